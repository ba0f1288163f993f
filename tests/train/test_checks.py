"""Settings that have no effect or do not suit the model are rejected before images are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, ConfigError
from trainable_candle.models import DigitsTransformer
from trainable_candle.run import train_adapter
from trainable_candle.settings.adapter import OFT_SIDES
from trainable_candle.settings.checks import check_settings
from trainable_candle.tasks.checks import check_format
from trainable_candle.train import TrainConfig
from trainable_candle.train.adapters import adapter_config

WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"random_crops": 9}, "--random-crops has no effect without --crop random"),
    (
        {"color_variants": 9},
        "--color-variants has no effect without --color-brightness, --color-contrast, .* or",
    ),
    ({"oft_side": "input"}, "--oft-side has no effect without --adapter oft"),
    (
        {"adapter": "oft", "rslora": True},
        "--rslora has no effect without a low-rank adapter",
    ),
    ({"adapter": "oft", "rank": 8}, "--rank and --alpha have no effect on --adapter oft"),
    ({"adapter": "oft", "alpha": 8.0}, "give --oft-block-size instead"),
    ({"bucketing": False, "min_side": 64}, "--min-side has no effect without --bucketing"),
    ({"cache": "memory", "cache_dir": "c"}, "--cache-dir has no effect without --cache disk"),
    ({"caption_keep_tokens": 5}, "--caption-keep-tokens has no effect without --caption-shuffle"),
    ({"caption_variants": 0}, "--caption-variants has no effect without --caption-shuffle"),
    ({"caption_separator": "|"}, "--caption-separator has no effect without --caption-shuffle"),
    ({"text_encoder_learning_rate": 1e-5}, "has no effect without --train-text-encoder"),
    ({"huber_delta": 0.5}, "--huber-delta has no effect without --loss huber"),
    ({"huber_schedule": "snr"}, "--huber-schedule has no effect without --loss huber"),
    (
        {"multires_noise_discount": 0.5},
        "--multires-noise-discount has no effect without --multires-noise-iterations",
    ),
    # DPO compares the model with its base, and dropout would change only the model.
    ({"objective": "dpo", "lora_dropout": 0.1}, "leave --lora-dropout out"),
    ({"validate_every": 1}, "--validate-every has no effect without --validation-split"),
    (
        {"guidance": 3.0, "sample_steps": 4},
        "--sample-steps, --guidance have no effect without --sample-prompts",
    ),
    ({"negative_prompt": "x"}, "--negative-prompt has no effect without --sample-prompts"),
    (
        {"sample_prompts": ["a"], "guidance": 1.0, "negative_prompt": "x"},
        "--negative-prompt has no effect without --guidance other than 1",
    ),
]


@pytest.mark.parametrize(("settings", "message"), WITHOUT_EFFECT, ids=str)
def test_a_setting_without_effect_is_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(TrainConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"random_crops": 9, "crop": "random"},
        # These two settings need a GPU, but with these values they stream nothing on any device.
        {"device": "cpu", "stream_blocks": 0, "stream_modulation": False},
        # The separator also separates the trigger from the caption.
        {"caption_separator": "|", "trigger": "sks"},
        # The YAML file lists folders, which may have triggers of their own.
        {"caption_separator": "|", "dataset": "list.yaml"},
        {"caption_variants": 0, "caption_tag_dropout": 0.1},
        {"huber_delta": 0.5, "loss": "smooth_l1"},
        {"sample_prompts": ["a"], "negative_prompt": "x"},
    ],
    ids=str,
)
def test_a_setting_with_effect_is_accepted(settings: dict[str, Any]) -> None:
    check_settings(TrainConfig(**settings))
    # A run's configuration file has every setting, also those that keep their defaults. Settings
    # that equal their defaults must be accepted.
    check_settings(TrainConfig.from_mapping(vars(TrainConfig(**settings))))


def test_text_that_is_not_utf_8_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"--sample-prompts is .*, expected text in UTF-8"):
        check_settings(TrainConfig(sample_prompts=["a\udcff"]))


@pytest.mark.parametrize("form", ["kohya", "diffusers", "peft", "comfyui"])
@pytest.mark.parametrize(
    ("kind", "side"),
    [
        *((kind, None) for kind in ("lora", "dora", "loha", "lokr", "oft")),
        *(("oft", side) for side in OFT_SIDES),
    ],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_checks_reject_exactly_the_formats_that_the_writer_rejects(
    sdxl_base: Path, tmp_path: Path, form: str, kind: str, side: str | None, parts: int
) -> None:
    # The parts of the pipeline that get adapters.
    names = ("unet", "text_encoder", "text_encoder_2")[:parts]
    models = [tc.models.load(sdxl_base, subfolder=name) for name in names]
    targets = ["attn2.to_q", "q_proj"]  # layers of the UNet, and of the text encoders
    config = TrainConfig(model="sdxl", format=form, adapter=kind, rank=2, alpha=2.0, oft_side=side)
    # The formats that have names for the layers of the model, the default first.
    formats = ("kohya", "diffusers", "peft", "comfyui")
    adapter = adapter_config(config, targets, formats)
    sets = [model.add_adapter(adapter) for model in models]
    assert rejects(lambda: check_format(config, formats, parts)) == rejects(
        lambda: tc.save_adapters(tmp_path / "a.safetensors", sets, format=form)
    )


@pytest.mark.parametrize("form", [None, "kohya", "diffusers", "peft", "comfyui"])
def test_checks_of_digits_reject_exactly_the_formats_that_the_writer_rejects(
    digits_base: Path, tmp_path: Path, form: str | None
) -> None:
    model = DigitsTransformer.from_pretrained(digits_base)
    adapter = model.add_adapter(tc.LoraConfig(r=2, lora_alpha=2.0, target_modules=["to_q"]))
    config = TrainConfig(model="digits", format=form)
    # The formats with names for the model's layers, the default first; one part gets an adapter.
    formats, parts = ("peft", "kohya", "diffusers"), 1
    assert rejects(lambda: check_format(config, formats, parts)) == rejects(
        lambda: tc.save_adapters(tmp_path / "a.safetensors", [adapter], format=form)
    )


def rejects(action: Callable[[], object]) -> bool:
    """Return whether `action` raises an error about its settings or arguments."""
    try:
        action()
    except (ConfigError, ArgumentError):
        return True
    return False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_modules": ["to_q", "nothing"]},
            r"--target-modules: `nothing` is not a layer \(layers are called",
        ),
        ({"target_modules": ["to_q("]}, r"--target-modules: `to_q\(` is not a regular expression"),
        ({"exclude_modules": ["proj_out"]}, "`proj_out` is none of the layers that get adapters"),
        ({"exclude_modules": ["all-linear"]}, "no layer is left"),
        (
            {"initial_adapter": "missing"},
            "--initial-adapter: there is no file or folder missing",
        ),
        (
            {"format": "comfyui"},
            "--format comfyui cannot represent the layers of the model `digits`",
        ),
        ({"sample_prompts": ["a cat"]}, "the prompt 'a cat' names no digit"),
    ],
    ids=str,
)
def test_settings_that_do_not_suit_the_model_are_rejected_before_images_are_read(
    config: TrainConfig, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    # `config` trains the model of digits.
    without_images = config.with_(dataset=str(tmp_path / "missing"), **settings)
    with pytest.raises((ConfigError, FileNotFoundError), match=message):
        train_adapter(without_images, progress=False, report=lambda _: None)
    assert not Path(config.output).exists()
