//! The CPU engine: threads, SIMD dispatch, and the loops that elementwise, reducing and row-wise operations share.
//!
//! Unless they say otherwise, functions take CPU tensors of dtype f32, f64, f16 and bf16 with any strides, and empty
//! tensors. f16 and bf16 are storage formats only: arithmetic and accumulation are in f32. The order in which numbers
//! are added does not depend on the number of threads, so results do not depend on it either. A function that reads or
//! writes a tensor on another device returns [`Error::Device`](crate::Error::Device).

mod access;
mod approx;
mod contiguous;
pub mod elem;
mod fold;
pub mod gemm;
pub(crate) mod inplace;
mod lane;
pub(crate) mod map;
pub mod pool;
pub(crate) mod reduce;
mod simd;
mod strided;

pub(crate) use access::{elements, read_all};
pub use contiguous::contiguous;
pub use elem::{Elem, Stored};
pub use gemm::{MatMut, MatRef, gemm, matmul, matmul_accumulate, product, write_products};
pub use inplace::{accumulate, copy_into, fill, lerp_in_place, scale_in_place};
pub use map::{Add, Binary, Div, Maximum, Minimum, Mul, Sub, Ternary, Unary, binary, cast, ternary, unary};
pub use reduce::{argmax, cumsum, max, mean, min, sum};
pub(crate) use simd::vectorized;
pub use simd::{Real, dispatch};
pub use strided::{Dims, broadcast_dims};
