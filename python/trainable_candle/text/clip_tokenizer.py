"""CLIP's tokenizer, which turns text into rows of up to 77 token numbers."""

from __future__ import annotations

import gzip
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from trainable_candle.errors import MissingFileError, WeightsFormatError
from trainable_candle.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from tokenizers import Tokenizer
    from typing_extensions import Self

LENGTH: Final = 77
"""The number of tokens that CLIP reads at once, including the start and end tokens."""
START: Final = "<|startoftext|>"
END: Final = "<|endoftext|>"
PAD_OF_CLIP_L: Final = END
"""The padding token of OpenAI's CLIP ViT-L/14."""
PAD_OF_BIG_G: Final = "!"
"""The padding token of OpenCLIP's ViT-bigG/14."""
SHIPPED: Final = Path(str(files("trainable_candle.text") / "assets" / "clip_merges.txt.gz"))
"""The package's own copy of `merges.txt`, which all published CLIP models share."""
_WORD: Final = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)
"""The regular expression of the words that byte-pair encoding splits, one by one, into tokens."""


class CLIPTokenizer:
    """Byte-pair encoding of text in lower case, as in `transformers.CLIPTokenizer`.

    Unlike in `transformers`, "!" in a text is ordinary text even if "!" is the padding token.
    OpenCLIP and ComfyUI also treat it as ordinary text.

    Args:
        tokenizer: splits text into tokens and maps each token to its number.
        pad: the padding token, `PAD_OF_CLIP_L` or `PAD_OF_BIG_G`.
        length: the number of tokens in a row, including the start and end tokens; at least 3.

    Raises:
        WeightsFormatError: the vocabulary lacks the start, end or padding token.
    """

    def __init__(self, tokenizer: Tokenizer, pad: str, length: int = LENGTH) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.start, self.end, self.pad = (self._number(token) for token in (START, END, pad))
        self.length = length

    @classmethod
    def shipped(cls, pad: str) -> Self:
        """Return the tokenizer of the published CLIP models, from the package's own copy.

        All of these models, OpenCLIP's too, have the same vocabulary; they differ in `pad`.

        Raises:
            WeightsFormatError: the vocabulary has no token `pad`.
        """
        return cls(_from_merges(gzip.decompress(SHIPPED.read_bytes()).decode()), pad)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Return the tokenizer of a diffusers folder, `tokenizer` or `tokenizer_2`.

        Args:
            folder: a folder with `tokenizer.json`, or `vocab.json` and `merges.txt`. The padding
                token and the length of rows are read from `tokenizer_config.json` and
                `special_tokens_map.json`.

        Raises:
            MissingFileError: there is no such folder or file.
            WeightsFormatError: a file cannot be understood, or the vocabulary lacks the start, end
                or padding token.
        """
        folder = Path(folder).expanduser()
        try:
            tokenizer = _from_folder(folder)
            settings = _read(folder / "special_tokens_map.json")
            settings |= _read(folder / "tokenizer_config.json")
        except FileNotFoundError as error:
            raise MissingFileError(
                f"tokenizer: there is no file {error.filename}; expected tokenizer.json, or "
                "vocab.json and merges.txt"
            ) from error
        except Exception as error:
            # The library raises no narrower exception.
            raise WeightsFormatError(f"tokenizer: {folder} cannot be read: {error}") from error
        length = settings.get("model_max_length", LENGTH)
        # Newer files leave the length out, or give a huge number for "unlimited".
        is_usable = isinstance(length, int) and 3 <= length <= LENGTH
        pad = _token(settings.get("pad_token", END))
        return cls(tokenizer, pad, length if is_usable else LENGTH)

    @property
    def content_length(self) -> int:
        """The number of tokens in a row, without the start and end tokens."""
        return self.length - 2

    def encode(self, text: str) -> list[int]:
        """Return the numbers of a text's tokens, without start and end tokens.

        Raises:
            WeightsFormatError: the vocabulary has no token for unknown text.
        """
        try:
            numbers: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:
            # The library raises no narrower exception.
            raise WeightsFormatError(f"tokenizer: {text!r} cannot be encoded: {error}") from error
        return numbers

    def chunks(self, text: str, most: int = 1) -> npt.NDArray[np.int64]:
        """Return a text in rows, each with start and end tokens and padding.

        Args:
            text: any text; an empty one gives one row.
            most: the greatest number of rows, at least 1; the rest of the text is left out.

        Returns:
            Token numbers of shape (rows, length).

        Raises:
            WeightsFormatError: the vocabulary has no token for unknown text.
        """
        numbers = self.encode(text)[: most * self.content_length]
        starts = range(0, max(len(numbers), 1), self.content_length)
        return np.array(
            [self._row(numbers[at : at + self.content_length]) for at in starts], np.int64
        )

    def __call__(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the first row of each text, in shape (number of texts, length).

        Args:
            texts: at least one text.

        Raises:
            WeightsFormatError: the vocabulary has no token for unknown text.
        """
        return np.concatenate([self.chunks(text) for text in texts])

    def _row(self, content: list[int]) -> list[int]:
        fill = [self.pad] * (self.content_length - len(content))
        return [self.start, *content, self.end, *fill]

    def _number(self, token: str) -> int:
        number: int | None = self._tokenizer.token_to_id(token)
        if number is None:
            raise WeightsFormatError(
                f"tokenizer: the vocabulary has no {token!r}; expected a tokenizer of CLIP"
            )
        return number


def _from_folder(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer  # noqa: PLC0415 - imported when first needed

    path = folder / "tokenizer.json"
    if path.is_file():
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    vocabulary = parse_json((folder / "vocab.json").read_text(encoding="utf-8"))
    return _from_merges((folder / "merges.txt").read_text(encoding="utf-8"), vocabulary)


def _from_merges(merges: str, vocabulary: dict[str, int] | None = None) -> Tokenizer:
    """Make a tokenizer from CLIP's list of merges.

    Args:
        merges: the text of `merges.txt`, with one merge on each line.
        vocabulary: the number of each token. By default, tokens are numbered in CLIP's order:
            bytes, bytes at the end of a word, results of merges, start, end.
    """
    from tokenizers import (  # noqa: PLC0415 - imported when first needed
        AddedToken,
        Regex,
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
    )

    pairs: list[tuple[str, str]] = []
    for line in merges.splitlines():
        first, _, second = line.partition(" ")
        if second and not line.startswith("#version"):
            pairs.append((first, second))
    if vocabulary is None:
        letters = _byte_letters()
        tokens = [*letters, *(f"{letter}</w>" for letter in letters)]
        tokens += ["".join(pair) for pair in pairs]
        vocabulary = {token: number for number, token in enumerate([*tokens, START, END])}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=pairs,
            continuing_subword_prefix="",
            end_of_word_suffix="</w>",
            unk_token=END,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # Inverted: removes what the expression does not match, and splits off each match.
            pre_tokenizers.Split(Regex(_WORD), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (START, END)])
    return tokenizer


def _byte_letters() -> list[str]:
    """Return a printable character for every byte, in GPT-2's order.

    Bytes that are printable in Latin-1 come first, as themselves; characters from U+0100 on stand
    for the remaining bytes.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    remaining = 256 - len(printable)
    return [chr(code) for code in (*printable, *range(0x100, 0x100 + remaining))]


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty object if there is no file."""
    values: dict[str, Any] = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return values


def _token(entry: Any) -> str:
    """Return the text of a token.

    `entry` is the text, or a mapping with the text as `content`. If it has no text, the token is
    `END`.
    """
    return str(entry.get("content", END)) if isinstance(entry, dict) else str(entry or END)
