"""Time the phases of `gpu_job.py` in diffusers, transformers and peft.

python benches/job_peer.py FOLDER MODEL [--steps 30] [--guidance 6.0] [--device cuda] [--side 1024]

FOLDER is the folder of `gpu_job.py`: its subfolder MODEL has the pipeline, and its subfolder
`images` the images. The folder of SDXL is a complete pipeline. Those of the other models lack the
files of tokenizers. So each of their parts is loaded separately, their text encoders get random
tokens (77 for CLIP, 512 for each other encoder), and images are drawn from random features.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# The imports below are timed, too.
started = time.perf_counter()
import diffusers  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from peft import LoraConfig, get_peft_model_state_dict  # noqa: E402
from PIL import Image  # noqa: E402

PROMPT = "a photo of a sks thing on a table"
# The same rank as in `gpu_job.py`.
RANK = 16
CLIP_TOKENS, OTHER_TOKENS = 77, 512
"""The tokens of a prompt for CLIP's text encoders, and for each other text encoder."""
SD3_TOKENS = 333
"""The tokens of SD3's prompt features: 77 of CLIP, 256 of T5."""
SDXL_LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "proj", "proj_in", "proj_out", "ff.net.2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=30, help="steps of drawing an image")
    parser.add_argument("--guidance", type=float, default=6.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--side", type=int, default=1024, help="side of an image in px")
    given = parser.parse_args()
    print(f"\n== diffusers: imports {time.perf_counter() - started:.1f} s", flush=True)
    with torch.no_grad():
        (sdxl if given.model == "sdxl" else flow)(given)


def phase(given: argparse.Namespace, title: str, run: Callable[[], Any]) -> Any:
    """Run a phase, print its time and torch's peak of GPU memory, and return its result."""
    on_gpu = given.device != "cpu"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    result = run()
    peak = ""
    if on_gpu:
        torch.cuda.synchronize()
        peak = f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
    print(f"  diffusers, {title}: {time.perf_counter() - begun:.2f} s{peak}", flush=True)
    return result


def image_paths(given: argparse.Namespace) -> list[Path]:
    return sorted((given.folder / "images").glob("*.png"))


def encode_images(given: argparse.Namespace, autoencoder: Any) -> None:
    """Encode the images in f32, one at a time; then convert the autoencoder to bf16."""
    autoencoder.float()

    def encode() -> None:
        for path in image_paths(given):
            image = Image.open(path).convert("RGB").resize((given.side, given.side))
            values = torch.tensor(np.asarray(image)).permute(2, 0, 1)[None].float()
            if isinstance(autoencoder, diffusers.AutoencoderKLQwenImage):
                values = values[:, :, None]  # an axis of frames
            autoencoder.encode(values.to(given.device) / 127.5 - 1).latent_dist.mean.cpu()

    count = len(image_paths(given))
    phase(given, f"latents of {count} images of {given.side} px, f32", encode)
    autoencoder.to(torch.bfloat16)


def draw(given: argparse.Namespace, pipeline: Any, **inputs: Any) -> None:
    """Draw two images; the first call also prepares kernels."""
    pipeline.set_progress_bar_config(disable=True)
    options = {"height": given.side, "width": given.side, "num_inference_steps": given.steps}
    is_qwen = isinstance(pipeline, diffusers.QwenImagePipeline)
    options["true_cfg_scale" if is_qwen else "guidance_scale"] = given.guidance
    for number in ("first", "second"):
        call = lambda: pipeline(**options, **inputs)  # noqa: E731
        phase(given, f"draw {given.side} px in {given.steps} steps, {number}", call)


def save(given: argparse.Namespace, pipeline: Any, part: str, layers: list[str]) -> None:
    """Merge the adapter of this library and save the result, then save a new adapter of peft.

    Args:
        given: the options.
        pipeline: the pipeline.
        part: the name of the denoiser in the pipeline.
        layers: the layers of the new adapter.
    """
    # The adapter that `gpu_job.py` has trained in its phase `cold`.
    adapter = given.folder / "cold" / "adapter.safetensors"
    denoiser = getattr(pipeline, part)
    if adapter.exists():

        def merge() -> None:
            pipeline.load_lora_weights(str(adapter))
            pipeline.fuse_lora()
            pipeline.unload_lora_weights()
            # This library's command `merge` copies the other parts, too.
            output = given.folder / "peer-merged"
            denoiser.save_pretrained(output / part)
            for other in (given.folder / given.model).iterdir():
                if other.is_dir() and other.name != part:
                    shutil.copytree(other, output / other.name)
                elif other.is_file():
                    shutil.copy(other, output)

        phase(given, "merge the adapter and save a folder", merge)
        shutil.rmtree(given.folder / "peer-merged")
    denoiser.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=layers))
    state = {f"{part}_lora_layers": get_peft_model_state_dict(denoiser)}
    write = lambda: type(pipeline).save_lora_weights(given.folder / "peer", **state)  # noqa: E731
    phase(given, "save the adapter", write)


def sdxl(given: argparse.Namespace) -> None:
    """Run the phases of SDXL."""
    kind = diffusers.StableDiffusionXLPipeline
    path = given.folder / given.model
    load = lambda: kind.from_pretrained(path, torch_dtype=torch.bfloat16).to(given.device)  # noqa: E731
    pipeline = phase(given, "load", load)
    captions = [path.with_suffix(".txt").read_text() for path in image_paths(given)]
    encode = lambda: [pipeline.encode_prompt(text) for text in captions]  # noqa: E731
    phase(given, f"{len(captions)} captions", encode)
    encode_images(given, pipeline.vae)
    draw(given, pipeline, prompt=PROMPT)
    save(given, pipeline, "unet", SDXL_LAYERS)


def flow(given: argparse.Namespace) -> None:
    """Run the phases of a flow model."""
    folder = given.folder / given.model

    def load(part: str) -> Any:
        config = json.loads((folder / part / "config.json").read_text())
        class_name = config.get("_class_name") or config["architectures"][0]
        library = diffusers if "_class_name" in config else transformers
        model_class = getattr(library, class_name)
        model = model_class.from_pretrained(folder / part, torch_dtype=torch.bfloat16)
        return model.to(given.device)

    encoders = {
        path.name: phase(given, f"load {path.name}", lambda path=path: load(path.name))
        for path in sorted(folder.glob("text_encoder*"))
    }
    tokens = lambda name: CLIP_TOKENS if "CLIP" in type(encoders[name]).__name__ else OTHER_TOKENS  # noqa: E731

    def encode() -> None:
        for _ in image_paths(given):
            for name, encoder in encoders.items():
                # Every encoder's vocabulary has these ids.
                ids = torch.randint(3, 250, (1, tokens(name)), device=given.device)
                if hasattr(encoder, "lm_head"):  # only the hidden states are needed
                    encoder.model(ids, output_hidden_states=True)
                else:
                    encoder(ids)

    phase(given, f"{len(image_paths(given))} captions", encode)
    configs = {name: encoder.config for name, encoder in encoders.items()}
    encoders.clear()
    if given.device != "cpu":
        torch.cuda.empty_cache()
    vae = phase(given, "load vae", lambda: load("vae"))
    encode_images(given, vae)
    transformer = phase(given, "load transformer", lambda: load("transformer"))
    class_name = json.loads((folder / "model_index.json").read_text())["_class_name"]
    pipeline_class = getattr(diffusers, class_name)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    parts = {"scheduler": scheduler, "vae": vae, "transformer": transformer}
    # The pipeline's tokenizers and text encoders are None: the features of prompts replace them.
    missing = [
        part
        for part, parameter in inspect.signature(pipeline_class.__init__).parameters.items()
        if part not in {"self", *parts} and parameter.default is parameter.empty
    ]
    pipeline = pipeline_class(**parts, **dict.fromkeys(missing))
    draw(given, pipeline, **features(class_name, transformer.config, configs, given.device))
    layers = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"]
    save(given, pipeline, "transformer", layers)


def features(pipeline: str, config: Any, encoders: dict[str, Any], device: str) -> dict[str, Any]:
    """Return random features of a prompt and, unless the model is Flux.1, of a negative prompt.

    Args:
        pipeline: the name of the pipeline's class.
        config: the transformer's configuration.
        encoders: the text encoders' configurations, by the names of the parts.
        device: the device of the features.
    """

    def random(*shape: int) -> Any:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def pair(name: str, make: Callable[[], Any]) -> dict[str, Any]:
        return {name: make(), f"negative_{name}": make()}

    if pipeline == "ZImagePipeline":
        return pair("prompt_embeds", lambda: [random(OTHER_TOKENS, config.cap_feat_dim)])
    width = config.joint_attention_dim
    if pipeline == "Flux2KleinPipeline":
        return pair("prompt_embeds", lambda: random(1, OTHER_TOKENS, width))
    if pipeline == "StableDiffusion3Pipeline":
        random_pooled = lambda: random(1, config.pooled_projection_dim)  # noqa: E731
        return pair("prompt_embeds", lambda: random(1, SD3_TOKENS, width)) | pair(
            "pooled_prompt_embeds", random_pooled
        )
    if pipeline in {"ChromaPipeline", "QwenImagePipeline"}:
        mask_dtype, mask_name = (
            (torch.bfloat16, "prompt_attention_mask")
            if pipeline == "ChromaPipeline"
            else (torch.bool, "prompt_embeds_mask")
        )
        mask = lambda: torch.ones((1, OTHER_TOKENS), device=device, dtype=mask_dtype)  # noqa: E731
        return pair("prompt_embeds", lambda: random(1, OTHER_TOKENS, width)) | pair(mask_name, mask)
    # Flux.1, whose first text encoder is CLIP.
    pooled = random(1, encoders["text_encoder"].projection_dim)
    return {"prompt_embeds": random(1, OTHER_TOKENS, width), "pooled_prompt_embeds": pooled}


if __name__ == "__main__":
    main()
