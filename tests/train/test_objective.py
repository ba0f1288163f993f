"""The diffusion objective in Python. Tests in Rust check its arithmetic."""

from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

import trainable_candle as tc
from trainable_candle.draws import drawn
from trainable_candle.errors import ArgumentError, ConfigError, MissingFileError, ShapeError
from trainable_candle.train import DiffusionObjective, NoiseSchedule

Array: TypeAlias = npt.NDArray[np.floating]
GOLDEN = Path(__file__).parents[1] / "golden" / "schedules" / "diffusers.safetensors"


@pytest.fixture(scope="module")
def golden() -> dict[str, tc.Tensor]:
    return tc.load_file(GOLDEN)


@pytest.mark.parametrize(
    ("prediction_type", "target", "weight"),
    [
        ("epsilon", "noise", "min_snr_gamma5_eps_weight"),
        ("v_prediction", "ddpm_velocity", "min_snr_gamma5_v_weight"),
    ],
)
def test_noise_target_and_weight_are_those_of_diffusers(
    golden: dict[str, tc.Tensor], prediction_type: str, target: str, weight: str
) -> None:
    schedule = NoiseSchedule(prediction_type=prediction_type)
    np.testing.assert_allclose(
        schedule.alphas_cumprod, golden["alphas_cumprod"].numpy(), rtol=1e-12
    )
    objective = DiffusionObjective(schedule, min_snr_gamma=5.0)
    noised = objective.noise_at(golden["x0"], golden["noise"], golden["timesteps"])
    np.testing.assert_allclose(noised.sample.numpy(), golden["ddpm_noised"].numpy(), atol=1e-6)
    np.testing.assert_allclose(noised.target.numpy(), golden[target].numpy(), atol=1e-6)
    # The squared error is 1 everywhere, so the loss is the mean of the weights.
    loss = objective.loss(noised.target + 1.0, noised)
    expected = golden[weight].numpy()[golden["timesteps"].numpy()].mean()
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_settings_reach_the_objective() -> None:
    schedule = NoiseSchedule()
    latents = tc.randn((200, 4, 2, 2))
    # The median noise level t is sigmoid(3) = 0.953. The shift makes it 3 t / (1 + 2 t) = 0.984.
    late = DiffusionObjective(
        schedule, timesteps="logit_normal", logit_mean=3.0, logit_std=0.5, shift=3.0
    )
    assert late.noise(latents).timesteps.numpy().mean() > 900
    # `max_timestep` is exclusive.
    narrow = DiffusionObjective(schedule, min_timestep=5, max_timestep=7)
    assert set(narrow.noise(latents).timesteps.tolist()) == {5, 6}
    bright = DiffusionObjective(schedule, noise_offset=50.0)
    assert np.abs(bright.noise(latents).target.numpy()).max() > 20
    # The losses of an error of 2. For errors above delta, the Huber loss is
    # delta * (error - delta / 2), and the smooth L1 loss is the Huber loss divided by delta.
    for loss, delta, expected in (
        ("mse", 0.1, 4.0),
        ("l1", 0.1, 2.0),
        ("huber", 0.5, 0.5 * (2.0 - 0.5 / 2)),
        ("smooth_l1", 0.1, 2.0 - 0.1 / 2),
    ):
        objective = DiffusionObjective(schedule, loss=loss, huber_delta=delta)
        noised = objective.noise(latents)
        found = objective.loss(noised.target + 2.0, noised).item()
        assert found == pytest.approx(expected, rel=1e-4)


def test_the_loss_is_weighted_by_mask_and_weights_and_a_mask_of_another_shape_is_rejected() -> None:
    objective = DiffusionObjective(NoiseSchedule())
    noised = objective.noise(tc.randn((2, 4, 3, 3)))
    error = np.zeros((2, 4, 3, 3), dtype=np.float32)
    error[0, :, 0, 0] = 3.0
    error[1] = 1.0
    prediction = noised.target + tc.tensor(error)
    mask = np.zeros((2, 1, 3, 3), dtype=np.float32)
    mask[0, :, 0, 0] = 1.0
    mask[1] = 0.2
    # The means of the squared errors, weighted by the mask, are 9 and 1.
    found = objective.loss(prediction, noised, mask=tc.tensor(mask)).item()
    assert found == pytest.approx((9.0 + 1.0) / 2, rel=1e-5)
    weights = tc.tensor([0.0, 0.5])
    found = objective.loss(prediction, noised, mask=tc.tensor(mask), weights=weights).item()
    assert found == pytest.approx((0.0 * 9.0 + 0.5 * 1.0) / 2, rel=1e-5)
    with pytest.raises(ShapeError, match=r"mask has shape \[2, 3, 3\], expected \[2, 1, 3, 3\]"):
        objective.loss(prediction, noised, mask=tc.tensor(mask[:, 0]))


def test_draws_repeat_with_the_generator_state_and_validation_keeps_that_state() -> None:
    objective = DiffusionObjective(NoiseSchedule(), noise_offset=0.05)
    latents = tc.zeros((3, 4, 2, 2))
    state = tc.get_rng_state()
    first = objective.noise(latents)
    tc.set_rng_state(state)
    second = objective.noise(latents)
    np.testing.assert_array_equal(first.sample.numpy(), second.sample.numpy())
    state = tc.get_rng_state()
    # The noise of an example depends only on its number (4, 5 or 6).
    fixed = objective.validation_noise(latents, [4, 5, 6])
    again = objective.validation_noise(latents[1:], [5, 6])
    assert tc.get_rng_state() == state
    np.testing.assert_array_equal(fixed.sample.numpy()[1:], again.sample.numpy())
    assert fixed.timesteps.tolist()[1:] == again.timesteps.tolist()


def enlarged(image: Array, size: tuple[int, int]) -> Array:
    """Enlarge images (..., h, w) like torch's bilinear `interpolate` with align_corners=False."""
    for axis, length in zip((-2, -1), size, strict=True):
        count = image.shape[axis]
        centers = (np.arange(length) + 0.5) * count / length - 0.5
        # Each input pixel has a triangular weight around its center. Beyond the edge, the values of
        # the edge pixels continue.
        distance = np.abs(np.clip(centers, 0, count - 1)[:, None] - np.arange(count))
        weights = np.maximum(1 - distance, 0)
        image = np.moveaxis(np.moveaxis(image, axis, -1) @ weights.T, -1, axis)
    return image


@pytest.mark.parametrize(("height", "width"), [(32, 24), (5, 40), (1, 1)])
def test_multiresolution_noise_follows_kohyas_formula_in_training_only(
    height: int, width: int
) -> None:
    seed, discount = 5, 0.7
    samples = [3, 9]  # the numbers of two samples
    latents = tc.zeros((len(samples), 4, height, width))

    def noise(**settings: float) -> Array:
        objective = DiffusionObjective(NoiseSchedule(), **settings)
        return objective.noise(latents, samples, seed).target.numpy()

    def pyramid(fine: Array) -> Array:
        """Add coarser noise to `fine`, the noise of one example, as `pyramid_noise_like` does."""
        total = fine.astype(np.float64)
        for i in range(6):
            ratio = float(tc.rand(1).item()) * 2 + 2
            h, w = max(1, int(height / ratio**i)), max(1, int(width / ratio**i))
            total += enlarged(tc.randn(4, h, w).numpy(), (height, width)) * discount**i
            if 1 in (h, w):
                break
        return total / total.std(ddof=1)

    for offset in (0.0, 0.2):
        plain = noise(noise_offset=offset)
        found = noise(
            noise_offset=offset, multires_noise_iterations=6, multires_noise_discount=discount
        )
        for example, sample in enumerate(samples):
            fine = plain[example]
            # `drawn` calls the function with the random numbers of this sample's own stream.
            expected = drawn(seed, "pyramid", sample, lambda fine=fine: pyramid(fine))
            np.testing.assert_allclose(found[example], expected, atol=3e-6)
    np.testing.assert_array_equal(noise(multires_noise_iterations=0), noise())
    # Validation draws no coarser noise.
    validation = [
        DiffusionObjective(NoiseSchedule(), multires_noise_iterations=n).validation_noise(
            latents, samples
        )
        for n in (0, 6)
    ]
    np.testing.assert_array_equal(*(noised.target.numpy() for noised in validation))


def test_the_gradient_of_the_loss_points_away_from_the_target() -> None:
    objective = DiffusionObjective(NoiseSchedule(), min_snr_gamma=5.0, loss="huber")
    noised = objective.noise(tc.randn((2, 4, 3, 3)))
    prediction = tc.Var(tc.zeros((2, 4, 3, 3)))
    # The prediction is 0, and so the signs of the gradient are those of -target.
    objective.loss(prediction, noised).backward()
    assert prediction.grad is not None
    assert (np.sign(prediction.grad.numpy()) == -np.sign(noised.target.numpy())).all()


def test_schedules_are_read_and_wrong_schedules_and_losses_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "scheduler" / "scheduler_config.json"
    file.parent.mkdir()
    file.write_text('{"prediction_type": "v_prediction", "rescale_betas_zero_snr": true}')
    schedule = NoiseSchedule.from_pretrained(tmp_path)
    assert (schedule.prediction_type, schedule.alphas_cumprod[-1]) == ("v_prediction", 0.0)
    file.write_text('{"beta_schedule": "sigmoid"}')
    with pytest.raises(ConfigError, match=r"scheduler_config\.json: .*sigmoid"):
        NoiseSchedule.from_pretrained(tmp_path)
    with pytest.raises(MissingFileError):
        NoiseSchedule.from_pretrained(tmp_path / "missing")
    with pytest.raises(ArgumentError, match="beta_schedule"):
        NoiseSchedule("cosine")
    with pytest.raises(ArgumentError, match="v_prediction"):
        DiffusionObjective(NoiseSchedule(rescale_betas_zero_snr=True))
    # The message lists the known losses, such as smooth_l1.
    with pytest.raises(ArgumentError, match="smooth_l1"):
        DiffusionObjective(NoiseSchedule(), loss="l2")
