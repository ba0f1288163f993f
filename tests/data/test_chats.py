"""Chats become the same texts, token ids and masks as with transformers; errors about rows.

In `Tokens`, `learnt` is the mask of the tokens to learn, `stops` has the indices of the tokens that
end an answer, and `answers` is the number of answers to learn, also if truncation removes them.
"""

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
SPECIAL_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
QUESTION = {"role": "user", "content": "why?"}


def make_tokenizer(template: str | None) -> ChatTokenizer:
    from tokenizers import Tokenizer

    templates = None if template is None else {"default": template}
    return ChatTokenizer(
        Tokenizer.from_file(str(GOLDEN / "tokenizer.json")), SPECIAL_TOKENS, templates
    )


def tokenizer_and_chat(case: dict[str, Any]) -> tuple[ChatTokenizer, Chat]:
    chat = CONTENT["chats"][case["chat"]]
    return make_tokenizer(CONTENT["templates"][case["template"]]), Chat(
        chat["messages"], chat["tools"]
    )


def learnt_text(tokens: Tokens, tokenizer: ChatTokenizer) -> str:
    return tokenizer.decode(tokens.ids[tokens.learnt].tolist(), special=True)


@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_transformers(case: dict[str, Any]) -> None:
    tokenizer, chat = tokenizer_and_chat(case)
    assert tokenizer.template.render(chat.messages, chat.tools).text == case["text"]
    prompt = tokenizer.template.render(chat.messages[:-1], chat.tools, generation_prompt=True)
    assert prompt.text == case["prompt"]


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_masks_are_those_of_transformers(case: dict[str, Any]) -> None:
    tokenizer, chat = tokenizer_and_chat(case)
    tokens = tokens_of(chat, tokenizer)
    assert tokens.ids.tolist() == case["input_ids"]
    expected = list(case["mask"])
    # In the template `tagged`, the `generation` block also has the line break after the stop token.
    # This library does not train on this line break.
    for index in tokens.stops:
        if case["template"] == "tagged":
            expected[index + 1] = 0
    assert tokens.learnt.astype(int).tolist() == expected
    answers = sum(message["role"] == "assistant" for message in chat.messages)
    assert tokens.answers == answers == len(tokens.stops)
    stop_tokens = {tokenizer.token(int(tokens.ids[index])) for index in tokens.stops}
    assert stop_tokens == {"<|eot_id|>" if case["template"] == "llama3" else "<|im_end|>"}


def test_a_stop_token_after_the_generation_block_is_learnt() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}"
    )
    tokenizer = make_tokenizer(template)
    tokens = tokens_of(Chat([QUESTION, {"role": "assistant", "content": "so"}]), tokenizer)
    assert learnt_text(tokens, tokenizer) == "so<|im_end|>"
    assert len(tokens.stops) == 1


def test_without_a_template_chatml_is_used() -> None:
    tokenizer = make_tokenizer(None)
    assert not tokenizer.has_template
    tokens = tokens_of(Chat([QUESTION, {"role": "assistant", "content": "so"}]), tokenizer)
    expected = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n"
    assert tokenizer.decode(tokens.ids.tolist(), special=True) == expected
    assert learnt_text(tokens, tokenizer) == "so<|im_end|>"
    assert tokenizer.template.render([QUESTION], generation_prompt=True).text in expected


def test_the_learnt_messages_can_be_chosen() -> None:
    tokenizer = make_tokenizer(CONTENT["templates"]["chatml"])
    chat = Chat(CONTENT["chats"]["plain"]["messages"])
    last = tokens_of(chat, tokenizer, "last-answer")
    assert learnt_text(last, tokenizer) == "Hello again,\nworld.\n<|im_end|>"
    everything = tokens_of(chat, tokenizer, "all")
    # The first token has no predecessor that could predict it.
    assert everything.learnt.tolist() == [False] + [True] * (len(everything) - 1)


def test_a_template_that_edits_history_allows_only_the_last_answer_to_be_learnt() -> None:
    # As in Qwen3's template, only the last answer has a block for thoughts. So the text of an
    # earlier answer (here message 1) changes as soon as more messages follow.
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    chat = Chat(CONTENT["chats"]["plain"]["messages"])
    with pytest.raises(ValueError, match=r"changes message 1 .*--train-on last-answer"):
        tokens_of(chat, tokenizer)
    last = tokens_of(chat, tokenizer, "last-answer")
    assert learnt_text(last, tokenizer) == "<think></think>Hello again,\nworld.\n<|im_end|>"


def test_a_completion_and_an_added_stop_token_are_learnt() -> None:
    tokenizer = make_tokenizer(None)
    tokens = tokens_of(Completion("What is it?", " It is true."), tokenizer)
    assert tokens.ids.tolist() == [*tokenizer.encode("What is it? It is true.").ids, tokenizer.end]
    assert learnt_text(tokens, tokenizer) == " It is true.<|end_of_text|>"
    no_prompt = tokens_of(Completion("", "It is true."), tokenizer)
    # The first token has no predecessor that could predict it.
    assert no_prompt.learnt.tolist() == [False] + [True] * (len(no_prompt) - 1)
    assert no_prompt.stops == (len(no_prompt) - 1,)


def test_truncation_removes_the_stop_token() -> None:
    tokenizer = make_tokenizer(None)
    tokens = tokens_of(Completion("What is it?", " It is true."), tokenizer)
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
    ids=["own error", "class", "private attribute", "changed messages", "missing message"],
)
def test_errors_while_a_template_is_rendered_are_quoted(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(template, {}).render([QUESTION])


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
    ids=["conversations", "instruction", "prompt and completion"],
)
def test_rows_of_other_forms_become_messages(
    row: dict[str, Any], messages: list[tuple[str, Any]]
) -> None:
    form = form_of(row)
    assert form is not None
    chat = form.read(row)
    assert isinstance(chat, Chat)
    assert [(m["role"], m["content"]) for m in chat.messages] == messages


ANSWER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "`messages` is empty, expected a list of messages"),
        ({"messages": [QUESTION]}, "no message of the role assistant"),
        ({"messages": [QUESTION, QUESTION, ANSWER]}, r"`messages\[1\].role`: user after user"),
        ({"messages": [ANSWER]}, r"`messages\[0\].role`: assistant first is out of order"),
        ({"messages": [{"role": "bot", "content": "a"}]}, r"role` is 'bot', expected system"),
        (
            {"messages": [QUESTION, {**ANSWER, "content": " "}]},
            r"\[1\].content` is an empty answer",
        ),
        ({"messages": [QUESTION, {"role": "assistant", "content": None}]}, "content` is missing"),
        (
            {"messages": [{**QUESTION, "content": [{"type": "image"}]}, ANSWER]},
            r"content\[0\]` is of type image; the model reads only text",
        ),
        ({"messages": [QUESTION, ANSWER], "tools": "{"}, "`tools` is text that is not JSON"),
        (
            {"messages": [QUESTION, ANSWER], "tools": [{}, 1]},
            r"`tools\[1\]` is int, expected an object: a JSON schema",
        ),
        (
            {"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            r"`messages\[1\].tool_calls\[0\]` is not a function call",
        ),
        (
            {"messages": [QUESTION, {"role": "assistant", "tool_calls": {"name": "f"}}]},
            r"tool_calls` is dict, expected a list of function calls",
        ),
        (
            {"messages": [QUESTION, ANSWER], "tools": '["\\ud83d"]'},
            r"`tools\[0\]` has half of a char",
        ),
        ({"instruction": "a", "output": ""}, "`output` is empty"),
        ({"instruction": "a", "output": "b", "history": 3}, "`history` is int, expected a list of"),
        (
            {"prompt": "a", "completion": [ANSWER]},
            "`completion` is a list of messages and `prompt` is not; give both as texts, or both",
        ),
        (
            {"prompt": [QUESTION], "completion": "b"},
            "`prompt` is a list of messages and `completion` is not",
        ),
        ({"prompt": 3, "completion": "b"}, "`prompt` is int, expected text"),
        ({"chosen": "a", "rejected": "a"}, "`chosen` and `rejected` are the same"),
        (
            {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION]},
            "`rejected` has no message of the role",
        ),
        (
            {"chosen": [QUESTION, ANSWER], "rejected": [{**QUESTION, "content": "c"}, ANSWER]},
            "differ before their last messages",
        ),
    ],
)
def test_errors_about_rows_name_the_field(row: dict[str, Any], message: str) -> None:
    form = form_of(row)
    assert form is not None
    with pytest.raises(ValueError, match=message):
        form.read(row)
