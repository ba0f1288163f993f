//! The network of Chroma that computes the modulation table: a row for each shift, scale and gate of all transformer
//! blocks, and for the shift and the scale of the last norm. In Flux, each block has its own layers that compute its
//! modulation. Chroma's network was distilled from these layers of Flux.1-schnell. Its name in files is
//! `distilled_guidance_layer`.

use trainable_candle_core::{DType, Device, Result, Tensor};
use trainable_candle_nn::{Linear, Module, RmsNorm, Visitor, Weights};

use crate::layers::timestep::LINEAR;
use crate::layers::{Sinusoids, TimestepEmbedding};
use crate::saved::Saved;

/// The epsilon that the norms add to the mean square, as in the original code. diffusers adds the machine epsilon of
/// the dtype instead. In f32 this makes hardly any difference.
const EPS: f64 = 1e-6;
/// The row numbers of the modulation table are multiplied by this number before their sinusoids are computed, as the
/// time from 0 to 1 is.
const ROW_SCALE: f32 = 1000.0;
/// The number of rows of the modulation table for a single-stream block: shift, scale, gate.
const SINGLE_ROWS: usize = 3;
/// The number of rows of the modulation table for one of the two streams of a double-stream block: shift, scale and
/// gate of attention, then shift, scale and gate of the feed-forward network.
const STREAM_ROWS: usize = 6;
/// The number of rows of the modulation table for the last norm: shift and scale.
const OUTPUT_ROWS: usize = 2;

/// The sizes of an [`Approximator`].
#[derive(Clone, Copy)]
pub(super) struct ApproximatorSizes {
    /// Number of input features from which a row of the modulation table is computed.
    pub channels: usize,
    /// Number of features of the hidden layers.
    pub width: usize,
    /// Number of residual layers.
    pub layers: usize,
    /// Number of double-stream blocks.
    pub doubles: usize,
    /// Number of single-stream blocks.
    pub singles: usize,
    /// Number of features of a token, and of a row of the modulation table.
    pub dim: usize,
}

impl ApproximatorSizes {
    /// Number of rows of the modulation table.
    const fn rows(self) -> usize {
        SINGLE_ROWS * self.singles + 2 * STREAM_ROWS * self.doubles + OUTPUT_ROWS
    }
}

/// Computes the modulation table from the time. Each row is computed from the sinusoids of the time, of the guidance
/// and of the row's number. The sinusoids pass through a projection, residual layers with RMS norms, and a projection
/// to the number of features of a token.
pub(super) struct Approximator {
    sizes: ApproximatorSizes,
    /// Computes the sinusoids of the time, channels / 4 for each time.
    sinusoids: Sinusoids,
    /// The input features that do not depend on the time, (rows, channels · 3 / 4): the sinusoids of the guidance,
    /// which is always 0, and of the row's number.
    fixed_features: Tensor,
    in_proj: Linear<Tensor>,
    /// The residual layers, without their norms. Each computes what a timestep embedding does: linear, SiLU, linear.
    layers: Vec<TimestepEmbedding>,
    /// The norm before each residual layer.
    norms: Vec<RmsNorm>,
    out_proj: Linear<Tensor>,
}

impl Approximator {
    /// A network with the parameters below `weights`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: ApproximatorSizes, weights: &mut Weights<'_>) -> Result<Self> {
        let ApproximatorSizes { channels, width, layers, dim, .. } = sizes;
        // The last argument of `linear` and the third of `named`: the layers have biases.
        let in_proj = weights.linear("in_proj", channels, width, true)?;
        let device = in_proj.weight.device();
        Ok(Self {
            sinusoids: Sinusoids::new(channels / 4, device)?,
            fixed_features: fixed_features(sizes, device)?,
            // `LINEAR` are the names of the two linear layers. Inputs, hidden features and results all have `width`
            // features.
            layers: (0..layers)
                .map(|i| TimestepEmbedding::named(LINEAR, [width; 3], true, &mut weights.pp(&format!("layers.{i}"))))
                .collect::<Result<_>>()?,
            norms: (0..layers).map(|i| weights.rms_norm(&format!("norms.{i}"), width, EPS)).collect::<Result<_>>()?,
            out_proj: weights.linear("out_proj", width, dim, true)?,
            in_proj,
            sizes,
        })
    }

    /// The modulation tables for `times (T)`, one table for each time. Times are from 0 (clean latents) to 1000.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if `times` is not one-dimensional.
    pub fn forward(&self, times: &Tensor) -> Result<ModulationTable> {
        let &[rows, fixed] = self.fixed_features.dims() else { unreachable!("the fixed features are a matrix") };
        let (count, channels) = (times.elem_count(), self.sizes.channels);
        let of_times = self.sinusoids.forward(times)?.unsqueeze(1)?.broadcast_as((count, rows, channels - fixed))?;
        let of_rows = self.fixed_features.unsqueeze(0)?.broadcast_as((count, rows, fixed))?;
        let features = Tensor::cat(&[&of_times, &of_rows], 2)?.to_dtype(self.in_proj.weight.dtype())?;
        let mut x = self.in_proj.forward(&features)?;
        for (layer, norm) in self.layers.iter().zip(&self.norms) {
            x = x.add(&layer.forward(&norm.forward(&x)?)?)?;
        }
        Ok(ModulationTable { sizes: self.sizes, rows: self.out_proj.forward(&x)? })
    }

    /// Adds to `saved` what the tape keeps of a forward pass for one time.
    pub fn saved(&self, saved: &mut Saved) {
        let ApproximatorSizes { channels, width, .. } = self.sizes;
        let rows = self.sizes.rows();
        // Of each linear layer: the number of its input values, and the number of rows to which it is applied.
        saved.linear(&self.in_proj, (rows * channels, rows));
        for layer in &self.layers {
            // The input of the norm.
            saved.keep(rows * width);
            layer.saved_rows(rows, saved);
        }
        saved.linear(&self.out_proj, (rows * width, rows));
    }
}

impl Module for Approximator {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.linear("in_proj", &self.in_proj)?;
        for (i, (layer, norm)) in self.layers.iter().zip(&self.norms).enumerate() {
            visitor.module(&format!("layers.{i}"), layer)?;
            visitor.module(&format!("norms.{i}"), norm)?;
        }
        visitor.linear("out_proj", &self.out_proj)
    }
}

/// The value of [`Approximator::fixed_features`].
fn fixed_features(sizes: ApproximatorSizes, device: &Device) -> Result<Tensor> {
    let (rows, channels) = (sizes.rows(), sizes.channels);
    let guidance = Sinusoids::new(channels / 4, device)?.forward(&Tensor::zeros(rows, DType::F32, device)?)?;
    let numbers: Vec<f32> = (0..rows).map(|row| row as f32 * ROW_SCALE).collect();
    let numbers = Tensor::from_vec(numbers, rows, &Device::Cpu)?.to_device(device)?;
    Tensor::cat(&[&guidance, &Sinusoids::new(channels / 2, device)?.forward(&numbers)?], 1)
}

/// The shifts, scales and gates of all blocks and of the last norm, for one or several times. The rows of a table are,
/// in order: three for each single-stream block, six for the image stream of each double-stream block, six for the text
/// stream of each double-stream block, and two for the last norm.
pub(super) struct ModulationTable {
    sizes: ApproximatorSizes,
    /// The tables, (T, rows, D) of T times, or (B, rows, D) of B samples after [`of_batch`](Self::of_batch). D is the
    /// number of features of a token.
    rows: Tensor,
}

impl ModulationTable {
    /// The tables of the `batch` samples. If they were computed for a single time, all samples get the same table.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if the number of times is not 1 or the number of samples.
    pub fn of_batch(self, batch: usize) -> Result<Self> {
        let rows = self.rows.broadcast_as((batch, self.sizes.rows(), self.sizes.dim))?;
        Ok(Self { rows, ..self })
    }

    /// The `count` rows from row `first` on, concatenated: (B, count · D).
    fn side_by_side(&self, first: usize, count: usize) -> Result<Tensor> {
        let batch = self.rows.dims()[0];
        self.rows.narrow(1, first, count)?.reshape((batch, count * self.sizes.dim))
    }

    /// The modulation of the image stream and of the text stream, (B, 6 · D) each, in the double-stream block `index`,
    /// which must be less than the number of these blocks.
    ///
    /// # Errors
    /// As [`Tensor::narrow`].
    pub fn double(&self, index: usize) -> Result<[Tensor; 2]> {
        let first_of_images = SINGLE_ROWS * self.sizes.singles;
        let first_of_texts = first_of_images + STREAM_ROWS * self.sizes.doubles;
        let of_block = |first: usize| self.side_by_side(first + STREAM_ROWS * index, STREAM_ROWS);
        Ok([of_block(first_of_images)?, of_block(first_of_texts)?])
    }

    /// The modulation (B, 3 · D) of the single-stream block `index`, which must be less than the number of these
    /// blocks.
    ///
    /// # Errors
    /// As [`Tensor::narrow`].
    pub fn single(&self, index: usize) -> Result<Tensor> {
        self.side_by_side(SINGLE_ROWS * index, SINGLE_ROWS)
    }

    /// The shift and the scale of the last norm, (B, D) each.
    ///
    /// # Errors
    /// As [`Tensor::narrow`].
    pub fn output(&self) -> Result<[Tensor; 2]> {
        let first = self.sizes.rows() - OUTPUT_ROWS;
        Ok([self.side_by_side(first, 1)?, self.side_by_side(first + 1, 1)?])
    }
}
