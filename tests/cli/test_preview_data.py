"""`trainable-candle preview-data`, with a folder in the layout of published language models."""

import gzip
import json
from pathlib import Path

import pytest

from trainable_candle.cli import main
from trainable_candle.data.chats import tokens_of
from trainable_candle.data.chats.forms import Chat
from trainable_candle.data.chats.preview import shown
from trainable_candle.text.chat_tokenizer import ChatTokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "chats"
TEMPLATES = json.loads(gzip.decompress((GOLDEN / "cases.json.gz").read_bytes()))["templates"]
CHAT = {
    "messages": [
        {"role": "user", "content": "is it? 世"},
        {"role": "assistant", "content": "it is"},
    ]
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer, its chat template and a file of two chats."""
    (tmp_path / "tokenizer.json").write_bytes((GOLDEN / "tokenizer.json").read_bytes())
    config = {
        "bos_token": {"content": "<|begin_of_text|>"},
        "eos_token": "<|end_of_text|>",
        "chat_template": [
            {"name": "tool_use", "template": "not used"},
            {"name": "default", "template": TEMPLATES["chatml"]},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    # The ids of <|end_of_text|> and <|eot_id|>.
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 6]}')
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 2)
    return tmp_path


def test_tokens_masks_and_counts_are_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--weights", str(folder), "--dataset", str(folder / "chats.jsonl"), "--examples", "1"]
    assert main(["preview-data", *flags, "--sequence-length", "100"]) == 0
    out = capsys.readouterr().out
    assert out.count("example 1:") == 1
    assert "example 2:" not in out
    # `[!...!]` marks a stop token, at which an answer ends; with this template, it is <|im_end|>.
    assert "[!<|im_end|>!]" in out.partition("example 1:")[2]
    assert "世" in out
    assert "answers end with <|end_of_text|> <|im_end|> <|eot_id|>" in out
    assert "2 of 2 answers end in a stop token" in out
    assert "packed: 1 rows of 100 tokens" in out


def test_colours_or_brackets_mark_tokens(folder: Path) -> None:
    tokenizer = ChatTokenizer.from_pretrained(folder / "tokenizer.json")
    tokens = tokens_of(Chat(CHAT["messages"]), tokenizer)
    coloured = shown(tokens, tokenizer, colour=True)
    # Bold magenta marks a stop token.
    assert "\x1b[1;35m<|im_end|>\x1b[0m" in coloured
    plain = shown(tokens, tokenizer, colour=False)
    assert "\x1b" not in plain
    assert "[!<|im_end|>!]" in plain


def test_a_template_file_overrides_the_template_of_the_tokenizer(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATES["llama3"])
    tokenizer = ChatTokenizer.from_pretrained(folder)
    assert tokenizer.template.source == TEMPLATES["llama3"]
    assert tokenizer.tokens["bos_token"] == "<|begin_of_text|>"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "[", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template that is neither text nor"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "rag", "template": ""}]}',
            "has the chat templates rag, expected one called default",
        ),
        ("chat_template.jinja", "{% if %}", "chat template: line 1 is not Jinja"),
        ("tokenizer.json", None, "there is no file"),
    ],
)
def test_damaged_and_missing_tokenizers_are_reported(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str | None,
    message: str,
) -> None:
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    flags = ["--weights", str(folder), "--dataset", str(folder / "chats.jsonl")]
    assert main(["preview-data", *flags]) == 2
    assert message in capsys.readouterr().err


def preview(*flags: str) -> int:
    """Run the command without examples, and return its exit status."""
    return main(["preview-data", *flags, "--examples", "0"])


def test_packed_rows_are_as_long_as_the_context_of_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--weights", str(folder), "--dataset", str(folder / "chats.jsonl")]
    # The tokenizer has 380 tokens.
    config = {"vocab_size": 380, "max_position_embeddings": 60}
    (folder / "config.json").write_text(json.dumps(config))
    assert preview(*flags) == 0
    assert "rows of 60 tokens" in capsys.readouterr().out
    assert preview(*flags, "--sequence-length", "61") == 2
    assert "was made for 60 positions" in capsys.readouterr().err
    # A configuration that does not give the context: the length is the default.
    (folder / "config.json").write_text(json.dumps({"vocab_size": 380}))
    assert preview(*flags) == 0
    assert "rows of 2048 tokens" in capsys.readouterr().out


def test_a_tokenizer_of_another_model_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--weights", str(folder), "--dataset", str(folder / "chats.jsonl")]
    (folder / "config.json").write_text(json.dumps({"vocab_size": 379}))
    assert preview(*flags) == 2
    assert "has a tokenizer of 380 tokens, and the model's embedding has 379 rows" in (
        capsys.readouterr().err
    )
    # 7 is the id of "!", which is ordinary text; a start token is a special or an added token.
    (folder / "config.json").write_text(json.dumps({"vocab_size": 380, "bos_token_id": 7}))
    assert preview(*flags) == 2
    assert "bos_token_id in" in capsys.readouterr().err


def test_without_weights_the_built_in_model_is_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preview("--dataset", str(folder / "chats.jsonl")) == 0
    out = capsys.readouterr().out
    assert "answers end with <|end|>" in out
    assert "rows of 512 tokens" in out
