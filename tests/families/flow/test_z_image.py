"""Z-Image: its chat template, the lengths of captions, its tokenizer, and distilled models."""

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
    thinking = PromptTokenizer.from_pretrained(folder, thinks=True)
    not_thinking = PromptTokenizer.from_pretrained(folder, thinks=False)
    # The library's template has "{}" where the caption goes. Here "{}" is the caption itself.
    tokens = thinking.encode("{}", 512)
    # The tokens are <|im_start|>, "user\n", "{}", <|im_end|>, "\n", <|im_start|>, "assistant\n".
    # Each byte of a quoted text is one token.
    assert len(tokens) == 1 + 5 + 2 + 1 + 1 + 1 + 10
    # Without thinking, empty thoughts follow: <think>, "\n\n", </think>, "\n\n".
    thoughts = not_thinking.encode("{}", 512)[len(tokens) :]
    assert len(thoughts) == 1 + 2 + 1 + 2
    # Both captions are truncated.
    assert thinking.encode("a" * 600, 512) == thinking.encode("a" * 900, 512)
    # One token for each byte, and five special tokens.
    assert thinking.size == 256 + 5


def test_features_are_padded_to_a_multiple_of_32_tokens(zimage_base: Path) -> None:
    family = families.load("zimage", zimage_base, "f32", "cpu").family
    batch = family.features(CAPTIONS)
    # Two captions of 64 tokens with 40 features each.
    assert batch["encoder_hidden_states"].shape == (2, 64, 40)
    # Z-Image's template adds no empty thoughts: it has 19 tokens. The second caption has 44 bytes.
    assert batch["lengths"].numpy().tolist() == [19, 63]
    # `text_length` counts multiples of 32 tokens.
    assert [family.text_length(caption) for caption in CAPTIONS] == [1, 2]
    alone = family.features(CAPTIONS[:1])["encoder_hidden_states"]
    assert alone.shape == (1, 32, 40)
    np.testing.assert_allclose(
        alone[:, :19].numpy(), batch["encoder_hidden_states"][:1, :19].numpy(), atol=1e-6
    )


def test_captions_of_a_batch_do_not_affect_each_other(zimage_base: Path) -> None:
    family = families.load("zimage", zimage_base, "f32", "cpu").family
    sample, times = tc.randn((2, 16, 12, 8)), tc.tensor([200.0, 700.0])
    together = family.predict(sample, times, family.features(CAPTIONS))
    for i, caption in enumerate(CAPTIONS):
        alone = family.predict(sample[i : i + 1], times[i : i + 1], family.features([caption]))
        np.testing.assert_allclose(alone.numpy()[0], together.numpy()[i], rtol=1e-4, atol=1e-5)


def test_the_tokenizer_is_found_beside_the_text_encoder(zimage_base: Path, tmp_path: Path) -> None:
    weights = tmp_path / "z.safetensors"
    transformer = tc.models.load(zimage_base / "transformer")
    tc.models.save_checkpoint(weights, {"transformer": transformer})
    for folder in ("transformer", "vae", "text_encoder", "scheduler"):
        shutil.copytree(zimage_base / folder, tmp_path / "parts" / folder)
    # The shapes in the file do not determine all sizes: the configuration in the folder
    # `transformer` beside it has them.
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
    pipeline = families.load("zimage", zimage_base, "f32", "cpu")
    np.testing.assert_array_equal(task.draw(["a"], options), pipeline.draw(["a"], options))


def test_a_note_says_that_training_undoes_a_distillation(zimage_base: Path, tmp_path: Path) -> None:
    def notes(name: str) -> list[str]:
        """The notes about a model in a folder of this name, which is given by a link to it."""
        (tmp_path / name).symlink_to(tmp_path / "models" / name)
        shutil.copytree(zimage_base, tmp_path / "models" / name)
        return families.load("zimage", tmp_path / name, "f32", "cpu").family.notes()

    # "De-Turbo" is a Turbo model whose distillation was already undone.
    assert notes("Z-Image") == notes("Z-Image-De-Turbo") == []
    assert "undoes its distillation" in notes("Z-Image-Turbo")[0]


def test_damaged_tokenizers_and_those_without_the_templates_tokens_are_reported(
    zimage_base: Path, tmp_path: Path
) -> None:
    text = (zimage_base / "tokenizer" / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|other|>"))
    with pytest.raises(
        WeightsFormatError, match=r"no '<\|im_end\|>'; expected the tokenizer of Qwen3"
    ):
        PromptTokenizer.from_pretrained(tmp_path, thinks=True)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsFormatError, match="cannot be read"):
        PromptTokenizer.from_pretrained(tmp_path, thinks=True)
