"""The loss on texts is the mean over all tokens to learn; generated text is streamed.

The loss does not depend on how the texts are batched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import trainable_candle as tc
from trainable_candle.data.chats import TextDataset, TextOptions, Tokens
from trainable_candle.data.chats.dataset import Counts
from trainable_candle.nn.functional import cross_entropy
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.text.prepared import PreparedTexts, perplexity
from trainable_candle.tasks.text.writing import streamed
from trainable_candle.train import Trainer

# The size of the vocabulary, and the most tokens of an example and of a packed row.
VOCABULARY, LENGTH = 7, 12


class Bigrams:
    """A bigram model: row `t` of its table has the logits of the token that follows token `t`.

    The table is the model's adapter. Without it, all logits are 0.
    """

    def __init__(self) -> None:
        values = np.random.default_rng(1).normal(size=(VOCABULARY, VOCABULARY))
        self.table = tc.Var(values.astype(np.float32))
        self.adapter_is_on = True

    def hidden(
        self, input_ids: tc.Tensor, positions: tc.Tensor, cu_seqlens: tc.Tensor
    ) -> tc.Tensor:
        assert positions.shape == input_ids.shape
        assert cu_seqlens.numpy()[-1] == input_ids.shape[0]
        return tc.tensor(np.eye(VOCABULARY, dtype=np.float32)[input_ids.numpy()])

    def packed_loss(
        self, input_ids: tc.Tensor, targets: tc.Tensor, positions: tc.Tensor, cu_seqlens: tc.Tensor
    ) -> tc.Tensor:
        logits = self.logits(self.hidden(input_ids, positions, cu_seqlens))
        return cross_entropy(logits, targets, reduction="sum")

    def log_probs(
        self, input_ids: tc.Tensor, targets: tc.Tensor, positions: tc.Tensor, cu_seqlens: tc.Tensor
    ) -> tc.Tensor:
        logits = self.logits(self.hidden(input_ids, positions, cu_seqlens))
        return -cross_entropy(logits, targets, reduction="none")

    def logits(self, hidden: tc.Tensor) -> tc.Tensor:
        return hidden @ (self.table if self.adapter_is_on else self.table * 0.0)


def examples() -> list[Tokens]:
    """Return 8 examples of 53 random tokens in total, of which about half are learnt."""
    rng = np.random.default_rng(0)
    texts = []
    for length in (3, 12, 5, 7, 2, 9, 11, 4):
        learnt = rng.random(length) < 0.5
        learnt[0], learnt[-1] = False, True
        ids = rng.integers(0, VOCABULARY, length)
        # `stops` and `answers` do not affect the loss.
        texts.append(Tokens(ids, learnt, stops=(), answers=1))
    return texts


def prepared(model: Bigrams, lines: list[str] | None = None, **settings: Any) -> PreparedTexts:
    """Return the examples as data of a run with `model`; log lines are appended to `lines`."""
    family = SimpleNamespace(model=model, device="cpu", config=TrainConfig(**settings))
    counts = Counts()  # of lines read from files: none, because the examples are given directly
    dataset = TextDataset(examples(), counts, TextOptions(LENGTH), Path("texts.jsonl"))

    @contextmanager
    def without_adapter() -> Iterator[None]:
        model.adapter_is_on = False
        yield
        model.adapter_is_on = True

    report = (lines if lines is not None else []).append
    return PreparedTexts(family, dataset, without_adapter, report)  # type: ignore[arg-type]


def mean_loss(table: npt.NDArray[Any]) -> float:
    """Return the mean loss over the tokens to learn in all examples, by its definition."""
    losses = []
    for example in examples():
        for token, following, is_learnt in zip(
            example.ids[:-1], example.ids[1:], example.learnt[1:], strict=True
        ):
            if is_learnt:
                losses.append(np.log(np.exp(table[token]).sum()) - table[token][following])
    return float(np.mean(losses))


def table_after_step(batch_size: int, accumulation: int) -> tuple[npt.NDArray[np.float32], int]:
    """Return the table after one training step, and the number of packed rows in an epoch."""
    model = Bigrams()
    data = prepared(model)
    batches = data.batches(batch_size)
    Trainer(
        data.loss,
        {"table": model.table},
        tc.optim.SGD([model.table], lr=1.0),
        batches,
        inputs=data.inputs,
        weigh=data.weight,
        steps=1,
        gradient_accumulation=accumulation,
    ).train()
    return model.table.detach().numpy(), batches.rows


def test_a_step_is_the_same_however_its_rows_are_batched() -> None:
    _, rows = table_after_step(1, 1)
    assert rows == 5  # for 53 tokens, with up to 12 in a row
    in_one_batch, _ = table_after_step(rows, 1)
    row_by_row, _ = table_after_step(1, rows)
    np.testing.assert_allclose(row_by_row, in_one_batch, rtol=1e-5, atol=1e-6)
    # With SGD and a learning rate of 1, the change of the table is minus the gradient. Compare
    # three elements of the gradient with finite differences of the mean loss.
    before = Bigrams().table.detach().numpy().astype(np.float64)
    for element in [(0, 0), (3, 5), (6, 1)]:
        shifted = before.copy()
        shifted[element] += 1e-5
        slope = (mean_loss(shifted) - mean_loss(before)) / 1e-5
        assert before[element] - in_one_batch[element] == pytest.approx(slope, abs=1e-4)


def test_validation_reports_the_mean_over_tokens_with_and_without_the_adapter() -> None:
    model, lines = Bigrams(), []
    data = prepared(model, lines, batch_size=2)
    expected = mean_loss(model.table.detach().numpy().astype(np.float64))
    loss = data.validation_loss()
    assert loss == pytest.approx(expected, rel=1e-5)
    facts = data.validation_facts(loss)
    assert facts["validation_base_loss"] == pytest.approx(np.log(VOCABULARY), rel=1e-5)
    assert facts["validation_perplexity"] == pytest.approx(np.exp(expected), rel=1e-5)
    assert f"loss {loss:.4f}" in lines[0]
    # Without the adapter, all tokens are equally likely: the perplexity is their number.
    assert f"({VOCABULARY:.2f})" in lines[0]
    # exp(1e4) is beyond the range of floats.
    assert perplexity(1e4) == float("inf")


class ByteTokenizer:
    """A tokenizer whose tokens are bytes.

    Like SentencePiece, it drops a space at the start of each text that it decodes.
    """

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace").removeprefix(" ")


def pieces(text: str, *stop: str) -> list[str]:
    """Return the pieces in which `text` is streamed, with the stop texts `stop`."""
    return list(streamed(text.encode(), ByteTokenizer(), stop))  # type: ignore[arg-type]


def test_a_text_comes_in_whole_characters_with_its_spaces() -> None:
    assert pieces("a b\u00e9\u20ac!") == ["a", " ", "b", "\u00e9", "\u20ac", "!"]
    # An incomplete character at the end is shown as U+FFFD.
    assert "".join(streamed("\u20ac".encode()[:2], ByteTokenizer())) == "\ufffd"  # type: ignore[arg-type]


def test_a_text_ends_before_a_stop_text_and_shows_no_part_of_it() -> None:
    assert pieces("one\n\ntwo", "\n\n") == ["o", "n", "e"]
    # A text that may begin a stop text is held back until it is certain that it does not.
    assert pieces("a\nb\n", "\n\n") == ["a", "\nb", "\n"]
    assert "".join(pieces("abcabd", "abd", "zz")) == "abc"
    assert pieces("stop", "stop") == []
