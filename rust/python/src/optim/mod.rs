//! Optimizers, gradient clipping, loss scaling, learning-rate schedules, and averages of parameters.

mod clip;
mod ema;
mod kinds;
mod scaler;
mod schedule;

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PyMappingMethods};
use pyo3::{PyTypeInfo, type_hint_identifier, type_hint_subscript, type_hint_union};
use trainable_candle_core as tc;
use trainable_candle_nn::optim::{self, StateDict};

pub use clip::clip_grad_norm_;
pub use ema::EMA;
pub use kinds::optimizer_kinds;
pub use scaler::GradScaler;
pub use schedule::Schedule;

use crate::argument::Argument;
use crate::call::{catch_panics, detached};
use crate::error::Result;
use crate::named::NamedTensors;
use crate::tensor::Tensor;
use crate::var::Var;

/// The base class of all optimizers. Construct one of its subclasses, such as `AdamW`.
///
/// ```python
/// loss.backward()
/// optimizer.step()
/// optimizer.zero_grad()
/// optimizer.lr = 1e-4
/// resumed = tc.optim.AdamW(model.parameters(), lr=1e-4)
/// resumed.load_state_dict(optimizer.state_dict())
/// ```
#[pyclass(frozen, subclass, module = "trainable_candle.optim")]
pub struct Optimizer(Mutex<Box<dyn optim::Optimizer>>);

impl Optimizer {
    fn lock(&self) -> MutexGuard<'_, Box<dyn optim::Optimizer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Optimizer {
    /// Make an optimizer of the kind `kind`, such as "AdamW", over the variables `params`. `settings` has
    /// hyper-parameters by name; all others have the kind's defaults. The docstrings of the subclasses describe the
    /// other arguments and the errors.
    #[new]
    #[pyo3(signature = (kind, params, settings, stochastic_rounding=false, states="device"))]
    fn new(
        kind: &str,
        params: Params<'_>,
        settings: &Bound<'_, PyDict>,
        stochastic_rounding: bool,
        states: &str,
    ) -> Result<Self> {
        Ok(Self(Mutex::new(kinds::build(kind, &params, settings, stochastic_rounding, states)?)))
    }

    /// Update every variable that has a gradient. The gradients are kept until `zero_grad`.
    ///
    /// Args:
    ///     if_finite: a tensor of one element, such as the norm that `clip_grad_norm_` returned. If the element is
    ///         infinite or NaN, nothing changes and no step is counted. A CUDA device decides this by itself; the host
    ///         does not wait.
    ///
    /// Raises:
    ///     ShapeError: if `if_finite` does not have exactly one element.
    ///     ArgumentError: if `eval` has replaced the variables' values, or a variable was replaced by a copy on another
    ///         device or in another dtype.
    ///     OutOfMemoryError: if the states do not fit into memory.
    #[pyo3(signature = (*, if_finite=None))]
    fn step(&self, py: Python<'_>, if_finite: Option<&Tensor>) -> Result<()> {
        detached(py, || {
            let guard = if_finite.map_or_else(|| Ok(optim::Guard::default()), |norm| optim::Guard::finite(&norm.0))?;
            self.lock().step_guarded(guard)
        })
    }

    /// Clear the gradients of all variables.
    fn zero_grad(&self, py: Python<'_>) -> Result<()> {
        detached(py, || self.lock().zero_grad())
    }

    /// Whether the optimizer keeps averages of its variables, as AdamWScheduleFree does. `eval` replaces the variables'
    /// values by the averages.
    #[getter]
    fn averages(&self) -> bool {
        self.lock().averages()
    }

    /// Replace the variables' values by the averages that the optimizer keeps, for validation or saving. `eval` does
    /// nothing if the optimizer keeps no averages, or if they have already replaced the values.
    ///
    /// Raises:
    ///     OutOfMemoryError: if a copy of the variables does not fit into memory.
    ///     DeviceError: if called inside a function that is being captured (`tc.cuda.capture`).
    fn eval(&self, py: Python<'_>) -> Result<()> {
        detached(py, || self.lock().eval())
    }

    /// Restore the values that `eval` has replaced, bit for bit. Call `train` before the next step. It does nothing if
    /// `eval` has not replaced the values.
    ///
    /// Raises:
    ///     DeviceError: if called inside a function that is being captured (`tc.cuda.capture`).
    fn train(&self, py: Python<'_>) -> Result<()> {
        detached(py, || self.lock().train())
    }

    /// The learning rate of the first parameter group. Assignment sets the learning rate of all groups.
    ///
    /// Raises:
    ///     ArgumentError: on assignment, if the number is negative or non-finite.
    ///     DeviceError: on assignment inside a function that is being captured (`tc.cuda.capture`).
    #[getter]
    fn lr(&self) -> f64 {
        self.lock().lr()
    }

    #[setter]
    fn set_lr(&self, lr: Argument<f64>) -> Result<()> {
        let lr = lr.get("Optimizer", "lr")?;
        catch_panics(|| self.lock().set_lr(lr))
    }

    /// The learning rate of each parameter group. To change them, assign a list with one number for each group.
    ///
    /// Raises:
    ///     ArgumentError: on assignment, if there is not one number for each group, or if a number is negative or
    ///         non-finite.
    ///     DeviceError: on assignment inside a function that is being captured (`tc.cuda.capture`).
    #[getter]
    fn group_lrs(&self) -> Vec<f64> {
        self.lock().group_lrs()
    }

    #[setter]
    fn set_group_lrs(&self, lrs: Argument<Vec<f64>>) -> Result<()> {
        let lrs = lrs.get("Optimizer", "group_lrs")?;
        let mut optimizer = self.lock();
        let groups = optimizer.group_lrs().len();
        if lrs.len() != groups {
            let message = format!("found {} learning rates, expected one for each of {groups} groups", lrs.len());
            return Err(tc::Error::argument(optimizer.name(), message).into());
        }
        catch_panics(|| lrs.iter().enumerate().try_for_each(|(group, &lr)| optimizer.set_group_lr(group, lr)))
    }

    /// Return a copy of all states on the CPU, as a dict with the following entries. INDEX counts the variables of all
    /// groups from 0.
    ///
    /// - `INDEX.NAME`: the state NAME of the variable
    /// - `INDEX.master`: the f32 master values of the variable, if it has them
    /// - `step` (i64): the number of steps of each variable
    /// - `lr` (f64): the learning rate of each group
    /// - `kind` (u8): the optimizer's name in ASCII
    /// - `seed` (i64): the seed of the random bits, if the optimizer rounds stochastically
    /// - states that belong to no variable, such as Prodigy's estimate, under their own names
    fn state_dict<'py>(&self, py: Python<'py>) -> Result<NamedTensors<'py>> {
        NamedTensors::new(py, detached(py, || self.lock().state_dict())?)
    }

    /// Load the states of an optimizer of the same kind over variables of the same shapes. After the errors below,
    /// nothing has changed. But if the states cannot be copied to a GPU, the optimizer has loaded them, and its next
    /// step tries the copy again.
    ///
    /// Raises:
    ///     ConfigError: if the states come from an optimizer of another kind; if they were saved with stochastic
    ///         rounding and this optimizer does not round stochastically, or the reverse; or if states are missing, not
    ///         expected or invalid.
    ///     ShapeError, DTypeError: if a state has another shape or dtype.
    ///     ArgumentError: if `eval` has replaced the variables' values, or if a learning rate is negative or
    ///         non-finite.
    ///     DeviceError: if called inside a function that is being captured (`tc.cuda.capture`).
    fn load_state_dict(&self, py: Python<'_>, state: HashMap<String, PyRef<'_, Tensor>>) -> Result<()> {
        let states: StateDict = state.into_iter().map(|(name, tensor)| (name, tensor.0.clone())).collect();
        detached(py, || self.lock().load_state_dict(&states))
    }

    /// The number of bytes of all existing states and master values. On the CPU, a variable's first step creates the
    /// variable's states. On a CUDA device, the first step of any variable creates the states of all variables; with
    /// `states="host"`, the constructor creates them.
    #[getter]
    fn state_bytes(&self) -> usize {
        self.lock().state_bytes()
    }

    fn __repr__(&self) -> String {
        let optimizer = self.lock();
        let elements: usize = optimizer.vars().iter().map(|var| var.elem_count()).sum();
        format!("{}({elements} parameters, lr={})", optimizer.name(), optimizer.lr())
    }
}

/// `Iterable` and `Iterable[Var]`, as annotations in the stub of the extension.
const ITERABLE: PyStaticExpr = type_hint_identifier!("collections.abc", "Iterable");
const VARIABLES: PyStaticExpr = type_hint_subscript!(ITERABLE, Var::TYPE_HINT);

/// Variables from any iterable, or from the values of a mapping.
pub struct Variables(pub(crate) Vec<tc::Var>);

impl<'a, 'py> FromPyObject<'a, 'py> for Variables {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        VARIABLES,
        type_hint_subscript!(
            type_hint_identifier!("collections.abc", "Mapping"),
            type_hint_identifier!("builtins", "str"),
            Var::TYPE_HINT
        )
    );

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(variables("parameters", &items(&object)?)?))
    }
}

/// The items of an iterable, or the values of a mapping.
///
/// # Errors
/// `ArgumentError` for a tensor: iteration over it would yield its slices, which are no variables. `TypeError` if
/// `object` is not iterable.
fn items<'py>(object: &Bound<'py, PyAny>) -> Result<Vec<Bound<'py, PyAny>>> {
    if object.is_instance_of::<Tensor>() {
        return Err(tc::Error::argument("parameters", "found one tensor, expected a list of Vars").into());
    }
    if let Ok(mapping) = object.cast::<PyMapping>() {
        return Ok(mapping.values()?.iter().collect());
    }
    Ok(object.try_iter()?.collect::<PyResult<_>>()?)
}

/// The variables in `items`. `op` is the name of the operation for errors.
///
/// # Errors
/// `ArgumentError` if an item is not a [`Var`].
fn variables(op: &'static str, items: &[Bound<'_, PyAny>]) -> Result<Vec<tc::Var>> {
    let variable = |(index, item): (usize, &Bound<'_, PyAny>)| match item.cast::<Var>() {
        Ok(var) => Ok(var.get().0.clone()),
        Err(_) => {
            let found = item.get_type().name()?;
            let message = format!("item {index} is {found}, expected a Var; only variables are trained");
            Err(tc::Error::argument(op, message).into())
        }
    };
    items.iter().enumerate().map(variable).collect()
}

/// The items of the argument `params` of an optimizer: variables, or one dict for each parameter group.
pub struct Params<'py>(Vec<Bound<'py, PyAny>>);

impl<'a, 'py> FromPyObject<'a, 'py> for Params<'py> {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        Variables::INPUT_TYPE,
        type_hint_subscript!(
            ITERABLE,
            type_hint_subscript!(
                type_hint_identifier!("collections.abc", "Mapping"),
                type_hint_identifier!("builtins", "str"),
                type_hint_identifier!("typing", "Any")
            )
        )
    );

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(items(&object)?))
    }
}
