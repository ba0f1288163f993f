"""The kernels that norms launch on the simulated device if residuals are added.

The fixture `cuda` runs a code snippet and returns the log of its CUDA calls. For the snippet, the
fixture defines `tc`, the library, and `mark(name)`, which writes a line to the log.
`run.after(name)` has the calls from the mark of this name to the next mark.
"""

from collections import Counter
from typing import Any

STEPS = """
    F = tc.nn.functional
    x = tc.Var(tc.randn((64, 1280), dtype="bf16", device="cuda"))
    residual = tc.Var(tc.randn((64, 1280), dtype="bf16", device="cuda"))
    images = tc.Var(tc.randn((2, 16, 320), dtype="bf16", device="cuda"))
    weight, bias = (tc.ones(1280, dtype="bf16", device="cuda") for _ in range(2))
    for step in range(2):
        mark(f"forward-{step}")
        FORWARD
        mark(f"backward-{step}")
        (y * y).sum().backward()
        mark("end")
"""


def launches(cuda: Any, forward: str) -> tuple[Counter[str], Counter[str]]:
    """The launches of each kernel in the forward and in the backward pass of the second step.

    In this step the variables have a `grad` from the first, to which the backward pass adds.
    """
    run = cuda.run(STEPS.replace("FORWARD", forward))
    assert run.of("refused") == []  # calls that the simulated libraries reject
    return tuple(Counter(run.after(f"{part}-1").launches) for part in ("forward", "backward"))


def additions(counts: Counter[str]) -> int:
    """Return the number of launches of kernels that only add two tensors."""
    return sum(count for name, count in counts.items() if name.startswith(("add_", "accumulate")))


def test_the_backward_kernel_of_a_norm_adds_the_gradient_of_the_residual(cuda: Any) -> None:
    for name, norm in (
        ("layer_norm", "x + F.layer_norm(x, 1280, weight, bias)"),
        ("rms_norm", "x + F.rms_norm(x, 1280, weight)"),
        ("group_norm", "images + F.group_norm(images, 32, channels_last=True)"),
        ("group_norm_silu", "images + F.group_norm_silu(images, 32, channels_last=True)"),
    ):
        _, backward = launches(cuda, f"y = {norm}")
        assert backward[f"{name}_backward_bf16"] == 1
        # The norm's kernel adds the gradient of the residual, so the backward pass launches as many
        # additions as without the residual. One of them adds to the `grad` of the norm's input.
        _, without_residual = launches(cuda, f"y = {norm.partition(' + ')[2]}")
        assert additions(backward) == additions(without_residual), (backward, without_residual)


def test_a_residual_sum_and_its_norm_are_one_launch_in_each_pass(cuda: Any) -> None:
    forward, backward = launches(
        cuda,
        "z, normed = F.add_layer_norm(x, residual, 1280, weight, bias); y = z * normed",
    )
    assert forward["layer_norm_forward_bf16"] == 1
    assert additions(forward) == 0, forward
    assert backward["layer_norm_backward_bf16"] == 1
