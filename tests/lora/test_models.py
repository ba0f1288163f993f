"""Several LoRAs on one model, and LoRAs that are extracted from the difference of two models."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle.cli import main
from trainable_candle.errors import ConfigError
from trainable_candle.lora import extract
from trainable_candle.lora.stack import stacked
from trainable_candle.models import SDXLUNet

LAYER = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"


def unet(base: Path) -> SDXLUNet:
    return SDXLUNet.from_pretrained(base, "f32", subfolder="unet")


def adapter(base: Path, path: Path, seed: int, rank: int = 2, **config: object) -> Path:
    """Write the file of an adapter whose LoRAs have random values; return its path."""
    model = unet(base)
    tc.manual_seed(seed)
    made = model.add_adapter(tc.LoraConfig(r=rank, lora_alpha=4.0, **config))  # type: ignore[arg-type]
    for var in made.parameters():
        var.set(tc.randn(*var.shape) * 0.1)
    made.save(path)
    return path


def weights(model: SDXLUNet) -> dict[str, np.ndarray]:
    model.merge_adapter()
    return {name: t.to("f32").numpy() for name, t in model.named_tensors().items()}


def test_changes_of_several_files_are_summed(sdxl_base: Path, tmp_path: Path) -> None:
    targets = ["to_q", "ff.net.2"]
    files = [
        (adapter(sdxl_base, tmp_path / "a.safetensors", 1, target_modules=targets), 0.5),
        (adapter(sdxl_base, tmp_path / "b.safetensors", 2, 3, target_modules="all-linear"), 2.0),
        (adapter(sdxl_base, tmp_path / "c.safetensors", 3, target_modules="all-conv"), -1.0),
    ]
    before = {name: t.to("f32").numpy() for name, t in unet(sdxl_base).named_tensors().items()}
    expected = dict(before)
    for path, scale in files:
        model = unet(sdxl_base)
        model.load_adapter(path, scale=scale)
        after = weights(model)
        expected = {name: expected[name] + after[name] - before[name] for name in expected}
    model = unet(sdxl_base)
    stacked(model, files)
    for name, value in weights(model).items():
        np.testing.assert_allclose(value, expected[name], atol=2e-5, err_msg=name)


def test_several_adapters_must_all_be_loras(sdxl_base: Path, tmp_path: Path) -> None:
    one = adapter(sdxl_base, tmp_path / "a.safetensors", 1, target_modules=["to_q"])
    dora = adapter(sdxl_base, tmp_path / "b.safetensors", 2, adapter="dora")
    with pytest.raises(ConfigError, match="adapters other than LoRA, and only LoRAs add up"):
        stacked(unet(sdxl_base), [(one, 1.0), (dora, 1.0)])


def test_the_difference_of_two_models_can_be_extracted_as_a_lora(
    sdxl_base: Path, tmp_path: Path
) -> None:
    path = adapter(sdxl_base, tmp_path / "a.safetensors", 1, target_modules=["to_q", "conv1"])
    tuned = unet(sdxl_base)
    tuned.load_adapter(path)
    tuned.merge_adapter()
    tuned.save_pretrained(tmp_path / "tuned")
    tuned = SDXLUNet.from_pretrained(tmp_path / "tuned", "f32")
    base = unet(sdxl_base)
    layers = [n.removesuffix(".weight") for n in base.named_tensors() if n.endswith("to_q.weight")]
    convs = [n.removesuffix(".weight") for n in base.named_tensors() if n.endswith("conv1.weight")]
    found = extract(base, tuned, [*layers, *convs, "time_embedding.linear_1"], rank=2)
    # The two models differ in `layers` and `convs`, by changes of rank 2. The layer
    # time_embedding.linear_1 is equal in both models, so it gets no adapter.
    assert set(found.config.rank_pattern) == {*layers, *convs}
    expected = {name: t.to("f32").numpy() for name, t in tuned.named_tensors().items()}
    for name, value in weights(base).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)
    with pytest.raises(ConfigError, match="the models are equal in all given layers"):
        extract(unet(sdxl_base), unet(sdxl_base), layers, rank=2)


def test_extract_writes_a_file_that_other_tools_read(
    sdxl_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = adapter(sdxl_base, tmp_path / "a.safetensors", 1, target_modules=["to_q"])
    model = ["--model", "sdxl", "--weights", str(sdxl_base)]
    merged = tmp_path / "merged"
    model += ["--precision", "f32"]
    assert main(["merge", *model, "--adapter", str(path), "--output", str(merged)]) == 0
    output = tmp_path / "found.safetensors"
    arguments = ["extract", *model, "--tuned", str(merged), "--rank", "2"]
    assert main([*arguments, "--target-modules", "to_q,to_k", "--output", str(output)]) == 0
    assert "adapter: " in capsys.readouterr().out
    one, other = unet(sdxl_base), unet(sdxl_base)
    one.load_adapter(path)
    other.load_adapter(output)
    expected = weights(one)
    for name, value in weights(other).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


def test_sample_draws_with_several_adapters(
    sdxl_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [adapter(sdxl_base, tmp_path / f"{n}.safetensors", n) for n in (1, 2)]
    draw = ["sample", "--model", "sdxl", "--weights", str(sdxl_base), "--steps", "1"]
    draw += ["--prompt", "a cat --w 64 --h 64 --d 3", "--prompt", "a dog --w 64 --h 32"]
    adapters = [part for path in files for part in ("--adapter", str(path))]
    combined = tmp_path / "both.safetensors"
    assert main(["combine", *adapters, "--scale", "0.5", "--output", str(combined)]) == 0
    together, alone = tmp_path / "together.png", tmp_path / "alone.png"
    assert main([*draw, *adapters, "--scale", "0.5", "--output", str(together)]) == 0
    assert main([*draw, "--adapter", str(combined), "--output", str(alone)]) == 0
    with Image.open(together) as one, Image.open(alone) as other:
        difference = np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16))
        assert difference.max() <= 2
        text = one.text["parameters"]  # type: ignore[attr-defined]
    assert "Seed: 3, Size: 64x64" in text
    assert "Size: 64x32" in text
    assert main([*draw, "--output", str(alone)]) == 2
    assert "which exists" in capsys.readouterr().err
