"""Comparisons, `where`, conversions and slices have the same bits on GPU and CPU.

Attention with a mask, in f32 on the GPU and in f64 on the CPU, has close values.
"""

import operator
from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

pytestmark = pytest.mark.gpu

FLOATS = ("f32", "f16", "bf16", "f64")
INTEGERS = ("u8", "u32", "i64")
COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
# Subnormal numbers, numbers that only f64 tells apart, and numbers beyond the range of each
# integer type.
NUMBERS = (
    -np.inf, -3e38, -(2.0**63), -2.5, -1.0, -0.5, -1e-40, -0.0, 0.0, 1e-40, 6e-8, 0.5, 1.0,
    1 + 2**-40, 2.5, 254.6, 255.0, 256.0, 2.0**31, 2.0**32 - 1, 2.0**32, 2.0**53 + 2, 2.0**63,
    3e38, np.inf, np.nan,
)  # fmt: skip
INTEGER_NUMBERS = {
    "u8": (0, 1, 2, 127, 128, 254, 255),
    "u32": (0, 1, 2**16, 2**24 + 1, 2**31, 2**32 - 2, 2**32 - 1),
    "i64": (
        -(2**63), -(2**53) - 1, -(2**32), -1, 0, 1, 300, 2**24 + 1, 2**53, 2**53 + 1, 2**63 - 1,
    ),
}  # fmt: skip


def values(dtype: str) -> tc.Tensor:
    """Return a vector of numbers of a dtype, on the CPU."""
    if dtype in INTEGER_NUMBERS:
        return tc.tensor(
            np.array(INTEGER_NUMBERS[dtype], dtype={"u8": "u1", "u32": "u4"}.get(dtype, "i8"))
        )
    return tc.tensor(np.array(NUMBERS)).to(dtype)


def bits(x: tc.Tensor) -> tuple[tuple[int, ...], bytes]:
    """Return the shape and the bytes of the elements; f16 and bf16 first become f32, exactly."""
    x = x.detach().to("cpu")
    return x.shape, (x.to("f32") if x.dtype in {"f16", "bf16"} else x).numpy().tobytes()


def check_same_bits(function: Callable[..., tc.Tensor], *inputs: tc.Tensor) -> None:
    """Check that a function gives the same bits on both devices, also for views of its inputs."""
    layouts: dict[str, Callable[[tc.Tensor], tc.Tensor]] = {
        "dense": lambda x: x,
        "transposed": lambda x: x.transpose(0, 1),
        "unaligned": lambda x: x.narrow(1, 1, x.shape[1] - 1),
        "empty": lambda x: x.narrow(0, 0, 0),
    }
    for name, layout in layouts.items():
        expected = function(*(layout(x) for x in inputs))
        found = function(*(layout(x.to("cuda")) for x in inputs))
        assert found.dtype == expected.dtype
        assert bits(found) == bits(expected), name


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("compare", COMPARISONS)
def test_comparisons_equal_those_of_the_cpu(
    compare: Callable[[Any, Any], tc.Tensor], dtype: str
) -> None:
    x = values(dtype)
    n = len(x)
    column, row = x.reshape(n, 1), x.reshape(1, n)
    expected = compare(column, row)
    assert bits(compare(column.to("cuda"), row.to("cuda"))) == bits(expected)
    # The kernels read 2, 4, 8 or 16 elements of a row at a time, so the rows have 48 elements, a
    # multiple of each of these numbers. Each number of `x` occurs 48 times, in a random order.
    order = np.random.default_rng(0).permutation(np.tile(np.arange(n), 48))
    wide = x[tc.tensor(order)].reshape(n, 48)
    check_same_bits(compare, wide, wide[::-1])
    check_same_bits(lambda a: compare(a, 1), wide)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_where_gives_the_bits_of_the_cpu(dtype: str) -> None:
    x = values(dtype)
    if dtype == "f32":  # NaN with a sign and a payload
        x = tc.cat([x, tc.tensor(np.array([0xFFC12345], np.uint32).view(np.float32))])
    n = len(x)
    indices = np.random.default_rng(1).integers(0, n, (2, n, 48))
    a, b = (x[tc.tensor(chosen.reshape(-1))].reshape(n, 48) for chosen in indices)
    # 1 and 2 both select from `a`.
    mask = tc.tensor(np.random.default_rng(2).integers(0, 3, (n, 48)).astype(np.uint8))
    check_same_bits(tc.where, mask, a, b)
    check_same_bits(lambda mask, b: tc.where(mask, 1, b), mask, b)
    row = x.reshape(1, n)
    # Mask and operands whose shapes broadcast to (n, n).
    for broadcast in ([mask[:, :n], row, x.reshape(n, 1)], [mask[0, :n], a[:, :n], b[:1, :n]]):
        assert bits(tc.where(*(t.to("cuda") for t in broadcast))) == bits(tc.where(*broadcast))


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_where_equal_those_of_the_cpu(dtype: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        tc.manual_seed(0)
        a, b = tc.randn((5, 7, 16)).to(dtype), tc.randn((7, 1)).to(dtype)
        a, b = tc.Var(a.to(device)), tc.Var(b.to(device))
        mask = tc.tensor(np.arange(16) % 3 == 0).to("u8").to(device)
        tc.where(mask, a, b).backward(tc.ones((5, 7, 16), dtype=dtype, device=device) * 3)
        found.append([bits(a.grad), bits(b.grad)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("source", "target"),
    [(a, b) for a, b in permutations(FLOATS + INTEGERS, 2) if {a, b} & {*INTEGERS}],
)
def test_conversions_from_and_to_integers_equal_the_cpu(source: str, target: str) -> None:
    x = values(source)
    order = np.random.default_rng(3).permutation(np.tile(np.arange(len(x)), 48))
    check_same_bits(lambda x: x.to(target), x[tc.tensor(order)].reshape(len(x), 48))


def test_new_tensors_of_integers_equal_the_cpu() -> None:
    for dtype in INTEGERS:
        for shape in ((), (0, 3), (5, 7)):
            on_cpu = tc.full(shape, 7, dtype=dtype)
            assert bits(tc.full(shape, 7, dtype=dtype, device="cuda")) == bits(on_cpu)


def test_a_replayed_graph_compares_its_new_inputs() -> None:
    def run(x: tc.Tensor, ids: tc.Tensor) -> tc.Tensor:
        chosen = tc.where(x < 0.25, x, ids.to("f32"))
        return tc.where(ids >= 3, chosen, -1.0) + (chosen == x).to("f32")

    rng = np.random.default_rng(4)
    inputs = [
        [tc.tensor(rng.random((6, 16), dtype=np.float32)), tc.tensor(rng.integers(0, 6, (6, 16)))]
        for _ in range(5)
    ]
    step = tc.cuda.capture(run, [x.to("cuda") for x in inputs[0]])
    # The first call runs the function, the second records the graph, the other three replay it.
    for x, ids in inputs:
        assert bits(step(x.to("cuda"), ids.to("cuda"))) == bits(run(x, ids))
    assert step.is_recorded


def test_attention_with_a_boolean_mask_equals_the_cpu() -> None:
    tc.manual_seed(0)
    q, k, v = (tc.randn((2, 3, 8, 16), dtype="f64") for _ in range(3))
    mask = tc.tensor(np.random.default_rng(5).integers(0, 2, (2, 1, 8, 8))).to("u8")
    attend = tc.nn.functional.scaled_dot_product_attention
    found = attend(*(x.to("f32").to("cuda") for x in (q, k, v)), mask.to("cuda"))
    expected = attend(q, k, v, mask).numpy()
    np.testing.assert_allclose(found.to("cpu").numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("step", [2, -1, -3])
def test_slices_with_a_step_and_their_gradients_equal_the_cpu(step: int) -> None:
    found = []
    for device in ("cpu", "cuda"):
        x = tc.Var(np.arange(60.0).reshape(4, 5, 3), device=device)
        y = x[:, ::step]
        y.backward(tc.tensor(np.arange(float(y.numel())).reshape(y.shape), device=device))
        found.append([bits(y), bits(x.grad)])
    assert found[0] == found[1]
