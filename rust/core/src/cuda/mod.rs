//! The CUDA engine: kernels of the crate `trainable-candle-cuda` and cuBLAS on candle's storage.
//!
//! Functions are those of [`cpu`](crate::cpu), on tensors of one CUDA device. All work goes to the device's one stream in the order of
//! the calls; nothing waits for it, and shapes travel with the launch instead of through memory. f16 and bf16 are storage formats:
//! arithmetic and accumulation are in f32. Sums are cut by sizes alone, so a run repeats.

pub(crate) mod attention;
mod board;
pub(crate) mod conv;
mod copy;
mod elementwise;
pub mod exchange;
mod gemm;
mod gemm_batch;
mod gpu;
mod graph;
pub(crate) mod index;
pub mod launch;
mod linear;
pub(crate) mod loss;
mod low_rank;
mod memory;
pub(crate) mod norm;
pub(crate) mod profile;
mod random;
mod reduce;
pub(crate) mod rms_norm_rope;
pub(crate) mod rows;
mod strided;

pub use copy::{
    accumulate, cast, cat, contiguous, copy, copy_into, fill, filled, lerp_in_place, scale_in_place, zeros,
};
pub use elementwise::{Kernel, binary, ternary, unary};
pub use gemm::{matmul, matmul_accumulate, product, write_products};
pub use gemm_batch::products;
pub use gpu::{Gpu, devices, open};
pub use graph::Captured;
pub use linear::linear;
pub use low_rank::low_rank;
pub use memory::{empty_cache, memory_stats, reset_peak_memory_stats, synchronize};
pub use random::{normal, uniform};
pub use reduce::{argmax, cumsum, max, mean, min, sum};

pub(crate) use gpu::from_candle;
pub(crate) use launch::{count32, empty, storage_len};
pub(crate) use memory::download;
