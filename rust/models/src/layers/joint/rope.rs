//! Rotary embedding of positions along several axes, such as the row and the column of an image patch.

use trainable_candle_core::{DType, Device, Error, Result, Tensor};

/// Cosines and sines of the angles of S tokens, f32: (S, head_dim / 2), or (B, S, head_dim / 2) if the tokens of the B
/// samples have different positions.
#[derive(Clone)]
pub struct Rope {
    /// Cosines.
    pub cos: Tensor,
    /// Sines.
    pub sin: Tensor,
}

/// Computes angles from positions. Each axis has its own pairs of features, which a position along the axis rotates.
pub struct RopeAxes {
    /// The frequencies of each axis, (1, pairs), f64: radians by which one step along the axis rotates each pair.
    frequencies: Vec<Tensor>,
}

impl RopeAxes {
    /// Check the `widths` of a configuration, the number of features of a head that each axis rotates: they must be
    /// even and add up to `head_dim`, the width of a head. The error message begins with `model`.
    ///
    /// # Errors
    /// [`Error::Config`] if a width is odd, or if the sum differs from `head_dim`.
    pub fn check(model: &str, widths: &[usize], head_dim: usize) -> Result<()> {
        if widths.iter().sum::<usize>() == head_dim && widths.iter().all(|width| width.is_multiple_of(2)) {
            return Ok(());
        }
        Err(Error::Config(format!(
            "{model}: axes_dims_rope is {widths:?}, expected even numbers whose sum is attention_head_dim, {head_dim}"
        )))
    }

    /// `widths` is as in [`check`](Self::check). An axis rotates its pair i by the angle
    /// position · `theta`^(−2i / width).
    ///
    /// # Errors
    /// [`Error::Candle`] if the frequencies cannot be copied to the device.
    pub fn new(widths: &[usize], theta: f64, device: &Device) -> Result<Self> {
        let axis = |&width: &usize| {
            let pairs = width / 2;
            let values: Vec<f64> = (0..pairs).map(|i| theta.powf(-2.0 * i as f64 / width as f64)).collect();
            Tensor::from_vec(values, (1, pairs), &Device::Cpu)?.to_device(device)
        };
        Ok(Self { frequencies: widths.iter().map(axis).collect::<Result<_>>()? })
    }

    /// The angles of tokens at the positions `ids (S, axes)`. They are computed in f64, as in the models' training:
    /// positions reach hundreds, so rounding the angles to f32 would change their cosines by about 1e-5.
    ///
    /// # Errors
    /// [`Error::Index`] if the positions have too few axes. Further axes are ignored.
    pub fn at(&self, ids: &Tensor) -> Result<Rope> {
        let ids = ids.detach().to_dtype(DType::F64)?;
        let angles: Vec<Tensor> = self
            .frequencies
            .iter()
            .enumerate()
            .map(|(axis, frequencies)| ids.narrow(1, axis, 1)?.mul(frequencies))
            .collect::<Result<_>>()?;
        let angles = Tensor::cat(&angles.iter().collect::<Vec<_>>(), 1)?;
        Ok(Rope { cos: angles.cos()?.to_dtype(DType::F32)?, sin: angles.sin()?.to_dtype(DType::F32)? })
    }
}

impl Rope {
    /// The angles of `length` tokens, from the token `start` on.
    ///
    /// # Errors
    /// [`Error::Index`] if there are fewer tokens.
    pub fn narrow(&self, start: usize, length: usize) -> Result<Self> {
        let part = |table: &Tensor| table.narrow(table.rank() - 2, start, length);
        Ok(Self { cos: part(&self.cos)?, sin: part(&self.sin)? })
    }

    /// Whether each sample has angles of its own.
    pub fn is_per_sample(&self) -> bool {
        self.cos.rank() == 3
    }

    /// The angles of the sample `index`. Callers must check that [`is_per_sample`](Self::is_per_sample) is true.
    ///
    /// # Errors
    /// [`Error::Index`] if there are fewer samples.
    pub fn sample(&self, index: usize) -> Result<Self> {
        let part = |table: &Tensor| table.narrow(0, index, 1)?.squeeze(0);
        Ok(Self { cos: part(&self.cos)?, sin: part(&self.sin)? })
    }

    /// Stack the angles of samples with different positions. Cosines and sines of each sample are (S, head_dim / 2).
    ///
    /// # Errors
    /// [`Error::Shape`] if the samples differ in the number of tokens.
    pub fn stack(samples: &[Self]) -> Result<Self> {
        let stacked =
            |table_of: fn(&Self) -> &Tensor| Tensor::stack(&samples.iter().map(table_of).collect::<Vec<_>>(), 0);
        Ok(Self { cos: stacked(|sample| &sample.cos)?, sin: stacked(|sample| &sample.sin)? })
    }
}
