"""Runs of several processes: results, failures, signals and wrong settings.

The results equal those of one process that takes as many batches in each step.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.cli import main
from trainable_candle.distributed.launch import LAUNCHER
from trainable_candle.run import JSON_LOG
from trainable_candle.train.logs import read_json_log, read_log
from trainable_candle.train.state import checkpoints

PROGRAM = [sys.executable, "-m", "trainable_candle"]


def train_command(base: Path, images: Path, output: Path, **more: object) -> list[str]:
    """Return the command that trains with these settings."""
    settings = {
        "model": "digits",
        "weights": base,
        "dataset": images,
        "output": output,
        "steps": 6,
        "rank": 4,
        "batch-size": 2,
        "learning-rate": 1e-2,
        "optimizer": "adamw",
        "lora-dropout": 0.1,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return [*PROGRAM, "train", *(str(part) for k, v in settings.items() for part in (f"--{k}", v))]


def losses(folder: Path) -> list[float]:
    return [float(row["loss"]) for row in read_log(folder / "train.csv")]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Return the device that the processes compute on."""
    name: str = request.param
    if name == "cuda" and (not tc.cuda.is_available() or tc.cuda.device_count() < 2):
        pytest.skip("needs two GPUs")
    return name


@pytest.fixture(scope="module")
def alone(
    digits_base: Path, digits_folder: Path, tmp_path_factory: pytest.TempPathFactory, device: str
) -> Path:
    """Train one process with four batches per step; return the output folder."""
    output = tmp_path_factory.mktemp("alone") / "run"
    more = {"gradient_accumulation": 4, "device": device, "precision": "f32"}
    result = run(train_command(digits_base, digits_folder, output, **more))
    assert result.returncode == 0, result.stderr
    return output


def test_one_gpu_starts_one_process(
    digits_base: Path, digits_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    def launch(arguments: list[str], gpus: list[int], **_: object) -> int:
        launched.append(gpus)
        # Train in this process instead of one that the launcher starts.
        monkeypatch.setenv(LAUNCHER, str(reading))
        return main(["train", *arguments])

    # A process that a launcher started ends when the launcher closes the writing end of a pipe. The
    # test keeps both ends of this pipe open.
    reading, _ = os.pipe()
    monkeypatch.setattr("trainable_candle.cli.train.launch", launch)
    command = train_command(digits_base, digits_folder, tmp_path / "run", gpus=1, device="cpu")
    assert main(command[command.index("train") :]) == 0
    assert launched == [[0]]
    assert (tmp_path / "run" / "adapter.safetensors").is_file()


@pytest.mark.gpu
def test_a_run_on_one_gpu_has_the_losses_of_a_run_without_a_launcher(
    gpu: str, digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    for name, gpus in (("alone", {}), ("launched", {"gpus": 1})):
        command = train_command(digits_base, digits_folder, tmp_path / name, device=gpu, **gpus)
        result = run(command)
        assert result.returncode == 0, result.stderr
        assert (tmp_path / name / "adapter.safetensors").is_file()
    np.testing.assert_allclose(losses(tmp_path / "launched"), losses(tmp_path / "alone"), rtol=1e-6)


def test_two_processes_that_start_from_pissa_train_the_adapter_of_one_process(
    digits_base: Path, digits_folder: Path, tmp_path: Path, device: str
) -> None:
    more = {"effective_batch": 8, "device": device, "precision": "f32", "init": "pissa"}
    adapters = []
    # `--init pissa` rejects dropout. Rounding changes SGD's updates little; the next test says how
    # it changes Adam's.
    for name, gpus in (("alone", {}), ("two", {"gpus": 2})):
        output = tmp_path / name
        command = train_command(
            digits_base, digits_folder, output, **more, **gpus, optimizer="sgd", lora_dropout=0
        )
        result = run(command)
        assert result.returncode == 0, result.stderr
        adapters.append(tc.load_file(output / "adapter.safetensors"))
    for name, value in adapters[0].items():
        np.testing.assert_allclose(adapters[1][name].numpy(), value.numpy(), atol=1e-5)


def test_two_processes_have_the_results_of_one_with_twice_the_batches(
    alone: Path, digits_base: Path, digits_folder: Path, tmp_path: Path, device: str
) -> None:
    output = tmp_path / "two"
    more = {"gpus": 2, "effective_batch": 8, "device": device, "precision": "f32"}
    result = run(train_command(digits_base, digits_folder, output, **more))
    assert result.returncode == 0, result.stderr
    assert "6 steps of 8 images (4 batches of 2 on 2 devices)" in result.stdout
    np.testing.assert_allclose(
        losses(output), losses(alone), rtol=1e-6 if device == "cpu" else 1e-4
    )
    if device != "cpu":
        # On GPUs the adapters can differ by whole updates: Adam's first updates depend almost only
        # on the signs of the gradients, and rounding can change the sign of a gradient near 0.
        return
    found = tc.load_file(output / "adapter.safetensors")
    for name, expected in tc.load_file(alone / "adapter.safetensors").items():
        np.testing.assert_allclose(found[name].numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)


def test_two_runs_with_stochastic_rounding_write_the_same_adapter(
    digits_base: Path, digits_folder: Path, tmp_path: Path, device: str
) -> None:
    found = []
    for folder in ("first", "second"):
        output = tmp_path / folder
        # After every step, check that the processes have the same adapter.
        more = {"gpus": 2, "device": device, "compare_every": 1}
        command = train_command(digits_base, digits_folder, output, **more)
        result = run([*command, "--stochastic-rounding"])
        assert result.returncode == 0, result.stderr
        adapter = tc.load_file(output / "adapter.safetensors")
        found.append({name: tensor.numpy().tobytes() for name, tensor in adapter.items()})
    assert found[0] == found[1]


@pytest.mark.gpu
def test_runs_with_streamed_blocks_equal_those_without(
    digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    if not tc.cuda.is_available() or tc.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = []
    for blocks in (0, 1):
        output = tmp_path / str(blocks)
        more = {"gpus": 2, "device": "cuda", "precision": "bf16", "stream_blocks": blocks}
        more |= {"gradient_checkpointing": "full", "base_precision": "same"}
        result = run(train_command(digits_base, digits_folder, output, **more))
        assert result.returncode == 0, result.stderr
        adapter = tc.load_file(output / "adapter.safetensors")
        values = {name: tensor.numpy().tobytes() for name, tensor in adapter.items()}
        found.append((losses(output), values))
    assert found[0] == found[1]


def test_processes_on_two_machines_train_together(
    alone: Path, digits_base: Path, digits_folder: Path, tmp_path: Path, device: str
) -> None:
    if device != "cpu":
        pytest.skip("two launchers would take the same GPUs")
    output = tmp_path / "machines"
    more = {"gpus": 2, "effective_batch": 8, "device": device, "precision": "f32"}
    command = train_command(digits_base, digits_folder, output, **more)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "localhost", "TRAINABLE_CANDLE_PORT": str(probe.getsockname()[1])}
    launchers = [
        subprocess.Popen(
            command,
            env={**os.environ, **address, "NNODES": "2", "NODE_RANK": str(machine)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for machine in range(2)
    ]
    outputs = [launcher.communicate(timeout=120) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    assert "6 steps of 8 images (4 batches of 2 on 4 devices)" in outputs[0][0]
    # Each machine has two ranks. The first of them prints to the terminal, so it has no log.
    assert sorted(path.name for path in (output / "logs").iterdir()) == ["rank-1.log", "rank-3.log"]
    np.testing.assert_allclose(losses(output), losses(alone), rtol=1e-6)


def test_a_run_continues_with_another_number_of_processes(
    alone: Path, digits_base: Path, digits_folder: Path, tmp_path: Path, device: str
) -> None:
    output = tmp_path / "resumed"
    common = {"device": device, "precision": "f32", "resume": "auto"}
    more = {"gpus": 2, "gradient_accumulation": 2, "steps": 3, **common}
    start = train_command(digits_base, digits_folder, output, **more)
    assert run(start).returncode == 0
    more = {"gradient_accumulation": 4, "steps": 6, **common}
    result = run(train_command(digits_base, digits_folder, output, **more))
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(
        losses(output), losses(alone), rtol=1e-6 if device == "cpu" else 1e-4
    )


def test_validation_on_two_processes_has_the_losses_of_one(
    digits_base: Path, digits_folder: Path, tmp_path: Path, device: str
) -> None:
    common = {"validation_split": 0.3, "validate_every": 3, "ema_decay": 0.5,
              "device": device, "precision": "f32", "batch_size": 1}  # fmt: skip
    found = []
    for name, more in (("one", {"gradient_accumulation": 2}), ("two", {"gpus": 2})):
        arguments = train_command(digits_base, digits_folder, tmp_path / name, **common, **more)
        result = run(arguments)
        assert result.returncode == 0, result.stderr
        rows = read_json_log(tmp_path / name / JSON_LOG)
        found.append(
            {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
        )
        assert (tmp_path / name / "adapter-best.safetensors").exists()
    one, two = found
    assert list(two) == list(one) == [0, 3, 6]
    # Before the first update, the losses are the same in every bit. Later they differ, because the
    # two runs round the sums of gradients differently.
    assert two[0] == one[0]
    np.testing.assert_allclose([*two.values()], [*one.values()], rtol=1e-5)


def test_all_processes_end_early_after_the_same_step(
    digits_base: Path, digits_folder: Path, tmp_path: Path, device: str
) -> None:
    more = {"validation_split": 0.3, "validate_every": 2, "early_stop": 1, "steps": 40,
            "learning_rate": 0.3, "gpus": 2, "device": device, "precision": "f32",
            "batch_size": 1}  # fmt: skip
    # More than `steps`: the processes compare adapters only before checkpoints and at the end.
    more["compare_every"] = 100
    output = tmp_path / "run"
    result = run(train_command(digits_base, digits_folder, output, **more))
    assert result.returncode == 0, result.stderr
    rows = [row for row in read_json_log(output / JSON_LOG) if "validation_loss" in row]
    after_steps = [row["validation_loss"] for row in rows[1:]]  # Without that of step 0.
    rises = [n for n in range(1, len(after_steps)) if after_steps[n] >= after_steps[n - 1]]
    # The first validation without an improvement (`early_stop` is 1) ends the run.
    assert rises == [len(after_steps) - 1]
    end = 2 * len(after_steps)  # `validate_every` is 2.
    assert end < 40
    assert f"early stop: after step {end} of 40, because 1 validation in a row" in result.stdout
    assert [folder.name for folder in checkpoints(output)] == [f"checkpoint-{end:06d}"]
    assert (output / "adapter.safetensors").exists()


def test_a_killed_process_ends_all_processes_and_leaves_the_checkpoint(
    digits_base: Path, digits_folder: Path, tmp_path: Path, device: str
) -> None:
    output = tmp_path / "killed"
    more = {"gpus": 2, "steps": 1_000_000, "save_every": 5, "device": device}
    command = train_command(digits_base, digits_folder, output, **more)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not checkpoints(output) and time.monotonic() < deadline:
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        victim = next(pid for pid in map(int, children) if b"RANK=1" in environment(pid))
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    # The first message is from the launcher, the second from the process that is left.
    assert b"rank 1 ended with signal SIGKILL" in errors
    assert b"rank 1 has ended" in errors
    assert checkpoints(output)


def environment(pid: int) -> list[bytes]:
    """Return the environment variables of a process, each as NAME=VALUE."""
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_on_a_signal_a_run_saves_a_checkpoint_and_ends(
    digits_base: Path, digits_folder: Path, tmp_path: Path, sent: signal.Signals, device: str
) -> None:
    output = tmp_path / "stopped"
    more = {"gpus": 2, "steps": 1_000_000, "device": device}
    command = train_command(digits_base, digits_folder, output, **more)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 60
        while len(read_log(output / "train.csv")) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        if sent == signal.SIGINT:
            os.killpg(process.pid, sent)  # On Ctrl-C, a terminal signals the process group.
        else:
            process.send_signal(sent)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + sent, errors
    assert b"continue with:" in errors
    assert checkpoints(output)


def test_a_missing_gpu_is_reported(digits_base: Path, digits_folder: Path, tmp_path: Path) -> None:
    if tc.cuda.is_available():
        pytest.skip("there is a GPU")
    command = train_command(digits_base, digits_folder, tmp_path / "run", gpus=2, device="cuda")
    result = run(command)
    assert result.returncode == 2
    assert "gpus: 2 asked for, and no GPU can be used" in result.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"gpus": "two"}, "expected a number of GPUs"),
        ({"gpus": "0"}, "expected at least 1"),
        ({"gpus": "1,1"}, "names a GPU twice"),
        ({"gpus": "all"}, "gpus: all selects GPUs, and --device cpu uses none; give the number"),
        ({"gpus": "0,2"}, "gpus: 0,2 selects GPUs, and --device cpu uses none; give the number"),
        # Two processes with batches of two.
        ({"gpus": 2, "effective_batch": 6}, "give a multiple of 4"),
    ],
    ids=["word", "none", "twice", "all on the CPU", "list on the CPU", "effective batch"],
)
def test_wrong_settings_are_rejected(
    digits_base: Path,
    digits_folder: Path,
    tmp_path: Path,
    more: dict[str, object],
    message: str,
) -> None:
    result = run(train_command(digits_base, digits_folder, tmp_path / "run", device="cpu", **more))
    assert result.returncode == 2
    assert message in result.stderr
