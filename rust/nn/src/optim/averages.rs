//! Averages of an optimizer's variables over the steps, which replace the variables' values until training continues.
//! Meanwhile the trained values are in [`Stepper`]'s field `trained`, which is `None` while no averages replace them. A
//! variable in half precision may have f32 master values, which a step updates and then rounds to the variable.

use trainable_candle_core::compute::{copy_into, lerp_in_place};
use trainable_candle_core::raw::own_copy;
use trainable_candle_core::{Error, Raw, Result};

use super::cuda::OnDevice;
use super::rule::{Average, Rule};
use super::state::Parameter;
use super::stepper::{Optimizer, Stepper};

impl<R: Rule> Stepper<R> {
    /// Checks that no averages replace the variables' values.
    pub(super) fn check_training(&self, op: &str) -> Result<()> {
        // `trained` is an `Option` in a `Fixed`. Here and below, the path `Option::is_none` shows that the method is
        // the option's.
        if Option::is_none(&self.trained) {
            return Ok(());
        }
        let message = format!("{op}() found the averages in place of the parameters; call train() first");
        Err(Error::argument(R::NAME, message))
    }

    /// The average of each variable, in the order of [`Optimizer::vars`], in the dtype that the optimizer computes in.
    /// None for a variable that is empty or has taken no step.
    fn averaged(&self, average: &Average<R::Config>) -> Result<Vec<Option<Raw>>> {
        let steps = self.device.as_ref().map(OnDevice::steps).transpose()?;
        let parameters = self.groups.iter().flat_map(|group| group.parameters.iter().map(|p| (&*group.config, p)));
        let average_of = |(index, (config, parameter)): (usize, (&R::Config, &Parameter))| {
            let var = &parameter.var;
            let step = steps.as_ref().map_or(parameter.step, |steps| steps[index]);
            if step == 0 || var.elem_count() == 0 {
                return Ok(None);
            }
            // The state that the average is computed from, and the master values if there are any.
            let (state, master) = match &self.device {
                Some(device) => device.state(var, index, average.state)?,
                None => parameter.state(average.state)?,
            };
            let result = own_copy(master.as_ref().unwrap_or_else(|| var.raw()))?;
            let weight = Raw::from_vec(vec![(average.weight)(config)], 1, var.device())?;
            // result += weight * (state - result)
            lerp_in_place(&result, &state, &weight)?;
            Ok(Some(result))
        };
        parameters.enumerate().map(average_of).collect()
    }

    /// Does what [`Optimizer::eval`] says.
    pub(super) fn replace_by_averages(&mut self) -> Result<()> {
        let Some(average) = R::AVERAGE.filter(|_| Option::is_none(&self.trained)) else { return Ok(()) };
        // A captured function may not change `trained`: there, `get_mut` returns an error. The call here returns it
        // before anything is computed.
        self.trained.get_mut()?;
        let values = self.averaged(&average)?;
        let vars = self.vars();
        let trained = vars.iter().map(|var| own_copy(var.raw())).collect::<Result<Vec<_>>>()?;
        *self.trained.get_mut()? = Some(trained);
        for (var, value) in vars.iter().zip(values) {
            if let Some(value) = value {
                var.update_in_place(|raw| copy_into(raw, &value))?;
            }
        }
        Ok(())
    }

    /// Does what [`Optimizer::train`] says.
    pub(super) fn restore_trained(&mut self) -> Result<()> {
        if Option::is_none(&self.trained) {
            return Ok(());
        }
        let trained = self.trained.get_mut()?.take().unwrap_or_default();
        for (index, (var, value)) in self.vars().iter().zip(&trained).enumerate() {
            var.update_in_place(|raw| copy_into(raw, value))?;
            // Master values count as out of date once their variable has changed. They belong to the restored values:
            // mark them as current again.
            if let Some(device) = &self.device {
                device.mark_master_current(var, index);
            }
        }
        for parameter in self.groups.iter_mut().flat_map(|group| &mut group.parameters) {
            if let Some(master) = &mut parameter.master {
                master.version = parameter.var.version();
            }
        }
        Ok(())
    }
}
