"""A probe finds how much host memory the driver pins. A run that needs more changes its plan.

The fixture `cuda` runs snippets on a simulated GPU, whose kernels do not compute. Its log has the
calls of the driver; `mark(name)`, which every snippet can call, writes a mark to the log. Snippets
find `os` and `tc` imported.
"""

import json
from pathlib import Path
from typing import Any

import pytest

MIB = 2**20


def total_bytes(calls: list[Any]) -> int:
    return sum(int(call["bytes"]) for call in calls)


@pytest.mark.parametrize(
    # The bytes that the simulated driver can pin (None: any number), that the probe is asked for,
    # and that it finds.
    ("limit", "wanted", "expected"),
    [
        # The driver pins everything that is wanted; the last step is the rest.
        (None, 300 * MIB + 5, 300 * MIB + 5),
        (None, 0, 0),
        # The probe pins steps of 64, 128, 256, ... MiB and keeps them. After a failure, steps are
        # halved, down to 64 MiB. It pins 64 + 128 of 200 MiB, and 64 + 128 + 128 of 330 MiB.
        (200 * MIB, 1024 * MIB, 192 * MIB),
        (330 * MIB, 1024 * MIB, 320 * MIB),
        # At 20 MiB even the smallest step, 64 MiB, fails. If only 19 MiB are wanted, the step is
        # 19 MiB.
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
    assert total_bytes(probe.of("alloc-pinned")) == expected
    assert total_bytes(probe.of("free-pinned")) == expected


def test_the_environment_variable_limits_the_probe_too(cuda: Any) -> None:
    run = cuda.run(
        f"""
    os.environ["TRAINABLE_CANDLE_PINNED_BYTES"] = str(100 * {MIB})
    from trainable_candle import _core
    print(_core.cuda_pinnable_bytes("cuda", 1 << 30))
    """
    )
    # The variable limits what the probe asks for, so the probe pins 64 MiB, then the rest.
    assert int(run.output) == 100 * MIB


@pytest.mark.parametrize("limited", [False, True], ids=["enough", "too little"])
def test_a_run_plans_with_the_memory_that_the_driver_pins(
    cuda: Any, flux_base: Path, sdxl_folder: Path, tmp_path: Path, *, limited: bool
) -> None:
    """If the driver pins too little, the log says so.

    The streamed weights that the run cannot pin then go through a ring: a small pinned buffer that
    the run fills again and again.
    """
    settings = {
        # `sdxl_folder` is a folder of images with captions.
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
    pinned.PROBED = 1  # so that even a plan that needs little pinned memory is probed
    # This copy allocates the buffer of pinned memory through which all later values are copied,
    # except streamed weights.
    tc.ones((1000,)).to("cuda").to("cpu")
    lines = []
    train_adapter(TrainConfig(**{settings!r}), progress=False, report=lines.append)
    print(json.dumps(lines))
    """
    # If limited, the driver pins that buffer (8 MiB) and 64 KiB for the streamed weights.
    run = cuda.run(code, settings={"PINNED": str(8 * MIB + (64 << 10))} if limited else {})
    lines = json.loads(run.output.splitlines()[-1])
    assert sum(line.startswith("plan: the system pins") for line in lines) == limited
    assert any("too little pinned memory" in line for line in lines) == limited
