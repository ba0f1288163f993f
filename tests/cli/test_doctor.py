"""`doctor` names faults and their cures. The tests replace `nvidia-smi` by a script."""

import os
import shutil
from pathlib import Path

import pytest

import trainable_candle as tc
from trainable_candle import doctor
from trainable_candle.cli import main
from trainable_candle.doctor import FAULT, GOOD, NOTE, Finding, examine


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file `said`, which a fake `nvidia-smi` prints.

    The fake fails if a file `said.fails` is in the same folder.
    """
    said = tmp_path / "said"
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\ncat "{said}"\n[ ! -e "{said}.fails" ]\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    said.write_text("NVIDIA H200, 580.65.06, 9.0, 143771 MiB\n")
    return said


def found(what: str) -> Finding:
    return next(finding for finding in examine(Path()) if finding.what == what)


def test_a_working_driver_is_no_fault_and_a_missing_gpu_is(driver: Path) -> None:
    assert found("gpu").state == GOOD
    assert "H200" in found("gpu").found
    driver.write_text("")
    assert found("gpu").state == FAULT


@pytest.mark.parametrize(
    ("said", "fault", "cure"),
    [
        ("NVIDIA A10, 535.1.2, 8.6, 24564 MiB\n", "the driver is too old", "driver 580 or newer"),
        ("Tesla T4, 580.1, 7.5, 16384 MiB\n", "compute capability below 8.0", "Ampere"),
    ],
)
def test_old_drivers_and_gpus_are_faults(driver: Path, said: str, fault: str, cure: str) -> None:
    driver.write_text(said)
    finding = found("gpu")
    assert finding.state == FAULT
    assert fault in finding.found
    assert cure in finding.cure


def test_a_driver_that_fails_is_a_fault(driver: Path) -> None:
    driver.write_text("Failed to initialize NVML: Driver/library version mismatch\n")
    driver.with_name("said.fails").touch()
    finding = found("gpu")
    assert (finding.state, finding.found) == (
        FAULT,
        "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch",
    )
    assert "reboot" in finding.cure


@pytest.mark.usefixtures("driver")
def test_a_build_without_cuda_beside_a_gpu_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "this build has no CUDA support"
    monkeypatch.setattr(tc.cuda, "unavailable_reason", lambda: reason)
    finding = found("cuda")
    assert (finding.state, finding.found) == (FAULT, f"cannot be used: {reason}")
    assert "+cu13" in finding.cure


@pytest.mark.parametrize(("count", "text"), [(1, "1 device can"), (2, "2 devices can")])
def test_usable_devices_are_counted(monkeypatch: pytest.MonkeyPatch, count: int, text: str) -> None:
    monkeypatch.setattr(tc.cuda, "unavailable_reason", lambda: None)
    monkeypatch.setattr(tc.cuda, "device_count", lambda: count)
    assert found("cuda") == Finding(GOOD, "cuda", f"{text} be used")


def test_without_a_gpu_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    if Path("/proc/driver/nvidia/version").exists() or tc.cuda.is_available():
        pytest.skip("there is a driver")
    before = tc.get_rng_state()
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "self-test  cpu: 60 steps in " in text
    assert text.endswith("0 faults\n")
    assert tc.get_rng_state() == before
    assert found("gpu").state == NOTE


def test_on_wsl_the_cure_names_the_file_wslconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_wsl", lambda: True)
    monkeypatch.setattr(tc.memory, "available_bytes", lambda: 2**30)
    assert ".wslconfig" in found("memory").cure


def test_a_folder_that_cannot_be_written_to_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert found("disk").state == FAULT


def test_a_self_test_that_does_not_learn_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_self_test", lambda _: (1.0, 0.5))
    assert main(["doctor"]) == 1
    assert "fault  self-test" in capsys.readouterr().out
