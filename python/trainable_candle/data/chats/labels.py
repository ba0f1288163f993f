"""The tokens of an example, and which of them count in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from trainable_candle.data.chats.forms import Chat, Completion, Preference
from trainable_candle.data.chats.messages import RowError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from trainable_candle.data.chats.forms import Example
    from trainable_candle.text.chat_tokenizer import ChatTokenizer, Encoded


@dataclass(frozen=True)
class Tokens:
    """The tokens of an example, or of one half of a pair, as the model reads them."""

    ids: npt.NDArray[np.int64]
    learnt: npt.NDArray[np.bool_]
    """The mask of the tokens to learn. The first token is never learnt: it has no predecessor."""
    stops: tuple[int, ...]
    """The indices, in `ids`, of tokens that end an answer and stop generation; all are learnt."""
    answers: int
    """The number of answers to learn, with or without a stop token, before truncation."""
    cut: int = 0
    """The number of tokens that truncation has cut off."""

    def __len__(self) -> int:
        return len(self.ids)

    def truncated(self, length: int) -> Tokens:
        """Return the first `length` tokens."""
        if len(self) <= length:
            return self
        stops = tuple(index for index in self.stops if index < length)
        cut = self.cut + len(self) - length
        return Tokens(self.ids[:length], self.learnt[:length], stops, self.answers, cut)


@dataclass(frozen=True)
class Pair:
    """A preference as the model reads it: the prompt with each of two answers."""

    chosen: Tokens
    rejected: Tokens

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens of `chosen` and then those of `rejected`; each begins with the prompt."""
        return np.concatenate([self.chosen.ids, self.rejected.ids])

    @cached_property
    def learnt(self) -> npt.NDArray[np.bool_]:
        """The mask of the tokens in `ids` to learn: those of the two answers."""
        return np.concatenate([self.chosen.learnt, self.rejected.learnt])

    @property
    def stops(self) -> tuple[int, ...]:
        """The indices, in `ids`, of tokens that end an answer and stop generation."""
        return (*self.chosen.stops, *(len(self.chosen) + n for n in self.rejected.stops))

    @property
    def answers(self) -> int:
        """The number of answers to learn, before truncation."""
        return self.chosen.answers + self.rejected.answers

    @property
    def cut(self) -> int:
        """The number of tokens that truncation has cut off."""
        return self.chosen.cut + self.rejected.cut

    def truncated(self, length: int) -> Pair:
        """Return the pair with at most `length` tokens; the ends of its halves are cut off.

        Each of `chosen` and `rejected` keeps up to half of `length`, and more if the other is
        shorter than its half.
        """
        half = length // 2
        chosen_length = max(half, length - len(self.rejected))
        rejected_length = max(half, length - min(len(self.chosen), chosen_length))
        return Pair(self.chosen.truncated(chosen_length), self.rejected.truncated(rejected_length))


@dataclass(frozen=True)
class Draft:
    """A text of an example, not yet tokenized."""

    text: str
    special: bool
    """Whether to add the tokens that the tokenizer puts around a text. A chat template writes these
    tokens itself."""
    label: Callable[[Encoded], Tokens]
    """Takes the tokens of the text and selects those to learn."""


def drafts_of(
    example: Example, tokenizer: ChatTokenizer, train_on: str = "answers"
) -> tuple[Draft, ...]:
    """Return the texts of an example: two for a preference, else one.

    `train_on` says what to learn: `answers`, `last-answer` or `all`; see `tokens_of`.

    Raises:
        ValueError: the template rejects the example, or renders an answer differently when more
            messages follow.
    """
    if isinstance(example, Preference):
        # In chats only the last messages differ; answers before them are part of the prompt.
        compared = "answers" if isinstance(example.chosen, Completion) else "last-answer"
        halves = (example.chosen, example.rejected)
        return tuple(_draft(half, tokenizer, compared) for half in halves)
    return (_draft(example, tokenizer, train_on),)


def labelled(drafts: Sequence[Draft], encoded: Sequence[Encoded]) -> Tokens | Pair:
    """Make an example from its texts and the tokens of each text; two texts make a `Pair`."""
    labels = [draft.label(tokens) for draft, tokens in zip(drafts, encoded, strict=True)]
    return Pair(*labels) if len(labels) > 1 else labels[0]


def tokens_of(
    example: Example, tokenizer: ChatTokenizer, train_on: str = "answers"
) -> Tokens | Pair:
    """Return the tokens of an example and their mask; a `Pair` for a preference.

    The text is tokenized once, as a whole. A token is learnt if at least one of its characters is
    in an answer that `train_on` selects. The token that ends the turn of this answer is learnt,
    too. With `train_on="all"`, all tokens but the first are learnt. For a preference, only the
    compared answers are learnt.

    Raises:
        ValueError: the template rejects the example, or renders an answer differently when more
            messages follow.
    """
    drafts = drafts_of(example, tokenizer, train_on)
    encoded = [tokenizer.encode(draft.text, special=draft.special) for draft in drafts]
    return labelled(drafts, encoded)


def unknown_token(
    ids: npt.ArrayLike, tokenizer: ChatTokenizer, vocabulary: int | None
) -> str | None:
    """Return the end of a sentence about a token that the model lacks; None if it lacks none.

    Args:
        ids: the tokens, at least one.
        tokenizer: the tokenizer that made them.
        vocabulary: the number of tokens that the model has; None: any number.
    """
    largest = int(np.max(ids))
    if vocabulary is None or largest < vocabulary:
        return None
    return (
        f"has the token {tokenizer.token(largest)} ({largest}), and the model has {vocabulary} "
        "tokens: the tokenizer is another model's"
    )


def _draft(example: Chat | Completion, tokenizer: ChatTokenizer, train_on: str) -> Draft:
    if isinstance(example, Chat):
        return _chat_draft(example, tokenizer, train_on)
    text = example.prompt + example.completion
    span = (0 if train_on == "all" else len(example.prompt), len(text))
    return Draft(
        text, special=True, label=lambda encoded: _label_completion(encoded, span, tokenizer.end)
    )


def _label_completion(encoded: Encoded, span: tuple[int, int], end: int | None) -> Tokens:
    """Return the tokens of a text, of which those in `span` and the end token are learnt.

    Args:
        encoded: the tokens of the text.
        span: start and end of the part to learn, in characters.
        end: the id of the end token, which is appended if it is missing; None: there is none.
    """
    ids, learnt = list(encoded.ids), _inside(encoded, span)
    if end is not None and ids[-1:] != [end]:
        ids.append(end)
        learnt = np.append(learnt, True)
    elif end is not None:
        # An end token that the tokenizer has added has no characters, so no span contains it.
        learnt[-1] = True
    learnt[:1] = False
    stops = () if end is None else (len(ids) - 1,)
    return Tokens(np.array(ids, np.int64), learnt, stops, answers=1)


def _chat_draft(example: Chat, tokenizer: ChatTokenizer, train_on: str) -> Draft:
    rendered = tokenizer.render(example.messages, example.tools)
    if rendered.spans is None:  # The template does not mark answers.
        last_only = train_on == "last-answer"
        spans = _answers(example, tokenizer, rendered.text, last_only=last_only)
    else:
        spans = list(rendered.spans)
    if train_on == "last-answer":
        spans = spans[-1:]

    def label(encoded: Encoded) -> Tokens:
        ids = np.array(encoded.ids, np.int64)
        learnt = np.zeros(len(ids), np.bool_)
        stops: list[int] = []
        for span in spans:
            inside = np.flatnonzero(_inside(encoded, span))
            if len(inside):
                last, stopped = _turn_end(encoded, inside, rendered.text, tokenizer)
                learnt[inside[0] : last + 1] = True
                stops += [last] if stopped else []
        if train_on == "all":
            learnt[:] = True
        learnt[:1] = False
        return Tokens(ids, learnt, tuple(stops), answers=len(spans))

    return Draft(rendered.text, special=False, label=label)


def _answers(
    example: Chat, tokenizer: ChatTokenizer, whole: str, *, last_only: bool
) -> list[tuple[int, int]]:
    """Return the spans of the answers in the text `whole`, in characters.

    For each answer, the template renders two texts: the messages before the answer with a
    generation prompt, and the messages up to the answer. The lengths of the two texts are the start
    and the end of the answer.

    Args:
        example: the conversation.
        tokenizer: renders its messages.
        whole: the text of all messages.
        last_only: whether to return only the span of the last answer. The others are then not
            looked for, because a template may change them when more messages follow.

    Raises:
        RowError: the first of the two texts is not the beginning of the second, or the second is
            not the beginning of `whole`.
    """
    spans = []
    turns = [n for n, message in enumerate(example.messages) if message["role"] == "assistant"]
    for turn in turns[-1:] if last_only else turns:
        asked = tokenizer.render(
            example.messages[:turn], example.tools, generation_prompt=True
        ).text
        answered = tokenizer.render(example.messages[: turn + 1], example.tools).text
        if not answered.startswith(asked):
            raise RowError(
                f"the chat template begins the answer in message {turn} differently from its "
                "generation prompt; give a template with {% generation %} around answers"
            )
        if not whole.startswith(answered):
            raise RowError(
                f"the chat template changes message {turn} when more messages follow, so answers "
                "before the last cannot be found in the text; give --train-on last-answer, or a "
                "template with {% generation %} around answers"
            )
        spans.append((len(asked), len(answered)))
    return spans


def _turn_end(
    encoded: Encoded, inside: npt.NDArray[np.int64], text: str, tokenizer: ChatTokenizer
) -> tuple[int, bool]:
    """Return the index of the last token of an answer, and whether this token stops generation.

    Text that a template writes after the end of a turn, usually a line break, belongs to the next
    turn. A stop token right after the answer's span belongs to the answer.

    Args:
        encoded: the tokens of the whole text.
        inside: the indices of the tokens in the answer's span; at least one.
        text: the whole text.
        tokenizer: knows the stop tokens.
    """
    ids, last = encoded.ids, int(inside[-1])
    # A stop token right after the span.
    if (
        last + 1 < len(ids)
        and ids[last] not in tokenizer.stops
        and ids[last + 1] in tokenizer.stops
    ):
        return last + 1, True
    # A stop token in the span, with nothing but white space after it.
    stops = [n for n in inside.tolist() if ids[n] in tokenizer.stops]
    if stops:
        begin, end = encoded.offsets[stops[-1]][1], encoded.offsets[last][1]
        if not text[begin:end].strip():
            return int(stops[-1]), True
    return last, False


def _inside(encoded: Encoded, span: tuple[int, int]) -> npt.NDArray[np.bool_]:
    """Return the mask of the tokens from the first to the last with a character in the span."""
    span_start, span_end = span
    starts, ends = encoded.offsets.T  # For each token, its start and its end in characters.
    mask = np.zeros(len(starts), np.bool_)
    touched = np.flatnonzero((starts < span_end) & (ends > span_start) & (ends > starts))
    if len(touched):
        # A token without characters is inside if tokens before it and after it are.
        mask[touched[0] : touched[-1] + 1] = True
    return mask
