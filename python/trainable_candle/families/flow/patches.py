"""Latents as tokens: squares of two by two, their positions, and back."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

import trainable_candle as tc

if TYPE_CHECKING:
    from trainable_candle import Tensor

_SIDE: Final = 2


def packed(latents: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H W / 4, 4 C): squares row by row, the channels of each outermost."""
    batch, channels, height, width = latents.shape
    rows, columns = height // _SIDE, width // _SIDE
    squares = latents.reshape(batch, channels, rows, _SIDE, columns, _SIDE)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * _SIDE**2)


def unpacked(tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, H W / 4, 4 C) -> (B, C, H, W), of latents of a height and width."""
    height, width = size
    batch, _, values = tokens.shape
    rows, columns, channels = height // _SIDE, width // _SIDE, values // _SIDE**2
    squares = tokens.reshape(batch, rows, columns, channels, _SIDE, _SIDE)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, height, width)


# Made once for a size: a recorded pass on a GPU copies nothing from the host.
@lru_cache(maxsize=64)
def positions(size: tuple[int, int], length: int, device: str) -> tuple[Tensor, Tensor]:
    """Positions (0, row, column) of the squares of latents, and zeros for a text.

    Args:
        size: height and width of the latents.
        length: tokens of the text.
        device: of the results.

    Returns:
        (H W / 4, 3) and (length, 3), f32.
    """
    rows, columns = size[0] // _SIDE, size[1] // _SIDE
    ids = np.zeros((rows, columns, 3), np.float32)
    ids[..., 1] = np.arange(rows)[:, None]
    ids[..., 2] = np.arange(columns)
    image = tc.tensor(ids.reshape(-1, 3), device=device)
    return image, tc.zeros((length, 3), device=device)
