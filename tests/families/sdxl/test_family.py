"""SDXL: losses, encoders, images and files; the tests write out the expected computations."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.data.buckets import Bucket, Fit, Frame
from trainable_candle.draws import normal_samples
from trainable_candle.errors import (
    ConfigError,
    MissingFileError,
    NonFiniteError,
    WeightsFormatError,
)
from trainable_candle.families.pipeline.facts import Facts
from trainable_candle.families.pipeline.facts import facts as facts_of
from trainable_candle.families.sdxl import SDXL
from trainable_candle.families.sdxl.family import time_ids
from trainable_candle.families.sdxl.schedule import schedule
from trainable_candle.families.sdxl.text import TextEncoders
from trainable_candle.tasks.latent import LatentTask, SampleOptions
from trainable_candle.train import TrainConfig


def facts(path: Path) -> Facts:
    return facts_of(path, "sdxl")


def prepare(base: Path, config: TrainConfig) -> tuple[LatentTask, Any]:
    """Return the task and its prepared data: `train` and `validation`."""
    task = SDXL(base, "f32", "cpu", config).task()

    def ignore(_: str) -> None:
        """Print no lines for the user."""

    return task, task.prepare(task.read(ignore), ignore)


def test_the_loss_is_that_of_epsilon_prediction(
    sdxl_base: Path, configure: Callable[..., TrainConfig]
) -> None:
    config = configure(batch_size=2)
    task, split = prepare(sdxl_base, config)
    batch = split.train.batches(2).batch(0)
    loss = split.train.loss(split.train.inputs(batch)).item()

    # Compute the same loss step by step: encoders, posterior, schedule, UNet. The random numbers of
    # a batch follow from the numbers of its samples, here 0 and 1.
    encoders = TextEncoders.load(SDXL(sdxl_base, "f32", "cpu"))
    vae = tc.models.AutoencoderKL.from_pretrained(sdxl_base, dtype="f32")
    dataset = task.read(lambda _: None).train
    pixels = np.stack([dataset.pixels(view) for view in batch.views]).astype(np.float32)
    mean, logvar = vae.encode(tc.tensor((pixels / 127.5 - 1).transpose(0, 3, 1, 2).copy()))
    drawn = normal_samples(mean.shape[1:], [0, 1], config.seed, "latents").numpy()
    latents = (mean.numpy() + np.exp(logvar.numpy() / 2) * drawn) * vae.scaling_factor
    objective = tc.train.DiffusionObjective(tc.train.NoiseSchedule())
    noised = objective.noise(tc.tensor(latents), [0, 1], config.seed)
    with tc.no_grad():
        features = encoders(batch.captions)
        unet = tc.models.SDXLUNet.from_pretrained(sdxl_base, dtype="f32", subfolder="unet")
        sizes = tc.tensor(np.array([time_ids(frame) for frame in batch.frames], np.float32))
        predicted = unet(noised.sample, noised.timesteps, time_ids=sizes, **features).numpy()
    alphas = np.array(tc.train.NoiseSchedule().alphas_cumprod)[noised.timesteps.numpy()]
    a = alphas[:, None, None, None]
    # Solve for the noise: the noised sample is sqrt(a) * latents + sqrt(1 - a) * noise.
    noise = (noised.sample.numpy() - np.sqrt(a) * latents) / np.sqrt(1 - a)
    assert loss == pytest.approx(np.mean((predicted - noise) ** 2), rel=1e-3)


def test_encoders_are_freed_when_no_setting_needs_them(
    sdxl_base: Path, configure: Callable[..., TrainConfig]
) -> None:
    def encoders_in_memory(**settings: Any) -> set[str]:
        """Return which of the autoencoder and the text encoders are in memory after preparing."""
        task, _ = prepare(sdxl_base, configure(**settings))
        # Both are cached properties, which `__dict__` has while they are loaded.
        coder = {"coder"} if "model" in task.family.coder.__dict__ else set()
        return coder | task.family.__dict__.keys() & {"encoders"}

    assert encoders_in_memory() == set()
    # Previews need the autoencoder, and the features of their prompts, which are computed before
    # the text encoders are freed.
    assert encoders_in_memory(sample_prompts=["a"]) == {"coder"}
    # Without a cache, each step encodes images and captions, and preparing loads the autoencoder.
    # The text encoders are loaded when they are first used, which is after preparing.
    assert encoders_in_memory(cache="off") == {"coder"}
    # Text encoders that are trained encode captions in each step; they, too, are loaded when they
    # are first used. The latents are cached.
    assert encoders_in_memory(train_text_encoder=True) == set()


def test_validation_repeats_its_loss_and_keeps_the_generator_state(
    sdxl_base: Path, configure: Callable[..., TrainConfig]
) -> None:
    _, split = prepare(sdxl_base, configure(validation_split=0.25))
    assert (len(split.train), len(split.validation)) == (6, 2)  # of eight images
    state = tc.get_rng_state()
    first = split.validation.validation_loss()
    assert tc.get_rng_state() == state
    assert split.validation.validation_loss() == first


def test_long_captions_take_several_rows_and_shorter_ones_get_rows_of_the_empty_caption(
    sdxl_base: Path,
) -> None:
    encoders = TextEncoders.load(SDXL(sdxl_base, "f32", "cpu"))
    # 40 letters of one token each. A row has 17 tokens: a start, up to 15 letters, and an end.
    long = "ab " * 20
    with tc.no_grad():
        both = encoders([long, "x"])
        alone, empty = encoders(["x"]), encoders([""])
    # The 40 letters need three rows. The two tiny encoders give 8 + 12 features for each token, and
    # the second one gives 12 for the whole caption.
    assert both["encoder_hidden_states"].shape == (2, 3 * 17, 20)
    assert both["text_embeds"].shape == (2, 12)
    text = both["encoder_hidden_states"].numpy()
    np.testing.assert_allclose(text[1, :17], alone["encoder_hidden_states"].numpy()[0], atol=1e-6)
    for padding in (text[1, 17:34], text[1, 34:]):
        np.testing.assert_allclose(padding, empty["encoder_hidden_states"].numpy()[0], atol=1e-6)
    np.testing.assert_allclose(
        both["text_embeds"].numpy()[1], alone["text_embeds"].numpy()[0], atol=1e-6
    )


def test_samples_depend_on_the_prompt_and_the_options_alone(sdxl_base: Path) -> None:
    task = SDXL(sdxl_base, "f32", "cpu").task()

    def draw(*prompts: str, **options: Any) -> np.ndarray:
        given = {"steps": 2, "size": (32, 48), "seed": 3, **options}  # width, height
        return task.draw(prompts or ["a cat"], SampleOptions(**given))

    state = tc.get_rng_state()
    first = draw()
    assert tc.get_rng_state() == state
    assert (first.shape, first.dtype) == ((1, 48, 32, 3), np.uint8)
    np.testing.assert_array_equal(draw(), first)
    # The second image has the given seed plus 1.
    np.testing.assert_array_equal(draw("a dog", "a cat", seed=2)[1:], first)
    changes: list[dict[str, Any]] = [
        {"seed": 4},
        {"steps": 3},
        {"guidance": 1.0},
        {"sampler": "dpmpp_2m"},
        {"negative_prompt": "blurry"},
        {"size": (48, 32)},
    ]
    for change in changes:
        assert not np.array_equal(draw(**change), first), change
    assert not np.array_equal(draw("a dog"), first)


def test_guidance_of_one_uses_the_prompt_alone(sdxl_base: Path) -> None:
    task = SDXL(sdxl_base, "f32", "cpu").task()
    found = task.draw(["x"], SampleOptions(steps=2, guidance=1.0, size=(32, 32), seed=1))
    schedule = tc.train.NoiseSchedule()
    sampler = tc.train.Sampler(schedule, 2, "euler")
    vae = task.family.coder.model
    tc.manual_seed(1)
    with tc.no_grad():
        features = TextEncoders.load(SDXL(sdxl_base, "f32", "cpu"))(["x"])
        # Height and width of the image, the crop's corner, and the crop's height and width.
        sizes = tc.tensor([[32.0, 32.0, 0.0, 0.0, 32.0, 32.0]])
        # The tiny autoencoder halves the height and width.
        x = sampler.init_noise(tc.randn((1, 4, 16, 16)))
        for step, t in enumerate(sampler.timesteps):
            scaled = sampler.scale_input(x, step)
            x = sampler.step(task.family.model(scaled, t, time_ids=sizes, **features), step, x)
        image = vae.decode(x / vae.scaling_factor).numpy()[0]
    expected = np.clip((image.transpose(1, 2, 0) + 1) * 127.5, 0, 255)
    assert np.abs(found[0].astype(float) - expected).max() <= 1


def test_encoders_are_not_loaded_if_the_cache_is_complete(
    sdxl_base: Path, configure: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(cache="disk", batch_size=2)
    _, first = prepare(sdxl_base, config)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("an encoder was loaded")

    monkeypatch.setattr(TextEncoders, "load", fail)
    monkeypatch.setattr(tc.models.AutoencoderKL, "from_pretrained", fail)
    _, second = prepare(sdxl_base, config)
    found, expected = (
        data.train.inputs(data.train.batches(2).batch(0)) for data in (second, first)
    )
    for name, tensor in expected.items():
        assert found[name].tolist() == tensor.tolist(), name


def test_sizes_that_are_no_multiples_of_the_vaes_factor_are_rejected(sdxl_base: Path) -> None:
    task = SDXL(sdxl_base, "f32", "cpu").task()
    with pytest.raises(ConfigError, match="the size is 33x32 px, expected multiples of 2"):
        task.draw(["x"], SampleOptions(size=(33, 32)))


def test_paths_that_are_no_sdxl_model_are_rejected(
    sdxl_base: Path, digits_base: Path, sdxl_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(MissingFileError, match="there is no file or folder"):
        facts(tmp_path / "none")
    with pytest.raises(WeightsFormatError, match="it has no folder unet, vae"):
        facts(digits_base)
    with pytest.raises(WeightsFormatError, match="is not a checkpoint of SDXL: it has no unet"):
        facts(sdxl_base / "unet" / "diffusion_pytorch_model.safetensors")
    assert facts(sdxl_file).factor == facts(sdxl_base).factor == 2


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["model.diffusion_model.x", "cond_stage_model.transformer.x"],
            "a checkpoint of Stable Diffusion 1",
        ),
        (
            ["model.diffusion_model.x", "conditioner.embedders.0.model.x"],
            "a checkpoint of SDXL's refiner",
        ),
        (["down_blocks.0.x", "mid_block.x"], "the weights of a UNet from a pipeline's folder"),
        (["lora_unet_x.alpha"], "an adapter, not a model"),
    ],
    ids=str,
)
def test_errors_say_what_a_file_of_another_model_looks_like(
    tmp_path: Path, names: list[str], message: str
) -> None:
    path = tmp_path / "a.safetensors"
    tc.save_file({name: tc.ones(1) for name in names}, path)
    with pytest.raises(
        WeightsFormatError, match=f"is not a checkpoint of SDXL.*; it looks like {message}"
    ):
        facts(path)


def test_the_folder_of_one_part_is_rejected_by_the_class_in_its_configuration(
    sdxl_base: Path,
) -> None:
    with pytest.raises(
        WeightsFormatError, match=r"not a model of SDXL \(it holds a UNet2DConditionModel"
    ):
        facts(sdxl_base / "unet")


def test_a_file_with_blocks_unlike_sdxls_is_accepted_only_with_configurations(
    tmp_path: Path,
) -> None:
    # The built-in SDXL is tiny: its models have fewer blocks than the published ones.
    base = SDXL.default_weights()
    assert base is not None
    path = tmp_path / "merged.safetensors"
    models = {name: tc.models.load(base, subfolder=name) for name in SDXL.parts}
    tc.models.save_checkpoint(path, models)
    tensors = tc.load_file(path)
    # Write the file without its metadata, which has the configurations.
    tc.save_file(tensors, path)
    with pytest.raises(WeightsFormatError, match="give the folder of its pipeline"):
        facts(path)
    configs = {
        f"trainable_candle.config.{name}": (base / name / "config.json").read_text()
        for name in SDXL.parts
    }
    tc.save_file(tensors, tmp_path / "described.safetensors", configs)
    found, expected = facts(tmp_path / "described.safetensors"), facts(base)
    assert (found.config, found.factor) == (expected.config, expected.factor)


def test_a_tokenizer_that_does_not_fit_is_reported(
    sdxl_base: Path, sdxl_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(WeightsFormatError, match=r"single_file\.safetensors holds no tokenizer"):
        TextEncoders.load(SDXL(sdxl_file, "f32", "cpu"))
    shutil.copytree(sdxl_base, tmp_path / "base")
    shutil.rmtree(tmp_path / "base" / "tokenizer_2")
    message = (
        r"tokenizer_2 is missing, and CLIP's usual tokenizer has a token 49407, but .* 200 tokens"
    )
    with pytest.raises(WeightsFormatError, match=message):
        TextEncoders.load(SDXL(tmp_path / "base", "f32", "cpu"))


def test_a_non_finite_image_is_an_error(sdxl_base: Path) -> None:
    task = SDXL(sdxl_base, "f32", "cpu").task()
    adapter = task.family.model.add_adapter(
        tc.LoraConfig(r=2, lora_alpha=2.0, target_modules=["to_q"])
    )
    for var in adapter.parameters():
        var.set(tc.full(var.shape, float("nan")))
    with pytest.raises(NonFiniteError, match="sample: the image has non-finite values"):
        task.draw(["x"], SampleOptions(steps=1, size=(32, 32)))


def test_the_prediction_type_is_read_from_an_original_checkpoint(
    tmp_path: Path, read_metadata: Callable[[Path], dict[str, str]]
) -> None:
    base = SDXL.default_weights()
    assert base is not None
    path = tmp_path / "v.safetensors"
    tc.models.save_checkpoint(
        path, {name: tc.models.load(base, subfolder=name) for name in SDXL.parts}
    )
    assert tc.inspect(path).prediction_type == "epsilon"
    # The names of these tensors show v-prediction and a schedule with zero terminal SNR.
    marks = {"v_pred": tc.zeros((1,)), "ztsnr": tc.zeros((1,))}
    metadata = read_metadata(path)
    tc.save_file({**tc.load_file(path), **marks}, path, metadata)
    found = schedule(path, None)
    assert (found.prediction_type, found.rescale_betas_zero_snr) == ("v_prediction", True)
    assert schedule(path, "epsilon").prediction_type == "epsilon"


def test_the_setting_replaces_only_the_prediction_type_of_a_folders_schedule(
    tmp_path: Path,
) -> None:
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.parent.mkdir()
    fields = {
        "beta_schedule": "linear", "beta_start": 0.001, "beta_end": 0.02, "steps_offset": 0,
        "num_train_timesteps": 10, "timestep_spacing": "trailing", "prediction_type": "epsilon",
    }  # fmt: skip
    path.write_text(json.dumps(fields))
    found = schedule(tmp_path, "v_prediction")
    assert (found.prediction_type, found.timestep_spacing) == ("v_prediction", "trailing")
    # As in diffusers' DDPMScheduler: the products of 1 - beta.
    expected = np.cumprod(1 - np.linspace(0.001, 0.02, 10))
    np.testing.assert_allclose(found.alphas_cumprod, expected, rtol=1e-5)
    path.unlink()
    assert schedule(tmp_path, "v_prediction").prediction_type == "v_prediction"


def test_time_ids_are_those_of_the_reference() -> None:
    # As in diffusers' train_text_to_image_sdxl.py, the six values are the height and width of the
    # original image, the top and left of the crop, and the height and width of the crop. The sizes
    # of `Fit` are those of the bucket, of the original image and of the scaled image, width first.
    # `corner` and `frame` have the left and then the top of the crop. Without arguments, `corner`
    # is that of a centered crop: half of the 1195 - 1152 rows left over, rounded.
    fit = Fit(Bucket(896, 1152), (3000, 4000), (896, 1195))
    assert fit.corner() == (0, 22)
    assert time_ids(fit.frame(0, 22)) == (4000, 3000, 22, 0, 1152, 896)
    wide = Fit(Bucket(100, 50), (240, 100), (120, 50))
    assert time_ids(wide.frame(3, 0)) == (100, 240, 0, 3, 50, 100)
    # Mirrored, the crop begins as far from the left edge as it ended from the right: 120 - 100 - 3.
    assert time_ids(wide.frame(3, 0, flipped=True)) == (100, 240, 0, 17, 50, 100)
    assert time_ids(Frame.whole(64, 48)) == (48, 64, 0, 0, 48, 64)


@pytest.mark.parametrize("clip_skip", [0, 1])
def test_layers_that_clip_skip_leaves_out_get_no_adapter(
    sdxl_base: Path, configure: Callable[..., TrainConfig], clip_skip: int
) -> None:
    config = configure(train_text_encoder=True, clip_skip=clip_skip, adapter="dora")
    task, split = prepare(sdxl_base, config)
    adapters = task.attach()
    split.train.loss(split.train.inputs(split.train.batches(1).batch(0))).backward()
    for name, var in adapters.named_parameters().items():
        assert var.grad is not None, name
    # The text encoder has three layers; the last one is skipped even with `clip_skip` 0.
    names = adapters.sets["text_encoder"].named_parameters()
    assert names
    assert not any(f"layers.{2 - n}." in name for name in names for n in range(clip_skip + 1))


@pytest.mark.parametrize(("optimizer", "divisor"), [("adamw", 10), ("prodigy", 1)])
def test_text_encoders_have_a_lower_rate_except_with_prodigy(
    sdxl_base: Path, configure: Callable[..., TrainConfig], optimizer: str, divisor: int
) -> None:
    config = configure(train_text_encoder=True, optimizer=optimizer, learning_rate=0.5)
    task, _ = prepare(sdxl_base, config)
    rates = {rate for _, rate in task.attach().groups(config)}
    assert rates == {0.5, 0.5 / divisor}
