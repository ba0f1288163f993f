"""The samplers, called from Python, draw what the schedulers of diffusers draw."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError
from trainable_candle.train import Guided, NoiseSchedule, Sampler, sample

GOLDEN = Path(__file__).parents[1] / "golden" / "samplers" / "diffusers.safetensors"
# The file begins with the length of its header (8 bytes) and the header, which is JSON.
BYTES = GOLDEN.read_bytes()
METADATA = json.loads(BYTES[8 : 8 + int.from_bytes(BYTES[:8], "little")])["__metadata__"]
RUNS: dict[str, dict[str, Any]] = json.loads(METADATA["runs"])


def toy_model(x: tc.Tensor, timestep: float, /, *, condition: tc.Tensor) -> tc.Tensor:
    """Predict as the model from which diffusers drew the samples in the file."""
    return 0.5 * x + 0.4 * (x + condition).tanh() * (timestep / 1000)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("batched", [False, True])
def test_samples_and_schedules_equal_those_of_diffusers(name: str, batched: bool) -> None:
    golden, run = tc.load_file(GOLDEN), dict(RUNS[name])
    settings = dict(run["settings"])
    karras = settings.pop("use_karras_sigmas", False)
    sampler = Sampler(NoiseSchedule(**settings), run["steps"], run["kind"], karras)
    np.testing.assert_allclose(sampler.timesteps, golden[f"{name}.timesteps"].numpy(), rtol=1e-5)
    np.testing.assert_allclose(sampler.sigmas, golden[f"{name}.sigmas"].numpy(), rtol=1e-4)
    # The noise has shape (2, 4, 2, 3). The file has one condition for both samples of the batch.
    positive, negative = (
        {"condition": golden[key].expand((2, 4, 1, 1))} for key in ("positive", "negative")
    )
    model = Guided(toy_model, positive, negative, json.loads(METADATA["scale"]), batched=batched)
    found = sample(sampler, model, golden["noise"])
    # The file has the samples before the first step and after each step.
    expected = golden[f"{name}.samples"].numpy()[-1]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_guidance_predicts_for_the_negative_prompt_except_at_a_scale_of_one() -> None:
    calls = []

    def model(x: tc.Tensor, timestep: float, /, *, condition: tc.Tensor) -> tc.Tensor:
        calls.append((x.shape, timestep))
        return x + condition

    x, one = tc.ones((2, 3)), tc.ones((2, 1))
    guided = Guided(model, {"condition": one}, {"condition": -one}, 1.0)
    assert guided(x, 5.0).tolist() == [[2.0] * 3] * 2
    assert calls == [((2, 3), 5.0)]
    guided = Guided(model, {"condition": one}, {"condition": -one}, 2.0)
    # The predictions are 2 for the prompt and 0 for the negative prompt: 0 + 2 * (2 - 0) = 4.
    assert guided(x, 5.0).tolist() == [[4.0] * 3] * 2
    # One call predicts for the prompt and for the negative prompt.
    assert calls[1:] == [((4, 3), 5.0)]


def test_sampling_records_no_gradient() -> None:
    weight = tc.Var(tc.ones((1,)))
    found = sample(Sampler(NoiseSchedule(), 3), lambda x, _: x * weight, tc.randn((1, 2)))
    assert not found.requires_grad


def test_wrong_arguments_of_samplers_and_of_guidance_are_rejected() -> None:
    schedule, x = NoiseSchedule(), tc.randn((1, 2))
    with pytest.raises(ArgumentError, match='unknown sampler "ddim"'):
        Sampler(schedule, 4, "ddim")
    with pytest.raises(ArgumentError, match="0 steps"):
        Sampler(schedule, 0)
    # A step of DPM-Solver++ uses the model's output of the step before.
    sampler = Sampler(schedule, 4, "dpmpp_2m")
    sampler.step(x, 0, x)  # the model's output, the number of the step, the sample
    with pytest.raises(ArgumentError, match="found step 2, expected step 1"):
        sampler.step(x, 2, x)
    with pytest.raises(ArgumentError, match="expected the same names"):
        Guided(toy_model, {"condition": x}, {}, 2.0)
