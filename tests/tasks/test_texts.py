"""The loss on texts: the mean over the tokens that are learnt, however they are batched."""

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
from trainable_candle.tasks.text.writing import WritingOptions, choose, continuation
from trainable_candle.train import Trainer

VOCABULARY, LENGTH = 7, 12


class Bigrams:
    """The cross-entropy of tokens by the one before, whose logits are a row of a table."""

    def __init__(self) -> None:
        values = np.random.default_rng(1).normal(size=(VOCABULARY, VOCABULARY))
        self.table = tc.Var(values.astype(np.float32))
        self.enabled = True

    def hidden(
        self, input_ids: tc.Tensor, positions: tc.Tensor, cu_seqlens: tc.Tensor
    ) -> tc.Tensor:
        assert positions.shape == input_ids.shape
        assert cu_seqlens.numpy()[-1] == input_ids.shape[0]
        return tc.tensor(np.eye(VOCABULARY, dtype=np.float32)[input_ids.numpy()])

    def packed_loss(
        self, input_ids: tc.Tensor, targets: tc.Tensor, positions: tc.Tensor, cu_seqlens: tc.Tensor
    ) -> tc.Tensor:
        states = self.logits(self.hidden(input_ids, positions, cu_seqlens))
        return cross_entropy(states, targets, reduction="sum")

    def logits(self, hidden: tc.Tensor) -> tc.Tensor:
        return hidden @ (self.table if self.enabled else self.table * 0.0)


def examples() -> list[Tokens]:
    rng = np.random.default_rng(0)
    made = []
    for length in (3, 12, 5, 7, 2, 9, 11, 4):
        learnt = rng.random(length) < 0.5
        learnt[0], learnt[-1] = False, True
        made.append(Tokens(rng.integers(0, VOCABULARY, length), learnt, (), 1))
    return made


def prepared(model: Bigrams, lines: list[str] | None = None, **settings: Any) -> PreparedTexts:
    family = SimpleNamespace(model=model, device="cpu", config=TrainConfig(**settings))
    dataset = TextDataset(examples(), Counts(), TextOptions(LENGTH), Path("texts.jsonl"))

    @contextmanager
    def without_adapter() -> Iterator[None]:
        model.enabled = False
        yield
        model.enabled = True

    report = (lines if lines is not None else []).append
    return PreparedTexts(family, dataset, without_adapter, report)  # type: ignore[arg-type]


def mean(table: npt.NDArray[Any]) -> float:
    losses = []
    for example in examples():
        for before, after, counts in zip(
            example.ids[:-1], example.ids[1:], example.learnt[1:], strict=True
        ):
            if counts:
                losses.append(np.log(np.exp(table[before]).sum()) - table[before][after])
    return float(np.mean(losses))


def step(batch_size: int, accumulation: int) -> tuple[npt.NDArray[np.float32], int]:
    model = Bigrams()
    data = prepared(model)
    rows = data.batches(batch_size)
    Trainer(
        data.loss,
        {"table": model.table},
        tc.optim.SGD([model.table], lr=1.0),
        rows,
        inputs=data.inputs,
        weigh=data.weight,
        steps=1,
        gradient_accumulation=accumulation,
    ).train()
    return model.table.detach().numpy(), rows.rows


def test_a_step_is_the_same_however_its_rows_are_batched() -> None:
    _, rows = step(1, 1)
    assert rows == 5
    whole, _ = step(rows, 1)
    single, _ = step(1, rows)
    np.testing.assert_allclose(single, whole, rtol=1e-5, atol=1e-6)
    # Against finite differences of the mean over all tokens.
    before = Bigrams().table.detach().numpy().astype(np.float64)
    for place in [(0, 0), (3, 5), (6, 1)]:
        other = before.copy()
        other[place] += 1e-5
        slope = (mean(other) - mean(before)) / 1e-5
        assert before[place] - whole[place] == pytest.approx(slope, abs=1e-4)


def test_validation_is_the_mean_over_tokens_beside_that_of_the_base() -> None:
    model, lines = Bigrams(), []
    data = prepared(model, lines, batch_size=2)
    expected = mean(model.table.detach().numpy().astype(np.float64))
    loss = data.validation_loss()
    assert loss == pytest.approx(expected, rel=1e-5)
    facts = data.validation_facts(loss)
    assert facts["validation_base_loss"] == pytest.approx(np.log(VOCABULARY), rel=1e-5)
    assert facts["validation_perplexity"] == pytest.approx(np.exp(expected), rel=1e-5)
    assert f"loss {loss:.4f}" in lines[0]
    assert f"({VOCABULARY:.2f})" in lines[0]
    assert perplexity(1e4) == float("inf")


def test_tokens_are_chosen_as_the_options_say() -> None:
    scores = np.log(np.array([0.1, 0.5, 0.15, 0.25]))
    rng = np.random.default_rng(0)

    def drawn(**options: Any) -> set[int]:
        chosen = WritingOptions(**{"temperature": 1.0, **options})
        return {choose(scores, [1], chosen, rng) for _ in range(300)}

    assert drawn(temperature=0.0) == {1}
    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {1, 3}
    assert drawn(top_p=0.6) == {1, 3}
    assert drawn(top_p=0.5) == {1}
    # The scores are negative: a penalty of 2 makes 0.5 a quarter, 0.25 stays.
    assert drawn(temperature=0.0, repetition_penalty=2.1) == {3}
    shares = np.bincount(
        [choose(scores, [], WritingOptions(temperature=1), rng) for _ in range(4000)]
    )
    np.testing.assert_allclose(shares / 4000, np.exp(scores), atol=0.04)


def test_a_text_ends_before_its_stop_token() -> None:
    model = Bigrams()
    table = np.full((VOCABULARY, VOCABULARY), -9.0, np.float32)
    for token in range(VOCABULARY - 1):
        table[token, token + 1] = 9.0
    model.table = tc.Var(table)
    found = continuation(model, [0, 2], {5}, WritingOptions(tokens=9), "cpu")  # type: ignore[arg-type]
    assert list(found) == [3, 4]
    few = continuation(model, [0], {5}, WritingOptions(tokens=2), "cpu")  # type: ignore[arg-type]
    assert list(few) == [1, 2]
