//! [`Base`]: what an adapter reads of its layer: the frozen weight and bias, and the operation.

use trainable_candle_core::ops::conv::{Conv2dOptions, conv2d};
use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::{Error, Result, Tensor, WeightRef};

/// The operation of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// y = x Wᵀ + b with W (out, in).
    Linear,
    /// A convolution of channels-last images with W (out, kernel height, kernel width, in / groups).
    Conv2d(Conv2dOptions),
}

impl Operation {
    /// Apply the operation to `x` with the given weight and bias, which need not be the layer's own.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`], `DType` or `Device` if the operands do not fit, `Argument` if the
    /// weight of a convolution is quantized or streamed.
    pub fn apply<'a>(self, x: &Tensor, weight: impl Into<WeightRef<'a>>, bias: Option<&Tensor>) -> Result<Tensor> {
        match (self, weight.into()) {
            (Self::Linear, weight) => linear(x, weight, bias),
            (Self::Conv2d(options), WeightRef::Plain(weight)) => conv2d(x, weight, bias, options),
            (Self::Conv2d(_), WeightRef::Quantized(_) | WeightRef::Streamed(_)) => Err(Error::argument(
                "conv2d",
                "the convolution's weight is quantized or streamed, but only linear layers can have such a weight",
            )),
        }
    }
}

/// A layer's frozen weight and bias, and its operation.
#[derive(Clone, Copy)]
pub struct Base<'a> {
    /// The frozen weight: (out, in), or (out, kernel height, kernel width, in / groups).
    pub weight: WeightRef<'a>,
    /// The frozen bias, (out).
    pub bias: Option<&'a Tensor>,
    /// The operation on the input.
    pub operation: Operation,
}

impl Base<'_> {
    /// Compute the layer's result without an adapter.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`], `DType` or `Device` if the input does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.operation.apply(x, self.weight, self.bias)
    }

    /// The number of output features, or of output channels.
    pub fn rows(&self) -> usize {
        self.weight.dims().first().copied().unwrap_or(0)
    }

    /// The number of elements of the weight per output: the number of input features, or kernel height x kernel width x
    /// input channels per group.
    pub fn columns(&self) -> usize {
        self.weight.dims().iter().skip(1).product()
    }

    /// The number of input features, or of input channels per group.
    pub fn inputs(&self) -> usize {
        self.weight.dims().last().copied().unwrap_or(0)
    }

    /// The height and the width of a convolution's kernel; `None` for a linear layer.
    pub fn kernel(&self) -> Option<[usize; 2]> {
        match self.weight.dims() {
            &[_, height, width, _] => Some([height, width]),
            _ => None,
        }
    }

    /// The number of groups of channels; 1 for a linear layer.
    pub const fn groups(&self) -> usize {
        match self.operation {
            Operation::Linear => 1,
            Operation::Conv2d(options) => options.groups,
        }
    }
}
