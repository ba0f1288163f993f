"""A tokenizer of another model is rejected before training; a model's own one is accepted."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trainable_candle.errors import ConfigError, WeightsFormatError
from trainable_candle.run import train_adapter
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.text.tokenizer_check import check_tokenizer, row_length
from trainable_candle.text.chat_tokenizer import ChatTokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
WORDS = 20
"""The number of ordinary tokens. Their ids begin at 0; the ids of the other tokens follow."""
END, TURN, ADDED = WORDS, WORDS + 1, WORDS + 2
"""The ids of `<end>`, `<turn>` and the added token `<think>`."""


def tokenizer() -> ChatTokenizer:
    """Make a tokenizer of 20 ordinary tokens and three added ones, of which two are special."""
    from tokenizers import AddedToken, Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w0"))
    words.add_special_tokens([AddedToken(name, special=True) for name in ("<end>", "<turn>")])
    words.add_tokens(["<think>"])
    return ChatTokenizer(words, {"eos_token": "<end>"})


@pytest.mark.parametrize(
    ("config", "generation", "message"),
    [
        # As in Qwen2.5: config.json has one end token, generation_config.json has it and another.
        ({"eos_token_id": END}, {"eos_token_id": [TURN, END], "bos_token_id": END}, None),
        ({"eos_token_id": ADDED, "bos_token_id": None}, {}, None),
        ({}, {}, None),
        # LlamaConfig's defaults: the maker of the model never chose them, so they are not checked.
        ({"eos_token_id": 2, "bos_token_id": 1}, {}, None),
        # transformers has copied these defaults to generation_config.json.
        (
            {"eos_token_id": 2, "bos_token_id": 1},
            {"_from_model_config": True, "eos_token_id": 2, "bos_token_id": 1},
            None,
        ),
        # If both files have an id, only that of generation_config.json counts.
        ({"eos_token_id": 5}, {"eos_token_id": END}, None),
        # Some models have -1 for no token.
        ({"eos_token_id": -1}, {}, None),
        ({"eos_token_id": 5}, {}, r"eos_token_id in .*[/]config.json is 5, the ordinary text 'w5'"),
        ({}, {"eos_token_id": [END, 6]}, r"generation_config.json is 6, the ordinary text 'w6'"),
        ({"bos_token_id": 3, "eos_token_id": END}, {}, r"bos_token_id in .* is 3, the ordinary"),
        # Without `_from_model_config`, an id in this file is checked even if it equals a default.
        ({}, {"eos_token_id": 2}, r"eos_token_id in .*generation_config.json is 2"),
        ({"eos_token_id": [900, 901]}, {}, r"is 900, and the tokenizer has 23 tokens"),
    ],
    ids=[
        "several end tokens",
        "added token",
        "no ids",
        "defaults",
        "copied defaults",
        "only generation_config counts",
        "minus one",
        "ordinary end token",
        "ordinary second end token",
        "ordinary start token",
        "default id chosen in generation_config",
        "no such tokens",
    ],
)
def test_only_ids_of_ordinary_or_missing_tokens_are_rejected(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], message: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    # The second argument is the model's folder, or a file in it, which need not exist here. The
    # third is the number of rows of the embedding, which needs no rows for the three added tokens,
    # and may have more rows than there are tokens.
    if message is None:
        check_tokenizer(tokenizer(), tmp_path, WORDS)
        check_tokenizer(tokenizer(), tmp_path / "model.safetensors", 2 * WORDS)
    else:
        with pytest.raises(WeightsFormatError, match=f"{message}.*another model's; give"):
            check_tokenizer(tokenizer(), tmp_path, WORDS)


def test_a_tokenizer_larger_than_the_embedding_is_rejected(tmp_path: Path) -> None:
    # Without the added tokens, which may lack rows in the embedding, there are 20 tokens.
    with pytest.raises(WeightsFormatError, match=r"of 20 tokens, and the model's embedding has 19"):
        check_tokenizer(tokenizer(), tmp_path, WORDS - 1)


def test_a_run_checks_its_tokenizer_before_it_writes_files(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    shutil.copytree(GOLDEN / "llm" / "llama", weights)
    shutil.copyfile(GOLDEN / "chats" / "tokenizer.json", weights / "tokenizer.json")
    (weights / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_text|>"}')
    (tmp_path / "chats.jsonl").write_text('{"text": "so it is"}\n')
    config = TrainConfig(
        model="causal-lm",
        weights=str(weights),
        dataset=str(tmp_path / "chats.jsonl"),
        output=str(tmp_path / "run"),
        device="cpu",
        steps=1,
    )
    with pytest.raises(WeightsFormatError, match=r"380 tokens, and the model's embedding has 320"):
        train_adapter(config, progress=False)
    assert not (tmp_path / "run").exists()


def test_no_row_is_longer_than_the_context() -> None:
    # By default, a packed row has 2048 tokens, or the context if that is shorter.
    assert [row_length(None, context) for context in (512, 4096)] == [512, 2048]
    assert row_length(4096, 4096) == 4096
    with pytest.raises(ConfigError, match="--sequence-length is 513, and the model was made for"):
        row_length(513, 512)
