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


def unet(base: Path) -> SDXLUNet:
    return SDXLUNet.from_pretrained(base, "f32", subfolder="unet")


def write_adapter(base: Path, path: Path, seed: int, rank: int = 2, **config: object) -> Path:
    """Write the file of an adapter with random values; return its path."""
    model = unet(base)
    tc.manual_seed(seed)
    adapter = model.add_adapter(tc.LoraConfig(r=rank, lora_alpha=4.0, **config))  # type: ignore[arg-type]
    for var in adapter.parameters():
        var.set(tc.randn(*var.shape) * 0.1)
    adapter.save(path)
    return path


def merged_weights(model: SDXLUNet) -> dict[str, np.ndarray]:
    """Merge the adapter; return the weights."""
    model.merge_adapter()
    return {name: t.to("f32").numpy() for name, t in model.named_tensors().items()}


def test_changes_of_several_files_are_summed(sdxl_base: Path, tmp_path: Path) -> None:
    targets = ["to_q", "ff.net.2"]
    # Pairs of a file and its scale. Some layers are adapted in several files.
    files = [
        (write_adapter(sdxl_base, tmp_path / "a.safetensors", 1, target_modules=targets), 0.5),
        (
            write_adapter(
                sdxl_base, tmp_path / "b.safetensors", 2, rank=3, target_modules="all-linear"
            ),
            2.0,
        ),
        (write_adapter(sdxl_base, tmp_path / "c.safetensors", 3, target_modules="all-conv"), -1.0),
    ]
    before = {name: t.to("f32").numpy() for name, t in unet(sdxl_base).named_tensors().items()}
    expected = dict(before)
    for path, scale in files:
        model = unet(sdxl_base)
        model.load_adapter(path, scale=scale)
        after = merged_weights(model)
        expected = {name: expected[name] + after[name] - before[name] for name in expected}
    model = unet(sdxl_base)
    stacked(model, files)
    for name, value in merged_weights(model).items():
        np.testing.assert_allclose(value, expected[name], atol=2e-5, err_msg=name)


def test_several_adapters_must_all_be_loras(sdxl_base: Path, tmp_path: Path) -> None:
    one = write_adapter(sdxl_base, tmp_path / "a.safetensors", 1, target_modules=["to_q"])
    dora = write_adapter(sdxl_base, tmp_path / "b.safetensors", 2, adapter="dora")
    with pytest.raises(ConfigError, match="adapters other than LoRA, and only LoRAs add up"):
        stacked(unet(sdxl_base), [(one, 1.0), (dora, 1.0)])


def test_the_difference_of_two_models_can_be_extracted_as_a_lora(
    sdxl_base: Path, tmp_path: Path
) -> None:
    path = write_adapter(sdxl_base, tmp_path / "a.safetensors", 1, target_modules=["to_q", "conv1"])
    tuned = unet(sdxl_base)
    tuned.load_adapter(path)
    tuned.merge_adapter()
    tuned.save_pretrained(tmp_path / "tuned")
    tuned = SDXLUNet.from_pretrained(tmp_path / "tuned", "f32")
    base = unet(sdxl_base)
    linear = [n.removesuffix(".weight") for n in base.named_tensors() if n.endswith("to_q.weight")]
    convs = [n.removesuffix(".weight") for n in base.named_tensors() if n.endswith("conv1.weight")]
    lora = extract(base, tuned, [*linear, *convs, "time_embedding.linear_1"], rank=2)
    # The two models differ in `linear` and `convs`, by changes of rank 2. The layer
    # time_embedding.linear_1 is equal in both models, so it gets no adapter.
    assert set(lora.config.rank_pattern) == {*linear, *convs}
    expected = {name: t.to("f32").numpy() for name, t in tuned.named_tensors().items()}
    for name, value in merged_weights(base).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


def test_no_lora_is_extracted_from_equal_models(sdxl_base: Path) -> None:
    base = unet(sdxl_base)
    layers = [n.removesuffix(".weight") for n in base.named_tensors() if n.endswith("to_q.weight")]
    with pytest.raises(ConfigError, match="the models are equal in all given layers"):
        extract(base, unet(sdxl_base), layers, rank=2)


def test_the_extract_command_recovers_a_merged_lora(
    sdxl_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_adapter(sdxl_base, tmp_path / "a.safetensors", 1, target_modules=["to_q"])
    base = ["--model", "sdxl", "--weights", str(sdxl_base), "--precision", "f32"]
    merged = tmp_path / "merged"
    assert main(["merge", *base, "--adapter", str(path), "--output", str(merged)]) == 0
    output = tmp_path / "extracted.safetensors"
    arguments = ["extract", *base, "--tuned", str(merged), "--rank", "2"]
    assert main([*arguments, "--target-modules", "to_q,to_k", "--output", str(output)]) == 0
    assert "adapter: " in capsys.readouterr().out
    original, extracted = unet(sdxl_base), unet(sdxl_base)
    original.load_adapter(path)
    extracted.load_adapter(output)
    expected = merged_weights(original)
    for name, value in merged_weights(extracted).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


def test_sample_draws_with_several_adapters_and_overwrites_no_image(
    sdxl_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write_adapter(sdxl_base, tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2)]
    # In a prompt, --w and --h give the size of its image, and --d the seed. `sample` writes the
    # images of all prompts to one file, in a grid. A single --scale is for all adapters.
    draw = ["sample", "--model", "sdxl", "--weights", str(sdxl_base), "--steps", "1"]
    draw += ["--prompt", "a cat --w 64 --h 64 --d 3", "--prompt", "a dog --w 64 --h 32"]
    adapters = [part for path in files for part in ("--adapter", str(path))]
    combined = tmp_path / "combined.safetensors"
    assert main(["combine", *adapters, "--scale", "0.5", "--output", str(combined)]) == 0
    of_both, of_combined = tmp_path / "both.png", tmp_path / "combined.png"
    assert main([*draw, *adapters, "--scale", "0.5", "--output", str(of_both)]) == 0
    assert main([*draw, "--adapter", str(combined), "--output", str(of_combined)]) == 0
    with Image.open(of_both) as one, Image.open(of_combined) as other:
        difference = np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16))
        assert difference.max() <= 2
        text = one.text["parameters"]  # type: ignore[attr-defined]
    assert "Seed: 3, Size: 64x64" in text
    assert "Size: 64x32" in text
    # The file of the output exists by now.
    assert main([*draw, "--output", str(of_combined)]) == 2
    assert "which exists" in capsys.readouterr().err
