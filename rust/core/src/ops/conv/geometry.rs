//! Sizes of a convolution.

use crate::{Error, Result};

/// Stride, padding, dilation and groups of a convolution. Arrays are [height, width].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2dOptions {
    /// Distance in the image, in pixels, between the windows of neighbouring pixels of the result.
    pub stride: [usize; 2],
    /// Number of zero pixels before the first pixel of the image, and as many after its last pixel.
    pub padding: [usize; 2],
    /// Distance in the image, in pixels, between the pixels that adjacent elements of the kernel multiply.
    pub dilation: [usize; 2],
    /// Number of groups of channels; the groups are convolved separately.
    pub groups: usize,
}

impl Default for Conv2dOptions {
    fn default() -> Self {
        Self { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1 }
    }
}

/// The sizes of one convolution, whose input, weight, bias and options fit together. Arrays are [height, width].
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub batch: usize,
    pub input: [usize; 2],
    pub channels: usize,
    pub kernel: [usize; 2],
    pub output: [usize; 2],
    pub out_channels: usize,
    pub has_bias: bool,
    pub options: Conv2dOptions,
}

impl Geometry {
    /// Computes the size of the result from the dimensions of the input, the weight and the bias.
    ///
    /// # Errors
    /// As [`conv2d`](super::conv2d), if dimensions or options do not fit.
    pub fn new(
        op: &'static str,
        [batch, height, width, channels]: [usize; 4],
        [out_channels, kernel_height, kernel_width, per_group]: [usize; 4],
        bias: Option<&[usize]>,
        options: Conv2dOptions,
    ) -> Result<Self> {
        let Conv2dOptions { stride, padding, dilation, groups } = options;
        if stride.contains(&0) || dilation.contains(&0) || groups == 0 {
            return Err(Error::argument(
                op,
                format!("stride is {stride:?}, dilation {dilation:?}, groups {groups}; each must be at least 1"),
            ));
        }
        if !out_channels.is_multiple_of(groups) || per_group.checked_mul(groups) != Some(channels) {
            return Err(Error::shape(
                op,
                format!(
                    "the input has {channels} channels; the weight has {out_channels} output channels and {per_group} input \
                     channels per group, with {groups} groups: expected {groups} x {per_group} input channels, and a multiple of \
                     {groups} output channels"
                ),
            ));
        }
        if let Some(bias) = bias.filter(|&dims| dims != [out_channels]) {
            return Err(Error::shape(op, format!("the bias has shape {bias:?}, expected ({out_channels},)")));
        }
        let (input, kernel) = ([height, width], [kernel_height, kernel_width]);
        let mut output = [0; 2];
        for (i, name) in ["height", "width"].into_iter().enumerate() {
            let too_large = || {
                Error::shape(
                    op,
                    format!(
                        "a kernel of {name} {} with dilation {} does not fit in an image of {name} {} with padding {}",
                        kernel[i], dilation[i], input[i], padding[i]
                    ),
                )
            };
            // The distance in the image between the first and the last kernel tap.
            let reach =
                kernel[i].checked_sub(1).and_then(|last| last.checked_mul(dilation[i])).ok_or_else(too_large)?;
            let padded = padding[i].checked_mul(2).and_then(|p| p.checked_add(input[i])).ok_or_else(too_large)?;
            output[i] = padded.checked_sub(1).and_then(|p| p.checked_sub(reach)).ok_or_else(too_large)? / stride[i] + 1;
        }
        Ok(Self { batch, input, channels, kernel, output, out_channels, has_bias: bias.is_some(), options })
    }

    pub const fn groups(&self) -> usize {
        self.options.groups
    }

    pub const fn channels_per_group(&self) -> usize {
        self.channels / self.options.groups
    }

    pub const fn out_channels_per_group(&self) -> usize {
        self.out_channels / self.options.groups
    }

    /// Number of pixels of the result, of all images together.
    pub const fn pixels(&self) -> usize {
        self.batch * self.output[0] * self.output[1]
    }

    /// Number of elements of the weight that belong to one output channel. A window of the image has as many elements
    /// in the channels of one group.
    pub const fn row_len(&self) -> usize {
        self.kernel[0] * self.kernel[1] * self.channels_per_group()
    }

    pub const fn input_dims(&self) -> [usize; 4] {
        [self.batch, self.input[0], self.input[1], self.channels]
    }

    pub const fn weight_dims(&self) -> [usize; 4] {
        [self.out_channels, self.kernel[0], self.kernel[1], self.channels_per_group()]
    }

    pub const fn result_dims(&self) -> [usize; 4] {
        [self.batch, self.output[0], self.output[1], self.out_channels]
    }

    /// Whether the convolution is a matrix product: the kernel is 1 × 1, without stride, padding or groups. Such a
    /// kernel has a single tap, so the dilation has no effect.
    pub fn is_pointwise(&self) -> bool {
        let pointwise = Conv2dOptions { dilation: self.options.dilation, ..Conv2dOptions::default() };
        self.kernel == [1, 1] && self.options == pointwise
    }

    /// Whether each channel is convolved separately: each group has one input channel and one output channel.
    pub const fn is_depthwise(&self) -> bool {
        self.channels == self.options.groups && self.out_channels == self.options.groups
    }
}
