"""One run at a time uses an output folder, and a finished run is not changed.

An output folder is not a data set, but it can be given as an adapter.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainable_candle.data import DatasetOptions, load_dataset, parse_sources
from trainable_candle.data.chats.reading import find_files
from trainable_candle.errors import ConfigError, DatasetError, MissingFileError
from trainable_candle.files import held
from trainable_candle.outputs import adapter_in
from trainable_candle.run import JSON_LOG, LOCK, train_adapter
from trainable_candle.settings.checks import existing_adapter
from trainable_candle.train import Callback, TrainConfig

# The fixture `train`: it trains an adapter and returns the bytes of its parameters by name.
Train = Callable[..., dict[str, bytes]]

# A program that holds the lock of the path in its first argument until its input ends.
HOLD = """
import sys
from pathlib import Path
from trainable_candle.files import held
with held(Path(sys.argv[1]), "x"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_rejected_while_the_first_is_running(config: TrainConfig) -> None:
    messages = []

    class SecondRun(Callback):
        def on_train_begin(self, trainer: object) -> None:  # noqa: ARG002
            with pytest.raises(ConfigError) as caught:
                train_adapter(config, progress=False, report=lambda _: None)
            messages.append(str(caught.value))

    train_adapter(config, callbacks=[SecondRun()], progress=False, report=lambda _: None)
    assert len(messages) == 1
    assert f"output: {config.output} is in use by process " in messages[0]
    assert not (Path(config.output) / LOCK).exists()


def test_a_run_does_not_write_into_its_own_data_sets(config: TrainConfig, tmp_path: Path) -> None:
    folder = Path(config.dataset)
    # A data set of one file, which has the name of a run's log.
    log = tmp_path / "data" / JSON_LOG
    log.parent.mkdir()
    log.write_text("a user's own\n")
    for setting, data, output in (
        ("dataset", folder, folder),
        ("dataset", log, log.parent),
        # Another spelling of the same folder.
        ("validation_dataset", log, log.parent / "." / "x" / ".."),
    ):
        overlapping = config.with_(**{setting: str(data), "output": str(output)})
        with pytest.raises(ConfigError, match=rf"^{setting}: the run would write into .*--output"):
            train_adapter(overlapping, progress=False, report=lambda _: None)
    assert log.read_text() == "a user's own\n"


def test_a_run_does_not_write_into_another_data_set(config: TrainConfig, tmp_path: Path) -> None:
    other = tmp_path / "others"
    shutil.copytree(config.dataset, other)
    with pytest.raises(ConfigError, match=r"output: .*/others is the folder of a data set: it has"):
        train_adapter(config.with_(output=str(other)), progress=False, report=lambda _: None)
    assert len(list(other.iterdir())) == len(list(Path(config.dataset).iterdir()))


def test_the_output_of_a_run_is_rejected_as_a_data_set(config: TrainConfig, train: Train) -> None:
    train(config)
    output = Path(config.output)
    for dataset in (str(output), [{"path": output.parent, "recursive": True}]):
        with pytest.raises(DatasetError, match=f"{output} is the output of a run"):
            load_dataset(DatasetOptions(parse_sources(dataset), resolution=64))
    with pytest.raises(DatasetError, match=f"{output} is the output of a run"):
        find_files(output)


def test_the_output_of_a_run_is_accepted_as_an_adapter_but_not_as_weights_or_settings(
    config: TrainConfig, train: Train
) -> None:
    # The fixture `config` has 12 steps.
    train(config.with_(name="mine", save_every=6))
    output = Path(config.output)
    finished = output / "mine.safetensors"
    assert adapter_in(output) == adapter_in(finished) == finished
    assert config.with_(initial_adapter=str(output)).initial_adapter_path == finished
    # Folders that are not the output of a run are rejected, each with its reason.
    for folder, message in (
        (output / "checkpoint-000012", f"is a checkpoint, .*; give an adapter in {output}"),
        (Path(config.dataset), "is a folder without adapters; give an adapter file, or the output"),
        (output.parent / "missing", "there is no file or folder"),
    ):
        with pytest.raises(MissingFileError, match=f"^--adapter: .*{message}"):
            existing_adapter("adapter", folder)
    with pytest.raises(MissingFileError, match=r"^--initial-adapter: .* without adapters; give"):
        train(config.with_(initial_adapter=config.dataset, output=str(output.parent / "other")))
    # Without the final adapter, the adapters of steps are suggested.
    finished.unlink()
    with pytest.raises(MissingFileError, match=r"give one of its files: mine-step000006\.safe"):
        adapter_in(output)
    with pytest.raises(ConfigError, match=r"--weights: .* is the output of a run and has an"):
        train(config.with_(weights=str(output), output=str(output.parent / "other")))
    with pytest.raises(ConfigError, match=rf"is a folder, .*, such as {output / 'config.yaml'}"):
        TrainConfig.from_yaml(output)


def test_a_lock_names_its_process_and_ends_with_that_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    # The second argument of `held` is the start of its error's message.
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        refusal = f"busy by process {process.pid};"
        with pytest.raises(ConfigError, match=refusal), held(path, "busy"):
            pass
        process.kill()
    # The killed process left its lock file. Another process, here this one, can take the lock, and
    # the file then no longer names the killed process.
    assert path.exists()
    with held(path, "busy"):
        assert path.read_text() != f"{process.pid}\n"
    assert not path.exists()


def test_resuming_after_the_last_step_changes_no_file(config: TrainConfig, train: Train) -> None:
    train(config)  # 12 steps
    output = Path(config.output)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    with pytest.raises(ConfigError, match="is of step 12, and the run has 5 steps: the run is"):
        train(config.with_(resume="latest", steps=5))
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
