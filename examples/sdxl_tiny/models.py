"""The four networks of a Stable Diffusion XL checkpoint, at a thousandth of SDXL's size."""

from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

RESOLUTION = 128
"""The sides of the training images, px."""
TOKENS = 77
"""The number of tokens of a caption, with padding."""
TEXT_WIDTHS = (48, 80)
"""The number of features of a token in each text encoder."""
POOLED_WIDTH = 64
"""The number of features of a whole caption, from the second text encoder."""
TIME_WIDTH = 32
"""The number of features for each of the six time ids.

The time ids are two numbers each for the size of the original image, the offset of the crop and the
size of the crop.
"""


def autoencoder() -> AutoencoderKL:
    """Make an autoencoder of SDXL's structure: four levels, 8x down-sampling, 4 latent channels."""
    return AutoencoderKL(
        block_out_channels=(24, 40, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=RESOLUTION,
        scaling_factor=0.13025,
    )


def text_encoders(
    vocabulary_size: int, start: int, end: int
) -> tuple[CLIPTextModel, CLIPTextModelWithProjection]:
    """Make SDXL's two text encoders: one like CLIP-L, and one like OpenCLIP-bigG.

    The first has quick GELU; the second has GELU and a projection of the pooled features.

    Args:
        vocabulary_size: the number of tokens.
        start: the id of the token before a text.
        end: the id of the token after a text.
    """
    shared = {
        "vocab_size": vocabulary_size,
        "max_position_embeddings": TOKENS,
        "num_hidden_layers": 2,
        "bos_token_id": start,
        "eos_token_id": end,
    }
    first = CLIPTextConfig(
        hidden_size=TEXT_WIDTHS[0],
        intermediate_size=96,
        num_attention_heads=3,
        hidden_act="quick_gelu",
        projection_dim=TEXT_WIDTHS[0],
        pad_token_id=end,
        **shared,
    )
    second = CLIPTextConfig(
        hidden_size=TEXT_WIDTHS[1],
        intermediate_size=160,
        num_attention_heads=5,
        hidden_act="gelu",
        projection_dim=POOLED_WIDTH,
        pad_token_id=0,  # the token "!", as in OpenCLIP
        **shared,
    )
    return CLIPTextModel(first), CLIPTextModelWithProjection(second)


def unet() -> UNet2DConditionModel:
    """Make a UNet with SDXL's structure and conditions: text, timestep, image size and crop."""
    return UNet2DConditionModel(
        sample_size=RESOLUTION // 8,
        block_out_channels=(48, 64, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=(3, 4, 4),  # In spite of its name, the number of heads.
        norm_num_groups=8,
        cross_attention_dim=sum(TEXT_WIDTHS),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=TIME_WIDTH,
        projection_class_embeddings_input_dim=6 * TIME_WIDTH + POOLED_WIDTH,
    )
