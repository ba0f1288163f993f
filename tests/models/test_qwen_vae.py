"""Qwen-Image's autoencoder against diffusers' on videos of one frame, and ComfyUI's files."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.compressed import decompressed

import trainable_candle as tc
from trainable_candle.models import AutoencoderKLQwenImage

from .conftest import assert_near, relative_error

FOLDER = Path(__file__).parents[1] / "golden" / "qwen-image"
CASE = tc.load_file(decompressed(FOLDER / "vae_forward.safetensors"))
STORED = tc.load_file(FOLDER / "vae" / "diffusion_pytorch_model.safetensors")


def load(device: str = "cpu") -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage.from_pretrained(FOLDER / "vae", dtype="f32", device=device)


def of_an_image(tensor: tc.Tensor) -> np.ndarray:
    """Return the part of a stored parameter that applies to an image, a video of one frame.

    A convolution over time pads only before the first frame, so only its last tap meets the frame.
    """
    values = tensor.to("f32").numpy()
    if values.ndim == 5:
        return values[:, :, -1]
    # Scales of norms and the 1x1 convolutions of attention have trailing dimensions of size 1.
    return values.squeeze() if values.ndim > 1 and values.shape[-1] == 1 else values


def test_parameters_are_those_that_apply_to_one_frame() -> None:
    ours = load().named_tensors()
    # These convolutions run only on videos of several frames.
    over_time = {name for name in STORED if ".time_conv." in name}
    assert over_time
    assert ours.keys() == STORED.keys() - over_time
    for name, tensor in ours.items():
        found, expected = tensor.numpy(), of_an_image(STORED[name])
        np.testing.assert_array_equal(found.squeeze(), expected.squeeze(), err_msg=name)


def test_moments_and_images_equal_those_of_diffusers(device: str) -> None:
    model = load(device)
    mean, logvar = model.encode(CASE["image"].to(device))
    decoded = model.decode(CASE["latent"].to(device))
    # On a GPU, products keep 16 bits of each factor (docs/decisions.md). This random decoder
    # amplifies the rounding: changes of its weights by at most 2^-16 change an image by up to
    # 1.6e-3.
    tolerances = {"mean": 1e-4, "logvar": 1e-4, "decoded": 1e-4 if device == "cpu" else 1.6e-3}
    for found, name in ((mean, "mean"), (logvar, "logvar"), (decoded, "decoded")):
        if device == "cpu":
            assert_near(found, CASE[name])
        assert relative_error(found, CASE[name]) < tolerances[name]
    # diffusers clips images to -1 to 1.
    assert np.abs(CASE["decoded"].numpy()).max() == 1.0
    assert model.downscale == 2  # this tiny model halves height and width once


def test_statistics_of_the_latents_are_those_of_the_configuration() -> None:
    model = load()
    config = json.loads((FOLDER / "vae" / "config.json").read_text())
    assert model.latents_mean == pytest.approx(config["latents_mean"])
    assert model.latents_std == pytest.approx(config["latents_std"])


def test_tiles_equal_those_of_diffusers() -> None:
    model = load()
    tiled = model.decode(CASE["latent"], tile_size=16)
    assert relative_error(tiled, CASE["tiled_decoded"]) < 1e-4
    # Tiles do change the image, so the first assertion would fail if `tile_size` had no effect.
    assert relative_error(CASE["tiled_decoded"], CASE["decoded"]) > 1e-3
    with pytest.raises(tc.ArgumentError, match="tile_size is 4, expected at least 8 pixels"):
        model.decode(CASE["latent"], tile_size=4)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_checkpointed_gradient_is_the_same_bit_for_bit(policy: str) -> None:
    model, latent = load(), tc.Var(CASE["latent"])

    def gradient() -> list[float]:
        (grad,) = tc.grad((model.decode(latent) ** 2).mean(), [latent])
        assert grad is not None
        return grad.tolist()

    plain = gradient()
    model.enable_gradient_checkpointing(policy)
    assert gradient() == plain


# Qwen-Image's autoencoder has the architecture of the autoencoder of Wan, a video model. This table
# maps some names of tensors in Wan's code, which ComfyUI's files have, to diffusers' names. The
# function `convert_wan_vae_to_diffusers` of diffusers 0.42 has the whole map.
WAN = {
    "encoder.conv1.weight": "encoder.conv_in.weight",
    "encoder.downsamples.0.residual.0.gamma": "encoder.down_blocks.0.norm1.gamma",
    "encoder.downsamples.2.shortcut.bias": "encoder.down_blocks.2.conv_shortcut.bias",
    "encoder.downsamples.1.resample.1.weight": "encoder.down_blocks.1.resample.1.weight",
    "encoder.middle.0.residual.6.weight": "encoder.mid_block.resnets.0.conv2.weight",
    "encoder.middle.1.to_qkv.weight": "encoder.mid_block.attentions.0.to_qkv.weight",
    "decoder.middle.2.residual.3.gamma": "decoder.mid_block.resnets.1.norm2.gamma",
    "decoder.head.0.gamma": "decoder.norm_out.gamma",
    "decoder.head.2.bias": "decoder.conv_out.bias",
    "conv1.weight": "quant_conv.weight",
    "conv2.bias": "post_quant_conv.bias",
}


def test_files_of_comfyui_hold_the_same_model(tmp_path: Path) -> None:
    model, path = load(), tmp_path / "vae.safetensors"
    tc.models.save_checkpoint(path, {"vae": model})
    written = tc.load_file(path)
    prefix = "first_stage_model."
    for theirs, ours in WAN.items():
        found, expected = written[prefix + theirs], STORED[ours]
        assert found.shape == expected.shape, theirs
        np.testing.assert_array_equal(of_an_image(found), of_an_image(expected), err_msg=theirs)
    # This file has no configuration in its header. Without one, the loader knows only the sizes of
    # published models.
    bare = tmp_path / "bare.safetensors"
    # ComfyUI's files also have the convolutions over time, which the loader must ignore.
    over_time = {"encoder.downsamples.1.time_conv.weight": tc.ones((4, 4, 3, 1, 1))}
    tc.save_file({name.removeprefix(prefix): t for name, t in written.items()} | over_time, bare)
    with pytest.raises(
        tc.ConfigError, match="16 channels in its latents and 2 after its first convolution"
    ):
        AutoencoderKLQwenImage.from_pretrained(bare)
    for loaded in (
        AutoencoderKLQwenImage.from_pretrained(path),
        AutoencoderKLQwenImage.from_pretrained(bare, config=FOLDER / "vae" / "config.json"),
    ):
        for name, tensor in loaded.named_tensors().items():
            np.testing.assert_array_equal(tensor.numpy(), model.named_tensors()[name].numpy())


def test_a_saved_folder_is_the_same_model(tmp_path: Path) -> None:
    model = load()
    model.save_pretrained(tmp_path)
    again = AutoencoderKLQwenImage.from_pretrained(tmp_path)
    np.testing.assert_array_equal(
        again.decode(CASE["latent"]).numpy(), model.decode(CASE["latent"]).numpy()
    )


def test_an_image_instead_of_a_latent_is_reported() -> None:
    with pytest.raises(tc.ShapeError, match=r"latent has shape .* expected \(B, 16, H, W\)"):
        load().decode(CASE["image"])
