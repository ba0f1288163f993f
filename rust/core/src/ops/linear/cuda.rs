//! The CUDA forms that are more than a plain product: tensor cores for f32 operands, each number as a pair of bf16
//! numbers; and cuBLASLt, which adds the bias in the product's kernel.

use super::LINEAR;
use crate::cuda::product_with_bias;
use crate::ops::conv::cuda::pairs;
use crate::{Raw, Result};

/// x Wᵀ + b over matrices; `None` if neither form supports the operands.
pub(super) fn forward(x: &Raw, weight: &Raw, bias: Option<&Raw>) -> Result<Option<Raw>> {
    if let Some(y) = pairs::linear(LINEAR.name, x, weight, bias)? {
        return Ok(Some(y));
    }
    bias.map_or(Ok(None), |bias| product_with_bias(LINEAR.name, x, &weight.t()?, bias))
}
