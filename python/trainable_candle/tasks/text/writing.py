"""Texts by a language model: one token after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from trainable_candle.tasks.text.family import CausalModel
    from trainable_candle.text.chat_tokenizer import ChatTokenizer


@dataclass(frozen=True)
class WritingOptions:
    """How the next token is chosen."""

    tokens: int = 512
    """At most."""
    temperature: float = 0.0
    """0 takes the likeliest token each time; 1 draws from what the model says."""
    top_k: int = 0
    """Draw from so many likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that are already there become less likely (arXiv:1909.05858)."""
    seed: int = 0


def continuation(
    model: CausalModel,
    ids: Sequence[int],
    stops: Collection[int],
    options: WritingOptions,
    device: str,
) -> Iterator[int]:
    """The tokens that follow, up to one that stops, which is left out.

    Args:
        model: the decoder.
        ids: the tokens so far, at least one.
        stops: numbers of tokens that end a text.
        options: how tokens are chosen.
        device: of the model.
    """
    rng = np.random.default_rng(options.seed)
    known = list(ids)
    for _ in range(options.tokens):
        token = choose(_scores(model, known, device), known, options, rng)
        if token in stops:
            return
        known.append(token)
        yield token


@tc.no_grad()
def _scores(model: CausalModel, ids: Sequence[int], device: str) -> npt.NDArray[np.float64]:
    """The scores of the next token."""
    count = len(ids)
    arrays = (np.asarray(ids), np.arange(count), np.array([0, count]))
    states = model.hidden(*(tc.tensor(array.astype(np.int64), device=device) for array in arrays))
    last = tc.tensor(np.array([count - 1]), device=device)
    scores = model.logits(states.index_select(0, last)).to("f32").to("cpu").numpy()
    return np.asarray(scores[0], np.float64)


def choose(
    scores: npt.NDArray[np.float64],
    known: Sequence[int],
    options: WritingOptions,
    rng: np.random.Generator,
) -> int:
    """The next token: penalty, temperature, top-k, top-p, in transformers' order."""
    if options.repetition_penalty != 1:
        there = np.unique(np.asarray(known))
        penalty = options.repetition_penalty
        scores = scores.copy()
        scores[there] = np.where(
            scores[there] > 0, scores[there] / penalty, scores[there] * penalty
        )
    if not options.temperature:
        return int(scores.argmax())
    order = np.argsort(-scores, kind="stable")
    if options.top_k:
        order = order[: options.top_k]
    shares = np.exp((scores[order] - scores[order[0]]) / options.temperature)
    shares /= shares.sum()
    if options.top_p < 1:
        # The token that passes the bound is kept.
        kept = int(np.searchsorted(np.cumsum(shares), options.top_p)) + 1
        order, shares = order[:kept], shares[:kept] / shares[:kept].sum()
    return int(order[int(np.searchsorted(np.cumsum(shares), rng.random() * shares.sum()))])


def streamed(tokens: Iterable[int], tokenizer: ChatTokenizer) -> Iterator[str]:
    """The text of tokens as they come; a character of several tokens waits for its last."""
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if text and not text.endswith("\ufffd"):
            yield text
            waiting = []
    if waiting:
        yield tokenizer.decode(waiting)
