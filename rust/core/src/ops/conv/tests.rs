//! Tests of convolutions against plain loops in f64: options, images in several parts, layouts, threads, errors.
//!
//! Images are (batch, height, width, channels), weights are (output channels, kernel height, kernel width, input
//! channels of a group). The CPU form computes a large image in several parts.

use super::cpu::{patch, stencil};
use super::*;
use crate::cpu::pool::tests::with_1_and_n_threads;
use crate::raw::{from_vec, to_f64_vec};
use crate::{DType, Var, grad};

/// A tensor of numbers from -1 to 1.
fn numbers(dims: &[usize], seed: usize, dtype: DType) -> Tensor {
    let count = dims.iter().product::<usize>();
    let values: Vec<f64> = (0..count).map(|i| ((i + seed) * 7919 % 10_007) as f64 / 5003.0 - 1.0).collect();
    Tensor::constant(from_vec(values, dims).to_dtype(dtype).unwrap())
}

fn values(t: &Tensor) -> Vec<f64> {
    to_f64_vec(t.raw()).unwrap()
}

/// Returns the result, and the gradients of `x` and `weight`, computed by plain loops in f64. `g(i)` is the gradient of
/// element i of the result.
fn plain_loops(x: &Tensor, weight: &Tensor, options: Conv2dOptions, g: impl Fn(usize) -> f64) -> [Vec<f64>; 3] {
    let Conv2dOptions { stride, padding, dilation, groups } = options;
    let (&[batch, height, width, channels], &[out, kh, kw, per_group]) = (x.dims(), weight.dims()) else { panic!() };
    let (x, weight) = (values(x), values(weight));
    let oh = (height + 2 * padding[0] - dilation[0] * (kh - 1) - 1) / stride[0] + 1;
    let ow = (width + 2 * padding[1] - dilation[1] * (kw - 1) - 1) / stride[1] + 1;
    let mut y = vec![0.0; batch * oh * ow * out];
    let (mut grad_x, mut grad_weight) = (vec![0.0; x.len()], vec![0.0; weight.len()]);
    for (at, y) in y.iter_mut().enumerate() {
        let (o, pixel) = (at % out, at / out);
        let (b, line, column) = (pixel / (oh * ow), pixel / ow % oh, pixel % ow);
        for (i, j) in (0..kh).flat_map(|i| (0..kw).map(move |j| (i, j))) {
            // The position in the padded image.
            let (h, w) = (line * stride[0] + i * dilation[0], column * stride[1] + j * dilation[1]);
            if h < padding[0] || w < padding[1] || h - padding[0] >= height || w - padding[1] >= width {
                continue;
            }
            let x_start =
                ((b * height + h - padding[0]) * width + w - padding[1]) * channels + o / (out / groups) * per_group;
            let weight_start = ((o * kh + i) * kw + j) * per_group;
            for c in 0..per_group {
                *y += x[x_start + c] * weight[weight_start + c];
                grad_x[x_start + c] += g(at) * weight[weight_start + c];
                grad_weight[weight_start + c] += g(at) * x[x_start + c];
            }
        }
    }
    [y, grad_x, grad_weight]
}

/// Asserts that each difference is at most `tolerance` times the larger of 1 and the largest expected magnitude.
fn assert_close(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(1.0, |m: f64, e| m.max(e.abs()));
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= tolerance * largest, "element {i}: {f}, expected {e}");
    }
}

/// Asserts that [`conv2d`] and its gradients match [`plain_loops`].
fn assert_like_plain_loops(
    x_dims: &[usize],
    weight_dims: &[usize],
    options: Conv2dOptions,
    dtype: DType,
    tolerance: f64,
) {
    let (x, weight) = (numbers(x_dims, 0, dtype), numbers(weight_dims, 3, dtype));
    let (x, weight) = (Var::from_tensor(&x).unwrap(), Var::from_tensor(&weight).unwrap());
    let y = conv2d(&x, &weight, None, options).unwrap();
    let g = numbers(y.dims(), 11, dtype);
    let g_values = values(&g);
    let [expected, expected_x, expected_weight] = plain_loops(&x, &weight, options, |at| g_values[at]);
    assert_close(&values(&y), &expected, tolerance);
    let retain_graph = false;
    let grads = grad(&y, &[&x, &weight], Some(&g), retain_graph).unwrap();
    assert_close(&values(grads[0].as_ref().unwrap()), &expected_x, tolerance);
    assert_close(&values(grads[1].as_ref().unwrap()), &expected_weight, tolerance);
}

#[test]
fn every_option_matches_plain_loops() {
    let default = Conv2dOptions::default();
    for (x, weight, options) in [
        ([2, 6, 5, 4], [3, 3, 3, 4], default),
        ([2, 6, 5, 4], [3, 1, 1, 4], default),
        ([1, 6, 5, 4], [3, 1, 1, 4], Conv2dOptions { padding: [1, 2], ..default }),
        ([2, 6, 7, 4], [6, 3, 2, 2], Conv2dOptions { stride: [2, 3], padding: [1, 0], dilation: [1, 2], groups: 2 }),
        ([2, 7, 4, 6], [6, 3, 3, 1], Conv2dOptions { padding: [1, 1], groups: 6, ..default }),
        // Some windows lie in the padding alone, and the kernel is as wide as the padded image.
        ([1, 2, 3, 1], [2, 2, 11, 1], Conv2dOptions { padding: [3, 4], ..default }),
    ] {
        assert_like_plain_loops(&x, &weight, options, DType::F64, 1e-13);
        assert_like_plain_loops(&x, &weight, options, DType::F32, 1e-6);
        assert_like_plain_loops(&x, &weight, options, DType::F16, 2e-3);
        assert_like_plain_loops(&x, &weight, options, DType::BF16, 1e-2);
    }
}

#[test]
fn an_image_in_several_parts_matches_plain_loops() {
    let options = Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() };
    let (x, weight) = ([2, 61, 103, 130], [3, 3, 3, 130]);
    let geometry = Geometry::new("test", x, weight, None, options).unwrap();
    // The parts of the result. A phase is a set of positions that use the same elements of the kernel; the forward pass
    // has only one, with all positions. 130 is the number of channels.
    let rects = patch::rects(&stencil::Stencil::forward(&geometry).phases[0], 130);
    let (lines, columns) = (&rects[0].lines, &rects[0].columns);
    assert!(lines.len() < 61 && columns.len() < 103, "parts must cut lines and columns: {lines:?} {columns:?}");
    assert_like_plain_loops(&x, &weight, options, DType::F64, 1e-12);
    assert_like_plain_loops(
        &x,
        &weight,
        Conv2dOptions { stride: [1, 2], dilation: [2, 1], ..options },
        DType::F32,
        1e-5,
    );
}

#[test]
fn few_and_many_channels_match_plain_loops() {
    // The CPU form packs the weight into panels. A panel is for a block of the channels of y (forward pass) or of the
    // gradient of x (backward pass): as many channels as a few vector registers have lanes. The cases have fewer
    // channels than one register has lanes, and more channels than a panel.
    let options = Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() };
    for (channels, out, groups) in [(1, 1, 1), (5, 37, 1), (33, 13, 1), (70, 66, 2), (12, 12, 4), (8, 16, 8), (7, 7, 7)]
    {
        let (x, weight) = ([2, 6, 19, channels], [out, 3, 3, channels / groups]);
        for stride in [[1, 1], [2, 1], [3, 2]] {
            assert_like_plain_loops(&x, &weight, Conv2dOptions { stride, groups, ..options }, DType::F64, 1e-13);
            assert_like_plain_loops(&x, &weight, Conv2dOptions { stride, groups, ..options }, DType::F32, 1e-6);
        }
    }
}

#[test]
fn conv2d_nchw_is_conv2d_with_permuted_dimensions() {
    let options = Conv2dOptions { stride: [2, 1], padding: [1, 0], ..Conv2dOptions::default() };
    let (x, weight) = (numbers(&[2, 5, 6, 3], 0, DType::F64), numbers(&[4, 3, 2, 3], 1, DType::F64));
    let bias = numbers(&[4], 2, DType::F64);
    let channels_last = conv2d(&x, &weight, Some(&bias), options).unwrap();
    let to_nchw = [0, 3, 1, 2];
    let nchw =
        conv2d_nchw(&x.permute(&to_nchw).unwrap(), &weight.permute(&to_nchw).unwrap(), Some(&bias), options).unwrap();
    assert_eq!(nchw.dims(), [2, 4, 3, 5]);
    assert_eq!(values(&nchw), values(&channels_last.permute(&to_nchw).unwrap()));
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let options = Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() };
    let (x, weight) = (numbers(&[2, 40, 40, 32], 0, DType::F32), numbers(&[48, 3, 3, 32], 1, DType::F32));
    let (one, many) = with_1_and_n_threads(4, || {
        let (x, weight) = (Var::from_tensor(&x).unwrap(), Var::from_tensor(&weight).unwrap());
        let y = conv2d(&x, &weight, None, options).unwrap();
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        [values(&y), values(&grads.get(&x).unwrap()), values(&grads.get(&weight).unwrap())]
    });
    assert_eq!(one, many);
}

#[test]
fn empty_convolutions_give_empty_results_or_the_bias() {
    let default = Conv2dOptions::default();
    let conv = |x: &[usize], weight: &[usize], bias: &[usize]| {
        let bias = numbers(bias, 5, DType::F32);
        conv2d(&numbers(x, 0, DType::F32), &numbers(weight, 1, DType::F32), Some(&bias), default).unwrap()
    };
    assert_eq!(conv(&[0, 4, 4, 3], &[2, 3, 3, 3], &[2]).dims(), [0, 2, 2, 2]);
    assert_eq!(conv(&[1, 4, 4, 3], &[0, 3, 3, 3], &[0]).dims(), [1, 2, 2, 0]);
    // One pixel with two output channels.
    let no_channels = conv(&[1, 3, 3, 0], &[2, 3, 3, 0], &[2]);
    assert_eq!(values(&no_channels), values(&numbers(&[2], 5, DType::F32)));
}

#[test]
fn wrong_operands_and_options_are_errors() {
    let default = Conv2dOptions::default();
    let error_of = |x: &[usize], weight: &[usize], options| {
        conv2d(&numbers(x, 0, DType::F32), &numbers(weight, 1, DType::F32), None, options).unwrap_err()
    };
    let (x, weight) = ([1, 4, 4, 3], [2, 3, 3, 3]);
    assert!(matches!(error_of(&x[1..], &weight, default), Error::Shape { .. }));
    assert!(matches!(error_of(&x, &[2, 3, 3, 4], default), Error::Shape { .. }));
    // Three groups do not divide two output channels.
    assert!(matches!(error_of(&x, &[2, 3, 3, 1], Conv2dOptions { groups: 3, ..default }), Error::Shape { .. }));
    let message = error_of(&x, &[2, 3, 5, 3], default).to_string();
    assert!(message.starts_with("conv2d: a kernel of width 5") && message.contains("width 4"), "{message}");
    for options in [
        Conv2dOptions { stride: [0, 1], ..default },
        Conv2dOptions { dilation: [1, 0], ..default },
        Conv2dOptions { groups: 0, ..default },
    ] {
        assert!(matches!(error_of(&x, &weight, options), Error::Argument { .. }));
    }
    assert!(matches!(
        error_of(&x, &weight, Conv2dOptions { padding: [usize::MAX, 0], ..default }),
        Error::Shape { .. }
    ));
    assert!(matches!(
        error_of(&x, &weight, Conv2dOptions { padding: [1 << 40, 1 << 40], ..default }),
        Error::OutOfMemory { .. }
    ));
    let (x, weight) = (numbers(&x, 0, DType::F32), numbers(&weight, 1, DType::F32));
    // The weight has two output channels.
    let bias = numbers(&[3], 0, DType::F32);
    assert!(matches!(conv2d(&x, &weight, Some(&bias), default), Err(Error::Shape { .. })));
    let bf16_weight = weight.to_dtype(DType::BF16).unwrap();
    assert!(matches!(conv2d(&x, &bf16_weight, None, default), Err(Error::DType { .. })));
    // A vector is no weight.
    assert!(matches!(conv2d_nchw(&x, &bias, None, default), Err(Error::Shape { .. })));
}
