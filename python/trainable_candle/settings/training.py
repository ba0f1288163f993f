"""Settings of the length of training and of the optimizer.

The functions here that return a message take the configuration of a whole run, which has the
settings of all groups.

The short help omits a `rare` setting. With `above`, the bound `low` is excluded. `synonyms` are the
names of a setting in other tools, and `spellings` maps their names of a choice to ours. The value
of a setting with `texts` is a list of texts; with `several`, its flag takes several at once.
`words` maps words to the numbers that they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from trainable_candle._core import Var, zeros
from trainable_candle.errors import ConfigError, Error
from trainable_candle.optim import KINDS
from trainable_candle.optim.lr_scheduler import SCHEDULES
from trainable_candle.placement import AUTO
from trainable_candle.settings import sections
from trainable_candle.settings.arguments import check_names, parsed
from trainable_candle.settings.setting import Condition, Group, Setting

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIMIZERS: Final = tuple(KINDS)
SCHEDULERS: Final = tuple(SCHEDULES)
RUN_ARGUMENTS: Final[dict[str, dict[str, Any]]] = {"muon": {"match_rms_adamw": True}}
"""Arguments that a run gives to an optimizer, by the optimizer's name. Muon's updates get the size
of AdamW's updates, because the default learning rates are chosen for AdamW."""


def _warmup(value: Any) -> Any:
    """Return a number of warm-up steps as `int`; OneTrainer writes it as 200.0.

    Returns a value that is not a whole number unchanged.

    Raises:
        ConfigError: the value is a share of the steps, which kohya's scripts take.
    """
    if not isinstance(value, (str, float)):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    if 0 < number < 1:
        raise ConfigError(
            f"warmup_steps is {value}, which is a share of the run; expected a number of steps"
        )
    return int(number) if number.is_integer() else value


def _long_warmup(config: Any) -> str | None:
    """Return why the warm-up is too long for the run; None if it is not."""
    # If `epochs` is set, `steps` is not the length of the run.
    if config.epochs is None and config.warmup_steps > config.steps:
        return (
            f"warmup_steps is {config.warmup_steps}, more than the {config.steps} steps of the run"
        )
    return None


def _wrong_arguments(config: Any) -> str | None:
    """Return why the optimizer or the schedule rejects its arguments; None if neither does.

    A small optimizer and a schedule are made with the arguments to find out.

    Raises:
        ConfigError: an argument cannot be parsed, is unknown, or has a flag of its own.
    """
    if not config.optimizer_args and not config.lr_scheduler_args:
        return None
    of_optimizer, of_schedule = config.optimizer_arguments, config.lr_scheduler_arguments
    kind: Callable[..., Any] = KINDS[config.optimizer]
    schedule = SCHEDULES[config.lr_scheduler]
    if "weight_decay" in parsed("optimizer_args", config.optimizer_args) and (
        config.weight_decay != Training.weight_decay
    ):
        return "--weight-decay and --optimizer-args both set the weight decay; give one"
    # Arguments that have flags of their own; the errors of `check_names` name these flags.
    optimizer_flags = {
        "lr": "--learning-rate",
        "stochastic_rounding": "--stochastic-rounding",
        "states": "--optimizer-states",
    }
    check_names("optimizer_args", of_optimizer, config.optimizer, kind, optimizer_flags)
    schedule_flags = {
        "optimizer": "--optimizer",
        "total_steps": "--steps",
        "warmup_steps": "--warmup-steps",
    }
    check_names("lr_scheduler_args", of_schedule, config.lr_scheduler, schedule, schedule_flags)
    setting = "optimizer_args"
    try:
        optimizer: Any = kind([Var(zeros(1))], lr=config.rate, **of_optimizer)
        setting = "lr_scheduler_args"
        # A stand-in for the length of the run: if `epochs` is set, `steps` is not the length, and
        # may be below the warm-up. The schedule's checks of its arguments do not depend on it.
        schedule(optimizer, total_steps=max(1, config.warmup_steps, config.steps), **of_schedule)
    except (Error, TypeError) as error:
        return f"{setting}: {error}"
    return None


def _one_rate_for_all(config: Any) -> str | None:
    """Return why the optimizer cannot train the factors B at another rate; None if it can."""
    if config.finds_rate and config.lora_plus_ratio != 1:
        return (
            f"--optimizer {config.optimizer} finds one step size for all parameters, so it cannot "
            "train the factors B at another rate; leave --lora-plus-ratio out"
        )
    return None


def _averaging_contradiction(config: Any) -> str | None:
    """Return what contradicts the optimizer if it averages the adapter; None if nothing does."""
    kind: Callable[..., Any] = KINDS[config.optimizer]
    if not kind([Var(zeros(1))]).averages:
        return None
    if config.ema_decay:
        return f"--optimizer {config.optimizer} already averages the adapter; set --ema-decay to 0"
    if config.lr_scheduler != "constant":
        return f"--optimizer {config.optimizer} needs no schedule; set --lr-scheduler to constant"
    return None


def _rounding_contradiction(config: Any) -> str | None:
    """Return why `stochastic_rounding` contradicts another setting; None if it does not."""
    if not config.stochastic_rounding:
        return None
    kind: Callable[..., Any] = KINDS[config.optimizer]
    try:
        kind([Var(zeros(1, dtype="bf16"))], stochastic_rounding=True)
    except Error as error:
        return f"--stochastic-rounding: {error}"
    others = {
        "--ema-decay": config.ema_decay,
        "--adapter dora": config.adapter == "dora",
        "--qat-learned-scales": config.qat_learned_scales,
    }
    for other, given in others.items():
        if given:
            return f"--stochastic-rounding trains in bf16, and {other} needs f32; leave one out"
    return None


def _contradiction(config: Any) -> str | None:
    """Return a message about the first contradiction; None if there is none."""
    return (
        _long_warmup(config)
        or _wrong_arguments(config)
        or _one_rate_for_all(config)
        or _averaging_contradiction(config)
        or _rounding_contradiction(config)
    )


@dataclass(frozen=True)
class Training(Group):
    """Steps, batches, optimizer and learning rate."""

    section: ClassVar[str] = sections.TRAINING
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("steps",),
            lambda c: c.epochs is None,
            complaint="--epochs and --steps both say how long to train; give one of the two",
        ),
        Condition(
            ("lora_plus_ratio",),
            lambda c: c.adapter in {"lora", "dora"},
            needed="--adapter lora or --adapter dora (other kinds have no factor B)",
        ),
    )
    contradictions: ClassVar = (_contradiction,)

    steps: Annotated[
        int,
        Setting(
            "optimizer steps",
            low=1,
            # `free`: whether a resumed run may change the setting. The constant schedule does not
            # depend on the number of steps.
            free=lambda values: values["lr_scheduler"] == "constant",
            synonyms=("max-train-steps", "num-steps", "train.steps"),
        ),
    ] = 1000
    epochs: Annotated[
        int | None,
        Setting(
            "epochs to train, instead of --steps",
            low=1,
            synonyms=("max-train-epochs", "num-train-epochs", "num-epochs"),
        ),
    ] = None
    batch_size: Annotated[
        int,
        Setting(
            "samples per batch; auto: fastest",
            low=0,
            words={AUTO: 0},
            synonyms=("train-batch-size", "batch", "bs", "train.batch-size"),
        ),
    ] = 1
    gradient_accumulation: Annotated[
        int,
        Setting(
            "batches per optimizer step",
            low=1,
            rare=True,
            synonyms=("gradient-accumulation-steps", "train.gradient-accumulation"),
        ),
    ] = 1
    optimizer: Annotated[
        str,
        Setting(
            "update rule",
            choices=OPTIMIZERS,
            synonyms=("optimizer-type", "optim", "optimizer.optimizer", "train.optimizer"),
            spellings={
                "adamw_8bit": "adamw8bit",
                "adam_8bit": "adam8bit",
                "lion_8bit": "lion8bit",
                "schedule_free_adamw": "adamwschedulefree",
            },
        ),
    ] = "adamw8bit"
    optimizer_args: Annotated[
        list[str],
        Setting(
            "further arguments of the optimizer, such as eps=1e-6 betas=0.9,0.99",
            texts=True,
            several=True,
            rare=True,
        ),
    ] = field(default_factory=list)
    stochastic_rounding: Annotated[
        bool,
        Setting(
            "keep the adapter, its gradients and the optimizer's states in bf16, rounded at random",
            rare=True,
            synonyms=("bf16-stochastic-round",),
        ),
    ] = False
    learning_rate: Annotated[
        float | None,
        Setting(
            "learning rate (default: model's; prodigy: 1)",
            low=0,
            above=True,
            synonyms=("lr", "train.lr"),
        ),
    ] = None
    lora_plus_ratio: Annotated[
        float,
        Setting(
            "learning rate of the factors B relative to that of the rest (LoRA+)",
            low=0,
            above=True,
            rare=True,
            synonyms=("loraplus-lr-ratio",),
        ),
    ] = 1.0
    lr_scheduler: Annotated[
        str,
        Setting(
            "schedule of the learning rate",
            choices=SCHEDULERS,
            rare=True,
            synonyms=("learning-rate-scheduler", "scheduler", "train.lr-scheduler"),
            spellings={"constant_with_warmup": "constant"},
        ),
    ] = "constant"
    lr_scheduler_args: Annotated[
        list[str],
        Setting(
            "arguments of the schedule, such as num_cycles=0.5", texts=True, several=True, rare=True
        ),
    ] = field(default_factory=list)
    warmup_steps: Annotated[
        int,
        Setting(
            "steps of linear warm-up",
            low=0,
            rare=True,
            synonyms=("lr-warmup-steps", "learning-rate-warmup-steps"),
            read=_warmup,
        ),
    ] = 0
    weight_decay: Annotated[float, Setting("weight decay", low=0, rare=True)] = 0.01
    max_grad_norm: Annotated[
        float | None,
        Setting(
            "norm to which larger gradients are clipped; 0: no limit (default: 1; sd3: 0.1)",
            low=0,
            rare=True,
            synonyms=("clip-grad-norm", "train.max-grad-norm"),
        ),
    ] = None
    ema_decay: Annotated[
        float,
        Setting("decay of the adapter's moving average; 0: no average", low=0, below=1, rare=True),
    ] = 0.0
    seed: Annotated[int, Setting("seed of all random numbers", low=0, below=2**64, rare=True)] = 0

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """The optimizer's arguments by name: `weight_decay`, `RUN_ARGUMENTS` and `optimizer_args`.

        If two of these give an argument, the later one counts.

        Raises:
            ConfigError: a text in `optimizer_args` cannot be parsed.
        """
        run_arguments = RUN_ARGUMENTS.get(self.optimizer, {})
        given = parsed("optimizer_args", self.optimizer_args)
        return {"weight_decay": self.weight_decay, **run_arguments, **given}

    @property
    def lr_scheduler_arguments(self) -> dict[str, Any]:
        """The schedule's arguments by name, except for the optimizer and the numbers of steps.

        Raises:
            ConfigError: a text in `lr_scheduler_args` cannot be parsed.
        """
        return parsed("lr_scheduler_args", self.lr_scheduler_args)

    @property
    def finds_rate(self) -> bool:
        """Whether the optimizer finds its step size, which it multiplies by the learning rate."""
        return self.optimizer == "prodigy"

    @property
    def most_grad_norm(self) -> float:
        """The norm to which larger gradients are clipped; 1 if neither user nor model sets one."""
        return 1.0 if self.max_grad_norm is None else self.max_grad_norm

    @property
    def rate(self) -> float:
        """The learning rate; 1e-4 if neither the user nor the model sets one."""
        return 1e-4 if self.learning_rate is None else self.learning_rate
