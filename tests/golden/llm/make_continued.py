"""Compute greedy continuations of prompts by the models in this folder, with transformers.

Run with torch 2.11.0 and transformers 5.23.0. Writes `continued.json`.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

HERE = Path(__file__).parent
TOKENS = 24


def main() -> None:
    rng = np.random.default_rng(5)
    continued = {}
    for family in ("llama", "qwen2", "qwen3"):
        model = AutoModelForCausalLM.from_pretrained(HERE / family, dtype=torch.float32)
        vocabulary = model.config.vocab_size
        # Tokens below 3 are special in the vocabulary of Llama.
        prompts = [rng.integers(3, vocabulary, length).tolist() for length in (4, 11, 1)]
        continued[family] = [
            {
                "prompts": prompts,
                "options": options,
                "expected": [continuation(model, prompt, **options) for prompt in prompts],
            }
            for options in ({}, {"repetition_penalty": 1.3})
        ]
    (HERE / "continued.json").write_text(json.dumps(continued) + "\n")


@torch.no_grad()
def continuation(model, prompt: list[int], **options: float) -> list[int]:
    """Return the TOKENS tokens after a prompt."""
    ids = torch.tensor([prompt])
    config = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, **options)
    # No token ends the text early.
    config.eos_token_id = None
    model.generation_config = config
    return model.generate(ids, attention_mask=torch.ones_like(ids))[0, ids.shape[1] :].tolist()


if __name__ == "__main__":
    main()
