//! Lets the user interrupt long computations. The program that embeds this library sets a check, which returns an error
//! when the user wants to stop (Ctrl-C).

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::Result;

/// A function that returns an error if the computation must end; the computation then returns this error unchanged.
pub type Check = fn() -> Result<()>;

static CHECK: OnceLock<Check> = OnceLock::new();

/// The shortest time between two calls of the check in a loop. Calls are rare because the check may wait for an
/// interpreter's lock.
const INTERVAL: Duration = Duration::from_millis(100);

/// A small step reads the clock only if its number in the loop is a multiple of this: a reading would take a
/// considerable part of the time of each small step.
const STEPS: u32 = 16;

/// A step on this many elements or more is large, and always reads the clock.
const LARGE: usize = 8192;

/// Let long computations call `check` from time to time. Only the first `set_check` of a process has an effect.
pub fn set_check(check: Check) {
    // It is no error if a check is set already: one program embeds this library in a process, and it sets the same
    // check again.
    let _ = CHECK.set(check);
}

/// Calls the check, if one is set, at once. For loops that wait: such a loop itself limits how often
/// it calls this function.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only code that waits for a GPU calls it"))]
pub(crate) fn ask() -> Result<()> {
    CHECK.get().map_or(Ok(()), |check| check())
}

/// Calls the check in a loop of many steps, with at least 100 ms between two calls.
pub struct Interrupt {
    check: Option<Check>,
    /// The number of steps so far.
    steps: u32,
    /// When the loop last called the check; before its first call, when it first read the clock.
    last: Option<Instant>,
}

impl Default for Interrupt {
    fn default() -> Self {
        Self::new()
    }
}

impl Interrupt {
    /// An interrupt for one loop.
    pub fn new() -> Self {
        Self { check: CHECK.get().copied(), steps: 0, last: None }
    }

    /// Calls the check if it is due. The loop calls this function at every step, with the number of elements that the
    /// step works on.
    ///
    /// # Errors
    /// The error of the check.
    pub fn step(&mut self, elements: usize) -> Result<()> {
        let Some(check) = self.check else { return Ok(()) };
        self.steps += 1;
        if elements < LARGE && !self.steps.is_multiple_of(STEPS) {
            return Ok(());
        }
        let now = Instant::now();
        if self.last.is_some_and(|last| now - last < INTERVAL) {
            return Ok(());
        }
        // The first reading of the clock only starts the interval, so short computations never call the check.
        if self.last.replace(now).is_some() { check() } else { Ok(()) }
    }
}
