"""Rules for files: their folders, names and lengths; no paths of one machine; no copies."""

import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The files that Git tracks or would add.
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
# Suffixes that tell versions of a file apart. A file's name must describe its content instead.
HISTORY = re.compile(
    r"_(v\d+|new|old|final|fixed|fix|simple|improved|enhanced|optimized|backup|bak|copy|orig|tmp|wip)$"
)
# Names that do not say which concept a file or folder holds.
VAGUE = {"common", "helper", "helpers", "misc", "shared", "stuff", "util", "utils"}
# Absolute paths below the folders of users and of mounted disks.
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:home|root|Users|work|mnt|srv|scratch)/[\w.-]+")
MAX_LINES = 500


def test_the_root_holds_only_listed_files_and_folders() -> None:
    assert {path.parts[0] for path in FILES} - TOP_LEVEL == set()


def test_names_of_files_and_folders_tell_no_versions_and_are_not_vague() -> None:
    names = {part for path in FILES for part in (*path.parts[:-1], path.stem)}
    assert [name for name in sorted(names) if HISTORY.search(plain(name))] == []
    assert [name for name in sorted(names) if plain(name) in VAGUE] == []


def plain(name: str) -> str:
    """Return a name in lower case, with underscores for hyphens."""
    return name.lower().replace("-", "_")


def test_source_files_are_short_enough_to_read() -> None:
    lines = {str(path): (ROOT / path).read_text().count("\n") for path in SOURCES}
    assert lines
    # Each file that a failure lists here must be split.
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_no_file_contains_a_path_of_one_machine() -> None:
    texts = {path: (ROOT / path).read_bytes() for path in FILES}
    found = {
        str(path): paths
        for path, content in texts.items()
        if b"\0" not in content and (paths := MACHINE_PATH.findall(content.decode()))
    }
    assert found == {}


def test_only_blank_files_and_second_tokenizers_have_copies() -> None:
    # A Stable Diffusion XL folder has a tokenizer for each encoder, with the same vocabulary.
    contents = {
        str(path): (ROOT / path).read_bytes() for path in FILES if path.parent.name != "tokenizer_2"
    }
    count = Counter(contents.values())
    assert [path for path, data in contents.items() if count[data] > 1 and data.strip()] == []
