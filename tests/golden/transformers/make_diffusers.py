"""Tiny models of flow-matching families, and results of diffusers and peft for them.

    python make_diffusers.py FOLDER

Needs torch 2.11, diffusers 0.42 and peft 0.21. Writes the folders `sd3`, `flux`, `chroma`, `flux2`,
`zimage` and `qwen-image`, which are stored beside the folder of this script. Writes the names and
shapes of the parameters of published models to `full_size`. The stored folder `flux/vae` is read,
and not written. Weights and initial adapters are rounded to bf16; everything else is f32.
"""

import copy
import gzip
import json
import math
import re
import sys
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    ZImageTransformer2DModel,
)
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save as to_bytes
from torch.nn.functional import mse_loss

OUTPUT = Path(sys.argv[1])
COMPRESSED = ("zimage", "flux2")
"""The transformers whose weights are stored compressed; `tests.compressed` reads them."""
RANK, ALPHA, STEPS = 2, 4.0, 4
# The seeds of models and of adapters. With this seed of adapters, errors in bf16 are at most about
# half of what the tests allow. Chroma, whose heads have 8 features, has the largest errors.
SEED, ADAPTER_SEED = 20261122, 4
SD3 = {
    "sample_size": 16, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 3,
    "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 40,
    "caption_projection_dim": 32, "pooled_projection_dim": 24, "pos_embed_max_size": 12,
    "dual_attention_layers": (0, 1), "qk_norm": "rms_norm",
}  # fmt: skip
FLUX = {
    "in_channels": 64, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 40, "pooled_projection_dim": 24,
    "axes_dims_rope": (4, 6, 6), "guidance_embeds": True,
}  # fmt: skip
# The smallest Chroma for 16 channels of latents and the text width of the tests, 40.
CHROMA = {
    "in_channels": 64, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 8,
    "num_attention_heads": 1, "joint_attention_dim": 40, "axes_dims_rope": (2, 2, 4),
    "approximator_num_channels": 16, "approximator_hidden_dim": 8, "approximator_layers": 2,
}  # fmt: skip
FLUX2 = {
    "in_channels": 64, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 40, "axes_dims_rope": [4, 4, 4, 4],
    "guidance_embeds": False,
}  # fmt: skip
Z_IMAGE = {
    "in_channels": 16, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2,
    "n_kv_heads": 2, "cap_feat_dim": 40, "axes_dims": [4, 6, 6], "axes_lens": [256, 64, 64],
}  # fmt: skip
QWEN_IMAGE = {
    "in_channels": 64, "out_channels": 16, "num_layers": 2, "attention_head_dim": 8,
    "num_attention_heads": 2, "joint_attention_dim": 40, "axes_dims_rope": (2, 2, 4),
}  # fmt: skip
SD35 = {"sample_size": 128, "in_channels": 16, "out_channels": 16, "attention_head_dim": 64,
        "joint_attention_dim": 4096, "pooled_projection_dim": 2048,
        "qk_norm": "rms_norm"}  # fmt: skip
SD35_MEDIUM = SD35 | {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536,
                      "pos_embed_max_size": 384, "dual_attention_layers": range(13)}  # fmt: skip
SD35_LARGE = SD35 | {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
                     "pos_embed_max_size": 192}  # fmt: skip
KLEIN_4B = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24,
            "joint_attention_dim": 7680, "guidance_embeds": False}  # fmt: skip
KLEIN_9B = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32,
            "joint_attention_dim": 12288, "guidance_embeds": False}  # fmt: skip
# Names of layers that get adapters (peft's `target_modules`): endings of the full names. `JOINT`
# adds the layers for the text. `SINGLE` is the attention of FLUX.2's two single blocks; there,
# `to_out` has its full name, because in the other blocks this ending names a list of modules.
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
SINGLE = ["to_qkv_mlp_proj", *(f"single_transformer_blocks.{i}.attn.to_out" for i in range(2))]
JOINT = [*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
MLP = ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]
MODULATION = ["norm1.linear", "norm1_context.linear"]


def randomize(model):
    """Give every parameter random values: results differ if a parameter is not loaded."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim >= 2:
                value.normal_(0, 1 / math.sqrt(value[0].numel()))
            elif name.endswith("bias"):
                value.normal_(0, 0.05)
            else:
                value.normal_(1.0, 0.1)
            value.copy_(value.bfloat16())
    return model


def save(path, tensors, metadata=None, *, compress=False):
    """Write tensors of a case; a compressed file has `.gz` after its name."""
    copies = {name: value.detach().contiguous().clone() for name, value in tensors.items()}
    data = to_bytes(copies, metadata)
    if compress:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data, mtime=0))
    else:
        path.write_bytes(data)


def peft_name(name):
    """Return the name of a parameter in peft's files."""
    return name.replace(".default.weight", ".weight").replace(".default", "")


def adapter_case(model, call, targets, use_dora, sample, path):
    """Save the output and gradients of the model with an adapter, and the losses of AdamW's steps.

    The random numbers of a case do not depend on the cases before it. `call` returns the output of
    a model. `sample` is the input `hidden_states` of `call`; its gradient is saved, too.
    """
    torch.manual_seed(ADAPTER_SEED)
    model.requires_grad_(False)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, use_dora=use_dora)
    model = inject_adapter_in_model(config, model).train()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "magnitude" in name:
                value.mul_(1 + 0.1 * torch.randn_like(value))
            elif "lora_" in name:
                value.normal_(0, 0.1)
            value.copy_(value.bfloat16())
    values = {peft_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    stored = {f"lora.{name}": value.detach().bfloat16() for name, value in values.items()}
    sample.grad = None
    output = call(model)
    target = torch.randn_like(output)
    mse_loss(output, target).backward()
    stored |= {"output": output, "target": target, "grad_input.hidden_states": sample.grad.clone()}
    stored |= {f"grad.{name}": value.grad.clone() for name, value in values.items()}
    optimizer = torch.optim.AdamW(values.values(), lr=1e-3, weight_decay=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mse_loss(call(model), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    stored["adamw.losses"] = torch.tensor(losses)
    settings = {"rank": str(RANK), "alpha": str(ALPHA), "targets": json.dumps(targets),
                "use_dora": str(use_dora).lower()}  # fmt: skip
    save(path, stored, settings, compress=True)


def save_family(name, make, inputs, call, linear, attention):
    """Save a model, its output, and results with a DoRA on `attention` and a LoRA on `linear`.

    `make` returns a new model, and `call` returns the output of a model for `inputs`. `linear` and
    `attention` are lists of names of layers.
    """
    folder = OUTPUT / name
    folder.mkdir(parents=True, exist_ok=True)
    model = randomize(make())
    copy.deepcopy(model).bfloat16().save_pretrained(folder / "transformer")
    if name in COMPRESSED:
        weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
        compressed = weights.with_name(f"{weights.name}.gz")
        compressed.write_bytes(gzip.compress(weights.read_bytes(), mtime=0))
        weights.unlink()
    with torch.no_grad():
        save(folder / "transformer_forward.safetensors", inputs | {"output": call(model)})
    for case, targets, use_dora in [
        ("dora_attention", attention, True),
        ("lora_all_linear", linear, False),
    ]:
        other = make()
        other.load_state_dict(model.state_dict())
        path = folder / f"transformer_{case}.safetensors"
        adapter_case(other, call, targets, use_dora, inputs["hidden_states"], path)


def texts(length):
    """Return inputs for two samples: text features, pooled embeddings, timesteps from 0 to 1."""
    return {"encoder_hidden_states": torch.randn(2, length, 40),
            "pooled_projections": torch.randn(2, 24),
            "timestep": torch.tensor([0.113, 0.871])}  # fmt: skip


def positions(height, width, length, axes):
    """Return the positions of the tokens of an image and of a text for rotary embeddings.

    With 4 axes, as in FLUX.2, the text has positions on the last; with 3, all of them are 0.
    """
    image = torch.zeros(height, width, axes)
    image[..., 1] += torch.arange(height)[:, None]
    image[..., 2] += torch.arange(width)
    words = torch.zeros(length, axes)
    if axes == 4:
        words[:, 3] = torch.arange(length)
    return {"img_ids": image.reshape(-1, axes), "txt_ids": words}


def sd3_model():
    """Return the model with its table of positions rounded to bf16, the dtype in its file."""
    model = SD3Transformer2DModel(**SD3)
    model.pos_embed.pos_embed.copy_(model.pos_embed.pos_embed.bfloat16())
    return model


def sd3():
    x = torch.randn(2, 16, 16, 12).requires_grad_()
    # SD3's transformer takes timesteps from 0 to 1000.
    inputs = {"hidden_states": x} | texts(21) | {"timestep": torch.tensor([12.5, 733.0])}

    def call(model):
        return model(**inputs, return_dict=False)[0]

    linear = [*JOINT, *MLP, *MODULATION]
    save_family("sd3", sd3_model, inputs, call, linear, JOINT)


def flux():
    height, width, length = 6, 4, 19
    x = torch.randn(2, height * width, 64).requires_grad_()
    inputs = {"hidden_states": x} | texts(length) | positions(height, width, length, 3)
    inputs["guidance"] = torch.tensor([1.0, 3.5])

    def call(model):
        return model(**inputs, return_dict=False)[0]

    linear = [*JOINT, *MLP, "proj_mlp", "proj_out", "norm.linear", *MODULATION]
    save_family("flux", lambda: FluxTransformer2DModel(**FLUX), inputs, call, linear, JOINT)


def chroma():
    """Texts of 7 and 3 tokens, padded, with a boolean mask as in the original code.
    `ChromaPipeline` makes a mask of numbers instead, which attention adds to its scores."""
    height, width, length = 3, 2, 7
    x = torch.randn(2, height * width, 64).requires_grad_()
    inputs = {"hidden_states": x} | texts(length) | positions(height, width, length, 3)
    inputs.pop("pooled_projections")
    lengths = torch.tensor([7, 3])
    is_token = torch.arange(length) < lengths[:, None]
    mask = torch.cat([is_token, torch.ones(2, height * width, dtype=torch.bool)], dim=1)

    def call(model):
        return model(**inputs, attention_mask=mask, return_dict=False)[0]

    linear = ["ff.net.2", "to_add_out", "proj_mlp", "proj_out", "linear_1", "out_proj"]
    attention = ["to_q", "to_out.0", "add_k_proj"]
    stored = inputs | {"lengths": lengths.float()}
    make = lambda: ChromaTransformer2DModel(**CHROMA)  # noqa: E731
    save_family("chroma", make, stored, call, linear, attention)


def z_image():
    """An image of 24 tokens, which the model pads to 32, and captions of 37 and 19 tokens."""
    lengths = torch.tensor([37, 19])
    x = torch.randn(2, 16, 12, 8).requires_grad_()
    text, times = torch.randn(2, 37, 40), torch.tensor([0.113, 0.871])

    def call(model):
        captions = [row[:length] for row, length in zip(text, lengths, strict=True)]
        rows = model([row[:, None] for row in x], times, captions, return_dict=False)[0]
        return torch.stack(rows)[:, :, 0]

    inputs = {"hidden_states": x, "encoder_hidden_states": text, "timestep": times,
              "lengths": lengths.float()}  # fmt: skip
    # In `all_final_layer`, `adaLN_modulation.0` is an activation, not a linear layer.
    modulation = [f"{block}.adaLN_modulation.0" for block in ("layers.1", "noise_refiner.0")]
    linear = [*ATTENTION, "w1", "w2", "w3", "cap_embedder.1", *modulation]
    make = lambda: ZImageTransformer2DModel(**Z_IMAGE)  # noqa: E731
    save_family("zimage", make, inputs, call, linear, ATTENTION)


def flux2():
    height, width, length = 6, 4, 19
    x = torch.randn(2, height * width, 64).requires_grad_()
    inputs = {"hidden_states": x} | texts(length) | positions(height, width, length, 4)
    inputs.pop("pooled_projections")

    def call(model):
        return model(**inputs, return_dict=False)[0]

    attention = [*JOINT, *SINGLE]
    linear = [*attention, "linear_in", "linear_out", "double_stream_modulation_img.linear"]
    save_family("flux2", lambda: Flux2Transformer2DModel(**FLUX2), inputs, call, linear, attention)


def qwen_image():
    """An image with odd numbers of rows and columns, and texts of 9 and 4 tokens."""
    height, width, length = 5, 3, 9
    x = torch.randn(2, height * width, 64).requires_grad_()
    inputs = {"hidden_states": x} | texts(length)
    inputs.pop("pooled_projections")
    lengths = torch.tensor([9, 4])
    mask = torch.arange(length) < lengths[:, None]

    def call(model):
        shapes = [[(1, height, width)]] * 2
        return model(**inputs, encoder_hidden_states_mask=mask, img_shapes=shapes,
                     return_dict=False)[0]  # fmt: skip

    # diffusers computes the positions from `img_shapes`; store them, too. Rows have positions -3 to
    # 1 and columns -2 to 0. The text begins at half of the larger side, rounded down.
    rows, columns = torch.arange(-3.0, 2), torch.arange(-2.0, 1)
    image = torch.zeros(height, width, 3)
    image[..., 1], image[..., 2] = rows[:, None], columns
    words = 2.0 + torch.arange(length)
    stored = inputs | {"img_ids": image.reshape(-1, 3), "txt_ids": words[:, None].repeat(1, 3),
                       "lengths": lengths.float()}  # fmt: skip
    # The model does not use the text that the last block computes: adapt these layers only in the
    # first block.
    text_layers = [f"transformer_blocks.0.{name}" for name in ("attn.to_add_out", "txt_mlp.net.2")]
    linear = ["add_q_proj", "img_mlp.net.0.proj", "img_mod.1", "txt_mod.1", *text_layers]
    make = lambda: QwenImageTransformer2DModel(**QWEN_IMAGE)  # noqa: E731
    save_family("qwen-image", make, stored, call, linear, ["to_q", "to_out.0", "add_k_proj"])


def qwen_autoencoder():
    """The autoencoder of Qwen-Image on one frame, decoded whole and in tiles."""
    means, deviations = torch.randn(16).tolist(), (0.5 + torch.rand(16)).tolist()
    sizes = {"base_dim": 2, "z_dim": 16, "dim_mult": [1, 2], "num_res_blocks": 1,
             "temperal_downsample": [True], "latents_mean": means,
             "latents_std": deviations}  # fmt: skip
    model = randomize(AutoencoderKLQwenImage(**sizes)).eval()
    # With this factor, some decoded values are beyond 1, and are clipped.
    model.decoder.norm_out.gamma.data.mul_(8)
    folder = OUTPUT / "qwen-image"
    copy.deepcopy(model).bfloat16().save_pretrained(folder / "vae")
    image, latent = torch.randn(1, 3, 18, 12).clamp(-1, 1), torch.randn(1, 16, 9, 6)
    with torch.no_grad():
        found = model.encode(image[:, :, None]).latent_dist
        decoded = model.decode(latent[:, :, None], return_dict=False)[0]
        # Tiles of 16x16 px, one every 12 px.
        model.enable_tiling(16, 16, 12, 12)
        # diffusers clips images that it decodes whole, but not those that it decodes in tiles.
        tiled = model.decode(latent[:, :, None], return_dict=False)[0].clamp(-1, 1)
    stored = {"image": image, "mean": found.mean[:, :, 0], "logvar": found.logvar[:, :, 0],
              "latent": latent, "decoded": decoded[:, :, 0],
              "tiled_decoded": tiled[:, :, 0]}  # fmt: skip
    save(folder / "vae_forward.safetensors", stored, compress=True)


def flux_autoencoder():
    """Results of the stored autoencoder of Flux, which has no quant convs.

    The image has odd sides.
    """
    stored = Path(__file__).parents[1] / "flux" / "vae"
    model = AutoencoderKL.from_pretrained(stored, torch_dtype=torch.float32).eval()
    pixels, latent = torch.randint(0, 256, (1, 3, 7, 5)), torch.randn(1, 16, 3, 2)
    with torch.no_grad():
        found = model.encode(pixels / 127.5 - 1).latent_dist
        decoded = model.decode(latent, return_dict=False)[0]
    case = {"pixels": pixels.to(torch.uint8), "mean": found.mean, "logvar": found.logvar,
            "latent": latent, "decoded": decoded}  # fmt: skip
    save(OUTPUT / "flux" / "vae_forward.safetensors", case)


def flux2_autoencoder():
    """The autoencoder of FLUX.2, whose latents have other means and variances than 0 and 1."""
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2,
             "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 8, "layers_per_block": 1,
             "latent_channels": 32}  # fmt: skip
    model = randomize(AutoencoderKLFlux2(**kinds, **sizes)).eval()
    model.bn.running_mean.normal_(0, 0.5)
    model.bn.running_var.uniform_(0.5, 2)
    for statistic in (model.bn.running_mean, model.bn.running_var):
        statistic.copy_(statistic.bfloat16())
    folder = OUTPUT / "flux2"
    copy.deepcopy(model).bfloat16().save_pretrained(folder / "vae")
    image, latent = torch.randn(2, 3, 24, 16).clamp(-1, 1), torch.randn(2, 32, 12, 8)
    with torch.no_grad():
        found = model.encode(image).latent_dist
        decoded = model.decode(latent, return_dict=False)[0]
    stored = {"image": image, "mean": found.mean, "logvar": found.logvar, "latent": latent,
              "decoded": decoded}  # fmt: skip
    save(folder / "vae_forward.safetensors", stored, compress=True)


def folded(shapes):
    """JSON in which one line stands for the same parameter of several blocks.

    The parameters of a line have the same shape, and their names differ only in a block's number.
    A line is [name, shape, numbers]: the name has `*` in place of the block's number, and `numbers`
    lists the blocks. A name without such a number has no `*`, and its list of numbers is empty.
    """
    lists = {}
    for name, shape in shapes.items():
        numbers = list(re.finditer(r"(?<=blocks\.)\d+|(?<=layers\.)\d+", name))
        last = numbers[-1] if numbers else None
        pattern = name if last is None else f"{name[: last.start()]}*{name[last.end() :]}"
        blocks = [] if last is None else [int(last.group())]
        lists.setdefault((pattern, tuple(shape)), []).extend(blocks)
    lines = [
        json.dumps([pattern, list(shape), sorted(numbers)], separators=(",", ":"))
        for (pattern, shape), numbers in sorted(lists.items())
    ]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def full_size():
    """Write the names and shapes of the parameters of published models.

    On the device "meta", the parameters take no memory.
    """
    with torch.device("meta"):
        models = {
            "sd35_medium": SD3Transformer2DModel(**SD35_MEDIUM),
            "sd35_large": SD3Transformer2DModel(**SD35_LARGE),
            "flux_dev": FluxTransformer2DModel(guidance_embeds=True),
            "zimage": ZImageTransformer2DModel(),
            "flux2_klein_4b": Flux2Transformer2DModel(**KLEIN_4B),
            "flux2_klein_9b": Flux2Transformer2DModel(**KLEIN_9B),
            "qwen_image": QwenImageTransformer2DModel(),
        }
    folder = OUTPUT / "full_size"
    folder.mkdir(exist_ok=True)
    # Chroma has all parameters of Flux except the modulation. Store only those that Flux lacks.
    flux = models["flux_dev"].state_dict()
    with torch.device("meta"):
        chroma = ChromaTransformer2DModel().state_dict()
    shared = {key for key in flux if "norm.linear" not in key and "norm1" not in key}
    shared = {key for key in shared if not key.startswith(("time_text_embed.", "norm_out."))}
    assert shared == {key for key in chroma if not key.startswith("distilled_guidance_layer.")}
    assert all(chroma[key].shape == flux[key].shape for key in shared)
    only_chroma = {key: list(chroma[key].shape) for key in sorted(chroma.keys() - shared)}
    (folder / "chroma.json").write_text(folded(only_chroma))
    for name, model in models.items():
        shapes = {key: list(value.shape) for key, value in sorted(model.state_dict().items())}
        (folder / f"{name}.json").write_text(folded(shapes))


if __name__ == "__main__":
    torch.set_num_threads(2)
    for make in (
        sd3, flux, flux_autoencoder, chroma, z_image, flux2, flux2_autoencoder, qwen_image,
        qwen_autoencoder,
    ):  # fmt: skip
        torch.manual_seed(SEED)
        make()
    full_size()
