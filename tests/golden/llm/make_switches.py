"""Logits of tiny decoders by transformers; most cases switch on one feature of the configuration.

Run with torch 2.11.0 and transformers 5.23.0. The script writes two files. `switches.json.gz` has
each configuration in two forms: with the old names of the fields, and as transformers writes it.
`switches.safetensors.gz` has the token ids and the mask that all cases share, and for each case the
weights in bf16 and the logits of each row.
"""

import copy
import gzip
import json
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
# A head has 4 features (hidden_size / num_attention_heads), so the rotary embedding has 2
# frequencies, and each list one factor per frequency. Rows of more than
# `original_max_position_embeddings` tokens get the long factors, others the short ones.
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 5.0],
    "original_max_position_embeddings": 8,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
# The name of a case -> the family, and the fields that differ from SIZES.
CASES = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "dynamic": (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8},
    ),
    "llama3": ("llama", {"rope_scaling": LLAMA3, "head_dim": 8}),
    "yarn": ("qwen2", {"rope_scaling": YARN}),
    "yarn mscale": (
        "llama",
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "longrope": ("llama", {"rope_scaling": LONGROPE}),
    # No row has more than 20 tokens (see `main`), so 24 selects the short factors.
    "longrope short": (
        "llama",
        {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 24}},
    ),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral without window": ("mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("qwen2", WINDOW | {"max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 10, "attention_bias": True}),
    "qwen3 window": (
        "qwen3",
        WINDOW
        | {
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "one head of keys": ("qwen3", {"head_dim": 2, "num_key_value_heads": 1}),
}


def main() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, SIZES["vocab_size"], (2, 20))
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0  # The second row has 13 tokens.
    tensors = {"input_ids": ids, "attention_mask": mask}
    configs = {}
    for name, (family, switches) in CASES.items():
        old = {"model_type": family, **SIZES, **switches}
        fields = {key: value for key, value in old.items() if key != "model_type"}
        config = AutoConfig.for_model(family, **fields)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        with torch.no_grad():
            for parameter in model.parameters():
                # Vary weights of norms, which are initially 1, around 1, and all others around 0.
                parameter.copy_(
                    1 + 0.3 * torch.randn_like(parameter)
                    if parameter.dim() == 1 and parameter.mean() == 1
                    else 0.3 * torch.randn_like(parameter)
                )
                parameter.copy_(parameter.bfloat16())
            for row, length in enumerate(mask.sum(1).tolist()):
                # Each row gets its own copy of the model: with "dynamic" scaling, a model remembers
                # the longest row.
                tensors[f"{name}|logits.{row}"] = copy.deepcopy(model)(
                    ids[row : row + 1, :length]
                ).logits[0]
        # If the output head and the embedding are one tensor, the file has only the embedding.
        tied = "lm_head.weight" if config.tie_word_embeddings else None
        for key, value in model.state_dict().items():
            if key != tied:
                tensors[f"{name}|{key}"] = value.bfloat16()
        new = json.loads(config.to_json_string(use_diff=False))
        configs[name] = {"old": old, "new": new | {"architectures": [type(model).__name__]}}
    data = save({key: value.contiguous() for key, value in tensors.items()})
    (HERE / "switches.safetensors.gz").write_bytes(gzip.compress(data, mtime=0))
    text = json.dumps(configs, separators=(",", ":"))
    (HERE / "switches.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
