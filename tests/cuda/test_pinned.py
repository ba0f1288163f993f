"""A probe finds how much memory the driver pins, and a plan that needs more changes with it."""

import json
from pathlib import Path
from typing import Any

import pytest

MIB = 2**20


def bytes_of(calls: list[Any]) -> int:
    return sum(int(call["bytes"]) for call in calls)


@pytest.mark.parametrize(
    ("limit", "wanted", "expected"),
    [
        # The driver pins everything that is wanted; the last step pins the rest.
        (None, 300 * MIB + 5, 300 * MIB + 5),
        (None, 0, 0),
        # Steps of 64 MiB, 128 MiB and, after failures, of 128 MiB and 64 MiB.
        (200 * MIB, 1024 * MIB, 192 * MIB),
        (330 * MIB, 1024 * MIB, 320 * MIB),
        # A part that is smaller than the smallest step may fit where a whole step does not.
        (20 * MIB, 1024 * MIB, 0),
        (20 * MIB, 19 * MIB, 19 * MIB),
    ],
)
def test_a_probe_finds_the_pinned_memory_and_frees_it(
    cuda: Any, limit: int | None, wanted: int, expected: int
) -> None:
    run = cuda.run(
        f"""
    from trainable_candle import _core
    mark("probe")
    print(_core.cuda_pinnable_bytes("cuda", {wanted}))
    mark("end")
    """,
        settings={} if limit is None else {"PINNED": str(limit)},
    )
    assert int(run.output) == expected
    probe = run.after("probe")
    assert bytes_of(probe.of("alloc-pinned")) == bytes_of(probe.of("free-pinned")) == expected


def test_the_environment_variable_limits_the_probe_too(cuda: Any) -> None:
    run = cuda.run(
        f"""
    os.environ["TRAINABLE_CANDLE_PINNED_BYTES"] = str(100 * {MIB})
    from trainable_candle import _core
    print(_core.cuda_pinnable_bytes("cuda", 1 << 30))
    """
    )
    assert int(run.output) == 100 * MIB


@pytest.mark.parametrize("limited", [False, True])
def test_a_run_plans_with_the_memory_that_the_driver_pins(
    cuda: Any, flux_base: Path, sdxl_folder: Path, tmp_path: Path, *, limited: bool
) -> None:
    """Only if the driver pins too little, the log says so and the run copies through a ring."""
    settings = {
        "model": "flux", "weights": str(flux_base), "dataset": str(sdxl_folder),
        "output": str(tmp_path / "run"), "resolution": 32, "max_side": 48, "cache": "memory",
        "stream_blocks": 3, "base_precision": "same", "gradient_checkpointing": "none",
        "rank": 4, "steps": 1, "precision": "bf16", "device": "cuda",
    }  # fmt: skip
    code = f"""
    import json
    from trainable_candle.run import train_adapter
    from trainable_candle.tasks import pinned
    from trainable_candle.train import TrainConfig, Trainer

    # Kernels do not compute, so losses have arbitrary values.
    Trainer._require_finite = lambda *_: None
    pinned.PROBED = 1
    # This copy allocates the buffer of pinned memory that later copies of other values use, too.
    tc.ones((1000,)).to("cuda").to("cpu")
    told = []
    train_adapter(TrainConfig(**{settings!r}), progress=False, report=told.append)
    print(json.dumps(told))
    """
    # The driver pins one buffer of 8 MiB and 64 KiB more.
    run = cuda.run(code, settings={"PINNED": str(8 * MIB + (64 << 10))} if limited else {})
    told = json.loads(run.output.splitlines()[-1])
    found = [line for line in told if line.startswith("plan: the system pins")]
    assert len(found) == limited
    assert any("too little pinned memory" in line for line in told) == limited
