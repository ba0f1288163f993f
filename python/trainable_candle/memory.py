"""The memory that existing tapes hold, and the host memory that is available, in bytes."""

from trainable_candle._core import available_bytes, saved_bytes

__all__ = ["available_bytes", "saved_bytes"]
