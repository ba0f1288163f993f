"""Quantization-aware training that learns factors of the scales, and files with the factors.

The training rounds each adapted weight to codes and scales. It multiplies each scale by a learned
factor, which starts at 1.
"""

from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.cli import main
from trainable_candle.errors import ConfigError, Error
from trainable_candle.families.causal_lm import BUILT_IN
from trainable_candle.files import safetensors_metadata
from trainable_candle.models import CausalLM
from trainable_candle.nn.functional import fake_quantize
from trainable_candle.run import train_adapter
from trainable_candle.settings import TrainConfig

from .test_export import scores
from .test_quantized import merged

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def config(qat: str = "nf4", **settings: object) -> tc.LoraConfig:
    return tc.LoraConfig(r=2, lora_alpha=4.0, target_modules=TARGETS, qat=qat, **settings)


def random_model(qat: str) -> tuple[CausalLM, tc.AdapterSet]:
    """Return a model and its adapter set with random weights and random factors of the scales."""
    model = CausalLM.from_pretrained(BUILT_IN, dtype="f32")
    adapter = model.add_adapter(config(qat, qat_learned_scales=True))
    tc.manual_seed(1)
    # The parameters `qat_scales` are the logarithms of the factors. Files hold the factors.
    for name, var in adapter.named_parameters().items():
        var.set(tc.randn(var.shape) * (0.2 if name.endswith("qat_scales") else 0.05))
    return model, adapter


@pytest.mark.parametrize("qat", ["int8", "int4", "fp8", "nf4"])
def test_learned_factors_do_not_change_the_first_step(qat: str) -> None:
    found = []
    for learned in (False, True):
        model = CausalLM.from_pretrained(BUILT_IN, dtype="f32")
        tc.manual_seed(0)
        adapter = model.add_adapter(config(qat, qat_learned_scales=learned))
        y = model(tc.tensor(np.arange(40).reshape(2, 20)))
        (y * y).sum().backward()
        gradients = {name: var.grad.numpy() for name, var in adapter.named_parameters().items()}
        found.append((y.numpy(), gradients))
    (fixed_y, fixed_gradients), (y, gradients) = found
    np.testing.assert_array_equal(y, fixed_y)
    for name, gradient in fixed_gradients.items():
        np.testing.assert_array_equal(gradients.pop(name), gradient, err_msg=name)
    # Only the gradients of the factors remain.
    assert {name.rpartition(".")[2] for name in gradients} == {"qat_scales"}
    assert all(np.abs(gradient).max() > 0 for gradient in gradients.values())


def test_a_plan_counts_the_factors() -> None:
    _, adapter = random_model("nf4")
    # The only part of a language model has an empty name.
    layers = tc.inspect(BUILT_IN, "causal-lm").parts[""].layers
    count, _state_bytes = config(qat_learned_scales=True).plan(dict(layers), "adamw")
    assert count == sum(var.numel() for var in adapter.parameters())


@pytest.mark.parametrize("qat", ["int8", "nf4"])
def test_a_file_holds_the_factors_but_a_folder_for_peft_lacks_them(
    tmp_path: Path, qat: str
) -> None:
    model, adapter = random_model(qat)
    # As a file, not a folder, even peft's format holds the factors.
    adapter.save(path := tmp_path / "a.safetensors", format="peft")
    factors = {
        key.removeprefix("qat_scales."): value
        for key, value in tc.load_file(path).items()
        if key.startswith("qat_scales.")
    }
    expected = scores(model)
    model.merge_adapter()
    merged_weights = model.named_tensors()
    # A model that learns no factors loads the file as a plain adapter. Its merged weights are not
    # rounded. Rounding them with the factors of the file gives the merged weights of the model that
    # learned the factors.
    plain = CausalLM.from_pretrained(BUILT_IN, dtype="f32")
    plain.load_adapter(path)
    plain.merge_adapter()
    values = plain.named_tensors()
    assert len(factors) == len([key for key in values if "_proj" in key])
    for layer, layer_factors in factors.items():
        found = fake_quantize(values[f"{layer}.weight"], qat, layer_factors).numpy()
        wanted = merged_weights[f"{layer}.weight"].numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    # An adapter set that learns factors also loads those of the file.
    again = CausalLM.from_pretrained(BUILT_IN, dtype="f32")
    again.add_adapter(config(qat, qat_learned_scales=True)).load(path)
    np.testing.assert_allclose(scores(again), expected, rtol=1e-4, atol=1e-4)
    # To a folder, `save` writes the files of peft for other programs. These files lack the factors.
    adapter.save(tmp_path / "peft", format="peft")
    keys = tc.load_file(tmp_path / "peft/adapter_model.safetensors")
    assert not any("qat_scales" in key for key in keys)


@pytest.mark.parametrize("qat", ["int8", "fp8", "nf4"])
def test_merging_stores_the_weights_that_the_training_computed_with(
    tmp_path: Path, qat: str
) -> None:
    model, adapter = random_model(qat)
    # `train-lora` writes these entries, from which `merge` knows how the adapter was trained.
    metadata = {"trainable_candle.qat": qat, "trainable_candle.qat_scales": "learned"}
    adapter.save(tmp_path / "a.safetensors", format="peft", metadata=metadata)
    flags = ("--to", qat, "--dtype", "f32")
    # `merged` runs the command `merge` and returns its exit status.
    assert merged(BUILT_IN, tmp_path / "a.safetensors", tmp_path / "o", *flags) == 0
    model.merge_adapter()
    wanted = model.named_tensors()
    found = CausalLM.from_pretrained(tmp_path / "o", dtype="f32").named_tensors()
    for key, value in wanted.items():
        if "_proj" in key:
            np.testing.assert_allclose(found[key].numpy(), value.numpy(), rtol=2e-6, atol=1e-9)
    # A merge to another number format than the one of the training ignores the factors, and is no
    # error.
    other = "int8" if qat == "nf4" else "nf4"
    flags = ("--to", other, "--dtype", "f32")
    assert merged(BUILT_IN, tmp_path / "a.safetensors", tmp_path / "p", *flags) == 0


def test_a_run_learns_resumes_and_merges_the_factors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "a row of words that are learnt"}\n' * 8)
    settings = TrainConfig(
        model="causal-lm", dataset=str(data), output=str(tmp_path / "full"), steps=4, rank=2,
        batch_size=2, device="cpu", precision="f32", qat="nf4", qat_learned_scales=True,
        learning_rate=1e-2, sequence_length=64, save_every=2,
    )  # fmt: skip
    full = train_adapter(settings, progress=False, report=lambda _: None)
    resumed = settings.with_(resume=str(tmp_path / "full/checkpoint-000002"))
    second = train_adapter(
        resumed.with_(output=str(tmp_path / "resumed")), progress=False, report=lambda _: None
    )
    files = [tc.load_file(run.adapter_path) for run in (full, second)]
    learned = [key for key in files[0] if key.startswith("qat_scales.")]
    assert learned
    for key in learned:
        np.testing.assert_array_equal(files[0][key].numpy(), files[1][key].numpy())
        assert (files[0][key].numpy() != 1).any()
    facts = safetensors_metadata(full.adapter_path)
    assert facts["trainable_candle.qat_scales"] == "learned"
    merging = ["merge", "--model", "causal-lm", "--to", "nf4", "--output", str(tmp_path / "o")]
    assert main([*merging, "--adapter", str(full.output / "peft")]) == 2
    assert "lacks the learned scales" in capsys.readouterr().err
    assert main([*merging, "--adapter", str(full.adapter_path)]) == 0


class OneLayer(tc.nn.Module):
    """A model that is not one of `trainable_candle.models`."""

    def __init__(self) -> None:
        self.fc = tc.nn.Linear.init(16, 8)


def test_settings_and_models_that_cannot_learn_factors_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no effect without qat"):
        tc.LoraConfig(qat_learned_scales=True)
    wanted = tc.LoraConfig(target_modules=["fc"], qat="int8", qat_learned_scales=True)
    with pytest.raises(ConfigError, match=r"is for models of trainable_candle\.models"):
        OneLayer().add_adapter(wanted)
    with pytest.raises(ConfigError, match="merge cannot write int4"):
        TrainConfig(qat="int4", qat_learned_scales=True)
    given = TrainConfig(
        model="digits", dataset=str(tmp_path), output=str(tmp_path), qat="int8",
        qat_learned_scales=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="qat-learned-scales"):
        train_adapter(given, progress=False, report=lambda _: None)


def test_factors_of_a_wrong_sign_or_shape_are_rejected(tmp_path: Path) -> None:
    _, adapter = random_model("int8")
    adapter.save(path := tmp_path / "a.safetensors", format="peft")
    tensors, facts = tc.load_file(path), safetensors_metadata(path)
    key = next(key for key in tensors if key.startswith("qat_scales."))
    for wrong, message in ((-tensors[key], "above 0"), (tensors[key][:-1], "expected")):
        tc.save_file(tensors | {key: wrong}, path, facts)
        with pytest.raises(Error, match=message):
            adapter.load(path)
