"""Pretrain a small language model on real text with torch, for benches/rounded_training.py.

python benches/pretrain.py FOLDER [--seconds 240] [--text TEXTS] [--megabytes 120] [--tiny]

The model is a Llama of 0.11 B parameters (14 layers of width 768) with a byte-level BPE of 16,384
tokens. It is trained on the Python files in the folder TEXTS (default: the installed packages),
with autocast to bf16, and transformers saves it in bf16 into FOLDER. `--tiny` makes a model that is
small enough for a CPU.
"""

from __future__ import annotations

import argparse
import math
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROW_TOKENS = 1024
END = "<|end|>"
"""The token at the end of each text."""
PEAK_RATE = 1e-3
"""The learning rate after the warm-up."""


def read_texts(folder: Path, most: int) -> list[str]:
    """Read Python files in a fixed random order until the texts have more than `most` characters.

    Of a file, at most 100,000 characters count. Files that cannot be read as UTF-8 are left out.
    """
    paths = sorted(folder.rglob("*.py"))
    random.Random(0).shuffle(paths)
    texts, size = [], 0
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        texts.append(text[:100_000])
        size += len(texts[-1])
        if size > most:
            break
    return texts


def make_tokenizer(texts: list[str], entries: int) -> Any:
    """Train a byte-level BPE with a vocabulary of `entries` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=entries, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)


def train(model: Any, rows: Any, seconds: float, batch: int, device: str) -> None:
    """Train with AdamW, 100 steps of warm-up and a cosine schedule over the given seconds.

    The schedule ends at a twentieth of the highest learning rate.

    Args:
        model: the language model.
        rows: token ids, (rows, `ROW_TOKENS`).
        seconds: how long to train.
        batch: the number of rows of a step.
        device: "cuda" or "cpu".
    """
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    fused = device == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=fused)
    order = torch.Generator().manual_seed(0)
    started, step, tokens = time.perf_counter(), 0, 0
    while (passed := (time.perf_counter() - started) / seconds) < 1:
        # The warm-up times the cosine schedule, which falls from 1 to 0.05.
        factor = min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * passed)))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * factor
        ids = rows[torch.randint(len(rows), (batch,), generator=order)].to(device).long()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, tokens = step + 1, tokens + ids.numel()
        if step % 100 == 1:
            speed = tokens / (time.perf_counter() - started)
            print(f"step {step}: loss {loss.item():.3f}, {speed:,.0f} tokens/s", flush=True)
    print(f"{step} steps, {tokens / 1e6:.0f} M tokens, last loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to save the model")
    parser.add_argument("--seconds", type=float, default=240, help="how long to train")
    packages = Path(sysconfig.get_paths()["purelib"])
    parser.add_argument("--text", type=Path, default=packages, help="a folder of Python files")
    parser.add_argument(
        "--megabytes", type=float, default=120, help="millions of characters to read"
    )
    parser.add_argument("--tiny", action="store_true", help="make a model for a CPU")
    given = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = read_texts(given.text, int(given.megabytes * 1e6))
    entries = 512 if given.tiny else 16_384
    # The tokenizer is trained on a sixth of the texts, to save time.
    tokenizer = make_tokenizer(texts[: max(1, len(texts) // 6)], entries)
    ids = [
        token
        for text in tokenizer(texts, add_special_tokens=False)["input_ids"]
        for token in [*text, tokenizer.eos_token_id]
    ]
    rows = torch.tensor(ids[: len(ids) // ROW_TOKENS * ROW_TOKENS], dtype=torch.int32).view(
        -1, ROW_TOKENS
    )
    sizes: dict[str, int] = (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        if given.tiny
        else {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14}
    )
    config = LlamaConfig(
        vocab_size=entries,
        num_attention_heads=sizes["hidden_size"] // 64,
        max_position_embeddings=ROW_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **sizes,
    )
    model = LlamaForCausalLM(config).to(device)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    characters = sum(map(len, texts)) / 1e6
    print(f"{count:.1f} M parameters; {characters:.0f} M characters, {len(ids) / 1e6:.1f} M tokens")
    batch = 2 if given.tiny else 32
    train(model, rows, given.seconds, batch, device)
    model.to(torch.bfloat16).save_pretrained(given.folder)
    tokenizer.save_pretrained(given.folder)


if __name__ == "__main__":
    main()
