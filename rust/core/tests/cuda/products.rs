//! Convolutions and linear layers on a CUDA device at the sizes of models, compared with the CPU in f64.

use trainable_candle_core::ops::conv::{Conv2dOptions, conv2d};
use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::ops::linear_group::{LinearGroup, LowRank, linear_group};
use trainable_candle_core::ops::lora::{LoraWeights, dora_linear, lora_linear};
use trainable_candle_core::raw::to_f64_vec;
use trainable_candle_core::{DType, Device, FlatBuffer, Result, Tensor, compute};

use super::gpu;
use super::walk::{close, value_and_gradients};

/// For each dtype, the largest permitted difference between a result and the f64 result of the same rounded inputs,
/// relative to the largest value of the f64 result.
pub(super) const TOLERANCE: [(DType, f64); 3] = [(DType::F32, 2e-5), (DType::F16, 2e-3), (DType::BF16, 1.6e-2)];

/// Normally distributed values with mean 0 and standard deviation `std`, rounded to `dtype`.
pub(super) fn random(dims: &[usize], std: f64, dtype: DType) -> Tensor {
    Tensor::randn(0.0, std, dims, DType::F32, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

pub(super) type Function<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

/// Compare value and gradients of a function on the GPU in the dtype of `inputs` with those on the CPU in f64.
pub(super) fn compare(what: &str, function: Function<'_>, inputs: &[Tensor], device: &Device, tolerance: f64) {
    compare_with(what, function, &in_f64(function, inputs), inputs, device, tolerance);
}

/// Value and gradients of a function on the CPU in f64.
pub(super) fn in_f64(function: Function<'_>, inputs: &[Tensor]) -> (Tensor, Vec<Vec<f64>>) {
    let wide: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
    value_and_gradients(function, &wide).unwrap()
}

/// Compare value and gradients of a function on the GPU in the dtype of `inputs` with expected value and gradients.
/// The gradients may differ by twice the tolerance.
pub(super) fn compare_with(
    what: &str,
    function: Function<'_>,
    (expected, expected_grads): &(Tensor, Vec<Vec<f64>>),
    inputs: &[Tensor],
    device: &Device,
    tolerance: f64,
) {
    let moved: Vec<Tensor> = inputs.iter().map(|x| x.to_device(device).unwrap()).collect();
    let (value, grads) = value_and_gradients(function, &moved).unwrap();
    assert_eq!(value.dims(), expected.dims(), "{what}");
    let expected = to_f64_vec(expected.raw()).unwrap();
    near(what, &to_f64_vec(value.raw()).unwrap(), &expected, tolerance);
    for (index, (found, expected)) in grads.iter().zip(expected_grads).enumerate() {
        near(&format!("{what}: gradient of input {index}"), found, expected, 2.0 * tolerance);
    }
}

/// [`close`] with a tolerance relative to the largest magnitude in `expected`, even if this is small. If all of
/// `expected` is 0, the tolerance is absolute.
pub(super) fn near(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    let largest = expected.iter().fold(0f64, |m, e| m.max(e.abs()));
    let largest = if largest == 0.0 { 1.0 } else { largest };
    let scaled = |values: &[f64]| values.iter().map(|v| v / largest).collect::<Vec<_>>();
    close(what, &scaled(found), &scaled(expected), tolerance).unwrap();
}

/// Every kernel for convolutions, also those of compute capability 9.0. The cases have incomplete tiles, sums that few
/// or many thread blocks share, strides, dilations, and numbers of channels that are no multiple of a kernel's step.
#[test]
#[ignore = "needs a CUDA device"]
fn convolutions_equal_the_cpu() {
    let device = gpu().unwrap();
    let padded = Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() };
    let halved = Conv2dOptions { stride: [2, 2], ..padded };
    let wide = Conv2dOptions { padding: [4, 2], dilation: [2, 1], ..padded };
    // Images (batch, height, width, in_channels), weights (out_channels, kernel height, kernel width, in_channels).
    let cases = [
        ([1, 32, 32, 320], [640, 3, 3, 320], padded),
        ([2, 16, 16, 64], [96, 3, 3, 64], padded),
        ([1, 64, 64, 128], [128, 3, 3, 128], padded),
        ([1, 33, 17, 72], [40, 3, 3, 72], padded),
        ([1, 8, 8, 640], [320, 3, 3, 640], padded),
        ([2, 32, 32, 128], [128, 3, 3, 128], halved),
        ([1, 15, 17, 64], [32, 3, 3, 64], halved),
        ([2, 12, 20, 64], [24, 5, 5, 64], wide),
        ([1, 20, 20, 64], [64, 1, 1, 64], Conv2dOptions { stride: [2, 2], ..Conv2dOptions::default() }),
        ([1, 24, 24, 64], [4, 3, 3, 64], padded),
        ([1, 24, 24, 4], [64, 3, 3, 4], padded),
        ([1, 24, 24, 192], [16, 3, 3, 192], padded),
    ];
    for (image, weight, options) in cases {
        // Without f32, the first entry: its convolutions have the next test.
        for (dtype, tolerance) in &TOLERANCE[1..] {
            let inputs = [
                random(&image, 1.0, *dtype),
                random(&weight, 1.0 / ((weight[1] * weight[2] * weight[3]) as f64).sqrt(), *dtype),
                random(&weight[..1], 1.0, *dtype),
            ];
            let what = format!("{} of {image:?} by {weight:?}", dtype.as_str());
            compare(&what, &|x| conv2d(&x[0], &x[1], Some(&x[2]), options), &inputs, &device, *tolerance);
        }
    }
}

/// Convolutions whose f32 operands are split into sums high + low of two bf16 numbers keep nearly the accuracy of f32.
/// The split operands have three times the channels, for the products high · high, high · low and low · high. There are
/// cases where steps over the channels cross from one third to the next, where channels are padded, where few or many
/// thread blocks share a sum, where values are large or small, and where there is no bias.
#[test]
#[ignore = "needs a CUDA device"]
fn f32_convolutions_on_tensor_cores_equal_the_cpu() {
    let device = gpu().unwrap();
    let padded = Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() };
    let halved = Conv2dOptions { stride: [2, 2], ..Conv2dOptions::default() };
    // Image, weight, options, and the standard deviation of image and bias.
    let cases = [
        ([1, 64, 64, 128], [128, 3, 3, 128], padded, 1.0),
        ([1, 40, 24, 512], [512, 3, 3, 512], padded, 1e3),
        ([2, 33, 17, 72], [40, 3, 3, 72], padded, 1e-3),
        ([1, 65, 65, 128], [128, 3, 3, 128], halved, 1.0),
        ([1, 32, 32, 128], [256, 1, 1, 128], Conv2dOptions::default(), 1.0),
        ([2, 40, 40, 3], [128, 3, 3, 3], padded, 1.0),
        ([1, 24, 24, 4], [512, 3, 3, 4], padded, 1.0),
        ([1, 24, 24, 512], [8, 3, 3, 512], padded, 1.0),
        ([1, 24, 24, 24], [3, 3, 3, 24], padded, 1.0),
        ([1, 9, 9, 8], [8, 1, 1, 8], Conv2dOptions::default(), 1.0),
    ];
    for (image, weight, options, deviation) in cases {
        let inputs = [
            random(&image, deviation, DType::F32),
            random(&weight, 1.0 / ((weight[1] * weight[2] * weight[3]) as f64).sqrt(), DType::F32),
            random(&weight[..1], deviation, DType::F32),
        ];
        let (_, tolerance) = TOLERANCE[0]; // of f32
        // Without and with the bias.
        for count in [2, 3] {
            let run = |x: &[Tensor]| compute::with_bf16_pairs(|| conv2d(&x[0], &x[1], x.get(2), options));
            let what = format!("f32 of {image:?} by {weight:?}, {count} operands");
            compare(&what, &run, &inputs[..count], &device, tolerance);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn linear_layers_with_biases_equal_the_cpu() {
    let device = gpu().unwrap();
    for [rows, inner, out] in [[1024, 640, 1280], [77, 768, 640], [1, 1280, 320], [33, 7, 13], [2, 320, 1]] {
        for (dtype, tolerance) in TOLERANCE {
            let inputs = [
                random(&[rows, inner], 1.0, dtype),
                random(&[out, inner], 1.0 / (inner as f64).sqrt(), dtype),
                random(&[out], 1.0, dtype),
            ];
            let what = format!("{} {rows} x {inner} to {out}", dtype.as_str());
            compare(&what, &|x| linear(&x[0], &x[1], Some(&x[2])), &inputs, &device, tolerance);
            // Views are read in place. The weight is stored transposed, and the layer has only the second half of its
            // outputs and of the bias. The view of x has all of its columns.
            let views = |x: &[Tensor]| {
                let weight = x[1].t()?.contiguous()?.t()?.narrow(0, out / 2, out - out / 2)?;
                linear(&x[0].narrow(1, 0, inner)?, &weight, Some(&x[2].narrow(0, out / 2, out - out / 2)?))
            };
            compare(&format!("{what}, views"), &views, &inputs, &device, tolerance);
        }
    }
}

/// Groups such as q, k and v of SDXL's blocks, with LoRA on all layers or on some, and with factors in one buffer or
/// separate.
#[test]
#[ignore = "needs a CUDA device"]
fn groups_of_linear_layers_equal_the_cpu() {
    let device = gpu().unwrap();
    const RANK: usize = 16;
    // `sizes` has the output features of each layer; `adapted` says which layers have a LoRA.
    for (rows, inner, sizes, adapted) in [
        (1024, 640, vec![640; 3], vec![true; 3]),
        (77, 2048, vec![640; 2], vec![true; 2]),
        (300, 320, vec![320; 3], vec![true, false, true]),
        (300, 320, vec![320, 64, 64], vec![true; 3]),
        // The next two cases are so large that cuBLAS computes the products x Aᵀ (as one product if all A are in one
        // buffer), and one launch adds the products with B to the result. The last tile of rows and the last block of
        // columns are not full. In the second case, a layer without an adapter lies between the others.
        (6999, 640, vec![640, 128, 128], vec![true; 3]),
        (4097, 320, vec![96, 640, 288, 32], vec![true, false, true, true]),
    ] {
        for (dtype, tolerance) in TOLERANCE {
            let total: usize = sizes.iter().sum();
            let weight = random(&[total, inner], 1.0 / (inner as f64).sqrt(), dtype);
            let bias = random(&[total], 1.0, dtype);
            let mut inputs = vec![random(&[rows, inner], 1.0, dtype)];
            for (&out, &adapted) in sizes.iter().zip(&adapted) {
                if adapted {
                    inputs.push(random(&[RANK, inner], 1.0 / (inner as f64).sqrt(), dtype));
                    inputs.push(random(&[out, RANK], 0.25, dtype));
                }
            }
            let function = |x: &[Tensor]| {
                // A frozen tensor of the layers, in the dtype and on the device of the inputs.
                let base = |tensor: &Tensor| tensor.to_dtype(x[0].dtype())?.to_device(x[0].device());
                let mut factors = x[1..].chunks_exact(2);
                let low_rank: Vec<Option<LowRank>> = adapted
                    .iter()
                    .map(|&adapted| {
                        let pair = if adapted { factors.next() } else { None };
                        pair.map(|f| LowRank { down: f[0].clone(), up: f[1].clone(), scale: 0.5 })
                    })
                    .collect();
                let weight = base(&weight)?;
                let group = LinearGroup {
                    weight: (&weight).into(),
                    bias: Some(&base(&bias)?),
                    sizes: &sizes,
                    low_rank: &low_rank,
                };
                linear_group(&x[0], group)
            };
            let what = format!("{} {rows} x {inner} to {sizes:?} ({adapted:?})", dtype.as_str());
            compare(&what, &function, &inputs, &device, tolerance);
            // Factors that are transposed views of variables; the products of the backward pass are then transposed
            // too.
            let turned: Vec<Tensor> = inputs[1..].iter().map(|x| x.t().unwrap().contiguous().unwrap()).collect();
            let turned: Vec<Tensor> = std::iter::once(inputs[0].clone()).chain(turned).collect();
            let through_views = |x: &[Tensor]| {
                let views = x[1..].iter().map(Tensor::t).collect::<Result<Vec<_>>>()?;
                function(&std::iter::once(x[0].clone()).chain(views).collect::<Vec<_>>())
            };
            compare(&format!("{what}, turned"), &through_views, &turned, &device, tolerance);
            // In one buffer the factors are evenly spaced, and products are batched.
            let flat: Vec<Tensor> = inputs[1..].iter().map(|x| x.to_device(&device).unwrap()).collect();
            let flat = FlatBuffer::new(&flat).unwrap();
            let x = inputs[0].to_device(&device).unwrap();
            let all: Vec<Tensor> =
                std::iter::once(x).chain(flat.vars().iter().map(|v| v.as_tensor().clone())).collect();
            let wide: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
            let (found, expected) = (function(&all).unwrap(), function(&wide).unwrap());
            near(&what, &to_f64_vec(found.raw()).unwrap(), &to_f64_vec(expected.raw()).unwrap(), tolerance);
        }
    }
}

/// Products whose results are neighbouring columns or rows of one tensor, and whose factors lie at equal or unequal
/// distances in another tensor.
#[test]
#[ignore = "needs a CUDA device"]
fn products_written_in_one_call_equal_those_of_the_cpu() {
    let device = gpu().unwrap();
    for (dtype, tolerance) in TOLERANCE {
        let (x, a) = (random(&[40, 24], 1.0, dtype), random(&[7, 8, 24], 0.2, dtype));
        // `picks` are three of the seven matrices in `a`. Their products x · aᵀ, (40, 8) each, are the columns of the
        // result (40, 24). Along rows, the products a · xᵀ, (8, 40) each, are the rows of the result (24, 40).
        for picks in [[0, 1, 2], [0, 2, 4], [4, 2, 0], [0, 1, 5]] {
            let run = |device: &Device, dtype: DType, along_rows: bool, accumulate: bool| {
                let copy = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap().to_device(device).unwrap().raw().clone();
                let (x, a) = (copy(&x), copy(&a));
                let result = Tensor::ones((40, 24), dtype, device).unwrap();
                let result = if along_rows { result.reshape((24, 40)).unwrap() } else { result };
                let terms: Vec<_> = picks
                    .iter()
                    .enumerate()
                    .map(|(i, &pick)| {
                        let factor = a.get(pick).unwrap();
                        let dst = result.raw().narrow(usize::from(!along_rows), 8 * i, 8).unwrap();
                        if along_rows { [dst, factor, x.t().unwrap()] } else { [dst, x.clone(), factor.t().unwrap()] }
                    })
                    .collect();
                let terms: Vec<_> = terms.iter().map(|term| term.each_ref()).collect();
                // Write half of each product over the ones in `result`, or add it to them if `accumulate`.
                compute::write_products(&terms, 0.5, accumulate).unwrap();
                to_f64_vec(result.raw()).unwrap()
            };
            for (along_rows, accumulate) in [(false, false), (false, true), (true, false), (true, true)] {
                let found = run(&device, dtype, along_rows, accumulate);
                let expected = run(&Device::Cpu, DType::F64, along_rows, accumulate);
                near(&format!("{} {picks:?} {along_rows} {accumulate}", dtype.as_str()), &found, &expected, tolerance);
            }
        }
    }
}

/// Ranks and numbers of rows that are multiples of the kernels' tiles, and others; inputs that need a gradient, and
/// frozen inputs.
#[test]
#[ignore = "needs a CUDA device"]
fn low_rank_products_equal_the_cpu() {
    let device = gpu().unwrap();
    for (rows, inner, outer, rank) in [
        (1024, 1280, 1280, 16),
        (77, 2048, 640, 16),
        (1000, 96, 320, 32),
        (33, 320, 32, 64),
        (17, 640, 96, 8),
        (5, 40, 72, 16),
        (6999, 640, 672, 32),
        (6999, 640, 640, 64),
    ] {
        for (dtype, tolerance) in TOLERANCE {
            let deviation = |n: usize| 1.0 / (n as f64).sqrt();
            let weight = random(&[outer, inner], deviation(inner), dtype);
            let magnitude = random(&[outer], 0.1, dtype);
            let inputs = [
                random(&[rows, inner], 1.0, dtype),
                random(&[rank, inner], deviation(inner), dtype),
                random(&[outer, rank], deviation(rank), dtype),
            ];
            // A frozen tensor, in the dtype and on the device of x.
            let base = |x: &Tensor, tensor: &Tensor| tensor.to_dtype(x.dtype())?.to_device(x.device());
            let lora = |x: &[Tensor]| {
                let weight = base(&x[0], &weight)?;
                lora_linear(
                    &x[0],
                    LoraWeights { weight: (&weight).into(), bias: None, down: &x[1], up: &x[2], scale: 0.5 },
                )
            };
            let dora = |x: &[Tensor]| {
                let (weight, magnitude) = (base(&x[0], &weight)?, base(&x[0], &magnitude)?);
                let weights = LoraWeights { weight: (&weight).into(), bias: None, down: &x[1], up: &x[2], scale: 0.5 };
                dora_linear(&x[0], weights, &magnitude)
            };
            // Here `x` has the factors alone.
            let of_frozen = |x: &[Tensor]| lora(&[base(&x[0], &inputs[0])?, x[0].clone(), x[1].clone()]);
            let what = format!("{} {rows} x {inner} to {outer}, rank {rank}", dtype.as_str());
            compare(&format!("LoRA {what}"), &lora, &inputs, &device, tolerance);
            compare(&format!("DoRA {what}"), &dora, &inputs, &device, tolerance);
            compare(&format!("LoRA of a frozen input {what}"), &of_frozen, &inputs[1..], &device, tolerance);
        }
    }
}
