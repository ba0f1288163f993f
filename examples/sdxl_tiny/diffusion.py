"""Train a tiny SDXL, its UNet and both text encoders, on cached latents, and draw samples."""

import copy
import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import photos
import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline
from PIL import Image
from torch import nn
from torch.nn import functional
from transformers import CLIPTokenizer

from models import TOKENS

CAPTION_DROPOUT = 0.1
"""The share of samples that are trained without their caption."""
GAMMA = 5.0
"""The limit of the signal-to-noise ratio in the weights of the loss."""


@dataclass
class Latents:
    """The latents of N crops, with their conditions."""

    values: torch.Tensor
    """Latents, (N, 4, 16, 16)."""
    time_ids: torch.Tensor
    """SDXL's time ids: sizes and offsets of the crops, (N, 6)."""
    rows: torch.Tensor
    """The row of each crop's first caption in the table of all captions (`caption_table`), (N,)."""


def scheduler() -> EulerDiscreteScheduler:
    """Return SDXL's published schedule."""
    return EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
        steps_offset=1,
    )


def caption_table(data: photos.Photos) -> tuple[list[str], dict[tuple[int, str], int], int]:
    """Return the captions of all pairs (flower, colour), equally many for each pair.

    Returns:
        A table of all captions; for each pair, the row of its first caption, after which its other
        captions follow; and the number of captions of a pair.
    """
    pairs = sorted(set(zip(data.flowers.tolist(), data.colours, strict=True)))
    captions = [photos.captions(photos.FLOWERS[flower], colour) for flower, colour in pairs]
    per_pair = len(captions[0])
    rows = {pair: index * per_pair for index, pair in enumerate(pairs)}
    return list(itertools.chain.from_iterable(captions)), rows, per_pair


def tokenise(folder: Path, texts: list[str], device: torch.device) -> list[torch.Tensor]:
    """Return the token ids of N texts, (N, 77), for each of the two text encoders."""
    ids = []
    for name in ("tokenizer", "tokenizer_2"):
        tokenizer = CLIPTokenizer.from_pretrained(folder / name)
        encoded = tokenizer(
            texts, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt"
        )
        ids.append(encoded.input_ids.to(device))
    return ids


def encode_texts(
    networks: nn.ModuleDict, ids: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the text features of N captions.

    Returns:
        The inputs of each encoder's last layer, concatenated, (N, 77, 128); the second encoder's
        pooled features, (N, 64).
    """
    first = networks["text_encoder"](ids[0], output_hidden_states=True)
    second = networks["text_encoder_2"](ids[1], output_hidden_states=True)
    hidden = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
    return hidden, second.text_embeds


def train(
    networks: nn.ModuleDict,
    latents: Latents,
    table: list[torch.Tensor],
    per_pair: int,
    seconds: float,
    rate: float,
    batch: int = 256,
) -> nn.ModuleDict:
    """Train the networks to predict noise, with min-SNR weights (Hang et al., 2023).

    A dropped caption is replaced by the empty caption or by zero features, each half of the time,
    so that both the empty caption and zeros work as negative prompts.

    Args:
        networks: UNet and text encoders.
        latents: the training data.
        table: the token ids of all captions, for each encoder; the last row is the empty caption.
        per_pair: the number of captions that each crop can have; each step draws one of them.
        seconds: how long to train.
        rate: the peak learning rate.
        batch: samples in a step.

    Returns:
        Copies of the networks with the exponential averages of the weights.
    """
    device = latents.values.device
    cuda = device.type == "cuda"
    cumulative = scheduler().alphas_cumprod.to(device)
    averaged = copy.deepcopy(networks).eval().requires_grad_(requires_grad=False)
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
    # A tensor, because a recorded step reads the learning rate from memory.
    current_rate = torch.tensor(rate, device=device)
    optimizer = torch.optim.AdamW(
        networks.parameters(), current_rate, betas=(0.9, 0.98), fused=cuda, capturable=cuda
    )

    def take_step() -> torch.Tensor:
        index = torch.randint(len(latents.values), (batch,), device=device)
        clean = latents.values[index]
        noise = torch.randn_like(clean)
        timestep = torch.randint(0, len(cumulative), (batch,), device=device)
        signal = cumulative[timestep].view(-1, 1, 1, 1)
        noisy = signal.sqrt() * clean + (1 - signal).sqrt() * noise
        draw = torch.rand(batch, device=device)
        rows = latents.rows[index] + torch.randint(0, per_pair, (batch,), device=device)
        rows = torch.where(draw < CAPTION_DROPOUT, len(table[0]) - 1, rows)
        has_features = (draw >= CAPTION_DROPOUT / 2).to(clean.dtype)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            # Encode all captions of the table rather than one caption for each sample: the table
            # has fewer captions than a step has samples.
            hidden, pooled = encode_texts(networks, table)
            conditions = {
                "text_embeds": pooled[rows] * has_features[:, None],
                "time_ids": latents.time_ids[index],
            }
            text = hidden[rows] * has_features[:, None, None]
            predicted = networks["unet"](noisy, timestep, text, added_cond_kwargs=conditions).sample
        ratio = (signal / (1 - signal)).flatten()
        weight = ratio.clamp(max=GAMMA) / ratio
        error = functional.mse_loss(predicted.float(), noise, reduction="none").mean((1, 2, 3))
        loss = (weight * error).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(networks.parameters(), 1.0)
        optimizer.step()
        # An exponential average ignores the last argument, the number of averaged models.
        average(list(averaged.parameters()), list(networks.parameters()), 1)
        return loss.detach()

    run_step = captured(take_step) if cuda else take_step
    # `smooth` is an exponential average of the losses of every 50th step; it starts at 1.
    start, step, progress, smooth = time.monotonic(), 0, 0.0, 1.0
    while progress < 1:
        progress = min(1.0, (time.monotonic() - start) / seconds)
        cosine = 0.5 + 0.5 * math.cos(math.pi * progress)
        # 500 steps of warm-up; then a cosine down to 1 % of the peak.
        current_rate.fill_(rate * min((step + 1) / 500, 0.01 + cosine))
        loss = run_step()
        if step % 50 == 0:
            smooth = 0.8 * smooth + 0.2 * float(loss)
        if step % 1000 == 0:
            print(f"unet {step:5d} {progress:4.0%} loss {smooth:.4f}", flush=True)
        step += 1
    print(f"unet: {step} steps of {batch}", flush=True)
    return averaged


def captured(take_step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Record a step as a CUDA graph, after four steps that are not recorded.

    torch requires such warm-up steps, on another stream than the default one.
    Without a graph, kernel launches take most of the time of a step of so small a model.

    Returns:
        A function that replays the graph and returns the loss, always in the same tensor.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            take_step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = take_step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def save(folder: Path, networks: nn.ModuleDict, vae: AutoencoderKL) -> None:
    """Write a folder that diffusers' StableDiffusionXLPipeline loads, with weights in f16.

    The folder must already have the tokenizers.
    """
    pipeline = StableDiffusionXLPipeline(
        vae=vae,
        **networks,
        tokenizer=CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        tokenizer_2=CLIPTokenizer.from_pretrained(folder / "tokenizer_2"),
        scheduler=scheduler(),
        add_watermarker=False,
    )
    pipeline.to(torch.float16).save_pretrained(folder)
    for name in ("unet", "vae"):
        path = folder / name / "config.json"
        config = json.loads(path.read_text("utf-8"))
        config.pop("_name_or_path", None)  # a path on this machine
        path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def sample(folder: Path, prompts: list[str], count: int, guidance: float, size: int) -> Image.Image:
    """Load the folder with diffusers and draw one row of `count` images for each prompt."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipeline = StableDiffusionXLPipeline.from_pretrained(
        folder, torch_dtype=torch.float32, add_watermarker=False
    ).to(device)
    pipeline.set_progress_bar_config(disable=True)
    grid = Image.new("RGB", (size * count, size * len(prompts)))
    for row, prompt in enumerate(prompts):
        images = pipeline(
            prompt,
            height=size,
            width=size,
            num_inference_steps=30,
            guidance_scale=guidance,
            num_images_per_prompt=count,
            generator=torch.Generator("cpu").manual_seed(row),
        ).images
        for column, image in enumerate(images):
            grid.paste(image, (size * column, size * row))
    return grid
