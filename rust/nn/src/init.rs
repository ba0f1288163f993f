//! Initial values of parameters, drawn from the library's generator.

use trainable_candle_core::{DType, Device, Result, Shape, Tensor};

/// Draw the initial values of a weight (out, in, ...): uniform in ±√(1 / fan_in), where fan_in is the product of all
/// dimensions but the first. This is torch's `kaiming_uniform_(a=√5)`, which initializes torch's linear layers and the
/// down matrices of most LoRAs.
///
/// # Errors
/// As [`Tensor::rand`].
pub fn kaiming_uniform(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    let fan_in: usize = shape.dims().iter().skip(1).product();
    uniform_by_fan(fan_in, shape, dtype, device)
}

/// Draw the initial values of a bias: uniform in ±√(1 / fan_in), where `fan_in` is that of the layer's weight
/// ([`kaiming_uniform`]). A `fan_in` of 0 counts as 1.
///
/// # Errors
/// As [`Tensor::rand`].
pub fn uniform_by_fan(fan_in: usize, shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let bound = 1.0 / (fan_in.max(1) as f64).sqrt();
    // The values are drawn in f32, so that each dtype gets the same values, rounded.
    Tensor::rand(-bound, bound, shape, DType::F32, device)?.to_dtype(dtype)
}
