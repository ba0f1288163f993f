"""The kernels that attention launches on the simulated GPU.

This GPU has compute capability 9.0, as a Hopper GPU, and 132 multiprocessors. The kernels for
Hopper are for many queries and keys; other kernels are for at most 80 keys; the general kernels
are for all else.

`cuda.run` runs code and returns the log of its driver calls. `mark(name)` in the code starts a part
of the log, and `after(name)` selects this part. Calls of the kind "refused" are those that the
simulated driver rejected.
"""

from collections import Counter
from typing import Any

import pytest

ATTENTION = """
    F = tc.nn.functional

    def heads(length):
        return tc.Var(tc.randn((2, HEADS, length, WIDTH), dtype="bf16", device="cuda"))

    q, k, v = heads(QUERIES), heads(KEYS), heads(KEYS)
    mark("forward")
    y = F.scaled_dot_product_attention(q, k, v, is_causal=CAUSAL)
    mark("backward")
    (y * y).sum().backward()
    mark("end")
"""


def run_snippet(cuda: Any, code: str, **constants: Any) -> Any:
    """Run `code` with values in place of the constants' names; no call may be an error."""
    for name, value in constants.items():
        code = code.replace(name, str(value))
    run = cuda.run(code)
    assert run.of("refused") == []
    return run


def launches(cuda: Any, part: str, **constants: Any) -> Counter[str]:
    """Count the launches of each attention kernel in `part`: "forward" or "backward"."""
    run = run_snippet(cuda, ATTENTION, **({"CAUSAL": False} | constants))
    return Counter(name for name in run.after(part).launches if name.startswith("attention"))


# The form `w64` of a kernel is for heads of a width of at most 64, `w128` of at most 128.
@pytest.mark.parametrize(("width", "form"), [(64, "w64"), (40, "w64"), (128, "w128")])
def test_long_sequences_use_the_hopper_kernels(cuda: Any, width: int, form: str) -> None:
    sizes = {"HEADS": 10, "WIDTH": width, "QUERIES": 300, "KEYS": 2500}
    forward, backward = (launches(cuda, part, **sizes) for part in ("forward", "backward"))
    # Both samples of the batch have 10 heads. Each head has two (w64) or three (w128) tiles of
    # queries. One block for each tile would leave most multiprocessors idle. So several blocks
    # share the keys of a tile, and the kernel `sum` adds up their results.
    assert forward == {f"attention_hopper_{name}_{form}_bf16": 1 for name in ("forward", "sum")}
    assert backward == {
        f"attention_hopper_{name}_{form}_bf16": 1 for name in ("statistics", "backward", "finish")
    }


@pytest.mark.parametrize("width", [64, 40])
def test_few_keys_use_the_kernels_for_few_keys(cuda: Any, width: int) -> None:
    sizes = {"HEADS": 10, "WIDTH": width, "QUERIES": 300, "KEYS": 77}
    assert launches(cuda, "forward", **sizes) == {"attention_few_keys_forward_bf16": 1}
    assert launches(cuda, "backward", **sizes) == {
        f"attention_few_keys_{name}_bf16": 1 for name in ("backward", "finish")
    }


# The kernels for Hopper need at least 256 keys, and rows of a multiple of 16 bytes: 44 values have
# 88 bytes.
@pytest.mark.parametrize("change", [{"CAUSAL": True}, {"KEYS": 100}, {"WIDTH": 44}], ids=str)
def test_no_hopper_kernel_runs_forward_if_causal_or_with_few_keys_or_unaligned_widths(
    cuda: Any, change: dict[str, Any]
) -> None:
    constants = {"HEADS": 2, "WIDTH": 64, "QUERIES": 300, "KEYS": 300} | change
    (name,) = launches(cuda, "forward", **constants)
    assert "hopper" not in name


def test_general_kernels_run_if_the_environment_asks_for_them(cuda: Any) -> None:
    # Without the variable, 77 and 2500 keys use the other kernels, as the tests above show.
    code = "    import os\n    os.environ['TRAINABLE_CANDLE_GENERAL_KERNELS'] = '1'\n" + ATTENTION
    for keys in (77, 2500):
        sizes = {"HEADS": 10, "WIDTH": 64, "QUERIES": 300, "KEYS": keys, "CAUSAL": False}
        found = run_snippet(cuda, code, **sizes).launches
        names = {name for name in found if name.startswith("attention")}
        assert names
        assert not {name for name in names if "hopper" in name or "few_keys" in name}


# Two segments, packed one after another: 100 tokens, then the other tokens. The queries have HEADS
# heads, the keys and values have 2.
SEGMENTS = """
    def tokens(heads):
        return tc.Var(tc.randn((TOKENS, heads, WIDTH), dtype="DTYPE", device="cuda"))

    q, k, v = tokens(HEADS), tokens(2), tokens(2)
    bounds = tc.tensor([0, 100, TOKENS], device="cuda")
    tc.cuda.synchronize()
    mark("forward")
    y = tc.nn.functional.varlen_attention(q, k, v, bounds)
    mark("backward")
    (y * y).sum().backward()
    mark("end")
"""


@pytest.mark.parametrize(("width", "dtype", "form"), [(128, "bf16", "w128"), (64, "f16", "w64")])
def test_long_segments_use_the_hopper_kernels_and_nothing_waits(
    cuda: Any, width: int, dtype: str, form: str
) -> None:
    run = run_snippet(cuda, SEGMENTS, TOKENS=8192, WIDTH=width, DTYPE=dtype, HEADS=12)
    forward, backward = run.after("forward"), run.after("backward")
    assert forward.launches == [
        "attention_varlen_spans",
        f"attention_varlen_hopper_forward_{form}_{dtype}",
    ]
    assert [name for name in backward.launches if name.startswith("attention")] == [
        f"attention_varlen_hopper_{name}_{form}_{dtype}"
        for name in ("statistics", "backward", "finish")
    ]
    assert forward.waits == []
    assert backward.waits == []


def test_short_segments_use_the_general_kernels(cuda: Any) -> None:
    run = run_snippet(cuda, SEGMENTS, TOKENS=200, WIDTH=64, DTYPE="bf16", HEADS=12)
    # The first launch computes the spans: which keys each query attends to, and the reverse.
    assert run.after("forward").launches[1:] == ["attention_varlen_forward_w64_bf16"]
    backward = run.after("backward").launches
    # The 2 key heads have four tiles of keys each. One block for each tile would leave most
    # multiprocessors idle, so several blocks share a tile. Each block works on some of the six
    # query heads that share a key head, and `attention_sum_parts` adds up their results.
    assert [name for name in backward if name.startswith("attention")] == [
        "attention_delta_bf16",
        "attention_varlen_backward_w64_bf16",
        "attention_sum_parts_bf16",
    ]


def test_the_forward_pass_of_wide_heads_in_segments_uses_the_plain_kernel(cuda: Any) -> None:
    # The tensor-core kernels are for heads of a width of at most 128.
    run = run_snippet(cuda, SEGMENTS, TOKENS=200, WIDTH=160, DTYPE="bf16", HEADS=4)
    assert run.after("forward").launches[1:] == ["attention_varlen_plain_forward_bf16"]
