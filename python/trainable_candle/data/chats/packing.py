"""Packs examples into rows, and joins the rows of a batch into one stream of tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from trainable_candle.data.chats.labels import Pair
from trainable_candle.draws import generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from trainable_candle.data.chats.labels import Tokens

IGNORED: Final = -100
"""The target of a token that the loss does not count."""


@dataclass(frozen=True)
class Packed:
    """A batch: one stream of N tokens that consists of texts and, perhaps, padding.

    A text is an example or, for preferences, one of the two halves of a pair. A token attends only
    to tokens of its own text.
    """

    input_ids: npt.NDArray[np.int64]
    """(N,): the ids of the tokens; 0 in padding."""
    targets: npt.NDArray[np.int64]
    """(N,): the id of the next token; `IGNORED` if the next token is not learnt, if it is in
    another text, and in padding."""
    positions: npt.NDArray[np.int64]
    """(N,): the index of each token in its text; 0 in padding."""
    cu_seqlens: npt.NDArray[np.int64]
    """(S,): the start of each text in the stream, then the end of the last text. In a padded batch,
    this end is repeated so that S is the same for all batches, and the tokens behind this end are
    the padding."""

    answers: npt.NDArray[np.float32] | None = None
    """(pairs, N) for preferences: 1 at the targets in a pair's chosen answer, -1 at the targets in
    the pair's rejected answer, else 0."""

    @property
    def count(self) -> int:
        """How many targets the loss counts."""
        return int((self.targets != IGNORED).sum())


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute items over bins by the method "best fit decreasing".

    The items are placed from the longest to the shortest, items of equal length in the given order.
    Each item goes to the bin that has enough room for it and will have the least room left.
    If `lengths` is reordered, items of equal length may change places, but each bin still gets
    items of the same lengths.

    Args:
        lengths: the lengths of the items, from 1 to `capacity`.
        capacity: the length that a bin has room for.

    Returns:
        For each bin, the indices of its items.
    """
    order = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    bins: list[list[int]] = []
    # For each bin the room that is left in it and the bin's number, in ascending order.
    rooms: list[tuple[int, int]] = []
    for item in order:
        # The first bin with enough room, which has the least room of all such bins, because `rooms`
        # ascends. The number -1 is less than that of every bin.
        position = bisect_left(rooms, (lengths[item], -1))
        if position == len(rooms):
            room, number = capacity, len(bins)
            bins.append([])
        else:
            room, number = rooms.pop(position)
        bins[number].append(item)
        insort(rooms, (room - lengths[item], number))
    return bins


class PackedRows:
    """Batches of packed rows by number, epoch after epoch.

    Each epoch packs all examples anew: examples of equal length randomly change places, and the
    rows are shuffled. For given examples, the rows of an epoch depend only on the seed and on the
    epoch's number. If the last rows of an epoch do not fill a batch, the first rows of the next
    epoch complete this batch.

    Args:
        examples: at least one, none longer than `sequence_length`. The length of a pair is the sum
            of the lengths of its two texts.
        sequence_length: the greatest number of tokens in a row.
        batch_size: rows in a batch.
        seed: the seed of the order.
        shapes: the greatest number of different batch lengths (in tokens), for CUDA graphs: each
            batch is padded to the next of these lengths. 0: no padding.
    """

    def __init__(
        self,
        examples: Sequence[Tokens | Pair],
        sequence_length: int,
        batch_size: int,
        seed: int,
        *,
        shapes: int = 0,
    ) -> None:
        self._examples = examples
        self._length = sequence_length
        self._batch_size = batch_size
        self._seed = seed
        # Batches are padded to a multiple of this number of tokens; 0: they are not padded.
        self._padding_multiple = -(-batch_size * sequence_length // shapes) if shapes else 0
        lengths = [len(example) for example in examples]
        # Only examples of equal length change places, so these rows have the lengths of every
        # epoch's rows.
        rows = best_fit(lengths, sequence_length)
        self.rows = len(rows)
        """The number of rows in each epoch."""
        texts_per_example = max(2 if isinstance(example, Pair) else 1 for example in examples)
        self._most_texts = texts_per_example * max(map(len, rows))
        """The greatest number of texts that a row can have."""
        # Two epochs are cached, because a batch may have rows of an epoch and of the next one.
        self._rows_of = lru_cache(maxsize=2)(self._packed)

    def batch(self, index: int) -> Packed:
        """Return batch number `index`, from 0."""
        # Rows are numbered through all epochs.
        first = index * self._batch_size
        numbers = range(first, first + self._batch_size)
        rows = [self._rows_of(number // self.rows)[number % self.rows] for number in numbers]
        examples = [[self._examples[item] for item in row] for row in rows]
        if not self._padding_multiple:
            return joined(examples)
        return joined(examples, self._padding_multiple, self._batch_size * self._most_texts + 1)

    def first_batch(self, epoch: int) -> int:
        """Return the number of the batch in which an epoch begins; both are counted from 0."""
        return epoch * self.rows // self._batch_size

    def _packed(self, epoch: int) -> list[list[int]]:
        """Return the rows of an epoch, each as the indices of its examples."""
        # "items" and "order" name two random streams: of the examples' order and of the rows'.
        order = generator(self._seed, "items", epoch).permutation(len(self._examples))
        lengths = [len(self._examples[item]) for item in order]
        rows = [[int(order[item]) for item in row] for row in best_fit(lengths, self._length)]
        row_order = generator(self._seed, "order", epoch).permutation(len(rows))
        return [rows[number] for number in row_order]


def in_order(
    examples: Sequence[Tokens | Pair], sequence_length: int, batch_size: int = 1
) -> list[Packed]:
    """Return batches of packed rows with each example once.

    Nothing is shuffled: the rows are in the order of `best_fit`, the same in every call.
    """
    rows = [
        [examples[item] for item in row]
        for row in best_fit([len(example) for example in examples], sequence_length)
    ]
    starts = range(0, len(rows), batch_size)
    return [joined(rows[start : start + batch_size]) for start in starts]


def joined(
    rows: Sequence[Sequence[Tokens | Pair]], padding_multiple: int = 1, least_bounds: int = 0
) -> Packed:
    """Return rows of examples as one stream.

    Args:
        rows: the examples of each row.
        padding_multiple: padding fills the stream up to a multiple of this many tokens.
        least_bounds: `cu_seqlens` gets at least this many entries; copies of its last entry fill it
            up.
    """
    ids, targets, lengths = [], [], list[int]()
    # The number of the first text, `chosen`, of each pair; `rejected` is the next text.
    chosen_texts = []
    for row in rows:
        for example in row:
            texts = (example.chosen, example.rejected) if isinstance(example, Pair) else (example,)
            if len(texts) > 1:
                chosen_texts.append(len(lengths))
            for text in texts:
                ids.append(text.ids)
                targets.append(shifted(text))
                lengths.append(len(text))
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cu_seqlens = np.pad(cu_seqlens, (0, max(0, least_bounds - len(cu_seqlens))), mode="edge")
    padding_length = -sum(lengths) % padding_multiple
    padding = np.zeros(padding_length, np.int64)
    ids.append(padding)
    targets.append(np.full(padding_length, IGNORED, np.int64))
    positions = np.concatenate([*(np.arange(n, dtype=np.int64) for n in lengths), padding])
    packed = Packed(np.concatenate(ids), np.concatenate(targets), positions, cu_seqlens)
    if not chosen_texts:
        return packed
    answers = np.zeros((len(chosen_texts), len(positions)), np.float32)
    for pair, chosen in enumerate(chosen_texts):
        begin, middle, end = cu_seqlens[chosen : chosen + 3]
        answers[pair, begin:middle], answers[pair, middle:end] = 1, -1
    # Prompts have no targets, so this leaves 0 at them.
    answers *= packed.targets != IGNORED
    return replace(packed, answers=answers)


def shifted(example: Tokens) -> npt.NDArray[np.int64]:
    """Return the target of each token of a text: the next token's id if it is learnt, or `IGNORED`.

    The last token has no next token, so its target is `IGNORED`.
    """
    targets = np.full(len(example), IGNORED, np.int64)
    targets[:-1] = np.where(example.learnt[1:], example.ids[1:], IGNORED)
    return targets
