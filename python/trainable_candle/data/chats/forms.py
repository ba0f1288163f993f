"""The forms of a data set's lines: which fields a line has, and how they become an example."""

from __future__ import annotations

from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from trainable_candle.data.chats.messages import SYSTEM, RowError, conversation, functions, text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainable_candle.data.chats.messages import Message


@dataclass(frozen=True)
class Chat:
    """Messages that the chat template turns into text; the assistant's messages are the answers."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Completion:
    """A text that consists of a prompt and its completion; the completion is the answer."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Preference:
    """Two examples with the same prompt and different answers; the answer of `chosen` is better."""

    chosen: Chat | Completion
    rejected: Chat | Completion


Example: TypeAlias = Chat | Completion | Preference


@dataclass(frozen=True)
class Form:
    """The names of the fields of a line, and the function that reads them."""

    name: str
    fields: tuple[str, ...]
    """Fields that each line of this form has."""
    others: tuple[str, ...]
    """Fields that a line of this form may have."""
    read: Callable[[Mapping[str, Any]], Example]
    """Makes an example from the fields' values; raises a `RowError` that names a wrong field."""


def _chat(values: Mapping[str, Any]) -> Chat:
    messages = conversation(values.get("messages"), "messages")
    return Chat(messages, functions(values.get("tools")))


def _sharegpt(values: Mapping[str, Any]) -> Chat:
    messages = conversation(values.get("conversations"), "conversations")
    if values.get("system") and messages[0]["role"] not in SYSTEM:
        messages = [{"role": "system", "content": text(values["system"], "system")}, *messages]
    return Chat(messages, functions(values.get("tools")))


def _completion(values: Mapping[str, Any]) -> Example:
    prompt, completion = values.get("prompt"), values.get("completion")
    lists = [isinstance(value, list) for value in (prompt, completion)]
    if any(lists):
        if not all(lists):
            texts, messages = ("completion", "prompt") if lists[0] else ("prompt", "completion")
            raise RowError(
                f"`{messages}` is a list of messages and `{texts}` is not; give both as texts, or "
                "both as messages"
            )
        asked = conversation(prompt, "prompt", answered=False)
        if not completion:
            raise RowError("`completion` is empty")
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
    history = values.get("history") or []
    if not isinstance(history, list):
        raise RowError(
            f"`history` is {type(history).__name__}, expected a list of pairs: question and answer"
        )
    for turn, pair in enumerate(history):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RowError(f"`history[{turn}]` is not a pair of question and answer")
        for role, content in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": text(content, f"history[{turn}]")})
    messages.append({"role": "user", "content": asked})
    messages.append({"role": "assistant", "content": text(values.get(name), name)})
    return Chat(messages)


def _text(values: Mapping[str, Any]) -> Completion:
    return Completion("", text(values.get("text"), "text"))


def _preference(values: Mapping[str, Any]) -> Preference:
    prompt, names = values.get("prompt"), ("chosen", "rejected")
    if not any(isinstance(values.get(name), list) for name in names):
        chosen, rejected = (text(values.get(name), name) for name in names)
        if prompt is None and chosen != rejected:
            # The prompt is the longest common prefix of the two texts, without the spaces at its
            # end: these belong to the first word of the answer.
            before = commonprefix([chosen, rejected]).rstrip(" ")  # noqa: RUF071 - no paths
            chosen, rejected = (answer.removeprefix(before) for answer in (chosen, rejected))
        else:
            before = text(prompt or "", "prompt", empty=True)
        if not chosen or not rejected:
            raise RowError("one of `chosen` and `rejected` is the beginning of the other")
        preference = Preference(Completion(before, chosen), Completion(before, rejected))
    else:
        asked = [] if prompt is None else _asked(prompt)
        pair = [_answered(asked, values, name) for name in names]
        if pair[0].messages[:-1] != pair[1].messages[:-1]:
            raise RowError("`chosen` and `rejected` differ before their last messages")
        preference = Preference(*pair)
    if preference.chosen == preference.rejected:
        raise RowError("`chosen` and `rejected` are the same")
    return preference


def _asked(prompt: Any) -> list[Message]:
    if isinstance(prompt, list):
        return conversation(prompt, "prompt", answered=False)
    return [{"role": "user", "content": text(prompt, "prompt")}]


def _answered(asked: list[Message], values: Mapping[str, Any], name: str) -> Chat:
    """Return the messages `asked` and, after them, the answer in field `name`.

    The field is a string or a list of messages.
    """
    answer = values.get(name)
    if not isinstance(answer, list):
        answer = [{"role": "assistant", "content": text(answer, name)}]
    both = conversation([*asked, *answer], f"prompt + {name}" if asked else name)
    if both[-1]["role"] != "assistant":
        raise RowError(f"`{name}` does not end with an answer of the assistant")
    return Chat(both, functions(values.get("tools")))


FORMS: Final = (
    Form("messages", ("messages",), ("tools",), _chat),
    Form("conversations (ShareGPT)", ("conversations",), ("tools", "system"), _sharegpt),
    Form("preferences", ("chosen", "rejected"), ("prompt", "tools"), _preference),
    Form("prompt and completion", ("prompt", "completion"), ("tools",), _completion),
    Form("instruction and output", ("instruction", "output"), ("input", "system", "history"),
         _instruction),
    Form("instruction and response", ("instruction", "response"), ("input", "system", "history"),
         _instruction),
    Form("text", ("text",), (), _text),
)  # fmt: skip
"""All forms; a line has the first of these forms whose `fields` it contains."""


def form_of(values: Mapping[str, Any]) -> Form | None:
    """Return the form of a line with the fields `values`; None if no form fits."""
    return next((form for form in FORMS if all(name in values for name in form.fields)), None)


def expected() -> str:
    """Return the fields of all forms, for a message."""
    return "; ".join(" and ".join(form.fields) for form in FORMS)
