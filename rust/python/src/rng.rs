//! The library's generator of random numbers, and the separate streams of random numbers of a training run.

use pyo3::prelude::*;
use trainable_candle_core as tc;
use trainable_candle_core::rng::{self, Purpose, State};

use crate::arguments::Integer;
use crate::autograd::Function;
use crate::call::compute;
use crate::error::Result;
use crate::tensor::Tensor;
use crate::types::Anything;

/// Set the seed of the library's generator, and start its sequence of random numbers from the beginning.
///
/// ```python
/// tc.manual_seed(0)
/// drawn = tc.randn(3)
/// tc.manual_seed(0)
/// assert tc.randn(3).tolist() == drawn.tolist()
/// ```
///
/// Args:
///     seed: 0 to 2**64 - 1.
///
/// Raises:
///     ArgumentError: if the seed is out of range.
#[pyfunction]
pub fn manual_seed(seed: Integer) -> Result<()> {
    // `as_u64` returns the argument as u64, or an error with these names if it does not fit.
    rng::manual_seed(seed.as_u64("manual_seed", "seed")?);
    Ok(())
}

/// Return the state of the library's generator: (seed, position in the sequence of random numbers of this seed). After
/// `set_rng_state(state)`, the generator repeats the random numbers that followed this state.
///
/// ```python
/// state = tc.get_rng_state()
/// drawn = tc.randn(3)
/// tc.set_rng_state(state)
/// assert tc.randn(3).tolist() == drawn.tolist()
/// ```
#[pyfunction]
pub fn get_rng_state() -> (u64, u64) {
    let State { seed, offset } = rng::state();
    (seed, offset)
}

/// Set the library's generator to a state that `get_rng_state` returned.
///
/// ```python
/// state = tc.get_rng_state()
/// drawn = tc.randn(3)
/// tc.set_rng_state(state)
/// assert tc.randn(3).tolist() == drawn.tolist()
/// ```
///
/// Raises:
///     ArgumentError: if the seed or the position is not a number from 0 to 2**64 - 1.
#[pyfunction]
pub fn set_rng_state(state: (Integer, Integer)) -> Result<()> {
    const OP: &str = "set_rng_state";
    rng::set_state(State { seed: state.0.as_u64(OP, "seed")?, offset: state.1.as_u64(OP, "the position")? });
    Ok(())
}

/// Return the seed of one stream of random numbers. A run has a separate stream for each pair of `purpose` and
/// `number`.
///
/// Args:
///     seed: the seed of the run, 0 to 2**64 - 1.
///     purpose: what the random numbers are for, such as "noise". The error for another value lists all purposes.
///     number: the number of the sample, batch or other item that the stream belongs to, 0 to 2**64 - 1.
///
/// Raises:
///     ArgumentError: if the purpose is unknown, or a number is out of range.
#[pyfunction]
pub fn stream_seed(seed: Integer, purpose: &str, number: Integer) -> Result<u64> {
    const OP: &str = "stream_seed";
    Ok(State::of(seed.as_u64(OP, "seed")?, purpose.parse()?, number.as_u64(OP, "number")?).seed)
}

/// Call `function` with a separate generator in place of the library's generator. The separate generator gives the same
/// random numbers as the library's generator after `manual_seed(seed)`. The state of the library's generator does not
/// change.
///
/// Args:
///     seed: the seed of the separate generator, 0 to 2**64 - 1.
///     function: a function without arguments.
///
/// Returns:
///     The result of `function`.
///
/// Raises:
///     ArgumentError: if the seed is out of range.
///     The exceptions of the function.
#[pyfunction]
pub fn draw_from<'py>(py: Python<'py>, seed: Integer, function: Function) -> PyResult<Anything<'py>> {
    // Until `_stream` is dropped, this thread draws from the separate generator.
    let _stream = rng::Stream::enter(State { seed: seed.as_u64("draw_from", "seed")?, offset: 0 });
    function.call(py, &[]).map(Anything)
}

/// Draw standard normal values for the samples of a batch. Each sample has its own stream of random numbers, so a
/// sample's values do not depend on the other samples of the batch.
///
/// Args:
///     shape: the shape of the values of one sample.
///     samples: the numbers of the B samples, counted from 0 through the whole training run.
///     seed: the seed of the run, 0 to 2**64 - 1.
///     purpose: what the random numbers are for, such as "noise".
///
/// Returns:
///     (B, *shape), f32.
///
/// Raises:
///     ArgumentError: if the purpose is unknown, or a number is out of range.
#[pyfunction]
pub fn normal_samples(
    py: Python<'_>,
    shape: Vec<Integer>,
    samples: Vec<Integer>,
    seed: Integer,
    purpose: &str,
) -> Result<Tensor> {
    const OP: &str = "normal_samples";
    let mut dims = shape.iter().map(|size| size.count(OP, "a size")).collect::<Result<Vec<_>>>()?;
    dims.insert(0, samples.len());
    let (samples, seed, purpose) =
        (sample_numbers(OP, &samples)?, seed.as_u64(OP, "seed")?, purpose.parse::<Purpose>()?);
    let sample_size: usize = dims[1..].iter().product();
    let draw = || {
        let values = rng::normal_samples(seed, purpose, &samples, sample_size);
        tc::Tensor::from_vec(values, dims.as_slice(), &tc::Device::Cpu)
    };
    // `compute` releases the GIL if there are many values to draw.
    compute(py, samples.len() * sample_size, draw).map(Tensor)
}

/// The numbers of samples as unsigned integers of 64 bits.
///
/// # Errors
/// `TypeError` if one is not an integer, `ArgumentError` if one is out of range.
pub fn sample_numbers(op: &'static str, numbers: &[Integer]) -> Result<Vec<u64>> {
    numbers.iter().map(|number| number.as_u64(op, "a sample's number")).collect()
}
