//! The library's random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
//!
//! A counter-based generator: a random value depends only on the seed and on the value's position in the stream. So
//! draws do not depend on the number of threads, and a checkpoint repeats draws by going back to a position.
//!
//! Programs draw from the one generator of the process ([`manual_seed`], [`state`]). A training run draws from streams,
//! each of which is keyed by the run's seed, a [`Purpose`] and a number ([`State::of`]).

mod purpose;
mod scope;
pub(crate) mod state;

use candle_core::{DType, Device, Shape};

use crate::compute::{self, on_device};
use crate::raw::{Raw, check_allocation_on, from_vec};
use crate::{Error, Result};

pub use purpose::Purpose;
pub(crate) use scope::{Draw, Recording, Repeating, advance};
pub use scope::{Stream, manual_seed, set_state, state};
pub use state::State;

/// The constants of Philox4x32: the multipliers, and the increments of the key in each round.
const M0: u64 = 0xD251_1F53;
const M1: u64 = 0xCD9E_8D57;
const W0: u32 = 0x9E37_79B9;
const W1: u32 = 0xBB67_AE85;
const ROUNDS: usize = 10;

/// Ten rounds of Philox4x32 on counter `block` under key `seed`.
pub fn philox(seed: u64, block: u64) -> [u32; 4] {
    philox_lanes::<1>(seed, block).map(|word| word[0])
}

/// [`philox`] on `N` counters from `block` on, side by side: word `w` of counter `block + i` is at `[w][i]`. For use
/// inside [`dispatch`](crate::cpu::dispatch).
#[inline(always)]
pub(crate) fn philox_lanes<const N: usize>(seed: u64, block: u64) -> [[u32; N]; 4] {
    philox_lanes_above(seed, block, [0; 2])
}

/// As [`philox_lanes`], with `upper` as the upper two of the four words of each counter. Counters of draws have
/// `[0, 0]` there; counters of [`State::of`] have the purpose and 1.
#[inline(always)]
pub fn philox_lanes_above<const N: usize>(seed: u64, block: u64, upper: [u32; 2]) -> [[u32; N]; 4] {
    let [mut c0, mut c1] = [[0u32; N]; 2];
    for i in 0..N {
        let counter = block.wrapping_add(i as u64);
        (c0[i], c1[i]) = (counter as u32, (counter >> 32) as u32);
    }
    rounds(seed, [c0, c1, [upper[0]; N], [upper[1]; N]])
}

/// [`philox`] on any counter of 128 bits, its lowest word first.
fn philox_at(seed: u64, counter: [u32; 4]) -> [u32; 4] {
    rounds::<1>(seed, counter.map(|word| [word])).map(|word| word[0])
}

#[inline(always)]
fn rounds<const N: usize>(seed: u64, [mut c0, mut c1, mut c2, mut c3]: [[u32; N]; 4]) -> [[u32; N]; 4] {
    let (mut k0, mut k1) = (seed as u32, (seed >> 32) as u32);
    for _ in 0..ROUNDS {
        for i in 0..N {
            let (p0, p1) = (M0 * u64::from(c0[i]), M1 * u64::from(c2[i]));
            (c0[i], c2[i]) = ((p1 >> 32) as u32 ^ c1[i] ^ k0, (p0 >> 32) as u32 ^ c3[i] ^ k1);
            (c1[i], c3[i]) = (p1 as u32, p0 as u32);
        }
        (k0, k1) = (k0.wrapping_add(W0), k1.wrapping_add(W1));
    }
    [c0, c1, c2, c3]
}

/// The upper 24 bits of `bits` as a multiple of 2⁻²⁴ in [0, 1), exact in f32.
fn fraction(bits: u32) -> f32 {
    (bits >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// `n` values. `draw` makes four values from each block of four random words; the first block is the one at `start`.
fn fill(start: State, n: usize, draw: impl Fn([u32; 4]) -> [f32; 4]) -> Vec<f32> {
    let mut values = Vec::with_capacity(n.next_multiple_of(4));
    for block in 0..n.div_ceil(4) as u64 {
        values.extend(draw(philox(start.seed, start.offset.wrapping_add(block))));
    }
    values.truncate(n);
    values
}

/// `n` uniform f32 values in [0, 1).
pub fn uniform_vec(n: usize) -> Vec<f32> {
    // `advance` moves the generator past these blocks of four words, and returns the state before them.
    fill(advance(n.div_ceil(4) as u64), n, |bits| bits.map(fraction))
}

/// `n` standard normal f32 values (Box-Muller).
pub fn normal_vec(n: usize) -> Vec<f32> {
    normal_vec_at(advance(n.div_ceil(4) as u64), n)
}

/// `size` uniform values in [0, 1) for each sample, one sample after the other. The values of sample number `s`, an
/// element of `samples`, come from the stream `State::of(seed, purpose, s)`.
pub fn uniform_samples(seed: u64, purpose: Purpose, samples: &[u64], size: usize) -> Vec<f32> {
    let draw = |&sample: &u64| fill(State::of(seed, purpose, sample), size, |bits| bits.map(fraction));
    samples.iter().flat_map(draw).collect()
}

/// As [`uniform_samples`], with standard normal values.
pub fn normal_samples(seed: u64, purpose: Purpose, samples: &[u64], size: usize) -> Vec<f32> {
    samples.iter().flat_map(|&sample| normal_vec_at(State::of(seed, purpose, sample), size)).collect()
}

/// The `n` values that [`normal_vec`] would draw from a generator whose state is `start`. Advances no generator.
pub fn normal_vec_at(start: State, n: usize) -> Vec<f32> {
    fill(start, n, |bits| {
        let pair = |a: u32, b: u32| {
            // 1 - u is in (0, 1], so that the logarithm is finite.
            let radius = (-2.0 * (1.0 - f64::from(fraction(a))).ln()).sqrt();
            let (sin, cos) = (std::f64::consts::TAU * f64::from(fraction(b))).sin_cos();
            [(radius * cos) as f32, (radius * sin) as f32]
        };
        let [a, b] = pair(bits[0], bits[1]);
        let [c, d] = pair(bits[2], bits[3]);
        [a, b, c, d]
    })
}

/// `n` integers in `[0, bound)`, by Lemire's multiplication. The probability of each integer is `1 / bound` with a
/// relative error below `bound` × 2⁻³².
///
/// # Errors
/// [`Error::Argument`] if `bound` is 0.
pub fn integers_vec(n: usize, bound: u32) -> Result<Vec<i64>> {
    if bound == 0 {
        return Err(Error::argument("randint", "the upper bound must be at least 1, found 0"));
    }
    let start = advance(n.div_ceil(4) as u64);
    Ok((0..n)
        .map(|i| {
            let bits = philox(start.seed, start.offset.wrapping_add(i as u64 / 4))[i % 4];
            ((u64::from(bits) * u64::from(bound)) >> 32) as i64
        })
        .collect())
}

fn check_float(op: &'static str, dtype: DType) -> Result<()> {
    if crate::raw::is_float(dtype) {
        return Ok(());
    }
    Err(Error::dtype(op, format!("random values are floating point; dtype {} is not", dtype.as_str())))
}

/// A tensor of uniformly distributed values in `[low, high)`, drawn as f32 and rounded to `dtype`.
///
/// # Errors
/// [`Error::OutOfMemory`] if the values do not fit in memory, [`Error::DType`] if `dtype` is not floating point.
pub fn uniform(low: f64, high: f64, shape: &Shape, dtype: DType, device: &Device) -> Result<Raw> {
    const OP: &str = "rand";
    check_float(OP, dtype)?;
    let n = check_allocation_on(device, OP, shape.dims(), DType::F32)?;
    on_device!(
        device,
        cuda => {
            let start = advance(n.div_ceil(4) as u64);
            compute::cast(&crate::cuda::uniform(device, shape.dims(), start, [low, high])?, dtype)
        },
        cpu => {
            let mut values = uniform_vec(n);
            if (low, high) != (0.0, 1.0) {
                for v in &mut values {
                    *v = (low + (high - low) * f64::from(*v)) as f32;
                }
            }
            Ok(compute::cast(&from_vec(values, shape), dtype)?.to_device(device)?)
        },
    )
}

/// A tensor of normally distributed values with mean `mean` and standard deviation `std`, drawn as f32 and rounded to
/// `dtype`.
///
/// # Errors
/// [`Error::OutOfMemory`] if the values do not fit in memory, [`Error::DType`] if `dtype` is not floating point.
pub fn normal(mean: f64, std: f64, shape: &Shape, dtype: DType, device: &Device) -> Result<Raw> {
    const OP: &str = "randn";
    check_float(OP, dtype)?;
    let n = check_allocation_on(device, OP, shape.dims(), DType::F32)?;
    on_device!(
        device,
        cuda => {
            let start = advance(n.div_ceil(4) as u64);
            compute::cast(&crate::cuda::normal(device, shape.dims(), start, [mean, std])?, dtype)
        },
        cpu => {
            let mut values = normal_vec(n);
            if (mean, std) != (0.0, 1.0) {
                for v in &mut values {
                    *v = (mean + std * f64::from(*v)) as f32;
                }
            }
            Ok(compute::cast(&from_vec(values, shape), dtype)?.to_device(device)?)
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_vectors() {
        // `philox4x32 10` of Random123's kat_vectors: counter and key all zeros, then all ones.
        assert_eq!(philox(0, 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd];
        assert_eq!(philox_at(u64::MAX, [u32::MAX; 4]), ones);
    }

    #[test]
    fn normal_vec_at_gives_the_values_that_a_generator_at_this_state_draws() {
        let expected = {
            let _stream = Stream::enter(State { seed: 3, offset: 11 });
            normal_vec(10)
        };
        assert_eq!(normal_vec_at(State { seed: 3, offset: 11 }, 10), expected);
        // Each block gives four values, so the next block begins at value 4.
        assert_eq!(normal_vec_at(State { seed: 3, offset: 12 }, 6), expected[4..]);
    }

    #[test]
    fn lanes_equal_philox_of_each_counter() {
        // The counters cross 2³², so both of their lower words change.
        let start = u64::from(u32::MAX) - 3;
        let lanes = philox_lanes::<16>(9, start);
        for i in 0..16 {
            assert_eq!(lanes.map(|word| word[i]), philox(9, start + i as u64));
        }
        let upper = [5, 6];
        let lanes = philox_lanes_above::<2>(9, start, upper);
        let second = start + 1;
        assert_eq!(lanes.map(|word| word[1]), philox_at(9, [second as u32, (second >> 32) as u32, upper[0], upper[1]]));
    }

    #[test]
    fn uniform_values_have_the_mean_and_the_variance_of_their_distribution() {
        let values: Vec<f64> = (0..25_000u64).flat_map(|b| philox(7, b).map(fraction)).map(f64::from).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let var = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
        assert!((mean - 0.5).abs() < 5e-3 && (var - 1.0 / 12.0).abs() < 1e-3, "{mean} {var}");
    }
}
