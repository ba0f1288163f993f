//! The sum of two tensors, and the layer norm of the sum as 8-bit codes (`kernels/norm_codes.cu`). Products of codes
//! read these codes, so no tensor has the norm itself.

use super::{ADD_LAYER_NORM, Kind, Reads, RowNorm, RowNormBackward};
use crate::Tensor;
use crate::compute::on_device;
use crate::quantized::CodeRows;
use crate::tape::{Aux, BackwardContext, Saver};
use crate::{Raw, Result};

/// A layer norm over the last dimension, with frozen scale and shift.
pub(in crate::ops) struct CodesNorm<'a>(RowNorm<'a>);

impl<'a> CodesNorm<'a> {
    /// Checks the operands of a norm of `x`. `affine` is the scale and the shift; `eps` is added to the variance.
    pub fn new(x: &Tensor, affine: [Option<&'a Tensor>; 2], eps: f64) -> Result<Self> {
        let normalized_dims = 1;
        Ok(Self(RowNorm::new(ADD_LAYER_NORM.name, Kind::Layer, x, normalized_dims, affine, eps)?))
    }

    /// Returns the sum of two tensors, rounded to their dtype; the codes of the sum's norm (signed integers if
    /// `is_int8`, else 8-bit floating-point numbers) with their scales; and the norm's statistics. `None` if the kernel
    /// does not support the tensors, and always on the CPU, which has no such kernel.
    pub fn of_sum(&self, operands: [&Raw; 2], is_int8: bool) -> Result<Option<(Raw, CodeRows, Aux)>> {
        on_device!(operands[0].device(), cuda => super::cuda::sum_and_codes(&self.0, operands, is_int8), cpu => {
            let _ = (operands, is_int8); // A build without CUDA does not use them.
            Ok(None)
        })
    }

    /// Computes the norm of `sum` as a tensor, for products that read no codes.
    pub fn values(&self, sum: &Tensor) -> Result<Raw> {
        Ok(self.0.forward(sum)?.0)
    }

    /// Returns the backward pass of the norm of `sum`. Saves the tensors that it reads.
    pub fn save(&self, saver: &mut Saver<'_>, sum: &Tensor, statistics: &[Raw]) -> CodesNormBackward {
        let RowNorm { op, kind, size, ref affine, eps } = self.0;
        // Input 0 of the node is the sum. The backward pass reads saved tensors only if the sum needs a gradient.
        let reads = saver.needs(0).then(|| Reads::save(saver, sum, statistics));
        // Only a backward pass that recomputes the norm would read the shift too.
        let recomputes_norm = false;
        let affine = affine.save(saver, recomputes_norm);
        CodesNormBackward(RowNormBackward { op, kind, size, reads, affine, eps })
    }
}

/// The backward pass of a [`CodesNorm`] in a node whose first input is the sum.
pub(in crate::ops) struct CodesNormBackward(RowNormBackward);

impl CodesNormBackward {
    /// Adds what the norm contributes to the gradient of the sum. `grad` is the gradient of the norm's result, dense.
    pub fn run(&self, context: &mut BackwardContext<'_>, grad: &Raw) -> Result<()> {
        self.0.run(context, grad)
    }
}
