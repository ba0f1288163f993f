"""Chooses the device and the precision of a command where the user has not chosen them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainable_candle import cuda

AUTO: Final = "auto"


@dataclass(frozen=True)
class Placement:
    """The device and the dtype of a command."""

    device: str
    """`cpu`, `cuda` or `cuda:N`."""
    precision: str
    """`f32`, `bf16` or `f16`."""
    reason: str | None = None
    """Why `auto` did not choose a GPU; None if it did, or if the user named the device."""

    def __str__(self) -> str:
        """Return one line for the user."""
        why = f" (no GPU is used: {self.reason})" if self.reason else ""
        return f"device: {self.device}, {self.precision}{why}"


def choose(device: str, precision: str) -> Placement:
    """Return the placement for the settings `device` and `precision`: names, or `auto`.

    The device `auto` is the first GPU if CUDA can be used, else the CPU. The precision `auto` is
    bf16 on a GPU (every supported GPU computes in bf16), and f32 on the CPU. A named device is not
    checked.
    """
    reason = None
    if device == "cpu:0":  # torch's other name of the CPU
        device = "cpu"
    if device == AUTO:
        reason = cuda.unavailable_reason()
        device = "cpu" if reason else "cuda"
    if precision == AUTO:
        precision = "f32" if device == "cpu" else "bf16"
    return Placement(device, precision, reason)
