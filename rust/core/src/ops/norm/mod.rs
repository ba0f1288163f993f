//! Normalisation: layer norm over trailing dimensions, RMS norm over the last dimension, RMS norm with rotary
//! embedding, and group norm of channels-last tensors.
//!
//! Each norm is one fused operation. It saves its input and the statistics, but not the normalised values. A frozen
//! scale or shift gets no gradient.

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

/// The scale (`weight`) and the shift (`bias`) of a norm, both optional, as inputs of an operation.
struct Affine<'a> {
    weight: Option<&'a Tensor>,
    bias: Option<&'a Tensor>,
}

impl<'a> Affine<'a> {
    /// Checks that scale and shift have shape `dims`, the device of `x`, and the dtype of `x` or f32 (only the dtype of
    /// `x` if that is f64).
    fn new(
        op: &'static str,
        x: &Tensor,
        weight: Option<&'a Tensor>,
        bias: Option<&'a Tensor>,
        dims: &[usize],
    ) -> Result<Self> {
        Self::named(op, x, [("weight", weight), ("bias", bias)], dims)
    }

    /// As [`new`](Self::new), with the names that the operation's errors use for scale and shift.
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
            let is_mixed = found == DType::F32 && input != DType::F64;
            if found != input && !is_mixed {
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

    /// Returns the scale in the accumulator type; `len` ones if there is none.
    fn scale<R: Real + WithDType>(&self, len: usize) -> Result<Vec<R>> {
        parameter_values(self.weight.map(|weight| &weight.raw), len, R::ONE)
    }

    /// Returns the shift in the accumulator type; `len` zeros if there is none.
    fn shift<R: Real + WithDType>(&self, len: usize) -> Result<Vec<R>> {
        parameter_values(self.bias.map(|bias| &bias.raw), len, R::ZERO)
    }

    /// Returns the operation's inputs: `x`, the tensor to normalise, then scale and shift where present.
    fn inputs(&self, x: &'a Tensor) -> SmallVec<[&'a Tensor; 3]> {
        std::iter::once(x).chain(self.weight).chain(self.bias).collect()
    }

    /// Saves those of scale and shift that the backward pass reads. A backward pass that recomputes the norm's result
    /// (`recomputes`) reads both; any other reads only the scale, for the gradient of `x`, which is input 0. `hold`
    /// keeps parameters: unlike what `save` keeps, they do not count as saved memory.
    fn save(&self, saver: &mut Saver<'_>, recomputes: bool) -> SavedAffine {
        let place =
            |parameter: &Tensor, index| Place { index, dims: parameter.dims().to_vec(), dtype: parameter.dtype() };
        SavedAffine {
            scale: self.weight.filter(|_| recomputes || saver.needs(0)).map(|weight| saver.hold(weight)),
            shift: self.bias.filter(|_| recomputes).map(|bias| saver.hold(bias)),
            scale_place: self.weight.map(|weight| place(weight, 1)),
            shift_place: self.bias.map(|bias| place(bias, 1 + usize::from(self.weight.is_some()))),
        }
    }
}

/// Checks the epsilon that is added to a variance or a mean square.
fn check_eps(op: &'static str, eps: f64) -> Result<()> {
    if eps.is_finite() && eps >= 0.0 {
        return Ok(());
    }
    Err(Error::argument(op, format!("eps is {eps}, expected a number that is finite and at least 0")))
}

/// Returns the values of a parameter in the accumulator type; without a parameter, `len` times `neutral`.
fn parameter_values<R: Real + WithDType>(parameter: Option<&Raw>, len: usize, neutral: R) -> Result<Vec<R>> {
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
    /// Adds `grad` to the parameter's gradient.
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
    /// Saves `x` and the `statistics`: rstd, then the mean if the norm subtracts it.
    fn save(saver: &mut Saver<'_>, x: &Tensor, statistics: &[Raw]) -> Self {
        Self {
            x: saver.save(x),
            rstd: saver.save_raw(&statistics[0]),
            mean: statistics.get(1).map(|mean| saver.save_raw(mean)),
        }
    }
}

/// The scale and the shift of a norm in its backward pass.
struct SavedAffine {
    /// The scale, if the backward pass reads it.
    scale: Option<Saved>,
    /// The shift, if the backward pass reads it.
    shift: Option<Saved>,
    /// Where the gradient of the scale is added, if the norm has a scale.
    scale_place: Option<Place>,
    /// Where the gradient of the shift is added, if the norm has a shift.
    shift_place: Option<Place>,
}

impl SavedAffine {
    /// Whether the gradient of the scale or that of the shift is needed.
    fn needs_grad(&self, context: &BackwardContext<'_>) -> bool {
        [&self.scale_place, &self.shift_place].into_iter().flatten().any(|place| context.needs(place.index))
    }

    /// Returns the scale in the accumulator type; `len` ones if it was not saved.
    fn scale<R: Real + WithDType>(&self, len: usize) -> Result<Vec<R>> {
        parameter_values(self.scale.as_ref().map(Saved::get).transpose()?.as_ref(), len, R::ONE)
    }

    /// Returns the shift in the accumulator type; `len` zeros if it was not saved.
    fn shift<R: Real + WithDType>(&self, len: usize) -> Result<Vec<R>> {
        parameter_values(self.shift.as_ref().map(Saved::get).transpose()?.as_ref(), len, R::ZERO)
    }

    /// Adds the gradients of the scale and of the shift where these are needed.
    fn add<R: WithDType>(
        &self,
        context: &mut BackwardContext<'_>,
        grad_scale: Vec<R>,
        grad_shift: Vec<R>,
    ) -> Result<()> {
        for (place, grad) in [(&self.scale_place, grad_scale), (&self.shift_place, grad_shift)] {
            if let Some(place) = place.as_ref().filter(|place| context.needs(place.index)) {
                place.add(context, grad)?;
            }
        }
        Ok(())
    }

    /// Adds the gradient of the shift, for a backward pass in which no other gradient is needed: the sum of the
    /// result's gradient `grad (samples, rows, len)` over the rows. The shift has `len` elements for each sample;
    /// `samples` is 1 if all rows have the same shift.
    fn add_shift_only(&self, context: &mut BackwardContext<'_>, grad: &Raw) -> Result<()> {
        let Some(place) = &self.shift_place else { return Ok(()) };
        let (rows_dim, keepdim) = (1, false);
        let sum = compute::sum(&compute::cast(grad, place.dtype)?, &[rows_dim], keepdim)?;
        context.add(place.index, sum.reshape(place.dims.as_slice())?)
    }
}
