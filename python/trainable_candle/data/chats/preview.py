"""Shows the tokens of examples for a terminal: which are learnt, and where an answer stops."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle.data.chats.labels import Pair, Tokens
    from trainable_candle.text.chat_tokenizer import ChatTokenizer

# Kinds of tokens: not learnt; learnt; learnt, and a stop token.
_GIVEN, _LEARNT, _STOP = range(3)
# The terminal's codes for colours, or the brackets, before and after tokens of each kind. Tokens
# that are not learnt have no brackets.
_COLOURS: Final = {_GIVEN: ("\x1b[2m", "\x1b[0m"), _LEARNT: ("\x1b[32m", "\x1b[0m"),
                   _STOP: ("\x1b[1;35m", "\x1b[0m")}  # fmt: skip
_MARKS: Final = {_GIVEN: ("", ""), _LEARNT: ("[+", "+]"), _STOP: ("[!", "!]")}


def legend(*, colour: bool) -> str:
    """Return a line that explains the colours or marks of `shown`."""
    kinds = {_GIVEN: "given", _LEARNT: "learnt", _STOP: "stop token, learnt"}
    marks = _COLOURS if colour else _MARKS
    named = [f"{marks[kind][0]}{name}{marks[kind][1]}" for kind, name in kinds.items()]
    return f"{', '.join(named)}; | separates tokens"


def shown(example: Tokens | Pair, tokenizer: ChatTokenizer, *, colour: bool) -> str:
    """Return the text of an example; `|` separates neighbouring tokens of the same kind.

    Marks show the kind: not learnt, learnt, or a stop token.

    Args:
        example: the tokens.
        tokenizer: decodes the tokens.
        colour: whether to mark the kinds with a terminal's colours instead of brackets.
    """
    marks = _COLOURS if colour else _MARKS
    # The kind of each token; `stops` has the indices of the stop tokens.
    kinds = [_LEARNT if learnt else _GIVEN for learnt in example.learnt]
    for index in example.stops:
        kinds[index] = _STOP
    parts = []
    for kind, indices in groupby(range(len(example)), kinds.__getitem__):
        pieces = _pieces([int(example.ids[index]) for index in indices], tokenizer)
        begin, end = marks[kind]
        parts.append(f"{begin}{'|'.join(pieces)}{end}")
    return "".join(parts)


def _pieces(ids: Sequence[int], tokenizer: ChatTokenizer) -> list[str]:
    """Return the text of each token; tokens that share a character have one text together."""
    pieces = []
    waiting = []  # the tokens since the last complete character
    for token in ids:
        waiting.append(token)
        # `special` keeps special tokens in the text.
        text = tokenizer.decode(waiting, special=True)
        # The replacement character stands for a character whose last token is still missing.
        if "\ufffd" not in text:
            # Some tokens have no text; their names are shown instead.
            pieces.append(text or tokenizer.token(token))
            waiting = []
    if waiting:
        pieces.append(tokenizer.decode(waiting, special=True))
    return pieces
