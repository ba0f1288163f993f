"""Quantized weights on a GPU.

Dequantized values equal the CPU's bit by bit; results of models are near the CPU's.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.models import CausalLM, FluxTransformer, SDXLUNet
from trainable_candle.nn import functional as F

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = ("int8", "fp8", "nf4")
# The shapes cover whole chunks of the kernels, rows that end inside a chunk, odd numbers of
# elements, and more elements than one grid stride.
SHAPES = ((64, 128), (37, 91), (1, 1), (5, 8), (3, 4096), (2050, 4100))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantized_values_are_those_of_the_cpu(
    gpu: str, shape: tuple[int, int], format: str
) -> None:
    tc.manual_seed(0)
    matrix = tc.quantize(tc.randn(shape) * 0.02, format)
    moved = matrix.to(gpu)
    assert (moved.device, moved.nbytes) == (tc.zeros((1,), device=gpu).device, matrix.nbytes)
    for dtype in ("f32", "bf16", "f16", "f64"):
        expected = matrix.dequantize(dtype).to("f64").numpy()
        found = moved.dequantize(dtype).to("cpu").to("f64").numpy()
        np.testing.assert_array_equal(found, expected, err_msg=dtype)


@pytest.mark.parametrize("format", [*FORMATS, "int4"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
def test_fake_quantized_values_and_gradients_are_those_of_the_cpu(
    gpu: str, dtype: str, format: str
) -> None:
    tc.manual_seed(0)
    weight, upstream = (tc.randn((66, 416)) * 0.02).to(dtype), tc.randn((66, 416)).to(dtype)
    by_device = []
    for device in ("cpu", gpu):
        x = tc.Var(weight.to(device))
        y = F.fake_quantize(x, format)
        (y * upstream.to(device)).sum().backward()
        by_device.append([t.to("cpu").to("f64").numpy() for t in (y.detach(), x.grad)])
    for expected, found in zip(*by_device, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_gradients_of_quantization_aware_training_are_near_those_of_the_cpu(gpu: str) -> None:
    path = GOLDEN / "flux" / "transformer"
    case = tc.load_file(GOLDEN / "flux" / "transformer_forward.safetensors")
    by_device = []
    for device in ("cpu", gpu):
        model = FluxTransformer.from_pretrained(path, dtype="f32", device=device)
        tc.manual_seed(0)
        adapter = model.add_adapter(tc.LoraConfig(r=4, target_modules=["to_q", "to_k"], qat="int8"))
        inputs = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")
        names = (*inputs, "img_ids", "txt_ids", "guidance")
        y = model(**{name: case[name].to(device) for name in names})
        F.mse_loss(y, tc.ones(y.shape, device=device)).backward()
        by_device.append([v.grad.to("cpu").numpy() for v in adapter.parameters()])
    for expected, found in zip(*by_device, strict=True):
        assert np.linalg.norm(found - expected) <= 1e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"])
@pytest.mark.parametrize(("rows", "row_blocks"), [(1, 1), (3, 5), (2050, 17)])
def test_blocks_of_ggml_have_the_values_of_the_cpu(
    gpu: str, rows: int, row_blocks: int, format: str
) -> None:
    """The blocks are random bytes, but their scales and minima are finite, of many magnitudes."""
    # The size of a block in bytes, and the offsets of its f16 scale and minimum.
    size, offsets = {
        "q4_0": (18, [0]),
        "q4_1": (20, [0, 2]),
        "q5_0": (22, [0]),
        "q5_1": (24, [0, 2]),
        "q8_0": (34, [0]),
        "q4_k": (144, [0, 2]),
        "q5_k": (176, [0, 2]),
        "q6_k": (210, [208]),
    }[format]
    count = rows * row_blocks
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (count, size), np.uint8)
    for offset in offsets:
        scales = random.normal(0, 1, count) * 10.0 ** random.integers(-7, 4, count)
        blocks[:, offset : offset + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    matrix = tc.QuantizedTensor.from_blocks(tc.tensor(blocks.reshape(rows, -1)), format)
    moved = matrix.to(gpu)
    for dtype in ("f32", "bf16", "f64"):
        expected = matrix.dequantize(dtype).to("f64").numpy()
        found = moved.dequantize(dtype).to("cpu").to("f64").numpy()
        # Compare bits, which also distinguishes -0 from 0.
        np.testing.assert_array_equal(found.view(np.uint64), expected.view(np.uint64), dtype)


def test_a_matrix_is_quantized_on_the_gpu_as_on_the_cpu(gpu: str) -> None:
    tc.manual_seed(0)
    weight = tc.randn((33, 70))
    for format in FORMATS:
        expected = tc.quantize(weight, format).tensors()
        found = tc.quantize(weight.to(gpu), format).tensors()
        for name, tensor in expected.items():
            np.testing.assert_array_equal(found[name].to("cpu").numpy(), tensor.numpy())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_quantized_linear_layer_equals_one_with_its_dequantized_weight(
    gpu: str, format: str, dtype: str
) -> None:
    tc.manual_seed(0)
    weight = tc.quantize(tc.randn((96, 256)).to(dtype), format).to(gpu)
    x = tc.Var(tc.randn((70, 256), device=gpu).to(dtype))
    for bias in (None, tc.randn((96,), device=gpu).to(dtype)):
        y, expected = (F.linear(x, w, bias) for w in (weight, weight.dequantize()))
        np.testing.assert_array_equal(y.to("f32").numpy(), expected.to("f32").numpy())
        dx, expected_dx = (tc.grad(each.to("f32").sum(), [x])[0] for each in (y, expected))
        np.testing.assert_array_equal(dx.to("f32").numpy(), expected_dx.to("f32").numpy())


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize(("dtype", "largest"), [("f32", 1e-3), ("f16", 2e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize(
    "shape",
    [
        # Rows, inputs and outputs.
        (1, 640, 640),
        (77, 3072, 48),
        (333, 48, 1936),
        (1030, 640, 1280),
        # An H100 or H200 has 132 multiprocessors, each of which computes one tile of 128 x 80
        # results at a time. These shapes have 128 and 256 tiles: one round and two rounds.
        (1000, 1936, 1280),
        (4000, 1280, 640),
    ],
)
def test_products_of_codes_are_near_those_of_the_cpu(
    gpu: str, shape: tuple[int, int, int], dtype: str, largest: float, format: str
) -> None:
    """`largest` is the largest accepted difference, relative to the largest value.

    There are two causes: tensor cores sum products of e4m3 codes with fewer bits than f32 has, and
    the results are rounded to `dtype`.
    """
    tc.manual_seed(0)
    rows, inner, outer = shape
    weight = tc.quantize(tc.randn((outer, inner)).to(dtype), format)
    x, bias = tc.randn((rows, inner)).to(dtype), tc.randn((outer,)).to(dtype)
    upstream = tc.randn((rows, outer)).to(dtype)
    found = []
    tc.set_w8a8(True)
    try:
        for device in ("cpu", gpu):
            var, matrix = tc.Var(x.to(device)), weight.to(device)
            for added in (None, bias.to(device)):
                y = F.linear(var, matrix, added)
                dx = tc.grad(y, [var], upstream.to(device))[0]
                found.append([t.detach().to("cpu").to("f64").numpy() for t in (y, dx)])
    finally:
        tc.set_w8a8(False)
    # On each device, the first pair is without a bias and the second pair with one.
    for cpu_pair, gpu_pair in zip(found[:2], found[2:], strict=True):
        for expected, ours in zip(cpu_pair, gpu_pair, strict=True):
            assert np.abs(ours - expected).max() <= largest * np.abs(expected).max()


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("width", [48, 1008])
def test_a_feed_forward_network_of_codes_equals_separate_operations(
    gpu: str, tmp_path: Path, width: int, dtype: str, format: str
) -> None:
    """Under the policy "selective", the operations run separately; otherwise they are fused."""
    config = json.loads((GOLDEN / "sdxl" / "unet" / "config.json").read_text())
    config |= {"block_out_channels": [8, 16, width], "norm_num_groups": 8, "layers_per_block": 1}
    # In configurations of SDXL, `attention_head_dim` has the numbers of heads.
    config |= {"attention_head_dim": [1, 2, width // 16], "transformer_layers_per_block": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tc.manual_seed(0)
    # Two images. Features of texts have 20 columns, and the pooled ones 12, as the config says.
    image, text = (tc.randn(shape).to(dtype).to(gpu) for shape in ((2, 4, 24, 16), (2, 7, 20)))
    pooled = tc.randn((2, 12)).to(dtype).to(gpu)
    times, sizes = tc.full((2,), 500.0, device=gpu), tc.full((2, 6), 64.0, device=gpu)
    tc.set_w8a8(True)
    try:
        model = SDXLUNet.from_config(tmp_path / "config.json", dtype, gpu, quantize=format)
        adapter = model.add_adapter(tc.LoraConfig(r=4, target_modules=["to_q", "to_out.0"]))
        for var in adapter.parameters():
            var.set(tc.randn(var.shape, device=gpu) * 0.05)
        found = []
        for policy in ("none", "selective", "full"):
            if policy != "none":
                model.enable_gradient_checkpointing(policy)
            with tc.cuda.profile(gpu) as profile:
                y = model(image, times, text, text_embeds=pooled, time_ids=sizes)
                loss = y.to("f32").square().mean()
                gradients = tc.grad(loss, adapter.parameters())
            kernels = ("add_layer_norm_codes_", "geglu_codes_forward_", "geglu_codes_backward_")
            fused = [kernel in str(profile) for kernel in kernels]
            assert fused == [policy != "selective"] * 3
            found.append([t.to("cpu").to("f32").numpy() for t in (y, *gradients)])
    finally:
        tc.set_w8a8(False)
    for none, selective, full in zip(*found, strict=True):
        assert np.isfinite(none).all()
        assert np.abs(none).max() > 0
        np.testing.assert_array_equal(selective, none)
        np.testing.assert_array_equal(full, none)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_losses_of_a_transformer_are_near_those_of_the_cpu(
    gpu: str, format: str, policy: str
) -> None:
    """The losses of eager steps and of captured steps are compared with those of the CPU."""
    case = tc.load_file(GOLDEN / "flux" / "transformer_forward.safetensors")
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")
    names = (*names, "img_ids", "txt_ids", "guidance")

    def losses(device: str, *, graph: bool) -> list[float]:
        tc.manual_seed(0)
        folder = GOLDEN / "flux" / "transformer"
        model = FluxTransformer.from_pretrained(folder, dtype="f32", device=device, quantize=format)
        if policy != "none":
            model.enable_gradient_checkpointing(policy)
        adapter = model.add_adapter(tc.LoraConfig(r=4, target_modules=["all-linear"]))
        for number, var in enumerate(adapter.parameters()):
            values = np.random.default_rng(number).normal(0, 0.05, var.shape)
            var.set(tc.tensor(values.astype(np.float32)).to(device))
        inputs = [case[name].to(device) for name in names]
        optimizer = tc.optim.AdamW(adapter.parameters(), lr=1e-2)

        def step(*given: tc.Tensor) -> tc.Tensor:
            found = model(**dict(zip(names, given, strict=True)))
            loss = (found * found).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = tc.cuda.capture(step, inputs) if graph else step
        return [run(*inputs).item() for _ in range(6)]

    expected = losses("cpu", graph=False)
    np.testing.assert_allclose(losses(gpu, graph=False), expected, rtol=2e-4)
    np.testing.assert_allclose(losses(gpu, graph=True), expected, rtol=2e-4)


def test_logits_of_a_quantized_language_model_are_near_those_of_the_cpu(gpu: str) -> None:
    folder = GOLDEN / "llm" / "llama"
    ids = tc.tensor(np.arange(48).reshape(2, 24) * 7 % 100)
    for format in FORMATS:
        cpu_model = CausalLM.from_pretrained(folder, dtype="f32", quantize=format)
        gpu_model = CausalLM.from_pretrained(folder, dtype="f32", device=gpu, quantize=format)
        expected = cpu_model(ids).numpy()
        found = gpu_model(ids.to(gpu)).to("cpu").numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
