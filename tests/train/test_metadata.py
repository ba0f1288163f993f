"""Metadata about the training, in the headers of adapter files."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.data import DatasetOptions, Source, load_dataset
from trainable_candle.run import train_adapter
from trainable_candle.train import TrainConfig
from trainable_candle.train.metadata import Progress, stamp, training_metadata

Read = Callable[[Path], dict[str, str]]


def metadata(data_entries: dict[str, str] | None = None, **settings: Any) -> dict[str, str]:
    """Return the metadata of a run at step 7, after 2 epochs of a data set of 5 images."""
    config = TrainConfig(**{"model": "sdxl", "output": "o/run", "precision": "bf16", **settings})
    return training_metadata(
        config, Progress(step=7, epoch=2, images=5, started=1.5), data_entries or {}
    )


def test_kohyas_and_modelspecs_entries_hold_the_settings_and_the_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    found = metadata(
        name="sks",
        trigger="sks cup",
        resolution=768,
        prediction_type="v_prediction",
        batch_size=2,
        gradient_accumulation=3,
        data_entries={"modelspec.tags": "cup"},
    )
    expected = {
        "ss_output_name": "sks",
        "ss_epoch": "2",
        "ss_steps": "7",
        "ss_total_batch_size": "6",
        "ss_resolution": "(768, 768)",
        "ss_mixed_precision": "bf16",
        "modelspec.title": "sks",
        "modelspec.date": "2023-11-14T22:13:20Z",
        "modelspec.trigger_phrase": "sks cup",
        "modelspec.resolution": "768x768",
        "modelspec.prediction_type": "v",
        "modelspec.tags": "cup",
    }
    assert expected.items() <= found.items()
    # Without a name, the title is the name of the output folder.
    assert metadata()["modelspec.title"] == "run"
    assert "modelspec.trigger_phrase" not in metadata()


def test_stamp_writes_the_hash_of_the_tensors(tmp_path: Path, read_metadata: Read) -> None:
    path = tmp_path / "a.safetensors"
    # `metadata()` has zeros in place of both hashes; `stamp` replaces the zeros.
    tc.save_file({"x": tc.ones(3)}, path, metadata=metadata())
    stamp(path)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    expected = hashlib.sha256(data[8 + length :]).hexdigest()
    found = read_metadata(path)
    assert found["sshs_model_hash"] == expected
    assert found["modelspec.hash_sha256"] == f"0x{expected}"
    assert tc.load_file(path)["x"].tolist() == [1, 1, 1]
    stamp(path)  # A second stamp changes nothing.
    assert path.read_bytes() == data


def test_stamp_leaves_a_file_without_metadata_as_it_is_and_ignores_a_missing_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.safetensors"
    tc.save_file({"x": tc.ones(3)}, path)
    before = path.read_bytes()
    stamp(path)
    stamp(tmp_path / "missing.safetensors")
    assert path.read_bytes() == before


def test_metadata_of_a_dataset_has_its_folders_tags_and_buckets(digits_folder: Path) -> None:
    options = DatasetOptions((Source(digits_folder, repeats=2.0),), resolution=8, bucket_step=8)
    found = load_dataset(options).metadata()
    count = len(list(digits_folder.glob("*.png")))
    name = digits_folder.name
    assert json.loads(found["ss_dataset_dirs"]) == {name: {"n_repeats": 2, "img_count": count}}
    # Commas separate tags, so each caption, such as "a handwritten 3", is a single tag.
    assert sum(json.loads(found["ss_tag_frequency"])[name].values()) == count
    buckets = json.loads(found["ss_bucket_info"])["buckets"]
    assert buckets == {"0": {"resolution": [8, 8], "count": count}}


def test_every_adapter_file_of_a_run_has_metadata(config: TrainConfig, read_metadata: Read) -> None:
    run = train_adapter(config.with_(name="digit"), progress=False, report=lambda _: None)
    files = sorted(run.output.glob("digit*.safetensors"))
    assert len(files) == 3  # `config` saves at steps 5 and 10, and at the end, 12
    hashes = [read_metadata(path)["sshs_model_hash"] for path in files]
    assert len(set(hashes)) == 3
    # The header would still have zeros in place of the hash if the run did not call `stamp`.
    assert "0" * 64 not in hashes
