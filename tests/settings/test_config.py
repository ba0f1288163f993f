"""Test the configuration: names, types and ranges of settings, and YAML files."""

from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
import yaml

import trainable_candle as tc
from trainable_candle.errors import ConfigError, MissingFileError
from trainable_candle.files import load_yaml
from trainable_candle.run import train_adapter
from trainable_candle.settings import GROUPS, TrainConfig, group_of, settings


def from_text(tmp_path: Path, text: str) -> TrainConfig:
    """Return the configuration in a YAML file with `text`."""
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return TrainConfig.from_yaml(path)


def test_every_field_has_help_and_a_group() -> None:
    assert list(settings()) == [item.name for item in fields(TrainConfig)]
    assert all(setting.help for _, setting in settings().values())
    assert {group_of(name) for name in settings()} == set(GROUPS)


def test_the_error_for_an_unknown_name_suggests_the_most_similar_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: unknown setting `learning_rte`") as caught:
        from_text(tmp_path, "learning_rte: 0.1")
    assert "did you mean `learning_rate`?" in str(caught.value)


def test_a_name_of_another_tool_is_read_unless_our_name_is_there_too(tmp_path: Path) -> None:
    text = "batch-size: 3\nlr: 1e-3\nnetwork_dim: 4\nlora_alpha: 2\nclip_grad_norm: 0.5"
    config = from_text(tmp_path, text)
    assert (config.batch_size, config.learning_rate, config.rank) == (3, 1e-3, 4)
    assert (config.alpha, config.max_grad_norm) == (2.0, 0.5)
    with pytest.raises(ConfigError, match="`lr` is another name of `learning_rate`, which is"):
        from_text(tmp_path, "learning_rate: 1e-3\nlr: 1e-4")


def test_the_error_for_a_name_like_no_other_lists_all_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of model, weights"):
        from_text(tmp_path, "zzzzzz: 1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rank: 0", "rank is 0, expected at least 1"),
        ("rank: 4.0", r"rank is 4\.0 \(float\), expected a whole number"),
        ("rank: true", r"rank is True \(bool\), expected a whole number"),
        ("rank: '8'", r"rank is '8' \(str\), expected a whole number"),
        ("rank:", r"rank is None \(NoneType\), expected a whole number"),
        ("alpha: 0", r"alpha is 0\.0, expected above 0"),
        ("learning_rate: -0.1", r"learning_rate is -0\.1, expected above 0"),
        ("learning_rate: .nan", "learning_rate is nan, expected a finite number"),
        ("learning_rate: .inf", "learning_rate is inf, expected a finite number"),
        ("learning_rate: fast", r"learning_rate is 'fast' \(str\), expected a number"),
        ("lora_dropout: 1", r"lora_dropout is 1\.0, expected below 1"),
        ("seed: -1", "seed is -1, expected at least 0"),
        ("seed: 18446744073709551616", "seed is 18446744073709551616, expected below"),
        (f"steps: {10**400}", "steps is a number of 1329 bits, too large to compute with"),
        (f"learning_rate: {10**400}", "learning_rate is a number of 1329 bits, too large"),
        # Python converts no text of more than 4300 digits to an integer.
        (f"steps: 1{'0' * 5000}", "is not valid YAML"),
        # It has the form of a date, but there is no month 13.
        ("caption: 2026-13-41", "is not valid YAML"),
        ("rslora: 1", r"rslora is 1 \(int\), expected true or false"),
        ("model: 3", r"model is 3 \(int\), expected text; put it in quotes"),
        ("name: 2026-01-01", r"name is .*\(date\), expected text; put it in quotes"),
        ("caption: yes", r"caption is True \(bool\), expected text; put it in quotes"),
        ("precision: 16", r"precision is 16 \(int\), expected one of auto, f32, bf16, f16$"),
        ("dataset: [a, b]", r"expected one path; list several folders in a YAML file"),
        ("target_modules: 3", r"target_modules is 3 \(int\), expected a list of names"),
        ("target_modules: [to_q, 3]", "expected a list of names"),
        ("optimizer: adamw8bits", r"expected one of .*; did you mean `adamw8bit`"),
        ("precision: f17", "expected one of auto, f32, bf16, f16; did you mean `f16`"),
        # The default of `steps` is 1000.
        ("warmup_steps: 2000", "warmup_steps is 2000, more than the 1000 steps"),
    ],
)
def test_the_error_for_a_wrong_value_says_what_is_wrong(
    tmp_path: Path, line: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        from_text(tmp_path, line)
    assert str(caught.value).startswith(str(tmp_path))


def test_numbers_with_an_exponent_but_no_dot_are_read(tmp_path: Path) -> None:
    # PyYAML follows YAML 1.1, which reads 1e-4 as a string, because it has no dot.
    config = from_text(tmp_path, "learning_rate: 1e-4\nalpha: 16\nmax_grad_norm: 1")
    assert config.learning_rate == 1e-4
    assert (config.alpha, type(config.alpha)) == (16.0, float)


def test_lists_are_read_from_yaml_lists_or_from_text_with_commas(tmp_path: Path) -> None:
    expected = ["to_q", "to_out.0"]
    assert from_text(tmp_path, "target_modules: [to_q, to_out.0]").target_modules == expected
    assert from_text(tmp_path, "target_modules: to_q, to_out.0").target_modules == expected


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n"])
def test_an_empty_file_gives_the_defaults(tmp_path: Path, text: str) -> None:
    assert from_text(tmp_path, text) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank: [1", "is not valid YAML"),
        ("- a\n- b", "expected lines of `name: value`, found"),
        ("just words", "expected lines of `name: value`, found 'just words'"),
        ("!!python/object:os.system {}", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_of_settings_is_rejected(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        from_text(tmp_path, text)


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="there is no such configuration file"):
        TrainConfig.from_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a folder, expected a YAML file"):
        TrainConfig.from_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"caption: caf\xe9")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        TrainConfig.from_yaml(tmp_path / "latin.yaml")


def test_yaml_reads_back_to_an_equal_configuration(tmp_path: Path) -> None:
    config = TrainConfig(
        model="digits",
        dataset=str(tmp_path / "Bilder \N{CAT FACE} #1: 'a'"),
        caption="yes",
        alpha=3.0,
        target_modules=["to_q", "to_out.0"],
        rslora=True,
        learning_rate=1e-05,
        seed=2**64 - 1,
        resume="latest",
    )
    assert from_text(tmp_path, config.to_yaml(tmp_path)) == config
    assert from_text(tmp_path, TrainConfig().to_yaml()) == TrainConfig()


def test_paths_in_a_file_are_relative_to_the_folder_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    (project / "run").mkdir(parents=True)
    monkeypatch.chdir(project)
    config = TrainConfig(
        weights="base",
        dataset="photos",
        output="run",
        text_encoder=["t5", str(tmp_path / "clip")],
        cache_dir="~/cache",
        resume="latest",
        sample_prompts=["a cat/dog", "prompts.txt"],
    )
    (project / "run" / "config.yaml").write_text(config.to_yaml(Path("run")))
    assert TrainConfig.from_yaml("run/config.yaml") == config
    stored = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (stored["output"], stored["dataset"]) == (".", "../photos")
    monkeypatch.chdir(project / "run")
    from_run = TrainConfig.from_yaml("config.yaml")
    assert (from_run.output, from_run.dataset, from_run.weights) == (".", "../photos", "../base")
    assert from_run.text_encoder == ["../t5", str(tmp_path / "clip")]
    assert from_run.sample_prompts == ["a cat/dog", "../prompts.txt"]
    # `portable` returns the settings as `to_yaml` writes them to a file in the given folder.
    assert config.with_(output=str(project / "run")).portable(project / "run")["output"] == "."
    # After a move of the project, the file's relative paths start at its new folder.
    project.rename(tmp_path / "moved")
    moved = TrainConfig.from_yaml(tmp_path / "moved" / "run" / "config.yaml")
    assert moved.dataset == str(tmp_path / "moved" / "photos")


def test_the_name_of_a_model_on_the_hub_is_no_path_but_a_dataset_is_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("weights: someone/a-model\ndataset: someone/photos\n")
    config = TrainConfig.from_yaml(path)
    assert config.weights == "someone/a-model"
    assert config.dataset == str(tmp_path / "someone" / "photos")
    path.write_text(config.to_yaml(tmp_path))
    assert TrainConfig.from_yaml(path).weights == "someone/a-model"


def test_required_settings_that_are_missing_are_reported_with_their_flags() -> None:
    with pytest.raises(ConfigError, match="missing settings: model, output; give --model --output"):
        TrainConfig(dataset="d").require("model", "dataset", "output")


@pytest.mark.parametrize("text", ["rank: 4\nsteps: 3\nrank: 8\n", "a: {b: 1, b: 2}\n"])
def test_a_key_given_twice_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is given twice"):
        TrainConfig.from_yaml(path)


# In Python 1 == 0x1 == True, and a mapping (`!!map`) cannot be the key of a dict.
@pytest.mark.parametrize("text", ["{1: 2, 0x1: 3}", "{1: 2, true: 3}", "{!!map 1: 2, !!map 1: 3}"])
def test_keys_that_a_dict_cannot_hold_apart_are_rejected(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"given twice|unhashable"):
        load_yaml(text)


def test_keys_of_different_types_are_different() -> None:
    # YAML 1.1 gives a plain `=` a type of its own; as a key it is read as text.
    assert load_yaml("{1: 2, '1': 3, =: 4}") == {1: 2, "1": 3, "=": 4}


def test_a_key_may_override_a_merged_mapping(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("<<: {rank: 4, steps: 3}\nrank: 8\n")
    config = TrainConfig.from_yaml(path)
    assert (config.rank, config.steps) == (8, 3)


def test_numbers_of_numpy_are_accepted() -> None:
    config = TrainConfig(
        rank=np.int64(4),  # type: ignore[arg-type]
        learning_rate=np.float32(0.5),  # type: ignore[arg-type]
        flip=np.bool_(True),  # type: ignore[arg-type]
    )
    assert config.to_yaml() == TrainConfig(rank=4, learning_rate=0.5, flip=True).to_yaml()
    with pytest.raises(ConfigError, match=r"rank is 4\.0 \(float\), expected a whole number"):
        TrainConfig(rank=np.float64(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [10**400, 10**300, 2**63])
def test_integers_that_are_too_large_are_rejected(value: int) -> None:
    for name in ("rank", "steps", "batch_size", "random_crops"):
        with pytest.raises(ConfigError, match=f"{name} is"):
            TrainConfig(**{name: value})


def test_choices_in_capitals_and_other_names_of_dtypes_are_recognised() -> None:
    assert TrainConfig(optimizer="AdamW").optimizer == "adamw"
    assert TrainConfig(precision="FP16", adapter_precision="float").precision == "f16"


def test_a_path_may_be_bytes(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rank: 4\n")
    assert TrainConfig.from_yaml(bytes(path)).rank == 4


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(TypeError, match="from_mapping: values is list, expected a mapping"):
        TrainConfig.from_mapping([1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown setting `stpes`; did you mean `steps`"):
        TrainConfig().with_(stpes=1)
    with pytest.raises(TypeError, match=r"config is dict, .*TrainConfig\.from_mapping makes one"):
        train_adapter({"model": "digits"})  # type: ignore[arg-type]


def test_devices_and_dtypes_may_be_objects() -> None:
    config = TrainConfig(
        device=tc.device("cpu"),
        precision=tc.bfloat16,  # type: ignore[arg-type]
    )
    assert (config.device, config.precision) == ("cpu", "bf16")
    assert type(config.device) is str


def test_defaults_are_not_shared() -> None:
    TrainConfig().target_modules.append("to_q")
    assert TrainConfig().target_modules == []


def test_with_changes_only_the_given_setting_and_checks_it() -> None:
    config = TrainConfig(steps=10)
    assert asdict(config.with_(steps=20)) == {**asdict(config), "steps": 20}
    with pytest.raises(ConfigError, match="steps is 0"):
        config.with_(steps=0)


def test_each_condition_says_what_its_settings_need_or_has_a_complaint() -> None:
    conditions = [condition for group in GROUPS for condition in group.conditions]
    assert len(conditions) > 20
    # A condition has exactly one of the two.
    assert [c.settings for c in conditions if bool(c.needed) == bool(c.complaint)] == []
