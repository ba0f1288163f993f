"""Transformers of image models against diffusers and peft, and in files of other tools."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tests.compressed import decompressed, model_folder

import trainable_candle as tc
from trainable_candle.models import (
    ChromaTransformer,
    Flux2Transformer,
    FluxTransformer,
    Model,
    QwenImageTransformer,
    SD3Transformer,
    ZImageTransformer,
)
from trainable_candle.nn.functional import mse_loss

# `relative_error` is the largest difference divided by the largest expected value, `distance` the
# norm of the differences divided by the norm of the expected values.
from .conftest import distance, metadata, relative_error

GOLDEN = Path(__file__).parents[1] / "golden"
# The largest relative error of predictions. torch rounds one frequency of the sinusoidal embedding
# differently. The embedding of a guidance of 3.5, which the model multiplies by 1000, therefore
# differs by this much.
ROUNDING = 1e-5
ADAPTER_CASES = ("dora_attention", "lora_all_linear")  # parts of names of golden files


def gradient(var: tc.Var) -> np.ndarray:
    """Return the gradient of `var`, or an empty array if `var` has none. (Other tests import this.)

    The layers of Qwen-Image's last block that apply only to the text have no gradients.
    """
    return np.empty(0) if var.grad is None else var.grad.numpy()


class Family(NamedTuple):
    """A transformer: its folder in tests/golden, its class, and the names of its inputs."""

    name: str
    kind: type[Model]
    inputs: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return GOLDEN / self.name

    @property
    def transformer(self) -> Path:
        """The folder of the transformer that diffusers wrote."""
        return model_folder(self.folder / "transformer")

    def load(self, dtype: str = "f32", device: str = "cpu") -> Model:
        return self.kind.from_pretrained(self.transformer, dtype=dtype, device=device)

    @property
    def stored(self) -> dict[str, tc.Tensor]:
        """The parameters in the file that diffusers wrote."""
        return tc.load_file(self.transformer / "diffusion_pytorch_model.safetensors")

    @property
    def case(self) -> dict[str, tc.Tensor]:
        """Inputs of the model by their names, and diffusers' `output` for them."""
        return tc.load_file(self.folder / "transformer_forward.safetensors")

    def predict(self, model: Model, device: str = "cpu", **changes: object) -> tc.Tensor:
        given = {name: self.case[name].to(device) for name in self.inputs}
        return model(**(given | changes))


POOLED = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")
UNPOOLED = ("hidden_states", "encoder_hidden_states", "timestep")
FAMILIES = {
    "sd3": Family("sd3", SD3Transformer, POOLED),
    "flux": Family("flux", FluxTransformer, (*POOLED, "img_ids", "txt_ids", "guidance")),
    "chroma": Family("chroma", ChromaTransformer, (*UNPOOLED, "img_ids", "txt_ids", "lengths")),
    "flux2": Family("flux2", Flux2Transformer, (*UNPOOLED, "img_ids", "txt_ids")),
    "zimage": Family("zimage", ZImageTransformer, (*UNPOOLED, "lengths")),
    "qwen-image": Family(
        "qwen-image", QwenImageTransformer, (*UNPOOLED, "img_ids", "txt_ids", "lengths")
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def adapted(
    family: Family, model: Model, name: str, device: str = "cpu"
) -> tuple[tc.AdapterSet, dict[str, tc.Tensor]]:
    """Add the initial adapter of the golden file of `name` to a model on `device`.

    Return the adapter and all tensors of the golden file: peft's results with this adapter.
    """
    path = decompressed(family.folder / f"transformer_{name}.safetensors")
    case, settings = tc.load_file(path), metadata(path)
    config = tc.LoraConfig(
        r=int(settings["rank"]),
        lora_alpha=float(settings["alpha"]),
        target_modules=json.loads(settings["targets"]),
        use_dora=settings["use_dora"] == "true",
    )
    adapter = model.add_adapter(config)
    parameters = adapter.named_parameters()
    assert {f"lora.{key}" for key in parameters} == {k for k in case if k.startswith("lora.")}
    for key, var in parameters.items():
        var.set(case[f"lora.{key}"].to("f32").to(device))
    return adapter, case


def four_steps(
    family: Family, model: Model, adapter: tc.AdapterSet, target: tc.Tensor
) -> list[float]:
    """Take four steps of AdamW, and return their losses."""
    optimizer = tc.optim.AdamW(adapter.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = mse_loss(family.predict(model, str(target.device)).to("f32"), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_names_and_shapes_equal_those_of_diffusers(family: Family) -> None:
    ours = {name: tensor.shape for name, tensor in family.load().named_tensors().items()}
    assert ours == {name: tensor.shape for name, tensor in family.stored.items()}


def test_prediction_equals_that_of_diffusers(family: Family, device: str) -> None:
    model = family.load(device=device)
    assert relative_error(family.predict(model, device), family.case["output"]) < ROUNDING


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("name", ADAPTER_CASES)
def test_adapters_train_as_with_peft(family: Family, name: str, policy: str, device: str) -> None:
    model = family.load(device=device)
    if policy != "none":
        model.enable_gradient_checkpointing(policy)
    adapter, case = adapted(family, model, name, device)
    sample = tc.Var(family.case["hidden_states"], device=device)
    output = family.predict(model, device, hidden_states=sample)
    assert relative_error(output, case["output"]) < ROUNDING
    target = case["target"].to(device)
    mse_loss(output, target).backward()
    assert relative_error(sample.grad, case["grad_input.hidden_states"]) < 1e-4
    for key, var in adapter.named_parameters().items():
        assert relative_error(var.grad, case[f"grad.{key}"]) < 1e-3, key
    losses = four_steps(family, model, adapter, target)
    np.testing.assert_allclose(losses, case["adamw.losses"].numpy(), rtol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "output_limit", "gradient_limit", "loss_limit"),
    [("f16", 0.01, 0.02, 2e-3), ("bf16", 0.05, 0.1, 1e-2)],
)
@pytest.mark.parametrize("name", ADAPTER_CASES)
def test_adapters_train_in_half_precision_nearly_as_with_peft(
    family: Family, name: str, dtype: str, output_limit: float, gradient_limit: float,
    loss_limit: float, device: str,
) -> None:  # fmt: skip
    model = family.load(dtype, device)
    adapter, case = adapted(family, model, name, device)
    target = case["target"].to(device)
    output = family.predict(model, device)
    assert output.dtype == dtype
    assert distance(output, case["output"]) < output_limit
    mse_loss(output.to("f32"), target).backward()
    parameters = adapter.named_parameters()
    found = tc.cat([var.grad.to("cpu").reshape(-1) for var in parameters.values()])
    expected = tc.cat([case[f"grad.{key}"].reshape(-1) for key in parameters])
    assert distance(found, expected) < gradient_limit
    losses = four_steps(family, model, adapter, target)
    np.testing.assert_allclose(losses, case["adamw.losses"].numpy(), rtol=loss_limit)


def test_a_batch_equals_its_samples_one_by_one(family: Family) -> None:
    model, case = family.load(), family.case
    # All samples share the other inputs, which are ids of positions.
    per_sample = [n for n in family.inputs if case[n].shape[0] == case["hidden_states"].shape[0]]
    batch = family.predict(model).numpy()
    for i in range(len(batch)):
        sample = family.predict(model, **{name: case[name][i : i + 1] for name in per_sample})
        np.testing.assert_allclose(sample.numpy()[0], batch[i], rtol=1e-4, atol=1e-5)


def test_a_file_with_the_original_names_holds_the_same_model(
    family: Family, tmp_path: Path
) -> None:
    """Original names are those in the file that the model's authors published."""
    model = family.load("bf16")
    path = tmp_path / "original.safetensors"
    tc.models.save_checkpoint(path, {"transformer": model})
    written = tc.load_file(path)
    # Most of the original tensor names of Z-Image and Qwen-Image are diffusers' names.
    if family.name not in {"zimage", "qwen-image"}:
        assert not any(name in written for name in family.stored)
    loaded = family.kind.from_pretrained(path).named_tensors()
    for name, tensor in family.stored.items():
        np.testing.assert_array_equal(loaded[name].to("f32"), tensor.to("f32"))
    # The bare file has no configurations in its header, and its tensor names have no prefix. The
    # loader must deduce the sizes from the shapes of the tensors.
    bare = tmp_path / "bare.safetensors"
    tc.save_file(
        {name.removeprefix("model.diffusion_model."): t for name, t in written.items()}, bare
    )
    if family.name == "sd3":
        expected = family.predict(model).to("f32").numpy()
        found = family.predict(family.kind.from_pretrained(bare)).to("f32").numpy()
        np.testing.assert_array_equal(found, expected)
    else:
        # The shapes do not show the widths of the rotary axes (`axes_dims`), and the published
        # model's widths do not fit the tiny model's heads.
        with pytest.raises(tc.ConfigError, match="axes_dims"):
            family.kind.from_pretrained(bare)


def test_sd3_medium_is_read_with_heads_of_64_features(tmp_path: Path) -> None:
    """Without norms of queries and keys, the shapes do not show the number of heads."""
    family = FAMILIES["sd3"]
    config = json.loads((family.transformer / "config.json").read_text())
    config |= {"qk_norm": None, "dual_attention_layers": [], "attention_head_dim": 64,
               "caption_projection_dim": 128}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    tc.manual_seed(0)
    model = SD3Transformer.from_config(tmp_path / "config.json")
    (tmp_path / "config.json").unlink()
    tc.models.save_checkpoint(tmp_path / "original.safetensors", {"transformer": model})
    # This file has no configurations in its header.
    path = tmp_path / "bare.safetensors"
    tc.save_file(tc.load_file(tmp_path / "original.safetensors"), path)
    facts = tc.inspect(path)
    assert facts.model == "sd3"
    found = facts.parts["transformer"].config
    assert (found["num_attention_heads"], found["attention_head_dim"]) == (2, 64)
    assert found.get("qk_norm") is None
    loaded = SD3Transformer.from_pretrained(path, dtype=model.dtype)
    results = (family.predict(each).to("f32").numpy() for each in (loaded, model))
    np.testing.assert_array_equal(*results)


def test_the_padding_of_a_text_is_not_read() -> None:
    """The second sample depends neither on its padding nor on the length of the first text."""
    family = FAMILIES["zimage"]
    model, case = family.load(), family.case
    x, text, times = (case[name][1:] for name in UNPOOLED)
    length = 19  # the number of tokens of the second text without its padding
    assert case["lengths"].tolist()[1] == length
    expected = model(x, text[:, :length], times)
    assert relative_error(expected, case["output"][1:]) < ROUNDING
    # The model pads each text to a multiple of 32 tokens. With its padding, a text of 19 tokens
    # fills a row of 32 tokens, but not a row of 80.
    for row, rows_are_full in ((32, True), (32, False), (80, False)):
        # The padding is large, so that the result would differ if the model read it.
        longer = tc.cat([text[:, :length], 100.0 * tc.ones((1, row - length, 40))], 1)
        found = model(x, longer, times, case["lengths"][1:], rows_are_full=rows_are_full)
        assert relative_error(found, expected) < ROUNDING, row


@pytest.mark.parametrize("name", ["chroma", "qwen-image"])
def test_texts_are_read_to_their_length(name: str) -> None:
    """The second sample depends neither on its padding nor on the length of the first text."""
    family = FAMILIES[name]
    model, case = family.load(), family.case
    x, text, times = (case[name][1:] for name in UNPOOLED)
    image_ids, text_ids = case["img_ids"], case["txt_ids"]
    length = int(case["lengths"][1].item())  # the tokens of the second text without its padding
    expected = model(x, text[:, :length], times, image_ids, text_ids[:length])
    assert relative_error(expected, case["output"][1:]) < ROUNDING
    # Nine tokens of padding, which are large, so that the result differs if the model reads them.
    longer = tc.cat([text[:, :length], 100.0 * tc.ones((1, 9, 40))], 1)
    longer_ids = tc.cat([text_ids[:length], tc.zeros((9, 3))], 0)
    found = model(x, longer, times, image_ids, longer_ids, case["lengths"][1:])
    assert relative_error(found, expected) < ROUNDING
    # Without `lengths`, the padding is read as text.
    assert relative_error(model(x, longer, times, image_ids, longer_ids), expected) > 0.01
    with pytest.raises(tc.ShapeError, match=r"lengths has shape \[2\], expected \(1,\)"):
        model(x, longer, times, image_ids, longer_ids, case["lengths"])


@pytest.mark.parametrize(
    ("key", "title"),
    [
        ("__index_timestep_zero__", "Qwen-Image-Edit-2511"),
        ("time_text_embed.addition_t_embedding.weight", "Qwen-Image-Layered"),
        ("transformer_blocks.0.img_mlp.gate_layer.weight", "Qwen-Image 2.1"),
        ("transformer_blocks.0.img_mlp.gate_up.weight", "Qwen-Image 2.1"),
    ],
)
def test_weights_of_variants_of_qwen_image_are_rejected(
    tmp_path: Path, key: str, title: str
) -> None:
    path = tmp_path / "other.safetensors"
    tc.save_file(FAMILIES["qwen-image"].stored | {key: tc.ones((4,))}, path)
    with pytest.raises(tc.ConfigError, match=f"the transformer is {title}.*expected Qwen-Image"):
        QwenImageTransformer.from_pretrained(path)


@pytest.mark.parametrize(
    ("field", "title"),
    [("zero_cond_t", "Edit-2511"), ("use_additional_t_cond", "Layered"),
     ("use_layer3d_rope", "Layered")],
)  # fmt: skip
def test_configurations_of_variants_of_qwen_image_are_rejected(
    tmp_path: Path, field: str, title: str
) -> None:
    path = FAMILIES["qwen-image"].transformer / "config.json"
    config = json.loads(path.read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: True}))
    with pytest.raises(tc.ConfigError, match=f"{field} is true: the transformer is .*{title}"):
        QwenImageTransformer.from_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(config | {field: False}))
    QwenImageTransformer.from_config(tmp_path / "config.json")


def test_variants_of_chroma_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "radiance.safetensors"
    tc.models.save_checkpoint(path, {"transformer": FAMILIES["chroma"].load()})
    weights = {
        name.removeprefix("model.diffusion_model."): tensor
        for name, tensor in tc.load_file(path).items()
    }
    tc.save_file(weights | {"nerf_blocks.0.norm.scale": tc.ones((4,))}, path)
    with pytest.raises(tc.ConfigError, match="Chroma Radiance"):
        ChromaTransformer.from_pretrained(path)


def test_files_of_comfyui_with_fused_projections_are_read_and_z_image_omni_is_rejected(
    tmp_path: Path,
) -> None:
    family = FAMILIES["zimage"]
    model = family.load("bf16")
    path = tmp_path / "fused.safetensors"
    tc.models.save_checkpoint(path, {"transformer": model})
    written = tc.load_file(path)
    prefix, ours = "model.diffusion_model.", model.named_tensors()
    projections = [ours[f"layers.1.attention.to_{name}.weight"].to("f32") for name in "qkv"]
    fused = written[f"{prefix}layers.1.attention.qkv.weight"].to("f32")
    np.testing.assert_array_equal(fused.numpy(), tc.cat(projections, 0).numpy())
    # The file below has no configuration, so the loader reads the one in a folder beside the file.
    (tmp_path / "transformer").mkdir()
    config = (family.transformer / "config.json").read_bytes()
    (tmp_path / "transformer" / "config.json").write_bytes(config)
    bare = {name.removeprefix(prefix): tensor for name, tensor in written.items()}
    # Some published files also have this tensor, which the model does not use.
    tc.save_file(bare | {"norm_final.weight": tc.ones((32,))}, tmp_path / "bare.safetensors")
    found = ZImageTransformer.from_pretrained(tmp_path / "bare.safetensors").named_tensors()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(found[name].to("f32").numpy(), tensor.to("f32").numpy())
    tc.save_file(bare | {"siglip_embedder.0.weight": tc.ones((4,))}, tmp_path / "omni.safetensors")
    with pytest.raises(tc.ConfigError, match="Z-Image-Omni"):
        ZImageTransformer.from_pretrained(tmp_path / "omni.safetensors")


def test_positions_beyond_the_axes_are_rejected() -> None:
    """130 x 8 latents are 65 x 4 tokens, but the second axis has only 64 positions."""
    family = FAMILIES["zimage"]
    # Along the first axis, padding of the image is at 0, the 64 text tokens (with their padding)
    # are at 1 to 64, and the image is at 65.
    with pytest.raises(tc.ShapeError, match=r"need \[66, 65, 4\] positions.*axes_lens"):
        family.predict(family.load(), hidden_states=tc.zeros((2, 16, 130, 8)))


def test_images_beyond_the_table_of_positions_and_odd_heights_are_rejected() -> None:
    """The table has positions for 12 x 12 tokens; a token is a square of 2 x 2 latents."""
    family = FAMILIES["sd3"]
    model, case = family.load(), family.case
    with pytest.raises(tc.ShapeError, match="13 x 2 tokens, but the model has only 12 x 12"):
        family.predict(model, hidden_states=tc.zeros((2, 16, 26, 4)))
    with pytest.raises(tc.ShapeError, match="H and W positive multiples of 2"):
        family.predict(model, hidden_states=case["hidden_states"][:, :, :5])


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("encoder_hidden_states", tc.zeros((2, 5, 39)), r"expected \(2, L, 40\)"),
        ("encoder_hidden_states", tc.zeros((2, 0, 40)), "at least one token"),
        ("pooled_projections", tc.zeros((2, 23)), r"expected \(2, 24\)"),
        ("timestep", tc.zeros((3,)), r"expected \(2,\), \(1,\) or \(\)"),
    ],
    ids=["text width", "no tokens", "pooled width", "number of timesteps"],
)
def test_inputs_of_wrong_shapes_are_reported(
    family: Family, name: str, wrong: tc.Tensor, message: str
) -> None:
    if name not in family.inputs:
        pytest.skip(f"{family.name} has no {name}")
    with pytest.raises(tc.ShapeError, match=f"{name} has shape .*{message}"):
        family.predict(family.load(), **{name: wrong})


def test_only_models_with_a_guidance_embedding_take_guidance(tmp_path: Path) -> None:
    family = FAMILIES["flux"]
    with pytest.raises(tc.ArgumentError, match="guidance is missing"):
        family.predict(family.load(), guidance=None)
    config = json.loads((family.transformer / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"guidance_embeds": False}))
    schnell = FluxTransformer.from_config(tmp_path / "config.json")
    assert family.predict(schnell, guidance=None).shape == family.case["output"].shape
    with pytest.raises(tc.ArgumentError, match="this model takes none"):
        family.predict(schnell)
