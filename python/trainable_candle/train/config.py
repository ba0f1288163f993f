"""What a training run does: every setting, its default, its range; read from YAML or the command line."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin, get_type_hints

import yaml

from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OPTIMIZERS: Final = ("adamw8bit", "adamw", "adam8bit", "adam", "lion8bit", "lion", "sgd")
SCHEDULERS: Final = ("constant", "linear", "cosine", "polynomial")
PRECISIONS: Final = ("f32", "bf16", "f16")
CHECKPOINTING: Final = ("none", "full", "selective")
TIMESTEPS: Final = ("uniform", "logit_normal")


def _choice(default: str, choices: tuple[str, ...], text: str) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


def _number(default: float | None, low: float, text: str, *, above: bool = False) -> Any:
    return field(default=default, metadata={"help": text, "low": low, "above": above})


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _list(default: tuple[str, ...], text: str) -> Any:
    return field(default_factory=lambda: list(default), metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a training run.

    Raises:
        ConfigError: a value has the wrong type or lies outside its range.
    """

    model: str = _setting("", "which model: see `trainable-candle info`")
    weights: str = _setting("", "its checkpoint: a folder or a file")
    dataset: str = _setting("", "a folder of pictures, each with a caption in a .txt of the same name")
    output: str = _setting("", "folder for the adapter, checkpoints and logs")
    caption: str | None = _setting(None, "caption of pictures that have no .txt")

    rank: int = _number(16, 1, "rank of the adapter")
    alpha: float | None = _number(None, 0, "numerator of the scale alpha / rank (default: the rank)", above=True)
    target_modules: list[str] = _list((), "layers to adapt, by name (default: the model's)")
    adapter: str = _choice("lora", ("lora", "dora"), "kind of adapter")
    rslora: bool = _setting(default=False, text="scale alpha / sqrt(rank)")
    lora_dropout: float = _number(0.0, 0, "dropout on the adapter's input")

    steps: int = _number(1000, 1, "optimizer steps")
    batch_size: int = _number(1, 1, "pictures in a batch")
    gradient_accumulation: int = _number(1, 1, "batches in an optimizer step")
    learning_rate: float = _number(1e-4, 0, "learning rate", above=True)
    optimizer: str = _choice("adamw8bit", OPTIMIZERS, "optimizer")
    weight_decay: float = _number(0.01, 0, "weight decay")
    lr_scheduler: str = _choice("constant", SCHEDULERS, "learning-rate schedule")
    warmup_steps: int = _number(0, 0, "steps of linear warm-up")
    max_grad_norm: float = _number(1.0, 0, "clip the gradient's norm; 0 leaves it alone")
    timesteps: str = _choice("uniform", TIMESTEPS, "distribution of the noise level")

    precision: str = _choice("f32", PRECISIONS, "dtype of the base and of the arithmetic")
    gradient_checkpointing: str = _choice("none", CHECKPOINTING, "recompute instead of keep")
    device: str = _setting("cpu", "cpu, cuda or cuda:N")
    threads: int | None = _number(None, 1, "CPU threads (default: all)")
    seed: int = _number(0, 0, "seed of everything random")

    save_every: int = _number(250, 0, "steps between checkpoints; 0 saves the end only")
    keep_checkpoints: int = _number(3, 1, "checkpoints to keep")
    log_every: int = _number(10, 1, "steps between lines of the log")
    resume: str | None = _setting(None, "a checkpoint folder to continue from, or `latest`")

    def __post_init__(self) -> None:
        """Check every value."""
        hints = get_type_hints(type(self))
        for item in fields(self):
            value = _typed(item.name, getattr(self, item.name), hints[item.name])
            object.__setattr__(self, item.name, value)
            _check_range(item.name, value, item.metadata)
        if self.lora_dropout >= 1:
            raise ConfigError(f"lora_dropout is {self.lora_dropout}, expected a number in [0, 1)")
        if self.warmup_steps > self.steps:
            raise ConfigError(
                f"warmup_steps is {self.warmup_steps}, more than the {self.steps} steps of the run"
            )

    def require(self, *names: str) -> None:
        """Check that settings without a default were given.

        Raises:
            ConfigError: naming what is missing and how to give it.
        """
        missing = [name for name in names if not getattr(self, name)]
        if missing:
            flags = " ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise ConfigError(
                f"missing settings: {', '.join(missing)}; "
                f"give {flags}, or set them in the file of --config"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "configuration") -> TrainConfig:
        """Settings by name.

        Raises:
            ConfigError: a name is unknown (the nearest right one is told) or a value is wrong.
        """
        known = [item.name for item in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"{source}: {unknown_name(str(key), known)}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def from_yaml(cls, path: str | Path) -> TrainConfig:
        """Settings from a YAML file of `name: value` lines.

        Raises:
            FileNotFoundError: there is no such file.
            ConfigError: the file is no YAML, a name is unknown, a value is wrong.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: there is no such configuration file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: is not valid YAML: {error}") from error
        if values is None:
            values = {}
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected lines of `name: value`, found {_kind(values)}")
        return cls.from_mapping(values, str(path))

    def to_yaml(self) -> str:
        """The settings as YAML that `from_yaml` reads back to an equal configuration."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)

    def with_(self, **changes: Any) -> TrainConfig:
        """A copy with other values.

        Raises:
            ConfigError: as for the class.
        """
        return replace(self, **changes)


def unknown_name(name: str, known: Iterable[str]) -> str:
    """What to say about a name that does not exist: the nearest one that does."""
    near = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1, cutoff=0.5)
    hint = f"; did you mean `{near[0]}`?" if near else f"; known: {', '.join(sorted(known))}"
    return f"unknown setting `{name}`{hint}"


def _kind(value: Any) -> str:
    return f"{type(value).__name__} ({value!r})"


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type of its setting; whole numbers serve as floats, nothing else is converted."""
    options = get_args(hint) if get_origin(hint) is not list else ()
    if value is None and type(None) in options:
        return None
    target = next((t for t in options if t is not type(None)), hint)
    if get_origin(target) is list:
        if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
            return list(value)
        raise ConfigError(f"{name} is {_kind(value)}, expected a list of names")
    if target is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if target is float and isinstance(value, str):
        # YAML 1.1 reads 1e-4 as text.
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, Path) and target is str:
        return str(value)
    if not isinstance(value, target) or (target is int and isinstance(value, bool)):
        raise ConfigError(f"{name} is {_kind(value)}, expected {target.__name__}")
    return value


def _check_range(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    choices = metadata.get("choices")
    if choices is not None and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise ConfigError(f"{name} is `{value}`, expected one of {', '.join(choices)}{hint}")
    low = metadata.get("low")
    if low is None or value is None:
        return
    if value != value or value in (float("inf"), float("-inf")):  # noqa: PLR0124 (only NaN differs from itself)
        raise ConfigError(f"{name} is {value}, expected a finite number")
    if value < low or (metadata["above"] and value == low):
        bound = "above" if metadata["above"] else "at least"
        raise ConfigError(f"{name} is {value}, expected {bound} {low}")
