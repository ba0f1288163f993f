"""Errors of commands: the user sees a short message and an exit status, but no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainable_candle import cli
from trainable_candle.errors import ConfigError, DatasetError, InternalError
from trainable_candle.settings import flag, settings
from trainable_candle.settings.foreign import INSTEAD


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainable_candle", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def status_of(error: BaseException) -> int:
    """Return the exit status of a command that raises `error`."""

    def action() -> int:
        raise error

    return cli.guarded(action)


@pytest.mark.parametrize(
    ("error", "status", "start"),
    [
        (ConfigError("rank is 0"), 2, "error: rank is 0"),
        (DatasetError("dataset: none"), 2, "error: dataset: none"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 2, "error: a.txt: No such"),
        (PermissionError(13, "Permission denied", "/x"), 2, "error: /x: Permission denied"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device"),
        (OSError("odd"), 2, "error: odd"),
        (ModuleNotFoundError("matplotlib: run pip"), 2, "error: matplotlib: run pip"),
        (ZeroDivisionError("division by zero"), 1, "error: ZeroDivisionError: division by zero"),
        (InternalError("bug"), 1, "error: InternalError: bug"),
        (KeyboardInterrupt(), 130, "\ninterrupted"),
    ],
    ids=repr,
)
def test_an_error_gives_a_message_and_an_exit_status(
    error: BaseException, status: int, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(error) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(start)
    assert "Traceback" not in printed.err
    # Status 1 stands for a bug. Only its message names the environment variable that shows the
    # traceback, `cli.TRACEBACK`.
    assert (cli.TRACEBACK in printed.err) == (status == 1)


def test_an_environment_variable_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cli.TRACEBACK, "1")
    assert status_of(ZeroDivisionError("x")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_error_for_an_unknown_command_suggests_the_nearest() -> None:
    result = run("trian")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: unknown command `trian`; did you mean `train`?\n"


def test_without_a_command_the_commands_are_listed() -> None:
    result = run()
    assert result.returncode == 2
    assert "usage: trainable-candle COMMAND" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --rnk 4", "unknown flag `--rnk`; did you mean `--rank`?"),
        ("train --lr 0", "learning_rate is 0.0, expected above 0"),
        # Messages have the setting's own name, also if the flag is another tool's synonym.
        ("train --network_dim 0", "rank is 0, expected at least 1"),
        (
            "train --model digits --dataset . --output o --weights none",
            "--weights: there is no file or folder none",
        ),
        (
            "sample --model digits --weights none --prompt 1 --output a.png",
            "--weights: there is no file or folder none",
        ),
        (
            "merge --model digits --adapter none --output o",
            "--adapter: there is no file or folder none",
        ),
        ("train --model digits --output o", "missing settings: dataset"),
        ("train --model digitz --dataset d --output o", "did you mean `digits`?"),
        ("train --model digits --dataset none --output o", "dataset: there is no folder none"),
        ("train --config none.yaml", "none.yaml: there is no such configuration file"),
        ("sample --model digits", "missing --prompt, --output"),
        ("sample --model digits --prompt 1 --output a.jpg", "expected the name of a .png file"),
        ("sample --model causal-lm", "missing --prompt (see"),
        (
            "sample --model causal-lm --prompt x --steps 3 --size 8x8",
            "--steps, --size have no effect with --model causal-lm, which writes texts",
        ),
        (
            "sample --model digits --prompt 1 --output a.png --tokens 3",
            "--tokens has no effect with --model digits, which draws images; leave it out",
        ),
        (
            "sample --model causal-lm --prompt x --count 2",
            "--count has no effect without --temperature",
        ),
        (
            "sample --model causal-lm --prompt x --raw --system y",
            "--system has no effect with --raw",
        ),
        (
            "sample --model causal-lm --prompt x --overwrite",
            "--overwrite has no effect without --output",
        ),
        (
            "sample --model causal-lm --prompt x --output a.png",
            "expected the name of a .txt file",
        ),
        ("sample --model causal-lm --prompt= --raw", "prompt: has no tokens; give a text"),
        (
            "chat --model causal-lm --vae a --prompt x",
            "--vae has no effect with --model causal-lm, whose weights are all in --weights",
        ),
        ("sample --scale 0", "argument --scale: expected a finite number other than 0, found 0"),
        (
            "sample --model causal-lm --temperature warm",
            "argument --temperature: invalid number value: 'warm'",
        ),
        (
            "sample --scale nan",
            "argument --scale: expected a finite number other than 0, found nan",
        ),
        (
            "sample --model sdxl --prompt x --output a.png --scale 0.5",
            "--scale has no effect without --adapter",
        ),
        (
            "sample --model sdxl --prompt x --output a.png --guidance 1 --negative-prompt y",
            "--negative-prompt has no effect with --guidance 1",
        ),
        (
            "sample --model sdxl --prompt x --output a.png --size 99992x99992",
            "sample: 1 image of 99992x99992 px need",
        ),
        (
            "sample --model digits --prompt 1 --output a.png --count 1000000000",
            "sample: 1000000000 images of 8x8 px need",
        ),
        # \udcff stands for a byte, 0xff, that is not UTF-8.
        ("sample --model sdxl --prompt \udcff --output a.png", "expected text in UTF-8"),
        ("train --model digits --dataset . --output o --sample-prompts \udcff", "text in UTF-8"),
        ("merge --model digits --adapter a", "missing --output"),
        # The working directory would be the data set and the folder of the run.
        ("train --model digits --dataset . --output . --gpus 1 --device cpu", "would write into ."),
        ("info --x", "unknown flag `--x`"),
        (
            "sample --model digits --prompt 1 --output /dev/null/a.png",
            "/dev/null is a file, expected",
        ),
        ("extract --model digits --tuned m --output a.safetensors", "--tuned: there is no file or"),
        ("sample --seed 18446744073709551616", "expected a whole number below 2**64"),
        ("demo --seed -1", "argument --seed: expected a whole number from 0, found -1"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(
    arguments: str, message: str, tmp_path: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "trainable_candle", *arguments.split()],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # The command has written nothing.


@pytest.mark.parametrize("ending", ["ckpt", "pt", "bin"])
def test_a_pickle_is_rejected_alone_and_in_a_folder(ending: str, tmp_path: Path) -> None:
    weights = tmp_path / f"model.{ending}"
    weights.write_bytes(b"PK")  # The ending alone decides; the content is never read.
    arguments = ["--model", "digits", "--prompt", "1", "--output", str(tmp_path / "a.png")]
    for given in (weights, tmp_path):
        result = run("sample", *arguments, "--weights", str(given))
        assert (result.returncode, result.stdout) == (2, "")
        assert f"{weights}: a .{ending} file is a pickle checkpoint, which is not" in result.stderr
        assert "safetensors file of the same model" in result.stderr


def test_flags_and_their_synonyms_are_all_different() -> None:
    synonyms = [flag(name) for _, setting in settings().values() for name in setting.synonyms]
    # INSTEAD has the settings of other tools for which an error gives advice.
    flags = [*synonyms, *map(flag, INSTEAD), *(flag(name) for name in settings())]
    assert len(set(flags)) == len(flags)


def test_a_closed_pipe_is_no_error() -> None:
    command = f'"{sys.executable}" -m trainable_candle info | true'
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.stderr == ""


def test_info_names_versions_devices_and_models() -> None:
    result = run("info")
    assert result.returncode == 0
    for text in ("trainable-candle ", "backend: ", "devices: cpu", "digits"):
        assert text in result.stdout


def test_the_help_of_train_imports_no_slow_package() -> None:
    code = """
import sys
from trainable_candle import cli
try:
    cli.main(["train", "--help"])
except SystemExit:
    pass
slow = {"matplotlib", "PIL", "tqdm", "sklearn", "scipy"} & sys.modules.keys()
sys.exit(f"imported: {slow}" if slow else 0)"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
