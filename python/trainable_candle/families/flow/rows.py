"""Joins texts of different lengths as the rows of one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle import Tensor


def in_rows(texts: Sequence[Tensor], multiple: int = 1) -> dict[str, Tensor]:
    """Pad texts to a common length with zeros, and join them into one batch.

    Args:
        texts: the features of B texts, at least one. Each is (1, L, W): L tokens with W features.
            L may differ between the texts.
        multiple: the common length is the longest L, rounded up to a multiple of this number.

    Returns:
        `encoder_hidden_states` (B, common length, W), and `lengths` (B,), f32: each text's L.
    """
    lengths = [text.shape[1] for text in texts]
    common = -(-max(lengths) // multiple) * multiple
    return {
        "encoder_hidden_states": tc.cat([_extended(text, common) for text in texts], 0),
        "lengths": tc.tensor(np.array(lengths, np.float32), device=texts[0].device),
    }


def _extended(text: Tensor, length: int) -> Tensor:
    """Return a text (1, L, W), padded with zero rows to (1, length, W)."""
    _, tokens, width = text.shape
    if tokens == length:
        return text
    zeros = tc.zeros((1, length - tokens, width), dtype=text.dtype, device=str(text.device))
    return tc.cat([text, zeros], 1)
