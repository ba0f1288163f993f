//! Tests of operations with ids against plain loops: repeated ids, strides, threads, quantized matrices, errors.

use half::bf16;

use super::*;
use crate::cpu::pool::tests::with_1_and_n_threads;
use crate::quantized::{Format, Ggml};
use crate::raw::{from_vec, to_f64_vec};
use crate::{Device, Quantized, Var, grad};

/// Irregular numbers from -1 to about 1.
fn numbers(dims: &[usize]) -> Tensor {
    let count = dims.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|i| ((i * 7919) % 10_007) as f32 / 5000.0 - 1.0).collect();
    Tensor::constant(from_vec(values, dims))
}

/// Irregular u32 ids below `size`; with more than `size` ids, some repeat.
fn some_ids(dims: &[usize], size: usize) -> Tensor {
    let count = dims.iter().product::<usize>();
    Tensor::constant(from_vec((0..count).map(|i| ((i * 31 + i / 7) % size) as u32).collect::<Vec<_>>(), dims))
}

fn values(t: &Tensor) -> Vec<f64> {
    to_f64_vec(t.raw()).unwrap()
}

/// These i64 ids.
fn ids_from(values: &[i64], dims: &[usize]) -> Tensor {
    Tensor::constant(from_vec(values.to_vec(), dims))
}

/// The gradient with respect to `x` of `function(x)`, if the gradient of the result is `g`.
fn gradient(x: &Tensor, g: &Tensor, function: impl Fn(&Tensor) -> Result<Tensor>) -> Vec<f64> {
    let x = Var::from_tensor(x).unwrap();
    let y = function(&x).unwrap();
    // `false`: the tape is not needed again.
    values(grad(&y, &[&x], Some(g), false).unwrap()[0].as_ref().unwrap())
}

/// Computes `y[o, j, i] = x[o, ids[j], i]`, and the gradient with respect to x if the gradient of y is `g`; both in
/// row-major order.
fn select_by_hand(x: &Tensor, ids: &[f64], dim: usize, g: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (x, dims) = (values(x), x.dims());
    let (outer, size, inner) = (dims[..dim].iter().product(), dims[dim], dims[dim + 1..].iter().product::<usize>());
    let (mut y, mut dx) = (Vec::new(), vec![0.0; x.len()]);
    for o in 0..outer {
        for &id in ids {
            for i in 0..inner {
                let at = (o * size + id as usize) * inner + i;
                dx[at] += g[y.len()];
                y.push(x[at]);
            }
        }
    }
    (y, dx)
}

fn assert_close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= 1e-5 * e.abs().max(1.0), "element {i}: {f}, expected {e}");
    }
}

#[test]
fn select_and_its_gradient_match_plain_loops() {
    // The larger tensors are computed in several pieces. A piece need not start at the first id of an outer index (`o`
    // in `select_by_hand`).
    for (dims, dim, count) in
        [([3, 4, 5], 1, 6), ([40, 90, 70], 1, 55), ([2000, 3, 41], 0, 700), ([9, 50, 300], 2, 111)]
    {
        let x = numbers(&dims);
        let ids = some_ids(&[count], dims[dim]);
        let y = x.index_select(&ids, dim).unwrap();
        let g = numbers(y.dims());
        let (expected, expected_gradient) = select_by_hand(&x, &values(&ids), dim, &values(&g));
        assert_eq!(values(&y), expected);
        assert_close(&gradient(&x, &g, |x| x.index_select(&ids, dim)), &expected_gradient);
    }
}

#[test]
fn gather_and_its_gradient_match_plain_loops() {
    for (dims, ids_dims, dim) in
        [([3, 4, 5], [2, 9, 5], 1), ([50, 40, 30], [50, 33, 30], 1), ([300, 7, 20], [300, 7, 21], 2)]
    {
        let x = numbers(&dims);
        let ids = some_ids(&ids_dims, dims[dim]);
        let y = x.gather(&ids, dim).unwrap();
        let g = numbers(&ids_dims);
        let (x_values, id_values, g_values) = (values(&x), values(&ids), values(&g));
        let (mut expected, mut expected_gradient) = (Vec::new(), vec![0.0; x_values.len()]);
        for (n, &id) in id_values.iter().enumerate() {
            let mut at = [n / (ids_dims[1] * ids_dims[2]), n / ids_dims[2] % ids_dims[1], n % ids_dims[2]];
            at[dim] = id as usize;
            let from = (at[0] * dims[1] + at[1]) * dims[2] + at[2];
            expected.push(x_values[from]);
            expected_gradient[from] += g_values[n];
        }
        assert_eq!(y.dims(), ids_dims);
        assert_eq!(values(&y), expected);
        assert_close(&gradient(&x, &g, |x| x.gather(&ids, dim)), &expected_gradient);
    }
}

#[test]
fn strided_values_and_ids_give_the_result_of_contiguous_ones() {
    let (x, ids) = (numbers(&[5, 4]).t().unwrap(), some_ids(&[3, 4], 4).t().unwrap());
    let contiguous = |t: &Tensor| Tensor::constant(t.raw().force_contiguous().unwrap());
    let expected = embedding(&contiguous(&x), &contiguous(&ids)).unwrap();
    let found = embedding(&x, &ids).unwrap();
    assert_eq!(found.dims(), [4, 3, 5]);
    assert_eq!(values(&found), values(&expected));
}

#[test]
fn bf16_gradients_of_repeated_ids_are_summed_in_f32() {
    // In bf16, 256 + 1 is 256, so a sum of ones in bf16 would stop there.
    let x = Tensor::zeros((3, 2), DType::BF16, &Device::Cpu).unwrap();
    let ids = Tensor::constant(from_vec(vec![1i64; 1000], 1000));
    let ones = Tensor::ones((1000, 2), DType::BF16, &Device::Cpu).unwrap();
    let expected = bf16::from_f32(1000.0).to_f64();
    assert_eq!(gradient(&x, &ones, |x| embedding(x, &ids)), [0.0, 0.0, expected, expected, 0.0, 0.0]);
    let ids = Tensor::constant(from_vec(vec![1i64; 1000], (1000, 1)));
    let ones = Tensor::ones((1000, 1), DType::BF16, &Device::Cpu).unwrap();
    assert_eq!(gradient(&x, &ones, |x| x.gather(&ids, 0)), [0.0, 0.0, expected, 0.0, 0.0, 0.0]);
}

#[test]
fn the_gradient_of_repeated_ids_does_not_depend_on_the_number_of_threads() {
    let (x, ids) = (numbers(&[64, 1100]), some_ids(&[5000], 64));
    let g = numbers(&[5000, 1100]);
    let (one, many) = with_1_and_n_threads(4, || gradient(&x, &g, |x| embedding(x, &ids)));
    assert_eq!(one, many);
}

#[test]
fn integers_can_be_picked() {
    let x = Tensor::constant(from_vec(vec![10i64, 20, 30, 40], (2, 2)));
    let picked = x.index_select(&ids_from(&[1, 0, 1], &[3]), 1).unwrap();
    assert_eq!(picked.to_vec::<i64>().unwrap(), [20, 10, 20, 40, 30, 40]);
    let picked = x.gather(&ids_from(&[1, 0], &[2, 1]), 1).unwrap();
    assert_eq!(picked.to_vec::<i64>().unwrap(), [20, 30]);
}

#[test]
fn errors_name_ids_that_are_out_of_range() {
    let x = numbers(&[3, 2]);
    for (ids, id, at) in
        [(ids_from(&[0, -1], &[2]), "id -1", "position 1"), (ids_from(&[3], &[1]), "id 3", "position 0")]
    {
        for message in [
            x.index_select(&ids, 0).unwrap_err().to_string(),
            embedding(&x, &ids).unwrap_err().to_string(),
            x.gather(&ids.unsqueeze(1).unwrap(), 0).unwrap_err().to_string(),
        ] {
            assert!(message.contains(id) && message.contains(at) && message.contains("size 3"), "{message}");
        }
    }
}

#[test]
fn wrong_ids_dimensions_and_weights_are_errors() {
    let x = numbers(&[3, 2]);
    assert!(matches!(x.index_select(&numbers(&[2]), 0), Err(Error::DType { .. })));
    assert!(matches!(x.index_select(&ids_from(&[0], &[1, 1]), 0), Err(Error::Shape { .. })));
    assert!(matches!(x.index_select(&ids_from(&[0], &[1]), 2), Err(Error::Index { .. })));
    // The ids of `gather` must have as many dimensions as `x`, and here at most its 2 columns.
    assert!(matches!(x.gather(&ids_from(&[0], &[1]), 0), Err(Error::Shape { .. })));
    assert!(matches!(x.gather(&ids_from(&[0; 3], &[1, 3]), 0), Err(Error::Shape { .. })));
    assert!(matches!(embedding(&numbers(&[3]), &ids_from(&[0], &[1])), Err(Error::Shape { .. })));
}

#[test]
fn embedding_of_a_quantized_matrix_matches_its_dequantized_values() {
    let weight = Tensor::randn(0.0, 1.0, (5, 64), DType::F32, &Device::Cpu).unwrap();
    let ids = Tensor::from_vec(vec![4i64, 1, 1, 0], (2, 2), &Device::Cpu).unwrap();
    for format in [Format::Int8, Format::Fp8, Format::Ggml(Ggml::Q8_0)] {
        let matrix = Quantized::new(&weight, format).unwrap();
        let found = embedding(&matrix, &ids).unwrap();
        let expected = embedding(&matrix.dequantize(DType::F32).unwrap(), &ids).unwrap();
        assert_eq!(found.dims(), [2, 2, 64]);
        assert_eq!(found.to_vec::<f32>().unwrap(), expected.to_vec::<f32>().unwrap());
    }
}

#[test]
fn embedding_rejects_ids_beyond_a_quantized_matrix_and_formats_without_separate_rows() {
    let weight = Tensor::randn(0.0, 1.0, (5, 64), DType::F32, &Device::Cpu).unwrap();
    for format in [Format::Int8, Format::Fp8, Format::Ggml(Ggml::Q8_0)] {
        let matrix = Quantized::new(&weight, format).unwrap();
        assert!(matches!(embedding(&matrix, &ids_from(&[5], &[1])), Err(Error::Index { .. })));
    }
    // A block of nf4 codes, which share a scale, can cross rows.
    let nf4 = Quantized::new(&weight, Format::Nf4).unwrap();
    assert!(matches!(embedding(&nf4, &ids_from(&[4], &[1])), Err(Error::Argument { .. })));
}
