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
"""Scales count as equal up to this relative difference, because files may store them in f16."""


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

    Args:
        config: the settings.
        path: the file.
        modules: the file's modules, as `verify_adapter` finds them.
        found: the parts of the model that the file has adapters for.
        expected: the parts that get adapters according to the settings, the trained model first.
        layers: the layers of the trained model that get adapters.

    Raises:
        ConfigError: the adapters differ from the settings; the message says which settings to give.
    """
    start = f"--initial-adapter: {path}"
    foreign = [module.module for module in modules if module.layer is None]
    if foreign or not modules:
        named = f"the model has no layer for its module {foreign[0]}" if foreign else "it is empty"
        raise ConfigError(f"{start} is not an adapter of this model: {named}")
    _check_parts(start, found, expected)
    kinds = sorted({module.kind or "unknown" for module in modules})
    if kinds != [config.adapter]:
        raise ConfigError(
            f"{start} holds {' and '.join(kinds)}, and --adapter is {config.adapter}"
            + (f": give --adapter {kinds[0]}" if len(kinds) == 1 else "")
        )
    sizes = {(module.rank, module.scale) for module in modules if module.rank}
    ranks = sorted({rank for rank, _ in sizes})
    if len(ranks) > 1:
        raise ConfigError(f"{start} has ranks from {ranks[0]} to {ranks[-1]}, expected one rank")
    alpha = config.rank if config.alpha is None else config.alpha
    scale = alpha / (config.rank**0.5 if config.rslora else config.rank)
    # Files of diffusers and peft have the alphas in their headers, and the loader checks them.
    has_alpha = any(module.alpha is not None for module in modules)
    same = not has_alpha or all(abs(other - scale) <= _SAME_SCALE * scale for _, other in sizes)
    if ranks and (ranks[0] != config.rank or not same):
        its_alpha = next(iter(sizes))[1] * (ranks[0] ** 0.5 if config.rslora else ranks[0])
        raise ConfigError(
            f"{start} has rank {ranks[0]} and alpha {its_alpha:g}, the settings have rank "
            f"{config.rank} and alpha {alpha:g}: give --rank {ranks[0]}"
            + (f" --alpha {its_alpha:g}" if has_alpha else "")
        )
    # A language model has one part, whose name is empty.
    prefix = f"{expected[0]}." if expected[0] else ""
    found_layers = {
        module.layer.removeprefix(prefix)
        for module in modules
        if module.layer and module.layer.startswith(prefix)
    }
    odd = sorted(found_layers ^ set(layers))
    if odd:
        ours, theirs = "among the layers of the settings", "in the file"
        places = (theirs, ours) if odd[0] in found_layers else (ours, theirs)
        raise ConfigError(
            f"{start} is for other layers than --target-modules: {odd[0]} is {places[0]}, not "
            f"{places[1]} ({len(odd)} layers differ)"
        )


def _check_parts(start: str, found: Collection[str], expected: Sequence[str]) -> None:
    """Check that a file has adapters for exactly the parts that get adapters."""
    more = sorted(set(found) - set(expected))
    if more:
        raise ConfigError(
            f"{start} has adapters on {' and '.join(more)}, which would be dropped: "
            "give --train-text-encoder"
        )
    missing = sorted(set(expected) - set(found))
    if missing:
        advice = "" if expected[0] in missing else ": leave --train-text-encoder out"
        raise ConfigError(f"{start} has no adapters on {' and '.join(missing)}{advice}")
