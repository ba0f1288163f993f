"""The noise schedule that an SDXL model was trained with."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Final

from trainable_candle.families.pipeline.facts import facts
from trainable_candle.files import parse_json
from trainable_candle.train.objective import NoiseSchedule

_CONFIG: Final = Path("scheduler", "scheduler_config.json")
"""The scheduler's configuration in a pipeline's folder."""


def schedule(weights: Path, prediction_type: str | None) -> NoiseSchedule:
    """Return the noise schedule of a model's training, including what the model predicts.

    Args:
        weights: a pipeline's folder, or an original checkpoint (all parts in one file). A folder
            without a scheduler has SDXL's usual schedule. As in ComfyUI, an original checkpoint has
            a tensor `v_pred` if its model predicts velocities, and a tensor `ztsnr` if its last
            timestep is pure noise.
        prediction_type: "epsilon" or "v_prediction", which overrides what the weights say; None:
            what the weights say.

    Raises:
        ConfigError, ArgumentError: the scheduler's configuration is wrong.
        MissingFileError, WeightsFormatError: the original checkpoint is missing, damaged, or of
            another model.
    """
    if weights.is_dir():
        has_scheduler = (weights / _CONFIG).is_file()
        found = NoiseSchedule.from_pretrained(weights) if has_scheduler else NoiseSchedule()
        if prediction_type is None or prediction_type == found.prediction_type:
            return found
        if not has_scheduler:
            return NoiseSchedule(prediction_type=prediction_type)
        return _with_prediction(weights / _CONFIG, prediction_type)
    checkpoint = facts(weights, "sdxl").checkpoint
    return NoiseSchedule(
        prediction_type=prediction_type or checkpoint.prediction_type or "epsilon",
        rescale_betas_zero_snr=checkpoint.zero_snr,
    )


def _with_prediction(config: Path, prediction_type: str) -> NoiseSchedule:
    """Return the schedule that a scheduler's configuration describes, with another prediction."""
    fields = parse_json(config.read_bytes()) | {"prediction_type": prediction_type}
    # `from_pretrained` takes the path of such a file or of a pipeline's folder, but no fields, so
    # write the changed configuration into a file.
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder, config.name)
        changed.write_text(json.dumps(fields), encoding="utf-8")
        return NoiseSchedule.from_pretrained(changed)
