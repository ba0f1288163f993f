"""Rules about files: their folders, names and lengths, no paths of machines, no copies."""

import re
import subprocess
from collections import Counter
from pathlib import Path

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
    ".github",
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
# Suffixes that name a version of a file. A file's name must describe its content instead.
HISTORY = re.compile(
    r"_(v\d+|new|old|final|fixed|fix|simple|improved|enhanced|optimized|backup|bak|copy|orig|tmp|wip)$"
)
# Names that do not say which concept a file holds.
NO_HOME = {"common", "helper", "helpers", "misc", "shared", "stuff", "util", "utils"}
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:home|root|Users|work|mnt|srv|scratch)/[\w.-]+")
MAX_LINES = 500


def test_the_root_holds_only_listed_files_and_folders() -> None:
    assert {path.parts[0] for path in FILES} - TOP_LEVEL == set()


def test_names_of_files_describe_their_content() -> None:
    names = {part for path in FILES for part in (*path.parts[:-1], path.stem)}
    assert [name for name in sorted(names) if HISTORY.search(plain(name))] == []
    assert [name for name in sorted(names) if plain(name) in NO_HOME] == []


def plain(name: str) -> str:
    return name.lower().replace("-", "_")


def test_source_files_are_short_enough_to_read() -> None:
    lines = {str(path): (ROOT / path).read_text().count("\n") for path in SOURCES}
    assert lines
    # Each file that a failure lists here must be split.
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_no_file_names_a_path_of_a_machine() -> None:
    texts = {path: (ROOT / path).read_bytes() for path in FILES}
    found = {
        str(path): paths
        for path, content in texts.items()
        if b"\0" not in content and (paths := MACHINE_PATH.findall(content.decode()))
    }
    assert found == {}


def test_no_file_has_a_copy() -> None:
    # A Stable Diffusion XL folder has a tokenizer for each encoder, with the same vocabulary.
    files = [path for path in FILES if path.parent.name != "tokenizer_2"]
    contents = Counter((ROOT / path).read_bytes() for path in files)
    twice = [
        str(path)
        for path in files
        if contents[data := (ROOT / path).read_bytes()] > 1 and data.strip()
    ]
    assert twice == []
