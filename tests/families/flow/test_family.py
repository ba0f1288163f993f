"""Families of flow models: training on a pipeline, the adapter's files, and drawing with them."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.distributed.group import ALONE
from trainable_candle.errors import ConfigError
from trainable_candle.run import train_adapter
from trainable_candle.tasks.latent import LatentTask, SampleOptions
from trainable_candle.tasks.latent.texts import prepare_texts
from trainable_candle.train import TrainConfig
from trainable_candle.train.logs import read_json_log


@pytest.fixture(params=["sd3", "flux", "chroma", "zimage", "flux2", "qwen-image"])
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of a family."""
    return request.param


@pytest.fixture
def base(name: str, request: pytest.FixtureRequest) -> Path:
    """Return the folder of the family's tiny pipeline."""
    return request.getfixturevalue(f"{name.replace('-', '_')}_base")


@pytest.fixture
def configure(
    configure: Callable[..., TrainConfig], name: str, base: Path
) -> Callable[..., TrainConfig]:
    """Return the function of conftest.py with the arguments for the family."""
    return partial(configure, name, base)


def test_a_run_trains_on_images_and_writes_an_adapter(
    name: str, base: Path, configure: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = configure(
        steps=3, batch_size=2, sample_prompts=["a blur"], sample_steps=2, sample_every=3,
        validation_split=0.25, validate_every=3,
    )  # fmt: skip
    result = train_adapter(config)
    assert result.completed
    tensors = tc.load_file(result.adapter_path)
    assert all(key.startswith("transformer.") for key in tensors)
    assert {key.rpartition(".lora_")[2] for key in tensors} == {"A.weight", "B.weight"}
    # Every adapted layer has changed, and ComfyUI can apply the adapter.
    assert tc.verify_adapter(result.adapter_path, name, base).good
    # One image before the first step, and one after the third.
    assert len(list((tmp_path / "out" / "samples").glob("*.png"))) == 2
    task = families.load(name, base, "f32", "cpu")
    before = task.draw(["a blur"], SampleOptions(steps=2, size=(32, 16)))
    assert before.shape == (1, 16, 32, 3)
    task.load_adapter(result.adapter_path, 1.0)
    assert (task.draw(["a blur"], SampleOptions(steps=2, size=(32, 16))) != before).any()


def test_captions_are_encoded_once_and_then_the_encoders_are_freed(
    name: str, base: Path, configure: Callable[..., TrainConfig]
) -> None:
    """The cached features are those that the encoders compute, also for the empty caption."""
    config = configure(caption_dropout=0.5)
    task = families.load(name, base, "f32", "cpu", config)
    assert isinstance(task, LatentTask)
    family, data = task.family, task.read(lambda _: None)
    texts, prompts = prepare_texts(family, data, ["a dog"], lambda _: None, ALONE)
    # Both are cached properties, which `vars` has while they are loaded.
    assert {"encoders", "model"}.isdisjoint(vars(family))
    captions = sorted(set(data.train.possible_captions()))
    assert "" in captions
    cached, live = texts.inputs(captions), family.features(captions)
    assert cached.keys() == live.keys() == prompts["a dog"].keys()
    # A transformer does not read the hidden states after the length of a text. Without lengths, it
    # reads them all.
    all_tokens = [live["encoder_hidden_states"].shape[1]] * len(captions)
    lengths = live["lengths"].numpy().astype(int) if "lengths" in live else all_tokens
    for key, tensor in live.items():
        by_caption = zip(cached[key].numpy(), tensor.numpy(), lengths, strict=True)
        for found, expected, length in by_caption:
            read = length if key == "encoder_hidden_states" else None
            np.testing.assert_allclose(
                np.atleast_1d(found)[:read], np.atleast_1d(expected)[:read], atol=1e-5, err_msg=key
            )


def test_captions_that_are_too_long_give_a_note_until_they_are_cached(
    name: str, base: Path, configure: Callable[..., TrainConfig], sdxl_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "images"
    shutil.copytree(sdxl_folder, folder, ignore=shutil.ignore_patterns(".*"))
    (folder / "0.txt").write_text("a red blur " * 500)
    config = configure(cache="disk", cache_dir=str(tmp_path / "cache")).with_(dataset=str(folder))
    notes = []
    for _ in range(2):
        task = families.load(name, base, "f32", "cpu", config)
        assert isinstance(task, LatentTask)
        lines: list[str] = []
        prepare_texts(task.family, task.read(lambda _: None), [], lines.append, ALONE)
        notes.append([line for line in lines if "note" in line])
    assert len(notes[0]) == 1
    assert "do not read the end of 1 caption, " in notes[0][0]
    assert "a red blur a red" in notes[0][0]
    # The second time, all captions are in the cache.
    assert notes[1] == []


@pytest.mark.parametrize(
    ("name", "scale", "shift"),
    [
        ("sd3", 1.5305, 0.0609),
        ("flux", 0.3611, 0.1159),
        ("chroma", 0.3611, 0.1159),
        ("zimage", 0.3611, 0.1159),
    ],
)
def test_training_latents_are_those_of_diffusers_shifted_and_then_scaled(
    name: str, scale: float, shift: float, base: Path
) -> None:
    """As in diffusers' training scripts. All four tiny pipelines have the same autoencoder."""
    case = tc.load_file(Path(__file__).parents[2] / "golden" / "flux" / "vae_forward.safetensors")
    coder = families.load(name, base, "f32", "cpu").family.coder
    encoded = coder.encode(case["pixels"].numpy().transpose(0, 2, 3, 1).copy())
    mean, logvar = case["mean"].numpy(), case["logvar"].numpy()
    found = coder.latents(encoded, None).numpy()
    np.testing.assert_allclose(found, (mean - shift) * scale, rtol=1e-4, atol=1e-5)
    noise = np.random.default_rng(0).normal(size=mean.shape).astype(np.float32)
    expected = (mean + np.exp(logvar / 2) * noise - shift) * scale
    found = coder.latents(encoded, lambda: tc.tensor(noise)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_every_model_has_a_resolution(name: str, base: Path) -> None:
    resolution = tc.inspect(base).resolution
    if name == "sd3":  # The configuration of its tiny transformer has a `sample_size`.
        assert resolution
    else:  # The resolution is that of the published model.
        assert resolution == 1024


@pytest.mark.parametrize("adapter", ["lora", "dora", "loha", "lokr", "oft"])
def test_a_merged_model_draws_as_with_the_adapter(
    name: str, base: Path, configure: Callable[..., TrainConfig], tmp_path: Path, adapter: str
) -> None:
    # The default format, diffusers', cannot hold the other kinds.
    given: dict[str, Any] = {} if adapter in {"lora", "dora"} else {"format": "peft"}
    if adapter == "oft":
        given["rank"] = TrainConfig.rank  # OFT accepts only the default.
    # A norm of 0 turns clipping off.
    result = train_adapter(
        configure(steps=2, learning_rate=1e-2, adapter=adapter, max_grad_norm=0.0, **given)
    )
    options = SampleOptions(steps=2, size=(32, 16))
    task = families.load(name, base, "f32", "cpu")
    plain = task.draw(["a blur"], options).astype(int)
    task.load_adapter(result.adapter_path, 1.0)
    adapted = task.draw(["a blur"], options).astype(int)
    assert np.abs(adapted - plain).max() > 2
    for output in (tmp_path / "merged", tmp_path / "merged.safetensors"):
        task = families.load(name, base, "f32", "cpu")
        task.load_adapter(result.adapter_path, 1.0)
        task.save_merged(output)
        if output.is_dir():
            merged = families.load(name, output, "f32", "cpu")
            drawn = merged.draw(["a blur"], options).astype(int)
            assert np.abs(drawn - adapted).max() <= 1
        else:
            # A single file has no tokenizers, so the package's own would be used. They have more
            # tokens than the tiny text encoders, so this test does not draw with the file.
            assert tc.inspect(output, name).parts.keys() == tc.inspect(base, name).parts.keys()


def test_an_interrupted_run_continues_bit_for_bit(
    configure: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    settings = {"steps": 4, "batch_size": 2, "caption_dropout": 0.5, "ema_decay": 0.5}
    full = train_adapter(configure(**settings, output=str(tmp_path / "full"), save_every=2))
    (tmp_path / "parts").mkdir()
    in_parts = configure(**settings, output=str(tmp_path / "parts"), save_every=2)
    train_adapter(in_parts.with_(steps=2))
    resumed = train_adapter(in_parts.with_(resume="latest"))
    expected, found = (tc.load_file(run.adapter_path) for run in (full, resumed))
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        np.testing.assert_array_equal(found[key].numpy(), tensor.numpy(), err_msg=key)


@pytest.mark.parametrize("format", ["kohya", "comfyui"])
def test_each_supported_format_holds_the_same_adapter(
    name: str, base: Path, configure: Callable[..., TrainConfig], tmp_path: Path, format: str
) -> None:
    if format not in families.find(name).formats:
        with pytest.raises(ConfigError, match=f"--format {format} has no place"):
            train_adapter(configure(format=format))
        return
    runs = [
        train_adapter(configure(steps=1, output=str(tmp_path / str(given)), format=given))
        for given in (None, format)
    ]
    parameters = []
    for run in runs:
        model = tc.models.load(base / "transformer", dtype="f32")
        parameters.append(model.load_adapter(run.adapter_path).named_parameters())
    assert parameters[0].keys() == parameters[1].keys()
    for key, var in parameters[0].items():
        np.testing.assert_allclose(parameters[1][key].numpy(), var.numpy(), rtol=1e-6, err_msg=key)


def test_formats_that_cannot_hold_the_adapters_are_rejected_before_training(
    name: str, configure: Callable[..., TrainConfig]
) -> None:
    formats = families.find(name).formats
    # In the original files of most families, one layer joins several layers of diffusers. This
    # causes the next two errors. Qwen-Image has no such layers.
    if "kohya" in formats and name != "qwen-image":
        with pytest.raises(ConfigError, match=r"apply to all outputs.* format .comfyui"):
            train_adapter(configure(format="kohya", adapter="lokr"))
        with pytest.raises(ConfigError, match="layers that have no adapter"):
            train_adapter(configure(format="kohya", adapter="dora", target_modules=["to_q"]))
    other = "comfyui" if "comfyui" in formats else "peft"
    with pytest.raises(ConfigError, match=f"give --format {other}"):
        train_adapter(configure(adapter="loha"))


def test_settings_without_effect_and_missing_weights_are_rejected(
    name: str, configure: Callable[..., TrainConfig]
) -> None:
    for setting in ({"clip_skip": 1}, {"train_text_encoder": True}, {"noise_offset": 0.1}):
        with pytest.raises(ConfigError, match="has no effect on"):
            train_adapter(configure(**setting))
    with pytest.raises(ConfigError, match="give one of the two"):
        train_adapter(configure(loss_weighting="cosmap", min_snr_gamma=5.0))
    with pytest.raises(ConfigError, match="--sampler is dpmpp_2m, expected euler"):
        train_adapter(configure(sampler="dpmpp_2m", sample_prompts=["x"]))
    with pytest.raises(ConfigError, match=r"needs its checkpoint; give --weights PATH: .*hub"):
        families.load(name, None, None, "cpu")


def test_flux_takes_the_guidance_scale_but_no_negative_prompt(
    flux_base: Path, sdxl_folder: Path, tmp_path: Path
) -> None:
    config = TrainConfig(
        model="flux", weights=str(flux_base), dataset=str(sdxl_folder), output=str(tmp_path),
        device="cpu", resolution=32, sample_prompts=["x"], negative_prompt="y",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="--negative-prompt has no effect on Flux"):
        train_adapter(config)
    task = families.load("flux", flux_base, "f32", "cpu")
    # The message names the model after its folder, `base`.
    with pytest.raises(ConfigError, match="the negative prompt has no effect on base, which"):
        task.draw(["x"], SampleOptions(steps=2, size=(16, 16), negative_prompt="y"))
    drawn = [task.draw(["x"], SampleOptions(steps=2, size=(16, 16), guidance=scale))
             for scale in (1.0, 3.5, 3.5)]  # fmt: skip
    assert (drawn[0] != drawn[1]).any()
    np.testing.assert_array_equal(drawn[1], drawn[2])


def validation_losses(output: Path) -> list[float]:
    """Return the validation losses of a run; the first is that before any step."""
    rows = read_json_log(output / "train.jsonl")
    return [row["validation_loss"] for row in rows if "validation_loss" in row]


@pytest.mark.parametrize(
    ("adapter", "format"), [("lora", None), ("lora", "comfyui"), ("dora", None)]
)
def test_a_run_can_start_from_the_file_of_an_adapter(
    configure: Callable[..., TrainConfig], tmp_path: Path, adapter: str, format: str | None
) -> None:
    """A run that starts from an adapter's file begins with the loss of the run that wrote it."""
    # A norm of 0 turns clipping off.
    given = {
        "adapter": adapter, "alpha": 2.0, "learning_rate": 3e-2, "max_grad_norm": 0.0,
        "validation_split": 0.25, "validate_every": 2, "steps": 2, "format": format,
    }  # fmt: skip
    first = train_adapter(configure(**given, output=str(tmp_path / "first")))
    start = str(first.adapter_path)
    train_adapter(configure(**given, output=str(tmp_path / "second"), initial_adapter=start))
    losses, second_losses = (validation_losses(tmp_path / run) for run in ("first", "second"))
    assert abs(losses[-1] - losses[0]) > 1e-3
    assert second_losses[0] == pytest.approx(losses[-1], rel=1e-5)


@pytest.mark.parametrize("init", ["pissa", "loftq"])
def test_a_file_from_pissa_or_loftq_draws_as_the_run_that_wrote_it(
    name: str, base: Path, configure: Callable[..., TrainConfig], init: str
) -> None:
    """A file from PiSSA applies to the original base, a file from LoftQ to the quantized base."""
    precision = {"base_precision": "nf4"} if init == "loftq" else {}
    # A norm of 0 turns clipping off.
    settings = {"steps": 2, "learning_rate": 1e-2, "max_grad_norm": 0.0, "init": init, **precision}
    run = train_adapter(configure(**settings))
    assert isinstance(run.task, LatentTask)
    options = SampleOptions(steps=2, size=(32, 16))
    config = TrainConfig(**precision)
    task = families.load(name, base, "f32", "cpu", config)
    assert isinstance(task, LatentTask)
    plain = task.draw(["a blur"], options).astype(int)
    task.load_adapter(run.adapter_path, 1.0)
    loaded, trained = (one.draw(["a blur"], options).astype(int) for one in (task, run.task))
    assert np.abs(loaded - plain).max() > 2
    assert np.abs(loaded - trained).max() <= 1
