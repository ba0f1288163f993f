//! Placeholder.
use candle_core::{Shape, Storage, WithDType, op::BackpropOp};
pub type Raw = candle_core::Tensor;
pub fn from_vec<T: WithDType>(data: Vec<T>, shape: impl Into<Shape>) -> Raw {
    Raw::from_storage(
        Storage::Cpu(T::to_cpu_storage_owned(data)),
        shape,
        BackpropOp::none(),
        false,
    )
}
pub fn check_allocation(op: &'static str, dims: &[usize], _dtype: candle_core::DType) -> crate::Result<usize> {
    dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|n| *n < 1 << 40).ok_or_else(|| crate::Error::OutOfMemory { op, message: "too large".into() })
}
