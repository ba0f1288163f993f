//! Attention inside the segments of packed tensors (rows, heads, width) on a CUDA device, compared with the CPU in f64.
//! A row is a token.
//!
//! `TOLERANCE` has a tolerance for each of f32, f16 and bf16, in this order. Comparisons with the CPU double it.

use trainable_candle_core::capture::{Captured, Function};
use trainable_candle_core::ops::attention::{RotaryHeads, rotary_attention, varlen_attention};
use trainable_candle_core::raw::to_f64_vec;
use trainable_candle_core::{DType, Device, Error, Result, Tensor, grad};

use super::gpu;
use super::products::{TOLERANCE, compare_with, in_f64, random};
use super::{close, value_and_gradients};

/// The sizes of one attention.
struct Case {
    /// The number of heads of queries, and that of keys and values.
    heads: [usize; 2],
    /// The features of a head.
    width: usize,
    /// The number of tokens.
    rows: usize,
    /// Segment i has rows `bounds[i]..bounds[i + 1]`.
    bounds: &'static [i64],
    /// The number of keys that a query sees at most.
    window: Option<usize>,
}

/// The bounds of 40 segments of different lengths. The rows after the last bound are in no segment.
const MANY: [i64; 41] = {
    let mut bounds = [0; 41];
    let mut segment = 0;
    while segment < 40 {
        bounds[segment + 1] = bounds[segment] + (segment as i64 * 37) % 190 + 1;
        segment += 1;
    }
    bounds
};

/// The cases have tiles of rows inside of one segment, tiles with many segments, and segments and windows that end
/// inside of a tile. The rows after the last segment begin inside of a tile and fill further tiles. Several thread
/// blocks share a tile of a head, or one thread block has several tiles. The tensor-core kernels do not support some of
/// the widths: those above 128 and those that are no multiple of 8.
const CASES: [Case; 19] = [
    Case { heads: [12, 2], width: 128, rows: 1024, bounds: &[0, 1024], window: None },
    Case { heads: [12, 2], width: 128, rows: 1000, bounds: &[0, 257, 320, 321, 700, 1000], window: None },
    Case { heads: [8, 2], width: 64, rows: 1000, bounds: &[0, 257, 320, 321, 700, 1000], window: None },
    Case { heads: [4, 1], width: 128, rows: 700, bounds: &[0, 600, 600, 700], window: Some(100) },
    Case { heads: [4, 4], width: 64, rows: 700, bounds: &[0, 600, 600, 700], window: Some(64) },
    Case { heads: [6, 2], width: 64, rows: 600, bounds: &[0, 30, 290, 290, 290], window: None },
    Case { heads: [6, 2], width: 128, rows: 600, bounds: &[0, 30, 290, 290, 290], window: Some(1) },
    Case { heads: [12, 2], width: 64, rows: 2309, bounds: &[0, 2200, 2201, 2202, 2300], window: None },
    Case { heads: [12, 2], width: 128, rows: 2309, bounds: &[0, 2200, 2201, 2202, 2300], window: None },
    Case { heads: [4, 2], width: 128, rows: 1500, bounds: &[0, 1400], window: Some(300) },
    Case { heads: [8, 8], width: 128, rows: 4100, bounds: &MANY, window: None },
    Case { heads: [8, 4], width: 64, rows: 4100, bounds: &MANY, window: Some(20) },
    Case { heads: [16, 2], width: 96, rows: 1301, bounds: &[0, 1, 2, 300, 301, 427, 559, 600, 1301], window: None },
    Case { heads: [32, 8], width: 128, rows: 640, bounds: &[0, 128, 129, 256, 639, 640], window: None },
    Case { heads: [8, 8], width: 48, rows: 700, bounds: &[0, 191, 192, 384, 385], window: Some(129) },
    Case { heads: [2, 1], width: 40, rows: 130, bounds: &[0, 1, 2, 3, 4, 5, 70, 130], window: None },
    Case { heads: [3, 1], width: 32, rows: 65, bounds: &[0, 64, 65], window: None },
    Case { heads: [4, 2], width: 256, rows: 200, bounds: &[0, 33, 190], window: Some(50) },
    Case { heads: [2, 2], width: 36, rows: 100, bounds: &[0, 33, 90, 90], window: None },
];

fn bounds(values: &[i64], device: &Device) -> Result<Tensor> {
    Tensor::from_vec(values.to_vec(), values.len(), device)
}

/// Random queries, keys and values, normally distributed with standard deviation 1.
fn drawn(case: &Case) -> [Tensor; 3] {
    [case.heads[0], case.heads[1], case.heads[1]].map(|heads| {
        // Rounded to bf16 and then to f16, the values are exact in every dtype, so that all dtypes share one reference.
        random(&[case.rows, heads, case.width], 1.0, DType::BF16).to_dtype(DType::F16).unwrap()
    })
}

#[test]
#[ignore = "needs a CUDA device"]
fn attention_of_segments_equals_the_cpu_and_repeats() {
    let device = gpu().unwrap();
    for case in &CASES {
        let drawn = drawn(case);
        let attend = |x: &[Tensor]| {
            let scale = None; // 1 / √width
            varlen_attention(&x[0], &x[1], &x[2], &bounds(case.bounds, x[0].device())?, case.window, scale)
        };
        let expected = in_f64(&attend, &drawn);
        for (dtype, tolerance) in TOLERANCE {
            let inputs = drawn.each_ref().map(|x| x.to_dtype(dtype).unwrap());
            let what = format!(
                "{} of {:?} heads of {} in {:?} of {}, {:?}",
                dtype.as_str(),
                case.heads,
                case.width,
                case.bounds,
                case.rows,
                case.window
            );
            compare_with(&what, &attend, &expected, &inputs, &device, 2.0 * tolerance);
            let moved = inputs.each_ref().map(|x| x.to_device(&device).unwrap());
            let first = value_and_gradients(&attend, &moved).unwrap();
            let again = value_and_gradients(&attend, &moved).unwrap();
            assert_eq!(to_f64_vec(again.0.raw()).unwrap(), to_f64_vec(first.0.raw()).unwrap(), "{what}");
            assert_eq!(again.1, first.1, "{what}");
            // The gradient of one input is the same if the other two need no gradient.
            for index in 0..3 {
                let fixed = |x: &[Tensor]| {
                    let mut all = moved.clone();
                    all[index] = x[0].clone();
                    attend(&all)
                };
                let (_, grads) = value_and_gradients(&fixed, &moved[index..=index]).unwrap();
                assert_eq!(grads[0], first.1[index], "{what}, of input {index} alone");
            }
        }
    }
}

/// The inputs are projections with queries, keys and values side by side. The queries and keys are rotated, or
/// normalised and rotated.
#[test]
#[ignore = "needs a CUDA device"]
fn attention_of_projections_equals_the_cpu_and_repeats() {
    let device = gpu().unwrap();
    for case in &CASES {
        for is_normed in [false, true] {
            let [heads, key_heads] = case.heads;
            let fixed = |dims: &[usize], std| random(dims, std, DType::BF16).to_dtype(DType::F32).unwrap();
            let angles = fixed(&[case.rows, case.width / 2], 3.0);
            let (tables, scale) = ([angles.cos().unwrap(), angles.sin().unwrap()], fixed(&[case.width], 1.0));
            let attend = |x: &[Tensor]| {
                let device = x[0].device();
                let table_dtype = if x[0].dtype() == DType::F64 { DType::F64 } else { DType::F32 };
                let moved = |tensor: &Tensor| tensor.to_device(device)?.to_dtype(table_dtype);
                let (cos, sin, scale) = (moved(&tables[0])?, moved(&tables[1])?, moved(&scale)?);
                // A scale for queries, none for keys; epsilon.
                let norms = is_normed.then_some(([Some(&scale), None], 1e-6));
                let heads = RotaryHeads { heads, key_heads, angles: [&cos, &sin], norms };
                rotary_attention(&x[0], heads, &bounds(case.bounds, device)?, case.window)
            };
            let columns = (heads + 2 * key_heads) * case.width;
            let drawn = [random(&[case.rows, columns], 1.0, DType::BF16).to_dtype(DType::F16).unwrap()];
            let expected = in_f64(&attend, &drawn);
            for (dtype, tolerance) in TOLERANCE {
                let inputs = drawn.each_ref().map(|x| x.to_dtype(dtype).unwrap());
                let what = format!("{} of {:?}, normed {is_normed}, {:?}", dtype.as_str(), case.heads, case.bounds);
                compare_with(&what, &attend, &expected, &inputs, &device, 2.0 * tolerance);
                let moved = inputs.each_ref().map(|x| x.to_device(&device).unwrap());
                let first = value_and_gradients(&attend, &moved).unwrap();
                let again = value_and_gradients(&attend, &moved).unwrap();
                assert_eq!(to_f64_vec(again.0.raw()).unwrap(), to_f64_vec(first.0.raw()).unwrap(), "{what}");
                assert_eq!(again.1, first.1, "{what}");
            }
        }
    }
}

/// For keys and values whose heads share memory (a broadcast view), the general kernels run in place of the kernels for
/// compute capability 9.0. The latter need at least 256 rows, and f16 or bf16.
#[test]
#[ignore = "needs a CUDA device"]
fn kernels_for_compute_capability_9_0_equal_the_general_kernels() {
    let device = gpu().unwrap();
    for case in CASES.iter().filter(|case| case.rows >= 256) {
        // Two heads of keys, with as many heads of queries for each as in the case.
        let [heads, key_heads] = [case.heads[0] / case.heads[1] * 2, 2];
        let attend = |x: &[Tensor], is_general: bool| {
            let keys = |x: &Tensor| {
                let shared = x.broadcast_as((case.rows, key_heads, case.width))?;
                if is_general { Ok(shared) } else { shared.contiguous() }
            };
            varlen_attention(&x[0], &keys(&x[1])?, &keys(&x[2])?, &bounds(case.bounds, &device)?, case.window, None)
        };
        // Without f32, the first dtype.
        for (dtype, tolerance) in &TOLERANCE[1..] {
            let inputs = [heads, 1, 1]
                .map(|heads| random(&[case.rows, heads, case.width], 1.0, *dtype).to_device(&device).unwrap());
            let [(value, grads), (expected, expected_grads)] = [false, true]
                .map(|is_general| value_and_gradients(&|x: &[Tensor]| attend(x, is_general), &inputs).unwrap());
            let what = format!("{} of {:?}, {:?}", dtype.as_str(), case.bounds, case.window);
            let [found, wanted] = [value, expected].map(|value| to_f64_vec(value.raw()).unwrap());
            close(&what, &found, &wanted, *tolerance).unwrap();
            for (found, expected) in grads.iter().zip(&expected_grads) {
                close(&what, found, expected, 2.0 * tolerance).unwrap();
            }
        }
    }
}

/// Only kernels read the bounds, so a recorded graph can be replayed with other bounds, if their number is the same.
#[test]
#[ignore = "needs a CUDA device"]
fn a_graph_can_be_replayed_with_other_segments() {
    let device = gpu().unwrap();
    let case = &CASES[1]; // 1000 rows and five segments
    let inputs = drawn(case).map(|x| x.to_device(&device).unwrap());
    let run = |cu_seqlens: &Tensor, inputs: &[Tensor]| -> Result<Vec<Tensor>> {
        let leaves = inputs
            .iter()
            .map(|x| Ok(trainable_candle_core::Var::from_tensor(x)?.as_tensor().clone()))
            .collect::<Result<Vec<_>>>()?;
        let y = varlen_attention(&leaves[0], &leaves[1], &leaves[2], cu_seqlens, None, None)?;
        // The gradient of the sum is 1 (None), and the graph is not retained (false).
        let grads = grad(&y.sqr()?.sum_all()?, &leaves.iter().collect::<Vec<_>>(), None, false)?;
        Ok(std::iter::once(y.detach()).chain(grads.into_iter().flatten()).collect())
    };
    let values = |tensors: &[Tensor]| -> Vec<Vec<f64>> {
        tensors.iter().map(|tensor| to_f64_vec(tensor.contiguous().unwrap().raw()).unwrap()).collect()
    };
    let bounds_of_calls = [
        [0, 257, 320, 321, 700, 1000],
        [0, 1000, 1000, 1000, 1000, 1000],
        [0, 1, 2, 3, 500, 500],
        [0, 100, 200, 300, 400, 999],
        [0, 0, 0, 0, 0, 0],
    ];
    let fixed = inputs.clone();
    let function: Function = Box::new(move |x| run(&x[0], &fixed));
    let mut step = Captured::new(&device, function, &[&bounds(&bounds_of_calls[0], &device).unwrap()]).unwrap();
    for segments in bounds_of_calls {
        let cu_seqlens = bounds(&segments, &device).unwrap();
        let found = values(&step.call(&[&cu_seqlens]).unwrap());
        let expected = values(&run(&cu_seqlens, &inputs).unwrap());
        assert!(found == expected, "{segments:?}");
    }
    assert!(step.is_recorded());
}

#[test]
#[ignore = "needs a CUDA device"]
fn bounds_out_of_order_or_range_are_an_error_when_a_value_is_read() {
    let device = gpu().unwrap();
    let x = random(&[200, 2, 64], 1.0, DType::BF16).to_device(&device).unwrap();
    // Bounds must begin at 0, must not decrease, and end at 200, the number of rows, at most.
    for wrong in [[0, 150, 100], [0, 100, 201], [1, 100, 200], [0, -5, 200], [0, i64::MAX, i64::MIN]] {
        // With a window of 7 keys and the default scale.
        let attend = || varlen_attention(&x, &x, &x, &bounds(&wrong, &device)?, Some(7), None)?.sum_all()?.item();
        assert!(matches!(attend(), Err(Error::Index { .. })), "{wrong:?}");
    }
    let y = varlen_attention(&x, &x, &x, &bounds(&[0, 200], &device).unwrap(), None, None).unwrap();
    assert!(y.sum_all().unwrap().item().unwrap().is_finite());
}
