//! Timestep embeddings: sinusoids (Ho et al. 2020, arXiv:2006.11239) and a small network.

use trainable_candle_core::{DType, Device, Result, Tensor};
use trainable_candle_nn::{Init, Linear, Module, Visitor, Weights};

use crate::saved::Saved;

/// The periods of the sinusoids are less than 2π times this number.
const MAX_PERIOD: f64 = 10_000.0;

/// Converts each number to cosines and sines of decreasing frequencies (diffusers' `Timesteps` with
/// `flip_sin_to_cos=True`, `downscale_freq_shift=0`).
pub struct Sinusoids {
    /// The frequencies, (1, dim / 2), from 1 down to nearly 1 / `MAX_PERIOD`.
    frequencies: Tensor,
}

impl Sinusoids {
    /// Computes the frequencies of `dim` sinusoids, half of them cosines and half of them sines. `dim` must be even.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Candle`] if the frequencies cannot be copied to the device.
    pub fn new(dim: usize, device: &Device) -> Result<Self> {
        let half = dim / 2;
        // Frequencies are computed in f32, so that they have the same rounding errors as when the models were trained.
        // A timestep of 1000 multiplies these errors by 1000.
        let frequency = |i: usize| (-MAX_PERIOD.ln() as f32 * i as f32 / half as f32).exp();
        let frequencies: Vec<f32> = (0..half).map(frequency).collect();
        Ok(Self { frequencies: Tensor::from_vec(frequencies, (1, half), &Device::Cpu)?.to_device(device)? })
    }

    /// Returns the sinusoids of `numbers (N)` as an f32 tensor `(N, dim)`: first all cosines, then all sines. No
    /// gradient reaches `numbers`.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if `numbers` is a scalar, [`trainable_candle_core::Error::Device`] if it
    /// is not on the device of the frequencies.
    pub fn forward(&self, numbers: &Tensor) -> Result<Tensor> {
        let angles = numbers.detach().to_dtype(DType::F32)?.unsqueeze(1)?.mul(&self.frequencies)?;
        Tensor::cat(&[&angles.cos()?, &angles.sin()?], 1)
    }
}

/// diffusers' names of a [`TimestepEmbedding`]'s layers.
pub(crate) const LINEAR: [&str; 2] = ["linear_1", "linear_2"];

/// Two linear layers with SiLU between them. They read sinusoids or other features.
pub struct TimestepEmbedding {
    names: [&'static str; 2],
    linear_1: Linear<Tensor>,
    linear_2: Linear<Tensor>,
}

impl TimestepEmbedding {
    /// Takes parameters below `weights`. Fresh weights are drawn from a normal distribution with a standard deviation
    /// of 0.02 (DiT, arXiv:2212.09748).
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(in_features: usize, dim: usize, weights: &mut Weights<'_>) -> Result<Self> {
        Self::named(LINEAR, [in_features, dim, dim], true, weights)
    }

    /// As [`new`](Self::new), for models that differ from diffusers' usual layers: `names` are those of the two layers,
    /// `hidden` is the width of the first layer's result, and `bias` says whether the layers have biases.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn named(
        names: [&'static str; 2],
        [in_features, hidden, dim]: [usize; 3],
        bias: bool,
        weights: &mut Weights<'_>,
    ) -> Result<Self> {
        Ok(Self {
            names,
            linear_1: weights.linear_init(names[0], in_features, hidden, bias, Init::Normal(0.02))?,
            linear_2: weights.linear_init(names[1], hidden, dim, bias, Init::Normal(0.02))?,
        })
    }

    /// Converts `features (B, in_features)` to the dtype of the weights and returns their embedding `(B, dim)`.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] or `Device` if the input does not fit.
    pub fn forward(&self, features: &Tensor) -> Result<Tensor> {
        let features = features.to_dtype(self.linear_1.weight.dtype())?;
        self.linear_2.forward(&self.linear_1.forward(&features)?.silu()?)
    }

    /// The device of the parameters.
    pub fn device(&self) -> &Device {
        self.linear_1.weight.device()
    }
}

impl TimestepEmbedding {
    /// Adds to `saved` what the tape keeps for one sample.
    pub fn saved(&self, saved: &mut Saved) {
        self.saved_rows(1, saved);
    }

    /// As [`saved`](Self::saved), for a sample whose features are a matrix of `rows` rows.
    pub fn saved_rows(&self, rows: usize, saved: &mut Saved) {
        for layer in [&self.linear_1, &self.linear_2] {
            let in_features = layer.weight.dims()[1];
            // The number of input values of all rows, and the number of rows.
            saved.linear(layer, (rows * in_features, rows));
        }
    }
}

impl Module for TimestepEmbedding {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.linear(self.names[0], &self.linear_1)?;
        visitor.linear(self.names[1], &self.linear_2)
    }
}
