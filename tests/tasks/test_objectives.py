"""Test flow matching (losses, noise levels, steps of sampling) and the noise of validations."""

from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.latent.objectives import FlowObjective, FlowSampler, NoiseObjective

# The shape of the latents: samples, channels, height, width.
SHAPE = (3, 2, 4, 5)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def mean_loss(
    error: np.ndarray,
    levels: np.ndarray,
    config: TrainConfig,
    mask: np.ndarray | None,
    weights: np.ndarray | None,
) -> float:
    """Return the loss by its definition, in float64.

    `error` is the prediction minus the target, (n, channels, height, width). `levels` are the noise
    levels of the n samples, from 0 to 1, and `weights` their weights.
    """
    s = levels[:, None, None, None]
    delta = np.full_like(s, config.huber_delta)
    if config.huber_schedule == "exponential":
        delta = config.huber_delta**s
    if config.huber_schedule == "snr":
        sigma = s / (1 - s)
        delta = (1 - config.huber_delta) / (1 + sigma) ** 2 + config.huber_delta
    distance = np.abs(error)
    huber = np.where(distance <= delta, error**2 / 2, delta * (distance - delta / 2))
    kinds = {"mse": error**2, "l1": distance, "huber": huber, "smooth_l1": huber / delta}
    element_losses = kinds[config.loss]
    if mask is not None:
        mean = mask.mean(axis=(1, 2, 3), keepdims=True)
        element_losses = element_losses * mask / np.where(mean > 0, mean, 1)
    losses = element_losses.mean(axis=(1, 2, 3))
    if config.min_snr_gamma is not None:
        # The data are sample - level * velocity, so an error of the velocity is `level` times as
        # large in the data. `levels**2` turns the loss of the velocity into that of the data, and
        # min-SNR weights the loss of the data by the SNR, at most gamma.
        snr = ((1 - levels) / levels) ** 2
        losses = losses * levels**2 * np.minimum(snr, config.min_snr_gamma)
    if config.loss_weighting == "sigma_sqrt":
        # The name is diffusers'; in spite of it, the weight is 1 / level².
        losses = losses * levels**-2.0
    if config.loss_weighting == "cosmap":
        losses = losses * 2 / (np.pi * (1 - 2 * levels + 2 * levels**2))
    return float(np.mean(losses if weights is None else losses * weights))


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss": "l1"},
        {"loss": "huber", "huber_delta": 0.7},
        {"loss": "smooth_l1", "huber_delta": 0.3, "huber_schedule": "exponential"},
        {"loss": "huber", "huber_schedule": "snr"},
        {"min_snr_gamma": 5.0},
        {"min_snr_gamma": 0.5, "loss": "l1"},
        {"loss_weighting": "sigma_sqrt"},
        {"loss_weighting": "cosmap", "loss": "huber"},
    ],
    ids=str,
)
def test_the_loss_of_a_flow_equals_its_definition(
    settings: dict[str, Any], has_mask: bool, has_weights: bool
) -> None:
    config = TrainConfig(**settings)
    objective = FlowObjective(config)
    latents = rng().standard_normal(SHAPE).astype(np.float32)
    # `samples` are arbitrary numbers of the samples in a run. Numbers and seed determine the noise
    # and its levels.
    inputs = objective.noise(tc.tensor(latents), samples=[4, 1, 9], seed=3)
    mask = rng().random((3, 1, 4, 5)).astype(np.float32) if has_mask else None
    if mask is not None:
        mask[1] = 0.0  # A mask of zeros gives a loss of 0, not NaN.
        inputs["mask"] = tc.tensor(mask)
    weights = np.array([0.5, 2.0, 1.0], np.float32) if has_weights else None
    if weights is not None:
        inputs["weights"] = tc.tensor(weights)
    prediction = tc.Var(rng().standard_normal(SHAPE).astype(np.float32))
    loss = objective.loss(prediction, inputs)
    error = prediction.numpy().astype(np.float64) - inputs["target"].numpy()
    levels = inputs["times"].numpy().astype(np.float64) / 1000
    assert loss.item() == pytest.approx(mean_loss(error, levels, config, mask, weights), rel=1e-5)
    loss.backward()
    assert prediction.grad is not None


def test_noise_is_mixed_in_by_its_level_and_a_shift_above_1_raises_levels() -> None:
    latents = tc.tensor(rng().standard_normal(SHAPE).astype(np.float32))
    objective = FlowObjective(TrainConfig(timesteps="logit_normal", timestep_shift=3.0))
    inputs = objective.noise(latents, samples=[0, 1, 2], seed=5)
    s = inputs["times"].numpy()[:, None, None, None] / 1000
    # The target is the velocity, noise - data.
    noise = inputs["target"].numpy() + latents.numpy()
    found = inputs["sample"].numpy()
    np.testing.assert_allclose(found, (1 - s) * latents.numpy() + s * noise, atol=1e-6)
    plain = FlowObjective(TrainConfig(timesteps="logit_normal"))
    # The same samples and seed draw the same levels before the shift.
    unshifted = plain.noise(latents, samples=[0, 1, 2], seed=5)
    assert (unshifted["times"].numpy() < inputs["times"].numpy()).all()


def test_the_size_of_latents_may_determine_the_shift_unless_it_is_set() -> None:
    def levels(shift: object, latents: tc.Tensor, **settings: Any) -> np.ndarray:
        objective = FlowObjective(TrainConfig(timesteps="mode", **settings), shift=shift)
        return objective.noise(latents, samples=[0, 1], seed=5)["times"].numpy()

    small, large = tc.zeros((2, 4, 6, 8)), tc.zeros((2, 4, 12, 16))
    # Maps height and width of the latents to their shift.
    by_size = {(6, 8): 1.5, (12, 16): 3.0}.__getitem__
    for latents, shift in ((small, 1.5), (large, 3.0)):
        np.testing.assert_array_equal(levels(by_size, latents), levels(shift, latents))
    given = levels(by_size, large, timestep_shift=2.0)
    np.testing.assert_array_equal(given, levels(2.0, large))


@pytest.mark.parametrize("kind", ["flow", "noise"])
def test_the_noise_of_validation_does_not_depend_on_the_seed_of_the_run(kind: str) -> None:
    latents = tc.tensor(rng().standard_normal(SHAPE).astype(np.float32))

    def noised(seed: int) -> dict[str, tc.Tensor]:
        config = TrainConfig(seed=seed)
        if kind == "flow":
            return FlowObjective(config).validation_noise(latents, examples=[2, 0, 1])
        schedule = tc.train.NoiseSchedule()
        return NoiseObjective(schedule, config, "cpu").validation_noise(latents, examples=[2, 0, 1])

    one, other = noised(1), noised(2)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor.numpy(), other[name].numpy())


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_steps_along_the_true_velocity_lead_to_the_data(shift: float) -> None:
    data, noise = rng().standard_normal((2, *SHAPE)).astype(np.float32)
    stepper = FlowSampler(tc.train.FlowMatching(shift=shift).sigmas(4))
    x = stepper.init_noise(tc.tensor(noise))
    assert stepper.timesteps[0] == 1000
    for step in range(4):
        x = stepper.step(tc.tensor(noise - data), step, x)
    np.testing.assert_allclose(x.numpy(), data, atol=1e-5)
