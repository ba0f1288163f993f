"""Checked device names, like `torch.device`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trainable_candle.errors import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["device"]

# As in torch, "cpu" may have a number, too.
_DEVICE = re.compile(r"(cpu|cuda)(?::(\d+))?")


class device(str):  # noqa: N801 - torch's name
    """The name of a device, a string with the properties `type` and `index`.

        device = tc.device("cuda" if tc.cuda.is_available() else "cpu")
        x = tc.zeros(2, 3, device=device)
        assert x.device.type == device.type

    Args:
        type: "cpu", "cuda" or "cuda:N", where N is the number of a GPU; or this number alone.
        index: The number of the GPU, if `type` is "cuda".

    Raises:
        ArgumentError: If this is not the name of a device. Whether the machine has the device is
            not checked.
    """

    __slots__ = ()

    def __new__(cls, type: str | int, index: int | None = None) -> Self:
        """Make a name, and check its form."""
        if isinstance(type, int) and not isinstance(type, bool):
            type = f"cuda:{type}"
        text = str(type) if index is None else f"{type}:{index}"
        if not _DEVICE.fullmatch(text):
            raise ArgumentError(
                f'device: found {text!r}, expected "cpu", "cuda", "cuda:N" or the number of a GPU'
            )
        return super().__new__(cls, text)

    @property
    def type(self) -> str:
        """The kind: "cpu" or "cuda"."""
        return self.partition(":")[0]

    @property
    def index(self) -> int | None:  # type: ignore[override]  # torch's `index`, not that of `str`
        """The number after the colon, such as that of a GPU; None for a name without a number."""
        number = self.partition(":")[2]
        return int(number) if number else None
