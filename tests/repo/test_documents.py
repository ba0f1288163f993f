"""Documents name only files, folders and make targets that exist, and have short lines."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
# The Makefile's targets with a help text after `##`.
TARGETS = set(re.findall(r"^([a-z][a-z-]*):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
# A line of the tree in CONTRIBUTING.md: a path and, after two spaces, what it holds.
TREE_LINE = re.compile(r"^(?P<indent> *)(?P<name>[\w./-]+)(?: {2,}.*)?$")


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def document(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_linked_files_exist(document: Path) -> None:
    # Relative links, without the anchor or title that may follow the path.
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)[^)]*\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_lines_outside_tables_fit_100_columns(document: Path) -> None:
    lines = document.read_text().splitlines()
    assert [line for line in lines if len(line) > 100 and not line.startswith("|")] == []


def test_paths_in_backquotes_exist(document: Path) -> None:
    top_folders = "|".join(re.escape(path.name) for path in ROOT.iterdir() if path.is_dir())
    paths = re.findall(rf"`((?:{top_folders})/[\w./-]+)`", document.read_text())
    # NAME is a placeholder.
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []


def test_make_targets_exist(document: Path) -> None:
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)(?=[`\n])", document.read_text()))
    assert named - TARGETS == set()


def test_the_paths_of_the_tree_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert block is not None
    # The latest path at each indentation; each level of folders is indented by two more spaces.
    parents: dict[int, Path] = {}
    for line in block.group(1).splitlines():
        match = TREE_LINE.match(line)
        assert match is not None, line
        depth = len(match["indent"])
        path = parents.get(depth - 2, ROOT) / match["name"]
        assert path.exists(), line
        parents[depth] = path
