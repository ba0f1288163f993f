"""What is checked of an SDXL run's settings before pictures are read or anything is encoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle import verify_adapter
from trainable_candle.errors import ConfigError
from trainable_candle.recipes import existing
from trainable_candle.recipes.base import parse_size
from trainable_candle.recipes.sdxl import files
from trainable_candle.recipes.sdxl.sampling import SAMPLER, require_multiple
from trainable_candle.train.checks import check_format, check_targets
from trainable_candle.train.config import FORMATS
from trainable_candle.train.estimate import adapted_layers
from trainable_candle.train.objective import DiffusionObjective
from trainable_candle.train.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainable_candle.train.config import TrainConfig

TEXT_ENCODERS: Final = ("text_encoder", "text_encoder_2")
_SAME_SCALE: Final = 1e-3
"""How far scales may differ, relatively: files may hold them in f16."""


def check(
    weights: Path,
    config: TrainConfig,
    unet_targets: Sequence[str],
    text_targets: Sequence[str],
    report: Callable[[str], None],
) -> None:
    """Check the settings against the checkpoint's headers.

    Args:
        weights: the checkpoint.
        config: the settings.
        unet_targets: the layers of the UNet that get adapters unless the settings say others.
        text_targets: those of the text encoders, if these are trained.
        report: gets a line where other tools would make less of the adapter.

    Raises:
        ConfigError, ArgumentError: a value lies outside its range or does not suit the model.
        MissingFileError, WeightsFormatError: the checkpoint is no SDXL model, or the initial
            adapter no adapter.
    """
    facts = files.facts(weights)
    check_format(config, FORMATS, parts=3 if config.train_text_encoder else 1)
    _check_clip_skip(config, facts)
    objective(weights, config, "cpu")
    if config.sample_prompts:
        schedule = files.schedule(weights, config.prediction_type)
        Sampler(schedule, config.sample_steps, config.sampler or SAMPLER)
        if config.sample_size:
            require_multiple(parse_size(config.sample_size), facts.factor)
    layers = facts.parts["unet"].layers
    texts = TEXT_ENCODERS if config.train_text_encoder else ()
    others = {
        layer: shape
        for name in texts
        for layer, shape in adapted_layers(facts.parts[name].layers, text_targets).items()
    }
    check_targets(config, layers, unet_targets, others)
    if config.initial_adapter and not config.resume:
        path = existing("initial_adapter", config.initial_adapter_path)
        chosen = adapted_layers(
            layers, config.target_modules or unet_targets, config.exclude_modules
        )
        _check_initial_adapter(path, weights, config, set(chosen))
    if config.adapter != "lora" and config.format in {None, "kohya"}:
        how = "leaves DoRA's magnitude out" if config.adapter == "dora" else "loads LoRA only"
        instead = "; --format diffusers is for it" if config.adapter == "dora" else ""
        report(f"note: of files under kohya's names diffusers {how}{instead}; ComfyUI applies all")


def objective(weights: Path, config: TrainConfig, device: str) -> DiffusionObjective:
    """What the model is asked to predict.

    Raises:
        ConfigError, ArgumentError: a value lies outside its range.
    """
    return DiffusionObjective(
        files.schedule(weights, config.prediction_type),
        timesteps=config.timesteps,
        shift=config.timestep_shift,
        min_timestep=config.min_timestep,
        max_timestep=config.max_timestep,
        min_snr_gamma=config.min_snr_gamma,
        noise_offset=config.noise_offset,
        loss=config.loss,
        huber_delta=config.huber_delta,
        huber_schedule=config.huber_schedule,
        device=device,
    )


def _check_clip_skip(config: TrainConfig, facts: files.Facts) -> None:
    counts = [facts.parts[name].config["num_hidden_layers"] for name in TEXT_ENCODERS]
    # The last layer is left out anyway, and one must remain to have adapters.
    most = min(counts) - 2
    if config.clip_skip is not None and config.clip_skip > most:
        raise ConfigError(
            f"--clip-skip is {config.clip_skip}, expected at most {most}: "
            f"the text encoders have {' and '.join(map(str, counts))} layers"
        )


def _check_initial_adapter(
    path: Path, weights: Path, config: TrainConfig, layers: set[str]
) -> None:
    start = f"--initial-adapter: {path}"
    modules = verify_adapter(path, "sdxl", weights).modules
    foreign = [module.module for module in modules if module.layer is None]
    if foreign or not modules:
        named = f"the model has no layer for its {foreign[0]}" if foreign else "it is empty"
        raise ConfigError(f"{start} is no adapter of this model: {named}")
    _check_parts(start, set(files.adapted_parts(path)), config)
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
    # diffusers' and peft's files have alphas in their headers, where the loader compares them.
    told = any(module.alpha is not None for module in modules)
    same = not told or all(abs(found - scale) <= _SAME_SCALE * scale for _, found in sizes)
    if ranks and (ranks[0] != config.rank or not same):
        found = next(iter(sizes))[1] * (ranks[0] ** 0.5 if config.rslora else ranks[0])
        raise ConfigError(
            f"{start} has rank {ranks[0]} and alpha {found:g}, the settings say {config.rank} and "
            f"{alpha:g}: give --rank {ranks[0]}" + (f" --alpha {found:g}" if told else "")
        )
    found_layers = {
        module.layer.removeprefix("unet.")
        for module in modules
        if module.layer and module.layer.startswith("unet.")
    }
    odd = sorted(found_layers ^ layers)
    if odd:
        where = "in the file, not" if odd[0] in found_layers else "not in the file, but"
        raise ConfigError(
            f"{start} is for other layers than --target-modules: {odd[0]} is {where} among these "
            f"({len(odd)} such layers)"
        )


def _check_parts(start: str, parts: set[str], config: TrainConfig) -> None:
    texts = parts & set(TEXT_ENCODERS)
    if texts and not config.train_text_encoder:
        raise ConfigError(
            f"{start} has adapters on {' and '.join(sorted(texts))}, which would be dropped: "
            "give --train-text-encoder"
        )
    missing = {"unet", *(TEXT_ENCODERS if config.train_text_encoder else ())} - parts
    if missing:
        advice = "" if "unet" in missing else ": leave --train-text-encoder out"
        raise ConfigError(f"{start} has no adapters on {' and '.join(sorted(missing))}{advice}")
