//! Fake quantization: the forward pass rounds values to the grid of an eight-bit or four-bit format; the backward pass
//! treats the rounding as the identity.
//!
//! The derivative of rounding is taken to be 1 where a value is within the range of the codes, and 0 elsewhere: the
//! straight-through estimator (Bengio et al. 2013, arXiv:1308.3432) with the clipping of Jacob et al. 2018,
//! arXiv:1712.05877. Scales are constants in the backward pass. Learned factors on the scales have the gradient of LSQ
//! (Esser et al. 2020, arXiv:1902.08153, equation 3), as in torchao's `range_learning`. LSQ also multiplies this
//! gradient by a constant, which has no effect on the steps of Adam and is omitted here. In LSQ, a value is
//! clipped if it exceeds the last code; here, as in torchao, a value is clipped if it rounds to a number beyond the
//! last code.

use std::str::FromStr;

use candle_core::DType;

#[cfg(feature = "testing")]
use super::case::{Case, Entry};
use crate::cpu::{Binary, Real, Ternary};
use crate::quantized::{self, Format};
use crate::raw::{Raw, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, compute};

static FAKE_QUANTIZE: OpInfo = OpInfo::cheap("fake_quantize");
static FAKE_QUANTIZE_BY: OpInfo = OpInfo::cheap("fake_quantize_by");

/// Number of elements of a row that share a scale in [`Grid::Int4`], as in torchao's configurations for training with
/// int4 weights.
const GROUP: usize = 32;
/// Number of elements that share a scale in [`Grid::Nf4`].
const BLOCK: usize = 64;
/// The largest e4m3 number.
const LARGEST_E4M3: f64 = 448.0;

/// The numbers that the elements of a fake quantized matrix can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// Integers from -127 to 127, times a scale per row: [`Format::Int8`].
    Int8,
    /// Integers from -8 to 7, times a scale for each 32 elements of a row. The scale is the largest magnitude of the 32
    /// elements, divided by 7.5, as in torchao's symmetric int4 weights.
    Int4,
    /// e4m3 numbers, times a scale per row: [`Format::Fp8`].
    Fp8,
    /// The 16 values of `NormalFloat`, times a scale for each 64 elements in row-major order: [`Format::Nf4`] with
    /// scales in f32.
    Nf4,
}

impl Grid {
    /// Every grid.
    pub const ALL: [Self; 4] = [Self::Int8, Self::Int4, Self::Fp8, Self::Nf4];

    /// The name of the grid in settings and in Python.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Fp8 => "fp8",
            Self::Nf4 => "nf4",
        }
    }

    /// The format that stores a matrix on this grid; no format stores `Int4`.
    pub const fn format(self) -> Option<Format> {
        match self {
            Self::Int8 => Some(Format::Int8),
            Self::Int4 => None,
            Self::Fp8 => Some(Format::Fp8),
            Self::Nf4 => Some(Format::Nf4),
        }
    }

    /// Checks that `dims` is the shape of a matrix that divides into whole groups of elements that share a scale.
    ///
    /// # Errors
    /// [`Error::Shape`] if `dims` is not the shape of a matrix, or if a row (`Int4`) or the matrix (`Nf4`) does not
    /// divide into whole groups.
    pub fn check(self, dims: &[usize]) -> Result<()> {
        let &[rows, columns] = dims else {
            let text = format!("found shape {dims:?}, expected a matrix (out_features, in_features)");
            return Err(Error::shape(FAKE_QUANTIZE.name, text));
        };
        let (found, group, what) = match self {
            Self::Int8 | Self::Fp8 => return Ok(()),
            Self::Int4 => (columns, GROUP, "in_features"),
            Self::Nf4 => (rows * columns, BLOCK, "elements"),
        };
        if found.is_multiple_of(group) {
            return Ok(());
        }
        let text = format!(
            "found {found} {what}, expected a multiple of {group}: {group} elements share a scale in {}",
            self.name()
        );
        Err(Error::shape(FAKE_QUANTIZE.name, text))
    }

    /// The number of groups of a matrix, and the number of elements of a group. The elements of a group share a scale.
    fn groups(self, rows: usize, columns: usize) -> [usize; 2] {
        match self {
            // Each row is a group.
            Self::Int8 | Self::Fp8 => [rows, columns],
            Self::Int4 => [rows * columns / GROUP, GROUP],
            Self::Nf4 => [rows * columns / BLOCK, BLOCK],
        }
    }

    /// The number of scales of a matrix that [`check`](Self::check) accepts.
    pub fn scales(self, rows: usize, columns: usize) -> usize {
        self.groups(rows, columns)[0]
    }

    /// Rounds each element of `x` (groups, elements) to the grid, scaled by its group's element of `scale` (groups, 1).
    fn round(self, x: &Raw, scale: &Raw) -> Result<Raw> {
        match self {
            Self::Int8 => compute::binary(x, scale, Int8),
            Self::Int4 => compute::binary(x, scale, Int4),
            Self::Fp8 => compute::binary(x, scale, E4m3),
            Self::Nf4 => compute::binary(x, scale, Nf4),
        }
    }

    /// Returns 1 (u8) for each element that is inside the range of the codes, otherwise 0; shapes are as in `round`.
    /// The range ends half a step beyond the first and the last code, where the step is the distance from this code to
    /// its neighbour: values in that half step round to the code.
    fn inside(self, x: &Tensor, scale: &Tensor) -> Result<Tensor> {
        let [low, high] = match self {
            Self::Int4 => {
                // The backward pass of `Int4` keeps the gradients, here ones, of the elements inside the range.
                let ones = Tensor::full(1.0, x.shape().clone(), x.dtype(), x.device())?;
                let gradients = Tensor::constant(compute::ternary(&ones.raw, &x.raw, &scale.raw, Int4)?);
                return gradients.eq(&ones);
            }
            Self::Int8 => [-127.5, 127.5],
            // The step from the largest number to its neighbour is 32.
            Self::Fp8 => [-LARGEST_E4M3 - 16.0, LARGEST_E4M3 + 16.0],
            Self::Nf4 => {
                let beyond = |last: f32, next: f32| f64::from(last + (last - next) / 2.0);
                let values = quantized::nf4_values();
                [beyond(values[0], values[1]), beyond(values[15], values[14])]
            }
        };
        let codes = x.div(scale)?;
        codes.clamp(Some(low), Some(high))?.eq(&codes)
    }

    /// The number by which the largest magnitude of a group is divided to get the group's scale.
    const fn scale_divisor(self) -> f64 {
        match self {
            Self::Int8 => 127.0,
            Self::Int4 => 7.5,
            Self::Fp8 => LARGEST_E4M3,
            Self::Nf4 => 1.0,
        }
    }
}

impl FromStr for Grid {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|grid| grid.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            Error::argument(FAKE_QUANTIZE.name, format!("found the format \"{name}\", expected one of {known}"))
        })
    }
}

/// Integers from -127 to 127 times a scale. The scale maps the largest magnitude to the end of the range, so values are
/// clipped only if a learned factor makes the scale smaller.
#[derive(Clone, Copy)]
struct Int8;

impl Int8 {
    const HIGH: f64 = 127.0;
}

impl Binary for Int8 {
    const KERNEL: &'static str = "fake_int8";

    #[inline(always)]
    fn apply<R: Real>(&self, x: R, scale: R) -> R {
        clamped(round_to_even(x / scale), -Self::HIGH, Self::HIGH) * scale
    }
}

/// Integers from -8 to 7 times a scale; values that are clipped get the gradient 0.
#[derive(Clone, Copy)]
struct Int4;

impl Int4 {
    const LOW: f64 = -8.0;
    const HIGH: f64 = 7.0;

    /// The code before it is clipped. The largest magnitude is 7.5 times the scale, halfway between two codes. As in
    /// torchao, x is multiplied by the rounded reciprocal of the scale. The rounding of the reciprocal decides which of
    /// the two codes is nearer.
    #[inline(always)]
    fn code<R: Real>(x: R, scale: R) -> R {
        round_to_even(x * (R::ONE / scale))
    }
}

impl Binary for Int4 {
    const KERNEL: &'static str = "fake_int4";

    #[inline(always)]
    fn apply<R: Real>(&self, x: R, scale: R) -> R {
        clamped(Self::code(x, scale), Self::LOW, Self::HIGH) * scale
    }
}

impl Ternary for Int4 {
    const KERNEL: &'static str = "fake_int4_backward";

    #[inline(always)]
    fn apply<R: Real>(&self, gradient: R, x: R, scale: R) -> R {
        let code = Self::code(x, scale);
        if code < R::from_f64(Self::LOW) || code > R::from_f64(Self::HIGH) { R::ZERO } else { gradient }
    }
}

/// e4m3 numbers times a scale.
#[derive(Clone, Copy)]
struct E4m3;

impl Binary for E4m3 {
    const KERNEL: &'static str = "fake_e4m3";

    #[inline(always)]
    fn apply<R: Real>(&self, x: R, scale: R) -> R {
        let x = clamped(x / scale, -LARGEST_E4M3, LARGEST_E4M3);
        // `spacing` is the distance between neighbouring e4m3 numbers at x. The distance is 2^-9 for |x| below 2^-5,
        // and doubles at 2^-5 and at each larger power of two, up to 2^8: 14 times. `step` starts at 2^-9, and `power`
        // at 2^-6.
        let (mut step, mut power) = (0.001_953_125, 0.015_625);
        let magnitude = x.abs();
        let mut spacing = R::from_f64(step);
        for _ in 0..14 {
            (step, power) = (step * 2.0, power * 2.0);
            spacing = if magnitude >= R::from_f64(power) { R::from_f64(step) } else { spacing };
        }
        round_to_even(x / spacing) * spacing * scale
    }
}

/// The nearest value of NF4 times a scale; the lower value in case of a tie.
#[derive(Clone, Copy)]
struct Nf4;

impl Binary for Nf4 {
    const KERNEL: &'static str = "fake_nf4";

    #[inline(always)]
    fn apply<R: Real>(&self, x: R, scale: R) -> R {
        let values = quantized::nf4_values();
        // As in bitsandbytes, x is multiplied by the rounded reciprocal of the scale, not divided by the scale.
        let x = x * (R::ONE / scale);
        let mut nearest = R::from_f64(f64::from(values[0]));
        for pair in values.windows(2) {
            let middle = R::from_f64(f64::from((pair[0] + pair[1]) / 2.0));
            nearest = if x > middle { R::from_f64(f64::from(pair[1])) } else { nearest };
        }
        // NaN stays NaN.
        if x >= R::NEG_INFINITY { nearest * scale } else { x }
    }
}

/// Returns the nearest whole number, ties to even. `large` is 1.5 · 2^23 (1.5 · 2^52 for f64). A float as large as x +
/// `large` has no bits for a fraction, so the addition rounds.
#[inline(always)]
fn round_to_even<R: Real>(x: R) -> R {
    let large = R::from_f64(if size_of::<R>() == size_of::<f32>() { 12_582_912.0 } else { 6_755_399_441_055_744.0 });
    (x + large) - large
}

/// Limits `x` to the range from `low` to `high`; NaN stays NaN.
#[inline(always)]
fn clamped<R: Real>(x: R, low: f64, high: f64) -> R {
    let (low, high) = (R::from_f64(low), R::from_f64(high));
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// The backward pass for `Int4`, where values can be out of the range of the codes; such values get the gradient 0.
struct Clipped {
    x: Saved,
    scale: Saved,
}

impl Backward for Clipped {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = compute::ternary(context.grad(), &self.x.get()?, &self.scale.get()?, Int4)?;
        context.add(0, grad)
    }
}

/// The backward pass for the other grids, whose codes cover every value: the identity.
struct Straight;

impl Backward for Straight {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = context.grad().clone();
        context.add(0, grad)
    }
}

/// The backward pass with learned factors on the scales. The derivative of a rounded value with respect to its factor
/// is d / factor. For a value within the range, d is the rounded value minus the value. For a value out of range, d is
/// the rounded value. The operation's input 0 is x, and its input 1 the factors.
struct Learned {
    /// The values, (groups, elements).
    x: Saved,
    /// The scales, already multiplied by the factors, (groups, 1).
    scale: Saved,
    /// The factors, (groups, 1).
    factors: Saved,
    grid: Grid,
}

impl Backward for Learned {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let [x, scale, factors] = [self.x.get()?, self.scale.get()?, self.factors.get()?].map(Tensor::constant);
        let grad = Tensor::constant(context.grad().clone());
        let (inside, zero) = (self.grid.inside(&x, &scale)?, Tensor::zeros((), x.dtype(), x.device())?);
        if context.needs(1) {
            let rounded = Tensor::constant(self.grid.round(&x.raw, &scale.raw)?);
            let d = rounded.sub(&Tensor::select(&inside, &x, &zero)?)?;
            let keepdim = true;
            context.add(1, grad.mul(&d)?.sum(&[1], keepdim)?.div(&factors)?.raw)?;
        }
        context.add(0, Tensor::select(&inside, &grad, &zero)?.raw)
    }
}

/// Rounds the matrix `x` to `grid`. The rounding is computed in f32 (in f64 if `x` is f64), and the result has the
/// dtype of `x`. The gradient passes unchanged where codes are in range, and is 0 elsewhere.
///
/// For `Int8`, `Fp8` and `Nf4`, the values are those that [`Quantized::new`](crate::Quantized::new) stores in the
/// format of the grid, dequantized; an `Nf4` format must have f32 scales. No format stores `Int4`. `Int8` and `Int4`
/// are the symmetric grids of
/// [torchao](https://github.com/pytorch/ao/blob/v0.18.0/torchao/quantization/quant_primitives.py).
///
/// # Errors
/// [`Error::Shape`] as [`Grid::check`], [`Error::DType`] if `x` is not floating point.
pub fn fake_quantize(x: &Tensor, grid: Grid) -> Result<Tensor> {
    rounded(x, grid, |grouped, scale| match grid {
        Grid::Int4 => rounded_to_int4(grouped, scale),
        _ => record(&FAKE_QUANTIZE, &[grouped], || grid.round(&grouped.raw, &scale.raw), |_, _| Straight),
    })
}

/// Rounds as [`fake_quantize`], with each scale multiplied by its element of the vector `factors`, which also gets a
/// gradient. There are [`Grid::scales`] factors, in the order of the groups in the row-major matrix. A matrix without
/// elements is returned as it is.
///
/// # Errors
/// As [`fake_quantize`]; [`Error::Shape`] if `x` has elements and `factors` is not a vector of [`Grid::scales`]
/// elements.
pub fn fake_quantize_by(x: &Tensor, factors: &Tensor, grid: Grid) -> Result<Tensor> {
    rounded(x, grid, |grouped, scale| {
        if factors.dims() != [grouped.dims()[0]] {
            let (found, expected) = (factors.dims(), grouped.dims()[0]);
            let text = format!("found factors of shape {found:?}, expected ({expected},), one for each scale");
            return Err(Error::shape(FAKE_QUANTIZE_BY.name, text));
        }
        let factors = factors.to_dtype(grouped.dtype())?.unsqueeze(1)?;
        let scale = scale.mul(&factors.detach())?;
        record(
            &FAKE_QUANTIZE_BY,
            &[grouped, &factors],
            || grid.round(&grouped.raw, &scale.raw),
            |saver, _| Learned {
                x: saver.save(grouped),
                scale: saver.save_raw(&scale.raw),
                factors: saver.save(&factors),
                grid,
            },
        )
    })
}

/// Calls `round` with the groups of `x` (groups, elements) and their scales (groups, 1), and returns its result in the
/// shape and the dtype of `x`. Returns an `x` without elements as it is.
fn rounded(x: &Tensor, grid: Grid, round: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>) -> Result<Tensor> {
    if !is_float(x.dtype()) {
        let text = format!("expected a floating point tensor, found {}; convert it with to()", x.dtype().as_str());
        return Err(Error::dtype(FAKE_QUANTIZE.name, text));
    }
    grid.check(x.dims())?;
    if x.elem_count() == 0 {
        return Ok(x.clone());
    }
    let compute_dtype = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let grouped = x.to_dtype(compute_dtype)?.reshape(&grid.groups(x.dims()[0], x.dims()[1])[..])?;
    let keepdim = true;
    let largest = grouped.detach().abs()?.max(&[1], keepdim)?;
    // Values are divided by the scale, so the scale of a group of zeros must be above 0, too. With any scale above 0,
    // zeros stay zeros.
    let smallest = f64::from(f32::MIN_POSITIVE);
    let scale = largest
        .div(&Tensor::full(grid.scale_divisor(), (), compute_dtype, x.device())?)?
        .clamp(Some(smallest), None)?;
    round(&grouped, &scale)?.reshape(x.shape().clone())?.to_dtype(x.dtype())
}

/// Rounds the groups `x` (groups, elements) to [`Grid::Int4`]. Values that are clipped get the gradient 0.
fn rounded_to_int4(x: &Tensor, scale: &Tensor) -> Result<Tensor> {
    record(
        &FAKE_QUANTIZE,
        &[x],
        || compute::binary(&x.raw, &scale.raw, Int4),
        |saver, _| Clipped { x: saver.save(x), scale: saver.save_raw(&scale.raw) },
    )
}

/// Registry entries of these operations. A case returns the values of x, but its gradient is that of the rounded x. The
/// straight-through estimator makes this gradient the identity, which agrees with finite differences of the returned
/// values. `fake_quantize` has no case for `Int4`, whose gradient is 0 for clipped values. A [`Case`] has a name, the
/// shapes of the inputs, and a function of the inputs.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[
    Entry {
        info: &FAKE_QUANTIZE,
        cases: || {
            let case = |grid: Grid| {
                move |x: &[Tensor]| {
                    let rounded = fake_quantize(&x[0], grid)?;
                    x[0].detach().add(&rounded)?.sub(&rounded.detach())
                }
            };
            vec![
                Case::new("int8", &[&[3, 7]], case(Grid::Int8)),
                Case::new("fp8", &[&[3, 7]], case(Grid::Fp8)),
                Case::new("nf4", &[&[6, 32]], case(Grid::Nf4)),
                Case::new("empty", &[&[0, 5]], case(Grid::Int8)),
            ]
        },
    },
    Entry {
        info: &FAKE_QUANTIZE_BY,
        cases: || {
            // The factors are above 1.5, so that no value is out of range. The value of a case is x, whatever the
            // factors are, so finite differences with respect to the factors are 0. A case adds the negative of the
            // expected gradient of the factors to their computed gradient: the sum must be 0, too.
            let case = |grid: Grid| {
                move |x: &[Tensor]| {
                    let factors = x[1].exp()?.add_scalar(1.5)?;
                    let rounded = fake_quantize_by(&x[0], &factors, grid)?;
                    let groups = [factors.elem_count(), x[0].elem_count() / factors.elem_count().max(1)];
                    let d = rounded.sub(&x[0])?.detach().reshape(&groups[..])?;
                    // A term whose gradient is the expected gradient of the factors, grad · d / factor.
                    let expected =
                        d.mul(&factors.div(&factors.detach())?.unsqueeze(1)?)?.reshape(x[0].shape().clone())?;
                    x[0].detach().add(&rounded)?.sub(&rounded.detach())?.sub(&expected)?.add(&expected.detach())
                }
            };
            // The second input has one element for each scale, such as 3 · 64 / 32 = 6 for int4.
            vec![
                Case::new("int8", &[&[3, 7], &[3]], case(Grid::Int8)),
                Case::new("int4", &[&[3, 64], &[6]], case(Grid::Int4)),
                Case::new("fp8", &[&[3, 7], &[3]], case(Grid::Fp8)),
                Case::new("nf4", &[&[6, 32], &[3]], case(Grid::Nf4)),
                Case::new("empty", &[&[0, 5], &[0]], |x| fake_quantize_by(&x[0], &x[1], Grid::Int8)),
            ]
        },
    },
];
