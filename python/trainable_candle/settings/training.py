"""How long is trained, and by which optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from trainable_candle.optim import KINDS
from trainable_candle.optim.lr_scheduler import SCHEDULES
from trainable_candle.settings import sections
from trainable_candle.settings.setting import Condition, Group, Setting

OPTIMIZERS: Final = tuple(KINDS)
SCHEDULERS: Final = tuple(SCHEDULES)


def _long_warmup(config: Any) -> str | None:
    if config.epochs is None and config.warmup_steps > config.steps:
        return (
            f"warmup_steps is {config.warmup_steps}, more than the {config.steps} steps of the run"
        )
    return None


@dataclass(frozen=True)
class Training(Group):
    """Steps, batches, and the rule that updates the parameters."""

    section: ClassVar[str] = sections.TRAINING
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("steps",),
            lambda c: c.epochs is None,
            "",
            "--epochs and --steps both say how long to train; give one of the two",
        ),
    )
    contradictions = (_long_warmup,)

    steps: Annotated[
        int,
        Setting(
            "optimizer steps",
            low=1,
            # A course that does not lead to the last step is the same for more of them.
            free=lambda values: values["lr_scheduler"] == "constant",
            synonyms=("max-train-steps", "num-steps"),
        ),
    ] = 1000
    epochs: Annotated[
        int | None,
        Setting(
            "passes over the dataset, in place of steps",
            low=1,
            synonyms=("max-train-epochs", "num-train-epochs", "num-epochs"),
        ),
    ] = None
    batch_size: Annotated[
        int,
        Setting(
            "images or rows in a batch",
            low=1,
            synonyms=("train-batch-size", "batch", "bs"),
        ),
    ] = 1
    gradient_accumulation: Annotated[
        int,
        Setting("batches in a step", low=1, rare=True, synonyms=("gradient-accumulation-steps",)),
    ] = 1
    optimizer: Annotated[
        str, Setting("update rule", choices=OPTIMIZERS, synonyms=("optimizer-type", "optim"))
    ] = "adamw8bit"
    learning_rate: Annotated[
        float | None, Setting("(default: model's)", low=0, above=True, synonyms=("lr",))
    ] = None
    lr_scheduler: Annotated[
        str,
        Setting(
            "its course",
            choices=SCHEDULERS,
            rare=True,
            synonyms=("learning-rate-scheduler", "scheduler"),
            spellings={"constant_with_warmup": "constant"},
        ),
    ] = "constant"
    warmup_steps: Annotated[
        int,
        Setting(
            "steps of linear warm-up",
            low=0,
            rare=True,
            synonyms=("lr-warmup-steps", "learning-rate-warmup-steps"),
        ),
    ] = 0
    weight_decay: Annotated[float, Setting("weight decay", low=0, rare=True)] = 0.01
    max_grad_norm: Annotated[
        float,
        Setting(
            "clip the gradient's norm; 0: do not", low=0, rare=True, synonyms=("clip-grad-norm",)
        ),
    ] = 1.0
    ema_decay: Annotated[
        float, Setting("average the adapter; 0: do not", low=0, below=1, rare=True)
    ] = 0.0
    seed: Annotated[int, Setting("of everything random", low=0, below=2**64, rare=True)] = 0

    @property
    def rate(self) -> float:
        """The learning rate; where a model has said nothing about it, 1e-4."""
        return 1e-4 if self.learning_rate is None else self.learning_rate
