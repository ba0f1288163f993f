"""What a training run does: every setting, its default, its range; read from YAML."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args, get_type_hints

import yaml

from trainable_candle._core import choices
from trainable_candle.errors import ConfigError
from trainable_candle.placement import AUTO
from trainable_candle.train.settings import Setting, checked, flag, nearest, read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

_CHOICES: Final = choices()
OPTIMIZERS: Final = tuple(_CHOICES["optimizer"])
SCHEDULERS: Final = ("constant", "linear", "cosine", "polynomial")
PRECISIONS: Final = ("f32", "bf16", "f16")
CHECKPOINTING: Final = ("none", "full", "selective")
TIMESTEPS: Final = ("uniform", "logit_normal")
LOSSES: Final = ("mse", "l1", "huber", "smooth_l1")
HUBER_SCHEDULES: Final = ("constant", "exponential", "snr")
PREDICTIONS: Final = ("epsilon", "v_prediction")
ADAPTERS: Final = tuple(_CHOICES["adapter"])
FORMATS: Final = tuple(_CHOICES["format"])
SAMPLERS: Final = ("euler", "dpmpp_2m")
CROPS: Final = ("center", "random")
MASKS: Final = ("off", "file", "alpha")
CACHES: Final = ("disk", "memory", "off")

MOST_VIEWS: Final = 1000
"""Cuts, and orders of tags, that a picture may have: each is encoded and kept."""

MODEL: Final = "model and data"
PICTURES: Final = "pictures"
CAPTIONS: Final = "captions"
ADAPTER: Final = "adapter"
TRAINING: Final = "training"
OBJECTIVE: Final = "objective"
VALIDATION: Final = "validation and previews"
MACHINE: Final = "machine"
FILES: Final = "files"


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a training run.

    Raises:
        ConfigError: a value has the wrong type or lies outside its range.
    """

    model: Annotated[str, Setting(MODEL, "which model; see `trainable-candle info`")] = ""
    weights: Annotated[str, Setting(MODEL, "its checkpoint: a folder or a file")] = ""
    dataset: Annotated[str, Setting(MODEL, "folder of pictures with .txt captions")] = ""
    output: Annotated[str, Setting(MODEL, "folder for adapter, checkpoints and logs")] = ""

    resolution: Annotated[
        int | None, Setting(MODEL, "root of a picture's area, px (default: model's)", low=8)
    ] = None
    bucketing: Annotated[bool, Setting(PICTURES, "keep aspect ratios", rare=True)] = True
    bucket_step: Annotated[
        int | None,
        Setting(PICTURES, "sides are multiples (default: 64, or less)", low=8, rare=True),
    ] = None
    min_side: Annotated[
        int | None, Setting(PICTURES, "shortest side (default: resolution / 4)", low=8, rare=True)
    ] = None
    max_side: Annotated[
        int | None, Setting(PICTURES, "longest side (default: resolution x 2)", low=8, rare=True)
    ] = None
    upscale: Annotated[bool, Setting(PICTURES, "enlarge small pictures", rare=True)] = False
    crop: Annotated[str, Setting(PICTURES, "what remains", choices=CROPS, rare=True)] = "center"
    random_crops: Annotated[
        int, Setting(PICTURES, "cuts of a picture", low=1, high=MOST_VIEWS, rare=True)
    ] = 4
    flip: Annotated[bool, Setting(PICTURES, "mirror half of them", rare=True)] = False
    mask: Annotated[str, Setting(PICTURES, "where loss counts", choices=MASKS, rare=True)] = "off"
    prior_loss_weight: Annotated[
        float, Setting(PICTURES, "weight of regularization pictures", low=0, rare=True)
    ] = 1.0
    skip_bad: Annotated[bool, Setting(PICTURES, "leave out what cannot be read", rare=True)] = False
    cache: Annotated[
        str, Setting(PICTURES, "where latents and features are kept", choices=CACHES, rare=True)
    ] = "disk"
    cache_dir: Annotated[
        str | None,
        Setting(PICTURES, "its folder (default: .trainable-candle in the dataset)", rare=True),
    ] = None

    caption: Annotated[str | None, Setting(CAPTIONS, "for pictures without a .txt", rare=True)] = (
        None
    )
    trigger: Annotated[str, Setting(CAPTIONS, "tag put before every caption", rare=True)] = ""
    caption_dropout: Annotated[
        float, Setting(CAPTIONS, "share of empty captions", low=0, high=1, rare=True)
    ] = 0.0
    caption_shuffle: Annotated[bool, Setting(CAPTIONS, "shuffle the tags", rare=True)] = False
    caption_keep_tokens: Annotated[
        int, Setting(CAPTIONS, "tags that keep their place", low=0, rare=True)
    ] = 0
    caption_tag_dropout: Annotated[
        float, Setting(CAPTIONS, "share of tags left out", low=0, below=1, rare=True)
    ] = 0.0
    caption_separator: Annotated[str, Setting(CAPTIONS, "what is between tags", rare=True)] = ","
    caption_variants: Annotated[
        int, Setting(CAPTIONS, "orders of tags; 0: new ones", low=0, high=MOST_VIEWS, rare=True)
    ] = 8

    adapter: Annotated[str, Setting(ADAPTER, "kind", choices=ADAPTERS)] = "lora"
    rank: Annotated[int, Setting(ADAPTER, "rank", low=1)] = 16
    alpha: Annotated[
        float | None, Setting(ADAPTER, "scale is alpha / rank (default: rank)", low=0, above=True)
    ] = None
    target_modules: Annotated[
        list[str], Setting(ADAPTER, "layers, comma-separated (default: model's)", rare=True)
    ] = field(default_factory=list)
    exclude_modules: Annotated[list[str], Setting(ADAPTER, "layers to leave out", rare=True)] = (
        field(default_factory=list)
    )
    rslora: Annotated[bool, Setting(ADAPTER, "scale by alpha / sqrt(rank)", rare=True)] = False
    lora_dropout: Annotated[
        float, Setting(ADAPTER, "dropout on the adapter's input", low=0, below=1, rare=True)
    ] = 0.0
    train_text_encoder: Annotated[
        bool, Setting(ADAPTER, "adapters on the text encoders too", rare=True)
    ] = False
    initial_adapter: Annotated[
        str | None, Setting(ADAPTER, "file to start from: same kind and ranks", rare=True)
    ] = None
    format: Annotated[
        str | None, Setting(ADAPTER, "whose keys (default: model's)", choices=FORMATS, rare=True)
    ] = None
    adapter_precision: Annotated[
        str, Setting(ADAPTER, "of the adapter files", choices=PRECISIONS, rare=True)
    ] = "f32"

    steps: Annotated[int, Setting(TRAINING, "optimizer steps", low=1)] = 1000
    epochs: Annotated[
        int | None, Setting(TRAINING, "passes over the dataset, in place of steps", low=1)
    ] = None
    batch_size: Annotated[int, Setting(TRAINING, "pictures in a batch", low=1)] = 1
    gradient_accumulation: Annotated[
        int, Setting(TRAINING, "batches in a step", low=1, rare=True)
    ] = 1
    optimizer: Annotated[str, Setting(TRAINING, "update rule", choices=OPTIMIZERS)] = "adamw8bit"
    learning_rate: Annotated[float, Setting(TRAINING, "learning rate", low=0, above=True)] = 1e-4
    text_encoder_learning_rate: Annotated[
        float | None, Setting(TRAINING, "(default: a tenth)", low=0, above=True, rare=True)
    ] = None
    lr_scheduler: Annotated[str, Setting(TRAINING, "its course", choices=SCHEDULERS, rare=True)] = (
        "constant"
    )
    warmup_steps: Annotated[int, Setting(TRAINING, "steps of linear warm-up", low=0, rare=True)] = 0
    weight_decay: Annotated[float, Setting(TRAINING, "weight decay", low=0, rare=True)] = 0.01
    max_grad_norm: Annotated[
        float, Setting(TRAINING, "clip the gradient's norm; 0: do not", low=0, rare=True)
    ] = 1.0
    ema_decay: Annotated[
        float, Setting(TRAINING, "average the adapter; 0: do not", low=0, below=1, rare=True)
    ] = 0.0
    seed: Annotated[
        int, Setting(TRAINING, "of everything random", low=0, below=2**64, rare=True)
    ] = 0

    prediction_type: Annotated[
        str | None, Setting(OBJECTIVE, "(default: model's)", choices=PREDICTIONS, rare=True)
    ] = None
    loss: Annotated[str, Setting(OBJECTIVE, "loss", choices=LOSSES, rare=True)] = "mse"
    huber_delta: Annotated[
        float, Setting(OBJECTIVE, "where Huber turns linear", low=0, above=True, rare=True)
    ] = 0.1
    huber_schedule: Annotated[
        str, Setting(OBJECTIVE, "its course", choices=HUBER_SCHEDULES, rare=True)
    ] = "constant"
    timesteps: Annotated[
        str, Setting(OBJECTIVE, "distribution of noise levels", choices=TIMESTEPS, rare=True)
    ] = "uniform"
    timestep_shift: Annotated[
        float, Setting(OBJECTIVE, "above 1: more noise", low=0, above=True, rare=True)
    ] = 1.0
    min_timestep: Annotated[int, Setting(OBJECTIVE, "first timestep", low=0, rare=True)] = 0
    max_timestep: Annotated[
        int | None, Setting(OBJECTIVE, "one after the last (default: model's)", low=1, rare=True)
    ] = None
    min_snr_gamma: Annotated[
        float | None,
        Setting(OBJECTIVE, "weigh by min(SNR, X); 5 is usual", low=0, above=True, rare=True),
    ] = None
    noise_offset: Annotated[
        float, Setting(OBJECTIVE, "noise of whole channels", low=0, rare=True)
    ] = 0.0
    clip_skip: Annotated[
        int | None, Setting(OBJECTIVE, "text layers left out (default: model's)", low=0, rare=True)
    ] = None

    validation_dataset: Annotated[
        str | None, Setting(VALIDATION, "folder of pictures to validate on", rare=True)
    ] = None
    validation_split: Annotated[
        float, Setting(VALIDATION, "share of the dataset to validate on", low=0, below=1, rare=True)
    ] = 0.0
    validate_every: Annotated[
        int, Setting(VALIDATION, "steps between validations", low=1, rare=True)
    ] = 100
    sample_prompts: Annotated[
        list[str], Setting(VALIDATION, "draw a preview; may be given again", texts=True)
    ] = field(default_factory=list)
    sample_every: Annotated[
        int, Setting(VALIDATION, "steps between previews", low=1, rare=True)
    ] = 250
    negative_prompt: Annotated[str, Setting(VALIDATION, "what not to draw", rare=True)] = ""
    guidance: Annotated[
        float | None, Setting(VALIDATION, "guidance scale (default: model's)", low=0, rare=True)
    ] = None
    sampler: Annotated[
        str | None, Setting(VALIDATION, "(default: model's)", choices=SAMPLERS, rare=True)
    ] = None
    sample_steps: Annotated[
        int, Setting(VALIDATION, "sampling steps of a preview", low=1, rare=True)
    ] = 25
    sample_size: Annotated[
        str | None, Setting(VALIDATION, "WIDTHxHEIGHT (default: resolution)", rare=True)
    ] = None
    sample_seed: Annotated[
        int, Setting(VALIDATION, "seed of the previews", low=0, below=2**64, rare=True)
    ] = 0

    device: Annotated[str, Setting(MACHINE, "auto, cpu, cuda or cuda:N")] = AUTO
    precision: Annotated[
        str, Setting(MACHINE, "auto: bf16 on a GPU", choices=(AUTO, *PRECISIONS))
    ] = AUTO
    gradient_checkpointing: Annotated[
        str, Setting(MACHINE, "what to recompute", choices=CHECKPOINTING)
    ] = "none"
    cuda_graphs: Annotated[
        int, Setting(MACHINE, "on a GPU, shapes of batches recorded; 0: none", low=0, rare=True)
    ] = 16
    memory_limit: Annotated[
        float | None, Setting(MACHINE, "GiB to stay within (default: free)", low=0, rare=True)
    ] = None
    threads: Annotated[
        int | None, Setting(MACHINE, "CPU threads (default: all)", low=1, rare=True)
    ] = None

    save_every: Annotated[int, Setting(FILES, "steps between saves; 0: only the last", low=0)] = 250
    keep_checkpoints: Annotated[int, Setting(FILES, "checkpoints to keep", low=1, rare=True)] = 3
    keep_adapters: Annotated[
        int, Setting(FILES, "adapters of earlier steps to keep", low=1, rare=True)
    ] = 10
    log_every: Annotated[int, Setting(FILES, "steps between lines of logs", low=1, rare=True)] = 1
    tensorboard: Annotated[bool, Setting(FILES, "log for TensorBoard too", rare=True)] = False
    resume: Annotated[str | None, Setting(FILES, "a checkpoint folder, or `latest`")] = None

    def __post_init__(self) -> None:
        """Check every value."""
        for name, (hint, setting) in settings().items():
            object.__setattr__(self, name, checked(name, getattr(self, name), hint, setting))
        if self.epochs is None and self.warmup_steps > self.steps:
            raise ConfigError(
                f"warmup_steps is {self.warmup_steps}, more than the {self.steps} steps of the run"
            )
        if self.validation_dataset and self.validation_split:
            raise ConfigError(
                "validation_dataset and validation_split are both given; "
                "choose a folder, or a share of the dataset"
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
    def from_yaml(cls, path: str | bytes | Path) -> TrainConfig:
        """Settings from a YAML file of `name: value` lines.

        Raises:
            MissingFileError: there is no such file.
            ConfigError: the file cannot be read or is no YAML, a name is unknown, a value is wrong.
        """
        return cls.from_mapping(read_yaml(path), os.fsdecode(path))

    def to_yaml(self) -> str:
        """The settings as YAML that `from_yaml` reads back to an equal configuration."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)

    def with_(self, **changes: Any) -> TrainConfig:
        """A copy with other values.

        Raises:
            ConfigError: as for the class.
        """
        return replace(self, **changes)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is not the CPU."""
        return self.device.partition(":")[0] not in {AUTO, "cpu"}

    @property
    def initial_adapter_path(self) -> Path:
        """The file that `initial_adapter` names."""
        return Path(self.initial_adapter or "").expanduser()

    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults, by name."""
        default = asdict(TrainConfig())
        return {name: value for name, value in asdict(self).items() if value != default[name]}


@cache
def settings() -> dict[str, tuple[Any, Setting]]:
    """The type and the facts of every setting of `TrainConfig`, by name."""
    hints = get_type_hints(TrainConfig, include_extras=True)
    return {name: get_args(hint) for name, hint in hints.items()}
