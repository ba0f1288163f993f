"""Caches of latents and text features: the entries that a run finds or makes, and batches."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle.data import (
    CacheOptions,
    ColorOptions,
    Dataset,
    DatasetOptions,
    LatentCache,
    TextCache,
    cache_folder,
    kept,
    load_dataset,
    parse_sources,
)
from trainable_candle.data.entries import facts_of, intact_facts, packed
from trainable_candle.errors import ConfigError, DatasetError

# The fixture `images` writes noise images `00.png`, `01.png` and so on into a folder below
# `tmp_path`, one for each size (width, height), with captions that begin with "image 0" and so on.
MakeImages = Callable[..., list[Path]]
SIZES = [(64, 64), (64, 64), (48, 80), (64, 64)]
DISK = CacheOptions("disk")


class Encoder:
    """Replaces a VAE: computes means over squares of 8x8 px, and records the size of each batch."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, pixels: npt.NDArray[np.uint8]) -> dict[str, tc.Tensor]:
        self.calls.append(len(pixels))
        n, height, width, _ = pixels.shape
        squares = pixels.reshape(n, height // 8, 8, width // 8, 8, 3).mean(axis=(2, 4))
        return {
            "mean": tc.tensor(squares.astype(np.float32)),
            "half": tc.ones((n, 2), dtype="bf16"),
        }


def load(folder: Path, **settings: Any) -> Dataset:
    options = DatasetOptions(parse_sources(folder), resolution=64, bucket_step=16, **settings)
    return load_dataset(options)


def make_cache(
    data: Dataset, folder: Path | None, options: CacheOptions = DISK, **more: Any
) -> tuple[LatentCache, Encoder]:
    """Return a cache that is not filled yet, and its encoder."""
    encoder = Encoder()
    identity = more.pop("identity", {"vae": "a"})
    return LatentCache(data, encoder, options, identity, folder=folder, **more), encoder


@pytest.mark.parametrize("kind", ["disk", "memory", "off"])
def test_batches_hold_what_the_encoder_returned(
    kind: str, images: MakeImages, tmp_path: Path
) -> None:
    images("a", *SIZES)
    data = load(tmp_path / "a", flip=True, crop="random", random_crops=2)
    # The images that the encoder gets at once have at most `encode_area` pixels: here two images.
    cache, encoder = make_cache(data, tmp_path / "c", CacheOptions(kind), encode_area=2 * 64 * 64)
    cache.fill()
    after_filling = len(encoder.calls)
    batches = data.batches(2)
    for batch in map(batches.batch, range(8)):
        expected = Encoder()(np.stack([data.pixels(view) for view in batch.views]))
        found = cache.batch(batch)
        assert found["half"].dtype == "bf16"
        np.testing.assert_array_equal(found["mean"].numpy(), expected["mean"].numpy())
    # Only without a cache, each batch is encoded when it is needed.
    assert (len(encoder.calls) > after_filling) == (kind == "off")


def test_a_second_run_encodes_nothing_again(images: MakeImages, tmp_path: Path) -> None:
    images("a", *SIZES)
    first, encoder = make_cache(load(tmp_path / "a", flip=True), tmp_path / "c")
    assert str(first.fill()) == "0 found, 8 made"
    # Four images, each also mirrored. By default, the encoder gets one at a time.
    assert encoder.calls == [1] * 8
    data = load(tmp_path / "a", flip=True)
    second, encoder = make_cache(data, tmp_path / "c")
    assert str(second.fill()) == "8 found, 0 made"
    batch = data.batches(2).batch(0)
    np.testing.assert_array_equal(
        second.batch(batch)["mean"].numpy(), first.batch(batch)["mean"].numpy()
    )
    assert encoder.calls == []


# `made` is the number of new entries; None means that the test computes it. Of the four images,
# three are square, and their crop is the same without bucketing. With `color`, each image has four
# variants.
@pytest.mark.parametrize(
    ("settings", "identity", "made"),
    [
        ({"resolution": 32, "max_side": 64}, {"vae": "a"}, 4),
        ({"bucketing": False}, {"vae": "a"}, 1),
        ({"bucketing": False, "crop": "random"}, {"vae": "a"}, None),
        ({"flip": True}, {"vae": "a"}, 4),
        ({"color": ColorOptions(hue=0.1)}, {"vae": "a"}, 16),
        ({}, {"vae": "b"}, 4),
        ({}, {"vae": "a", "dtype": "f16"}, 4),
    ],
    ids=str,
)
def test_changed_settings_or_identities_need_new_entries(
    settings: dict[str, Any],
    identity: dict[str, str],
    made: int | None,
    images: MakeImages,
    tmp_path: Path,
) -> None:
    images("a", (64, 64), (64, 64), (64, 64), (96, 64))
    make_cache(load(tmp_path / "a"), tmp_path / "c")[0].fill()
    merged = {"resolution": 64, "bucket_step": 16, **settings}
    data = load_dataset(DatasetOptions(parse_sources(tmp_path / "a"), **merged))
    # With random crops, each of the three square images has one crop, whose entry exists. All
    # random crops of the wide image are new.
    expected = len(data.views()) - 3 if made is None else made
    assert expected > 0
    assert make_cache(data, tmp_path / "c", identity=identity)[0].fill().made == expected
    assert make_cache(load(tmp_path / "a"), tmp_path / "c")[0].fill().made == 0


def test_an_edited_image_is_encoded_again_and_a_renamed_one_is_not(
    images: MakeImages, tmp_path: Path
) -> None:
    paths = images("a", *SIZES)
    make_cache(load(tmp_path / "a"), tmp_path / "c")[0].fill()
    Image.new("RGB", (64, 64), "red").save(paths[1])
    paths[0].rename(paths[0].with_name("renamed.png"))
    paths[0].with_suffix(".txt").rename(paths[0].with_name("renamed.txt"))
    data = load(tmp_path / "a")
    cache, _ = make_cache(data, tmp_path / "c")
    assert str(cache.fill()) == "3 found, 1 made, 1 outdated or damaged removed"
    red_batch = next(b for b in data.fixed_batches(1) if b.captions[0].startswith("image 1"))
    assert (cache.batch(red_batch)["mean"].numpy()[..., 0] == 255).all()
    assert len(list((tmp_path / "c").rglob("*.safetensors"))) == 4


def test_damaged_entries_are_made_again(images: MakeImages, tmp_path: Path) -> None:
    images("a", *SIZES)
    data = load(tmp_path / "a")
    make_cache(data, tmp_path / "c")[0].fill()
    entries = sorted((tmp_path / "c").rglob("*.safetensors"))
    entries[0].write_bytes(b"")
    entries[1].write_bytes(entries[1].read_bytes()[:-1])
    # An intact entry, but of another image.
    entries[2].write_bytes(entries[3].read_bytes())
    assert make_cache(data, tmp_path / "c")[0].fill().made == 3

    # A folder with the name of an entry is replaced by the entry.
    entries[2].unlink()
    entries[2].mkdir()
    (entries[2] / "file").touch()
    cache, _ = make_cache(data, tmp_path / "c")
    assert cache.fill().made == 1
    for batch in data.fixed_batches(1):
        expected = Encoder()(data.pixels(batch.views[0])[None])["mean"].numpy()
        np.testing.assert_array_equal(cache.batch(batch)["mean"].numpy(), expected)


def test_any_changed_missing_or_added_byte_of_an_entry_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    tensors = {"mean": tc.randn((1, 2, 3)), "half": tc.ones((1, 2), dtype="bf16")}
    whole = packed(tensors, {"source": "an image.png", "key": "1" * 32})

    def noticed(content: bytes) -> bool:
        path.write_bytes(content)
        return intact_facts(path) == {}

    assert not noticed(whole)
    assert facts_of(path) == intact_facts(path)
    assert intact_facts(path)["source"] == "an image.png"
    # Flip the lowest bit, the bit of a letter's case, or all bits.
    for change in (0x01, 0x20, 0xFF):
        unnoticed = [
            place
            for place in range(len(whole))
            if not noticed(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
        ]
        assert unnoticed == []
    assert all(noticed(whole[:length]) for length in range(len(whole)))
    assert all(noticed(whole + bytes(more)) for more in range(1, 9))


def test_an_entry_is_made_again_whichever_of_its_parts_changed(
    images: MakeImages, tmp_path: Path
) -> None:
    images("a", (64, 64))
    data = load(tmp_path / "a")
    make_cache(data, tmp_path / "c")[0].fill()
    (entry,) = (tmp_path / "c").rglob("*.safetensors")
    whole = entry.read_bytes()
    # An entry begins with the length of its header, in 8 bytes. Change the first of them; every
    # seventh byte and the last byte of the header; the first and the last byte of the data.
    data_start = 8 + int.from_bytes(whole[:8], "little")
    for place in (0, *range(8, data_start, 7), data_start - 1, data_start, len(whole) - 1):
        entry.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert make_cache(data, tmp_path / "c")[0].fill().made == 1
        assert entry.read_bytes() == whole


def test_an_entry_is_a_safetensors_file_with_the_given_tensors(tmp_path: Path) -> None:
    tensors = {
        name: (tc.randn((3, 5)) * 100).to(name) for name in ("f64", "f32", "f16", "bf16", "u8")
    }
    path = tmp_path / "a.safetensors"
    # Facts may contain any characters, also half of a surrogate pair.
    path.write_bytes(packed(tensors, {"caption": "\U0001f408 \udcff"}))
    found = tc.load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name].to("f64").numpy(), tensor.to("f64").numpy())


def test_a_missing_entry_and_a_missing_folder_are_errors(
    images: MakeImages, tmp_path: Path
) -> None:
    images("a", (64, 64))
    data = load(tmp_path / "a")
    cache, _ = make_cache(data, tmp_path / "c")
    missing = r"there is no intact entry .* of the kind 'latents' .* fill the cache before"
    with pytest.raises(DatasetError, match=missing):
        cache.batch(data.fixed_batches(1)[0])
    with pytest.raises(DatasetError, match="the kind 'latents' on disk need a folder"):
        make_cache(data, None)


def test_a_killed_run_leaves_only_whole_entries(images: MakeImages, tmp_path: Path) -> None:
    images("a", *[(64, 64)] * 60)
    # Each pixel is repeated 40 times, so that an entry has 2 MB and takes a while to write: a kill
    # may then come in the middle of a file.
    script = (
        "import numpy as np, trainable_candle as tc\n"
        "from trainable_candle.data import *\n"
        f"options = DatasetOptions(parse_sources({str(tmp_path / 'a')!r}), resolution=64)\n"
        "def encode(pixels):\n"
        "    print(flush=True)\n"
        "    return {'x': tc.tensor(np.repeat(pixels, 40, 1).astype(np.float32))}\n"
        "LatentCache(load_dataset(options), encode, CacheOptions('disk'), {},"
        f" folder=__import__('pathlib').Path({str(tmp_path / 'c')!r})).fill()\n"
    )
    # Each run is killed after it has begun to encode this many images.
    begun_counts = (1, 7, 8)
    for begun in begun_counts:
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as run:
            assert run.stdout is not None
            for _ in range(begun):
                assert run.stdout.readline()
            run.send_signal(signal.SIGKILL)
    entries = list((tmp_path / "c").rglob("*.safetensors"))
    # A killed run lacks only the entry that it was encoding, the one that it was writing, and up to
    # PENDING queued ones.
    assert sum(max(0, n - 2 - kept.PENDING) for n in begun_counts) <= len(entries) < 60
    for path in entries:
        assert tc.load_file(path)["x"].shape == (1, 64 * 40, 64, 3)
    old = next((tmp_path / "c").glob("latents-*")) / "x.safetensors.1.partial"
    old.write_bytes(b"incomplete")
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
    assert len(list((tmp_path / "c").rglob("*.safetensors"))) == 60
    # A partial file that is old enough is removed.
    assert not old.exists()


def encode_texts(captions: Sequence[str]) -> dict[str, tc.Tensor]:
    """Replaces text encoders: makes (length of the caption, index of the word) for each word.

    All captions of a call must have equally many words. The empty caption counts as one word.
    """
    counts = [max(1, len(caption.split())) for caption in captions]
    assert len(set(counts)) == 1
    values = [[[len(caption), word] for word in range(counts[0])] for caption in captions]
    return {
        "hidden": tc.tensor(np.array(values, np.float32)),
        "pooled": tc.tensor(np.array([[len(caption)] for caption in captions], np.float32)),
    }


@pytest.mark.parametrize("kind", ["disk", "memory", "off"])
def test_shorter_text_features_are_extended_by_those_of_the_empty_caption(
    kind: str, tmp_path: Path
) -> None:
    def size_of(caption: str) -> int:
        """Return the size of a caption in words; `most_size` limits the sum per encoder call."""
        return len(caption.split())

    captions = ["a b c", "dd", "", "e ff", "dd"]
    options = CacheOptions(kind)
    cache = TextCache(encode_texts, options, {}, folder=tmp_path, most_size=4, size_of=size_of)
    # Four of the five captions are different.
    assert cache.fill(captions).made == (0 if kind == "off" else 4)
    # The features of the empty caption are [0, 0].
    one = cache.batch(["e ff"])
    assert one["hidden"].tolist() == [[[4, 0], [4, 1]]]
    several = cache.batch(["dd", "a b c", ""])
    assert several["hidden"].tolist() == [
        [[2, 0], [0, 0], [0, 0]],
        [[5, 0], [5, 1], [5, 2]],
        [[0, 0], [0, 0], [0, 0]],
    ]
    assert several["pooled"].tolist() == [[2], [5], [0]]
    if kind == "disk":
        again = TextCache(encode_texts, options, {}, folder=tmp_path)
        assert str(again.fill(captions)) == "4 found, 0 made"


def test_an_encoder_with_the_wrong_number_of_rows_is_reported(
    images: MakeImages, tmp_path: Path
) -> None:
    images("a", (64, 64))
    data = load(tmp_path / "a")
    cache = LatentCache(data, lambda _: {"x": tc.ones((2, 3))}, CacheOptions("memory"), {})
    with pytest.raises(DatasetError, match=r"given 1 items and returned `x` of shape \(2, 3\)"):
        cache.fill()


def test_cached_features_need_no_gradient(images: MakeImages, tmp_path: Path) -> None:
    images("a", (64, 64))
    data = load(tmp_path / "a")
    weight = tc.Var(np.ones(3, np.float32))
    cache = LatentCache(
        data, lambda _: {"x": (weight * 2.0).reshape(1, 3)}, CacheOptions("off"), {}
    )
    assert not cache.batch(data.fixed_batches(1)[0])["x"].requires_grad


def test_the_cache_on_disk_is_in_the_data_set_or_in_the_given_folder(
    images: MakeImages, tmp_path: Path
) -> None:
    images("a", (64, 64))
    options = DatasetOptions(parse_sources(tmp_path / "a"), resolution=64)
    folder, note = cache_folder(DISK, options, tmp_path / "out")
    assert (folder, note) == (tmp_path / "a" / ".trainable-candle", None)
    assert cache_folder(CacheOptions("memory"), options, None) == (None, None)
    elsewhere = CacheOptions(folder=tmp_path / "x" / "y")
    assert cache_folder(elsewhere, options, None) == (tmp_path / "x" / "y", None)


def test_the_cache_of_a_read_only_data_set_is_in_the_output_folder(
    images: MakeImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images("a", (64, 64))
    options = DatasetOptions(parse_sources(tmp_path / "a"), resolution=64)

    # Permissions do not stop root, so this test makes mkdir fail instead.
    mkdir = Path.mkdir

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        if tmp_path / "a" in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    folder, note = cache_folder(DISK, options, tmp_path / "out")
    assert folder == tmp_path / "out" / ".trainable-candle"
    assert note is not None
    assert "cannot be written to: Permission denied; the cache is in" in note
    with pytest.raises(ConfigError, match="cannot be written to"):
        cache_folder(DISK, options, None)


def test_the_files_of_the_cache_are_not_read_as_images(images: MakeImages, tmp_path: Path) -> None:
    images("a", (64, 64))
    options = DatasetOptions(
        parse_sources([{"path": tmp_path / "a", "recursive": True}]), resolution=64
    )
    folder, _ = cache_folder(DISK, options, None)
    make_cache(load_dataset(options), folder)[0].fill()
    assert len(load_dataset(options)) == 1


def test_entries_beyond_the_memory_limits_are_read_from_disk_each_time(
    images: MakeImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images("a", *SIZES)
    data = load(tmp_path / "a")
    # An entry has at most 8 * 8 * 3 values of 4 bytes and 2 values of 2 bytes, 772 bytes in all.
    # The limit of the device has room for one entry. The limit of all memory, on the device and the
    # host together, has room for two.
    monkeypatch.setattr(kept, "DEVICE_LIMIT", 800)
    monkeypatch.setattr(kept, "MEMORY_LIMIT", 1600)
    cache, _ = make_cache(data, tmp_path / "c")
    cache.fill()
    entries = list((tmp_path / "c").rglob("*.safetensors"))
    assert len(entries) == 4
    batches = data.fixed_batches(1)
    for _ in range(2):
        for batch in batches:
            expected = Encoder()(data.pixels(batch.views[0])[None])["mean"].numpy()
            np.testing.assert_array_equal(cache.batch(batch)["mean"].numpy(), expected)
    for path in entries:
        path.unlink()
    # The entries of the first two batches are in memory; the others are read from disk each time.
    for batch in batches[:2]:
        cache.batch(batch)
    for batch in batches[2:]:
        with pytest.raises(DatasetError, match=r"no intact entry .* of the kind 'latents'"):
            cache.batch(batch)
