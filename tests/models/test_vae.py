"""The autoencoders of SDXL, Flux and FLUX.2 against those of diffusers."""

from pathlib import Path

import pytest
from tests.compressed import decompressed

import trainable_candle as tc
from trainable_candle.models import AutoencoderKL

from .conftest import GOLDEN, assert_near, relative_error, weights_of

CASE = tc.load_file(decompressed(GOLDEN / "vae_forward.safetensors"))


@pytest.fixture
def model(sdxl: Path) -> AutoencoderKL:
    return AutoencoderKL.from_pretrained(sdxl)


def loaded_on(sdxl: Path, device: str) -> tuple[AutoencoderKL, dict[str, tc.Tensor]]:
    """Load the model on a device, and return it with its inputs there."""
    inputs = {name: CASE[name].to(device) for name in ("image", "latent")}
    return AutoencoderKL.from_pretrained(sdxl, device=device), inputs


def assert_close(found: tc.Tensor, expected: tc.Tensor) -> None:
    """Assert that values are near, with a wider tolerance on a GPU.

    There, products keep only 16 bits of each factor; docs/decisions.md has the reasons.
    """
    if found.device == "cpu":
        assert_near(found, expected)
    else:
        assert relative_error(found, expected) < 1e-4


def test_names_and_shapes_equal_those_of_diffusers(model: AutoencoderKL) -> None:
    ours = {name: tensor.shape for name, tensor in model.named_tensors().items()}
    assert ours == {name: tensor.shape for name, tensor in weights_of("vae").items()}


def test_moments_and_images_equal_those_of_diffusers(sdxl: Path, device: str) -> None:
    model, given = loaded_on(sdxl, device)
    # The image has an odd height, which encoding accepts.
    mean, logvar = model.encode(given["image"])
    assert_close(mean, CASE["mean"])
    assert_close(logvar, CASE["logvar"])
    assert_close(model.decode(given["latent"]), CASE["decoded"])
    # The test model halves each side once, and has a `downscale` of 2. SDXL's own has 8.
    assert (model.scaling_factor, model.shift_factor, model.downscale) == (0.13025, 0.0, 2)


def test_tiles_equal_those_of_diffusers(sdxl: Path, device: str) -> None:
    model, given = loaded_on(sdxl, device)
    mean, _ = model.encode(given["image"], tile_size=16)
    assert_close(mean, CASE["tiled_mean"])
    assert_close(model.decode(given["latent"], tile_size=16), CASE["tiled_decoded"])
    # An image that fits into one tile is not split.
    assert_close(model.decode(given["latent"], tile_size=512), CASE["decoded"])
    with pytest.raises(tc.ArgumentError, match="tile_size is 4, expected at least 8 pixels"):
        model.decode(given["latent"], tile_size=4)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_checkpointed_gradient_is_the_same_bit_for_bit(model: AutoencoderKL, policy: str) -> None:
    latent = tc.Var(CASE["latent"])

    def gradient() -> list[float]:
        (grad,) = tc.grad((model.decode(latent) ** 2).mean(), [latent])
        assert grad is not None
        return grad.tolist()

    plain = gradient()
    model.enable_gradient_checkpointing(policy)
    assert gradient() == plain


def test_the_dtype_is_f32_unless_force_upcast_is_off(sdxl: Path) -> None:
    # The weights are stored as bf16, and the configuration sets force_upcast.
    for dtype in (None, "f16", "bf16", "f32"):
        assert AutoencoderKL.from_pretrained(sdxl, dtype=dtype).dtype == "f32"
    assert AutoencoderKL.from_pretrained(sdxl, force_upcast=False).dtype == "bf16"
    assert AutoencoderKL.from_pretrained(sdxl, dtype="f16", force_upcast=False).dtype == "f16"
    assert tc.models.load(sdxl, dtype="f16", subfolder="vae").dtype == "f32"


def test_wrong_inputs_are_reported(model: AutoencoderKL) -> None:
    # An image has 3 channels, latents have 4.
    with pytest.raises(tc.ShapeError, match=r"latent has shape .* expected \(B, 4, H, W\)"):
        model.decode(CASE["image"])
    with pytest.raises(tc.ShapeError, match="H and W at least 2"):
        model.encode(CASE["image"][:, :, :1])


FLUX = GOLDEN.parent / "flux"


def test_the_autoencoder_without_quant_convs_equals_that_of_diffusers(device: str) -> None:
    """SD3.5, Flux, Chroma and Z-Image have such an autoencoder, with 16 channels of latents."""
    stored = tc.load_file(FLUX / "vae" / "diffusion_pytorch_model.safetensors")
    model = AutoencoderKL.from_pretrained(FLUX / "vae", dtype="f32", device=device)
    ours = {name: tensor.shape for name, tensor in model.named_tensors().items()}
    assert ours == {name: tensor.shape for name, tensor in stored.items()}
    case = tc.load_file(FLUX / "vae_forward.safetensors")
    mean, logvar = model.encode(case["pixels"].to("f32").to(device) / 127.5 - 1.0)
    assert_close(mean, case["mean"])
    assert_close(logvar, case["logvar"])
    assert_close(model.decode(case["latent"].to(device)), case["decoded"])
    assert (model.scaling_factor, model.shift_factor, model.downscale) == (0.3611, 0.1159, 2)


FLUX2 = GOLDEN.parent / "flux2"


def test_the_autoencoder_of_flux2_equals_that_of_diffusers_and_loads_from_its_files(
    tmp_path: Path,
) -> None:
    case = tc.load_file(decompressed(FLUX2 / "vae_forward.safetensors"))
    stored = tc.load_file(FLUX2 / "vae" / "diffusion_pytorch_model.safetensors")
    model = AutoencoderKL.from_pretrained(FLUX2 / "vae", dtype="f32")
    del stored["bn.num_batches_tracked"]  # which only training in torch uses
    ours = {name: tensor.shape for name, tensor in model.named_tensors().items()}
    assert ours == {name: tensor.shape for name, tensor in stored.items()}
    mean, logvar = model.encode(case["image"])
    assert_near(mean, case["mean"])
    assert_near(logvar, case["logvar"])
    assert_near(model.decode(case["latent"]), case["decoded"])
    # Save the model in a folder, and in one file, where `quant_conv` is part of the encoder.
    model.save_pretrained(tmp_path / "folder")
    tc.models.save_checkpoint(tmp_path / "ae.safetensors", {"vae": model})
    written = tc.load_file(tmp_path / "ae.safetensors")
    prefix = "first_stage_model."
    assert f"{prefix}encoder.quant_conv.weight" in written
    bare = {name.removeprefix(prefix): tensor for name, tensor in written.items()}
    tc.save_file(bare, tmp_path / "bare.safetensors")
    # The shapes do not show the number of groups of a norm, which is 8 in this model. Without a
    # configuration, the loader takes 32. `save_checkpoint` stores the configuration in the file,
    # and `bare.safetensors` lacks it.
    config = FLUX2 / "vae" / "config.json"
    for path, given in (("folder", None), ("ae.safetensors", None), ("bare.safetensors", config)):
        found = AutoencoderKL.from_pretrained(tmp_path / path, config=given).named_tensors()
        assert found.keys() == stored.keys()
        for name, tensor in found.items():
            assert (tensor.to("f32").numpy() == stored[name].to("f32").numpy()).all(), name
