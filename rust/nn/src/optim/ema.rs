//! [`EMA`]: exponential moving averages of variables that share a flat buffer, such as the parameters of an adapter.

use trainable_candle_core::capture::{Fixed, HostState, before_replay, is_capturing};
use trainable_candle_core::compute::{copy_into, fill, lerp_in_place, zeros};
use trainable_candle_core::raw::{Raw, check_allocation_on, host_copy, own_copy};
use trainable_candle_core::{DType, Device, Error, FlatBuffer, Result, Tensor};

use super::state::StateDict;

const OP: &str = "EMA";
const UPDATES: &str = "updates";

/// The settings of an [`EMA`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EMAConfig {
    /// Weight of the old average in each update, in [0, 1); with `warmup`, the largest weight.
    pub decay: f64,
    /// Use the decay min(`decay`, (1 + n) / (10 + n)) in the update that follows n other updates, so that the initial
    /// values soon lose their weight. TensorFlow's `ExponentialMovingAverage` does the same with `num_updates`.
    pub warmup: bool,
}

impl Default for EMAConfig {
    fn default() -> Self {
        Self { decay: 0.999, warmup: true }
    }
}

/// Averages of the variables of a flat buffer over the steps of a training run. For sampling or saving, they can
/// temporarily replace the variables' values.
pub struct EMA {
    config: EMAConfig,
    /// The variables.
    buffer: FlatBuffer,
    /// The averages, in the order of `buffer`.
    average: Raw,
    /// The weight of the variables in the next update, one f64. It is on the variables' device, because a captured
    /// update reads it there.
    weight: Raw,
    /// The number of updates.
    updates: HostState<u64>,
    is_swapped_in: HostState<bool>,
    /// The variables' own values while the averages replace them; otherwise None.
    trained: Fixed<Option<Raw>>,
}

impl EMAConfig {
    /// Returns the weight of the old average in an update that follows `updates` other updates.
    fn decay_after(&self, updates: u64) -> f64 {
        let n = updates as f64;
        if self.warmup { self.decay.min((1.0 + n) / (10.0 + n)) } else { self.decay }
    }
}

impl EMA {
    /// Makes averages of the variables of `buffer`, which start as the variables' values.
    ///
    /// # Errors
    /// [`Error::Argument`] if the decay is outside its range, [`Error::DType`] if the buffer is not f32 (shorter dtypes
    /// would round the small changes of averages away), [`Error::OutOfMemory`] if the averages do not fit.
    pub fn new(buffer: &FlatBuffer, config: EMAConfig) -> Result<Self> {
        if !(0.0..1.0).contains(&config.decay) {
            return Err(Error::argument(OP, format!("found decay {}, expected a number in [0, 1)", config.decay)));
        }
        let data = buffer.data();
        if data.dtype() != DType::F32 {
            return Err(Error::dtype(OP, format!("the parameters are {}, expected f32", data.dtype().as_str())));
        }
        check_allocation_on(data.device(), OP, data.dims(), data.dtype())?;
        Ok(Self {
            config,
            average: own_copy(data)?,
            weight: zeros(&[1], DType::F64, data.device())?,
            buffer: buffer.clone(),
            updates: HostState::new("how often averages were updated", 0),
            is_swapped_in: HostState::new("whether averages are in the place of parameters", false),
            trained: Fixed::new("whether the variables hold averages or trained values", None),
        })
    }

    /// Returns the settings.
    pub const fn config(&self) -> EMAConfig {
        self.config
    }

    /// Returns the number of updates, including those before a loaded state was saved.
    pub fn updates(&self) -> u64 {
        self.updates.get()
    }

    /// Returns the weight of the old average in the next update.
    pub fn decay(&self) -> f64 {
        self.config.decay_after(self.updates())
    }

    /// Returns whether the averages replace the variables' values.
    pub fn is_swapped_in(&self) -> bool {
        self.is_swapped_in.get()
    }

    /// Moves the averages towards the variables, in one pass over the buffer. Call this function after each step of the
    /// optimizer. Every replay of a captured step uses the decay for the number of updates before that replay.
    ///
    /// # Errors
    /// [`Error::Argument`] while the averages replace the variables' values; [`Error::Device`] if a captured function
    /// updates twice in one call.
    pub fn update(&mut self) -> Result<()> {
        // `read`, not `get`: a captured update depends on this value.
        if self.is_swapped_in.read() {
            return Err(Error::argument(
                OP,
                "update() found the averages in place of the parameters; call swap_out() first",
            ));
        }
        // The text follows "the function changes" in the error for a captured function.
        self.updates.refuse_repetition("averages twice in a call, each time with another decay")?;
        let set_weight = {
            let (config, weight, updates) = (self.config, self.weight.clone(), self.updates.clone());
            move || fill(&weight, 1.0 - config.decay_after(updates.get()))
        };
        // A graph must not contain `set_weight`, because each call has another weight. If a captured function calls
        // `update`, `before_replay` calls `set_weight` before the call that records the graph, and before every replay.
        // Outside of captured functions it does nothing.
        if !is_capturing() {
            set_weight()?;
        }
        before_replay(set_weight);
        lerp_in_place(&self.average, self.buffer.data(), &self.weight)?;
        self.updates.advance(|updates| *updates += 1);
        Ok(())
    }

    /// Replaces the variables' values by the averages. As after an optimizer's step, a backward pass that needs the
    /// replaced values returns an error.
    ///
    /// # Errors
    /// [`Error::Argument`] if the averages already replace the values, [`Error::OutOfMemory`] if a copy of the
    /// variables does not fit, [`Error::Device`] within a captured function. After an error, nothing has changed.
    pub fn swap_in(&mut self) -> Result<()> {
        if self.is_swapped_in() {
            return Err(Error::argument(OP, "swap_in() found the averages already in place of the parameters"));
        }
        // Within a captured function, this fails before anything changes.
        let saved = self.trained.get_mut()?;
        check_allocation_on(self.average.device(), OP, self.average.dims(), self.average.dtype())?;
        let trained = own_copy(self.buffer.data())?;
        // The error may come after values were overwritten, so the trained values are restored.
        if let Err(error) = overwrite(&self.buffer, &self.average) {
            overwrite(&self.buffer, &trained)?;
            return Err(error);
        }
        *saved = Some(trained);
        self.is_swapped_in.set(true)
    }

    /// Restores the variables' own values, bit for bit.
    ///
    /// # Errors
    /// [`Error::Argument`] if the averages do not replace the values, [`Error::Device`] within a captured function.
    pub fn swap_out(&mut self) -> Result<()> {
        let Some(trained) = Option::clone(&self.trained) else {
            return Err(Error::argument(
                OP,
                "swap_out() found the parameters' own values in place; call swap_in() first",
            ));
        };
        let saved = self.trained.get_mut()?;
        overwrite(&self.buffer, &trained)?;
        *saved = None;
        self.is_swapped_in.set(false)
    }

    /// Returns a copy of the state on the CPU: `INDEX.average` is the average of the buffer's variable INDEX, and
    /// `updates` (i64) is the number of updates.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the copy does not fit.
    pub fn state_dict(&self) -> Result<StateDict> {
        let mut dict = StateDict::new();
        for (index, view) in self.views()?.iter().enumerate() {
            dict.insert(key(index), Tensor::from_raw(&host_copy(view)?));
        }
        dict.insert(UPDATES.into(), Tensor::from_vec(vec![self.updates() as i64], 1, &Device::Cpu)?);
        Ok(dict)
    }

    /// Loads a [`state_dict`](Self::state_dict) that was saved over variables of the same shapes.
    ///
    /// # Errors
    /// [`Error::Config`] if an entry is missing or not expected, or if the number of updates is negative;
    /// [`Error::Shape`] or [`Error::DType`] if an entry has another shape or dtype; [`Error::OutOfMemory`] if a copy
    /// does not fit on the device; [`Error::Device`] within a captured function. After an error, nothing has changed.
    pub fn load_state_dict(&mut self, states: &StateDict) -> Result<()> {
        let entry = |name: &str, dtype: DType, dims: &[usize]| {
            let Some(found) = states.get(name) else {
                return Err(Error::Config(format!(
                    "load_state_dict: {OP}: the state {name:?} is missing; were the states saved with the same adapter?"
                )));
            };
            if found.dims() != dims {
                return Err(Error::shape(OP, format!("{name:?} has shape {:?}, expected {dims:?}", found.dims())));
            }
            if found.dtype() != dtype {
                let (found, expected) = (found.dtype().as_str(), dtype.as_str());
                return Err(Error::dtype(OP, format!("{name:?} is {found}, expected {expected}")));
            }
            Ok(found)
        };
        let updates: i64 = entry(UPDATES, DType::I64, &[1])?.to_scalar()?;
        let Ok(updates) = u64::try_from(updates) else {
            return Err(Error::Config(format!("load_state_dict: {OP}: found {updates} updates, expected 0 or more")));
        };
        let views = self.views()?;
        // A copy to the device may fail, so all new values are on the device before the first average changes.
        let to_device = |(i, view): (usize, &Raw)| entry(&key(i), DType::F32, view.dims())?.to_device(view.device());
        let averages = views.iter().enumerate().map(to_device).collect::<Result<Vec<_>>>()?;
        if let Some(name) = states.keys().find(|name| *name != UPDATES && !(0..views.len()).any(|i| **name == key(i))) {
            return Err(Error::Config(format!(
                "load_state_dict: {OP}: found the state {name:?}, which these averages do not have"
            )));
        }
        // Within a captured function, this fails, so it comes before the first average changes.
        self.updates.set(updates)?;
        for (view, average) in views.iter().zip(averages) {
            copy_into(view, average.raw())?;
        }
        Ok(())
    }

    /// Returns a view of each variable's average, with the variable's shape.
    fn views(&self) -> Result<Vec<Raw>> {
        let view = |(range, var): (&std::ops::Range<usize>, &trainable_candle_core::Var)| {
            Ok(self.average.narrow(0, range.start, range.len())?.reshape(var.shape())?)
        };
        self.buffer.ranges().iter().zip(self.buffer.vars()).map(view).collect()
    }
}

/// Copies `values` to the variables of `buffer`, and marks the variables as changed.
fn overwrite(buffer: &FlatBuffer, values: &Raw) -> Result<()> {
    copy_into(buffer.data(), values)?;
    buffer.vars().iter().try_for_each(|var| var.update_in_place(|_| Ok(())))
}

/// Returns the name of the average of variable `index` in a state dict.
fn key(index: usize) -> String {
    format!("{index}.average")
}
