//! Attention on a CUDA device at the sizes of models, and the fused norm and rotation of queries and keys, compared
//! with the CPU in f64.
//!
//! `TOLERANCE` has a tolerance for each of f32, f16 and bf16, in this order. The tests of attention double it.
//! `random(dims, std, dtype)` draws from the normal distribution with mean 0 and standard deviation `std`.

use trainable_candle_core::ops::attention::{
    HeadSizes, Stream, normed_attention, packed_attention, scaled_dot_product_attention,
};
use trainable_candle_core::ops::norm::rms_norm_rope;
use trainable_candle_core::raw::to_f64_vec;
use trainable_candle_core::{DType, Result, Tensor};

use super::gpu;
use super::products::{TOLERANCE, compare, compare_with, in_f64, near, random};
use super::value_and_gradients;

/// (B, S, D) → (B, heads, S, D / heads), a view: in memory the heads of a position are adjacent.
fn split_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, length, width) = (x.dims()[0], x.dims()[1], x.dims()[2]);
    x.reshape((batch, length, heads, width / heads))?.transpose(1, 2)
}

/// Attention of q, k and v in separate tensors (B, S, D), where D is the features of all heads; q may have another S
/// than k and v.
fn separate(x: &[Tensor], heads: usize, is_causal: bool) -> Result<Tensor> {
    let [q, k, v] = [split_heads(&x[0], heads)?, split_heads(&x[1], heads)?, split_heads(&x[2], heads)?];
    let mixed = scaled_dot_product_attention(&q, &k, &v, /* mask: */ None, is_causal, /* scale: */ None)?;
    mixed.transpose(1, 2)?.reshape(x[0].dims())
}

/// Attention over packed tensors: q, k and v side by side in one tensor if `is_self_attention`, else q in one tensor,
/// and the k and v of a context side by side in a second one.
fn packed(x: &[Tensor], is_self_attention: bool, heads: usize, is_causal: bool) -> Result<Tensor> {
    let first_joined = usize::from(!is_self_attention);
    let joined = Tensor::cat(&x[first_joined..].iter().collect::<Vec<_>>(), 2)?;
    if is_self_attention {
        return packed_attention(&joined, None, heads, is_causal);
    }
    packed_attention(&x[0], Some(&joined), heads, is_causal)
}

struct Shape {
    model: &'static str,
    queries: usize,
    /// The number of keys of a context; without a context the tokens attend to one another.
    keys: Option<usize>,
    heads: usize,
    /// The features of a head.
    width: usize,
    is_causal: bool,
    /// Whether the model has its projections (q, k and v, or k and v of a context) side by side in one tensor.
    is_packed: bool,
}

const fn shape(model: &'static str, queries: usize, heads: usize, width: usize) -> Shape {
    Shape { model, queries, keys: None, heads, width, is_causal: false, is_packed: true }
}

/// The attentions of the models for one image. The result of a head does not depend on the number of heads, with one
/// exception: if few heads would leave the GPU idle, several thread blocks compute partial sums of the gradients of a
/// tile of keys. If a name ends in "of N heads", the model has N heads, for which the reference would take long. The
/// shape then has fewer heads: just enough that one thread block computes the gradients of a tile of keys, as with N
/// heads.
const SHAPES: [Shape; 9] = [
    shape("SDXL, 64 x 64, of 10 heads", 4096, 4, 64),
    shape("SDXL, 32 x 32", 1024, 20, 64),
    Shape { keys: Some(77), ..shape("SDXL, 64 x 64, to the text", 4096, 10, 64) },
    Shape { keys: Some(77), ..shape("SDXL, 32 x 32, to the text", 1024, 20, 64) },
    Shape { is_packed: false, ..shape("Flux, text of 512 and image, of 24 heads", 4608, 3, 128) },
    Shape { is_packed: false, ..shape("SD3.5, text of 333 and image, of 38 heads", 4429, 3, 64) },
    Shape { is_causal: true, ..shape("CLIP L", 77, 12, 64) },
    Shape { is_causal: true, ..shape("CLIP G", 77, 20, 64) },
    shape("VAE, 32 x 32", 1024, 1, 512),
];

#[test]
#[ignore = "needs a CUDA device"]
fn attention_of_the_models_equals_the_cpu() {
    let device = gpu().unwrap();
    for Shape { model, queries, keys, heads, width, is_causal, is_packed } in SHAPES {
        // The inputs, rounded to bf16 and then to f16, are exact in every dtype, so all dtypes share one reference.
        let exact = |length: usize| random(&[1, length, heads * width], 1.0, DType::BF16).to_dtype(DType::F16).unwrap();
        let drawn = [exact(queries), exact(keys.unwrap_or(queries)), exact(keys.unwrap_or(queries))];
        let attend = |x: &[Tensor]| separate(x, heads, is_causal);
        let attend_packed = |x: &[Tensor]| packed(x, keys.is_none(), heads, is_causal);
        let expected = in_f64(&attend, &drawn);
        for (dtype, tolerance) in TOLERANCE {
            let inputs = drawn.each_ref().map(|x| x.to_dtype(dtype).unwrap());
            let what = format!("{} {model}", dtype.as_str());
            compare_with(&what, &attend, &expected, &inputs, &device, 2.0 * tolerance);
            if is_packed {
                compare_with(&format!("{what}, packed"), &attend_packed, &expected, &inputs, &device, 2.0 * tolerance);
            }
        }
    }
}

/// Sizes with incomplete tiles, tiles of queries or keys that several thread blocks share, and tiles of one thread
/// block. Results and gradients are the same in each run, bit for bit, also if only one operand needs a gradient.
#[test]
#[ignore = "needs a CUDA device"]
fn attention_shared_by_blocks_equals_the_cpu_and_repeats() {
    let device = gpu().unwrap();
    for (batch, queries, keys, heads, width) in [
        (1, 600, 700, 26, 128),
        (2, 1210, 700, 13, 64),
        (2, 400, 2300, 10, 128),
        (1, 300, 270, 3, 96),
        (2, 257, 1000, 2, 40),
        (1, 1030, 256, 70, 64),
        // Few keys: several thread blocks share a head, or one thread block has several heads.
        (2, 1210, 77, 13, 64),
        (5, 300, 80, 40, 40),
        (1, 257, 1, 3, 8),
    ] {
        let exact =
            |length: usize| random(&[batch, length, heads * width], 1.0, DType::BF16).to_dtype(DType::F16).unwrap();
        let drawn = [exact(queries), exact(keys), exact(keys)];
        let attend = |x: &[Tensor]| separate(x, heads, false);
        let expected = in_f64(&attend, &drawn);
        // f16 and bf16, whose kernels use tensor cores.
        for (dtype, tolerance) in &TOLERANCE[1..] {
            let inputs = drawn.each_ref().map(|x| x.to_dtype(*dtype).unwrap());
            let what = format!("{} {batch} x {queries} to {keys}, {heads} heads of {width}", dtype.as_str());
            compare_with(&what, &attend, &expected, &inputs, &device, 2.0 * tolerance);
            let moved = inputs.each_ref().map(|x| x.to_device(&device).unwrap());
            let first = value_and_gradients(&attend, &moved).unwrap();
            for round in 0..3 {
                let again = value_and_gradients(&attend, &moved).unwrap();
                assert_eq!(to_f64_vec(again.0.raw()).unwrap(), to_f64_vec(first.0.raw()).unwrap(), "{what}, {round}");
                assert_eq!(again.1, first.1, "{what}, {round}");
            }
            for index in 0..3 {
                // A function of one input; the other two are constants, which need no gradient.
                let of_one_input = |x: &[Tensor]| {
                    let mut all = moved.clone();
                    all[index] = x[0].clone();
                    separate(&all, heads, false)
                };
                let (_, grads) = value_and_gradients(&of_one_input, &moved[index..=index]).unwrap();
                assert_eq!(grads[0], first.1[index], "{what}, of input {index} alone");
            }
        }
    }
}

/// Sizes with fewer steps (a tile of queries times a tile of keys) to share than thread blocks. A thread block without
/// a shared step writes no partial sum, and the kernel that adds the partial sums must not read the memory for it.
#[test]
#[ignore = "needs a CUDA device"]
fn attention_of_fewer_steps_than_blocks_reads_only_what_was_written() {
    let device = gpu().unwrap();
    // The third size has 133 tiles of 192 queries in the forward pass: each of an H100's 132 thread blocks computes one
    // tile alone, and they share only the eight steps of the last tile.
    for (queries, keys, heads, width) in
        [(257, 1000, 1, 40), (1000, 300, 2, 128), (192 * 132 + 1, 1024, 1, 64), (1000, 77, 2, 64)]
    {
        let drawn = [queries, keys, keys].map(|length| random(&[1, length, heads * width], 1.0, DType::BF16));
        let attend = |x: &[Tensor]| separate(x, heads, false);
        // Fill with NaN the memory that the kernels will reuse. On an H100, with 132 multiprocessors and two partial
        // sums for the thread block of each, these are: the partial sums of the forward pass for widths up to 64 (tiles
        // of 192 queries) and up to 128 (tiles of 128 queries), with two more numbers per query for its softmax; those
        // of the backward pass (keys and values of a tile of 128 keys); and the sums for the gradients of the queries.
        for values in [2 * 132 * 192 * 66, 2 * 132 * 128 * 130, 2 * 132 * 2 * 128 * width, queries * heads * width] {
            drop(Tensor::full(f64::NAN, values, DType::F32, &device).unwrap());
        }
        compare(
            &format!("{queries} to {keys}, {heads} heads of {width}"),
            &attend,
            &drawn,
            &device,
            2.0 * TOLERANCE[2].1,
        );
    }
}

/// The scores of all queries do not fit in the memory that the kernels use for scores, so the kernels take some queries
/// at a time.
#[test]
#[ignore = "needs a CUDA device"]
fn attention_of_wide_heads_takes_some_queries_at_a_time() {
    let device = gpu().unwrap();
    // One head of 136 features: 2,900 queries, 12,000 keys and values.
    let inputs = [2900, 12_000, 12_000].map(|length| random(&[1, length, 136], 1.0, DType::F32));
    // Without a mask, not causal, and with the default scale.
    let attend = |x: &[Tensor]| scaled_dot_product_attention(&x[0], &x[1], &x[2], None, false, None);
    let doubles: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
    let expected = to_f64_vec(attend(&doubles).unwrap().raw()).unwrap();
    let moved: Vec<Tensor> = inputs.iter().map(|x| x.to_device(&device).unwrap()).collect();
    let found = to_f64_vec(attend(&moved).unwrap().raw()).unwrap();
    near("2,900 to 12,000", &found, &expected, 2.0 * TOLERANCE[0].1);
}

/// Projections side by side in one tensor, at widths such as SDXL's. The kernels read them there without a copy, and
/// write their gradients side by side too.
#[test]
#[ignore = "needs a CUDA device"]
fn attention_over_packed_projections_equals_the_cpu() {
    let device = gpu().unwrap();
    for (queries, keys, heads, width, is_causal) in [
        (1024, None, 2, 64, false),
        (130, None, 3, 64, false),
        (256, Some(77), 5, 64, false),
        (77, None, 2, 64, true),
        (96, None, 2, 128, false),
        (33, Some(7), 3, 40, false),
        (40, Some(50), 3, 160, false),
    ] {
        for (dtype, tolerance) in TOLERANCE {
            // The first input has q, k and v, or only q if a second input has the k and v of a context.
            let in_first = if keys.is_some() { 1 } else { 3 };
            let mut inputs = vec![random(&[2, queries, in_first * heads * width], 1.0, dtype)];
            inputs.extend(keys.map(|keys| random(&[2, keys, 2 * heads * width], 1.0, dtype)));
            let what = format!("{} {queries} to {keys:?}, {heads} heads of {width}", dtype.as_str());
            let function = |x: &[Tensor]| packed_attention(&x[0], x.get(1), heads, is_causal);
            compare(&what, &function, &inputs, &device, 2.0 * tolerance);
        }
    }
}

/// Heads one after the other in memory (`heads_outside`), heads that are adjacent at each position (`heads_inside`),
/// and rotated pairs of both kinds (adjacent features if `interleaved`, else features half a width apart): at the
/// models' widths (64 to 256), at widths that are read one element at a time (2, 210), and at widths that do not fit
/// into the registers of a warp (210, 1104, 1200).
#[test]
#[ignore = "needs a CUDA device"]
fn norms_and_rotations_of_queries_and_keys_equal_the_cpu() {
    let device = gpu().unwrap();
    for (heads, length, width, interleaved) in [
        (24, 300, 128, true),
        (16, 333, 128, false),
        (19, 333, 64, true),
        (8, 77, 256, false),
        (3, 65, 40, true),
        (3, 65, 2, false),
        (2, 5, 1104, false),
        (2, 5, 1200, true),
        (2, 5, 210, true),
        (2, 5, 210, false),
    ] {
        let angles = random(&[length, width / 2], 1.0, DType::F32);
        let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
        for (dtype, tolerance) in TOLERANCE {
            let inputs = [random(&[2, length, heads, width], 2.0, dtype), random(&[width], 1.0, dtype)];
            let norm_and_rotate = |x: &Tensor, weight: Option<&Tensor>| {
                let (cos, sin) = (cos.to_device(x.device())?, sin.to_device(x.device())?);
                rms_norm_rope(x, weight, &cos, &sin, interleaved, 1e-6)
            };
            // The input is (B, S, heads, width); norm and rotation take and return (B, heads, S, width).
            let heads_inside = |x: &[Tensor]| norm_and_rotate(&x[0].transpose(1, 2)?, x.get(1))?.transpose(1, 2);
            let heads_outside =
                |x: &[Tensor]| norm_and_rotate(&x[0].transpose(1, 2)?.contiguous()?, x.get(1))?.transpose(1, 2);
            let what = format!("{} {length} of {heads} heads of {width}, interleaved {interleaved}", dtype.as_str());
            let expected = in_f64(&heads_inside, &inputs);
            compare_with(&what, &heads_inside, &expected, &inputs, &device, tolerance);
            compare_with(&format!("{what}, heads outside"), &heads_outside, &expected, &inputs, &device, tolerance);
            compare(&format!("{what}, no weight"), &heads_inside, &inputs[..1], &device, tolerance);
        }
    }
}

/// Attention over the tokens of one stream and of two, whose projections have other columns beside queries, keys and
/// values, at sizes for the kernels of compute capability 9.0 and for the general kernels.
#[test]
#[ignore = "needs a CUDA device"]
fn attention_over_projections_of_streams_equals_the_cpu() {
    let device = gpu().unwrap();
    for (lengths, heads, width, other_columns) in [
        (&[300, 77][..], 3, 128, 0),
        (&[333][..], 2, 128, 384),
        (&[77, 300][..], 3, 64, 64),
        (&[280][..], 4, 64, 0),
        (&[40, 9][..], 2, 40, 6),
        // So many tokens that the kernels for 9.0 split items among blocks.
        (&[2048][..], 2, 128, 0),
        (&[1900, 148][..], 2, 64, 0),
    ] {
        let scale = random(&[width], 1.0, DType::F32);
        // One table for all streams: a stream of n tokens takes the first n rows. No stream has more tokens than the
        // table has rows: 300 or, if that is more, the tokens of the first stream.
        let angles = random(&[300.max(lengths[0]), width / 2], 1.0, DType::F32);
        let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
        for is_rotated in [true, false] {
            let run = |x: &[Tensor]| {
                let moved = |tensor: &Tensor| tensor.to_device(x[0].device());
                let dtype = if x[0].dtype() == DType::F64 { DType::F64 } else { DType::F32 };
                let scale = moved(&scale)?.to_dtype(dtype)?;
                let tables = x
                    .iter()
                    .map(|x| {
                        let of_its_tokens = |table: &Tensor| moved(&table.narrow(0, 0, x.dims()[1])?);
                        Ok([of_its_tokens(&cos)?, of_its_tokens(&sin)?])
                    })
                    .collect::<Result<Vec<_>>>()?;
                let stream = |(x, tables)| {
                    let [cos, sin]: &[Tensor; 2] = tables;
                    // The norm of queries has a scale, the norm of keys has none.
                    Stream { x, norms: [Some(&scale), None], angles: is_rotated.then_some([cos, sin]) }
                };
                let streams: Vec<_> = x.iter().zip(&tables).map(stream).collect();
                normed_attention(&streams, HeadSizes { heads, width, eps: 1e-6 }, /* mask: */ None)
            };
            for (dtype, tolerance) in TOLERANCE {
                let projections = |&length: &usize| random(&[2, length, 3 * heads * width + other_columns], 1.0, dtype);
                let inputs: Vec<Tensor> = lengths.iter().map(projections).collect();
                let what = format!("{} {lengths:?} of {heads} heads of {width}, rotated {is_rotated}", dtype.as_str());
                compare(&what, &run, &inputs, &device, 2.0 * tolerance);
            }
        }
    }
}
