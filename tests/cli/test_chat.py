"""`trainable-candle chat` with the built-in model: long conversations, and errors of input."""

import io
import shutil
from pathlib import Path

import pytest

from trainable_candle.cli import main
from trainable_candle.families.causal_lm import BUILT_IN, CausalLM
from trainable_candle.text.chat_tokenizer import ChatTokenizer

CHAT = ["chat", "--model", "causal-lm", "--device", "cpu", "--tokens", "4"]
CONTEXT = 512  # the built-in model's, in tokens
# The built-in model knows tasks on words, such as `upper: clavo`, whose answer is CLAVO.


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Make `lines` the standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_long_conversations_lose_their_oldest_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[list[str]] = []
    prompt = ChatTokenizer.prompt

    def record_prompt(self: ChatTokenizer, messages: list[dict[str, str]]) -> list[int]:
        prompts.append([message["content"] for message in messages])
        return prompt(self, messages)

    monkeypatch.setattr(ChatTokenizer, "prompt", record_prompt)
    say(monkeypatch, *(f"first: {'word' * 40}{number}" for number in range(4)))
    assert main([*CHAT, "--system", "be brief"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 4
    # A token is a byte. Each message has about 170 tokens, so two turns fit into the context. The
    # third and the fourth prompt each leave out the oldest turn.
    assert printed.err == f"[the context has {CONTEXT} tokens: 1 oldest turn left out]\n" * 2
    last = prompts[-1]
    assert last[0] == "be brief"
    # The user's messages and the answers alternate. Each message of the user ends with its number.
    assert [message[-1] for message in last[1::2]] == ["2", "3"]


def test_a_message_that_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "upper: clavo", "x" * CONTEXT, "upper: clavo")
    assert main(CHAT) == 0
    printed = capsys.readouterr()
    assert "oldest" not in printed.err
    assert len(printed.out.splitlines()) == 2
    assert f"made for {CONTEXT} positions; this message is left out" in printed.err


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ("strict", "standard input: byte 0xff is not text in utf-8"),
        ("surrogateescape", r"standard input is 'a\udcff', expected text in UTF-8"),
    ],
    ids=["strict", "surrogateescape"],
)
def test_bytes_that_are_not_utf_8_are_reported(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    errors: str,
    message: str,
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(CHAT) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "sample"])
def test_prompts_are_checked_before_the_model_loads(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tokenizers import Tokenizer

    weights = tmp_path / "weights"
    shutil.copytree(BUILT_IN, weights)
    tokenizer = Tokenizer.from_file(str(weights / "tokenizer.json"))
    # The model has 260 tokens, one more than the tokenizer. So <new> gets the id 259 and fits, and
    # <newer>, with the id 260, is one too many.
    tokenizer.add_tokens(["<new>", "<newer>"])
    tokenizer.save(str(weights / "tokenizer.json"))
    monkeypatch.setattr(CausalLM, "model", property(lambda _: pytest.fail("the model is loaded")))
    # No adapter is read before the prompts are checked, so an empty file suffices.
    adapter = tmp_path / "adapter.safetensors"
    adapter.write_bytes(b"")
    flags = ["--weights", str(weights), "--adapter", str(adapter), "--prompt", "a", "--prompt"]
    # The arguments end with a flag. The test appends its value, the second prompt.
    arguments = [command, *CHAT[1:], *flags]
    assert main([*arguments, "a <newer>"]) == 2
    assert "has the token <newer> (260), and the model has 260 tokens" in capsys.readouterr().err
    assert main([*arguments, "x" * CONTEXT]) == 2
    assert f"the model was made for {CONTEXT} positions" in capsys.readouterr().err
