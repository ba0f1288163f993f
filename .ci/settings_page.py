#!/usr/bin/env python3
"""Make docs/settings.md from the settings that the command line, YAML files and Python share.

.ci/settings_page.py [--write]

Prints the page, or writes it to docs/settings.md with `--write`.
"""

import argparse
from collections.abc import Iterator
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, get_args, get_origin

from trainable_candle.optim import KINDS
from trainable_candle.optim.lr_scheduler import SCHEDULES
from trainable_candle.settings import Setting, TrainConfig, flag, group_of, settings
from trainable_candle.settings.sections import SECTIONS
from trainable_candle.settings.training import RUN_ARGUMENTS

DOCUMENT = Path(__file__).parents[1] / "docs" / "settings.md"
# Parameters of optimizers and schedules that the sections of `arguments` leave out: settings with
# rows of their own, and values that the run provides.
ELSEWHERE = {"params", "lr", "weight_decay", "stochastic_rounding", "states"}
ELSEWHERE |= {"optimizer", "total_steps", "warmup_steps"}
HEAD = """# Every setting

Each setting is a command-line flag, a line `name: value` of a YAML file (`--config`; names have
underscores instead of hyphens there), and a field of `TrainConfig`. `trainable-candle train --help`
shows the settings that a first run may need; `--help-all` shows all settings of the chosen model.
The column "also" lists the names of the same setting in other tools, which are accepted, too.
`.ci/settings_page.py --write` makes this page."""


def page() -> str:
    """Return the text of the document."""
    parts = [HEAD]
    defaults = TrainConfig()
    for section in SECTIONS:
        rows = [
            row(name, hint, setting, getattr(defaults, name))
            for name, (hint, setting) in settings().items()
            if (setting.section or group_of(name).section) == section
        ]
        if rows:
            head = ["| flag | value | default | | also |", "|---|---|---|---|---|"]
            parts.append("\n".join([f"## {section.capitalize()}\n", *head, *rows]))
    parts.append(arguments("--optimizer-args", "--optimizer", KINDS))
    parts.append(arguments("--lr-scheduler-args", "--lr-scheduler", SCHEDULES))
    return "\n\n".join(parts) + "\n"


def row(name: str, hint: Any, setting: Setting, default: Any) -> str:
    """Return the table row of a setting."""
    shown = "" if default is None or default in ("", []) else code(text(default))
    # A name with dots stands for nested lines in YAML files, and is not a flag.
    also = ", ".join(
        code(synonym if "." in synonym else flag(synonym)) for synonym in setting.synonyms
    )
    cells = (code(flag(name)), value(hint, setting), shown, setting.help, also)
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def value(hint: Any, setting: Setting) -> str:
    """Return the values that a setting accepts."""
    if setting.choices:
        return ", ".join(code(choice) for choice in setting.choices)
    if get_origin(hint) is list:
        return "texts" if setting.texts else "names"
    # Of `X | None` the type is X.
    kind = next((kind for kind in get_args(hint) if kind is not type(None)), hint)
    switch = f"on, or {code('--no-…')}"
    type_names = {int: "whole number", float: "number", bool: switch, str: "text"}
    limits = []
    if setting.low is not None:
        limits.append(f"{'above' if setting.above else 'from'} {setting.low:g}")
    if setting.high is not None:
        limits.append(f"to {setting.high:g}")
    # 2**63 is the bound of every whole number that has no other.
    if setting.below is not None and setting.below < 2**63:
        limits.append(f"below {setting.below:g}")
    # Words that users write in place of these numbers.
    words = [f"{code(word)} (same as {number})" for word, number in setting.words.items()]
    return ", ".join([" ".join([type_names[kind], *limits]), *words])


def arguments(arguments_flag: str, chosen_by: str, kinds: dict[str, Any]) -> str:
    """Return the section of a flag: the `name=value` it takes for each choice of `chosen_by`."""
    lines = [
        f"## `{arguments_flag}`\n",
        f"The arguments that `{arguments_flag} name=value …` accepts, with their defaults.\n",
    ]
    lines += [f"| `{chosen_by}` | |", "|---|---|"]
    for name, kind in kinds.items():
        defaults = ", ".join(with_defaults(kind, RUN_ARGUMENTS.get(name, {})))
        lines.append(f"| {code(name)} | {defaults or 'none'} |")
    return "\n".join(lines)


def with_defaults(kind: Any, of_run: dict[str, Any]) -> Iterator[str]:
    """Yield `name=default` of an optimizer's or a schedule's arguments.

    `of_run` has the values that a run gives by itself, which replace the signature's defaults.
    """
    for name, parameter in signature(kind).parameters.items():
        if name not in ELSEWHERE and parameter.default is not Parameter.empty:
            default = of_run.get(name, parameter.default)
            given = default if isinstance(default, tuple) else (default,)
            yield code(f"{name}={','.join(map(str, given)).lower()}")


def text(default: Any) -> str:
    """Return a default as users write it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)


def code(part: str) -> str:
    """Return Markdown for a piece of code."""
    return f"`{part}`"


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        DOCUMENT.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
