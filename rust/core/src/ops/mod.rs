//! The operations. The file or folder of an operation has its forward pass, the tensors that it saves, its backward
//! pass, its cost, and its test cases.
//!
//! `REGISTRY` lists the cases, which are compiled only with the feature `testing`. `tests/registry.rs` runs every case
//! in every dtype, and with strided and empty inputs. It compares gradients with finite differences in f64, fused
//! operations with their plain forms (definitions in basic operations), and the results and gradients inside a
//! checkpoint with those outside. A test fails if a differentiable operation has no case.

pub mod activation;
pub mod arithmetic;
pub mod attention;
pub mod beside; // joins the columns of a tensor and an activation of another tensor's columns
#[cfg(feature = "testing")]
pub mod case;
pub mod cast;
pub mod cayley;
pub mod compare;
pub mod conv;
pub mod dropout;
pub mod elementwise;
pub mod fake_quantize;
pub mod gated;
pub mod gated_add;
pub mod index;
mod integer;
pub mod linear;
pub mod linear_group;
pub mod lora;
pub mod loss;
mod low_rank;
pub mod low_rank_hadamard;
pub mod matmul;
pub mod norm;
pub mod reduce;
pub mod rope;
mod rows;
pub mod scalar;
pub mod select;
pub mod shape;
pub mod softmax;
pub mod upsample;

#[cfg(feature = "testing")]
pub use case::{Case, Domain, Entry, Input};

/// The cases of every operation that has a derivative.
#[cfg(feature = "testing")]
pub static REGISTRY: &[&[Entry]] = &[
    elementwise::ENTRIES,
    activation::ENTRIES,
    gated::ENTRIES,
    beside::ENTRIES,
    gated_add::ENTRIES,
    arithmetic::ENTRIES,
    scalar::ENTRIES,
    cast::ENTRIES,
    select::ENTRIES,
    shape::ENTRIES,
    index::ENTRIES,
    reduce::ENTRIES,
    softmax::ENTRIES,
    matmul::ENTRIES,
    cayley::ENTRIES,
    linear::ENTRIES,
    linear_group::ENTRIES,
    lora::ENTRIES,
    low_rank_hadamard::ENTRIES,
    norm::ENTRIES,
    attention::ENTRIES,
    conv::ENTRIES,
    upsample::ENTRIES,
    rope::ENTRIES,
    dropout::ENTRIES,
    fake_quantize::ENTRIES,
    loss::ENTRIES,
];
