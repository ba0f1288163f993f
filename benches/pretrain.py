"""Pretrain a small language model on real text with torch, for benches/rounded_training.py.

python benches/pretrain.py FOLDER [--seconds 240] [--text FOLDER] [--megabytes 120] [--tiny]

The model is a Llama of 0.11 B parameters (14 layers of width 768) with a byte-level BPE of 16,384
tokens. It is trained on the Python files in --text (default: the installed packages), with autocast
to bf16, and transformers saves it in bf16 into FOLDER. `--tiny` makes a model that is small enough
for a CPU.
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

ROW = 1024
END = "<|end|>"


def read_texts(folder: Path, most: int) -> list[str]:
    """Read files in a fixed random order until the texts have more than `most` characters."""
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
    """Train with AdamW, warm-up and a cosine schedule over the given seconds."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    fused = device == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=fused)
    order = torch.Generator().manual_seed(0)
    started, step, tokens = time.perf_counter(), 0, 0
    while (passed := (time.perf_counter() - started) / seconds) < 1:
        rate = min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * passed)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * rate
        ids = rows[torch.randint(len(rows), (batch,), generator=order)].to(device).long()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, tokens = step + 1, tokens + ids.numel()
        if step % 100 == 1:
            rate_now = tokens / (time.perf_counter() - started)
            print(f"step {step}: loss {loss.item():.3f}, {rate_now:,.0f} tokens/s", flush=True)
    print(f"{step} steps, {tokens / 1e6:.0f} M tokens, last loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["purelib"]))
    parser.add_argument("--megabytes", type=float, default=120)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = read_texts(given.text, int(given.megabytes * 1e6))
    entries = 512 if given.tiny else 16_384
    tokenizer = make_tokenizer(texts[: max(1, len(texts) // 6)], entries)
    ids = [
        i
        for text in tokenizer(texts, add_special_tokens=False)["input_ids"]
        for i in [*text, tokenizer.eos_token_id]
    ]
    rows = torch.tensor(ids[: len(ids) // ROW * ROW], dtype=torch.int32).view(-1, ROW)
    sizes: dict[str, int] = (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        if given.tiny
        else {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14}
    )
    config = LlamaConfig(
        vocab_size=entries,
        num_attention_heads=sizes["hidden_size"] // 64,
        max_position_embeddings=ROW,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **sizes,
    )
    model = LlamaForCausalLM(config).to(device)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    characters = sum(map(len, texts)) / 1e6
    print(f"{count:.1f} M parameters; {characters:.0f} M characters, {len(ids) / 1e6:.1f} M tokens")
    train(model, rows, given.seconds, 2 if given.tiny else 32, device)
    model.to(torch.bfloat16).save_pretrained(given.folder)
    tokenizer.save_pretrained(given.folder)


if __name__ == "__main__":
    main()
