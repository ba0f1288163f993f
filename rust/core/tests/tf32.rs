//! Matrix products in TF32. The setting holds for the whole process, so this test has a process of its own. Needs a
//! GPU: `cargo test --features cuda --test tf32 -- --ignored`.
#![cfg(feature = "cuda")]

use std::path::PathBuf;

use trainable_candle_core::compute::{MatmulPrecision, set_float32_matmul_precision};
use trainable_candle_core::raw::to_f64_vec;
use trainable_candle_core::{DType, Device, Tensor, device};

/// Products round their factors to TF32 only if `MatmulPrecision::High` is set, and even then they add in f32.
#[test]
#[ignore = "needs a CUDA device"]
fn products_use_tf32_only_on_request() {
    let folders: Vec<PathBuf> =
        std::env::var_os("TRAINABLE_CANDLE_CUDA_LIBRARIES").iter().flat_map(std::env::split_paths).collect();
    let device = device::cuda(0, &folders).unwrap();
    // A matrix of pseudo-random numbers in [-1, 1]: 7919 and 10007 are primes, and 5003 is about half of 10007.
    let draw = |seed| {
        let values = (0..256 * 256).map(|i: usize| ((i * 7919 + seed) % 10_007) as f32 / 5003.0 - 1.0).collect();
        Tensor::from_vec(values, (256, 256), &Device::Cpu).unwrap()
    };
    let (a, b) = (draw(3), draw(5));
    let in_f64 = |x: &Tensor| x.to_dtype(DType::F64).unwrap();
    let expected = to_f64_vec(in_f64(&a).matmul(&in_f64(&b)).unwrap().raw()).unwrap();
    let largest_error = |precision| {
        set_float32_matmul_precision(precision);
        let product = a.to_device(&device).unwrap().matmul(&b.to_device(&device).unwrap()).unwrap();
        let found = to_f64_vec(product.raw()).unwrap();
        found.iter().zip(&expected).map(|(f, e)| (f - e).abs()).fold(0.0, f64::max)
    };
    let (high, highest) = (largest_error(MatmulPrecision::High), largest_error(MatmulPrecision::Highest));
    // Rounding to TF32 changes a factor, which is at most 1, by about 2^-12. The errors of the 256 products of a sum
    // partly cancel: the sum's error is well below 0.1, but clearly larger than that of products in f32.
    assert!(highest < 2e-4 && high > 4.0 * highest && high < 0.1, "{highest:e} and {high:e}");
}
