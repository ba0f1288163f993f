"""With W8A8, a product uses the kernels and cuBLASLt calls that fit its dtype and the GPU.

W8A8 multiplies weights and activations as codes: numbers of 8 bits with scales. The simulated GPU
has compute capability 9.0.
"""

from typing import Any

import pytest

# `calls` replaces the words in capitals.
SNIPPET = """
    tc.set_w8a8(True)
    weight = tc.quantize(tc.randn((OUT, 64)), "FORMAT").to("cuda")
    x = tc.Var(tc.randn((ROWS, 64), dtype="DTYPE", device="cuda"))
    bias = tc.randn((OUT,), dtype="DTYPE", device="cuda")
    mark("forward")
    y = tc.nn.functional.linear(x, weight, bias)
    mark("backward")
    y.backward(tc.ones_like(y))
    mark("end")
"""
# The types of the operands and of the result, in cuBLASLt's numbers: 28 is e4m3, 2 is f16, 14 is
# bf16, 0 is f32.
TO_F16, TO_BF16, TO_F32 = "28,2", "28,14", "28,0"


def calls(cuda: Any, **constants: str) -> dict[str, tuple[list[str], list[tuple[str, ...]]]]:
    """Return the W8A8 kernels of each pass, and the fields of its cuBLASLt products.

    The fields are m, n, k, types, epilogue and fast. In the forward pass, m counts outputs, n rows
    and k inputs; in the backward pass, m counts inputs and k outputs. `fast` is 1 if cuBLASLt may
    use fast accumulation.
    """
    code = SNIPPET
    for name, value in {"OUT": "48", **constants}.items():
        code = code.replace(name, value)
    run = cuda.run(code)
    # The simulated libraries reject no call.
    assert run.of("refused") == []
    found = {}
    for mark in ("forward", "backward"):
        log = run.after(mark)  # up to the next mark
        words = ("codes", "quantize", "sums")
        kernels = [name for name in log.launches if any(word in name for word in words)]
        fields = ("m", "n", "k", "types", "epilogue", "fast")
        products = [tuple(call[field] for field in fields) for call in log.of("product")]
        found[mark] = (kernels, products)
    return found


@pytest.mark.parametrize(("dtype", "types"), [("bf16", TO_BF16), ("f16", TO_F16)])
@pytest.mark.parametrize("rows", ["77", "1"])
def test_cublaslt_scales_products_of_e4m3(cuda: Any, dtype: str, types: str, rows: str) -> None:
    found = calls(cuda, FORMAT="fp8", DTYPE=dtype, ROWS=rows)
    # The epilogue 4 adds the bias; the epilogue 1 does nothing. Fast accumulation is for sums of a
    # forward pass that have at most 1280 terms (here k = 64) and are rounded to bf16.
    fast = "1" if dtype == "bf16" else "0"
    products = [("48", rows, "64", types, "4", fast)]
    assert found["forward"] == ([f"quantize_rows_{dtype}"], products)
    products = [("64", rows, "48", types, "1", "0")]
    assert found["backward"] == ([f"quantize_gradient_{dtype}"], products)


def test_a_kernel_multiplies_e4m3_if_its_tiles_fill_the_gpu(cuda: Any) -> None:
    # The GPU has 132 multiprocessors, each of which computes a tile of 128 x 80 results. The 1000 x
    # 1280 results of the forward pass are 8 x 16 tiles, nearly as many as multiprocessors. The
    # 1000 x 64 results of the backward pass are only 8 x 1, so cuBLASLt multiplies there.
    found = calls(cuda, FORMAT="fp8", DTYPE="bf16", ROWS="1000", OUT="1280")
    kernels = ["quantize_rows_bf16", "product_of_codes_e4m3_n80_bf16"]
    assert found["forward"] == (kernels, [])
    products = [("64", "1000", "1280", TO_BF16, "1", "0")]
    assert found["backward"] == (["quantize_gradient_bf16"], products)


def test_sums_of_e4m3_in_f32_are_scaled_by_a_kernel(cuda: Any) -> None:
    # The products round the 77 rows up to 80, a multiple of 16.
    found = calls(cuda, FORMAT="fp8", DTYPE="f32", ROWS="77")
    kernels = ["quantize_rows_f32", "scale_sums_f32"]
    assert found["forward"] == (kernels, [("48", "80", "64", TO_F32, "1", "0")])
    kernels = ["quantize_gradient_f32", "scale_sums_f32"]
    assert found["backward"] == (kernels, [("64", "80", "48", TO_F32, "1", "0")])


def test_a_kernel_multiplies_and_scales_int8(cuda: Any) -> None:
    # Unlike products of e4m3, this one takes the kernel although its few tiles do not fill the GPU.
    found = calls(cuda, FORMAT="int8", DTYPE="bf16", ROWS="77")
    product = "product_of_codes_int8_n80_bf16"
    assert found["forward"] == (["quantize_rows_bf16", product], [])
    assert found["backward"] == (["quantize_gradient_bf16", product], [])


def test_queries_keys_and_values_are_one_product(cuda: Any) -> None:
    """Linear layers with the same input keep the codes of their weights in common storage.

    One product then computes the outputs of all these layers.
    """
    run = cuda.run(
        """
    from pathlib import Path

    folder = Path(tc.__file__).parent / "assets" / "sdxl_tiny" / "unet"
    model = tc.models.SDXLUNet.from_pretrained(folder, dtype="bf16", device="cuda", quantize="fp8")
    tc.set_w8a8(True)
    mark("forward")
    model(
        tc.zeros(1, 4, 16, 16, dtype="bf16", device="cuda"),
        tc.zeros(1, device="cuda"),
        encoder_hidden_states=tc.zeros(1, 77, 128, dtype="bf16", device="cuda"),
        text_embeds=tc.zeros(1, 64, dtype="bf16", device="cuda"),
        time_ids=tc.zeros(1, 6, device="cuda"),
    )
    mark("end")
    """
    )
    assert run.of("refused") == []
    products = [call for call in run.after("forward").of("product") if call["types"] == TO_BF16]
    # Each of the 11 transformer blocks of the small SDXL has a self-attention. The weights of its
    # queries, keys and values are k x k, so their common product has m = 3 k.
    assert sum(int(call["m"]) == 3 * int(call["k"]) for call in products) == 11
