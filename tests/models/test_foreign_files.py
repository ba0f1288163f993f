"""Loading a model from the file of another model or part raises an error that says whose it is."""

from pathlib import Path

import pytest

import trainable_candle as tc
from trainable_candle.models import AutoencoderKL, CLIPTextModel, SDXLUNet

from .conftest import GOLDEN, weights_of

# Names of tensors in original checkpoints of Stable Diffusion 1 and 3.5.
SD1_ENCODER = "cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1.weight"
SD3 = "model.diffusion_model.joint_blocks.0.context_block.attn.qkv.weight"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (SD1_ENCODER, r"no CLIPTextModel .*: the file is a checkpoint of Stable Diffusion 1,"),
        ("cond_stage_model.model.ln_final.weight", "a checkpoint of Stable Diffusion 2,"),
        (SD3, "a checkpoint of SD3.5 without this model"),
        ("vector_in.in_layer.weight", "a checkpoint of Flux without this model"),
        ("model.diffusion_model.input_blocks.0.0.weight", "of SDXL without this model"),
        ("model.diffusion_model.x", "a checkpoint without this model"),
        ("down_blocks.0.resnets.0.conv1.weight", "the weights of a UNet from a pipeline's folder"),
        ("decoder.up_blocks.0.x.weight", "the weights of an autoencoder from a pipeline's folder"),
        ("lora_unet_x.lora_up.weight", "an adapter, not a model"),
        ("x", "not an original checkpoint with this model"),
    ],
)
def test_the_error_for_a_checkpoint_without_the_encoder_says_what_the_file_is(
    tmp_path: Path, key: str, message: str
) -> None:
    path = tmp_path / "file.safetensors"
    tc.save_file({key: tc.ones(1)}, path)
    with pytest.raises(tc.WeightsFormatError, match=message):
        CLIPTextModel.from_pretrained(path)


def test_the_unet_of_another_stable_diffusion_is_rejected(
    single_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "file.safetensors"
    # SDXL's UNet embeds the pooled text and the image sizes with `label_emb`, which Stable
    # Diffusion 1 and 2 lack.
    tensors = tc.load_file(single_file)
    tc.save_file({key: t for key, t in tensors.items() if "label_emb" not in key}, path)
    with pytest.raises(
        tc.ConfigError, match=r"no model\.diffusion_model\.label_emb.* Diffusion 1 or"
    ):
        SDXLUNet.from_pretrained(path)


def test_the_file_of_a_unet_loads_only_as_a_unet_with_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    tc.save_file(weights_of("unet"), path)
    with pytest.raises(
        tc.WeightsFormatError,
        match="there is no AutoencoderKL or AutoencoderKLFlux2 in this file and no",
    ):
        AutoencoderKL.from_pretrained(path)
    with pytest.raises(
        tc.WeightsFormatError, match="the weights of a UNet from a pipeline's folder"
    ):
        tc.models.load(path)
    unet = tc.models.load(path, config=GOLDEN / "unet")
    assert isinstance(unet, SDXLUNet)
