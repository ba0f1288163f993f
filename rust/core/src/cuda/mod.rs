//! The CUDA runtime: devices, memory, launches, graphs, cuBLAS, and the functions of the CPU engine on CUDA tensors.
//!
//! The code that launches the kernels of particular operations, such as attention, is in `ops`.
//!
//! A function that computes the same as a function of [`cpu`](crate::cpu) has the same name and arguments, except that
//! elementwise functions take a [`Kernel`] in place of a Rust function. The tensors of a call are on one CUDA device.
//! Kernels go to the device's one stream in the order of the calls; some copies have a stream of their own (see
//! `copies.rs`). No function that computes waits for the device. Shapes are arguments of the launches, so that no
//! launch needs a copy to the device before it. f16 and bf16 are storage formats: kernels convert their elements to
//! f32, and compute and sum in f32. How a sum is split into partial sums depends on the tensors' sizes alone, so runs
//! are repeatable.

mod board; // device memory in which kernels report ids out of range
pub mod communicator;
mod copies; // the stream of copies of each device
mod copy; // copies, conversions and changes in place of tensors
mod download;
mod elementwise;
mod error;
pub mod exchange; // memory shared with other libraries by DLPack
mod gemm;
mod gemm_batch; // many products in one call
mod gemm_bias;
mod gemm_codes; // products of 8-bit codes
mod gemm_lt; // products by cuBLASLt
mod gemm_tiles; // the fastest tiles of cuBLASLt for the matrices of models
mod gpu;
mod graph;
pub mod launch;
mod loader;
mod low_rank;
mod low_rank_gradient;
mod mapped; // tensors in pinned host memory that kernels use over the bus
mod memory;
pub mod offload;
pub mod peers; // memory on the devices of several processes
mod product_calls; // the cached calls of cuBLASLt
pub(crate) mod profile;
mod random;
mod recorder; // the state of a capture in progress
mod reduce;
mod staging; // copies from pageable host memory
mod storage; // the length of the storage of candle's CUDA tensors
pub mod streaming;
pub mod strided; // descriptions of an elementwise kernel's tensors
pub(crate) mod tensor_map; // descriptions of tensors for the copy engine of compute capability 9.0

pub use copy::{
    accumulate, cast, cat, contiguous, convert, copy, copy_into, fill, filled, lerp_in_place, scale_in_place, zeros,
};
pub use elementwise::{Kernel, binary, ternary, unary};
pub use gemm::{matmul, matmul_accumulate, product, write_products};
pub use gemm_batch::products;
pub use gemm_bias::product_with_bias;
pub use gemm_codes::{Codes, Scaled, product_of_codes, scaled_product_of_codes};
pub use gpu::{Gpu, devices, open};
pub use graph::Captured;
pub use low_rank::low_rank;
pub use mapped::zeros_on_host;
pub use memory::{device_name, empty_cache, memory_stats, reset_peak_memory_stats, set_memory_limit, synchronize};
pub use random::{normal, uniform};
pub use reduce::{argmax, cumsum, max, mean, min, sum};

pub(crate) use download::download;
pub(crate) use error::from_candle;
pub(crate) use launch::empty;
pub(crate) use recorder::generator;
pub(crate) use storage::storage_len;
