//! [`Conv2d`]: convolution of channels-last images over frozen or trainable parameters, with a slot for an adapter.

use trainable_candle_core::ops::conv::{Conv2dOptions, conv2d_add};
use trainable_candle_core::{DType, Device, Error, Result, Tensor, Var, Weight};

use crate::base::{Base, Operation};
use crate::init;
use crate::slot::AdapterSlot;

/// A two-dimensional convolution. `Conv2d<Tensor>` is frozen, `Conv2d<Var>` trainable.
///
/// Images and weight are channels-last in memory, as [`conv2d`](trainable_candle_core::ops::conv::conv2d) takes them.
/// Files hold the weight as (out, in / groups, kernel height, kernel width), see [`weight_to_file`].
pub struct Conv2d<T: AsRef<Tensor>> {
    /// The weight, (out_channels, kernel height, kernel width, in_channels / groups).
    pub weight: T,
    /// The bias, (out_channels).
    pub bias: Option<T>,
    /// Stride, padding, dilation, groups.
    pub options: Conv2dOptions,
    adapter: AdapterSlot,
}

/// Copy a file's weight, (out, in / groups, kernel height, kernel width), into a layer's layout, (out, kernel height,
/// kernel width, in / groups).
///
/// # Errors
/// [`Error::Shape`] if the weight does not have four dimensions.
pub fn weight_from_file(weight: &Tensor) -> Result<Tensor> {
    weight.permute(&[0, 2, 3, 1])?.contiguous()
}

/// View a layer's weight in the layout of files: (out, in / groups, kernel height, kernel width).
///
/// # Errors
/// [`Error::Shape`] if the weight does not have four dimensions.
pub fn weight_to_file(weight: &Tensor) -> Result<Tensor> {
    weight.permute(&[0, 3, 1, 2])
}

impl Conv2d<Var> {
    /// Make a trainable f32 layer with torch's initial values: weight and bias are uniform in ±1/√fan_in, where fan_in
    /// = (in_channels / groups) · kernel height · kernel width. `kernel` is (height, width).
    ///
    /// # Errors
    /// [`Error::Argument`] if `groups` is 0 or does not divide both numbers of channels, [`Error::OutOfMemory`] if the
    /// parameters do not fit into the device's memory.
    pub fn new(
        in_channels: usize,
        out_channels: usize,
        kernel: [usize; 2],
        options: Conv2dOptions,
        device: &Device,
    ) -> Result<Self> {
        let per_group = channels_per_group(in_channels, out_channels, options.groups)?;
        let dims = (out_channels, kernel[0], kernel[1], per_group);
        let weight = init::kaiming_uniform(dims, DType::F32, device)?;
        let fan_in = per_group * kernel[0] * kernel[1];
        let bias = init::uniform_by_fan(fan_in, out_channels, DType::F32, device)?;
        Self::from_parameters(Var::from_tensor(&weight)?, Some(Var::from_tensor(&bias)?), options)
    }

    /// The trainable parameters: weight, then bias.
    pub fn vars(&self) -> Vec<Var> {
        std::iter::once(self.weight.clone()).chain(self.bias.clone()).collect()
    }
}

impl<T: AsRef<Tensor>> Conv2d<T> {
    /// Make a layer over given parameters: `weight` (out_channels, kernel height, kernel width, in_channels / groups)
    /// and `bias` (out_channels).
    ///
    /// # Errors
    /// [`Error::Shape`] if the weight does not have four dimensions or the bias does not fit it.
    pub fn from_parameters(weight: T, bias: Option<T>, options: Conv2dOptions) -> Result<Self> {
        let dims = weight.as_ref().dims();
        if dims.len() != 4 {
            let expected = "(out channels, kernel height, kernel width, in channels / groups)";
            return Err(Error::shape("Conv2d", format!("the weight has shape {dims:?}, expected {expected}")));
        }
        if let Some(bias) = bias.as_ref().map(AsRef::as_ref).filter(|b| b.dims() != [dims[0]]) {
            return Err(Error::shape(
                "Conv2d",
                format!("the bias has shape {:?}, expected ({},)", bias.dims(), dims[0]),
            ));
        }
        Ok(Self { weight, bias, options, adapter: AdapterSlot::default() })
    }

    /// Compute the layer's result, with the adapter if one is attached: `x (B, H, W, in_channels)` →
    /// `(B, OH, OW, out_channels)`.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`] or [`Error::Device`] if the input does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.adapter.forward(x, &self.base())
    }

    /// Compute [`forward`](Self::forward) of `x (B, H, W, in_channels)` and add `addend`, which has the shape
    /// `(B, OH, OW, out_channels)` or `(B, 1, 1, out_channels)`. Without an adapter, one operation may compute both;
    /// [`conv2d_add`] says when.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), also if the addend does not fit.
    pub fn forward_add(&self, x: &Tensor, addend: &Tensor) -> Result<Tensor> {
        if self.slot().get().is_some() {
            return self.forward(x)?.add(addend);
        }
        conv2d_add(x, self.weight.as_ref(), self.bias.as_ref().map(AsRef::as_ref), self.options, addend)
    }

    /// The number of channels of the input.
    pub fn in_channels(&self) -> usize {
        self.weight.as_ref().dims().last().copied().unwrap_or(0) * self.options.groups
    }

    /// The number of channels of the result.
    pub fn out_channels(&self) -> usize {
        self.weight.as_ref().dims().first().copied().unwrap_or(0)
    }

    /// The weight that the layer computes with: its own weight, or the merged weight while an adapter is merged.
    pub fn effective_weight(&self) -> Weight {
        self.adapter.effective_weight(self.weight.as_ref().into())
    }

    /// The layer's parameters and operation, for adapters.
    pub fn base(&self) -> Base<'_> {
        Base {
            weight: self.weight.as_ref().into(),
            bias: self.bias.as_ref().map(AsRef::as_ref),
            operation: Operation::Conv2d(self.options),
        }
    }

    /// The place for the layer's adapter.
    pub(crate) const fn slot(&self) -> &AdapterSlot {
        &self.adapter
    }
}

/// Compute the number of input channels of each group.
///
/// # Errors
/// [`Error::Argument`] if `groups` is 0 or does not divide both numbers of channels.
pub(crate) fn channels_per_group(in_channels: usize, out_channels: usize, groups: usize) -> Result<usize> {
    if groups == 0 || !in_channels.is_multiple_of(groups) || !out_channels.is_multiple_of(groups) {
        return Err(Error::argument(
            "Conv2d",
            format!("{in_channels} input and {out_channels} output channels do not divide into {groups} groups"),
        ));
    }
    Ok(in_channels / groups)
}
