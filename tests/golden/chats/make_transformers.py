"""Make expected values: chats that transformers renders, and masks of the assistant's tokens.

    python make_transformers.py

Writes tokenizer.json and cases.json.gz, with which tests compare this library. Needs transformers
5.23 and jinja2. The templates imitate published ones. Transformers makes a mask only if the
template has `{% generation %}` around each answer. For templates without this tag, the masks come
from a copy that has it (`TWINS`).
"""

import datetime as dt
import gzip
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + strftime_now("%d %b %Y") + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception('Only user and assistant: ' + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
TAGGED = """{% for message in messages %}
{% if message['role'] == 'assistant' %}
<|im_start|>assistant
{% generation %}
{{ message['content'] }}<|im_end|>
{% endgeneration %}
{% else %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == "assistant" %}{% generation %}
        {%- if message.content is defined %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' }}{{- call.function | tojson(indent=2) }}{{- '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- endgeneration %}{%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- set ns = namespace(asked=false) %}
{%- if add_generation_prompt %}{%- set ns.asked = true %}{%- endif %}
{%- if ns.asked %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# Copies of templates, with `{% generation %}` around each answer.
TWINS = {
    "chatml": CHATML.replace(
        "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}",
        "{{'<|im_start|>' + message['role'] + '\\n'}}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}",
    ),
    "llama3": LLAMA3.replace(
        "    {{- message['content'] | trim + '<|eot_id|>' }}",
        "{%- if message.role == 'assistant' %}"
        "{% generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}"
        "{%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}",
    ),
}
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "tagged": TAGGED, "tools": TOOLS}

PLAIN = [
    {"role": "user", "content": "What is 2 < 3 & 'why'?"},
    {"role": "assistant", "content": "It is true."},
    {"role": "user", "content": "  Grüße, 世界 🙂 "},
    {"role": "assistant", "content": "Hello again,\nworld.\n"},
]
SYSTEM = [{"role": "system", "content": " Be brief. "}, *PLAIN[:2]]
CALLS = [
    {"role": "user", "content": "Weather in Köln and Bonn?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": c}}}
            for c in ("Köln", "Bonn")
        ],
    },
    {"role": "tool", "name": "weather", "content": '{"celsius": 21}'},
    {"role": "tool", "name": "weather", "content": "rain"},
    {"role": "assistant", "content": "21 °C, and rain."},
]
# The tools that CALLS may use.
TOOL_SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city, <now>.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
# The name of a chat -> its messages and its tools.
CHATS = {
    "plain": (PLAIN, None),
    "system": (SYSTEM, None),
    "calls": (CALLS, TOOL_SCHEMAS),
}


class FixedDay(dt.datetime):
    """A clock that always shows the same day, so that `strftime_now` in a template does, too."""

    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26, tzinfo=tz)


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [TOOLS, LLAMA3, "What is it? It is true. Hello again, world. Be brief."]
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=380,  # 256 bytes, the special tokens, and merges
            special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(HERE / "tokenizer.json"), pretty=False)
    chat_template_utils.datetime = FixedDay
    cases = []
    for name, template in TEMPLATES.items():
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<|begin_of_text|>",
            eos_token="<|end_of_text|>",
            chat_template=template,
        )
        for chat, (messages, tools) in CHATS.items():
            # Only the template `tools` can render the chat `calls`. It is used for no other chat.
            if (chat == "calls") != (name == "tools"):
                continue
            options = {"tools": tools, "tokenize": False}
            prompt = messages[:-1]  # all messages before the last answer
            text = fast.apply_chat_template(messages, **options)
            twin = TWINS.get(name, template)
            assert fast.apply_chat_template(messages, chat_template=twin, **options) == text
            assert "{% generation %}" in twin
            tokenized = fast.apply_chat_template(
                messages,
                tools=tools,
                chat_template=twin,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            cases.append(
                {
                    "template": name,
                    "chat": chat,
                    "text": text,
                    "prompt": fast.apply_chat_template(
                        prompt, add_generation_prompt=True, **options
                    ),
                    "input_ids": tokenized["input_ids"],
                    "mask": tokenized["assistant_masks"],
                }
            )
    content = {
        "templates": TEMPLATES,
        "chats": {
            chat: {"messages": messages, "tools": tools}
            for chat, (messages, tools) in CHATS.items()
        },
        "cases": cases,
    }
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (HERE / "cases.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
