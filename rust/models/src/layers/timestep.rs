//! How a model is told the time: sinusoids (Ho et al. 2020, arXiv:2006.11239) and a small network.

use trainable_candle_core::{DType, Device, Result, Tensor};
use trainable_candle_nn::{Init, Linear, Module, Visitor, Weights};

/// The longest period of the sinusoids, divided by 2π.
const MAX_PERIOD: f64 = 10_000.0;

/// `timestep (B)` → f32 `(B, dim)`: dim / 2 cosines of falling frequency (1 to nearly 1 / 10000), then as many sines
/// (diffusers' `Timesteps` with `flip_sin_to_cos=True`, `downscale_freq_shift=0`). `dim` is even; no gradient flows.
///
/// # Errors
/// [`trainable_candle_core::Error::Shape`] if `timestep` has not one dimension.
pub fn sinusoidal_embedding(timestep: &Tensor, dim: usize) -> Result<Tensor> {
    let half = dim / 2;
    let frequencies: Vec<f32> = (0..half).map(|i| (-MAX_PERIOD.ln() * i as f64 / half as f64).exp() as f32).collect();
    let frequencies = Tensor::from_vec(frequencies, (1, half), &Device::Cpu)?.to_device(timestep.device())?;
    let angles = timestep.detach().to_dtype(DType::F32)?.unsqueeze(1)?.mul(&frequencies)?;
    Tensor::cat(&[&angles.cos()?, &angles.sin()?], 1)
}

/// Two linear layers with SiLU between them, over the sinusoids.
pub struct TimestepEmbedding {
    linear_1: Linear<Tensor>,
    linear_2: Linear<Tensor>,
}

impl TimestepEmbedding {
    /// Parameters below `weights`; starting normal with a deviation of 0.02 (DiT, arXiv:2212.09748).
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(in_features: usize, dim: usize, weights: &mut Weights<'_>) -> Result<Self> {
        Ok(Self {
            linear_1: weights.linear_init("linear_1", in_features, dim, true, Init::Normal(0.02))?,
            linear_2: weights.linear_init("linear_2", dim, dim, true, Init::Normal(0.02))?,
        })
    }

    /// `timestep (B)` → `(B, dim)` in the dtype of the weights.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if `timestep` has not one dimension.
    pub fn forward(&self, timestep: &Tensor) -> Result<Tensor> {
        let sinusoids = sinusoidal_embedding(timestep, self.linear_1.in_features())?;
        let hidden = self.linear_1.forward(&sinusoids.to_dtype(self.linear_1.weight.dtype())?)?.silu()?;
        self.linear_2.forward(&hidden)
    }
}

impl Module for TimestepEmbedding {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.linear("linear_1", &self.linear_1)?;
        visitor.linear("linear_2", &self.linear_2)
    }
}
