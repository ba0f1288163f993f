"""Processes compare settings, versions and files before a run, and parameters during it."""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from trainable_candle.distributed.agreement import differing
from trainable_candle.distributed.launch import rank_environment

LIMIT_SECONDS = 30.0
"""All processes of a test must end within this number of seconds."""


def run_ranks(arguments: list[list[str]]) -> list[tuple[int, str, str]]:
    """Run one Python process per rank; return the exit status, output and errors of each.

    `arguments` are the command-line arguments of each rank's Python.
    """
    size = len(arguments)
    began = time.monotonic()
    # In /tmp, because the path of the socket where the processes meet must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as meeting:
        processes = [
            subprocess.Popen(
                [sys.executable, *arguments[rank]],
                env=rank_environment(Path(meeting), rank, size),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        # The timeout is longer than the limit: it only ends the wait for a process that hangs.
        texts = [process.communicate(timeout=60) for process in processes]
    assert time.monotonic() - began < LIMIT_SECONDS
    return [(p.returncode, *text) for p, text in zip(processes, texts, strict=True)]


def training(base: Path, output: Path, dataset: str, *more: str) -> list[str]:
    """Return the arguments with which Python trains the digits model for two steps."""
    common = ["-m", "trainable_candle", "train", "--model", "digits", "--device", "cpu"]
    places = ["--weights", str(base), "--output", str(output), "--dataset", dataset]
    return [*common, *places, "--steps", "2", "--rank", "2", *more]


def require_all_fail(found: list[tuple[int, str, str]], *messages: str) -> None:
    """Assert that each process failed, and that its errors contain all messages."""
    for status, _, errors in found:
        assert status != 0
        for message in messages:
            assert message in errors


def test_settings_that_differ_are_reported_by_all(
    digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    found = run_ranks(
        [
            training(digits_base, tmp_path / "run", str(digits_folder), "--learning-rate", rate)
            for rate in ("1e-3", "2e-3")
        ]
    )
    require_all_fail(
        found,
        "rank 1 does not belong to this run",
        "learning_rate is 0.002 there and 0.001 on rank 0",
    )


def test_versions_that_differ_are_reported_by_all() -> None:
    script = (
        "import trainable_candle as tc\n"
        "from trainable_candle import _core\n"
        "_core.__version__ = '{}'\n"
        "tc.distributed.init('cpu')\n"
    )
    found = run_ranks([["-c", script.format(version)] for version in ("9.1.0", "9.2.0")])
    require_all_fail(
        found,
        "rank 1 does not belong to this run",
        "trainable-candle is 9.2.0 there and 9.1.0 on rank 0",
    )


@pytest.mark.parametrize("what", ["data", "weights"])
def test_files_that_differ_are_reported_by_all(
    digits_base: Path, digits_folder: Path, tmp_path: Path, what: str
) -> None:
    """The processes read different folders, as on machines without a common file system."""
    datasets = [tmp_path / "data" / "images of 0", tmp_path / "images of 1"]
    bases = [tmp_path / "base of 0", tmp_path / "models" / "base of 1"]
    for rank in range(2):
        shutil.copytree(digits_folder, datasets[rank])
        shutil.copytree(digits_base, bases[rank])
    if what == "data":
        # The message names the image whose caption differs.
        (datasets[1] / "3.txt").write_text("an eight")
        expected = "3.png is "
    else:
        with (bases[1] / "config.json").open("a") as file:
            file.write("\n")
        expected = "config.json is "
    arguments = [
        training(base, tmp_path / "run", str(folder))
        for base, folder in zip(bases, datasets, strict=True)
    ]
    require_all_fail(run_ranks(arguments), f"rank 1 has other {what} than rank 0: {expected}")


# The argument is the rank whose parameters change after step 3; -1: no rank. The program prints the
# last step that it has done.
TRAINING = """
import sys

import trainable_candle as tc
from trainable_candle.distributed.agreement import SameParameters
from trainable_candle.distributed.group import make_group
from trainable_candle.distributed.world import from_environment
from trainable_candle.train import Callback, Trainer

group = make_group(from_environment(), "cpu", {})
parameters = {"a": tc.Var(tc.full((4,), 0.5)), "b": tc.Var(tc.full((2, 3), 0.1))}
reached = []


class Fault(Callback):
    def on_step_end(self, trainer, report):
        reached.append(report.step)
        if report.step == 3 and group.rank == int(sys.argv[1]):
            values = parameters["b"].detach().numpy().copy()
            values[1, 2] *= 1.001
            parameters["b"].set(tc.tensor(values))


class BatchNumbers:
    def batch(self, index):
        return index


trainer = Trainer(
    lambda n: (parameters["a"].sum() * (n + 1.0) - parameters["b"].sum()).square(),
    parameters,
    tc.optim.AdamW(list(parameters.values()), lr=1e-3),
    BatchNumbers(),
    steps=9,
    callbacks=[Fault(), SameParameters(group, moments=2)],  # compares after every second step
    group=group,
)
try:
    trainer.train()
finally:
    print(reached[-1])
group.close()
"""


def test_parameters_that_differ_end_the_run_at_the_next_comparison() -> None:
    found = run_ranks([["-c", TRAINING, "1"]] * 2)
    # b has six values near 0.1, so its norm is about 0.24.
    require_all_fail(found, "after step 4, b differs between rank 1 (its norm is 0.2")
    # The processes compare every two steps, so step 4 is the first comparison after the change.
    assert [output.strip() for _, output, _ in found] == ["4", "4"]


def test_parameters_that_stay_equal_do_not_end_the_run() -> None:
    found = run_ranks([["-c", TRAINING, "-1"]] * 2)
    assert [(status, output.strip()) for status, output, _ in found] == [(0, "9"), (0, "9")]


def test_facts_that_one_process_lacks_are_reported() -> None:
    # `differing` compares the facts of another process with those of rank 0.
    rank_0, other = {"a": "1", "b": "2"}, {"b": "2", "c": "3"}
    assert differing(other, rank_0) == [
        "a is missing there and 1 on rank 0",
        "c is 3 there and missing on rank 0",
    ]
