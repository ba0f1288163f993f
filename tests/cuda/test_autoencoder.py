"""The CUDA calls of an autoencoder and of `draw`, on the simulated device.

`cuda.run` runs code and returns the log of its calls. `run.after(name)` is the part of the log from
`mark(name)` to the next mark. Calls of the kind "refused" are those that the simulated driver
rejected, and `waits` are those for which the host waits.
"""

from typing import Any

# Channel counts that suit tensor cores. The attention of the middle block has one head of all 192
# channels, which is too wide for the attention kernels, so matrix products compute it.
AUTOENCODER = """
    import json
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({
            "block_out_channels": [64, 192],
            "down_block_types": ["DownEncoderBlock2D"] * 2,
            "up_block_types": ["UpDecoderBlock2D"] * 2,
        }))
        vae = tc.models.AutoencoderKL.from_config(config, device="cuda")
"""


def test_an_autoencoder_in_f32_multiplies_on_tensor_cores(cuda: Any) -> None:
    run = cuda.run(
        AUTOENCODER
        + """
    image = tc.zeros((2, 3, 32, 48), device="cuda")
    mark("encode")
    mean, logvar = vae.encode(image)
    assert mean.shape == logvar.shape == (2, 4, 16, 24)
    mark("decode")
    assert vae.decode(mean).shape == (2, 3, 32, 48)
    mark("end")
    """
    )
    assert run.of("refused") == []
    slow = ("conv2d_forward_plain", "conv2d_forward_direct", "attention_plain")
    for part in ("encode", "decode"):
        names = run.after(part).launches
        assert [name for name in names if name.startswith(slow)] == []
        convolutions = [name for name in names if name.startswith("conv2d_forward")]
        assert len(convolutions) > 8  # so that the next check is not one of an empty list
        assert all(name.endswith("_bf16") for name in convolutions)
        # A kernel splits each operand of a convolution into pairs of bf16 numbers. It also splits
        # the operands of the attention's matrix products: two products for each of two images.
        assert names.count("pairs_left_f32") == len(convolutions) + 2 * 2
        assert names.count("pairs_right_f32") == len(convolutions) + 2 * 2


def test_a_convolution_in_f32_outside_an_autoencoder_uses_the_plain_kernel(cuda: Any) -> None:
    run = cuda.run("""
        x, w = tc.zeros((1, 64, 8, 8), device="cuda"), tc.zeros((64, 64, 3, 3), device="cuda")
        mark("convolution")
        tc.nn.functional.conv2d(x, w, padding=1)
        mark("end")
    """)
    assert "conv2d_forward_plain_f32" in run.after("convolution").launches


def test_images_are_copied_as_bytes(cuda: Any) -> None:
    run = cuda.run("""
        import numpy as np

        pixels = np.zeros((2, 32, 48, 3), np.uint8)
        mark("copy")
        image = tc.tensor(pixels, device="cuda").permute(0, 3, 1, 2).to("f32") / 127.5 - 1.0
        mark("end")
        assert image.shape == (2, 3, 32, 48)
    """)
    to_device = [c for c in run.after("copy").of("copy") if "HtoD" in c["kind"]]
    sizes = sorted(int(copy["bytes"]) for copy in to_device)
    # The smaller copies carry the numbers 127.5 and 1.0 of the expression.
    assert sizes[-1] == 2 * 32 * 48 * 3
    assert sum(sizes[:-1]) < 128


def test_drawing_replays_a_graph_and_waits_for_no_step(cuda: Any) -> None:
    run = cuda.run("""
        from pathlib import Path

        from trainable_candle.families.sdxl import SDXL
        from trainable_candle.tasks.latent import SampleOptions
        from trainable_candle.tasks.latent.drawing import draw

        folder = Path(tc.__file__).parent / "assets" / "sdxl_tiny"
        family = SDXL(folder, "bf16", "cuda")
        family.model, family.coder.load()  # load both parts now: `model` is loaded on first use
        text = {
            "encoder_hidden_states": tc.zeros((1, 77, 128), device="cuda"),
            "text_embeds": tc.zeros((1, 64), device="cuda"),
        }

        def features(prompts):
            mark("features")
            return text

        decode = family.coder.decode

        def marked(latents):
            mark("decode")
            return decode(latents)

        family.coder.decode = marked
        size = (64, 64)
        draw(family, ["a", "b"], SampleOptions(steps=6), features, size)
    """)
    assert run.of("refused") == []
    # `draw` calls `features` twice for each image: for the prompt and for the negative prompt. The
    # steps of the image follow the second call, up to the mark "decode". `run.after` finds only the
    # first of several marks with the same name, so the parts are cut out here (without the output).
    marks = [i for i, call in enumerate(run.calls) if call.kind == "mark"]
    parts = [
        type(run)("", run.calls[start + 1 : end])
        for start, end in zip(marks, [*marks[1:], len(run.calls)], strict=True)
        if run.calls[start]["name"] == "features"
    ]
    first, second = parts[1], parts[3]
    # Step 1 of the first image is eager. Step 2 is recorded; replays run steps 2 to 6, and all 6
    # steps of the second image.
    assert len(first.of("capture-end")) == 1
    assert len(first.of("replay")) == 5
    assert len(second.of("replay")) == 6
    assert second.of("capture-begin") == []
    assert second.waits == []
