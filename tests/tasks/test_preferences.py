"""Direct preference optimization (DPO): loss, gradient, rows in every form, and errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import trainable_candle as tc
from trainable_candle.data.chats import Pair, TextDataset, Tokens, in_order
from trainable_candle.errors import ConfigError, DatasetError
from trainable_candle.families.causal_lm import CausalLM
from trainable_candle.run import train_adapter
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.text import TextTask
from trainable_candle.tasks.text.preferences import PreparedPreferences

GOLDEN = Path(__file__).parents[1] / "golden" / "llm" / "llama"
BETA = 0.3
# Each rejected answer repeats its word once more than the one before, so that lengths differ.
ROWS = [
    {"prompt": f"name {word}", "chosen": word.upper(), "rejected": word[::-1] * n}
    for n, word in enumerate(("one", "two", "three", "seven", "eleven"), 1)
]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The folder of a tiny Llama with a byte-level tokenizer that has the end token `<end>`."""
    folder = tmp_path / "weights"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((GOLDEN / name).read_bytes())
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({t: n for n, t in enumerate(["<end>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return folder


def config_of(weights: Path, rows: list[dict[str, Any]], **settings: Any) -> TrainConfig:
    """Write `rows` to a data set, and return the settings of a DPO run on it."""
    dataset = weights.parent / "pairs.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"model": "causal-lm", "weights": str(weights), "dataset": str(dataset),
             "output": str(weights.parent / "run"), "objective": "dpo", "dpo_beta": BETA,
             "device": "cpu", "precision": "f32", "sequence_length": 64, "rank": 4,
             "alpha": 8.0}  # fmt: skip
    return TrainConfig(**(given | settings))


def prepared(
    config: TrainConfig,
) -> tuple[TextTask, TextDataset, PreparedPreferences, dict[str, tc.Var]]:
    """Return the task, the tokenized and the prepared pairs, and a random adapter's parameters."""
    task = CausalLM(Path(config.weights), "f32", "cpu", config).task()
    split = task.read(lambda _: None)
    tc.manual_seed(3)
    parameters = task.attach().named_parameters()
    for var in parameters.values():
        var.set(tc.randn(var.shape) * 0.1)
    data = task.prepare(split, lambda _: None).train
    assert isinstance(data, PreparedPreferences)
    return task, split.train, data, parameters


def log_prob(task: TextTask, tokens: Tokens) -> float:
    """Sum the log-probabilities of a text's tokens to learn; no other text is in its row."""
    logits = task.family.model(tc.tensor(tokens.ids[None]))[0].numpy().astype(np.float64)  # type: ignore[operator]
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    # The logits of a token are in the row of the token before it.
    positions = np.flatnonzero(tokens.learnt)
    return float(sum(logits[i - 1, tokens.ids[i]] for i in positions))


def by_definition(task: TextTask, pairs: list[Pair]) -> np.ndarray:
    """Return the loss of each pair by equation 7 of the DPO paper (arXiv:2305.18290)."""
    tuned = [[log_prob(task, p.chosen), log_prob(task, p.rejected)] for p in pairs]
    with task.without_adapter():
        base = [[log_prob(task, p.chosen), log_prob(task, p.rejected)] for p in pairs]
    gains = np.array(tuned) - np.array(base)
    return np.log1p(np.exp(-BETA * (gains[:, 0] - gains[:, 1])))


def test_the_loss_of_packed_pairs_equals_its_definition(weights: Path) -> None:
    task, dataset, data, _ = prepared(config_of(weights, ROWS))
    expected = by_definition(task, dataset.examples)  # type: ignore[arg-type]
    assert data.validation_loss() == pytest.approx(expected.mean(), abs=1e-5)
    # The weight of a batch is its number of pairs. A row of 64 tokens is too short for all pairs.
    one_row = data.batches(1).batch(0)
    assert data.weight(one_row) < len(ROWS)
    # Ten rows are enough for all pairs.
    batches = in_order(dataset.examples, sequence_length=64, batch_size=10)
    assert len(batches) == 1
    assert data.weight(batches[0]) == len(ROWS)
    assert float(data.loss(data.inputs(batches[0])).item()) == pytest.approx(
        expected.mean(), abs=1e-5
    )


def test_the_gradient_equals_the_slope_of_the_defined_loss(weights: Path) -> None:
    """The gradient of one LoRA factor B, at random values of B and at B = 0.

    For the element of B with the largest gradient, compare the gradient with a central difference
    of `by_definition`.
    """
    task, dataset, data, named = prepared(config_of(weights, ROWS[:3]))
    name = next(name for name in named if "lora_B" in name)
    var = named[name]
    inputs = data.inputs(in_order(dataset.examples, sequence_length=64, batch_size=10)[0])
    for values in (var.detach().numpy().copy(), np.zeros(var.shape, np.float32)):
        var.set(tc.tensor(values))
        for parameter in named.values():
            parameter.zero_grad()
        data.loss(inputs).backward()
        grad = var.grad
        assert grad is not None
        change = np.zeros_like(values)
        largest = np.unravel_index(np.abs(grad.numpy()).argmax(), values.shape)
        change[largest] = 1e-2
        losses = []
        for sign in (1, -1):
            var.set(tc.tensor(values + sign * change))
            losses.append(by_definition(task, dataset.examples).mean())  # type: ignore[arg-type]
        slope = (losses[0] - losses[1]) / 2e-2
        assert abs(slope) > 1e-5
        assert grad.numpy()[largest] == pytest.approx(slope, rel=2e-2)


def test_a_run_learns_to_prefer_the_chosen_answers(
    weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(
        weights, ROWS, steps=12, learning_rate=5e-3, validation_dataset="", validate_every=12
    )
    # The run validates on the pairs that it trains on; `config_of` has chosen their path.
    config = config.with_(validation_dataset=config.dataset)
    train_adapter(config, progress=False)
    log = capsys.readouterr().out
    # The lines read `validation: loss 0.6931, chosen preferred ...`.
    losses = [float(line.split()[2].rstrip(",")) for line in log.splitlines() if "chosen" in line]
    # An adapter without effect gives both answers the probabilities that the base gives them.
    assert losses[0] == pytest.approx(np.log(2), abs=1e-4)
    assert losses[-1] < 0.5
    assert "chosen preferred 100%" in log


def test_a_pair_has_the_same_tokens_in_every_form(weights: Path) -> None:
    asked, good, bad = ({"role": r, "content": c} for r, c in
                        (("user", "a"), ("assistant", "b"), ("assistant", "c")))  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"prompt": "say it", "chosen": " yes", "rejected": " no"},
        {"chosen": "say it yes", "rejected": "say it no"},
    ]
    _, texts, *_ = prepared(config_of(weights, rows))
    first, second = texts.examples
    np.testing.assert_array_equal(first.ids, second.ids)
    np.testing.assert_array_equal(first.learnt, second.learnt)
    rows = [
        {"prompt": [asked], "chosen": [good], "rejected": [bad]},
        {"chosen": [asked, good], "rejected": [asked, bad]},
        {"prompt": "a", "chosen": [good], "rejected": [bad]},
    ]
    _, chats, *_ = prepared(config_of(weights, rows, sequence_length=160))
    first, *others = chats.examples
    assert len(first.stops) == 2  # an end token for each of the two answers
    for other in others:
        np.testing.assert_array_equal(other.ids, first.ids)
        np.testing.assert_array_equal(other.learnt, first.learnt)


def test_the_longer_answer_of_a_long_pair_is_truncated(weights: Path) -> None:
    row = {"prompt": "p", "chosen": "x" * 60, "rejected": "y" * 10}
    _, dataset, *_ = prepared(config_of(weights, [row, *ROWS]))
    pair = dataset.examples[0]
    assert isinstance(pair, Pair)
    # The pair is truncated to the 64 tokens of a row. The rejected text has 12 tokens: the prompt,
    # ten letters and the end token.
    assert (len(pair.chosen), len(pair.rejected)) == (64 - 12, 12)
    assert dataset.counts.truncated == 1


@pytest.mark.parametrize(
    ("rows", "settings", "error", "message"),
    [
        (
            ROWS,
            {"objective": "sft", "dpo_beta": 0.1},
            DatasetError,
            "give --objective dpo, or rename",
        ),
        ([{"text": "a"}], {}, DatasetError, "has no `chosen` and `rejected`"),
        (ROWS, {"initial_adapter": "a"}, ConfigError, "merge initial_adapter into the weights"),
        (ROWS, {"train_on": "all"}, ConfigError, "--objective sft"),
    ],
    ids=[
        "pairs without dpo",
        "texts with dpo",
        "initial adapter",
        "train on all",
    ],
)
def test_rows_and_settings_that_do_not_fit_are_rejected(
    weights: Path, rows: Any, settings: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train_adapter(config_of(weights, rows, **settings), progress=False)
