//! Candle tensors as plain storage, on which the tape and the kernels compute.

mod host;
mod storage;

pub use host::{filled_in_parts, host_copy, own_copy, to_cpu, to_f64_vec, to_vec, with_bytes};
pub use storage::{
    Raw, check_allocation, check_allocation_on, check_size, from_vec, heads_are_adjacent, is_float, storage_identity,
};
