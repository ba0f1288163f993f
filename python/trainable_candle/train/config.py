"""What a training run does: every setting, its default, its range; read from YAML."""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args, get_origin, get_type_hints

import yaml

from trainable_candle.errors import ConfigError, MissingFileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OPTIMIZERS: Final = ("adamw8bit", "adamw", "adam8bit", "adam", "lion8bit", "lion", "sgd")
SCHEDULERS: Final = ("constant", "linear", "cosine", "polynomial")
PRECISIONS: Final = ("f32", "bf16", "f16")
CHECKPOINTING: Final = ("none", "full", "selective")
TIMESTEPS: Final = ("uniform", "logit_normal")
ADAPTERS: Final = ("lora", "dora")

DATA: Final = "model and data"
ADAPTER: Final = "adapter"
TRAINING: Final = "training"
MACHINE: Final = "machine"
FILES: Final = "files"


@dataclass(frozen=True)
class Setting:
    """What there is to know about a setting besides its name, type and default."""

    group: str
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    """The least value."""
    above: bool = False
    """Whether `low` itself is too little."""
    below: float | None = None
    """The first value that is too much."""
    rare: bool = False
    """Whether a short help leaves it out."""


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a training run.

    Raises:
        ConfigError: a value has the wrong type or lies outside its range.
    """

    model: Annotated[str, Setting(DATA, "which model; see `trainable-candle info`")] = ""
    weights: Annotated[str, Setting(DATA, "its checkpoint: a folder or a file")] = ""
    dataset: Annotated[str, Setting(DATA, "folder of pictures, each with a .txt caption")] = ""
    output: Annotated[str, Setting(DATA, "folder for adapter, checkpoints and logs")] = ""
    caption: Annotated[
        str | None, Setting(DATA, "caption of pictures without a .txt", rare=True)
    ] = None

    adapter: Annotated[str, Setting(ADAPTER, "kind", choices=ADAPTERS)] = "lora"
    rank: Annotated[int, Setting(ADAPTER, "rank", low=1)] = 16
    alpha: Annotated[
        float | None, Setting(ADAPTER, "scale is alpha / rank (default: rank)", low=0, above=True)
    ] = None
    target_modules: Annotated[
        list[str], Setting(ADAPTER, "layers, comma-separated (default: the model's)")
    ] = field(default_factory=list)
    exclude_modules: Annotated[list[str], Setting(ADAPTER, "layers to leave out", rare=True)] = (
        field(default_factory=list)
    )
    rslora: Annotated[bool, Setting(ADAPTER, "scale by alpha / sqrt(rank)", rare=True)] = False
    lora_dropout: Annotated[
        float, Setting(ADAPTER, "dropout on the adapter's input", low=0, below=1, rare=True)
    ] = 0.0

    steps: Annotated[int, Setting(TRAINING, "optimizer steps", low=1)] = 1000
    batch_size: Annotated[int, Setting(TRAINING, "pictures in a batch", low=1)] = 1
    gradient_accumulation: Annotated[int, Setting(TRAINING, "batches in a step", low=1)] = 1
    optimizer: Annotated[str, Setting(TRAINING, "update rule", choices=OPTIMIZERS)] = "adamw8bit"
    learning_rate: Annotated[float, Setting(TRAINING, "learning rate", low=0, above=True)] = 1e-4
    lr_scheduler: Annotated[
        str, Setting(TRAINING, "course of the learning rate", choices=SCHEDULERS)
    ] = "constant"
    warmup_steps: Annotated[int, Setting(TRAINING, "steps of linear warm-up", low=0)] = 0
    weight_decay: Annotated[float, Setting(TRAINING, "weight decay", low=0, rare=True)] = 0.01
    max_grad_norm: Annotated[
        float, Setting(TRAINING, "clip the gradient's norm; 0: do not", low=0, rare=True)
    ] = 1.0
    timesteps: Annotated[
        str, Setting(TRAINING, "distribution of noise levels", choices=TIMESTEPS, rare=True)
    ] = "uniform"
    seed: Annotated[int, Setting(TRAINING, "seed of everything random", low=0, below=2**64)] = 0

    device: Annotated[str, Setting(MACHINE, "cpu, cuda or cuda:N")] = "cpu"
    precision: Annotated[str, Setting(MACHINE, "of the arithmetic", choices=PRECISIONS)] = "f32"
    gradient_checkpointing: Annotated[
        str, Setting(MACHINE, "what to recompute", choices=CHECKPOINTING)
    ] = "none"
    threads: Annotated[
        int | None, Setting(MACHINE, "CPU threads (default: all)", low=1, rare=True)
    ] = None

    save_every: Annotated[
        int, Setting(FILES, "steps between checkpoints; 0: only the last", low=0)
    ] = 250
    keep_checkpoints: Annotated[int, Setting(FILES, "checkpoints to keep", low=1, rare=True)] = 3
    log_every: Annotated[
        int, Setting(FILES, "steps between lines of train.csv", low=1, rare=True)
    ] = 1
    resume: Annotated[str | None, Setting(FILES, "a checkpoint folder, or `latest`")] = None

    def __post_init__(self) -> None:
        """Check every value."""
        for name, (hint, setting) in settings().items():
            value = _typed(name, getattr(self, name), hint)
            object.__setattr__(self, name, value)
            _check_range(name, value, setting)
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
            flags = " ".join(flag(name) for name in missing)
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
        for key in values:
            if key not in settings():
                hint = nearest(str(key).replace("-", "_"), settings())
                raise ConfigError(f"{source}: unknown setting `{key}`{hint}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def from_yaml(cls, path: str | Path) -> TrainConfig:
        """Settings from a YAML file of `name: value` lines.

        Raises:
            MissingFileError: there is no such file.
            ConfigError: the file cannot be read or is no YAML, a name is unknown, a value is wrong.
        """
        return cls.from_mapping(read_yaml(path), str(path))

    def to_yaml(self) -> str:
        """The settings as YAML that `from_yaml` reads back to an equal configuration."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)

    def with_(self, **changes: Any) -> TrainConfig:
        """A copy with other values.

        Raises:
            ConfigError: as for the class.
        """
        return replace(self, **changes)


@cache
def settings() -> dict[str, tuple[Any, Setting]]:
    """The type and the facts of every setting of `TrainConfig`, by name."""
    hints = get_type_hints(TrainConfig, include_extras=True)
    return {name: get_args(hint) for name, hint in hints.items()}


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The `name: value` lines of a YAML file, unchecked.

    Raises:
        MissingFileError: there is no such file.
        ConfigError: the file cannot be read, or holds something else.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingFileError(f"{path}: there is no such configuration file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8: {error}") from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected lines of `name: value`, found {_kind(values)}")
    return values


def flag(name: str) -> str:
    """The command line's spelling of a setting."""
    return f"--{name.replace('_', '-')}"


def nearest(name: str, known: Iterable[str]) -> str:
    """What to add to a complaint about a name that does not exist."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else f"; expected one of {', '.join(known)}"


def _kind(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"


_EXPECTED: Final = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as its setting's type; whole numbers serve as floats, nothing else is converted."""
    options = get_args(hint) if get_origin(hint) is not list else ()
    if value is None and type(None) in options:
        return None
    target = next((option for option in options if option is not type(None)), hint)
    if get_origin(target) is list:
        return _names(name, value)
    if target is float and type(value) is int:
        return float(value)
    if target is float and isinstance(value, str):
        # YAML 1.1 reads 1e-4 as text.
        try:
            return float(value)
        except ValueError:
            pass
    if target is str and isinstance(value, Path):
        return str(value)
    if type(value) is not target:
        raise ConfigError(f"{name} is {_kind(value)}, expected {_EXPECTED[target]}")
    return value


def _names(name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return list(value)
    raise ConfigError(f"{name} is {_kind(value)}, expected a list of names")


def _check_range(name: str, value: Any, setting: Setting) -> None:
    if setting.choices and value not in setting.choices:
        near = difflib.get_close_matches(value, setting.choices, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise ConfigError(
            f"{name} is `{value}`, expected one of {', '.join(setting.choices)}{hint}"
        )
    if value is None or setting.low is None:
        return
    if not math.isfinite(value):
        raise ConfigError(f"{name} is {value}, expected a finite number")
    if value < setting.low or (setting.above and value == setting.low):
        bound = "above" if setting.above else "at least"
        raise ConfigError(f"{name} is {value}, expected {bound} {setting.low:g}")
    if setting.below is not None and value >= setting.below:
        raise ConfigError(f"{name} is {value}, expected below {setting.below}")
