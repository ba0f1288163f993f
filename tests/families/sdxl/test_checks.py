"""Settings are checked against the model before images are read, and against the images after."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, ConfigError, Error
from trainable_candle.families.sdxl import SDXL
from trainable_candle.train import TrainConfig

# Layers of the UNet that get adapters.
TARGETS = ["attn2.to_q", "attn2.to_k"]
Check = Callable[..., list[str]]


@pytest.fixture
def check(sdxl_base: Path) -> Check:
    """A function that checks settings and returns the lines that the check reports."""

    def check(weights: Path = sdxl_base, **settings: Any) -> list[str]:
        # The check reads neither of these folders, which do not exist.
        config = TrainConfig(model="sdxl", dataset="none", output="none", **settings)
        lines: list[str] = []
        SDXL(weights, "f32", "cpu", config).task().check(lines.append)
        return lines

    return check


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapter": "loha", "format": "diffusers"}, "--format diffusers cannot represent --adap"),
        ({"train_text_encoder": True, "format": "peft"}, "--format peft cannot represent several"),
        (
            {"adapter": "dora", "dora_axis": "input", "format": "peft"},
            "--format peft cannot represent --dora-axis input; give --format kohya",
        ),
        # The noise schedule has the timesteps 0 to 999.
        ({"min_timestep": 1000}, "found timesteps from 1000"),
        ({"max_timestep": 1001}, "found timesteps from 0 up to but not including 1001"),
        ({"sample_prompts": ["a"], "sample_size": "33x32"}, "the size is 33x32 px, expected mult"),
        ({"sample_prompts": ["a"], "sample_size": "0x0"}, "size: '0x0' is not a size in pixels"),
        ({"sample_prompts": ["a"], "sample_steps": 1001}, "steps"),
        ({"target_modules": ["to_q", "nothing"]}, "`nothing` is not a layer"),
        # A layer of the text encoders, which get no adapters without `train_text_encoder`.
        ({"target_modules": ["q_proj"]}, "`q_proj` is not a layer"),
        ({"exclude_modules": ["conv_in"]}, "`conv_in` is none of the layers that get adapters"),
        ({"initial_adapter": "none"}, "--initial-adapter: there is no file or folder none"),
        ({"clip_skip": 100}, r"--clip-skip is 100, expected at most 1: the text encoders have 3 a"),
    ],
    ids=str,
)
def test_settings_that_do_not_suit_the_model_are_rejected(
    check: Check, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, ArgumentError, FileNotFoundError), match=message):
        check(**settings)


def test_layers_may_be_given_as_patterns(check: Check) -> None:
    check(target_modules=["to_(q|k)"], exclude_modules=["attn1.to_(q|k)"])


def test_layers_of_text_encoders_may_be_excluded_only_if_these_are_trained(check: Check) -> None:
    check(exclude_modules=["fc1"], train_text_encoder=True)
    with pytest.raises(ConfigError, match="`fc1` is none of the layers"):
        check(exclude_modules=["fc1"])


def test_a_min_snr_gamma_of_zero_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"min_snr_gamma is 0\.0, expected above 0"):
        TrainConfig(min_snr_gamma=0.0)


def test_notes_say_what_diffusers_ignores_of_the_adapter(check: Check) -> None:
    assert check() == []
    assert (
        "diffusers ignores DoRA's magnitude; for diffusers, give --format"
        in check(adapter="dora")[0]
    )
    assert check(adapter="dora", format="diffusers") == []
    (note,) = check(adapter="dora", dora_axis="input")
    assert note.endswith("diffusers ignores DoRA's magnitude; ComfyUI applies the whole adapter")
    assert "diffusers loads LoRA only" in check(adapter="loha")[0]


Save = Callable[..., Path]


@pytest.fixture
def save(sdxl_base: Path, tmp_path: Path) -> Save:
    """A function that writes a file with adapters on the given parts of the pipeline."""

    def save(parts: Sequence[str] = ("unet",), form: str = "kohya", **settings: Any) -> Path:
        path = tmp_path / "initial.safetensors"
        sets = []
        for part in parts:
            targets = TARGETS if part == "unet" else ["q_proj"]
            given = {"r": 4, "lora_alpha": 2.0, "target_modules": targets, **settings}
            sets.append(
                tc.models.load(sdxl_base, subfolder=part).add_adapter(tc.LoraConfig(**given))
            )
        tc.save_adapters(path, sets, format=form)
        return path

    return save


# All parts that can have adapters.
EVERY = ("unet", "text_encoder", "text_encoder_2")


@pytest.mark.parametrize(
    ("saved", "settings"),
    [
        ({}, {}),
        ({"form": "diffusers"}, {}),
        ({"use_rslora": True}, {"rslora": True}),
        ({"adapter": "dora"}, {"adapter": "dora"}),
        ({"parts": EVERY}, {"train_text_encoder": True}),
    ],
    ids=str,
)
def test_an_initial_adapter_that_fits_is_accepted(
    check: Check, save: Save, saved: dict[str, Any], settings: dict[str, Any]
) -> None:
    path = save(**saved)
    check(initial_adapter=str(path), rank=4, alpha=2.0, target_modules=TARGETS, **settings)


@pytest.mark.parametrize(
    ("saved", "settings", "message"),
    [
        ({}, {"rank": 8}, "has rank 4 and alpha 2, .* give --rank 4 --alpha 2"),
        ({}, {"alpha": 4.0}, "give --rank 4 --alpha 2"),
        ({"use_rslora": True}, {"rslora": True, "rank": 8}, "give --rank 4 --alpha 2"),
        ({"adapter": "dora"}, {}, "holds dora, and --adapter is lora: give --adapter dora"),
        ({}, {"adapter": "dora"}, "holds lora, and --adapter is dora: give --adapter lora"),
        (
            {"parts": EVERY},
            {},
            "text_encoder and text_encoder_2, which would be dropped: give --tr",
        ),
        ({}, {"train_text_encoder": True}, "no adapters on text_encoder and text_encoder_2: leave"),
        ({}, {"target_modules": ["to_q"]}, "is among the layers of the settings, not in the file"),
        (
            {},
            {"target_modules": ["attn2.to_q"]},
            "to_k is in the file, not among the layers of the settings",
        ),
    ],
    ids=str,
)
def test_an_initial_adapter_that_does_not_fit_is_rejected(
    check: Check, save: Save, saved: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    given = {"rank": 4, "alpha": 2.0, "target_modules": TARGETS, **settings}
    with pytest.raises(ConfigError, match=message):
        check(initial_adapter=str(save(**saved)), **given)


def test_an_initial_adapter_of_another_model_or_a_damaged_file_is_rejected(
    check: Check, tmp_path: Path
) -> None:
    path = tmp_path / "other.safetensors"
    tc.save_file({"lora_unet_x_to_q.lora_down.weight": tc.ones((2, 4))}, path)
    with pytest.raises(
        ConfigError, match="not an adapter of this model: the model has no layer for i"
    ):
        check(initial_adapter=str(path))
    path.write_bytes(b"nothing")
    with pytest.raises(Error, match=r"other\.safetensors"):
        check(initial_adapter=str(path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask": "file"}, "--mask file has no effect: no image has a mask file"),
        ({"mask": "alpha"}, "--mask alpha has no effect: no image has transparency"),
        ({"prior_loss_weight": 0.5}, "--prior-loss-weight has no effect: no folder"),
    ],
    ids=str,
)
def test_settings_that_have_no_effect_on_the_given_images_are_rejected(
    sdxl_base: Path, sdxl_folder: Path, settings: dict[str, Any], message: str
) -> None:
    config = TrainConfig(model="sdxl", dataset=str(sdxl_folder), resolution=64, **settings)
    with pytest.raises(ConfigError, match=message):
        SDXL(sdxl_base, "f32", "cpu", config).task().read(lambda _: None)


def test_the_transparency_of_an_image_is_accepted_as_its_mask(
    sdxl_base: Path, tmp_path: Path
) -> None:
    Image.new("RGBA", (64, 64), (1, 2, 3, 128)).save(tmp_path / "a.png")
    config = TrainConfig(
        model="sdxl", dataset=str(tmp_path), resolution=64, mask="alpha", caption="x"
    )
    task = SDXL(sdxl_base, "f32", "cpu", config).task()
    assert len(task.read(lambda _: None).train) == 1
