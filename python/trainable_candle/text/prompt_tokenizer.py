"""The tokenizer of image models with a Qwen3 text encoder, which wraps prompts in a chat turn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainable_candle.errors import MissingFileError, WeightsFormatError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from typing_extensions import Self

FILE: Final = "tokenizer.json"
_PAD: Final = "<|endoftext|>"
_TOKENS: Final = ("<|im_start|>", "<|im_end|>", _PAD)
_TURN: Final = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""A user's turn in Qwen3's template, up to where the answer begins."""
_NO_THOUGHTS: Final = "<think>\n\n</think>\n\n"
"""The text that the template adds for an answer without thoughts."""


class PromptTokenizer:
    """Qwen's tokenizer with its template, as `transformers`' `apply_chat_template`.

    Args:
        tokenizer: splits text and numbers tokens, including those of the template.
        thinks: whether the answer may begin with thoughts, as `enable_thinking` of a pipeline.

    Raises:
        WeightsFormatError: a token of the template is missing.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinks: bool) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._form = _TURN if thinks else _TURN + _NO_THOUGHTS
        for token in _TOKENS:
            if tokenizer.token_to_id(token) is None:
                raise WeightsFormatError(
                    f"tokenizer: it has no token {token}; expected the tokenizer of Qwen3"
                )

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, thinks: bool) -> Self:
        """The tokenizer in a folder.

        Args:
            folder: a folder with `tokenizer.json`.
            thinks: see the class.

        Raises:
            MissingFileError: there is no such file.
            WeightsFormatError: the file cannot be understood.
        """
        from tokenizers import Tokenizer  # noqa: PLC0415 - imported when first needed

        path = Path(folder).expanduser() / FILE
        if not path.is_file():
            raise MissingFileError(f"tokenizer: there is no file {path}")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            # The library raises no narrower exception.
            raise WeightsFormatError(f"tokenizer: {path} cannot be read: {error}") from error
        return cls(tokenizer, thinks=thinks)

    @property
    def size(self) -> int:
        """One more than the largest number of a token."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def pad(self) -> int:
        """The number of the padding token."""
        return int(self._tokenizer.token_to_id(_PAD) or 0)

    def encode(self, prompt: str, most: int) -> list[int]:
        """The token ids of a prompt in the template, truncated to at most `most`."""
        tokens: list[int] = self._tokenizer.encode(
            self._form.replace("{}", prompt), add_special_tokens=False
        ).ids
        return tokens[:most]
