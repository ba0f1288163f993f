//! The linear map y = x Wᵀ + b, fused: no transposed copy of W, no separate addition of b, no gradient for frozen
//! operands.

#[cfg(feature = "cuda")]
mod cuda;
pub(super) mod residual;

use candle_core::{Device, Shape};
use smallvec::SmallVec;

#[cfg(feature = "testing")]
use super::case::{Case, Entry};
use crate::compute::on_device;
use crate::quantized::Addends;
use crate::quantized::weight::{HeldWeight, WeightRef};
#[cfg(feature = "testing")]
use crate::quantized::{Format, example};
use crate::raw::Raw;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, checkpoint, compute};

pub use residual::linear_add;
pub(super) use residual::{check_residual, forward_add};

static LINEAR: OpInfo = OpInfo::expensive("linear");

/// `x` as a contiguous matrix with one column for each element of the last dimension of `x`. `x` must not be a scalar.
pub(super) fn as_matrix(x: &Raw) -> Result<Raw> {
    let columns = x.dims()[x.rank() - 1];
    let rows = x.dims()[..x.rank() - 1].iter().product::<usize>();
    Ok(compute::contiguous(x)?.reshape((rows, columns))?)
}

/// The shape of `x` with `out` in place of the last dimension.
pub(super) fn with_last(x: &Raw, out: usize) -> Shape {
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = out;
    }
    dims.into()
}

/// x Wᵀ + b over matrices: (rows, in), (out, in), (out) → (rows, out).
pub(super) fn forward(x: &Raw, weight: WeightRef<'_>, bias: Option<&Raw>) -> Result<Raw> {
    // While products of 8-bit codes are enabled (`set_w8a8`), a weight in a fitting format is not dequantized.
    if let WeightRef::Quantized(weight) = weight
        && let Some(y) = weight.product_of_codes(x, Addends { bias, residual: None })?
    {
        return Ok(y);
    }
    match weight {
        WeightRef::Plain(weight) => forward_plain(x, &weight.raw, bias),
        // On a GPU all values of the weight are dequantized into scratch memory for one product. On the CPU, and for a
        // large weight such as the head of a language model, the next arm dequantizes the values in parts.
        WeightRef::Quantized(weight) if !x.device().is_cpu() && !weight.is_large() => {
            forward_plain(x, &weight.values(x.dtype())?, bias)
        }
        WeightRef::Quantized(weight) => {
            let y = match bias {
                Some(bias) => bias_rows(bias, x.dims()[0])?,
                None => compute::unset(LINEAR.name, x, &[x.dims()[0], weight.dims()[0]])?,
            };
            // With a bias, `y` has the bias in each row, and the product is added to it.
            let accumulates = bias.is_some();
            weight.product(&y, x, accumulates)?;
            Ok(y)
        }
        // `here` returns the weight on the device of its layer, to which it was streamed.
        WeightRef::Streamed(weight) => forward(x, (&weight.here()?).into(), bias),
    }
}

/// [`forward`] for an operation that saves other values, but not y. A checkpoint's recomputation only restores saved
/// values. So if the recomputation ends with this operation, nothing reads y, and zeros take its place.
pub(super) fn forward_unless_unread(x: &Raw, weight: WeightRef<'_>, bias: Option<&Raw>) -> Result<Raw> {
    if checkpoint::ends_here() {
        return compute::zeros(&[x.dims()[0], weight.dims()[0]], x.dtype(), x.device());
    }
    forward(x, weight, bias)
}

/// A matrix of `rows` rows, each equal to `bias`, in new storage.
fn bias_rows(bias: &Raw, rows: usize) -> Result<Raw> {
    let y = compute::contiguous(&bias.broadcast_as((rows, bias.dims()[0]))?)?;
    // For one row, `contiguous` returns the storage of the bias itself.
    if bias.elem_count() == y.elem_count() { crate::raw::own_copy(&y) } else { Ok(y) }
}

/// [`forward`] with a weight that is not quantized.
pub(super) fn forward_plain(x: &Raw, weight: &Raw, bias: Option<&Raw>) -> Result<Raw> {
    // The CUDA forms add the bias too; `None` if none of them supports these operands.
    let fused = on_device!(x.device(), cuda => cuda::forward(x, weight, bias)?, cpu => None);
    if let Some(y) = fused {
        return Ok(y);
    }
    let weight = weight.t()?;
    let Some(bias) = bias else { return compute::matmul(x, &weight) };
    // First every row of `y` is set to the bias, then the product is added.
    let y = bias_rows(bias, x.dims()[0])?;
    let alpha = 1.0;
    compute::matmul_accumulate(&y, x, &weight, alpha)?;
    Ok(y)
}

/// Checks that the shapes are `x (..., in)`, `weight (out, in)` and `bias (out)`, and that dtypes and devices fit.
pub(super) fn check(op: &'static str, x: &Tensor, weight: WeightRef<'_>, bias: Option<&Tensor>) -> Result<()> {
    if weight.rank() != 2 {
        return Err(Error::shape(
            op,
            format!("the weight has shape {:?}, expected (out_features, in_features)", weight.dims()),
        ));
    }
    let (out, inner) = (weight.dims()[0], weight.dims()[1]);
    if x.dims().last() != Some(&inner) {
        return Err(Error::shape(
            op,
            format!(
                "the input has shape {:?}, expected (..., {inner}) for a weight of shape {:?}",
                x.dims(),
                weight.dims()
            ),
        ));
    }
    if let Some(bias) = bias.filter(|b| b.dims() != [out]) {
        return Err(Error::shape(op, format!("the bias has shape {:?}, expected ({out},)", bias.dims())));
    }
    same_weight(op, x, weight)?;
    bias.map_or(Ok(()), |bias| same_kind(op, x, "bias", bias))
}

/// Checks that `weight` has the device of `x` and, if it is not quantized, the dtype of `x`.
pub(super) fn same_weight(op: &'static str, x: &Tensor, weight: WeightRef<'_>) -> Result<()> {
    match weight {
        WeightRef::Plain(weight) => same_kind(op, x, "weight", weight),
        // Products take the codes of a quantized weight, or dequantize it to the dtype of the input. So only the
        // device must match.
        WeightRef::Quantized(weight) => same_device(op, x, "weight", weight.device()),
        WeightRef::Streamed(weight) => same_weight(op, x, (&weight.here()?).into()),
    }
}

/// Checks that `other`, called `name` in errors, has the dtype and the device of `x`.
pub(super) fn same_kind(op: &'static str, x: &Tensor, name: &str, other: &Tensor) -> Result<()> {
    if other.dtype() != x.dtype() {
        return Err(Error::dtype(
            op,
            format!(
                "the input is {}, the {name} {}; convert one with to()",
                x.dtype().as_str(),
                other.dtype().as_str()
            ),
        ));
    }
    same_device(op, x, name, other.device())
}

fn same_device(op: &'static str, x: &Tensor, name: &str, device: &Device) -> Result<()> {
    if device.same_device(x.device()) {
        return Ok(());
    }
    Err(Error::device(op, format!("the {name} is on another device than the input; move one with to()")))
}

/// The inputs on the tape are x (index 0), the weight (1) if it is a tensor, and the bias if there is one.
struct LinearBackward {
    /// The input, if the weight needs a gradient.
    x: Option<Saved>,
    /// The weight, if the input needs a gradient.
    weight: Option<HeldWeight>,
    x_shape: Shape,
    /// The index of the bias among the inputs: 2, or 1 for a quantized or streamed weight, which is not an input.
    /// Without a bias, the number of inputs: no input has this index, so none needs a gradient.
    bias: usize,
}

impl Backward for LinearBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = as_matrix(context.grad())?;
        if let (true, Some(weight)) = (context.needs(0), &self.weight) {
            weight.add_input_gradient(context, &self.x_shape, &grad)?;
        }
        // Input 1 may be the bias; then `x` is `None`.
        if let (true, Some(x)) = (context.needs(1), &self.x) {
            let x = as_matrix(&x.get()?)?;
            let shape = (grad.dims()[1], x.dims()[1]);
            let alpha = 1.0;
            context.add_product(1, shape, grad.dtype(), [&grad.t()?, &x], alpha)?;
        }
        if context.needs(self.bias) {
            let keepdim = false;
            context.add(self.bias, compute::sum(&grad, &[0], keepdim)?)?;
        }
        Ok(())
    }
}

/// y = x Wᵀ + b: `x (..., in)`, `weight (out, in)`, `bias (out)` → `(..., out)`.
///
/// Saves the input only if the weight needs a gradient; a frozen layer saves no activation. A quantized weight gets no
/// gradient, and its dtype may differ from that of the input.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit.
pub fn linear<'a>(x: &Tensor, weight: impl Into<WeightRef<'a>>, bias: Option<&Tensor>) -> Result<Tensor> {
    let weight = weight.into();
    check(LINEAR.name, x, weight, bias)?;
    let inputs: SmallVec<[&Tensor; 3]> = std::iter::once(x).chain(weight.tensor()).chain(bias).collect();
    record(
        &LINEAR,
        &inputs,
        || {
            let y = forward(&as_matrix(&x.raw)?, weight, bias.map(|b| &b.raw))?;
            Ok(y.reshape(with_last(&x.raw, weight.dims()[0]))?)
        },
        |saver, _| LinearBackward {
            x: weight.requires_grad().then(|| saver.save(x)),
            weight: saver.needs(0).then(|| weight.hold(saver)),
            x_shape: x.shape().clone(),
            bias: if bias.is_some() { inputs.len() - 1 } else { inputs.len() },
        },
    )
}

/// Registry entries of this file.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[
    Entry {
        info: &LINEAR,
        cases: || {
            let plain = |x: &[Tensor]| {
                let y = x[0].matmul(&x[1].t()?)?;
                x.get(2).map_or_else(|| Ok(y.clone()), |b| y.add(b))
            };
            let run = |x: &[Tensor]| linear(&x[0], &x[1], x.get(2));
            /// A case with a quantized weight, which `example` makes on the device of its first argument, and a trained
            /// bias. With rows of 27 elements, NF4 blocks (64 elements) cross the ends of rows.
            fn quantized(label: &'static str, format: Format) -> Case {
                let plain = move |x: &[Tensor]| {
                    let weight = example(&x[0], [7, 27], format)?.dequantize(x[0].dtype())?;
                    x[0].matmul(&weight.t()?)?.add(&x[1])
                };
                let run = move |x: &[Tensor]| linear(&x[0], &example(&x[0], [7, 27], format)?, Some(&x[1]));
                Case::new(label, &[&[2, 3, 27], &[7]], run).plain(plain)
            }
            vec![
                Case::new("bias", &[&[2, 3, 5], &[4, 5], &[4]], run).plain(plain),
                Case::new("no bias", &[&[3, 5], &[7, 5]], run).plain(plain),
                Case::new("one row", &[&[5], &[7, 5], &[7]], run).plain(plain),
                Case::new("no rows", &[&[0, 5], &[7, 5], &[7]], run).plain(plain),
                quantized("int8", Format::Int8),
                quantized("fp8", Format::Fp8),
                quantized("nf4", Format::Nf4),
            ]
        },
    },
    residual::ENTRY,
];
