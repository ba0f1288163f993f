//! Interrupts long computations: the embedding program installs a check for the user's wish to stop (Ctrl-C).

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::Result;

/// Checks whether to continue. The check's error ends the computation, which returns this error unchanged.
pub type Check = fn() -> Result<()>;

static CHECK: OnceLock<Check> = OnceLock::new();

/// The shortest time between two checks. Checks are rare because a check may wait for an interpreter's lock.
const INTERVAL: Duration = Duration::from_millis(100);

/// The number of small steps between two readings of the clock: a reading takes a considerable part of the time of a
/// small step.
const STEPS: u32 = 16;

/// A step on this many elements or more is large: it reads the clock every time.
const LARGE: usize = 8192;

/// Let long computations call `check` from time to time. Only the first `set_check` of a process has an effect.
pub fn set_check(check: Check) {
    // A second embedding program in one process would install the same check.
    let _ = CHECK.set(check);
}

/// Calls the check immediately. For waiting loops, which limit the rate of their calls themselves.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only code that waits for a GPU calls it"))]
pub(crate) fn ask() -> Result<()> {
    CHECK.get().map_or(Ok(()), |check| check())
}

/// Calls the check once in a while in a loop of many steps.
pub struct Interrupt {
    check: Option<Check>,
    steps: u32,
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

    /// To be called at every step, with the number of elements that the step works on.
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
        // The first reading of the clock only starts the interval: short computations never check.
        if self.last.replace(now).is_some() { check() } else { Ok(()) }
    }
}
