"""The forms of lines in data sets of texts: a line's fields, and how they become an example."""

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
    """The JSON schemas of the functions that the assistant can call."""


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
    """The fields that a line has, and the function that makes an example from them."""

    name: str
    fields: tuple[str, ...]
    """Fields that each line of this form has."""
    others: tuple[str, ...]
    """Further fields that a line of this form may have."""
    read: Callable[[Mapping[str, Any]], Example]
    """Makes an example from the fields' values; raises a `RowError` that names a wrong field."""


def _chat(values: Mapping[str, Any]) -> Chat:
    messages = conversation(values.get("messages"), "messages")
    return Chat(messages, functions(values.get("tools")))


def _sharegpt(values: Mapping[str, Any]) -> Chat:
    messages = conversation(values.get("conversations"), "conversations")
    # A system message in the conversation has priority over the field `system`.
    if values.get("system") and messages[0]["role"] not in SYSTEM:
        messages = [{"role": "system", "content": text(values["system"], "system")}, *messages]
    return Chat(messages, functions(values.get("tools")))


def _completion(values: Mapping[str, Any]) -> Example:
    prompt, completion = values.get("prompt"), values.get("completion")
    are_lists = [isinstance(value, list) for value in (prompt, completion)]
    if any(are_lists):
        if not all(are_lists):
            fields = ("prompt", "completion") if are_lists[0] else ("completion", "prompt")
            raise RowError(
                f"`{fields[0]}` is a list of messages and `{fields[1]}` is not; give both as "
                "texts, or both as lists of messages"
            )
        asked = conversation(prompt, "prompt", answered=False)
        if not completion:
            raise RowError("`completion` is empty")
        messages = conversation([*asked, *completion], "prompt + completion")
        return Chat(messages, functions(values.get("tools")))
    return Completion(text(prompt, "prompt", empty=True), text(completion, "completion"))


def _instruction(values: Mapping[str, Any]) -> Chat:
    asked = text(values.get("instruction"), "instruction")
    added = values.get("input")
    if added is not None and text(added, "input", empty=True).strip():
        asked = f"{asked}\n{added}"
    answer_field = "output" if "output" in values else "response"
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
    messages.append({"role": "assistant", "content": text(values.get(answer_field), answer_field)})
    return Chat(messages)


def _text(values: Mapping[str, Any]) -> Completion:
    return Completion("", text(values.get("text"), "text"))


def _preference(values: Mapping[str, Any]) -> Preference:
    prompt, names = values.get("prompt"), ("chosen", "rejected")
    if not any(isinstance(values.get(name), list) for name in names):
        chosen, rejected = (text(values.get(name), name) for name in names)
        if prompt is None and chosen != rejected:
            # The prompt is the longest common prefix of the two texts, without the spaces at its
            # end: these belong to the first words of the answers.
            asked = commonprefix([chosen, rejected]).rstrip(" ")  # noqa: RUF071 - no paths
            chosen, rejected = (answer.removeprefix(asked) for answer in (chosen, rejected))
        else:
            # `prompt` can be None here, if the texts are equal; the check at the end rejects them.
            asked = text(prompt or "", "prompt", empty=True)
        if not chosen or not rejected:
            raise RowError("one of `chosen` and `rejected` is the beginning of the other")
        preference = Preference(Completion(asked, chosen), Completion(asked, rejected))
    else:
        messages = [] if prompt is None else _prompt_messages(prompt)
        chats = [_answered(messages, values, name) for name in names]
        if chats[0].messages[:-1] != chats[1].messages[:-1]:
            raise RowError("`chosen` and `rejected` differ before their last messages")
        preference = Preference(*chats)
    if preference.chosen == preference.rejected:
        raise RowError("`chosen` and `rejected` are the same")
    return preference


def _prompt_messages(prompt: Any) -> list[Message]:
    """Return the messages of a prompt, which is a list of messages or the text of one."""
    if isinstance(prompt, list):
        return conversation(prompt, "prompt", answered=False)
    return [{"role": "user", "content": text(prompt, "prompt")}]


def _answered(asked: list[Message], values: Mapping[str, Any], name: str) -> Chat:
    """Return the messages `asked` and, after them, the answer in field `name`.

    The field is a string or a list of messages.

    Raises:
        RowError: the messages are wrong, or the last one is not the assistant's.
    """
    answer = values.get(name)
    if not isinstance(answer, list):
        answer = [{"role": "assistant", "content": text(answer, name)}]
    messages = conversation([*asked, *answer], f"prompt + {name}" if asked else name)
    if messages[-1]["role"] != "assistant":
        raise RowError(f"`{name}` does not end with an answer of the assistant")
    return Chat(messages, functions(values.get("tools")))


# The arguments are `name`, `fields`, `others` and `read`.
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
    """Return, for a message, the fields that each form requires."""
    return "; ".join(" and ".join(form.fields) for form in FORMS)
