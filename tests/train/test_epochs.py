"""`Epochs` converts steps to epochs, and a run saves and draws at the ends of epochs."""

from pathlib import Path

import pytest

from trainable_candle.data.batches import ShuffledBatches
from trainable_candle.run import JSON_LOG, train_adapter
from trainable_candle.train import TrainConfig
from trainable_candle.train.epochs import Epochs, is_due
from trainable_candle.train.evaluation import step_adapters
from trainable_candle.train.logs import read_json_log


def test_an_epoch_ends_at_the_step_that_completes_it() -> None:
    # 10 items in batches of 4: a batch with items of two epochs belongs to the second. The epochs
    # have 2, 3, 2, 3 and 2 batches. A step takes two batches. The epochs are complete after 2, 5,
    # 7, 10 and 12 batches, which are in steps 1, 3, 4, 5 and 6.
    epochs = Epochs(ShuffledBatches(10, 4, seed=0).first_batch, accumulation=2)
    assert [epochs.completed(step) for step in range(6)] == [0, 1, 1, 2, 3, 4]
    # `ends(n)` selects the steps that complete every n-th epoch.
    ends_any = epochs.ends(1)
    assert [step for step in range(1, 6) if ends_any(step)] == [1, 3, 4, 5]
    ends_even = epochs.ends(2)
    assert [step for step in range(1, 6) if ends_even(step)] == [3, 5]
    # A later call may ask for an earlier step, as after a resume.
    assert epochs.completed(2) == 1
    assert epochs.at(0) == 0
    # After two steps, 2 of the 3 batches of the second epoch have been used.
    assert epochs.at(2) == pytest.approx(1 + 2 / 3)


def test_several_epochs_can_end_at_one_step() -> None:
    # 2 items in batches of 8: each batch has items of four epochs and belongs to the last of them.
    # The three other epochs have no batch, and so they are complete before it.
    epochs = Epochs(ShuffledBatches(2, 8, seed=0).first_batch, accumulation=1)
    assert epochs.completed(0) == 3
    assert epochs.ends(1)(1)
    # Step 1 completes the fourth epoch, and the next three, which have no batch, with it.
    assert epochs.completed(1) == 7


def test_actions_are_due_every_nth_step_or_by_a_function() -> None:
    assert [step for step in range(1, 7) if is_due(3, step)] == [3, 6]
    assert not is_due(0, 4)
    assert is_due(lambda step: step == 4, 4)


def test_a_run_saves_and_draws_at_the_ends_of_epochs(config: TrainConfig) -> None:
    images = len(list(Path(config.dataset).glob("*.png")))
    most_steps_per_epoch = -(-images // 4)  # rounded up
    by_epochs = config.with_(
        # Restore the defaults of the settings that count steps.
        steps=TrainConfig.steps,
        epochs=3,
        batch_size=4,
        save_every=TrainConfig.save_every,
        save_every_epochs=1,
        sample_prompts=["a zero"],
        sample_every_epochs=2,
        warmup_steps=0,
        name="digit",
    )
    lines: list[str] = []
    run = train_adapter(by_epochs, progress=False, report=lines.append)
    epochs = Epochs(ShuffledBatches(images, 4, seed=0).first_batch, accumulation=1)
    # The last step is left out: it saves the final adapter, `digit.safetensors`.
    ends = [step for step in range(1, run.step) if epochs.ends(1)(step)]
    assert len(ends) >= 2
    saved = [int(path.stem.rpartition("step")[2]) for path in step_adapters(run.output, "digit")]
    assert saved == ends
    previews = [path.stem for path in (run.output / "samples").glob("*.png")]
    # Previews are drawn before the first step, after every second epoch, and after the last step.
    assert len(previews) == len(
        {0, *(s for s in range(1, run.step) if epochs.ends(2)(s)), run.step}
    )
    assert run.adapter_path == run.output / "digit.safetensors"
    assert run.adapter_path.is_file()
    # Row n has the values of step n + 1. Compare a step after the first epoch.
    rows = read_json_log(run.output / JSON_LOG)
    found = rows[most_steps_per_epoch]["epoch"]
    assert found == pytest.approx(epochs.at(most_steps_per_epoch + 1), abs=1e-4)
    assert all(row["per_second"] > 0 for row in rows if "loss" in row)
    log = "\n".join(lines)
    assert f"training: {run.step} steps of 4 images" in log
    assert f"step {run.step}: preview" in log
    assert f"done: {run.step} steps in " in log
    assert "images/s, at most" in log
