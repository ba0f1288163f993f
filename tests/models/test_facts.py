"""`tc.inspect` reads from the headers of files what loaded models have, and finds damaged files.

Its result, the facts, has the model's name and a description of each part of the pipeline.
"""

import shutil
from pathlib import Path

import pytest

import trainable_candle as tc
from trainable_candle import models

from .conftest import GOLDEN

PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")


@pytest.mark.parametrize("name", PARTS)
def test_facts_of_a_pipeline_equal_those_of_its_models(single_file: Path, name: str) -> None:
    # A pipeline in folders (a tiny SDXL), and the same models in one file.
    for path in (GOLDEN, single_file):
        facts = tc.inspect(path)
        assert (facts.model, tuple(sorted(facts.parts))) == ("sdxl", tuple(sorted(PARTS)))
        part = facts.parts[name]
        model = models.load(GOLDEN, subfolder=name)
        assert type(model).__name__ == part.class_name
        tensors = {key: list(tensor.shape) for key, tensor in model.named_tensors().items()}
        assert part.tensors == tensors
        # `elements` is the number of all values.
        assert part.elements == sum(tc.zeros(tuple(shape)).numel() for shape in tensors.values())
        assert part.dtype == "bf16"
        # `layers` has the layers that can have adapters, with the shapes of their weights.
        assert (
            part.layers.items()
            <= {key.removesuffix(".weight"): shape for key, shape in tensors.items()}.items()
        )


def test_folders_of_one_model_are_inspected_and_wrong_model_names_are_rejected(
    tmp_path: Path,
) -> None:
    unet_facts = tc.inspect(GOLDEN / "unet")
    assert (unet_facts.model, list(unet_facts.parts)) == ("sdxl", ["unet"])
    folder = tmp_path / "digits"
    models.DigitsTransformer().save_pretrained(folder)
    digits_facts = tc.inspect(folder)
    # The pipeline of the digits is a single model, whose part has no folder of its own.
    assert (digits_facts.model, list(digits_facts.parts)) == ("digits", [""])
    assert digits_facts.resolution == 8
    with pytest.raises(tc.WeightsFormatError, match="it has no folder unet, vae, text_encoder"):
        tc.inspect(folder, model="sdxl")
    with pytest.raises(tc.ConfigError, match='no model "sdxll"; expected "sdxl", "flux"'):
        tc.inspect(GOLDEN, model="sdxll")


def test_select_and_plan_agree_with_the_adapter_of_a_model() -> None:
    model = models.load(GOLDEN)  # without `subfolder`: the UNet
    layers = tc.inspect(GOLDEN).parts["unet"].layers
    config = tc.LoraConfig(r=4, target_modules=["to_(q|k)"], rank_pattern={"to_k": 2})
    selected = config.select(layers)
    parameters = model.add_adapter(config).named_parameters()
    assert {f"{name}.lora_A.weight": rank for name, rank in selected.items()} == {
        name: var.shape[0] for name, var in parameters.items() if name.endswith("lora_A.weight")
    }
    assert set(selected.values()) == {2, 4}
    # The number of trained parameters, and the bytes of the optimizer's state.
    count, state_bytes = config.plan(layers, "adamw")
    assert count == sum(var.numel() for var in parameters.values())
    # AdamW keeps two values in f32 for each parameter.
    assert state_bytes == 2 * 4 * count
    with pytest.raises(tc.ConfigError, match='there is no optimizer "adamx"'):
        config.plan(layers, "adamx")


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A copy of the golden SDXL pipeline's model folders, without a `model_index.json`."""
    for name in PARTS:
        shutil.copytree(GOLDEN / name, tmp_path / "pipeline" / name)
    return tmp_path / "pipeline"


def write_index(pipeline: Path, text: str) -> None:
    (pipeline / "model_index.json").write_text(text)


def test_a_damaged_pipeline_says_what_is_damaged(pipeline: Path) -> None:
    write_index(pipeline, '{"_class_name": "StableDiffusionXLPipeline"}')
    assert sorted(tc.inspect(pipeline).parts) == sorted(PARTS)
    weights = next((pipeline / "vae").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])  # ends inside the header
    with pytest.raises(tc.WeightsFormatError, match=f"vae/{weights.name}"):
        tc.inspect(pipeline)
    shutil.rmtree(pipeline / "vae")
    with pytest.raises(tc.WeightsFormatError, match="not a model of SDXL: it has no folder vae"):
        tc.inspect(pipeline)


def test_an_index_of_an_unknown_pipeline_leaves_the_unet_and_a_damaged_index_is_an_error(
    pipeline: Path,
) -> None:
    shutil.rmtree(pipeline / "vae")
    write_index(pipeline, '{"_class_name": "SomethingElse"}')
    # No known pipeline has all of its parts here, so the folder counts as a single model.
    assert list(tc.inspect(pipeline).parts) == ["unet"]
    write_index(pipeline, '{"_class_name": ')
    with pytest.raises(tc.ConfigError, match=r"model_index\.json: EOF"):
        tc.inspect(pipeline)
