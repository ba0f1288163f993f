"""A training adapter takes part in the training of another adapter, but not in inference.

Distilled models are trained over an adapter that undoes the distillation, and are used without it.
"""

from collections.abc import Callable
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
def made(sdxl_folder: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    def made(name: str, base: Path, output: str, **given: Any) -> TrainConfig:
        settings = {
            "resolution": 32, "max_side": 48, "cache": "memory", "rank": 4, "device": "cpu",
            "precision": "f32", "steps": 2, "learning_rate": 1e-2, "max_grad_norm": 0.0,
            "output": str(tmp_path / output), "model": name, "weights": str(base),
        } | given  # fmt: skip
        return TrainConfig(dataset=str(sdxl_folder), **settings)

    return made


def losses(output: Path) -> list[str]:
    rows = (output / "train.csv").read_text().splitlines()
    column = rows[0].split(",").index("loss")
    return [row.split(",")[column] for row in rows[1:]]


@pytest.mark.parametrize("adapter", ["lora", "dora", "lokr"])
@pytest.mark.parametrize("name", ["flux", "chroma", "zimage", "flux2", "qwen-image"])
def test_a_training_adapter_affects_only_training_steps(
    name: str, adapter: str, made: Callable[..., TrainConfig], request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue(f"{name.replace('-', '_')}_base")
    over = train_adapter(made(name, base, "over", rank=3, alpha=6.0)).adapter_path
    form = {} if adapter != "lokr" else {"format": "comfyui"}
    given = {"adapter": adapter, "alpha": 2.0, "sample_prompts": ["a"], "sample_steps": 1, **form}
    plain = train_adapter(made(name, base, "plain", **given))
    run = train_adapter(made(name, base, "run", **given, training_adapter=str(over)))
    assert losses(run.output)[0] != losses(plain.output)[0]
    # The first preview comes before the first step: the new adapter has no effect yet, and previews
    # turn the training adapter off. So both runs draw the images of the base model.
    previews = [min((r.output / "samples").glob("*.png")).read_bytes() for r in (plain, run)]
    assert previews[0] == previews[1]
    # The run's model draws like a base model with the run's adapter and no training adapter.
    task = families.load(name, base, "f32", "cpu")
    task.load_adapter(run.adapter_path, 1.0)
    drawn = task.draw(["a"], OPTIONS).astype(int)
    assert np.abs(run.task.draw(["a"], OPTIONS).astype(int) - drawn).max() <= 1
    remarks = tc.verify_adapter(run.adapter_path, name, base).remarks
    assert any("the training adapter adapter.safetensors" in remark for remark in remarks)


def test_a_resumed_run_keeps_the_training_adapter(
    zimage_base: Path, made: Callable[..., TrainConfig]
) -> None:
    over = train_adapter(made("zimage", zimage_base, "over")).adapter_path
    settings = {"training_adapter": str(over), "steps": 4, "save_every": 2}
    whole = train_adapter(made("zimage", zimage_base, "whole", **settings))
    part = made("zimage", zimage_base, "part", **settings)
    train_adapter(part.with_(steps=2))
    again = train_adapter(part.with_(resume="latest"))
    expected, found = (tc.load_file(run.adapter_path) for run in (whole, again))
    for key, tensor in expected.items():
        np.testing.assert_array_equal(found[key].numpy(), tensor.numpy(), err_msg=key)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_training_adapter_can_be_switched_off_and_removed_exactly(
    flux2_base: Path, tmp_path: Path, dtype: str, kind: str
) -> None:
    folder = flux2_base / "transformer"
    tc.manual_seed(1)

    def adapted(path: str, **given: Any) -> Path:
        model = tc.models.load(folder, dtype="f32")
        config = tc.LoraConfig(r=3, lora_alpha=6.0, target_modules=["to_q", "to_out"], **given)
        adapter = model.add_adapter(config)
        for var in adapter.parameters():
            var.set(var + 0.2 * tc.randn(var.shape))
        adapter.save(tmp_path / path)
        return tmp_path / path

    over, trained = adapted("over.safetensors"), adapted("b.safetensors", use_dora=kind == "dora")
    case = tc.load_file(FORWARD)
    inputs = {
        "hidden_states": tc.randn((2, 24, 128)), "encoder_hidden_states": tc.randn((2, 19, 48)),
        "timestep": case["timestep"], "img_ids": case["img_ids"], "txt_ids": case["txt_ids"],
    }  # fmt: skip
    model = tc.models.load(folder, dtype=dtype)
    model.load_adapter(trained)
    alone = model(**inputs).to("f32").numpy()
    with pytest.raises(ArgumentError, match="add_training_adapter: scale is NaN, expected a"):
        model.add_training_adapter(over, float("nan"))
    product = model.add_training_adapter(over)
    assert len(product) == 4
    both = model(**inputs).to("f32").numpy()
    assert np.abs(both - alone).max() > 0.05
    product.set_enabled(False)
    np.testing.assert_array_equal(model(**inputs).to("f32").numpy(), alone)
    product.set_enabled(True)
    np.testing.assert_array_equal(model(**inputs).to("f32").numpy(), both)
    with pytest.raises(ConfigError, match="the layer has a training adapter already"):
        model.add_training_adapter(over)
    product.remove()
    np.testing.assert_array_equal(model(**inputs).to("f32").numpy(), alone)
    if kind == "dora" or dtype == "bf16":
        return
    # In f32, merging the training adapter before loading the other adapter gives the same result.
    merged = tc.models.load(folder, dtype="f32")
    merged.load_adapter(over)
    merged.merge_adapter()
    merged.save_pretrained(tmp_path / "merged")
    other = tc.models.load(tmp_path / "merged", dtype="f32")
    other.load_adapter(trained)
    np.testing.assert_allclose(other(**inputs).numpy(), both, rtol=1e-4, atol=1e-4)


def test_files_that_are_no_training_adapter_are_rejected(
    zimage_base: Path, flux_base: Path, made: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    settings = {"rank": 2, "steps": 1}
    dora = train_adapter(made("zimage", zimage_base, "dora", adapter="dora", **settings))
    other = train_adapter(made("flux", flux_base, "flux", **settings))
    for path, message in (
        (dora.adapter_path, "it is a dora, expected a LoRA"),
        (other.adapter_path, "has no such layer"),
        (tmp_path / "none", "there is no file or folder"),
    ):
        with pytest.raises(tc.Error, match=message):
            train_adapter(made("zimage", zimage_base, "out", training_adapter=str(path)))


def test_a_training_adapter_replaces_the_warning_about_distilled_models(tmp_path: Path) -> None:
    for name, given, expected in (
        ("turbo", None, ["undoes its distillation to a few steps; train the base"]),
        ("turbo", "a", []),
        ("base", None, []),
        ("base", "a", ["--training-adapter is for distilled models; is base distilled?"]),
    ):
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
        config = TrainConfig(training_adapter=given)
        notes = families.find("zimage")(folder, "f32", "cpu", config).notes()  # type: ignore[attr-defined]
        assert len(notes) == len(expected)
        assert all(text in note for text, note in zip(expected, notes, strict=True))
