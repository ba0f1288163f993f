"""Properties that only Chroma has.

The transformer reads one padding token after each caption. Files of Chroma resemble those of Flux.
The checkpoint Chroma1-Flash is distilled.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.errors import WeightsFormatError
from trainable_candle.families.chroma import Chroma
from trainable_candle.tasks.latent import SampleOptions
from trainable_candle.train.trainer import Inputs


def test_files_of_chroma_and_of_flux_are_distinguished(
    chroma_base: Path, flux_base: Path, tmp_path: Path
) -> None:
    """Each is rejected as the other, by the names of its tensors: original ones or diffusers'."""
    classes = {"flux": tc.models.FluxTransformer, "chroma": tc.models.ChromaTransformer}
    for base, other, title in ((chroma_base, "flux", "Chroma"), (flux_base, "chroma", "Flux")):
        original = tmp_path / f"{other}.safetensors"
        tc.models.save_checkpoint(original, {"transformer": tc.models.load(base / "transformer")})
        # A file with diffusers' names, in a folder without a configuration.
        (stored,) = (base / "transformer").glob("*.safetensors")
        diffusers = tmp_path / other / stored.name
        diffusers.parent.mkdir()
        shutil.copy(stored, diffusers)
        for file in (original, diffusers):
            with pytest.raises(WeightsFormatError, match="it has no transformer"):
                families.load(other, file, "f32", "cpu")
            with pytest.raises(WeightsFormatError, match=f"the file is .* {title}"):
                classes[other].from_pretrained(file)


def test_captions_of_a_batch_do_not_affect_each_other(chroma_base: Path) -> None:
    """A prediction for one caption does not depend on the lengths of the batch's other captions."""
    family = families.load("chroma", chroma_base, "f32", "cpu").family
    captions = ["", "a red blur of many words", "a blur"]
    together = family.features(captions)
    assert together["encoder_hidden_states"].shape[1] == max(map(family.text_length, captions))
    times = tc.tensor(np.array([300.0], np.float32))
    latents = tc.randn(3, 16, 4, 6)
    expected = [
        family.predict(latents[i : i + 1], times, family.features([caption])).numpy()
        for i, caption in enumerate(captions)
    ]
    found = family.predict(latents, tc.cat([times] * 3), together).numpy()
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-4, atol=1e-5)


def test_prompts_of_different_lengths_are_not_padded(
    chroma_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model runs on the negative prompt and on the prompt separately, so it needs no mask."""
    task = families.load("chroma", chroma_base, "f32", "cpu")
    shapes = []
    predict = task.family.predict

    def record_shapes(sample: tc.Tensor, times: tc.Tensor, conditions: Inputs) -> tc.Tensor:
        shapes.append((sample.shape[0], conditions["encoder_hidden_states"].shape[1]))
        return predict(sample, times, conditions)

    monkeypatch.setattr(task.family, "predict", record_shapes)
    task.draw(["a red blur"], SampleOptions(steps=2, size=(16, 16), guidance=2.0))
    # The batch size and the number of text tokens. The empty prompt has the end token and one
    # padding token.
    negative, positive = (1, 2), (1, task.family.text_length("a red blur"))
    assert positive[1] > 2
    assert shapes == [negative, positive] * 2  # two steps


def test_chroma_flash_is_recognized_by_its_name(chroma_base: Path, tmp_path: Path) -> None:
    for name, is_distilled in (("Chroma1-Flash", True), ("Chroma1-HD", False)):
        shutil.copytree(chroma_base, tmp_path / name)
        notes = Chroma(tmp_path / name, "f32", "cpu").notes()
        assert any("undoes its distillation" in note for note in notes) is is_distilled
