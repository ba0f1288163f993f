"""Runs that stream blocks from peers: values, failures, resume, wrong settings.

Each process keeps a slice of the streamed weights, and all processes read all slices.
`check_settings` allows streaming from peers only on GPUs. These runs skip `check_settings`, so that
they also work on the CPU, where the slices are in shared memory.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle import _core
from trainable_candle.distributed import streamed
from trainable_candle.distributed.launch import rank_environment
from trainable_candle.distributed.streamed import (
    BUS,
    NVLINK,
    require_peers,
    require_streams,
    slowest_link,
)
from trainable_candle.errors import ConfigError
from trainable_candle.models import DigitsTransformer
from trainable_candle.settings.checks import check_settings
from trainable_candle.train import TrainConfig
from trainable_candle.train.logs import read_log
from trainable_candle.train.state import checkpoints

RUN = """
import json
import sys

from trainable_candle import run
from trainable_candle.distributed.world import from_environment
from trainable_candle.train import TrainConfig

run.check_settings = lambda config: None
config = TrainConfig(
    model="digits", base_precision="same", rank=4, batch_size=2, gradient_checkpointing="full",
    **{"device": "cpu", "precision": "f32", **json.loads(sys.argv[1])},
)
run.train_adapter(config, progress=False, world=from_environment())
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a digits transformer of three blocks with random weights; return its folder."""
    folder = tmp_path_factory.mktemp("model") / "base"
    tc.manual_seed(0)
    model = DigitsTransformer(num_layers=3, num_attention_heads=2, attention_head_dim=8)
    for var in model.named_parameters().values():
        var.set(tc.randn(var.shape) * 0.3)
    model.save_pretrained(folder)
    return folder


def start(meeting: str, settings: dict[str, object]) -> list[subprocess.Popen[str]]:
    """Start two processes that train together; they meet in the folder `meeting`."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", RUN, json.dumps(settings)],
            env=rank_environment(Path(meeting), rank, 2),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def train(base: Path, images: Path, output: Path, **more: object) -> tuple[list[str], Any]:
    """Train with two processes; return the losses and the bytes of the adapter's tensors."""
    paths = {"weights": str(base), "dataset": str(images), "output": str(output)}
    # The processes meet at a socket, whose path must be short; pytest's folders have long paths.
    with tempfile.TemporaryDirectory(dir="/tmp") as meeting:
        processes = start(meeting, {**paths, "steps": 6, **more})
        errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    adapter = tc.load_file(output / "adapter.safetensors")
    values = {name: tensor.numpy().tobytes() for name, tensor in adapter.items()}
    return [row["loss"] for row in read_log(output / "train.csv")], values


def test_streaming_and_resuming_do_not_change_the_results(
    base: Path, digits_folder: Path, tmp_path: Path, device: str
) -> None:
    if device != "cpu" and tc.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    on_device = {"device": device, "precision": "f32" if device == "cpu" else "bf16"}
    expected = train(base, digits_folder, tmp_path / "host", **on_device, stream_blocks=3)
    assert expected == train(
        base, digits_folder, tmp_path / "resident", **on_device, stream_blocks=0
    )
    peers = {**on_device, "stream_blocks": 3, "stream_from": "peers"}
    assert train(base, digits_folder, tmp_path / "peers", **peers) == expected
    assert "stream_from: peers" in (tmp_path / "peers" / "config.yaml").read_text()
    # An interrupted run that streams from peers continues as if it had not been interrupted.
    resumed = tmp_path / "resumed"
    train(base, digits_folder, resumed, **peers, steps=3)
    assert train(base, digits_folder, resumed, **peers, resume="auto") == expected


def test_a_killed_process_ends_the_other(base: Path, digits_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    settings = {"weights": str(base), "dataset": str(digits_folder), "output": str(output)}
    # The run does not end by itself, and logs no losses.
    settings |= {"steps": 1_000_000, "save_every": 4, "log_every": 1_000_000}  # type: ignore[dict-item]
    with tempfile.TemporaryDirectory(dir="/tmp") as meeting:
        processes = start(meeting, {**settings, "stream_blocks": 3, "stream_from": "peers"})
        deadline = time.monotonic() + 60
        while not checkpoints(output) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(processes[1].pid, signal.SIGKILL)
        error = processes[0].communicate(timeout=60)[1]
        processes[1].communicate()
    assert processes[0].returncode
    assert "DistributedError: distributed: rank 1 has ended" in error
    assert checkpoints(output)


def configured(**more: Any) -> TrainConfig:
    """Return a configuration that streams from peers."""
    return TrainConfig(model="flux", device="cuda", stream_from="peers", **more)


def test_only_settings_that_can_stream_from_peers_are_accepted() -> None:
    with pytest.raises(ConfigError, match="give --gpus 2 or more, or leave out --stream-from peer"):
        require_peers(1)
    require_peers(2)
    check_settings(configured())
    with pytest.raises(ConfigError, match="no effect without --device cuda"):
        check_settings(replace(configured(), device="cpu"))
    with pytest.raises(ConfigError, match="without --stream-blocks or --stream-modulation"):
        check_settings(configured(stream_blocks=0, stream_modulation=False))
    with pytest.raises(ConfigError, match="stream_from is `disk`, expected one of host, peers"):
        TrainConfig(stream_from="disk")
    # `check_settings` accepts settings without `stream_blocks`, because a run's plan may choose it.
    # `require_streams` checks the settings after the plan: if it chose none, nothing is streamed.
    with pytest.raises(
        ConfigError, match="all of the model is on each GPU; give --stream-blocks N"
    ):
        require_streams(configured())
    require_streams(configured(stream_blocks=2))
    # Without `stream_from="peers"`, a run need not stream.
    require_streams(TrainConfig(model="flux", device="cuda"))


def test_a_single_process_is_rejected_before_it_writes_anything(
    digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    arguments = ["--model", "digits", "--weights", digits_base, "--dataset", digits_folder]
    arguments += ["--output", tmp_path / "run", "--device", "cuda", "--precision", "bf16"]
    arguments += ["--stream-from", "peers"]
    result = subprocess.run(
        [sys.executable, "-m", "trainable_candle", "train", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 2
    assert "and this one is alone; give --gpus 2 or more" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    # `links` are the links of this process's GPU to those of the other two processes: "none" if
    # there is no link, None if CUDA does not show the other GPU. `slowest` is the result; None
    # stands for an error.
    ("links", "slowest"),
    [
        ([NVLINK, NVLINK], NVLINK),
        ([NVLINK, BUS], BUS),
        ([None, NVLINK], BUS),
        ([BUS, "none"], None),
    ],
    ids=["NVLink", "bus", "GPU that CUDA does not show", "no link"],
)
def test_the_slowest_link_counts_and_a_missing_link_is_an_error(
    monkeypatch: pytest.MonkeyPatch, links: list[str | None], slowest: str | None
) -> None:
    monkeypatch.setattr(streamed, "machine", lambda: "machine")
    monkeypatch.setattr(_core, "cuda_bus_id", lambda _device: "0")
    monkeypatch.setattr(_core, "cuda_link", lambda _device, bus: links[int(bus) - 1])

    def exchange(message: bytes) -> list[bytes]:
        # The GPUs of the other two processes have the bus addresses 1 and 2.
        others = [message.replace(b'"bus": "0"', b'"bus": "%d"' % n) for n in (1, 2)]
        return [message, *others]

    group: Any = SimpleNamespace(exchange=exchange)
    if slowest is not None:
        assert slowest_link(group, "cuda:0") == slowest
        return
    with pytest.raises(
        ConfigError, match="GPU at 0 cannot read the memory of the one at 2; choose"
    ):
        slowest_link(group, "cuda:0")


def test_processes_that_share_no_memory_cannot_stream_from_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A process that shares no memory with others has no name of its machine.
    monkeypatch.setattr(streamed, "machine", lambda: "")
    monkeypatch.setattr(_core, "cuda_bus_id", lambda _device: "0")
    group: Any = SimpleNamespace(exchange=lambda message: [message, message])
    with pytest.raises(ConfigError, match="as one user and in one container, or leave out"):
        slowest_link(group, "cuda:0")
