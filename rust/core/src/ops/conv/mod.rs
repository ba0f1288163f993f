//! Two-dimensional convolution (cross-correlation, as in every deep learning library).
//!
//! Images are (batch, height, width, channels) and weights (out channels, kernel height, kernel width, channels /
//! groups). No im2col matrix is built. Convolutions by kernels of 1 × 1 without stride, padding or groups are matrix
//! products. On the CPU, the forward pass and the gradient of the input are sums over the kernel taps
//! ([`stencil`](cpu::stencil)); these sums read copies of parts of the image, or of the gradient of the result.
//! Depthwise convolutions on the CPU have loops of their own.

mod add;
#[cfg(feature = "testing")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;
mod geometry;

use smallvec::SmallVec;

use super::linear::same_kind;
use crate::compute::on_device;
use crate::raw::{Raw, check_allocation_on, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, compute};
use geometry::Geometry;

pub use add::conv2d_add;
#[cfg(feature = "testing")]
pub use cases::ENTRIES;
pub use geometry::Conv2dOptions;

static CONV2D: OpInfo = OpInfo::expensive("conv2d");

struct Conv2dBackward {
    geometry: Geometry,
    /// The input, if the gradient of the weight is needed.
    x: Option<Saved>,
    /// The weight, if the gradient of the input is needed.
    weight: Option<Saved>,
}

impl Backward for Conv2dBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        // The inputs of the operation are 0, the image; 1, the weight; 2, the bias.
        let grad = context.grad().clone();
        if let (true, Some(weight)) = (context.needs(0), &self.weight) {
            context.add(0, grad_input(&self.geometry, &grad, &weight.get()?)?)?;
        }
        if let (true, Some(x)) = (context.needs(1), &self.x) {
            let x = x.get()?;
            let grad_weight = on_device!(
                grad.device(),
                cuda => cuda::grad_weight(&self.geometry, &grad, &x),
                cpu => cpu::grad_weight(&self.geometry, &grad, &x),
            )?;
            context.add(1, grad_weight)?;
        }
        if self.geometry.has_bias && context.needs(2) {
            // The sum over batch, height and width.
            let keepdim = false;
            context.add(2, compute::sum(&grad, &[0, 1, 2], keepdim)?)?;
        }
        Ok(())
    }
}

/// Computes the gradient of the input from `grad`, the gradient of the result.
fn grad_input(geometry: &Geometry, grad: &Raw, weight: &Raw) -> Result<Raw> {
    on_device!(
        grad.device(),
        cuda => cuda::grad_input(geometry, grad, weight),
        cpu => cpu::grad_input(geometry, grad, weight),
    )
}

/// Convolves channels-last images: `x (B, H, W, C)`, `weight (O, KH, KW, C / groups)`, `bias (O)` → `(B, OH, OW, O)`,
/// where B counts images, C and O count channels, and KH × KW is the kernel.
///
/// The height OH and the width OW of the result are `⌊(size + 2 padding - dilation (kernel - 1) - 1) / stride⌋ + 1`.
/// Output channel `o` reads the input channels of its group, `o / (O / groups)`. The input is saved only if the weight
/// needs a gradient.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the shapes, dtypes or devices of the operands do not fit
/// together, [`Error::Shape`] if the kernel is empty or larger than the padded image, [`Error::DType`] if `x` is not
/// floating point, [`Error::Argument`] if a stride, a dilation or the number of groups is 0, [`Error::OutOfMemory`] if
/// the result does not fit in memory.
pub fn conv2d(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, options: Conv2dOptions) -> Result<Tensor> {
    let geometry = check(x, weight, bias, options)?;
    let inputs: SmallVec<[&Tensor; 3]> = [x, weight].into_iter().chain(bias).collect();
    record(
        &CONV2D,
        &inputs,
        || {
            let bias = bias.map(|bias| &bias.raw);
            on_device!(
                x.device(),
                cuda => cuda::forward(&geometry, &x.raw, &weight.raw, bias),
                cpu => cpu::forward(&geometry, &x.raw, &weight.raw, bias),
            )
        },
        // Input 0 is the image, input 1 the weight. `save` keeps an input for the backward pass. `hold` keeps a
        // parameter, which is in memory anyway and does not count as saved.
        |saver, _| Conv2dBackward {
            x: saver.needs(1).then(|| saver.save(x)),
            weight: saver.needs(0).then(|| saver.hold(weight)),
            geometry,
        },
    )
}

/// Checks the operands of a convolution, and that its result fits in memory.
fn check(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, options: Conv2dOptions) -> Result<Geometry> {
    let dims_of = |name: &str, tensor: &Tensor, expected: &str| {
        <[usize; 4]>::try_from(tensor.dims()).map_err(|_| {
            Error::shape(CONV2D.name, format!("the {name} has shape {:?}, expected {expected}", tensor.dims()))
        })
    };
    let x_dims = dims_of("input", x, "(batch, height, width, channels)")?;
    let weight_dims = dims_of("weight", weight, "(out channels, kernel height, kernel width, channels / groups)")?;
    let geometry = Geometry::new(CONV2D.name, x_dims, weight_dims, bias.map(Tensor::dims), options)?;
    if !is_float(x.dtype()) {
        return Err(Error::dtype(
            CONV2D.name,
            format!("expected a floating point input, found {}; convert it with to()", x.dtype().as_str()),
        ));
    }
    for (name, other) in std::iter::once(("weight", weight)).chain(bias.map(|bias| ("bias", bias))) {
        same_kind(CONV2D.name, x, name, other)?;
    }
    check_allocation_on(x.device(), CONV2D.name, &geometry.result_dims(), x.dtype())?;
    Ok(geometry)
}

/// Computes [`conv2d`] in torch's layout: `x (B, C, H, W)`, `weight (O, C / groups, KH, KW)`, `bias (O)` →
/// `(B, O, OH, OW)`, a view of a channels-last result. Each call copies input and weight to the channels-last layout;
/// models use [`conv2d`], which needs no copies.
///
/// # Errors
/// As [`conv2d`].
pub fn conv2d_nchw(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, options: Conv2dOptions) -> Result<Tensor> {
    if x.rank() != 4 || weight.rank() != 4 {
        return Err(Error::shape(
            CONV2D.name,
            format!(
                "the input has shape {:?} and the weight {:?}, expected (batch, channels, height, width) and \
                 (out channels, channels / groups, kernel height, kernel width)",
                x.dims(),
                weight.dims()
            ),
        ));
    }
    const TO_CHANNELS_LAST: [usize; 4] = [0, 2, 3, 1];
    const TO_CHANNELS_FIRST: [usize; 4] = [0, 3, 1, 2];
    conv2d(&x.permute(&TO_CHANNELS_LAST)?, &weight.permute(&TO_CHANNELS_LAST)?, bias, options)?
        .permute(&TO_CHANNELS_FIRST)
}

#[cfg(test)]
mod tests;
