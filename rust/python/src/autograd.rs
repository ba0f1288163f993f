//! Gradients: backward, grad, the recording mode, checkpoints, gradcheck.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use pyo3::{PyTypeInfo, type_hint_identifier, type_hint_subscript, type_hint_union};
use tc::checkpoint::checkpoint_with;
use tc::gradcheck::Tolerance;
use trainable_candle_core as tc;

use crate::argument::Argument;
use crate::arguments::{found, wrong_type};
use crate::call::{detached, quick};
use crate::error::{Result, from_callback};
use crate::tensor::Tensor;
use crate::types::{Anything, ELLIPSIS};

#[pymethods]
impl Tensor {
    /// Differentiate with respect to every variable that this tensor depends on, and add the gradients to the
    /// variables' `.grad`.
    ///
    /// The backward pass frees each saved tensor after its last use, unless `retain_graph` is True.
    ///
    /// Args:
    ///     gradient: the gradient with respect to this tensor, of its shape; not needed if the tensor has one element.
    ///     retain_graph: whether the graph can be differentiated again.
    ///
    /// Raises:
    ///     ShapeError: if there is more than one element and no gradient, or the gradient has another shape.
    ///     AutogradError: if this tensor depends on no variable, if the graph was differentiated before, or if a
    ///         variable was changed in place since it was used.
    #[pyo3(signature = (gradient=None, retain_graph=false))]
    fn backward(&self, py: Python<'_>, gradient: Option<&Self>, retain_graph: bool) -> Result<()> {
        detached(py, || self.0.backward_with(gradient.map(|g| &g.0), retain_graph)).map(|_| ())
    }
}

/// A tensor, or a sequence of tensors.
pub struct Tensors(std::result::Result<Vec<tc::Tensor>, String>);

impl Tensors {
    fn get(self, op: &'static str) -> Result<Vec<tc::Tensor>> {
        self.0.map_err(|found| wrong_type(op, "inputs", &found, "a Tensor or a sequence of Tensors"))
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Tensors {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        Tensor::TYPE_HINT,
        type_hint_subscript!(type_hint_identifier!("collections.abc", "Sequence"), Tensor::TYPE_HINT)
    );

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(tensor) = object.cast::<Tensor>() {
            return Ok(Self(Ok(vec![tensor.get().0.clone()])));
        }
        let several = object.extract::<Vec<PyRef<'_, Tensor>>>();
        let tensors = several.map(|tensors| tensors.iter().map(|tensor| tensor.0.clone()).collect());
        Ok(Self(tensors.map_err(|_| found(&object))))
    }
}

/// Compute the gradients of `loss` with respect to `inputs`, without changing any `.grad`.
///
/// ```python
/// x = tc.Var([3.0])
/// (dx,) = tc.grad((x * x).sum(), x)
/// assert dx.tolist() == [6.0] and x.grad is None
/// ```
///
/// Args:
///     loss: a tensor on the tape.
///     inputs: variables, or any tensors on the tape.
///     gradient: the gradient with respect to `loss`, of the same shape; not needed if `loss` has a single element.
///     retain_graph: whether the graph can be differentiated again.
///
/// Returns:
///     One gradient for each input; None for an input on which the loss does not depend.
///
/// Raises:
///     AutogradError: as `backward`, and if an input does not require a gradient.
///     ShapeError: as `backward`.
#[pyfunction]
#[pyo3(signature = (loss, inputs, gradient=None, retain_graph=false))]
pub fn grad(
    py: Python<'_>,
    loss: &Tensor,
    inputs: Tensors,
    gradient: Option<&Tensor>,
    retain_graph: bool,
) -> Result<Vec<Option<Tensor>>> {
    let inputs = inputs.get("grad")?;
    let inputs: Vec<&tc::Tensor> = inputs.iter().collect();
    let grads = detached(py, || tc::grad(&loss.0, &inputs, gradient.map(|g| &g.0), retain_graph))?;
    Ok(grads.into_iter().map(|grad| grad.map(Tensor)).collect())
}

/// Return whether operations of this thread are recorded for backward passes.
///
/// ```python
/// with tc.no_grad():
///     assert not tc.is_grad_enabled()
/// ```
#[pyfunction]
pub fn is_grad_enabled() -> bool {
    tc::tape::is_grad_enabled()
}

/// Enable or disable recording on this thread; returns the previous state.
#[pyfunction]
pub fn set_grad_enabled(enabled: bool) -> bool {
    tc::tape::set_grad_enabled(enabled)
}

/// A Python function, given as an argument.
pub struct Function(pub Py<PyAny>);

impl<'a, 'py> FromPyObject<'a, 'py> for Function {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = type_hint_subscript!(
        type_hint_identifier!("collections.abc", "Callable"),
        ELLIPSIS,
        type_hint_identifier!("typing", "Any")
    );

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if object.is_callable() {
            return Ok(Self(object.to_owned().unbind()));
        }
        let kind = object.get_type().name()?;
        Err(pyo3::exceptions::PyTypeError::new_err(format!("expected a function, found {kind}")))
    }
}

impl From<Py<PyAny>> for Function {
    fn from(function: Py<PyAny>) -> Self {
        Self(function)
    }
}

impl From<Function> for Py<PyAny> {
    fn from(function: Function) -> Self {
        function.0
    }
}

impl Function {
    /// Call the function with tensors. Its exceptions pass through unchanged.
    pub fn call<'py>(&self, py: Python<'py>, inputs: &[tc::Tensor]) -> PyResult<Bound<'py, PyAny>> {
        let inputs =
            inputs.iter().map(|tensor| Bound::new(py, Tensor(tensor.clone()))).collect::<PyResult<Vec<_>>>()?;
        self.0.bind(py).call1(PyTuple::new(py, inputs)?)
    }
}

/// The tensors that a function returned, and whether it returned a single tensor.
fn outputs(op: &'static str, returned: &Bound<'_, PyAny>) -> PyResult<(Vec<tc::Tensor>, bool)> {
    if let Ok(tensor) = returned.cast::<Tensor>() {
        return Ok((vec![tensor.get().0.clone()], true));
    }
    let items = match returned.cast::<PyTuple>() {
        Ok(tuple) => Some(tuple.to_list()),
        Err(_) => returned.cast::<PyList>().ok().cloned(),
    };
    let tensors = items.and_then(|items| {
        items
            .iter()
            .map(|item| item.cast::<Tensor>().ok().map(|tensor| tensor.get().0.clone()))
            .collect::<Option<Vec<_>>>()
    });
    match tensors {
        Some(tensors) => Ok((tensors, false)),
        None => {
            let kind = returned.get_type().name()?;
            let message = format!("the function returned {kind}, expected a Tensor or a tuple of Tensors");
            Err(crate::error::Error::from(tc::Error::argument(op, message)).into())
        }
    }
}

/// Run `function(*tensors)` and save only a part of its intermediate results. The backward pass calls the function
/// again to recompute the results that were not saved.
///
/// The function must compute the same when it is called again. The second call gets the same random numbers, so that
/// dropout has the same mask. Variables that the function captures get their gradients.
///
/// ```python
/// layer = tc.nn.Linear(4, 4)
/// y = tc.checkpoint(lambda x: F.gelu(layer(x)), tc.randn(2, 4))
/// y.sum().backward()  # computes the layer again
/// ```
///
/// Args:
///     function: takes the tensors, returns a Tensor or a tuple of Tensors.
///     tensors: the arguments of the function. The function must capture all other values that it needs.
///     policy: "full" saves only the tensors. "selective" also saves the results of matrix products and attention, so
///         that only cheap operations are recomputed. "none" saves everything. "offload" is "full" with large tensors
///         in the memory of the host until the backward pass.
///
/// Returns:
///     The result of the function.
///
/// Raises:
///     ArgumentError: if an argument or a result is not a Tensor, or the policy is unknown.
///     The exceptions of the function.
#[pyfunction]
#[pyo3(signature = (function, *tensors: "Tensor", policy="full"))]
pub fn checkpoint<'py>(
    py: Python<'py>,
    function: Function,
    tensors: &Bound<'py, PyTuple>,
    policy: &str,
) -> Result<Anything<'py>> {
    const OP: &str = "checkpoint";
    let policy = policy.parse()?;
    let mut inputs = Vec::with_capacity(tensors.len());
    for (index, tensor) in tensors.iter().enumerate() {
        let Ok(tensor) = tensor.cast::<Tensor>() else {
            let kind = tensor.get_type().name()?;
            let message =
                format!("argument {index} is {kind}, expected a Tensor; capture other values in the function");
            return Err(tc::Error::argument(OP, message).into());
        };
        inputs.push(tensor.get().0.clone());
    }
    let single = Arc::new(AtomicBool::new(false));
    let returned_one = single.clone();
    let run = move |inputs: &[tc::Tensor]| {
        Python::attach(|py| {
            let returned = function.call(py, inputs).and_then(|returned| outputs(OP, &returned));
            let (tensors, one) = returned.map_err(from_callback)?;
            returned_one.store(one, Ordering::Relaxed);
            Ok(tensors)
        })
    };
    let results = quick(|| checkpoint_with(policy, run, &inputs.iter().collect::<Vec<_>>()))?;
    let mut results = results.into_iter().map(|tensor| Bound::new(py, Tensor(tensor))).collect::<PyResult<Vec<_>>>()?;
    if single.load(Ordering::Relaxed) {
        return Ok(Anything(results.swap_remove(0).into_any()));
    }
    Ok(Anything(PyTuple::new(py, results)?.into_any()))
}

/// Check the gradient of `function` at `inputs` against central differences in f64:
/// `|analytic - numeric| <= atol + rtol * |numeric|` for every entry.
///
/// ```python
/// assert tc.gradcheck(lambda x: x.tanh() * x, tc.randn(3, dtype="f64"))
/// ```
///
/// Args:
///     function: takes the inputs, returns a Tensor of any shape.
///     inputs: one or several f64 tensors.
///     eps: how much the central differences change an entry, in both directions.
///     atol: absolute tolerance.
///     rtol: relative tolerance.
///
/// Returns:
///     True.
///
/// Raises:
///     AutogradError: if an analytic gradient differs from the numeric one by more than the tolerance, or if the result
///         does not depend on the inputs. In the first case, the message names the entry that exceeds the tolerance most.
///     ArgumentError: if the function does not return one Tensor.
///     DTypeError: if an input is not f64.
///     The exceptions of the function.
#[pyfunction]
#[pyo3(signature = (function, inputs, eps=Argument::of(1e-6), atol=Argument::of(1e-5), rtol=Argument::of(1e-3)))]
pub fn gradcheck(
    py: Python<'_>,
    function: Function,
    inputs: Tensors,
    eps: Argument<f64>,
    atol: Argument<f64>,
    rtol: Argument<f64>,
) -> Result<bool> {
    const OP: &str = "gradcheck";
    let tolerance = Tolerance { eps: eps.get(OP, "eps")?, atol: atol.get(OP, "atol")?, rtol: rtol.get(OP, "rtol")? };
    let inputs: Vec<tc::Tensor> = inputs.get("gradcheck")?.iter().map(tc::Tensor::detach).collect();
    let run = |inputs: &[tc::Tensor]| {
        let returned = function.call(py, inputs).and_then(|returned| outputs("gradcheck", &returned));
        let (mut tensors, one) = returned.map_err(from_callback)?;
        if one {
            return Ok(tensors.swap_remove(0));
        }
        Err(tc::Error::argument("gradcheck", "the function returned several values, expected one Tensor"))
    };
    quick(|| tc::gradcheck::gradcheck(run, &inputs, tolerance))?;
    Ok(true)
}
