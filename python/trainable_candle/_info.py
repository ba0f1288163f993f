"""Facts about this installation and its machine."""

import platform
from typing import Any

from trainable_candle import _core, cuda

__all__ = ["info"]


def info() -> dict[str, Any]:
    """Return versions, the backend, why it is not CUDA, the devices and the number of threads.

        assert tc.info()["backend"] in {"cpu", "cuda"}

    Returns:
        A dictionary with `version`, `python`, `platform`, `backend` ("cpu" or "cuda"), `reason`
        (why the backend is not CUDA, or None), `devices` (their names) and `threads` (the number of
        CPU threads).
    """
    reason = cuda.unavailable_reason()
    return {
        "version": _core.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backend": "cpu" if reason else "cuda",
        "reason": reason,
        "devices": ["cpu", *(f"cuda:{i}" for i in range(cuda.device_count()))],
        "threads": _core.get_num_threads(),
    }
