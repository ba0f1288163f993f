//! The sum of a convolution and another tensor, the addend, as in residual blocks. On GPUs of compute capability 9.0,
//! the kernels of a frozen convolution add the addend as they write the result.

use super::geometry::Geometry;
use super::{Conv2dOptions, check, conv2d, cpu, grad_input};
use crate::compute::on_device;
use crate::cpu::Add;
use crate::ops::arithmetic::reduced;
use crate::ops::linear::same_kind;
use crate::ops::lora::check_frozen;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, compute};

pub(super) static CONV2D_ADD: OpInfo = OpInfo::expensive("conv2d_add");

/// Adds `addend`, of the result's shape (B, OH, OW, O) or with one vector for each image (B, 1, 1, O), to [`conv2d`] of
/// `x (B, H, W, C)`. O is the number of output channels. This is one operation on the tape only on a GPU, and only if
/// weight and bias need no gradient. Otherwise the function calls `conv2d`, then adds.
///
/// # Errors
/// As [`conv2d`]; also [`Error::Shape`] if the addend has neither of these shapes, [`Error::DType`] if it does not have
/// the dtype of `x`, and [`Error::Device`] if it is on another device.
pub fn conv2d_add(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: Conv2dOptions,
    addend: &Tensor,
) -> Result<Tensor> {
    let geometry = check(x, weight, bias, options)?;
    let dims = geometry.result_dims();
    let per_image = [dims[0], 1, 1, dims[3]];
    if addend.dims() != dims && addend.dims() != per_image {
        let found = addend.dims();
        let message = format!("the addend has shape {found:?}, expected {dims:?} or {per_image:?}");
        return Err(Error::shape(CONV2D_ADD.name, message));
    }
    same_kind(CONV2D_ADD.name, x, "addend", addend)?;
    if !x.device().is_cuda() || weight.requires_grad() || bias.is_some_and(Tensor::requires_grad) {
        return conv2d(x, weight, bias, options)?.add(addend);
    }
    // Reports to checkpoints that the operation reads weight and bias; they are frozen here.
    check_frozen(CONV2D_ADD.name, weight.into(), bias)?;
    record(
        &CONV2D_ADD,
        &[x, addend],
        || {
            let (bias, [x, weight, addend]) =
                (bias.map(|bias| &bias.raw), [x, weight, addend].map(|tensor| &tensor.raw));
            // The CPU form is never used here: tensors on the CPU have taken the path above.
            on_device!(
                x.device(),
                cuda => super::cuda::forward_add(&geometry, x, weight, bias, addend),
                cpu => compute::binary(&cpu::forward(&geometry, x, weight, bias)?, addend, Add),
            )
        },
        // In `needs` here and below, input 0 is `x` and input 1 is `addend`. `hold` keeps a parameter without counting
        // it as saved memory.
        |saver, _| Conv2dAddBackward {
            weight: saver.needs(0).then(|| saver.hold(weight)),
            geometry,
            addend_dims: addend.dims().to_vec(),
        },
    )
}

struct Conv2dAddBackward {
    geometry: Geometry,
    /// The weight, if the gradient of the input is needed.
    weight: Option<Saved>,
    addend_dims: Vec<usize>,
}

impl Backward for Conv2dAddBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = context.grad().clone();
        if context.needs(1) {
            // If the addend has one vector for each image, its gradient is the sum over the image's pixels.
            context.add(1, reduced(grad.clone(), &self.addend_dims)?)?;
        }
        if let (true, Some(weight)) = (context.needs(0), &self.weight) {
            context.add(0, grad_input(&self.geometry, &grad, &weight.get()?)?)?;
        }
        Ok(())
    }
}
