"""`merge` of image models, mostly with `--to fp8` and `--to int8`.

The tests check the files in ComfyUI's format, and the losses and notes that `merge` prints.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.families.merging import (
    check_codes,
    check_that_loading_keeps_codes,
    losses_in,
    make_adapter,
    merge,
    raw_tensors,
)

import trainable_candle as tc
from trainable_candle.run import train_adapter
from trainable_candle.train import TrainConfig

# A fixture: a family's name, its pipeline's folder, a file with the transformer in the original
# format, and settings with the files of the autoencoder and of the text encoders.
from .test_parts import files  # noqa: F401


@pytest.mark.parametrize("to", ["fp8", "int8"])
def test_files_have_comfyuis_format_and_loading_keeps_their_codes(
    files: tuple[str, Path, Path, TrainConfig],  # noqa: F811
    tmp_path: Path,
    to: str,
) -> None:
    name, base, weights, config = files
    adapter = make_adapter(base, "transformer", tmp_path / "adapter.safetensors")
    given = ["--model", name, "--weights", str(weights), "--adapter", str(adapter)]
    given += ["--vae", str(config.vae)]
    given += [word for path in config.text_encoder for word in ("--text-encoder", str(path))]
    plain, written = tmp_path / "plain.safetensors", tmp_path / "written.safetensors"
    assert merge(given, plain) == 0
    assert merge(given, written, "--to", to) == 0
    quantized = check_codes(plain, written, to)
    # Files in the original format join some of diffusers' layers, except those of Qwen-Image.
    has_joined_layers = any("qkv" in key or "linear1" in key for key in quantized)
    assert has_joined_layers == (name != "qwen-image")
    check_that_loading_keeps_codes(written, "transformer", to)


@pytest.mark.parametrize("to", ["fp8", "int8"])
def test_the_losses_before_and_after_merging_are_printed(
    files: tuple[str, Path, Path, TrainConfig],  # noqa: F811
    tmp_path: Path,
    sdxl_folder: Path,
    to: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Merging and rounding change the loss, but by less than 10 %."""
    name, base, _, _ = files
    adapter = make_adapter(base, "transformer", tmp_path / "adapter.safetensors")
    given = ["--model", name, "--weights", str(base), "--adapter", str(adapter)]
    data = ("--dataset", str(sdxl_folder), "--resolution", "32", "--max-side", "48")
    assert merge(given, tmp_path / "written.safetensors", "--to", to, *data) == 0
    before, after = losses_in(capsys.readouterr().out)
    assert after != before
    assert abs(after - before) < 0.1 * before


def test_impossible_outputs_are_errors_before_the_data_set_is_read(
    flux_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The data set does not exist either: reading it first would give another error.
    given = ["--model", "flux", "--weights", str(flux_base), "--dataset", str(tmp_path / "none")]
    assert merge(given, tmp_path / "folder", "--to", "fp8") == 2
    assert "with --to fp8, expected the name of a new .safetensors file" in capsys.readouterr().err
    (existing := tmp_path / "existing.safetensors").touch()
    assert merge(given, existing, "--to", "fp8") == 2
    assert f"--output is {existing}, which exists; expected a new file" in capsys.readouterr().err
    assert existing.stat().st_size == 0
    assert merge(given, tmp_path / "no" / "file.safetensors", "--to", "fp8") == 2
    assert f"but there is no folder {tmp_path / 'no'}; make it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "flags", "note"),
    [
        # With base_precision "same", the base keeps the format of its files. `note` is a part of
        # the expected note; empty if none is expected.
        (
            {"base_precision": "nf4"},
            [],
            "trained over a base in nf4, but here the base is in its own",
        ),
        ({"base_precision": "nf4"}, ["--base-precision", "nf4"], ""),
        ({"qat": "int8", "base_precision": "same"}, [], "use merge --to int8"),
        ({"qat": "int8", "base_precision": "same"}, ["--to", "int8"], ""),
    ],
    ids=["nf4 base", "nf4 base, nf4 merged", "int8 QAT", "int8 QAT, int8 merged"],
)
def test_a_note_appears_unless_the_merge_quantizes_as_the_training_did(
    flux_base: Path,
    configure: Callable[..., TrainConfig],
    tmp_path: Path,
    settings: dict[str, str],
    flags: list[str],
    note: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = train_adapter(configure("flux", flux_base, steps=1, **settings))
    capsys.readouterr()
    given = ["--model", "flux", "--weights", str(flux_base), "--adapter", str(result.adapter_path)]
    assert merge(given, tmp_path / "merged.safetensors", *flags) == 0
    printed = capsys.readouterr().out
    assert ("note: adapter" in printed) == bool(note)
    assert note in printed


@pytest.mark.parametrize("to", ["fp8", "int8"])
def test_a_model_is_quantized_without_an_adapter(
    flux_base: Path, tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with this file reads its codes, instead of quantizing the original weights again."""
    path = tmp_path / "quantized.safetensors"
    given = ["--model", "flux", "--weights", str(flux_base)]
    assert merge(given, path, "--to", to) == 0
    assert f"quantized model: {path}" in capsys.readouterr().out
    read: dict[str, Any] = {"dtype": "f32", "subfolder": "transformer"}
    original = tc.models.load(flux_base, **read).named_tensors()
    found = tc.models.load(path, **read, quantize=to).named_tensors()
    for key, value in original.items():
        # fp8 errs most: it has three fraction bits.
        error = np.abs(found[key].numpy() - value.numpy()).max()
        assert error <= np.abs(value.numpy()).max() / 16, key
    assert tc.inspect(path, "flux").parts["transformer"].stored_format == to


def test_an_adapter_is_merged_into_a_quantized_file(
    flux_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The merged file has only f32 weights: no codes, and no tensors that describe codes."""
    stored = tmp_path / "stored.safetensors"
    assert merge(["--model", "flux", "--weights", str(flux_base)], stored, "--to", "fp8") == 0
    adapter = make_adapter(flux_base, "transformer", tmp_path / "adapter.safetensors")
    given = ["--model", "flux", "--weights", str(stored), "--adapter", str(adapter)]
    assert merge(given, tmp_path / "merged.safetensors") == 0
    assert "note: the base was dequantized from fp8" in capsys.readouterr().out
    assert {dtype for dtype, _ in raw_tensors(tmp_path / "merged.safetensors").values()} == {"F32"}


def test_a_note_is_printed_once_although_the_adapter_is_loaded_twice(
    flux_base: Path, sdxl_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # With --dataset, `merge` loads model and adapter for the first loss, and again to merge them.
    adapter = make_adapter(flux_base, "transformer", tmp_path / "plain.safetensors")
    path = tmp_path / "adapter.safetensors"
    metadata = {"trainable_candle.base_precision": "nf4"}
    tc.save_file(tc.load_file(adapter), path, metadata)
    given = ["--model", "flux", "--weights", str(flux_base), "--adapter", str(path)]
    data = ("--dataset", str(sdxl_folder), "--resolution", "32", "--max-side", "48")
    assert merge(given, tmp_path / "written.safetensors", "--to", "fp8", *data) == 0
    assert capsys.readouterr().out.count("note: ") == 1
