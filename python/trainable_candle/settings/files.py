"""Settings of the files that a run writes, how often it saves, and which checkpoint it resumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from trainable_candle.outputs import ADAPTER
from trainable_candle.settings import sections
from trainable_candle.settings.setting import Condition, Group, Setting


def _no_file_name(config: Any) -> str | None:
    """Return why `name` cannot be the stem of the adapter files' names; None if it can."""
    name = config.name
    if "/" in name or name.startswith(".") or "\0" in name or name.endswith(".safetensors"):
        return (
            f"name is `{name}`, expected a file's name without folder and ending, and without a "
            "dot at its start"
        )
    return None


@dataclass(frozen=True)
class Files(Group):
    """The adapter's files, checkpoints and logs."""

    section: ClassVar[str] = sections.FILES
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            settings=("save_every",),
            holds=lambda c: c.save_every_epochs is None,
            complaint=(
                "--save-every and --save-every-epochs both say when to save; give one of the two"
            ),
        ),
    )
    contradictions: ClassVar = (_no_file_name,)

    # `rare`: the short help omits the setting. `free`: a resumed run may change the value and still
    # compute what the earlier run would have. `path`: in a YAML file, the value is relative to the
    # file's folder.
    name: Annotated[
        str,
        Setting(
            "name of the adapter's files (default: adapter)",
            rare=True,
            free=True,
            synonyms=("output-name",),
        ),
    ] = ""
    save_every: Annotated[
        int,
        Setting(
            "save every N steps; 0: at end",
            low=0,
            free=True,
            synonyms=("save-every-n-steps", "checkpointing-steps", "save-steps", "save.save-every"),
        ),
    ] = 250
    save_every_epochs: Annotated[
        int | None,
        Setting(
            "epochs between saves, instead of --save-every",
            low=1,
            rare=True,
            free=True,
            synonyms=("save-every-n-epochs",),
        ),
    ] = None
    keep_checkpoints: Annotated[
        int, Setting("how many checkpoints to keep", low=1, rare=True, free=True)
    ] = 3
    keep_adapters: Annotated[
        int,
        Setting(
            "how many adapters of earlier steps to keep",
            low=1,
            rare=True,
            free=True,
            synonyms=("save.max-step-saves-to-keep",),
        ),
    ] = 10
    log_every: Annotated[int, Setting("steps between log lines", low=1, rare=True, free=True)] = 1
    tensorboard: Annotated[bool, Setting("log for TensorBoard too", rare=True, free=True)] = False
    wandb: Annotated[
        str | None,
        Setting("project of Weights & Biases to log to", rare=True, free=True),
    ] = None
    # `auto` is the latest checkpoint, or a new run if there is no checkpoint.
    resume: Annotated[
        str | None,
        Setting("checkpoint to resume: a folder, latest or auto", free=True, path=True),
    ] = None

    @property
    def stem(self) -> str:
        """The beginning of the names of the adapter's files."""
        return self.name or ADAPTER
