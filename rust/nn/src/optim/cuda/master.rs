//! [`DeviceMaster`]: the f32 master values of a variable in device memory. Steps update the master values; the variable
//! gets them rounded to f16 or bf16.

use trainable_candle_core::capture::Follower;
use trainable_candle_core::compute::copy_into;
use trainable_candle_core::{Raw, Result, Var};

use crate::optim::state::Parameter;

/// The f32 master values of an f16 or bf16 variable.
#[derive(Clone)]
pub(super) struct DeviceMaster {
    pub(super) values: Raw,
    /// The version of the variable that `values` match. If the variable has another version, it was set outside the
    /// optimizer.
    pub(super) follower: Follower,
}

impl DeviceMaster {
    /// Sets these master values to the host's (`parameter.master`) if those belong to the variable's present version,
    /// otherwise to the values of the variable itself.
    pub(super) fn take(&self, parameter: &Parameter) -> Result<()> {
        let version = parameter.var.version();
        match parameter.master.as_ref().filter(|master| master.version == version) {
            Some(master) => {
                let values = Raw::from_slice(&master.values, self.values.shape(), self.values.device())?;
                copy_into(&self.values, &values)?;
            }
            None => copy_into(&self.values, parameter.var.raw())?,
        }
        parameter.var.set_followed_by(&self.follower);
        Ok(())
    }

    /// Copies the variable's values to the master values if the variable was set outside the optimizer.
    pub(super) fn refresh(&self, var: &Var) -> Result<()> {
        if !var.is_followed_by(&self.follower) {
            copy_into(&self.values, var.raw())?;
            var.set_followed_by(&self.follower);
        }
        Ok(())
    }
}
