"""Products of the codes of 8-bit weights."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainable_candle.settings.machine import Machine


@contextmanager
def multiplying_codes(config: Machine) -> Iterator[None]:
    """A context in which linear layers multiply the codes of 8-bit weights if `w8a8` is set.

    Besides training, the model that is trained must be loaded in it, and the size of its weights
    asked for: some models quantize fewer layers then.
    """
    before = tc.get_w8a8()
    tc.set_w8a8(before or config.w8a8)
    try:
        yield
    finally:
        tc.set_w8a8(before)
