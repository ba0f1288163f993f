"""Packs latents into squares, turns them into tokens and back, and gives tokens their positions.

A square of 2x2 latent pixels becomes one pixel of packed latents, with four times the channels; a
token is a packed pixel. The positions are those of the rotary embeddings.

In the shapes, B is the batch, C channels, H and W the height and the width of latents; h and w are
those of packed latents.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

import trainable_candle as tc

if TYPE_CHECKING:
    from typing import Protocol

    from trainable_candle import Tensor

    class Transformer(Protocol):
        """A transformer that takes the tokens of latents and the positions of all tokens."""

        def __call__(self, tokens: Tensor, image_at: Tensor, text_at: Tensor, /) -> Tensor:
            """Return the output for image tokens, given the positions of image and text tokens."""


_SIDE: Final = 2
"""The side of a square, in latent pixels."""


def squares(latents: Tensor) -> Tensor:
    """Map (B, C, H, W) to (B, 4 * C, H / 2, W / 2): the 2x2 pixels of a square become channels.

    The first four channels of the result come from the first channel of the latents: they are the
    four pixels of each square, row by row.
    """
    batch, channels, height, width = latents.shape
    rows, columns = height // _SIDE, width // _SIDE
    split = latents.reshape(batch, channels, rows, _SIDE, columns, _SIDE)
    return split.permute(0, 1, 3, 5, 2, 4).reshape(batch, channels * _SIDE**2, rows, columns)


def from_squares(packed: Tensor) -> Tensor:
    """Map (B, 4 * C, h, w) to (B, C, 2 * h, 2 * w), the inverse of `squares`."""
    batch, packed_channels, rows, columns = packed.shape
    channels = packed_channels // _SIDE**2
    split = packed.reshape(batch, channels, _SIDE, _SIDE, rows, columns)
    return split.permute(0, 1, 4, 2, 5, 3).reshape(batch, channels, rows * _SIDE, columns * _SIDE)


def as_tokens(x: Tensor) -> Tensor:
    """Map (B, C, h, w) to tokens (B, h * w, C), row by row; C is the number of channels of `x`."""
    batch, channels, height, width = x.shape
    return x.reshape(batch, channels, height * width).transpose(1, 2)


def from_tokens(tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """Map (B, h * w, C) to (B, C, h, w), the inverse of `as_tokens`; `size` is (h, w)."""
    batch, _, channels = tokens.shape
    return tokens.transpose(1, 2).reshape(batch, channels, *size)


# Cached, so that a step that is recorded as a CUDA graph copies nothing from the host: an earlier
# step, which is not recorded, has made the tensors.
@lru_cache(maxsize=64)
def positions(
    rows: int,
    columns: int,
    length: int,
    device: str,
    *,
    has_text_axis: bool = False,
    centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the positions of an image's tokens, row by row, and of a text's tokens.

    Args:
        rows: the number of rows of tokens in the image.
        columns: the number of columns of tokens in the image.
        length: the number of tokens of the text.
        device: the device of the results.
        has_text_axis: whether there is a fourth axis: token i of the text is at (0, 0, 0, i), and
            the image is at 0 on this axis. Not with `centred`.
        centred: whether rows and columns are counted from the image's centre, as in Qwen-Image:
            the first row is -ceil(rows / 2), the first column -ceil(columns / 2). Token i of the
            text is then at max(rows // 2, columns // 2) + i on all axes.

    Returns:
        The image's positions (rows * columns, axes), each (0, row, column) or (0, row, column, 0),
        and the text's positions (length, axes), f32; `axes` is 3, or 4 with `has_text_axis`.
        Without either flag, all tokens of the text are at (0, 0, 0).
    """
    axes = 4 if has_text_axis else 3
    image = np.zeros((rows, columns, axes), np.float32)
    image[..., 1] = np.arange(rows)[:, None]
    image[..., 2] = np.arange(columns)
    text = np.zeros((length, axes), np.float32)
    if has_text_axis:
        text[:, 3] = np.arange(length)
    if centred:
        image[..., 1] -= rows - rows // 2
        image[..., 2] -= columns - columns // 2
        text += max(rows // 2, columns // 2) + np.arange(length, dtype=np.float32)[:, None]
    return tc.tensor(image.reshape(-1, axes), device=device), tc.tensor(text, device=device)


def over_tokens(
    latents: Tensor, length: int, transformer: Transformer, *, centred: bool = False
) -> Tensor:
    """Return a transformer's prediction, (B, C, H, W); its image tokens are 2x2 latent pixels.

    Args:
        latents: (B, C, H, W), with even height and width.
        length: the number of tokens of the text.
        transformer: returns tokens of the same shape as its first argument.
        centred: see `positions`.
    """
    packed = squares(latents)
    rows, columns = packed.shape[2:]
    image_at, text_at = positions(rows, columns, length, str(latents.device), centred=centred)
    predicted = transformer(as_tokens(packed), image_at, text_at)
    return from_squares(from_tokens(predicted, (rows, columns)))
