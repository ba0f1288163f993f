"""The workflow of the release is consistent, and so are the places that name its version."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
# The workspace's version, and the version in which the workspace requires its crate `a`.
MANIFEST = '[workspace.package]\nversion = "1.2.3"\na = { path = "a", version = "1.2.3" }\n'
CHANGELOG = (
    "# Changelog\n\n## [1.2.3] - 2026-01-02\n\n- One.\n\n## [1.2.2] - 2025-01-02\n\n- Two.\n"
)


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps() -> list[dict[str, Any]]:
    """Return the steps of all jobs of the workflow."""
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_the_workflow_runs_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {
        name for step in steps() for name in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))
    }
    assert {"release-check", "release-notes", "wheel", "test-wheel", "wheel-cuda"} <= used
    assert used <= targets


def test_jobs_wait_for_jobs_that_exist() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    for job in jobs.values():
        needs = job.get("needs", [])
        assert ({needs} if isinstance(needs, str) else set(needs)) <= set(jobs)


def test_the_push_of_a_tag_starts_the_workflow() -> None:
    # YAML 1.1 reads the key `on` as true.
    assert yaml.safe_load(WORKFLOW.read_text())[True]["push"] == {"tags": ["v*"]}


def test_this_version_can_be_released(release: ModuleType) -> None:
    manifest, changelog = ((ROOT / name).read_text() for name in ("Cargo.toml", "CHANGELOG.md"))
    assert release.complaints(manifest, changelog, f"v{release.version(manifest)}") == []


@pytest.mark.parametrize(
    ("manifest", "changelog", "tag", "complaint"),
    [
        (MANIFEST, CHANGELOG, "v1.2.4", "the tag is v1.2.4"),
        (MANIFEST, CHANGELOG, "1.2.3", "expected v1.2.3"),
        # An empty tag is not checked.
        (MANIFEST.replace('a", version = "1.2.3', 'a", version = "1.2.2'), CHANGELOG, "", "1.2.2"),
        (MANIFEST, CHANGELOG.replace("1.2.3", "Unreleased"), "", "there is no section"),
        (MANIFEST, CHANGELOG.replace(" - 2026-01-02", ""), "", "has no date"),
        (MANIFEST, CHANGELOG.replace("- One.", ""), "", "there is no section"),
    ],
    ids=["other tag", "tag without v", "other crate", "no section", "no date", "empty section"],
)
def test_contradictions_and_gaps_are_reported(
    release: ModuleType, manifest: str, changelog: str, tag: str, complaint: str
) -> None:
    assert release.complaints(MANIFEST, CHANGELOG, "v1.2.3") == []
    (found,) = release.complaints(manifest, changelog, tag)
    assert complaint in found


def test_the_notes_are_the_section_of_the_version(release: ModuleType) -> None:
    assert release.sections(CHANGELOG)["1.2.3"] == ("2026-01-02", "- One.")
