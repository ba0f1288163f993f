"""Texts of different lengths as rows of one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle import Tensor


def in_rows(texts: Sequence[Tensor], multiple: int = 1) -> dict[str, Tensor]:
    """Pad the features of texts, each (1, L, W) with its own L, to one length.

    Args:
        texts: at least one.
        multiple: the common length is the longest L, rounded up to a multiple of this number.

    Returns:
        `encoder_hidden_states` (B, common length, W), with zeros after each text, and the `lengths`
        of the texts, (B,), f32.
    """
    lengths = [text.shape[1] for text in texts]
    longest = -(-max(lengths) // multiple) * multiple
    return {
        "encoder_hidden_states": tc.cat([_extended(text, longest) for text in texts], 0),
        "lengths": tc.tensor(np.array(lengths, np.float32), device=texts[0].device),
    }


def _extended(text: Tensor, length: int) -> Tensor:
    """Return a text (1, L, W), padded with zero rows to (1, length, W)."""
    _, there, width = text.shape
    if there == length:
        return text
    zeros = tc.zeros((1, length - there, width), dtype=text.dtype, device=str(text.device))
    return tc.cat([text, zeros], 1)
