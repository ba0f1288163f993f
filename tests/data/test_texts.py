"""Files of texts: their examples, the lines that are rejected, and the packing into rows."""

import csv
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainable_candle.data.chats import (
    IGNORED,
    PackedRows,
    TextDataset,
    TextOptions,
    Tokens,
    best_fit,
    in_order,
    load_texts,
)
from trainable_candle.errors import DatasetError
from trainable_candle.text.chat_tokenizer import ChatTokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "chats"
# A line that can be used: a conversation with one answer.
GOOD = {
    "messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so it is"}]
}


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    from tokenizers import Tokenizer

    ends = {"eos_token": "<|end_of_text|>"}
    return ChatTokenizer(Tokenizer.from_file(str(GOLDEN / "tokenizer.json")), ends)


def write_lines(path: Path, *rows: Any) -> Path:
    """Write each row as a line: text as it is, anything else as JSON; return the path."""
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def load(path: Path, tokenizer: ChatTokenizer, **options: Any) -> TextDataset:
    """Return the training texts of a file."""
    return load_texts(path, tokenizer, TextOptions(**options))[0]


def ids(dataset: TextDataset) -> list[list[int]]:
    return [example.ids.tolist() for example in dataset.examples]


def test_json_lines_json_and_csv_give_the_same_tokens(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    rows = [{"instruction": f"say {n}", "input": "", "output": f"{n}, ü"} for n in range(3)]
    expected = ids(load(write_lines(tmp_path / "a.jsonl", *rows), tokenizer))
    (tmp_path / "b.json").write_text(json.dumps({"version": "1", "data": rows}))
    with (tmp_path / "c.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["instruction", "input", "output"])
        writer.writeheader()
        writer.writerows(rows)
    assert len(expected) == 3
    assert ids(load(tmp_path / "b.json", tokenizer)) == expected
    assert ids(load(tmp_path / "c.csv", tokenizer)) == expected


def test_parquet_gives_the_same_tokens_or_needs_pyarrow(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    path = tmp_path / "a.parquet"
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError:
        path.write_bytes(b"PAR1")
        with pytest.raises(ModuleNotFoundError, match=r'install "trainable-candle\[parquet\]"'):
            load(path, tokenizer)
        return
    # In Parquet files, tools are JSON text.
    rows = [{**GOOD, "tools": json.dumps([{"name": "f"}])}]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    assert ids(load(path, tokenizer)) == ids(
        load(write_lines(tmp_path / "a.jsonl", *rows), tokenizer)
    )


def test_files_of_a_folder_are_training_or_validation_texts(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    write_lines(tmp_path / "train.jsonl", GOOD, GOOD)
    write_lines(tmp_path / "valid.jsonl", GOOD)
    write_lines(tmp_path / "test.jsonl", "not read")
    train, validation = load_texts(tmp_path, tokenizer, TextOptions())
    assert validation is not None
    assert (len(train), len(validation)) == (2, 1)


def test_bad_lines_are_reported_with_number_and_field(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    path = write_lines(tmp_path / "a.jsonl", GOOD, "{", "[1]", "", {"messages": [{"role": "user"}]})
    with pytest.raises(DatasetError) as caught:
        load(path, tokenizer)
    message = str(caught.value)
    # Line 4 is empty, which is no error, and is not counted.
    assert "3 of 4 lines" in message
    assert "--skip-bad" in message
    assert "a.jsonl, line 2: is not JSON" in message
    assert "a.jsonl, line 3: is list" in message
    assert "a.jsonl, line 5: `messages[0].content` is missing" in message
    usable = load(path, tokenizer, skip_bad=True)
    assert len(usable) == 1
    assert "3 lines left out" in usable.summary()


def test_half_of_a_surrogate_pair_is_reported(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    answer = {"role": "assistant", "content": "cut \ud83d"}
    path = write_lines(tmp_path / "a.jsonl", GOOD, {"messages": [GOOD["messages"][0], answer]})
    message = r"line 2: `messages\[1\].content` has half of a character, '\\ud83d', at index 4"
    with pytest.raises(DatasetError, match=message):
        load(path, tokenizer)
    assert len(load(path, tokenizer, skip_bad=True)) == 1


def test_tokens_that_the_model_lacks_are_reported_with_their_line(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "so"}, {"text": "so Be"}, {"text": "so"})
    # The model has as many tokens as the text "so" needs.
    known = load(write_lines(tmp_path / "b.jsonl", {"text": "so"}), tokenizer)
    vocabulary = int(known.examples[0].ids.max()) + 1
    # The second line of `path` has a token with a larger id than `vocabulary` allows.
    largest = max(int(example.ids.max()) for example in load(path, tokenizer).examples)
    message = rf"line 2: has the token .* \({largest}\), and the model has {vocabulary} tokens"
    with pytest.raises(DatasetError, match=message):
        load(path, tokenizer, vocabulary=vocabulary)
    usable = load(path, tokenizer, vocabulary=vocabulary, skip_bad=True)
    assert ids(usable) == ids(known) * 2
    bad = write_lines(tmp_path / "c.jsonl", {"text": "so Be"})
    with pytest.raises(DatasetError, match=r"none can be used:\n  c.jsonl, line 1: has the token"):
        load(bad, tokenizer, vocabulary=vocabulary, skip_bad=True)


def test_lines_give_the_same_tokens_together_in_twos_and_alone(
    tmp_path: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair_of_texts = {"prompt": "why?", "chosen": "so it is", "rejected": "no"}
    asked = [{"role": "user", "content": "why?"}]
    said = [{"role": "assistant", "content": "no"}]
    pair_of_messages = {"prompt": asked, "chosen": GOOD["messages"][1:], "rejected": said}
    texts = [{"prompt": f"say {n}:", "completion": f" {n} ü" * n} for n in range(1, 6)]
    for name, rows, options in (
        ("a", [GOOD, "{", GOOD, {"messages": [*GOOD["messages"] * 3]}, "[1]"], {}),
        ("b", texts, {}),
        (
            "c",
            [pair_of_texts, pair_of_messages, pair_of_texts, pair_of_texts, pair_of_messages],
            {"preferences": True},
        ),
    ):
        path = write_lines(tmp_path / f"{name}.jsonl", *rows)
        together = load(path, tokenizer, skip_bad=True, **options)
        # `AT_ONCE` is the number of lines that are tokenized together.
        with monkeypatch.context() as patch:
            patch.setattr("trainable_candle.data.chats.dataset.AT_ONCE", 2)
            in_twos = load(path, tokenizer, skip_bad=True, **options)
        assert in_twos.listing() == together.listing()
        assert in_twos.counts == together.counts
        alone = [
            load(write_lines(tmp_path / "one.jsonl", row), tokenizer, **options)
            for row in rows
            if row not in ("{", "[1]")
        ]
        assert ids(together) == [example for dataset in alone for example in ids(dataset)]


def test_unknown_and_mixed_forms_are_rejected(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    with pytest.raises(DatasetError, match="has the fields question, reply; expected one of: mess"):
        load(write_lines(tmp_path / "a.jsonl", {"question": "a", "reply": "b"}), tokenizer)
    with pytest.raises(DatasetError, match=r"line 2: `messages` is missing"):
        load(write_lines(tmp_path / "b.jsonl", GOOD, {"text": "a"}), tokenizer)


def test_the_summary_names_the_fields_that_are_not_read(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    summary = load(write_lines(tmp_path / "c.jsonl", {**GOOD, "id": 3}), tokenizer).summary()
    assert "1 example of messages in" in summary
    assert "fields that are not read: id" in summary


def test_truncation_is_counted(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", GOOD, {"messages": [*GOOD["messages"], *GOOD["messages"]]}
    )
    short, long = map(len, load(path, tokenizer).examples)
    cut = load(path, tokenizer, sequence_length=short)
    assert list(map(len, cut.examples)) == [short, short]
    assert cut.counts.cut_tokens == long - short
    assert f"1 example longer than {short} tokens: {long - short} cut off" in cut.summary()
    # The second example had two answers, and truncation has cut off the second of them.
    assert (cut.counts.stops, cut.counts.answers) == (2, 3)


def test_data_without_tokens_to_learn_is_rejected(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    path = write_lines(tmp_path / "a.jsonl", GOOD)
    # The first 5 tokens are all in the user's turn.
    with pytest.raises(DatasetError, match="no token would be learnt: the answers are beyond"):
        load(path, tokenizer, sequence_length=5)
    length = len(load(path, tokenizer).examples[0])
    # The stop token and a line break are the last two tokens.
    with pytest.raises(DatasetError, match=r"no stop token would be learnt.*cuts their ends off"):
        load(path, tokenizer, sequence_length=length - 2)


def test_a_file_without_examples_is_rejected(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DatasetError, match="is empty"):
        load(tmp_path / "empty.jsonl", tokenizer)


def example(length: int, first_id: int) -> Tokens:
    """Return an example with consecutive ids. Tokens 0, 3, 6, ... of the example are not learnt."""
    token_ids = np.arange(first_id, first_id + length)
    learnt = np.arange(length) % 3 > 0
    return Tokens(token_ids, learnt, stops=(), answers=1)


# Examples of these lengths are packed into rows of at most `ROW_LENGTH` tokens.
ROW_LENGTH = 16
LENGTHS = [9, 4, 4, 7, 1, 2, 16, 5, 4, 3, 3, 6]
# No two examples have a token id in common.
EXAMPLES = [example(length, 100 * n) for n, length in enumerate(LENGTHS, 1)]


def test_best_fit_uses_the_fullest_bin_that_has_room_and_needs_few_bins() -> None:
    # The items are numbered from 0; the longest, number 4, comes first.
    assert best_fit([5, 3, 7, 2, 8], 10) == [[4, 3], [2, 1], [0]]
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, 500).tolist()
    bins = best_fit(lengths, 100)
    assert sorted(item for items in bins for item in items) == list(range(500))
    assert max(sum(lengths[item] for item in items) for items in bins) <= 100
    # Full bins would be `sum(lengths) / 100`; at most 2 % and one bin more are needed.
    assert len(bins) <= 1.02 * sum(lengths) / 100 + 1


# `shapes` is the greatest number of different lengths to which batches are padded; 0: no padding.
@pytest.mark.parametrize("shapes", [0, 2])
def test_every_epoch_has_every_example_once_in_an_order_that_follows_from_the_seed(
    shapes: int,
) -> None:
    packer = PackedRows(EXAMPLES, ROW_LENGTH, batch_size=1, seed=3, shapes=shapes)
    epochs = []
    for epoch in range(2):
        seen: Counter[int] = Counter()
        for number in range(packer.first_batch(epoch), packer.first_batch(epoch + 1)):
            batch = packer.batch(number)
            # The id 0 is padding.
            seen.update(batch.input_ids[batch.input_ids > 0].tolist())
        epochs.append(seen)
    assert epochs[0] == epochs[1] == Counter(n for e in EXAMPLES for n in e.ids.tolist())
    again = PackedRows(EXAMPLES, ROW_LENGTH, batch_size=1, seed=3, shapes=shapes)
    assert again.batch(5).input_ids.tolist() == packer.batch(5).input_ids.tolist()


@pytest.mark.parametrize("shapes", [1, 4])
def test_targets_stay_within_their_example_and_batches_have_few_shapes(shapes: int) -> None:
    batch_size = 2
    packer = PackedRows(EXAMPLES, ROW_LENGTH, batch_size, seed=1, shapes=shapes)
    # The lengths of batches are multiples of this many tokens.
    length_step = batch_size * ROW_LENGTH // shapes
    found_shapes = set()
    # A batch has two rows, so as many batches as an epoch has rows are two epochs.
    for number in range(packer.rows):
        batch = packer.batch(number)
        found_shapes.add((len(batch.input_ids), len(batch.cu_seqlens)))
        bounds = batch.cu_seqlens.tolist()
        assert bounds[0] == 0
        assert len(batch.input_ids) % length_step == 0
        assert 0 <= len(batch.input_ids) - bounds[-1] < length_step
        padding = slice(bounds[-1], None)
        assert (batch.targets[padding] == IGNORED).all()
        assert not batch.positions[padding].any()
        for begin, end in pairwise(bounds):
            assert batch.positions[begin:end].tolist() == list(range(end - begin))
            if begin == end:
                continue  # `cu_seqlens` repeats its last bound to reach a fixed length
            assert batch.targets[end - 1] == IGNORED
            targets = batch.targets[begin : end - 1]
            counted = targets != IGNORED
            following = batch.input_ids[begin + 1 : end]
            assert (targets[counted] == following[counted]).all()
            # As in `example`, whose token 0 is no target.
            assert counted.tolist() == [n % 3 > 0 for n in range(1, end - begin)]
    assert len(found_shapes) <= shapes


def test_validation_reads_every_token_once() -> None:
    batches = in_order(EXAMPLES, ROW_LENGTH, batch_size=3)
    seen = Counter(n for batch in batches for n in batch.input_ids.tolist())
    assert seen == Counter(n for e in EXAMPLES for n in e.ids.tolist())
    # The first token of an example is no target.
    assert sum(batch.count for batch in batches) == sum(e.learnt[1:].sum() for e in EXAMPLES)


def test_the_summary_of_a_part_counts_its_own_examples(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    long = {"instruction": "say", "output": "well " * 40}
    short = {"instruction": "say", "output": "so"}
    path = write_lines(tmp_path / "a.jsonl", short, long, short, long, short, {"text": 1})
    # Truncation to 24 tokens cuts the ends of both long answers off.
    whole = load(path, tokenizer, sequence_length=24, skip_bad=True)
    length = len(load(write_lines(tmp_path / "b.jsonl", long), tokenizer).examples[0])
    assert "3 of 5 answers end in a stop token" in whole.summary()
    excess = length - 24
    # The numbers of a part's examples, and texts in its summary.
    parts = {
        (0, 2, 3): [
            "3 examples of",
            "2 of 3 answers",
            f"1 example longer than 24 tokens: {excess} ",
        ],
        (1, 3): ["2 examples of", "0 of 2 answers", f"longer than 24 tokens: {2 * excess} cut off"],
    }
    for numbers, texts in parts.items():
        summary = whole.part(numbers).summary()
        for text in (*texts, "1 line left out: cannot be used"):
            assert text in summary
    assert "longer than" not in whole.part([0, 4]).summary()
    assert "3 of 5 answers" in whole.part(range(5)).summary()
