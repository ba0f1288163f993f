"""`merge --to nf4` writes image models as folders in the format of bitsandbytes, for diffusers."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.families.merging import losses_in, make_adapter, merge

import trainable_candle as tc
from trainable_candle.families.pipeline.facts import DENOISERS

FAMILIES = ("sdxl", "sd3", "flux", "chroma", "zimage", "flux2", "qwen-image")
# The values of the 16 codes of NF4.
VALUES = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], np.float32)  # fmt: skip


@pytest.fixture(params=FAMILIES)
def base(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """Return the name of a family and the folder of its tiny pipeline."""
    name = request.param
    return name, request.getfixturevalue(f"{name.replace('-', '_')}_base")


def denoiser_of(folder: Path) -> str:
    """Return the name of the denoiser's folder in a pipeline's folder."""
    return next(name for name in DENOISERS if (folder / name).is_dir())


def merged(name: str, weights: Path, output: Path, *flags: str) -> int:
    """Run `merge`; return its exit status."""
    return merge(["--model", name, "--weights", str(weights)], output, *flags)


def nf4(values: np.ndarray) -> np.ndarray:
    """Round values to NF4 with an f32 scale for each block of 64; the last block may be smaller."""
    flat = values.reshape(-1)
    found = np.empty_like(flat)
    middles = (VALUES[1:] + VALUES[:-1]) / 2
    for start in range(0, flat.size, 64):
        block = flat[start : start + 64]
        scale = np.abs(block).max()
        # As in bitsandbytes, only an incomplete block is divided by its scale; the values of other
        # blocks are multiplied by the rounded reciprocal.
        normalized = block * (np.float32(1) / scale) if block.size == 64 else block / scale
        found[start : start + 64] = VALUES[np.searchsorted(middles, normalized)] * scale
    return found.reshape(values.shape)


def test_the_folder_holds_the_rounded_merged_weights(
    base: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, weights = base
    part = denoiser_of(weights)
    adapter = make_adapter(weights, part, tmp_path / "adapter.safetensors")
    flags, output = ("--adapter", str(adapter)), tmp_path / "nf4"
    assert merged(name, weights, tmp_path / "plain", *flags) == 0
    assert merged(name, weights, output, *flags, "--to", "nf4") == 0
    assert f"merged model: {output}" in capsys.readouterr().out
    files = sorted(path.relative_to(tmp_path / "plain") for path in (tmp_path / "plain").rglob("*"))
    assert files == sorted(path.relative_to(output) for path in output.rglob("*"))

    stored = tc.load_file(next((output / part).glob("*.safetensors")))
    state = ".quant_state.bitsandbytes__nf4"
    quantized = {key.removesuffix(state) for key in stored if key.endswith(state)}
    plain = tc.load_file(next((tmp_path / "plain" / part).glob("*.safetensors")))
    found = tc.models.load(output, subfolder=part, dtype="f32").named_tensors()
    assert found.keys() == plain.keys()
    for key, value in plain.items():
        expected = nf4(value.numpy()) if key in quantized else value.numpy()
        np.testing.assert_array_equal(found[key].numpy(), expected, key)
        beside_codes = {other for other in stored if other.startswith(f"{key}.")}
        suffixes = (".absmax", ".quant_map", state) if key in quantized else ()
        assert beside_codes == {f"{key}{suffix}" for suffix in suffixes}

    # `merge` quantizes the layers that --base-precision nf4 quantizes. It also quantizes the last
    # layer if the blocks have a layer of the same name: a list of skipped layers with this name
    # would make diffusers skip the layers of the blocks, too.
    rounded = tc.models.load(weights, subfolder=part, dtype="f32", quantize="nf4").named_tensors()
    before = tc.models.load(weights, subfolder=part, dtype="f32").named_tensors()
    changed = {k for k, v in rounded.items() if not np.array_equal(v.numpy(), before[k].numpy())}
    last = {"proj_out.weight"} if name in {"flux", "chroma"} else set()
    assert quantized == changed | last
    assert len(quantized) > len(last)

    # A model loaded in NF4 has the codes of the file: nothing is rounded twice.
    again = tc.models.load(output, subfolder=part, dtype="f32", quantize="nf4").named_tensors()
    for key, tensor in found.items():
        np.testing.assert_array_equal(again[key].numpy(), tensor.numpy(), key)
    facts = tc.inspect(output, name).parts[part]
    assert facts.stored_format == "nf4"


def test_the_configuration_names_the_layers_that_are_not_quantized(
    base: tuple[str, Path], tmp_path: Path
) -> None:
    """diffusers quantizes every linear layer that `llm_int8_skip_modules` does not name."""
    name, weights = base
    part = denoiser_of(weights)
    assert merged(name, weights, tmp_path / "nf4", "--to", "nf4") == 0
    config = json.loads((tmp_path / "nf4" / part / "config.json").read_text())
    found = config.pop("quantization_config")
    assert found.pop("llm_int8_skip_modules") == sorted(unquantized_layers(tmp_path / "nf4" / part))
    assert found == {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
    }
    plain = tc.models.load(weights, subfolder=part, dtype="f32")
    plain.save_pretrained(tmp_path / "plain")
    assert config == json.loads((tmp_path / "plain" / "config.json").read_text())


def unquantized_layers(folder: Path) -> set[str]:
    """Return the names of the layers in a folder whose weights are matrices without codes."""
    stored = tc.load_file(next(folder.glob("*.safetensors")))
    return {
        key.removesuffix(".weight")
        for key, tensor in stored.items()
        # Codes are u8.
        if key.endswith(".weight") and tensor.ndim == 2 and str(tensor.dtype) != "u8"
    }


def test_the_losses_before_and_after_rounding_are_reported(
    base: tuple[str, Path],
    tmp_path: Path,
    sdxl_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rounding changes the loss, but by less than 20 %."""
    name, weights = base
    adapter = make_adapter(weights, denoiser_of(weights), tmp_path / "adapter.safetensors")
    data = ("--dataset", str(sdxl_folder), "--resolution", "32", "--max-side", "48")
    flags = ("--adapter", str(adapter), "--to", "nf4", *data)
    assert merged(name, weights, tmp_path / "nf4", *flags) == 0
    printed = capsys.readouterr().out
    assert "loss: adapter not merged " in printed
    assert ", merged and quantized " in printed
    before, after = losses_in(printed)
    assert after != before
    assert abs(after - before) < 0.2 * before


def test_a_base_in_one_file_and_wrong_outputs_are_errors_before_loading(
    flux_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "transformer.safetensors"
    tc.models.save_checkpoint(file, {"transformer": tc.models.load(flux_base / "transformer")})
    # The data set is missing. Reading it would raise another error.
    given = ("--to", "nf4", "--dataset", str(tmp_path / "missing"))
    parts = ("--vae", str(flux_base / "vae"))
    parts += ("--text-encoder", str(flux_base / "text_encoder"))
    parts += ("--text-encoder", str(flux_base / "text_encoder_2"))
    assert merged("flux", file, tmp_path / "nf4", *given, *parts) == 2
    error = capsys.readouterr().err
    assert "is one file; give the model's folder, or give --to fp8" in error
    assert merged("flux", flux_base, tmp_path / "nf4.safetensors", *given) == 2
    assert "--to nf4 writes a folder for diffusers; give the name of a new folder" in (
        capsys.readouterr().err
    )
    (full := tmp_path / "full").mkdir()
    (full / "file").touch()
    assert merged("flux", flux_base, full, *given) == 2
    assert f"--output is {full}, which exists; expected a new or an empty folder" in (
        capsys.readouterr().err
    )
    assert [path.name for path in full.iterdir()] == ["file"]


def test_save_pretrained_rejects_what_cannot_be_quantized(flux_base: Path, tmp_path: Path) -> None:
    model = tc.models.load(flux_base / "transformer", dtype="f32")
    with pytest.raises(tc.errors.ArgumentError, match="fp8, expected nf4 in a folder; save_checkp"):
        model.save_pretrained(tmp_path / "fp8", quantize="fp8")
    vae = tc.models.load(flux_base, subfolder="vae")
    with pytest.raises(tc.errors.ArgumentError, match="no layers that may be quantized"):
        vae.save_pretrained(tmp_path / "vae", quantize="nf4")
    wide = tc.models.load(flux_base / "transformer", dtype="f64")
    with pytest.raises(tc.errors.DTypeError, match="has dtype f64, expected f32, f16 or bf16"):
        wide.save_pretrained(tmp_path / "wide", quantize="nf4")
    assert list(tmp_path.iterdir()) == []


# The class of each family's denoiser in diffusers.
CLASSES = {
    "sdxl": "UNet2DConditionModel",
    "sd3": "SD3Transformer2DModel",
    "flux": "FluxTransformer2DModel",
    "chroma": "ChromaTransformer2DModel",
    "zimage": "ZImageTransformer2DModel",
    "flux2": "Flux2Transformer2DModel",
    "qwen-image": "QwenImageTransformer2DModel",
}


# The code of diffusers for Chroma uses a deprecated name.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_diffusers_loads_the_same_weights(
    base: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    functional = pytest.importorskip("bitsandbytes").functional
    pytest.importorskip("accelerate")
    quantizers = pytest.importorskip("diffusers.quantizers.bitsandbytes")
    # diffusers requires a GPU for bitsandbytes, although bitsandbytes also dequantizes on the CPU.
    quantizer = quantizers.BnB4BitDiffusersQuantizer
    monkeypatch.setattr(quantizer, "validate_environment", lambda *_, **__: None)
    name, weights = base
    part = denoiser_of(weights)
    assert merged(name, weights, tmp_path / "nf4", "--to", "nf4") == 0
    ours = tc.models.load(tmp_path / "nf4", subfolder=part, dtype="f32").named_tensors()
    model = getattr(diffusers, CLASSES[name]).from_pretrained(
        tmp_path / "nf4", subfolder=part, device_map={"": "cpu"}, torch_dtype=torch.float32
    )
    quantized = 0
    for key, value in model.named_parameters():
        state = getattr(value, "quant_state", None)
        if state is not None:
            quantized += 1
            value = functional.dequantize_4bit(value.data, state)  # noqa: PLW2901
        np.testing.assert_array_equal(value.detach().float().numpy(), ours[key].numpy(), key)
    assert quantized > 0


def test_notes_depend_on_the_stored_format_of_the_base(
    flux_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(flux_base, "transformer", tmp_path / "plain.safetensors")
    trained = tmp_path / "trained.safetensors"
    tc.save_file(tc.load_file(adapter), trained, {"trainable_candle.base_precision": "nf4"})
    flags = ("--adapter", str(trained))
    assert merged("flux", flux_base, tmp_path / "1", *flags) == 0
    assert "over a base in nf4, but here the base is in its own" in capsys.readouterr().out
    # The dequantized values of an NF4 folder are those over which the adapter was trained.
    assert merged("flux", flux_base, tmp_path / "nf4", "--to", "nf4") == 0
    assert merged("flux", tmp_path / "nf4", tmp_path / "2", *flags) == 0
    found = capsys.readouterr().out
    assert "over a base" not in found
    assert "note: the base was dequantized from nf4" in found
    # The format of a text encoder does not count.
    part = tmp_path / "2" / "text_encoder_2"
    tc.models.load(part).save_pretrained(part, quantize="nf4")
    assert tc.inspect(tmp_path / "2", "flux").parts["text_encoder_2"].stored_format == "nf4"
    assert merged("flux", tmp_path / "2", tmp_path / "3", *flags) == 0
    found = capsys.readouterr().out
    assert "over a base in nf4, but here the base is in its own" in found
    assert "dequantized" not in found


@pytest.mark.gpu
def test_a_gpu_loads_the_same_values_as_the_cpu(gpu: str, flux_base: Path, tmp_path: Path) -> None:
    assert merged("flux", flux_base, tmp_path / "nf4", "--to", "nf4") == 0
    expected, found = (
        tc.models.load(
            tmp_path / "nf4", subfolder="transformer", dtype="f32", quantize="nf4", device=device
        ).named_tensors()
        for device in ("cpu", gpu)
    )
    for key, tensor in expected.items():
        np.testing.assert_array_equal(found[key].to("cpu").numpy(), tensor.numpy(), key)
