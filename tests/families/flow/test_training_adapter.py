"""A training adapter is applied while another adapter is trained, but not when images are drawn.

A distilled model is trained with a training adapter that undoes the distillation. After training,
the distilled model draws with the new adapter alone.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.errors import ArgumentError, ConfigError
from trainable_candle.run import train_adapter
from trainable_candle.tasks.latent import SampleOptions
from trainable_candle.train import TrainConfig

FORWARD = Path(__file__).parents[2] / "golden" / "flux2" / "transformer_forward.safetensors"
OPTIONS = SampleOptions(steps=2, size=(32, 16))


@pytest.fixture
def configure(configure: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    """Return the function of conftest.py, with defaults for two large steps."""
    return partial(configure, steps=2, learning_rate=1e-2, max_grad_norm=0.0)


def losses(output: Path) -> list[str]:
    """Return the column of losses in a run's train.csv."""
    rows = (output / "train.csv").read_text().splitlines()
    column = rows[0].split(",").index("loss")
    return [row.split(",")[column] for row in rows[1:]]


@pytest.mark.parametrize("adapter", ["lora", "dora", "lokr"])
@pytest.mark.parametrize("name", ["sd3", "flux", "chroma", "zimage", "flux2", "qwen-image"])
def test_a_training_adapter_affects_the_loss_but_no_images(
    name: str, adapter: str, configure: Callable[..., TrainConfig], request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue(f"{name.replace('-', '_')}_base")
    # The training adapter, whose rank, 3, differs from the new adapter's 4.
    training_adapter = train_adapter(configure(name, base, "first", rank=3, alpha=6.0)).adapter_path
    settings = {"adapter": adapter, "alpha": 2.0, "sample_prompts": ["a"], "sample_steps": 1}
    if adapter == "lokr":
        settings["format"] = "comfyui"  # the default format, that of diffusers, has no LoKr
    plain = train_adapter(configure(name, base, "plain", **settings))
    run = train_adapter(
        configure(name, base, "run", **settings, training_adapter=str(training_adapter))
    )
    assert losses(run.output)[0] != losses(plain.output)[0]
    # The first preview is drawn before the first step: the new adapter has no effect yet, and the
    # training adapter is off in previews. So both runs draw the images of the base model.
    previews = [min((r.output / "samples").glob("*.png")).read_bytes() for r in (plain, run)]
    assert previews[0] == previews[1]
    # After the run, its model draws like a base model with the new adapter alone.
    task = families.load(name, base, "f32", "cpu")
    task.load_adapter(run.adapter_path, 1.0)
    drawn = task.draw(["a"], OPTIONS).astype(int)
    # Rounding to bytes may change a value by 1.
    assert np.abs(run.task.draw(["a"], OPTIONS).astype(int) - drawn).max() <= 1
    remarks = tc.verify_adapter(run.adapter_path, name, base).remarks
    assert any("the training adapter adapter.safetensors" in remark for remark in remarks)


@pytest.mark.parametrize("name", ["sd3", "zimage"])
def test_a_run_with_a_training_adapter_equals_one_on_a_model_into_which_it_is_merged(
    name: str,
    configure: Callable[..., TrainConfig],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """The two runs have the same losses and write the same adapter, of rank 4 as configured."""
    base = request.getfixturevalue(f"{name}_base")
    cache = {"cache": "disk", "cache_dir": str(tmp_path / "cache")}
    first = train_adapter(configure(name, base, "first", rank=3, alpha=6.0, **cache))
    training_adapter = first.adapter_path
    task = families.load(name, base, "f32", "cpu")
    task.load_adapter(training_adapter, 1.0)
    task.save_merged(tmp_path / "merged")
    given = {"optimizer": "sgd", "learning_rate": 1.0, "target_modules": ["to_q"], **cache}
    on_merged = train_adapter(configure(name, tmp_path / "merged", "on merged", **given))
    run = train_adapter(
        configure(name, base, "run", **given, training_adapter=str(training_adapter))
    )
    without = train_adapter(configure(name, base, "without", **given))
    found, expected, plain = (np.array(losses(r.output), float) for r in (run, on_merged, without))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.abs(found - plain).min() > 1e-3
    saved, expected_saved = (tc.load_file(r.adapter_path) for r in (run, on_merged))
    assert saved.keys() == expected_saved.keys()
    for key, tensor in saved.items():
        np.testing.assert_allclose(
            tensor.numpy(), expected_saved[key].numpy(), rtol=1e-5, atol=1e-7
        )
        assert 4 in tensor.shape  # the rank of the new adapter, not the training adapter's 3


def test_a_resumed_run_keeps_the_training_adapter(
    zimage_base: Path, configure: Callable[..., TrainConfig]
) -> None:
    training_adapter = train_adapter(configure("zimage", zimage_base, "first")).adapter_path
    settings = {"training_adapter": str(training_adapter), "steps": 4, "save_every": 2}
    uninterrupted = train_adapter(configure("zimage", zimage_base, "whole", **settings))
    interrupted = configure("zimage", zimage_base, "part", **settings)
    train_adapter(interrupted.with_(steps=2))
    resumed = train_adapter(interrupted.with_(resume="latest"))
    expected, found = (tc.load_file(run.adapter_path) for run in (uninterrupted, resumed))
    for key, tensor in expected.items():
        np.testing.assert_array_equal(found[key].numpy(), tensor.numpy(), err_msg=key)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_training_adapter_can_be_switched_off_and_removed_exactly(
    flux2_base: Path, tmp_path: Path, dtype: str, kind: str
) -> None:
    folder = flux2_base / "transformer"
    tc.manual_seed(1)

    def write_adapter(name: str, **given: Any) -> Path:
        model = tc.models.load(folder, dtype="f32")
        config = tc.LoraConfig(r=3, lora_alpha=6.0, target_modules=["to_q", "to_out"], **given)
        adapter = model.add_adapter(config)
        for var in adapter.parameters():
            var.set(var + 0.2 * tc.randn(var.shape))
        adapter.save(tmp_path / name)
        return tmp_path / name

    training_adapter = write_adapter("training.safetensors")
    adapter = write_adapter("adapter.safetensors", use_dora=kind == "dora")
    case = tc.load_file(FORWARD)
    # The case has the ids of 24 image tokens and 19 text tokens, but its tokens have fewer features
    # than those of this model.
    inputs = {
        "hidden_states": tc.randn((2, 24, 128)), "encoder_hidden_states": tc.randn((2, 19, 48)),
        "timestep": case["timestep"], "img_ids": case["img_ids"], "txt_ids": case["txt_ids"],
    }  # fmt: skip
    model = tc.models.load(folder, dtype=dtype)
    model.load_adapter(adapter)
    alone = model(**inputs).to("f32").numpy()
    with pytest.raises(ArgumentError, match="scale is NaN, expected a finite number"):
        model.add_training_adapter(training_adapter, float("nan"))
    attached = model.add_training_adapter(training_adapter)
    # `to_q` and `to_out` of the model's two blocks with separate projections.
    assert len(attached) == 4
    both = model(**inputs).to("f32").numpy()
    assert np.abs(both - alone).max() > 0.05
    attached.set_enabled(False)
    np.testing.assert_array_equal(model(**inputs).to("f32").numpy(), alone)
    attached.set_enabled(True)
    np.testing.assert_array_equal(model(**inputs).to("f32").numpy(), both)
    with pytest.raises(ConfigError, match="the layer has a training adapter already"):
        model.add_training_adapter(training_adapter)
    attached.remove()
    np.testing.assert_array_equal(model(**inputs).to("f32").numpy(), alone)
    if kind == "dora" or dtype == "bf16":
        return
    # In f32, a LoRA on a base into which the training adapter is merged gives the same result.
    merged = tc.models.load(folder, dtype="f32")
    merged.load_adapter(training_adapter)
    merged.merge_adapter()
    merged.save_pretrained(tmp_path / "merged")
    other = tc.models.load(tmp_path / "merged", dtype="f32")
    other.load_adapter(adapter)
    np.testing.assert_allclose(other(**inputs).numpy(), both, rtol=1e-4, atol=1e-4)


def test_files_that_cannot_be_training_adapters_are_rejected(
    zimage_base: Path, flux_base: Path, configure: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    settings = {"rank": 2, "steps": 1}
    dora = train_adapter(configure("zimage", zimage_base, "dora", adapter="dora", **settings))
    other = train_adapter(configure("flux", flux_base, "flux", **settings))
    for path, message in (
        (dora.adapter_path, "it is a dora, expected a LoRA"),
        (other.adapter_path, "has no such layer"),
        (tmp_path / "none", "there is no file or folder"),
    ):
        with pytest.raises(tc.Error, match=message):
            train_adapter(configure("zimage", zimage_base, "out", training_adapter=str(path)))


def test_a_note_appears_if_a_training_adapter_is_missing_or_unexpected(tmp_path: Path) -> None:
    # A model counts as distilled if the name of its folder contains "turbo".
    for name, training_adapter, expected in (
        ("turbo", None, ["undoes its distillation to a few steps; train the base"]),
        ("turbo", "a", []),
        ("base", None, []),
        ("base", "a", ["--training-adapter is for distilled models; is base distilled?"]),
    ):
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
        config = TrainConfig(training_adapter=training_adapter)
        notes = families.find("zimage")(folder, "f32", "cpu", config).notes()  # type: ignore[attr-defined]
        assert len(notes) == len(expected)
        assert all(text in note for text, note in zip(expected, notes, strict=True))
