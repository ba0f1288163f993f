"""Training with `trainable_candle.distributed.ray`, on a Ray cluster of two nodes.

Both nodes are on this machine, and each has one CPU.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trainable_candle.errors import ConfigError, DistributedError
from trainable_candle.run import LOG, train_adapter
from trainable_candle.settings import flag
from trainable_candle.train import TrainConfig
from trainable_candle.train.logs import read_log
from trainable_candle.train.state import checkpoints, step_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

from trainable_candle.distributed.ray import RayRun, train

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own warnings
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start a Ray cluster of two nodes with separate home folders, as on two machines."""
    memory = 80 * 2**20  # Ray's minimum, because the /dev/shm of a container may be small.
    nodes = Cluster()
    for name in ("first", "second"):
        home = str(tmp_path_factory.mktemp(name))
        nodes.add_node(
            num_cpus=1,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=memory,
            env_vars={"HOME": home},
        )
    ray.init(address=nodes.address, logging_level="ERROR")
    yield
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def config(digits_base: Path, digits_folder: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        model="digits",
        weights=str(digits_base),
        dataset=str(digits_folder),
        output=str(tmp_path / "run"),
        steps=6,
        rank=4,
        batch_size=2,
        learning_rate=1e-2,
        optimizer="adamw",
        device="cpu",
    )


def losses(output: str) -> list[float]:
    return [float(row["loss"]) for row in read_log(Path(output) / LOG)]


def test_two_processes_have_the_losses_of_one_with_twice_the_batches(
    config: TrainConfig, tmp_path: Path
) -> None:
    lines: list[str] = []
    done = train(config, workers=2, report=lines.append)
    assert done == RayRun(config.output, 6, completed=True, failures=0, stopped_by=None)
    assert [line.partition(" is process")[0] for line in lines] == ["ray: rank 0", "ray: rank 1"]
    alone = config.with_(output=str(tmp_path / "alone"), gradient_accumulation=2)
    train_adapter(alone, progress=False, report=lambda _: None)
    np.testing.assert_allclose(losses(config.output), losses(alone.output), rtol=1e-6)


def test_a_run_that_loses_a_process_starts_again_from_a_checkpoint(config: TrainConfig) -> None:
    config = config.with_(steps=400, save_every=20, keep_checkpoints=1)
    lines: list[str] = []

    def kill() -> None:
        output, deadline = Path(config.output), time.monotonic() + 60
        while not checkpoints(output) and time.monotonic() < deadline:
            time.sleep(0.01)
        (line,) = (line for line in lines if line.startswith("ray: rank 1 is"))
        # The line begins "ray: rank 1 is process PID".
        os.kill(int(line.split()[5]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    done = train(config, workers=2, max_failures=1, report=lines.append)
    killer.join()
    assert (done.step, done.completed, done.failures) == (400, True, 1)
    (failure,) = (line for line in lines if line.endswith("; starting again"))
    assert failure.startswith("ray: rank 1 on ")
    assert "died" in failure
    assert [int(row["step"]) for row in read_log(Path(config.output) / LOG)] == [*range(1, 401)]


def test_restarts_need_an_output_folder_that_all_machines_share(config: TrainConfig) -> None:
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"output: ~/run of .* give a folder that all machines"):
        train(config.with_(output="~/run"), workers=2, max_failures=1, report=lines.append)
    # Without restarts, only rank 0 needs the folder.
    done = train(config.with_(output="~/run"), workers=2, report=lines.append)
    assert done.completed


def test_on_sigterm_all_processes_save_and_end(config: TrainConfig) -> None:
    # `changed` returns the settings that differ from their defaults.
    arguments = config.with_(steps=1_000_000).changed()
    flags = [part for name, value in arguments.items() for part in (flag(name), str(value))]
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "trainable_candle", "ray", "--workers", "2", *flags]
    with subprocess.Popen(
        [*command, "--address", address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while len(read_log(Path(config.output) / LOG)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    (checkpoint,) = checkpoints(Path(config.output))
    assert f"stopped after step {step_of(checkpoint)} of 1000000; continue with:" in errors
    assert "--workers 2" in errors
    assert "--resume latest" in errors
    # Ray forwards what rank 0 prints.
    assert "1000000 steps of 4 images (2 batches of 2 on 2 devices)" in output


def test_a_run_with_wrong_settings_is_not_started_again(
    config: TrainConfig, tmp_path: Path
) -> None:
    lines: list[str] = []
    missing = config.with_(dataset=str(tmp_path / "nowhere"))
    with pytest.raises(DistributedError, match=r"ray: rank 0 on .*nowhere"):
        train(missing, workers=2, max_failures=5, report=lines.append)
    assert not any("starting again" in line for line in lines)


def test_cpus_and_gpus_that_the_cluster_lacks_are_an_error(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match=r"3 processes need 3 CPU, and the cluster has 2 CPU"):
        train(config, workers=3, wait_seconds=0.5)
    with pytest.raises(ConfigError, match="the cluster has no GPU"):
        train(config.with_(device="cuda"))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"gpus": "2"}, {}, "give --workers instead"),
        ({"device": "cuda:1"}, {}, "on a Ray cluster give cuda"),
        ({}, {"strategy": "NEAR"}, "expected one of PACK, SPREAD"),
        ({}, {}, "say how many processes"),
    ],
    ids=["gpus", "GPU index", "strategy", "count missing"],
)
def test_settings_that_do_not_fit_a_cluster_are_rejected(
    config: TrainConfig,
    changes: dict[str, str],
    options: dict[str, str],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(config.with_(**changes), **options)
