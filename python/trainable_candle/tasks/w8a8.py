"""Switches on W8A8, products of 8-bit codes of weights and activations, within a context."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainable_candle.settings.machine import Machine


@contextmanager
def multiplying_codes(config: Machine) -> Iterator[None]:
    """Return a context in which linear layers multiply 8-bit codes (W8A8) if `config.w8a8` is set.

    If W8A8 products were on before, they stay on. Load the model, estimate its memory and train in
    this context. Loading and the estimate need it too, because some models quantize fewer layers
    with `w8a8`.
    """
    was_on = tc.get_w8a8()
    tc.set_w8a8(was_on or config.w8a8)
    try:
        yield
    finally:
        tc.set_w8a8(was_on)
