"""Full-size SDXL on a GPU outside training steps: encoding images and texts, drawing images.

python benches/gpu_encode.py [--only decode] [--profile] [--no-torch]

Weights are random, with the shapes of SDXL's base model; images are noise. `--profile` adds the
time of each of our kernels. `--only` runs the cases whose title contains a text. If diffusers is
installed, its autoencoder is measured too.
"""

from __future__ import annotations

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_timing
import numpy as np
from gpu_timing import GIB, Machine

import trainable_candle as tc
from trainable_candle.families.sdxl import SDXL
from trainable_candle.tasks.latent import SampleOptions
from trainable_candle.tasks.latent.coders import KLCoder
from trainable_candle.tasks.latent.drawing import draw
from trainable_candle.tasks.latent.tiles import tile_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

SIZES = [(1024, 1024), (1280, 960)]
BATCHES = [1, 2, 4]
STEPS = 30
"""Sampling steps of a drawn image."""
DOWNSCALE = 8
"""The side of an image in px, divided by the side of its latents."""
EXACT_SIDE = 512
"""Side in px of the image whose latents are compared with those of f64."""
# The configuration of SDXL's second text encoder, OpenCLIP bigG.
BIG_G = {
    "architectures": ["CLIPTextModelWithProjection"],
    "hidden_act": "gelu",
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
}
# Floating-point operations of the autoencoder's convolutions and attention at 1024 x 1024 px.
ENCODER_FLOPS, DECODER_FLOPS = 4.85e12, 10.5e12


def pixels(batch: int, width: int, height: int) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (batch, height, width, 3), np.uint8)


def encoded(vae: Any, rgb: npt.NDArray[np.uint8], device: str) -> tuple[tc.Tensor, tc.Tensor]:
    """Encode an image as training does; return mean and log variance of the latents."""
    image = tc.tensor(rgb, device=device).permute(0, 3, 1, 2).to("f32")
    height, width = image.shape[2:]
    moments: tuple[tc.Tensor, tc.Tensor] = vae.encode(
        image / 127.5 - 1.0, tile_size=tile_size(width, height)
    )
    return moments


def on_host(vae: Any, rgb: npt.NDArray[np.uint8], device: str) -> list[npt.NDArray[Any]]:
    return [moment.numpy() for moment in encoded(vae, rgb, device)]


def pooled(models: Sequence[Any], tokens: tc.Tensor) -> list[tc.Tensor]:
    return [model(tokens).pooled for model in models]


def report(title: str, seconds: float, device: str, *, flops: float = 0) -> None:
    """Print the time of a case, its operations per second if `flops` is given, and peak memory."""
    peak = tc.cuda.memory_stats(device)["peak_allocated"] / GIB
    rate = f", {flops / seconds / 1e12:.0f} TFLOP/s" if flops else ""
    print(f"{title}: {seconds * 1e3:.1f} ms{rate}, peak {peak:.2f} GiB", flush=True)


def case(
    title: str, call: Callable[[], object], machine: Machine, *, profile: bool, flops: float = 0
) -> None:
    """Measure and report a case; `flops` are the operations of one call."""
    gpu_timing.fresh(machine.device)
    seconds = gpu_timing.timed(call, machine.device, machine.seconds)
    report(title, seconds, machine.device, flops=flops)
    if profile:
        gpu_timing.profiled(call, machine.device, rows=25)


def autoencoder(machine: Machine, vae: Any, only: str, *, profile: bool) -> None:
    device = machine.device
    for width, height in SIZES:
        for batch in BATCHES:
            title = f"encode {width} x {height}, batch {batch}"
            if only not in title:
                continue
            rgb = pixels(batch, width, height)
            # `ENCODER_FLOPS` is for one image of 1024 x 1024 px.
            times_the_area = batch * width * height / 1024**2
            shown = profile and batch == 1
            case(
                title,
                partial(encoded, vae, rgb, device),
                machine,
                profile=shown,
                flops=times_the_area * ENCODER_FLOPS,
            )
            to_host = gpu_timing.timed(partial(on_host, vae, rgb, device), device, machine.seconds)
            print(f"  with the copy to the host {to_host * 1e3 / batch:.1f} ms an image")
    title = "decode 1024 x 1024"
    if only in title:
        latent = tc.randn((1, 4, 128, 128), device=device)
        case(title, lambda: vae.decode(latent), machine, profile=profile, flops=DECODER_FLOPS)


def errors(machine: Machine, vae: Any) -> None:
    """Print how far latents and images are from those of the same weights in f64.

    Each error is the root mean square of the differences, divided by that of the f64 values.
    """
    device = machine.device
    rgb = pixels(1, EXACT_SIDE, EXACT_SIDE)
    image = (rgb.transpose(0, 3, 1, 2) / 127.5 - 1.0).astype(np.float32)
    side = EXACT_SIDE // DOWNSCALE
    latent = np.random.default_rng(1).standard_normal((1, 4, side, side)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        vae.save_pretrained(folder)
        results: dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}
        for dtype in ("f64", "f32", "bf16"):
            # With `force_upcast`, the model in bf16 would have weights in f32.
            model = tc.models.AutoencoderKL.from_pretrained(
                folder, dtype=dtype, device=device, force_upcast=False
            )
            mean, _ = model.encode(tc.tensor(image, device=device))
            decoded = model.decode(tc.tensor(latent, device=device))
            results[dtype] = (mean.to("f64").numpy(), decoded.to("f64").numpy())
        diffusers = optional("diffusers") if machine.torch else None
        if diffusers is not None:
            torch = machine.torch
            assert torch is not None
            theirs = diffusers.AutoencoderKL.from_pretrained(folder).to("cuda")
            with torch.no_grad():
                for name, tf32 in (("torch, TF32", True), ("torch, f32", False)):
                    torch.backends.cudnn.allow_tf32 = tf32
                    mean = theirs.encode(torch.from_numpy(image).cuda()).latent_dist.mean
                    decoded = theirs.decode(torch.from_numpy(latent).cuda()).sample
                    results[name] = (mean.double().cpu().numpy(), decoded.double().cpu().numpy())
            torch.backends.cudnn.allow_tf32 = True
    exact = results.pop("f64")
    for name, found in results.items():
        latent_error, image_error = (
            float(np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2)))
            for x, y in zip(found, exact, strict=True)
        )
        print(f"error of {name}: latents {latent_error:.1e}, image {image_error:.1e}", flush=True)


def optional(name: str) -> Any | None:
    try:
        return __import__(name)
    except ImportError:
        return None


def their_autoencoder(machine: Machine, only: str) -> None:
    torch, diffusers = machine.torch, optional("diffusers")
    if torch is None or diffusers is None:
        return
    torch.cuda.empty_cache()
    vae = diffusers.AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        sample_size=1024,
    ).to("cuda")
    with torch.no_grad():
        for batch in BATCHES:
            title = f"encode 1024 x 1024, batch {batch}"
            image = torch.randn(batch, 3, 1024, 1024, device="cuda")
            if only in title:
                encode = partial(vae.encode, image)
                seconds = gpu_timing.torch_timed(torch, encode, machine.seconds)
                print(f"diffusers, {title}: {seconds * 1e3:.1f} ms", flush=True)
        if only in "decode 1024 x 1024":
            latent = torch.randn(1, 4, 128, 128, device="cuda")
            seconds = gpu_timing.torch_timed(torch, lambda: vae.decode(latent), machine.seconds)
            print(f"diffusers, decode 1024 x 1024: {seconds * 1e3:.1f} ms", flush=True)


def texts(machine: Machine, only: str, *, profile: bool) -> None:
    device = machine.device
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(BIG_G))
        models = [
            tc.models.CLIPTextModel.from_config(dtype="bf16", device=device),
            tc.models.CLIPTextModel.from_config(config, dtype="bf16", device=device),
        ]
    # Both encoders together, for one text and for many.
    for batch in (1, 24):
        title = f"texts, batch {batch}"
        if only not in title:
            continue
        # CLIP's vocabulary has 49406 tokens besides the start and the end token.
        ids = np.random.default_rng(0).integers(0, 49406, (batch, 77))
        tokens = tc.tensor(ids, device=device)
        case(
            title,
            partial(pooled, models, tokens),
            machine,
            profile=profile,
        )


def drawing(machine: Machine, vae: Any, *, profile: bool) -> None:
    device = machine.device
    unet = tc.models.SDXLUNet.from_config(dtype="bf16", device=device)
    text = {
        "encoder_hidden_states": tc.randn((1, 77, 2048), device=device).to("bf16"),
        "text_embeds": tc.randn((1, 1280), device=device).to("bf16"),
    }

    def features(_: Sequence[str]) -> Mapping[str, tc.Tensor]:
        return text

    class RandomCoder(KLCoder):
        model = vae

    class RandomSDXL(SDXL):
        model, schedule = unet, tc.train.NoiseSchedule()
        coder = RandomCoder(
            {},  # no files: `model` is made already
            {"latent_channels": 4, "scaling_factor": vae.scaling_factor},
            vae.downscale,
            device,
            dict,  # returns an empty identity; nothing is cached
        )

    def run(count: int = 1) -> None:
        family = RandomSDXL(Path(), "bf16", device)
        draw(family, ["x"] * count, SampleOptions(steps=STEPS), features, (1024, 1024))

    gpu_timing.fresh(device)
    run()  # Untimed: the first run loads kernels.
    for count in (1, 2):
        started = time.perf_counter()
        run(count)
        seconds = time.perf_counter() - started
        report(f"draw 1024 x 1024, {STEPS} steps, {count} images", seconds, device)
    sample, times = tc.randn((2, 4, 128, 128), device=device), tc.full((1,), 500.0, device=device)
    # Guidance needs a forward pass with the prompt and one without it, together a batch of 2.
    both = {name: tc.cat([x, x]) for name, x in text.items()}
    both["time_ids"] = tc.full((2, 6), 1024.0, device=device)

    @tc.no_grad()
    def forward() -> tc.Tensor:
        return unet(sample, times, **both)

    # A forward pass of one image takes 6.76e12 floating-point operations.
    case("UNet, batch 2", forward, machine, profile=profile, flops=2 * 6.76e12)
    graph = gpu_timing.captured(forward, device)
    seconds = gpu_timing.timed(graph, device, machine.seconds)
    print(f"  as a graph {seconds * 1e3:.1f} ms, {STEPS} times {seconds * STEPS:.2f} s", flush=True)


def main() -> None:
    parser = gpu_timing.parser(__doc__)
    parser.set_defaults(seconds=1.0)
    options = parser.parse_args()
    machine = gpu_timing.start(options)
    only, profile = options.only, options.profile
    vae = tc.models.AutoencoderKL.from_config(device=machine.device)
    autoencoder(machine, vae, only, profile=profile)
    their_autoencoder(machine, only)
    # The preparation of these cases takes time, so `only` is compared with a word for all of them.
    # By default it is empty, and an empty text is in every word.
    if only in "errors":
        errors(machine, vae)
    if only in "texts" or only.startswith("texts"):
        texts(machine, only, profile=profile)
    if only in "draw":
        drawing(machine, vae, profile=profile)


if __name__ == "__main__":
    main()
