//! Norms of rows on a CUDA device, alone and fused with residual sums, compared with the CPU in f64. Fused norms are
//! also compared with separate kernels on the same device.

use trainable_candle_core::checkpoint::{Policy, checkpoint_with};
use trainable_candle_core::ops::norm::{add_layer_norm, add_rms_norm, layer_norm, modulated_layer_norm, rms_norm};
use trainable_candle_core::raw::to_f64_vec;
use trainable_candle_core::{DType, Result, Tensor};

use super::gpu;
use super::products::{TOLERANCE, compare, random};
use super::walk::value_and_gradients;

const EPS: f64 = 1e-5;
/// The number of trailing dimensions over which [`layer_norm`] and [`add_layer_norm`] normalise: each row by itself.
const NORMED_DIMS: usize = 1;

/// Numbers of rows and their lengths. A thread gets few or many packs (accesses of 16 bytes), a thread block has
/// several rows or a row has several warps, some lengths are no multiple of a pack, and some rows are too long for the
/// registers of the threads that share a row.
///
/// The gradients of the results (`weights_like` of the module `walk`) repeat seven numbers, whose sum is zero. As no
/// length is a multiple of seven, a column has each of these numbers once in seven consecutive rows. So with a multiple
/// of seven rows, every column's sum, which is a bias's gradient, would be zero. No number of rows here is such a
/// multiple.
const SIZES: [[usize; 2]; 8] =
    [[1024, 1280], [4096, 640], [5000, 1280], [79, 768], [3, 12_808], [2, 40_000], [5, 12_301], [300, 33]];

/// The layer norm of x[0] + x[1] over the last dimension, with weight x[2] and bias x[3], plus the sum itself.
fn add_and_norm(x: &[Tensor]) -> Result<Tensor> {
    let (sum, y) = add_layer_norm(&x[0], &x[1], NORMED_DIMS, Some(&x[2]), Some(&x[3]), EPS)?;
    y.add(&sum)
}

#[test]
#[ignore = "needs a CUDA device"]
fn norms_of_rows_equal_the_cpu() {
    let device = gpu().unwrap();
    for [rows, len] in SIZES {
        for (dtype, tolerance) in TOLERANCE {
            // Normally distributed, with standard deviation 1.0.
            let inputs = [&[rows, len][..], &[rows, len], &[len], &[len]].map(|dims| random(dims, 1.0, dtype));
            let [x, residual, weight, bias] = &inputs;
            let of = |name: &str| format!("{name} of {rows} x {len} in {}", dtype.as_str());
            let layer = |x: &[Tensor]| layer_norm(&x[0], NORMED_DIMS, x.get(1), x.get(2), EPS);
            let parameters = [x.clone(), weight.clone(), bias.clone()];
            compare(&of("layer norm"), &layer, &parameters, &device, tolerance);
            // "Beside" something: x is used a second time, so its gradient has a second term.
            compare(&of("layer norm beside x"), &|x| layer(x)?.add(&x[0]), &parameters, &device, tolerance);
            let beside = |x: &[Tensor]| layer(x)?.add(&x[0])?.add(&x[0].sqr()?);
            compare(&of("layer norm beside a sum"), &beside, &parameters, &device, tolerance);
            // The gradient of the sum is a view that repeats one value along each row.
            let repeated = |x: &[Tensor]| layer(x)?.add(&x[0])?.mean(&[1], false);
            compare(&of("mean of a layer norm beside x"), &repeated, &parameters, &device, tolerance);
            let rms = |x: &[Tensor]| rms_norm(&x[0], x.get(1), EPS)?.add(&x[0]);
            compare(&of("RMS norm"), &rms, &[x.clone(), weight.clone()], &device, tolerance);
            // Norms of sums get twice the tolerance, because the sum is rounded, too.
            let rms_of_sum = |x: &[Tensor]| add_rms_norm(&x[0], &x[1], None, EPS).map(|(_, y)| y);
            compare(&of("RMS norm of a sum"), &rms_of_sum, &[x.clone(), residual.clone()], &device, 2.0 * tolerance);
            compare(&of("layer norm of a sum"), &add_and_norm, &inputs, &device, 2.0 * tolerance);
            let mut mixed = inputs.clone();
            for parameter in &mut mixed[2..] {
                *parameter = parameter.to_dtype(DType::F32).unwrap();
            }
            compare(&of("layer norm of a sum, f32 parameters"), &add_and_norm, &mixed, &device, 2.0 * tolerance);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn modulated_norms_equal_the_cpu() {
    let device = gpu().unwrap();
    for [batch, positions, len] in [[2, 1024, 1280], [3, 79, 1536], [64, 16, 96], [2, 5, 12_301], [5, 1, 33]] {
        for (dtype, tolerance) in TOLERANCE {
            let inputs =
                [&[batch, positions, len][..], &[batch, len], &[batch, len]].map(|dims| random(dims, 1.0, dtype));
            let what = format!("{batch} x {positions} x {len} in {}", dtype.as_str());
            // The last two inputs are scale and shift.
            let run = |x: &[Tensor]| modulated_layer_norm(&x[0], &x[1], &x[2], EPS);
            compare(&what, &run, &inputs, &device, tolerance);
            compare(&format!("{what}, beside x"), &|x| run(x)?.add(&x[0]), &inputs, &device, tolerance);
        }
    }
}

/// The fused kernel rounds the sum to the dtype before it normalises the sum, as separate kernels do. The recomputation
/// of a checkpoint runs the same kernels as the first run.
#[test]
#[ignore = "needs a CUDA device"]
fn a_fused_residual_norm_equals_sum_and_norm_bit_for_bit() {
    let device = gpu().unwrap();
    let apart = |x: &[Tensor]| {
        let sum = x[0].add(&x[1])?;
        layer_norm(&sum, NORMED_DIMS, Some(&x[2]), Some(&x[3]), EPS)?.add(&sum)
    };
    let checkpointed = |policy: Policy| {
        move |x: &[Tensor]| {
            let inputs: Vec<&Tensor> = x.iter().collect();
            Ok(checkpoint_with(policy, |x| Ok(vec![add_and_norm(x)?]), &inputs)?.remove(0))
        }
    };
    for [rows, len] in SIZES {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [&[rows, len][..], &[rows, len], &[len], &[len]]
                .map(|dims| random(dims, 1.0, dtype).to_device(&device).unwrap());
            let bits = |function: &dyn Fn(&[Tensor]) -> Result<Tensor>| {
                let (value, grads) = value_and_gradients(function, &inputs).unwrap();
                let parts = std::iter::once(to_f64_vec(value.raw()).unwrap()).chain(grads);
                parts.map(|part| part.iter().map(|v| v.to_bits()).collect::<Vec<_>>()).collect::<Vec<_>>()
            };
            let together = bits(&add_and_norm);
            assert!(together == bits(&apart), "{rows} x {len} in {}", dtype.as_str());
            for policy in [Policy::Full, Policy::Selective] {
                assert!(together == bits(&checkpointed(policy)), "{policy:?}, {rows} x {len} in {}", dtype.as_str());
            }
        }
    }
}
