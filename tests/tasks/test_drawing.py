"""Test how sizes of sampled images are read, and how examples are held out for validation."""

import pytest

from trainable_candle.errors import ConfigError, DatasetError
from trainable_candle.tasks.latent.drawing import parse_size
from trainable_candle.tasks.task import held_out_items


@pytest.mark.parametrize(
    ("text", "size"), [("1024x768", (1024, 768)), ("64X32", (64, 32)), (" 512 ", (512, 512))]
)
def test_sizes_are_read_from_text(text: str, size: tuple[int, int]) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    # "\u0664" is the Arabic digit four. A side has at most five digits.
    ["", "x", "0", "64x", "x64", "64x0", "0x0", "00x64", "\u0664", "-64", "64*64", "1e3", "640000"],
)
def test_texts_that_are_no_size_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size in pixels, expected WIDTHxHEIGHT"):
        parse_size(text)


# Python rounds 2.5 to 2.
@pytest.mark.parametrize(("share", "count"), [(0.001, 1), (0.25, 2), (0.5, 5), (0.999, 9)])
def test_a_share_of_ten_examples_is_held_out_but_never_none_or_all(
    share: float, count: int
) -> None:
    seed = 3
    items = held_out_items(10, share, seed)
    assert len(items) == len(set(items)) == count
    assert set(items) <= set(range(10))
    assert items == held_out_items(10, share, seed)


def test_one_image_cannot_be_split() -> None:
    with pytest.raises(DatasetError, match="1 image cannot be split"):
        held_out_items(1, 0.5, 0)
