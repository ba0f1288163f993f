"""What `make` would run: the demo is built for the GPU of the machine, or for the CPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def environment(folder: Path, gpus: str | None) -> dict[str, str]:
    """Make a folder of a few tools, and return environment variables with it alone as PATH.

    `nvidia-smi` is one of the tools and prints `gpus`; if `gpus` is None, there is no `nvidia-smi`.
    """
    tools = folder / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "awk", "make", "sed", "find", "env", "cat", "dirname", "python3"):
        found = shutil.which(name)
        assert found is not None, name
        (tools / name).symlink_to(found)
    if gpus is not None:
        tool = tools / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho '{gpus}'\n")
        tool.chmod(0o755)
    return {**os.environ, "PATH": str(tools)}


def run(folder: Path, gpus: str | None, *command: str) -> str:
    """Return what a command prints in the environment of `environment(folder, gpus)`."""
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(folder, gpus),
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


# `gpus` has a line for each GPU: the version of the driver, and the GPU's compute capability.
# Training needs a driver of version 580 or later and a compute capability of at least 8.0. The
# architecture has the name that nvcc uses; for compute capability 9.0 it is 90a.
@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("580.65.06, 9.0", "90a"),
        ("581.0, 8.6", "86"),
        ("580.1, 12.0", "120"),
        ("580.1, 7.5", ""),
        ("535.1, 8.6", ""),
        ("580.1, 7.5\n580.1, 8.9", "89"),
        ("NVIDIA-SMI has failed", ""),
        (None, ""),
    ],
)
def test_the_architecture_is_that_of_the_first_gpu_that_can_train(
    tmp_path: Path, gpus: str | None, expected: str
) -> None:
    assert run(tmp_path, gpus, ".ci/gpu_arch") == expected


def test_the_demo_is_built_for_the_architecture_of_the_gpu_alone(tmp_path: Path) -> None:
    planned = run(tmp_path, "580.1, 8.6", "make", "--dry-run", "--always-make", "setup")
    assert "TRAINABLE_CANDLE_CUDA_ARCHS=86 " in planned
    assert "--features cuda" in planned
    assert "'.[demo,cuda13]'" in planned


def test_without_a_gpu_the_demo_is_built_for_the_cpu(tmp_path: Path) -> None:
    planned = run(tmp_path, None, "make", "--dry-run", "--always-make", "setup")
    assert "pip install '.[demo]'" in planned
    assert "cuda" not in planned


def test_installing_the_cpu_wheel_removes_the_marks_of_other_wheels(tmp_path: Path) -> None:
    # `make setup` leaves such a mark in .venv: its name says for which GPU the installed package is
    # built, or that it is built for the CPU.
    planned = run(tmp_path, "580.1, 8.6", "make", "--dry-run", "--always-make", "wheel")
    assert planned.endswith("rm -f .venv/.setup-*\ntouch .venv/.setup-cpu")


def test_make_check_builds_the_site(tmp_path: Path) -> None:
    planned = run(tmp_path, None, "make", "--dry-run", "--always-make", "check")
    assert " docs; do" in planned  # the end of `for step in format deny … docs; do`
