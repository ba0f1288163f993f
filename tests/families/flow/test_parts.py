"""Weights in separate files: a transformer, an autoencoder, text encoders; and in shards."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.errors import MissingFileError, WeightsFormatError
from trainable_candle.export.gguf_file import Entry
from trainable_candle.export.gguf_file import write as write_gguf
from trainable_candle.tasks.latent import SampleOptions
from trainable_candle.train import TrainConfig

# The text encoders of families that have more than one.
ENCODERS = {"sd3": ("text_encoder", "text_encoder_2", "text_encoder_3"),
            "flux": ("text_encoder", "text_encoder_2")}  # fmt: skip
FAMILIES = ("sd3", "flux", "chroma", "zimage", "flux2", "qwen-image")


def copy_part(base: Path, part: str, path: Path) -> Path:
    """Copy a part's weights to `path`, and its configuration into a folder `part` beside `path`."""
    (weights,) = (base / part).glob("*.safetensors")
    shutil.copy(weights, path)
    (path.parent / part).mkdir()
    shutil.copy(base / part / "config.json", path.parent / part)
    return path


@pytest.fixture(params=FAMILIES)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Path, TrainConfig]:
    """A family's name, its pipeline's folder, a file with the transformer, and settings.

    The tensors in the file have their original names, not those of diffusers. The settings name the
    files of the autoencoder and of the text encoders.
    """
    name = request.param
    base = request.getfixturevalue(f"{name.replace('-', '_')}_base")
    weights = tmp_path / "transformer.safetensors"
    transformer = tc.models.load(base / "transformer")
    tc.models.save_checkpoint(weights, {"transformer": transformer})
    vae = tmp_path / "ae.safetensors"
    tc.models.save_checkpoint(vae, {"vae": tc.models.load(base, subfolder="vae")})
    parts = ENCODERS.get(name, ("text_encoder",))
    encoders = [str(copy_part(base, part, tmp_path / f"{part}.safetensors")) for part in parts]
    # The autoencoder needs its configuration: the shapes of its tensors do not show how many groups
    # its normalization has.
    (tmp_path / "vae").mkdir()
    shutil.copy(base / "vae" / "config.json", tmp_path / "vae")
    for tokenizer in base.glob("tokenizer*"):
        shutil.copytree(tokenizer, tmp_path / tokenizer.name)
    # Put the last text encoder first: the order of encoders of different kinds does not matter.
    config = TrainConfig(text_encoder=[encoders[-1], *encoders[:-1]], vae=str(vae))
    return name, base, weights, config


def test_each_part_is_found_in_its_file(
    files: tuple[str, Path, Path, TrainConfig],
) -> None:
    name, base, weights, config = files
    found = tc.inspect(weights, name, [*config.text_encoder, config.vae])
    expected = tc.inspect(base, name)
    assert found.parts.keys() == expected.parts.keys()
    for part, facts in expected.parts.items():
        assert found.parts[part].tensors == facts.tensors, part
    for field in ("scaling_factor", "shift_factor", "latent_channels"):
        assert found.parts["vae"].config.get(field) == expected.parts["vae"].config.get(field)
    assert {facts.path.name for facts in found.parts.values()} == {
        "transformer.safetensors", "ae.safetensors", *(Path(p).name for p in config.text_encoder)
    }  # fmt: skip


def test_a_gguf_file_can_hold_the_transformer(
    files: tuple[str, Path, Path, TrainConfig], tmp_path: Path
) -> None:
    name, base, weights, config = files
    tensors = {
        key.removeprefix("model.diffusion_model."): tensor.to("f32")
        for key, tensor in tc.load_file(weights).items()
    }
    path = tmp_path / "transformer.gguf"
    with path.open("wb") as file:
        entries = [Entry(key, tuple(t.shape), "f32", t.clone) for key, t in tensors.items()]
        write_gguf(file, {"general.architecture": name}, entries)
    (tmp_path / "transformer").mkdir()
    shutil.copy(base / "transformer" / "config.json", tmp_path / "transformer")
    found = tc.inspect(path, name, [*config.text_encoder, config.vae])
    assert found.parts["transformer"].tensors == tc.inspect(base, name).parts["transformer"].tensors
    family = families.load(name, path, "f32", "cpu", config).family
    family.require_own()  # raises an error if the weights are not of this family
    expected = tc.models.load(base / "transformer", dtype="f32").named_tensors()
    for key, tensor in tc.models.load(path, dtype="f32").named_tensors().items():
        np.testing.assert_array_equal(tensor.numpy(), expected[key].numpy(), key)


def test_separate_files_give_the_latents_and_images_of_the_pipeline(
    files: tuple[str, Path, Path, TrainConfig],
) -> None:
    name, base, weights, config = files
    separate = families.load(name, weights, "f32", "cpu", config)
    pipeline = families.load(name, base, "f32", "cpu")
    pixels = np.random.default_rng(0).integers(0, 256, (1, 16, 24, 3), dtype=np.uint8)
    latents = [task.family.coder.latents(task.family.coder.encode(pixels), None).numpy()
               for task in (separate, pipeline)]  # fmt: skip
    np.testing.assert_array_equal(*latents)
    # Until the denoiser is loaded, the estimate of memory for drawing (here one image of 32x32 px)
    # includes it, in the format in which it will be loaded.
    needed = separate.family.drawing_bytes((32, 32), 1)
    quantized = families.load(name, weights, "f32", "cpu", config.with_(base_precision="nf4"))
    assert quantized.family.drawing_bytes((32, 32), 1) < needed
    separate.family.model  # noqa: B018 - loads the denoiser
    denoiser = separate.family.facts.bytes("f32", "transformer")
    needed_besides = separate.family.drawing_bytes((32, 32), 1)
    assert needed_besides == needed - denoiser
    assert needed_besides > 0
    options = SampleOptions(steps=1, size=(16, 16))
    if name not in {"sd3", "flux"}:
        # Prompts can be encoded. Chroma's only text encoder is T5, and the tiny T5 has all tokens
        # of the package's T5 tokenizer. The text encoders of the other families are models of Qwen,
        # whose tokenizers the families find beside the encoders.
        np.testing.assert_array_equal(separate.draw(["a"], options), pipeline.draw(["a"], options))
        return
    # Prompts cannot be encoded: with a transformer in a file of its own, the family looks for no
    # CLIP tokenizer, but uses the package's, which has more tokens than the tiny encoder.
    with pytest.raises(WeightsFormatError, match="tokenizer"):
        separate.draw(["a"], options)


def test_missing_parts_missing_files_and_repeated_parts_are_reported(
    files: tuple[str, Path, Path, TrainConfig], tmp_path: Path
) -> None:
    name, _, weights, config = files
    with pytest.raises(WeightsFormatError, match="it has no vae and no text_encoder"):
        families.load(name, weights, "f32", "cpu")
    with pytest.raises(MissingFileError, match="--vae"):
        families.load(name, weights, "f32", "cpu", config.with_(vae=str(tmp_path / "none")))
    # Each file must hold a part that the files before it do not hold.
    twice = config.with_(text_encoder=[config.text_encoder[0]] * 2)
    with pytest.raises(WeightsFormatError, match="that are still missing"):
        families.load(name, weights, "f32", "cpu", twice)


def test_flux_does_not_apply_the_projection_of_a_clip_encoder(
    flux_base: Path, tmp_path: Path
) -> None:
    """Flux needs no projection, but files of CLIP-L that are made for SDXL or SD3 have one."""
    projecting_base = tmp_path / "base"
    shutil.copytree(flux_base, projecting_base)
    encoder = projecting_base / "text_encoder"
    config = json.loads((encoder / "config.json").read_text())
    config |= {"architectures": ["CLIPTextModelWithProjection"], "projection_dim": 24}
    (encoder / "config.json").write_text(json.dumps(config))
    (weights,) = encoder.glob("*.safetensors")
    tc.save_file(tc.load_file(weights) | {"text_projection.weight": tc.randn((24, 24))}, weights)
    captions = ["a red blur", "", "a " * 40]
    plain, projecting = (
        families.load("flux", base, "f32", "cpu").family.features(captions)["pooled_projections"]
        for base in (flux_base, projecting_base)
    )
    assert plain.shape == (3, 24)
    np.testing.assert_array_equal(projecting.numpy(), plain.numpy())


def shard(folder: Path, variant: str) -> None:
    """Split a model's weight file into two shards with an index, named as diffusers names them.

    `variant` is the part of the names by which diffusers marks files of half precision, `.fp16`, or
    empty. The tensors stay as they are.
    """
    (file,) = folder.glob("*.safetensors")
    tensors = tc.load_file(file)
    file.unlink()
    names = sorted(tensors)
    index: dict[str, str] = {}
    for i, keys in enumerate((names[::2], names[1::2]), 1):
        name = f"{file.stem}{variant}-{i:05}-of-00002.safetensors"
        tc.save_file({key: tensors[key] for key in keys}, folder / name)
        index |= dict.fromkeys(keys, name)
    path = folder / f"{file.stem}.safetensors.index{variant}.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.mark.parametrize("variant", ["", ".fp16"], ids=["plain", "fp16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_pipeline_in_shards_draws_the_same_image(
    name: str, variant: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base = request.getfixturevalue(f"{name.replace('-', '_')}_base")
    in_shards = tmp_path / "base"
    shutil.copytree(base, in_shards)
    for part in ("transformer", *ENCODERS.get(name, ("text_encoder",))):
        shard(in_shards / part, variant)
    options = SampleOptions(steps=1, size=(16, 16))
    expected, found = (
        families.load(name, path, "f32", "cpu").draw(["a"], options) for path in (base, in_shards)
    )
    np.testing.assert_array_equal(found, expected)
