//! Two-dimensional convolution (cross-correlation, as in every deep learning library).
//!
//! Images are (batch, height, width, channels) and weights (out, kernel height, kernel width, channels / groups). The forward
//! pass and the gradient of the input are sums over the places of the kernel ([`stencil`]), which read copies of parts of
//! the image; there is no im2col matrix. Kernels of 1 × 1 are matrix products, convolutions of each channel by itself
//! have loops of their own.

mod depthwise;
mod geometry;
mod kernels;
mod patch;
mod stencil;
mod weight;

use smallvec::SmallVec;

use super::case::{Case, Entry};
#[cfg(feature = "cuda")]
use super::linear;
use super::linear::same_kind;
use crate::compute::{cast, contiguous};
use crate::cpu::{elements, read_all};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::raw::{Raw, check_allocation_on, from_vec, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, compute, dispatch_float};
use geometry::Geometry;

pub use geometry::Conv2dOptions;

static CONV2D: OpInfo = OpInfo::dear("conv2d");

fn forward(geometry: &Geometry, x: &Raw, weight: &Raw, bias: Option<&Raw>) -> Result<Raw> {
    let (x, weight) = (contiguous(x)?, contiguous(weight)?);
    let bias = bias.map(contiguous).transpose()?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        if geometry.is_pointwise() {
            let y = linear::forward(&geometry.as_rows(&x)?, &geometry.as_matrix(&weight)?, bias.as_ref())?;
            return Ok(y.reshape(geometry.result_dims().as_slice())?);
        }
        let (sizes, dims) = (geometry.cuda_sizes(CONV2D.name)?, geometry.result_dims());
        return cuda::conv::forward(CONV2D.name, sizes, dims, [&x, &weight], bias.as_ref());
    }
    let operands: SmallVec<[&Raw; 3]> = [&x, &weight].into_iter().chain(&bias).collect();
    let sum = dispatch_float!(x.dtype(), CONV2D.name, T => read_all(CONV2D.name, &operands, |operands| {
        let bias = operands.get(2).map(|&bias| elements::<T>(bias)).transpose()?;
        Ok(kernels::forward(geometry, elements::<T>(operands[0])?, elements(operands[1])?, bias))
    })
    .map(|y| from_vec(y, geometry.result_dims().as_slice())))?;
    cast(&sum, x.dtype())
}

/// The gradient of the input.
fn grad_input(geometry: &Geometry, grad: &Raw, weight: &Raw) -> Result<Raw> {
    let (grad, weight) = (contiguous(grad)?, contiguous(weight)?);
    #[cfg(feature = "cuda")]
    if grad.device().is_cuda() {
        if geometry.is_pointwise() {
            let dx = compute::matmul(&geometry.as_rows(&grad)?, &geometry.as_matrix(&weight)?)?;
            return Ok(dx.reshape(geometry.input_dims().as_slice())?);
        }
        let (sizes, dims) = (geometry.cuda_sizes(CONV2D.name)?, geometry.input_dims());
        return cuda::conv::grad_input(CONV2D.name, sizes, dims, [&grad, &weight]);
    }
    let sum = dispatch_float!(grad.dtype(), CONV2D.name, T => read_all(CONV2D.name, &[&grad, &weight], |operands| {
        Ok(kernels::grad_input(geometry, elements::<T>(operands[0])?, elements(operands[1])?))
    })
    .map(|grad_x| from_vec(grad_x, geometry.input_dims().as_slice())))?;
    cast(&sum, grad.dtype())
}

/// The gradient of the weight.
fn grad_weight(geometry: &Geometry, grad: &Raw, x: &Raw) -> Result<Raw> {
    let (grad, x) = (contiguous(grad)?, contiguous(x)?);
    #[cfg(feature = "cuda")]
    if grad.device().is_cuda() {
        if geometry.is_pointwise() {
            let dw = compute::matmul(&geometry.as_rows(&grad)?.t()?, &geometry.as_rows(&x)?)?;
            return Ok(dw.reshape(geometry.weight_dims().as_slice())?);
        }
        let (sizes, dims) = (geometry.cuda_sizes(CONV2D.name)?, geometry.weight_dims());
        return cuda::conv::grad_weight(CONV2D.name, sizes, dims, [&grad, &x]);
    }
    let sum = dispatch_float!(grad.dtype(), CONV2D.name, T => read_all(CONV2D.name, &[&grad, &x], |operands| {
        Ok(kernels::grad_weight(geometry, elements::<T>(operands[0])?, elements(operands[1])?))
    })
    .map(|grad_weight| from_vec(grad_weight, geometry.weight_dims().as_slice())))?;
    cast(&sum, grad.dtype())
}

struct Conv2dBackward {
    geometry: Geometry,
    /// For the gradient of the weight.
    x: Option<Saved>,
    /// For the gradient of the input.
    weight: Option<Saved>,
}

impl Backward for Conv2dBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = context.grad().clone();
        if let (true, Some(weight)) = (context.needs(0), &self.weight) {
            context.add(0, grad_input(&self.geometry, &grad, &weight.get()?)?)?;
        }
        if let (true, Some(x)) = (context.needs(1), &self.x) {
            context.add(1, grad_weight(&self.geometry, &grad, &x.get()?)?)?;
        }
        if self.geometry.has_bias && context.needs(2) {
            context.add(2, compute::sum(&grad, &[0, 1, 2], false)?)?;
        }
        Ok(())
    }
}

/// Convolution of channels-last images: `x (B, H, W, C)`, `weight (O, KH, KW, C / groups)`, `bias (O)` → `(B, OH, OW, O)`.
///
/// Per direction, the result has `(size + 2 padding - dilation (kernel - 1) - 1) / stride + 1` pixels, rounded down.
/// Output channel `o` reads the input channels of its group, `o / (O / groups)`. The input is saved only if the weight
/// needs a gradient.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit or the kernel is larger than the padded
/// image, [`Error::Argument`] if a stride or dilation or the number of groups is 0.
pub fn conv2d(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, options: Conv2dOptions) -> Result<Tensor> {
    let rank_4 = |name: &str, tensor: &Tensor, expected: &str| {
        <[usize; 4]>::try_from(tensor.dims()).map_err(|_| {
            Error::shape(CONV2D.name, format!("the {name} has shape {:?}, expected {expected}", tensor.dims()))
        })
    };
    let x_dims = rank_4("input", x, "(batch, height, width, channels)")?;
    let weight_dims = rank_4("weight", weight, "(out channels, kernel height, kernel width, channels / groups)")?;
    let geometry = Geometry::new(CONV2D.name, x_dims, weight_dims, bias.map(Tensor::dims), options)?;
    if !is_float(x.dtype()) {
        return Err(Error::dtype(
            CONV2D.name,
            format!("expected a floating point input, found {}; convert it with to()", x.dtype().as_str()),
        ));
    }
    for (name, other) in std::iter::once(("weight", weight)).chain(bias.map(|b| ("bias", b))) {
        same_kind(CONV2D.name, x, name, other)?;
    }
    check_allocation_on(x.device(), CONV2D.name, &geometry.result_dims(), x.dtype())?;
    let with_bias;
    let without_bias = [x, weight];
    let inputs: &[&Tensor] = match bias {
        Some(bias) => {
            with_bias = [x, weight, bias];
            &with_bias
        }
        None => &without_bias,
    };
    record(
        &CONV2D,
        inputs,
        || forward(&geometry, &x.raw, &weight.raw, bias.map(|b| &b.raw)),
        |saver, _| Conv2dBackward {
            x: saver.needs(1).then(|| saver.save(x)),
            weight: saver.needs(0).then(|| saver.hold(weight)),
            geometry,
        },
    )
}

/// [`conv2d`] in torch's layout: `x (B, C, H, W)`, `weight (O, C / groups, KH, KW)`, `bias (O)` → `(B, O, OH, OW)`, a view
/// of a channels-last result. Input and weight are copied to channels-last at each call: models use [`conv2d`].
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
    const CHANNELS_LAST: [usize; 4] = [0, 2, 3, 1];
    conv2d(&x.permute(&CHANNELS_LAST)?, &weight.permute(&CHANNELS_LAST)?, bias, options)?.permute(&[0, 3, 1, 2])
}

/// A convolution from basic operations: for each place in the kernel, the pixels it meets times its part of the weight.
fn plain(x: &[Tensor], options: Conv2dOptions) -> Result<Tensor> {
    let Conv2dOptions { stride, padding, dilation, groups } = options;
    let (weight, out) = (&x[1], x[1].dims()[0]);
    let mut padded = x[0].clone();
    for (dim, pad) in [(1, padding[0]), (2, padding[1])] {
        let mut dims = padded.dims().to_vec();
        dims[dim] = pad;
        let zeros = Tensor::zeros(dims, padded.dtype(), padded.device())?;
        padded = Tensor::cat(&[&zeros, &padded, &zeros], dim)?;
    }
    let kernel = [weight.dims()[1], weight.dims()[2]];
    let count = |i: usize| (padded.dims()[i + 1] - dilation[i] * (kernel[i] - 1) - 1) / stride[i] + 1;
    let mut parts = Vec::new();
    for group in 0..groups {
        let width = weight.dims()[3];
        let image = padded.narrow(3, group * width, width)?;
        let weight = weight.narrow(0, group * (out / groups), out / groups)?;
        let mut sum: Option<Tensor> = None;
        for (i, j) in (0..kernel[0]).flat_map(|i| (0..kernel[1]).map(move |j| (i, j))) {
            let lines = image.strided(1, i * dilation[0], count(0), stride[0] as isize)?;
            let met = lines.strided(2, j * dilation[1], count(1), stride[1] as isize)?;
            let place = weight.narrow(1, i, 1)?.narrow(2, j, 1)?.reshape((out / groups, width))?;
            let product = met.matmul(&place.t()?)?;
            sum = Some(match sum {
                Some(sum) => sum.add(&product)?,
                None => product,
            });
        }
        parts.extend(sum);
    }
    let y = Tensor::cat(&parts.iter().collect::<Vec<_>>(), 3)?;
    x.get(2).map_or_else(|| Ok(y.clone()), |bias| y.add(bias))
}

fn case(label: &'static str, shapes: &[&[usize]], options: Conv2dOptions) -> Case {
    Case::new(label, shapes, move |x| conv2d(&x[0], &x[1], x.get(2), options)).plain(move |x| plain(x, options))
}

/// Registry entries of this file.
pub static ENTRIES: &[Entry] = &[Entry {
    info: &CONV2D,
    cases: || {
        let default = Conv2dOptions::default();
        let padded = Conv2dOptions { padding: [1, 1], ..default };
        let all = Conv2dOptions { stride: [2, 1], padding: [2, 1], dilation: [1, 2], groups: 2 };
        vec![
            case("3x3", &[&[2, 5, 4, 3], &[4, 3, 3, 3], &[4]], padded),
            case("no bias, not square", &[&[1, 4, 5, 2], &[3, 2, 3, 2]], default),
            case("1x1", &[&[2, 3, 2, 5], &[3, 1, 1, 5], &[3]], default),
            case("1x1 strided", &[&[1, 5, 4, 3], &[2, 1, 1, 3], &[2]], Conv2dOptions { stride: [2, 2], ..default }),
            case("stride, dilation, groups", &[&[2, 5, 6, 4], &[6, 3, 2, 2], &[6]], all),
            case("depthwise", &[&[1, 4, 4, 3], &[3, 3, 3, 1], &[3]], Conv2dOptions { groups: 3, ..padded }),
            case(
                "stride beyond the kernel",
                &[&[1, 7, 7, 2], &[2, 2, 2, 2]],
                Conv2dOptions { stride: [3, 4], ..default },
            ),
            Case::new("torch's layout", &[&[2, 3, 4, 5], &[4, 3, 3, 3], &[4]], move |x| {
                conv2d_nchw(&x[0], &x[1], x.get(2), padded)
            }),
            Case::new("no images", &[&[0, 4, 4, 3], &[2, 3, 3, 3], &[2]], move |x| {
                conv2d(&x[0], &x[1], x.get(2), padded)
            }),
        ]
    },
}];

#[cfg(test)]
mod tests;
