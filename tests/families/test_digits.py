"""The digits family: captions, pixels, loss, sampling; and finding a family by its name."""

from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.data import read_pixels
from trainable_candle.errors import ConfigError
from trainable_candle.families.digits import Digits, digits_in, to_model
from trainable_candle.settings import GROUPS
from trainable_candle.tasks.latent import SampleOptions
from trainable_candle.tasks.latent.drawing import to_pixels
from trainable_candle.tasks.latent.objectives import FLOW_TIMES
from trainable_candle.train import FlowMatching, TrainConfig


@pytest.mark.parametrize(
    ("caption", "digits"),
    [
        ("a handwritten 7", [7]),
        ("Zero", [0]),
        ("three!", [3]),
        ("5five FIVE", [5]),  # three times the same digit
        ("no.9,", [9]),
        ("one two", [1, 2]),
        ("10", []),  # a number of two numerals names no digit
        ("phone", []),
        ("", []),
    ],
)
def test_digits_are_read_from_words_and_from_single_numerals(
    caption: str, digits: list[int]
) -> None:
    assert digits_in(caption) == digits


def test_conversion_for_the_model_and_back_keeps_grey_levels() -> None:
    pixels = np.arange(256, dtype=np.uint8).reshape(4, 8, 8)[..., None].repeat(3, axis=-1)
    images = to_model(pixels)
    assert (images.shape, images.dtype) == ((4, 1, 8, 8), np.float32)
    np.testing.assert_allclose([images.min(), images.max()], [-1, 1], atol=1e-6)
    np.testing.assert_array_equal(to_pixels(tc.tensor(images)), pixels)
    assert to_pixels(tc.full((1, 1, 8, 8), 3.0)).max() == 255


def test_the_loss_is_that_of_flow_matching(digits_base: Path, digits_folder: Path) -> None:
    config = TrainConfig(dataset=str(digits_folder), timesteps="logit_normal", seed=4)
    task = Digits(digits_base, "f32", "cpu", config).task()
    split = task.read(print)  # `print` gets the lines for users
    prepared = task.prepare(split, print).train
    assert len(prepared) == 10
    batch = prepared.batches(2).batch(1)
    loss = prepared.loss(prepared.inputs(batch)).item()

    digits = [digits_in(caption)[0] for caption in batch.captions]
    images = to_model(np.stack([read_pixels(digits_folder / f"{digit}.png") for digit in digits]))
    # The second batch has the samples 2 and 3; 4 is the seed.
    noisy, sigmas, _ = FlowMatching("logit_normal").noise(tc.tensor(images), [2, 3], 4)
    sigma = sigmas.numpy()[:, None, None, None]
    noise = (noisy.numpy() - (1 - sigma) * images) / sigma
    # The model reads sigma * 1000 (FLOW_TIMES) as its timestep.
    velocity = task.family.model(noisy, sigmas * FLOW_TIMES, tc.tensor(digits)).numpy()
    assert loss == pytest.approx(np.mean((velocity - (noise - images)) ** 2), rel=1e-4)


def test_samples_depend_on_the_seed_and_keep_the_state_of_the_generator(digits_base: Path) -> None:
    task = Digits(digits_base, "f32", "cpu").task()
    state = tc.get_rng_state()
    first = task.draw(["4", "four"], SampleOptions(steps=3, seed=1))
    assert tc.get_rng_state() == state
    assert (first.shape, first.dtype) == ((2, 8, 8, 3), np.uint8)
    np.testing.assert_array_equal(task.draw(["4", "4"], SampleOptions(steps=3, seed=1)), first)
    assert not np.array_equal(task.draw(["4", "4"], SampleOptions(steps=3, seed=2)), first)


def test_sampling_follows_the_velocity_from_noise(digits_base: Path) -> None:
    task = Digits(digits_base, "f32", "cpu").task()
    tc.manual_seed(6)
    x = tc.randn((1, 1, 8, 8)).numpy()
    # Four steps from sigma 1 to 0, each of -0.25.
    for sigma in (1.0, 0.75, 0.5, 0.25):
        timestep = tc.tensor(np.array([1000 * sigma], np.float32))
        x = x - 0.25 * task.family.model(tc.tensor(x), timestep, tc.tensor([2])).numpy()
    found = task.draw(["two"], SampleOptions(steps=4, seed=6)).astype(int)
    assert np.abs(found - to_pixels(tc.tensor(x)).astype(int)).max() <= 1


def test_the_error_for_an_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="model: `digit` is not known; did you mean `digits`"):
        families.find("digit")


def test_every_family_can_be_found() -> None:
    for name in families.NAMES:
        family = families.find(name)
        assert family.summary
        assert family.name == name
        assert set(family.groups) <= set(GROUPS)
