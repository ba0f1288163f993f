"""Properties that only FLUX.2-klein has.

The transformer reads the features of padding tokens. The autoencoder has a mean and a variance of
each latent channel. Some checkpoints are distilled.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.errors import ArgumentError, ConfigError
from trainable_candle.families.flux2 import Flux2
from trainable_candle.models import CausalLM
from trainable_candle.tasks.latent import SampleOptions
from trainable_candle.train import TrainConfig


def test_padding_tokens_attend_to_words_but_not_to_padding(flux2_base: Path) -> None:
    model = CausalLM.from_pretrained(flux2_base / "text_encoder", layers=3)
    words = tc.tensor(np.array([7, 3, 9], np.int64))
    padded = tc.tensor(np.array([7, 3, 9, 4, 5], np.int64))
    alone = model.hidden_states(words.reshape(1, 3), layers=[0, 1, 3])
    # The second argument is the number of tokens that are not padding.
    without_padding = model.padded_states(words, 3, [0, 1, 3])
    with_padding = model.padded_states(padded, 3, [0, 1, 3])
    for expected, short, long in zip(alone, without_padding, with_padding, strict=True):
        np.testing.assert_array_equal(short.numpy(), expected.numpy()[0])
        np.testing.assert_allclose(long.numpy()[:3], expected.numpy()[0], atol=1e-6)
    # Replacing a padding token changes the states of this token, but not those of the next one: a
    # padding token does not attend to other padding tokens.
    other = model.padded_states(tc.tensor(np.array([7, 3, 9, 8, 5], np.int64)), 3, [3])[0]
    last_states = with_padding[-1]  # also of layer 3
    assert (other.numpy()[3] != last_states.numpy()[3]).any()
    np.testing.assert_allclose(other.numpy()[4], last_states.numpy()[4], atol=1e-6)
    for count in (0, 6):
        with pytest.raises(ArgumentError, match=f"text_tokens is {count}, expected 1 to 5"):
            model.padded_states(padded, count, [1])


def test_latents_are_normalized_by_the_statistics_of_their_channels(flux2_base: Path) -> None:
    coder = families.load("flux2", flux2_base, "f32", "cpu").family.coder
    # Pixels of 4 x 4 become a position of the latents with 128 channels.
    assert (coder.channels, coder.factor) == (128, 4)
    pixels = np.random.default_rng(0).integers(0, 256, (1, 16, 24, 3), np.uint8)
    encoded = coder.encode(pixels)
    latents = coder.latents(encoded, normal=None)
    assert latents.shape == (1, 128, 4, 6)
    tensors = coder.model.named_tensors()
    mean, variance = (tensors[f"bn.running_{name}"].numpy() for name in ("mean", "var"))
    # The transformer's channel 4 c + 2 dy + dx holds channel c of the autoencoder at row dy and
    # column dx of each 2 x 2 patch. Channel 22 is c = 5, dy = 1, dx = 0.
    # At row 1 and column 3 of the latents, this is row 3 and column 6 of the autoencoder.
    value = encoded["mean"].numpy()[0, 5, 2 * 1 + 1, 2 * 3]
    expected = (value - mean[22]) / np.sqrt(variance[22] + 1e-4)  # `batch_norm_eps` is 1e-4.
    assert latents.numpy()[0, 22, 1, 3] == pytest.approx(expected, rel=1e-5)
    # The statistics remain, although this frees the autoencoder. `coder.model`, below, reads it
    # again.
    coder.drop()
    # The latents are the means of the distributions: the noise has no effect.
    with_noise = coder.latents(encoded, lambda: tc.ones(encoded["mean"].shape))
    np.testing.assert_array_equal(with_noise.numpy(), latents.numpy())
    drawn = coder.decode(latents)
    np.testing.assert_allclose(
        drawn.numpy(), coder.model.decode(encoded["mean"]).numpy(), atol=1e-4
    )


def test_distilled_models_are_recognized_by_their_index_or_file_name(
    flux2_base: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(flux2_base, folder)
    index = folder / "model_index.json"
    distilled = {"_class_name": "Flux2KleinPipeline", "is_distilled": True}
    index.write_text(json.dumps(distilled))
    family = families.load("flux2", folder, "f32", "cpu").family
    assert family.is_distilled
    assert family.drawing_defaults == (4, 1.0)  # The steps and the guidance scale of previews.
    assert "undoes its distillation" in family.notes()[0]
    for setting in ({"guidance": 4.0}, {"negative_prompt": "x"}):
        configured = Flux2(folder, "f32", "cpu", TrainConfig(**setting))
        with pytest.raises(ConfigError, match=r"has no effect on the distilled FLUX\.2-klein"):
            configured.check()
    index.write_text("{")
    with pytest.raises(ConfigError, match=r"model_index\.json"):
        _ = Flux2(folder, "f32", "cpu").is_distilled
    names = {"flux-2-klein-4b": True, "flux-2-klein-base-9b": False, "mine": False}
    for name, expected in names.items():
        family = Flux2(tmp_path / f"{name}.safetensors", "f32", "cpu")
        assert family.is_distilled is expected
        assert family.drawing_defaults == ((4, 1.0) if expected else (50, 4.0))


def test_original_files_with_a_separate_text_encoder_draw_the_same(
    flux2_base: Path, tmp_path: Path
) -> None:
    weights, vae = tmp_path / "flux-2-klein-base-4b.safetensors", tmp_path / "ae.safetensors"
    for part, path in (("transformer", weights), ("vae", vae)):
        tc.models.save_checkpoint(path, {part: tc.models.load(flux2_base / part)})
        # The shapes of tensors do not determine the widths of the rotary axes and the number of
        # groups in group norms. Loading therefore also reads these configurations.
        (tmp_path / part).mkdir()
        shutil.copy(flux2_base / part / "config.json", tmp_path / part)
    config = TrainConfig(text_encoder=[str(flux2_base / "text_encoder")], vae=str(vae))
    from_files = families.load("flux2", weights, "f32", "cpu", config)
    from_folder = families.load("flux2", flux2_base, "f32", "cpu")
    options = SampleOptions(steps=2, size=(16, 24), guidance=2.0)
    np.testing.assert_array_equal(from_files.draw(["a"], options), from_folder.draw(["a"], options))


def test_a_wrong_text_width_and_the_unsupported_dev_model_are_reported(
    flux2_base: Path, tmp_path: Path
) -> None:
    for field, value, message in (
        ("joint_attention_dim", 60, "makes 48 features, but the transformer reads 60"),
        ("guidance_embeds", True, "is FLUX.2-dev"),
    ):
        folder = tmp_path / field
        shutil.copytree(flux2_base, folder)
        path = folder / "transformer" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
        with pytest.raises(ConfigError, match=message):
            families.load("flux2", folder, "f32", "cpu")


@pytest.mark.parametrize("tied", [True, False], ids=["tied head", "own head"])
def test_a_single_file_of_qwen3_can_be_the_text_encoder(
    flux2_base: Path, tmp_path: Path, tied: bool
) -> None:
    """Without a configuration, the sizes of the model follow from the shapes of its tensors."""
    (weights,) = (flux2_base / "text_encoder").glob("*.safetensors")
    file = tmp_path / "qwen_3_8b.safetensors"
    head = {} if tied else {"lm_head.weight": tc.randn((300, 16))}
    tc.save_file(tc.load_file(weights) | head, file)
    shutil.copytree(flux2_base / "tokenizer", tmp_path / "tokenizer")
    config = TrainConfig(text_encoder=[str(file)])
    from_file = families.load("flux2", flux2_base, "f32", "cpu", config).family.features(["a"])
    from_folder = families.load("flux2", flux2_base, "f32", "cpu").family.features(["a"])
    name = "encoder_hidden_states"
    np.testing.assert_array_equal(from_file[name].numpy(), from_folder[name].numpy())
    assert tc.inspect(file).parts["text_encoder"].config["tie_word_embeddings"] is tied
