//! Tests of the CPU's fused kernels beyond the registry's small cases: more rows than a kernel takes at a time, memory
//! layouts, extreme values, operands of two dtypes.

use trainable_candle_core::cpu::pool::set_num_threads;
use trainable_candle_core::ops::attention::{
    HeadSizes, Stream, normed_attention, scaled_dot_product_attention as attention,
};
use trainable_candle_core::ops::beside::{Activation, activate_beside};
use trainable_candle_core::ops::gated_add::gated_add;
use trainable_candle_core::ops::norm::{group_norm, group_norm_silu, layer_norm, rms_norm, rms_norm_rope};
use trainable_candle_core::ops::rope::rope;
use trainable_candle_core::{DType, Device, Result, Tensor, Var, grad, raw::to_f64_vec};

/// Numbers of magnitude about one, different for each `seed`.
fn draw(dims: &[usize], seed: usize, dtype: DType) -> Tensor {
    let number =
        |i: usize| ((i * 7919 + seed * 104_729) as f64 * 0.618_034).sin() + ((i * i + seed) as f64 * 0.31).cos();
    let values = (0..dims.iter().product()).map(number).collect::<Vec<_>>();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// The result, then the gradient of each input for a fixed gradient of the result.
fn run(inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) -> Vec<Vec<f64>> {
    let vars: Vec<Var> = inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let inputs: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = f(&inputs).unwrap();
    let g = draw(y.dims(), 99, y.dtype());
    // `false`: the tape is not kept for another backward pass.
    let grads = grad(&y, &inputs.iter().collect::<Vec<_>>(), Some(&g), false).unwrap();
    let grads = grads.iter().map(|g| to_f64_vec(g.as_ref().unwrap().raw()).unwrap());
    std::iter::once(to_f64_vec(y.raw()).unwrap()).chain(grads).collect()
}

fn assert_close(found: &[Vec<f64>], expected: &[Vec<f64>], tolerance: f64) {
    for (part, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.len(), expected.len());
        let largest = expected.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
        for (i, (f, e)) in found.iter().zip(expected).enumerate() {
            assert!(
                (f - e).abs() <= tolerance * largest,
                "tensor {part} of the result and the gradients, element {i}: {f}, expected {e}"
            );
        }
    }
}

/// Attention in basic operations. `attention` takes the scale of the scores as its last argument; `None` stands for
/// this function's scale, 1 / √width.
fn attention_plain(x: &[Tensor], mask: Option<&Tensor>, is_causal: bool) -> Result<Tensor> {
    let (queries, keys, width) =
        (x[0].dims()[x[0].rank() - 2], x[1].dims()[x[1].rank() - 2], x[0].dims()[x[0].rank() - 1]);
    let mut scores = x[0].matmul(&x[1].t()?)?.mul_scalar(1.0 / (width as f64).sqrt())?;
    if let Some(mask) = mask {
        scores = scores.add(mask)?;
    }
    if is_causal {
        let causal_mask =
            (0..queries).flat_map(|i| (0..keys).map(move |j| if j <= i { 0.0 } else { -1e30 })).collect::<Vec<f64>>();
        scores =
            scores.add(&Tensor::from_vec(causal_mask, (queries, keys), &Device::Cpu)?.to_dtype(scores.dtype())?)?;
    }
    scores.softmax(scores.rank() - 1)?.matmul(&x[2])
}

/// Shapes of q, k and v. The first has several blocks of queries and of keys, and few heads: the backward pass divides
/// the queries of a head among several tasks, and sums the gradients of keys and values that these compute. The second
/// has several blocks of queries, and many heads. The third has heads as wide as in large models, over a prompt of 77
/// tokens. The last has heads of an odd width.
const SHAPES: [[[usize; 3]; 3]; 4] = [
    [[2, 300, 8], [2, 600, 8], [2, 600, 5]],
    [[20, 150, 4], [20, 150, 4], [20, 150, 4]],
    [[3, 130, 64], [3, 77, 64], [3, 77, 64]],
    [[2, 77, 33], [2, 77, 33], [2, 77, 33]],
];

#[test]
fn attention_of_several_blocks_equals_basic_operations() {
    for shapes in SHAPES {
        let inputs: Vec<Tensor> = (0..3).map(|i| draw(&shapes[i], i, DType::F64)).collect();
        let mask = draw(&[shapes[0][1], shapes[1][1]], 7, DType::F64);
        for (mask, is_causal) in [(None, false), (None, true), (Some(&mask), false), (Some(&mask), true)] {
            let found = run(&inputs, |x| attention(&x[0], &x[1], &x[2], mask, is_causal, None));
            assert_close(&found, &run(&inputs, |x| attention_plain(x, mask, is_causal)), 1e-11);
            let singles: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(DType::F32).unwrap()).collect();
            let in_f32 = run(&singles, |x| attention(&x[0], &x[1], &x[2], mask, is_causal, None));
            assert_close(&in_f32, &found, 2e-6);
        }
    }
}

#[test]
fn attention_keeps_the_layout_of_split_heads() {
    let split = |x: &Tensor| x.reshape((2, 70, 3, 4))?.transpose(1, 2);
    let inputs: Vec<Tensor> = (0..3).map(|i| draw(&[2, 70, 12], i, DType::F64)).collect();
    let found = run(&inputs, |x| {
        let y = attention(&split(&x[0])?, &split(&x[1])?, &split(&x[2])?, None, true, None)?.transpose(1, 2)?;
        assert!(y.raw().is_contiguous());
        y.reshape((2, 70, 12))
    });
    let expected = run(&inputs, |x| {
        let heads = x.iter().map(split).collect::<Result<Vec<_>>>()?;
        attention_plain(&heads, None, true)?.transpose(1, 2)?.reshape((2, 70, 12))
    });
    assert_close(&found, &expected, 1e-12);
}

#[test]
fn attention_takes_keys_that_are_broadcast_and_transposed() {
    // One head of keys for three of queries, stored (width, length).
    let inputs = [draw(&[3, 9, 4], 0, DType::F64), draw(&[1, 4, 6], 1, DType::F64), draw(&[3, 6, 4], 2, DType::F64)];
    let keys = |x: &Tensor| x.t()?.broadcast_as((3, 6, 4));
    let found = run(&inputs, |x| attention(&x[0], &keys(&x[1])?, &x[2], None, false, None));
    let expected = run(&inputs, |x| attention_plain(&[x[0].clone(), keys(&x[1])?, x[2].clone()], None, false));
    assert_close(&found, &expected, 1e-12);
}

#[test]
fn a_query_that_sees_no_key_gives_zeros_and_no_gradient() {
    let inputs: Vec<Tensor> = (0..3).map(|i| draw(&[3, 4], i, DType::F32)).collect();
    // Row i of the mask says which keys query i sees.
    let mask = Tensor::from_vec(vec![1u8, 1, 0, 0, 0, 0, 1, 1, 1], (3, 3), &Device::Cpu).unwrap();
    let found = run(&inputs, |x| attention(&x[0], &x[1], &x[2], Some(&mask), false, None));
    assert!(found.iter().flatten().all(|x| x.is_finite()));
    // Query 1 sees no key: its elements 4 to 7 are 0 in the result (`found[0]`) and in the gradient of the queries.
    assert!(found[0][4..8].iter().chain(&found[1][4..8]).all(|x| *x == 0.0));
    assert!(found[0][..4].iter().any(|x| *x != 0.0));
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    // The shapes of the inputs, and the kernel. The number after the input is the dimension in a softmax, how many of
    // the last dimensions are normalised in `layer_norm`, and the number of groups in `group_norm`.
    type Kernel = fn(&[Tensor]) -> Result<Tensor>;
    let kernels: [(&[&[usize]], Kernel); 7] = [
        (&[&[999, 77]], |x| x[0].softmax(1)),
        (&[&[999, 77]], |x| x[0].log_softmax(0)),
        (&[&[999, 77], &[77], &[77]], |x| layer_norm(&x[0], 1, Some(&x[1]), Some(&x[2]), 1e-5)),
        (&[&[999, 77], &[77]], |x| rms_norm(&x[0], Some(&x[1]), 1e-5)),
        (&[&[2, 999, 60], &[60], &[60]], |x| group_norm(&x[0], 5, Some(&x[1]), Some(&x[2]), 1e-5)),
        (&[&[2, 999, 60], &[60], &[60]], |x| group_norm_silu(&x[0], 5, Some(&x[1]), Some(&x[2]), 1e-5)),
        (&[&[2, 300, 8], &[2, 600, 8], &[2, 600, 8]], |x| attention(&x[0], &x[1], &x[2], None, true, None)),
    ];
    for (shapes, kernel) in kernels {
        let inputs: Vec<Tensor> = shapes.iter().enumerate().map(|(i, dims)| draw(dims, i, DType::F32)).collect();
        let results = [1, 3, 4].map(|threads| {
            set_num_threads(threads).unwrap();
            run(&inputs, kernel)
        });
        assert!(results[0] == results[1] && results[0] == results[2]);
    }
}

#[test]
fn norms_of_many_rows_equal_basic_operations_in_f64() {
    let shapes: [&[usize]; 3] = [&[1500, 40], &[40], &[40]];
    let doubles: Vec<Tensor> = (0..3).map(|i| draw(shapes[i], i, DType::F64)).collect();
    let singles: Vec<Tensor> = doubles.iter().map(|x| x.to_dtype(DType::F32).unwrap()).collect();
    let layer = |x: &[Tensor]| layer_norm(&x[0], 1, Some(&x[1]), Some(&x[2]), 1e-5);
    let layer_plain = |x: &[Tensor]| {
        let centered = x[0].sub(&x[0].mean(&[1], true)?)?;
        let std = centered.sqr()?.mean(&[1], true)?.add_scalar(1e-5)?.sqrt()?;
        centered.div(&std)?.mul(&x[1])?.add(&x[2])
    };
    let expected = run(&doubles, layer_plain);
    assert_close(&run(&doubles, layer), &expected, 1e-12);
    assert_close(&run(&singles, layer), &expected, 3e-6);

    let group = |x: &[Tensor]| group_norm(&x[0].reshape((1, 1500, 40))?, 4, Some(&x[1]), Some(&x[2]), 1e-5);
    let group_plain = |x: &[Tensor]| {
        let split = x[0].reshape((1, 1500, 4, 10))?;
        let centered = split.sub(&split.mean(&[1, 3], true)?)?;
        let std = centered.sqr()?.mean(&[1, 3], true)?.add_scalar(1e-5)?.sqrt()?;
        centered.div(&std)?.reshape((1, 1500, 40))?.mul(&x[1])?.add(&x[2])
    };
    let expected = run(&doubles, group_plain);
    assert_close(&run(&doubles, group), &expected, 1e-12);
    assert_close(&run(&singles, group), &expected, 3e-6);
}

#[test]
fn norms_do_not_cancel_where_the_mean_is_large() {
    // Multiples of 1/256 between 4096 and 4097 are exact in f32.
    let values = (0..2000u32).map(|i| 4096.0 + f64::from(i * 37 % 256) / 256.0).collect::<Vec<_>>();
    let x = |dtype| Tensor::from_vec(values.clone(), (1, 50, 40), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    // Both normalise all 2000 values together: over the last two dimensions, and over one group of channels.
    for norm in [|x: &Tensor| layer_norm(x, 2, None, None, 1e-5), |x: &Tensor| group_norm(x, 1, None, None, 1e-5)] {
        let single = to_f64_vec(norm(&x(DType::F32)).unwrap().raw()).unwrap();
        let double = to_f64_vec(norm(&x(DType::F64)).unwrap().raw()).unwrap();
        // Rounding the mean to f32 changes it by up to 2^-24 × 4096 = 2^-12, which is 1/1200 of the standard deviation.
        assert_close(&[single], &[double], 1e-3);
    }
}

#[test]
fn layer_norm_of_bf16_takes_parameters_in_f32() {
    let x = draw(&[300, 40], 0, DType::BF16);
    let (weight, bias) = (draw(&[40], 1, DType::F32), draw(&[40], 2, DType::F32));
    let inputs = [x.clone(), weight.clone(), bias.clone()];
    let found = run(&inputs, |x| layer_norm(&x[0], 1, Some(&x[1]), Some(&x[2]), 1e-5));
    let inputs = [x.to_dtype(DType::F32).unwrap(), weight, bias];
    let expected = run(&inputs, |x| {
        let y = layer_norm(&x[0], 1, Some(&x[1]), Some(&x[2]), 1e-5)?;
        y.to_dtype(DType::BF16)
    });
    // Sums are in f32: only the result and the gradient of the input are rounded to bf16.
    assert_close(&found[2..], &expected[2..], 1e-6);
    assert_close(&found[..2], &expected[..2], 1e-2);
}

#[test]
fn softmax_takes_extreme_values_infinities_and_nan() {
    let row = |values: [f32; 4]| Tensor::new(&values, &Device::Cpu).unwrap();
    let found = |values| row(values).softmax(0).unwrap().to_vec::<f32>().unwrap();
    assert_eq!(found([1e30, -1e30, 0.0, f32::NEG_INFINITY]), [1.0, 0.0, 0.0, 0.0]);
    assert_eq!(found([-1e30, -1e30, f32::NEG_INFINITY, -1e30]), [1.0 / 3.0, 1.0 / 3.0, 0.0, 1.0 / 3.0]);
    assert!(found([0.0, f32::NAN, 0.0, 0.0]).iter().all(|y| y.is_nan()));
    assert!(found([f32::NEG_INFINITY; 4]).iter().all(|y| y.is_nan()));
    let log = row([0.0, -200.0, 0.0, 0.0]).log_softmax(0).unwrap().to_vec::<f32>().unwrap();
    assert!((log[1] + 200.0 + 3f32.ln()).abs() < 2e-5, "{log:?}");
}

/// A rotation keeps the length of each vector, and the result lies in memory as the input does.
#[test]
fn rope_keeps_lengths_and_layouts() {
    let angles = draw(&[70, 2], 1, DType::F64);
    let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
    let x = draw(&[2, 70, 3, 4], 0, DType::F64).transpose(1, 2).unwrap();
    for interleaved in [false, true] {
        let y = rope(&x, &cos, &sin, interleaved).unwrap();
        assert!(y.transpose(1, 2).unwrap().raw().is_contiguous());
        let same = rope(&Tensor::from_raw(&x.raw().force_contiguous().unwrap()), &cos, &sin, interleaved).unwrap();
        assert_eq!(to_f64_vec(y.raw()).unwrap(), to_f64_vec(same.raw()).unwrap());
        let squared_lengths = |x: &Tensor| to_f64_vec(x.sqr().unwrap().sum(&[3], false).unwrap().raw()).unwrap();
        assert_close(&[squared_lengths(&y)], &[squared_lengths(&x)], 1e-14);
    }
}

/// The input has more rows than the kernel takes at a time. In memory, its heads lie one after the other (`outside`),
/// or the heads of each position are adjacent (`inside`). Rotated pairs are adjacent features, or features half a width
/// apart.
#[test]
fn rms_norm_rope_equals_rms_norm_then_rope() {
    let angles = draw(&[1100, 32], 1, DType::F64);
    let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
    let heads = draw(&[2, 1100, 3, 64], 0, DType::F64);
    let weight = draw(&[64], 2, DType::F64);
    for interleaved in [false, true] {
        let fused = |x: &Tensor, w: &Tensor| rms_norm_rope(x, Some(w), &cos, &sin, interleaved, 1e-6);
        let unfused = |x: &Tensor, w: &Tensor| rope(&rms_norm(x, Some(w), 1e-6)?, &cos, &sin, interleaved);
        let inside = |f: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>| {
            run(&[heads.clone(), weight.clone()], |x| f(&x[0].transpose(1, 2)?, &x[1]))
        };
        let outside = |f: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>| {
            let x = heads.transpose(1, 2).unwrap().contiguous().unwrap();
            run(&[x, weight.clone()], |x| f(&x[0], &x[1]))
        };
        assert_close(&inside(&fused), &inside(&unfused), 1e-13);
        assert_close(&outside(&fused), &outside(&unfused), 1e-13);
        let y = fused(&heads.transpose(1, 2).unwrap(), &weight).unwrap();
        assert!(y.transpose(1, 2).unwrap().raw().is_contiguous());
    }
}

#[test]
fn rms_norm_rope_of_bf16_takes_a_weight_in_f32() {
    let angles = draw(&[300, 20], 1, DType::F64);
    let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
    let (x, weight) = (draw(&[2, 300, 40], 0, DType::BF16), draw(&[40], 2, DType::F32));
    let function = |x: &[Tensor]| rms_norm_rope(&x[0], Some(&x[1]), &cos, &sin, false, 1e-6)?.to_dtype(DType::BF16);
    let found = run(&[x.clone(), weight.clone()], function);
    let expected = run(&[x.to_dtype(DType::F32).unwrap(), weight], function);
    // Sums are in f32: only the result and the gradient of the input are rounded to bf16.
    assert_close(&found[2..], &expected[2..], 1e-6);
    assert_close(&found[..2], &expected[..2], 1e-2);
}

#[test]
fn operands_that_do_not_fit_are_errors_that_name_the_operation() {
    let x = |dims: &[usize]| draw(dims, 0, DType::F32);
    let message = |result: Result<Tensor>| result.unwrap_err().to_string();
    let cases = [
        (message(x(&[2, 3]).softmax(2)), "softmax: dimension 2 is out of range for shape [2, 3]"),
        (message(Tensor::new(&[1u8], &Device::Cpu).unwrap().softmax(0)), "softmax: found dtype u8"),
        (message(layer_norm(&x(&[2, 3]), 0, None, None, 1e-5)), "layer_norm: cannot normalise the last 0"),
        (
            message(layer_norm(&x(&[2, 3]), 1, Some(&x(&[2])), None, 1e-5)),
            "layer_norm: the weight has shape [2], expected [3]",
        ),
        (message(rms_norm(&x(&[2, 3]), Some(&draw(&[3], 0, DType::F64)), 1e-5)), "rms_norm: the weight is f64"),
        (message(group_norm(&x(&[2, 5, 6]), 4, None, None, 1e-5)), "group_norm: 6 channels cannot be split into 4"),
        (message(group_norm(&x(&[6]), 2, None, None, 1e-5)), "group_norm: the input has shape [6]"),
        (
            message(attention(&x(&[2, 5, 4]), &x(&[2, 7, 3]), &x(&[2, 7, 4]), None, false, None)),
            "scaled_dot_product_attention: k has shape [2, 7, 3]",
        ),
        (
            message(attention(&x(&[2, 5, 4]), &x(&[2, 7, 4]), &x(&[2, 6, 4]), None, false, None)),
            "scaled_dot_product_attention: v has shape [2, 6, 4]",
        ),
        (
            message(attention(&x(&[5, 4]), &x(&[7, 4]), &x(&[7, 4]), Some(&x(&[5, 6])), false, None)),
            "scaled_dot_product_attention: the mask has shape [5, 6]",
        ),
        (message(rope(&x(&[5, 3]), &x(&[5, 1]), &x(&[5, 1]), false)), "rope: the width 3"),
        (message(rope(&x(&[5, 4]), &x(&[4, 2]), &x(&[5, 2]), false)), "rope: cos has shape [4, 2]"),
        (
            message(rope(&x(&[5, 4]), Var::from_tensor(&x(&[5, 2])).unwrap().as_tensor(), &x(&[5, 2]), false)),
            "rope: has no backward",
        ),
        (
            message(rope(
                &x(&[5, 4]),
                &Tensor::from_vec(vec![1i64; 10], (5, 2), &Device::Cpu).unwrap(),
                &x(&[5, 2]),
                false,
            )),
            "rope: cos is i64, expected floating point",
        ),
        (
            message(rms_norm_rope(&x(&[4]), None, &x(&[1, 2]), &x(&[1, 2]), false, 1e-6)),
            "rms_norm_rope: the input has shape [4]",
        ),
        (
            message(rms_norm_rope(&x(&[5, 4]), Some(&x(&[2])), &x(&[5, 2]), &x(&[5, 2]), false, 1e-6)),
            "rms_norm_rope: the weight has shape [2], expected [4]",
        ),
        (
            message(rms_norm_rope(&x(&[5, 4]), None, &x(&[5, 2]), &x(&[5, 4]), false, 1e-6)),
            "rms_norm_rope: sin has shape [5, 4]",
        ),
        (message(rms_norm_rope(&x(&[5, 4]), None, &x(&[5, 2]), &x(&[5, 2]), false, -1.0)), "rms_norm_rope: eps is -1"),
    ];
    for (found, expected) in cases {
        assert!(found.starts_with(expected), "{found}");
    }
}

/// The error of each wrong input names the shape or the value that was found, or the one that is needed.
#[test]
fn errors_of_normed_attention_activate_beside_and_gated_add_name_what_does_not_fit() {
    // The 24 columns are the queries, keys and values of 2 heads of width 4.
    let x = draw(&[2, 3, 24], 1, DType::F32);
    let sizes = HeadSizes { heads: 2, width: 4, eps: 1e-6 };
    let stream = Stream { x: &x, norms: [None, None], angles: None };
    let says = |result: Result<Tensor>, part: &str| {
        let message = result.expect_err(part).to_string();
        assert!(message.contains(part), "{message}");
    };
    assert_eq!(normed_attention(&[stream], sizes, None).unwrap().dims(), [2, 3, 8]);
    says(normed_attention(&[], sizes, None), "at least one stream");
    says(normed_attention(&[stream], HeadSizes { width: 3, ..sizes }, None), "even width");
    says(normed_attention(&[stream], HeadSizes { heads: 3, ..sizes }, None), "[2, 3, 24]");
    says(normed_attention(&[stream], HeadSizes { eps: f64::NAN, ..sizes }, None), "eps is NaN");
    let scale = draw(&[5], 2, DType::F32);
    says(normed_attention(&[Stream { norms: [Some(&scale), None], ..stream }], sizes, None), "expected [4]");
    let trainable = Var::from_tensor(&draw(&[4], 2, DType::F32)).unwrap();
    says(normed_attention(&[Stream { norms: [Some(trainable.as_tensor()), None], ..stream }], sizes, None), "frozen");
    let table = draw(&[3, 1], 3, DType::F32);
    says(normed_attention(&[Stream { angles: Some([&table, &table]), ..stream }], sizes, None), "cos has shape [3, 1]");
    let mask = draw(&[2, 3], 6, DType::F32);
    says(normed_attention(&[stream], sizes, Some(&mask)), "the mask has shape [2, 3]");
    let other = draw(&[1, 3, 24], 4, DType::F32);
    says(normed_attention(&[stream, Stream { x: &other, ..stream }], sizes, None), "[1, 3, 24]");

    // The number is the first column to which the activation is applied.
    says(activate_beside(None, &x, 25, Activation::GeluTanh), "at least 25 columns");
    says(activate_beside(None, &x, 1, Activation::SwiGlu), "even number");
    says(activate_beside(Some(&other), &x, 0, Activation::GeluTanh), "[1, 3, 24]");
    says(gated_add(&x, &x, &draw(&[2, 24], 5, DType::F32)), "[2, 24]");
    says(gated_add(&x, &x.to_dtype(DType::F64).unwrap(), &x), "f64");
}
