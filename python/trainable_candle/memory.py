"""What the tape holds and what the machine has, in bytes."""

from trainable_candle._core import available_bytes, saved_bytes

__all__ = ["available_bytes", "saved_bytes"]
