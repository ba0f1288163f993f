"""On a GPU, the kernels of convolutions and of products of 8-bit codes (W8A8) add residuals.

Only layers without an adapter use these kernels: a layer with an adapter computes its result first
and then adds the residual in a separate sum. A new adapter changes no values, so a model whose
layers have new adapters gives the expected values.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.models import SDXLUNet

pytestmark = pytest.mark.gpu
CONFIG = Path(__file__).parents[1] / "golden" / "sdxl" / "unet" / "config.json"


def results(
    tmp_path: Path,
    device: str,
    dtype: str,
    targets: list[str] | None,
    quantize: str | None = None,
) -> list[np.ndarray]:
    """The result of a UNet and the gradient of its input. The layers `targets` get new adapters."""
    config = json.loads(CONFIG.read_text())
    config |= {"block_out_channels": [32, 64, 128], "norm_num_groups": 8, "layers_per_block": 1}
    # diffusers' name for the number of heads of each level.
    config |= {"attention_head_dim": [1, 2, 8], "transformer_layers_per_block": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tc.manual_seed(0)
    shapes = ((2, 4, 24, 16), (2, 7, 20), (2, 12))
    image, text, pooled = (tc.randn(shape).to(device).to(dtype) for shape in shapes)
    times, sizes = tc.full((2,), 500.0, device=device), tc.full((2, 6), 64.0, device=device)
    source = SDXLUNet.from_config(tmp_path / "config.json", "f32", "cpu")
    source.save_pretrained(tmp_path / "model")
    model = SDXLUNet.from_pretrained(
        tmp_path / "model", dtype=dtype, device=device, quantize=quantize
    )
    if targets is not None:
        model.add_adapter(tc.LoraConfig(r=4, target_modules=targets))
    image = tc.Var(image)
    y = model(image, times, text, text_embeds=pooled, time_ids=sizes)
    dx = tc.grad(y.to("f32").square().mean(), [image])[0]
    return [t.detach().to("cpu").to("f32").numpy() for t in (y, dx)]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_convolutions_add_as_separate_sums_do(gpu: str, tmp_path: Path, dtype: str) -> None:
    """A convolution rounds its result before it adds, as a separate sum does."""
    fused = results(tmp_path, gpu, dtype, None)
    # The layers whose results are added to another tensor: an embedding or a residual.
    separate = results(tmp_path, gpu, dtype, ["conv1", "conv2"])
    for ours, expected in zip(fused, separate, strict=True):
        assert np.abs(expected).max() > 0
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_products_of_codes_add_as_separate_sums_do(
    gpu: str, tmp_path: Path, dtype: str, format: str
) -> None:
    """Results may differ by roundings, because cuBLASLt adds before it rounds a product of fp8.

    A different rounding can also change the codes of the inputs of later layers.
    """
    tc.set_w8a8(True)
    try:
        fused = results(tmp_path, gpu, dtype, None, format)
        separate = results(tmp_path, gpu, dtype, ["ff.net.2", "proj_out"], format)
    finally:
        tc.set_w8a8(False)
    for ours, expected in zip(fused, separate, strict=True):
        assert np.linalg.norm(ours - expected) <= 0.05 * np.linalg.norm(expected)
