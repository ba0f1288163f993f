//! The two CUDA forms of linear layers that are more than a plain product: a product of f32 operands on tensor cores,
//! each number as a pair of bf16 numbers; and a product of cuBLASLt, whose kernel adds the bias.

use super::LINEAR;
use crate::cuda::product_with_bias;
use crate::ops::conv::cuda::pairs;
use crate::{Raw, Result};

/// x Wᵀ + b over matrices, by the first form that supports the operands (the second needs a bias). `None` if neither
/// does; the caller then computes a plain product.
pub(super) fn forward(x: &Raw, weight: &Raw, bias: Option<&Raw>) -> Result<Option<Raw>> {
    if let Some(y) = pairs::linear(LINEAR.name, x, weight, bias)? {
        return Ok(Some(y));
    }
    bias.map_or(Ok(None), |bias| product_with_bias(LINEAR.name, x, &weight.t()?, bias))
}
