"""Tasks on made-up words: some that the built-in language model knows, and one that is new to it.

A message is a task and a word, for example `upper: clavo`; the answer is what the task makes of the
word, here `CLAVO`. Words are random syllables. A hash assigns each word to one of two parts: models
are trained on one part and judged on the other, the held-out part.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

_ONSETS: Final = (
    *"bcdfghjklmnprstvwz",
    "bl", "br", "cl", "cr", "dr", "fl", "gr", "pl", "sh", "sn", "sp", "st", "th", "tr",
)  # fmt: skip
_VOWELS: Final = "aeiou"
_CODAS: Final = ("", "", "", "l", "m", "n", "r", "s", "t", "nd", "rk", "st")
_HELD_OUT: Final = 8
"""On average, one of this many words is held out."""


def _pig(word: str) -> str:
    start = next(index for index, letter in enumerate(word) if letter in _VOWELS)
    return f"{word[start:]}{word[:start]}ay"


TASKS: Final[dict[str, Callable[[str], str]]] = {
    "repeat": lambda word: word,
    "upper": str.upper,
    "name": str.capitalize,
    "shout": lambda word: f"{word.upper()}!",
    "quote": lambda word: f'"{word}"',
    "spell": " ".join,
    "double": lambda word: f"{word} {word}",
    "first": lambda word: word[0],
    "last": lambda word: word[-1],
    "tail": lambda word: word[1:],
    "head": lambda word: word[:-1],
    "vowels": lambda word: "".join(letter for letter in word if letter in _VOWELS),
}
"""The tasks that the built-in model knows: by name, the function that maps a word to its answer."""
UNSEEN: Final = "pig"
"""The task that the built-in model has never seen: Pig Latin, which moves the consonants before the
first vowel to the end and appends `ay`."""


def answer(task: str, word: str) -> str:
    """Return the right answer for a task and a word."""
    return _pig(word) if task == UNSEEN else TASKS[task](word)


def message(task: str, word: str) -> str:
    """Return the message that asks for a task on a word."""
    return f"{task}: {word}"


def chat(task: str, word: str) -> list[dict[str, str]]:
    """Return a chat of two messages: one that asks for a task on a word, and the right answer."""
    return [
        {"role": "user", "content": message(task, word)},
        {"role": "assistant", "content": answer(task, word)},
    ]


def is_held_out(word: str) -> bool:
    """Return whether a word is in the part that models are judged on, not trained on."""
    return zlib.crc32(word.encode()) % _HELD_OUT == 0


def words(rng: np.random.Generator, count: int, *, held_out: bool = False) -> list[str]:
    """Return `count` different words of 4 to 9 letters, all of the same part.

    Args:
        rng: the random generator.
        count: the number of words.
        held_out: whether the words are of the held-out part or of the training part.
    """
    found: dict[str, None] = {}
    while len(found) < count:
        two_syllables = (_ONSETS, _VOWELS, _CODAS) * 2
        word = "".join(_choice(rng, choices) for choices in two_syllables)
        if 4 <= len(word) <= 9 and is_held_out(word) == held_out:
            found[word] = None
    return list(found)


def _choice(rng: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[int(rng.integers(len(choices)))]
