"""What tests of several areas need: a small model on disk, and a folder of pictures for it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle.models import DigitsTransformer

GOLDEN_SDXL = Path(__file__).parent / "golden" / "sdxl"
UNET_FILE = "diffusion_pytorch_model.safetensors"
TEXT_WIDTH = 112


@pytest.fixture(scope="session")
def digits_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A digits transformer of one narrow block, its weights random: a fresh one is constant."""
    folder = tmp_path_factory.mktemp("model") / "base"
    state = tc.get_rng_state()
    tc.manual_seed(0)
    model = DigitsTransformer(num_layers=1, num_attention_heads=2, attention_head_dim=8)
    for var in model.named_parameters().values():
        var.set(tc.randn(var.shape) * 0.3)
    model.save_pretrained(folder)
    tc.set_rng_state(state)
    return folder


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten pictures of 8x8 pixels with captions."""
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for number in range(10):
        pixels = generator.integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a handwritten {number}")
    return folder


@pytest.fixture(scope="session")
def sdxl_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden SDXL with random weights as a pipeline's folder, with tokenizers of 600 tokens.

    Its UNet reads texts of width 64, and its text encoders make 112: it gets other projections.
    """
    folder = tmp_path_factory.mktemp("sdxl model") / "base"
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        shutil.copytree(GOLDEN_SDXL / name, folder / name)
    for name, pad in (("tokenizer", "<|endoftext|>"), ("tokenizer_2", "!")):
        write_tokenizer(folder / name, pad)
    path = folder / "unet" / "config.json"
    config = {**json.loads(path.read_text()), "cross_attention_dim": TEXT_WIDTH}
    path.unlink()
    path.write_text(json.dumps(config))
    widen(GOLDEN_SDXL / "unet" / UNET_FILE, folder / "unet" / UNET_FILE)
    return folder


@pytest.fixture(scope="session")
def sdxl_file(sdxl_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights under the original names; its tokenizer is the published one, too large."""
    path = tmp_path_factory.mktemp("sdxl file") / "single_file.safetensors"
    # Its shapes do not tell the numbers of heads: the configurations lie beside it.
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        (path.parent / name).mkdir()
        shutil.copy(sdxl_base / name / "config.json", path.parent / name)
    widen(GOLDEN_SDXL / path.name, path)
    return path


def widen(source: Path, target: Path) -> None:
    """Copy weights, with random projections of texts of another width."""
    tensors = tc.load_file(source)
    for name, tensor in tensors.items():
        if name.endswith(("attn2.to_k.weight", "attn2.to_v.weight")):
            rng = np.random.default_rng(list(name.rpartition("transformer_blocks")[2].encode()))
            values = rng.normal(0, 0.1, (tensor.shape[0], TEXT_WIDTH)).astype(np.float32)
            tensors[name] = tc.tensor(values).to(tensor.dtype)
    target.unlink(missing_ok=True)
    tc.save_file(tensors, target)


def write_tokenizer(folder: Path, pad: str) -> None:
    """A CLIP tokenizer of single letters: 256 within and 256 at the end of a word, 600 in all."""
    codes = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(code) for code in (*codes, *range(0x100, 0x100 + 256 - len(codes)))]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters)]
    tokens += [f"unused{n}</w>" for n in range(598 - len(tokens))]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    settings = {"pad_token": pad, "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


SIZES = [(64, 64), (96, 48), (48, 96), (130, 70), (64, 80), (90, 90), (64, 64), (200, 60)]


@pytest.fixture(scope="session")
def sdxl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight pictures of several sizes, with captions."""
    folder = tmp_path_factory.mktemp("photographs")
    generator = np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        coarse = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        picture.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}, a blur")
    return folder
