#!/usr/bin/env python3
"""Check the version of a release, or print the section of the changelog for this version.

.ci/release.py check [TAG]   check that TAG names the version in Cargo.toml, and that CHANGELOG.md
                             has a section with a date for this version
.ci/release.py notes         print the section of CHANGELOG.md for the version in Cargo.toml
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECTION = re.compile(
    r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d{2}-\d{2}))?$", re.MULTILINE
)


def version(manifest: str) -> str:
    """Return the version of the workspace, given the text of its Cargo.toml.

    Raises:
        SystemExit: the manifest has no version.
    """
    found = re.search(r'^version = "([^"]+)"$', manifest, re.MULTILINE)
    if found is None:
        sys.exit("Cargo.toml: the workspace has no version")
    return found[1]


def sections(changelog: str) -> dict[str, tuple[str | None, str]]:
    """Return the date and the text of each section of the changelog, by version."""
    heads = list(SECTION.finditer(changelog))
    ends = [head.start() for head in heads[1:]] + [len(changelog)]
    return {
        head["version"]: (head["date"], changelog[head.end() : end].strip())
        for head, end in zip(heads, ends, strict=True)
    }


def complaints(manifest: str, changelog: str, tag: str) -> list[str]:
    """Return one message for each contradiction between manifest, changelog and tag.

    An empty tag is not checked.
    """
    known = version(manifest)
    date, text = sections(changelog).get(known, (None, ""))
    found = []
    if tag and tag != f"v{known}":
        found.append(f"the tag is {tag}, and Cargo.toml has the version {known}: expected v{known}")
    # The versions in which the workspace's crates require one another.
    required = set(re.findall(r'path = "[^"]+", version = "([^"]+)"', manifest))
    if required - {known}:
        others = ", ".join(sorted(required - {known}))
        found.append(
            f"Cargo.toml: the workspace requires its crates in version {others}, expected {known}"
        )
    if not text:
        found.append(f"CHANGELOG.md: there is no section `## [{known}] - YYYY-MM-DD` with changes")
    elif date is None:
        found.append(f"CHANGELOG.md: the section of {known} has no date")
    return found


def main(command: str, tag: str = "") -> None:
    """Run the command `check` or `notes`."""
    manifest = (ROOT / "Cargo.toml").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if command == "notes":
        print(sections(changelog)[version(manifest)][1])
        return
    found = complaints(manifest, changelog, tag)
    if found:
        sys.exit("\n".join(found))
    print(f"version {version(manifest)}: manifest, changelog{' and tag' if tag else ''} agree")


if __name__ == "__main__":
    main(*sys.argv[1:])
