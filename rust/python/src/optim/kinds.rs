//! The optimizers of [`KINDS`], the library's registry. `python/trainable_candle/optim/kinds.py` makes a Python class
//! for each.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use trainable_candle_core as tc;
use trainable_candle_nn::optim::{self, Field, KINDS, NamedGroup, OptimizerKind, StatePlace, Value};

use super::{Params, items, variables};
use crate::argument::Argument;
use crate::arguments::Integer;
use crate::error::Result;

/// An optimizer of the registry: its name, its docstring, the number of hyper-parameters that may be passed by
/// position, and all hyper-parameters with their defaults.
type Kind<'py> = (&'static str, String, usize, Bound<'py, PyDict>);

/// Return the optimizers of the library's registry. Each is a tuple of its name, its docstring, the number of
/// hyper-parameters that may be passed by position, and all hyper-parameters with their defaults, in the order of the
/// constructor's parameters.
#[pyfunction]
pub fn optimizer_kinds(py: Python<'_>) -> Result<Vec<Kind<'_>>> {
    let entry = |kind: &OptimizerKind| {
        let defaults = PyDict::new(py);
        for Field { name, value, .. } in (kind.fields)() {
            match value {
                Value::Number(value) => defaults.set_item(name, value),
                Value::Optional(value) => defaults.set_item(name, value),
                Value::Pair(value) => defaults.set_item(name, value),
                Value::Triple(value) => defaults.set_item(name, value),
                Value::OptionalPair(value) => defaults.set_item(name, value),
                Value::Switch(value) => defaults.set_item(name, value),
                Value::Count(value) => defaults.set_item(name, value),
            }?;
        }
        Ok((kind.name, docstring(kind), kind.positional, defaults))
    };
    KINDS.iter().map(entry).collect()
}

/// The docstring of the optimizer's Python class.
fn docstring(kind: &OptimizerKind) -> String {
    let mut text = format!(
        "{}\n\n```python\noptimizer = tc.optim.{}(model.parameters(), lr=1e-3)\nloss.backward()\noptimizer.step()\n\
        optimizer.zero_grad()\n```\n\nArgs:\n    params: variables, or parameter groups: dicts with an entry \"params\" and \
        hyper-parameters of the group.\n",
        kind.about, kind.name
    );
    for Field { name, doc, .. } in (kind.fields)() {
        text += &format!("    {name}: {}\n", doc.trim());
    }
    text += "    stochastic_rounding: keep bf16 variables and their states in bf16, without f32 master values. Steps \
        compute in f32 and round stochastically, with random bits from the seed of `manual_seed`, the step and the \
        element. ";
    text +=
        if kind.rounds { "Variables of other dtypes are not affected.\n" } else { "This optimizer rejects True.\n" };
    text += "    states: where the states of variables on a GPU are: \"device\" for the memory of the GPU, \"host\" for \
        pinned memory of the host. \"host\" saves memory of the GPU, but each step reads and writes the states over the \
        bus. Results do not depend on `states`. f32 master values stay on the GPU. The states of variables on the CPU \
        are always in the memory of the host.\n";
    text + "\nRaises:\n    \
        ArgumentError: if a value is out of range or unknown, if there is no variable, or if a variable appears \
        twice.\n    \
        DTypeError: if a variable's dtype is not supported.\n    \
        DeviceError: if the variables are on different devices.\n    \
        OutOfMemoryError: if the system gives too little pinned memory for the states.\n"
}

/// Make an optimizer of the kind `name`. The Python class has checked the names of `settings`: an unknown name is
/// ignored.
///
/// # Errors
/// `TypeError` if a hyper-parameter has another type than its default; `ArgumentError` if there is no kind `name`, if
/// `states` is unknown, or if a parameter group has an unknown entry; the errors of the optimizer's constructor.
pub fn build(
    name: &str,
    params: &Params<'_>,
    settings: &Bound<'_, PyDict>,
    stochastic_rounding: bool,
    states: &str,
) -> Result<Box<dyn optim::Optimizer>> {
    let Some(kind) = KINDS.iter().find(|kind| kind.name == name) else {
        let known: Vec<&str> = KINDS.iter().map(|kind| kind.name).collect();
        let message = format!("found the kind {name:?}, expected one of {}", known.join(", "));
        return Err(tc::Error::argument("Optimizer", message).into());
    };
    let fields = (kind.fields)();
    let mut common = Vec::new();
    let no_suffix = "";
    for (key, value) in settings.iter() {
        let key = key.cast_into::<PyString>().map_err(PyErr::from)?;
        common.extend(setting(kind, &fields, key.to_str()?, no_suffix, &value)?);
    }
    let seed = stochastic_rounding.then(|| tc::rng::state().seed);
    let place = match states {
        "device" => StatePlace::Device,
        "host" => StatePlace::Host,
        other => {
            let message = format!("found states {other:?}, expected \"device\" or \"host\"");
            return Err(tc::Error::argument(kind.name, message).into());
        }
    };
    let mut optimizer = kind.build(params.groups(kind, &fields, &common)?, seed)?;
    optimizer.place_states(place)?;
    Ok(optimizer)
}

/// Convert `value`, the Python value of the hyper-parameter `key`. Errors name the hyper-parameter with `suffix`, such
/// as " of a parameter group". `None` if the optimizer has no hyper-parameter of this name.
fn setting(
    kind: &OptimizerKind,
    fields: &[Field],
    key: &str,
    suffix: &str,
    value: &Bound<'_, PyAny>,
) -> Result<Option<(&'static str, Value)>> {
    let Some(field) = fields.iter().find(|field| field.name == key) else { return Ok(None) };
    let (op, name) = (kind.name, format!("{key}{suffix}"));
    // All values of a hyper-parameter have the variant of its default.
    let value = match field.value {
        Value::Number(_) => Value::Number(value.extract::<Argument<f64>>()?.get(op, &name)?),
        Value::Optional(_) => Value::Optional(value.extract::<Argument<Option<f64>>>()?.get(op, &name)?),
        Value::Pair(_) => Value::Pair(value.extract::<Argument<(f64, f64)>>()?.get(op, &name)?),
        Value::Triple(_) => Value::Triple(value.extract::<Argument<(f64, f64, f64)>>()?.get(op, &name)?),
        Value::OptionalPair(_) => Value::OptionalPair(value.extract::<Argument<(Option<f64>, f64)>>()?.get(op, &name)?),
        Value::Switch(_) => Value::Switch(value.extract::<Argument<bool>>()?.get(op, &name)?),
        Value::Count(_) => Value::Count(value.extract::<Integer>()?.count(op, &name)?),
    };
    Ok(Some((field.name, value)))
}

impl Params<'_> {
    /// The parameter groups; variables that were passed without groups form one group. Each group has the `common`
    /// hyper-parameters, followed by the group's own ones, which take precedence.
    ///
    /// # Errors
    /// `TypeError` if a group is not a dict or a value has a wrong type; `ArgumentError` if an item is not a variable,
    /// or if a group has an unknown entry or no entry "params".
    fn groups(
        &self,
        kind: &OptimizerKind,
        fields: &[Field],
        common: &[(&'static str, Value)],
    ) -> Result<Vec<NamedGroup<'static>>> {
        let op = kind.name;
        // `self.0` has the items of the argument `params`: variables, or one dict for each group.
        if !self.0.first().is_some_and(|item| item.is_instance_of::<PyDict>()) {
            return Ok(vec![(variables(op, &self.0)?, common.to_vec())]);
        }
        let group = |item: &Bound<'_, PyAny>| {
            let item = item.cast::<PyDict>()?;
            let mut settings = common.to_vec();
            let mut params = None;
            for (key, value) in item.iter() {
                let key = key.cast_into::<PyString>().map_err(PyErr::from)?;
                let key = key.to_str()?;
                if key == "params" {
                    params = Some(variables(op, &items(&value)?)?);
                } else if let Some(own) = setting(kind, fields, key, " of a parameter group", &value)? {
                    settings.push(own);
                } else {
                    let names: Vec<&str> = fields.iter().map(|field| field.name).collect();
                    let message =
                        format!("unknown entry \"{key}\" in a parameter group; expected params, {}", names.join(", "));
                    return Err(tc::Error::argument(op, message).into());
                }
            }
            let params = params.ok_or_else(|| tc::Error::argument(op, "a parameter group has no entry \"params\""))?;
            Ok((params, settings))
        };
        self.0.iter().map(group).collect()
    }
}
