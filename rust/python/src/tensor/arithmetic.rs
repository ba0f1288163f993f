//! Python's operators on tensors, and the methods `maximum`, `minimum`, `pow` and `matmul`.

use pyo3::prelude::*;
use trainable_candle_core as tc;

use super::promote::{for_quotient, promoted};
use super::{Operand, Tensor};
use crate::call::compute;
use crate::error::Result;

/// The number of elements of the larger operand, as a measure of the operation's work.
fn work(a: &tc::Tensor, b: &Operand<'_>) -> usize {
    // `compute` releases the GIL if the number is large.
    a.elem_count().max(b.elem_count())
}

/// Compute `apply(a, b)`, an elementwise operation, after [promotion](promoted) of both operands to one dtype. A number
/// `b` becomes a tensor. `op` is the name of the operation for errors.
#[inline]
fn binary(
    py: Python<'_>,
    op: &'static str,
    a: &tc::Tensor,
    b: &Operand<'_>,
    apply: impl FnOnce(&tc::Tensor, &tc::Tensor) -> tc::Result<tc::Tensor> + Send,
) -> Result<Tensor> {
    compute(py, work(a, b), || promoted(op, a, b, apply)).map(Tensor)
}

/// Compute `apply(a, b)`, a matrix product. The dtypes are not promoted: they must be the same.
#[inline]
fn product(
    py: Python<'_>,
    a: &tc::Tensor,
    b: &Operand<'_>,
    apply: impl FnOnce(&tc::Tensor, &tc::Tensor) -> tc::Result<tc::Tensor> + Send,
) -> Result<Tensor> {
    compute(py, work(a, b), || b.with("matmul", a, |b| apply(a, b))).map(Tensor)
}

/// As [`binary`], but for a floating-point `a` and a number `b`, compute `apply_number(a, b)` without a tensor for `b`.
#[inline]
fn with_scalar(
    py: Python<'_>,
    op: &'static str,
    a: &tc::Tensor,
    b: &Operand<'_>,
    apply: impl FnOnce(&tc::Tensor, &tc::Tensor) -> tc::Result<tc::Tensor> + Send,
    apply_number: impl FnOnce(&tc::Tensor, f64) -> tc::Result<tc::Tensor> + Send,
) -> Result<Tensor> {
    match b {
        Operand::Number(number) if tc::raw::is_float(a.dtype()) => {
            let value = number.float(op)?;
            compute(py, a.elem_count(), || apply_number(a, value)).map(Tensor)
        }
        _ => binary(py, op, a, b, apply),
    }
}

// Python calls a reflected operator, such as `__radd__`, on the right operand. There the closures get `self` as `a`, so
// that `a` is the second operand of the operation.
#[pymethods]
impl Tensor {
    fn __add__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        with_scalar(py, "add", &self.0, &other, tc::Tensor::add, tc::Tensor::add_scalar)
    }

    fn __radd__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        with_scalar(py, "add", &self.0, &other, |a, b| b.add(a), tc::Tensor::add_scalar)
    }

    fn __sub__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        with_scalar(py, "sub", &self.0, &other, tc::Tensor::sub, |a, b| a.add_scalar(-b))
    }

    fn __rsub__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        with_scalar(py, "sub", &self.0, &other, |a, b| b.sub(a), |a, b| a.affine(-1.0, b))
    }

    fn __mul__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        with_scalar(py, "mul", &self.0, &other, tc::Tensor::mul, tc::Tensor::mul_scalar)
    }

    fn __rmul__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        with_scalar(py, "mul", &self.0, &other, |a, b| b.mul(a), tc::Tensor::mul_scalar)
    }

    // `for_quotient` promotes as `binary` does, but converts two integer operands to f32. A divisor that is a number
    // becomes a tensor too: a product with its reciprocal, as a scalar factor, would round twice.
    fn __truediv__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        compute(py, work(&self.0, &other), || for_quotient("div", &self.0, &other, tc::Tensor::div)).map(Self)
    }

    fn __rtruediv__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        compute(py, work(&self.0, &other), || for_quotient("div", &self.0, &other, |a, b| b.div(a))).map(Self)
    }

    fn __pow__(&self, py: Python<'_>, exponent: Operand<'_>, modulo: Option<&Bound<'_, PyAny>>) -> Result<Self> {
        if modulo.is_some() {
            return Err(tc::Error::argument("pow", "a third argument is not supported for tensors").into());
        }
        with_scalar(py, "pow", &self.0, &exponent, tc::Tensor::pow, tc::Tensor::pow_scalar)
    }

    fn __rpow__(&self, py: Python<'_>, base: Operand<'_>, modulo: Option<&Bound<'_, PyAny>>) -> Result<Self> {
        if modulo.is_some() {
            return Err(tc::Error::argument("pow", "a third argument is not supported for tensors").into());
        }
        binary(py, "pow", &self.0, &base, |a, b| b.pow(a))
    }

    fn __matmul__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        product(py, &self.0, &other, tc::Tensor::matmul)
    }

    fn __rmatmul__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        product(py, &self.0, &other, |a, b| b.matmul(a))
    }

    fn __neg__(&self, py: Python<'_>) -> Result<Self> {
        compute(py, self.0.elem_count(), || self.0.neg()).map(Self)
    }

    fn __pos__(&self) -> Self {
        Self(self.0.clone())
    }

    fn __abs__(&self, py: Python<'_>) -> Result<Self> {
        compute(py, self.0.elem_count(), || self.0.abs()).map(Self)
    }

    fn __eq__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        binary(py, "eq", &self.0, &other, tc::Tensor::eq)
    }

    fn __ne__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        binary(py, "ne", &self.0, &other, tc::Tensor::ne)
    }

    fn __lt__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        binary(py, "lt", &self.0, &other, tc::Tensor::lt)
    }

    fn __le__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        binary(py, "le", &self.0, &other, tc::Tensor::le)
    }

    fn __gt__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        binary(py, "gt", &self.0, &other, tc::Tensor::gt)
    }

    fn __ge__(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        binary(py, "ge", &self.0, &other, tc::Tensor::ge)
    }

    /// Return the larger of each pair of elements. Equal elements share the gradient equally.
    ///
    /// Raises:
    ///     ShapeError: if the shapes do not broadcast.
    ///     DTypeError: if `other` is an array of numpy or another library with another dtype.
    ///     ArgumentError: if `other` is an integer outside the range of this tensor's dtype, or of f64 if the dtype is
    ///         floating point.
    ///     DeviceError: if the operands are on different devices.
    fn maximum(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        binary(py, "maximum", &self.0, &other, tc::Tensor::maximum)
    }

    /// Return the smaller of each pair of elements. Equal elements share the gradient equally.
    ///
    /// Raises:
    ///     ShapeError: if the shapes do not broadcast.
    ///     DTypeError: if `other` is an array of numpy or another library with another dtype.
    ///     ArgumentError: if `other` is an integer outside the range of this tensor's dtype, or of f64 if the dtype is
    ///         floating point.
    ///     DeviceError: if the operands are on different devices.
    fn minimum(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        binary(py, "minimum", &self.0, &other, tc::Tensor::minimum)
    }

    /// Raise each element to the power of `exponent`.
    ///
    /// Raises:
    ///     ShapeError: if the shapes do not broadcast.
    ///     DTypeError: if neither this tensor nor the exponent is floating point, or if the exponent is an array of
    ///         numpy or another library with another dtype.
    ///     ArgumentError: if the exponent is an integer outside the range of f64.
    ///     DeviceError: if the operands are on different devices.
    fn pow(&self, py: Python<'_>, exponent: Operand<'_>) -> Result<Self> {
        self.__pow__(py, exponent, None)
    }

    /// Return the matrix product (..., m, k) x (..., k, n) -> (..., m, n).
    ///
    /// Batch dimensions broadcast. As in numpy, a vector (k,) on the left counts as the matrix (1, k), a vector (k,) on
    /// the right as (k, 1), and the result does not have the added dimension of size 1.
    ///
    /// Raises:
    ///     ShapeError: if an operand has no dimensions, the sizes k differ, or the batch dimensions do not broadcast.
    ///     DTypeError: if the dtypes differ or are not floating point.
    ///     DeviceError: if the operands are on different devices.
    fn matmul(&self, py: Python<'_>, other: Operand<'_>) -> Result<Self> {
        self.__matmul__(py, other)
    }
}
