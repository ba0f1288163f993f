"""A file with all parts of SD3.5 trains and draws on the command line as the pipeline's folder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle.cli import main
from trainable_candle.models import CLIPTextModel

CLIPS = ("text_encoder", "text_encoder_2")
PARTS = ("transformer", "vae", *CLIPS, "text_encoder_3")
# The sizes of CLIP's published vocabulary and of its rows of tokens. A file holds no tokenizer, so
# the tokenizer is the package's own, which has these sizes.
VOCABULARY = {"vocab_size": 49_408, "max_position_embeddings": 77, "eos_token_id": 49_407}


@pytest.fixture(scope="module")
def folder(sd3_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny pipeline of SD3 without tokenizers, with encoders of CLIP's vocabulary."""
    folder = tmp_path_factory.mktemp("sd3") / "base"
    shutil.copytree(sd3_base, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    for seed, name in enumerate(CLIPS):
        path = folder / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | VOCABULARY))
        tc.manual_seed(seed)
        CLIPTextModel.from_config(path).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    """Return a file with all parts of `folder` under their original names."""
    path = folder.parent / "sd3.5_tiny.safetensors"
    tc.models.save_checkpoint(
        path, {name: tc.models.load(folder, subfolder=name) for name in PARTS}
    )
    return path


def adapter_and_image(weights: Path, images: Path, output: Path) -> tuple[Path, Path]:
    """Train for one step, and draw with the adapter; return the adapter and the image."""
    base = ["--model", "sd3", "--weights", str(weights), "--device", "cpu", "--precision", "f32"]
    size = ["--resolution", "32", "--max-side", "48", "--rank", "2"]
    rates = ["--learning-rate", "1e-2", "--max-grad-norm", "0", "--batch-size", "2"]
    data = ["--dataset", str(images), "--cache-dir", str(output / "cache"), "--steps", "1"]
    run = ["--output", str(output / "run"), "--target-modules", "all-linear"]
    assert main(["train", *base, *size, *rates, *data, *run]) == 0
    adapter, image = output / "run" / "adapter.safetensors", output / "image.png"
    prompt = ["--prompt", "a red blur", "--size", "32x16", "--steps", "2", "--seed", "3"]
    drawing = ["--adapter", str(adapter), *prompt, "--output", str(image)]
    assert main(["sample", *base, *drawing]) == 0
    return adapter, image


def test_a_file_with_all_parts_of_sd3_trains_and_draws_as_its_folder(
    folder: Path, file: Path, sdxl_folder: Path, tmp_path: Path
) -> None:
    """The adapters of both runs, and the images drawn with them, have equal bits.

    `sdxl_folder` has the images and captions to train on.
    """
    assert {name.partition(".")[0] for name in tc.load_file(file)} == {
        "model", "first_stage_model", "text_encoders",
    }  # fmt: skip
    results = [
        adapter_and_image(weights, sdxl_folder, tmp_path / weights.stem)
        for weights in (folder, file)
    ]
    expected, found = (tc.load_file(adapter) for adapter, _ in results)
    assert found.keys() == expected.keys()
    assert any(np.any(t.numpy() != 0) for name, t in found.items() if ".lora_B." in name)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), tensor.numpy(), name)
    pixels = [np.asarray(Image.open(image)) for _, image in results]
    np.testing.assert_array_equal(*pixels)
    assert pixels[0].std() > 0
