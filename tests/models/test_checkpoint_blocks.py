"""Models that recompute only their first blocks have the gradients of those that recompute none."""

from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.models import CausalLM, Model, SDXLUNet
from trainable_candle.nn.functional import mse_loss

from .test_transformers import FAMILIES, GOLDEN, Family, gradient

LLAMA = GOLDEN / "llm" / "llama"
ADAPTER = {"r": 4, "lora_alpha": 4.0, "target_modules": ["all-linear"]}


def facts_of(folder: Path) -> tc.PartFacts:
    """The facts of the only model in a folder."""
    return next(iter(tc.inspect(folder).parts.values()))


def counts_up_to(blocks: int) -> list[int]:
    """A few numbers of blocks from 1 to `blocks`."""
    return sorted({1, blocks // 2, blocks - 1, blocks})


def load(family: Family, **options: object) -> Model:
    return family.kind.from_pretrained(family.transformer, dtype="f32", **options)


def prediction_and_gradients(family: Family, model: Model) -> list[np.ndarray]:
    """The prediction, and the gradients of an adapter whose factors are not zero."""
    tc.manual_seed(0)
    adapter = model.add_adapter(tc.LoraConfig(**ADAPTER))
    for var in adapter.parameters():
        var.set(tc.randn(var.shape) * 0.05)
    y = family.predict(model)
    mse_loss(y, tc.ones(y.shape)).backward()
    return [y.numpy(), *(gradient(var) for var in adapter.parameters())]


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("policy", ["full", "offload"])
@pytest.mark.parametrize("name", FAMILIES)
def test_recomputing_some_blocks_changes_no_gradient(name: str, policy: str) -> None:
    family = FAMILIES[name]
    expected = prediction_and_gradients(family, load(family))
    for count in counts_up_to(facts_of(family.transformer).blocks_to_checkpoint):
        model = load(family)
        model.enable_gradient_checkpointing(policy, blocks=count)
        assert_equal(prediction_and_gradients(family, model), expected)


@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_recomputing_some_streamed_blocks_changes_no_gradient(
    name: str, quantize: str | None
) -> None:
    family = FAMILIES[name]
    expected = prediction_and_gradients(family, load(family, quantize=quantize))
    facts = facts_of(family.transformer)
    for count in counts_up_to(facts.blocks_to_checkpoint):
        # `facts.blocks`: all blocks that can be streamed from host memory.
        model = load(family, quantize=quantize, stream_blocks=facts.blocks)
        model.enable_gradient_checkpointing("full", blocks=count)
        assert_equal(prediction_and_gradients(family, model), expected)


@pytest.mark.parametrize("streamed", [0, 5])
def test_recomputing_some_blocks_of_a_unet_changes_no_gradient(streamed: int) -> None:
    """The transformers in a UNet recompute several of their blocks at a time.

    With some values of `count`, the last recomputed block is in the middle of a transformer.
    """
    folder = GOLDEN / "sdxl" / "unet"
    case = tc.load_file(GOLDEN / "sdxl" / "unet_forward.safetensors")
    case.pop("output")

    def unet_results(count: int | None) -> list[np.ndarray]:
        tc.manual_seed(0)
        unet = SDXLUNet.from_pretrained(folder, dtype="f32", stream_blocks=streamed)
        adapter = unet.add_adapter(tc.LoraConfig(r=4, target_modules=["to_q", "ff.net.2"]))
        if count is not None:
            unet.enable_gradient_checkpointing("full", blocks=count)
        y = unet(**case)
        mse_loss(y, tc.ones(y.shape)).backward()
        return [y.numpy(), *(gradient(var) for var in adapter.parameters())]

    expected = unet_results(None)
    for count in range(1, facts_of(folder).blocks_to_checkpoint + 1):
        assert_equal(unet_results(count), expected)


def test_recomputing_some_blocks_of_a_language_model_changes_no_gradient() -> None:
    def loss_and_gradients(count: int | None) -> list[np.ndarray]:
        tc.manual_seed(1)
        model = CausalLM.from_pretrained(LLAMA, dtype="f32")
        adapter = model.add_adapter(tc.LoraConfig(**ADAPTER))
        if count is not None:
            model.enable_gradient_checkpointing("full", blocks=count)
        # Two texts of 24 tokens; the ids are below the size of the vocabulary.
        ids = tc.tensor(np.arange(48).reshape(2, 24) * 7 % 100)
        loss = model.loss(ids, ids)
        loss.backward()
        return [loss.numpy(), *(gradient(var) for var in adapter.parameters())]

    expected = loss_and_gradients(None)
    for count in counts_up_to(facts_of(LLAMA).blocks_to_checkpoint):
        assert_equal(loss_and_gradients(count), expected)


def test_a_model_holds_less_the_more_blocks_it_recomputes() -> None:
    family = FAMILIES["flux"]
    held = []  # bytes saved for the backward pass, for each number of recomputed blocks
    for count in range(1, facts_of(family.transformer).blocks_to_checkpoint + 1):
        model = load(family)
        model.add_adapter(tc.LoraConfig(**ADAPTER))
        model.enable_gradient_checkpointing("full", blocks=count)
        before = tc.memory.saved_bytes()
        y = family.predict(model)
        held.append(tc.memory.saved_bytes() - before)
        del y
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == len(held)


def test_impossible_numbers_of_blocks_and_policies_are_errors() -> None:
    model = load(FAMILIES["flux"])
    with pytest.raises(tc.errors.ArgumentError, match="found 100 blocks to recompute, expected at"):
        model.enable_gradient_checkpointing("full", blocks=100)
    with pytest.raises(
        tc.errors.ArgumentError, match='policy "selective", expected "full" or "offload"'
    ):
        model.enable_gradient_checkpointing("selective", blocks=1)
    with pytest.raises(tc.errors.ArgumentError, match="blocks is -1"):
        model.enable_gradient_checkpointing("full", blocks=-1)
