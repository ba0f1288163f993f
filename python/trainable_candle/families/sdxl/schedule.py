"""The noise schedule that an SDXL model was trained with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainable_candle.families.pipeline.facts import facts
from trainable_candle.train.objective import NoiseSchedule

if TYPE_CHECKING:
    from pathlib import Path


def schedule(weights: Path, prediction_type: str | None) -> NoiseSchedule:
    """Return the noise schedule of a model's training, including what the model predicts.

    Args:
        weights: a pipeline's folder, or an original checkpoint. A folder without a scheduler has
            SDXL's usual schedule. As in ComfyUI, an original checkpoint has a tensor `v_pred` if
            its model predicts velocities, and a tensor `ztsnr` if its last timestep is pure noise.
        prediction_type: "epsilon" or "v_prediction", whatever the weights say; None: what the
            weights say.

    Raises:
        ConfigError, ArgumentError: the scheduler's configuration is wrong.
        MissingFileError, WeightsFormatError: the original checkpoint is missing, damaged, or of
            another model.
    """
    if weights.is_dir():
        has_scheduler = (weights / "scheduler" / "scheduler_config.json").is_file()
        found = NoiseSchedule.from_pretrained(weights) if has_scheduler else NoiseSchedule()
        if prediction_type is None or prediction_type == found.prediction_type:
            return found
        return NoiseSchedule(
            prediction_type=prediction_type,
            rescale_betas_zero_snr=found.rescale_betas_zero_snr,
            timestep_spacing=found.timestep_spacing,
        )
    checkpoint = facts(weights, "sdxl").checkpoint
    return NoiseSchedule(
        prediction_type=prediction_type or checkpoint.prediction_type or "epsilon",
        rescale_betas_zero_snr=checkpoint.zero_snr,
    )
