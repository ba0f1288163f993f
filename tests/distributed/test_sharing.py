"""Processes divide the filling of caches and the validation: no item is computed by two of them.

Here, a thread stands for each process.
"""

import json
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

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
    TextCache,
    load_dataset,
    parse_sources,
)
from trainable_candle.data.entries import packed, unpacked
from trainable_candle.distributed import dealing
from trainable_candle.distributed.dealing import measured
from trainable_candle.distributed.group import Alone, Group
from trainable_candle.distributed.processes import Processes
from trainable_candle.distributed.world import World
from trainable_candle.errors import DatasetError, DistributedError

Result = TypeVar("Result")
DISK = CacheOptions("disk")


def together(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """Run `work` on `size` ranks; return its results in the order of the ranks."""
    # The path of a Unix socket must be short; those of pytest's folders may be too long.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:

        def run(rank: int) -> Result:
            # All ranks are on one machine, so local ranks are ranks.
            address = f"{folder}/meeting"
            world = World(rank, size, rank, size, address, job="job", join_seconds=20.0)
            group = Processes(world, "cpu", facts={})
            try:
                return work(group)
            except BaseException as error:
                group.fail(f"rank {rank}: {error}")
                raise
            finally:
                group.close()

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(run, range(size)))


class Encoder:
    """Computes the mean of each channel of each image, and records the first mean in `seen`."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, pixels: npt.NDArray[np.uint8]) -> dict[str, tc.Tensor]:
        means = pixels.astype(np.float32).mean(axis=(1, 2))
        with self._lock:
            self.seen += [int(mean) for mean in means[:, 0]]
        return {"mean": tc.tensor(means)}


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    """Write and load eleven grey images of two widths; all pixels of image N have the value N."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(11):
        width = 64 if number % 3 else 48
        Image.new("RGB", (width, 64), (number,) * 3).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text("grey")
    return load_dataset(DatasetOptions(parse_sources(folder), resolution=64, bucket_step=16))


def filled(
    data: Dataset, encoder: Any, group: Group, folder: Path, options: CacheOptions = DISK
) -> tuple[str, list[float]]:
    """Fill a cache; return its report and the values of all images, read from the cache."""
    area = 2 * 64 * 64  # Encode at most two images of 64 x 64 pixels at a time.
    cache = LatentCache(data, encoder, options, identity={}, folder=folder, encode_area=area)
    report = str(cache.fill(group=group))
    batches = data.fixed_batches(1)
    return report, [float(cache.batch(batch)["mean"][0, 0].item()) for batch in batches]


@pytest.mark.parametrize("size", [2, 3])
def test_every_image_is_encoded_once(data: Dataset, tmp_path: Path, size: int) -> None:
    encoder = Encoder()
    found = together(size, lambda group: filled(data, encoder, group, tmp_path / "cache"))
    assert sorted(encoder.seen) == list(range(11))
    assert [report for report, _ in found] == ["0 found, 11 made"] * size
    assert all(sorted(values) == list(range(11)) for _, values in found)
    again = together(size, lambda group: filled(data, encoder, group, tmp_path / "cache"))
    assert [report for report, _ in again] == ["11 found, 0 made"] * size
    assert len(encoder.seen) == 11


def test_two_processes_encode_about_half_each(data: Dataset, tmp_path: Path) -> None:
    encoders = [Encoder(), Encoder()]
    together(2, lambda group: filled(data, encoders[group.rank], group, tmp_path / "cache"))
    assert sorted(len(encoder.seen) for encoder in encoders) == [5, 6]


@pytest.mark.parametrize("kind", ["disk", "memory"])
@pytest.mark.parametrize("size", [2, 3])
def test_processes_receive_entries_that_they_cannot_read(
    data: Dataset, tmp_path: Path, kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries are in the memory of other processes, or in folders of other machines."""
    # With so few bytes in a round of messages, the entries take several rounds.
    monkeypatch.setattr(dealing, "_PIECE", 1000)
    encoder = Encoder()

    def work(group: Group) -> tuple[str, list[float]]:
        folder = tmp_path / str(group.rank)
        return filled(data, encoder, group, folder, options=CacheOptions(kind))

    found = together(size, work)
    assert sorted(encoder.seen) == list(range(11))
    assert [report for report, _ in found] == ["0 found, 11 made"] * size
    assert all(sorted(values) == list(range(11)) for _, values in found)
    # Ranks 0 and 1 have files of the same names; with "memory", neither has a file.
    files = [sorted(path.name for path in (tmp_path / str(rank)).rglob("*.*")) for rank in range(2)]
    assert files[0] == files[1]


def test_a_machine_receives_the_entries_that_its_folder_lacks(
    data: Dataset, tmp_path: Path
) -> None:
    """Rank 0 begins with all entries, rank 1 with none."""
    filled(data, Encoder(), Alone(), tmp_path / "0")
    encoder = Encoder()
    found = together(2, lambda group: filled(data, encoder, group, tmp_path / str(group.rank)))
    assert all(sorted(values) == list(range(11)) for _, values in found)
    # All 11 entries are missing in rank 1, so the ranks divide all of them: every second one is for
    # rank 1, which encodes these 5. Rank 0 has the other 6 already: it encodes nothing, and sends
    # them to rank 1.
    assert len(encoder.seen) == 5


def test_sent_entries_keep_every_bit() -> None:
    values = np.random.default_rng(0).normal(size=(1, 3, 2))
    tensors = {
        name: tc.tensor(values, dtype="f64").to(name) for name in ("f64", "f32", "f16", "bf16")
    } | {"i64": tc.tensor(np.arange(5)), "u8": tc.tensor(np.arange(5, dtype=np.uint8))}
    found, facts = unpacked(packed(tensors, {"key": "a"}))
    assert facts["key"] == "a"
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(
            found[name].to("f64").numpy(), tensor.to("f64").numpy(), strict=True
        )


def test_every_caption_is_encoded_once(tmp_path: Path) -> None:
    captions = [f"caption {number}" for number in range(7)]
    asked: list[str] = []

    def encode(texts: Any) -> dict[str, tc.Tensor]:
        asked.extend(texts)
        return {"length": tc.tensor([[float(len(text))] for text in texts])}

    def work(group: Group) -> list[float]:
        cache = TextCache(encode, DISK, identity={}, folder=tmp_path)
        cache.fill(captions, group=group)
        return [float(cache.batch([caption])["length"].item()) for caption in captions]

    # Each of the 7 captions, such as "caption 0", has 9 characters.
    assert together(2, work) == [[9.0] * 7] * 2
    # The cache also has the empty caption.
    assert sorted(asked) == ["", *captions]


def test_a_process_that_cannot_encode_ends_all_processes(data: Dataset, tmp_path: Path) -> None:
    def broken(_pixels: Any) -> dict[str, tc.Tensor]:
        raise DatasetError("dataset: 3.png cannot be decoded")

    def work(group: Group) -> str:
        encoder = broken if group.rank == 1 else Encoder()
        try:
            filled(data, encoder, group, tmp_path / "cache")
        except DatasetError as error:
            group.fail(f"rank {group.rank}: {error}")
            return str(error)
        except DistributedError as error:
            return str(error)
        return ""

    error_0, error_1 = together(2, work)
    assert "rank 1: dataset: 3.png cannot be decoded" in error_0
    assert error_1 == "dataset: 3.png cannot be decoded"


@pytest.mark.parametrize("size", [2, 3])
def test_results_of_validation_equal_those_of_one_process(size: int) -> None:
    items = list(np.random.default_rng(0).normal(size=7))
    expected = measured(Alone(), items, lambda item: float(np.exp(item)))
    asked: list[float] = []

    def measure(item: float) -> float:
        asked.append(item)
        return float(np.exp(item))

    assert together(size, lambda group: measured(group, items, measure)) == [expected] * size
    assert sorted(asked) == sorted(items)
    # A result may also be a list.
    lists = together(size, lambda group: measured(group, [1, 2], lambda n: [0.5] * n))
    assert lists == [[[0.5], [0.5, 0.5]]] * size
    # JSON, the form in which processes send results, keeps every digit.
    assert json.loads(json.dumps(expected)) == expected
