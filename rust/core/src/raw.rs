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
