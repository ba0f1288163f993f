"""Properties of Z-Image: its chat template, caption lengths, tokenizer and distilled models."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.errors import WeightsFormatError
from trainable_candle.tasks.latent import SampleOptions
from trainable_candle.text.prompt_tokenizer import PromptTokenizer
from trainable_candle.train import TrainConfig

CAPTIONS = ("", "a red blur on a blue ground, seen from above")


def test_captions_are_wrapped_in_the_template(zimage_base: Path) -> None:
    folder = zimage_base / "tokenizer"
    plain, quiet = (PromptTokenizer.from_pretrained(folder, thinks=t) for t in (True, False))
    tokens = plain.encode("{}", 512)
    # The tokens are <|im_start|>, "user\n", "{}", <|im_end|>, "\n", <|im_start|>, "assistant\n".
    # Each byte of a quoted text is one token.
    assert len(tokens) == 1 + 5 + 2 + 1 + 1 + 1 + 10
    thoughts = quiet.encode("{}", 512)[len(tokens) :]
    assert len(thoughts) == 1 + 2 + 1 + 2
    assert plain.encode("a" * 600, 512) == plain.encode("a" * 900, 512)
    assert plain.size == 256 + 5


def test_features_are_padded_to_a_multiple_of_32_tokens(zimage_base: Path) -> None:
    family = families.load("zimage", zimage_base, "f32", "cpu").family
    made = family.features(CAPTIONS)
    assert made["encoder_hidden_states"].shape == (2, 64, 40)
    assert made["lengths"].numpy().tolist() == [19, 63]
    assert [family.text_length(caption) for caption in CAPTIONS] == [1, 2]
    one = family.features(CAPTIONS[:1])["encoder_hidden_states"]
    assert one.shape == (1, 32, 40)
    np.testing.assert_allclose(
        one[:, :19].numpy(), made["encoder_hidden_states"][:1, :19].numpy(), atol=1e-6
    )


def test_captions_of_a_batch_do_not_affect_each_other(zimage_base: Path) -> None:
    family = families.load("zimage", zimage_base, "f32", "cpu").family
    sample, times = tc.randn((2, 16, 12, 8)), tc.tensor([200.0, 700.0])
    whole = family.predict(sample, times, family.features(CAPTIONS))
    for i, caption in enumerate(CAPTIONS):
        one = family.predict(sample[i : i + 1], times[i : i + 1], family.features([caption]))
        np.testing.assert_allclose(one.numpy()[0], whole.numpy()[i], rtol=1e-4, atol=1e-5)


def test_the_tokenizer_is_found_beside_the_text_encoder(zimage_base: Path, tmp_path: Path) -> None:
    weights = tmp_path / "z.safetensors"
    transformer = tc.models.load(zimage_base / "transformer")
    tc.models.save_checkpoint(weights, {"transformer": transformer})
    for folder in ("transformer", "vae", "text_encoder", "scheduler"):
        shutil.copytree(zimage_base / folder, tmp_path / "parts" / folder)
    (tmp_path / "transformer").mkdir()
    shutil.copy(zimage_base / "transformer" / "config.json", tmp_path / "transformer")
    parts = tmp_path / "parts"
    config = TrainConfig(text_encoder=[str(parts / "text_encoder")], vae=str(parts / "vae"))
    task = families.load("zimage", weights, "f32", "cpu", config)
    options = SampleOptions(steps=1, size=(16, 16), guidance=1.0)
    with pytest.raises(
        WeightsFormatError, match=r"there is no tokenizer.json or vocab.json of Qwen3"
    ):
        task.draw(["a"], options)
    shutil.copytree(zimage_base / "tokenizer", parts / "tokenizer")
    task = families.load("zimage", weights, "f32", "cpu", config)
    whole = families.load("zimage", zimage_base, "f32", "cpu")
    np.testing.assert_array_equal(task.draw(["a"], options), whole.draw(["a"], options))


def test_training_a_distilled_model_gives_a_warning(zimage_base: Path, tmp_path: Path) -> None:
    def notes(name: str) -> list[str]:
        (tmp_path / name).symlink_to(tmp_path / "models" / name)
        shutil.copytree(zimage_base, tmp_path / "models" / name)
        return families.load("zimage", tmp_path / name, "f32", "cpu").family.notes()

    assert notes("Z-Image") == notes("Z-Image-De-Turbo") == []
    assert "undoes its distillation" in notes("Z-Image-Turbo")[0]


def test_files_without_the_template_are_reported(zimage_base: Path, tmp_path: Path) -> None:
    text = (zimage_base / "tokenizer" / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|other|>"))
    with pytest.raises(
        WeightsFormatError, match=r"no '<\|im_end\|>'; expected the tokenizer of Qwen3"
    ):
        PromptTokenizer.from_pretrained(tmp_path, thinks=True)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsFormatError, match="cannot be read"):
        PromptTokenizer.from_pretrained(tmp_path, thinks=True)
