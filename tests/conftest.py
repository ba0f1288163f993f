"""Fixtures for tests of several areas: small models, images, devices, and a temporary cache."""

import json
import os
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle.models import DigitsTransformer

GOLDEN_SDXL = Path(__file__).parent / "golden" / "sdxl"
SDXL_PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")


def pytest_configure() -> None:
    """Make the paths of temporary folders contain a space and a letter that is not ASCII."""
    folder = Path(tempfile.gettempdir()) / f"a földer of {os.getuid()}"
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(folder))


@pytest.fixture(scope="session")
def read_metadata() -> Callable[[Path], dict[str, str]]:
    """A function that returns the text entries in the header of a safetensors file."""

    def read(path: Path) -> dict[str, str]:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            texts: dict[str, str] = json.loads(file.read(length))["__metadata__"]
        return texts

    return read


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set a temporary cache folder, so that tests do not use the cache folder of the developer."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("user cache"))


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """Make Ctrl-C work in pytest and its subprocesses, even if a shell started pytest with `&`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def gpu() -> str:
    """The name of a CUDA device; without one, the test is skipped.

    A test that uses this fixture must have the marker `gpu`.
    """
    reason = tc.cuda.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    return "cuda"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU, and in a second run of the test, which has the marker `gpu`, a CUDA device."""
    return request.getfixturevalue("gpu") if request.param == "cuda" else request.param


@pytest.fixture(scope="session")
def digits_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a digits transformer of one narrow block with random weights.

    The output of a newly initialized transformer is constant, which would hide errors. Therefore
    the fixture overwrites all weights.
    """
    folder = tmp_path_factory.mktemp("model") / "base"
    random_state = tc.get_rng_state()
    tc.manual_seed(0)
    model = DigitsTransformer(num_layers=1, num_attention_heads=2, attention_head_dim=8)
    for var in model.named_parameters().values():
        var.set(tc.randn(var.shape) * 0.3)
    model.save_pretrained(folder)
    tc.set_rng_state(random_state)
    return folder


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ten images of 8x8 pixels with captions."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for number in range(10):
        pixels = generator.integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a handwritten {number}")
    return folder


@pytest.fixture(scope="session")
def sdxl_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny SDXL pipeline with random weights and tokenizers of 200 tokens."""
    folder = tmp_path_factory.mktemp("sdxl model") / "base"
    for name in SDXL_PARTS:
        shutil.copytree(GOLDEN_SDXL / name, folder / name)
    for name, pad in (("tokenizer", "<|endoftext|>"), ("tokenizer_2", "!")):
        _write_tokenizer(folder / name, pad)
    return folder


@pytest.fixture(scope="session")
def sdxl_file(sdxl_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A single file with the weights of `sdxl_base` under the names of the original SDXL.

    The folder of the file also holds the configurations, but no tokenizer. For such a file, the
    package takes the CLIP tokenizer that it ships. The shipped tokenizer has more tokens than the
    tiny text encoders, so a test that encodes captions with this file must expect an error.
    """
    folder = tmp_path_factory.mktemp("sdxl file")
    path = folder / "single_file.safetensors"
    models = {name: tc.models.load(sdxl_base, subfolder=name) for name in SDXL_PARTS}
    tc.models.save_checkpoint(path, models)
    for name in SDXL_PARTS:
        (folder / name).mkdir()
        shutil.copy(sdxl_base / name / "config.json", folder / name)
    return path


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[[Path, str], None]:
    """A function that writes a small tokenizer with a padding token to a folder."""
    return _write_tokenizer


def _write_tokenizer(folder: Path, pad: str) -> None:
    """Write a CLIP tokenizer of 200 tokens.

    Each character has two tokens: one for the end of a word, and one for the other places in it.
    """
    letters = "abcdefghijklmnopqrstuvwxyz0123456789!#$%&'()*+,-./:;<=>?@[]_"
    tokens = [*letters, *(f"{letter}</w>" for letter in letters)]
    # Fill the vocabulary up to 200 tokens, two of which are the special ones.
    tokens += [f"unused{n}</w>" for n in range(198 - len(tokens))]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    # The tiny text encoders have 17 positions.
    settings = {"pad_token": pad, "model_max_length": 17}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


# Widths and heights of the images in `sdxl_folder`.
SIZES = [(64, 64), (96, 48), (48, 96), (130, 70), (64, 80), (90, 90), (64, 64), (200, 60)]


@pytest.fixture(scope="session")
def sdxl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of eight images of several sizes, with captions."""
    folder = tmp_path_factory.mktemp("photographs")
    generator = np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        coarse = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        image.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}, a blur")
    return folder
