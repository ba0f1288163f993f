//! The configuration of adapters.

use std::collections::BTreeMap;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyType};
use trainable_candle_core as tc;
use trainable_candle_models::facts;
use trainable_candle_nn::adapter;

use crate::argument::Argument;
use crate::arguments::{Integer, Names};
use crate::call::detached;
use crate::dtype::{DType, DTypeArg, Reduced};
use crate::error::Result;
use crate::peft_arguments;

/// The configuration of adapters: which layers get them, and their kind and size. Arguments that peft has too have
/// peft's names.
///
/// The entries of `target_modules`, `exclude_modules`, `rank_pattern` and `alpha_pattern` select layers. An entry is
/// the whole name of a layer, or the end of its name after a dot ("to_q", "to_out.0"). An entry with other characters
/// than letters, digits, "_", "." and "-" is a regular expression for the whole name, or for the end after a dot.
/// "all-linear" selects every linear layer, "all-conv" every convolution, and "all-attention" the projections of
/// attention.
///
/// ```python
/// config = tc.LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_v"], rank_pattern={"to_v": 4})
/// layers = {"mid.to_q": (8, 8), "mid.to_v": (8, 8), "mid.to_k": (8, 8)}
/// assert config.select(layers) == {"mid.to_q": 16, "mid.to_v": 4}
/// ```
///
/// Args:
///     r: rank, at least 1.
///     lora_alpha: numerator of the scale lora_alpha / r; finite and not 0.
///     target_modules: the layers that get an adapter. Default: "all-linear".
///     exclude_modules: layers that get no adapter although `target_modules` selects them. Default: none.
///     lora_dropout: probability of dropping an element of an adapter's input while training, in [0, 1).
///     use_dora: whether adapters of the kind "lora" are weight-decomposed (DoRA), as those of the kind "dora" are.
///     use_rslora: whether the scale is lora_alpha / sqrt(r) instead of lora_alpha / r.
///     rank_pattern: the ranks of layers whose rank is not `r`, by the entry that selects the layers. If several
///         entries select a layer, the first in alphabetical order counts.
///     alpha_pattern: as `rank_pattern`, the alphas of layers whose alpha is not `lora_alpha`.
///     adapter: the kind of adapter: "lora", "dora", "loha", "lokr" or "oft". OFT has no rank, so it ignores `r` and
///         `lora_alpha`.
///     wd_on_output: whether DoRA has one magnitude for each output, as in the paper, instead of one for each input.
///     decompose_both: whether LoKr's smaller factor may be low-rank, too.
///     decompose_factor: the number of rows, and of columns, of LoKr's smaller factor. If this number does not divide a
///         layer's number of outputs (or inputs), LoKr takes a smaller divisor. -1 chooses divisors near the square
///         roots of these two numbers.
///     oft_block_size: the size of the blocks that OFT rotates, at least 2. If it does not divide a layer's number of
///         features, OFT uses the nearest divisor.
///     oft_side: "input" if OFT rotates the inputs of layers, as in peft; "output" if it rotates their outputs, as in
///         LyCORIS and ComfyUI. The default depends on the default file format of the model's adapters: "input" for
///         peft's format, "output" for the others.
///     use_cayley_neumann: whether OFT of inputs (`oft_side`) computes a Neumann series instead of the Cayley
///         transform. In peft the default is True.
///     num_cayley_neumann_terms: the number of terms of the Neumann series, from 2 to 64.
///     qat: the format for quantization-aware training, "int8", "int4", "fp8" or "nf4". Every forward pass rounds the
///         adapted weights of linear layers (base and adapter together) to this format, as
///         `nn.functional.fake_quantize` does.
///     qat_activations: whether layers with rounded weights also round their inputs, with a scale per token. This needs
///         `qat` "int8" or "fp8".
///     qat_learned_scales: whether each scale of the rounded weights is multiplied by a learned factor, which starts
///         at 1.
///     dtype: the dtype of the parameters in training, "f32", or "bf16" for an optimizer with `stochastic_rounding`.
///     peft: other arguments of peft's `LoraConfig`, such as `bias="none"`.
///
/// Raises:
///     ConfigError: if a value is unknown, out of range or does not fit the other values, or if an argument of peft
///         asks for something that this library does not do.
///     ArgumentError: if an integer other than `decompose_factor` is negative, or the format `qat` is unknown.
///     DTypeError: if the dtype is unknown.
///     TypeError: if an argument's name is unknown both here and in peft.
// `subclass` only lets Python get as far as `__init_subclass__`, whose error says what to do instead.
#[pyclass(frozen, subclass, module = "trainable_candle")]
pub struct LoraConfig(pub adapter::LoraConfig);

#[pymethods]
impl LoraConfig {
    #[new]
    #[pyo3(signature = (r=Integer::of(8), lora_alpha=Argument::of(8.0), target_modules=None, exclude_modules=None, lora_dropout=Argument::of(0.0),
        use_dora=false, use_rslora=false, rank_pattern=None, alpha_pattern=Argument::of(None), adapter="lora", wd_on_output=true,
        decompose_both=false, decompose_factor=Integer::of(-1), oft_block_size=Integer::of(32), oft_side=None, use_cayley_neumann=false,
        num_cayley_neumann_terms=Integer::of(5), qat=None, qat_activations=false,
        qat_learned_scales=false, dtype=None, **peft: "object"))]
    #[allow(clippy::too_many_arguments)] // each is a field of the configuration
    fn new(
        r: Integer,
        lora_alpha: Argument<f64>,
        target_modules: Option<Names>,
        exclude_modules: Option<Names>,
        lora_dropout: Argument<f64>,
        use_dora: bool,
        use_rslora: bool,
        rank_pattern: Option<BTreeMap<String, Integer>>,
        alpha_pattern: Argument<Option<BTreeMap<String, f64>>>,
        adapter: &str,
        wd_on_output: bool,
        decompose_both: bool,
        decompose_factor: Integer,
        oft_block_size: Integer,
        oft_side: Option<&str>,
        use_cayley_neumann: bool,
        num_cayley_neumann_terms: Integer,
        qat: Option<&str>,
        qat_activations: bool,
        qat_learned_scales: bool,
        dtype: Option<DTypeArg>,
        peft: Option<&Bound<'_, PyDict>>,
    ) -> Result<Self> {
        const OP: &str = "LoraConfig";
        peft.map_or(Ok(()), peft_arguments::check)?;
        let ranked = |(entry, rank): (String, Integer)| {
            Ok((entry.clone(), rank.count(OP, &format!("rank_pattern[{entry:?}]"))?))
        };
        let config = adapter::LoraConfig {
            r: r.count(OP, "r")?,
            lora_alpha: lora_alpha.get(OP, "lora_alpha")?,
            target_modules: match target_modules {
                Some(names) => names.get(OP, "target_modules")?,
                None => adapter::LoraConfig::default().target_modules,
            },
            exclude_modules: exclude_modules
                .map_or_else(|| Ok(Vec::new()), |names| names.get(OP, "exclude_modules"))?,
            lora_dropout: lora_dropout.get(OP, "lora_dropout")?,
            use_dora,
            use_rslora,
            adapter: adapter.to_owned(),
            wd_on_output,
            decompose_both,
            // A negative number, such as the default -1, becomes `None`: LoKr chooses the factor.
            decompose_factor: usize::try_from(decompose_factor.signed(OP, "decompose_factor")?).ok(),
            oft_block_size: oft_block_size.count(OP, "oft_block_size")?,
            oft_side: oft_side.map(str::parse).transpose()?,
            cayley_neumann_terms: use_cayley_neumann
                .then(|| num_cayley_neumann_terms.count(OP, "num_cayley_neumann_terms"))
                .transpose()?,
            qat: qat.map(str::parse).transpose()?,
            qat_activations,
            qat_learned_scales,
            dtype: dtype.map_or(tc::DType::F32, |dtype| dtype.0),
            rank_pattern: rank_pattern.unwrap_or_default().into_iter().map(ranked).collect::<Result<_>>()?,
            alpha_pattern: alpha_pattern.get(OP, "alpha_pattern")?.unwrap_or_default(),
        };
        config.validate()?;
        Ok(Self(config))
    }

    #[classmethod]
    fn __init_subclass__(_class: &Bound<'_, PyType>) -> Result<()> {
        let message = "LoraConfig has no subclasses; write a function that calls LoraConfig instead";
        Err(PyTypeError::new_err(message).into())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Reduced<'py>> {
        let (py, class) = (slf.py(), slf.get_type());
        let arguments = PyDict::new(py);
        // Every argument is also an attribute, except the last one, `peft`.
        for name in py.import("inspect")?.call_method1("signature", (&class,))?.getattr("parameters")?.try_iter()? {
            let name = name?.cast_into::<PyString>()?;
            if name != "peft" {
                arguments.set_item(&name, slf.getattr(&name)?)?;
            }
        }
        let make = py.import("functools")?.getattr("partial")?.call((class,), Some(&arguments))?;
        Ok(Reduced((make, ()).into_pyobject(py)?))
    }

    /// Return the layers that get an adapter, with their ranks.
    ///
    /// Args:
    ///     layers: the shape of each layer's weight in files, by the layer's name: (out, in) for a linear layer, (out,
    ///         in, height, width) for a convolution.
    ///
    /// Raises:
    ///     ConfigError: if an entry is not a valid regular expression.
    fn select(&self, py: Python<'_>, layers: BTreeMap<String, Vec<usize>>) -> Result<BTreeMap<String, usize>> {
        // A weight of four dimensions is that of a convolution.
        detached(py, || self.0.select(layers.iter().map(|(name, dims)| (name.as_str(), dims.len() == 4))))
    }

    /// Return the number of elements of the adapters' parameters, and the bytes of an optimizer's states for them. If
    /// `dtype` is "bf16", the states are those of an optimizer that rounds stochastically.
    ///
    /// Args:
    ///     layers: as for `select`.
    ///     optimizer: the name of an optimizer in lower case, such as "adamw8bit".
    ///
    /// Raises:
    ///     ConfigError: if there is no such optimizer, or an entry is not a valid regular expression.
    ///     ShapeError: if a shape cannot be that of a layer's weight.
    fn plan(&self, py: Python<'_>, layers: BTreeMap<String, Vec<usize>>, optimizer: &str) -> Result<(usize, usize)> {
        let plan = detached(py, || facts::plan(&self.0, &layers, optimizer))?;
        Ok((plan.parameters, plan.state_bytes))
    }

    /// The dtype of the parameters in training.
    #[getter]
    fn dtype(&self) -> DType {
        DType::new(self.0.dtype)
    }

    /// The rank.
    #[getter]
    fn r(&self) -> usize {
        self.0.r
    }

    /// The numerator of the scale.
    #[getter]
    fn lora_alpha(&self) -> f64 {
        self.0.lora_alpha
    }

    /// The layers that get an adapter.
    #[getter]
    fn target_modules(&self) -> Vec<String> {
        self.0.target_modules.clone()
    }

    /// Layers that get no adapter although `target_modules` selects them.
    #[getter]
    fn exclude_modules(&self) -> Vec<String> {
        self.0.exclude_modules.clone()
    }

    /// The probability of dropping an element of an adapter's input while training.
    #[getter]
    fn lora_dropout(&self) -> f64 {
        self.0.lora_dropout
    }

    /// Whether adapters of the kind "lora" are weight-decomposed (DoRA), as those of the kind "dora" are.
    #[getter]
    fn use_dora(&self) -> bool {
        self.0.use_dora
    }

    /// Whether the scale is lora_alpha / sqrt(r).
    #[getter]
    fn use_rslora(&self) -> bool {
        self.0.use_rslora
    }

    /// The kind of adapter.
    #[getter]
    fn adapter(&self) -> &str {
        &self.0.adapter
    }

    /// Whether DoRA has one magnitude for each output (otherwise for each input).
    #[getter]
    fn wd_on_output(&self) -> bool {
        self.0.wd_on_output
    }

    /// Whether the smaller factor of LoKr may be low-rank, too.
    #[getter]
    fn decompose_both(&self) -> bool {
        self.0.decompose_both
    }

    /// The number of rows, and of columns, of LoKr's smaller factor; -1 if LoKr chooses them.
    #[getter]
    fn decompose_factor(&self) -> i64 {
        self.0.decompose_factor.and_then(|factor| i64::try_from(factor).ok()).unwrap_or(-1)
    }

    /// The size of the blocks that OFT rotates.
    #[getter]
    fn oft_block_size(&self) -> usize {
        self.0.oft_block_size
    }

    /// The side of layers that OFT rotates: "input" or "output"; None for the default.
    #[getter]
    fn oft_side(&self) -> Option<&'static str> {
        self.0.oft_side.map(adapter::OftSide::name)
    }

    /// Whether OFT of inputs computes a Neumann series instead of the Cayley transform.
    #[getter]
    fn use_cayley_neumann(&self) -> bool {
        self.0.cayley_neumann_terms.is_some()
    }

    /// The number of terms of the Neumann series; 5 without `use_cayley_neumann`.
    #[getter]
    fn num_cayley_neumann_terms(&self) -> usize {
        self.0.cayley_neumann_terms.unwrap_or(5)
    }

    /// The format to which quantization-aware training rounds adapted weights; None for other training.
    #[getter]
    fn qat(&self) -> Option<&'static str> {
        self.0.qat.map(tc::ops::fake_quantize::Grid::name)
    }

    /// Whether layers with rounded weights also round their inputs.
    #[getter]
    const fn qat_activations(&self) -> bool {
        self.0.qat_activations
    }

    /// Whether each scale of the rounded weights is multiplied by a learned factor.
    #[getter]
    const fn qat_learned_scales(&self) -> bool {
        self.0.qat_learned_scales
    }

    /// The ranks of layers whose rank is not `r`, by the entry that selects the layers.
    #[getter]
    fn rank_pattern(&self) -> BTreeMap<String, usize> {
        self.0.rank_pattern.clone()
    }

    /// The alphas of layers whose alpha is not `lora_alpha`, by the entry that selects the layers.
    #[getter]
    fn alpha_pattern(&self) -> BTreeMap<String, f64> {
        self.0.alpha_pattern.clone()
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

impl LoraConfig {
    /// A copy of the configuration.
    pub fn inner(&self) -> adapter::LoraConfig {
        self.0.clone()
    }
}
