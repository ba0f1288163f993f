"""The noise levels of flow models and their shifts, against diffusers' schedulers.

The expected levels are in tests/golden/schedules. An image of 1024x1024 pixels has 4096 tokens, one
of 512x512 pixels 1024.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, ConfigError
from trainable_candle.families.flow.schedule import FlowSchedule
from trainable_candle.families.flux import Flux
from trainable_candle.families.flux2 import Flux2
from trainable_candle.families.sd3 import SD3

STORED = tc.load_file(Path(__file__).parents[2] / "golden" / "schedules" / "flow.safetensors")


def test_levels_of_sd3_equal_those_of_diffusers() -> None:
    expected = STORED["sd3_28_sigmas"].numpy()
    np.testing.assert_allclose(SD3.schedule.levels(steps=28, tokens=4096), expected, atol=1e-6)


def test_the_shift_of_flux_depends_on_the_image_size() -> None:
    expected = STORED["flux_28_seq1024_sigmas"].numpy()
    np.testing.assert_allclose(Flux.schedule.levels(steps=28, tokens=1024), expected, atol=1e-6)
    # At 4096 tokens, the logarithm of the shift is the `max_shift` of Flux's scheduler, 1.15.
    assert Flux.schedule.at(4096) == pytest.approx(3.158, abs=1e-3)


def test_the_shift_of_flux2_depends_on_image_size_and_steps() -> None:
    """The expected logarithms of the shifts are results of diffusers' `compute_empirical_mu`."""
    shifts = [Flux2.schedule.drawing(steps, 4096) for steps in (50, 4)]
    np.testing.assert_allclose(np.log(shifts), [2.02335, 2.29118], atol=1e-5)
    # Above 4300 image tokens, the shift does not depend on the number of steps.
    assert Flux2.schedule.drawing(4, 4301) == Flux2.schedule.drawing(50, 4301)
    # No images are drawn in training, so the shift cannot depend on the steps: it is that of Flux.
    assert Flux2.schedule.in_training(4096) == pytest.approx(Flux.schedule.at(4096))


def test_the_shift_in_training_depends_on_the_image_size() -> None:
    """Flux trains with the shift that it samples with at the same number of image tokens.

    SD3's shift in training is proportional to the square root of the number of pixels
    (arXiv:2403.03206, equation 23).
    """
    assert Flux.schedule.in_training(1024) == pytest.approx(Flux.schedule.at(1024))
    # At 1024x1024 pixels, it is the shift that SD3 samples with.
    assert SD3.schedule.at(4096) == 3.0
    assert SD3.schedule.in_training(4096) == SD3.schedule.at(4096)
    # With a quarter of the tokens, it is half as large.
    assert SD3.schedule.in_training(1024) == pytest.approx(1.5)


def test_the_scheduler_in_the_pipelines_folder_sets_the_shift(tmp_path: Path) -> None:
    folder = tmp_path / "scheduler"
    folder.mkdir()
    path = folder / "scheduler_config.json"
    path.write_text(json.dumps({"shift": 1.0, "use_dynamic_shifting": False}))
    # The configuration is that of FLUX.1-schnell, whose levels are not shifted.
    schnell = FlowSchedule.of(tmp_path, Flux.schedule)
    levels = schnell.levels(steps=4, tokens=4096)
    np.testing.assert_allclose(levels, [1, 0.75, 0.5, 0.25, 0], atol=1e-7)


def test_wrong_configurations_and_numbers_of_steps_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.parent.mkdir()
    for wrong, message in [
        ('{"shift": "x"}', "shift is 'x'"),
        ("[]", "an object"),
        ("{", "line 1"),
    ]:
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=message):
            FlowSchedule.of(tmp_path, Flux.schedule)
    with pytest.raises(ArgumentError, match="found 0 steps"):
        FlowSchedule().levels(steps=0, tokens=16)
