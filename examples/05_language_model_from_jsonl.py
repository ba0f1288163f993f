"""Train a language model on a JSONL file: the built-in Llama learns Pig Latin.

Each line of the file is a conversation: `{"messages": [{"role": "user", "content": ...}, ...]}`.
The model learns the assistant's messages. To train Qwen, Llama or Mistral, set `weights` in the
settings to a folder or a name on the Hugging Face hub. The script takes half a minute on two cores:

    python examples/05_language_model_from_jsonl.py [FOLDER]
"""

import json
import sys
from pathlib import Path

import numpy as np

import trainable_candle as tc
from trainable_candle.demo import words
from trainable_candle.run import train_adapter
from trainable_candle.tasks.text.writing import WritingOptions

STEPS = 200
QUESTIONS = 20
"""The number of words that the trained model is asked about."""


def write_chats(path: Path, count: int) -> None:
    """Write a file of `count` conversations, in which `pig: clavo` is answered by `avoclay`."""
    drawn = words.words(np.random.default_rng(0), count)
    # UNSEEN is the task that the built-in model was not trained on: Pig Latin.
    lines = [json.dumps({"messages": words.chat(words.UNSEEN, word)}) for word in drawn]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(folder: Path, steps: int = STEPS) -> float:
    """Train, then ask about new words; returns the fraction of correct answers."""
    folder.mkdir(parents=True, exist_ok=True)
    write_chats(folder / "chats.jsonl", 600)
    run = train_adapter(
        tc.train.TrainConfig(
            model="causal-lm",
            dataset=str(folder / "chats.jsonl"),
            output=str(folder / "run"),
            rank=16,
            steps=steps,
            batch_size=2,
            sequence_length=512,
            learning_rate=1e-2,
            validation_split=0.1,
        )
    )

    # Words that neither the base model nor its adapter was trained on.
    asked = words.words(np.random.default_rng(1), QUESTIONS, held_out=True)
    # Of each chat, only the first message, which is the user's.
    questions = [[words.chat(words.UNSEEN, word)[0]] for word in asked]
    answers = run.task.answers(questions, WritingOptions(tokens=24))
    expected = [words.answer(words.UNSEEN, word) for word in asked]
    correct = sum(a.strip() == e for a, e in zip(answers, expected, strict=True))
    print(f"{asked[0]} -> {answers[0]}; {correct} of {QUESTIONS} answers are correct")
    print(f"adapter for transformers and peft: {folder / 'run' / 'peft'}")
    return correct / QUESTIONS


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "pig-latin"))
