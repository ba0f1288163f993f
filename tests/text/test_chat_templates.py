"""Named chat templates, and contents of messages as text or parts, work as in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainable_candle.data.chats.forms import Chat, form_of
from trainable_candle.errors import WeightsFormatError
from trainable_candle.text.chat_tokenizer import ChatTokenizer
from trainable_candle.text.templates import ChatTemplate
from trainable_candle.text.tokenizer_files import copy_files

GOLDEN = Path(__file__).parents[1] / "golden" / "chats"
# The content of a message is a text or a list of parts. The templates TEXTS and PARTS read one of
# these forms, and BOTH reads either. A letter that tests put before a template shows which template
# was used.
TEXTS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}: "
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}({{ part['text'] }})"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)
BOTH = PARTS.replace(
    "{% for part in m['content'] %}",
    "{% set parts = [{'type': 'text', 'text': m['content']}] if m['content'] is string "
    "else m['content'] %}{% for part in parts %}",
)
# The configuration's list of named templates.
NAMED = [{"name": "default", "template": TEXTS}, {"name": "tool_use", "template": "T" + TEXTS}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ANSWER = {"role": "assistant", "content": "b"}
QUESTION = [{"role": "user", "content": "a"}]


def text_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def write_folder(path: Path, entry: Any = None, **files: str) -> Path:
    """Write a tokenizer to a folder, and return the folder.

    `entry` is the `chat_template` in its configuration; `files` has the template files by name.
    """
    (path / "tokenizer.json").write_bytes((GOLDEN / "tokenizer.json").read_bytes())
    config = {"eos_token": "<|end_of_text|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if entry is not None:
        config["chat_template"] = entry
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, template in files.items():
        file = path / "chat_template.jinja"
        if name != "default":
            file = path / "additional_chat_templates" / f"{name}.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_text(template)
    return path


@pytest.mark.parametrize(
    ("entry", "files"),
    [
        (TEXTS, {}),
        (NAMED, {}),
        (None, {"default": TEXTS, "tool_use": "T" + TEXTS}),
        (NAMED, {"default": "F" + TEXTS}),
        ("C" + TEXTS, {"default": TEXTS, "rag": "R" + TEXTS}),
    ],
    ids=[
        "text",
        "named",
        "files",
        "named and a file",
        "text and files",
    ],
)
def test_the_template_is_the_one_that_transformers_chooses(
    tmp_path: Path, entry: Any, files: dict[str, str]
) -> None:
    transformers = pytest.importorskip("transformers")
    path = write_folder(tmp_path, entry, **files)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    ours = ChatTokenizer.from_pretrained(path)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(QUESTION, tools=tools, tokenize=False)
        assert ours.render(QUESTION, tools).text == expected


def test_the_template_tool_use_is_for_conversations_with_tools(tmp_path: Path) -> None:
    ours = ChatTokenizer.from_pretrained(
        write_folder(tmp_path, default=TEXTS, tool_use="T" + TEXTS, rag="R" + TEXTS)
    )
    assert ours.render(QUESTION, TOOLS).text == "Tuser: a<|im_end|>\n"
    assert ours.render(QUESTION).text == "user: a<|im_end|>\n"


def test_copied_folders_have_all_chat_templates(tmp_path: Path) -> None:
    path = write_folder(tmp_path, default=TEXTS, tool_use="T" + TEXTS)
    (path / "copy").mkdir()
    copy_files(path, path / "copy")
    found = ChatTokenizer.from_pretrained(path / "copy")
    assert found.render(QUESTION, TOOLS).text.startswith("T")


@pytest.mark.parametrize("template", [TEXTS, PARTS, BOTH], ids=["texts", "parts", "both"])
def test_every_template_renders_both_forms_of_content(template: str) -> None:
    text = ChatTemplate(template, {}).render([{"role": "user", "content": "one, two"}]).text
    parts = ChatTemplate(template, {}).render(
        [{"role": "user", "content": text_parts("one, ", "two")}]
    )
    assert "one, two" in text
    # PARTS and BOTH put each part in parentheses: "(one, )(two)", but "(one, two)" for a text.
    assert parts.text.replace(")(", "") == text


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (PARTS, text_parts("a", "b")),
        (BOTH, text_parts("a")),
        (BOTH, "a"),
        (TEXTS, "a"),
    ],
    ids=["parts", "both with parts", "both with text", "text"],
)
def test_content_that_a_template_reads_is_passed_unchanged(
    tmp_path: Path, template: str, content: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(write_folder(tmp_path, template))
    messages = [{"role": "user", "content": content}]
    expected = theirs.apply_chat_template(messages, tokenize=False)
    assert ChatTemplate(template, {}).render(messages).text == expected


def test_the_role_developer_becomes_system_in_templates_without_it() -> None:
    row = {"messages": [{"role": "developer", "content": "be brief"}, *QUESTION, ANSWER]}
    form = form_of(row)
    assert form is not None
    chat = form.read(row)
    assert isinstance(chat, Chat)
    assert ChatTemplate(TEXTS, {}).render(chat.messages).text.startswith("system: be brief")
    with_developer = TEXTS.replace("{{ m.role }}", "{{ 'D' if m.role == 'developer' else m.role }}")
    assert ChatTemplate(with_developer, {}).render(chat.messages).text.startswith("D: be brief")


def test_damaged_templates_are_reported(tmp_path: Path) -> None:
    # A list must have named templates, as NAMED has.
    path = write_folder(tmp_path, ["x"])
    with pytest.raises(WeightsFormatError, match=r"tokenizer_config.json has a chat_template that"):
        ChatTokenizer.from_pretrained(path)
    (path / "chat_template.jinja").write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(WeightsFormatError, match=r"chat_template.jinja cannot be read.*utf-8"):
        ChatTokenizer.from_pretrained(path)
