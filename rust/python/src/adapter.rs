//! The Python class `Adapter` of a single linear layer, and the initial values of linear layers.
//!
//! The number that functions pass to `compute` is a number of elements that tells how long the work takes: `compute`
//! releases the GIL if the number is large.

use pyo3::prelude::*;
use tc::{DType, Tensor as Inner};
use trainable_candle_core as tc;
use trainable_candle_nn::adapter::{self, AdapterSettings, KINDS, QuantizationAware};
use trainable_candle_nn::{Base, Linear, Operation, init};

use crate::argument::Argument;
use crate::arguments::Integer;
use crate::call::{catch_panics, compute};
use crate::device;
use crate::dtype::DTypeArg;
use crate::error::Result;
use crate::tensor::Tensor;
use crate::var::Var;

/// A trainable adapter of one frozen linear layer.
///
/// Args:
///     kind: "lora", "dora", "loha", "lokr" or "oft".
///     weight: the layer's frozen weight, (out_features, in_features).
///     bias: the layer's frozen bias, (out_features,), or None.
///     rank: rank of the low-rank product, at least 1.
///     alpha: the low-rank product is multiplied by alpha / rank. For "oft", which has no such product, alpha / rank
///         multiplies the difference between the rotation and the identity.
///     dropout: probability of dropping an element of the adapter's input while training, in [0, 1). "oft" drops
///         nothing.
///     rslora: whether the low-rank product is multiplied by alpha / sqrt(rank) instead of alpha / rank.
///     qat: the format to which every forward pass rounds the adapted weight, as `nn.functional.fake_quantize` does.
///     qat_activations: whether `forward` also rounds its input, with a scale for each vector of in_features.
///
/// Raises:
///     ArgumentError: if the kind or the format `qat` is unknown, or a number is out of range.
///     ShapeError: if the weight is not a matrix or the bias does not fit it.
///     ConfigError: if the weight cannot be rounded to the format `qat`, if `qat` is given with dropout, if
///         `qat_activations` is True and `qat` is neither "int8" nor "fp8", or if an adapter of this kind does not suit
///         the layer.
#[pyclass(frozen, module = "trainable_candle")]
pub struct Adapter {
    inner: Box<dyn adapter::Adapter>,
    vars: Vec<Py<Var>>,
}

#[pymethods]
impl Adapter {
    #[new]
    #[pyo3(signature = (kind, weight, bias, rank, alpha, dropout=Argument::of(0.0), rslora=false, qat=None, qat_activations=false))]
    #[allow(clippy::too_many_arguments)] // each is an argument in Python
    fn new(
        py: Python<'_>,
        kind: &str,
        weight: &Tensor,
        bias: Option<&Tensor>,
        rank: Integer,
        alpha: Argument<f64>,
        dropout: Argument<f64>,
        rslora: bool,
        qat: Option<&str>,
        qat_activations: bool,
    ) -> Result<Self> {
        const OP: &str = "Adapter";
        let Some(kind) = KINDS.iter().find(|k| k.name == kind) else {
            let known = KINDS.iter().map(|k| k.name).collect::<Vec<_>>().join("\", \"");
            return Err(tc::Error::argument(OP, format!("unknown kind \"{kind}\"; expected \"{known}\"")).into());
        };
        let (alpha, dropout) = (alpha.get(OP, "alpha")?, dropout.get(OP, "dropout")?);
        let rank = rank.at_least(OP, "rank", 1)?;
        if !(0.0..1.0).contains(&dropout) {
            return Err(
                tc::Error::argument(OP, format!("the dropout is {dropout}, expected a number in [0, 1)")).into()
            );
        }
        if !alpha.is_finite() {
            return Err(tc::Error::argument(OP, format!("alpha is {alpha}, expected a finite number")).into());
        }
        let scale = adapter::scale(alpha, rank, rslora);
        let layer = Linear::<Inner>::from_parameters(weight.0.detach(), bias.map(|b| b.0.detach()))?;
        let settings = AdapterSettings { rank, scale, dropout, ..AdapterSettings::default() };
        let parameters = catch_panics(|| {
            let initial = kind.init(&layer.base(), &settings)?;
            initial
                .into_iter()
                .map(|(name, value)| Ok((name, tc::Var::from_tensor(&value)?)))
                .collect::<tc::Result<Vec<_>>>()
        })?;
        let mut inner = (kind.build)(&parameters, &layer.base(), &settings)?;
        // The grid of a format is the set of values that it can represent.
        let grid = qat.map(str::parse).transpose()?;
        if qat_activations {
            QuantizationAware::check_activations(grid)?;
        }
        if let Some(grid) = grid {
            let rounding = QuantizationAware::over(inner, &layer.base(), &settings, grid)?;
            inner = Box::new(rounding.with_activations(qat_activations));
        }
        let vars = parameters.into_iter().map(|(_, var)| Var::object(py, var)).collect::<PyResult<_>>()?;
        Ok(Self { inner, vars })
    }

    /// Return the adapter's trainable parameters. They depend on its kind: LoRA has down and up, in this order; DoRA
    /// has down, up and the magnitude.
    fn vars(&self, py: Python<'_>) -> Vec<Py<Var>> {
        self.vars.iter().map(|var| var.clone_ref(py)).collect()
    }

    /// The number by which the low-rank product is multiplied: alpha / rank, or alpha / sqrt(rank) with `rslora`.
    #[getter]
    fn scale(&self) -> f64 {
        self.inner.scale()
    }

    /// Compute the layer's result with the adapter: (..., in_features) -> (..., out_features). `weight` and `bias` are
    /// the layer's: the adapter does not keep them.
    ///
    /// Raises:
    ///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
    #[pyo3(signature = (input, weight, bias=None))]
    fn forward(&self, py: Python<'_>, input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let work = input.0.elem_count().saturating_add(weight.0.elem_count());
        let base = Base { weight: (&weight.0).into(), bias: bias.map(|b| &b.0), operation: Operation::Linear };
        compute(py, work, || self.inner.forward(&input.0, &base)).map(Tensor)
    }

    /// Return the merged weight, in the dtype of `weight`, the layer's frozen weight. A plain linear layer with the
    /// merged weight and the same bias computes the same results as the layer with the adapter, unless the adapter
    /// applies dropout or rounds its input.
    fn merged_weight(&self, py: Python<'_>, weight: &Tensor) -> Result<Tensor> {
        let base = Base { weight: (&weight.0).into(), bias: None, operation: Operation::Linear };
        compute(py, weight.0.elem_count(), || self.inner.merged_weight(&base)).map(Tensor)
    }

    /// Set whether the adapter is in training mode, in which dropout is active.
    fn set_training(&self, training: bool) {
        self.inner.set_training(training);
    }
}

/// Draw the initial parameters of a linear layer: weight (out_features, in_features) and bias (out_features,), or None
/// instead of the bias if `bias` is False. As in torch, both are drawn uniformly between -1 / sqrt(in_features) and
/// 1 / sqrt(in_features). Their dtype is f32 by default.
///
/// Raises:
///     ArgumentError: if a number of features is negative.
///     DTypeError: if the dtype is not floating point.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the parameters do not fit into memory.
#[pyfunction]
#[pyo3(signature = (in_features, out_features, bias=true, dtype=None, device="cpu"))]
pub fn init_linear(
    py: Python<'_>,
    in_features: Integer,
    out_features: Integer,
    bias: bool,
    dtype: Option<DTypeArg>,
    device: &str,
) -> Result<(Py<Var>, Option<Py<Var>>)> {
    const OP: &str = "Linear.init";
    let (in_features, out_features) = (in_features.count(OP, "in_features")?, out_features.count(OP, "out_features")?);
    let device = device::parse(device)?;
    let dtype = dtype.map_or(DType::F32, |dtype| dtype.0);
    let (weight, bias) = compute(py, in_features.saturating_mul(out_features), || {
        let weight = tc::Var::from_tensor(&init::kaiming_uniform((out_features, in_features), dtype, &device)?)?;
        // `in_features` determines the range of the bias, `out_features` is its shape.
        let bias =
            bias.then(|| tc::Var::from_tensor(&init::uniform_by_fan(in_features, out_features, dtype, &device)?));
        Ok((weight, bias.transpose()?))
    })?;
    Ok((Var::object(py, weight)?, bias.map(|bias| Var::object(py, bias)).transpose()?))
}
