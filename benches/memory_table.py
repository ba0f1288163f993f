"""Make the table of docs/memory.md: what a run chooses on cards of several sizes.

python benches/memory_table.py [--write]

No GPU is needed: memory and time are predicted from the configurations of the published models.
`--write` puts the table into the document.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from facts_only import MODELS, write_model
from PIL import Image

from trainable_candle import families
from trainable_candle.errors import OutOfMemoryError
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.budget import Budget, Plan, make_plan, step_seconds
from trainable_candle.tasks.estimate import CONTEXT_BYTES, GIB
from trainable_candle.tasks.speed import GPUS

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
# Bytes of host memory that a run may use: see `Budget.host`.
HOST = 24 * GIB
# The GiB of memory of cards (sold as GB), and their GPUs. The 6 GB card stands for GPUs of laptops.
CARDS = (
    (6, "RTX 3060"), (8, "RTX 4060 Ti"), (12, "RTX 4070"), (16, "RTX 4060 Ti"), (24, "RTX 3090"),
    (24, "RTX 4090"), (32, "RTX 5090"),
)  # fmt: skip
RANK, SIDE = 16, 1024
"""The rank of the LoRA, and the height and width of the images in px."""
ROW_TOKENS = 2048
"""The tokens of a row, the batch of a language model."""
# The words for settings in the column "chosen".
SHORT = {
    "gradient_checkpointing": "checkpointing", "checkpoint_blocks": "for", "base_precision": "base",
    "text_encoder_precision": "texts", "stream_modulation": "modulation streamed",
    "stream_blocks": "blocks streamed", "optimizer_states": "states",
}  # fmt: skip


def plans(model: str, folder: Path) -> Iterator[tuple[int, str, Plan | None, Budget]]:
    """Yield for each card: its GiB, its GPU, the plan (None if none fits), and the budget.

    Args:
        model: a key of `MODELS`.
        folder: where to write the model's configurations and an image.
    """
    family_name, _ = MODELS[model]
    family_class: Any = families.find(family_name)
    weights = write_model(folder / model, model)
    for gib, gpu in CARDS:
        config = _config(family_class, folder)
        # Every run on a GPU leaves this share of the memory free.
        budget = Budget(gib * GIB - CONTEXT_BYTES, HOST, GPUS[gpu], margin=0.05)
        family = family_class(weights, "bf16", "cuda", config)
        if family_name == "causal-lm":
            estimate = partial(family.estimate, tokens=ROW_TOKENS)
        else:
            task = family.task()
            data = task.read(lambda _: None)
            estimate = partial(task.estimate, data=data, limit=budget.memory)
        try:
            plan = make_plan(config, family_class.groups, budget, estimate)
        except OutOfMemoryError:
            plan = None
        yield gib, gpu, plan, budget


def _config(family: Any, folder: Path) -> TrainConfig:
    """Return the settings of a run, with the family's defaults; write the image of its data set."""
    images = folder / "images"
    if not images.exists():
        images.mkdir()
        Image.fromarray(np.zeros((SIDE, SIDE, 3), np.uint8)).save(images / "a.png")
        (images / "a.txt").write_text("a square")
    given = TrainConfig(
        dataset=str(images), device="cuda", precision="bf16", rank=RANK,
        resolution=None if family.name == "causal-lm" else SIDE,
    )  # fmt: skip
    defaults = {k: v for k, v in family.defaults(given).items() if getattr(given, k) is None}
    return given.with_(**defaults)


def table() -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| model | card | chosen | peak | while | host | a step |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            lines += [_line(model, *row) for row in plans(model, Path(folder))]
    return lines


def _line(model: str, gib: int, gpu: str, plan: Plan | None, budget: Budget) -> str:
    """Return the line of a model on a card."""
    card = f"{gib} GB ({gpu})"
    if plan is None:
        return f"| {model} | {card} | does not fit | | | | |"
    estimate = plan.estimate
    host = f"{estimate.host / GIB:.1f} GiB" if estimate.host else ""
    # `highest` is the name of the phase with the peak.
    needs = f"{estimate.peak / GIB:.1f} GiB | {estimate.highest} | {host}"
    return f"| {model} | {card} | {_chosen(plan)} | {needs} | {step_seconds(plan, budget):.2g} s |"


def _chosen(plan: Plan) -> str:
    """Return the chosen settings in words."""
    parts = []
    for name, value in plan.chosen.items():
        short = SHORT[name]
        if value is True:
            parts.append(short)
        elif name == "checkpoint_blocks":
            # The part before is "checkpointing full" or "checkpointing offload". It is for the
            # first `value` of the blocks that can have a policy.
            blocks = plan.estimate.work.checkpointed if plan.estimate.work is not None else 0
            parts[-1] += f" {short} {value} of {blocks} blocks"
        elif name == "stream_blocks":
            # `work.blocks` counts the blocks that can be streamed.
            blocks = plan.estimate.work.blocks if plan.estimate.work is not None else 0
            parts.append(f"{value} of {blocks} {short}")
        else:
            parts.append(f"{short} {value}")
    return ", ".join(parts) or "nothing: bf16, no checkpointing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write the table to {DOCUMENT.name}")
    given = parser.parse_args()
    lines = table()
    print("\n".join(lines))
    if given.write:
        before, rest = DOCUMENT.read_text().split(BEGIN)
        _, after = rest.split(END)
        DOCUMENT.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]))


if __name__ == "__main__":
    main()
