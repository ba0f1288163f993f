"""The run of the digits demo, and the base model that it starts from."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle.data import check_folder
from trainable_candle.demo import digits
from trainable_candle.demo.digits import UNSEEN
from trainable_candle.demo.run import SAMPLES, DemoResult, run, write_dataset
from trainable_candle.families.digits import BASE, Digits
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.latent import SampleOptions


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    return run(tmp_path_factory.mktemp("demo"), progress=False, report=lambda _: None)


@pytest.mark.slow
def test_lora_teaches_the_unseen_digit(demo: DemoResult) -> None:
    verdict = demo.verdict
    assert verdict is not None
    assert verdict.judge_accuracy > 0.97  # on real images
    # The shares of samples that the judge takes for the unseen digit, without and with the LoRA.
    assert verdict.share_before < 0.2
    assert verdict.share_after > 0.8
    # The samples differ from each other at least 0.6 times as much as real images of the digit.
    assert verdict.spread_ratio >= 0.6
    assert verdict.passed


@pytest.mark.slow
def test_the_run_writes_its_verdict_configuration_images_and_data(demo: DemoResult) -> None:
    assert demo.verdict is not None
    written = json.loads((demo.output / "verdict.json").read_text())
    assert written["share_after"] == demo.verdict.share_after
    assert TrainConfig.from_yaml(demo.output / "config.yaml").rank == 8
    for name in ("loss.png", "before.png", "after.png"):
        with Image.open(demo.output / name) as image:
            assert min(image.size) > 300
    images = check_folder(demo.output / "dataset")
    assert {image.caption for image in images} == {"a handwritten 0"}
    # scikit-learn's data has 178 images of the digit 0; the split holds out 30 % of them.
    assert len(images) == 125


@pytest.mark.slow
def test_a_loaded_adapter_gives_the_same_samples_and_can_be_removed(demo: DemoResult) -> None:
    task = Digits(BASE, "f32", "cpu").task()
    prompts = ["a 0", "a 3"]
    base = task.draw(prompts, SampleOptions(steps=3, seed=1))
    task.family.model.load_adapter(demo.output / "adapter.safetensors")
    adapted = task.draw(prompts, SampleOptions(steps=3, seed=1))
    assert not np.array_equal(adapted, base)
    task.family.model.remove_adapter()
    np.testing.assert_array_equal(task.draw(prompts, SampleOptions(steps=3, seed=1)), base)


@pytest.mark.slow
def test_samples_are_almost_as_far_from_the_training_images_as_real_images_are(
    demo: DemoResult,
) -> None:
    task = Digits(BASE, "f32", "cpu").task()
    task.family.model.load_adapter(demo.output / "adapter.safetensors")
    options = SampleOptions(steps=25, seed=2)
    drawn = digits.from_grey(task.draw(["0"] * SAMPLES, options)[..., 0])
    train, held_out = digits.split(digits.load())

    def distance(pixels: digits.Pixels) -> float:
        """Return the mean distance of an image to the nearest training image of the digit."""
        images, trained_on = (
            p.reshape(len(p), -1).astype(float) for p in (pixels, train.only(UNSEEN).pixels)
        )
        pairs = np.sqrt(((images[:, None] - trained_on[None]) ** 2).sum(-1))
        return float(pairs.min(axis=1).mean())

    assert distance(drawn) > 0.8 * distance(held_out.only(UNSEEN).pixels)


def test_base_draws_the_nine_digits_it_has_seen() -> None:
    from trainable_candle.demo.judge import Judge

    train, held_out = digits.split(digits.load())
    seen = [digit for digit in range(10) if digit != UNSEEN]
    task = Digits(BASE, "f32", "cpu").task()
    prompts = [f"a handwritten {digit}" for digit in seen for _ in range(20)]
    judged = Judge(held_out).labels(
        digits.from_grey(task.draw(prompts, SampleOptions(steps=25, seed=0))[..., 0])
    )
    assert (judged == np.repeat(seen, 20)).mean() > 0.9
    # The base was trained on this number of images: those of the other nine digits.
    assert len(train.without(UNSEEN)) == 1133


def test_the_embedding_of_the_unseen_digit_in_the_base_is_untrained() -> None:
    # The seed with which the base was initialised before its training.
    tc.manual_seed(0)
    fresh = tc.models.DigitsTransformer().named_tensors()["class_embedding.weight"].numpy()
    shipped = tc.models.load(BASE).named_tensors()["class_embedding.weight"].numpy()
    # The base's file is in f16.
    as_stored = fresh.astype(np.float16)
    np.testing.assert_array_equal(shipped[UNSEEN], as_stored[UNSEEN])
    seen = UNSEEN + 1
    assert not np.array_equal(shipped[seen], as_stored[seen])


def test_base_has_at_most_1_mb() -> None:
    assert (BASE / "model.safetensors").stat().st_size <= 1_000_000


def test_writing_the_data_set_again_gives_the_same_files(tmp_path: Path) -> None:
    images = digits.load().only(UNSEEN)

    def write(folder: Path) -> list[tuple[str, str]]:
        write_dataset(images, folder)
        return [
            (p.name, hashlib.sha256(p.read_bytes()).hexdigest()) for p in sorted(folder.iterdir())
        ]

    assert write(tmp_path / "a") == write(tmp_path / "b")
    assert len(list((tmp_path / "a").glob("*.png"))) == len(images)
