"""Applies adapter files to weights as ComfyUI does, in numpy.

ComfyUI's models have the original names, and one matrix for queries, keys and values. ComfyUI's map
of names (`lora.py`) lists the original names with the prefix `diffusion_model.` and, with
underscores for dots, with the prefix `lora_unet_`. It lists diffusers' names, each of which stands
for some of the rows of an original matrix, with the prefix `transformer.` and, with underscores,
with the prefixes `lycoris_` and `lora_transformer_`. ComfyUI's package `weight_adapter` has the
formulas. This file follows ComfyUI at commit ec93dcac. It does not use the tables of
trainable_candle.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

Arrays = Mapping[str, np.ndarray]


class Slice(NamedTuple):
    """The rows that a layer in diffusers has in the original matrix `name`.

    The matrix's rows are divided into `of` equal ranges. The layer has `count` ranges, beginning
    with range `first` (from 0). If `swapped`, the matrix has the second half of the layer's rows
    before the first half: of diffusers' layer `norm_out`, the first half computes scales and the
    second half shifts; originally, shifts come first.
    """

    name: str
    first: int = 0
    count: int = 1
    of: int = 1
    swapped: bool = False


def _qkv(names: tuple[str, str, str], original: str, of: int = 3) -> dict[str, Slice]:
    """The slices of queries, keys and values: the first three of the matrix's `of` ranges."""
    return {name: Slice(original, first=i, of=of) for i, name in enumerate(names)}


def _attention(
    prefix: str, names: tuple[str, str, str, str], qkv: str, out: str
) -> dict[str, Slice]:
    """The slices of an attention.

    In diffusers, its layers have `prefix` and then `names`; originally, they are the matrices `qkv`
    and `out`.
    """
    q, k, v = (f"{prefix}{name}" for name in names[:3])
    return {**_qkv((q, k, v), qkv), f"{prefix}{names[3]}": Slice(out)}


# The layers of an attention in diffusers: queries, keys, values, output. An attention over image
# and text has a second set of layers, ADDED, for the text.
OWN = ("to_q", "to_k", "to_v", "to_out.0")
ADDED = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


def flux_slices(blocks: int, singles: int) -> dict[str, Slice]:
    """The rows of Flux's original matrices, by the name of the linear layer in diffusers."""
    found = {
        "x_embedder": Slice("img_in"),
        "context_embedder": Slice("txt_in"),
        "proj_out": Slice("final_layer.linear"),
        "norm_out.linear": Slice("final_layer.adaLN_modulation.1", swapped=True),
    }
    for diffusers, original in (("timestep", "time"), ("guidance", "guidance"), ("text", "vector")):
        for i, layer in ((1, "in_layer"), (2, "out_layer")):
            name = f"time_text_embed.{diffusers}_embedder.linear_{i}"
            found[name] = Slice(f"{original}_in.{layer}")
    for i in range(blocks):
        # `a` begins the block's names in diffusers, `b` its original names.
        a, b = f"transformer_blocks.{i}.", f"double_blocks.{i}."
        found |= _attention(f"{a}attn.", OWN, f"{b}img_attn.qkv", f"{b}img_attn.proj")
        found |= _attention(f"{a}attn.", ADDED, f"{b}txt_attn.qkv", f"{b}txt_attn.proj")
        for norm, stream, ff in (("norm1", "img", "ff"), ("norm1_context", "txt", "ff_context")):
            found[f"{a}{norm}.linear"] = Slice(f"{b}{stream}_mod.lin")
            found[f"{a}{ff}.net.0.proj"] = Slice(f"{b}{stream}_mlp.0")
            found[f"{a}{ff}.net.2"] = Slice(f"{b}{stream}_mlp.2")
    for i in range(singles):
        a, b = f"single_transformer_blocks.{i}.", f"single_blocks.{i}."
        # `linear1` has seven equal ranges: queries, keys, values, and four ranges of the MLP.
        found |= _qkv((f"{a}attn.to_q", f"{a}attn.to_k", f"{a}attn.to_v"), f"{b}linear1", of=7)
        found[f"{a}proj_mlp"] = Slice(f"{b}linear1", first=3, count=4, of=7)
        found[f"{a}proj_out"] = Slice(f"{b}linear2")
        found[f"{a}norm.linear"] = Slice(f"{b}modulation.lin")
    return found


def without_modulation(flux: dict[str, Slice], layers: int) -> dict[str, Slice]:
    """Like `flux_slices`, for Chroma, from the result for Flux.

    Chroma lacks Flux's modulation layers. In their place it has one network that computes all
    modulation (`distilled_guidance_layer`, the approximator), with `layers` blocks.
    """
    modulation = ("time_text_embed.", "norm_out.")
    found = {
        layer: place
        for layer, place in flux.items()
        if not layer.startswith(modulation) and "norm.linear" not in layer and "norm1" not in layer
    }
    name = "distilled_guidance_layer"
    for end in ("in_proj", "out_proj"):
        found[f"{name}.{end}"] = Slice(f"{name}.{end}")
    for i in range(layers):
        for diffusers, original in (("linear_1", "in_layer"), ("linear_2", "out_layer")):
            found[f"{name}.layers.{i}.{diffusers}"] = Slice(f"{name}.layers.{i}.{original}")
    return found


def sd3_slices(blocks: int, dual: int) -> dict[str, Slice]:
    """Like `flux_slices`, for SD3.5, whose first `dual` blocks have two attentions."""
    found = {
        "context_embedder": Slice("context_embedder"),
        "proj_out": Slice("final_layer.linear"),
        "norm_out.linear": Slice("final_layer.adaLN_modulation.1", swapped=True),
    }
    for diffusers, original in (("timestep", "t"), ("text", "y")):
        for i, layer in ((1, 0), (2, 2)):
            name = f"time_text_embed.{diffusers}_embedder.linear_{i}"
            found[name] = Slice(f"{original}_embedder.mlp.{layer}")
    for i in range(blocks):
        # `a` begins the block's names in diffusers; `x` and `c` begin the original names of its
        # layers for the image and for the text.
        a, x, c = (
            f"transformer_blocks.{i}.",
            f"joint_blocks.{i}.x_block.",
            f"joint_blocks.{i}.context_block.",
        )
        # In the last block, `norm1_context` computes only scales and shifts, as `norm_out` does.
        # The block also lacks some layers for the text; `originals` ignores layers without weights.
        last = i == blocks - 1
        found |= _attention(f"{a}attn.", OWN, f"{x}attn.qkv", f"{x}attn.proj")
        found |= _attention(f"{a}attn.", ADDED, f"{c}attn.qkv", f"{c}attn.proj")
        if i < dual:
            found |= _attention(f"{a}attn2.", OWN, f"{x}attn2.qkv", f"{x}attn2.proj")
        found[f"{a}norm1.linear"] = Slice(f"{x}adaLN_modulation.1")
        found[f"{a}norm1_context.linear"] = Slice(f"{c}adaLN_modulation.1", swapped=last)
        for ff, block in (("ff", x), ("ff_context", c)):
            found[f"{a}{ff}.net.0.proj"] = Slice(f"{block}mlp.fc1")
            found[f"{a}{ff}.net.2"] = Slice(f"{block}mlp.fc2")
    return found


def flux2_slices(blocks: int, singles: int) -> dict[str, Slice]:
    """Like `flux_slices`, for FLUX.2; diffusers does not split the matrices of single blocks."""
    found = {
        "x_embedder": Slice("img_in"),
        "context_embedder": Slice("txt_in"),
        "proj_out": Slice("final_layer.linear"),
        "norm_out.linear": Slice("final_layer.adaLN_modulation.1", swapped=True),
    }
    for i, layer in ((1, "in_layer"), (2, "out_layer")):
        found[f"time_guidance_embed.timestep_embedder.linear_{i}"] = Slice(f"time_in.{layer}")
    for name in ("double_stream_modulation_img", "double_stream_modulation_txt"):
        found[f"{name}.linear"] = Slice(f"{name}.lin")
    found["single_stream_modulation.linear"] = Slice("single_stream_modulation.lin")
    for i in range(blocks):
        # `a` begins the block's names in diffusers, `b` its original names.
        a, b = f"transformer_blocks.{i}.", f"double_blocks.{i}."
        found |= _attention(f"{a}attn.", OWN, f"{b}img_attn.qkv", f"{b}img_attn.proj")
        found |= _attention(f"{a}attn.", ADDED, f"{b}txt_attn.qkv", f"{b}txt_attn.proj")
        for stream, ff in (("img", "ff"), ("txt", "ff_context")):
            found[f"{a}{ff}.linear_in"] = Slice(f"{b}{stream}_mlp.0")
            found[f"{a}{ff}.linear_out"] = Slice(f"{b}{stream}_mlp.2")
    for i in range(singles):
        a, b = f"single_transformer_blocks.{i}.attn.", f"single_blocks.{i}."
        found[f"{a}to_qkv_mlp_proj"] = Slice(f"{b}linear1")
        found[f"{a}to_out"] = Slice(f"{b}linear2")
    return found


def z_image_slices(layers: int, refiners: int) -> dict[str, Slice]:
    """Like `flux_slices`, for Z-Image."""
    # In diffusers, "2-1" stands for patches of 2x2 latent pixels and 1 frame.
    found = {
        "all_x_embedder.2-1": Slice("x_embedder"),
        "all_final_layer.2-1.linear": Slice("final_layer.linear"),
        "all_final_layer.2-1.adaLN_modulation.1": Slice("final_layer.adaLN_modulation.1"),
    }
    counts = {"layers": layers, "noise_refiner": refiners, "context_refiner": refiners}
    for blocks, count in counts.items():
        for i in range(count):
            a = f"{blocks}.{i}."
            found |= _attention(f"{a}attention.", OWN, f"{a}attention.qkv", f"{a}attention.out")
            # Layers with the same name in diffusers and originally.
            alike = [f"{a}feed_forward.w{number}" for number in (1, 2, 3)]
            if blocks != "context_refiner":
                alike.append(f"{a}adaLN_modulation.0")
            found |= {name: Slice(name) for name in alike}
    for name in ("cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2"):
        found[name] = Slice(name)
    return found


# The beginnings of diffusers' names of layers that ComfyUI's map lists only by the original names.
_NATIVE = ("double_stream_modulation_", "single_stream_modulation.", "time_guidance_embed.",
           "distilled_guidance_layer.")  # fmt: skip


def originals(weights: Arrays, slices: Mapping[str, Slice]) -> dict[str, np.ndarray]:
    """Join diffusers' weights into the original matrices."""
    # By original name: the rows of its layers, by the number of the layer's first range.
    rows: dict[str, dict[int, np.ndarray]] = {}
    for layer, place in slices.items():
        if (weight := weights.get(f"{layer}.weight")) is not None:
            value = np.roll(weight, len(weight) // 2, axis=0) if place.swapped else weight
            rows.setdefault(place.name, {})[place.first] = value
    return {name: np.concatenate([parts[i] for i in sorted(parts)]) for name, parts in rows.items()}


def applied(
    tensors: Arrays, matrices: Arrays, slices: Mapping[str, Slice]
) -> dict[str, np.ndarray]:
    """The original matrices after ComfyUI has loaded a file at strength 1.

    Raises:
        StopIteration: a key is not in ComfyUI's map of names; ComfyUI logs and ignores such keys.
    """
    modules: dict[str, Slice] = {}
    for layer, place in slices.items():
        if layer.startswith(_NATIVE):
            continue
        modules[f"transformer.{layer}"] = place
        flat = layer.replace(".", "_")
        modules[f"lycoris_{flat}"] = modules[f"lora_transformer_{flat}"] = place
    for name in matrices:
        modules[f"diffusion_model.{name}"] = Slice(name)
        modules[f"lora_unet_{name.replace('.', '_')}"] = Slice(name)
    adapters: dict[str, dict[str, np.ndarray]] = {}
    for key, value in tensors.items():
        # The longest name of a module that begins the key.
        module = next(m for m in sorted(modules, key=len, reverse=True) if key.startswith(f"{m}."))
        adapters.setdefault(module, {})[key.removeprefix(f"{module}.")] = value
    result = {name: np.array(value) for name, value in matrices.items()}
    for module, values in adapters.items():
        place = modules[module]
        whole = result[place.name]
        height = len(whole) // place.of
        rows = slice(place.first * height, (place.first + place.count) * height)
        whole[rows] = _patched(whole[rows], values, swapped=place.swapped)
    return result


def _patched(weight: np.ndarray, values: Arrays, *, swapped: bool) -> np.ndarray:
    """Apply one module's adapter to the rows of its layer.

    Args:
        weight: the layer's rows in the original matrix.
        values: the module's tensors by their names without the module's prefix.
        swapped: whether the halves of the rows are swapped, as in `Slice`.
    """
    values = dict(values)
    alpha = values.pop("alpha", None)
    magnitude = values.pop("dora_scale", None)
    # peft's names of the factors, and ComfyUI's.
    known = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}
    values = {known.get(name, name): value for name, value in values.items()}
    rank = None
    if "oft_blocks" in values:
        # An alpha of OFT limits the rotation and scales nothing.
        blocks = values.pop("oft_blocks").astype(np.float64)
        q = blocks - blocks.transpose(0, 2, 1)
        assert np.linalg.norm(q) < alpha.item(), "ComfyUI would limit the rotation"
        eye = np.eye(q.shape[1])
        rotation = (eye + q) @ np.linalg.inv(eye - q)
        rows = np.roll(weight, -(len(weight) // 2), axis=0) if swapped else weight
        # Each block rotates n of the layer's outputs: rows are (k blocks, n, inputs).
        rows = rows.reshape(*blocks.shape[:2], -1)
        delta = (np.einsum("knm,knc->kmc", rotation, rows) - rows).reshape(weight.shape)
        alpha = None
    elif "lora_down.weight" in values:
        down, up = values.pop("lora_down.weight"), values.pop("lora_up.weight")
        delta, rank = up @ down, len(down)
    elif "hada_w1_a" in values:
        downs = [values.pop(f"hada_w{i}_b") for i in (1, 2)]
        pairs = [values.pop(f"hada_w{i}_a") @ down for i, down in enumerate(downs, 1)]
        delta, rank = pairs[0] * pairs[1], len(downs[0])
    else:
        factors = []
        for name in ("lokr_w1", "lokr_w2"):
            if name in values:
                factors.append(values.pop(name))
            else:
                b = values.pop(f"{name}_b")
                factors.append(values.pop(f"{name}_a") @ b)
                rank = len(b)
        delta = np.kron(*factors)
    assert not values, f"ComfyUI leaves out {sorted(values)}"
    delta *= 1.0 if alpha is None or rank is None else alpha.item() / rank
    if swapped:
        delta = np.roll(delta, len(delta) // 2, axis=0)
    if magnitude is None:
        return weight + delta
    # As in ComfyUI: if each output has a magnitude, the norms are those of the weight without the
    # change; if each input has one, they are those of the changed weight.
    if len(magnitude) == len(weight):
        norm = np.linalg.norm(weight, axis=1, keepdims=True)
    else:
        norm = np.linalg.norm(weight + delta, axis=0, keepdims=True)
    return (weight + delta) * (magnitude / norm)
