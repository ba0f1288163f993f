"""What weights of flow models decide: defaults and notes, and errors for parts that do not fit."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.errors import ConfigError, WeightsFormatError
from trainable_candle.hub import shown_name
from trainable_candle.run import train_adapter
from trainable_candle.tasks.latent import LatentModel, SampleOptions
from trainable_candle.train import TrainConfig

FAMILIES = ("sd3", "flux", "chroma", "zimage", "flux2", "qwen-image")
# The fields for the widths of text features. The families that are missing here have only
# `joint_attention_dim`.
FEATURES = {"zimage": ["cap_feat_dim"], "sd3": ["joint_attention_dim", "pooled_projection_dim"],
            "flux": ["joint_attention_dim", "pooled_projection_dim"]}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_that_do_not_fit_are_reported_by_loading_and_by_checking(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base = request.getfixturevalue(f"{name.replace('-', '_')}_base")
    fields = ("in_channels", *FEATURES.get(name, ["joint_attention_dim"]))
    for field in fields:
        folder = tmp_path / field
        shutil.copytree(base, folder)
        path = folder / "transformer" / "config.json"
        content = json.loads(path.read_text())
        # A transformer predicts as many channels as it reads.
        has_outputs = field == "in_channels" and "out_channels" in content
        outputs = {"out_channels": 2 * content[field]} if has_outputs else {}
        path.write_text(json.dumps(content | outputs | {field: 2 * content[field]}))
        error = "vae: the latents of" if field == "in_channels" else "text_encoder.*: it makes"
        with pytest.raises(ConfigError, match=rf"{error} .*but the transformer reads"):
            families.load(name, folder, "f32", "cpu")
        config = TrainConfig(model=name, weights=str(folder))
        with pytest.raises(ConfigError, match=rf"{error} .*but the transformer reads"):
            families.find(name)(folder, "f32", "cpu", config).task().check(lambda _line: None)


@pytest.mark.parametrize(
    ("name", "plain", "distilled", "steps_and_guidance"),
    [
        ("sd3", "sd3.5_large", "sd3.5_large_turbo", (4, 1.0)),
        ("chroma", "Chroma1-HD", "Chroma1-HD-Flash", (16, 1.0)),
        ("zimage", "z_image_bf16", "z_image_turbo_bf16", (9, 1.0)),
        ("flux2", "flux-2-klein-base-4b", "flux-2-klein-4b", (4, 1.0)),
    ],
)
@pytest.mark.parametrize("place", ["file", "cache"])
def test_distilled_models_draw_in_few_steps_without_guidance_by_default(
    name: str,
    plain: str,
    distilled: str,
    steps_and_guidance: tuple[int, float],
    place: str,
    tmp_path: Path,
) -> None:
    """The name of the file, or of the repository in the cache, shows that a model is distilled."""

    def family(weights: str) -> LatentModel:
        path = tmp_path / f"{weights}.safetensors"
        if place == "cache":
            path = tmp_path / f"models--someone--{weights}" / "snapshots" / "0a1b2c"
            path.mkdir(parents=True)
        return families.find(name)(path, "f32", "cpu", TrainConfig())  # type: ignore[return-value]

    base, fast = family(plain), family(distilled)
    assert fast.drawing_defaults == steps_and_guidance
    assert base.drawing_defaults.steps >= 28
    assert base.drawing_defaults.guidance > 1
    assert base.notes() == []
    assert "undoes its distillation" in fast.notes()[0]


def test_flux_schnell_draws_in_four_steps_and_reads_256_tokens(
    flux_base: Path, tmp_path: Path
) -> None:
    dev = families.load("flux", flux_base, "f32", "cpu").family
    assert (dev.drawing_defaults, dev.text_tokens) == ((28, 3.5), 512)
    folder = tmp_path / "base"
    shutil.copytree(flux_base, folder)
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"guidance_embeds": False}))
    schnell = families.load("flux", folder, "f32", "cpu").family
    assert (schnell.drawing_defaults, schnell.text_tokens) == ((4, 1.0), 256)
    # Without a scheduler's configuration, as with a single file, the shift is 1 as in schnell's
    # published configuration.
    shutil.rmtree(folder / "scheduler")
    schnell = families.load("flux", folder, "f32", "cpu").family
    tokens = 4096  # of an image of 1024x1024 px
    np.testing.assert_allclose(schnell.found_schedule.levels(4, tokens), [1, 0.75, 0.5, 0.25, 0])
    assert "undoes its distillation" in schnell.notes()[0]


def test_a_negative_prompt_without_guidance_is_rejected(zimage_base: Path, tmp_path: Path) -> None:
    weights = tmp_path / "Z-Image-Turbo"
    shutil.copytree(zimage_base, weights)
    task = families.load("zimage", weights, "f32", "cpu")
    options = {"steps": 1, "size": (16, 16), "negative_prompt": "noise"}
    with pytest.raises(ConfigError, match="Z-Image-Turbo is drawn without guidance by default"):
        task.draw(["a"], SampleOptions(**options))
    assert task.draw(["a"], SampleOptions(**options, guidance=2.0)).shape == (1, 16, 16, 3)


def test_a_model_is_shown_by_the_name_of_its_file_folder_or_repository(tmp_path: Path) -> None:
    cached = tmp_path / "models--black-forest-labs--FLUX.1-dev" / "snapshots" / "3de623"
    for path, expected in (
        (tmp_path / "z_image.v2.safetensors", "z_image.v2"),
        (tmp_path / "FLUX.1-dev", "FLUX.1-dev"),
        (cached, "FLUX.1-dev"),
        # Not in a hub cache, where the repository's folder is two levels above.
        (tmp_path / "snapshots" / "mine", "mine"),
    ):
        assert shown_name(path) == expected
    # Files in the cache are links to blobs, which have hashes as names.
    blob = tmp_path / "models--black-forest-labs--FLUX.1-dev" / "blobs" / "4610115bb0c8"
    for folder in (blob.parent, cached):
        folder.mkdir(parents=True)
    blob.touch()
    file = cached / "flux1-dev.safetensors"
    file.symlink_to(blob)
    assert shown_name(file) == "flux1-dev"


@pytest.mark.parametrize(("name", "rate", "norm"), [("sd3", 1e-4, 0.1), ("qwen-image", 5e-5, None)])
def test_a_run_has_the_learning_rate_and_clipping_of_its_family(
    name: str,
    rate: float,
    norm: float | None,
    configure: Callable[..., TrainConfig],
    request: pytest.FixtureRequest,
) -> None:
    base = request.getfixturevalue(f"{name.replace('-', '_')}_base")
    run = train_adapter(configure(name, base, steps=1))
    used = TrainConfig.from_yaml(run.output / "config.yaml")
    assert (used.rate, used.max_grad_norm) == (rate, norm)


# Flux is left out, because it reads from the transformer's configuration whether it is distilled,
# and the folder of this test has no transformer.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "flux"])
def test_a_note_warns_if_the_range_of_f16_is_too_small(name: str, tmp_path: Path) -> None:
    # A distilled model has another note, which would count here. FLUX.2 reads from this field that
    # it is not distilled.
    (tmp_path / "model_index.json").write_text('{"is_distilled": false}')
    has_notes = {
        dtype: bool(families.find(name)(tmp_path, dtype, "cpu", TrainConfig()).notes())  # type: ignore[attr-defined]
        for dtype in ("f16", "bf16")
    }
    assert has_notes == {"f16": name in {"zimage", "qwen-image"}, "bf16": False}


def test_errors_about_separate_parts_say_what_is_wrong(
    flux_base: Path, sd3_base: Path, flux2_base: Path
) -> None:
    encoder = str(flux_base / "text_encoder")
    for given, message in (
        (
            {"text_encoder": [str(sd3_base)]},
            r"--text-encoder: .* is the folder of a pipeline; .*text_encoder$",
        ),
        ({"vae": str(sd3_base)}, r"--vae: .* is the folder of a pipeline; .*vae$"),
        ({"vae": encoder}, "--vae: .* is not an autoencoder"),
        ({"text_encoder": [str(flux_base / "vae")]}, "is an autoencoder; give it with --vae"),
        ({"vae": str(sd3_base / "vae")}, r"scales latents by 1\.5305, expected 0\.3611"),
        ({"vae": str(flux2_base / "vae")}, "have 32 channels, but the transformer reads 16"),
    ):
        with pytest.raises(ConfigError, match=message):
            families.load("flux", flux_base, "f32", "cpu", TrainConfig(**given))


# How errors name the families.
TITLES = {"sd3": "SD3.5", "flux": "Flux", "chroma": "Chroma", "zimage": "Z-Image",
          "flux2": "FLUX.2-klein", "qwen-image": "Qwen-Image"}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_of_another_family_and_missing_parts_are_reported(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The error names the family of a file with original tensor names, and of a folder."""
    base = request.getfixturevalue(f"{name.replace('-', '_')}_base")
    file = tmp_path / "weights.safetensors"
    tc.models.save_checkpoint(file, {"transformer": tc.models.load(base / "transformer")})
    for other in {"sdxl", *FAMILIES} - {name}:
        for weights in (file, base):
            message = f"it is one of {re.escape(TITLES[name])}: give --model {name}$"
            with pytest.raises(WeightsFormatError, match=message):
                families.load(other, weights, "f32", "cpu")
    with pytest.raises(
        WeightsFormatError, match=r"; give the files of these parts with --vae and --text-encoder$"
    ):
        families.load(name, file, "f32", "cpu")


def test_a_file_with_another_text_encoder_is_reported(
    chroma_base: Path, zimage_base: Path, tmp_path: Path
) -> None:
    (weights,) = (chroma_base / "text_encoder").glob("*.safetensors")
    file = tmp_path / "t5xxl_fp16.safetensors"
    shutil.copy(weights, file)
    message = r"encoders .* of Z-Image that are still missing.*a T5 text encoder"
    with pytest.raises(WeightsFormatError, match=message):
        families.load("zimage", zimage_base, "f32", "cpu", TrainConfig(text_encoder=[str(file)]))
