//! Methods of Python's `Tensor` that map each element by itself, and the function `where`.
//!
//! [`compute`] takes the number of elements, and releases the GIL if there are many.

use pyo3::prelude::*;
use trainable_candle_core as tc;

use super::{Operand, Tensor};
use crate::argument::Argument;
use crate::call::compute;
use crate::error::Result;

/// Define methods without arguments for floating-point tensors. An entry has the name of the method, the name of the
/// core's method that it calls, and its docstring.
macro_rules! unary_methods {
    ($($name:ident = $method:ident, $doc:literal;)*) => {
        #[pymethods]
        impl Tensor {
            $(
                #[doc = $doc]
                ///
                /// Raises:
                ///     DTypeError: if the tensor is not floating point.
                fn $name(&self, py: Python<'_>) -> Result<Self> {
                    compute(py, self.0.elem_count(), || self.0.$method()).map(Self)
                }
            )*
        }
    };
}

unary_methods! {
    exp = exp, "Return e to the power of each element.";
    log = log, "Return the natural logarithm of each element.";
    sqrt = sqrt, "Return the square root of each element.";
    square = sqr, "Return the square of each element.";
    reciprocal = recip, "Return one over each element.";
    sin = sin, "Return the sine of each element.";
    cos = cos, "Return the cosine of each element.";
    tanh = tanh, "Return the hyperbolic tangent of each element.";
    sigmoid = sigmoid, "Return 1 / (1 + exp(-x)) for each element x.";
    relu = relu, "Return max(x, 0) for each element x; NaN stays NaN.";
    silu = silu, "Return x * sigmoid(x) for each element x.";
}

#[pymethods]
impl Tensor {
    /// Return the absolute value of each element; the gradient at 0 is 0.
    fn abs(&self, py: Python<'_>) -> Result<Self> {
        compute(py, self.0.elem_count(), || self.0.abs()).map(Self)
    }

    /// Return the elements with the opposite sign.
    ///
    /// Raises:
    ///     DTypeError: if the tensor is u8 or u32.
    fn neg(&self, py: Python<'_>) -> Result<Self> {
        compute(py, self.0.elem_count(), || self.0.neg()).map(Self)
    }

    /// Apply GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415) to each element x.
    ///
    /// Args:
    ///     approximate: "none" for x * Phi(x), where Phi is the standard normal distribution function, computed with
    ///         the error function; "tanh" for the approximation of x * Phi(x) with tanh.
    ///
    /// Raises:
    ///     ArgumentError: if `approximate` has another value.
    ///     DTypeError: if the tensor is not floating point.
    #[pyo3(signature = (approximate="none"))]
    fn gelu(&self, py: Python<'_>, approximate: &str) -> Result<Self> {
        let form: tc::ops::activation::Gelu = approximate.parse()?;
        compute(py, self.0.elem_count(), || self.0.gelu(form)).map(Self)
    }

    /// Limit each element to [min, max]; None means no limit. The gradient of elements outside of this range is 0.
    ///
    /// Raises:
    ///     ArgumentError: if neither limit is given, a limit is NaN, or min > max.
    ///     DTypeError: if the tensor is not floating point.
    #[pyo3(signature = (min=Argument::of(None), max=Argument::of(None)))]
    fn clamp(&self, py: Python<'_>, min: Argument<Option<f64>>, max: Argument<Option<f64>>) -> Result<Self> {
        let (min, max) = (min.get("clamp", "min")?, max.get("clamp", "max")?);
        compute(py, self.0.elem_count(), || self.0.clamp(min, max)).map(Self)
    }
}

/// Take each element from `input` where `condition` is not 0, and from `other` where it is 0. Shapes broadcast as in
/// numpy.
///
/// ```python
/// x = tc.tensor([-1.0, 2.0])
/// assert tc.where(x > 0, x, 0.0).tolist() == [0.0, 2.0]
/// ```
///
/// Args:
///     condition: a u8 tensor, such as the result of a comparison.
///     input: a tensor or a number.
///     other: a tensor or a number. If both `input` and `other` are numbers, the result is f32.
///
/// Raises:
///     DTypeError: if `condition` is not u8, `input` and `other` are tensors of different dtypes, or one of them is a
///         float and the other a tensor of integers.
///     ArgumentError: if `input` or `other` is an integer outside the range of the result's dtype, or outside the range
///         of f64 if this dtype is floating point.
///     ShapeError: if the shapes do not broadcast.
///     DeviceError: if the tensors are on different devices.
#[pyfunction]
#[pyo3(name = "where")]
pub fn where_(py: Python<'_>, condition: &Tensor, input: Operand<'_>, other: Operand<'_>) -> Result<Tensor> {
    let work = condition.0.elem_count().max(input.elem_count()).max(other.elem_count());
    let select = |a: &tc::Tensor, b: &tc::Tensor| tc::Tensor::select(&condition.0, a, b);
    // `like` and `with` make a number a tensor in the dtype and on the device of the other operand. An `Array` is a
    // numpy array or a tensor of another library.
    compute(py, work, || match (&input, &other) {
        (Operand::Number(a), Operand::Number(b)) => {
            // Only the dtype and the device of this tensor matter.
            let in_f32 = tc::Tensor::full(0.0, (), candle_core::DType::F32, condition.0.device())?;
            select(&a.like("where", &in_f32)?, &b.like("where", &in_f32)?)
        }
        (Operand::Number(a), Operand::Tensor(b)) => select(&a.like("where", b)?, b),
        (Operand::Number(a), Operand::Array(b)) => select(&a.like("where", b)?, b),
        (Operand::Tensor(a), b) => b.with("where", a, |b| select(a, b)),
        (Operand::Array(a), b) => b.with("where", a, |b| select(a, b)),
    })
    .map(Tensor)
}
