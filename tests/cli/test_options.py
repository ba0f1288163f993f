"""Flags: every setting has one, files are overridden by them, help fits on a screen."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainable_candle.cli import COMMANDS, chat, main, merge, preview_data, sample
from trainable_candle.cli.train import make_parser, read_config
from trainable_candle.errors import ConfigError
from trainable_candle.settings import TrainConfig, flag, settings

DOCS = Path(__file__).parents[2] / "docs"
SAMPLES: dict[str, Any] = {
    "model": "digits",
    "weights": "w",
    "text_encoder": ["t 1.safetensors", "t2"],
    "vae": "ae",
    "dataset": "d",
    "output": "o",
    "resolution": 512,
    "bucketing": False,
    "bucket_step": 32,
    "min_side": 128,
    "max_side": 2048,
    "upscale": True,
    "crop": "random",
    "random_crops": 2,
    "flip": True,
    "mask": "alpha",
    "prior_loss_weight": 0.5,
    "skip_bad": True,
    "cache": "memory",
    "cache_dir": "c",
    "cuda_graphs": 0,
    "caption": "c",
    "trigger": "sks, a dog",
    "caption_dropout": 1.0,
    "caption_shuffle": True,
    "caption_keep_tokens": 1,
    "caption_tag_dropout": 0.2,
    "caption_separator": "|",
    "caption_variants": 0,
    "sequence_length": 64,
    "train_on": "all",
    "adapter": "dora",
    "rank": 3,
    "alpha": 2.5,
    "target_modules": ["to_q", "to_k"],
    "exclude_modules": ["proj"],
    "rslora": True,
    "lora_dropout": 0.1,
    "train_text_encoder": True,
    "initial_adapter": "a",
    "training_adapter": "b",
    "format": "comfyui",
    "adapter_precision": "f16",
    "steps": 12,
    "epochs": 3,
    "batch_size": 4,
    "gradient_accumulation": 5,
    "optimizer": "lion",
    "learning_rate": 1e-3,
    "text_encoder_learning_rate": 1e-5,
    "lr_scheduler": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.5,
    "max_grad_norm": 0.0,
    "ema_decay": 0.99,
    "seed": 9,
    "prediction_type": "v_prediction",
    "loss": "huber",
    "huber_delta": 0.2,
    "huber_schedule": "snr",
    "timesteps": "logit_normal",
    "timestep_shift": 3.0,
    "resolution_shift": True,
    "train_guidance": 2.0,
    "min_timestep": 10,
    "max_timestep": 900,
    "min_snr_gamma": 5.0,
    "noise_offset": 0.1,
    "clip_skip": 2,
    "validation_split": 0.1,
    "validate_every": 5,
    "sample_prompts": ["a cat, a dog", "a tree"],
    "sample_every": 6,
    "negative_prompt": "blurry",
    "guidance": 3.0,
    "sampler": "euler",
    "sample_steps": 7,
    "sample_size": "64x32",
    "sample_seed": 8,
    "sample_tokens": 9,
    "sample_temperature": 0.5,
    "device": "cuda:1",
    "precision": "bf16",
    "gradient_checkpointing": "full",
    "memory_limit": 8.0,
    "threads": 1,
    "save_every": 0,
    "keep_checkpoints": 7,
    "keep_adapters": 2,
    "log_every": 8,
    "tensorboard": True,
    "resume": "latest",
}


def parse(*arguments: str) -> TrainConfig:
    return read_config(make_parser("train-lora", rare=False).parse(arguments))


def as_arguments(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else f"--no-{flag(name)[2:]}"]
    if settings()[name][1].texts:
        return [part for text in value for part in (flag(name), text)]
    return [flag(name), ",".join(value) if isinstance(value, list) else str(value)]


def test_every_setting_has_a_flag() -> None:
    exclusive = {"validation_dataset"}
    assert SAMPLES.keys() | exclusive == settings().keys()
    default = TrainConfig()
    for name, value in SAMPLES.items():
        assert value != getattr(default, name)
    arguments = [part for item in SAMPLES.items() for part in as_arguments(*item)]
    assert parse(*arguments) == TrainConfig(**SAMPLES)
    assert parse("--validation-dataset", "v").validation_dataset == "v"
    assert parse("--mixed-precision", "bf16").precision == "bf16"
    assert parse("--dtype", "bf16").precision == "bf16"


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rank: 4\nsteps: 20\nrslora: true\n")
    config = parse("--config", str(path), "--rank", "8", "--no-rslora")
    assert (config.rank, config.steps, config.rslora) == (8, 20, False)


def test_a_flag_can_mend_a_wrong_line_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rank: 0\n")
    assert parse("--config", str(path), "--rank", "8").rank == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning-rte", "1"], r"unknown flag `--learning-rte`; did you mean `--learning-rate`"),
        (["--learning_rate=1"], r"unknown flag `--learning_rate`; did you mean `--learning-rate`"),
        (["--xyzzy"], r"unknown flag `--xyzzy` \(see train-lora --help\)"),
        (["--learn", "1"], "unknown flag `--learn`"),
        (["digits"], "unexpected argument `digits`"),
        (["--rank"], "argument --rank: expected one argument"),
        (["--rank", "many"], "argument --rank: invalid int value: 'many'"),
        (["--rank", "0"], "command line: rank is 0, expected at least 1"),
        (["--optimizer", "adam8b"], r"optimizer is `adam8b`, .* did you mean `adam8bit`"),
        (["--learning-rate", "nan"], "learning_rate is nan, expected a finite number"),
        (["--config", "none.yaml"], r"none\.yaml: there is no such configuration file"),
    ],
)
def test_wrong_flags_are_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ConfigError, FileNotFoundError), match=message):
        parse(*arguments)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*command.split(), "--help"]
    try:
        status: object = main(arguments)
    except SystemExit as left:  # argparse's way
        status = left.code
    assert status == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: trainable-candle {command}".rstrip())
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_the_long_help_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert [name for name in settings() if f"  {flag(name)}" not in text] == []


@pytest.mark.parametrize("name", ["training.md", "sdxl.md", "data.md", "language-models.md"])
def test_guides_name_flags_that_exist(name: str) -> None:
    guide = (DOCS / name).read_text()
    commands = (sample, merge, chat, preview_data)
    parsers = [make_parser("train", rare=True), *(c.make_parser("c") for c in commands)]
    known = {option for parser in parsers for a in parser._actions for option in a.option_strings}
    named = set(re.findall(r"--[a-z][a-z-]+", guide))
    assert len(named) > 5
    assert named - known == set()


def test_the_settings_in_the_guide_are_read() -> None:
    guide = (DOCS / "training.md").read_text()
    block = re.search(r"```yaml\n(.*?)```", guide, re.DOTALL)
    assert block is not None
    assert TrainConfig.from_mapping(yaml.safe_load(block[1])).model == "digits"
