//! Reads and writes an optimizer's state on the device for code outside of the step, such as state dicts and averages.

use trainable_candle_core::compute::copy_into;
use trainable_candle_core::raw::to_vec;
use trainable_candle_core::{DType, Raw, Result, Var};

use super::{Layout, OnDevice, Place, entries, parameters};
use crate::optim::state::{Group, Master, Parameter, State, StateData};

impl OnDevice {
    /// Returns the numbers that the steps of all variables share; empty if the optimizer has none. Waits for the
    /// device.
    ///
    /// # Errors
    /// [`Error::Device`](trainable_candle_core::Error::Device) if the device fails.
    pub(in crate::optim) fn shared(&self) -> Result<Vec<f64>> {
        self.shared.as_ref().map_or_else(|| Ok(Vec::new()), to_vec::<f64>)
    }

    /// Replaces the numbers that the steps of all variables share, if the optimizer has any. Captured steps then use
    /// the new numbers.
    ///
    /// # Errors
    /// [`Error::Device`](trainable_candle_core::Error::Device) if the device fails.
    pub(in crate::optim) fn set_shared(&self, numbers: &[f64]) -> Result<()> {
        let Some(shared) = &self.shared else { return Ok(()) };
        copy_into(shared, &Raw::from_slice(numbers, numbers.len(), shared.device())?)
    }

    /// Returns the number of steps that each variable has taken; waits for the device. For an empty variable, the
    /// number is that of its slot (the variables that share settings and a step counter).
    ///
    /// # Errors
    /// [`Error::Device`](trainable_candle_core::Error::Device) if the device fails.
    pub(in crate::optim) fn steps(&self) -> Result<Vec<u64>> {
        let (steps, slots) = (self.settings.steps()?, self.slots.get());
        Ok(slots.of.iter().map(|&slot| steps[slot]).collect())
    }

    /// Returns state number `state` of `var`, which is variable number `index`, and the f32 master values of `var` if
    /// it has any. State and master values are views, not copies.
    ///
    /// # Errors
    /// None that a caller could cause.
    pub(in crate::optim) fn state(&self, var: &Var, index: usize, state: usize) -> Result<(Raw, Option<Raw>)> {
        let place = &self.places[index];
        let (spec, buffer) = (self.layouts[place.layout].specs[state], &self.layouts[place.layout].buffers[state]);
        let dims = spec.kind.dims(var.dims());
        // A layout belongs to all variables with the same kinds of states, and `buffer` has this state of all of them. The
        // buffer consists of blocks; a block has the entries for a fixed number of elements. The part of `var` begins
        // with block `place.blocks[state]`; `entries` converts a number of blocks to a number of entries.
        let start = entries(spec.kind, place.blocks[state] as usize);
        let part = buffer.narrow(0, start, dims.iter().product())?.reshape(dims)?;
        Ok((part, place.master.as_ref().map(|master| master.values.clone())))
    }

    /// Marks the f32 master values of `var`, which is variable number `index`, as current, so that the next
    /// step does not replace them by the variable's rounded values; does nothing if it has none. Call this function
    /// after the variable was set back to its trained values.
    pub(in crate::optim) fn mark_master_current(&self, var: &Var, index: usize) {
        if let Some(master) = &self.places[index].master {
            var.set_followed_by(&master.follower);
        }
    }

    /// Copies the variables' step counters, states and master values to the host; a variable that has taken no step
    /// gets no states. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Device`](trainable_candle_core::Error::Device) if the device fails.
    pub(in crate::optim) fn download<C>(&self, groups: &[Group<C>]) -> Result<Vec<Parameter>> {
        let (steps, slots) = (self.settings.steps()?, self.slots.get());
        let buffer_to_host = |buffer: &Raw| {
            Ok(match buffer.dtype() {
                DType::U8 => StateData::U8(to_vec(buffer)?),
                DType::BF16 => StateData::BF16(to_vec(buffer)?),
                // No state on a device is f64; only states on the CPU can be.
                _ => StateData::F32(to_vec(buffer)?),
            })
        };
        let layout_to_host = |layout: &Layout| layout.buffers.iter().map(buffer_to_host).collect::<Result<Vec<_>>>();
        let host_layouts = self.layouts.iter().map(layout_to_host).collect::<Result<Vec<_>>>()?;
        let parameter_to_host = |((parameter, place), &slot): ((&Parameter, &Place), &usize)| {
            let var = &parameter.var;
            // Empty variables take no steps.
            let step = if var.elem_count() > 0 { steps[slot] } else { 0 };
            let mut copy = Parameter { step, ..parameter.fresh() };
            if copy.step > 0 {
                let specs = self.layouts[place.layout].specs.iter().zip(&place.blocks);
                for ((&spec, &first_block), buffer) in specs.zip(&host_layouts[place.layout]) {
                    let start = entries(spec.kind, first_block as usize);
                    let part = start..start + spec.kind.dims(var.dims()).iter().product::<usize>();
                    let data = match buffer {
                        StateData::BF16(data) => StateData::BF16(data[part].to_vec()),
                        StateData::F32(data) => StateData::F32(data[part].to_vec()),
                        StateData::F64(data) => StateData::F64(data[part].to_vec()),
                        StateData::U8(data) => StateData::U8(data[part].to_vec()),
                    };
                    copy.states.push(State { spec, data });
                }
                if let Some(master) = &place.master {
                    let version = master.follower.version();
                    copy.master = Some(Master { values: to_vec(&master.values)?, version });
                }
            }
            Ok(copy)
        };
        // `places` and `slots.of` are in the order of the parameters.
        parameters(groups).zip(&self.places).zip(&slots.of).map(parameter_to_host).collect()
    }

    /// Returns the number of bytes of the states (on the device or on the host) and of the master values.
    pub(in crate::optim) fn state_bytes(&self) -> usize {
        let bytes = |raw: &Raw| raw.elem_count() * raw.dtype().size_in_bytes();
        let states: usize = self.layouts.iter().flat_map(|layout| &layout.buffers).map(bytes).sum();
        states + self.places.iter().flat_map(|place| &place.master).map(|master| bytes(&master.values)).sum::<usize>()
    }
}
