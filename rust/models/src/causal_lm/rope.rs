//! Rotary position embedding: the angles by which queries and keys are rotated, and the scaling of the frequencies for
//! texts longer than those of pretraining.

use std::f64::consts::PI;

use trainable_candle_core::{DType, Device, Error, Result, Tensor};

use super::OP;
use crate::fields::Fields;

/// Rotary position embedding. The features i and i + `width` / 2 of a head are pair i. Each pair has a frequency, the
/// angle per position: for the token at `position`, the pair is rotated by `position · frequency`. Without scaling, the
/// frequency is `θ^(-2i / width)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The base θ of the frequencies.
    theta: f64,
    scaling: Scaling,
    /// Number of features of a head.
    width: usize,
    /// The largest number of tokens of a text that the model was trained for.
    longest: usize,
}

/// The scaling of the frequencies. The original length, `original`, is the number of tokens of the texts in
/// pretraining. A frequency *makes* `original · frequency / 2π` rotations in a text of this length.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// No scaling.
    Plain,
    /// All frequencies are divided by one factor.
    Linear {
        /// The divisor of frequencies.
        factor: f64,
    },
    /// NTK-aware scaling: for a text of L tokens, θ is replaced by
    /// `θ (factor · L / longest - (factor - 1))^(width / (width - 2))` if L is larger than `longest`, the number of
    /// tokens of the longest texts in training.
    Dynamic {
        /// The factor in the formula.
        factor: f64,
    },
    /// Llama 3.1's scaling: low frequencies are divided by a factor, high frequencies are unchanged, and the
    /// frequencies in between are interpolated linearly in their number of rotations.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// A frequency is low if it makes at most this many rotations in a text of the original length.
        low: f64,
        /// A frequency is high if it makes at least this many rotations in a text of the original length.
        high: f64,
        /// The original length: the number of tokens of the texts in pretraining.
        original: f64,
    },
    /// `YaRN` (Peng et al. 2023, arXiv:2309.00071).
    Yarn {
        /// The divisor of low frequencies.
        factor: f64,
        /// The original length: the number of tokens of the texts in pretraining.
        original: f64,
        /// A frequency that makes at least this many rotations in a text of the original length is unchanged.
        fast: f64,
        /// A frequency that makes at most this many rotations in a text of the original length is divided by `factor`.
        slow: f64,
        /// The frequencies between `slow` and `fast` rotations are interpolated linearly in the index of their pair.
        /// `truncate` tells whether the interpolation begins and ends at whole indices: the index of `fast` rotations
        /// rounded down, and the index of `slow` rotations rounded up.
        truncate: bool,
        /// The number by which cosines and sines are multiplied.
        attention: f64,
    },
    /// `LongRoPE` (Ding et al. 2024, arXiv:2402.13753): the frequency of each pair has its own divisor.
    LongRope {
        /// The divisors for texts up to the original length, one for each pair.
        short: Vec<f64>,
        /// The divisors for texts longer than the original length, one for each pair.
        long: Vec<f64>,
        /// The original length: the number of tokens of the texts in pretraining.
        original: f64,
        /// The number by which cosines and sines are multiplied.
        attention: f64,
    },
}

impl Rope {
    /// Reads the rotary embedding from a configuration: `rope_theta` beside the other fields of the model, and all
    /// other fields inside `rope_scaling`; in new configurations all fields are inside `rope_parameters`. `width` is
    /// the number of features of a head. `longest` is the largest number of tokens of a text that the model was trained
    /// for.
    ///
    /// # Errors
    /// [`Error::Config`] if a field is missing or has a wrong value, or if the kind of scaling is not supported.
    pub(super) fn read(fields: &mut Fields<'_>, width: usize, longest: usize) -> Result<Self> {
        let theta = fields.number("rope_theta", Some(10_000.0))?;
        // Some configurations have this field beside the other fields of the model, not inside `rope_scaling`.
        let outer_original = fields.optional_number("original_max_position_embeddings")?;
        let rope = |theta, scaling| Self { theta, scaling, width, longest };
        let inner = match fields.object("rope_parameters")? {
            Some(inner) => Some(inner),
            None => fields.object("rope_scaling")?,
        };
        let Some(mut inner) = inner else { return Ok(rope(theta, Scaling::Plain)) };
        let theta = inner.number("rope_theta", Some(theta))?;
        // Models that rotate only a part of the features of a head are not supported.
        inner.only(&[("partial_rotary_factor", 1.0.into())])?;
        let original = |inner: &mut Fields<'_>| match outer_original {
            Some(original) => Ok(original),
            None => inner.number("original_max_position_embeddings", Some(longest as f64)),
        };
        // `None`: there is no default, so a missing field is an error.
        let factor = |inner: &mut Fields<'_>| inner.number("factor", None);
        let name = inner.text("rope_type").or_else(|| inner.text("type")).unwrap_or("default");
        let scaling = match name {
            // "mrope" computes each angle from the position on one of three axes. A text token has the same position on
            // all three axes.
            "default" | "mrope" => Scaling::Plain,
            "linear" => Scaling::Linear { factor: factor(&mut inner)? },
            "dynamic" => Scaling::Dynamic { factor: factor(&mut inner)? },
            "llama3" => Scaling::Llama3 {
                factor: factor(&mut inner)?,
                low: inner.number("low_freq_factor", None)?,
                high: inner.number("high_freq_factor", None)?,
                original: original(&mut inner)?,
            },
            "yarn" => {
                let original = original(&mut inner)?;
                let factor = inner.number("factor", Some(longest as f64 / original))?;
                Scaling::Yarn {
                    factor,
                    original,
                    fast: inner.number("beta_fast", Some(32.0))?,
                    slow: inner.number("beta_slow", Some(1.0))?,
                    truncate: inner.flag("truncate", true)?,
                    attention: yarn_attention(&mut inner, factor)?,
                }
            }
            // "su" is an old name of LongRoPE.
            "longrope" | "su" => {
                let original = original(&mut inner)?;
                let factor = inner.number("factor", Some(longest as f64 / original))?;
                let default_attention = if factor > 1.0 { (1.0 + factor.ln() / original.ln()).sqrt() } else { 1.0 };
                Scaling::LongRope {
                    short: inner.numbers("short_factor", width / 2)?,
                    long: inner.numbers("long_factor", width / 2)?,
                    original,
                    attention: inner.number("attention_factor", Some(default_attention))?,
                }
            }
            _ => {
                let field = if inner.is_given("rope_type") { "rope_type" } else { "type" };
                let known = "\"default\", \"linear\", \"dynamic\", \"llama3\", \"yarn\" or \"longrope\"";
                return Err(inner.wrong(field, known));
            }
        };
        Ok(rope(theta, scaling))
    }

    /// The frequency of each pair, and the number by which cosines and sines are multiplied. `length` is the number of
    /// tokens of the longest text.
    fn frequencies(&self, length: usize) -> (Vec<f64>, f64) {
        let width = self.width as f64;
        let unscaled = |theta: f64| (0..self.width / 2).map(move |i| theta.powf(-2.0 * i as f64 / width));
        let plain = || unscaled(self.theta);
        match &self.scaling {
            Scaling::Plain => (plain().collect(), 1.0),
            Scaling::Linear { factor } => (plain().map(|f| f / factor).collect(), 1.0),
            Scaling::Dynamic { factor } => {
                let ratio = length.max(self.longest) as f64 / self.longest as f64;
                let theta = self.theta * (factor * ratio - (factor - 1.0)).powf(width / (width - 2.0));
                (unscaled(theta).collect(), 1.0)
            }
            &Scaling::Llama3 { factor, low, high, original } => {
                let scaled = |frequency: f64| {
                    let rotations = original * frequency / (2.0 * PI);
                    let unchanged = ((rotations - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 - unchanged) * frequency / factor + unchanged * frequency
                };
                (plain().map(scaled).collect(), 1.0)
            }
            &Scaling::Yarn { factor, original, fast, slow, truncate, attention } => {
                // The index i, not rounded, of the pair whose frequency makes this many rotations.
                let pair = |rotations: f64| width * (original / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
                let (first, last) = (pair(fast), pair(slow));
                let (first, last) = if truncate { (first.floor(), last.ceil()) } else { (first, last) };
                // The limit width - 1 (not width / 2 - 1) and the distance 0.001, which avoids a division by 0, are
                // those of transformers.
                let (first, mut last) = (first.max(0.0), last.min(width - 1.0));
                if first == last {
                    last += 0.001;
                }
                let scaled = |(i, frequency): (usize, f64)| {
                    let divided = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
                    frequency / factor * divided + frequency * (1.0 - divided)
                };
                (plain().enumerate().map(scaled).collect(), attention)
            }
            Scaling::LongRope { short, long, original, attention } => {
                let divisors = if length as f64 > *original { long } else { short };
                (plain().zip(divisors).map(|(f, divisor)| f / divisor).collect(), *attention)
            }
        }
    }

    /// Whether the frequencies depend on the number of tokens of a text.
    pub(super) fn follows_length(&self) -> bool {
        match &self.scaling {
            Scaling::Dynamic { .. } => true,
            Scaling::LongRope { short, long, .. } => short != long,
            _ => false,
        }
    }

    /// A number that identifies the frequencies for a text of `length` tokens: two texts with equal numbers have the
    /// same frequencies.
    pub(super) fn stage(&self, length: usize) -> usize {
        match &self.scaling {
            Scaling::Dynamic { .. } => length.max(self.longest),
            Scaling::LongRope { original, .. } => usize::from(length as f64 > *original),
            _ => 0,
        }
    }

    /// The cosines and the sines of the angles at `positions (N)`, multiplied by the number that the scaling gives,
    /// each (N, width / 2) in f32.
    pub(super) fn tables(&self, positions: &Tensor, device: &Device) -> Result<[Tensor; 2]> {
        let (frequencies, attention) = self.frequencies(self.length(positions)?);
        let count = frequencies.len();
        // The frequencies, and their products with the positions, are in f32, as in transformers.
        let frequencies: Vec<f32> = frequencies.into_iter().map(|f| f as f32).collect();
        let frequencies = Tensor::from_vec(frequencies, (1, count), device)?;
        let angles = positions.detach().to_dtype(DType::F32)?.unsqueeze(1)?.mul(&frequencies)?;
        let scaled = |table: Tensor| if attention == 1.0 { Ok(table) } else { table.mul_scalar(attention) };
        Ok([scaled(angles.cos()?)?, scaled(angles.sin()?)?])
    }

    /// The largest of `positions` plus 1 (the length of the longest text), or 0 if the frequencies do not depend on the
    /// length. The positions are copied to the CPU to find the largest, so the call waits for the GPU that computes
    /// them.
    fn length(&self, positions: &Tensor) -> Result<usize> {
        if !self.follows_length() {
            return Ok(0);
        }
        let positions = positions.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec::<i64>()?;
        let largest = positions.into_iter().max().unwrap_or(0);
        let negative = |_| Error::index(OP, format!("the largest position is {largest}, expected 0 or more"));
        usize::try_from(largest + 1).map_err(negative)
    }
}

/// The number by which `YaRN` multiplies cosines and sines: the field `attention_factor`, or else transformers'
/// default, which depends on the scaling factor `factor` and on the fields `mscale` and `mscale_all_dim`.
fn yarn_attention(fields: &mut Fields<'_>, factor: f64) -> Result<f64> {
    if let Some(given) = fields.optional_number("attention_factor")? {
        return Ok(given);
    }
    let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    // In transformers, 0 counts as missing.
    let mscale = fields.optional_number("mscale")?.filter(|&m| m != 0.0);
    let mscale_all_dim = fields.optional_number("mscale_all_dim")?.filter(|&m| m != 0.0);
    Ok(match (mscale, mscale_all_dim) {
        (Some(mscale), Some(mscale_all_dim)) => scale(mscale) / scale(mscale_all_dim),
        _ => scale(1.0),
    })
}
