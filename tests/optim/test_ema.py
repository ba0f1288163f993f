"""Test the moving average of an adapter's parameters. Tests in Rust check its arithmetic."""

from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, ConfigError

Values = list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]


@pytest.fixture
def adapter(digits_base: Path) -> tc.AdapterSet:
    model = tc.models.DigitsTransformer.from_pretrained(digits_base)
    return model.add_adapter(tc.LoraConfig(r=2, target_modules=["to_q"]))


def values(adapter: tc.AdapterSet) -> Values:
    return [var.detach().numpy() for var in adapter.parameters()]


def perturb(adapter: tc.AdapterSet) -> None:
    """Add random numbers to the parameters, in place of training."""
    for var in adapter.parameters():
        var.set(var.detach() + tc.randn(var.shape))


def test_averages_replace_the_parameters_only_within_a_context(
    adapter: tc.AdapterSet, tmp_path: Path
) -> None:
    start = values(adapter)
    # The averages start from the parameters at this point.
    ema = tc.optim.EMA(adapter, decay=0.75, warmup=False)
    perturb(adapter)
    trained = values(adapter)
    ema.update()
    expected = [0.75 * a + 0.25 * b for a, b in zip(start, trained, strict=True)]
    with ema:
        assert ema.is_swapped_in
        for found, average in zip(values(adapter), expected, strict=True):
            np.testing.assert_allclose(found, average, rtol=1e-5, atol=1e-6)
        adapter.save(tmp_path / "average.safetensors")
        with pytest.raises(ArgumentError, match="swap_out"):
            ema.update()
    for found, value in zip(values(adapter), trained, strict=True):
        np.testing.assert_array_equal(found, value)
    # The file, which was written within the context, has the averages.
    adapter.load(tmp_path / "average.safetensors")
    for found, average in zip(values(adapter), expected, strict=True):
        np.testing.assert_allclose(found, average, rtol=1e-5, atol=1e-6)


def test_an_error_within_the_context_restores_the_parameters(adapter: tc.AdapterSet) -> None:
    ema = tc.optim.EMA(adapter)
    perturb(adapter)
    trained = values(adapter)
    with pytest.raises(ZeroDivisionError), ema:
        _ = 1 / 0
    for found, value in zip(values(adapter), trained, strict=True):
        np.testing.assert_array_equal(found, value)


def test_a_saved_state_loads_bit_for_bit(adapter: tc.AdapterSet, tmp_path: Path) -> None:
    ema = tc.optim.EMA(adapter)
    for _ in range(3):
        perturb(adapter)
        ema.update()
    tc.save_file(ema.state_dict(), tmp_path / "ema.safetensors")
    other = tc.optim.EMA(adapter)
    other.load_state_dict(tc.load_file(tmp_path / "ema.safetensors"))
    # During the warm-up, the decay after n updates, here 3, is (1 + n) / (10 + n).
    assert (other.updates, other.decay) == (3, pytest.approx(4 / 13))
    perturb(adapter)
    for each in (ema, other):
        each.update()
    for name, value in ema.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), other.state_dict()[name].numpy())


def test_a_state_without_averages_is_an_error(adapter: tc.AdapterSet) -> None:
    ema = tc.optim.EMA(adapter)
    with pytest.raises(ConfigError, match=r"0\.average"):
        ema.load_state_dict({"updates": ema.state_dict()["updates"]})


def test_a_decay_of_1_is_an_error(adapter: tc.AdapterSet) -> None:
    with pytest.raises(ArgumentError, match="decay"):
        tc.optim.EMA(adapter, decay=1.0)
