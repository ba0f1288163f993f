"""What a training run does: every setting, its default, its range; read from YAML."""

from __future__ import annotations

import difflib
import math
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin, get_type_hints

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


@dataclass(frozen=True)
class Setting:
    """What there is to know about a setting besides its name, type and default."""

    help: str
    group: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    """The least value."""
    above: bool = False
    """Whether `low` itself is too little."""
    below: float | None = None
    """The first value that is too much."""
    rare: bool = False
    """Whether a short help leaves it out."""


def _setting(default: Any, group: str, text: str, **facts: Any) -> Any:
    metadata = {"setting": Setting(text, group, **facts)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a training run.

    Raises:
        ConfigError: a value has the wrong type or lies outside its range.
    """

    model: str = _setting("", "what", "which model; `trainable-candle info` lists them")
    weights: str = _setting("", "what", "its checkpoint, a folder or a file")
    dataset: str = _setting("", "what", "folder of pictures, captions in .txt files beside them")
    output: str = _setting("", "what", "folder for the adapter, checkpoints and logs")
    caption: str | None = _setting(None, "what", "caption of pictures without a .txt", rare=True)

    adapter: str = _setting("lora", "adapter", "kind of adapter", choices=ADAPTERS)
    rank: int = _setting(16, "adapter", "rank", low=1)
    alpha: float | None = _setting(
        None, "adapter", "numerator of the scale alpha / rank (default: rank)", low=0, above=True
    )
    target_modules: list[str] = _setting(
        [], "adapter", "layers by name, comma-separated (default: the model's)"
    )
    exclude_modules: list[str] = _setting([], "adapter", "layers to leave out", rare=True)
    rslora: bool = _setting(
        default=False, group="adapter", text="scale by alpha / sqrt(rank)", rare=True
    )
    lora_dropout: float = _setting(
        0.0, "adapter", "dropout on the adapter's input", low=0, below=1, rare=True
    )

    steps: int = _setting(1000, "training", "optimizer steps", low=1)
    batch_size: int = _setting(1, "training", "pictures in a batch", low=1)
    gradient_accumulation: int = _setting(1, "training", "batches in an optimizer step", low=1)
    optimizer: str = _setting("adamw8bit", "training", "optimizer", choices=OPTIMIZERS)
    learning_rate: float = _setting(1e-4, "training", "learning rate", low=0, above=True)
    lr_scheduler: str = _setting(
        "constant", "training", "learning-rate schedule", choices=SCHEDULERS
    )
    warmup_steps: int = _setting(0, "training", "steps of linear warm-up", low=0)
    weight_decay: float = _setting(0.01, "training", "weight decay", low=0, rare=True)
    max_grad_norm: float = _setting(
        1.0, "training", "clip the gradient's norm; 0 leaves it alone", low=0, rare=True
    )
    timesteps: str = _setting(
        "uniform", "training", "distribution of noise levels", choices=TIMESTEPS, rare=True
    )
    seed: int = _setting(0, "training", "seed of everything random", low=0, below=2**64)

    device: str = _setting("cpu", "machine", "cpu, cuda or cuda:N")
    precision: str = _setting(
        "f32", "machine", "dtype of the base and of the arithmetic", choices=PRECISIONS
    )
    gradient_checkpointing: str = _setting(
        "none", "machine", "what to recompute instead of keeping", choices=CHECKPOINTING
    )
    threads: int | None = _setting(None, "machine", "CPU threads (default: all)", low=1, rare=True)

    save_every: int = _setting(250, "files", "steps between checkpoints; 0: only the last", low=0)
    keep_checkpoints: int = _setting(3, "files", "how many checkpoints to keep", low=1, rare=True)
    log_every: int = _setting(1, "files", "steps between lines of train.csv", low=1, rare=True)
    resume: str | None = _setting(None, "files", "checkpoint folder to continue from, or `latest`")

    def __post_init__(self) -> None:
        """Check every value."""
        hints = get_type_hints(type(self))
        for item in fields(self):
            value = _typed(item.name, getattr(self, item.name), hints[item.name])
            object.__setattr__(self, item.name, value)
            _check_range(item.name, value, item.metadata["setting"])
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
        known = [item.name for item in fields(cls)]
        for key in values:
            if key not in known:
                hint = nearest(str(key).replace("-", "_"), known)
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


def default_of(name: str) -> Any:
    """The value that a setting has unless it is given."""
    item = next(item for item in fields(TrainConfig) if item.name == name)
    return item.default if item.default_factory is MISSING else item.default_factory()


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
        raise ConfigError(f"{name} is `{value}`, expected one of {', '.join(setting.choices)}{hint}")
    if value is None or setting.low is None:
        return
    if not math.isfinite(value):
        raise ConfigError(f"{name} is {value}, expected a finite number")
    if value < setting.low or (setting.above and value == setting.low):
        bound = "above" if setting.above else "at least"
        raise ConfigError(f"{name} is {value}, expected {bound} {setting.low:g}")
    if setting.below is not None and value >= setting.below:
        raise ConfigError(f"{name} is {value}, expected below {setting.below}")
