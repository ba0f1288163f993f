"""The demo of language models: teaches the built-in model a task that it has never seen."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import trainable_candle as tc
from trainable_candle.demo import words
from trainable_candle.demo.folder import VERDICT, begin
from trainable_candle.draws import generator
from trainable_candle.errors import InternalError
from trainable_candle.families.causal_lm import CausalLM
from trainable_candle.files import write_atomically
from trainable_candle.run import train_adapter
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.text import TextTask
from trainable_candle.tasks.text.writing import WritingOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DATASET: Final = "chats.jsonl"
EXAMPLES: Final = 4000
"""The number of training examples."""
KNOWN_SHARE: Final = 0.3
"""The probability that a training example is of a task that the base knows. Without such examples,
training makes the model forget those tasks."""
ASKED: Final = 200
"""The number of held-out words that the unseen task is judged on."""
ASKED_KNOWN: Final = 20
"""The number of held-out words that each known task is judged on."""
MOST_BEFORE: Final = 0.0
"""`Verdict.before` must be at most this."""
LEAST_AFTER: Final = 0.9
"""`Verdict.after` must be at least this."""
LEAST_KEPT: Final = 0.8
"""`Verdict.old_after` must be at least this share of `Verdict.old_before`."""


@dataclass(frozen=True)
class Verdict:
    """Shares (0 to 1) of exact answers about words that are in no training data.

    The names with `old` are about the tasks that the base knows, the others about the unseen task.
    """

    before: float
    """In the unseen task: the share that the base answers right."""
    after: float
    """In the unseen task: the share that the base with the LoRA answers right."""
    old_before: float
    """In the tasks that the base knows: the share that the base answers right."""
    old_after: float
    """In the tasks that the base knows: the share that the base with the LoRA answers right."""

    @property
    def passed(self) -> bool:
        """Whether the base can do the unseen task only with the LoRA, and then forgets little."""
        return (
            self.before <= MOST_BEFORE
            and self.after >= LEAST_AFTER
            and self.old_after >= LEAST_KEPT * self.old_before
        )

    def __str__(self) -> str:
        least_known = f"at least {LEAST_KEPT:.0%} of before"
        rows = [
            (f"{words.UNSEEN}, without the LoRA", self.before, f"{MOST_BEFORE:.0%}"),
            (f"{words.UNSEEN}, with the LoRA", self.after, f"at least {LEAST_AFTER:.0%}"),
            ("known tasks, without the LoRA", self.old_before, "-"),
            ("known tasks, with the LoRA", self.old_after, least_known),
        ]
        lines = [f"  {what:30}{found:7.1%}  (expected: {wanted})" for what, found, wanted in rows]
        return "\n".join(["Exact answers about words that are in no training data:", *lines])


def run_demo(
    output: Path,
    *,
    seed: int = 0,
    threads: int | None = None,
    progress: bool = True,
    report: Callable[[str], None] = print,
) -> Verdict | None:
    """Train a LoRA on the unseen task, and judge the base's answers without it and with it.

    Args:
        output: the folder for the data set and the results; created if missing.
        seed: the seed of the words, of the data set and of the training.
        threads: CPU threads; default all.
        progress: whether to show a progress bar.
        report: gets a line at each stage.

    Returns:
        The judgement; None if the training was interrupted.

    Raises:
        OSError: the folder cannot be written.
        ConfigError: the folder has checkpoints of a run that is no demo.
    """
    begin(output)
    write_dataset(output / DATASET, seed)
    if threads is not None:
        tc.set_num_threads(threads)
    config = configuration(output, seed=seed, threads=threads)
    base = CausalLM.default_weights()
    assert base is not None
    untouched = Answers(CausalLM(base, config.precision, config.device).task(), seed)
    report(f"base: knows {', '.join(words.TASKS)}; it has never seen {words.UNSEEN}")

    training = train_adapter(config, progress=progress, report=report)
    assert isinstance(training.task, TextTask)
    if not training.completed:
        return None
    tuned = Answers(training.task, seed)
    report(tuned.shown(untouched))
    training.adapter.set_enabled(False)
    if Answers(training.task, seed).unseen != untouched.unseen:
        raise InternalError("demo: the model without its adapter is no longer the base")
    result = Verdict(untouched.right, tuned.right, untouched.right_known, tuned.right_known)
    write_atomically(output / VERDICT, json.dumps(asdict(result), indent=2) + "\n")
    return result


def configuration(output: Path, *, seed: int = 0, threads: int | None = None) -> TrainConfig:
    """Return the settings of a run that trains on the chats in `output` and writes to `output`."""
    return TrainConfig(
        model="causal-lm",
        dataset=str(output / DATASET),
        output=str(output),
        device="cpu",
        precision="f32",
        rank=16,
        steps=200,
        batch_size=4,
        sequence_length=512,
        learning_rate=5e-3,
        optimizer="adamw",
        weight_decay=0.0,
        lr_scheduler="cosine",
        warmup_steps=20,
        save_every=0,
        log_every=1,
        seed=seed,
        threads=threads,
    )


def write_dataset(path: Path, seed: int) -> None:
    """Write the training examples: chats about words that are not held out, one per line as JSON.

    Raises:
        OSError: the file cannot be written.
    """
    # "items" names a stream of random numbers; the held-out words come from another, "split".
    rng = generator(seed, "items")
    known_tasks, lines = list(words.TASKS), []
    for word in words.words(rng, EXAMPLES):
        is_known = rng.random() < KNOWN_SHARE
        task = known_tasks[int(rng.integers(len(known_tasks)))] if is_known else words.UNSEEN
        lines.append(json.dumps({"messages": words.chat(task, word)}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(lines))


class Answers:
    """A model's answers about held-out words, in the unseen task and in the known tasks.

    Args:
        task: the model that answers.
        seed: the seed of the words.
    """

    def __init__(self, task: TextTask, seed: int) -> None:
        rng = generator(seed, "split")
        questions = [(words.UNSEEN, word) for word in words.words(rng, ASKED, held_out=True)]
        for task_name in words.TASKS:
            questions += [
                (task_name, word) for word in words.words(rng, ASKED_KNOWN, held_out=True)
            ]
        chats = [[{"role": "user", "content": words.message(*question)}] for question in questions]
        answers = task.answers(chats, WritingOptions(tokens=32))
        self.asked = questions[:ASKED]
        """The questions of the unseen task: pairs of the task and a word."""
        self.unseen = answers[:ASKED]
        """The answers to `asked`, in the same order."""
        # `answers` has the order of `questions`: first the unseen task, then the known tasks.
        are_right = [
            words.answer(*question) == answer
            for question, answer in zip(questions, answers, strict=True)
        ]
        self.right = sum(are_right[:ASKED]) / ASKED
        """The share of exact answers in the unseen task."""
        self.right_known = sum(are_right[ASKED:]) / len(are_right[ASKED:])
        """The share of exact answers in the known tasks together."""

    def shown(self, before: Answers, count: int = 4) -> str:
        """Return a line for each of the first `count` words of the unseen task, with both answers.

        Args:
            before: the answers of the model without the LoRA, about the same words.
            count: the number of lines.
        """
        rows = list(zip(self.asked, before.unseen, self.unseen, strict=True))[:count]
        return "\n".join(
            f"  {words.message(*question)}: without the LoRA {base_answer!r}, with it {answer!r}"
            for question, base_answer, answer in rows
        )
