//! The CPU engine: threads, SIMD dispatch, and the loops that elementwise, reducing and row-wise operations share.
//!
//! Every function works on CPU tensors of dtype f32, f64, f16 and bf16 with any strides and any zero-size
//! dimensions. f16 and bf16 are storage formats only: arithmetic and accumulation happen in f32. Work is cut at
//! boundaries that depend on sizes alone, so results do not depend on the number of threads.

mod approx;
pub mod elem;
pub mod pool;
pub mod simd;
