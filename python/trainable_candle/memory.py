"""Memory of the tape and of the machine, in bytes."""

from trainable_candle._core import available_bytes, saved_bytes

__all__ = ["available_bytes", "saved_bytes"]
