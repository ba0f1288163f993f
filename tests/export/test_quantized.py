"""`merge --to` writes quantized folders that transformers and this package load."""

import json
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.cli import main
from trainable_candle.demo import words
from trainable_candle.families.causal_lm import BUILT_IN
from trainable_candle.models import CausalLM
from trainable_candle.nn.functional import fake_quantize

# `make_adapter` writes an adapter with random weights, and returns the logits (`scores`) of the
# model with the adapter. The fixture `weights` is the folder of a tiny model.
from .test_export import into_shards, make_adapter, scores, weights  # noqa: F401 - a fixture

# The end of the names of the weights of the blocks' linear layers.
LINEAR = "_proj.weight"


def merged(base: Path, adapter: Path, output: Path, *flags: str) -> int:
    """Run `merge`; return its exit status."""
    given = ["merge", "--model", "causal-lm", "--weights", str(base), "--adapter", str(adapter)]
    return main([*given, "--output", str(output), *flags])


def rounded(folder: Path, to: str) -> dict[str, np.ndarray]:
    """Return the weights of a folder by name; round those of the blocks' linear layers.

    Rounding quantizes to the format `to`, and dequantizes.
    """
    return {
        key: (fake_quantize(weight, to) if key.endswith(LINEAR) else weight).numpy()
        for key, weight in CausalLM.from_pretrained(folder, dtype="f32").named_tensors().items()
    }


@pytest.mark.parametrize("to", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
def test_the_folder_holds_the_rounded_merged_weights(
    weights: Path,  # noqa: F811
    tmp_path: Path,
    sharded: bool,
    to: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if sharded:
        into_shards(weights)
    make_adapter(weights, adapter := tmp_path / "a.safetensors")
    assert merged(weights, adapter, tmp_path / "plain", "--dtype", "f32") == 0
    assert merged(weights, adapter, tmp_path / to, "--dtype", "f32", "--to", to) == 0
    assert f"layers in {to}: relative error of their weights" in capsys.readouterr().out
    expected = rounded(tmp_path / "plain", to)
    model = CausalLM.from_pretrained(tmp_path / to, dtype="f32")
    found = model.named_tensors()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key].numpy(), value, rtol=1e-6, err_msg=key)


@pytest.mark.parametrize("to", ["int8", "fp8"])
def test_a_folder_loaded_in_its_own_format_is_not_rounded_again(
    weights: Path,  # noqa: F811
    tmp_path: Path,
    to: str,
) -> None:
    """The logits equal those of a model that rounds the dequantized weights of the same folder.

    Rounding the dequantized weights gives their codes again.
    """
    make_adapter(weights, adapter := tmp_path / "a.safetensors")
    assert merged(weights, adapter, tmp_path / to, "--dtype", "f32", "--to", to) == 0
    values = CausalLM.from_pretrained(tmp_path / to, dtype="f32").named_tensors()
    (dequantized := tmp_path / "dequantized").mkdir()
    config = json.loads((tmp_path / to / "config.json").read_text())
    config.pop("quantization_config")
    (dequantized / "config.json").write_text(json.dumps(config))
    tc.save_file(values, dequantized / "model.safetensors")
    # In both models, `quantize` also rounds the embedding and the head to int8.
    stored, requantized = (
        CausalLM.from_pretrained(folder, dtype="f32", quantize=to)
        for folder in (tmp_path / to, dequantized)
    )
    np.testing.assert_allclose(scores(stored), scores(requantized), rtol=1e-5, atol=1e-5)


def loaded_by_transformers(folder: Path) -> dict[str, np.ndarray]:
    """Load a folder in transformers; return its quantized weights, dequantized, by name."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    found = {}
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if type(layer).__name__ == "Linear4bit":
            functional = pytest.importorskip("bitsandbytes").functional
            found[name] = functional.dequantize_4bit(weight.data, weight.quant_state).float()
        elif type(layer).__name__ == "Linear8bitLt":
            # The largest absolute value of each row, which the code 127 stands for.
            scales = weight.SCB if weight.SCB is not None else layer.state.SCB
            found[name] = weight.data.float() * scales[:, None] / 127
        elif hasattr(layer, "quantization_scheme"):  # a layer of compressed_tensors
            found[name] = weight.float() * getattr(layer, "weight_scale", 1)
    return {f"{name}.weight": values.detach().numpy() for name, values in found.items()}


@pytest.mark.parametrize(
    ("to", "library"),
    [("nf4", "bitsandbytes"), ("int8", "bitsandbytes"), ("fp8", "compressed_tensors")],
)
def test_transformers_loads_the_same_weights(
    weights: Path,  # noqa: F811
    tmp_path: Path,
    to: str,
    library: str,
) -> None:
    pytest.importorskip(library)
    make_adapter(weights, adapter := tmp_path / "a.safetensors")
    assert merged(weights, adapter, tmp_path / to, "--dtype", "f32", "--to", to) == 0
    found = loaded_by_transformers(tmp_path / to)
    assert merged(weights, adapter, tmp_path / "plain", "--dtype", "f32") == 0
    expected = rounded(tmp_path / "plain", to)
    assert found.keys() == {key for key in expected if key.endswith(LINEAR)}
    for key, values in found.items():
        np.testing.assert_allclose(values, expected[key], rtol=1e-6, atol=1e-9, err_msg=key)


def test_merging_stores_the_weights_that_qat_computed_with(tmp_path: Path) -> None:
    """The merged NF4 folder gives the logits that the model had during training."""
    model = CausalLM.from_pretrained(BUILT_IN, dtype="f32")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter = model.add_adapter(
        tc.LoraConfig(r=2, lora_alpha=4.0, target_modules=targets, qat="nf4")
    )
    tc.manual_seed(1)
    for var in adapter.parameters():
        var.set(tc.randn(var.shape) * 0.05)
    adapter.save(tmp_path / "a.safetensors", format="peft")
    flags = ("--to", "nf4", "--dtype", "f32")
    assert merged(BUILT_IN, tmp_path / "a.safetensors", tmp_path / "o", *flags) == 0
    found, expected = scores(CausalLM.from_pretrained(tmp_path / "o", dtype="f32")), scores(model)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_the_losses_before_and_after_rounding_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The built-in model has learned to answer such chats. With so small an alpha, the adapter
    # hardly changes the model, so its loss stays low.
    make_adapter(BUILT_IN, tmp_path / "a.safetensors", r=1, lora_alpha=0.1)
    data = tmp_path / "chats.jsonl"
    rows = [{"messages": words.chat("upper", word)} for word in ("clavo", "drenda", "spok")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--to", "nf4", "--dataset", str(data))
    assert merged(BUILT_IN, tmp_path / "a.safetensors", tmp_path / "o", *flags) == 0
    # The line is `loss: adapter not merged 1.2345, merged and quantized 1.3456`.
    line = capsys.readouterr().out.partition("loss: ")[2].partition("\n")[0]
    before, after = (float(part.split()[-1]) for part in line.split(","))
    # Rounding raises the loss; the 5 is only a loose bound.
    assert before < after < before + 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to", "int4"], "--to is int4, expected one of nf4, int8, fp8"),
        (["--dataset", "d"], "--dataset has no effect without --to"),
        (["--resolution", "64"], "--resolution has no effect without --dataset of images"),
        (["--max-side", "8"], "--max-side has no effect without --dataset of images"),
        (["--to", "int8", "--max-side", "8"], "--max-side has no effect without --dataset of"),
    ],
    ids=["format", "dataset", "resolution", "max side", "max side and format"],
)
def test_wrong_flags_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    make_adapter(BUILT_IN, tmp_path / "a.safetensors")
    assert merged(BUILT_IN, tmp_path / "a.safetensors", tmp_path / "o", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("o.safetensors", "language models are written as folders: give the name of a new folder"),
        ("o.gguf", "give the name of a new folder, and see export --gguf"),
        ("full", "which exists; expected a new or an empty folder"),
    ],
    ids=["safetensors", "gguf", "full folder"],
)
def test_wrong_outputs_are_errors_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    missing = tmp_path / "missing.safetensors"
    # The adapter and the data set do not exist. Reading them would raise other errors.
    flags = ("--to", "int8", "--dataset", str(tmp_path / "missing"))
    assert merged(BUILT_IN, missing, tmp_path / name, *flags) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def quantized(base: Path, output: Path, to: str) -> Path:
    """Quantize a model without an adapter; return the new folder."""
    given = ["merge", "--model", "causal-lm", "--weights", str(base), "--output", str(output)]
    assert main([*given, "--dtype", "f32", "--to", to]) == 0
    return output


@pytest.mark.parametrize("to", ["nf4", "int8", "fp8"])
def test_a_model_is_quantized_without_an_adapter(
    weights: Path,  # noqa: F811
    tmp_path: Path,
    to: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The new folder has the rounded weights and names their format."""
    folder = quantized(weights, tmp_path / to, to)
    assert f"quantized model: {folder}" in capsys.readouterr().out
    found = CausalLM.from_pretrained(folder, dtype="f32").named_tensors()
    for key, value in rounded(weights, to).items():
        np.testing.assert_allclose(found[key].numpy(), value, rtol=1e-6, err_msg=key)
    facts = tc.inspect(folder).parts[""]  # a language model has one part, without a name
    assert facts.stored_format == to
    assert tc.inspect(weights).parts[""].stored_format is None


@pytest.mark.parametrize("to", ["nf4", "int8", "fp8"])
def test_merging_an_adapter_into_a_quantized_folder_writes_unquantized_weights(
    weights: Path,  # noqa: F811
    tmp_path: Path,
    to: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = quantized(weights, tmp_path / to, to)
    expected_scores = make_adapter(folder, adapter := tmp_path / "a.safetensors")
    assert merged(folder, adapter, tmp_path / "merged") == 0
    assert f"note: the base was dequantized from {to}; the merged" in capsys.readouterr().out
    # With this entry, transformers would take the merged weights for quantized ones.
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    stored = tc.load_file(tmp_path / "merged" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in stored.values()} <= {"f32", "bf16"}
    # Without --dtype, the merged weights may be rounded to bf16; with f32, the logits are the same.
    assert merged(folder, adapter, tmp_path / "exact", "--dtype", "f32") == 0
    found = scores(CausalLM.from_pretrained(tmp_path / "exact", dtype="f32"))
    np.testing.assert_allclose(found, expected_scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flags", [[], ["--gguf", "q8_0"]], ids=["safetensors", "gguf"])
@pytest.mark.parametrize("to", ["nf4", "int8", "fp8"])
def test_a_model_over_a_quantized_folder_is_not_exported(
    weights: Path,  # noqa: F811
    tmp_path: Path,
    to: str,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = quantized(weights, tmp_path / to, to)
    make_adapter(folder, adapter := tmp_path / "a.safetensors")
    given = ["export", "--weights", str(folder), "--adapter", str(adapter), "--for", "merged"]
    assert main([*given, "--output", str(tmp_path / "exported"), *flags]) == 2
    assert "are quantized (quantization_config" in capsys.readouterr().err
