"""The captions that the model is trained on, in new and in resumed runs."""

from collections import Counter
from pathlib import Path

import pytest

from trainable_candle.data import CaptionMaker, CaptionOptions
from trainable_candle.data.captions import read_caption, read_metadata
from trainable_candle.errors import DatasetError

TAGS = "1girl, solo, red hair, smile, outdoors"


def uses(options: CaptionOptions, count: int = 400, trigger: str = "", seed: int = 0) -> list[str]:
    maker = CaptionMaker(options, seed)
    return [maker.use(TAGS, trigger, 0, sample) for sample in range(count)]


def test_without_settings_captions_change_only_in_white_space() -> None:
    assert set(uses(CaptionOptions())) == {TAGS}
    odd = "a (cat:1.2) {x|y} __wild__\n second   line"
    assert CaptionMaker(CaptionOptions(), 0).plain(odd, "") == (
        "a (cat:1.2) {x|y} __wild__ second line"
    )


def test_dropout_has_the_given_frequency() -> None:
    dropped = Counter(uses(CaptionOptions(dropout=0.25), 4000))[""]
    # The bound is five standard deviations of the binomial distribution.
    assert abs(dropped - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5
    assert set(uses(CaptionOptions(dropout=1.0))) == {""}


def test_shuffling_keeps_tags_and_the_first_in_place() -> None:
    seen = set(uses(CaptionOptions(shuffle=True, keep_tokens=2, variants=0)))
    assert len(seen) == 6
    for caption in seen:
        assert caption.startswith("1girl, solo, ")
        assert sorted(caption.split(", ")) == sorted(TAGS.split(", "))


def test_the_trigger_comes_first_and_does_not_count_as_a_kept_tag() -> None:
    seen = uses(CaptionOptions(shuffle=True, keep_tokens=1, variants=0), trigger="sks, style")
    assert {caption.split(", ")[0] for caption in seen} == {"sks"}
    assert {", ".join(caption.split(", ")[1:3]) for caption in seen} == {"style, 1girl"}
    maker = CaptionMaker(CaptionOptions(shuffle=True, variants=0), 0)
    assert maker.plain("sks cat", "sks") == "sks cat"
    assert maker.plain("", "sks") == "sks"


def test_tag_dropout_spares_kept_tags() -> None:
    seen = uses(CaptionOptions(tag_dropout=0.5, keep_tokens=1, variants=0), 2000)
    count = Counter(tag for caption in seen for tag in caption.split(", "))
    assert count["1girl"] == 2000
    assert all(850 < count[tag] < 1150 for tag in TAGS.split(", ")[1:])
    places = [TAGS.index(tag) for tag in seen[0].split(", ")]
    assert places == sorted(places)


def test_captions_are_split_at_the_given_separator() -> None:
    maker = CaptionMaker(CaptionOptions(shuffle=True, separator="|", variants=4), 0)
    assert {frozenset(c.split("| ")) for c in maker.possible("a, b |c| d", "", 0)} == {
        frozenset({"a, b", "c", "d"})
    }


def test_all_used_captions_are_listed_as_possible() -> None:
    options = CaptionOptions(dropout=0.1, shuffle=True, tag_dropout=0.2, variants=5)
    foreseen = set(CaptionMaker(options, 0).possible(TAGS, "x", 0))
    assert foreseen == set(uses(options, trigger="x"))
    assert 2 < len(foreseen) <= 6


def test_a_resumed_run_sees_the_same_captions_and_another_seed_does_not() -> None:
    options = CaptionOptions(dropout=0.2, shuffle=True, variants=0)
    assert uses(options) == uses(options)
    assert uses(options, seed=1) != uses(options)
    later = CaptionMaker(options, 0)
    assert [later.use(TAGS, "", 0, sample) for sample in range(200, 300)] == (
        uses(options)[200:300]
    )


def test_captions_are_read_from_metadata_in_hugging_faces_layout(tmp_path: Path) -> None:
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


def test_caption_files_may_end_in_caption(tmp_path: Path) -> None:
    picture = tmp_path / "a.b.png"
    assert read_caption(picture) is None
    (tmp_path / "a.b.caption").write_text("\ufeffa cat \n", encoding="utf-8")
    assert read_caption(picture) == "a cat"
    (tmp_path / "a.b.txt").write_text("a dog", encoding="utf-8")
    assert read_caption(picture) == "a dog"


def test_a_word_that_begins_like_the_trigger_is_no_trigger() -> None:
    maker = CaptionMaker(CaptionOptions(), seed=0)
    assert maker.plain("catwalk at night", "cat") == "cat, catwalk at night"
    assert maker.plain("cat, at night", "cat") == "cat, at night"
    assert maker.plain("cat", "cat") == "cat"
