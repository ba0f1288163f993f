"""Test stochastic rounding of bf16 variables and optimizer states against numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, ConfigError, DTypeError
from trainable_candle.settings import TrainConfig

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

COUNTS = (300, 7, 2048)
"""The number of elements of each variable."""
ROUNDING = ("AdamW8bit", "Adam8bit", "AdamW", "Adam", "Lion8bit", "Lion", "SGD")
"""The optimizers that can round stochastically."""
F32 = np.float32


def philox(seed: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return random words from ten rounds of Philox4x32 (Salmon et al. 2011).

    Each row of `counters` is one counter of four 32-bit words. The same row of the result has the
    four random 32-bit words for this counter.
    """
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = counters.T
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        shift = np.uint64(32)
        c0, c2 = p1 >> shift ^ c1 ^ np.uint64(k0), p0 >> shift ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & low, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], 1)


def rounded(
    values: NDArray[Any], seed: int, step: int, first: int, number: int
) -> NDArray[np.float32]:
    """Return `values` as f32, each rounded to bf16 with 16 random bits.

    `first` is the index of the first element of the variable among the elements of all variables,
    where the elements of each variable are padded to a multiple of 256. `number` is 0 for the
    variable itself and 1, 2, ... for its states.
    """
    elements = first + np.arange(values.size, dtype=np.uint64)
    zeros = np.zeros_like(elements)
    # The last word of a counter is 2 or more here; the library's other random numbers have 0 or 1
    # there. The arrays with the numbers 0 and 1 take half of the bits of the same words each, as do
    # those with 2 and 3.
    counters = np.stack([elements // 4, zeros, zeros + step, zeros + 2 + number // 2], 1)
    words = philox(seed, counters)[np.arange(values.size), elements % 4]
    random = words >> np.uint64(16 * (number % 2)) & np.uint64(0xFFFF)
    bits = values.astype(F32).view(np.uint32) + random.astype(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(F32)


def bf16(values: NDArray[Any]) -> tc.Tensor:
    return tc.tensor(values, dtype="bf16")


def normal(seed: int) -> list[NDArray[np.float32]]:
    """Return normally distributed numbers for each variable, rounded to bf16."""
    rng = np.random.default_rng(seed)
    return [bf16(rng.standard_normal(n)).to("f32").numpy() for n in COUNTS]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_steps_are_those_of_the_formula(kind: str) -> None:
    seed = 2**40 + 3  # has bits in both halves of the key
    tc.manual_seed(seed)
    parameters = [tc.Var(bf16(values)) for values in normal(0)]
    lr, beta, beta2 = 0.01, 0.9, 0.999
    optimizer: tc.optim.Optimizer
    if kind == "adam":
        optimizer = tc.optim.Adam(parameters, lr=lr, amsgrad=True, stochastic_rounding=True)
    else:
        optimizer = tc.optim.SGD(parameters, lr=lr, momentum=beta, stochastic_rounding=True)
    # The optimizer has taken its seed when it was made, so this seed has no effect.
    tc.manual_seed(0)
    expected = normal(0)
    states = [[np.zeros_like(p) for _ in range(3)] for p in expected]
    for step in range(1, 5):
        first = 0  # of the variable's elements; see `rounded`
        for index, gradient in enumerate(normal(step)):
            parameters[index].grad = bf16(gradient)
            p, (a, b, c) = expected[index], states[index]  # `b` and `c` are for Adam only.
            if kind == "adam":
                a = a + F32(1 - beta) * (gradient - a)
                b = b * F32(beta2) + F32(1 - beta2) * gradient * gradient
                c = np.maximum(c, b)
                denominator = np.sqrt(c) / F32(np.sqrt(1 - beta2**step)) + F32(1e-8)
                p = p - F32(lr / (1 - beta**step)) * a / denominator
            else:
                a = gradient if step == 1 else F32(beta) * a + gradient
                p = p - F32(lr) * a
            results = [rounded(v, seed, step, first, n) for n, v in enumerate((p, a, b, c))]
            expected[index], states[index] = results[0], results[1:]
            first += -(-p.size // 256) * 256
        optimizer.step()
    for parameter, values in zip(parameters, expected, strict=True):
        assert parameter.dtype == "bf16"
        np.testing.assert_array_equal(parameter.detach().to("f32").numpy(), values)
    names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"] if kind == "adam" else ["momentum_buffer"]
    saved = optimizer.state_dict()
    for index, known_states in enumerate(states):
        # For SGD, `names` has only the first of the three states.
        for name, values in zip(names, known_states, strict=False):
            state = saved[f"{index}.{name}"]
            assert state.dtype == "bf16"
            np.testing.assert_array_equal(state.to("f32").numpy(), values)
    assert saved["seed"].item() == seed


@pytest.mark.parametrize("kind", sorted(tc.optim.KINDS))
def test_an_optimizer_rounds_or_its_error_names_optimizers_that_do(kind: str) -> None:
    make: Any = tc.optim.KINDS[kind]
    var = tc.Var(bf16(np.ones(3)))
    if make.__name__ in ROUNDING:
        assert "seed" in make([var], stochastic_rounding=True).state_dict()
        with pytest.raises(DTypeError, match="all variables have other dtypes such as f32"):
            make([tc.Var(tc.ones(3))], stochastic_rounding=True)
    else:
        with pytest.raises(ArgumentError, match="such as AdamW, AdamW8bit, Lion or SGD"):
            make([var], stochastic_rounding=True)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("adapter", ["lora", "loha", "lokr", "oft"])
def test_an_adapter_in_bf16_starts_as_the_identity_and_trains(
    adapter: str, precision: str, tmp_path: Path
) -> None:
    tc.manual_seed(0)
    initial = tc.models.DigitsTransformer(num_layers=1)
    for var in initial.named_parameters().values():
        # The weights of the last layer and of some other layers start as zeros. OFT rotates
        # weights, and no rotation changes zeros.
        var.set(var.detach() + tc.randn(var.shape) * 0.05)
    initial.save_pretrained(tmp_path)
    model = tc.models.DigitsTransformer.from_pretrained(tmp_path, dtype=precision)
    sample = tc.randn((2, 1, 8, 8), dtype=precision)
    timesteps, digits = tc.tensor([1000.0, 500.0]), tc.tensor([3, 7])
    inputs = (sample, timesteps, digits)
    without_adapter = model(*inputs).to("f32").numpy()
    adapters = model.add_adapter(tc.LoraConfig(adapter=adapter, dtype="bf16"))
    assert adapters.config.dtype == "bf16"
    np.testing.assert_array_equal(model(*inputs).to("f32").numpy(), without_adapter)
    parameters = adapters.parameters()
    optimizer = tc.optim.AdamW(parameters, lr=1e-2, stochastic_rounding=True)
    losses = []
    for _ in range(12):
        loss = ((model(*inputs) - sample).to("f32") ** 2).mean()
        losses.append(loss.item())
        loss.backward()
        assert all(var.grad is None or var.grad.dtype == "bf16" for var in parameters)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
    assert all(var.dtype == "bf16" for var in parameters)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optimizer": "prodigy"}, "Prodigy: its update needs whole variables"),
        ({"ema_decay": 0.9}, "--ema-decay needs f32"),
        ({"adapter": "dora"}, "--adapter dora needs f32"),
        ({"qat": "int8", "qat_learned_scales": True}, "--qat-learned-scales needs f32"),
    ],
)
def test_settings_that_exclude_stochastic_rounding_are_reported(
    settings: dict[str, Any], expected: str
) -> None:
    # With the defaults of `settings`, there is no error.
    assert TrainConfig(stochastic_rounding=True).stochastic_rounding
    with pytest.raises(ConfigError, match=expected):
        TrainConfig(stochastic_rounding=True, **settings)


def test_adapters_of_a_module_in_python_must_be_f32() -> None:
    module = tc.nn.Sequential(tc.nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="dtype bf16 is for models"):
        tc.get_peft_model(module, tc.LoraConfig(r=2, target_modules=["0"], dtype="bf16"))
