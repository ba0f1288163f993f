"""Models with blocks streamed from host memory compute the same as without streaming."""

import json
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.models import CausalLM, Model, SDXLUNet
from trainable_candle.nn.functional import mse_loss

from .test_transformers import FAMILIES, GOLDEN, Family, gradient

ALL_LINEAR = {"r": 4, "lora_alpha": 4.0, "target_modules": ["all-linear"]}
ATTENTION = {"r": 4, "lora_alpha": 4.0, "target_modules": ["to_q", "to_k", "to_v"]}
LLAMA = GOLDEN / "llm" / "llama"


def load(
    family: Family, stream_blocks: int, quantize: str | None = None, *, modulation: bool = False
) -> Model:
    return family.kind.from_pretrained(
        family.transformer,
        dtype="f32",
        quantize=quantize,
        stream_blocks=stream_blocks,
        stream_modulation=modulation,
    )


def block_count(family: Family) -> int:
    """Return how many blocks the family's golden transformer has; each can be streamed."""
    config = json.loads((family.transformer / "config.json").read_text())
    names = ("num_layers", "num_single_layers", "n_layers")
    # Z-Image has as many refiners for the noise as for the context.
    refiners = 2 * config.get("n_refiner_layers", 0)
    return sum(config.get(name, 0) for name in names) + refiners


def two_steps(
    family: Family, model: Model, policy: str, config: dict[str, object]
) -> list[np.ndarray]:
    """Train a new adapter for two steps; return predictions, gradients and a last prediction.

    `policy` is that of checkpointing; `config` has the arguments of `LoraConfig`.
    """
    tc.manual_seed(0)
    adapter = model.add_adapter(tc.LoraConfig(**config))
    optimizer = tc.optim.AdamW(adapter.parameters(), lr=1e-2)
    if policy == "none":
        model.disable_gradient_checkpointing()
    else:
        model.enable_gradient_checkpointing(policy)
    results = []
    for _ in range(2):
        y = family.predict(model)
        mse_loss(y, tc.ones(y.shape)).backward()
        results += [y.numpy(), *(gradient(var) for var in adapter.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    with tc.no_grad():
        results.append(family.predict(model).numpy())
    return results


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for found_array, expected_array in zip(found, expected, strict=True):
        np.testing.assert_array_equal(found_array, expected_array)


@pytest.mark.parametrize("policy", ["full", "selective", "none"])
@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_blocks_compute_the_same_as_resident_blocks(name: str, policy: str) -> None:
    family = FAMILIES[name]
    expected = two_steps(family, load(family, 0), policy, ALL_LINEAR)
    for count in (1, block_count(family) - 1, block_count(family)):
        assert_equal(two_steps(family, load(family, count), policy, ALL_LINEAR), expected)


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_modulation_can_be_streamed_with_or_without_blocks(name: str) -> None:
    """The modulation layers have adapters, so the backward pass needs these layers' weights."""
    family = FAMILIES[name]
    for policy in ("full", "none"):
        expected = two_steps(family, load(family, 0), policy, ALL_LINEAR)
        for count in (0, 1, block_count(family)):
            model = load(family, count, modulation=True)
            assert_equal(two_steps(family, model, policy, ALL_LINEAR), expected)


@pytest.mark.parametrize("quantize", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_blocks_may_be_quantized(name: str, quantize: str) -> None:
    family = FAMILIES[name]
    expected = two_steps(family, load(family, 0, quantize), "full", ATTENTION)
    found = two_steps(family, load(family, block_count(family), quantize), "full", ATTENTION)
    assert_equal(found, expected)


@pytest.mark.parametrize(
    "kind",
    [
        {"use_dora": True},
        {"adapter": "loha"},
        {"adapter": "lokr"},
        {"adapter": "oft"},
        {"lora_dropout": 0.1},
    ],
    ids=["dora", "loha", "lokr", "oft", "dropout"],
)
def test_every_kind_of_adapter_trains_on_streamed_blocks(kind: dict[str, object]) -> None:
    family = FAMILIES["flux"]
    config = ATTENTION | {"target_modules": ["to_q", "ff.net.2"]} | kind
    expected = two_steps(family, load(family, 0), "full", config)
    assert_equal(two_steps(family, load(family, block_count(family)), "full", config), expected)


def test_merging_saving_and_unmerging_give_the_same_with_streamed_weights(tmp_path: Path) -> None:
    family = FAMILIES["flux"]
    results = []
    for count in (0, block_count(family)):
        tc.manual_seed(0)
        model = load(family, count)
        adapter = model.add_adapter(tc.LoraConfig(**ATTENTION))
        for var in adapter.parameters():
            var.set(tc.randn(var.shape) * 0.05)
        model.merge_adapter()
        # Blocks are also streamed while the adapter is merged.
        family.predict(model)
        model.save_pretrained(tmp_path / str(count))
        saved = family.kind.from_pretrained(tmp_path / str(count)).named_tensors()
        results.append({key: tensor.numpy() for key, tensor in saved.items()})
        model.unmerge_adapter()
        results[-1]["prediction"] = family.predict(model).numpy()
    assert results[0].keys() == results[1].keys()
    for key, value in results[0].items():
        np.testing.assert_array_equal(results[1][key], value, err_msg=key)


def test_a_language_model_computes_the_same_with_streamed_blocks() -> None:
    def losses(stream_blocks: int) -> list[float]:
        tc.manual_seed(1)
        model = CausalLM.from_pretrained(LLAMA, dtype="f32", stream_blocks=stream_blocks)
        model.enable_gradient_checkpointing("full")
        adapter = model.add_adapter(tc.LoraConfig(**ALL_LINEAR))
        optimizer = tc.optim.AdamW(adapter.parameters(), lr=1e-2)
        ids = tc.tensor(np.arange(48).reshape(2, 24) * 7 % 100)
        found = []
        for _ in range(3):
            loss = model.loss(ids, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(2) == losses(0)


def test_streaming_what_a_model_does_not_have_is_an_error() -> None:
    family = FAMILIES["flux"]
    with pytest.raises(tc.errors.ArgumentError, match=r"found 1000 blocks to stream, expected at"):
        load(family, 1000)
    with pytest.raises(tc.errors.ArgumentError, match="stream_blocks is -1"):
        load(family, -1)
    with pytest.raises(tc.errors.ArgumentError, match="no separate layers for the modulation"):
        load(FAMILIES["flux2"], 0, modulation=True)


def test_the_estimate_counts_only_two_of_the_streamed_blocks() -> None:
    for family in FAMILIES.values():
        facts = next(iter(tc.inspect(family.transformer).parts.values()))
        for quantize in (None, "nf4"):
            counts = range(block_count(family) + 1)
            estimates = [facts.weight_bytes("bf16", quantize, stream_blocks=n) for n in counts]
            # Streaming one or two blocks saves nothing: the device holds the weights of two
            # streamed blocks at a time.
            assert estimates[0] == facts.weight_bytes("bf16", quantize)
            assert estimates[1] == estimates[2] == estimates[0]
            assert (estimates[-1] < estimates[0]) == (block_count(family) > 2)


@pytest.mark.parametrize("policy", ["full", "selective", "none"])
def test_a_unet_computes_the_same_with_streamed_blocks(policy: str) -> None:
    """Checkpointing recomputes nested blocks together, unless they are streamed.

    So streaming changes what is recomputed together, but must not change the results.
    """
    case = tc.load_file(GOLDEN / "sdxl" / "unet_forward.safetensors")
    case.pop("output")  # the other tensors are the arguments of the model
    results = []
    for count in (0, 1, 12):  # of 17 blocks
        tc.manual_seed(0)
        unet = SDXLUNet.from_pretrained(GOLDEN / "sdxl" / "unet", dtype="f32", stream_blocks=count)
        adapter = unet.add_adapter(tc.LoraConfig(r=4, target_modules=["to_q", "ff.net.2"]))
        if policy != "none":
            unet.enable_gradient_checkpointing(policy)
        y = unet(**case)
        mse_loss(y, tc.ones(y.shape)).backward()
        results.append([y.numpy(), *(var.grad.numpy() for var in adapter.parameters())])
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])
