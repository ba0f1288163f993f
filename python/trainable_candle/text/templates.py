"""Chat templates, which turn messages into text as transformers' `apply_chat_template` does.

Templates come with downloaded checkpoints, so they run in jinja's sandbox and get only plain JSON
values. The environment is that of transformers 5 (`utils/chat_template_utils.py`), with three
exceptions. `strftime_now` always gives the same day: if texts changed from day to day, runs would
not be repeatable. Names of a namespace's attributes must not begin with `_`, because such names
could lead to Python's internals. `dict` is a function, because methods of the class, such as
`dict.update`, could change messages.

Unlike transformers, `ChatTemplate` also adapts messages. Values that are None count as absent. The
role `developer` is called `system` for templates that do not have the word "developer", because
most of these would leave the message out. Content that is text becomes a list of parts for
templates that read only lists, and a list of parts becomes text for templates that read only text;
transformers would render nothing, or Python's notation of the list. Reasoning is given under each
of the two keys that templates read.
"""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import WeightsFormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2 import Template, nodes
    from jinja2.parser import Parser

CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + END }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + END + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template for tokenizers without one. `END` is `<|im_end|>`; if the vocabulary lacks this
token, `END` is the token that ends a text."""
DAY: Final = dt.datetime(2024, 7, 26, tzinfo=dt.timezone.utc)
"""The date that templates get as today; it is the default date in Llama 3.1's template."""
_START, _END = "\ufdd0", "\ufdd1"
"""Marks around generated text. Unicode reserves these characters, so texts should not have them."""
_PROBE: Final = "A question"
"""The text of a message that is rendered to find out which forms of content a template reads."""
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""The keys under which a message may have its reasoning; the first key that is present is used."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    spans: tuple[tuple[int, int], ...] | None
    """Start and end, in characters, of each span that the model generates. Templates enclose such
    text in `{% generation %}`; None if the template has no `{% generation %}`."""


class ChatTemplate:
    """A chat template in Jinja; `marks_answers` says whether it has `{% generation %}`.

    Args:
        source: the template.
        tokens: more variables for the template: `bos_token`, `eos_token`, and `END` for `CHATML`.

    Raises:
        WeightsFormatError: the source is not a template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        from jinja2 import TemplateSyntaxError  # noqa: PLC0415 - imported when first needed

        self.source = source
        self._tokens = dict(tokens)
        try:
            self._template, self.marks_answers = _compiled(source)
        except TemplateSyntaxError as error:
            raise WeightsFormatError(
                f"chat template: line {error.lineno} is not Jinja: {error.message}"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> Rendered:
        """Return the text of a conversation.

        Args:
            messages: mappings with `role`, `content` and so on; values that are None count as
                absent. Content is text, or a list of parts with `text`.
            tools: JSON schemas of functions.
            generation_prompt: whether to end with the beginning of an answer's turn.

        Raises:
            ValueError: the template rejects the conversation, or a text has a reserved character;
                the message says why.
        """
        without_none = [{k: v for k, v in m.items() if v is not None} for m in messages]
        adapted = [_with_reasoning(self._adapted(message)) for message in without_none]
        marked = self._render(adapted, tools, generation_prompt)
        return _unmarked(marked, self.marks_answers)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = False,
    ) -> str:
        from jinja2 import TemplateError  # noqa: PLC0415 - imported when first needed

        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._tokens,
            )
        except (TemplateError, TypeError, ArithmeticError, LookupError) as error:
            raise ValueError(f"the chat template rejects the conversation: {error}") from error

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with its role and its content in forms that the template reads."""
        content = message.get("content")
        if isinstance(content, list) and not self._reads_parts:
            message = {**message, "content": "".join(part["text"] for part in content)}
        elif isinstance(content, str) and self._reads_parts and not self._reads_text:
            message = {**message, "content": [{"type": "text", "text": content}]}
        if message.get("role") == "developer" and "developer" not in self.source:
            message = {**message, "role": "system"}
        return message

    @cached_property
    def _reads_text(self) -> bool:
        """Whether the template writes content that is text."""
        return _PROBE in self._probed(_PROBE)

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template writes the texts of content that is a list of parts."""
        text = self._probed([{"type": "text", "text": _PROBE}])
        # A template that reads only text may write the list in the notation of Python or JSON; then
        # the probe is in quotes.
        return _PROBE in text and not any(f"{quote}{_PROBE}{quote}" in text for quote in "'\"")

    def _probed(self, content: str | list[dict[str, str]]) -> str:
        """Return a user's message as text; an empty text if the template rejects it."""
        try:
            return self._render([{"role": "user", "content": content}])
        except ValueError:
            return ""


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message that has its reasoning, if any, under the two keys that templates read.

    The keys are `thinking` and `reasoning_content`; the message may also have it under `reasoning`.
    """
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _unmarked(marked: str, has_tag: bool) -> Rendered:
    """Return the text without the marks `_START` and `_END`, and the spans that they enclosed.

    Without marks in the text, the spans are () if the template has the tag `generation`, else None.

    Raises:
        ValueError: the conversation itself has the characters of the marks.
    """
    if _START not in marked and _END not in marked:
        return Rendered(marked, () if has_tag else None)
    spans = []
    before, *parts = marked.split(_START)  # each part begins with generated text
    text = before
    for part in parts:
        inside, end, outside = part.partition(_END)
        if not end or _END in outside:
            raise ValueError("a text has the reserved characters U+FDD0 or U+FDD1; remove them")
        spans.append((len(text), len(text) + len(inside)))
        text += inside + outside
    if _END in before:
        raise ValueError("a text has the reserved character U+FDD1; remove it")
    return Rendered(text, tuple(spans))


@lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[Template, bool]:
    """Return a template, and whether it has the tag `generation`.

    Raises:
        TemplateSyntaxError: the source is not a template.
    """
    from jinja2 import ext, nodes  # noqa: PLC0415 - imported when first needed
    from jinja2.exceptions import SecurityError, TemplateError  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415
    from jinja2.utils import Namespace  # noqa: PLC0415

    has_generation = False

    class Generation(ext.Extension):
        """`{% generation %}`, which puts marks around its contents."""

        tags = {"generation"}  # noqa: RUF012 - as the base has it

        def parse(self, parser: Parser) -> nodes.Node:
            nonlocal has_generation
            has_generation = True
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # `_mark` gets the body as `caller`, which has no arguments and no defaults.
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        @staticmethod
        def _mark(caller: Any) -> str:
            return f"{_START}{caller()}{_END}"

    class PlainNamespace(Namespace):
        """A namespace without attributes that could lead to Python's internals."""

        # As in jinja's class, `self` is in `args`, so that an attribute may be called `self`.
        def __init__(*args: Any, **kwargs: Any) -> None:
            self, *given = args
            attributes = dict(*given, **kwargs)
            for name in attributes:
                _require_plain(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _require_plain(name)
            super().__setitem__(name, value)

    def _require_plain(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot have the attribute {name!r}")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    # Templates get this function instead of the class `dict`, whose methods could change messages.
    def as_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        {
            "raise_exception": raise_exception,
            "strftime_now": DAY.strftime,
            "dict": as_dict,
            "namespace": PlainNamespace,
        }
    )
    return environment.from_string(source), has_generation


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON text without the HTML escapes that jinja's own filter adds."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
