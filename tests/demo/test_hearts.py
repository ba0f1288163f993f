"""The demo of SDXL: its shapes, data and judge, and its run; how all demos start anew."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainable_candle.data import check_folder
from trainable_candle.demo import hearts, language, shapes
from trainable_candle.demo import run as digits_demo
from trainable_candle.demo.folder import MARK, begin
from trainable_candle.demo.hearts import Verdict
from trainable_candle.errors import ConfigError
from trainable_candle.families import load
from trainable_candle.tasks.latent import LatentTask, SampleOptions
from trainable_candle.train import TrainConfig
from trainable_candle.train.state import checkpoints, refuse_later


@pytest.fixture(scope="module")
def judge() -> shapes.Judge:
    return shapes.Judge(seed=0)


def drawn(shape: str, colour: str, seed: int) -> np.ndarray:
    return np.asarray(shapes.draw(shape, colour, np.random.default_rng(seed)))


def test_the_judge_recognises_shapes_that_it_was_not_trained_on(judge: shapes.Judge) -> None:
    assert judge.accuracy > 0.97
    for shape in shapes.SHAPES:
        images = np.stack([drawn(shape, "red", seed) for seed in range(100, 120)])
        assert judge.hearts(images).mean() == pytest.approx(float(shape == "heart"), abs=0.1)


def test_the_judge_recognises_dark_hearts(judge: shapes.Judge) -> None:
    # Inverted, a white heart is a dark one.
    images = np.stack([255 - drawn("heart", "white", seed) for seed in range(20)])
    assert judge.hearts(images).all()


def test_the_judge_rejects_upside_down_hearts(judge: shapes.Judge) -> None:
    images = np.stack([drawn("heart", "red", seed)[::-1] for seed in range(20)])
    assert judge.hearts(images).mean() < 0.1


def test_a_heart_has_the_colour_in_which_it_was_drawn_and_no_other() -> None:
    for colour in shapes.COLOURS:
        found = [
            name for name in shapes.COLOURS if shapes.is_colour(drawn("heart", colour, 1), name)
        ]
        assert found == [colour]


def test_the_data_has_no_heart_in_the_unseen_colour(tmp_path: Path) -> None:
    seed = 3
    hearts.write_dataset(tmp_path / "a", seed)
    captions = [image.caption for image in check_folder(tmp_path / "a")]
    assert len(captions) == 40  # 10 of each of four colours; `orange` is missing
    assert set(captions) == {f"a {c} heart" for c in ("red", "yellow", "purple", "white")}


def test_the_same_seed_gives_the_same_data(tmp_path: Path) -> None:
    seed = 3
    hearts.write_dataset(tmp_path / "a", seed)
    hearts.write_dataset(tmp_path / "b", seed)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


# The numbers are the shares of hearts in images without the LoRA (`before`, at most 0.2) and with
# it (`after`, at least 0.6); and, without limits, the share of hearts in the unseen colour
# (`unseen`) and the judge's share of right answers (`judge_accuracy`).
@pytest.mark.parametrize(
    ("verdict", "passed"),
    [
        (Verdict(0.2, 0.6, 0.0, 1.0), True),
        (Verdict(0.21, 1.0, 1.0, 1.0), False),
        (Verdict(0.0, 0.59, 1.0, 1.0), False),
    ],
    ids=["at both limits", "too many before", "too few after"],
)
def test_verdicts_pass_within_their_limits(verdict: Verdict, passed: bool) -> None:
    assert verdict.passed == passed
    assert "orange hearts" in str(verdict)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lora_teaches_hearts(tmp_path: Path) -> None:
    verdict = hearts.run_demo(tmp_path, progress=False, report=lambda _: None)
    assert verdict is not None
    assert verdict.passed
    assert verdict.after - verdict.before >= 0.5
    assert json.loads((tmp_path / "verdict.json").read_text())["after"] == verdict.after
    for name in ("loss.png", "before.png", "after.png"):
        with Image.open(tmp_path / name) as image:
            assert min(image.size) > 300
    # The file contains the adapter that was judged.
    task = load("sdxl", None, "f32", "cpu")
    assert isinstance(task, LatentTask)
    task.load_adapter(tmp_path / "adapter.safetensors", 1.0)
    options = SampleOptions(steps=14, guidance=4.0, size=(128, 128), sampler="dpmpp_2m")
    images = task.draw(["a white heart"] * 4, options)
    assert shapes.Judge(seed=0).hearts(images).mean() >= 0.5


@pytest.mark.parametrize("demo", [hearts, language, digits_demo])
def test_a_demo_replaces_an_interrupted_demo_but_no_other_run(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {hearts: "sdxl", language: "causal-lm", digits_demo: "digits"}[demo]
    task = load(name, None, "f32", "cpu")

    def interrupted_training(_: TrainConfig, **_options: object) -> SimpleNamespace:
        # As a new run does: rejects checkpoints of steps after 0, which are those of another run.
        refuse_later(tmp_path, 0)
        leave_checkpoint(tmp_path)
        return SimpleNamespace(task=task, completed=False)

    monkeypatch.setattr(demo, "train_adapter", interrupted_training)
    # Save time: before training, ask the language model nothing, and draw only one digit.
    monkeypatch.setattr(language, "Answers", lambda *_: None)
    monkeypatch.setattr(digits_demo, "SAMPLES", 1)
    # The second demo removes the checkpoint of the first; otherwise `refuse_later` would raise.
    for _ in range(2):
        demo.run_demo(tmp_path)
    assert checkpoints(tmp_path)
    # The mark is a file that says that a demo writes to the folder. Without it, the checkpoints may
    # be those of another run, so they are kept. The first demo must leave no mark when it fails, or
    # the second would remove them.
    (tmp_path / MARK).unlink()
    for _ in range(2):
        with pytest.raises(ConfigError, match="of an earlier run"):
            demo.run_demo(tmp_path)


def test_a_demo_keeps_the_adapter_of_another_run(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.safetensors"
    adapter.write_bytes(b"another run's")
    # The first call must leave no mark, or the second would remove the adapter.
    for _ in range(2):
        begin(tmp_path)
    assert adapter.read_bytes() == b"another run's"
    assert not (tmp_path / MARK).exists()


def leave_checkpoint(output: Path) -> None:
    """Write the only checkpoint folder of the run, as an interrupted run does."""
    folder = output / "checkpoint-000007"
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    assert checkpoints(output) == [folder]
