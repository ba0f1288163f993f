//! Normalisation: layer norm and RMS norm over trailing dimensions, also with rotary embedding, group norm over channels that come
//! last.
//!
//! Each is one fused kernel forward and one backward. They save their input and the statistics, never the normalised values.
//! Scale and shift may be frozen: then no gradient is made for them.

mod group;
mod rms_norm_rope;
mod row;

use candle_core::{DType, WithDType};
use smallvec::SmallVec;

use super::case::{Case, Entry};
use crate::cpu::Real;
use crate::raw::{Raw, from_vec};
use crate::tape::{BackwardContext, Saved, Saver};
use crate::{Error, Result, Tensor, compute};

pub use group::{group_norm, group_norm_silu};
#[cfg(feature = "cuda")]
pub(crate) use rms_norm_rope::Turn;
pub use rms_norm_rope::rms_norm_rope;
pub use row::{layer_norm, rms_norm};

/// The optional scale and shift of a norm as inputs of an operation.
struct Affine<'a> {
    weight: Option<&'a Tensor>,
    bias: Option<&'a Tensor>,
}

impl<'a> Affine<'a> {
    /// Check both against the input and the shape that they must have.
    fn new(
        op: &'static str,
        x: &Tensor,
        weight: Option<&'a Tensor>,
        bias: Option<&'a Tensor>,
        dims: &[usize],
    ) -> Result<Self> {
        for (name, parameter) in [("weight", weight), ("bias", bias)] {
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
        Ok(Self { weight, bias })
    }

    /// The scale for arithmetic; ones if there is none.
    fn scale<R: Real + WithDType>(&self, len: usize) -> Result<Vec<R>> {
        numbers(self.weight.map(|weight| &weight.raw), len, R::ONE)
    }

    /// The shift for arithmetic; zeros if there is none.
    fn shift<R: Real + WithDType>(&self, len: usize) -> Result<Vec<R>> {
        numbers(self.bias.map(|bias| &bias.raw), len, R::ZERO)
    }

    /// Both as they are.
    #[cfg(feature = "cuda")]
    fn parameters(&self) -> [Option<&'a Raw>; 2] {
        [self.weight.map(|weight| &weight.raw), self.bias.map(|bias| &bias.raw)]
    }

    /// The operation's inputs: the normalised tensor, then the scale, then the shift, as far as there are any.
    fn inputs(&self, x: &'a Tensor) -> SmallVec<[&'a Tensor; 3]> {
        std::iter::once(x).chain(self.weight).chain(self.bias).collect()
    }

    /// What the backward pass needs to know of both, which may compute the normalised, scaled and shifted values again.
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

/// Check what is added to a variance.
fn check_eps(op: &'static str, eps: f64) -> Result<()> {
    if eps.is_finite() && eps >= 0.0 {
        return Ok(());
    }
    Err(Error::argument(op, format!("eps is {eps}, expected a number of at least 0")))
}

/// The values of a parameter for arithmetic; if there is none, those that change nothing.
fn numbers<R: Real + WithDType>(parameter: Option<&Raw>, len: usize, neutral: R) -> Result<Vec<R>> {
    Ok(match parameter {
        Some(parameter) => compute::cast(parameter, R::DTYPE)?.flatten_all()?.to_vec1()?,
        None => vec![neutral; len],
    })
}

/// Where the gradient of a parameter goes.
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

struct SavedAffine {
    /// The scale, if the backward pass reads it.
    scale: Option<Saved>,
    /// The shift, if the backward pass reads it.
    shift: Option<Saved>,
    weight: Option<Place>,
    bias: Option<Place>,
}

impl SavedAffine {
    /// Whether this pass wants the gradient of the scale or the shift.
    fn needs_grad(&self, context: &BackwardContext<'_>) -> bool {
        [&self.weight, &self.bias].into_iter().flatten().any(|place| context.needs(place.index))
    }

    /// The scale for arithmetic; ones if there is none, or if nothing reads it.
    fn scale<R: Real + WithDType>(&self, len: usize) -> Result<Vec<R>> {
        numbers(self.scale.as_ref().map(Saved::get).transpose()?.as_ref(), len, R::ONE)
    }

    /// The shift for arithmetic; zeros if there is none, or if nothing reads it.
    fn shift<R: Real + WithDType>(&self, len: usize) -> Result<Vec<R>> {
        numbers(self.shift.as_ref().map(Saved::get).transpose()?.as_ref(), len, R::ZERO)
    }

    /// Hand over the gradients that are wanted.
    fn add<R: WithDType>(&self, context: &mut BackwardContext<'_>, weight: Vec<R>, bias: Vec<R>) -> Result<()> {
        for (place, grad) in [(&self.weight, weight), (&self.bias, bias)] {
            if let Some(place) = place.as_ref().filter(|place| context.needs(place.index)) {
                place.add(context, grad)?;
            }
        }
        Ok(())
    }

    /// Both as they are, if the backward pass reads them.
    #[cfg(feature = "cuda")]
    fn parameters(&self) -> Result<[Option<Raw>; 2]> {
        let get = |saved: &Option<Saved>| saved.as_ref().map(Saved::get).transpose();
        Ok([get(&self.scale)?, get(&self.shift)?])
    }

    /// Which gradients this pass wants: of the input, the scale and the shift.
    #[cfg(feature = "cuda")]
    fn wants(&self, context: &BackwardContext<'_>) -> [bool; 3] {
        let wants = |place: &Option<Place>| place.as_ref().is_some_and(|place| context.needs(place.index));
        [context.needs(0), wants(&self.weight), wants(&self.bias)]
    }

    /// Hand over the gradients that were made.
    #[cfg(feature = "cuda")]
    fn add_gradients(&self, context: &mut BackwardContext<'_>, grads: crate::cuda::norm::Gradients) -> Result<()> {
        if let Some(grad) = grads.input {
            context.add(0, grad)?;
        }
        for (place, grad) in [(&self.weight, grads.weight), (&self.bias, grads.bias)] {
            if let (Some(place), Some(grad)) = (place, grad) {
                context.add(place.index, compute::cast(&grad, place.dtype)?.reshape(place.dims.as_slice())?)?;
            }
        }
        Ok(())
    }

    /// The gradient of the shift, the sum over the rows of `grad`, where nothing else is wanted.
    fn add_shift_only(&self, context: &mut BackwardContext<'_>, grad: &Raw) -> Result<()> {
        let Some(place) = &self.bias else { return Ok(()) };
        let sum = compute::sum(&compute::cast(grad, place.dtype)?, &[0], false)?;
        context.add(place.index, sum.reshape(place.dims.as_slice())?)
    }
}

fn layer_norm_plain(x: &[Tensor], dims: &[usize], eps: f64) -> Result<Tensor> {
    let centered = x[0].sub(&x[0].mean(dims, true)?)?;
    let std = centered.sqr()?.mean(dims, true)?.add_scalar(eps)?.sqrt()?;
    affine_plain(&centered.div(&std)?, x)
}

fn rms_norm_plain(x: &[Tensor], eps: f64) -> Result<Tensor> {
    let rms = x[0].sqr()?.mean(&[x[0].rank() - 1], true)?.add_scalar(eps)?.sqrt()?;
    affine_plain(&x[0].div(&rms)?, x)
}

/// For `x (batch, length, channels)`.
fn group_norm_plain(x: &[Tensor], groups: usize, eps: f64) -> Result<Tensor> {
    let dims = x[0].dims();
    let split = x[0].reshape((dims[0], dims[1], groups, dims[2] / groups))?;
    let normal = layer_norm_plain(&[split], &[1, 3], eps)?.reshape(x[0].shape().clone())?;
    affine_plain(&normal, x)
}

/// Scale and shift by the second and third input, as far as there are any.
fn affine_plain(normal: &Tensor, x: &[Tensor]) -> Result<Tensor> {
    let scaled = x.get(1).map_or_else(|| Ok(normal.clone()), |weight| normal.mul(weight))?;
    x.get(2).map_or_else(|| Ok(scaled.clone()), |bias| scaled.add(bias))
}

/// An input that needs no gradient, of the dtype and on the device of `like`.
fn frozen(dims: &[usize], like: &Tensor) -> Result<Tensor> {
    let values = (0..dims.iter().product()).map(|i: usize| (i as f64 * 1.3).sin()).collect::<Vec<_>>();
    Tensor::from_vec(values, dims, like.device())?.to_dtype(like.dtype())
}

fn layer_norm_cases() -> Vec<Case> {
    const EPS: f64 = 1e-5;
    let run = |x: &[Tensor]| layer_norm(&x[0], 1, x.get(1), x.get(2), EPS);
    let plain = |x: &[Tensor]| layer_norm_plain(x, &[x[0].rank() - 1], EPS);
    vec![
        Case::new("scale and shift", &[&[2, 3, 7], &[7], &[7]], run).plain(plain),
        Case::new("scale", &[&[3, 7], &[7]], run).plain(plain),
        Case::new("plain", &[&[3, 7]], run).plain(plain),
        Case::new("shift", &[&[3, 7], &[7]], |x| layer_norm(&x[0], 1, None, Some(&x[1]), EPS))
            .plain(|x| layer_norm_plain(&x[..1], &[1], EPS)?.add(&x[1])),
        Case::new("frozen input", &[&[7], &[7]], |x| {
            let input = frozen(&[3, 7], &x[0])?;
            layer_norm(&input, 1, Some(&x[0]), Some(&x[1]), EPS)
        }),
        Case::new("two dimensions", &[&[3, 5, 9], &[5, 9], &[5, 9]], |x| layer_norm(&x[0], 2, x.get(1), x.get(2), EPS))
            .plain(|x| layer_norm_plain(x, &[1, 2], EPS)),
        Case::new("no rows", &[&[0, 7], &[7], &[7]], run),
        Case::new("empty rows", &[&[3, 0]], run),
    ]
}

fn rms_norm_cases() -> Vec<Case> {
    const EPS: f64 = 1e-6;
    let run = |x: &[Tensor]| rms_norm(&x[0], x.get(1), EPS);
    let plain = |x: &[Tensor]| rms_norm_plain(x, EPS);
    vec![
        Case::new("scale", &[&[2, 3, 37], &[37]], run).plain(plain),
        Case::new("plain", &[&[3, 7]], run).plain(plain),
        Case::new("no rows", &[&[0, 7], &[7]], run),
    ]
}

fn group_norm_cases() -> Vec<Case> {
    const EPS: f64 = 1e-5;
    let run = |x: &[Tensor]| group_norm(&x[0], 3, x.get(1), x.get(2), EPS);
    let plain = |x: &[Tensor]| group_norm_plain(x, 3, EPS);
    vec![
        Case::new("scale and shift", &[&[2, 5, 6], &[6], &[6]], run).plain(plain),
        Case::new("plain", &[&[2, 5, 6]], run).plain(plain),
        Case::new("picture", &[&[2, 3, 5, 6], &[6]], run),
        Case::new("groups of one", &[&[2, 5, 3], &[3], &[3]], run).plain(plain),
        Case::new("frozen input", &[&[6], &[6]], |x| {
            let input = frozen(&[2, 3, 6], &x[0])?;
            group_norm(&input, 3, Some(&x[0]), Some(&x[1]), EPS)
        }),
        Case::new("empty batch", &[&[0, 5, 6], &[6], &[6]], run),
        Case::new("no positions", &[&[2, 0, 6], &[6], &[6]], run),
    ]
}

fn group_norm_silu_cases() -> Vec<Case> {
    const EPS: f64 = 1e-6;
    let run = |x: &[Tensor]| group_norm_silu(&x[0], 3, x.get(1), x.get(2), EPS);
    let plain = |x: &[Tensor]| group_norm_plain(x, 3, EPS)?.silu();
    vec![
        Case::new("scale and shift", &[&[2, 5, 6], &[6], &[6]], run).plain(plain),
        Case::new("plain", &[&[2, 5, 6]], run).plain(plain),
        Case::new("picture", &[&[2, 3, 5, 6], &[6]], run),
        Case::new("frozen input", &[&[6], &[6]], |x| {
            let input = frozen(&[2, 3, 6], &x[0])?;
            group_norm_silu(&input, 3, Some(&x[0]), Some(&x[1]), EPS)
        }),
        Case::new("frozen input and scale", &[&[6]], |x| {
            let (input, scale) = (frozen(&[2, 3, 6], &x[0])?, frozen(&[6], &x[0])?);
            group_norm_silu(&input, 3, Some(&scale), Some(&x[0]), EPS)
        }),
        Case::new("empty batch", &[&[0, 5, 6], &[6], &[6]], run),
    ]
}

/// Registry entries of the norms.
pub static ENTRIES: &[Entry] = &[
    Entry { info: &row::LAYER_NORM, cases: layer_norm_cases },
    Entry { info: &row::RMS_NORM, cases: rms_norm_cases },
    rms_norm_rope::ENTRY,
    Entry { info: &group::GROUP_NORM, cases: group_norm_cases },
    Entry { info: &group::GROUP_NORM_SILU, cases: group_norm_silu_cases },
];
