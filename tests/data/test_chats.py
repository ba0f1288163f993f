"""Conversations become tokens: rendered texts, token ids and masks equal transformers' own."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from trainable_candle.data.chats import Tokens, tokens_of
from trainable_candle.data.chats.forms import Chat, Completion, form_of
from trainable_candle.errors import WeightsFormatError
from trainable_candle.text.chat_tokenizer import ChatTokenizer
from trainable_candle.text.templates import ChatTemplate

GOLDEN = Path(__file__).parents[1] / "golden" / "chats"
CONTENT = json.loads(gzip.decompress((GOLDEN / "cases.json.gz").read_bytes()))
CASES = [pytest.param(case, id=f"{case['template']}-{case['chat']}") for case in CONTENT["cases"]]
TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
ASKED = {"role": "user", "content": "why?"}


def tokenizer(template: str | None) -> ChatTokenizer:
    from tokenizers import Tokenizer

    templates = None if template is None else {"default": template}
    return ChatTokenizer(Tokenizer.from_file(str(GOLDEN / "tokenizer.json")), TOKENS, templates)


def chat_of(case: dict[str, Any]) -> tuple[ChatTokenizer, Chat]:
    chat = CONTENT["chats"][case["chat"]]
    return tokenizer(CONTENT["templates"][case["template"]]), Chat(chat["messages"], chat["tools"])


def learnt(tokens: Tokens, text: ChatTokenizer) -> str:
    return text.decode(tokens.ids[tokens.learnt].tolist(), special=True)


@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_transformers(case: dict[str, Any]) -> None:
    text, chat = chat_of(case)
    assert text.template.render(chat.messages, chat.tools).text == case["text"]
    prompt = text.template.render(chat.messages[:-1], chat.tools, generation_prompt=True)
    assert prompt.text == case["prompt"]


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_masks_are_those_of_transformers(case: dict[str, Any]) -> None:
    text, chat = chat_of(case)
    tokens = tokens_of(chat, text)
    assert tokens.ids.tolist() == case["input_ids"]
    expected = list(case["mask"])
    # In the template `tagged`, the `generation` block also has the line break after the stop token.
    # This library does not train on this line break.
    for place in tokens.stops:
        if case["template"] == "tagged":
            expected[place + 1] = 0
    assert tokens.learnt.astype(int).tolist() == expected
    answers = sum(message["role"] == "assistant" for message in chat.messages)
    assert tokens.answers == answers == len(tokens.stops)
    ends = {text.token(int(tokens.ids[place])) for place in tokens.stops}
    assert ends == {"<|eot_id|>" if case["template"] == "llama3" else "<|im_end|>"}


def test_a_stop_token_after_the_generation_block_is_learnt() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}"
    )
    text = tokenizer(template)
    tokens = tokens_of(Chat([ASKED, {"role": "assistant", "content": "so"}]), text)
    assert learnt(tokens, text) == "so<|im_end|>"
    assert len(tokens.stops) == 1


def test_without_a_template_chatml_is_used() -> None:
    text = tokenizer(None)
    assert not text.has_template
    tokens = tokens_of(Chat([ASKED, {"role": "assistant", "content": "so"}]), text)
    whole = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n"
    assert text.decode(tokens.ids.tolist(), special=True) == whole
    assert learnt(tokens, text) == "so<|im_end|>"
    assert text.template.render([ASKED], generation_prompt=True).text in whole


def test_the_learnt_messages_can_be_chosen() -> None:
    text = tokenizer(CONTENT["templates"]["chatml"])
    chat = Chat(CONTENT["chats"]["plain"]["messages"])
    last = tokens_of(chat, text, "last-answer")
    assert learnt(last, text) == "Hello again,\nworld.\n<|im_end|>"
    everything = tokens_of(chat, text, "all")
    assert everything.learnt.tolist() == [False] + [True] * (len(everything) - 1)


def test_a_template_that_edits_history_is_rejected() -> None:
    # As in Qwen3's template, only the last answer has a block for thoughts.
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    text = tokenizer(template)
    chat = Chat(CONTENT["chats"]["plain"]["messages"])
    with pytest.raises(ValueError, match=r"changes message 1 .*--train-on last-answer"):
        tokens_of(chat, text)
    last = tokens_of(chat, text, "last-answer")
    assert learnt(last, text) == "<think></think>Hello again,\nworld.\n<|im_end|>"


def test_a_completion_is_split_by_offsets_and_ended() -> None:
    text = tokenizer(None)
    tokens = tokens_of(Completion("What is it?", " It is true."), text)
    assert tokens.ids.tolist() == [*text.encode("What is it? It is true.").ids, text.end]
    assert learnt(tokens, text) == " It is true.<|end_of_text|>"
    whole = tokens_of(Completion("", "It is true."), text)
    # The first token has no predecessor that could predict it.
    assert whole.learnt.tolist() == [False] + [True] * (len(whole) - 1)
    assert whole.stops == (len(whole) - 1,)


def test_truncation_removes_the_stop_token() -> None:
    text = tokenizer(None)
    tokens = tokens_of(Completion("What is it?", " It is true."), text)
    cut = tokens.truncated(len(tokens) - 1)
    assert (len(cut), cut.stops, cut.answers) == (len(tokens) - 1, (), 1)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no ' + messages[0].role) }}", "no user"),
        ("{{ messages[0].__class__.__mro__ }}", "access to attribute '__class__'.*unsafe"),
        ("{% set ns = namespace() %}{% set ns._a = 1 %}", "cannot have the attribute '_a'"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[3].content }}", "has no element 3"),
    ],
)
def test_errors_that_a_template_raises_are_quoted(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(template, {}).render([ASKED])


def test_the_error_for_a_damaged_template_gives_its_line() -> None:
    with pytest.raises(WeightsFormatError, match="line 2 is not Jinja"):
        ChatTemplate("\n{% if %}", {})


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            [("user", "a"), ("assistant", "b")],
        ),
        (
            {"instruction": "a", "input": "x", "output": "b", "history": [["p", "q"]]},
            [("user", "p"), ("assistant", "q"), ("user", "a\nx"), ("assistant", "b")],
        ),
        (
            {
                "prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                "completion": [{"role": "assistant", "content": "b"}],
            },
            [("user", [{"type": "text", "text": "a"}]), ("assistant", "b")],
        ),
    ],
)
def test_rows_of_every_form_become_messages(
    row: dict[str, Any], messages: list[tuple[str, Any]]
) -> None:
    form = form_of(row)
    assert form is not None
    found = form.read(row)
    assert isinstance(found, Chat)
    assert [(m["role"], m["content"]) for m in found.messages] == messages


ANSWER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "`messages` is empty, expected a list of messages"),
        ({"messages": [ASKED]}, "no message of the role assistant"),
        ({"messages": [ASKED, ASKED, ANSWER]}, r"`messages\[1\].role`: user after user"),
        ({"messages": [ANSWER]}, r"`messages\[0\].role`: assistant first is out of order"),
        ({"messages": [{"role": "bot", "content": "a"}]}, r"role` is 'bot', expected system"),
        ({"messages": [ASKED, {**ANSWER, "content": " "}]}, r"\[1\].content` is an empty answer"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "content` is missing"),
        (
            {"messages": [{**ASKED, "content": [{"type": "image"}]}, ANSWER]},
            r"content\[0\]` is of type image; the model reads only text",
        ),
        ({"messages": [ASKED, ANSWER], "tools": "{"}, "`tools` is text that is not JSON"),
        (
            {"messages": [ASKED, ANSWER], "tools": [{}, 1]},
            r"`tools\[1\]` is int, expected an object: a JSON schema",
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            r"`messages\[1\].tool_calls\[0\]` is not a function call",
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "tool_calls": {"name": "f"}}]},
            r"tool_calls` is dict, expected a list of function calls",
        ),
        ({"messages": [ASKED, ANSWER], "tools": '["\\ud83d"]'}, r"`tools\[0\]` has half of a char"),
        ({"instruction": "a", "output": ""}, "`output` is empty"),
        ({"instruction": "a", "output": "b", "history": 3}, "`history` is int, expected a list of"),
        (
            {"prompt": "a", "completion": [ANSWER]},
            "`completion` is a list of messages and `prompt` is not; give both as texts, or both",
        ),
        (
            {"prompt": [ASKED], "completion": "b"},
            "`prompt` is a list of messages and `completion` is not",
        ),
        ({"prompt": 3, "completion": "b"}, "`prompt` is int, expected text"),
        ({"chosen": "a", "rejected": "a"}, "`chosen` and `rejected` are the same"),
        ({"chosen": [ASKED, ANSWER], "rejected": [ASKED]}, "`rejected` has no message of the role"),
        (
            {"chosen": [ASKED, ANSWER], "rejected": [{**ASKED, "content": "c"}, ANSWER]},
            "differ before their last messages",
        ),
    ],
)
def test_errors_about_rows_name_the_field(row: dict[str, Any], message: str) -> None:
    form = form_of(row)
    assert form is not None
    with pytest.raises(ValueError, match=message):
        form.read(row)
