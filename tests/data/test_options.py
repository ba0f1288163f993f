"""The settings of a data set: what valid ones mean, and the errors about invalid ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainable_candle.data import (
    CacheOptions,
    CaptionOptions,
    DatasetOptions,
    Source,
    parse_sources,
)
from trainable_candle.errors import ConfigError, DatasetError

SOURCES = (Source(Path("images")),)

# The fixture `images` writes images of the given sizes into a folder below `tmp_path`.


def test_a_path_to_a_folder_becomes_one_source() -> None:
    assert parse_sources("a folder", caption="cat") == (Source(Path("a folder"), caption="cat"),)


def test_entries_have_their_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "data.yaml"
    file.write_text(
        "- images\n"
        "- {path: /abs, repeats: 0.5, caption: own, loss_weight: 2, recursive: true}\n"
        "- {path: class, regularization: true, mask: alpha, trigger: ''}\n"
    )
    assert parse_sources(file, caption="general") == (
        Source(tmp_path / "images", caption="general"),
        Source(Path("/abs"), caption="own", repeats=0.5, loss_weight=2, recursive=True),
        Source(
            tmp_path / "class", caption="general", regularization=True, mask="alpha", trigger=""
        ),
    )


def test_a_list_may_be_given_directly_or_under_a_key_of_a_file(tmp_path: Path) -> None:
    with_key = tmp_path / "key.yml"
    with_key.write_text("dataset: [one, two]")
    assert [s.path.name for s in parse_sources(with_key)] == ["one", "two"]
    assert parse_sources([Path("x"), {"path": "y"}]) == (Source(Path("x")), Source(Path("y")))


def test_a_folder_whose_name_ends_in_yaml_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "set.yaml"
    folder.mkdir()
    assert parse_sources(folder) == (Source(folder),)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (3, "entry 2 is 3, expected a folder"),
        ({"repeats": 2}, "entry 2 is .*expected a folder, or `path: FOLDER`"),
        ({"path": "a", "repeat": 2}, "entry 2: `repeat` is unknown, expected one of path, caption"),
        ({"path": "a", "repeats": 0}, "entry 2: repeats is 0, expected a number above 0"),
        ({"path": "a", "repeats": True}, "repeats is True"),
        ({"path": "a", "loss_weight": float("nan")}, "loss_weight is nan"),
        # A whole number that is too large for a float.
        ({"path": "a", "loss_weight": 10**400}, "loss_weight is 1000"),
        ({"path": "a", "mask": "on"}, "mask is 'on', expected one of off, file, alpha"),
        ({"path": "a", "caption": 7}, "caption is 7, expected text"),
        ({"path": "a", "recursive": 1}, "recursive is 1, expected true or false"),
        ({"path": ""}, "path is '', expected a folder"),
    ],
)
def test_a_wrong_entry_is_reported(entry: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_sources(["a", entry])


# YAML reads 2026-13-41 as a date, and there is no such date.
@pytest.mark.parametrize(
    "text", ["path: a", "- [", "3", "", "- path: 2026-13-41", "- path: a\n  path: b"]
)
def test_a_file_that_holds_no_list_or_is_not_yaml_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.yaml").write_text(text)
    with pytest.raises(DatasetError, match=r"d\.yaml (holds no list|is not valid YAML)"):
        parse_sources(tmp_path / "d.yaml")


def test_entries_may_use_the_names_of_other_tools(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(
        "datasets:\n- {image_dir: a, num_repeats: 2, class_tokens: cup, is_reg: true}\n"
        "- {folder_path: b, mask: off}\n"
    )
    # YAML reads `off` as false.
    assert parse_sources(file) == (
        Source(tmp_path / "a", caption="cup", repeats=2, regularization=True),
        Source(tmp_path / "b", mask="off"),
    )
    with pytest.raises(ConfigError, match="`path` and `folder_path` mean the same; give one"):
        parse_sources([{"path": "a", "folder_path": "b"}])


def test_a_repeated_entry_is_rejected_but_may_differ_in_its_caption() -> None:
    with pytest.raises(ConfigError, match="entry 2 is a again; give `repeats: 2`"):
        parse_sources(["a", "./a/"])
    assert len(parse_sources(["a", {"path": "a", "caption": "x"}])) == 2


def test_a_file_of_another_format_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "k.toml").touch()
    with pytest.raises(DatasetError, match="a folder of images, or a YAML file that lists folders"):
        parse_sources(tmp_path / "k.toml")


def test_an_empty_list_and_a_missing_file_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder is given"):
        parse_sources([])
    with pytest.raises(DatasetError, match=r"none\.yaml cannot be read: No such file"):
        parse_sources(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"bucket_step": 12}, "bucket_step is 12, expected a multiple of 8"),
        ({"resolution": 1000}, "resolution is 1000, expected a multiple of bucket_step, 64"),
        ({"resolution": 0}, "resolution is 0, expected a whole number of at least 8"),
        ({"resolution": 512.0}, r"resolution is 512\.0, expected a whole number"),
        ({"min_side": 1088}, "sides from 1088 to 2048 px, and the resolution, 1024 px, is outside"),
        ({"max_side": 960}, "sides from 256 to 960 px"),
        ({"crop": "left"}, "crop is 'left', expected one of center, random"),
        ({"random_crops": 0}, "random_crops is 0"),
        ({"random_crops": 1001}, "random_crops is 1001, expected .* and at most 1000"),
        ({"prior_loss_weight": -1}, "prior_loss_weight is -1, expected a number of at least 0"),
    ],
)
def test_impossible_settings_are_rejected(settings: dict[str, Any], complaint: str) -> None:
    # By default, the resolution is 1024 px, and the sides of buckets are multiples of 64 px between
    # 256 px and 2048 px.
    with pytest.raises(ConfigError, match=f"dataset: .*{complaint}"):
        DatasetOptions(SOURCES, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 1.1},
        {"tag_dropout": 1},  # expected below 1, while `dropout` may be 1
        {"keep_tokens": -1},
        {"separator": " "},
        {"variants": -1},
        {"variants": 1001},
    ],
    ids=str,
)
def test_impossible_caption_settings_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"dataset: .* expected"):
        CaptionOptions(**settings)


def test_an_unknown_cache_is_rejected() -> None:
    with pytest.raises(ConfigError, match="cache is 'ram', expected one of disk, memory, off"):
        CacheOptions("ram")


def test_folders_with_repeats_in_their_names_are_sources(
    tmp_path: Path, images: Callable[..., list[Path]]
) -> None:
    for name in ("10_sks coffee", "2_a dog", "notes", ".hidden"):
        images(f"kohya/{name}", (8, 8))
    (tmp_path / "kohya" / "3_file").write_text("no folder")
    coffee, dog = parse_sources(tmp_path / "kohya")
    assert (coffee.path.name, coffee.repeats, coffee.caption) == ("10_sks coffee", 10, "sks coffee")
    assert (dog.path.name, dog.repeats, dog.caption) == ("2_a dog", 2, "a dog")
    changed = parse_sources([{"path": tmp_path / "kohya", "caption": "x", "loss_weight": 0.5}])
    assert [(s.caption, s.repeats, s.loss_weight) for s in changed] == [
        ("x", 10, 0.5),
        ("x", 2, 0.5),
    ]
    captioned = parse_sources(tmp_path / "kohya", caption="mine")
    assert [source.caption for source in captioned] == ["mine", "mine"]


@pytest.mark.parametrize("name", ["a.png", "metadata.jsonl"])
def test_a_folder_with_an_image_or_metadata_is_one_source(tmp_path: Path, name: str) -> None:
    (tmp_path / "10_cup").mkdir()
    (tmp_path / name).touch()
    assert parse_sources(tmp_path) == (Source(tmp_path),)


def test_the_repeats_of_an_entry_override_those_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "10_cup").mkdir()
    repeated = [{"path": tmp_path / "10_cup", "repeats": 3}]
    assert [source.repeats for source in parse_sources(repeated)] == [3]


def test_images_beside_folders_with_repeats_are_an_error(
    tmp_path: Path, images: Callable[..., list[Path]]
) -> None:
    images("both", (8, 8))
    images("both/10_cup", (8, 8))
    with pytest.raises(ConfigError, match="holds images, and so do its folders 10_cup; move"):
        parse_sources(tmp_path / "both")


def test_zero_repeats_in_a_name_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "0_cup").mkdir()
    with pytest.raises(ConfigError, match=r"repeats is 0, .* above 0, in the names 0_cup"):
        parse_sources(tmp_path)
