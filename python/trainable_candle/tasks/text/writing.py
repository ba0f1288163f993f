"""Answers of a language model: their options, and the text of their tokens as these arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from trainable_candle.text.chat_tokenizer import ChatTokenizer


@dataclass(frozen=True)
class WritingOptions:
    """How the next token is chosen, and where an answer ends."""

    tokens: int = 512
    """The greatest number of tokens in an answer."""
    temperature: float = 0.0
    """0 takes the likeliest token each time. Otherwise, tokens are drawn after a division of their
    scores by this number; 1 draws with the model's probabilities."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0: from all tokens."""
    top_p: float = 1.0
    """Draw from the smallest set of likeliest tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Draw from tokens whose probability is at least this fraction of the likeliest token's."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that are already in the text become less likely (arXiv:1909.05858)."""
    seed: int = 0
    """The seed of the draws."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, as end tokens do. The answer does not contain the stop text."""

    def arguments(self, stops: Collection[int]) -> dict[str, Any]:
        """Return the arguments of `CausalLM.generate` and `CausalLM.stream`.

        These functions do not know the texts in `stop`; `streamed` looks for them.

        Args:
            stops: the ids of the end tokens.
        """
        return {
            "max_new_tokens": self.tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "stop_token_ids": sorted(stops),
        }


def streamed(
    tokens: Iterable[int], tokenizer: ChatTokenizer, stop: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the text of tokens as they arrive, up to the first stop text (a text in `stop`).

    A character of several tokens is held back until its last token. Text that may begin a stop text
    is held back until further tokens show whether it does. The tokens of each piece of text are
    decoded together with those of the piece before, because SentencePiece tokenizers drop a space
    at the beginning of the text that they decode.
    """
    held = ""
    for piece in _pieces(tokens, tokenizer):
        held += piece
        stop_starts = [start for start in (held.find(text) for text in stop) if start >= 0]
        if stop_starts:
            before = held[: min(stop_starts)]
            if before:
                yield before
            return
        decided = len(held) - _begun_length(held, stop)
        if decided:
            yield held[:decided]
            held = held[decided:]
    if held:
        yield held


def _pieces(tokens: Iterable[int], tokenizer: ChatTokenizer) -> Iterator[str]:
    """Yield the text of tokens in pieces of whole characters."""
    ids: list[int] = []
    # `ids[start:end]` are the tokens of the previous piece; those from `end` on are held back.
    start = end = 0
    for token in tokens:
        ids.append(token)
        previous, text = tokenizer.decode(ids[start:end]), tokenizer.decode(ids[start:])
        # An unfinished character is decoded as U+FFFD.
        if len(text) > len(previous) and not text.endswith("\ufffd"):
            yield text[len(previous) :]
            start, end = end, len(ids)
    # The tokens have ended inside a character, or the last ones have no text.
    if end < len(ids):
        rest = tokenizer.decode(ids[start:])[len(tokenizer.decode(ids[start:end])) :]
        if rest:
            yield rest


def _begun_length(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of a stop text."""
    lengths = (
        length
        for stop_text in stop
        for length in range(1, min(len(stop_text), len(text) + 1))
        if text.endswith(stop_text[:length])
    )
    return max(lengths, default=0)
