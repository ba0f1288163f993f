//! The library's random numbers.

use pyo3::prelude::*;
use trainable_candle_core as tc;
use trainable_candle_core::rng::{self, Purpose, State};

use crate::arguments::Integer;
use crate::autograd::Function;
use crate::call::compute;
use crate::error::Result;
use crate::tensor::Tensor;
use crate::types::Anything;

/// Start the generator's stream of `seed`.
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
#[pyfunction]
pub fn manual_seed(seed: Integer) -> Result<()> {
    rng::manual_seed(seed.word("manual_seed", "seed")?);
    Ok(())
}

/// Seed and position of the generator; `set_rng_state` repeats the draws that followed.
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

/// Continue from what `get_rng_state` returned.
///
/// ```python
/// state = tc.get_rng_state()
/// drawn = tc.randn(3)
/// tc.set_rng_state(state)
/// assert tc.randn(3).tolist() == drawn.tolist()
/// ```
#[pyfunction]
pub fn set_rng_state(state: (Integer, Integer)) -> Result<()> {
    const OP: &str = "set_rng_state";
    rng::set_state(State { seed: state.0.word(OP, "seed")?, offset: state.1.word(OP, "offset")? });
    Ok(())
}

/// The seed of a separate stream in a run of `seed`.
///
/// Args:
///     seed: that of the run, 0 to 2**64 - 1.
///     purpose: the purpose of the draw.
///     number: the number of the sample, batch, ..., 0 to 2**64 - 1.
///
/// Raises:
///     ArgumentError: if there is no such purpose.
#[pyfunction]
pub fn stream_seed(seed: Integer, purpose: &str, number: Integer) -> Result<u64> {
    const OP: &str = "stream_seed";
    Ok(State::of(seed.word(OP, "seed")?, purpose.parse()?, number.word(OP, "number")?).seed)
}

/// Call a function whose draws come from the stream of a seed; the library's generator does not advance.
///
/// Args:
///     seed: 0 to 2**64 - 1.
///     function: called without arguments.
///
/// Returns:
///     What the function returns.
#[pyfunction]
pub fn draw_from<'py>(py: Python<'py>, seed: Integer, function: Function) -> PyResult<Anything<'py>> {
    let _stream = rng::Stream::enter(State { seed: seed.word("draw_from", "seed")?, offset: 0 });
    function.call(py, &[]).map(Anything)
}

/// Standard normal values for samples of a run, each from its own stream, so that a sample has the same values in any batch.
///
/// Args:
///     shape: of the values of one sample.
///     samples: their numbers.
///     seed: that of the run.
///     purpose: the purpose of the draw.
///
/// Returns:
///     A row for each sample, (B, ...), f32.
///
/// Raises:
///     ArgumentError: if there is no such purpose.
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
    let (samples, seed, purpose) = (words(OP, &samples)?, seed.word(OP, "seed")?, purpose.parse::<Purpose>()?);
    let size: usize = dims[1..].iter().product();
    let draw =
        || tc::Tensor::from_vec(rng::normal_samples(seed, purpose, &samples, size), dims.as_slice(), &tc::Device::Cpu);
    compute(py, samples.len() * size, draw).map(Tensor)
}

/// The numbers of samples.
pub fn words(op: &'static str, numbers: &[Integer]) -> Result<Vec<u64>> {
    numbers.iter().map(|number| number.word(op, "a sample's number")).collect()
}
