#!/usr/bin/env python3
"""Make the gallery of the site: run the three demos, and write a page with their results.

.ci/site/gallery.py FOLDER [--seed N]

Writes `gallery.md` and its images to FOLDER, where `pages.py` finds them. This takes about a minute
on two cores.
"""

import argparse
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainable_candle import __version__
from trainable_candle.demo import hearts, language, run

PAGE = "gallery.md"
HEAD = """# Gallery

This page shows what the demos of version {version} make. Models that ship in the wheel learn what
they have never seen, and a judge that is independent of the models counts successes.
`.ci/site/gallery.py FOLDER` makes this page. This copy was made on {machine}. `make demo` runs the
same demos.
"""
DIGITS = """## A digit it has never seen

A small generator of handwritten digits was trained without a zero. The LoRA saw 125 zeros of 8x8
pixels; a support vector machine, fitted on other images, looks for zeros.
"""
HEARTS = """## Hearts, by a model of flowers

The tiny SDXL has seen only flowers. The LoRA was trained on hearts in four colours; the last row is
orange, a colour that no training image has.
"""
WORDS = """## Pig Latin

The built-in language model knows twelve tasks on made-up words. The LoRA teaches it one more.
The answers without and with the LoRA are judged, on words that are in no training data.
"""
DEMOS: dict[str, tuple[str, Callable[..., Any]]] = {
    "digits": (DIGITS, lambda output, **options: run.run(output, **options).verdict),
    "sdxl": (HEARTS, hearts.run_demo),
    "causal-lm": (WORDS, language.run_demo),
}
"""For each model, the text of its section, and the demo, which returns the judge's verdict."""


def main() -> None:
    """Run the demos and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    parts = [HEAD.format(machine=platform.machine(), version=__version__)]
    for model, (text, demo) in DEMOS.items():
        output = given.folder / model
        shutil.rmtree(output, ignore_errors=True)
        lines: list[str] = []
        start = time.monotonic()
        verdict = demo(output, seed=given.seed, progress=False, report=lines.append)
        seconds = round(time.monotonic() - start)
        # The line may end with a note in parentheses: why no GPU is used.
        device = next(line.split(" (")[0] for line in lines if line.startswith("device: "))
        parts.append(text)
        for name in ("before", "after"):
            if (output / f"{name}.png").exists():
                shutil.copy(output / f"{name}.png", given.folder / f"{model}-{name}.png")
                parts.append(f"![{name.capitalize()}]({model}-{name}.png)")
        command = f"trainable-candle demo --model {model} --seed {given.seed}"
        parts.append(f"\n```sh\n{command}  # {seconds} s, {device.removeprefix('device: ')}\n```\n")
        # The demo of the language model logs some answers, each without and with the LoRA.
        shown = [line for line in lines if "without the LoRA" in line]
        parts.append("```text\n" + "\n".join([*shown, str(verdict)]) + "\n```\n")
    (given.folder / PAGE).write_text("\n".join(parts))


if __name__ == "__main__":
    main()
