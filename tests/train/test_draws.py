"""A draw depends only on its purpose, the run's seed, and the number of the sample or batch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle.data import (
    CaptionOptions,
    DatasetOptions,
    load_dataset,
    parse_sources,
)
from trainable_candle.draws import draw_from, drawn, generator, normal_samples, stream_seed
from trainable_candle.errors import ArgumentError
from trainable_candle.families.digits import Digits
from trainable_candle.settings import TrainConfig
from trainable_candle.train import Callback, Trainer

if TYPE_CHECKING:
    from pathlib import Path


def prepared(base: Path, folder: Path, seed: int = 3) -> Any:
    """Return the training data of a digits model, prepared for a run with `seed`."""
    config = TrainConfig(dataset=str(folder), seed=seed)
    task = Digits(base, "f32", "cpu", config).task()
    return task.prepare(task.read(print), print).train


def samples(data: Any, batch_size: int, count: int) -> list[tuple[Any, ...]]:
    """Return the model's inputs, as bytes, for each of the first `count` samples of a run."""
    batches = data.batches(batch_size)
    seen = []
    for index in range(count // batch_size):
        inputs = data.inputs(batches.batch(index))
        arrays = [inputs[name].numpy() for name in ("sample", "times", "class_labels", "target")]
        seen += [tuple(array[row].tobytes() for array in arrays) for row in range(batch_size)]
    return seen


def test_the_inputs_of_a_sample_do_not_depend_on_the_batch_size(
    digits_base: Path, digits_folder: Path
) -> None:
    data = prepared(digits_base, digits_folder)
    state = tc.get_rng_state()
    expected = samples(data, 1, 24)
    assert len(set(expected)) == 24
    for batch_size in (2, 4, 8):
        tc.randn((batch_size,))  # These draws have no effect on the inputs.
        assert samples(data, batch_size, 24) == expected
    tc.set_rng_state(state)
    assert samples(prepared(digits_base, digits_folder, seed=4), 1, 24) != expected


def test_views_and_captions_of_a_sample_do_not_depend_on_its_batch(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        noise = np.random.default_rng(number).integers(0, 256, (80, 96, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}, tag a, tag b, tag c")
    options = DatasetOptions(
        parse_sources(str(folder)),
        resolution=64,
        bucketing=False,
        crop="random",
        flip=True,
    )
    # With `variants=0`, each sample draws a new variant of its caption.
    captions = CaptionOptions(dropout=0.2, shuffle=True, variants=0)
    data = load_dataset(options, captions, 3)

    def seen(batch_size: int, backwards: bool = False) -> list[Any]:
        batches = data.batches(batch_size)
        indices = list(range(24 // batch_size))
        found = {}
        for index in reversed(indices) if backwards else indices:
            batch = batches.batch(index)
            for sample, view, caption in zip(
                batch.samples, batch.views, batch.captions, strict=True
            ):
                found[sample] = (view, caption)
        return [found[sample] for sample in range(24)]

    expected = seen(1)
    # Crops, flips and captions are random, so that most samples differ.
    assert len(set(expected)) > 12
    assert seen(2) == seen(4) == seen(4, backwards=True) == seen(1, backwards=True) == expected


class Stop(Callback):
    """Draws from the library's generator after every step, and stops the run after step `after`.

    If `after` is None, the run is not stopped.
    """

    def __init__(self, after: int | None) -> None:
        self.after = after

    def on_step_end(self, trainer: Trainer[Any], report: Any) -> None:
        tc.randn((3,))
        if report.step == self.after:
            trainer.stop()


class RandomBatches:
    """Batches, as a user might define them, that draw from the library's generator."""

    def batch(self, index: int) -> tc.Tensor:
        return tc.rand((1,)) + index


def make_trainer(
    output: Path | None, accumulation: int, steps: int, stop_after: int | None = None
) -> Any:
    """Return a trainer, and the list to which its loss appends the three draws of each batch."""
    seen: list[tuple[float, float, float]] = []
    weight = tc.Var([1.0])

    def loss(inputs: Any) -> tc.Tensor:
        own_draw = tc.rand(()).item()
        seen.append((inputs["batch"].item(), inputs["noise"].item(), own_draw))
        return (weight * inputs["noise"]).sum()

    trainer = Trainer(
        loss,
        {"weight": weight},
        tc.optim.SGD([weight], lr=0.01),
        RandomBatches(),
        inputs=lambda batch: {"batch": batch, "noise": tc.randn((1,))},
        steps=steps,
        gradient_accumulation=accumulation,
        output=output,
        callbacks=[Stop(stop_after)],
        seed=5,
    )
    return trainer, seen


def test_random_numbers_in_a_loss_depend_on_the_number_of_the_batch(tmp_path: Path) -> None:
    unaccumulated, expected = make_trainer(None, 1, 12)
    assert unaccumulated.train()
    assert len({value for row in expected for value in row}) == 12 * 3
    for accumulation in (2, 3, 4):
        trainer, seen = make_trainer(None, accumulation, 12 // accumulation)
        tc.manual_seed(accumulation)
        state = tc.get_rng_state()
        assert trainer.train()
        assert seen == expected
        # The second number of a state is a position in the sequence of random numbers. Only the
        # draws of `Stop` advance it, by one for each step.
        assert tc.get_rng_state() == (state[0], 12 // accumulation)
    interrupted, before = make_trainer(tmp_path, 2, 6, stop_after=2)
    assert not interrupted.train()
    resumed, after = make_trainer(tmp_path, 2, 6)
    resumed.resume(tmp_path / "checkpoint-000002")
    assert resumed.train()
    assert before + after == expected


def test_without_a_seed_draws_depend_on_the_seed_of_the_generator() -> None:
    def first_draw(seed: int) -> float:
        tc.manual_seed(seed)
        tc.rand((seed,))  # Draws before the training have no effect on it.
        seen: list[float] = []
        weight = tc.Var([1.0])

        def loss(_: tc.Tensor) -> tc.Tensor:
            seen.append(tc.rand(()).item())
            return weight.sum()

        optimizer = tc.optim.SGD([weight], lr=0.1)
        Trainer(loss, {"w": weight}, optimizer, RandomBatches(), steps=1).train()
        return seen[0]

    # The loss of batch 0 draws from the stream for the purpose "pass" and the number 0.
    assert first_draw(8) == first_draw(8) == drawn(8, "pass", 0, lambda: tc.rand(()).item())
    assert first_draw(8) != first_draw(9)


def test_a_stream_affects_only_its_thread_and_its_function() -> None:
    state = tc.get_rng_state()
    elsewhere: list[float] = []

    def draw() -> list[float]:
        before = tc.rand(()).item()
        thread = threading.Thread(target=lambda: elsewhere.append(tc.rand(()).item()))
        thread.start()
        thread.join()
        # A checkpoint calls its function twice, and both calls draw.
        tc.checkpoint(lambda x: x * tc.rand(()), tc.Var(1.0)).backward()
        return [before, tc.rand(()).item()]

    # In `draw`, the draws come from the stream with the seed 7.
    first = draw_from(7, draw)
    # Of these draws, only the one in the other thread advanced the library's generator.
    assert tc.get_rng_state() == (state[0], state[1] + 1)
    assert draw_from(7, draw) == first
    assert elsewhere[0] != elsewhere[1]
    with pytest.raises(ZeroDivisionError):
        draw_from(7, lambda: 1 // 0)
    assert tc.get_rng_state() == (state[0], state[1] + 2)
    tc.set_rng_state(state)


def test_streams_depend_on_seed_purpose_and_number() -> None:
    # The arguments of `generator` are the seed, the purpose and the number.
    assert generator(1, "view", 2).random() == generator(1, "view", 2).random()
    others = [(1, "view", 3), (1, "crop", 2), (2, "view", 2)]
    assert len({generator(*stream).random() for stream in [(1, "view", 2), *others]}) == 4
    # The arguments: the shape of a sample, the samples' numbers, the seed and the purpose.
    samples_5_and_6 = normal_samples((2, 3), [5, 6], 1, "noise").numpy()
    assert samples_5_and_6.shape == (2, 2, 3)
    np.testing.assert_array_equal(
        normal_samples((2, 3), [6], 1, "noise").numpy()[0], samples_5_and_6[1]
    )
    sample_5 = drawn(1, "noise", 5, lambda: tc.randn((2, 3)).numpy())
    np.testing.assert_array_equal(sample_5, samples_5_and_6[0])
    with pytest.raises(ArgumentError, match='unknown purpose "dropout"; expected one of latents'):
        stream_seed(0, "dropout", 0)
