"""Loading and saving models: folders, shards, variants, original checkpoints, the hub."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.compressed import model_folder
from tests.peak_memory import READS_PROC, growth

import trainable_candle as tc
from trainable_candle import models
from trainable_candle.models import AutoencoderKL, CLIPTextModel, Model, SDXLUNet

from .conftest import GOLDEN, weights_of

PARTS = {
    "unet": SDXLUNet,
    "vae": AutoencoderKL,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": CLIPTextModel,
}


def assert_same(found: Model, expected: Model) -> None:
    """Assert that two models are of the same kind and have the same parameters, bit for bit."""
    assert type(found) is type(expected)
    found_tensors, expected_tensors = found.named_tensors(), expected.named_tensors()
    assert found_tensors.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        assert found_tensors[name].dtype == tensor.dtype, name
        found_values = found_tensors[name].to("f32").numpy()
        np.testing.assert_array_equal(found_values, tensor.to("f32").numpy(), err_msg=name)


def from_folder(name: str) -> Model:
    return PARTS[name].from_pretrained(GOLDEN / name)


@pytest.fixture
def unet_folder(tmp_path: Path) -> Path:
    """A copy of the UNet's folder."""
    shutil.copytree(GOLDEN / "unet", tmp_path / "unet")
    return tmp_path / "unet"


@pytest.mark.parametrize("name", PARTS)
def test_a_pipeline_folder_and_a_checkpoint_hold_the_same_models(
    single_file: Path, name: str
) -> None:
    expected = from_folder(name)
    for path in (GOLDEN, single_file):
        assert_same(PARTS[name].from_pretrained(path, subfolder=name), expected)
        assert_same(models.load(path, subfolder=name), expected)


def test_without_a_name_the_part_to_fine_tune_is_loaded(single_file: Path) -> None:
    assert_same(models.load(GOLDEN), from_folder("unet"))
    assert_same(models.load(single_file), from_folder("unet"))
    assert_same(CLIPTextModel.from_pretrained(single_file), from_folder("text_encoder"))


@pytest.mark.parametrize(
    ("family", "kind"), [("flux", models.FluxTransformer), ("flux2", models.Flux2Transformer)]
)
def test_from_a_pipeline_load_takes_the_transformer(
    tmp_path: Path, family: str, kind: type
) -> None:
    for part in ("transformer", "vae"):
        shutil.copytree(model_folder(GOLDEN.parent / family / part), tmp_path / part)
    assert isinstance(models.load(tmp_path), kind)


def test_a_checkpoint_takes_its_configuration_from_an_argument_or_from_beside_it(
    single_file: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone.safetensors"
    shutil.copy(single_file, alone)
    with pytest.raises(
        tc.ConfigError, match=r"do not determine the number of attention heads; give config="
    ):
        SDXLUNet.from_pretrained(alone)
    for config in (GOLDEN, GOLDEN / "unet", GOLDEN / "unet" / "config.json"):
        assert_same(SDXLUNet.from_pretrained(alone, config=config), from_folder("unet"))
    # The shapes of the autoencoder's tensors show neither the number of groups of its norms nor
    # the scale of its latents. The loader reads both from the configuration beside the file.
    shutil.copytree(GOLDEN / "vae", tmp_path / "vae")
    assert_same(AutoencoderKL.from_pretrained(alone), from_folder("vae"))
    # The loader ignores a configuration beside the file if its sizes do not fit the tensors: the
    # configuration belongs to another model.
    (tmp_path / "unet").mkdir()
    other = json.loads((GOLDEN / "unet" / "config.json").read_text())
    other["block_out_channels"] = [8, 16, 24]
    (tmp_path / "unet" / "config.json").write_text(json.dumps(other))
    with pytest.raises(tc.ConfigError, match="give config="):
        SDXLUNet.from_pretrained(alone)


def test_shards_are_loaded_as_one_model_and_a_missing_one_is_an_error(unet_folder: Path) -> None:
    tensors = weights_of("unet")
    names = sorted(tensors)
    shards = {
        f"diffusion_pytorch_model-0000{i}-of-00003.safetensors": names[i::3] for i in range(3)
    }
    for shard, held in shards.items():
        tc.save_file({name: tensors[name] for name in held}, unet_folder / shard)
    (unet_folder / "diffusion_pytorch_model.safetensors").unlink()
    assert_same(SDXLUNet.from_pretrained(unet_folder), from_folder("unet"))

    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (unet_folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    # The loader ignores files that the index does not list, such as those of another download.
    tc.save_file(tensors, unet_folder / "diffusion_pytorch_model-00001-of-00001.safetensors")
    assert_same(SDXLUNet.from_pretrained(unet_folder), from_folder("unet"))
    missing = unet_folder / next(iter(shards))
    missing.unlink()
    with pytest.raises(tc.WeightsFormatError, match=f"the shard .*{missing.name} is missing"):
        SDXLUNet.from_pretrained(unet_folder)


def test_half_precision_files_are_read_if_alone_or_requested(unet_folder: Path) -> None:
    plain, half = (unet_folder / f"diffusion_pytorch_model{v}.safetensors" for v in ("", ".fp16"))
    tc.save_file({name: tensor.to("f16") for name, tensor in weights_of("unet").items()}, half)
    # The file without the suffix has bf16.
    assert SDXLUNet.from_pretrained(unet_folder).dtype == "bf16"
    plain.rename(unet_folder / "elsewhere.safetensors")
    assert SDXLUNet.from_pretrained(unet_folder).dtype == "f16"
    assert SDXLUNet.from_pretrained(unet_folder, dtype="f32").dtype == "f32"
    # If both files exist, a request for f16 reads only the `.fp16` file. The other file is empty
    # here, so that reading it fails.
    plain.write_bytes(b"")
    assert SDXLUNet.from_pretrained(unet_folder, dtype="f16").dtype == "f16"
    with pytest.raises(tc.WeightsFormatError, match="only 0 bytes"):
        SDXLUNet.from_pretrained(unet_folder, dtype="f32")


def test_files_of_mixed_dtypes_make_models_of_one_dtype(unet_folder: Path) -> None:
    tensors = weights_of("unet")
    # All golden tensors are in bf16. Here vectors are in f32.
    mixed = {name: t.to("f32") if t.ndim == 1 else t for name, t in tensors.items()}
    tc.save_file(mixed, unet_folder / "diffusion_pytorch_model.safetensors")
    assert_same(SDXLUNet.from_pretrained(unet_folder), from_folder("unet"))


def test_text_encoders_load_with_and_without_the_prefix_of_the_names(tmp_path: Path) -> None:
    for name in ("text_encoder", "text_encoder_2"):
        shutil.copytree(GOLDEN / name, tmp_path / name)
        tensors = weights_of(name)
        for prefix in ("", "text_model."):
            renamed = {}
            for key, tensor in tensors.items():
                bare = key.removeprefix("text_model.")
                renamed[bare if bare.startswith("text_projection") else prefix + bare] = tensor
            # Older files also have the positions 0 to 16, which are no parameter.
            renamed[f"{prefix}embeddings.position_ids"] = tc.tensor(np.arange(17)[None])
            tc.save_file(renamed, tmp_path / name / "model.safetensors")
            assert_same(CLIPTextModel.from_pretrained(tmp_path / name), from_folder(name))


def test_autoencoders_load_with_the_older_names_of_their_attention(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "vae", tmp_path / "vae")
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {}
    for key, tensor in weights_of("vae").items():
        old_key = key
        for new, old in older.items():
            old_key = old_key.replace(f".{new}.", f".{old}.")
        renamed[old_key] = tensor
    tc.save_file(renamed, tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    assert_same(AutoencoderKL.from_pretrained(tmp_path / "vae"), from_folder("vae"))


def test_missing_and_unexpected_tensors_are_reported(unet_folder: Path) -> None:
    tensors = weights_of("unet")
    lost = tensors.pop("mid_block.attentions.0.proj_in.weight")
    tensors["mid_block.attentions.0.proj_inn.weight"] = lost
    tc.save_file(tensors, unet_folder / "diffusion_pytorch_model.safetensors")
    with pytest.raises(
        tc.ConfigError,
        match=r"missing mid_block\.attentions\.0\.proj_in\.weight; unexpected .*proj_inn\.weight",
    ):
        SDXLUNet.from_pretrained(unet_folder)


def test_another_models_files_are_rejected(single_file: Path, tmp_path: Path) -> None:
    with pytest.raises(tc.ConfigError, match='a "AutoencoderKL", expected "UNet2DConditionModel"'):
        SDXLUNet.from_pretrained(GOLDEN / "vae")
    config = json.loads((GOLDEN / "unet" / "config.json").read_text())
    config["block_out_channels"] = [8, 16, 24]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(tc.ConfigError, match="the model's configuration expects"):
        SDXLUNet.from_pretrained(single_file, config=tmp_path / "config.json")
    lora = tmp_path / "elsewhere" / "lora.safetensors"
    lora.parent.mkdir()
    tc.save_file({"lora_unet_down.lora_up.weight": tc.zeros((2, 2))}, lora)
    with pytest.raises(tc.WeightsFormatError, match="the file is an adapter, not a model"):
        models.load(lora)


@pytest.mark.parametrize("name", PARTS)
def test_a_saved_folder_equals_that_of_diffusers_or_transformers(name: str, tmp_path: Path) -> None:
    model = from_folder(name)
    if name == "vae":  # its configuration has `force_upcast`, which makes the weights f32
        model = AutoencoderKL.from_pretrained(GOLDEN / name, force_upcast=False)
    model.save_pretrained(tmp_path / name)
    assert {path.name for path in (tmp_path / name).iterdir()} == {
        path.name for path in (GOLDEN / name).iterdir()
    }
    saved = tc.load_file(next((tmp_path / name).glob("*.safetensors")))
    expected = weights_of(name)
    if name == "text_encoder":  # published files have this prefix in the names of the tensors
        expected = {f"text_model.{key}": tensor for key, tensor in expected.items()}
    assert saved.keys() == expected.keys()
    for key, tensor in expected.items():
        assert saved[key].dtype == "bf16"
        np.testing.assert_array_equal(saved[key].to("f32").numpy(), tensor.to("f32").numpy())
    # Every field of our configuration has the value of the golden folder's configuration.
    ours, theirs = (
        json.loads((folder / name / "config.json").read_text()) for folder in (tmp_path, GOLDEN)
    )
    for key, value in ours.items():
        if name == "text_encoder" and key == "projection_dim":
            continue  # this encoder has no projection, so the field has no effect
        # Fields with one number for all levels of the model are lists in the golden folder.
        is_per_level = isinstance(theirs[key], list) and not isinstance(value, list)
        assert (theirs[key][0] if is_per_level else theirs[key]) == value, key
    assert_same(models.load(tmp_path / name), from_folder(name))


def test_a_merged_adapter_is_saved_in_a_checkpoint(single_file: Path, tmp_path: Path) -> None:
    model = SDXLUNet.from_pretrained(single_file)
    adapter = model.add_adapter(tc.LoraConfig(r=2, target_modules=["to_q"]))
    for var in adapter.parameters():
        var.set(tc.randn(var.shape) * 0.1)
    model.merge_adapter()
    encoder = CLIPTextModel.from_pretrained(single_file, subfolder="text_encoder_2")
    merged = tmp_path / "merged.safetensors"
    models.save_checkpoint(merged, {"unet": model, "text_encoder_2": encoder}, base=single_file)
    before, after = tc.load_file(single_file), tc.load_file(merged)
    assert before.keys() == after.keys()
    changed = set()
    for key, tensor in before.items():
        assert (after[key].shape, after[key].dtype) == (tensor.shape, tensor.dtype), key
        if after[key].to("f32").tolist() != tensor.to("f32").tolist():
            changed.add(key)
    assert changed
    assert all(key.endswith("to_q.weight") for key in changed)
    # Each adapted weight has two factors.
    assert len(changed) == len(adapter.parameters()) // 2


def test_all_parts_are_saved_in_a_checkpoint_of_another_dtype(
    single_file: Path, tmp_path: Path
) -> None:
    parts = {name: PARTS[name].from_pretrained(single_file, subfolder=name) for name in PARTS}
    models.save_checkpoint(tmp_path / "own.safetensors", parts, dtype="f32")
    for name, part in parts.items():
        # The header of the checkpoint holds the configurations of its models.
        reloaded = PARTS[name].from_pretrained(tmp_path / "own.safetensors", subfolder=name)
        assert_same(reloaded, PARTS[name].from_pretrained(GOLDEN, "f32", subfolder=name))
        with pytest.raises(tc.ArgumentError, match='has no place "scheduler"'):
            models.save_checkpoint(tmp_path / "wrong.safetensors", {"scheduler": part})
    with pytest.raises(tc.DTypeError, match="save_checkpoint: dtype is i64, expected one of f32"):
        models.save_checkpoint(tmp_path / "wrong.safetensors", parts, dtype="i64")


# The arguments are the folder of the large model, a folder with a small one, and a dtype. Loading
# the small model starts threads and fills caches, so the measurement does not include them.
SETUP = """
from trainable_candle.models import CLIPTextModel

large, small, dtype = sys.argv[1:]
CLIPTextModel.from_pretrained(small, "f32", subfolder="text_encoder")
"""
LOAD = "model = CLIPTextModel.from_pretrained(large, dtype)"


@READS_PROC
@pytest.mark.parametrize(("dtype", "itemsize"), [("f32", 4), ("bf16", 2)])
def test_loading_takes_at_most_a_tenth_more_memory_than_the_model(
    tmp_path: Path, dtype: str, itemsize: int
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    config = json.loads((GOLDEN / "text_encoder" / "config.json").read_text())
    config |= sizes | {"vocab_size": 49408, "max_position_embeddings": 77}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # Replace each dimension in the shapes of the tiny encoder by the large encoder's dimension.
    widths = {8: 512, 20: 2048, 200: 49408, 17: 77}
    tensors = {}
    for name, tensor in weights_of("text_encoder").items():
        shape = tuple(widths[length] for length in tensor.shape)
        # All 8 layers are made from layer 0 of the tiny encoder; its other layers are left out.
        if "layers.0." in name:
            keys = [name.replace("layers.0.", f"layers.{layer}.") for layer in range(8)]
        else:
            keys = [] if "layers." in name else [name]
        for key in keys:
            tensors[key] = tc.full(shape, 0.5)
    elements = sum(int(np.prod(tensor.shape)) for tensor in tensors.values())
    assert 4 * elements > 190e6  # bytes, so that other memory of the process hardly counts
    tc.save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    found = growth(SETUP, LOAD, str(tmp_path), str(GOLDEN), dtype)
    assert found < 1.1 * itemsize * elements


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot folder of one repository in the hub client's cache. The client is offline."""
    from huggingface_hub import constants

    revision = "0" * 40
    repository = tmp_path / "models--someone--tiny-sdxl"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    snapshot = repository / "snapshots" / revision
    for name in PARTS:
        shutil.copytree(GOLDEN / name, snapshot / name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return snapshot


def test_models_given_by_name_are_read_from_the_cache_of_the_hub(hub_cache: Path) -> None:
    assert_same(SDXLUNet.from_pretrained("someone/tiny-sdxl"), from_folder("unet"))
    assert_same(AutoencoderKL.from_pretrained("someone/tiny-sdxl"), from_folder("vae"))
    encoder = CLIPTextModel.from_pretrained("someone/tiny-sdxl", subfolder="text_encoder_2")
    assert_same(encoder, from_folder("text_encoder_2"))
    assert_same(models.load("someone/tiny-sdxl"), from_folder("unet"))
    # Now the repository has only the autoencoder.
    shutil.rmtree(hub_cache)
    shutil.copytree(GOLDEN / "vae", hub_cache)
    assert_same(AutoencoderKL.from_pretrained("someone/tiny-sdxl"), from_folder("vae"))
    # Of two files, the one without the suffix `.fp16` is read.
    half = {name: tensor.to("f16") for name, tensor in weights_of("vae").items()}
    tc.save_file(half, hub_cache / "diffusion_pytorch_model.fp16.safetensors")
    assert AutoencoderKL.from_pretrained("someone/tiny-sdxl", force_upcast=False).dtype == "bf16"
    (hub_cache / "diffusion_pytorch_model.safetensors").unlink()
    assert AutoencoderKL.from_pretrained("someone/tiny-sdxl", force_upcast=False).dtype == "f16"


def test_names_without_files_on_the_hub_or_the_disk_are_reported_as_missing(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(tc.MissingFileError, match="someone/other: there is no such file or folder"):
        SDXLUNet.from_pretrained("someone/other")
    for weights in hub_cache.glob("*/*.safetensors"):
        weights.unlink()
    with pytest.raises(tc.MissingFileError, match="unet/ has no safetensors weights"):
        SDXLUNet.from_pretrained("someone/tiny-sdxl")
    # None in `sys.modules` makes the import fail, as if the package were not installed.
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="pip install huggingface_hub"):
        SDXLUNet.from_pretrained("someone/tiny-sdxl")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        SDXLUNet.from_pretrained("/nowhere/at/all")
