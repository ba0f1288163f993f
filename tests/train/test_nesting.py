"""Values nested too deeply for a parser are an error in most files; logs skip such a line."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trainable_candle.data import check_folder, parse_sources
from trainable_candle.errors import Error
from trainable_candle.families.pipeline.facts import facts
from trainable_candle.text import CLIPTokenizer
from trainable_candle.train import TrainConfig
from trainable_candle.train.logs import read_json_log
from trainable_candle.train.state import read_state

DEEP = "[" * 100_000
# For each file that a test replaces with `DEEP`: a function that reads the file at a path.
READERS: dict[str, Callable[[Path], object]] = {
    "base/unet/config.json": lambda path: facts(path.parents[1], "sdxl"),
    "base/vae/config.json": lambda path: facts(path.parents[1], "sdxl"),
    "base/tokenizer/vocab.json": lambda path: CLIPTokenizer.from_pretrained(path.parent),
    "base/tokenizer/tokenizer.json": lambda path: CLIPTokenizer.from_pretrained(path.parent),
    "base/tokenizer/tokenizer_config.json": lambda path: CLIPTokenizer.from_pretrained(path.parent),
    "base/tokenizer/special_tokens_map.json": lambda path: CLIPTokenizer.from_pretrained(
        path.parent
    ),
    "run.yaml": TrainConfig.from_yaml,
    "sources.yaml": parse_sources,
    "images/metadata.jsonl": lambda path: check_folder(path.parent),
    "checkpoint/state.json": lambda path: read_state(path.parent),
}


@pytest.mark.parametrize("name", READERS)
def test_a_deeply_nested_file_raises_an_error_of_the_library(
    sdxl_base: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(sdxl_base, tmp_path / "base")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(DEEP)
    with pytest.raises(Error):
        READERS[name](path)


@pytest.mark.parametrize(
    "text", ["{a: " * 20_000, "- " * 30_000, "? " * 20_000], ids=["mappings", "sequences", "keys"]
)
def test_deep_nesting_of_mappings_sequences_or_keys_in_yaml_is_an_error(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(Error, match="nested too deeply"):
        TrainConfig.from_yaml(tmp_path / "run.yaml")


def test_a_deeply_nested_line_of_a_log_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(f'{{"step": 1}}\n{DEEP}\n')
    assert [row["step"] for row in read_json_log(tmp_path / "train.jsonl")] == [1]
