//! Streams of random numbers of a run: each stream is a function of the run's seed, a purpose and a number.
//!
//! A stream depends on nothing else: not on earlier draws, the composition of batches, or the process that draws. So a
//! run can be continued at any training step, on any number of GPUs, given the number of the step.

use std::str::FromStr;

use super::{State, philox_at};
use crate::{Error, Result};

/// The purpose of a stream. Streams of different purposes are independent. Below, "by A" means that the stream's number
/// is the number of A; "by A and B" means that the number of A is in the upper 32 bits, and that of B in the lower 32
/// bits. This is the only list of purposes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Purpose {
    /// A draw from an autoencoder's distribution for an image; by the number of the sample.
    Latents = 1,
    /// Noise levels and timesteps; by the number of the sample.
    Level,
    /// Noise; by the number of the sample.
    Noise,
    /// Offset noise, one value for all pixels of a channel; by the number of the sample.
    Offset,
    /// Noise levels of a validation; by the number of the example.
    ValidationLevel,
    /// Noise of a validation; by the number of the example.
    ValidationNoise,
    /// Draws in the preparation of a batch for which this list has no other purpose; by the number of the batch.
    Inputs,
    /// Draws of a forward pass and its backward pass, such as those of dropout; by the number of the batch.
    Pass,
    /// Which of an image's crops and which variant of its colours a sample gets, and whether the sample is mirrored; by
    /// the number of the sample.
    View,
    /// The positions of an image's crops; by image and crop.
    Crop,
    /// The caption of an image, if any; by the number of the sample.
    Caption,
    /// The order and the dropout of the tags of a caption; by image and variant.
    CaptionVariant,
    /// The order of the items (images, or examples of texts) of a group, from which batches are made; by group and
    /// epoch.
    Items,
    /// The order in which the batches of all groups follow one another (for language models, the order of the packed
    /// rows); by epoch.
    Order,
    /// The choice of the items for validation; the number is 0.
    Split,
    /// The next token of a generated text; by text and position of the token in the text.
    Token,
    /// Pyramid noise, a sum of noise of several resolutions; by the number of the sample.
    Pyramid,
    /// The changes to the colours of an image; by image and variant.
    Color,
}

impl Purpose {
    /// All purposes.
    pub const ALL: [Self; 18] = [
        Self::Latents,
        Self::Level,
        Self::Noise,
        Self::Offset,
        Self::ValidationLevel,
        Self::ValidationNoise,
        Self::Inputs,
        Self::Pass,
        Self::View,
        Self::Crop,
        Self::Caption,
        Self::CaptionVariant,
        Self::Items,
        Self::Order,
        Self::Split,
        Self::Token,
        Self::Pyramid,
        Self::Color,
    ];

    /// The purpose's name in Python.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Latents => "latents",
            Self::Level => "level",
            Self::Noise => "noise",
            Self::Offset => "offset",
            Self::ValidationLevel => "validation_level",
            Self::ValidationNoise => "validation_noise",
            Self::Inputs => "inputs",
            Self::Pass => "pass",
            Self::View => "view",
            Self::Crop => "crop",
            Self::Caption => "caption",
            Self::CaptionVariant => "caption_variant",
            Self::Items => "items",
            Self::Order => "order",
            Self::Split => "split",
            Self::Token => "token",
            Self::Pyramid => "pyramid",
            Self::Color => "color",
        }
    }
}

impl FromStr for Purpose {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|purpose| purpose.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::argument("stream", format!("unknown purpose \"{name}\"; expected one of {names}"))
        })
    }
}

impl State {
    /// The start of the stream for `purpose` and `number` in a run of `seed`.
    ///
    /// The stream's seed is the output of Philox, with the run's seed as its key, for a counter that no draw reaches:
    /// counters of draws have 0 in the upper half (the last two words), this counter has the purpose and 1.
    pub fn of(seed: u64, purpose: Purpose, number: u64) -> Self {
        let [low, high, ..] = philox_at(seed, [number as u32, (number >> 32) as u32, purpose as u32, 1]);
        Self { seed: u64::from(high) << 32 | u64::from(low), offset: 0 }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::rng::{normal_samples, normal_vec_at, uniform_samples};

    #[test]
    fn each_purpose_has_its_own_number_and_name() {
        assert_eq!(Purpose::ALL.map(|purpose| purpose as u32).to_vec(), (1..=18).collect::<Vec<_>>());
        for purpose in Purpose::ALL {
            assert_eq!(purpose.name().parse::<Purpose>().unwrap(), purpose);
        }
        assert!("dropout".parse::<Purpose>().unwrap_err().to_string().contains("expected one of latents, level"));
    }

    #[test]
    fn each_seed_purpose_and_number_has_its_own_stream() {
        let mut seen = HashSet::new();
        for seed in [0, 1, u64::MAX] {
            for purpose in Purpose::ALL {
                for number in (0..200).chain([1 << 32, u64::MAX]) {
                    let state = State::of(seed, purpose, number);
                    assert!(seen.insert(state.seed), "{seed} {purpose:?} {number}");
                }
            }
        }
    }

    fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
        let count = values.len() as f64;
        values.sum::<f64>() / count
    }

    #[test]
    fn values_of_many_samples_have_the_moments_of_their_distribution_and_are_uncorrelated() {
        const COUNT: usize = 50_000;
        let samples: Vec<u64> = (0..COUNT as u64).collect();
        // Two values for each sample, in a run of seed 3.
        let normals = normal_samples(3, Purpose::Noise, &samples, 2);
        // Six standard deviations of a mean of COUNT values with variance 1. For another variance, the bound is
        // multiplied by its square root. For a standard normal x, the variance of x² is 2, and that of x³ is 15. For u
        // uniform in [-1/2, 1/2), the variance is 1/12, and that of u² is 1/180. The variance of a product of
        // independent values with mean 0 is the product of their variances.
        let bound = 6.0 / (COUNT as f64).sqrt();
        let column = |at: usize| normals.iter().skip(at).step_by(2).map(|&v| f64::from(v)).collect::<Vec<_>>();
        let (first, second) = (column(0), column(1));
        for values in [&first, &second] {
            assert!(mean(values.iter().copied()).abs() < bound);
            assert!((mean(values.iter().map(|v| v * v)) - 1.0).abs() < bound * 2f64.sqrt());
            assert!(mean(values.iter().map(|v| v.powi(3))).abs() < bound * 15f64.sqrt());
            for lag in [1, 2, 64] {
                assert!(mean(values.iter().zip(&values[lag..]).map(|(a, b)| a * b)).abs() < bound, "lag {lag}");
            }
        }
        let levels = uniform_samples(3, Purpose::Level, &samples, 1);
        let levels: Vec<f64> = levels.into_iter().map(|v| f64::from(v) - 0.5).collect();
        assert!(mean(levels.iter().copied()).abs() < bound / 12f64.sqrt());
        assert!((mean(levels.iter().map(|v| v * v)) - 1.0 / 12.0).abs() < bound / 180f64.sqrt());
        let offsets = normal_samples(3, Purpose::Offset, &samples, 1).into_iter().map(f64::from).collect::<Vec<_>>();
        let other_seed = normal_samples(4, Purpose::Noise, &samples, 1).into_iter().map(f64::from).collect::<Vec<_>>();
        for (name, values) in [("value", &second), ("purpose", &offsets), ("seed", &other_seed)] {
            assert!(mean(first.iter().zip(values).map(|(a, b)| a * b)).abs() < bound, "another {name}");
        }
        assert!(mean(first.iter().zip(&levels).map(|(a, b)| a * b)).abs() < bound / 12f64.sqrt());
    }

    #[test]
    fn a_sample_draws_the_same_in_any_batch() {
        // Five values for each of four samples, in a run of seed 9.
        let all = normal_samples(9, Purpose::Noise, &[4, 5, 6, 7], 5);
        assert_eq!(normal_samples(9, Purpose::Noise, &[6], 5), all[10..15]);
        assert_eq!(normal_samples(9, Purpose::Noise, &[7, 4], 5), [&all[15..], &all[..5]].concat());
        assert_eq!(normal_vec_at(State::of(9, Purpose::Noise, 5), 5), all[5..10]);
    }
}
