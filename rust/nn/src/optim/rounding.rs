//! Stochastic rounding of f32 values to bf16: each value becomes one of the two bf16 numbers around it, the nearer one
//! with the higher probability, so that the expected value is the value itself.
//!
//! Rounding to nearest loses updates of less than half a unit in the last place; with stochastic rounding, such updates
//! take effect on average (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", arXiv:1502.02551).
//!
//! The random bits are a function of the optimizer's seed, the number of the step, the number of the element among all
//! elements of the optimizer's variables, and which of the element's values (the parameter or one of its states) is
//! rounded. Therefore the bits are the same on the CPU, on a GPU, in a captured step and in a resumed run.

use half::bf16;
use trainable_candle_core::cpu::dispatch;
use trainable_candle_core::rng::philox_lanes_above;
use trainable_candle_core::{DType, Error, Result};

use super::rule::Rule;
use super::state;
use super::stepper::Stepper;

/// The number of Philox blocks (128 random bits each) that are computed together, in lanes of vector registers.
const LANES: usize = 16;

/// The number of elements that take their random bits from one Philox block: one 32-bit word for each element.
const QUAD: usize = 4;

/// The random bits of consecutive elements in one step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bits {
    pub(super) seed: u64,
    /// The number of the step, which counts from 1; its upper 32 bits have no effect.
    pub(super) step: u64,
    /// The number of the first element among all elements of the optimizer's variables, a multiple of 4.
    pub(super) first: u64,
}

impl Bits {
    /// Rounds `values` of consecutive elements to bf16. `array` is 0 if the values are parameters, 1 if they are the
    /// first state, and so on.
    ///
    /// Element `e` takes 16 bits from word `e % 4` of Philox block `e / 4`: the lower half of the word if `array` is
    /// even, the upper half if `array` is odd. So the arrays 0 and 1 share blocks, as do 2 and 3, and so on. The upper
    /// half of a block's counter holds the step and 2 + `array` / 2. Counters of other random numbers have 0 or 1
    /// instead of 2 + `array` / 2.
    pub(super) fn round(self, values: &[f32], rounded: &mut [bf16], array: usize) {
        let upper = [self.step as u32, 2 + array as u32 / 2];
        let shift = if array.is_multiple_of(2) { 0 } else { 16 };
        let (chunk_len, first_block) = (LANES * QUAD, self.first / QUAD as u64);
        dispatch(
            #[inline(always)]
            || {
                for (index, (values, rounded)) in
                    values.chunks(chunk_len).zip(rounded.chunks_mut(chunk_len)).enumerate()
                {
                    // `words[w][b]` is word `w` of block `b` of this chunk.
                    let words = philox_lanes_above::<LANES>(self.seed, first_block + (index * LANES) as u64, upper);
                    for (i, (value, rounded)) in values.iter().zip(rounded).enumerate() {
                        *rounded = round(*value, words[i % QUAD][i / QUAD] >> shift);
                    }
                }
            },
        );
    }
}

/// Rounds to one of the two neighbouring bf16 numbers, which the lower 16 of `bits` choose. The probability of the
/// neighbour of larger magnitude is the distance of `value` from the other neighbour, divided by the distance between
/// the neighbours. Values that bf16 can represent do not change, and NaN stays NaN.
#[inline(always)]
fn round(value: f32, bits: u32) -> bf16 {
    let exact = value.to_bits();
    // bf16 drops the lower 16 bits of f32. A carry from their sum with the random bits selects the neighbour of larger
    // magnitude. Bit 22 keeps the mantissa of a NaN from becoming zero, which would mean infinity.
    let wide = if value.is_finite() { exact + (bits & 0xffff) } else { exact | (u32::from(value.is_nan()) << 22) };
    bf16::from_bits((wide >> 16) as u16)
}

impl<R: Rule> Stepper<R> {
    /// Keeps bf16 variables and their states in bf16, without f32 master values. Steps compute in f32 and round
    /// stochastically, with random bits that depend on `seed`, the number of the step, the variable and the element.
    /// Other variables, and 8-bit states, are updated as without stochastic rounding. Call this before the first step,
    /// and before the states are placed in memory of the host.
    ///
    /// # Errors
    /// [`Error::Argument`] if the update is not elementwise, or if states exist on a CUDA device; [`Error::DType`] if
    /// no variable is bf16.
    pub fn with_stochastic_rounding(mut self, seed: u64) -> Result<Self> {
        if !R::ELEMENTWISE {
            return Err(no_rounding(R::NAME));
        }
        if self.device.is_some() {
            return Err(Error::argument(
                R::NAME,
                "the states exist already; choose stochastic rounding before the first step and before place_states()",
            ));
        }
        if self.parameters().all(|parameter| parameter.var.dtype() != DType::BF16) {
            let found = self.parameters().next().map_or("", |parameter| parameter.var.dtype().as_str());
            let message = format!(
                "stochastic rounding is for bf16 variables, but all variables have other dtypes such as {found}; \
                 convert them to bf16, or leave stochastic_rounding out"
            );
            return Err(Error::dtype(R::NAME, message));
        }
        state::number_elements(&mut self.groups);
        self.seed = Some(seed);
        Ok(self)
    }
}

/// Makes the error of the optimizer `name`, which cannot round stochastically.
pub(super) fn no_rounding(name: &'static str) -> Error {
    let message = "its update needs whole variables, and such updates cannot round stochastically; use an optimizer \
        that updates each element alone, such as AdamW, AdamW8bit, Lion or SGD";
    Error::argument(name, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the unit in the last place of bf16 at `value`, a normal number.
    fn unit(value: f32) -> f64 {
        2f64.powi(value.abs().log2().floor() as i32 - 7)
    }

    #[test]
    fn the_expected_value_of_the_rounding_is_the_value() {
        const COUNT: usize = 200_000;
        for (case, value) in [1.001_f32, -1.003_9, 3.0e-5, 0.999_7, 255.3, -7.0e20].into_iter().enumerate() {
            let mut rounded = vec![bf16::ZERO; COUNT];
            let bits = Bits { seed: 5, step: 1 + case as u64, first: 0 };
            let array = case % 4;
            bits.round(&vec![value; COUNT], &mut rounded, array);
            let (value, unit) = (f64::from(value), unit(value));
            let is_neighbour = |found: &bf16| (f64::from(*found) - value).abs() < unit;
            assert!(rounded.iter().all(is_neighbour), "{value}");
            let mean_error = rounded.iter().map(|&found| f64::from(found) - value).sum::<f64>() / COUNT as f64;
            // The error of a rounding takes one of two values that are one unit apart, so its standard deviation is at
            // most half a unit, and the standard deviation of the mean error is at most unit / 2 / √COUNT. The bound is
            // six standard deviations of the mean, plus 2⁻¹⁶ units because probabilities are multiples of 2⁻¹⁶.
            let bound = unit * (3.0 / (COUNT as f64).sqrt() + 2f64.powi(-16));
            assert!(mean_error.abs() < bound, "{value}: the mean error is {mean_error}, the bound is {bound}");
        }
    }

    #[test]
    fn rounding_keeps_bf16_values_infinities_and_nan() {
        for bits in [0, 0xffff, 0x8000] {
            for value in [0.0, -0.0, 1.0, -2.5, f32::MIN_POSITIVE, f32::INFINITY, f32::NEG_INFINITY] {
                assert_eq!(round(value, bits).to_f32().to_bits(), value.to_bits());
            }
            for nan in [f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)] {
                assert!(round(nan, bits).is_nan());
            }
        }
    }

    #[test]
    fn a_value_rounds_up_only_if_the_sum_of_its_lower_bits_and_the_random_bits_carries() {
        let (above_one, below_next) = (f32::from_bits(0x3f80_0001), f32::from_bits(0x3f80_ffff));
        assert_eq!([round(above_one, 0xfffe), round(above_one, 0xffff)].map(bf16::to_bits), [0x3f80, 0x3f81]);
        assert_eq!([round(below_next, 0), round(below_next, 1)].map(bf16::to_bits), [0x3f80, 0x3f81]);
    }

    #[test]
    fn bits_depend_on_everything_but_the_split_into_chunks() {
        let values: Vec<f32> = (0..1000).map(|i| 1.0 + i as f32 / 4096.1).collect();
        let rounded_with = |bits: Bits, values: &[f32], array| {
            let mut rounded = vec![bf16::ZERO; values.len()];
            bits.round(values, &mut rounded, array);
            rounded
        };
        let bits = Bits { seed: 1, step: 2, first: 512 };
        let unsplit = rounded_with(bits, &values, 0);
        assert_eq!(rounded_with(Bits { first: 512 + 256, ..bits }, &values[256..], 0), unsplit[256..]);
        let changed = [Bits { seed: 2, ..bits }, Bits { step: 3, ..bits }, Bits { first: 516, ..bits }];
        let mut roundings = vec![unsplit];
        roundings.extend(changed.map(|bits| rounded_with(bits, &values, 0)));
        roundings.extend((1..4).map(|array| rounded_with(bits, &values, array)));
        for (index, rounding) in roundings.iter().enumerate() {
            for earlier in &roundings[..index] {
                let same = rounding.iter().zip(earlier).filter(|(a, b)| a == b).count();
                // If the distances from the lower neighbour are uniform, independent roundings agree for two thirds of
                // the elements on average. The range is this mean and 4.5 standard deviations on both sides.
                assert!((600..735).contains(&same), "{index}: {same}");
            }
        }
    }
}
