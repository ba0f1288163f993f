"""The tokenizer of image models with a Qwen text encoder; it wraps prompts in a chat turn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import MissingFileError, WeightsFormatError
from trainable_candle.files import parse_json
from trainable_candle.text.gguf_tokenizer import byte_level

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from typing_extensions import Self

FILE: Final = "tokenizer.json"
VOCABULARY: Final = "vocab.json"
"""The file with the tokens' numbers in folders that have `merges.txt` and no `tokenizer.json`."""
_PAD: Final = "<|endoftext|>"
_TOKENS: Final = ("<|im_start|>", "<|im_end|>", _PAD)
"""The tokens of the template, and the padding token."""
_TURN: Final = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""A user's turn in Qwen3's template, up to where the answer begins."""
_SYSTEM: Final = "<|im_start|>system\n{}<|im_end|>\n"
"""The system's turn, which precedes the user's and says what the model is to do."""
_NO_THOUGHTS: Final = "<think>\n\n</think>\n\n"
"""The beginning of an answer, which the template writes if `enable_thinking` is false."""


class PromptTokenizer:
    """Qwen's tokenizer; it puts prompts into Qwen's chat template, as transformers does.

    Args:
        tokenizer: splits text, including the template's, into tokens, and maps each token to its
            number.
        thinks: whether the answer may begin with thoughts; the template's name of this setting is
            `enable_thinking`.
        system: the text of a system's turn before the user's; None for no such turn.

    Raises:
        WeightsFormatError: a token of the template, or the padding token, is missing.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, thinks: bool = True, system: str | None = None
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        start, end = _TURN.split("{}")
        self._start = start if system is None else _SYSTEM.format(system) + start
        self._end = end if thinks else end + _NO_THOUGHTS
        # The system's turn is used with Qwen2.5-VL, which has Qwen2's tokenizer.
        model = "Qwen3" if system is None else "Qwen2"
        for token in _TOKENS:
            if tokenizer.token_to_id(token) is None:
                raise WeightsFormatError(
                    f"tokenizer: the vocabulary has no {token!r}; expected the tokenizer of {model}"
                )

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, thinks: bool = True, system: str | None = None
    ) -> Self:
        """Return the tokenizer in a folder.

        Args:
            folder: a folder with `tokenizer.json`, or `vocab.json` and `merges.txt`.
            thinks: as for the class.
            system: as for the class.

        Raises:
            MissingFileError: there is neither `tokenizer.json` nor `vocab.json`.
            WeightsFormatError: a file cannot be understood, `merges.txt` is missing, or a token of
                the template is missing.
        """
        from tokenizers import Tokenizer  # noqa: PLC0415 - imported when first needed

        path = Path(folder).expanduser() / FILE
        vocabulary = path.with_name(VOCABULARY)
        if not path.is_file() and not vocabulary.is_file():
            raise MissingFileError(f"tokenizer: there is no file {path}, and no {VOCABULARY}")
        try:
            if path.is_file():
                tokenizer = Tokenizer.from_file(str(path))
            else:
                path = vocabulary
                tokenizer = _from_merges(path.parent)
        except Exception as error:
            # The library raises no narrower exception.
            raise WeightsFormatError(f"tokenizer: {path} cannot be read: {error}") from error
        return cls(tokenizer, thinks=thinks, system=system)

    @property
    def size(self) -> int:
        """One more than the largest token number."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def pad(self) -> int:
        """The number of the padding token."""
        # `__init__` has checked that the token exists; `or 0` is only for the type checker.
        return int(self._tokenizer.token_to_id(_PAD) or 0)

    def encode(self, prompt: str, most: int) -> list[int]:
        """Return the numbers of the first `most` tokens of a prompt in the template."""
        tokens: list[int] = self._tokenizer.encode(
            self._start + prompt + self._end, add_special_tokens=False
        ).ids
        return tokens[:most]


def _from_merges(folder: Path) -> Tokenizer:
    """Return Qwen2's tokenizer from `vocab.json` and `merges.txt`.

    Added tokens come from `added_tokens.json` and `tokenizer_config.json`, if these files exist.

    Raises:
        OSError, ValueError, TypeError, KeyError: a file is missing or cannot be understood.
    """
    from tokenizers import AddedToken  # noqa: PLC0415 - imported when first needed

    numbers = _read(folder / VOCABULARY)
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    tokens = sorted(numbers, key=lambda token: int(numbers[token]))
    # A token's index in `tokens` becomes its number. `pre` is GGUF's name of the pre-tokenizer.
    tokenizer = byte_level({"pre": "qwen2", "tokens": tokens, "merges": merges})
    added = {int(number): token for token, number in _read(folder / "added_tokens.json").items()}
    decoder = _read(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    added |= {int(number): fields["content"] for number, fields in decoder.items()}
    # The library gives a new token the next free number, so add the tokens in the order of numbers.
    for number, token in sorted(added.items()):
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        if tokenizer.token_to_id(token) != number:
            raise ValueError(
                f"the added token {token} has the number {number}, expected "
                f"{tokenizer.token_to_id(token)}"
            )
    return tokenizer


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no file."""
    if not path.is_file():
        return {}
    found = parse_json(path.read_bytes())
    if not isinstance(found, dict):
        raise TypeError(f"{path.name}: expected an object, found {type(found).__name__}")
    return found
