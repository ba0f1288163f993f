"""Sizes that cannot be are errors before memory is touched: the process never aborts."""

import pytest

import trainable_candle as tc

HUGE = 10**13


@pytest.mark.parametrize(
    "make",
    [
        lambda: tc.zeros(HUGE),
        lambda: tc.ones(1).expand(HUGE),
        lambda: tc.ones(3, 4).broadcast_to(2**62, 3, 4),
        lambda: tc.zeros(2**23, 1) == tc.zeros(1, 2**23),
        lambda: tc.zeros(2**21, 1) + tc.zeros(1, 2**21),
        lambda: tc.zeros(2**21, 1) @ tc.zeros(1, 2**21),
        lambda: tc.where(tc.zeros(2**21, 1) == 0.0, tc.zeros(1, 2**21), tc.zeros(1)),
        lambda: tc.zeros(0, 2**41).sum(0),
    ],
    ids=["zeros", "expand", "overflow", "compare", "add", "matmul", "where", "empty sum"],
)
def test_more_than_memory_is_an_error(make) -> None:
    with pytest.raises(tc.OutOfMemoryError, match="tensor of shape"):
        make()


def test_a_layer_without_inputs_works() -> None:
    layer = tc.nn.LoRALinear(tc.zeros(0, 4), 2, 1)
    assert layer(tc.zeros(3, 4)).shape == (3, 0)


def test_reserved_name_is_refused(tmp_path) -> None:
    with pytest.raises(tc.ArgumentError, match="__metadata__"):
        tc.save_file({"__metadata__": tc.zeros(1)}, tmp_path / "t.safetensors")
    assert list(tmp_path.iterdir()) == []
