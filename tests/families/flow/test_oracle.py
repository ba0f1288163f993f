"""The library's text features and sampled images against those of diffusers' pipelines.

The fixtures `*_base` are folders of tiny pipelines.

The tests are skipped where torch, transformers or diffusers is missing.
"""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.draws import draw_from
from trainable_candle.tasks.latent import SampleOptions
from trainable_candle.text.prompt_tokenizer import PromptTokenizer
from trainable_candle.text.t5_tokenizer import SHIPPED

os.environ.setdefault("HF_HUB_OFFLINE", "1")
diffusers = pytest.importorskip("diffusers")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# diffusers itself uses a class that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")

GOLDEN = Path(__file__).parents[2] / "golden"
# SIZE is the width and the height of images, px. They differ, so that tests fail if they are
# exchanged. Tokens are squares of 4x4 px: 11 columns and 7 rows, both odd.
SIZE, STEPS, SEED = (44, 28), 4, 3
PROMPT, NEGATIVE = "a red blur", "noise"
# Drawn pixels are rounded to 8 bits, which errs by up to half a level.
TOLERANCE = 1e-3 + 0.5 / 255


def t5_tokenizer(folder: Path) -> "transformers.T5Tokenizer":
    folder.mkdir()
    (folder / "spiece.model").write_bytes(gzip.decompress(SHIPPED.read_bytes()))
    return transformers.T5TokenizerFast.from_pretrained(folder)


def clip_tokenizer(folder: Path) -> "transformers.CLIPTokenizer":
    return transformers.CLIPTokenizer.from_pretrained(folder)


def noise(channels: int = 16, factor: int = 2) -> "torch.Tensor":
    """Return the library's noise for latents that are `factor` times smaller than the image."""
    shape = (1, channels, SIZE[1] // factor, SIZE[0] // factor)
    return torch.from_numpy(draw_from(SEED, lambda: tc.randn(shape)).numpy())


def ours(name: str, base: Path, guidance: float, negative: str) -> np.ndarray:
    """Return the library's image, (1, H, W, 3), in [0, 1]."""
    task = families.load(name, base, "f32", "cpu")
    options = SampleOptions(
        steps=STEPS, seed=SEED, size=SIZE, guidance=guidance, negative_prompt=negative
    )
    return task.draw([PROMPT], options).astype(np.float64) / 255


# The part of Qwen3's chat template that renders turns without tools. Qwen-Image's prompts, which
# diffusers renders without a chat template, do not use it.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def chat_tokenizer(folder: Path) -> "transformers.PreTrainedTokenizerFast":
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        padding_side="right",
    )


def load(kind: type, folder: Path) -> object:
    """Load a model of transformers or diffusers in f32."""
    return kind.from_pretrained(folder, torch_dtype=torch.float32)


# A caption without words, one with some words, and one that is truncated.
CAPTIONS = ["", PROMPT, "a blur of many words " * 150]


def sd3(sd3_base: Path, tmp_path: Path) -> "diffusers.StableDiffusion3Pipeline":
    clip = transformers.CLIPTextModelWithProjection
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=load(diffusers.SD3Transformer2DModel, sd3_base / "transformer"),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(sd3_base / "scheduler"),
        vae=load(diffusers.AutoencoderKL, sd3_base / "vae"),
        text_encoder=load(clip, sd3_base / "text_encoder"),
        tokenizer=clip_tokenizer(sd3_base / "tokenizer"),
        text_encoder_2=load(clip, sd3_base / "text_encoder_2"),
        tokenizer_2=clip_tokenizer(sd3_base / "tokenizer_2"),
        text_encoder_3=load(transformers.T5EncoderModel, sd3_base / "text_encoder_3"),
        tokenizer_3=t5_tokenizer(tmp_path / "t5"),
    )
    pipeline.tokenizer_max_length = 17  # the number of positions of the tiny CLIP encoders
    return pipeline


def test_text_features_of_sd3_equal_those_of_diffusers(sd3_base: Path, tmp_path: Path) -> None:
    with torch.no_grad():
        states, _, pooled, _ = sd3(sd3_base, tmp_path).encode_prompt(
            CAPTIONS,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=256,
        )
    found = families.load("sd3", sd3_base, "f32", "cpu").family.features(CAPTIONS)
    for name, expected in (("encoder_hidden_states", states), ("pooled_projections", pooled)):
        np.testing.assert_allclose(found[name].numpy(), expected.numpy(), atol=1e-5, err_msg=name)


def test_images_of_sd3_equal_those_of_diffusers(sd3_base: Path, tmp_path: Path) -> None:
    theirs = sd3(sd3_base, tmp_path)(
        PROMPT, negative_prompt=NEGATIVE, num_inference_steps=STEPS, guidance_scale=4.5,
        height=SIZE[1], width=SIZE[0], latents=noise(), output_type="np",
    ).images  # fmt: skip
    np.testing.assert_allclose(ours("sd3", sd3_base, 4.5, NEGATIVE), theirs, atol=TOLERANCE)


def flux(flux_base: Path, tmp_path: Path) -> "diffusers.FluxPipeline":
    pipeline = diffusers.FluxPipeline(
        transformer=load(diffusers.FluxTransformer2DModel, flux_base / "transformer"),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(
            flux_base / "scheduler"
        ),
        vae=load(diffusers.AutoencoderKL, flux_base / "vae"),
        text_encoder=load(transformers.CLIPTextModel, flux_base / "text_encoder"),
        tokenizer=clip_tokenizer(flux_base / "tokenizer"),
        text_encoder_2=load(transformers.T5EncoderModel, flux_base / "text_encoder_2"),
        tokenizer_2=t5_tokenizer(tmp_path / "t5"),
    )
    pipeline.tokenizer_max_length = 17  # the number of positions of the tiny CLIP encoders
    return pipeline


def test_text_features_of_flux_equal_those_of_diffusers(flux_base: Path, tmp_path: Path) -> None:
    with torch.no_grad():
        states, pooled, _ = flux(flux_base, tmp_path).encode_prompt(CAPTIONS, prompt_2=None)
    found = families.load("flux", flux_base, "f32", "cpu").family.features(CAPTIONS)
    for name, expected in (("encoder_hidden_states", states), ("pooled_projections", pooled)):
        np.testing.assert_allclose(found[name].numpy(), expected.numpy(), atol=1e-5, err_msg=name)


def test_images_of_flux_equal_those_of_diffusers(flux_base: Path, tmp_path: Path) -> None:
    pipeline, latents = flux(flux_base, tmp_path), noise()
    packed = pipeline._pack_latents(latents, *latents.shape)
    theirs = pipeline(
        PROMPT, num_inference_steps=STEPS, guidance_scale=3.5, height=SIZE[1], width=SIZE[0],
        latents=packed, output_type="np", max_sequence_length=512,
    ).images  # fmt: skip
    np.testing.assert_allclose(ours("flux", flux_base, 3.5, ""), theirs, atol=TOLERANCE)


def chroma(base: Path, folder: Path) -> "diffusers.ChromaPipeline":
    """Return diffusers' pipeline, patched to use a boolean mask of the text tokens.

    The code that Chroma was trained with excludes padding, as a boolean mask does. diffusers 0.42
    concatenates numbers and booleans, so its mask holds numbers. Attention adds such a mask to the
    scores instead of excluding tokens, so the unpatched pipeline reads all of the padding.
    """
    pipeline = diffusers.ChromaPipeline(
        transformer=load(diffusers.ChromaTransformer2DModel, base / "transformer"),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(base / "scheduler"),
        vae=load(diffusers.AutoencoderKL, base / "vae"),
        text_encoder=load(transformers.T5EncoderModel, base / "text_encoder"),
        tokenizer=t5_tokenizer(folder),
    )
    prepare = pipeline._prepare_attention_mask

    def boolean_mask(**given: object) -> "torch.Tensor | None":
        mask = prepare(**given)
        return None if mask is None else mask.bool()

    pipeline._prepare_attention_mask = boolean_mask
    return pipeline


def test_chroma_reads_text_and_one_token_of_padding(chroma_base: Path, tmp_path: Path) -> None:
    """One caption has no words, one has some, and one is so long that it is truncated."""
    pipeline = chroma(chroma_base, tmp_path / "t5")
    captions = ["", PROMPT, "a blur " * 400]
    with torch.no_grad():
        theirs, mask = pipeline._get_t5_prompt_embeds(captions)
    found = families.load("chroma", chroma_base, "f32", "cpu").family.features(captions)
    lengths = found["lengths"].numpy().astype(int)
    np.testing.assert_array_equal(lengths, mask.sum(1).numpy())
    # The end token, and one token of padding.
    assert lengths[0] == 2
    assert lengths[2] == 512  # the most tokens of a caption
    for states, expected, length in zip(
        found["encoder_hidden_states"].numpy(), theirs.numpy(), lengths, strict=True
    ):
        np.testing.assert_allclose(states[:length], expected[:length], atol=1e-5)
        assert (states[length:] == 0).all()


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_images_of_chroma_equal_those_of_diffusers(
    chroma_base: Path, tmp_path: Path, guidance: float
) -> None:
    """The prompt and the negative prompt differ in length."""
    pipeline = chroma(chroma_base, tmp_path / "t5")
    latents = noise()
    theirs = pipeline(
        PROMPT, negative_prompt=NEGATIVE, num_inference_steps=STEPS, guidance_scale=guidance,
        height=SIZE[1], width=SIZE[0], latents=pipeline._pack_latents(latents, *latents.shape),
        output_type="np",
    ).images  # fmt: skip
    found = ours("chroma", chroma_base, guidance, NEGATIVE)
    np.testing.assert_allclose(found, theirs, atol=TOLERANCE)


def test_several_double_stream_blocks_of_chroma_equal_those_of_diffusers(tmp_path: Path) -> None:
    """Each block reads its own rows of the modulation.

    The model has three double-stream blocks. The golden model has only one.
    """
    torch.manual_seed(0)
    config = json.loads((GOLDEN / "chroma" / "transformer" / "config.json").read_text())
    sizes = {"num_layers": 3, "num_single_layers": 2}
    config = {name: value for name, value in config.items() if not name.startswith("_")}
    theirs = diffusers.ChromaTransformer2DModel(**config | sizes)
    theirs.save_pretrained(tmp_path / "transformer")
    # Latents, text features, times, positions of the image and of the text.
    given = (torch.randn(2, 6, 64), torch.randn(2, 5, 40), torch.tensor([0.2, 0.9]),
             torch.randn(6, 3), torch.zeros(5, 3))  # fmt: skip
    with torch.no_grad():
        expected = theirs(*given).sample.numpy()
    model = tc.models.load(tmp_path / "transformer", dtype="f32")
    found = model(*(tc.tensor(tensor.numpy()) for tensor in given)).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def z_image(zimage_base: Path) -> "diffusers.ZImagePipeline":
    return diffusers.ZImagePipeline(
        transformer=load(diffusers.ZImageTransformer2DModel, zimage_base / "transformer"),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(
            zimage_base / "scheduler"
        ),
        vae=load(diffusers.AutoencoderKL, zimage_base / "vae"),
        text_encoder=load(transformers.Qwen3ForCausalLM, zimage_base / "text_encoder"),
        tokenizer=chat_tokenizer(zimage_base / "tokenizer"),
    )


def test_text_features_of_z_image_equal_those_of_diffusers(zimage_base: Path) -> None:
    with torch.no_grad():
        # Pass a copy: the pipeline replaces the captions in the list by rendered templates.
        theirs, _ = z_image(zimage_base).encode_prompt(
            list(CAPTIONS), do_classifier_free_guidance=False
        )
    found = families.load("zimage", zimage_base, "f32", "cpu").family.features(CAPTIONS)
    assert found["lengths"].numpy().tolist() == [len(text) for text in theirs]
    for states, expected in zip(found["encoder_hidden_states"].numpy(), theirs, strict=True):
        scale = np.abs(expected.numpy()).max()
        np.testing.assert_allclose(states[: len(expected)], expected.numpy(), atol=1e-5 * scale)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_images_of_z_image_equal_those_of_diffusers(zimage_base: Path, guidance: float) -> None:
    # The pipeline's guidance scale is that of this library minus 1. The prompt has 29 tokens, the
    # negative prompt 19; both are padded to 32.
    theirs = z_image(zimage_base)(
        PROMPT, negative_prompt="", num_inference_steps=STEPS, guidance_scale=guidance - 1,
        height=SIZE[1], width=SIZE[0], latents=noise(), output_type="np",
    ).images  # fmt: skip
    found = ours("zimage", zimage_base, guidance, "")
    np.testing.assert_allclose(found, theirs, atol=TOLERANCE)


def klein(base: Path, *, is_distilled: bool) -> "diffusers.Flux2KleinPipeline":
    return diffusers.Flux2KleinPipeline(
        transformer=load(diffusers.Flux2Transformer2DModel, base / "transformer"),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(base / "scheduler"),
        vae=load(diffusers.AutoencoderKLFlux2, base / "vae"),
        text_encoder=load(transformers.Qwen3ForCausalLM, base / "text_encoder"),
        tokenizer=chat_tokenizer(base / "tokenizer"),
        is_distilled=is_distilled,
    )


def test_flux2_reads_text_with_its_padding(flux2_base: Path) -> None:
    """Two captions are padded and one is truncated. The features of padding are compared too."""
    pipeline = klein(flux2_base, is_distilled=False)
    captions = ["", PROMPT, "a blur " * 100]
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt(captions)
    family = families.load("flux2", flux2_base, "f32", "cpu").family
    found = family.features(captions)["encoder_hidden_states"].numpy()
    assert found.shape == (3, 512, 48)  # captions, tokens with padding, features
    scale = np.abs(theirs.numpy()).max()
    np.testing.assert_allclose(found / scale, theirs.numpy() / scale, atol=1e-5)


@pytest.mark.parametrize("is_distilled", [False, True])
def test_images_of_flux2_equal_those_of_diffusers(
    flux2_base: Path, tmp_path: Path, is_distilled: bool
) -> None:
    """diffusers and the library get a guidance scale of 4; a distilled model ignores it."""
    base = tmp_path / "klein"
    base.mkdir()
    for part in flux2_base.iterdir():
        (base / part.name).symlink_to(part)
    # Remove the link, so that writing does not change the fixture's file.
    (base / "model_index.json").unlink()
    index = {"_class_name": "Flux2KleinPipeline", "is_distilled": is_distilled}
    (base / "model_index.json").write_text(json.dumps(index))
    theirs = klein(base, is_distilled=is_distilled)(
        prompt=PROMPT, num_inference_steps=STEPS, guidance_scale=4.0, height=SIZE[1],
        width=SIZE[0], latents=noise(channels=128, factor=4), output_type="np",
    ).images  # fmt: skip
    np.testing.assert_allclose(ours("flux2", base, 4.0, ""), theirs, atol=TOLERANCE)


def qwen_image(base: Path) -> "diffusers.QwenImagePipeline":
    config = transformers.AutoConfig.from_pretrained(base / "text_encoder")
    sizes = {"depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16,
             "out_hidden_size": 40}  # fmt: skip
    for name, size in sizes.items():
        setattr(config.vision_config, name, size)
    torch.manual_seed(0)
    # The model of transformers also has a vision encoder and a head. Their random weights have no
    # effect on text features.
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(config).float().eval()
    stored = {
        name.removeprefix("model."): torch.from_numpy(tensor.to("f32").numpy())
        for name, tensor in tc.load_file(base / "text_encoder" / "model.safetensors").items()
    }
    encoder.model.language_model.load_state_dict(stored)
    return diffusers.QwenImagePipeline(
        transformer=load(diffusers.QwenImageTransformer2DModel, base / "transformer"),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(base / "scheduler"),
        vae=load(diffusers.AutoencoderKLQwenImage, base / "vae"),
        text_encoder=encoder,
        tokenizer=chat_tokenizer(base / "tokenizer"),
    )


def test_qwen_image_reads_text_after_the_start_of_its_template(qwen_image_base: Path) -> None:
    """One caption has no words, one has some, and one is so long that it is truncated."""
    captions = ["", PROMPT, "a blur " * 200]
    with torch.no_grad():
        theirs, mask = qwen_image(qwen_image_base).encode_prompt(captions)
    found = families.load("qwen-image", qwen_image_base, "f32", "cpu").family.features(captions)
    lengths = found["lengths"].numpy().astype(int)
    np.testing.assert_array_equal(lengths, mask.sum(1).numpy())
    assert lengths[2] == 1024  # the most tokens of a caption
    scale = np.abs(theirs.numpy()).max()
    np.testing.assert_allclose(
        found["encoder_hidden_states"].numpy() / scale, theirs.numpy() / scale, atol=1e-5
    )


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_images_of_qwen_image_equal_those_of_diffusers(
    qwen_image_base: Path, guidance: float
) -> None:
    """The prompt and the negative prompt differ in length.

    With guidance, each token of the prediction is scaled to its norm in the prediction for the
    prompt alone. The library's default negative prompt is a space.
    """
    pipeline, latents = qwen_image(qwen_image_base), noise()
    packed = pipeline._pack_latents(latents, *latents.shape)
    theirs = pipeline(
        PROMPT, negative_prompt=" ", num_inference_steps=STEPS, true_cfg_scale=guidance,
        height=SIZE[1], width=SIZE[0], latents=packed, output_type="np",
    ).images  # fmt: skip
    found = ours("qwen-image", qwen_image_base, guidance, "")
    np.testing.assert_allclose(found, theirs, atol=TOLERANCE)


def test_tokens_of_qwen2_equal_those_of_transformers(tmp_path: Path) -> None:
    """The tokens come from `vocab.json` and `merges.txt`.

    The published folder of Qwen-Image has these files, but no `tokenizer.json`.
    """
    # In byte-level BPE, "\u0120" stands for a space.
    merges = ["h e", "l l", "he ll", "\u0120 w"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    added = {name: len(tokens) + i for i, name in enumerate(names)}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    pairs = [tuple(merge.split()) for merge in merges]
    their_tokenizer = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=pairs)
    their_tokenizer.add_special_tokens({"additional_special_tokens": list(names[1:])})
    # Braces in the system's text are ordinary characters.
    our_tokenizer = PromptTokenizer.from_pretrained(tmp_path, system="Look: {}")
    for text in ("", "hello w\u00f6rld, it's 2026!\n\n  we'LL", "e\u0301 \u4f60\u597d <|im_end|>"):
        turn = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        chat = "<|im_start|>system\nLook: {}<|im_end|>\n" + turn
        most_tokens = 1000  # more than any text here has
        assert our_tokenizer.encode(text, most_tokens) == their_tokenizer(chat).input_ids
