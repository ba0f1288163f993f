//! The library's random numbers.

use pyo3::prelude::*;
use trainable_candle_core::rng::{self, State};

/// Start the generator's stream of `seed`.
///
/// Args:
///     seed: 0 to 2**64 - 1.
#[pyfunction]
pub fn manual_seed(seed: u64) {
    rng::manual_seed(seed);
}

/// Seed and position of the generator; `set_rng_state` repeats the draws that followed.
#[pyfunction]
pub fn get_rng_state() -> (u64, u64) {
    let State { seed, offset } = rng::state();
    (seed, offset)
}

/// Continue from what `get_rng_state` returned.
#[pyfunction]
pub fn set_rng_state(state: (u64, u64)) {
    let (seed, offset) = state;
    rng::set_state(State { seed, offset });
}
