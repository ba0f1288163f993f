//! The activations GELU (exact, tanh and quick) and SiLU, each with its derivative as one fused function.
//!
//! The [`Unary`] function of a type is the activation. Its [`Binary`] function maps the gradient `g` of the result and
//! the input `x` to the gradient of the input. So the backward pass saves the input, not the result (`SAVES_RESULT`).

#[cfg(feature = "testing")]
use super::case::{Case, Entry};
use super::elementwise::{Pointwise, pointwise};
use crate::cpu::{Binary, Real, Unary};
use crate::tape::OpInfo;
use crate::{Error, Result, Tensor};

/// How GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415) is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gelu {
    /// x Φ(x) with the error function.
    #[default]
    Exact,
    /// 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))).
    Tanh,
}

impl std::str::FromStr for Gelu {
    type Err = Error;

    /// Parses torch's name of a form: `"none"` or `"tanh"`.
    ///
    /// # Errors
    /// [`Error::Argument`] if the name is another.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "none" => Ok(Self::Exact),
            "tanh" => Ok(Self::Tanh),
            other => Err(Error::argument("gelu", format!("approximate is \"{other}\"; expected \"none\" or \"tanh\""))),
        }
    }
}

static GELU: OpInfo = OpInfo::cheap("gelu");
static QUICK_GELU: OpInfo = OpInfo::cheap("quick_gelu");
static SILU: OpInfo = OpInfo::cheap("silu");

/// 1 / √(2π).
const INV_SQRT_TAU: f64 = 0.398_942_280_401_432_7;
/// √(2/π), the factor in the tanh of [`Gelu::Tanh`].
const TANH_SCALE: f64 = 0.797_884_560_802_865_4;
/// The factor of x³ in [`Gelu::Tanh`].
const TANH_CUBE: f64 = 0.044_715;
/// The factor of x in the sigmoid of [`Tensor::quick_gelu`].
const QUICK_SCALE: f64 = 1.702;

#[derive(Clone, Copy)]
pub(super) struct GeluExact;

impl Unary for GeluExact {
    const KERNEL: &'static str = "gelu";

    #[inline(always)]
    fn apply<R: Real>(&self, x: R) -> R {
        x * x.normal_cdf()
    }
}

impl Binary for GeluExact {
    const KERNEL: &'static str = "gelu_backward";

    #[inline(always)]
    fn apply<R: Real>(&self, g: R, x: R) -> R {
        let pdf = R::from_f64(INV_SQRT_TAU) * (R::from_f64(-0.5) * x * x).exp();
        g * (x.normal_cdf() + x * pdf)
    }
}

impl Pointwise for GeluExact {
    const SAVES_RESULT: bool = false;
}

#[derive(Clone, Copy)]
pub(super) struct GeluTanh;

impl Unary for GeluTanh {
    const KERNEL: &'static str = "gelu_tanh";

    #[inline(always)]
    fn apply<R: Real>(&self, x: R) -> R {
        let inner = R::from_f64(TANH_SCALE) * (x + R::from_f64(TANH_CUBE) * x * x * x);
        let half_x = R::from_f64(0.5) * x;
        half_x + half_x * inner.tanh()
    }
}

impl Binary for GeluTanh {
    const KERNEL: &'static str = "gelu_tanh_backward";

    #[inline(always)]
    fn apply<R: Real>(&self, g: R, x: R) -> R {
        let half = R::from_f64(0.5);
        let t = (R::from_f64(TANH_SCALE) * (x + R::from_f64(TANH_CUBE) * x * x * x)).tanh();
        let inner_slope = R::from_f64(TANH_SCALE) * (R::ONE + R::from_f64(3.0 * TANH_CUBE) * x * x);
        g * (half + half * t + half * x * (R::ONE - t * t) * inner_slope)
    }
}

impl Pointwise for GeluTanh {
    const SAVES_RESULT: bool = false;
}

#[derive(Clone, Copy)]
struct QuickGelu;

impl Unary for QuickGelu {
    const KERNEL: &'static str = "quick_gelu";

    #[inline(always)]
    fn apply<R: Real>(&self, x: R) -> R {
        x * (R::from_f64(QUICK_SCALE) * x).sigmoid()
    }
}

impl Binary for QuickGelu {
    const KERNEL: &'static str = "quick_gelu_backward";

    #[inline(always)]
    fn apply<R: Real>(&self, g: R, x: R) -> R {
        let scaled = R::from_f64(QUICK_SCALE) * x;
        let s = scaled.sigmoid();
        g * s * (R::ONE + scaled * (R::ONE - s))
    }
}

impl Pointwise for QuickGelu {
    const SAVES_RESULT: bool = false;
}

#[derive(Clone, Copy)]
pub(super) struct Silu;

impl Unary for Silu {
    const KERNEL: &'static str = "silu";

    #[inline(always)]
    fn apply<R: Real>(&self, x: R) -> R {
        x * x.sigmoid()
    }
}

impl Binary for Silu {
    const KERNEL: &'static str = "silu_backward";

    #[inline(always)]
    fn apply<R: Real>(&self, g: R, x: R) -> R {
        let s = x.sigmoid();
        g * s * (R::ONE + x * (R::ONE - s))
    }
}

impl Pointwise for Silu {
    const SAVES_RESULT: bool = false;
}

impl Tensor {
    /// GELU in the given form.
    ///
    /// # Errors
    /// [`Error::DType`] if the tensor is not floating point.
    pub fn gelu(&self, form: Gelu) -> Result<Self> {
        match form {
            Gelu::Exact => pointwise(&GELU, self, GeluExact),
            Gelu::Tanh => pointwise(&GELU, self, GeluTanh),
        }
    }

    /// x · sigmoid(1.702 x): the approximation of GELU that CLIP was trained with (section 2 of the GELU paper).
    ///
    /// # Errors
    /// [`Error::DType`] if the tensor is not floating point.
    pub fn quick_gelu(&self) -> Result<Self> {
        pointwise(&QUICK_GELU, self, QuickGelu)
    }

    /// SiLU: x · sigmoid(x).
    ///
    /// # Errors
    /// [`Error::DType`] if the tensor is not floating point.
    pub fn silu(&self) -> Result<Self> {
        pointwise(&SILU, self, Silu)
    }
}

/// Computes the plain form of [`Gelu::Tanh`].
#[cfg(feature = "testing")]
fn gelu_tanh_plain(x: &Tensor) -> Result<Tensor> {
    let cubic_term = x.sqr()?.mul(x)?.mul_scalar(TANH_CUBE)?;
    let inner = x.add(&cubic_term)?.mul_scalar(TANH_SCALE)?;
    x.mul(&inner.tanh()?.add_scalar(1.0)?)?.mul_scalar(0.5)
}

/// Registry entries of this file. A [`Case`] has a label (empty for an ordinary case), the shape of each input, and the
/// call to test. [`Gelu::Exact`] has no plain form, because no basic operation computes the error function. Cases with
/// empty inputs have none either, because their results have no values to compare.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[
    Entry {
        info: &GELU,
        cases: || {
            vec![
                Case::new("exact", &[&[3, 7]], |x| x[0].gelu(Gelu::Exact)),
                Case::new("exact empty", &[&[0]], |x| x[0].gelu(Gelu::Exact)),
                Case::new("tanh", &[&[3, 7]], |x| x[0].gelu(Gelu::Tanh)).plain(|x| gelu_tanh_plain(&x[0])),
            ]
        },
    },
    Entry {
        info: &QUICK_GELU,
        cases: || {
            vec![
                Case::new("", &[&[3, 7]], |x| x[0].quick_gelu())
                    .plain(|x| x[0].mul(&x[0].mul_scalar(QUICK_SCALE)?.sigmoid()?)),
                Case::new("empty", &[&[0]], |x| x[0].quick_gelu()),
            ]
        },
    },
    Entry {
        info: &SILU,
        cases: || {
            vec![
                Case::new("", &[&[3, 7]], |x| x[0].silu()).plain(|x| x[0].mul(&x[0].sigmoid()?)),
                Case::new("empty", &[&[2, 0]], |x| x[0].silu()),
            ]
        },
    },
];
