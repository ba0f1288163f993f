//! The adapters of a whole model and their configuration.

use std::collections::BTreeMap;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use trainable_candle_core as tc;
use trainable_candle_io as io;
use trainable_candle_models::{Loaded, facts};
use trainable_candle_nn::adapter;

use crate::argument::Argument;
use crate::arguments::{FilePath, Integer, Names};
use crate::call::{detached, quick};
use crate::dtype::DTypeArg;
use crate::error::Result;
use crate::named::NamedVars;
use crate::var::Var;

/// Which layers get an adapter, and of what kind and size. The names are peft's.
///
/// A layer is named by its whole name, by its end after a dot ("to_q", "to_out.0"), or by a regular expression for the
/// whole name; "all-linear" means every linear layer, "all-conv" for every convolution, "all-attention" for the
/// projections of attention.
///
/// Args:
///     r: rank, at least 1.
///     lora_alpha: numerator of the scale, lora_alpha / r.
///     target_modules: the layers that get an adapter.
///     exclude_modules: layers to leave out.
///     lora_dropout: probability of dropping an element of an adapter's input while training, in [0, 1).
///     use_dora: weight-decomposed adapters (DoRA) instead of LoRA.
///     use_rslora: scale by lora_alpha / sqrt(r).
///     rank_pattern: other ranks for layers by name.
///     alpha_pattern: other alphas for layers by name.
///     adapter: the kind of adapter by its name on the command line, "lora" for example.
///     wd_on_output: DoRA: one magnitude for each output, as in the paper; otherwise one for each input.
///     decompose_both: LoKr: whether the smaller factor may be low-rank, too.
///     decompose_factor: LoKr: the size of the smaller factor; -1 for one near the root of the layer's size.
///     qat: quantization-aware training: adapted weights of linear layers are rounded in every forward pass as `nn.functional.fake_quantize`
///         does, to "int8", "int4", "fp8" or "nf4".
///     qat_activations: round the inputs of these layers likewise, to "int8" or "fp8" with a scale a token.
///
/// Raises:
///     ConfigError: if a value is out of range.
#[pyclass(frozen, module = "trainable_candle")]
pub struct LoraConfig(adapter::LoraConfig);

#[pymethods]
impl LoraConfig {
    #[new]
    #[pyo3(signature = (r=Integer::of(8), lora_alpha=Argument::of(8.0), target_modules=None, exclude_modules=None, lora_dropout=Argument::of(0.0),
        use_dora=false, use_rslora=false, rank_pattern=None, alpha_pattern=Argument::of(None), adapter="lora", wd_on_output=true,
        decompose_both=false, decompose_factor=Integer::of(-1), qat=None, qat_activations=false))]
    #[allow(clippy::too_many_arguments)] // peft's
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
        qat: Option<&str>,
        qat_activations: bool,
    ) -> Result<Self> {
        const OP: &str = "LoraConfig";
        let rank =
            |(name, rank): (String, Integer)| Ok((name.clone(), rank.count(OP, &format!("rank_pattern[{name:?}]"))?));
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
            decompose_factor: usize::try_from(decompose_factor.signed(OP, "decompose_factor")?).ok(),
            qat: qat.map(str::parse).transpose()?,
            qat_activations,
            rank_pattern: rank_pattern.unwrap_or_default().into_iter().map(rank).collect::<Result<_>>()?,
            alpha_pattern: alpha_pattern.get(OP, "alpha_pattern")?.unwrap_or_default(),
        };
        config.validate()?;
        Ok(Self(config))
    }

    /// The layers that get an adapter, with their ranks.
    ///
    /// Args:
    ///     layers: the shapes of layers' weights as files have them, (out, in) or (out, in, height, width), by name.
    ///
    /// Raises:
    ///     ConfigError: if a pattern is not a regular expression.
    fn select(&self, py: Python<'_>, layers: BTreeMap<String, Vec<usize>>) -> Result<BTreeMap<String, usize>> {
        detached(py, || self.0.select(layers.iter().map(|(name, dims)| (name.as_str(), dims.len() == 4))))
    }

    /// What the adapters take: how many numbers their parameters consist of, and the bytes of an optimizer's states.
    ///
    /// Args:
    ///     layers: as for `select`.
    ///     optimizer: the name of one in small letters, "adamw8bit".
    ///
    /// Raises:
    ///     ConfigError: if there is no such optimizer, or a pattern is not a regular expression.
    ///     ShapeError: if a shape is not a layer's.
    fn plan(&self, py: Python<'_>, layers: BTreeMap<String, Vec<usize>>, optimizer: &str) -> Result<(usize, usize)> {
        let plan = detached(py, || facts::plan(&self.0, &layers, optimizer))?;
        Ok((plan.parameters, plan.state_bytes))
    }

    /// Rank.
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

    /// The layers that are left out.
    #[getter]
    fn exclude_modules(&self) -> Vec<String> {
        self.0.exclude_modules.clone()
    }

    /// The probability of dropping an element of an adapter's input while training.
    #[getter]
    fn lora_dropout(&self) -> f64 {
        self.0.lora_dropout
    }

    /// Whether adapters are weight-decomposed (DoRA).
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

    /// The size of the smaller factor of LoKr; -1 for one near the root of the layer's size.
    #[getter]
    fn decompose_factor(&self) -> i64 {
        self.0.decompose_factor.and_then(|factor| i64::try_from(factor).ok()).unwrap_or(-1)
    }

    /// The grid that adapted weights are rounded to while training, if any.
    #[getter]
    fn qat(&self) -> Option<&'static str> {
        self.0.qat.map(tc::ops::fake_quantize::Grid::name)
    }

    /// Whether the inputs of these layers are rounded too.
    #[getter]
    const fn qat_activations(&self) -> bool {
        self.0.qat_activations
    }

    /// Other ranks for layers by name.
    #[getter]
    fn rank_pattern(&self) -> BTreeMap<String, usize> {
        self.0.rank_pattern.clone()
    }

    /// Other alphas for layers by name.
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

/// The adapters of a model, made by `add_adapter` or `load_adapter`.
#[pyclass(frozen, module = "trainable_candle")]
pub struct AdapterSet {
    set: Arc<adapter::AdapterSet>,
    model: Loaded,
    vars: Vec<(String, Py<Var>)>,
}

impl AdapterSet {
    /// The Python object of a set.
    pub fn object(py: Python<'_>, set: Arc<adapter::AdapterSet>, model: Loaded) -> PyResult<Py<Self>> {
        let vars = set
            .named_vars()
            .into_iter()
            .map(|(name, var)| Ok((name, Var::object(py, var)?)))
            .collect::<PyResult<_>>()?;
        Py::new(py, Self { set, model, vars })
    }

    /// The set itself.
    pub const fn inner(&self) -> &Arc<adapter::AdapterSet> {
        &self.set
    }
}

#[pymethods]
impl AdapterSet {
    /// The trainable parameters in the order of the layers.
    fn parameters(&self, py: Python<'_>) -> Vec<Py<Var>> {
        self.vars.iter().map(|(_, var)| var.clone_ref(py)).collect()
    }

    /// The trainable parameters under peft's names ("transformer_blocks.0.attn.to_q.lora_A.weight").
    fn named_parameters<'py>(&self, py: Python<'py>) -> Result<NamedVars<'py>> {
        let dict = PyDict::new(py);
        for (name, var) in &self.vars {
            dict.set_item(name, var)?;
        }
        Ok(NamedVars(dict))
    }

    /// The configuration.
    #[getter]
    fn config(&self) -> LoraConfig {
        LoraConfig(self.set.config().clone())
    }

    /// Turn the adapters on or off; while they are off, the model computes exactly the base's results.
    fn set_enabled(&self, enabled: bool) {
        self.set.set_enabled(enabled);
    }

    /// Training (dropout on) or not.
    fn set_training(&self, training: bool) {
        self.set.set_training(training);
    }

    /// Write the adapters to a safetensors file, complete or not at all.
    ///
    /// Args:
    ///     path: the file.
    ///     format: "kohya", "diffusers", "peft" or "comfyui". Default: the one that most tools load, "kohya" for SDXL,
    ///         "peft" for a model that no other tool knows.
    ///     metadata: text entries for the file's header, in addition to those that tools look for.
    ///     dtype: the dtype of the parameters, "f32", "f16" or "bf16".
    ///
    /// Returns:
    ///     The names of layers whose adapter has no effect, because a factor is zero everywhere; none once all of them are
    ///     trained.
    ///
    /// Raises:
    ///     FileError: if the file cannot be written.
    ///     ArgumentError: if the format is unknown or cannot hold these adapters.
    #[pyo3(signature = (path, format=None, metadata=Argument::of(None), dtype=None))]
    fn save(
        &self,
        py: Python<'_>,
        path: FilePath,
        format: Option<&str>,
        metadata: Argument<Option<BTreeMap<String, String>>>,
        dtype: Option<DTypeArg>,
    ) -> Result<Vec<String>> {
        const OP: &str = "save";
        let path = path.get(OP)?;
        let options = options(OP, format, metadata, dtype)?;
        let names = self.model.adapter_names();
        detached(py, || Ok(io::save_adapters(&path, &[(&names, &self.set)], &options)?.zero))
    }

    /// Read the parameters of an adapter file with the same layers, ranks and alphas.
    ///
    /// Raises:
    ///     MissingFileError, WeightsFormatError: if there is no such file, or it is not an adapter for this model.
    ///     ConfigError, ShapeError: if it does not fit; nothing is changed then.
    fn load(&self, py: Python<'_>, path: FilePath) -> Result<()> {
        let path = path.get("load")?;
        detached(py, || {
            let (names, layers) = (self.model.adapter_names(), self.model.named_layers());
            io::load_adapter(&path, &self.set, io::PartLayers { names: &names, layers: &layers })
        })
    }

    fn __repr__(&self) -> String {
        let elements: usize = self.set.vars().iter().map(|var| var.elem_count()).sum();
        format!("AdapterSet({} layers, {elements} parameters)", self.set.len())
    }
}

fn options(
    op: &'static str,
    format: Option<&str>,
    metadata: Argument<Option<BTreeMap<String, String>>>,
    dtype: Option<DTypeArg>,
) -> Result<io::SaveOptions> {
    Ok(io::SaveOptions {
        format: format.map(str::parse).transpose()?,
        dtype: dtype.map(|dtype| dtype.0),
        metadata: metadata.get(op, "metadata")?.unwrap_or_default(),
    })
}

/// Write the adapters of several models, a UNet and its text encoders, to one safetensors file.
///
/// Args:
///     path: the file.
///     adapters: the adapters of each model.
///     format: "kohya" (the default for SDXL), "diffusers" or "comfyui".
///     metadata: text entries for the file's header, in addition to those that tools look for.
///     dtype: the dtype of the parameters, "f32", "f16" or "bf16".
///
/// Returns:
///     The names of layers whose adapter has no effect, because a factor is zero everywhere.
///
/// Raises:
///     FileError: if the file cannot be written.
///     ArgumentError: if the format is unknown or cannot hold these adapters.
#[pyfunction]
#[pyo3(signature = (path, adapters, format=None, metadata=Argument::of(None), dtype=None))]
pub fn save_adapters(
    py: Python<'_>,
    path: FilePath,
    adapters: Vec<Py<AdapterSet>>,
    format: Option<&str>,
    metadata: Argument<Option<BTreeMap<String, String>>>,
    dtype: Option<DTypeArg>,
) -> Result<Vec<String>> {
    let file = prepared(py, "save_adapters", path, &adapters, (format, metadata, dtype))?;
    file.write(py)?;
    Ok(file.idle())
}

/// Copy what `save_adapters` would write to the CPU, to write it while training continues.
///
/// Args:
///     path: the file.
///     adapters: the adapters of each model.
///     format: "kohya" (the default for SDXL), "diffusers" or "comfyui".
///     metadata: text entries for the file's header, in addition to those that tools look for.
///     dtype: the dtype of the parameters, "f32", "f16" or "bf16".
///
/// Raises:
///     ArgumentError: if the format is unknown or cannot hold these adapters.
#[pyfunction]
#[pyo3(signature = (path, adapters, format=None, metadata=Argument::of(None), dtype=None))]
pub fn prepare_adapters(
    py: Python<'_>,
    path: FilePath,
    adapters: Vec<Py<AdapterSet>>,
    format: Option<&str>,
    metadata: Argument<Option<BTreeMap<String, String>>>,
    dtype: Option<DTypeArg>,
) -> Result<AdapterFile> {
    prepared(py, "prepare_adapters", path, &adapters, (format, metadata, dtype))
}

/// How a file is written: its format, its metadata, the dtype of the parameters.
type FileOptions<'a> = (Option<&'a str>, Argument<Option<BTreeMap<String, String>>>, Option<DTypeArg>);

fn prepared(
    py: Python<'_>,
    op: &'static str,
    path: FilePath,
    adapters: &[Py<AdapterSet>],
    (format, metadata, dtype): FileOptions<'_>,
) -> Result<AdapterFile> {
    let path = path.get(op)?;
    let options = options(op, format, metadata, dtype)?;
    let names: Vec<io::PartNames> = adapters.iter().map(|adapter| adapter.get().model.adapter_names()).collect();
    let sets: Vec<Arc<adapter::AdapterSet>> = adapters.iter().map(|adapter| adapter.get().set.clone()).collect();
    detached(py, || {
        let parts: Vec<_> = names.iter().zip(sets.iter().map(Arc::as_ref)).collect();
        Ok(AdapterFile(io::prepare_adapters(&path, &parts, &options)?))
    })
}

/// An adapter file that is complete but not written yet, made by `prepare_adapters`.
#[pyclass(frozen, module = "trainable_candle")]
pub struct AdapterFile(io::AdapterFile);

#[pymethods]
impl AdapterFile {
    /// Write the file, complete or not at all.
    ///
    /// Raises:
    ///     FileError: if the file cannot be written.
    fn write(&self, py: Python<'_>) -> Result<()> {
        detached(py, || self.0.write())
    }

    /// The names of layers whose adapter has no effect, because a factor is zero everywhere.
    #[getter]
    fn idle(&self) -> Vec<String> {
        self.0.saved().zero.clone()
    }

    fn __repr__(&self) -> String {
        format!("AdapterFile({} layers)", self.0.saved().layers)
    }
}

/// The adapters of a model: none, or one set.
#[derive(Default)]
pub struct Attached(std::sync::Mutex<Option<Arc<adapter::AdapterSet>>>);

impl Attached {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<adapter::AdapterSet>>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Attach the set that `make` builds, for the operation `op`.
    pub fn attach(
        &self,
        py: Python<'_>,
        op: &'static str,
        model: &Loaded,
        make: impl FnOnce() -> tc::Result<adapter::AdapterSet> + Send,
    ) -> Result<Py<AdapterSet>> {
        self.refuse_second(op)?;
        let set = Arc::new(detached(py, make)?);
        // Another thread may have attached one meanwhile.
        if let Err(error) = self.refuse_second(op) {
            set.set_enabled(false);
            return Err(error);
        }
        *self.lock() = Some(set.clone());
        Ok(AdapterSet::object(py, set, model.clone())?)
    }

    fn refuse_second(&self, op: &'static str) -> Result<()> {
        if self.lock().is_none() {
            return Ok(());
        }
        let cure = "call remove_adapter() first; one configuration can name all layers that are to have one";
        Err(tc::Error::Config(format!("{op}: the model has an adapter already; {cure}")).into())
    }

    /// The set; an error of the operation `op` if there is none.
    pub fn get(&self, op: &'static str) -> Result<Arc<adapter::AdapterSet>> {
        let missing =
            || tc::Error::argument(op, "the model has no adapter; call add_adapter() or load_adapter() first");
        Ok(self.lock().clone().ok_or_else(missing)?)
    }

    /// Remove the set, if there is one.
    pub fn remove(&self) -> Result<()> {
        quick(|| {
            if let Some(set) = self.lock().take() {
                set.set_enabled(false);
            }
            Ok(())
        })
    }
}
