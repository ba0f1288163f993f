"""Checks the messages of conversations, and renames their roles and fields for chat templates."""

from __future__ import annotations

from typing import Any, Final

from trainable_candle.files import parse_json

Message = dict[str, Any]


class RowError(ValueError):
    """Raised for a line of a data set that cannot be used; the message names what is wrong."""


SYSTEM: Final = frozenset({"system", "developer"})
"""The roles of messages with instructions; only the first message may have such a role."""
_ROLES: Final = {
    "system": "system", "developer": "developer",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool",
    "function_call": "function_call",
}  # fmt: skip
"""Maps the names of roles in data sets to the names in this module."""


def conversation(values: Any, field: str, *, answered: bool = True) -> list[Message]:
    """Check a list of messages; returns them with this module's names of roles and fields.

    Args:
        values: a list, or its JSON text, of objects with `role` and `content` or, as in ShareGPT's
            files, `from` and `value`.
        field: the field's name, for error messages.
        answered: whether at least one message must be of the role assistant.

    Raises:
        RowError: the value is not a list of messages or is empty; a role, a content or a function
            call is wrong; roles are out of order; no message is of the role assistant although
            `answered`. The message names the field.
    """
    values = _parsed(values, field)
    if not isinstance(values, list) or not values:
        raise RowError(f"`{field}` is {_kind(values)}, expected a list of messages")
    messages = [_message(value, f"{field}[{number}]") for number, value in enumerate(values)]
    _check_order(messages, field)
    if answered and not any(message["role"] == "assistant" for message in messages):
        raise RowError(f"`{field}` has no message of the role assistant: nothing to learn")
    return messages


def functions(values: Any, field: str = "tools") -> list[dict[str, Any]] | None:
    """Return the JSON schemas of tools from a list or, as in Parquet files, from JSON text.

    The result is None if there are no tools.

    Raises:
        RowError: the tools are not a list of objects, or the text is not JSON.
    """
    values = _parsed(values, field)
    if values is None or values in ("", []):
        return None
    if not isinstance(values, list):
        raise RowError(f"`{field}` is {_kind(values)}, expected a list of JSON schemas")
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise RowError(
                f"`{field}[{number}]` is {_kind(value)}, expected an object: a JSON schema"
            )
    return values


def require_whole_characters(value: Any, field: str) -> None:
    """Check that all texts in a field's value consist of whole characters.

    JSON can express half of a UTF-16 surrogate pair. Such halves come from programs that cut a text
    inside an emoji, and no tokenizer takes them.

    Raises:
        RowError: a text has such a half; the message names the field.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RowError(
                f"`{field}` has half of a character, {value[error.start]!r}, at index "
                f"{error.start}: the text was cut inside an emoji or another rare character"
            ) from None
    elif isinstance(value, dict):
        for name, item in value.items():
            require_whole_characters(name, f"{field} (the name of an entry)")
            require_whole_characters(item, f"{field}.{name}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            require_whole_characters(item, f"{field}[{number}]")


def text(value: Any, field: str, *, empty: bool = False) -> str:
    """Check that a field's value is a string, and not blank unless `empty`; returns the string.

    Raises:
        RowError: the value is not a string, or is blank although `empty` is False.
    """
    if not isinstance(value, str):
        raise RowError(f"`{field}` is {_kind(value)}, expected text")
    if not empty and not value.strip():
        raise RowError(f"`{field}` is empty")
    return value


def _message(value: Any, field: str) -> Message:
    """Check a message; returns it with this module's names of roles and fields.

    Raises:
        RowError: the role, the content or a function call is wrong.
    """
    if not isinstance(value, dict):
        raise RowError(f"`{field}` is {_kind(value)}, expected an object with role and content")
    role_field = "role" if "role" in value else "from"
    if role_field not in value:
        raise RowError(f"`{field}` has no role; expected system, user, assistant or tool")
    role = _ROLES.get(str(value[role_field]).lower())
    if role is None:
        raise RowError(
            f"`{field}.{role_field}` is {value[role_field]!r}, expected system, user, assistant or "
            "tool"
        )
    content_field = "content" if "content" in value or role_field == "role" else "value"
    content = value.get(content_field)
    if role == "function_call":
        return {"role": "assistant", "tool_calls": _calls(content, f"{field}.{content_field}")}
    # The template also gets all other fields, such as `weight` in files for OpenAI's models.
    rest = {k: v for k, v in value.items() if k not in {"role", "from", "content", "value"}}
    message: Message = {"role": role, **rest}
    calls = _parsed(message.get("tool_calls"), f"{field}.tool_calls")
    if calls:
        message["tool_calls"] = _checked_calls(calls, f"{field}.tool_calls")
    else:
        message.pop("tool_calls", None)
    if content is None and calls:
        return message
    content_text = _content(content, f"{field}.{content_field}")
    if role in {"user", "assistant"} and not content_text.strip() and not calls:
        kind = "answer" if role == "assistant" else "message"
        raise RowError(f"`{field}.{content_field}` is an empty {kind}")
    # The template gets the content as it is: a list of parts stays a list. The role and the content
    # come before the other fields.
    return {"role": role, "content": content, **{k: v for k, v in message.items() if k != "role"}}


def _content(value: Any, field: str) -> str:
    """Return the text of a message's content, which is a string or a list of parts with texts.

    Raises:
        RowError: the content is neither, or has a part that is no text.
    """
    if isinstance(value, list):
        for number, part in enumerate(value):
            kind = part.get("type", "text") if isinstance(part, dict) else _kind(part)
            if kind != "text":
                raise RowError(f"`{field}[{number}]` is of type {kind}; the model reads only text")
        return "".join(
            text(part.get("text"), f"{field}[{number}].text", empty=True)
            for number, part in enumerate(value)
        )
    return text(value, field, empty=True)


def _calls(value: Any, field: str) -> list[dict[str, Any]]:
    """Return the function calls in the content of a message with the role `function_call`.

    Args:
        value: one call or a list of calls, or the JSON text of either.
        field: the content's field, for error messages.

    Raises:
        RowError: the content has something that is not a function call.
    """
    parsed = _parsed(value, field)
    calls = parsed if isinstance(parsed, list) else [parsed]
    return [{"type": "function", "function": call} for call in _checked_calls(calls, field)]


def _checked_calls(calls: Any, field: str) -> list[Any]:
    """Check that function calls are a list, and that each names a function; returns the list.

    A call is an object with `name` and `arguments`, or has such an object as `function`.

    Raises:
        RowError: this is not so; the message names the call.
    """
    if not isinstance(calls, list):
        raise RowError(f"`{field}` is {_kind(calls)}, expected a list of function calls")
    for number, call in enumerate(calls):
        inner = (call.get("function") or call) if isinstance(call, dict) else call
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise RowError(
                f"`{field}[{number}]` is not a function call: expected JSON with name and arguments"
            )
    return calls


def _check_order(messages: list[Message], field: str) -> None:
    """Check that each message has a role that may follow the role before it.

    Raises:
        RowError: a role is out of order.
    """
    previous = ""
    for number, message in enumerate(messages):
        role = message["role"]
        if role in SYSTEM:
            in_order = number == 0
        elif role == "user":
            in_order = previous in {"", *SYSTEM, "assistant"}
        elif role == "assistant":
            in_order = previous in {"user", "tool"}
        else:  # "tool": `_message` has turned "function_call" into "assistant"
            in_order = previous == "tool" or (
                previous == "assistant" and "tool_calls" in messages[number - 1]
            )
        if not in_order:
            where = f"after {previous}" if previous else "first"
            raise RowError(
                f"`{field}[{number}].role`: {role} {where} is out of order; expected user and "
                "assistant in turn, tool only after a tool call or another tool message, and "
                "system only as the first message"
            )
        previous = role


def _parsed(value: Any, field: str) -> Any:
    """Return the value; a string that is not blank is parsed as JSON.

    Raises:
        RowError: the string is not JSON, or has half of a character.
    """
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        parsed = parse_json(value)
    except ValueError as error:
        raise RowError(f"`{field}` is text that is not JSON: {error}") from None
    require_whole_characters(parsed, field)
    return parsed


def _kind(value: Any) -> str:
    """Return, for an error message, what a wrong value is: missing, empty, or its type."""
    if value is None:
        return "missing"
    return "empty" if value in ("", [], {}) else type(value).__name__
