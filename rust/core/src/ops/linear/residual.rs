//! The sum of the result of a frozen linear map and a residual, as at the end of a transformer block.
//!
//! On a GPU, most products with the codes of quantized weights add the residual as they write the result: cuBLASLt
//! adds it before it rounds the result, the kernel for int8 codes afterwards. In all other cases a separate kernel adds
//! the residual. cuBLASLt could add it in a half-precision product too, but this would make the product slower by as
//! much time as the separate kernel takes.

use candle_core::Shape;

use super::{as_matrix, check, forward, linear, with_last};
use crate::cpu::Add;
#[cfg(feature = "testing")]
use crate::ops::case::{Case, Entry};
#[cfg(feature = "testing")]
use crate::ops::linear_group::frozen;
use crate::ops::lora::check_frozen;
use crate::quantized::Addends;
use crate::quantized::weight::{HeldWeight, WeightRef};
use crate::raw::Raw;
use crate::tape::{Backward, BackwardContext, OpInfo, record};
use crate::{Error, Result, Tensor, compute};

static LINEAR_ADD: OpInfo = OpInfo::expensive("linear_add");

/// [`linear`] of `x (..., in)`, plus `residual (..., out)`. This is one operation on CUDA if neither weight nor bias
/// needs a gradient. Otherwise it is two: `linear` and an addition.
///
/// # Errors
/// As [`linear`]; also [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the residual does not have the shape,
/// dtype and device of the result.
pub fn linear_add<'a>(
    x: &Tensor,
    weight: impl Into<WeightRef<'a>>,
    bias: Option<&Tensor>,
    residual: &Tensor,
) -> Result<Tensor> {
    let (weight, op) = (weight.into(), LINEAR_ADD.name);
    check(op, x, weight, bias)?;
    check_residual(op, x, weight, residual)?;
    if !x.device().is_cuda() || weight.requires_grad() || bias.is_some_and(Tensor::requires_grad) {
        return linear(x, weight, bias)?.add(residual);
    }
    // Cannot fail here; it reports to checkpoints that the operation reads weight and bias.
    check_frozen(op, weight, bias)?;
    // Input 0 on the tape is x, input 1 is the residual.
    record(
        &LINEAR_ADD,
        &[x, residual],
        || {
            let y = forward_add(&as_matrix(&x.raw)?, weight, bias.map(|bias| &bias.raw), &residual.raw)?;
            Ok(y.reshape(residual.shape())?)
        },
        |saver, _| LinearAddBackward { weight: saver.needs(0).then(|| weight.hold(saver)), x_shape: x.shape().clone() },
    )
}

/// Checks that `residual` has the shape, dtype and device of the result of the linear map of `x` with `weight`.
pub(in crate::ops) fn check_residual(
    op: &'static str,
    x: &Tensor,
    weight: WeightRef<'_>,
    residual: &Tensor,
) -> Result<()> {
    let expected = with_last(&x.raw, weight.dims()[0]);
    if *residual.shape() != expected {
        let found = residual.dims();
        return Err(Error::shape(op, format!("the residual has shape {found:?}, expected {:?}", expected.dims())));
    }
    super::same_kind(op, x, "residual", residual)
}

/// x Wᵀ + b over matrices, as [`forward`], plus `residual (..., out)` with as many rows as x.
pub(in crate::ops) fn forward_add(x: &Raw, weight: WeightRef<'_>, bias: Option<&Raw>, residual: &Raw) -> Result<Raw> {
    let residual = as_matrix(residual)?;
    match weight {
        WeightRef::Plain(_) => {}
        WeightRef::Quantized(weight) => {
            if let Some(y) = weight.product_of_codes(x, Addends { bias, residual: Some(&residual) })? {
                return Ok(y);
            }
        }
        // `here` is the weight's copy on the device.
        WeightRef::Streamed(weight) => return forward_add(x, (&weight.here()?).into(), bias, &residual),
    }
    compute::binary(&forward(x, weight, bias)?, &residual, Add)
}

struct LinearAddBackward {
    /// The weight, if x needs a gradient.
    weight: Option<HeldWeight>,
    x_shape: Shape,
}

impl Backward for LinearAddBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        if context.needs(1) {
            context.add(1, context.grad().clone())?;
        }
        if let (true, Some(weight)) = (context.needs(0), &self.weight) {
            weight.add_input_gradient(context, &self.x_shape, &as_matrix(context.grad())?)?;
        }
        Ok(())
    }
}

/// The entry of [`linear_add`].
#[cfg(feature = "testing")]
pub(super) const ENTRY: Entry = Entry {
    info: &LINEAR_ADD,
    cases: || {
        /// A case with x of shape `dims` and `out` output features.
        fn case(label: &'static str, dims: &[usize], out: usize, has_bias: bool) -> Case {
            let inner = dims[dims.len() - 1];
            let result_dims: Vec<usize> = dims[..dims.len() - 1].iter().copied().chain([out]).collect();
            let weight_and_bias = move |x: &Tensor| -> Result<(Tensor, Option<Tensor>)> {
                Ok((frozen(x, &[out, inner])?, has_bias.then(|| frozen(x, &[out])).transpose()?))
            };
            let run = move |x: &[Tensor]| {
                let (weight, bias) = weight_and_bias(&x[0])?;
                linear_add(&x[0], &weight, bias.as_ref(), &x[1])
            };
            let plain = move |x: &[Tensor]| {
                let (weight, bias) = weight_and_bias(&x[0])?;
                linear(&x[0], &weight, bias.as_ref())?.add(&x[1])
            };
            Case::new(label, &[dims, &result_dims], run).plain(plain)
        }
        vec![
            case("bias", &[2, 3, 5], 7, true),
            case("no bias", &[3, 5], 4, false),
            // In f16 and bf16 the bytes of a row are a multiple of 16, the alignment of the widest accesses.
            case("multiples of eight", &[9, 16], 24, true),
            case("no rows", &[0, 5], 7, true),
        ]
    },
};
