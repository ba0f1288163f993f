"""The kernels and products of a training step of the small SDXL on the simulated device.

The fixture `cuda` runs a code snippet and returns a `Run` with the log of its CUDA calls. Before
a snippet it defines `tc`, the library, and `mark`, which writes a line to the log. Of a `Run`,
`after(mark)` has only the calls from a mark to the next one, `launches` are the names of the
launched kernels, and `of(kind)` has the calls of a kind: "product" is a product by cuBLAS,
"refused" a call that returned an error.
"""

from collections import Counter
from typing import Any

THREE_STEPS = """
    from pathlib import Path

    import numpy as np

    rng = np.random.default_rng(0)
    folder = Path(tc.__file__).parent / "assets" / "sdxl_tiny" / "unet"
    model = tc.models.SDXLUNet.from_pretrained(folder, dtype="bf16", device="cuda")
    tc.manual_seed(0)
    adapter = model.add_adapter(tc.LoraConfig(r=8, target_modules=TARGETS))

    def normal(*shape):
        return tc.tensor(rng.standard_normal(shape), dtype="bf16", device="cuda")

    sample, target = normal(2, 4, 16, 16), normal(2, 4, 16, 16)
    conditions = {
        "encoder_hidden_states": normal(2, 77, 128),
        "text_embeds": normal(2, 64),
        "time_ids": tc.tensor(np.full((2, 6), 128.0), dtype="f32", device="cuda"),
    }
    timestep = tc.tensor(np.full(2, 500.0), dtype="f32", device="cuda")
    for step in range(3):
        mark(f"forward-{step}")
        predicted = model(sample, timestep, **conditions)
        loss = tc.nn.functional.mse_loss(predicted, target)
        mark(f"backward-{step}")
        loss.backward()
        for parameter in adapter.parameters():
            parameter.zero_grad()
    mark("end")
"""
ATTENTION = '["to_q", "to_k", "to_v", "to_out.0"]'
# Transformer blocks in the small model: three in the down path, two in the middle, six in the up
# path. Each has a self-attention and a cross-attention to the text.
BLOCKS = 11
# Stacks of transformer blocks: two in the down path, one in the middle, four in the up path.
STACKS = 7
# Concatenations of a feature map of the down path with one of the up path.
JOINS = 6


def run_steps(cuda: Any, targets: str = ATTENTION) -> Any:
    """Run three steps, numbered from 0; the tests examine the last, whose marks end in `-2`."""
    return cuda.run(THREE_STEPS.replace("TARGETS", targets))


def test_convolutions_use_the_hopper_kernels(cuda: Any) -> None:
    """The simulated GPU has compute capability 9.0."""
    run = run_steps(cuda)
    assert run.of("refused") == []
    names = run.after("forward-2").launches + run.after("backward-2").launches
    general = [
        n for n in names if n.startswith(("conv2d_forward", "conv2d_grad")) and "hopper" not in n
    ]
    # The first convolution has only four input channels, and the last one only four output
    # channels: too few for the Hopper kernels. So the general kernels compute these two, and the
    # gradient of the last convolution's input. The first one's input needs no gradient.
    assert len(general) <= 3, general


def test_projections_are_read_in_place(cuda: Any) -> None:
    run = run_steps(cuda)
    forward = Counter(run.after("forward-2").launches)
    backward = Counter(run.after("backward-2").launches)
    assert forward["attention_forward_w64_bf16"] == 2 * BLOCKS
    assert backward["attention_backward_w64_bf16"] == 2 * BLOCKS
    # The forward pass copies the input and the output, whose channels come first, and both feature
    # maps of each join. The backward pass copies at most ten gradients: that of the output, and
    # slices of the six joins' gradients. The slices for the up path are six. Those for the down
    # path are only three, because the other three feature maps come before the first adapter and
    # need no gradient. Nothing is copied for attention, biases or conversions of dtypes.
    assert forward["copy_bytes_2"] <= 2 + 2 * JOINS, forward
    assert backward["copy_bytes_2"] <= 10, backward
    assert not any(name.startswith("ucopy") for name in forward | backward), backward


def test_convolutions_add_residuals(cuda: Any) -> None:
    forward = Counter(run_steps(cuda).after("forward-2").launches)
    # Only these sums take a separate kernel: the residuals of the feed-forward networks and of the
    # stacks of blocks, and the sum of the embeddings of time and text.
    assert forward["add_bf16"] <= BLOCKS + STACKS + 1, forward


def test_gradients_of_residuals_are_added_by_the_norms(cuda: Any) -> None:
    backward = Counter(run_steps(cuda).after("backward-2").launches)
    # Each block has three layer norms, before its two attentions and its feed-forward network. At
    # least the last two follow an adapter of the block, so they have a backward pass.
    assert backward["layer_norm_backward_bf16"] >= 2 * BLOCKS
    # A feature map of the down path gets a second gradient from its join. A separate kernel adds
    # this gradient.
    assert backward["add_bf16"] <= JOINS, backward


def test_adapters_with_the_same_input_share_their_products(cuda: Any) -> None:
    product_counts = {
        targets: len(run_steps(cuda, targets).after("forward-2").of("product"))
        for targets in ('["to_out.0"]', ATTENTION)
    }
    # Adapters with the same input x share two products: h = x Aᵀ, and h Bᵀ, which adds to the
    # result. Besides `to_out.0`, each block has three inputs with adapters: one for q, k and v of
    # the self-attention, one for q of the cross-attention, and one for k and v of the
    # cross-attention.
    assert product_counts[ATTENTION] - product_counts['["to_out.0"]'] == 6 * BLOCKS
