"""T5's tokenizer, which turns texts into rows of token numbers and a mask."""

from __future__ import annotations

import base64
import gzip
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from trainable_candle.errors import ArgumentError, MissingFileError, WeightsFormatError
from trainable_candle.files import parse_json
from trainable_candle.text import sentencepiece
from trainable_candle.text.sentencepiece import UnigramModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from tokenizers import Tokenizer
    from typing_extensions import Self

PAD: Final = "<pad>"
END: Final = "</s>"
UNKNOWN: Final = "<unk>"
SENTINELS: Final = 100
"""The number of sentinels. They are the tokens `<extra_id_99>` to `<extra_id_0>`, which follow the
pieces in this order."""
SHIPPED: Final = Path(str(files("trainable_candle.text") / "assets" / "t5_spiece.model.gz"))
"""The package's own copy of the SentencePiece model that all published T5 models share."""
_SPACE: Final = "▁"
"""The character that marks the space before a word."""


class T5Tokenizer:
    """Splits words into pieces by a unigram model, as `transformers.T5Tokenizer` does.

    Args:
        tokenizer: converts text to token numbers.

    Raises:
        WeightsFormatError: the vocabulary lacks the padding or the end token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.pad, self.end = (self._number(token) for token in (PAD, END))

    @classmethod
    def shipped(cls) -> Self:
        """Return the tokenizer of the published T5 models, from the package's own copy.

        T5 1.0 and 1.1 in every size, Stable Diffusion 3 and Flux all use this tokenizer.
        """
        return cls(_tokenizer(sentencepiece.parse(gzip.decompress(SHIPPED.read_bytes()))))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Return the tokenizer of a diffusers folder: Flux's `tokenizer_2`, SD3's `tokenizer_3`.

        Args:
            folder: a folder with `tokenizer.json` or `spiece.model`. From `tokenizer.json` only
                the pieces, the table of characters and the added tokens are read; the split into
                words does not depend on the file, as in transformers 5.

        Raises:
            MissingFileError: there is no such folder or file.
            WeightsFormatError: a file cannot be understood, or the vocabulary lacks the padding or
                the end token.
        """
        folder = Path(folder).expanduser()
        try:
            return cls(_from_folder(folder))
        except FileNotFoundError as error:
            raise MissingFileError(
                f"tokenizer: there is no file {error.filename}; expected tokenizer.json or "
                "spiece.model"
            ) from error
        except WeightsFormatError:
            raise
        except Exception as error:
            # The library raises no narrower exception.
            raise WeightsFormatError(f"tokenizer: {folder} cannot be read: {error}") from error

    @property
    def size(self) -> int:
        """The number of tokens, including added tokens such as sentinels."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    def encode(self, text: str) -> list[int]:
        """Return the numbers of a text's tokens, without the end token.

        Raises:
            WeightsFormatError: the tokenizer's files are damaged.
        """
        try:
            numbers: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            # A damaged table of characters makes the library panic; the panic is no `Exception`.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise WeightsFormatError(f"tokenizer: {text!r} cannot be encoded: {error}") from error
        return numbers

    def __call__(
        self, texts: Sequence[str], length: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return texts as rows of one length, each with an end token and padding.

        Args:
            texts: any texts; an empty one is the end token alone.
            length: tokens in a row, including the end token; at least 1. Longer texts are
                truncated.

        Returns:
            The token numbers, and a mask: 1 for text and end token, 0 for padding. Both have the
            shape (number of texts, length).

        Raises:
            ArgumentError: the length is less than 1.
            WeightsFormatError: the tokenizer's files are damaged.
        """
        if length < 1:
            raise ArgumentError(f"T5Tokenizer: the length is {length}, expected 1 or more")
        rows = [[*self.encode(text)[: length - 1], self.end] for text in texts]
        ids = np.full((len(rows), length), self.pad, np.int64)
        mask = np.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
            mask[index, : len(row)] = 1
        return ids, mask

    def _number(self, token: str) -> int:
        number: int | None = self._tokenizer.token_to_id(token)
        if number is None:
            raise WeightsFormatError(
                f"tokenizer: the vocabulary has no {token!r}; expected a tokenizer of T5"
            )
        return number


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _tokenizer(sentencepiece.parse((folder / "spiece.model").read_bytes()))
    content: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
    model = content["model"]
    if not isinstance(model["vocab"], list):
        raise WeightsFormatError(f"tokenizer: {path} has no unigram model, which T5 needs")
    pieces = [(str(piece), float(score)) for piece, score in model["vocab"]]
    charsmap = _charsmap(content.get("normalizer"))
    added = sorted(content.get("added_tokens") or [], key=lambda token: int(token["id"]))
    tokenizer = _tokenizer(UnigramModel(pieces, int(model["unk_id"]), charsmap), added)
    for token in added:
        number = tokenizer.token_to_id(str(token["content"]))
        if number != token["id"]:
            raise WeightsFormatError(
                f"tokenizer: {path} gives the added token {token['content']!r} the number "
                f"{token['id']}, expected {number}"
            )
    return tokenizer


def _charsmap(normalizer: dict[str, Any] | None) -> bytes:
    """Return the table of characters in a normalizer of `tokenizer.json`; empty if there is none.

    SentencePiece normalizes characters by this table. A normalizer may be a sequence of
    normalizers.
    """
    if normalizer is None:
        return b""
    if normalizer["type"] == "Sequence":
        return next(filter(None, map(_charsmap, normalizer["normalizers"])), b"")
    return base64.b64decode(normalizer.get("precompiled_charsmap") or "")


def _tokenizer(model: UnigramModel, added: Sequence[dict[str, Any]] | None = None) -> Tokenizer:
    """Make a tokenizer from pieces and added tokens; added tokens take precedence over pieces.

    Args:
        model: the pieces, their scores and the table of characters.
        added: the added tokens as in `tokenizer.json`, in the order of their numbers. By default
            they are the padding, end and unknown tokens, as far as these are pieces, and the
            sentinels.
    """
    from tokenizers import (  # noqa: PLC0415 - imported when first needed
        AddedToken,
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
    )

    tokenizer = Tokenizer(models.Unigram(model.pieces, model.unknown, byte_fallback=False))
    if model.charsmap:
        tokenizer.normalizer = normalizers.Precompiled(model.charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always"),
        ]
    )
    if added is None:
        sentinels = [f"<extra_id_{number}>" for number in reversed(range(SENTINELS))]
        named = [token for token in (PAD, END, UNKNOWN) if tokenizer.token_to_id(token) is not None]
        added = [{"content": token} for token in (*named, *sentinels)]
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    tokenizer.add_tokens(
        [
            AddedToken(str(token["content"]), **{flag: bool(token.get(flag)) for flag in flags})
            for token in added
        ]
    )
    return tokenizer
