"""docs/settings.md matches the settings, and docs/many-gpus.md matches the options of `ray`."""

import importlib.util
import re
from pathlib import Path

from trainable_candle.cli.ray import make_parser
from trainable_candle.settings import TrainConfig

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_settings() -> None:
    # A script of `.ci/`, which is no package, makes the page.
    spec = importlib.util.spec_from_file_location("page", ROOT / ".ci" / "settings_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = (ROOT / "docs" / "settings.md").read_text()
    assert found == module.page(), "run: .ci/settings_page.py --write"


def test_the_defaults_on_the_page_are_accepted_as_arguments() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    for setting in ("optimizer", "lr_scheduler"):
        # A section has a table with a row for each optimizer (schedule), such as
        # | `adamw` | `betas=0.9,0.999`, `eps=1e-08` |
        _, rest = text.split(f"## `--{setting.replace('_', '-')}-args`")
        rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", rest.split("\n## ")[0], re.MULTILINE)
        assert len(rows) > 3  # The pattern has found the table.
        for name, cell in rows:
            given = {setting: name, f"{setting}_args": re.findall(r"`(.*?)`", cell)}
            TrainConfig(model="digits", **given)


def test_the_document_lists_all_options_of_the_ray_command() -> None:
    text = (ROOT / "docs" / "many-gpus.md").read_text().split("## Ray")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `(--[\w-]+)", text, re.MULTILINE))
    parser = make_parser("trainable-candle ray")
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert listed == {flag for flag in known if flag.startswith("--")} - {"--help"}
