"""The tokens of an example, and which of them count in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from trainable_candle.data.chats.forms import Chat, Completion, Preference
from trainable_candle.data.chats.messages import RowError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from trainable_candle.data.chats.forms import Example
    from trainable_candle.text.chat_tokenizer import ChatTokenizer, Encoded

    Spans = Sequence[tuple[int, int]]
    """Starts and ends, of characters or of tokens."""


@dataclass(frozen=True)
class Tokens:
    """One example as the model reads it."""

    ids: npt.NDArray[np.int64]
    learnt: npt.NDArray[np.bool_]
    """Which tokens the model learns to predict; never the first, which no token precedes."""
    stops: tuple[int, ...]
    """The positions of tokens that end an answer and stop generation; all are learnt."""
    answers: int
    """The number of learnt answers, with or without a stop token."""

    def __len__(self) -> int:
        return len(self.ids)

    def truncated(self, length: int) -> Tokens:
        """The first `length` tokens."""
        if len(self) <= length:
            return self
        stops = tuple(place for place in self.stops if place < length)
        return Tokens(self.ids[:length], self.learnt[:length], stops, self.answers)


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt as the model reads them, each with the prompt before it."""

    chosen: Tokens
    rejected: Tokens

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens of both answers."""
        return np.concatenate([self.chosen.ids, self.rejected.ids])

    @cached_property
    def learnt(self) -> npt.NDArray[np.bool_]:
        """Which tokens belong to the answers."""
        return np.concatenate([self.chosen.learnt, self.rejected.learnt])

    @property
    def stops(self) -> tuple[int, ...]:
        """The positions of tokens that end an answer and stop generation."""
        return (*self.chosen.stops, *(len(self.chosen) + n for n in self.rejected.stops))

    @property
    def answers(self) -> int:
        """The number of learnt answers."""
        return self.chosen.answers + self.rejected.answers

    def truncated(self, length: int) -> Pair:
        """The first tokens of both answers, `length` in all; the longer is truncated first."""
        half = length // 2
        chosen = max(half, length - len(self.rejected))
        rejected = max(half, length - min(len(self.chosen), chosen))
        return Pair(self.chosen.truncated(chosen), self.rejected.truncated(rejected))


def tokens_of(
    example: Example, tokenizer: ChatTokenizer, train_on: str = "answers"
) -> Tokens | Pair:
    """The tokens of an example; for a preference, a pair whose last answers count.

    The text is tokenized once, as a whole, and the offsets of the tokens decide which count. An
    answer includes the token that ends its turn.

    Raises:
        ValueError: the template rejects the example, or renders an answer differently when more
            messages follow.
    """
    if isinstance(example, Preference):
        # Earlier messages are the same in both and do not count.
        last = "answers" if isinstance(example.chosen, Completion) else "last-answer"
        return Pair(
            _tokens(example.chosen, tokenizer, last), _tokens(example.rejected, tokenizer, last)
        )
    return _tokens(example, tokenizer, train_on)


def _tokens(example: Chat | Completion, tokenizer: ChatTokenizer, train_on: str) -> Tokens:
    if isinstance(example, Chat):
        return _chat(example, tokenizer, train_on)
    return _completion(example, tokenizer, train_on)


def _completion(example: Completion, tokenizer: ChatTokenizer, train_on: str) -> Tokens:
    text = example.prompt + example.completion
    encoded = tokenizer.encode(text, special=True)
    spans = [(0 if train_on == "all" else len(example.prompt), len(text))]
    ids, learnt = list(encoded.ids), _inside(encoded, spans)
    end = tokenizer.end
    if end is not None and ids[-1:] != [end]:
        ids.append(end)
        learnt = np.append(learnt, True)
    elif end is not None:
        learnt[-1] = True  # The tokenizer added this token, which is not in the text.
    learnt[:1] = False
    stops = () if end is None else (len(ids) - 1,)
    return Tokens(np.array(ids, np.int64), learnt, stops, 1)


def _chat(example: Chat, tokenizer: ChatTokenizer, train_on: str) -> Tokens:
    rendered = tokenizer.template.render(example.messages, example.tools)
    if rendered.spans is None:
        last_only = train_on == "last-answer"
        spans = _answers(example, tokenizer, rendered.text, last_only=last_only)
    else:
        spans = list(rendered.spans)
    if train_on == "last-answer":
        spans = spans[-1:]
    encoded = tokenizer.encode(rendered.text)
    ids = np.array(encoded.ids, np.int64)
    learnt = np.zeros(len(ids), np.bool_)
    stops: list[int] = []
    for span in spans:
        inside = np.flatnonzero(_inside(encoded, [span]))
        if len(inside):
            last, stopped = _turn_end(encoded, inside, rendered.text, tokenizer)
            learnt[inside[0] : last + 1] = True
            stops += [last] if stopped else []
    if train_on == "all":
        learnt[:] = True
    learnt[:1] = False
    return Tokens(ids, learnt, tuple(stops), len(spans))


def _answers(
    example: Chat, tokenizer: ChatTokenizer, whole: str, *, last_only: bool
) -> list[tuple[int, int]]:
    """Where the answers are in the text, found by rendering the messages up to each answer."""
    spans = []
    answers = [n for n, message in enumerate(example.messages) if message["role"] == "assistant"]
    for turn in answers[-1:] if last_only else answers:
        asked = tokenizer.template.render(
            example.messages[:turn], example.tools, generation_prompt=True
        ).text
        answered = tokenizer.template.render(example.messages[: turn + 1], example.tools).text
        if not answered.startswith(asked):
            raise RowError(
                f"the chat template begins the answer in message {turn} differently from its "
                "generation prompt, and has no {% generation %} that marks the answer"
            )
        if not whole.startswith(answered):
            raise RowError(
                f"the chat template changes message {turn} when others follow, so answers before "
                "the last cannot be found in the text; give --train-on last-answer, or a "
                "template with {% generation %} around answers"
            )
        spans.append((len(asked), len(answered)))
    return spans


def _turn_end(
    encoded: Encoded, inside: npt.NDArray[np.int64], text: str, tokenizer: ChatTokenizer
) -> tuple[int, bool]:
    """The last token of an answer, and whether it stops generation.

    Text that a template writes after the end of a turn, usually a line break, belongs to the next
    turn. An end token right after a marked answer belongs to the answer.
    """
    ids, last = encoded.ids, int(inside[-1])
    if (
        last + 1 < len(ids)
        and ids[last] not in tokenizer.stops
        and ids[last + 1] in tokenizer.stops
    ):
        return last + 1, True
    ends = [n for n in inside if ids[n] in tokenizer.stops]
    if ends:
        begin, end = encoded.offsets[ends[-1]][1], encoded.offsets[last][1]
        if not text[begin:end].strip():
            return int(ends[-1]), True
    return last, False


def _inside(encoded: Encoded, spans: Spans) -> npt.NDArray[np.bool_]:
    """Which tokens are, wholly or in part, within spans of characters."""
    offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
    begin, end = offsets[:, 0], offsets[:, 1]
    found = np.zeros(len(offsets), np.bool_)
    for first, last in spans:
        touched = np.flatnonzero((begin < last) & (end > first) & (end > begin))
        if len(touched):
            # Tokens with empty offsets belong to the tokens around them.
            found[touched[0] : touched[-1] + 1] = True
    return found
