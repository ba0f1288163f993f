"""SDXL's UNet against diffusers and peft: predictions, gradients, training of adapters."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.compressed import decompressed

import trainable_candle as tc
from trainable_candle.models import SDXLUNet
from trainable_candle.nn.functional import mse_loss

from .conftest import GOLDEN, assert_near, distance, metadata, relative_error, weights_of

# Inputs of diffusers' tiny UNet, a batch of three samples, and its output.
CASE = tc.load_file(GOLDEN / "unet_forward.safetensors")
INPUTS = ("sample", "timestep", "encoder_hidden_states", "text_embeds", "time_ids")
ADAPTER_CASES = ["dora_attention", "lora_all_linear"]


def predict(model: SDXLUNet, sample: tc.Tensor | None = None, device: str = "cpu") -> tc.Tensor:
    given = {name: CASE[name].to(device) for name in INPUTS}
    return model(**given if sample is None else given | {"sample": sample})


@pytest.fixture
def model(sdxl: Path) -> SDXLUNet:
    return SDXLUNet.from_pretrained(sdxl / "unet", dtype="f32")


def adapted(
    model: SDXLUNet, name: str, device: str = "cpu"
) -> tuple[tc.AdapterSet, dict[str, tc.Tensor]]:
    """Add a case's initial adapter to a model, which is on `device`; return adapter and case."""
    path = decompressed(GOLDEN / f"unet_{name}.safetensors")
    case, settings = tc.load_file(path), metadata(path)
    options = {key: json.loads(value) for key, value in settings.items() if key.startswith("use_")}
    targets = json.loads(settings["targets"])
    adapter = model.add_adapter(tc.LoraConfig(r=2, lora_alpha=3, target_modules=targets, **options))
    parameters = adapter.named_parameters()
    assert {f"lora.{key}" for key in parameters} == {k for k in case if k.startswith("lora.")}
    for key, var in parameters.items():
        var.set(case[f"lora.{key}"].to("f32").to(device))
    return adapter, case


def test_names_and_shapes_equal_those_of_diffusers(model: SDXLUNet) -> None:
    ours = {name: tensor.shape for name, tensor in model.named_tensors().items()}
    assert ours == {name: tensor.shape for name, tensor in weights_of("unet").items()}


def test_prediction_equals_that_of_diffusers(sdxl: Path, device: str) -> None:
    # The latents are 10 x 7. The down path halves heights and widths and rounds odd ones up; the up
    # path must restore the heights and widths from before each halving.
    model = SDXLUNet.from_pretrained(sdxl / "unet", dtype="f32", device=device)
    assert_near(predict(model, device=device), CASE["output"])


def test_one_timestep_is_broadcast_to_the_batch(model: SDXLUNet) -> None:
    def predict_at(time: tc.Tensor | float) -> np.ndarray:
        inputs = CASE["sample"], time, CASE["encoder_hidden_states"]
        added = {"text_embeds": CASE["text_embeds"], "time_ids": CASE["time_ids"]}
        return model(*inputs, **added).numpy()

    expected = predict_at(tc.tensor([501.0, 501.0, 501.0]))
    np.testing.assert_array_equal(predict_at(501), expected)
    np.testing.assert_array_equal(predict_at(tc.tensor([501])), expected)
    np.testing.assert_array_equal(predict_at(tc.tensor(501.0)), expected)


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("name", ADAPTER_CASES)
def test_adapters_train_as_with_peft(sdxl: Path, name: str, policy: str, device: str) -> None:
    model = SDXLUNet.from_pretrained(sdxl / "unet", dtype="f32", device=device)
    if policy != "none":
        model.enable_gradient_checkpointing(policy)
    adapter, case = adapted(model, name, device)
    sample = tc.Var(CASE["sample"], device=device)
    output = predict(model, sample, device)
    assert_near(output, case["output"])
    mse_loss(output, case["target"].to(device)).backward()
    assert relative_error(sample.grad, case["grad_input.sample"]) < 1e-4
    for key, var in adapter.named_parameters().items():
        assert relative_error(var.grad, case[f"grad.{key}"]) < 1e-3, key
    losses = four_steps(model, adapter, case["target"].to(device))
    np.testing.assert_allclose(losses, case["adamw.losses"].numpy(), rtol=2e-5)


def four_steps(model: SDXLUNet, adapter: tc.AdapterSet, target: tc.Tensor) -> list[float]:
    """Take four steps of AdamW, and return their losses."""
    optimizer = tc.optim.AdamW(adapter.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = mse_loss(predict(model, device=target.device).to("f32"), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# The limits are on the distances from peft's f32 results. `distance` is the norm of all
# differences, relative to the norm of the expected values. The limits of gradients are wide: the
# normalization layers of the tiny model have few channels, so the backward pass amplifies rounding
# errors.
@pytest.mark.parametrize(
    ("dtype", "output_limit", "gradient_limit", "loss_limit"),
    [("f16", 0.01, 0.1, 2e-3), ("bf16", 0.05, 0.5, 1e-2)],
)
@pytest.mark.parametrize("name", ADAPTER_CASES)
def test_adapters_train_in_half_precision_nearly_as_with_peft(
    sdxl: Path, name: str, dtype: str, output_limit: float, gradient_limit: float,
    loss_limit: float, device: str,
) -> None:  # fmt: skip
    model = SDXLUNet.from_pretrained(sdxl / "unet", dtype=dtype, device=device)
    adapter, case = adapted(model, name, device)
    target = case["target"].to(device)
    output = predict(model, device=device)
    assert output.dtype == dtype
    assert distance(output, case["output"]) < output_limit
    mse_loss(output.to("f32"), target).backward()
    parameters = adapter.named_parameters()
    assert {str(var.grad.dtype) for var in parameters.values()} == {"f32"}
    found = tc.cat([var.grad.to("cpu").reshape(-1) for var in parameters.values()])
    expected = tc.cat([case[f"grad.{key}"].reshape(-1) for key in parameters])
    assert distance(found, expected) < gradient_limit
    losses = four_steps(model, adapter, target)
    np.testing.assert_allclose(losses, case["adamw.losses"].numpy(), rtol=loss_limit)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_checkpointed_gradients_are_the_same_bit_for_bit(model: SDXLUNet, policy: str) -> None:
    adapter, case = adapted(model, "lora_all_linear")

    def gradients() -> list[np.ndarray]:
        loss = mse_loss(predict(model), case["target"])
        # No gradient is None: `if` is for type checkers.
        return [g.numpy() for g in tc.grad(loss, adapter.parameters()) if g is not None]

    plain = gradients()
    model.enable_gradient_checkpointing(policy)
    for found, expected in zip(gradients(), plain, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_full_checkpointing_keeps_fewer_bytes_for_the_backward_pass(model: SDXLUNet) -> None:
    adapted(model, "lora_all_linear")

    def bytes_kept() -> int:
        before = tc.memory.saved_bytes()
        output = predict(model)
        kept = tc.memory.saved_bytes() - before
        del output
        return kept

    without_checkpointing = bytes_kept()
    model.enable_gradient_checkpointing("full")
    assert bytes_kept() < 0.4 * without_checkpointing


def test_merging_keeps_the_prediction_and_removing_restores_that_of_the_base(
    model: SDXLUNet,
) -> None:
    _, case = adapted(model, "dora_attention")
    model.merge_adapter()
    assert_near(predict(model), case["output"])
    model.remove_adapter()
    assert_near(predict(model), CASE["output"])


def test_the_dtype_is_that_of_the_file_unless_another_is_given(sdxl: Path) -> None:
    assert SDXLUNet.from_pretrained(sdxl).dtype == "bf16"
    assert SDXLUNet.from_pretrained(sdxl, dtype="f16").dtype == "f16"


def test_a_random_model_has_the_sizes_of_its_configuration(sdxl: Path, device: str) -> None:
    expected = SDXLUNet.from_pretrained(sdxl).named_tensors()
    model = SDXLUNet.from_config(sdxl / "unet" / "config.json", dtype="bf16", device=device)
    found = model.named_tensors()
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.items()}
    assert not model.named_parameters()
    output = predict(model, device=device).to("cpu").to("f32").numpy()
    assert np.isfinite(output).all()
    assert output.std() > 0.01


def test_from_config_rejects_configurations_of_other_models_and_integer_dtypes(sdxl: Path) -> None:
    with pytest.raises(tc.ConfigError, match="UNet2DConditionModel"):
        SDXLUNet.from_config(sdxl / "vae" / "config.json")
    with pytest.raises(tc.DTypeError, match="dtype is i64, expected a floating-point dtype"):
        SDXLUNet.from_config(sdxl / "unet" / "config.json", dtype="i64")


def test_inputs_of_wrong_shapes_are_reported(model: SDXLUNet) -> None:
    sample, time, text = CASE["sample"], CASE["timestep"], CASE["encoder_hidden_states"]
    added = {"text_embeds": CASE["text_embeds"], "time_ids": CASE["time_ids"]}
    with pytest.raises(tc.ShapeError, match=r"sample has shape .* expected \(B, 4, H, W\)"):
        model(sample[:, :3], time, text, **added)
    with pytest.raises(tc.ShapeError, match=r"timestep has shape \[2\], expected \(3,\), \(1,\)"):
        model(sample, time[:2], text, **added)
    with pytest.raises(tc.ShapeError, match=r"encoder_hidden_states .* expected \(3, L, 20\)"):
        model(sample, time, text[:, :, :4], **added)
    with pytest.raises(tc.ShapeError, match=r"time_ids has shape \[3, 5\], expected \(3, 6\)"):
        model(sample, time, text, **(added | {"time_ids": CASE["time_ids"][:, :5]}))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"timestep": float("nan")}, tc.ArgumentError, "SDXLUNet: the timestep is NaN, expected"),
        ({"timestep": 10**400}, tc.ArgumentError, "SDXLUNet: the timestep is inf, expected"),
        ({"sample": CASE["sample"].to("i64")}, tc.DTypeError, "SDXLUNet: sample is i64, expected"),
        (
            {"encoder_hidden_states": CASE["encoder_hidden_states"][:, :0]},
            tc.ShapeError,
            "SDXLUNet: encoder_hidden_states has shape .* at least one token",
        ),
        ({"text_embeds": None}, TypeError, "SDXLUNet: text_embeds is None, expected a Tensor"),
        (
            {"sample": np.zeros((1, 4, 16, 16))},
            TypeError,
            r"SDXLUNet: sample is a value of type ndarray, expected a Tensor, which .*tensor\(\)",
        ),
    ],
    ids=["NaN", "infinite", "integers", "no tokens", "missing", "array"],
)
def test_impossible_inputs_are_reported(
    model: SDXLUNet, wrong: dict[str, object], error: type[Exception], message: str
) -> None:
    inputs = {name: tensor for name, tensor in CASE.items() if name in INPUTS}
    with pytest.raises(error, match=message):
        model(**inputs | wrong)
