"""The names of transformers' parameters in original files, with diffusers' names for them.

    python make_names.py FILE

Needs torch 2.11 and diffusers 0.42. Writes the list `original_names.txt.gz`, which is stored beside
this script. It has all parameters of the tiny models in the folders beside that of the script.
diffusers' functions for single files (`from_single_file`) convert tensors with the names in
ORIGINAL, and the numbers in the results show where each row comes from.

A line of the list has the name of a layer (or of a parameter that belongs to no layer) in original
files, then diffusers' names of the layers whose rows follow one another in it. `4*` says that a
layer has four times as many rows as the other layers of the line. `swapped` says that diffusers
exchanges the halves of the rows. A `=` stands for the original name. The header of a section has
the family and the blocks that its lines are about: the beginning of their names in original files
and, after `=`, in diffusers if it is another one. Without blocks, the names are whole.
"""

import gzip
import re
import sys
from pathlib import Path

import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import load

GOLDEN = Path(__file__).parents[1]
# The number of rows of every tensor. Flux's function expects this number for `linear1`.
ROWS = 7 * 3072
BOTH = [f"{stream}_{name}" for stream in ("img", "txt") for name in (
    "attn.qkv", "attn.norm.query_norm.scale", "attn.norm.key_norm.scale", "attn.proj", "mlp.0",
    "mlp.2")]  # fmt: skip
SINGLE = ["linear1", "norm.query_norm.scale", "norm.key_norm.scale", "linear2"]
ENDS = ["img_in", "txt_in", "time_in.in_layer", "time_in.out_layer", "final_layer.linear",
        "final_layer.adaLN_modulation.1"]  # fmt: skip
Z_IMAGE_BLOCK = [
    "attention.qkv", "attention.q_norm", "attention.k_norm", "attention.out", "attention_norm1",
    "attention_norm2", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "ffn_norm1",
    "ffn_norm2",
]  # fmt: skip
SD3_BLOCK = [
    *(f"{attention}.{name}" for name in ("qkv", "ln_q", "ln_k", "proj")
      for attention in ("x_block.attn", "context_block.attn", "x_block.attn2")),
    *(f"{stream}_block.{name}" for name in ("mlp.fc1", "mlp.fc2", "adaLN_modulation.1")
      for stream in ("x", "context")),
]  # fmt: skip
# For each family, the name of its function, and the layers in original files by the beginning of
# their names. diffusers' functions ignore the layers that a block does not have.
ORIGINAL = {
    "sd3": ("sd3", {
        "": ["pos_embed", "x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2",
             "y_embedder.mlp.0", "y_embedder.mlp.2", "context_embedder", *ENDS[-2:]],
        "joint_blocks.0.": SD3_BLOCK, "joint_blocks.1.": SD3_BLOCK,
        "joint_blocks.2.": [name for name in SD3_BLOCK if "attn2" not in name],
    }),
    "flux": ("flux", {
        "": [*ENDS, "vector_in.in_layer", "vector_in.out_layer", "guidance_in.in_layer",
             "guidance_in.out_layer"],
        **{f"double_blocks.{i}.": [*BOTH, "img_mod.lin", "txt_mod.lin"] for i in range(2)},
        **{f"single_blocks.{i}.": [*SINGLE, "modulation.lin"] for i in range(2)},
    }),
    "flux2": ("flux2", {
        "": [*ENDS, "double_stream_modulation_img.lin", "double_stream_modulation_txt.lin",
             "single_stream_modulation.lin"],
        **{f"double_blocks.{i}.": BOTH for i in range(2)},
        **{f"single_blocks.{i}.": SINGLE for i in range(2)},
    }),
    "zimage": ("z_image", {
        "": ["x_embedder", "t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.0",
             "cap_embedder.1", "x_pad_token", "cap_pad_token", *ENDS[-2:]],
        **{f"{block}.": [*Z_IMAGE_BLOCK, "adaLN_modulation.0"]
           for block in ("layers.0", "layers.1", "noise_refiner.0")},
        "context_refiner.0.": Z_IMAGE_BLOCK,
    }),
}  # fmt: skip
# Of a layer, a file has these parameters. The other names are parameters themselves.
LAYER_ENDS = (".weight", ".bias")
PARAMETERS = ("pos_embed", "x_pad_token", "cap_pad_token")


def part_of(values):
    """Return the first row and the number of rows in the original tensor, and if it is swapped."""
    first, count = int(values.min()), len(values)
    rows = torch.arange(first, first + count)
    swapped = not torch.equal(values, rows)
    if swapped:
        assert torch.equal(values, rows.roll(count // 2))
    return first % ROWS, count, swapped


def sections_of(family):
    """Return the lines of the list by the blocks that they are about."""
    function, listed = ORIGINAL[family]
    path = GOLDEN / family / "transformer" / "diffusion_pytorch_model.safetensors"
    compressed = path.with_name(f"{path.name}.gz")
    data = gzip.decompress(compressed.read_bytes()) if compressed.exists() else path.read_bytes()
    parameters = set(load(data))
    # The original parameters: block, layer, end of the name.
    originals = [
        (block, layer, end)
        for block, layers in listed.items()
        for layer in layers
        for end in (("",) if layer in PARAMETERS or layer.endswith("scale") else LAYER_ENDS)
    ]
    tensors = {"".join(key): torch.arange(ROWS) + i * ROWS for i, key in enumerate(originals)}
    name = f"convert_{function}_transformer_checkpoint_to_diffusers"
    converted = getattr(single_file_utils, name)(tensors)
    assert parameters <= converted.keys()
    # What diffusers' parameters take from each original parameter.
    parts = {key: [] for key in originals}
    for name in parameters:
        key = originals[int(converted[name].min()) // ROWS]
        parts[key].append((*part_of(converted[name]), name.removesuffix(key[2])))
    blocks_of = {}
    for (block, layer, _), found in parts.items():
        if not found:
            continue  # The model has no such parameter.
        found.sort()
        counts = [count for _, count, _, _ in found]
        assert sum(counts) == ROWS
        # The block in diffusers: the name up to the first number.
        own = re.match(r"[a-z_]+\.\d+\.", found[0][3])[0] if block else ""
        words = [layer]
        for _, count, swapped, name in found:
            assert name.startswith(own)
            times = "" if count == min(counts) else f"{count // min(counts)}*"
            inside = name.removeprefix(own)
            words.append(times + ("=" if inside == layer else inside))
            words += ["swapped"] * swapped
        header = block[:-1] if block == own else f"{block[:-1]}={own[:-1]}"
        # The lines of a weight and of its bias are the same.
        blocks_of.setdefault(" ".join(words), {})[header] = None
    sections = {}
    for line, blocks in blocks_of.items():
        sections.setdefault(" ".join([family, *filter(None, blocks)]), []).append(line)
    return sections


if __name__ == "__main__":
    found = [
        "\n".join([f"[{header}]", *lines])
        for family in ORIGINAL
        for header, lines in sections_of(family).items()
    ]
    text = "\n".join(found) + "\n"
    Path(sys.argv[1]).write_bytes(gzip.compress(text.encode(), mtime=0))
