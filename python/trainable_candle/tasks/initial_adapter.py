"""Checks that the adapter from which a run starts fits the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from trainable_candle import AdapterModule
    from trainable_candle.settings import TrainConfig

_SAME_SCALE: Final = 1e-3
"""Scales count as equal up to this relative difference, because files may store alpha in f16."""


def check_initial_adapter(
    config: TrainConfig,
    path: Path,
    modules: Sequence[AdapterModule],
    *,
    found: Collection[str],
    expected: Sequence[str],
    layers: Collection[str],
) -> None:
    """Check that the adapters in a file are those that the settings describe.

    The layers of text encoders are not compared.

    Args:
        config: the settings.
        path: the file.
        modules: the file's modules, as `verify_adapter` reports them.
        found: the parts of the model that the file has adapters for.
        expected: the parts that get adapters according to the settings; the first is the denoiser
            or the language model.
        layers: the layers of the first part that get adapters according to the settings.

    Raises:
        ConfigError: the adapters differ from the settings, or are for another model.
    """
    subject = f"--initial-adapter: {path}"
    foreign = [module.module for module in modules if module.layer is None]
    if foreign or not modules:
        reason = (
            f"the model has no layer for its module {foreign[0]}"
            if foreign
            else "the file has no modules"
        )
        raise ConfigError(f"{subject} is not an adapter of this model: {reason}")
    _check_parts(subject, found, expected)
    kinds = sorted({module.kind or "incomplete adapters" for module in modules})
    if kinds != [config.adapter]:
        are_complete = all(module.kind for module in modules)
        raise ConfigError(
            f"{subject} holds {' and '.join(kinds)}, and --adapter is {config.adapter}"
            + (f": give --adapter {kinds[0]}" if are_complete and len(kinds) == 1 else "")
        )
    # Adapters without low-rank factors have rank 0, and no scale to compare.
    sizes = {(module.rank, module.scale) for module in modules if module.rank}
    ranks = sorted({rank for rank, _ in sizes})
    if len(ranks) > 1:
        raise ConfigError(f"{subject} has ranks from {ranks[0]} to {ranks[-1]}, expected one rank")
    if ranks:
        has_alpha = any(module.alpha is not None for module in modules)
        _check_size(subject, sizes, config, has_alpha=has_alpha)
    _check_layers(subject, modules, expected[0], layers)


def _check_size(
    subject: str, sizes: Collection[tuple[int, float]], config: TrainConfig, *, has_alpha: bool
) -> None:
    """Check the rank and, if the file has tensors `alpha`, the scale of its adapters.

    Files of diffusers and peft have no such tensors; the loader checks their alphas.

    Args:
        subject: the beginning of messages.
        sizes: the different pairs of rank and scale of the adapters; all ranks are equal.
        config: the settings.
        has_alpha: whether the file has tensors `alpha`.
    """
    # The rank is that of all adapters. If their scales differ, the message has one of them.
    rank, file_scale = next(iter(sizes))
    alpha = config.rank if config.alpha is None else config.alpha
    scale = alpha / (config.rank**0.5 if config.rslora else config.rank)
    same_scale = not has_alpha or all(
        abs(found - scale) <= _SAME_SCALE * scale for _, found in sizes
    )
    if rank == config.rank and same_scale:
        return
    if not has_alpha:
        raise ConfigError(
            f"{subject} has rank {rank}, the settings have rank {config.rank}: give --rank {rank}"
        )
    file_alpha = file_scale * (rank**0.5 if config.rslora else rank)
    raise ConfigError(
        f"{subject} has rank {rank} and alpha {file_alpha:g}, the settings have rank "
        f"{config.rank} and alpha {alpha:g}: give --rank {rank} --alpha {file_alpha:g}"
    )


def _check_layers(
    subject: str, modules: Sequence[AdapterModule], part: str, layers: Collection[str]
) -> None:
    """Check that a file has adapters on exactly the `layers` of a part."""
    # A language model has one part, whose name is empty.
    prefix = f"{part}." if part else ""
    layers_in_file = {
        module.layer.removeprefix(prefix)
        for module in modules
        if module.layer and module.layer.startswith(prefix)
    }
    differing = sorted(layers_in_file ^ set(layers))
    if differing:
        first = differing[0]
        in_settings, in_file = "among the layers of the settings", "in the file"
        where = f"{in_settings}, not {in_file}"
        if first in layers_in_file:
            where = f"{in_file}, not {in_settings}"
        raise ConfigError(
            f"{subject} is for other layers than --target-modules: {first} is {where} "
            f"(differing layers: {len(differing)})"
        )


def _check_parts(subject: str, found: Collection[str], expected: Sequence[str]) -> None:
    """Check that a file has adapters for exactly the parts that get adapters."""
    extra = sorted(set(found) - set(expected))
    if extra:
        raise ConfigError(
            f"{subject} has adapters on {' and '.join(extra)}, which would be dropped: "
            "give --train-text-encoder"
        )
    missing = sorted(set(expected) - set(found))
    if missing:
        advice = "" if expected[0] in missing else ": leave --train-text-encoder out"
        raise ConfigError(f"{subject} has no adapters on {' and '.join(missing)}{advice}")
