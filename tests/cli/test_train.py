"""`train`, `sample` and `merge` with the model `digits`, run as commands."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.cli import main
from trainable_candle.models import DigitsTransformer
from trainable_candle.settings.training import OPTIMIZERS
from trainable_candle.train import TrainConfig
from trainable_candle.train.logs import read_log
from trainable_candle.train.state import checkpoints, step_of

PROGRAM = [sys.executable, "-m", "trainable_candle"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def training(base: Path, images: Path, output: Path, steps: int) -> list[str]:
    """Return the arguments of the command `train` for a run of `steps` steps."""
    settings = {
        "model": "digits",
        "weights": base,
        "dataset": images,
        "output": output,
        "steps": steps,
        "rank": 4,
        "batch-size": 4,
        "learning-rate": 1e-2,
        "optimizer": "adamw",
        "lora-dropout": 0.1,
    }
    return ["train", *(str(part) for k, v in settings.items() for part in (f"--{k}", v))]


@pytest.fixture(scope="module")
def trained(
    digits_base: Path, digits_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The output folder of a run of 30 steps."""
    output = tmp_path_factory.mktemp("trained") / "run"
    result = run(*training(digits_base, digits_folder, output, 30))
    assert result.returncode == 0, result.stderr
    assert f"adapter: {output / 'adapter.safetensors'}" in result.stdout
    assert "30/30" in result.stderr
    return output


def wait_for_steps(process: subprocess.Popen[str], log: Path, steps: int) -> None:
    while len(read_log(log)) < steps:
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize(("stop_signal", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_on_a_signal_a_run_saves_and_prints_how_to_resume(
    digits_base: Path,
    digits_folder: Path,
    tmp_path: Path,
    stop_signal: signal.Signals,
    status: int,
) -> None:
    output = tmp_path / "a run"
    command = [*PROGRAM, *training(digits_base, digits_folder, output, 1_000_000)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for_steps(process, output / "train.csv", 3)
        process.send_signal(stop_signal)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in errors
    stopped = step_of(checkpoints(output)[-1])
    assert f"stopped after step {stopped} of 1000000; continue with:" in errors
    assert len(read_log(output / "train.csv")) == stopped
    assert not (output / "adapter.safetensors").exists()

    # The last line is the command that continues the run.
    advice = shlex.split(errors.splitlines()[-1])
    assert advice[:2] == ["trainable-candle", "train"]
    steps = stopped + 4
    resumed = run(*advice[1:], "--steps", steps)
    assert resumed.returncode == 0, resumed.stderr
    unbroken = run(*training(digits_base, digits_folder, tmp_path / "unbroken", steps))
    assert unbroken.returncode == 0, unbroken.stderr
    adapters = [
        tc.load_file(folder / "adapter.safetensors") for folder in (output, tmp_path / "unbroken")
    ]
    assert adapters[0].keys() == adapters[1].keys()
    for name, tensor in adapters[0].items():
        np.testing.assert_array_equal(tensor.numpy(), adapters[1][name].numpy())
    logs = [read_log(folder / "train.csv") for folder in (output, tmp_path / "unbroken")]
    assert [row["loss"] for row in logs[0]] == [row["loss"] for row in logs[1]]


def test_flags_override_a_file_of_settings(
    digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: digits\nweights: {digits_base}\ndataset: {digits_folder}\n"
        f"output: {tmp_path / 'out'}\nsteps: 50\nlearning_rate: 1e-3\n"
    )
    result = run("train", "--config", path, "--steps", 2)
    assert result.returncode == 0, result.stderr
    assert len(read_log(tmp_path / "out" / "train.csv")) == 2


def test_the_flag_optimizer_accepts_every_optimizer_of_the_library(
    digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    classes = {
        value.__name__.lower()
        for value in vars(tc.optim).values()
        if isinstance(value, type) and issubclass(value, tc.optim.Optimizer)
    }
    # The flag's choices are OPTIMIZERS. One run shows that a choice reaches the optimizer.
    assert set(OPTIMIZERS) == classes - {"optimizer"}
    command = training(digits_base, digits_folder, tmp_path / "run", 2)
    result = run(*(text.replace("adamw", "prodigy") for text in command))
    assert result.returncode == 0, result.stderr


def test_folders_may_have_any_name(digits_base: Path, digits_folder: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"# \xf0\x9f\x90\x88 'a' \xff")  # an emoji, and a byte that is not UTF-8
    dataset, output = tmp_path / name, tmp_path / f"{name} out"
    shutil.copytree(digits_folder, dataset)
    result = run(*training(digits_base, dataset, output, 2))
    assert result.returncode == 0, result.stderr
    config = TrainConfig.from_yaml(output / "config.yaml")
    assert (config.dataset, config.output) == (str(dataset), str(output))
    resumed = run("train", "--config", output / "config.yaml", "--resume", "latest", "--steps", 3)
    assert resumed.returncode == 0, resumed.stderr


def check_rejected(result: subprocess.CompletedProcess[str], *texts: str) -> None:
    """Check that a command ended with status 2 and an error that contains `texts`."""
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    for text in texts:
        assert text in result.stderr


def test_an_output_folder_that_cannot_be_written_is_reported(
    digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    check_rejected(
        run(*training(digits_base, digits_folder, file, 2)),
        str(file),
        "exists and is a file, expected a folder",
    )
    check_rejected(
        run(*training(digits_base, digits_folder, file / "x", 2)), str(file), "Not a directory"
    )
    read_only = Path("/proc/self")  # even root cannot create a folder here
    check_rejected(
        run(*training(digits_base, digits_folder, read_only / "x", 2)), "/proc/self/x: No such"
    )


def test_weights_and_images_that_do_not_fit_the_model_are_rejected(
    digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    check_rejected(run(*training(tmp_path / "none", digits_folder, out, 2)), str(tmp_path / "none"))
    # A folder of images in place of the weights.
    check_rejected(
        run(*training(digits_folder, digits_folder, out, 2)),
        "there is no config.json in this folder",
    )
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    Image.new("RGB", (9, 8)).save(wrong / "a.png")
    (wrong / "a.txt").write_text("a cat")
    Image.new("RGB", (8, 8)).save(wrong / "b.png")
    (wrong / "b.txt").write_text("one or two")
    check_rejected(
        run(*training(digits_base, wrong, out, 2)),
        "2 of 2 images",
        "a.png: is 9x8 pixels, expected 8x8",
        "b.txt: 'one or two' names the digits 1, 2, expected one",
    )


def test_unknown_devices_and_layers_are_rejected(
    digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    arguments = training(digits_base, digits_folder, tmp_path / "out", 2)
    check_rejected(run(*arguments, "--device", "gpu"), "gpu")
    check_rejected(run(*arguments, "--target-modules", "to_x"), "to_x")


def test_an_unknown_dtype_is_rejected(digits_base: Path, tmp_path: Path) -> None:
    arguments = ["--weights", digits_base, "--prompt", "1", "--output", tmp_path / "a.png"]
    check_rejected(sample(*arguments, "--dtype", "f8"), "f8")


def sample(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run("sample", "--model", "digits", *arguments)


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def test_sample_draws_the_same_grid_unless_an_adapter_changes_it(
    digits_base: Path, trained: Path, tmp_path: Path
) -> None:
    common = ["--weights", digits_base, "--prompt", "a two", "--prompt", "7", "--count", 3]
    common += ["--steps", 4, "--columns", 3]
    result = sample(*common, "--output", tmp_path / "base.png")
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(f"6 images: {tmp_path / 'base.png'}\n")
    assert result.stdout.startswith("device: ")
    # 2 rows and 3 columns of 8x8 pixels, 1 pixel apart, all enlarged eightfold.
    assert pixels(tmp_path / "base.png").shape == (8 * (2 * 8 + 1), 8 * (3 * 8 + 2), 3)
    sample(*common, "--output", tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "base.png").read_bytes()
    adapter = ["--adapter", trained / "adapter.safetensors"]
    sample(*common, *adapter, "--output", tmp_path / "adapted.png")
    assert not np.array_equal(pixels(tmp_path / "adapted.png"), pixels(tmp_path / "base.png"))
    # With a scale near 0 the adapter has no effect, except on the rounding of pixels.
    sample(*common, *adapter, "--scale", 1e-9, "--output", tmp_path / "off.png")
    difference = pixels(tmp_path / "off.png") - pixels(tmp_path / "base.png")
    assert np.abs(difference).max() <= 1


def test_sample_rejects_prompts_without_a_digit(digits_base: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.png"
    result = sample("--weights", digits_base, "--prompt", "a cat", "--output", output)
    check_rejected(result, "'a cat' names no digit, expected one of 0 to 9 or of zero to nine")
    assert not output.exists()


def test_merge_writes_a_model_that_predicts_the_same(
    digits_base: Path, trained: Path, tmp_path: Path
) -> None:
    arguments = ["--model", "digits", "--weights", digits_base]
    arguments += ["--adapter", trained / "adapter.safetensors", "--output", tmp_path / "merged"]
    result = run("merge", *arguments)
    assert result.returncode == 0, result.stderr
    check_rejected(run("merge", *arguments), "which exists; expected a new or an empty folder")

    # Three noisy images, their timesteps and their digits.
    inputs = (
        tc.randn((3, 1, 8, 8)),
        tc.tensor([1.0, 500.0, 999.0]),
        tc.tensor([0, 5, 9]),
    )
    merged = DigitsTransformer.from_pretrained(tmp_path / "merged")
    model = DigitsTransformer.from_pretrained(digits_base)
    without_adapter = model(*inputs).numpy()
    model.load_adapter(trained / "adapter.safetensors")
    expected = model(*inputs).numpy()
    assert np.abs(expected - without_adapter).max() > 1e-2
    np.testing.assert_allclose(merged(*inputs).numpy(), expected, atol=1e-4)


def test_missing_adapters_and_files_that_are_not_adapters_are_rejected(
    digits_base: Path, trained: Path, tmp_path: Path
) -> None:
    arguments = ["--weights", digits_base, "--prompt", "1", "--output", tmp_path / "a.png"]
    check_rejected(
        sample(*arguments, "--adapter", tmp_path / "none.safetensors"), "none.safetensors"
    )
    check_rejected(sample(*arguments, "--adapter", trained / "train.csv"), "train.csv")
    check_rejected(
        sample(*arguments, "--adapter", digits_base / "model.safetensors"), "model.safetensors"
    )


def test_the_long_help_says_which_weights_to_download(capsys: pytest.CaptureFixture[str]) -> None:
    """For each model whose weights are not in the package: their place, size and licence."""
    assert main(["train", "--help-all"]) == 0
    section = capsys.readouterr().out.partition("weights to download:\n")[2]
    assert max(map(len, section.splitlines())) <= 80
    for name in families.NAMES:
        family = families.find(name)
        is_built_in = family.default_weights() is not None
        assert is_built_in == (f"  {name}: " not in section), name
        if not is_built_in:
            for what in (r"hub", r"\d GB", r"Apache-2\.0|License"):
                assert re.search(what, family.download), (name, what)
