//! Dtype promotion in Python's operators, by torch's rules
//! (<https://docs.pytorch.org/docs/2.9/tensor_attributes.html#type-promotion-doc>). The core's operations never convert
//! dtypes.

use trainable_candle_core as tc;
use trainable_candle_core::DType;

use super::Operand;

/// Call `apply`, an elementwise operation, with `a` and `b` converted to one dtype. A number gets the dtype of `a`,
/// except that a float and an `a` of integers are both converted to f32. Arrays of other libraries are not converted,
/// because numpy's are often f64 by accident. If such an array has another dtype than `a`, `apply` returns an error
/// that names both dtypes.
pub fn promoted<T>(
    op: &'static str,
    a: &tc::Tensor,
    b: &Operand<'_>,
    apply: impl FnOnce(&tc::Tensor, &tc::Tensor) -> tc::Result<T>,
) -> tc::Result<T> {
    match b {
        Operand::Tensor(b) if a.dtype() != b.dtype() => {
            let dtype = common(a, b);
            apply(&a.to_dtype(dtype)?, &b.to_dtype(dtype)?)
        }
        Operand::Number(number) if !number.is_integer() && !tc::raw::is_float(a.dtype()) => {
            let a = a.to_dtype(DType::F32)?;
            apply(&a, &number.like(op, &a)?)
        }
        _ => b.with(op, a, |b| apply(a, b)),
    }
}

/// As [`promoted`], but if the first operand is still of integers after the promotion, convert both operands to f32,
/// because a quotient is always floating point.
pub fn for_quotient<T>(
    op: &'static str,
    a: &tc::Tensor,
    b: &Operand<'_>,
    apply: impl FnOnce(&tc::Tensor, &tc::Tensor) -> tc::Result<T>,
) -> tc::Result<T> {
    promoted(op, a, b, |a, b| {
        // Here both operands have one dtype, unless `b` is an array of another library.
        if tc::raw::is_float(a.dtype()) {
            return apply(a, b);
        }
        apply(&a.to_dtype(DType::F32)?, &b.to_dtype(DType::F32)?)
    })
}

/// The dtype to which both tensors are promoted. If only one of them has dimensions, the tensor without dimensions
/// affects this dtype only if it is floating point and the tensor with dimensions is not.
fn common(a: &tc::Tensor, b: &tc::Tensor) -> DType {
    let is_float = |tensor: &tc::Tensor| tc::raw::is_float(tensor.dtype());
    match (is_float(a), is_float(b)) {
        (true, false) => a.dtype(),
        (false, true) => b.dtype(),
        _ => match (a.dims().is_empty(), b.dims().is_empty()) {
            (true, false) => b.dtype(),
            (false, true) => a.dtype(),
            _ => wider(a.dtype(), b.dtype()),
        },
    }
}

/// The wider of two dtypes, which must both be floating point or both integers. For f16 and bf16, it is f32.
fn wider(a: DType, b: DType) -> DType {
    // Ranks by width, to be compared within floating point or within integers. The other dtypes, f16, bf16 and
    // u8, are the narrowest.
    let width = |dtype: DType| match dtype {
        DType::F64 | DType::I64 => 2,
        DType::F32 | DType::U32 => 1,
        _ => 0,
    };
    match (a, b) {
        (DType::F16, DType::BF16) | (DType::BF16, DType::F16) => DType::F32,
        _ if width(a) >= width(b) => a,
        _ => b,
    }
}
