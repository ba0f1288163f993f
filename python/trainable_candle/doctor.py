"""A report of what this machine can train with, of its faults, and of the cures."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Iterator

GOOD: Final = "ok"
NOTE: Final = "note"
"""Training works, but something is missing or may be too small or slow."""
FAULT: Final = "fault"
"""Training, or training on a GPU, cannot work."""
DRIVER: Final = 580
"""The oldest major version of NVIDIA's driver that CUDA 13 works with."""
CAPABILITY: Final = (8, 0)
"""The least compute capability that a GPU must have, as (major, minor)."""
_GIB: Final = 2**30
_LEAST_MEMORY: Final = 16 * _GIB
"""With less free memory, in bytes, the report has a note."""
_LEAST_DISK: Final = 20 * _GIB
"""With less free disk space, in bytes, the report has a note."""
_STEPS: Final = 60
"""The number of optimizer steps of the test on a device."""
_FALL: Final = 0.1
"""After the test, the loss must be below this fraction of the first loss."""
_EXTRAS: Final = {
    "matplotlib": ("plot", "draws loss curves"),
    "tensorboardX": ("tensorboard", "logs for TensorBoard"),
    "wandb": ("wandb", "logs to Weights & Biases"),
    "huggingface_hub": ("hub", "fetches models by name"),
    "pyarrow": ("parquet", "reads Parquet files"),
}
"""For each optional package, the extra that installs it and what the package does."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    state: str
    """`ok`, `note` or `fault`."""
    what: str
    """What was checked, in at most 9 characters."""
    found: str
    """What the check has found."""
    cure: str = ""
    """What to do; empty if nothing must be done. Every fault has a cure."""

    def __str__(self) -> str:
        """Return one line, and the cure on a line below."""
        line = f"{self.state:<5}  {self.what:<9}  {self.found}"
        return f"{line}\n{'':18}-> {self.cure}" if self.cure else line


def examine(folder: Path) -> Iterator[Finding]:
    """Run all checks; yield each finding as soon as it is known.

    The last checks train a small layer on each device, for less than ten seconds per device.

    Args:
        folder: the folder to which runs will be written.
    """
    yield _version()
    yield from _extras()
    yield _memory()
    yield _disk(folder)
    gpu = _gpu()
    yield gpu
    reason = tc.cuda.unavailable_reason()
    yield _cuda(gpu.state == GOOD, reason)
    devices = ["cpu", *(f"cuda:{n}" for n in range(tc.cuda.device_count()))]
    for device in devices[1:]:
        yield _card(device)
    for device in devices:
        yield _trains(device)


def is_wsl() -> bool:
    """Return whether this system is Linux inside Windows (WSL)."""
    return "microsoft" in platform.release().lower()


def _version() -> Finding:
    text = f"trainable-candle {tc.__version__}, Python {platform.python_version()}, "
    text += f"{platform.platform()}{' (WSL)' if is_wsl() else ''}, {tc.get_num_threads()} threads"
    return Finding(GOOD, "versions", text)


def _extras() -> Iterator[Finding]:
    missing = {name: facts for name, facts in _EXTRAS.items() if not importlib.util.find_spec(name)}
    have = [name for name in _EXTRAS if name not in missing]
    yield Finding(GOOD, "extras", ", ".join(have) or "none")
    for name, (extra, use) in missing.items():
        cure = f'pip install "trainable-candle[{extra}]"'
        yield Finding(NOTE, "extras", f"{name}, which {use}, is not installed", cure)


def _memory() -> Finding:
    free = tc.memory.available_bytes()
    if free is None:
        return Finding(NOTE, "memory", "the system does not report the free memory")
    found = f"{free / _GIB:.1f} GiB are free"
    if free >= _LEAST_MEMORY:
        return Finding(GOOD, "memory", found)
    cure = "large models are loaded into this memory first: close other programs"
    if is_wsl():
        cure = r"raise `memory` in %UserProfile%\.wslconfig, then run `wsl --shutdown` in Windows"
    return Finding(NOTE, "memory", found, cure)


def _disk(folder: Path) -> Finding:
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return Finding(FAULT, "disk", f"{place} cannot be written to", "choose another --output")
    free = shutil.disk_usage(place).free
    found = f"{free / _GIB:.1f} GiB are free in {place}"
    if str(place).startswith("/mnt/") and is_wsl():
        cure = "files of Windows are slow to read: keep data and models in Linux, e.g. ~/"
        return Finding(NOTE, "disk", found, cure)
    if free < _LEAST_DISK:
        return Finding(NOTE, "disk", found, "checkpoints and caches need space: free some")
    return Finding(GOOD, "disk", found)


def _gpu() -> Finding:
    """Return a finding about the NVIDIA GPUs and their driver, as nvidia-smi reports them.

    The compute capability is checked for the first GPU only.
    """
    tool = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if tool is None:
        if Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists():
            cure = "install the driver's tools (nvidia-utils), or run `nvidia-smi` as root once"
            return Finding(FAULT, "gpu", "there is a driver, but no nvidia-smi", cure)
        where = "Windows" if is_wsl() else "this system"
        cure = f"if this machine has an NVIDIA GPU, install its driver {DRIVER} or newer in {where}"
        return Finding(NOTE, "gpu", "no NVIDIA driver is installed", cure)
    query = "--query-gpu=name,driver_version,compute_cap,memory.total"
    try:
        result = subprocess.run(  # noqa: S603 - the driver's tool
            [tool, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(FAULT, "gpu", f"nvidia-smi does not run: {error}", "reboot, then try again")
    lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
    if result.returncode or not lines:
        messages = (result.stdout + result.stderr).strip().splitlines()
        cure = "reboot after an update of the driver; in a container, give it the GPU (--gpus all)"
        return Finding(FAULT, "gpu", f"nvidia-smi: {messages[0] if messages else 'no GPU'}", cure)
    facts = [part.strip() for part in lines[0].split(",")]
    found = "; ".join(lines)
    if len(facts) == 4:  # The four values of `query`.
        driver = facts[1].partition(".")[0]
        if driver.isdecimal() and int(driver) < DRIVER:
            cure = f"install driver {DRIVER} or newer" + (" in Windows" if is_wsl() else "")
            return Finding(FAULT, "gpu", f"{found}: the driver is too old", cure)
        major, _, minor = facts[2].partition(".")
        is_known = major.isdecimal() and minor.isdecimal()
        if is_known and (int(major), int(minor)) < CAPABILITY:
            cure = "train on the CPU, or on a GPU of the Ampere generation or newer"
            return Finding(FAULT, "gpu", f"{found}: compute capability below 8.0", cure)
    return Finding(GOOD, "gpu", found)


def _cuda(gpu_is_good: bool, reason: str | None) -> Finding:
    """Return a finding about CUDA; `reason` says why it cannot be used, and is None if it can."""
    if reason is None:
        count = tc.cuda.device_count()
        devices = "1 device" if count == 1 else f"{count} devices"
        return Finding(GOOD, "cuda", f"{devices} can be used")
    if not gpu_is_good:
        return Finding(NOTE, "cuda", f"not used: {reason}")
    cure = 'pip install "trainable-candle[cuda13]"; `nvidia-smi` shows whether the driver works'
    if "no CUDA support" in reason:
        cure = "install the wheel whose version ends in +cu13, or build it: make wheel-cuda"
    return Finding(FAULT, "cuda", f"cannot be used: {reason}", cure)


def _card(device: str) -> Finding:
    """Return a finding about the free memory of a GPU."""
    stats = tc.cuda.memory_stats(device)
    found = f"{stats['free'] / _GIB:.1f} of {stats['total'] / _GIB:.1f} GiB are free on {device}"
    if stats["free"] < 0.5 * stats["total"]:
        return Finding(
            NOTE, "card", found, "another process uses the GPU: `nvidia-smi` names the process"
        )
    return Finding(GOOD, "card", found)


def _trains(device: str) -> Finding:
    """Train a small LoRA layer; return a finding that says whether its loss has fallen enough."""
    started = time.perf_counter()
    try:
        first, last = _self_test(device)
    except tc.Error as error:
        cure = "report this with the lines above" if device == "cpu" else "update the driver"
        return Finding(FAULT, "self-test", f"{device}: {error}", cure)
    seconds = time.perf_counter() - started
    found = f"{device}: {_STEPS} steps in {seconds:.1f} s, loss {first:.2e} to {last:.2e}"
    if last < _FALL * first:
        return Finding(GOOD, "self-test", found)
    return Finding(FAULT, "self-test", found, "the loss must fall tenfold: report this")


def _self_test(device: str) -> tuple[float, float]:
    """Train a LoRA layer to learn a change of rank 4; return the first and the last loss."""
    from trainable_candle.nn import LoRALinear, functional  # noqa: PLC0415 - only for this test
    from trainable_candle.optim import AdamW  # noqa: PLC0415

    before = tc.get_rng_state()
    try:
        tc.manual_seed(0)
        weight = tc.randn(64, 128, device=device) * 0.1
        change = tc.randn(64, 4, device=device) @ tc.randn(4, 128, device=device) * 0.05
        x = tc.randn(256, 128, device=device)
        target = x @ (weight + change).T
        layer = LoRALinear(weight, rank=8, alpha=8)
        optimizer = AdamW(layer.get_vars(), lr=0.02)
        losses = []
        for _ in range(_STEPS):
            loss = functional.mse_loss(layer(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    finally:
        tc.set_rng_state(before)
    return losses[0], losses[-1]


def main(folder: Path) -> bool:
    """Print the report; return whether there is no fault."""
    faults = 0
    for finding in examine(folder):
        print(finding, flush=True)
        faults += finding.state == FAULT
    print(f"{faults} faults" if faults != 1 else "1 fault")
    sys.stdout.flush()
    return not faults
