"""Tiny T5 encoders with random weights, and transformers' results for token ids.

    python make_transformers.py FOLDER

Needs torch 2.11 and transformers 5.23. bf16 represents all weights exactly. The output `large` of
the gated model comes from weights with which f16 overflows: in the residual stream, in the gated
product and in the results of `wo`. `full_size.json` has the names and shapes of T5 1.1 XXL's
encoder. In a name, `*` replaces the index of a block. Each entry has the shape of a parameter,
and how many parameters the name stands for.
"""

import copy
import gzip
import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import T5Config, T5EncoderModel

XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
SIZES = {
    "gated": {"d_model": 40, "d_kv": 8, "d_ff": 72, "num_layers": 3, "num_heads": 3},
    "relu": {"d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4},
}
FORM = {"gated": "gated-gelu", "relu": "relu"}
VOCABULARY = 150


def config(form, **sizes):
    return T5Config(
        vocab_size=VOCABULARY, feed_forward_proj=form, tie_word_embeddings=False, **sizes
    )


@torch.no_grad()
def random_model(settings):
    model = T5EncoderModel(settings).eval()
    for name, value in model.named_parameters():
        # `shared` is the embedding of tokens, `bias` that of relative positions. Weights of norms
        # are around 1, all others around 0.
        scale = 1.0 if "shared" in name or "bias" in name else 0.2
        value.copy_(torch.randn(value.shape) * scale + ("norm" in name))
        value.copy_(value.bfloat16())
    return model


def largest(model, ids):
    """Return the largest magnitudes in the residual stream, the inputs of `wo` and its outputs."""
    found = {"stream": 0.0, "middle": 0.0, "wo": 0.0}

    def update(name, value):
        found[name] = max(found[name], value.abs().max().item())

    def update_wo(_module, given, out):
        update("middle", given[0])
        update("wo", out)

    hooks = []
    for block in model.encoder.block:
        hooks.append(block.register_forward_hook(lambda _m, _i, out: update("stream", out[0])))
        hooks.append(block.layer[1].DenseReluDense.wo.register_forward_hook(update_wo))
    model(ids)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def main():
    root = Path(sys.argv[1])
    torch.manual_seed(20261122)
    # Ids 0 and 1 are T5's padding and end of text.
    ids = torch.randint(2, VOCABULARY, (2, 37))
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0
    mask[1, :3] = 0
    # A text with distances beyond `relative_attention_max_distance`, which is 128.
    long = torch.randint(2, VOCABULARY, (1, 150))
    for name, sizes in SIZES.items():
        model = random_model(config(FORM[name], **sizes))
        folder = root / name
        copy.deepcopy(model).bfloat16().save_pretrained(folder)
        case = {"input_ids": ids, "attention_mask": mask, "long_ids": long}
        case["output"] = model(ids).last_hidden_state
        case["masked"] = model(ids, attention_mask=mask).last_hidden_state
        case["nothing_seen"] = model(ids, attention_mask=mask * 0).last_hidden_state
        case["long"] = model(long).last_hidden_state
        if name == "gated":
            # f16 holds both factors of each gated product, but not the product. The test multiplies
            # the saved weights by the same number.
            for block in model.encoder.block:
                inner = block.layer[1].DenseReluDense
                inner.wi_1.weight *= 8192
            case["large"] = model(ids).last_hidden_state
            magnitudes = largest(model, ids)
            print(magnitudes)
            assert min(magnitudes.values()) > torch.finfo(torch.float16).max
            assert not model.half()(ids).last_hidden_state.isfinite().all()
        (root / f"{name}.safetensors.gz").write_bytes(gzip.compress(save(case), mtime=0))
    with torch.device("meta"):
        settings = T5Config(vocab_size=32128, feed_forward_proj="gated-gelu", **XXL)
        shapes = {n: list(p.shape) for n, p in T5EncoderModel(settings).named_parameters()}
    patterns = {}
    for name, shape in shapes.items():
        pattern = re.sub(r"^encoder\.block\.\d+\.", "encoder.block.*.", name)
        known_shape, count = patterns.get(pattern, (shape, 0))
        assert known_shape == shape
        patterns[pattern] = (shape, count + 1)
    lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(e)}" for n, e in sorted(patterns.items()))
    (root / "full_size.json").write_text(f"{{\n{lines}\n}}\n")


main()
