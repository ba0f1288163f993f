"""A data set of texts, checked and tokenized before a model is loaded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Final

from trainable_candle.data.chats.forms import Form, Preference, expected, form_of
from trainable_candle.data.chats.labels import Pair, drafts_of, labelled, unknown_token
from trainable_candle.data.chats.messages import RowError, require_whole_characters
from trainable_candle.data.chats.reading import BadRow, Row, find_files, read_rows
from trainable_candle.data.folder import counted, first_lines
from trainable_candle.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from trainable_candle.data.chats.labels import Draft, Tokens
    from trainable_candle.text.chat_tokenizer import ChatTokenizer, Encoded

AT_ONCE: Final = 1024
"""The number of lines whose texts are tokenized together, by several threads."""
SKIP_HINT: Final = " (--skip-bad leaves such lines out)"
"""The cure in messages about lines that cannot be used."""


@dataclass(frozen=True)
class TextOptions:
    """How the examples of a data set are read."""

    sequence_length: int = 2048
    """The greatest number of tokens in an example; longer examples are truncated at the end."""
    train_on: str = "answers"
    """Which tokens count in the loss; one of `settings.texts.TRAIN_ON`."""
    preferences: bool = False
    """Whether each example is a pair of answers to compare."""
    skip_bad: bool = False
    """Whether lines that cannot be used are left out."""
    vocabulary: int | None = None
    """The number of tokens that the model has; None: any token is accepted."""


@dataclass
class Counts:
    """What was counted while the lines of a data set were read.

    The form of a line is the set of fields that it has, such as `messages` or `prompt` and
    `completion`.
    """

    forms: Counter[str] = field(default_factory=Counter)
    """For each form's name, the number of lines that have this form."""
    ignored: Counter[str] = field(default_factory=Counter)
    """For each field that is not read, the number of lines that have the field."""
    bad: list[str] = field(default_factory=list)
    """One message for each line that cannot be used."""
    truncated: int = 0
    """Examples that were longer than `TextOptions.sequence_length`."""
    cut_tokens: int = 0
    """Tokens cut off from all truncated examples together."""
    unlearnt: int = 0
    """Examples that were left out because they have no token to learn, often after truncation."""
    answers: int = 0
    """Answers to learn, counted before examples are truncated."""
    stops: int = 0
    """Answers to learn that still end in a stop token after examples are truncated."""


class TextDataset:
    """A data set of texts, with its examples as tokens.

    Args:
        examples: at least one.
        counts: what was counted while the examples' lines were read.
        options: how the lines were read.
        place: the file or folder, for messages.
    """

    def __init__(
        self, examples: Sequence[Tokens | Pair], counts: Counts, options: TextOptions, place: Path
    ) -> None:
        self.examples = list(examples)
        self.counts = counts
        self.options = options
        self.place = place

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def tokens(self) -> int:
        """The number of tokens in all examples together."""
        return sum(map(len, self.examples))

    @property
    def learnt(self) -> int:
        """The number of tokens that count in the loss."""
        return sum(int(example.learnt.sum()) for example in self.examples)

    def part(self, numbers: Sequence[int]) -> TextDataset:
        """Return the data set of the examples with these indices.

        Its counts of answers and of truncation are those of its own examples. Its other counts are
        those of the whole data set, because lines and examples that were left out are in no part.
        """
        chosen = [self.examples[number] for number in numbers]
        counts = replace(
            self.counts,
            truncated=sum(example.cut > 0 for example in chosen),
            cut_tokens=sum(example.cut for example in chosen),
            answers=sum(example.answers for example in chosen),
            stops=sum(len(example.stops) for example in chosen),
        )
        return TextDataset(chosen, counts, self.options, self.place)

    def listing(self) -> dict[str, str]:
        """Return, for each example, a hash of its token ids and of its mask of tokens to learn."""
        return {
            f"example {number}": blake2b(
                example.ids.tobytes() + example.learnt.tobytes(), digest_size=16
            ).hexdigest()
            for number, example in enumerate(self.examples)
        }

    def summary(self) -> str:
        """Return a description of the data set in several lines."""
        counts, learnt = self.counts, self.learnt
        forms = ", ".join(counts.forms)
        share = f"{100 * learnt / self.tokens:.0f} %"
        lines = [
            f"dataset: {counted(len(self), 'example')} of {forms} in {self.place}",
            f"  {counted(self.tokens, 'token')}, {learnt} learnt ({share})",
            f"  the longest example has {max(map(len, self.examples))} tokens",
            f"  {counts.stops} of {counted(counts.answers, 'answer')} end in a stop token",
        ]
        if counts.truncated:
            lines.append(
                f"  {counted(counts.truncated, 'example')} longer than "
                f"{self.options.sequence_length} tokens: {counts.cut_tokens} cut off "
                "(--sequence-length keeps more)"
            )
        if counts.unlearnt:
            lines.append(f"  {counted(counts.unlearnt, 'example')} left out: nothing to learn")
        if counts.bad:
            lines.append(f"  {counted(len(counts.bad), 'line')} left out: cannot be used")
            lines += [f"    {line}" for line in first_lines(counts.bad)]
        if counts.ignored:
            lines.append(f"  fields that are not read: {', '.join(sorted(counts.ignored))}")
        return "\n".join(lines)


def load_texts(
    path: Path, tokenizer: ChatTokenizer, options: TextOptions
) -> tuple[TextDataset, TextDataset | None]:
    """Read, check and tokenize the files that a path names.

    Returns:
        Two data sets: the first to train on, the second for validation. The second is None if
        `path` is a file, or a folder in which no file is for training by its name, or none is for
        validation (see `reading.find_files`).

    Raises:
        DatasetError: there are no files, or `path` is the output folder of a run; a file cannot be
            read; no line can be used; some lines cannot be used and `skip_bad` is off (the message
            names the first ten); no token, or no stop token, would be learnt.
        ModuleNotFoundError: a Parquet file needs pyarrow.
    """
    train, validation = find_files(path)
    held_out = _load(validation, path, tokenizer, options) if validation else None
    return _load(train, path, tokenizer, options), held_out


def has_pairs(path: Path) -> bool:
    """Return whether the first readable line of a data set has a chosen and a rejected answer.

    Raises:
        DatasetError: the files are missing or cannot be read.
        ModuleNotFoundError: a Parquet file needs pyarrow.
    """
    train, _ = find_files(path)
    rows = (row for file in train for row in read_rows(file))
    first = next((row for row in rows if isinstance(row, Row)), None)
    form = form_of(first.values) if first else None
    return form is not None and form.name == "preferences"


def _load(
    files: Sequence[Path], place: Path, tokenizer: ChatTokenizer, options: TextOptions
) -> TextDataset:
    """Return the data set in `files`; `place` is the file or folder that messages name."""
    counts, line_count = Counts(), 0
    examples: list[Tokens | Pair] = []
    for file in files:
        # The first line that has a form decides the form of all lines of its file.
        form: Form | None = None
        rows = read_rows(file)
        while chunk := list(islice(rows, AT_ONCE)):
            line_count += len(chunk)
            # Texts of usable lines that are not tokenized yet, with the place of each line.
            drafts: list[tuple[str, tuple[Draft, ...]]] = []
            for row in chunk:
                try:
                    if isinstance(row, BadRow):
                        raise RowError(row.reason)
                    form = form or _form(row)
                    drafts.append((row.place, _drafts(row, form, tokenizer, options)))
                except ValueError as error:  # or its subclass `RowError`
                    counts.bad.append(f"{row.place}: {error}")
                    continue
                counts.forms[form.name] += 1
                counts.ignored.update(set(row.values) - {*form.fields, *form.others})
            examples += _examples(drafts, tokenizer, options, counts)
    if counts.bad and not options.skip_bad:
        raise DatasetError(
            f"dataset: {len(counts.bad)} of {counted(line_count, 'line')} in {place} cannot be used"
            f"{SKIP_HINT}:\n  " + "\n  ".join(first_lines(counts.bad))
        )
    _require_learnable(counts, examples, line_count, place, options)
    return TextDataset(examples, counts, options, place)


def _form(row: Row) -> Form:
    """Return the form of a line.

    Raises:
        RowError: no form has the line's fields.
    """
    form = form_of(row.values)
    if form is None:
        names = ", ".join(map(str, row.values)) or "none"
        raise RowError(f"has the fields {names}; expected one of: {expected()}")
    return form


def _drafts(
    row: Row, form: Form, tokenizer: ChatTokenizer, options: TextOptions
) -> tuple[Draft, ...]:
    """Return the texts of a line: two for a pair of answers, else one.

    Raises:
        ValueError: the line cannot be used.
    """
    # `others` are the fields that a line of this form may lack.
    for name in (*form.fields, *form.others):
        require_whole_characters(row.values.get(name), name)
    read = form.read(row.values)
    if isinstance(read, Preference) and not options.preferences:
        raise RowError(
            "`chosen` and `rejected` are answers to compare; give --objective dpo, or rename "
            "`chosen` to `completion` to learn only that answer"
        )
    if options.preferences and not isinstance(read, Preference):
        raise RowError("has no `chosen` and `rejected`, which --objective dpo compares")
    return drafts_of(read, tokenizer, options.train_on)


def _examples(
    drafts: Sequence[tuple[str, tuple[Draft, ...]]],
    tokenizer: ChatTokenizer,
    options: TextOptions,
    counts: Counts,
) -> Iterator[Tokens | Pair]:
    """Tokenize texts and yield the examples in which something is learnt; count the others.

    Args:
        drafts: for each line, its place and its texts.
        tokenizer: the tokenizer.
        options: how the lines are read.
        counts: gets what is counted.
    """
    encoded: list[Encoded] = []
    all_drafts = chain.from_iterable(line_drafts for _, line_drafts in drafts)
    # All texts of one call of `encode_all` have the same `special`: whether the tokenizer adds
    # tokens around a text.
    for special, group in groupby(all_drafts, lambda draft: draft.special):
        encoded += tokenizer.encode_all([draft.text for draft in group], special=special)
    tokens = iter(encoded)
    for place, line_drafts in drafts:
        # A line has one text, or the two texts of a pair.
        example = labelled(line_drafts, list(islice(tokens, len(line_drafts))))
        problem = unknown_token(example.ids, tokenizer, options.vocabulary)
        if problem:
            counts.bad.append(f"{place}: {problem}")
            continue
        kept = _truncated(example, options, counts)
        if kept is not None:
            yield kept


def _truncated(tokens: Tokens | Pair, options: TextOptions, counts: Counts) -> Tokens | Pair | None:
    """Return what is kept of an example after truncation, and count what is cut off.

    None if nothing in the example, or in one half of a pair, is learnt.
    """
    counts.answers += tokens.answers
    kept = tokens.truncated(options.sequence_length)
    counts.stops += len(kept.stops)
    if kept.cut:
        counts.truncated += 1
        counts.cut_tokens += kept.cut
    texts = (kept.chosen, kept.rejected) if isinstance(kept, Pair) else (kept,)
    if not all(text.learnt.any() for text in texts):
        counts.unlearnt += 1
        return None
    return kept


def _require_learnable(
    counts: Counts, examples: Sequence[Tokens | Pair], lines: int, place: Path, options: TextOptions
) -> None:
    """Check that the examples have tokens to learn, and a stop token among them.

    Raises:
        DatasetError: they have none; the message says why.
    """
    start = f"dataset: {counted(lines, 'line')} in {place}:"
    if not lines:
        raise DatasetError(f"dataset: {place} is empty")
    if not examples and not counts.unlearnt:
        raise DatasetError(f"{start} none can be used:\n  " + "\n  ".join(first_lines(counts.bad)))
    if not examples:
        reason = (
            f"the answers are beyond the first {options.sequence_length} tokens; "
            "give a larger --sequence-length"
            if counts.truncated
            else "the chat template marks no answer; see `trainable-candle preview-data`"
        )
        raise DatasetError(f"{start} no token would be learnt: {reason}")
    if not counts.stops:
        reason = (
            "the answers are longer than --sequence-length, which cuts their ends off"
            if counts.truncated
            else "no answer ends in an end token (eos_token) of the tokenizer or of "
            "generation_config.json"
        )
        raise DatasetError(
            f"{start} no stop token would be learnt, and the model would not stop: {reason}"
        )
