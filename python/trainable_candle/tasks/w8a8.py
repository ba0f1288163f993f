"""Switches on the products of 8-bit codes (W8A8) in a context."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainable_candle.settings.machine import Machine


@contextmanager
def multiplying_codes(config: Machine) -> Iterator[None]:
    """Return a context in which linear layers multiply 8-bit codes if `w8a8` is set.

    Load the trained model in this context, and estimate its memory in it: with `w8a8`, some models
    quantize fewer layers. Train in it, too.
    """
    before = tc.get_w8a8()
    tc.set_w8a8(before or config.w8a8)
    try:
        yield
    finally:
        tc.set_w8a8(before)
