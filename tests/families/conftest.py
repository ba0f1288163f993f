"""Tiny pipelines of flow models: golden models (`tests/golden`) with random text encoders.

The transformers and autoencoders are copies of the golden ones. Pipelines have no files of
T5's tokenizer, because the library ships it.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.compressed import model_folder
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE

import trainable_candle as tc
from trainable_candle.models import CausalLM, CLIPTextModel, T5Encoder

GOLDEN = Path(__file__).parents[1] / "golden"
# The width of the text features that golden transformers read. The pipeline of FLUX.2 has a copy
# of its golden transformer that `widen` has changed to another width.
TEXT_WIDTH = 40
# The size of the usual vocabulary of T5.
T5_TOKENS = 32_128


def write_model(kind: type[tc.models.Model], folder: Path, config: dict[str, Any]) -> None:
    """Write a model with random weights to a new folder."""
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    # With this seed, the weights do not depend on the tests that ran before.
    tc.manual_seed(0)
    kind.from_config(path).save_pretrained(folder)


def write_clip(folder: Path, width: int, projection: int | None) -> None:
    """Write a CLIP text encoder with a vocabulary of 200 tokens.

    Args:
        folder: the new folder.
        width: the number of features of a token.
        projection: the number of features of the whole text; None: there is no projection.
    """
    config = {
        "architectures": ["CLIPTextModelWithProjection" if projection else "CLIPTextModel"],
        "vocab_size": 200, "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 17,
        "hidden_act": "quick_gelu", "eos_token_id": 199, "layer_norm_eps": 1e-5,
    }  # fmt: skip
    if projection:
        config["projection_dim"] = projection
    write_model(CLIPTextModel, folder, config)


def write_t5(folder: Path) -> None:
    """Write a T5 encoder with T5's usual vocabulary."""
    config = {
        "architectures": ["T5EncoderModel"], "vocab_size": T5_TOKENS, "d_model": TEXT_WIDTH,
        "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
    }  # fmt: skip
    write_model(T5Encoder, folder, config)


def write_qwen3(folder: Path, width: int = TEXT_WIDTH, layers: int = 3) -> None:
    """Write a Qwen3 model with a vocabulary of 300 tokens, as a text encoder."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300,
        "hidden_size": width, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    write_model(CausalLM, folder, config)


def write_qwen25_vl(folder: Path) -> None:
    """Write a text encoder of Qwen2.5-VL with a vocabulary of 300 tokens.

    The keys of its config.json are those that transformers 5 writes.
    """
    text = {
        "model_type": "qwen2_5_vl_text", "vocab_size": 300, "hidden_size": TEXT_WIDTH,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 5,
        "num_key_value_heads": 1, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        # The sections add up to half of a head's width, which is 40 / 5.
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2],
        },
    }  # fmt: skip
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "text_config": text, "tie_word_embeddings": False,
    }  # fmt: skip
    write_model(CausalLM, folder, config)


def write_chat_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a token for each byte, and the special tokens of Qwen's template."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())  # One character for each byte.
    tokenizer = Tokenizer(BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_pipeline(
    folder: Path,
    family: str,
    class_name: str,
    scheduler: dict[str, Any],
    latents: dict[str, float],
    autoencoder: str = "flux",
) -> None:
    """Write the transformer, the autoencoder, the scheduler and the index of a pipeline.

    Args:
        folder: the folder of the pipeline.
        family: the golden model whose transformer is copied.
        class_name: the class of the pipeline in diffusers.
        scheduler: settings of the scheduler.
        latents: settings of the autoencoder that scale and shift the latents; none if the golden
            autoencoder already has them.
        autoencoder: the golden model whose autoencoder is copied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(model_folder(GOLDEN / family / "transformer"), folder / "transformer")
    shutil.copytree(GOLDEN / autoencoder / "vae", folder / "vae")
    path = folder / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | latents))
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(
        json.dumps({"_class_name": "FlowMatchEulerDiscreteScheduler"} | scheduler)
    )
    (folder / "model_index.json").write_text(json.dumps({"_class_name": class_name}))


@pytest.fixture(scope="session")
def sd3_base(
    tmp_path_factory: pytest.TempPathFactory, write_tokenizer: Callable[[Path, str], None]
) -> Path:
    """Write a tiny pipeline of SD3; return its folder."""
    folder = tmp_path_factory.mktemp("sd3 model") / "base"
    latents = {"scaling_factor": 1.5305, "shift_factor": 0.0609}
    write_pipeline(folder, "sd3", "StableDiffusion3Pipeline", {"shift": 3.0}, latents)
    # The second argument is the padding token.
    write_tokenizer(folder / "tokenizer", "<|endoftext|>")
    write_tokenizer(folder / "tokenizer_2", "!")
    for name in ("text_encoder", "text_encoder_2"):
        write_clip(folder / name, width=16, projection=12)
    write_t5(folder / "text_encoder_3")
    return folder


LATENTS_OF_FLUX = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
SCHEDULER_OF_FLUX = {
    "use_dynamic_shifting": True, "shift": 3.0, "base_shift": 0.5, "max_shift": 1.15,
    "base_image_seq_len": 256, "max_image_seq_len": 4096,
}  # fmt: skip


@pytest.fixture(scope="session")
def flux_base(
    tmp_path_factory: pytest.TempPathFactory, write_tokenizer: Callable[[Path, str], None]
) -> Path:
    """Write a tiny pipeline of Flux; return its folder."""
    folder = tmp_path_factory.mktemp("flux model") / "base"
    write_pipeline(folder, "flux", "FluxPipeline", SCHEDULER_OF_FLUX, LATENTS_OF_FLUX)
    write_tokenizer(folder / "tokenizer", "<|endoftext|>")  # The padding token.
    write_clip(folder / "text_encoder", width=24, projection=None)
    write_t5(folder / "text_encoder_2")
    return folder


@pytest.fixture(scope="session")
def chroma_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny pipeline of Chroma; return its folder."""
    folder = tmp_path_factory.mktemp("chroma model") / "base"
    write_pipeline(folder, "chroma", "ChromaPipeline", SCHEDULER_OF_FLUX, LATENTS_OF_FLUX)
    write_t5(folder / "text_encoder")
    return folder


@pytest.fixture(scope="session")
def zimage_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny pipeline of Z-Image; return its folder."""
    folder = tmp_path_factory.mktemp("z-image model") / "base"
    write_pipeline(folder, "zimage", "ZImagePipeline", {"shift": 3.0}, LATENTS_OF_FLUX)
    write_chat_tokenizer(folder / "tokenizer")
    write_qwen3(folder / "text_encoder")
    return folder


def widen(folder: Path, sizes: dict[str, int]) -> None:
    """Give a golden transformer of FLUX.2 more channels per image token and per text token.

    Along the channels, repeat the weights of the layers that read or write them.
    """
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    path = folder / "diffusion_pytorch_model.safetensors"
    weights = tc.load_file(path)
    image_width, text_width = sizes["in_channels"], sizes["joint_attention_dim"]
    for name, dim, size in (("x_embedder", 1, image_width), ("proj_out", 0, image_width),
                            ("context_embedder", 1, text_width)):  # fmt: skip
        weight = weights[f"{name}.weight"]
        weights[f"{name}.weight"] = tc.cat([weight, weight], dim).narrow(dim, 0, size).contiguous()
    tc.save_file(weights, path)


@pytest.fixture(scope="session")
def flux2_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny pipeline of FLUX.2-klein; return its folder."""
    folder = tmp_path_factory.mktemp("flux2 model") / "klein-base"
    scheduler = {"use_dynamic_shifting": True, "shift": 3.0}
    write_pipeline(
        folder, "flux2", "Flux2KleinPipeline", scheduler, latents={}, autoencoder="flux2"
    )
    # An image token is 2 x 2 latents of 32 channels: 128 numbers. The golden transformer reads 64.
    widen(folder / "transformer", {"in_channels": 128, "joint_attention_dim": 48})
    write_chat_tokenizer(folder / "tokenizer")
    # FLUX.2 reads the hidden states after the blocks 9, 18 and 27, each 16 wide: 48 features.
    write_qwen3(folder / "text_encoder", width=16, layers=28)
    return folder


@pytest.fixture(scope="session")
def qwen_image_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny pipeline of Qwen-Image; return its folder."""
    folder = tmp_path_factory.mktemp("qwen model") / "base"
    scheduler = SCHEDULER_OF_FLUX | {
        "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02,
    }  # fmt: skip
    write_pipeline(
        folder, "qwen-image", "QwenImagePipeline", scheduler, latents={}, autoencoder="qwen-image"
    )
    write_chat_tokenizer(folder / "tokenizer")
    write_qwen25_vl(folder / "text_encoder")
    return folder
