"""Properties that only Chroma has.

Chroma has one text encoder. Its transformer reads one padding token per caption. Its files resemble
Flux's.
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
    """A file is recognized by the names of its tensors: original names or those of diffusers."""
    classes = {"flux": tc.models.FluxTransformer, "chroma": tc.models.ChromaTransformer}
    for base, other, title in ((chroma_base, "flux", "Chroma"), (flux_base, "chroma", "Flux")):
        original = tmp_path / f"{other}.safetensors"
        tc.models.save_checkpoint(original, {"transformer": tc.models.load(base / "transformer")})
        (own,) = (base / "transformer").glob("*.safetensors")
        bare = tmp_path / other / own.name
        bare.parent.mkdir()
        shutil.copy(own, bare)
        for file in (original, bare):
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
    sample = tc.randn(3, 16, 4, 6)
    expected = [
        family.predict(sample[i : i + 1], times, family.features([caption])).numpy()
        for i, caption in enumerate(captions)
    ]
    found = family.predict(sample, tc.cat([times] * 3), together).numpy()
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-4, atol=1e-5)


def test_drawing_needs_no_mask(chroma_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and a negative prompt of different lengths go through the model separately."""
    task = families.load("chroma", chroma_base, "f32", "cpu")
    found = []
    predict = task.family.predict

    def counted(sample: tc.Tensor, times: tc.Tensor, conditions: Inputs) -> tc.Tensor:
        found.append((sample.shape[0], conditions["encoder_hidden_states"].shape[1]))
        return predict(sample, times, conditions)

    monkeypatch.setattr(task.family, "predict", counted)
    task.draw(["a red blur"], SampleOptions(steps=2, size=(16, 16), guidance=2.0))
    negative, positive = (1, 2), (1, task.family.text_length("a red blur"))
    assert positive[1] > 2
    assert found == [negative, positive] * 2


def test_chroma_flash_is_recognized_by_its_name(chroma_base: Path, tmp_path: Path) -> None:
    for name, is_distilled in (("Chroma1-Flash", True), ("Chroma1-HD", False)):
        shutil.copytree(chroma_base, tmp_path / name)
        notes = Chroma(tmp_path / name, "f32", "cpu").notes()
        assert any("undoes its distillation" in note for note in notes) is is_distilled
