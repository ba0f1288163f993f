//! [`Weights`]: access by name to the parameters of a model under construction.

use trainable_candle_core::ops::conv::Conv2dOptions;
use trainable_candle_core::{Result, Shape, Tensor, Weight};

use crate::conv::channels_per_group;
use crate::source::Packing;
use crate::{Conv2d, GroupNorm, LayerNorm, Linear, LinearGroup, RmsNorm, Source};

/// Gives a model under construction its parameters by name, from a [`Source`].
///
/// Calls of [`pp`](Weights::pp) are cheap. The source records which parameters the model has requested, so that
/// [`Source::finish`] can name the missing and the unused ones.
pub struct Weights<'a> {
    source: &'a mut Source,
    prefix: String,
}

impl<'a> Weights<'a> {
    pub(crate) const fn root(source: &'a mut Source) -> Self {
        Self { source, prefix: String::new() }
    }
}

/// The initial values of a fresh parameter.
#[derive(Clone, Copy, Debug)]
pub enum Init {
    /// Uniform in ±1/√fan_in, where fan_in is the product of all dimensions but the first.
    Kaiming,
    /// Uniform in ±1/√fan_in for a given fan-in (biases).
    Fan(usize),
    /// Normal of mean 0 and this standard deviation.
    Normal(f64),
    /// The same value for all elements.
    Constant(f64),
}

impl Weights<'_> {
    /// The parameters whose names start with this object's prefix, followed by `name` and a dot ("push prefix").
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
    /// [`Error::Config`](trainable_candle_core::Error::Config) if the parameter has another shape in the file, or if
    /// so many parameters are missing that the weights must be those of another model. If fewer are missing,
    /// [`Source::finish`] reports them. The errors of reading stored parameters ([`Stored`](crate::Stored)) and of
    /// drawing initial values.
    pub fn get(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> Result<Tensor> {
        let name = self.join(name);
        self.source.get(name, &shape.into(), init, Packing::Plain)
    }

    /// The matrix `name.weight` of `shape` (out, in), quantized if the source's
    /// [`Quantization`](crate::Quantization) includes `name`, and streamed if the source's
    /// [`Streaming`](crate::Streaming) does.
    ///
    /// # Errors
    /// As [`get`](Weights::get), and if the weight cannot be quantized or streamed.
    pub fn matrix(&mut self, name: &str, shape: (usize, usize), init: Init) -> Result<Weight> {
        let name = self.join(name);
        self.source.weight(&name, &shape.into(), init)
    }

    /// A linear layer `name`. Fresh parameters start with torch's initial values.
    ///
    /// # Errors
    /// As [`matrix`](Weights::matrix).
    pub fn linear(
        &mut self,
        name: &str,
        in_features: usize,
        out_features: usize,
        bias: bool,
    ) -> Result<Linear<Tensor>> {
        self.linear_init(name, in_features, out_features, bias, Init::Kaiming)
    }

    /// A linear layer `name`, whose fresh weight is drawn from `init`. A fresh bias starts as in torch if `init` is
    /// [`Init::Kaiming`], otherwise at zero.
    ///
    /// # Errors
    /// As [`matrix`](Weights::matrix).
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
        // `Source::weight` takes the layer's full name and appends `.weight`.
        let weight = scope.source.weight(&scope.prefix, &(out_features, in_features).into(), init)?;
        let bias = if bias { Some(scope.get("bias", out_features, bias_init)?) } else { None };
        Ok(Linear::from_weight(weight, bias))
    }

    /// Linear layers that share an input. `layers` has the name and the number of output features of each. Their
    /// initial values are those of [`linear_init`](Weights::linear_init).
    ///
    /// # Errors
    /// As [`matrix`](Weights::matrix) and [`LinearGroup::new`].
    pub fn linear_group(
        &mut self,
        layers: &[(&'static str, usize)],
        in_features: usize,
        bias: bool,
        init: Init,
    ) -> Result<LinearGroup> {
        let named_layer =
            |&(name, out): &(&'static str, usize)| Ok((name, self.linear_init(name, in_features, out, bias, init)?));
        LinearGroup::new(layers.iter().map(named_layer).collect::<Result<_>>()?)
    }

    /// A convolution `name`. Fresh parameters start with torch's initial values. Files hold the weight as
    /// (out, in / groups, height, width).
    ///
    /// # Errors
    /// As [`get`](Weights::get); [`Error::Argument`](trainable_candle_core::Error::Argument) if the number of groups is
    /// 0, or if the number of input or output channels is not a multiple of it.
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
        let weight = scope.source.get(scope.join("weight"), &shape, Init::Kaiming, Packing::ChannelsLast)?;
        let bias = if bias { Some(scope.get("bias", out_channels, Init::Fan(fan_in))?) } else { None };
        Conv2d::from_parameters(weight, bias, options)
    }

    /// A layer norm `name` over `features`. A fresh scale starts at 1, a fresh shift at 0.
    ///
    /// # Errors
    /// As [`get`](Weights::get).
    pub fn layer_norm(&mut self, name: &str, features: usize, eps: f64) -> Result<LayerNorm> {
        let (weight, bias) = self.scale_and_shift(name, features)?;
        Ok(LayerNorm { weight: Some(weight), bias: Some(bias), eps })
    }

    /// An RMS norm `name` over `features`. A fresh scale starts at 1.
    ///
    /// # Errors
    /// As [`get`](Weights::get).
    pub fn rms_norm(&mut self, name: &str, features: usize, eps: f64) -> Result<RmsNorm> {
        Ok(RmsNorm { weight: Some(self.pp(name).get("weight", features, Init::Constant(1.0))?), eps })
    }

    /// A group norm `name` over `channels`. A fresh scale starts at 1, a fresh shift at 0.
    ///
    /// # Errors
    /// As [`get`](Weights::get).
    pub fn group_norm(&mut self, name: &str, channels: usize, groups: usize, eps: f64) -> Result<GroupNorm> {
        let (weight, bias) = self.scale_and_shift(name, channels)?;
        Ok(GroupNorm { weight, bias, groups, eps })
    }

    /// The parameters `name.weight`, the scale, and `name.bias`, the shift.
    fn scale_and_shift(&mut self, name: &str, size: usize) -> Result<(Tensor, Tensor)> {
        let mut scope = self.pp(name);
        Ok((scope.get("weight", size, Init::Constant(1.0))?, scope.get("bias", size, Init::Constant(0.0))?))
    }
}
