"""Make the files beside this one: a tiny SDXL with random weights, inputs, and the results of
diffusers, transformers and peft.

Run with torch 2.11, diffusers 0.42.1, transformers 5.23, peft 0.21 and safetensors installed:
python make_diffusers.py

This script does not write two of the files. `original_names.json.gz` maps each key of a checkpoint
in Stability AI's format to the parameters that it holds. For each parameter, there is a list of its
folder, its name and its form: "plain", "transposed", "pointwise" (a linear layer as a 1 x 1
convolution), or "rows N" (the key stacks three parameters, and N is 0, 1 or 2). The map fits models
with as many layers as this SDXL. It comes from a comparison of a model with the output of
diffusers' convert_diffusers_to_original_sdxl.py. `unet_shapes.json` has the names and shapes of the
parameters of the full-size SDXL's UNet in diffusers, in the format of `folded` in
tests/golden/transformers/make_diffusers.py.
"""

import copy
import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save as to_bytes
from torch.nn import Module
from torch.nn.functional import mse_loss
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

HERE = Path(__file__).parent
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
LINEAR = [*ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"]
# The number of tokens, the width of the pooled text features, and the width of the other text
# features, which is the sum of the hidden sizes of the text encoders: 8 + 12.
VOCABULARY, POOLED, CONTEXT = 200, 12, 20
# The seeds of models and of adapters. With this seed of adapters, errors in bf16 are at most about
# half of what the tests allow.
SEED, ADAPTER_SEED = 20261121, 3


def randomized(model: Module) -> Module:
    """Give every parameter values that have an effect, and that bf16 files hold exactly."""
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.ndim >= 2:
                parameter.normal_(0, 1 / math.sqrt(parameter[0].numel()))
            elif name.endswith("bias"):
                parameter.normal_(0, 0.05)
            else:
                parameter.normal_(1, 0.1)
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def store(model: Module, folder: str) -> None:
    """Write the model in bf16, in the format of its library."""
    copy.deepcopy(model).bfloat16().save_pretrained(HERE / folder)


def save(
    name: str,
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
    *,
    compress: bool = False,
) -> None:
    """Write tensors of a case."""
    tensors = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    data = to_bytes(tensors, metadata)
    path = HERE / f"{name}.safetensors{'.gz' if compress else ''}"
    path.write_bytes(gzip.compress(data, mtime=0) if compress else data)


def adapter_case(
    name: str,
    model: Module,
    call: Callable[[Module], torch.Tensor],
    x: torch.Tensor,
    targets: list[str],
    **options: bool,
) -> None:
    """Save results with a peft adapter: an output, gradients of its loss, the losses of four steps.

    Args:
        name: the name of the case.
        model: the model, which gets the adapter.
        call: computes the model's output for the input `x` and further inputs.
        x: the input whose gradient is saved.
        targets: the names of the layers that get an adapter.
        options: further arguments of `LoraConfig`.
    """
    torch.manual_seed(ADAPTER_SEED)
    model.requires_grad_(False)
    config = LoraConfig(r=2, lora_alpha=3, target_modules=targets, **options)
    model = inject_adapter_in_model(config, model).train()
    parameters = {}
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            # peft's name of the adapter, "default", is no part of the keys in files.
            parameters[key.replace(".default", "")] = parameter
            with torch.no_grad():
                if "magnitude" in key:
                    parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
                else:
                    parameter.normal_(0, 0.1)
                parameter.copy_(parameter.bfloat16())
    case = {f"lora.{key}": value.detach().bfloat16() for key, value in parameters.items()}
    x.grad = None
    output = call(model)
    target = torch.randn_like(output)
    mse_loss(output, target).backward()
    case |= {"output": output, "target": target, "grad_input.sample": x.grad.clone()}
    case |= {f"grad.{key}": value.grad.clone() for key, value in parameters.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = mse_loss(call(model), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    case["adamw.losses"] = torch.tensor(losses)
    metadata = {"targets": json.dumps(targets)} | {
        key: json.dumps(value) for key, value in options.items()
    }
    save(f"unet_{name}", case, metadata, compress=True)


def unet() -> None:
    """Save the UNet and adapters on it.

    The latents of 10 x 7 are halved twice, to 5 x 4 and 3 x 2. Up-sampling must restore the odd
    sizes.
    """
    sizes = {
        "block_out_channels": (8, 8, 24),
        "norm_num_groups": 4,
        "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": [1, 1, 2],
        "attention_head_dim": [1, 2, 3],
        "cross_attention_dim": CONTEXT,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 6,
        # Six time ids of six features each, and the pooled text features.
        "projection_class_embeddings_input_dim": 6 * 6 + POOLED,
    }
    model = randomized(UNet2DConditionModel(sample_size=16, **sizes))
    store(model, "unet")
    x = torch.randn(3, 4, 10, 7).requires_grad_()
    inputs = {
        "sample": x,
        "timestep": torch.tensor([3, 501, 980]),
        "encoder_hidden_states": torch.randn(3, 9, CONTEXT),
        "text_embeds": torch.randn(3, POOLED),
        # Original height and width, top and left of the crop, target height and width.
        "time_ids": torch.tensor(
            [
                [1024.0, 768, 0, 16, 1024, 768],
                [640, 480, 8, 0, 512, 512],
                [512, 512, 0, 0, 512, 512],
            ]
        ),
    }

    def call(model: Module) -> torch.Tensor:
        added = {"text_embeds": inputs["text_embeds"], "time_ids": inputs["time_ids"]}
        return model(
            x, inputs["timestep"], inputs["encoder_hidden_states"], added_cond_kwargs=added
        ).sample

    save("unet_forward", inputs | {"output": call(model)})
    adapter_case("dora_attention", copy.deepcopy(model), call, x, ATTENTION, use_dora=True)
    adapter_case("lora_all_linear", copy.deepcopy(model), call, x, LINEAR)


def autoencoder() -> None:
    """Save the autoencoder, the moments of images and decoded latents.

    The means and the decoded latents are also saved as computed in tiles.
    """
    model = randomized(
        AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 16),
            layers_per_block=2,
            norm_num_groups=4,
            latent_channels=4,
            sample_size=16,
            scaling_factor=0.13025,
        )
    )
    store(model, "vae")
    image, latent = torch.randn(2, 3, 23, 36).clamp(-1, 1), torch.randn(2, 4, 10, 17)
    posterior = model.encode(image).latent_dist
    case = {
        "image": image,
        "mean": posterior.mean,
        "logvar": posterior.logvar,
        "latent": latent,
        "decoded": model.decode(latent).sample,
    }
    model.enable_tiling()  # tiles of `sample_size` px, so that the image has several
    case |= {
        "tiled_mean": model.encode(image).latent_dist.mean,
        "tiled_decoded": model.decode(latent).sample,
    }
    save("vae_forward", case, compress=True)


def text_encoders() -> None:
    """Save both encoders. The first has `eos_token_id` 2, as the configurations of old files have.

    With this id, transformers takes the largest id of a text as its end token: VOCABULARY - 1.
    """
    # Three texts of 17 tokens. The end token replaces the tokens from positions 5, 9 and 16 on.
    ids = torch.randint(3, VOCABULARY - 2, (3, 17))
    ids[0, 5:], ids[1, 9:], ids[2, -1] = VOCABULARY - 1, VOCABULARY - 1, VOCABULARY - 1
    common = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 3,
        "max_position_embeddings": 17,
        "bos_token_id": VOCABULARY - 2,
        "pad_token_id": VOCABULARY - 1,
    }
    kinds = {
        "text_encoder": (
            CLIPTextModel,
            {
                "hidden_act": "quick_gelu",
                "hidden_size": 8,
                "intermediate_size": 20,
                "num_attention_heads": 2,
                "eos_token_id": 2,
            },
        ),
        "text_encoder_2": (
            CLIPTextModelWithProjection,
            {
                "hidden_act": "gelu",
                "hidden_size": 12,
                "intermediate_size": 30,
                "num_attention_heads": 3,
                "projection_dim": POOLED,
                "eos_token_id": 7,
            },
        ),
    }
    for name, (kind, sizes) in kinds.items():
        model = randomized(kind(CLIPTextConfig(**common, **sizes)))
        store(model, name)
        if name == "text_encoder_2":
            # The end token is 7. The first text has two of them, the second none, the third one.
            ids = ids.clone()
            ids[ids == 7] = 8
            ids[0, 4], ids[0, 8], ids[2, 11] = 7, 7, 7
        output = model(ids, output_hidden_states=True)
        pooled = output.text_embeds if name == "text_encoder_2" else output.pooler_output
        states = {f"hidden_states.{i}": state for i, state in enumerate(output.hidden_states)}
        save(
            f"{name}_forward",
            states
            | {"input_ids": ids, "last_hidden_state": output.last_hidden_state, "pooled": pooled},
        )


if __name__ == "__main__":
    torch.set_num_threads(2)
    for make in (unet, autoencoder, text_encoders):
        torch.manual_seed(SEED)
        make()
