//! The tiles with which cuBLASLt multiplies the matrices of models fastest.

use super::gpu::Gpu;
use super::product_calls::Key;

/// The sizes `[m, n, k]` in cuBLAS' order, where n is the number of rows of the model's input; whether the first
/// operand (the weight) is transposed, as in a forward pass but not in the product for the input's gradient; whether
/// there is a bias; and cuBLASLt's number of the tile.
type Choice = ([usize; 3], bool, bool, u32);

/// Products in half precision for which the usual algorithm is not the fastest: with a bias, the usual algorithm is the
/// first that cuBLASLt recommends; without, it is cuBLAS' choice. With the tile listed here, which is among cuBLASLt's
/// recommendations, the product takes at least 3 % less time and has the same bits. Measured by `benches/gpu_tiles.py`
/// on an H100 on 2026-11-26, with cuBLASLt 13.1 and the numbers of rows that the benchmarks have.
const CHOICES: &[Choice] = &[
    // SDXL, batches of 1 and 4
    ([3840, 1024, 1280], true, false, 20),
    ([1280, 1024, 3840], false, false, 28),
    ([1280, 1024, 1280], false, false, 28),
    ([10240, 1024, 1280], true, true, 20),
    ([1280, 1024, 10240], false, false, 28),
    ([1920, 4096, 640], true, false, 29),
    ([5120, 4096, 640], true, true, 20),
    ([2560, 4096, 640], false, false, 29),
    ([3840, 4096, 1280], true, false, 29),
    ([1280, 4096, 1280], true, false, 29),
    ([1280, 4096, 1280], false, false, 29),
    ([1280, 4096, 10240], false, false, 29),
    ([5120, 4096, 1280], false, false, 29),
    ([1920, 16384, 640], true, false, 20),
    ([640, 16384, 1920], false, false, 29),
    ([640, 16384, 640], true, true, 20),
    ([5120, 16384, 640], true, true, 24),
    ([640, 16384, 5120], false, false, 248),
    ([2560, 16384, 640], false, false, 29),
    // Qwen2-1.5B, 4 × 2048 tokens
    ([2048, 8192, 1536], true, true, 20),
    ([1536, 8192, 2048], false, false, 29),
    ([1536, 8192, 1536], true, false, 20),
    ([1536, 8192, 1536], false, false, 20),
    ([17920, 8192, 1536], true, false, 201),
    ([1536, 8192, 8960], true, false, 495),
    ([8960, 8192, 1536], false, false, 29),
    // Llama-3-8B, 2 × 2048 tokens
    ([6144, 4096, 4096], true, false, 24),
    ([28672, 4096, 4096], true, false, 201),
    // Flux
    ([9216, 4608, 3072], true, true, 24),
    ([3072, 4608, 3072], true, true, 20),
    ([12288, 4096, 3072], true, true, 23),
    ([3072, 4096, 12288], false, false, 24),
    ([12288, 4096, 3072], false, false, 24),
    ([21504, 4608, 3072], true, true, 24),
    // Z-Image
    ([10240, 4224, 3840], false, false, 495),
    // SD3.5-medium
    ([4608, 4096, 1536], true, true, 495),
    ([1536, 4096, 4608], false, false, 31),
    ([1536, 4096, 1536], true, true, 495),
    ([1536, 4096, 6144], false, false, 31),
    ([1536, 4096, 6144], true, true, 495),
    ([6144, 4096, 1536], false, false, 20),
];

/// Returns the tile for a product, if one is known to be faster. A choice also applies if the product's n is smaller
/// than the listed n by less than an eighth, because it needs nearly the same number of tiles.
pub(super) fn preferred(gpu: &Gpu, key: &Key) -> Option<u32> {
    if !gpu.runs_hopper_kernels() || !key.arithmetic.is_half() {
        return None;
    }
    // The second operand is the model's input. The choices were measured with row-major inputs, which cuBLAS does not
    // transpose (`false`). The other field of each operand, the distance between its columns, does not matter here.
    let ([m, n, k], [(is_transposed, _), (false, _)]) = (key.sizes, key.operands) else { return None };
    let fits = |&&([listed_m, listed_n, listed_k], listed_transposed, listed_bias, _): &&Choice| {
        (listed_m, listed_k, listed_transposed, listed_bias) == (m, k, is_transposed, key.arithmetic.has_bias())
            && (listed_n - listed_n / 8 + 1..=listed_n).contains(&n)
    };
    CHOICES.iter().find(fits).map(|&(.., tile)| tile)
}
