"""The forms that examples come in, told apart by the names of their fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from trainable_candle.data.chats.messages import RowError, conversation, functions, text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainable_candle.data.chats.messages import Message


@dataclass(frozen=True)
class Chat:
    """Messages that the chat template makes a text of; the assistant's are learnt."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Completion:
    """A text whose second part is learnt."""

    prompt: str
    completion: str


Example: TypeAlias = Chat | Completion


@dataclass(frozen=True)
class Form:
    """How examples are written."""

    name: str
    fields: tuple[str, ...]
    """Which fields every example has."""
    others: tuple[str, ...]
    """Which it may have besides."""
    read: Callable[[Mapping[str, Any]], Example]
    """Raises a `RowError` that names the field."""


def _chat(values: Mapping[str, Any]) -> Chat:
    messages = conversation(values.get("messages"), "messages")
    return Chat(messages, functions(values.get("tools")))


def _sharegpt(values: Mapping[str, Any]) -> Chat:
    messages = conversation(values.get("conversations"), "conversations")
    if values.get("system") and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": text(values["system"], "system")}, *messages]
    return Chat(messages, functions(values.get("tools")))


def _completion(values: Mapping[str, Any]) -> Example:
    prompt, completion = values.get("prompt"), values.get("completion")
    if isinstance(prompt, list) or isinstance(completion, list):
        asked = conversation(prompt, "prompt", answered=False)
        if not isinstance(completion, list) or not completion:
            raise RowError("`completion` is not a list of messages, and `prompt` is one")
        both = [*asked, *completion]
        return Chat(conversation(both, "prompt + completion"), functions(values.get("tools")))
    return Completion(text(prompt, "prompt", empty=True), text(completion, "completion"))


def _instruction(values: Mapping[str, Any]) -> Chat:
    asked = text(values.get("instruction"), "instruction")
    more = values.get("input")
    if more is not None and text(more, "input", empty=True).strip():
        asked = f"{asked}\n{more}"
    name = "output" if "output" in values else "response"
    messages = []
    if values.get("system"):
        messages.append({"role": "system", "content": text(values["system"], "system")})
    for turn, pair in enumerate(values.get("history") or []):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RowError(f"`history[{turn}]` is no pair of question and answer")
        for role, said in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": text(said, f"history[{turn}]")})
    messages.append({"role": "user", "content": asked})
    messages.append({"role": "assistant", "content": text(values.get(name), name)})
    return Chat(messages)


def _text(values: Mapping[str, Any]) -> Completion:
    return Completion("", text(values.get("text"), "text"))


def _preference(_: Mapping[str, Any]) -> Example:
    raise RowError(
        "`chosen` and `rejected` are pairs of answers to compare, which is not trained yet; "
        "name the chosen one `completion` to learn it alone"
    )


FORMS: Final = (
    Form("messages", ("messages",), ("tools",), _chat),
    Form("conversations (ShareGPT)", ("conversations",), ("tools", "system"), _sharegpt),
    Form("preferences", ("chosen", "rejected"), ("prompt",), _preference),
    Form("prompt and completion", ("prompt", "completion"), ("tools",), _completion),
    Form("instruction and output", ("instruction", "output"), ("input", "system", "history"),
         _instruction),
    Form("instruction and response", ("instruction", "response"), ("input", "system", "history"),
         _instruction),
    Form("text", ("text",), (), _text),
)  # fmt: skip
"""The first that fits is taken."""


def form_of(values: Mapping[str, Any]) -> Form | None:
    """The form of an example; None if its fields belong to none."""
    return next((form for form in FORMS if all(name in values for name in form.fields)), None)


def expected() -> str:
    """The fields of all forms, for a message."""
    return "; ".join(" and ".join(form.fields) for form in FORMS if form.name != "preferences")
