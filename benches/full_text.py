"""Write full-size language models with random bf16 weights, and texts to train them on.

python benches/full_text.py FOLDER MODEL [--device cuda]

All texts consist of the same few thousand words of random letters. The tokenizer is trained on
these words, so it has merges and tokens of several letters, as real tokenizers do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from full_flow import write_part
from gpu_lm import CLASSES, LLAMA3, QWEN2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterator

MODELS: Final = {"qwen2": QWEN2, "llama": LLAMA3}
SPECIAL: Final = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# `{% generation %}` encloses the tokens of answers, which training counts.
TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTION, ANSWER = 40, 120
"""The mean numbers of words of a question and of an answer, beyond the first word of each."""


def write_model(folder: Path, model: str, device: str = "cpu") -> None:
    """Write a model's folder as on the Hugging Face hub; it takes 3.1 GB (qwen2) or 16 (llama)."""
    config = MODELS[model] | {"architectures": [CLASSES[MODELS[model]["model_type"]]]}
    write_part(folder, "CausalLM", config, device)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(_words())], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_texts(path: Path, count: int = 64, words: int = 400) -> None:
    """Write lines with one text each, all of the same number of words."""
    random = np.random.default_rng(0)
    vocabulary = _words()
    texts = (" ".join(random.choice(vocabulary, words)) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_chats(path: Path, count: int = 5000) -> None:
    """Write lines with one conversation each, of two questions and two answers."""
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in _chats(count)))


def _chats(count: int) -> Iterator[list[dict[str, Any]]]:
    random = np.random.default_rng(1)
    vocabulary = _words()

    def message(role: str, mean: int) -> dict[str, Any]:
        words = random.choice(vocabulary, 1 + random.poisson(mean))
        return {"role": role, "content": " ".join(words)}

    for _ in range(count):
        yield [message(*turn) for turn in (("user", QUESTION), ("assistant", ANSWER)) * 2]


def _words(count: int = 4000) -> list[str]:
    """Return words of 2 to 9 random letters, the same in every call."""
    random = np.random.default_rng(2)
    a, z = ord("a"), ord("z")
    return ["".join(map(chr, random.integers(a, z + 1, 2 + n % 8))) for n in range(count)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    write_model(given.folder, given.model, given.device)
    write_chats(given.folder / "chats.jsonl")
