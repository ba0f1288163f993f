//! Interrupts long computations: the embedder installs a check whether the user wants to stop (Ctrl-C).

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::Result;

/// Checks whether to continue; its error ends the computation and is returned unchanged.
pub type Check = fn() -> Result<()>;

static CHECK: OnceLock<Check> = OnceLock::new();

/// How often the embedder is asked at most: asking may mean waiting for an interpreter's lock.
const INTERVAL: Duration = Duration::from_millis(100);

/// Small steps between looks at the clock, which costs a good part of a small operation.
const STEPS: u32 = 16;

/// Elements from which a step is large.
const LARGE: usize = 8192;

/// Ask `check` from time to time in long computations. The first call of a process counts; later ones change nothing.
pub fn set_check(check: Check) {
    // A second embedder in one process would bring the same question.
    let _ = CHECK.set(check);
}

/// Asks in a loop that waits; the loop sees to it that this is not too often.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only what waits for a GPU asks"))]
pub(crate) fn ask() -> Result<()> {
    CHECK.get().map_or(Ok(()), |check| check())
}

/// Asks once in a while in a loop of many steps.
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
    /// For one loop.
    pub fn new() -> Self {
        Self { check: CHECK.get().copied(), steps: 0, last: None }
    }

    /// To be called at every step, with the number of elements that it works on.
    ///
    /// # Errors
    /// The check's.
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
        // The first look at the clock only starts the interval: short computations never ask.
        if self.last.replace(now).is_some() { check() } else { Ok(()) }
    }
}
