"""`doctor` names faults and their cures. A script takes the place of `nvidia-smi`."""

import os
import shutil
from pathlib import Path

import pytest

import trainable_candle as tc
from trainable_candle import doctor
from trainable_candle.cli import main
from trainable_candle.doctor import FAULT, GOOD, NOTE, Finding, examine


@pytest.fixture
def smi_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a fake `nvidia-smi` prints; at first it describes a good GPU.

    A line has the name, the version of the driver, the compute capability and the memory of a GPU.
    The fake fails if the folder of the file also has a file with this name and `.fails`.
    """
    output = tmp_path / "smi-output"
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\ncat "{output}"\n[ ! -e "{output}.fails" ]\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    output.write_text("NVIDIA H200, 580.65.06, 9.0, 143771 MiB\n")
    return output


def finding_about(what: str) -> Finding:
    return next(finding for finding in examine(Path()) if finding.what == what)


def test_a_working_driver_is_good_and_a_missing_gpu_is_a_fault(smi_output: Path) -> None:
    assert finding_about("gpu").state == GOOD
    assert "H200" in finding_about("gpu").found
    smi_output.write_text("")
    assert finding_about("gpu").state == FAULT


@pytest.mark.parametrize(
    ("line", "fault", "cure"),
    [
        ("NVIDIA A10, 535.1.2, 8.6, 24564 MiB\n", "the driver is too old", "driver 580 or newer"),
        ("Tesla T4, 580.1, 7.5, 16384 MiB\n", "compute capability below 8.0", "Ampere"),
    ],
    ids=["old driver", "old GPU"],
)
def test_old_drivers_and_gpus_are_faults(
    smi_output: Path, line: str, fault: str, cure: str
) -> None:
    smi_output.write_text(line)
    finding = finding_about("gpu")
    assert finding.state == FAULT
    assert fault in finding.found
    assert cure in finding.cure


def test_a_driver_that_fails_is_a_fault(smi_output: Path) -> None:
    smi_output.write_text("Failed to initialize NVML: Driver/library version mismatch\n")
    smi_output.with_name(f"{smi_output.name}.fails").touch()
    finding = finding_about("gpu")
    assert (finding.state, finding.found) == (
        FAULT,
        "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch",
    )
    assert "reboot" in finding.cure


@pytest.mark.usefixtures("smi_output")
def test_a_build_without_cuda_beside_a_gpu_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "this build has no CUDA support"
    monkeypatch.setattr(tc.cuda, "unavailable_reason", lambda: reason)
    finding = finding_about("cuda")
    assert (finding.state, finding.found) == (FAULT, f"cannot be used: {reason}")
    # The versions of wheels with CUDA end in +cu13.
    assert "+cu13" in finding.cure


@pytest.mark.parametrize(("count", "text"), [(1, "1 device can"), (2, "2 devices can")])
def test_usable_devices_are_counted(monkeypatch: pytest.MonkeyPatch, count: int, text: str) -> None:
    monkeypatch.setattr(tc.cuda, "unavailable_reason", lambda: None)
    monkeypatch.setattr(tc.cuda, "device_count", lambda: count)
    assert finding_about("cuda") == Finding(GOOD, "cuda", f"{text} be used")


def test_without_a_gpu_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    if Path("/proc/driver/nvidia/version").exists() or tc.cuda.is_available():
        pytest.skip("there is a driver")
    random_state = tc.get_rng_state()
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "self-test  cpu: 60 steps in " in text
    assert text.endswith("0 faults\n")
    assert tc.get_rng_state() == random_state
    assert finding_about("gpu").state == NOTE


def test_on_wsl_the_cure_for_little_memory_names_wslconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_wsl", lambda: True)
    monkeypatch.setattr(tc.memory, "available_bytes", lambda: 2**30)
    assert ".wslconfig" in finding_about("memory").cure


def test_a_folder_that_cannot_be_written_to_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert finding_about("disk").state == FAULT


def test_a_self_test_that_does_not_learn_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first and the last loss of the self-test. The last must be less than a tenth of the first.
    monkeypatch.setattr(doctor, "_self_test", lambda _: (1.0, 0.5))
    assert main(["doctor"]) == 1
    assert "fault  self-test" in capsys.readouterr().out
