"""The scripts of `examples/` run with small settings, and do what they say."""

import importlib.util
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trainable_candle as tc

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.name[:2]: path for path in sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))}


def script(number: str) -> Any:
    """Return a script as an imported module; `main` has not run."""
    path = SCRIPTS[number]
    spec = importlib.util.spec_from_file_location(f"example_{number}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_script_is_listed_and_tested() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    assert re.findall(r"\]\((\d\d_\w+\.py)\)", page) == [path.name for path in SCRIPTS.values()]
    tested = set(re.findall(r'(?:script\(|SCRIPTS\[)"(\d\d)"', Path(__file__).read_text()))
    assert tested == SCRIPTS.keys()


@pytest.mark.parametrize(
    ("path", "files"),
    [
        (SCRIPTS["01"], {"config.json", "model.safetensors"}),
        (
            SCRIPTS["02"],
            {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"},
        ),
    ],
    ids=["01", "02"],
)
def test_the_scripts_that_train_built_in_models_run(
    path: Path, files: set[str], tmp_path: Path
) -> None:
    arguments = ["--steps", "2", "--output", str(tmp_path / "made")]
    subprocess.run([sys.executable, str(path), *arguments], check=True, capture_output=True)
    assert {file.name for file in (tmp_path / "made").iterdir()} == files


def test_lora_improves_a_users_own_model(tmp_path: Path) -> None:
    accuracy = script("03").main(tmp_path)
    assert accuracy["before"] < 0.5
    assert accuracy["after"] > 0.9
    assert accuracy["merged"] == accuracy["after"]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", 8)


def test_the_script_for_sdxl_trains_and_draws(tmp_path: Path) -> None:
    run = script("04").main(tmp_path, steps=2)
    assert (run.completed, run.step) == (True, 2)
    assert tc.verify_adapter(run.adapter_path, "sdxl").modules
    with Image.open(tmp_path / "coffee.png") as image:
        assert np.ptp(np.asarray(image)) > 50  # the image is not of one colour


def test_the_script_for_language_models_trains_and_answers(tmp_path: Path) -> None:
    correct_share = script("05").main(tmp_path, steps=60)
    assert correct_share > 0.2  # the base model was not trained on Pig Latin
    assert (tmp_path / "run" / "peft" / "adapter_model.safetensors").exists()


def test_the_script_for_many_adapters_draws_similar_images(tmp_path: Path) -> None:
    # Mean differences, from 0 to 255, to the image that is drawn with both adapters loaded. The
    # other images are drawn with both adapters joined in one file ("joined"), with this file
    # reduced to rank 8, with both adapters merged into a checkpoint, and without any adapters.
    distances = script("06").main(tmp_path, steps=4)
    assert distances["without any"] > 1
    assert distances["joined"] < 0.1
    assert distances["merged"] < 0.1
    assert distances["joined"] <= distances["rank 8"] < distances["without any"]


def test_the_script_for_comfyui_copies_the_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = script("07").main(tmp_path, steps=2, comfyui=tmp_path / "there")
    assert report.good
    assert (tmp_path / "there" / "models" / "loras" / "my-photos.safetensors").exists()
    output = capsys.readouterr().out
    assert "modelspec.trigger_phrase: myphotos" in output
    assert re.search(r"ComfyUI: (\d+) of \1 modules", output, re.IGNORECASE)


def test_the_script_with_a_loop_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    example = script("08")
    resumed_weights = example.main(tmp_path)
    # The same epochs without an interruption.
    train, _ = example.digits.split(example.digits.load())
    data = example.TensorDataset(example.pixels(train), tc.tensor(train.labels, dtype="i64"))
    steps_per_epoch = -(-len(train) // example.BATCH_SIZE)  # rounded up
    state = example.make(example.EPOCHS * steps_per_epoch)
    for _ in range(example.EPOCHS):
        example.train_epoch(state, data)
    for name, value in state.model.state_dict().items():
        np.testing.assert_array_equal(resumed_weights[name].numpy(), value.numpy())


def test_the_script_with_two_processes_gives_equal_results() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPTS["09"])], check=True, capture_output=True, text=True
    )
    lines = re.findall(r"process (\d): loss (\S+), checksum of the weights (\w+)", result.stdout)
    assert {rank for rank, *_ in lines} == {"0", "1"}
    assert len({tuple(results) for _, *results in lines}) == 1


# `statuses` are the exit statuses of the two processes; signal 9 killed the one with -9.
@pytest.mark.parametrize(
    ("statuses", "expected"), [((0, 0), 0), ((-9, 0), 1), ((0, 3), 1)], ids=str
)
def test_the_launch_of_two_processes_fails_if_and_only_if_one_fails(
    monkeypatch: pytest.MonkeyPatch, statuses: tuple[int, ...], expected: int
) -> None:
    remaining = iter(statuses)

    def popen(*_: Any, **__: Any) -> Any:
        # `wait` returns the status of this process.
        return SimpleNamespace(wait=partial(int, next(remaining)))

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert script("09").launch(2) == expected
