//! Initial values of parameters, drawn from the library's generator.

use trainable_candle_core::{DType, Device, Result, Shape, Tensor};

/// Uniform in ±√(1 / fan_in), as torch's `kaiming_uniform_(a=√5)`. torch's linear layers and the down matrices of most
/// LoRAs start with these values. `fan_in` is the product of all dimensions but the first.
///
/// # Errors
/// As [`Tensor::rand`].
pub fn kaiming_uniform(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    let fan_in: usize = shape.dims().iter().skip(1).product();
    uniform_by_fan(fan_in, shape, dtype, device)
}

/// Uniform in ±√(1 / fan_in), for the bias of a layer whose weight has that fan-in.
///
/// # Errors
/// As [`Tensor::rand`].
pub fn uniform_by_fan(fan_in: usize, shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let bound = 1.0 / (fan_in.max(1) as f64).sqrt();
    Tensor::rand(-bound, bound, shape, DType::F32, device)?.to_dtype(dtype)
}
