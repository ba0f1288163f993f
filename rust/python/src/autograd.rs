//! Gradients (backward, grad, the recording mode, checkpoints, gradcheck), and Python functions as arguments.

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
use crate::arguments::{describe, wrong_type};
use crate::call::{catch_panics, detached};
use crate::error::{Result, from_callback};
use crate::tensor::Tensor;
use crate::types::{Anything, ELLIPSIS};

#[pymethods]
impl Tensor {
    /// Differentiate this tensor with respect to every variable that it depends on, and add the gradients to the
    /// variables' `.grad`.
    ///
    /// The backward pass frees each saved tensor after its last use, unless `retain_graph` is True.
    ///
    /// Args:
    ///     gradient: the gradient of the loss with respect to this tensor, in this tensor's shape. It may be left out
    ///         if this tensor has one element, which is then the loss itself.
    ///     retain_graph: whether the graph can be differentiated again.
    ///
    /// Raises:
    ///     ShapeError: if `gradient` has another shape, or is left out and this tensor does not have one element.
    ///     AutogradError: if this tensor depends on no variable, if the graph was differentiated before, or if a
    ///         variable was changed in place since it was used.
    #[pyo3(signature = (gradient=None, retain_graph=false))]
    fn backward(&self, py: Python<'_>, gradient: Option<&Self>, retain_graph: bool) -> Result<()> {
        // `detached` releases the GIL.
        detached(py, || self.0.backward_with(gradient.map(|g| &g.0), retain_graph)).map(|_| ())
    }
}

/// An argument that is a tensor or a sequence of tensors. For any other object, its description by [`describe`], which
/// the error contains.
pub struct Tensors(std::result::Result<Vec<tc::Tensor>, String>);

impl Tensors {
    fn get(self, op: &'static str) -> Result<Vec<tc::Tensor>> {
        self.0.map_err(|description| wrong_type(op, "inputs", &description, "a Tensor or a sequence of Tensors"))
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
        Ok(Self(tensors.map_err(|_| describe(&object))))
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
///     gradient: the gradient with respect to `loss`, in the same shape. Default: 1, for a `loss` with one element.
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

/// Return whether operations of this thread are recorded on the tape.
///
/// ```python
/// with tc.no_grad():
///     assert not tc.is_grad_enabled()
/// ```
#[pyfunction]
pub fn is_grad_enabled() -> bool {
    tc::tape::is_grad_enabled()
}

/// Enable or disable recording on the tape in this thread; return whether it was enabled before.
#[pyfunction]
pub fn set_grad_enabled(enabled: bool) -> bool {
    tc::tape::set_grad_enabled(enabled)
}

/// A Python function as an argument.
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

/// The tensors in the value `returned` of a function, and whether this value is one tensor instead of a tuple or a
/// list.
fn outputs(op: &'static str, returned: &Bound<'_, PyAny>) -> PyResult<(Vec<tc::Tensor>, bool)> {
    if let Ok(tensor) = returned.cast::<Tensor>() {
        return Ok((vec![tensor.get().0.clone()], true));
    }
    let wrong = |description: String| -> PyErr {
        let message = format!("the function returned {description}, expected a Tensor or a tuple of Tensors");
        crate::error::Error::from(tc::Error::argument(op, message)).into()
    };
    let kind = returned.get_type().name()?;
    let items = match returned.cast::<PyTuple>() {
        Ok(tuple) => tuple.to_list(),
        Err(_) => returned.cast::<PyList>().cloned().map_err(|_| wrong(kind.to_string()))?,
    };
    let mut tensors = Vec::with_capacity(items.len());
    for item in &items {
        let Ok(tensor) = item.cast::<Tensor>() else {
            let item_kind = item.get_type().name()?;
            return Err(wrong(format!("{kind} with an item of type {item_kind}")));
        };
        tensors.push(tensor.get().0.clone());
    }
    Ok((tensors, false))
}

/// Run `function(*tensors)` and save only the intermediate results that `policy` names. The backward pass calls the
/// function again to recompute the other intermediate results.
///
/// The second call must compute the same as the first. It gets the same random numbers, so that dropout has the same
/// mask. Variables that the function captures get their gradients.
///
/// ```python
/// layer = tc.nn.Linear(4, 4)
/// y = tc.checkpoint(lambda x: F.gelu(layer(x)), tc.randn(2, 4))
/// y.sum().backward()  # computes the layer again
/// ```
///
/// Args:
///     function: takes `tensors` as its arguments, returns a Tensor, or a tuple or list of Tensors.
///     tensors: the arguments of the function. The function must capture all other values that it needs.
///     policy: "full" saves only `tensors`. "selective" also saves the results of matrix products and attention, so
///         that only cheap operations are recomputed. "none" saves everything. "offload" saves the same as "full", and
///         keeps large tensors in host memory until the backward pass.
///
/// Returns:
///     The function's Tensor, or a tuple of its Tensors.
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
    let is_single = Arc::new(AtomicBool::new(false));
    let run = {
        let is_single = is_single.clone();
        move |inputs: &[tc::Tensor]| {
            Python::attach(|py| {
                let returned = function.call(py, inputs).and_then(|returned| outputs(OP, &returned));
                let (tensors, single) = returned.map_err(from_callback)?;
                is_single.store(single, Ordering::Relaxed);
                Ok(tensors)
            })
        }
    };
    let results = catch_panics(|| checkpoint_with(policy, run, &inputs.iter().collect::<Vec<_>>()))?;
    let mut results = results.into_iter().map(|tensor| Bound::new(py, Tensor(tensor))).collect::<PyResult<Vec<_>>>()?;
    if is_single.load(Ordering::Relaxed) {
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
///     inputs: an f64 tensor, or a sequence of f64 tensors.
///     eps: the step of the central differences: each entry is changed by +eps and by -eps.
///     atol: absolute tolerance.
///     rtol: relative tolerance.
///
/// Returns:
///     True.
///
/// Raises:
///     AutogradError: if an analytic gradient differs from the numeric one by more than the tolerance (the message
///         names the entry that exceeds the tolerance most), or if the result depends on no input.
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
    let inputs: Vec<tc::Tensor> = inputs.get(OP)?.iter().map(tc::Tensor::detach).collect();
    let run = |inputs: &[tc::Tensor]| {
        let returned = function.call(py, inputs).and_then(|returned| outputs(OP, &returned));
        let (mut tensors, is_single) = returned.map_err(from_callback)?;
        if is_single {
            return Ok(tensors.swap_remove(0));
        }
        Err(tc::Error::argument(OP, "the function returned a tuple or a list, expected one Tensor"))
    };
    catch_panics(|| tc::gradcheck::gradcheck(run, &inputs, tolerance))?;
    Ok(true)
}
