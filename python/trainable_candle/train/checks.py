"""What is checked of a run's settings before anything is read: that all have an effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from trainable_candle.data.options import YAML_SUFFIXES
from trainable_candle.errors import ConfigError
from trainable_candle.train.estimate import adapted_layers
from trainable_candle.train.settings import flag

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainable_candle.train.config import TrainConfig
    from trainable_candle.train.estimate import Shape


class _Condition(NamedTuple):
    """When settings have an effect."""

    settings: tuple[str, ...]
    holds: Callable[[TrainConfig], bool]
    needed: str


def _varies(config: TrainConfig) -> bool:
    return config.caption_shuffle or config.caption_tag_dropout > 0


def _joins_tags(config: TrainConfig) -> bool:
    # Each folder of a list may have its own trigger.
    return _varies(config) or bool(config.trigger) or config.dataset.endswith(YAML_SUFFIXES)


_PREVIEWS: Final = (
    "sample_every", "sample_steps", "sample_size", "sample_seed", "sampler", "guidance",
    "negative_prompt",
)  # fmt: skip
_CONDITIONS: Final = (
    _Condition(("random_crops",), lambda c: c.crop == "random", "--crop random"),
    _Condition(("min_side", "max_side"), lambda c: c.bucketing, "--bucketing"),
    _Condition(("cache_dir",), lambda c: c.cache == "disk", "--cache disk"),
    _Condition(
        ("caption_keep_tokens", "caption_variants"),
        _varies,
        "--caption-shuffle or --caption-tag-dropout",
    ),
    _Condition(
        ("caption_separator",),
        _joins_tags,
        "--caption-shuffle, --caption-tag-dropout or --trigger",
    ),
    _Condition(
        ("text_encoder_learning_rate",), lambda c: c.train_text_encoder, "--train-text-encoder"
    ),
    _Condition(
        ("huber_delta", "huber_schedule"),
        lambda c: c.loss in {"huber", "smooth_l1"},
        "--loss huber or --loss smooth_l1",
    ),
    _Condition(
        ("validate_every",),
        lambda c: bool(c.validation_dataset or c.validation_split),
        "--validation-split or --validation-dataset",
    ),
    _Condition(("cuda_graphs",), lambda c: c.on_gpu, "--device cuda"),
    _Condition(_PREVIEWS, lambda c: bool(c.sample_prompts), "--sample-prompts"),
    _Condition(("negative_prompt",), lambda c: c.guidance != 1, "--guidance other than 1"),
)


def check_settings(config: TrainConfig) -> None:
    """Check what can be told from the settings alone.

    Raises:
        ConfigError: a setting has no effect, or a text is none.
    """
    if config.epochs is not None and "steps" in config.changed():
        raise ConfigError("--epochs and --steps both say how long to train; give one of the two")
    _check_effects(config)
    _check_texts(config)


def _check_effects(config: TrainConfig) -> None:
    """Check that every setting which differs from its default takes effect.

    Raises:
        ConfigError: one does not, for want of another; both are named.
    """
    changed = config.changed()
    for condition in _CONDITIONS:
        given = [flag(name) for name in condition.settings if name in changed]
        if given and not condition.holds(config):
            verb = "has" if len(given) == 1 else "have"
            raise ConfigError(
                f"{', '.join(given)} {verb} no effect without {condition.needed}; "
                f"give that, or leave {'it' if len(given) == 1 else 'them'} out"
            )


def _check_texts(config: TrainConfig) -> None:
    """Check that what becomes tokens is text.

    Raises:
        ConfigError: there are bytes that are no UTF-8.
    """
    for name in ("caption", "trigger", "negative_prompt", "sample_prompts"):
        value: Any = getattr(config, name)
        for text in value if isinstance(value, list) else [value or ""]:
            require_text(flag(name), text)


def require_text(name: str, text: str) -> None:
    """Check that a text has no bytes that are no UTF-8, as command lines may.

    Raises:
        ConfigError: it has; names the flag.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} is {text!r}, expected text in UTF-8") from None


def check_format(config: TrainConfig, formats: Sequence[str], parts: int) -> None:
    """Check that the format of the adapter files can hold the adapters.

    Args:
        config: the settings.
        formats: those that have names for the layers of the model, the default one first.
        parts: how many parts of the model get adapters.

    Raises:
        ConfigError: it cannot; names one that can.
    """
    form = config.format or formats[0]
    start = f"--format {form} has no place for"
    others = [other for other in formats if other not in {form, "diffusers"}]
    instead = f"give --format {others[0]}" if others else "leave it out"
    if form not in formats:
        raise ConfigError(
            f"{start} the layers of the model `{config.model}`; give --format {formats[0]}"
        )
    if form == "diffusers" and config.adapter not in {"lora", "dora"}:
        raise ConfigError(f"{start} --adapter {config.adapter}; {instead}")
    if form == "peft" and parts > 1:
        raise ConfigError(
            f"{start} several parts of a model, and --train-text-encoder adapts them; {instead}"
        )


def check_targets(
    config: TrainConfig,
    layers: Mapping[str, Shape],
    targets: Sequence[str],
    others: Mapping[str, Shape] | None = None,
) -> None:
    """Check that each pattern of `target_modules` and `exclude_modules` names some layer.

    Args:
        config: the settings.
        layers: shapes of the weights of layers that targets choose from, by name.
        targets: those of the model, if the settings have none.
        others: those of layers that get adapters whatever the targets are.

    Raises:
        ConfigError: one names no layer, or no layer is left.
    """
    for pattern in config.target_modules:
        if not _named("--target-modules", pattern, layers):
            raise ConfigError(f"--target-modules: `{pattern}` is no layer {_some(layers)}")
    chosen = adapted_layers(layers, config.target_modules or targets)
    for pattern in config.exclude_modules:
        if not _named("--exclude-modules", pattern, {**(others or {}), **chosen}):
            raise ConfigError(
                f"--exclude-modules: `{pattern}` is none of the layers that get adapters "
                f"{_some(chosen)}"
            )
    if not adapted_layers(chosen, config.target_modules or targets, config.exclude_modules):
        raise ConfigError("--exclude-modules: no layer is left for an adapter")


def _named(option: str, pattern: str, layers: Mapping[str, Shape]) -> Mapping[str, Shape]:
    """The layers that a pattern names.

    Raises:
        ConfigError: it is no regular expression; names the option.
    """
    try:
        return adapted_layers(layers, [pattern])
    except ConfigError:
        raise ConfigError(f"{option}: `{pattern}` is no regular expression") from None


def _some(layers: Mapping[str, Shape]) -> str:
    """Ends of names, as a hint to what layers are called."""
    ends = dict.fromkeys(
        ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])
        for name in layers
        if (parts := name.split("."))
    )
    shown = sorted(end for end in ends if not end[0].isdigit())[:12]
    return f"(layers are called {', '.join(shown)}, for example)"
