"""Filling caches: memory use, the encoder's batches, and the entries that failures leave."""

import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import trainable_candle as tc
from trainable_candle.data import (
    CacheOptions,
    CaptionOptions,
    Dataset,
    DatasetOptions,
    ImageFile,
    LatentCache,
    TextCache,
    View,
    load_dataset,
    parse_sources,
)
from trainable_candle.data.buckets import Buckets
from trainable_candle.data.cache import FeatureStore
from trainable_candle.data.item import Item
from trainable_candle.data.kept import PENDING
from trainable_candle.data.pixels import AHEAD, in_parallel
from trainable_candle.errors import DatasetError

MakeImages = Callable[..., list[Path]]
SIDE = 16
DISK = CacheOptions("disk")
IDENTITY: dict[str, str] = {}
"""What a cache's results depend on besides the inputs, such as the encoder's weights: nothing."""


class LiveCount:
    """Counts objects that are alive, and keeps the largest count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.alive = self.most = 0

    def counted(self, thing: Any) -> Any:
        """Count an object until it is freed, and return it."""
        with self._lock:
            self.alive += 1
            self.most = max(self.most, self.alive)
        weakref.finalize(thing, self._gone)
        return thing

    def _gone(self) -> None:
        with self._lock:
            self.alive -= 1


class Generated(Dataset):
    """A data set that generates its images on request, and counts those in memory."""

    def __init__(self, count: int) -> None:
        # No files are read, so there need be no folder "none".
        options = DatasetOptions(parse_sources("none"), resolution=SIDE, bucket_step=8)
        fit = Buckets(options).fit(SIDE, SIDE)
        assert fit is not None
        items = [
            Item(
                ImageFile(
                    Path(f"{number}.png"), caption="", width=SIDE, height=SIDE,
                    digest=f"{number:032x}",
                ),
                fit, trigger="", loss_weight=1.0, repeats=1.0, mask="off",
            )
            for number in range(count)
        ]  # fmt: skip
        super().__init__(items, options, CaptionOptions(), seed=0, summary="")
        self.decoded = LiveCount()

    def pixels(self, view: View) -> npt.NDArray[np.uint8]:
        return self.decoded.counted(np.full((SIDE, SIDE, 3), view.item % 256, np.uint8))


def means(pixels: npt.NDArray[np.uint8]) -> dict[str, tc.Tensor]:
    """Encode images of shape (n, height, width, 3) as their mean colours, (n, 3)."""
    return {"mean": tc.tensor(pixels.astype(np.float32).mean((1, 2)))}


@pytest.mark.parametrize(("count", "batch_size"), [(300, 1), (10_000, 4)])
def test_memory_does_not_grow_with_the_number_of_images(
    tmp_path: Path, count: int, batch_size: int
) -> None:
    data, encoded, written = Generated(count), [0], [0]
    # For each call of the encoder: how many of the images that it has got so far are not written.
    unwritten = []
    write = FeatureStore.write

    def encode(pixels: npt.NDArray[np.uint8]) -> dict[str, tc.Tensor]:
        encoded[0] += len(pixels)
        unwritten.append(encoded[0] - written[0])
        return means(pixels)

    def write_and_count(*given: Any) -> None:
        write(*given)
        written[0] += 1

    area = batch_size * SIDE * SIDE
    cache = LatentCache(data, encode, DISK, IDENTITY, folder=tmp_path, encode_area=area)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureStore, "write", write_and_count)
        assert str(cache.fill()) == f"0 found, {count} made"
    # At any time, memory holds only the images that are decoded ahead, the image that is passed on,
    # and the images of one batch.
    assert data.decoded.most <= AHEAD + batch_size + 1
    assert data.decoded.alive == 0
    # Memory holds the batch being encoded, the batch being written, and the queued batches.
    assert max(unwritten) <= (PENDING + 2) * batch_size
    # Each of these batches has one image; image n has the colour n % 256.
    last = data.fixed_batches(1)[-1]
    np.testing.assert_array_equal(cache.batch(last)["mean"].numpy(), [[(count - 1) % 256] * 3])


def test_parallel_results_come_in_order_and_a_failure_stops_the_tasks() -> None:
    assert list(in_parallel(lambda n: n * n, range(100))) == [n * n for n in range(100)]
    begun = []

    def fail_at_ten(number: int) -> int:
        begun.append(number)
        return 1 // (number - 10)

    with pytest.raises(ZeroDivisionError):
        list(in_parallel(fail_at_ten, range(10_000)))
    assert max(begun) <= 10 + AHEAD


def test_images_of_the_same_bucket_are_encoded_together(images: MakeImages, tmp_path: Path) -> None:
    # Sizes are (width, height). The last image is scaled to 64x64, so there are six of this size.
    images("a", *[(64, 64)] * 5, *[(32, 64)] * 3, (128, 128))
    options = DatasetOptions(parse_sources(tmp_path / "a"), resolution=64, bucket_step=32)
    data = load_dataset(options)
    shapes = []  # of the encoded batches: (images, height, width)

    def encode(pixels: npt.NDArray[np.uint8]) -> dict[str, tc.Tensor]:
        shapes.append(pixels.shape[:3])
        return means(pixels)

    def shapes_at(area: int) -> list[tuple[int, ...]]:
        """Return the shapes if a batch of several images has at most `area` pixels."""
        shapes.clear()
        cache = LatentCache(data, encode, CacheOptions("memory"), IDENTITY, encode_area=area)
        cache.fill()
        for batch in data.fixed_batches(1):
            expected = means(data.pixels(batch.views[0])[None])["mean"].numpy()
            np.testing.assert_array_equal(cache.batch(batch)["mean"].numpy(), expected)
        return sorted(shapes)

    assert shapes_at(0) == [(1, 64, 32)] * 3 + [(1, 64, 64)] * 6
    assert shapes_at(64 * 64) == sorted([(2, 64, 32), (1, 64, 32)] + [(1, 64, 64)] * 6)
    assert shapes_at(4 * 64 * 64) == sorted([(3, 64, 32), (4, 64, 64), (2, 64, 64)])


def test_captions_of_the_same_size_are_encoded_together(tmp_path: Path) -> None:
    calls = []

    def encode(captions: Sequence[str]) -> dict[str, tc.Tensor]:
        calls.append(list(captions))
        return {"length": tc.tensor([[float(len(caption))] for caption in captions])}

    def size_of(caption: str) -> int:
        return len(caption.split())

    # The size of a caption is its number of words. A batch has captions of equal size, and their
    # sizes add up to at most 4, unless one caption is larger. The empty caption is always encoded,
    # first. The sizes follow in the order in which they first occur.
    captions = ["a b", "c", "d e", "f", "g h i j k", "l m", "n o p q r"]
    cache = TextCache(encode, DISK, IDENTITY, folder=tmp_path, most_size=4, size_of=size_of)
    cache.fill(captions)
    assert calls == [
        [""], ["a b", "d e"], ["l m"], ["c", "f"], ["g h i j k"], ["n o p q r"]
    ]  # fmt: skip
    assert cache.batch(captions)["length"].tolist() == [[float(len(c))] for c in captions]


def test_progress_is_reported_only_for_many_images() -> None:
    lines: list[str] = []
    data = Generated(200)
    memory = CacheOptions("memory")
    # The encoder gets 64 images at once. A line is due when another tenth of the images is done,
    # so here after each batch. For fewer than 100 images there are no lines.
    area = 64 * SIDE * SIDE
    LatentCache(data, means, memory, IDENTITY, encode_area=area).fill(report=lines.append)
    assert lines == [f"latents: {count} of 200 encoded" for count in (64, 128, 192, 200)]
    lines.clear()
    LatentCache(Generated(99), means, memory, IDENTITY).fill(report=lines.append)
    assert lines == []


def test_an_entry_that_cannot_be_written_ends_the_filling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, write = [0], FeatureStore.write

    def encode(pixels: npt.NDArray[np.uint8]) -> dict[str, tc.Tensor]:
        encoded[0] += 1
        return means(pixels)

    def write_at_most_five(store: FeatureStore, key: str, *given: Any) -> None:
        if len(list(store.folder.glob("*.safetensors"))) >= 5:
            raise OSError(28, "No space left on device", key)
        write(store, key, *given)

    monkeypatch.setattr(FeatureStore, "write", write_at_most_five)
    data = Generated(100)
    with pytest.raises(OSError, match="No space left"):
        LatentCache(data, encode, DISK, IDENTITY, folder=tmp_path).fill()
    # By default, a batch of the encoder has one image. Five entries were written, the sixth failed,
    # `PENDING` were queued, and one was being encoded.
    assert encoded[0] <= 7 + PENDING
    assert len(list(tmp_path.rglob("*.safetensors"))) == 5
    assert list(tmp_path.rglob("*.partial")) == []
    monkeypatch.undo()
    again = LatentCache(data, means, DISK, IDENTITY, folder=tmp_path)
    assert str(again.fill()) == "5 found, 95 made"


def test_entries_that_were_encoded_before_the_encoder_fails_are_kept(tmp_path: Path) -> None:
    calls = [0]

    def encode(pixels: npt.NDArray[np.uint8]) -> dict[str, tc.Tensor]:
        calls[0] += 1  # a call encodes one image
        if calls[0] == 8:
            raise DatasetError("the eighth")
        return means(pixels)

    data = Generated(20)
    with pytest.raises(DatasetError, match="the eighth"):
        LatentCache(data, encode, DISK, IDENTITY, folder=tmp_path).fill()
    assert (
        str(LatentCache(data, means, DISK, IDENTITY, folder=tmp_path).fill()) == "7 found, 13 made"
    )
