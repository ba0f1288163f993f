"""Failures while a cache is filled: the error is clear, and all entries that remain are whole."""

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle.data import (
    CacheOptions,
    Dataset,
    DatasetOptions,
    LatentCache,
    cache_folder,
    load_dataset,
    parse_sources,
)
from trainable_candle.errors import DatasetError, FileError

MakeImages = Callable[..., list[Path]]
DISK = CacheOptions("disk")
IDENTITY: dict[str, str] = {}
"""The identity of the encoder: the same for all caches of these tests."""


def load(folder: Path) -> Dataset:
    return load_dataset(DatasetOptions(parse_sources(folder), resolution=64))


def encode(pixels: npt.NDArray[np.uint8]) -> dict[str, tc.Tensor]:
    """Make features of almost 128 KiB (3 * 10922 values of 4 bytes) from each image of 64x64 px."""
    features = np.repeat(pixels.reshape(len(pixels), 1, -1).astype(np.float32), 3, 1)[:, :, :10922]
    return {"x": tc.tensor(np.ascontiguousarray(features))}


def expect_whole(folder: Path, data: Dataset, count: int) -> None:
    """Assert that the cache has `count` entries, all whole, and that another run makes the rest."""
    assert len(list(folder.rglob("*.safetensors"))) == count
    assert list(folder.rglob("*.partial")) == []
    cache = LatentCache(data, encode, DISK, IDENTITY, folder=folder)
    assert str(cache.fill()) == f"{count} found, {len(data) - count} made"
    for batch in data.fixed_batches(1):
        expected = encode(data.pixels(batch.views[0])[None])["x"].numpy()
        np.testing.assert_array_equal(cache.batch(batch)["x"].numpy(), expected)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 1 MiB."""
    target = tmp_path / "small disk"
    target.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(target)]
    if (
        not shutil.which("mount")
        or subprocess.run(command, check=False, capture_output=True).returncode
    ):
        pytest.skip("this test mounts a file system, which needs root")
    try:
        yield target
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


def test_a_vanished_image_ends_the_encoding_and_earlier_entries_remain(
    images: MakeImages, tmp_path: Path
) -> None:
    # 30 images of 64x64 px with the names 00.png to 29.png. They are encoded in this order.
    paths = images("a", *[(64, 64)] * 30)
    data = load(tmp_path / "a")
    hidden = paths[25].rename(tmp_path / "hidden.png")
    cache = LatentCache(data, encode, DISK, IDENTITY, folder=tmp_path / "c")
    with pytest.raises(DatasetError, match=r"25\.png: has vanished; leave the images alone"):
        cache.fill()
    hidden.rename(paths[25])
    expect_whole(tmp_path / "c", data, 25)


def test_an_image_that_changed_is_not_encoded_under_its_old_key(
    images: MakeImages, tmp_path: Path
) -> None:
    paths = images("a", *[(64, 64)] * 3)
    data = load(tmp_path / "a")
    Image.new("RGB", (64, 64), "red").save(paths[1])
    cache = LatentCache(data, encode, DISK, IDENTITY, folder=tmp_path / "c")
    with pytest.raises(DatasetError, match=r"01\.png: has changed since it was checked"):
        cache.fill()
    # The entry of the first image remains.
    expect_whole(tmp_path / "c", load(tmp_path / "a"), 1)


def test_a_full_disk_ends_the_encoding_and_earlier_entries_remain(
    images: MakeImages, tmp_path: Path, small_disk: Path
) -> None:
    images("a", *[(64, 64)] * 30)
    data = load(tmp_path / "a")
    cache = LatentCache(data, encode, DISK, IDENTITY, folder=small_disk)
    with pytest.raises(FileError, match="the cache cannot be written: No space left") as caught:
        cache.fill()
    assert str(caught.value).startswith(str(small_disk))
    count = len(list(small_disk.rglob("*.safetensors")))
    # The disk of 1 MiB has room for at most 8 entries of 128 KiB; the lower bound is loose.
    assert 4 <= count <= 8
    shutil.copytree(small_disk, tmp_path / "larger")
    expect_whole(tmp_path / "larger", data, count)


def test_an_incomplete_entry_is_not_left_behind(images: MakeImages, tmp_path: Path) -> None:
    images("a", *[(64, 64)] * 5)
    data = load(tmp_path / "a")
    cache = LatentCache(data, encode, DISK, IDENTITY, folder=tmp_path / "c")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    _, hard_limit = limits
    # This limit of the size of files, in bytes, is below the size of an entry.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard_limit))
    try:
        with pytest.raises(FileError, match="the cache cannot be written: File too large"):
            cache.fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    expect_whole(tmp_path / "c", data, 0)


def test_the_cache_of_images_on_a_read_only_disk_is_in_the_output_folder(
    images: MakeImages, tmp_path: Path, small_disk: Path
) -> None:
    # The function writes to a folder below `tmp_path`, where the disk is mounted.
    images(small_disk.name, (64, 64))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    data = load(small_disk)
    folder, note = cache_folder(DISK, data.options, tmp_path / "out")
    assert folder == tmp_path / "out" / ".trainable-candle"
    assert note is not None
    assert "cannot be written to: Read-only file system; the cache is in" in note
    expect_whole(folder, data, 0)
