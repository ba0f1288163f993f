//! Cases of convolutions. Images are (batch, height, width, channels), weights (out channels, kernel height, kernel
//! width, channels / groups), biases (out channels).

use super::add::CONV2D_ADD;
use super::{CONV2D, Conv2dOptions, conv2d, conv2d_add, conv2d_nchw};
use crate::ops::case::{Case, Entry};
use crate::ops::linear_group::frozen;
use crate::{Result, Tensor};

/// The plain form of a convolution of x[0] with the weight x[1] and the bias x[2], if there is one. In each group, it
/// multiplies the pixels that kernel tap (i, j) reads by `weight[:, i, j, :]`, and adds up the products of all taps.
fn plain(x: &[Tensor], options: Conv2dOptions) -> Result<Tensor> {
    let Conv2dOptions { stride, padding, dilation, groups } = options;
    let (weight, out) = (&x[1], x[1].dims()[0]);
    let mut padded = x[0].clone();
    for (dim, pad) in [(1, padding[0]), (2, padding[1])] {
        let mut dims = padded.dims().to_vec();
        dims[dim] = pad;
        let zeros = Tensor::zeros(dims, padded.dtype(), padded.device())?;
        padded = Tensor::cat(&[&zeros, &padded, &zeros], dim)?;
    }
    let kernel = [weight.dims()[1], weight.dims()[2]];
    // The height (`axis` = 0) or the width (`axis` = 1) of the result.
    let out_size = |axis: usize| (padded.dims()[axis + 1] - dilation[axis] * (kernel[axis] - 1) - 1) / stride[axis] + 1;
    let mut results = Vec::new();
    for group in 0..groups {
        let channels = weight.dims()[3];
        let image = padded.narrow(3, group * channels, channels)?;
        let weight = weight.narrow(0, group * (out / groups), out / groups)?;
        let mut sum: Option<Tensor> = None;
        for (i, j) in (0..kernel[0]).flat_map(|i| (0..kernel[1]).map(move |j| (i, j))) {
            // The arguments of `strided` are a dimension, the first index, the number of indices, and their distance.
            let lines = image.strided(1, i * dilation[0], out_size(0), stride[0] as isize)?;
            let pixels = lines.strided(2, j * dilation[1], out_size(1), stride[1] as isize)?;
            let tap = weight.narrow(1, i, 1)?.narrow(2, j, 1)?.reshape((out / groups, channels))?;
            let product = pixels.matmul(&tap.t()?)?;
            sum = Some(match sum {
                Some(sum) => sum.add(&product)?,
                None => product,
            });
        }
        results.extend(sum);
    }
    let y = Tensor::cat(&results.iter().collect::<Vec<_>>(), 3)?;
    x.get(2).map_or_else(|| Ok(y.clone()), |bias| y.add(bias))
}

/// A case of [`conv2d`]; `shapes` are those of the images, the weight and, if there is one, the bias.
fn case(label: &'static str, shapes: &[&[usize]], options: Conv2dOptions) -> Case {
    Case::new(label, shapes, move |x| conv2d(&x[0], &x[1], x.get(2), options)).plain(move |x| plain(x, options))
}

/// Cases of convolutions of x[0] with frozen weight and bias, plus the addend x[1]. The arguments of `case` are the
/// label, the shapes of x[0] and x[1], the size of the square kernel, and whether there is a bias. `frozen` makes
/// a constant of the given shape, with the dtype of x[0].
fn add_cases() -> Vec<Case> {
    let case = |label, shapes: [&[usize]; 2], kernel: usize, has_bias: bool| {
        let padding = [kernel / 2; 2];
        let options = Conv2dOptions { padding, ..Conv2dOptions::default() };
        let parameters = move |x: &[Tensor]| -> Result<(Tensor, Option<Tensor>)> {
            let (channels, out) = (x[0].dims()[3], x[1].dims()[3]);
            let bias = has_bias.then(|| frozen(&x[0], &[out])).transpose()?;
            Ok((frozen(&x[0], &[out, kernel, kernel, channels])?, bias))
        };
        let run = move |x: &[Tensor]| {
            let (weight, bias) = parameters(x)?;
            conv2d_add(&x[0], &weight, bias.as_ref(), options, &x[1])
        };
        let plain = move |x: &[Tensor]| {
            let (weight, bias) = parameters(x)?;
            conv2d(&x[0], &weight, bias.as_ref(), options)?.add(&x[1])
        };
        Case::new(label, &shapes, run).plain(plain)
    };
    vec![
        case("addend per pixel", [&[2, 3, 4, 3], &[2, 3, 4, 5]], 3, true),
        case("addend per image", [&[2, 3, 4, 3], &[2, 1, 1, 5]], 3, false),
        case("1x1", [&[2, 3, 2, 5], &[2, 3, 2, 3]], 1, true),
        // These two cases have numbers of channels that the CUDA kernels for tensor cores support. In the second, these
        // CUDA kernels split each sum over taps and channels among several thread blocks.
        case("tensor cores", [&[2, 5, 7, 8], &[2, 5, 7, 24]], 3, true),
        case("split sums", [&[2, 3, 3, 64], &[2, 1, 1, 24]], 3, true),
        case("no images", [&[0, 4, 4, 3], &[0, 4, 4, 2]], 3, true),
    ]
}

/// Registry entries of this folder.
pub static ENTRIES: &[Entry] = &[
    Entry { info: &CONV2D_ADD, cases: add_cases },
    Entry {
        info: &CONV2D,
        cases: || {
            let default = Conv2dOptions::default();
            let padded = Conv2dOptions { padding: [1, 1], ..default };
            let no_defaults = Conv2dOptions { stride: [2, 1], padding: [2, 1], dilation: [1, 2], groups: 2 };
            vec![
                case("3x3", &[&[2, 5, 4, 3], &[4, 3, 3, 3], &[4]], padded),
                case("no bias, not square", &[&[1, 4, 5, 2], &[3, 2, 3, 2]], default),
                case("1x1", &[&[2, 3, 2, 5], &[3, 1, 1, 5], &[3]], default),
                case("1x1 strided", &[&[1, 5, 4, 3], &[2, 1, 1, 3], &[2]], Conv2dOptions { stride: [2, 2], ..default }),
                case("stride, padding, dilation, groups", &[&[2, 5, 6, 4], &[6, 3, 2, 2], &[6]], no_defaults),
                case("depthwise", &[&[1, 4, 4, 3], &[3, 3, 3, 1], &[3]], Conv2dOptions { groups: 3, ..padded }),
                case(
                    "stride larger than the kernel",
                    &[&[1, 7, 7, 2], &[2, 2, 2, 2]],
                    Conv2dOptions { stride: [3, 4], ..default },
                ),
                // Here images are (batch, channels, height, width), and the weight is (out channels, channels, kernel
                // height, kernel width). `plain` takes channels-last tensors, so this case is tested without it.
                Case::new("torch's layout", &[&[2, 3, 4, 5], &[4, 3, 3, 3], &[4]], move |x| {
                    conv2d_nchw(&x[0], &x[1], x.get(2), padded)
                }),
                Case::new("no images", &[&[0, 4, 4, 3], &[2, 3, 3, 3], &[2]], move |x| {
                    conv2d(&x[0], &x[1], x.get(2), padded)
                }),
            ]
        },
    },
];
