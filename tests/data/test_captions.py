"""Captions: how they are read, and how they are changed for training.

A variant is a caption after shuffling its tags and dropping some. With `variants=N`, an image has
N variants, and each sample uses one of them; with `variants=0`, each sample draws a new variant.
`CaptionMaker.plain` returns a caption without random changes, `use` the caption for one sample of
training, and `possible` all captions that `use` can return.
"""

from collections import Counter
from pathlib import Path

import pytest

from trainable_candle.data import CaptionMaker, CaptionOptions
from trainable_candle.data.captions import read_caption, read_metadata
from trainable_candle.errors import DatasetError

TAGS = "1girl, solo, red hair, smile, outdoors"
IMAGE_SEED = 0
"""The seed of the image's variants."""


def used(options: CaptionOptions, count: int = 400, trigger: str = "", seed: int = 0) -> list[str]:
    """Return the captions that the samples 0 to `count` - 1 use for an image with `TAGS`."""
    maker = CaptionMaker(options, seed)
    return [maker.use(TAGS, trigger, IMAGE_SEED, sample) for sample in range(count)]


def test_without_settings_captions_change_only_in_white_space() -> None:
    assert set(used(CaptionOptions())) == {TAGS}
    odd = "a (cat:1.2) {x|y} __wild__\n second   line"
    assert CaptionMaker(CaptionOptions(), 0).plain(odd, "") == (
        "a (cat:1.2) {x|y} __wild__ second line"
    )


def test_dropout_has_the_given_frequency() -> None:
    dropped = Counter(used(CaptionOptions(dropout=0.25), 4000))[""]
    # The bound is five standard deviations of the binomial distribution.
    assert abs(dropped - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5
    assert set(used(CaptionOptions(dropout=1.0))) == {""}


def test_shuffling_keeps_all_tags_and_leaves_the_first_in_place() -> None:
    seen = set(used(CaptionOptions(shuffle=True, keep_tokens=2, variants=0)))
    # Three tags can be shuffled; they have six orders.
    assert len(seen) == 6
    for caption in seen:
        assert caption.startswith("1girl, solo, ")
        assert sorted(caption.split(", ")) == sorted(TAGS.split(", "))


def test_the_trigger_comes_first_and_does_not_count_as_a_kept_tag() -> None:
    seen = used(CaptionOptions(shuffle=True, keep_tokens=1, variants=0), trigger="sks, style")
    assert {caption.split(", ")[0] for caption in seen} == {"sks"}
    assert {", ".join(caption.split(", ")[1:3]) for caption in seen} == {"style, 1girl"}


def test_a_caption_that_begins_with_the_trigger_gets_no_second_one() -> None:
    maker = CaptionMaker(CaptionOptions(shuffle=True, variants=0), 0)
    assert maker.plain("sks cat", "sks") == "sks cat"
    assert maker.plain("", "sks") == "sks"


def test_tag_dropout_spares_kept_tags_and_keeps_the_order() -> None:
    seen = used(CaptionOptions(tag_dropout=0.5, keep_tokens=1, variants=0), 2000)
    count = Counter(tag for caption in seen for tag in caption.split(", "))
    assert count["1girl"] == 2000
    # 1000 are expected; 150 are more than six standard deviations.
    assert all(850 < count[tag] < 1150 for tag in TAGS.split(", ")[1:])
    positions = [TAGS.index(tag) for tag in seen[0].split(", ")]
    assert positions == sorted(positions)


def test_captions_are_split_at_the_given_separator() -> None:
    maker = CaptionMaker(CaptionOptions(shuffle=True, separator="|", variants=4), 0)
    # The shuffled tags are joined by the separator and a space.
    assert {frozenset(c.split("| ")) for c in maker.possible("a, b |c| d", "", IMAGE_SEED)} == {
        frozenset({"a, b", "c", "d"})
    }


def test_all_used_captions_are_listed_as_possible() -> None:
    options = CaptionOptions(dropout=0.1, shuffle=True, tag_dropout=0.2, variants=5)
    possible = set(CaptionMaker(options, 0).possible(TAGS, "x", IMAGE_SEED))
    assert possible == set(used(options, trigger="x"))
    # Five variants, some of which may be equal, and the empty caption.
    assert 2 < len(possible) <= 6


def test_a_resumed_run_sees_the_same_captions_and_another_seed_gives_others() -> None:
    options = CaptionOptions(dropout=0.2, shuffle=True, variants=0)
    assert used(options) == used(options)
    assert used(options, seed=1) != used(options)
    resumed = CaptionMaker(options, 0)
    assert [resumed.use(TAGS, "", IMAGE_SEED, sample) for sample in range(200, 300)] == (
        used(options)[200:300]
    )


def test_captions_are_read_from_metadata_in_hugging_faces_layout(tmp_path: Path) -> None:
    # U+2028 is a line separator, which ends no line of a JSON Lines file.
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "a.png", "text": " a cat "}\n\n'
        '{"file_name": "sub/b.png", "caption": "\\u00fc", "more": [1]}\n'
        '{"file_name": "c.png", "prompt": "c\u2028d"}\n',
        encoding="utf-8",
    )
    assert read_metadata(tmp_path) == {
        tmp_path / "a.png": "a cat",
        tmp_path / "sub" / "b.png": "ü",
        tmp_path / "c.png": "c\u2028d",
    }


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: is not JSON"),
        ("[1]", "line 2: has no `file_name`"),
        ('{"file_name": 3, "text": "x"}', "line 2: has no `file_name`"),
        ('{"file_name": "a.png", "text": null}', "line 2: has no caption for a.png"),
    ],
)
def test_a_wrong_line_of_metadata_is_reported(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "metadata.jsonl").write_text(f'{{"file_name": "0.png", "text": ""}}\n{line}\n')
    with pytest.raises(DatasetError, match=complaint):
        read_metadata(tmp_path)


def test_caption_files_end_in_txt_or_caption_and_txt_comes_first(tmp_path: Path) -> None:
    image = tmp_path / "a.b.png"
    assert read_caption(image) is None
    (tmp_path / "a.b.caption").write_text("\ufeffa cat \n", encoding="utf-8")
    assert read_caption(image) == "a cat"
    (tmp_path / "a.b.txt").write_text("a dog", encoding="utf-8")
    assert read_caption(image) == "a dog"


def test_a_longer_word_that_begins_with_the_trigger_is_no_trigger() -> None:
    maker = CaptionMaker(CaptionOptions(), seed=0)
    assert maker.plain("catwalk at night", "cat") == "cat, catwalk at night"
    assert maker.plain("cat, at night", "cat") == "cat, at night"
    assert maker.plain("cat", "cat") == "cat"
