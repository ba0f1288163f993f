"""The noise schedule that an SDXL model was trained with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainable_candle.families.pipeline.facts import facts
from trainable_candle.train.objective import NoiseSchedule

if TYPE_CHECKING:
    from pathlib import Path


def schedule(weights: Path, prediction_type: str | None) -> NoiseSchedule:
    """The noise schedule that the model was trained with, and what it predicts.

    Args:
        weights: a pipeline's folder with a scheduler, or an original checkpoint. The latter has a
            tensor `v_pred` if it predicts velocities, and `ztsnr` if its last timestep is pure
            noise, as in ComfyUI.
        prediction_type: overrides what the weights say.

    Raises:
        ConfigError: the scheduler's configuration is wrong.
    """
    if weights.is_dir():
        has_scheduler = (weights / "scheduler" / "scheduler_config.json").is_file()
        found = NoiseSchedule.from_pretrained(weights) if has_scheduler else NoiseSchedule()
        if prediction_type in {None, found.prediction_type}:
            return found
        return NoiseSchedule(
            prediction_type=prediction_type or found.prediction_type,
            rescale_betas_zero_snr=found.rescale_betas_zero_snr,
            timestep_spacing=found.timestep_spacing,
        )
    checkpoint = facts(weights, "sdxl").checkpoint
    return NoiseSchedule(
        prediction_type=prediction_type or checkpoint.prediction_type or "epsilon",
        rescale_betas_zero_snr=checkpoint.zero_snr,
    )
