//! The library's random numbers.

use pyo3::prelude::*;
use trainable_candle_core::rng::{self, State};

use crate::arguments::Integer;
use crate::error::Result;

/// Start the generator's stream of `seed`.
///
/// Args:
///     seed: 0 to 2**64 - 1.
#[pyfunction]
pub fn manual_seed(seed: Integer) -> Result<()> {
    rng::manual_seed(seed.word("manual_seed", "seed")?);
    Ok(())
}

/// Seed and position of the generator; `set_rng_state` repeats the draws that followed.
#[pyfunction]
pub fn get_rng_state() -> (u64, u64) {
    let State { seed, offset } = rng::state();
    (seed, offset)
}

/// Continue from what `get_rng_state` returned.
#[pyfunction]
pub fn set_rng_state(state: (Integer, Integer)) -> Result<()> {
    const OP: &str = "set_rng_state";
    rng::set_state(State { seed: state.0.word(OP, "seed")?, offset: state.1.word(OP, "offset")? });
    Ok(())
}
