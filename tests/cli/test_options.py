"""Flags: every setting has one, files are overridden by them, help fits on a screen."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainable_candle.cli import COMMANDS, main, merge, sample
from trainable_candle.cli.train import make_parser, read_config
from trainable_candle.errors import ConfigError
from trainable_candle.train.config import TrainConfig, flag, settings

SAMPLES: dict[str, Any] = {
    "model": "digits",
    "weights": "w",
    "dataset": "d",
    "output": "o",
    "caption": "c",
    "adapter": "dora",
    "rank": 3,
    "alpha": 2.5,
    "target_modules": ["to_q", "to_k"],
    "exclude_modules": ["proj"],
    "rslora": True,
    "lora_dropout": 0.1,
    "steps": 12,
    "batch_size": 4,
    "gradient_accumulation": 5,
    "optimizer": "lion",
    "learning_rate": 1e-3,
    "lr_scheduler": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.5,
    "max_grad_norm": 0.0,
    "timesteps": "logit_normal",
    "seed": 9,
    "device": "cuda:1",
    "precision": "bf16",
    "gradient_checkpointing": "full",
    "threads": 1,
    "save_every": 0,
    "keep_checkpoints": 7,
    "log_every": 8,
    "resume": "latest",
}


def parse(*arguments: str) -> TrainConfig:
    return read_config(make_parser("train-lora", rare=False).parse(arguments))


def as_arguments(name: str, value: Any) -> list[str]:
    if value is True:
        return [flag(name)]
    return [flag(name), ",".join(value) if isinstance(value, list) else str(value)]


def test_every_setting_has_a_flag() -> None:
    assert SAMPLES.keys() == settings().keys()
    default = TrainConfig()
    for name, value in SAMPLES.items():
        assert value != getattr(default, name)
    arguments = [part for item in SAMPLES.items() for part in as_arguments(*item)]
    assert parse(*arguments) == TrainConfig(**SAMPLES)


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


def test_the_guide_names_flags_that_exist() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    parsers = [make_parser("train", rare=True), sample.make_parser("s"), merge.make_parser("m")]
    known = {option for parser in parsers for a in parser._actions for option in a.option_strings}
    named = set(re.findall(r"--[a-z][a-z-]+", guide))
    assert len(named) > 10
    assert named - known == set()
    block = re.search(r"```yaml\n(.*?)```", guide, re.DOTALL)
    assert block is not None
    assert TrainConfig.from_mapping(yaml.safe_load(block[1])).model == "digits"
