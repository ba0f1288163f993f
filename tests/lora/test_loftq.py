"""LoftQ: LoRAs that start from the quantization error of the base.

The factors B A are near W - Q, the difference between the exact and the quantized weights.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, ConfigError
from trainable_candle.families import find
from trainable_candle.lora import loftq, start_from_rounding
from trainable_candle.models import CausalLM
from trainable_candle.settings import TrainConfig

# A tiny Llama with random weights.
LLAMA = Path(__file__).parents[1] / "golden" / "llm" / "llama"


def weight(rows: int = 96, columns: int = 128) -> np.ndarray:
    """A matrix of normal values with a few columns of large values, as trained layers have."""
    random = np.random.default_rng(0)
    values = random.standard_normal((rows, columns)) * 0.02
    values[:, :4] *= 8  # the columns of large values
    return values.astype(np.float32)


def error_of(rank: int, iterations: int) -> float:
    """The norm of W - (Q + B A)."""
    exact = weight()
    quantized, factors = loftq(tc.tensor(exact), rank, iterations=iterations)
    found = quantized.dequantize().numpy() + factors.up @ factors.down
    return float(np.linalg.norm(exact - found))


def test_the_error_falls_with_the_rank_and_the_iterations() -> None:
    exact = weight()
    plain = np.linalg.norm(exact - tc.quantize(tc.tensor(exact), "nf4").dequantize().numpy())
    # Quantization alone has the error of rank 0.
    by_rank = [float(plain), *(error_of(rank, 1) for rank in (4, 16, 64))]
    assert by_rank == sorted(by_rank, reverse=True)
    by_iterations = [error_of(16, iterations) for iterations in (1, 2, 5)]
    assert by_iterations == sorted(by_iterations, reverse=True)
    assert by_iterations[-1] < 0.9 * plain


def test_one_iteration_keeps_the_rounding_of_the_weight_and_takes_the_nearest_product() -> None:
    exact = weight()
    quantized, factors = loftq(tc.tensor(exact), 8)
    rounded = tc.quantize(tc.tensor(exact), "nf4").dequantize().numpy()
    np.testing.assert_array_equal(quantized.dequantize().numpy(), rounded)
    # By the theorem of Eckart and Young, the error of the nearest product of rank 8 is the norm of
    # the singular values from the ninth on.
    lost = np.linalg.svd((exact - rounded).astype(np.float64), compute_uv=False)[8:]
    error = np.linalg.norm(exact - rounded - factors.up @ factors.down)
    np.testing.assert_allclose(error, np.sqrt((lost**2).sum()), rtol=1e-3)


@pytest.mark.parametrize("iterations", [1, 3])
def test_the_product_and_the_quantized_weight_are_those_of_peft(iterations: int) -> None:
    """The product is near that of peft's `loftq_init`, and nearly all quantized values are equal.

    `loftq_init` needs a GPU. The test repeats the loop of `loftq_init` with peft's low-rank
    decomposition and with the rounding of this library.
    """
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("peft.utils.loftq_utils")
    exact, rank = weight(), 24
    quantized, factors = loftq(tc.tensor(exact), rank, iterations=iterations)

    # What the quantized weight must represent: first all of W, then W without the product.
    rest = torch.tensor(exact)
    for _ in range(iterations):
        rounded = torch.tensor(tc.quantize(tc.tensor(rest.numpy()), "nf4").dequantize().numpy())
        found = utils._low_rank_decomposition(torch.tensor(exact) - rounded, rank)
        rest = torch.tensor(exact) - found["L"] @ found["R"]
    expected = (found["L"] @ found["R"]).numpy()
    difference = np.linalg.norm(factors.up @ factors.down - expected)
    assert difference < 1e-3 * np.linalg.norm(expected)
    values = quantized.dequantize().numpy()
    assert (np.abs(values - rounded.numpy()) > 1e-6).mean() < 1e-3


def test_start_from_rounding_brings_a_quantized_model_nearer_to_the_original() -> None:
    original = CausalLM.from_pretrained(LLAMA, dtype="f32")
    base = CausalLM.from_pretrained(LLAMA, dtype="f32", quantize="nf4")
    ids = tc.tensor(np.arange(3, 15, dtype=np.int64).reshape(1, 12))  # any tokens
    expected = original(ids).numpy()
    plain = np.linalg.norm(base(ids).numpy() - expected)
    config = tc.LoraConfig(r=16, lora_alpha=8.0, target_modules=["q_proj", "up_proj", "down_proj"])
    adapter = base.add_adapter(config)
    # A new adapter does not change the model.
    np.testing.assert_allclose(np.linalg.norm(base(ids).numpy() - expected), plain, rtol=1e-5)
    start_from_rounding(adapter, base, original)
    assert np.linalg.norm(base(ids).numpy() - expected) < 0.9 * plain


@pytest.mark.parametrize("model", ["causal-lm", "digits"])
def test_a_run_with_loftq_starts_nearer_to_the_original_model(model: str) -> None:
    family_class = find(model)
    weights, errors = family_class.default_weights(), {}
    assert weights is not None
    exact = family_class(weights, "f32", "cpu", TrainConfig()).model.named_tensors()
    for init in ("default", "loftq"):
        config = TrainConfig(model=model, base_precision="nf4", init=init, rank=8)
        family = family_class(weights, "f32", "cpu", config)
        adapted = family.task().attach()
        # Q + B A, whose distance from W is the error that training starts with.
        family.model.merge_adapter()
        merged, adapter = family.model.named_tensors(), next(iter(adapted.sets.values()))
        layers = {name.partition(".lora_")[0] for name in adapter.named_parameters()}
        keys = [f"{layer}.weight" for layer in layers]
        errors[init] = sum(np.square((merged[k] - exact[k]).numpy()).sum() for k in keys) ** 0.5
    assert 0 < errors["loftq"] < 0.9 * errors["default"]


# Each row is added to `init: loftq`. The last two rows replace `init`: they test contradictions of
# `qat` with settings of the base and of the adapter.
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give --base-precision"),
        ({"base_precision": "nf4", "adapter": "dora"}, "--adapter is dora"),
        ({"base_precision": "nf4", "initial_adapter": "a"}, "--initial-adapter both say"),
        ({"base_precision": "nf4", "init": "default", "qat": "int8"}, "--qat int8 cannot start"),
        (
            # "The two" in the message are the weight and the adapter, whose sum QAT rounds.
            {"init": "default", "qat": "int8", "lora_dropout": 0.1},
            "and --lora-dropout needs the two apart",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_reported(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**({"init": "loftq"} | settings))


def test_wrong_arguments_are_reported() -> None:
    with pytest.raises(ArgumentError, match="rank is 0, expected at least 1"):
        loftq(tc.tensor(weight()), 0)
    with pytest.raises(ArgumentError, match="iterations is 0"):
        loftq(tc.tensor(weight()), 2, iterations=0)
    original = CausalLM.from_pretrained(LLAMA, dtype="f32")
    base = CausalLM.from_pretrained(LLAMA, dtype="f32", quantize="nf4")
    adapter = base.add_adapter(tc.LoraConfig(r=2, adapter="loha"))
    with pytest.raises(ConfigError, match=r"expected LoRA, .*the adapter is loha"):
        start_from_rounding(adapter, base, original)


def test_a_rank_above_the_smaller_side_of_a_weight_leaves_no_error() -> None:
    original = CausalLM.from_pretrained(LLAMA, dtype="f32")
    base = CausalLM.from_pretrained(LLAMA, dtype="f32", quantize="nf4")
    # The adapted weights have fewer than 100 rows or columns, so rank 100 is enough for any error.
    adapter = base.add_adapter(tc.LoraConfig(r=100, target_modules=["k_proj", "up_proj"]))
    start_from_rounding(adapter, base, original)
    base.merge_adapter()
    for name, exact in original.named_tensors().items():
        if "k_proj" in name or "up_proj" in name:
            assert min(exact.shape) < 100
            # Only the rounding of f32 arithmetic, in the factors and in the merge, causes errors.
            np.testing.assert_allclose(base.get_tensor(name).numpy(), exact.numpy(), atol=1e-5)


def test_start_from_rounding_changes_every_layer_but_the_head() -> None:
    """The head gets no adapter, even if `target_modules` names it."""
    original = CausalLM.from_pretrained(LLAMA, dtype="f32")
    base = CausalLM.from_pretrained(LLAMA, dtype="f32", quantize="nf4")
    adapter = base.add_adapter(tc.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    initial = {name: var.numpy().copy() for name, var in adapter.named_parameters().items()}
    start_from_rounding(adapter, base, original)
    changed = {
        name.partition(".lora_")[0]
        for name, var in adapter.named_parameters().items()
        if not np.array_equal(var.numpy(), initial[name])
    }
    assert changed == {name.partition(".lora_")[0] for name in initial if "q_proj" in name}


def test_a_base_without_quantization_errors_is_rejected() -> None:
    original = CausalLM.from_pretrained(LLAMA, dtype="f32")
    base = CausalLM.from_pretrained(LLAMA, dtype="f32")
    adapter = base.add_adapter(tc.LoraConfig(r=2))
    with pytest.raises(ConfigError, match="no layer has a quantization error"):
        start_from_rounding(adapter, base, original)


def test_adapters_of_convolutions_start_as_usual() -> None:
    family_class = find("sdxl")
    weights = family_class.default_weights()
    assert weights is not None
    config = TrainConfig(
        model="sdxl",
        base_precision="nf4",
        init="loftq",
        rank=4,
        target_modules=["to_q", "conv1"],
    )
    adapted = family_class(weights, "f32", "cpu", config).task().attach()
    parameters = adapted.named_parameters()
    ups = {name: var.numpy() for name, var in parameters.items() if ".lora_B." in name}
    # conv1 is a convolution, which is not quantized. Usually, the up factors start as zeros.
    assert {name for name, up in ups.items() if up.any()} == {n for n in ups if "to_q" in n}
    assert any("conv1" in name for name in ups)


def test_a_resumed_run_neither_loads_nor_counts_the_original_model() -> None:
    family_class = find("causal-lm")
    weights = family_class.default_weights()
    assert weights is not None
    config = TrainConfig(model="causal-lm", base_precision="nf4", init="loftq", rank=2)
    config = config.with_(precision="f32")
    family = family_class(weights, "f32", "cpu", config)
    # Not fresh: the values will come from a checkpoint, so the up factors stay zeros.
    parameters = family.task().attach(fresh=False).named_parameters()
    assert not any(var.numpy().any() for name, var in parameters.items() if ".lora_B." in name)
    tokens = 64  # of a row
    items = family.estimate(config, tokens).phases["starting the adapter"]
    assert {item.what for item in items} == {"weights", "adapter", "original weights"}
    resumed = config.with_(resume="latest")
    assert "starting the adapter" not in family.estimate(resumed, tokens).phases
    # Without streamed blocks, host memory holds nothing but the original weights.
    on_gpu = config.with_(device="cuda", precision="bf16", stream_blocks=0)
    assert family.estimate(on_gpu, tokens).host > 0
    assert family.estimate(on_gpu.with_(resume="latest"), tokens).host == 0
