"""Models whose base weights are quantized: results, gradients, memory, files."""

import json
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.models import AutoencoderKL, CausalLM, Model, SDXLUNet
from trainable_candle.nn.functional import mse_loss

from .test_transformers import FAMILIES, Family, gradient

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = ("int8", "fp8", "nf4")
LLAMA = GOLDEN / "llm" / "llama"
ALL_LINEAR = tc.LoraConfig(r=4, lora_alpha=4.0, target_modules=["all-linear"])


def quantized(family: Family, format: str) -> Model:
    folder = family.transformer
    return family.kind.from_pretrained(folder, dtype="f32", quantize=format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_quantized_model_equals_one_with_its_dequantized_weights(
    name: str, format: str, tmp_path: Path
) -> None:
    """Saving dequantizes the weights.

    The results and gradients of the saved model are bit for bit those of the quantized model.
    """
    family = FAMILIES[name]
    model = quantized(family, format)
    model.save_pretrained(tmp_path)
    plain = family.kind.from_pretrained(tmp_path, dtype="f32")
    original = family.load().named_tensors()
    changed = {
        key
        for key, tensor in plain.named_tensors().items()
        if (tensor.numpy() != original[key].numpy()).any()
    }
    layers = {f"{layer}.weight" for layer in next(iter(tc.inspect(tmp_path).parts.values())).layers}
    assert changed
    # Only linear layers of the repeated blocks are quantized.
    blocks = (
        "transformer_blocks.", "single_transformer_blocks.", "layers.", "noise_refiner.",
        "context_refiner.",
    )  # fmt: skip
    assert changed <= {key for key in layers if key.startswith(blocks)}
    results = []
    for each in (model, plain):
        tc.manual_seed(0)
        adapter = each.add_adapter(ALL_LINEAR)
        each.enable_gradient_checkpointing("full")
        y = family.predict(each)
        mse_loss(y, tc.ones(y.shape)).backward()
        gradients = {key: gradient(var) for key, var in adapter.named_parameters().items()}
        results.append((y.numpy(), gradients))
    (y, gradients), (expected_y, expected_gradients) = results
    np.testing.assert_array_equal(y, expected_y)
    assert gradients.keys() == expected_gradients.keys()
    for key, found in gradients.items():
        np.testing.assert_array_equal(found, expected_gradients[key], err_msg=key)
    # The prediction of the original weights differs.
    assert np.abs(y - family.predict(family.load()).numpy()).max() > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"adapter": "loha"},
        {"adapter": "lokr"},
        {"adapter": "oft"},
        {"lora_dropout": 0.1},
    ],
    ids=["dora", "loha", "lokr", "oft", "dropout"],
)
def test_adapters_train_on_a_quantized_base_and_can_be_removed(
    settings: dict[str, object],
) -> None:
    family = FAMILIES["flux"]
    model = quantized(family, "nf4")
    before = family.predict(model).numpy()
    config = tc.LoraConfig(r=2, lora_alpha=2.0, target_modules=["to_q", "ff.net.2"], **settings)
    adapter = model.add_adapter(config)
    y = family.predict(model)
    np.testing.assert_allclose(y.numpy(), before, rtol=1e-4, atol=1e-5)
    optimizer = tc.optim.AdamW(adapter.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = mse_loss(family.predict(model), tc.zeros(y.shape))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.remove_adapter()
    np.testing.assert_array_equal(family.predict(model).numpy(), before)


def test_merging_dequantizes_and_unmerging_gives_the_codes_back() -> None:
    family = FAMILIES["sd3"]
    model = quantized(family, "int8")
    before = family.predict(model).numpy()
    adapter = model.add_adapter(ALL_LINEAR)
    for var in adapter.parameters():
        var.set(tc.randn(var.shape) * 0.05)
    unmerged = family.predict(model).numpy()
    assert np.abs(unmerged - before).max() > 1e-3
    model.merge_adapter()
    np.testing.assert_allclose(family.predict(model).numpy(), unmerged, rtol=1e-3, atol=1e-4)
    model.unmerge_adapter()
    np.testing.assert_array_equal(family.predict(model).numpy(), unmerged)
    model.remove_adapter()
    np.testing.assert_array_equal(family.predict(model).numpy(), before)


def test_losses_with_quantized_weights_stay_near_those_with_unquantized_ones() -> None:
    def losses(quantize: str | None) -> list[float]:
        tc.manual_seed(1)
        model = CausalLM.from_pretrained(LLAMA, dtype="f32", quantize=quantize)
        adapter = model.add_adapter(ALL_LINEAR)
        optimizer = tc.optim.AdamW(adapter.parameters(), lr=1e-2)
        ids = tc.tensor(np.arange(48).reshape(2, 24) * 7 % 100)
        found = []
        for _ in range(12):
            loss = model.loss(ids, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    expected = losses(None)
    assert expected[-1] < 0.9 * expected[0]
    for format, tolerance in (("int8", 0.01), ("fp8", 0.02), ("nf4", 0.05)):
        np.testing.assert_allclose(losses(format), expected, rtol=tolerance)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_embedding_and_head_are_quantized_to_int8(
    name: str, format: str, checkpointing: str, tmp_path: Path
) -> None:
    """Losses, logits and gradients are near those of a model with the dequantized values."""
    folder = GOLDEN / "llm" / name
    original = CausalLM.from_pretrained(folder, dtype="f32").named_tensors()
    model = CausalLM.from_pretrained(folder, dtype="f32", quantize=format)
    model.save_pretrained(tmp_path)
    plain = CausalLM.from_pretrained(tmp_path, dtype="f32")
    tables = [key for key in original if key in {"model.embed_tokens.weight", "lm_head.weight"}]
    # qwen3's head is its embedding.
    assert len(tables) == (2 if name == "llama" else 1)
    for key in tables:
        # The embedding and the head are int8 whichever format the other layers have.
        expected = tc.quantize(original[key], "int8").dequantize().numpy()
        np.testing.assert_array_equal(plain.named_tensors()[key].numpy(), expected)
    ids = tc.tensor(np.arange(48).reshape(2, 24) * 7 % 100)
    results = []
    for each in (model, plain):
        tc.manual_seed(0)
        if checkpointing != "none":
            each.enable_gradient_checkpointing(checkpointing)
        adapter = each.add_adapter(ALL_LINEAR)
        for var in adapter.parameters():
            var.set(tc.randn(var.shape) * 0.05)
        loss = each.loss(ids, ids)
        gradients = tc.grad(loss, adapter.parameters())
        results.append([loss.numpy(), each(ids).numpy(), *(g.numpy() for g in gradients)])
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_facts_of_a_language_model_give_its_bytes_after_quantization() -> None:
    (facts,) = tc.inspect(LLAMA).parts.values()
    in_blocks = list(facts.layers.values())
    tables = [facts.tensors[f"{key}.weight"] for key in ("model.embed_tokens", "lm_head")]
    # The bytes in bf16 of all weights that are quantized.
    in_bf16 = sum(2 * rows * columns for rows, columns in (*in_blocks, *tables))
    quantized_bytes = sum(tc.quantize(tc.zeros(shape), "nf4").nbytes for shape in in_blocks)
    quantized_bytes += sum(tc.quantize(tc.zeros(shape), "int8").nbytes for shape in tables)
    assert facts.weight_bytes("bf16", "nf4") == 2 * facts.elements - in_bf16 + quantized_bytes


@pytest.mark.parametrize("format", FORMATS)
def test_facts_of_a_transformer_give_its_bytes_after_quantization(format: str) -> None:
    folder = FAMILIES["flux"].transformer
    (facts,) = tc.inspect(folder).parts.values()
    assert facts.weight_bytes("bf16") == 2 * facts.elements
    blocks = {name: shape for name, shape in facts.layers.items() if "transformer_blocks." in name}
    in_bf16 = sum(2 * rows * columns for rows, columns in blocks.values())
    quantized_bytes = sum(tc.quantize(tc.zeros(shape), format).nbytes for shape in blocks.values())
    assert facts.weight_bytes("bf16", format) == 2 * facts.elements - in_bf16 + quantized_bytes


def saved_unet(folder: Path) -> SDXLUNet:
    """Save a tiny UNet with random weights in bf16 in `folder` / "model", and return it."""
    config = json.loads((GOLDEN / "sdxl" / "unet" / "config.json").read_text())
    # With W8A8, linear layers multiply 8-bit codes of the weights and of the inputs. This needs
    # sizes that are multiples of 16, as the widths 16 and 48 of the last two levels, which have the
    # transformer blocks. Such layers also keep their codes transposed, for the gradients of inputs.
    config |= {"block_out_channels": [8, 16, 48]}
    (folder / "config.json").write_text(json.dumps(config))
    unet = SDXLUNet.from_config(folder / "config.json", "bf16")
    unet.save_pretrained(folder / "model")
    return unet


def loaded_with_w8a8(folder: Path, format: str) -> tuple[SDXLUNet, int]:
    """Load the UNet of `folder` with W8A8, and also return the estimate of its weights' bytes."""
    (facts,) = tc.inspect(folder).parts.values()
    tc.set_w8a8(True)
    try:
        unet = SDXLUNet.from_pretrained(folder, "bf16", quantize=format)
        return unet, facts.weight_bytes("bf16", format)
    finally:
        tc.set_w8a8(False)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_with_w8a8_only_feed_forward_networks_of_the_unet_are_quantized(
    format: str, tmp_path: Path
) -> None:
    """Quantizing smaller layers would not save time. The networks also keep transposed codes."""
    plain = saved_unet(tmp_path)
    (facts,) = tc.inspect(tmp_path / "model").parts.values()
    networks = {name: shape for name, shape in facts.layers.items() if ".ff.net." in name}
    assert 0 < len(networks) < len(facts.layers)
    expected = {key: value.to("f32").numpy() for key, value in plain.named_tensors().items()}
    unquantized = 2 * facts.elements - sum(
        2 * rows * columns for rows, columns in networks.values()
    )
    model, found = loaded_with_w8a8(tmp_path / "model", format)
    codes = [tc.quantize(tc.zeros(shape), format).nbytes for shape in networks.values()]
    # Transposed codes take one byte for each element, and each column has a scale in f32.
    transposed = [rows * columns + 4 * columns for rows, columns in networks.values()]
    assert found == unquantized + sum(codes) + sum(transposed)
    for key, value in model.named_tensors().items():
        is_equal = np.array_equal(value.to("f32").numpy(), expected[key])
        assert is_equal == (key.removesuffix(".weight") not in networks), key


def test_w8a8_does_not_change_the_bytes_of_a_unet_in_nf4(tmp_path: Path) -> None:
    saved_unet(tmp_path)
    (facts,) = tc.inspect(tmp_path / "model").parts.values()
    _, found = loaded_with_w8a8(tmp_path / "model", "nf4")
    assert found == facts.weight_bytes("bf16", "nf4")


def test_models_without_quantizable_layers_and_unknown_formats_are_errors() -> None:
    with pytest.raises(tc.errors.ArgumentError, match="no layers that may be quantized"):
        AutoencoderKL.from_pretrained(GOLDEN / "sdxl" / "vae", quantize="nf4")
    with pytest.raises(tc.errors.ArgumentError, match="int8, fp8, nf4"):
        CausalLM.from_pretrained(LLAMA, quantize="nf5")
