//! [`Fixed`]: host state that no captured function may change.

use std::ops::Deref;

use super::effects::refuse_change;
use crate::Result;

/// A value that the host reads, or copies to a device, when it queues work. A replay of a CUDA graph would not repeat a
/// change of the value, so [`get_mut`](Self::get_mut), the only way to change it, returns an error while a function is
/// recorded:
///
/// ```
/// # use trainable_candle_core::capture::Fixed;
/// let mut decay = Fixed::new("the decay", 0.9);
/// *decay.get_mut()? = 0.99;
/// assert_eq!(*decay, 0.99);
/// # Ok::<(), trainable_candle_core::Error>(())
/// ```
///
/// ```compile_fail,E0594
/// # use trainable_candle_core::capture::Fixed;
/// let mut decay = Fixed::new("the decay", 0.9);
/// *decay = 0.99;
/// ```
#[derive(Clone, Debug)]
pub struct Fixed<T> {
    name: &'static str,
    value: T,
}

impl<T> Fixed<T> {
    /// Creates a value that messages call `name`, such as "the hyper-parameters of an optimizer".
    pub const fn new(name: &'static str, value: T) -> Self {
        Self { name, value }
    }

    /// Returns a mutable reference to the value.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) while a function is recorded, because replays would not repeat the
    /// change.
    pub fn get_mut(&mut self) -> Result<&mut T> {
        refuse_change(self.name)?;
        Ok(&mut self.value)
    }
}

impl<T> Deref for Fixed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

#[cfg(test)]
mod tests {
    use super::super::Run;
    use super::*;

    #[test]
    fn only_a_recording_rejects_a_change() {
        let mut rate = Fixed::new("the rate", 1.0);
        // A `Run` stands for one call of a function: eager, or recorded if `recording`.
        for recording in [false, true] {
            let run = Run::begin(recording).unwrap();
            assert_eq!(*rate, 1.0);
            assert_eq!(rate.get_mut().is_err(), recording);
            drop(run);
        }
        *rate.get_mut().unwrap() = 2.0;
        assert_eq!(*rate, 2.0);
    }
}
