//! Normalisation: layer norm and RMS norm over trailing dimensions, RMS norm with rotary embedding, and group norm of
//! channels-last tensors.
//!
//! Each norm is one fused operation. It saves its input and the statistics, never the normalised values. No gradient is
//! computed for a scale or shift that is frozen.

#[cfg(feature = "testing")]
mod cases;
#[cfg(feature = "cuda")]
mod cuda;
mod group;
#[cfg(feature = "testing")]
mod plain;
mod rms_norm_rope;
mod row;

use candle_core::{DType, WithDType};
use smallvec::SmallVec;

use crate::cpu::Real;
use crate::raw::{Raw, from_vec};
use crate::tape::{BackwardContext, Saved, Saver};
use crate::{Error, Result, Tensor, compute};

#[cfg(feature = "testing")]
pub use cases::ENTRIES;
pub use group::{group_norm, group_norm_silu};
pub use rms_norm_rope::rms_norm_rope;
pub(super) use rms_norm_rope::{HeadNorms, HeadStatistics, check_head_norms};
pub(super) use row::{CodesNorm, CodesNormBackward};
pub use row::{add_layer_norm, add_rms_norm, layer_norm, modulated_layer_norm, rms_norm};

/// The optional scale and shift of a norm as inputs of an operation.
struct Affine<'a> {
    weight: Option<&'a Tensor>,
    bias: Option<&'a Tensor>,
}

impl<'a> Affine<'a> {
    /// Checks scale and shift against the input and the shape that they must have.
    fn new(
        op: &'static str,
        x: &Tensor,
        weight: Option<&'a Tensor>,
        bias: Option<&'a Tensor>,
        dims: &[usize],
    ) -> Result<Self> {
        Self::named(op, x, [("weight", weight), ("bias", bias)], dims)
    }

    /// As [`new`](Self::new), with the operation's own names of scale and shift for errors.
    fn named(
        op: &'static str,
        x: &Tensor,
        parameters: [(&'static str, Option<&'a Tensor>); 2],
        dims: &[usize],
    ) -> Result<Self> {
        for (name, parameter) in parameters {
            let Some(parameter) = parameter else { continue };
            if parameter.dims() != dims {
                let found = parameter.dims();
                let input = x.dims();
                return Err(Error::shape(
                    op,
                    format!("the {name} has shape {found:?}, expected {dims:?} for an input of shape {input:?}"),
                ));
            }
            let (found, input) = (parameter.dtype(), x.dtype());
            let mixed = found == DType::F32 && input != DType::F64;
            if found != input && !mixed {
                return Err(Error::dtype(
                    op,
                    format!("the {name} is {}, the input {}; convert one with to()", found.as_str(), input.as_str()),
                ));
            }
            if !parameter.device().same_device(x.device()) {
                return Err(Error::device(
                    op,
                    format!("the {name} is on another device than the input; move one with to()"),
                ));
            }
        }
        let [(_, weight), (_, bias)] = parameters;
        Ok(Self { weight, bias })
    }

    /// The scale in the accumulator type; ones if there is none.
    fn scale<R: Real + WithDType>(&self, len: usize) -> Result<Vec<R>> {
        numbers(self.weight.map(|weight| &weight.raw), len, R::ONE)
    }

    /// The shift in the accumulator type; zeros if there is none.
    fn shift<R: Real + WithDType>(&self, len: usize) -> Result<Vec<R>> {
        numbers(self.bias.map(|bias| &bias.raw), len, R::ZERO)
    }

    /// The operation's inputs: the tensor to normalise, then scale and shift where present.
    fn inputs(&self, x: &'a Tensor) -> SmallVec<[&'a Tensor; 3]> {
        std::iter::once(x).chain(self.weight).chain(self.bias).collect()
    }

    /// Saves the scale and the shift, each if the backward pass reads it. `computes_again`: whether the backward pass
    /// recomputes the scaled and shifted values, for which it needs both.
    fn save(&self, saver: &mut Saver<'_>, computes_again: bool) -> SavedAffine {
        let place =
            |parameter: &Tensor, index| Place { index, dims: parameter.dims().to_vec(), dtype: parameter.dtype() };
        SavedAffine {
            scale: self.weight.filter(|_| computes_again || saver.needs(0)).map(|weight| saver.hold(weight)),
            shift: self.bias.filter(|_| computes_again).map(|bias| saver.hold(bias)),
            weight: self.weight.map(|weight| place(weight, 1)),
            bias: self.bias.map(|bias| place(bias, 1 + usize::from(self.weight.is_some()))),
        }
    }
}

/// Checks the epsilon that is added to a variance.
fn check_eps(op: &'static str, eps: f64) -> Result<()> {
    if eps.is_finite() && eps >= 0.0 {
        return Ok(());
    }
    Err(Error::argument(op, format!("eps is {eps}, expected a number that is finite and at least 0")))
}

/// The values of a parameter in the accumulator type; without a parameter, `len` times `neutral`.
fn numbers<R: Real + WithDType>(parameter: Option<&Raw>, len: usize, neutral: R) -> Result<Vec<R>> {
    Ok(match parameter {
        Some(parameter) => compute::cast(parameter, R::DTYPE)?.flatten_all()?.to_vec1()?,
        None => vec![neutral; len],
    })
}

/// A parameter's index among the operation's inputs, and the shape and dtype of its gradient.
struct Place {
    index: usize,
    dims: Vec<usize>,
    dtype: DType,
}

impl Place {
    fn add<R: WithDType>(&self, context: &mut BackwardContext<'_>, grad: Vec<R>) -> Result<()> {
        context.add(self.index, compute::cast(&from_vec(grad, self.dims.as_slice()), self.dtype)?)
    }
}

/// The tensors that the backward pass of a norm reads, except scale and shift.
struct Reads {
    x: Saved,
    /// 1/√(var + eps) of each row or group.
    rstd: Saved,
    /// The mean of each row or group, if the norm subtracts it.
    mean: Option<Saved>,
}

impl Reads {
    fn save(saver: &mut Saver<'_>, x: &Tensor, statistics: &[Raw]) -> Self {
        Self {
            x: saver.save(x),
            rstd: saver.save_raw(&statistics[0]),
            mean: statistics.get(1).map(|mean| saver.save_raw(mean)),
        }
    }
}

struct SavedAffine {
    /// The scale, if the backward pass reads it.
    scale: Option<Saved>,
    /// The shift, if the backward pass reads it.
    shift: Option<Saved>,
    /// The place of the gradients of the scale (`weight`) and of the shift (`bias`), if the norm has them.
    weight: Option<Place>,
    bias: Option<Place>,
}

impl SavedAffine {
    /// Whether this backward pass computes the gradient of the scale or the shift.
    fn needs_grad(&self, context: &BackwardContext<'_>) -> bool {
        [&self.weight, &self.bias].into_iter().flatten().any(|place| context.needs(place.index))
    }

    /// The scale in the accumulator type; ones if there is none, or if the backward pass does not read it.
    fn scale<R: Real + WithDType>(&self, len: usize) -> Result<Vec<R>> {
        numbers(self.scale.as_ref().map(Saved::get).transpose()?.as_ref(), len, R::ONE)
    }

    /// The shift in the accumulator type; zeros if there is none, or if the backward pass does not read it.
    fn shift<R: Real + WithDType>(&self, len: usize) -> Result<Vec<R>> {
        numbers(self.shift.as_ref().map(Saved::get).transpose()?.as_ref(), len, R::ZERO)
    }

    /// Adds `weight` to the gradient of the scale and `bias` to the gradient of the shift, for each of the two that is
    /// wanted.
    fn add<R: WithDType>(&self, context: &mut BackwardContext<'_>, weight: Vec<R>, bias: Vec<R>) -> Result<()> {
        for (place, grad) in [(&self.weight, weight), (&self.bias, bias)] {
            if let Some(place) = place.as_ref().filter(|place| context.needs(place.index)) {
                place.add(context, grad)?;
            }
        }
        Ok(())
    }

    /// Adds the gradient of the shift, for a backward pass in which no other gradient is wanted.
    /// `grad (samples, rows, len)` is summed over the rows.
    fn add_shift_only(&self, context: &mut BackwardContext<'_>, grad: &Raw) -> Result<()> {
        let Some(place) = &self.bias else { return Ok(()) };
        let sum = compute::sum(&compute::cast(grad, place.dtype)?, &[1], false)?;
        context.add(place.index, sum.reshape(place.dims.as_slice())?)
    }
}
