"""What a run writes, how often, and where it continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from trainable_candle.settings import sections
from trainable_candle.settings.setting import Group, Setting


@dataclass(frozen=True)
class Files(Group):
    """Checkpoints, adapters of earlier steps, logs."""

    section: ClassVar[str] = sections.FILES

    save_every: Annotated[
        int,
        Setting(
            "steps between saves; 0: only the last",
            low=0,
            free=True,
            aliases=("save-steps", "checkpointing-steps"),
        ),
    ] = 250
    keep_checkpoints: Annotated[
        int, Setting("checkpoints to keep", low=1, rare=True, free=True)
    ] = 3
    keep_adapters: Annotated[
        int, Setting("adapters of earlier steps to keep", low=1, rare=True, free=True)
    ] = 10
    log_every: Annotated[
        int, Setting("steps between lines of logs", low=1, rare=True, free=True)
    ] = 1
    tensorboard: Annotated[bool, Setting("log for TensorBoard too", rare=True, free=True)] = False
    resume: Annotated[str | None, Setting("a checkpoint folder, or `latest`", free=True)] = None
