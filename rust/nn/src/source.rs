//! [`Source`]: where the parameters of a model under construction come from.

use std::collections::BTreeSet;
use std::sync::Arc;

use trainable_candle_core::quantized::Format;
use trainable_candle_core::{DType, Device, Error, Quantized, Result, Shape, Tensor, Var, Weight};

use crate::conv::weight_from_file;
use crate::{Init, Quantization, Streaming, Weights, init};

/// Provides parameters: stored values (frozen), new initial values (trainable or frozen), or shapes alone.
pub struct Source {
    kind: Kind,
    quantization: Option<Quantization>,
    streaming: Option<Arc<Streaming>>,
}

/// Stored parameters, which are read one at a time when a model requests them.
pub trait Stored {
    /// The shape of the parameter `name`, if there is such a parameter.
    ///
    /// # Errors
    /// [`Error::WeightsFormat`] if the value stored under the name cannot be a parameter.
    fn shape(&self, name: &str) -> Result<Option<Vec<usize>>>;

    /// The values of a stored parameter, in the dtype and on the device of the model.
    ///
    /// # Errors
    /// [`Error::WeightsFormat`] if there is no such parameter, [`Error::Io`] if reading fails, [`Error::OutOfMemory`]
    /// if the values do not fit.
    fn read(&mut self, name: &str) -> Result<Tensor>;

    /// The weight `name` of a linear layer. With a `format`, the weight is quantized to this format. Without a format,
    /// a weight that is stored in quantized form may stay quantized; this default never returns such a weight.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read) and of [`Quantized::new`].
    fn read_weight(&mut self, name: &str, format: Option<Format>) -> Result<Weight> {
        let values = self.read(name)?;
        format.map_or_else(|| Ok(values.clone().into()), |format| Ok(Quantized::new(&values, format)?.into()))
    }

    /// As [`read_weight`](Self::read_weight), but the weight is on the CPU.
    ///
    /// # Errors
    /// As [`read_weight`](Self::read_weight).
    fn read_weight_to_cpu(&mut self, name: &str, format: Option<Format>) -> Result<Weight> {
        on_cpu(self.read_weight(name, format)?)
    }

    /// The stored parameters that the model has not taken. `taken` has the model's names of the parameters that it has
    /// taken. The result has the names that the store uses, which may differ from the model's.
    fn unexpected(&self, taken: &BTreeSet<String>) -> Vec<String>;
}

enum Kind {
    /// Reads frozen tensors.
    Stored {
        stored: Box<dyn Stored>,
        /// The names of the parameters that the model has requested and got.
        taken: BTreeSet<String>,
        /// The names of the parameters that the model has requested, but that are not stored.
        missing: Vec<String>,
    },
    /// Draws trainable variables from the library's generator.
    Fresh { device: Device },
    /// Draws frozen tensors from the library's generator.
    Random { dtype: DType, device: Device },
    /// Makes zeros that take no memory.
    Shapes { dtype: DType },
}

/// How the layout of a parameter in memory differs from its layout in a file.
#[derive(Clone, Copy)]
pub(crate) enum Packing {
    /// The layout in memory is that of the file.
    Plain,
    /// The weight of a convolution, (out, in / groups, height, width) in a file and (out, height, width, in / groups)
    /// in memory.
    ChannelsLast,
}

impl Packing {
    /// Converts a tensor from the layout of the file.
    fn pack(self, tensor: Tensor) -> Result<Tensor> {
        match self {
            Self::Plain => Ok(tensor),
            Self::ChannelsLast => weight_from_file(&tensor),
        }
    }

    /// The shape in memory of a parameter of `shape` in the file.
    fn shape(self, shape: &Shape) -> Shape {
        match (self, shape.dims()) {
            (Self::ChannelsLast, &[out, input, height, width]) => Shape::from((out, height, width, input)),
            _ => shape.clone(),
        }
    }
}

impl Source {
    /// Provides stored parameters, frozen.
    pub fn stored(stored: impl Stored + 'static) -> Self {
        Self::of(Kind::Stored { stored: Box::new(stored), taken: BTreeSet::new(), missing: Vec::new() })
    }

    /// Provides fresh trainable f32 variables, drawn from the library's generator.
    pub fn fresh(device: &Device) -> Self {
        Self::of(Kind::Fresh { device: device.clone() })
    }

    /// Provides fresh frozen tensors, drawn from the library's generator, to measure the speed and size of a model.
    pub fn random(dtype: DType, device: &Device) -> Self {
        Self::of(Kind::Random { dtype, device: device.clone() })
    }

    /// Provides zeros that take no memory. Their names, shapes and dtype suffice to list a model's parameters and to
    /// estimate the memory that the model needs.
    pub const fn shapes(dtype: DType) -> Self {
        Self::of(Kind::Shapes { dtype })
    }

    const fn of(kind: Kind) -> Self {
        Self { kind, quantization: None, streaming: None }
    }

    /// Quantizes each weight that `quantization` includes when the weight is requested; None quantizes nothing.
    /// Trainable parameters and bare shapes do not change.
    #[must_use]
    pub fn quantized(self, quantization: Option<Quantization>) -> Self {
        Self { quantization, ..self }
    }

    /// Keeps the weights that `streaming` includes on the CPU; [`Streaming::start`] prepares the copies of them that
    /// the device gets as it needs them. None streams nothing. Trainable parameters and bare shapes do not change.
    #[must_use]
    pub fn streamed(self, streaming: Option<Arc<Streaming>>) -> Self {
        Self { streaming, ..self }
    }

    /// Access to the parameters, without a prefix of their names.
    pub const fn root(&mut self) -> Weights<'_> {
        Weights::root(self)
    }

    /// Checks, after a model of stored parameters is built, that no parameter was missing and that no stored parameter
    /// is unused.
    ///
    /// # Errors
    /// [`Error::Config`] that names the missing and the unexpected parameters.
    pub fn finish(self) -> Result<()> {
        let Kind::Stored { stored, taken, missing } = self.kind else { return Ok(()) };
        let unexpected = stored.unexpected(&taken);
        if missing.is_empty() && unexpected.is_empty() {
            return Ok(());
        }
        Err(Error::Config(format!(
            "the weights do not fit the model: missing {}; unexpected {}",
            listed(&missing),
            listed(&unexpected)
        )))
    }

    /// The matrix `layer.weight` of `shape`. It is quantized if the source's quantization includes `layer`, and
    /// streamed if the source's streaming includes `layer`.
    pub(crate) fn weight(&mut self, layer: &str, shape: &Shape, init: Init) -> Result<Weight> {
        let name = format!("{layer}.weight");
        // None: not quantized. `Some(None)`: in the format in which the weight is stored. `Some(Some(f))`: in format f.
        let wanted = self.quantization.and_then(|quantization| quantization.of(layer));
        let transposes = wanted.is_some() && self.transposes();
        let streaming = self.streaming.clone();
        // None: not streamed. A unit is the weights of a block that are streamed together.
        let streamed = streaming.as_deref().and_then(|streaming| Some((streaming, streaming.unit(layer)?)));
        if let Kind::Stored { stored, taken, .. } = &mut self.kind
            && let Some(found) = stored.shape(&name)?
        {
            check_shape(&name, &found, shape)?;
            let weight = match (streamed, wanted) {
                (Some((streaming, unit)), Some(format)) => {
                    streaming.weight(unit, stored.read_weight_to_cpu(&name, format)?)?
                }
                (Some((streaming, unit)), None) => {
                    // `read` would put the values on the device of the model. `read_weight_to_cpu` does not, but may
                    // return a quantized weight, and this layer is not to be quantized.
                    let weight = stored.read_weight_to_cpu(&name, None)?;
                    let values = weight.quantized().map(|matrix| matrix.dequantize(matrix.dtype())).transpose()?;
                    streaming.weight(unit, values.map_or(weight, Weight::from))?
                }
                (None, Some(format)) => transposed(stored.read_weight(&name, format)?, transposes)?,
                (None, None) => stored.read(&name)?.into(),
            };
            taken.insert(name);
            return Ok(weight);
        }
        let values = self.get(name, shape, init, Packing::Plain)?;
        // Trainable parameters, bare shapes and stand-ins for missing parameters are neither quantized nor streamed.
        let Kind::Random { .. } = &self.kind else { return Ok(values.into()) };
        // Random values have no stored format to keep, so they stay unquantized if no format is given.
        let weight: Weight = match wanted.flatten() {
            Some(format) => transposed(Quantized::new(&values, format)?.into(), transposes)?,
            None => values.into(),
        };
        match streamed {
            Some((streaming, unit)) => streaming.weight(unit, on_cpu(weight)?),
            None => Ok(weight),
        }
    }

    /// Whether quantized weights keep a transposed copy of their codes; never if the source streams weights.
    fn transposes(&self) -> bool {
        self.streaming.is_none() && self.quantization.is_some_and(|quantization| quantization.transposes())
    }

    /// The parameter `name`. `shape` is its shape in files, `packing` its layout in memory.
    pub(crate) fn get(&mut self, name: String, shape: &Shape, init: Init, packing: Packing) -> Result<Tensor> {
        match &mut self.kind {
            Kind::Stored { stored, taken, missing } => match stored.shape(&name)? {
                Some(found) => {
                    check_shape(&name, &found, shape)?;
                    let tensor = packing.pack(stored.read(&name)?)?;
                    taken.insert(name);
                    Ok(tensor)
                }
                None => {
                    missing.push(name);
                    if missing.len() == MOST_MISSING {
                        let some = listed(missing);
                        return Err(Error::Config(format!(
                            "the weights do not fit the model: missing at least {some}; are these the weights of \
                             another model?"
                        )));
                    }
                    // Nothing reads these zeros, because `finish` will return an error.
                    without_memory(&packing.shape(shape), DType::F32)
                }
            },
            Kind::Fresh { device } => Ok(Var::from_tensor(&packing.pack(draw(shape, init, device)?)?)?.into_inner()),
            Kind::Random { dtype, device } => packing.pack(draw(shape, init, device)?.to_dtype(*dtype)?),
            Kind::Shapes { dtype } => without_memory(&packing.shape(shape), *dtype),
        }
    }
}

/// `weight`. If it is quantized and `transposes` is true, it also keeps a transposed copy of its codes.
fn transposed(weight: Weight, transposes: bool) -> Result<Weight> {
    match weight {
        Weight::Quantized(matrix) if transposes => Ok(matrix.with_transposed_codes()?.into()),
        other => Ok(other),
    }
}

/// Copies a weight to the CPU, if it is on another device.
fn on_cpu(weight: Weight) -> Result<Weight> {
    match weight {
        Weight::Plain(tensor) => Ok(tensor.to_device(&Device::Cpu)?.into()),
        Weight::Quantized(matrix) => Ok(matrix.to_device(&Device::Cpu)?.into()),
        Weight::Streamed(weight) => weight.host(),
    }
}

/// Checks that a stored parameter has the shape that the model expects.
fn check_shape(name: &str, found: &[usize], expected: &Shape) -> Result<()> {
    if found == expected.dims() {
        return Ok(());
    }
    Err(Error::Config(format!(
        "{name} has shape {found:?}, the model's configuration expects {:?}; are these the weights of another model?",
        expected.dims()
    )))
}

/// The number of missing parameters at which building stops, because a model of a wrong configuration may request
/// millions.
const MOST_MISSING: usize = 512;

/// Zeros of `shape`, of which memory holds a single element.
fn without_memory(shape: &Shape, dtype: DType) -> Result<Tensor> {
    Tensor::zeros((), dtype, &Device::Cpu)?.broadcast_as(shape)
}

/// The first names of a list and the number of the names after them.
fn listed<S: AsRef<str>>(names: &[S]) -> String {
    const SHOWN: usize = 8;
    if names.is_empty() {
        return "none".into();
    }
    let shown: Vec<&str> = names.iter().take(SHOWN).map(AsRef::as_ref).collect();
    match names.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Initial values (f32) of a parameter whose shape in files is `shape`.
fn draw(shape: &Shape, init: Init, device: &Device) -> Result<Tensor> {
    match init {
        Init::Kaiming => init::kaiming_uniform(shape.clone(), DType::F32, device),
        Init::Fan(fan_in) => init::uniform_by_fan(fan_in, shape.clone(), DType::F32, device),
        Init::Normal(std) => Tensor::randn(0.0, std, shape.clone(), DType::F32, device),
        Init::Constant(value) => Tensor::full(value, shape.clone(), DType::F32, device),
    }
}
