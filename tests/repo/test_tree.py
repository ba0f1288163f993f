"""The house rules that a file listing can show: what lies where, names, sizes, no machine paths."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    Path(name)
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    if name and (ROOT / name).exists()
]
SOURCES = [path for path in FILES if path.suffix in {".rs", ".py", ".cu", ".cuh", ".c"}]

TOP_LEVEL = {
    ".ci",
    ".config",
    ".deny.toml",
    ".editorconfig",
    ".gitignore",
    ".rustfmt.toml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "Makefile",
    "README.md",
    "benches",
    "cuda",
    "docs",
    "examples",
    "pyproject.toml",
    "python",
    "rust",
    "tests",
}
# A name says what a file is, not where it stands in its history ...
HISTORY = re.compile(
    r"_(v\d+|new|old|final|fixed|fix|simple|improved|enhanced|optimized|backup|bak|copy|orig|tmp|wip)$"
)
# ... and a concept has a home: these name none.
NO_HOME = {"common", "helper", "helpers", "misc", "shared", "stuff", "util", "utils"}
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:home|root|Users|work|mnt|srv|scratch)/[\w.-]+")
MAX_LINES = 500


def test_the_root_holds_only_what_belongs_there() -> None:
    assert {path.parts[0] for path in FILES} - TOP_LEVEL == set()


@pytest.mark.parametrize("path", FILES, ids=str)
def test_name_says_what_it_is(path: Path) -> None:
    for part in (*path.parts[:-1], path.stem):
        name = part.lower().replace("-", "_")
        assert not HISTORY.search(name), part
        assert name not in NO_HOME, part


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_source_file_is_short_enough_to_read(path: Path) -> None:
    lines = (ROOT / path).read_text().count("\n")
    assert lines <= MAX_LINES, f"{lines} lines: split it"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_file_names_no_path_of_a_machine(path: Path) -> None:
    content = (ROOT / path).read_bytes()
    if b"\0" not in content:
        assert MACHINE_PATH.findall(content.decode()) == []


def test_no_file_is_there_twice() -> None:
    # A Stable Diffusion XL folder has a tokenizer for each encoder, with the same vocabulary.
    files = [path for path in FILES if path.parent.name != "tokenizer_2"]
    contents = Counter((ROOT / path).read_bytes() for path in files)
    twice = [
        str(path)
        for path in files
        if contents[data := (ROOT / path).read_bytes()] > 1 and data.strip()
    ]
    assert twice == []
