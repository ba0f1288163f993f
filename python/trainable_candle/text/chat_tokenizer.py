"""The tokenizer of a language model with its chat template and the tokens that end a turn."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainable_candle._core import gguf_facts
from trainable_candle.errors import MissingFileError, WeightsFormatError
from trainable_candle.text import gguf_tokenizer
from trainable_candle.text.templates import CHATML, ChatTemplate
from trainable_candle.text.tokenizer_files import (
    DEFAULT,
    TOOL_USE,
    chat_templates,
    end_tokens,
    read_object,
    special_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from tokenizers import Encoding, Tokenizer
    from typing_extensions import Self

    from trainable_candle.text.templates import Rendered


class Encoded:
    """A text as tokens.

    Args:
        encoding: what the tokenizer returned for the text.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self.ids: list[int] = encoding.ids
        """The ids of the tokens."""

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where each token starts and ends in the text, in characters: shape (tokens, 2)."""
        return np.array(self._encoding.offsets, np.int64).reshape(-1, 2)


class ChatTokenizer:
    """Converts text to tokens and back, and conversations to text.

    Args:
        tokenizer: converts text to ids of tokens and back.
        tokens: the texts of special tokens by name: `bos_token`, `eos_token` and so on.
        templates: the chat templates by name. `default` is needed, and `tool_use`, if present, is
            for conversations with tools. None or empty: ChatML for all conversations.
        ends: ids of the tokens that end a text according to the model's configuration.

    Raises:
        WeightsFormatError: a template is not Jinja; or there are no templates, and the tokenizer
            has neither `<|im_end|>` nor an `eos_token`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokens: Mapping[str, str],
        templates: Mapping[str, str] | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.tokens = dict(tokens)
        self.has_template = bool(templates)
        # The variables of the templates. `END` is what the template CHATML writes after each turn.
        variables = dict(self.tokens)
        if not templates:
            templates = {DEFAULT: CHATML}
            has_im_end = tokenizer.token_to_id("<|im_end|>") is not None
            variables["END"] = "<|im_end|>" if has_im_end else self.tokens.get("eos_token", "")
            if not variables["END"]:
                raise WeightsFormatError(
                    "tokenizer: there is neither a chat template nor a token that ends a text; "
                    "give the token as eos_token in tokenizer_config.json"
                )
        self.template = ChatTemplate(templates[DEFAULT], variables)
        self._tool_template = (
            ChatTemplate(templates[TOOL_USE], variables) if TOOL_USE in templates else self.template
        )
        self._configured_ends = frozenset(ends)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Return the tokenizer of a model.

        Args:
            folder: the folder of the model, a GGUF file, or another file of weights with the
                tokenizer in the same folder.

        Raises:
            MissingFileError: there is no `tokenizer.json`.
            WeightsFormatError: a file cannot be understood, or there is neither a chat template nor
                a token that ends a text.
        """
        from tokenizers import Tokenizer  # noqa: PLC0415 - imported when first needed

        folder = Path(folder).expanduser()
        # The metadata in the header of a GGUF file.
        facts = gguf_facts(folder) if folder.is_file() and folder.suffix == ".gguf" else None
        if facts is not None:
            return cls(*gguf_tokenizer.read(folder, facts))  # `read` returns the arguments
        folder = folder.parent if folder.is_file() else folder
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise MissingFileError(
                f"tokenizer: there is no file {path}; expected the folder of a model with its "
                "tokenizer.json"
            )
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:
            # The library raises no narrower exception.
            raise WeightsFormatError(f"tokenizer: {path} cannot be read: {error}") from error
        config = read_object(folder / "tokenizer_config.json")
        tokens = special_tokens({**read_object(folder / "special_tokens_map.json"), **config})
        return cls(tokenizer, tokens, chat_templates(folder, config), end_tokens(folder))

    def summary(self) -> str:
        """Return a line for the log: which template is used, and which tokens end an answer."""
        ends = " ".join(self.token(number) for number in sorted(self.stops)) or "nothing"
        template = "of the tokenizer" if self.has_template else "ChatML, as the tokenizer has none"
        return f"chat template: {template}; answers end with {ends}"

    @property
    def size(self) -> int:
        """The number of tokens in the vocabulary, including the tokens that were added to it."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    @property
    def size_without_added(self) -> int:
        """The number of tokens in the vocabulary, without the tokens that were added to it."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=False)
        return size

    @cached_property
    def special(self) -> frozenset[int]:
        """The ids of the special tokens, such as those that begin or end a text or a turn."""
        added = self._tokenizer.get_added_tokens_decoder()
        named = [self._tokenizer.token_to_id(token) for token in self.tokens.values()]
        return frozenset(
            [
                *(n for n, token in added.items() if token.special),
                *(n for n in named if n is not None),
            ]
        )

    def is_ordinary(self, number: int) -> bool:
        """Return whether the token with this id exists and is neither special nor added."""
        return (
            number not in self.special
            and number not in self._tokenizer.get_added_tokens_decoder()
            and self._tokenizer.id_to_token(number) is not None
        )

    @property
    def end(self) -> int | None:
        """The id of the token that ends a text; None if the tokenizer has no such token."""
        number: int | None = self._tokenizer.token_to_id(self.tokens.get("eos_token", ""))
        return number

    @cached_property
    def stops(self) -> frozenset[int]:
        """The ids of the tokens that end an answer.

        They are the token that ends a text, the end tokens of the configuration, and the last
        special token in an answer's turn. This special token is left out if the chat template
        rejects a question with its answer, or writes no special token in the answer's turn.
        """
        ends = self._configured_ends
        if self.end is not None:
            ends |= {self.end}
        try:
            question = [{"role": "user", "content": "a"}]
            before = self.render(question, generation_prompt=True).text
            conversation = [*question, {"role": "assistant", "content": "b"}]
            # What the template writes for the answer "b", with the end of its turn.
            answer = self.render(conversation).text.removeprefix(before)
        except ValueError:
            return ends
        special = [number for number in self.encode(answer).ids if number in self.special]
        return ends | frozenset(special[-1:])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> Rendered:
        """Return the text of a conversation, as `ChatTemplate.render` does.

        Conversations with tools are rendered by the template `tool_use` if the tokenizer has one.

        Raises:
            ValueError: the template rejects the conversation.
        """
        template = self.template if tools is None else self._tool_template
        return template.render(messages, tools, generation_prompt=generation_prompt)

    def encode(self, text: str, *, special: bool = False) -> Encoded:
        """Return the tokens of a text; see `encode_all`."""
        return self.encode_all([text], special=special)[0]

    def encode_all(self, texts: Sequence[str], *, special: bool = False) -> list[Encoded]:
        """Return the tokens of each text, which several threads compute.

        Args:
            texts: the texts; special tokens that are spelled out in them are recognised.
            special: whether to add the tokens that the tokenizer puts around a text, such as the
                token that begins it.
        """
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=special)
        return [Encoded(encoding) for encoding in encodings]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens; with special tokens only if `special` is true."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text

    def token(self, number: int) -> str:
        """Return the text of the token with this id; the id in angle brackets if there is none."""
        return self._tokenizer.id_to_token(number) or f"<{number}>"

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation's tokens, with those that begin the answer's turn.

        Raises:
            ValueError: the template rejects the conversation.
        """
        return self.encode(self.render(messages, generation_prompt=True).text).ids

    def beginning(self, text: str) -> list[int]:
        """Return the ids of the tokens of a text that the model is to continue.

        They include the tokens that the tokenizer puts before a text, but no end token that it puts
        after the text.
        """
        ids = self.encode(text, special=True).ids
        end_was_added = (
            self.end is not None
            and ids[-1:] == [self.end]
            and not text.endswith(self.token(self.end))
        )
        return ids[:-1] if end_was_added else ids
