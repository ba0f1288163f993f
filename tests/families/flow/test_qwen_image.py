"""Qwen-Image: positions, noise levels, captions, guidance, files, errors for related models."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.errors import ConfigError, WeightsFormatError
from trainable_candle.families.flow.patches import positions
from trainable_candle.families.qwen_image import QwenImage
from trainable_candle.models import CausalLM
from trainable_candle.tasks.latent import SampleOptions
from trainable_candle.train import TrainConfig

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen-image"
CAPTIONS = ("", "a red blur on a blue ground", "a blur")


def test_positions_are_counted_from_the_centre() -> None:
    # The file has the positions that diffusers computes for 5 rows and 3 columns of image tokens
    # and 9 tokens of text.
    case = tc.load_file(GOLDEN / "transformer_forward.safetensors")
    image, text = positions(5, 3, 9, "cpu", centred=True)
    np.testing.assert_array_equal(image.numpy(), case["img_ids"].numpy())
    np.testing.assert_array_equal(text.numpy(), case["txt_ids"].numpy())


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1024, [1, 0.86248219, 0.70279437, 0.51510549, 0.29134262, 0.02, 0]),
        (4096, [1, 0.87530386, 0.72565663, 0.54273653, 0.31405902, 0.02, 0]),
    ],
)
def test_the_last_noise_level_above_0_is_the_terminal_level(
    tokens: int, expected: list[float]
) -> None:
    """The expected levels are those of diffusers with the published configuration.

    Its `shift_terminal` is 0.02. A single step goes from 1 to 0.
    """
    np.testing.assert_allclose(QwenImage.schedule.levels(6, tokens), expected, atol=1e-6)
    assert QwenImage.schedule.levels(1, tokens) == [1.0, 0.0]


def test_captions_of_a_batch_do_not_affect_each_other(qwen_image_base: Path) -> None:
    family = families.load("qwen-image", qwen_image_base, "f32", "cpu").family
    sample, times = tc.randn((3, 16, 12, 8)), tc.tensor([200.0, 500.0, 700.0])
    features = family.features(CAPTIONS)
    lengths = features["lengths"].numpy().astype(int).tolist()
    assert lengths == [family.text_length(caption) for caption in CAPTIONS]
    assert len(set(lengths)) == 3
    together = family.predict(sample, times, features)
    for i, caption in enumerate(CAPTIONS):
        alone = family.predict(sample[i : i + 1], times[i : i + 1], family.features([caption]))
        np.testing.assert_allclose(alone.numpy()[0], together.numpy()[i], rtol=1e-4, atol=1e-5)


def test_guidance_gives_tokens_the_norms_of_the_prediction_for_the_prompt(
    qwen_image_base: Path,
) -> None:
    family = families.load("qwen-image", qwen_image_base, "f32", "cpu").family
    # The predictions with guidance and for the prompt alone.
    guided, positive = tc.randn((1, 16, 4, 6)), 3 * tc.randn((1, 16, 4, 6))

    def norms(x: tc.Tensor) -> np.ndarray:
        # A token is a square of 2x2 pixels of the latents with all channels. The tokens form 2 rows
        # and 3 columns.
        return np.sqrt((x.numpy().reshape(16, 2, 2, 3, 2) ** 2).sum((0, 2, 4)))

    found = family.rescaled(guided, positive)
    np.testing.assert_allclose(norms(found), norms(positive), rtol=1e-5)
    # All values of the first token have the same factor.
    ratio = found.numpy() / guided.numpy()
    np.testing.assert_allclose(ratio[:, :, :2, :2], ratio[0, 0, 0, 0], rtol=1e-4)


def test_the_negative_prompt_is_a_space_by_default(qwen_image_base: Path) -> None:
    task = families.load("qwen-image", qwen_image_base, "f32", "cpu")
    options = SampleOptions(steps=2, size=(16, 16))
    drawn = [
        task.draw(["a"], SampleOptions(steps=2, size=(16, 16), negative_prompt=negative))
        for negative in (" ", "noise")
    ]
    np.testing.assert_array_equal(task.draw(["a"], options), drawn[0])
    assert (drawn[0] != drawn[1]).any()


@pytest.fixture
def files(qwen_image_base: Path, tmp_path: Path) -> tuple[Path, TrainConfig]:
    """A file with the transformer, as ComfyUI loads it, and settings that name the other files."""
    stored = tc.load_file(next((qwen_image_base / "transformer").glob("*.safetensors")))
    path = tmp_path / "qwen_image.safetensors"
    tc.save_file({f"model.diffusion_model.{name}": t for name, t in stored.items()}, path)
    for part in ("transformer", "text_encoder"):
        (tmp_path / part).mkdir()
        shutil.copy(qwen_image_base / part / "config.json", tmp_path / part)
    encoder = tmp_path / "qwen_2.5_vl.safetensors"
    weights = tc.load_file(next((qwen_image_base / "text_encoder").glob("*.safetensors")))
    # A text encoder uses neither the head nor the vision encoder.
    unused = {"lm_head.weight": tc.ones((300, 40)), "visual.patch_embed.proj.weight": tc.ones((4,))}
    tc.save_file(weights | unused, encoder)
    vae = tmp_path / "vae.safetensors"
    tc.models.save_checkpoint(vae, {"vae": tc.models.load(qwen_image_base, subfolder="vae")})
    shutil.copytree(qwen_image_base / "tokenizer", tmp_path / "tokenizer")
    return path, TrainConfig(text_encoder=[str(encoder)], vae=str(vae))


def test_files_of_comfyui_draw_the_same_image(
    qwen_image_base: Path, files: tuple[Path, TrainConfig]
) -> None:
    path, config = files
    options = SampleOptions(steps=2, size=(16, 16))
    expected = families.load("qwen-image", qwen_image_base, "f32", "cpu").draw(["a"], options)
    found = families.load("qwen-image", path, "f32", "cpu", config).draw(["a"], options)
    np.testing.assert_array_equal(found, expected)


def test_fp8_files_hold_nearly_the_same_weights(
    qwen_image_base: Path, files: tuple[Path, TrainConfig], tmp_path: Path
) -> None:
    path, config = files
    fp8 = tmp_path / "fp8.safetensors"
    model = tc.models.load(qwen_image_base / "transformer")
    tc.models.save_checkpoint(fp8, {"transformer": model}, quantize={"transformer": "fp8"})
    stored = tc.load_file(fp8)
    assert "model.diffusion_model.transformer_blocks.0.attn.to_q.weight_scale" in stored
    found = families.load("qwen-image", fp8, "f32", "cpu", config).family.model.named_tensors()
    expected = families.load("qwen-image", path, "f32", "cpu", config).family.model.named_tensors()
    for name, tensor in expected.items():
        values = tensor.numpy()
        # Rounding to three fraction bits errs by up to 1/16, about 0.06. `atol` is for values near
        # 0, which have fewer bits.
        np.testing.assert_allclose(
            found[name].numpy(), values, rtol=0.07, atol=0.002 * np.abs(values).max(), err_msg=name
        )


def test_a_text_encoder_as_published_with_qwen_image_is_read(
    qwen_image_base: Path, tmp_path: Path
) -> None:
    """The published config.json has no `text_config`: its fields are at the top level.

    The names of the language model's tensors begin with `model.language_model`.
    """
    config = json.loads((qwen_image_base / "text_encoder" / "config.json").read_text())
    flat = config.pop("text_config")
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    del flat["rope_parameters"], flat["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(flat | config | rope))
    weights = tc.load_file(next((qwen_image_base / "text_encoder").glob("*.safetensors")))
    renamed = {name.replace("model.", "model.language_model.", 1): t for name, t in weights.items()}
    unused = {"lm_head.weight": tc.ones((300, 40)), "model.visual.norm.weight": tc.ones((4,))}
    tc.save_file(renamed | unused, tmp_path / "model.safetensors")
    found = CausalLM.from_pretrained(tmp_path, dtype="f32")
    expected = CausalLM.from_pretrained(qwen_image_base / "text_encoder", dtype="f32")
    # One text of three tokens: their ids, their positions, and the bounds of the text in the row.
    ids, positions_in_text, bounds = (
        tc.tensor(np.array(values)) for values in ([5, 80, 7], [0, 1, 2], [0, 3])
    )
    row = (ids, positions_in_text, bounds)
    np.testing.assert_array_equal(found.hidden(*row).numpy(), expected.hidden(*row).numpy())
    with pytest.raises(tc.ArgumentError, match="loaded as a text encoder, without its head"):
        found(ids.reshape(1, 3))
    # With `layers=1`, the tensors of the second layer and of the final norm are skipped.
    assert CausalLM.from_pretrained(tmp_path, dtype="f32", layers=1).num_hidden_layers == 1


@pytest.mark.parametrize("pipeline", ["QwenImageEditPipeline", "QwenImageLayeredPipeline"])
def test_folders_of_related_models_are_rejected(
    qwen_image_base: Path, tmp_path: Path, pipeline: str
) -> None:
    for part in qwen_image_base.iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    with pytest.raises(ConfigError, match=f"is a {pipeline}, which is not supported"):
        families.load("qwen-image", tmp_path, "f32", "cpu")


def test_a_text_encoder_of_another_width_is_rejected(qwen_image_base: Path, tmp_path: Path) -> None:
    for part in qwen_image_base.iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / "text_encoder").unlink()
    path = qwen_image_base / "text_encoder" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= {"hidden_size": 80, "num_attention_heads": 10}
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder" / "config.json").write_text(json.dumps(config))
    CausalLM.from_config(tmp_path / "text_encoder" / "config.json").save_pretrained(
        tmp_path / "text_encoder"
    )
    with pytest.raises(ConfigError, match=r"makes 80 features, .* reads 40"):
        families.load("qwen-image", tmp_path, "f32", "cpu")


def test_tokenizers_that_are_missing_or_damaged_are_reported(
    qwen_image_base: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(qwen_image_base, base)
    (base / "tokenizer" / "tokenizer.json").unlink()
    family = families.load("qwen-image", base, "f32", "cpu").family
    with pytest.raises(
        WeightsFormatError, match=r"there is no tokenizer.json or vocab.json of Qwen2.5-VL"
    ):
        family.features(["a"])
    (base / "tokenizer" / "vocab.json").write_text("[]")
    with pytest.raises(WeightsFormatError, match=r"vocab.json cannot be read"):
        family.features(["a"])
