"""Quantization-aware training: models whose adapted weights are rounded in training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ConfigError
from trainable_candle.models import SDXLUNet
from trainable_candle.nn.functional import fake_quantize, mse_loss

from .test_transformers import FAMILIES, Family

# A `Family` has a small transformer in tests/golden. `load` loads it in f32, and `predict` runs it
# on stored inputs.
FLUX = FAMILIES["flux"]
GOLDEN = Path(__file__).parents[1] / "golden"
TARGETS = ["to_q", "to_k", "to_v"]


def config(qat: str | None, **settings: object) -> tc.LoraConfig:
    return tc.LoraConfig(r=4, lora_alpha=8.0, target_modules=TARGETS, qat=qat, **settings)


def randomize(adapter: tc.AdapterSet) -> None:
    """Add random changes to the parameters, the same in each call."""
    random = np.random.default_rng(0)
    for var in adapter.parameters():
        change = random.standard_normal(var.shape).astype(np.float32) * 0.1
        var.set(tc.tensor(var.detach().numpy() + change))


@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr", "oft"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_merged_model_computes_the_same_as_in_training(name: str, kind: str) -> None:
    family: Family = FAMILIES[name]
    plain, aware = family.load(), family.load()
    for model, qat in ((plain, None), (aware, "int8")):
        tc.manual_seed(0)
        randomize(model.add_adapter(config(qat, adapter=kind)))
    before = family.predict(aware).numpy()
    assert (before != family.predict(plain).numpy()).any()
    aware.merge_adapter()
    np.testing.assert_allclose(family.predict(aware).numpy(), before, rtol=1e-4, atol=1e-5)
    # The merged weights equal the merged weights of a plain adapter after rounding to int8.
    plain.merge_adapter()
    merged = plain.named_tensors()
    adapted = 0
    for key, weight in aware.named_tensors().items():
        # The other weights have no adapters, so they are the same in both models.
        if (weight.numpy() != merged[key].numpy()).any():
            expected = fake_quantize(merged[key], "int8").numpy()
            np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-5, atol=1e-7)
            adapted += 1
    assert adapted >= len(TARGETS)


def test_gradients_reach_every_parameter_and_checkpoints_do_not_change_them() -> None:
    results = []
    for policy in ("none", "full"):
        model = FLUX.load()
        tc.manual_seed(0)
        adapter = model.add_adapter(config("int4"))
        randomize(adapter)
        if policy != "none":
            model.enable_gradient_checkpointing(policy)
        y = FLUX.predict(model)
        mse_loss(y, tc.ones(y.shape)).backward()
        results.append({key: var.grad.numpy() for key, var in adapter.named_parameters().items()})
    for key, gradient in results[0].items():
        assert np.abs(gradient).max() > 0, key
        np.testing.assert_array_equal(gradient, results[1][key], err_msg=key)


def test_a_base_of_the_same_format_starts_unchanged() -> None:
    """Rounding the values of a quantized base gives the codes of the base again."""
    model = FLUX.kind.from_pretrained(FLUX.transformer, dtype="f32", quantize="int8")
    before = FLUX.predict(model).numpy()
    model.add_adapter(config("int8"))
    np.testing.assert_allclose(FLUX.predict(model).numpy(), before, rtol=1e-4, atol=1e-5)


def test_a_base_of_another_format_is_rejected() -> None:
    model = FLUX.kind.from_pretrained(FLUX.transformer, dtype="f32", quantize="nf4")
    with pytest.raises(ConfigError, match=r"to_q: qat int8: the base is nf4; load the base"):
        model.add_adapter(config("int8"))


def test_convolutions_are_an_error_and_linear_layers_are_not(sdxl: Path) -> None:
    unet = SDXLUNet.from_pretrained(sdxl / "unet", dtype="f32")
    with pytest.raises(ConfigError, match=r"qat int8: the layer is a convolution.*exclude_modules"):
        unet.add_adapter(tc.LoraConfig(target_modules=["all-conv"], qat="int8"))
    assert unet.add_adapter(tc.LoraConfig(target_modules=["all-linear"], qat="int8")).parameters()


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_with_rounded_inputs_a_model_computes_what_w8a8_computes(form: str, tmp_path: Path) -> None:
    """W8A8 rounds the merged weights and the inputs of layers, and multiplies their codes."""
    (facts,) = tc.inspect(FLUX.transformer).parts.values()
    layers = [name for name in facts.layers if "transformer_blocks." in name]
    found = {}
    for rounds_inputs in (False, True):
        model = FLUX.load()
        tc.manual_seed(0)
        adapter = model.add_adapter(
            tc.LoraConfig(r=4, target_modules=layers, qat=form, qat_activations=rounds_inputs)
        )
        randomize(adapter)
        found[rounds_inputs] = FLUX.predict(model).numpy()
    # `model` is now the one with rounded inputs. Both have the same adapter.
    model.merge_adapter()
    model.save_pretrained(tmp_path)
    served = FLUX.kind.from_pretrained(tmp_path, dtype="f32", quantize=form)
    tc.set_w8a8(True)
    try:
        expected = FLUX.predict(served).numpy()
    finally:
        tc.set_w8a8(False)
    np.testing.assert_allclose(found[True], expected, rtol=1e-3, atol=1e-4)
    assert np.abs(found[False] - expected).max() > 20 * np.abs(found[True] - expected).max()


# The names of the inputs that Flux and SD3 share.
FLOW = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")


def run_flow(model: Any, name: str) -> tc.Tensor:
    names = {"flux": (*FLOW, "img_ids", "txt_ids", "guidance"), "sd3": FLOW}[name]
    case = tc.load_file(GOLDEN / name / "transformer_forward.safetensors")
    result: tc.Tensor = model(**{key: case[key] for key in names})
    return result


def run_qwen2(model: Any, _: str) -> tc.Tensor:
    result: tc.Tensor = model(tc.tensor(np.arange(40, dtype=np.int64)[None]))
    return result


# For each model: its folder, a function that runs it, the number of samples in this run,
# and the sizes of a sample: latent pixels and text tokens. Flux's input has 24 tokens of 2 x 2
# latent pixels, whatever their arrangement.
ESTIMATED = {
    "flux": ("flux/transformer", run_flow, 2, {"height": 2, "width": 48, "tokens": 19}),
    "sd3": ("sd3/transformer", run_flow, 2, {"height": 16, "width": 12, "tokens": 21}),
    "qwen2": ("llm/qwen2", run_qwen2, 1, {"height": 0, "width": 0, "tokens": 40}),
}


@pytest.mark.parametrize("policy", ["none", "selective"])
@pytest.mark.parametrize("name", ESTIMATED)
def test_the_estimate_counts_rounded_inputs(name: str, policy: str) -> None:
    folder, run, samples, sizes = ESTIMATED[name]
    path = GOLDEN / folder
    (facts,) = tc.inspect(path).parts.values()
    layers = facts.layers

    def measured_and_estimated(**settings: bool) -> tuple[int, int]:
        """The bytes on the tape, and their estimate; both without the rounded weights."""
        model = tc.models.load(path, dtype="f32")
        if policy != "none":
            model.enable_gradient_checkpointing(policy)
        lora = tc.LoraConfig(r=4, target_modules="all-linear", qat="int8", **settings)
        model.add_adapter(lora)
        before = tc.memory.saved_bytes()
        result = run(model, name)
        held = tc.memory.saved_bytes() - before
        assert result.requires_grad
        weights = 4 * sum(int(np.prod(layers[layer])) for layer in lora.select(layers))
        values, _in_host_memory = facts.saved_values(lora, policy, **sizes)
        # Every weight and every saved value is an f32, which has 4 bytes.
        return held - weights, 4 * samples * values

    (plain, plain_estimate), (rounded, rounded_estimate) = (
        measured_and_estimated(),
        measured_and_estimated(qat_activations=True),
    )
    if policy == "none":
        # The tape keeps a rounded input for each layer, also for layers that share an input.
        assert rounded > plain
        assert rounded_estimate == pytest.approx(rounded, rel=1 / 7)
    else:
        # The backward pass recomputes the rounded inputs of one block at a time. The estimate
        # counts those of one block; the measured tape, after the forward pass, has none.
        assert rounded == pytest.approx(plain, rel=0.02)
        assert rounded_estimate > plain_estimate
