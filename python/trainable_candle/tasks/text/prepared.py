"""A data set of texts prepared for training: packed rows, the loss, the perplexity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.data.chats import PackedRows, in_order
from trainable_candle.distributed.dealing import measured
from trainable_candle.distributed.group import ALONE

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from trainable_candle import Tensor
    from trainable_candle.data.chats import Packed, TextDataset
    from trainable_candle.distributed.group import Group
    from trainable_candle.tasks.text.family import TextFamily
    from trainable_candle.train.trainer import Inputs


SHAPES: Final = 4
"""In a run with CUDA graphs, the batches have at most this many different lengths in tokens."""


class Packing:
    """A data set as packed rows: what `PreparedTexts` and `PreparedPreferences` share.

    A packed row has several texts, one after another, in at most `sequence_length` tokens.

    Args:
        family: the model.
        dataset: the examples.
        without_adapter: returns a context in which the adapter is disabled.
        report: gets a line at each validation.
        group: the processes that validate together.
    """

    token_count_fixes_shapes: ClassVar[bool] = True
    """Whether batches with equal numbers of tokens have inputs of equal shapes."""

    def __init__(
        self,
        family: TextFamily,
        dataset: TextDataset,
        without_adapter: Callable[[], AbstractContextManager[None]],
        report: Callable[[str], None],
        group: Group = ALONE,
    ) -> None:
        self._family = family
        self._dataset = dataset
        self._without_adapter = without_adapter
        self._report = report
        self._group = group

    def __len__(self) -> int:
        return len(self._dataset)

    def batches(self, batch_size: int) -> PackedRows:
        """Return shuffled batches of `batch_size` packed rows.

        If steps run as CUDA graphs, padding gives the batches at most `SHAPES` different lengths in
        tokens, and at most as many as there are graphs (`--cuda-graphs`). Steps run as graphs if
        the run is on a GPU, and both `token_count_fixes_shapes` and the family's `repeats` (the
        model runs the same operations for all batches of equal size) are true.
        """
        config = self._family.config
        in_graphs = config.on_gpu and self.token_count_fixes_shapes and self._family.repeats
        return PackedRows(
            self._dataset.examples,
            self._dataset.options.sequence_length,
            batch_size,
            config.seed,
            shapes=min(config.cuda_graphs, SHAPES) if in_graphs else 0,  # 0: no padding
        )

    def count(self, batch: Packed) -> float:
        """Return the number of tokens without padding.

        It includes tokens that the loss ignores; `batch.count` does not.
        """
        return int(batch.cu_seqlens[-1])

    def metadata(self) -> dict[str, str]:
        """Return an empty dict: adapter files get no metadata about texts."""
        return {}

    def tokens(self, batch: Packed) -> dict[str, Tensor]:
        """Return tokens, targets, positions and bounds of texts, by name, on the model's device.

        The bounds `cu_seqlens` are the starts of the texts and the end of the last text.
        """
        names = ("input_ids", "targets", "positions", "cu_seqlens")
        return {name: tc.tensor(getattr(batch, name), device=self._family.device) for name in names}


class PreparedTexts(Packing):
    """A data set of texts, and a model's cross-entropy on the tokens that count in the loss."""

    _base_loss: float | None = None
    """The validation loss of the base; None until the first validation measures it."""

    def weight(self, batch: Packed) -> float:
        """Return the number of tokens that count in the loss.

        The trainer weights the batch's loss by this number, so the loss of a step is the mean over
        the tokens that count in all its batches.
        """
        return batch.count

    def inputs(self, batch: Packed) -> dict[str, Tensor]:
        """Return the result of `tokens`, and `scale`: 1 / the number of tokens that count.

        If no token counts, `scale` is 1; `loss` is then 0.
        """
        scale = np.array(1.0 / max(1, batch.count), np.float32)
        return self.tokens(batch) | {"scale": tc.tensor(scale, device=self._family.device)}

    def loss(self, inputs: Inputs) -> Tensor:
        """Return the mean cross-entropy of the tokens that count."""
        return self._sum(inputs) * inputs["scale"]

    def validation_loss(self) -> float:
        """Return the mean cross-entropy over all tokens that count; each token is used once."""
        batches = in_order(
            self._dataset.examples,
            self._dataset.options.sequence_length,
            self._family.config.batch_size,
        )
        with tc.no_grad():
            # Each process computes some of the sums; all processes get all sums.
            sums = measured(
                self._group, batches, lambda batch: float(self._sum(self.inputs(batch)).item())
            )
        return math.fsum(sums) / sum(batch.count for batch in batches)

    def validation_facts(self, loss: float) -> dict[str, float]:
        """Return and report the loss, its perplexity, and the loss of the base."""
        if self._base_loss is None:
            with self._without_adapter():
                self._base_loss = self.validation_loss()
        base = self._base_loss
        self._report(
            f"validation: loss {loss:.4f} (perplexity {perplexity(loss):.2f}), "
            f"base {base:.4f} ({perplexity(base):.2f})"
        )
        return {
            "validation_loss": loss,
            "validation_perplexity": perplexity(loss),
            "validation_base_loss": base,
        }

    def _sum(self, inputs: Inputs) -> Tensor:
        """Return the summed cross-entropy of the tokens that count."""
        return self._family.model.packed_loss(
            inputs["input_ids"], inputs["targets"], inputs["positions"], inputs["cu_seqlens"]
        )


def perplexity(loss: float) -> float:
    """Return the exponential of a mean cross-entropy; infinity from a loss of 700 on."""
    return math.exp(loss) if loss < 700 else math.inf  # math.exp fails from 709.79 on
