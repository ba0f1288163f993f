"""A LoRA step of full-size transformers on a GPU: 1024 x 1024 px, frozen base of random weights.

python benches/gpu_transformers.py [--only flux] [--profile]

Our base and that of diffusers are bf16; `--base-precision` quantizes only ours. A step is
forward, mean squared error, backward and the optimizer, with f32 LoRA of rank 16 on the attention
of image and text (in FLUX.2's single-stream blocks, on the layer in which queries, keys and values
are fused with the MLP's input). Our step is timed without and with a CUDA graph. The time with the
graph is compared with that of diffusers and peft in eager mode under torch's autocast, if they are
installed. diffusers recomputes all blocks where our checkpointing is full or offload, and nothing
otherwise.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_timing
from gpu_sdxl import torch_optimizer
from gpu_timing import GIB, Machine

import trainable_candle as tc
from trainable_candle.families.flow.patches import positions

if TYPE_CHECKING:
    from collections.abc import Callable

RANK = 16
LATENT = 128
"""The height and width of the latents of an image of 1024 x 1024 px."""
# The layers that get a LoRA. Only FLUX.2's single-stream blocks have the last one.
LORA_LAYERS = [
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    "to_qkv_mlp_proj",
]  # fmt: skip
SD3_MEDIUM = {
    "sample_size": 128, "num_layers": 24, "num_attention_heads": 24, "attention_head_dim": 64,
    "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "pos_embed_max_size": 384,
    "caption_projection_dim": 1536, "dual_attention_layers": list(range(13)),
    "qk_norm": "rms_norm", "patch_size": 2, "in_channels": 16, "out_channels": 16,
}  # fmt: skip
SD3_LARGE = SD3_MEDIUM | {
    "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
    "pos_embed_max_size": 192, "dual_attention_layers": [],
}  # fmt: skip
FLUX = {
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38,
    "num_attention_heads": 24, "attention_head_dim": 128, "joint_attention_dim": 4096,
    "pooled_projection_dim": 768, "guidance_embeds": True, "axes_dims_rope": [16, 56, 56],
}  # fmt: skip
CHROMA = {
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38,
    "num_attention_heads": 24, "attention_head_dim": 128, "joint_attention_dim": 4096,
    "axes_dims_rope": [16, 56, 56], "approximator_num_channels": 64,
    "approximator_hidden_dim": 5120, "approximator_layers": 5,
}  # fmt: skip
KLEIN = {
    "patch_size": 1, "in_channels": 128, "num_layers": 5, "num_single_layers": 20,
    "num_attention_heads": 24, "attention_head_dim": 128, "joint_attention_dim": 7680,
    "guidance_embeds": False, "axes_dims_rope": [32, 32, 32, 32],
}  # fmt: skip
Z_IMAGE = {
    "in_channels": 16, "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30,
    "n_kv_heads": 30, "cap_feat_dim": 2560, "axes_dims": [32, 48, 48],
    "axes_lens": [1024, 512, 512],
}  # fmt: skip
# Our names of the classes. In diffusers, "2DModel" follows.
CLASSES = {"flux": "FluxTransformer", "sd3": "SD3Transformer", "flux2": "Flux2Transformer",
           "zimage": "ZImageTransformer", "chroma": "ChromaTransformer"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The model, its text, the kind of checkpointing and the optimizer of a measured step."""

    name: str
    config: dict[str, Any]
    tokens: int
    """The number of tokens of the text."""
    flops: tuple[float, float]
    """FLOPs of a forward pass at 1024 px: in linear layers, and in attention."""
    checkpointing: str
    """One of "no", "selective", "full" and "offload"."""
    optimizer: str

    @property
    def title(self) -> str:
        return f"{self.name}, {self.checkpointing} checkpointing, {self.optimizer}"

    @property
    def kind(self) -> str:
        if "cap_feat_dim" in self.config:
            return "zimage"
        if "num_single_layers" not in self.config:
            return "sd3"
        if "approximator_num_channels" in self.config:
            return "chroma"
        return "flux" if "pooled_projection_dim" in self.config else "flux2"

    @property
    def text_width(self) -> int:
        return int(self.config["cap_feat_dim" if self.kind == "zimage" else "joint_attention_dim"])

    @property
    def recomputes_all(self) -> bool:
        return self.checkpointing in {"full", "offload"}

    @property
    def step_flops(self) -> float:
        """The floating-point operations of a step.

        The backward pass costs as much as the forward pass in frozen linear layers, and 2.5 times
        as much in attention. A case that recomputes all blocks adds a forward pass.
        """
        linear, attention = self.flops
        recomputed = linear + attention if self.recomputes_all else 0
        return 2 * linear + 3.5 * attention + recomputed


def cases() -> list[Case]:
    # Name, configuration, tokens of the text, and FLOPs, as in `Case`.
    models: list[tuple[str, dict[str, Any], int, tuple[float, float]]] = [
        ("sd3.5-medium", SD3_MEDIUM, 333, (7.0e12, 4.2e12)),
        ("sd3.5-large", SD3_LARGE, 333, (23.9e12, 7.3e12)),
        ("flux-dev", FLUX, 512, (59.5e12, 14.9e12)),
        ("chroma", CHROMA, 128, (54.7e12, 12.5e12)),
        ("flux2-klein-4b", KLEIN, 512, (28.3e12, 6.5e12)),
        ("z-image", Z_IMAGE, 128, (47.8e12, 8.7e12)),
    ]
    result = []
    for name, config, tokens, flops in models:
        if config is not SD3_LARGE:
            result.append(Case(name, config, tokens, flops, "no", "adamw"))
        if config is FLUX or config is KLEIN:
            result.append(Case(name, config, tokens, flops, "selective", "adamw"))
        result.append(Case(name, config, tokens, flops, "full", "adamw8bit"))
        result.append(Case(name, config, tokens, flops, "offload", "adamw8bit"))
    return result


def model_of(case: Case, device: str, base: str | None = None, **streaming: Any) -> Any:
    """Return our model of a case, with random weights.

    `base` is the format that quantizes the weights (None: bf16); `streaming` goes to `from_config`.
    """
    tc.manual_seed(0)
    model_class: Any = getattr(tc.models, CLASSES[case.kind])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(case.config | {"_class_name": f"{CLASSES[case.kind]}2DModel"}))
        return model_class.from_config(
            path, dtype="bf16", device=device, quantize=base, **streaming
        )


def ours(case: Case, device: str, base: str | None = None) -> Callable[[], tc.Tensor]:
    """Return our step of a case; `base` is as in `model_of`."""
    return step_of(case, model_of(case, device, base), device)


def inputs_of(case: Case, device: str, latent: int = LATENT) -> tuple[tc.Tensor, ...]:
    """Return random inputs of our model, for latents of `latent` x `latent`."""

    def random(*shape: int) -> tc.Tensor:
        return tc.randn((1, *shape), device=device).to("bf16")

    text, timesteps = random(case.tokens, case.text_width), tc.full((1,), 0.5, device=device)
    side = latent // 2  # tokens stand for patches of 2 x 2
    area = side * side
    channels = case.config["in_channels"]
    latents = (channels, latent, latent)
    if case.kind == "zimage":
        return (random(*latents), text, timesteps)
    if case.kind == "flux2":
        image_ids, text_ids = positions(side, side, case.tokens, device, has_text_axis=True)
        return (random(area, channels), text, timesteps, image_ids, text_ids)
    image_ids, text_ids = positions(side, side, case.tokens, device)
    if case.kind == "chroma":
        return (random(area, channels), text, timesteps, image_ids, text_ids)
    pooled = random(case.config["pooled_projection_dim"])
    if case.kind == "sd3":
        # Only SD3's timesteps are from 0 to 1000; the other models take them from 0 to 1.
        return (random(*latents), text, pooled, timesteps * 1000.0)
    guidance = tc.full((1,), 1.0, device=device)
    return (random(area, channels), text, pooled, timesteps, image_ids, text_ids, guidance)


def step_of(case: Case, model: Any, device: str) -> Callable[[], tc.Tensor]:
    """Put LoRA on the model and make its optimizer; return a step of training."""
    if case.checkpointing != "no":
        model.enable_gradient_checkpointing(case.checkpointing)
    config = tc.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LORA_LAYERS)
    adapter = model.add_adapter(config)
    kinds: dict[str, Any] = {"adamw": tc.optim.AdamW, "adamw8bit": tc.optim.AdamW8bit}
    optimizer = kinds[case.optimizer](adapter.parameters(), lr=1e-4)

    inputs = inputs_of(case, device)
    target = tc.randn(inputs[0].shape, device=device)

    def step() -> tc.Tensor:
        loss = tc.nn.functional.mse_loss(model(*inputs).to("f32"), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def their_inputs(torch: Any, case: Case) -> dict[str, Any]:
    """Return random inputs of diffusers' model, by the names of its arguments."""
    half = {"dtype": torch.bfloat16, "device": "cuda"}  # the options of every bf16 tensor
    text = torch.randn(1, case.tokens, case.text_width, **half)
    channels, side = case.config["in_channels"], LATENT // 2
    timesteps = torch.full((1,), 0.5, **half)
    if case.kind == "zimage":
        latents = torch.randn(channels, 1, LATENT, LATENT, **half)  # 1: an image is one frame
        return {"x": [latents], "t": timesteps, "cap_feats": [text[0]]}
    given = {"encoder_hidden_states": text, "timestep": timesteps}
    if case.kind == "sd3":
        return given | {
            "pooled_projections": torch.randn(1, case.config["pooled_projection_dim"], **half),
            "hidden_states": torch.randn(1, channels, LATENT, LATENT, **half),
            "timestep": torch.full((1,), 500.0, device="cuda"),
        }
    axes = len(case.config["axes_dims_rope"])
    image_ids = torch.zeros(side, side, axes, **half)
    text_ids = torch.zeros(case.tokens, axes, **half)
    image_ids[..., 1], image_ids[..., 2] = torch.arange(side)[:, None], torch.arange(side)
    given |= {
        "hidden_states": torch.randn(1, side * side, channels, **half),
        "img_ids": image_ids.reshape(-1, axes),
        "txt_ids": text_ids,
    }
    if case.kind == "flux":
        given["pooled_projections"] = torch.randn(1, case.config["pooled_projection_dim"], **half)
        given["guidance"] = torch.ones(1, device="cuda")
    elif case.kind == "flux2":
        # The fourth axis of FLUX.2's positions numbers the tokens of the text. `given` already has
        # this tensor as "txt_ids".
        text_ids[:, 3] = torch.arange(case.tokens)
    return given


def their_result(model: Any, given: dict[str, Any], case: Case) -> Any:
    """Return the result of diffusers' model. Z-Image returns a list, of one image here."""
    result = model(**given, return_dict=False)[0]
    return result[0] if case.kind == "zimage" else result


def theirs(torch: Any, case: Case) -> Callable[[], object]:
    """Return the step of diffusers and peft; raise `ImportError` without them."""
    import diffusers  # noqa: PLC0415 - optional
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415 - optional

    torch.manual_seed(0)
    # cuDNN's attention fails on some of these shapes.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = getattr(diffusers, f"{CLASSES[case.kind]}2DModel")(**case.config)
        torch.set_default_dtype(torch.float32)
    # diffusers makes the table of positions in f32, so the model is converted to bf16 once more.
    model = model.to(torch.bfloat16).requires_grad_(False)
    config = LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules=LORA_LAYERS, init_lora_weights="gaussian"
    )
    model = inject_adapter_in_model(config, model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.data = parameter.data.float()
    if case.recomputes_all:
        model.enable_gradient_checkpointing()
    model.train()
    given = their_inputs(torch, case)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        shape = their_result(model, given, case).shape
    target = torch.randn(shape, device="cuda")
    optimizer = torch_optimizer(torch, parameters, case.optimizer)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            result = their_result(model, given, case)
        torch.nn.functional.mse_loss(result.float(), target).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def run(case: Case, machine: Machine, *, profile: bool) -> None:
    """Measure a case, and print our line and, with torch, that of diffusers."""
    device = machine.device
    gpu_timing.fresh(device)
    step = ours(case, device, machine.base)
    started = time.perf_counter()
    step().item()
    first = time.perf_counter() - started
    if profile:
        gpu_timing.profiled(step, device)
    eager = gpu_timing.timed(step, device, machine.seconds)
    peak = tc.cuda.memory_stats(device)["peak_allocated"]
    graph = gpu_timing.captured(step, device)
    replayed = gpu_timing.timed(graph, device, machine.seconds)
    # The floor is the time of the arithmetic alone: it counts no bytes that are read or written.
    floor = machine.floor("bf16", case.step_flops, moved=0)
    times = gpu_timing.milliseconds(ours=replayed, ours_without_graph=eager, floor=floor)
    print(
        f"{case.title}{gpu_timing.title_suffix(machine)}: {times}; peak {peak / GIB:.2f} GiB; "
        f"first {first:.1f} s",
        flush=True,
    )
    del step, graph
    gc.collect()
    gpu_timing.fresh(device)
    if machine.torch is None:
        return
    try:
        their_step = theirs(machine.torch, case)
    except ImportError as error:
        print(f"  {error}", flush=True)
        return
    their_seconds = gpu_timing.torch_timed(machine.torch, their_step, machine.seconds)
    allocated = machine.torch.cuda.max_memory_allocated() / GIB
    times = gpu_timing.milliseconds(torch_eager=their_seconds)
    ratio = replayed / their_seconds
    print(f"  {times}; peak {allocated:.2f} GiB; ours/torch {ratio:.2f}", flush=True)
    del their_step
    gpu_timing.fresh(device)


def main() -> None:
    parser = gpu_timing.parser(__doc__)
    parser.set_defaults(seconds=2.0)
    options = parser.parse_args()
    machine = gpu_timing.start(options)
    for case in cases():
        if options.only in case.title:
            run(case, machine, profile=options.profile)


if __name__ == "__main__":
    main()
