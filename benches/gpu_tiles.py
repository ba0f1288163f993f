"""Find the tiles with which cuBLASLt multiplies the matrices of models fastest.

python benches/gpu_tiles.py [--only sdxl] [--least 2] [--codes]

The script prints a line for each product of a model. An arrow marks the products for which one of
the algorithms that cuBLASLt recommends saves at least `--least` percent of the usual algorithm's
time. For a product with a bias or of codes, the usual algorithm is cuBLASLt's first recommendation;
for other products it is the choice of cuBLAS. The marked lines are those of the table in
rust/core/src/cuda/gemm_tiles.rs, which has no products of codes. With `--codes`, the products are
those of e4m3 codes, with a scale for each row and column. As in a model, each product reads its
weight from GPU memory and its input from the cache. Needs torch.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Values of the enumerations in cublasLt.h and library_types.h. First types of numbers and of sums:
BF16, F32, E4M3, COMPUTE_F32 = 14, 0, 28, 68
# Attributes of a product, with the mode "a scale for each row or column" and the epilogue "bias":
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8
SCALE_POINTERS, SCALE_MODES, VECTOR_OF_SCALES = (17, 18), (31, 32), 3
WITH_BIAS = 4
# Attributes of a preference, with the scheme of reduction "in the type of the sums":
MOST_WORKSPACE, REDUCTION, IN_COMPUTE_TYPE, ALIGNMENTS = 1, 3, 2, (5, 6, 7, 8)
# Attributes of an algorithm:
TILE, SPLITS, CLUSTER = 1, 2, 8
WORKSPACE = 32 << 20
"""Bytes of the workspace that an algorithm may use."""
ALGORITHMS = 8
"""The most algorithms that cuBLASLt recommends for a product."""
WEIGHT_BYTES = 200 << 20
"""Bytes of the weights that calls use in turn: several times the second-level cache."""


@dataclass(frozen=True)
class Layer:
    """A linear layer of a model: the rows of its input, its input and its output features."""

    model: str
    rows: int
    inputs: int
    outputs: int
    bias: bool = False


def layers() -> Iterator[Layer]:
    """Yield the large linear layers of the models of the benchmarks."""
    # SDXL's two kinds of attention blocks, for images of 1024 x 1024 pixels.
    for batch in (1, 4):
        for tokens, width in ((1024, 1280), (4096, 640)):
            rows = batch * tokens
            yield Layer("sdxl", rows, width, 3 * width)
            yield Layer("sdxl", rows, width, width)
            yield Layer("sdxl", rows, width, width, bias=True)
            yield Layer("sdxl", rows, width, 8 * width, bias=True)
            yield Layer("sdxl", rows, 4 * width, width, bias=True)
    for model, rows, width, key_width, mlp_width in (
        ("qwen2-1.5b", 8192, 1536, 256, 8960),
        ("llama3-8b", 4096, 4096, 1024, 14336),
    ):
        yield Layer(model, rows, width, width + 2 * key_width, bias=model.startswith("qwen"))
        yield Layer(model, rows, width, width)
        yield Layer(model, rows, width, 2 * mlp_width)
        yield Layer(model, rows, mlp_width, width)
    # 4096 image tokens (1024 x 1024 pixels), alone or with 512 (Flux) or 128 (Z-Image) text tokens.
    for model, rows, width in (("flux", 4608, 3072), ("flux", 4096, 3072), ("z-image", 4224, 3840)):
        yield Layer(model, rows, width, 3 * width, bias=model == "flux")
        yield Layer(model, rows, width, width, bias=model == "flux")
    yield Layer("flux", 4096, 3072, 12288, bias=True)
    yield Layer("flux", 4096, 12288, 3072, bias=True)
    # Flux's single-stream blocks: a layer for q, k, v and the MLP, then one for attention and MLP.
    yield Layer("flux", 4608, 3072, 21504, bias=True)
    yield Layer("flux", 4608, 15360, 3072, bias=True)
    # Z-Image's MLP (gate and up in one layer, then down); SD3's attention and MLP.
    yield Layer("z-image", 4224, 3840, 20480)
    yield Layer("z-image", 4224, 10240, 3840)
    yield Layer("sd3", 4096, 1536, 4608, bias=True)
    yield Layer("sd3", 4096, 1536, 1536, bias=True)
    yield Layer("sd3", 4096, 1536, 6144, bias=True)
    yield Layer("sd3", 4096, 6144, 1536, bias=True)


class CublasLt:
    """cuBLASLt's library, called through ctypes, with a handle and a workspace."""

    def __init__(self) -> None:
        folder = Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "lib"
        found = sorted(folder.glob("libcublasLt.so.*"))
        self.library = ctypes.CDLL(str(found[0]) if found else "libcublasLt.so.13")
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function, and raise `RuntimeError` if its status is not 0."""
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: status {status}")

    def make(self, name: str, *arguments: Any) -> c_void_p:
        """Call a function that makes an object, and return the object's handle."""
        made = c_void_p()
        self.call(name, byref(made), *arguments)
        return made

    def attribute(self, algorithm: Any, which: int) -> int:
        """Return an attribute of an algorithm."""
        value, written = c_uint16() if which == CLUSTER else c_uint32(), c_size_t()
        size = c_size_t(ctypes.sizeof(value))
        name = "cublasLtMatmulAlgoConfigGetAttribute"
        self.call(name, algorithm, which, byref(value), size, byref(written))
        return value.value


class Product:
    """A product y (n, m) = x (n, k) times weight (k, m), with a bias or without.

    All matrices are row-major. For cuBLASLt they are the transposed column-major matrices, so
    cuBLASLt's first operand is the weight, and m, n and k are the sizes of its product. If
    `transposed`, the weight is stored as (m, k). If `codes`, x and the weight are e4m3 numbers.
    """

    def __init__(
        self,
        lt: CublasLt,
        sizes: tuple[int, int, int],
        *,
        transposed: bool,
        bias: bool,
        codes: bool = False,
    ) -> None:
        self.lt = lt
        m, n, k = sizes
        bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        operand_dtype = torch.float8_e4m3fn if codes else torch.bfloat16

        def random(rows: int, columns: int) -> torch.Tensor:
            return torch.randn((rows, columns), **bf16).to(operand_dtype)

        count = max(2, WEIGHT_BYTES // (operand_dtype.itemsize * m * k))
        self.weights = [random(m, k) if transposed else random(k, m) for _ in range(count)]
        self.x, self.y = random(n, k), torch.empty((n, m), **bf16)
        self.bias = torch.zeros(m, **bf16)
        self.description = lt.make("cublasLtMatmulDescCreate", COMPUTE_F32, F32)
        for which, value in ((TRANSPOSE_A, int(transposed)), (TRANSPOSE_B, 0)):
            self.describe(which, c_int(value))
        if bias:
            self.describe(EPILOGUE, c_int(WITH_BIAS))
            self.describe(BIAS_POINTER, c_void_p(self.bias.data_ptr()))

        if codes:
            self.scales = [torch.ones(size, device="cuda") for size in (m, n)]
            for scales, mode, pointer in zip(self.scales, SCALE_MODES, SCALE_POINTERS, strict=True):
                self.describe(mode, c_int(VECTOR_OF_SCALES))
                self.describe(pointer, c_void_p(scales.data_ptr()))

        def layout(number_type: int, rows: int, columns: int) -> c_void_p:
            shape = (c_uint64(rows), c_uint64(columns), c_int64(rows))
            return lt.make("cublasLtMatrixLayoutCreate", number_type, *shape)

        operand = E4M3 if codes else BF16
        weight_shape = (k, m) if transposed else (m, k)
        self.layouts = [layout(operand, *weight_shape), layout(operand, k, n), layout(BF16, m, n)]

    def describe(self, which: int, value: Any) -> None:
        """Set an attribute of the product."""
        size = c_size_t(ctypes.sizeof(value))
        name = "cublasLtMatmulDescSetAttribute"
        self.lt.call(name, self.description, which, byref(value), size)

    def algorithms(self) -> list[Any]:
        """Return the algorithms that cuBLASLt recommends, its first recommendation first."""
        preference = self.lt.make("cublasLtMatmulPreferenceCreate")
        options = [(MOST_WORKSPACE, c_uint64(WORKSPACE)), (REDUCTION, c_uint32(IN_COMPUTE_TYPE))]
        # torch aligns tensors to 256 bytes or more.
        options += [(which, c_uint32(256)) for which in ALIGNMENTS]
        for which, value in options:
            size = c_size_t(ctypes.sizeof(value))
            name = "cublasLtMatmulPreferenceSetAttribute"
            self.lt.call(name, preference, which, byref(value), size)
        # A result has 96 bytes: 64 of the algorithm, then 32 with its workspace, status and waves.
        # So a pointer to a result is also a pointer to its algorithm.
        results, found = (ctypes.c_uint8 * 96 * ALGORITHMS)(), c_int()
        a, b, y = self.layouts
        name = "cublasLtMatmulAlgoGetHeuristic"
        request = (self.description, a, b, y, y, preference)
        self.lt.call(name, self.lt.handle, *request, ALGORITHMS, results, byref(found))
        return [results[i] for i in range(found.value)]

    def run(self, algorithm: Any, turn: int) -> None:
        """Multiply with an algorithm; successive turns use different weights."""
        one, zero, workspace = c_float(1), c_float(0), self.lt.workspace
        a, b, y = self.layouts
        weight = self.weights[turn % len(self.weights)]
        result = c_void_p(self.y.data_ptr())
        self.lt.call(
            "cublasLtMatmul", self.lt.handle, self.description, byref(one),
            c_void_p(weight.data_ptr()), a, c_void_p(self.x.data_ptr()), b, byref(zero),
            result, y, result, y, algorithm, c_void_p(workspace.data_ptr()), c_size_t(WORKSPACE),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip


def microseconds(call: Callable[[int], object]) -> float:
    """Return the time of a call inside a CUDA graph of 20 calls.

    It is the median of nine replays, after one that does not count.

    Args:
        call: gets the number of the call in the graph.
    """
    count = 20
    for turn in range(3):
        call(turn)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(count):
            call(turn)
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times[1:])


def examine(lt: CublasLt, layer: Layer, *, backward: bool, least: float, codes: bool) -> None:
    """Time the product of a layer with each algorithm, and print its line.

    If `backward`, the product is the gradient of the layer's input. Then the gradient of the
    layer's output takes the place of the input, so input and output features are swapped.
    """
    m, k = (layer.inputs, layer.outputs) if backward else (layer.outputs, layer.inputs)
    bias = layer.bias and not backward
    # A weight is stored as (outputs, inputs): (m, k) forward, (k, m) backward. The library
    # multiplies codes only with a weight stored as (m, k), so it keeps a transposed copy too.
    transposed = codes or not backward
    product = Product(lt, (m, layer.rows, k), transposed=transposed, bias=bias, codes=codes)
    algorithms = product.algorithms()
    times = [microseconds(lambda turn, a=a: product.run(a, turn)) for a in algorithms]
    usual = times[0]
    if not bias and not codes:

        def by_cublas(turn: int) -> None:
            weight = product.weights[turn % len(product.weights)]
            torch.mm(product.x, weight if backward else weight.T, out=product.y)

        usual = microseconds(by_cublas)
    # Algorithms that split the sums over k round differently, so they are left out.
    unsplit = [i for i, a in enumerate(algorithms) if lt.attribute(a, SPLITS) <= 1]
    best = min(unsplit, key=lambda i: times[i])
    saving = 100 * (1 - times[best] / usual)
    tile, cluster = (lt.attribute(algorithms[best], which) for which in (TILE, CLUSTER))
    tiles = [lt.attribute(a, TILE) for a in algorithms]
    entry = f"({[m, layer.rows, k]}, {str(transposed).lower()}, {str(bias).lower()}, {tile}),"
    mark = "   " if saving < least else "-> "
    print(
        f"{mark}{entry:52s} // {layer.model}, {usual:.1f} -> {times[best]:.1f} us, {saving:.1f} %, "
        f"number {best} of {tiles}, cluster {cluster}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the models whose name contains this")
    parser.add_argument(
        "--least", type=float, default=3, help="least saving of a marked product, in %%"
    )
    parser.add_argument("--codes", action="store_true", help="multiply e4m3 codes")
    given = parser.parse_args()
    lt = CublasLt()
    print(f"// {torch.cuda.get_device_name()}, cuBLASLt {lt.library.cublasLtGetVersion()}")
    seen = set()
    for layer in layers():
        for backward in (False, True):
            shape = (layer.rows, layer.inputs, layer.outputs, layer.bias and not backward, backward)
            if given.only in layer.model and shape not in seen:
                seen.add(shape)
                examine(lt, layer, backward=backward, least=given.least, codes=given.codes)


if __name__ == "__main__":
    main()
