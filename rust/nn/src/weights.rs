//! [`Weights`]: where a model under construction gets its parameters.

use std::collections::BTreeMap;

use trainable_candle_core::ops::conv::Conv2dOptions;
use trainable_candle_core::{DType, Device, Error, Result, Shape, Tensor, Var};

use crate::conv::{channels_per_group, weight_from_file};
use crate::{Conv2d, Linear, init};

/// Gives a model its parameters by name: read ones, frozen, or fresh ones, trainable.
///
/// Cheap to descend into ([`pp`](Weights::pp)); remembers what was taken, so that leftovers can be named.
pub struct Weights<'a> {
    source: &'a mut Source,
    prefix: String,
}

/// Parameters to give out.
pub struct Source {
    kind: Kind,
    taken: BTreeMap<String, Tensor>,
}

enum Kind {
    /// Read from a file: name -> values.
    Loaded { tensors: BTreeMap<String, Tensor>, dtype: Option<DType>, missing: Vec<String> },
    /// Drawn from the library's generator as variables.
    Fresh { device: Device },
}

impl Source {
    /// Give out `tensors`, converted to `dtype` if one is given.
    pub fn loaded(tensors: BTreeMap<String, Tensor>, dtype: Option<DType>) -> Self {
        Self { kind: Kind::Loaded { tensors, dtype, missing: Vec::new() }, taken: BTreeMap::new() }
    }

    /// Give out fresh trainable f32 variables, drawn from the library's generator.
    pub fn fresh(device: &Device) -> Self {
        Self { kind: Kind::Fresh { device: device.clone() }, taken: BTreeMap::new() }
    }

    /// The root of the names.
    pub fn root(&mut self) -> Weights<'_> {
        Weights { source: self, prefix: String::new() }
    }

    /// After the model is built: everything asked for was there, and everything there was asked for.
    ///
    /// # Errors
    /// [`Error::Config`] naming the missing and the unexpected parameters.
    pub fn finish(self) -> Result<()> {
        let Kind::Loaded { tensors, missing, .. } = self.kind else { return Ok(()) };
        let unexpected: Vec<&String> = tensors.keys().filter(|name| !self.taken.contains_key(*name)).collect();
        if missing.is_empty() && unexpected.is_empty() {
            return Ok(());
        }
        Err(Error::Config(format!(
            "the weights do not fit the model: missing {}; unexpected {}",
            listed(&missing),
            listed(&unexpected)
        )))
    }
}

/// The first names of a list and how many more there are.
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

/// How a fresh parameter starts.
#[derive(Clone, Copy, Debug)]
pub enum Init {
    /// Uniform in ±1/√fan_in, the fan-in being the product of all sizes but the first.
    Kaiming,
    /// Uniform in ±1/√fan_in for a given fan-in (biases).
    Fan(usize),
    /// Normal of mean 0 and this standard deviation.
    Normal(f64),
    /// This value everywhere.
    Constant(f64),
}

impl Weights<'_> {
    /// The parameters below `name`.
    pub fn pp(&mut self, name: &str) -> Weights<'_> {
        let prefix = self.join(name);
        Weights { source: self.source, prefix }
    }

    fn join(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) }
    }

    /// The parameter `name` of `shape`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the file has another shape. A missing parameter is reported by [`Source::finish`].
    pub fn get(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> Result<Tensor> {
        self.packed(name, shape.into(), init, |tensor| Ok(tensor.clone()))
    }

    /// The parameter `name`, of `shape` in files, as `pack` lays it out.
    fn packed(
        &mut self,
        name: &str,
        shape: Shape,
        init: Init,
        pack: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let name = self.join(name);
        let tensor = match &mut self.source.kind {
            Kind::Loaded { tensors, dtype, missing } => match tensors.get(&name) {
                Some(tensor) if tensor.dims() != shape.dims() => {
                    return Err(Error::Config(format!(
                        "{name} has shape {:?}, the model's configuration expects {:?}; are the weights of another model?",
                        tensor.dims(),
                        shape.dims()
                    )));
                }
                Some(tensor) => pack(&dtype.map_or_else(|| Ok(tensor.clone()), |d| tensor.to_dtype(d))?)?,
                None => {
                    missing.push(name.clone());
                    // Never used: `finish` fails.
                    pack(&Tensor::zeros((), DType::F32, &Device::Cpu)?.broadcast_as(shape)?)?
                }
            },
            Kind::Fresh { device } => Var::from_tensor(&pack(&draw(&shape, init, device)?)?)?.into_inner(),
        };
        self.source.taken.insert(name, tensor.clone());
        Ok(tensor)
    }

    /// A linear layer `name` with torch's initial values.
    ///
    /// # Errors
    /// As [`get`](Weights::get).
    pub fn linear(
        &mut self,
        name: &str,
        in_features: usize,
        out_features: usize,
        bias: bool,
    ) -> Result<Linear<Tensor>> {
        self.linear_init(name, in_features, out_features, bias, Init::Kaiming)
    }

    /// A linear layer whose weight starts by `init`; its bias by torch's rule, or at zero if the weight starts constant or normal.
    ///
    /// # Errors
    /// As [`get`](Weights::get).
    pub fn linear_init(
        &mut self,
        name: &str,
        in_features: usize,
        out_features: usize,
        bias: bool,
        init: Init,
    ) -> Result<Linear<Tensor>> {
        let bias_init = if matches!(init, Init::Kaiming) { Init::Fan(in_features) } else { Init::Constant(0.0) };
        let mut scope = self.pp(name);
        let weight = scope.get("weight", (out_features, in_features), init)?;
        let bias = if bias { Some(scope.get("bias", out_features, bias_init)?) } else { None };
        Ok(Linear::from_weight(weight, bias))
    }

    /// A convolution `name` with torch's initial values. Files hold its weight as (out, in / groups, height, width).
    ///
    /// # Errors
    /// As [`get`](Weights::get); [`Error::Argument`] if the channels do not divide into the groups.
    pub fn conv2d(
        &mut self,
        name: &str,
        in_channels: usize,
        out_channels: usize,
        kernel: [usize; 2],
        options: Conv2dOptions,
        bias: bool,
    ) -> Result<Conv2d<Tensor>> {
        let per_group = channels_per_group(in_channels, out_channels, options.groups)?;
        let fan_in = per_group * kernel[0] * kernel[1];
        let mut scope = self.pp(name);
        let shape = Shape::from((out_channels, per_group, kernel[0], kernel[1]));
        let weight = scope.packed("weight", shape, Init::Kaiming, weight_from_file)?;
        let bias = if bias { Some(scope.get("bias", out_channels, Init::Fan(fan_in))?) } else { None };
        Conv2d::from_parameters(weight, bias, options)
    }
}

fn draw(shape: &Shape, init: Init, device: &Device) -> Result<Tensor> {
    match init {
        Init::Kaiming => init::kaiming_uniform(shape.clone(), DType::F32, device),
        Init::Fan(fan_in) => init::uniform_by_fan(fan_in, shape.clone(), DType::F32, device),
        Init::Normal(std) => Tensor::randn(0.0, std, shape.clone(), DType::F32, device),
        Init::Constant(value) => Tensor::full(value, shape.clone(), DType::F32, device),
    }
}
