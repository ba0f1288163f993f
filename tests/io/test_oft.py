"""OFT files against the formulas of LyCORIS and peft, computed in numpy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, ConfigError, WeightsFormatError

Attach = Callable[[tc.models.Model, str], tc.AdapterSet]
LLAMA = Path(tc.__file__).parent / "assets" / "llama_tiny"
# The settings of an OFT that rotates outputs.
OUTPUT_SIDE: dict[str, Any] = {
    "adapter": "oft",
    "oft_block_size": 8,
    "target_modules": ["to_q", "conv1"],
}
# One layer's name in diffusers, and the prefix of its keys in kohya's format.
LAYER = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
KEY = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"


def skew(upper: np.ndarray) -> np.ndarray:
    """Build skew-symmetric matrices from their strict upper triangles, (count, elements)."""
    # The positive root n of n * (n - 1) / 2 = number of elements.
    size = round((1 + (1 + 8 * upper.shape[1]) ** 0.5) / 2)
    matrices = np.zeros((len(upper), size, size))
    rows, columns = np.triu_indices(size, 1)
    matrices[:, rows, columns] = upper
    return matrices - matrices.transpose(0, 2, 1)


def weight_of_rotated_inputs(weight: np.ndarray, rotations: np.ndarray) -> np.ndarray:
    """Compute the weight W' with x W'ᵀ = (x R) Wᵀ.

    R is block diagonal: `rotations` (blocks, n, n) holds one matrix for each n inputs.
    """
    blocks = weight.reshape(len(weight), *rotations.shape[:2])
    return np.einsum("oki,kji->okj", blocks, rotations).reshape(weight.shape)


def language_model() -> tc.models.CausalLM:
    return tc.models.CausalLM.from_pretrained(LLAMA, dtype="f32")


def weights(model: tc.models.Model) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.named_tensors().items()}


@pytest.mark.parametrize("alpha", [None, 0.0, 1e-3])
def test_lycoris_files_rotate_outputs(
    unet: tc.models.SDXLUNet, tmp_path: Path, alpha: float | None
) -> None:
    """`DiagOFTModule` computes the rotation from a skew-symmetric Q. An alpha
    other than 0 limits the norm of Q to alpha times the number of outputs:
    https://github.com/KohakuBlueleaf/LyCORIS/blob/01ca138a/lycoris/modules/diag_oft.py#L87"""
    weight = weights(unet)[f"{LAYER}.weight"]
    blocks = np.random.default_rng(3).normal(0, 0.3, (len(weight) // 4, 4, 4)).astype(np.float32)
    tensors = {f"{KEY}.oft_blocks": tc.tensor(blocks)}
    if alpha is not None:
        tensors[f"{KEY}.alpha"] = tc.tensor(alpha)
    tc.save_file(tensors, tmp_path / "a.safetensors")
    q = blocks.astype(np.float64)
    q = q - q.transpose(0, 2, 1)
    if alpha:  # the norm of this Q exceeds the limit
        q *= alpha * len(weight) / np.linalg.norm(q)
    eye = np.eye(4)
    rotation = (eye + q) @ np.linalg.inv(eye - q)
    blocks_of_outputs = weight.reshape(-1, 4, weight.shape[1])
    expected = np.einsum("knm,knc->kmc", rotation, blocks_of_outputs).reshape(weight.shape)
    unet.load_adapter(tmp_path / "a.safetensors")
    unet.merge_adapter()
    np.testing.assert_allclose(weights(unet)[f"{LAYER}.weight"], expected, rtol=1e-5, atol=1e-6)


def test_a_lycoris_file_that_is_saved_again_keeps_its_block_size_in_the_metadata(
    unet: tc.models.SDXLUNet, tmp_path: Path, read_metadata: Callable[[Path], dict[str, str]]
) -> None:
    """LyCORIS computes the size of the blocks from `ss_network_dim`."""
    outputs = len(weights(unet)[f"{LAYER}.weight"])
    tensors = {f"{KEY}.oft_blocks": tc.zeros((outputs // 4, 4, 4)), f"{KEY}.alpha": tc.tensor(0.0)}
    tc.save_file(tensors, tmp_path / "a.safetensors")
    adapter = unet.load_adapter(tmp_path / "a.safetensors")
    adapter.save(tmp_path / "b.safetensors", format="kohya")
    assert read_metadata(tmp_path / "b.safetensors")["ss_network_dim"] == "4"


# In peft, the exact form has the opposite sign of Q to that of the series. By default, the series
# has 5 terms: the powers of Q from 0 to 4, of which the first and the last occur once, the others
# twice. With 2 terms, peft makes an exception: the last power, Q itself, occurs twice.
@pytest.mark.parametrize(
    ("settings", "rotation"),
    [
        ({"use_cayley_neumann": False}, lambda q, eye: (eye - q) @ np.linalg.inv(eye + q)),
        ({}, lambda q, eye: eye + 2 * (q + q @ q + q @ q @ q) + q @ q @ q @ q),
        ({"num_cayley_neumann_terms": 2}, lambda q, eye: eye + 2 * q),
    ],
    ids=["exact", "default", "two terms"],
)
@pytest.mark.parametrize("shared", [False, True], ids=["own blocks", "one shared block"])
def test_peft_folders_rotate_inputs_also_after_saving(
    tmp_path: Path, settings: dict[str, Any], rotation: Callable[..., np.ndarray], shared: bool
) -> None:
    """peft's formula for rotations:
    https://github.com/huggingface/peft/blob/5d602fdb/src/peft/tuners/oft/layer.py#L116"""
    model = language_model()
    before = weights(model)
    layer = next(name for name in before if name.endswith("q_proj.weight")).removesuffix(".weight")
    weight = before[f"{layer}.weight"]
    # A skew-symmetric 8 x 8 matrix has 8 * 7 / 2 = 28 elements above its diagonal.
    count = 1 if shared else weight.shape[1] // 8
    upper = np.random.default_rng(4).normal(0, 0.1, (count, 28)).astype(np.float32)
    tc.save_file(
        {f"base_model.model.{layer}.oft_R.weight": tc.tensor(upper)},
        tmp_path / "adapter_model.safetensors",
    )
    config = {"peft_type": "OFT", "r": 0, "oft_block_size": 8, "block_share": shared, **settings}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    matrices = np.repeat(skew(upper), weight.shape[1] // 8 // count, axis=0)
    expected = weight_of_rotated_inputs(weight, rotation(matrices, np.eye(8)))
    adapter = model.load_adapter(tmp_path)
    saved = tmp_path / "saved"
    adapter.save(saved)
    model.merge_adapter()
    np.testing.assert_allclose(weights(model)[f"{layer}.weight"], expected, rtol=1e-5, atol=1e-6)
    reloaded = language_model()
    reloaded.load_adapter(saved)
    reloaded.merge_adapter()
    np.testing.assert_allclose(weights(reloaded)[f"{layer}.weight"], expected, rtol=1e-5, atol=1e-6)
    written = json.loads((saved / "adapter_config.json").read_text())
    assert written["use_cayley_neumann"] == settings.get("use_cayley_neumann", True)
    assert written["oft_block_size"] == 8


def test_the_limit_of_coft_is_applied(tmp_path: Path) -> None:
    """peft's formula for the limit of the norm:
    https://github.com/huggingface/peft/blob/5d602fdb/src/peft/tuners/oft/layer.py#L158"""
    model = language_model()
    names = [name for name in weights(model) if name.endswith("q_proj.weight")]
    layer, columns = names[0].removesuffix(".weight"), weights(model)[names[0]].shape[1]
    upper = np.random.default_rng(5).normal(0, 0.1, (columns // 8, 28)).astype(np.float32)
    upper[0] *= 1e-3
    tc.save_file(
        {f"base_model.model.{layer}.oft_R.weight": tc.tensor(upper)},
        tmp_path / "adapter_model.safetensors",
    )
    config = {"peft_type": "OFT", "oft_block_size": 8, "coft": True, "eps": 0.2}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    limit = 0.2 / len(upper) ** 0.5  # eps / sqrt(number of blocks)
    norms = np.linalg.norm(skew(upper), axis=(1, 2))[:, None]
    assert norms.min() < limit < norms.max()
    expected = np.where(norms > limit, upper * limit / norms, upper)
    (found,) = model.load_adapter(tmp_path).parameters()
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)


def test_written_files_have_the_form_that_comfyui_reads(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    adapter = attach(unet, "oft")
    assert adapter.save(path) == []  # no layer has an adapter without effect
    tensors = tc.load_file(path)
    blocks = tensors[f"{KEY}.oft_blocks"].numpy()
    upper = adapter.named_parameters()[f"{LAYER}.oft_blocks"].numpy()
    np.testing.assert_array_equal(
        blocks - blocks.transpose(0, 2, 1), skew(upper).astype(np.float32)
    )
    # alpha limits the norm of Q. A1111 reads an alpha of 0 as "no rotation", not as "no limit". The
    # file therefore has an alpha whose limit no rotation reaches.
    assert tensors[f"{KEY}.alpha"].item() == 1e4
    assert all(name.endswith((".oft_blocks", ".alpha")) for name in tensors)


def test_a_new_adapter_changes_no_weight_and_trains_only_blocks(unet: tc.models.SDXLUNet) -> None:
    before = weights(unet)
    adapter = unet.add_adapter(tc.LoraConfig(**OUTPUT_SIDE))
    unet.merge_adapter()
    for name, value in weights(unet).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert {name.rpartition(".")[2] for name in adapter.named_parameters()} == {"oft_blocks"}


def test_files_and_formats_that_do_not_fit_are_rejected(
    unet: tc.models.SDXLUNet, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    input_side = OUTPUT_SIDE | {"oft_side": "input", "target_modules": ["to_q"]}
    adapter = unet.add_adapter(tc.LoraConfig(**input_side))
    with pytest.raises(ArgumentError, match=r'save with format "peft", .* \(--oft-side output\)'):
        adapter.save(path, format="kohya")
    for var in adapter.parameters():
        var.set(var + 0.1)
    adapter.save(tmp_path / "peft", format="peft")
    unet.remove_adapter()
    with pytest.raises(ArgumentError, match="load it with scale=1, or merge it"):
        unet.load_adapter(tmp_path / "peft", scale=0.5).save(path, format="peft")
    unet.remove_adapter()
    output_side = unet.add_adapter(tc.LoraConfig(**OUTPUT_SIDE | {"target_modules": ["to_q"]}))
    with pytest.raises(ConfigError, match=r'oft_side="input" \(--oft-side input\)'):
        output_side.load(tmp_path / "peft")
    unet.remove_adapter()
    smaller = unet.add_adapter(tc.LoraConfig(**input_side | {"oft_block_size": 4}))
    with pytest.raises(tc.ShapeError, match="is the oft_block_size the same"):
        smaller.load(tmp_path / "peft")
    unet.remove_adapter()
    series = unet.add_adapter(tc.LoraConfig(**input_side, use_cayley_neumann=True))
    with pytest.raises(ConfigError, match="the file has use_cayley_neumann=False"):
        series.load(tmp_path / "peft")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        # The layer has 8 outputs, so two blocks of 4 x 4 would fit. The first three files are
        # rejected whatever their number of blocks.
        ({"oft_blocks": (2, 4, 4, 4)}, "butterfly form is not supported"),
        ({"oft_blocks": (4, 4, 4), "rescale": (16, 1)}, "a factor for each output"),
        ({"oft_blocks": (4, 4, 5)}, r"expected \(blocks, n, n\)"),
        ({"oft_blocks": (3, 4, 4)}, r"expected \(k, n \(n - 1\) / 2\) with k"),
        ({"oft_R.weight": (3, 7)}, r"expected \(k, n \(n - 1\) / 2\) with k"),
    ],
    ids=["butterfly", "rescale", "not square", "number of blocks", "number of elements"],
)
def test_unsupported_forms_and_wrong_shapes_of_oft_are_errors(
    unet: tc.models.SDXLUNet, tmp_path: Path, tensors: dict[str, tuple[int, ...]], message: str
) -> None:
    values = {f"{KEY}.{name}": tc.ones(shape) for name, shape in tensors.items()}
    tc.save_file(values, tmp_path / "a.safetensors")
    with pytest.raises((WeightsFormatError, tc.ShapeError), match=message):
        unet.load_adapter(tmp_path / "a.safetensors")


def test_verify_says_how_each_tool_reads_oft(
    unet: tc.models.SDXLUNet, attach: Attach, sdxl: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    attach(unet, "oft").save(path)
    report = tc.verify_adapter(path, "sdxl", sdxl)
    assert report.good
    module = report.modules[0]
    assert module.ignored_by["diffusers"] == "it only loads LoRA"
    assert module.changed_by == {"A1111": "it rotates biases too"}
    tensors = tc.load_file(path)
    # ComfyUI limits the norm of Q by this alpha, so it would change the weights.
    low_alphas = {key: tc.tensor(1e-2) for key in tensors if key.endswith(".alpha")}
    tc.save_file(tensors | low_alphas, path)
    limited = tc.verify_adapter(path, "sdxl", sdxl)
    assert not limited.good
    assert "alpha times the number of outputs" in limited.modules[0].changed_by["ComfyUI"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("side", "series"),
    [("input", False), ("input", True), ("output", False)],
    ids=["inputs exactly", "inputs by a series", "outputs exactly"],
)
def test_a_gpu_computes_nearly_the_same_predictions_and_gradients(side: str, series: bool) -> None:
    results = []
    for device in ("cpu", "cuda"):
        model = tc.models.CausalLM.from_pretrained(LLAMA, dtype="f32", device=device)
        config = tc.LoraConfig(
            adapter="oft", oft_side=side, use_cayley_neumann=series, target_modules=["all-linear"]
        )
        adapter = model.add_adapter(config)
        random = np.random.default_rng(1)
        for var in adapter.parameters():
            drawn = 0.1 * random.standard_normal(var.shape)
            var.set(tc.tensor(drawn.astype(np.float32)).to(device))
        ids = tc.tensor(np.arange(12).reshape(1, 12) % 40, dtype="i64").to(device)
        y = model(ids)
        (y * y).mean().backward()
        results.append(
            [y.to("cpu").numpy(), *(var.grad.to("cpu").numpy() for var in adapter.parameters())]
        )
    for on_cpu, on_gpu in zip(*results, strict=True):
        np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-3, atol=1e-4 * np.abs(on_cpu).max())
