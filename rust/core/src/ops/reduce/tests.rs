//! Tests of reductions: shapes, precision, empty tensors, equal elements, NaN, errors.

use half::bf16;

use super::*;
use crate::raw::{from_vec, to_f64_vec};
use crate::{Device, Var, grad};

fn tensor(values: &[f64], dims: &[usize]) -> Tensor {
    Tensor::constant(from_vec(values.to_vec(), dims))
}

fn values(t: &Tensor) -> Vec<f64> {
    to_f64_vec(t.raw()).unwrap()
}

fn gradient(x: &Tensor, function: impl Fn(&Tensor) -> Result<Tensor>) -> Vec<f64> {
    let x = Var::from_tensor(x).unwrap();
    let y = function(&x).unwrap();
    let ones = Tensor::ones(y.shape(), y.dtype(), y.device()).unwrap();
    let retain_graph = false;
    values(grad(&y, &[&x], Some(&ones), retain_graph).unwrap()[0].as_ref().unwrap())
}

#[test]
fn results_keep_the_reduced_dimensions_only_with_keepdim() {
    let x = tensor(&[0.0; 24], &[2, 3, 4]);
    for (dims, dropped, kept) in [
        (vec![1], vec![2, 4], vec![2, 1, 4]),
        (vec![2, 0], vec![3], vec![1, 3, 1]),
        (vec![0, 1, 2], vec![], vec![1, 1, 1]),
        (vec![], vec![2, 3, 4], vec![2, 3, 4]),
    ] {
        let results = |keepdim| {
            [
                x.sum(&dims, keepdim).unwrap(),
                x.mean(&dims, keepdim).unwrap(),
                x.var(&dims, keepdim, /* correction */ 0.0).unwrap(),
                x.max(&dims, keepdim).unwrap(),
                x.min(&dims, keepdim).unwrap(),
                x.logsumexp(&dims, keepdim).unwrap(),
            ]
        };
        assert!(results(false).iter().all(|y| y.dims() == dropped));
        assert!(results(true).iter().all(|y| y.dims() == kept));
    }
}

#[test]
fn the_variance_matches_its_definition() {
    let data = [1.0, 4.0, -2.0, 0.5, 7.0, 3.0];
    let x = tensor(&data, &[2, 3]);
    // `correction` is subtracted from the number of elements in the denominator.
    let expected = |part: &[f64], correction: f64| {
        let mean = part.iter().sum::<f64>() / part.len() as f64;
        part.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (part.len() as f64 - correction)
    };
    let found = values(&x.var(&[1], false, 1.0).unwrap());
    assert!((found[0] - expected(&data[..3], 1.0)).abs() < 1e-12);
    assert!((found[1] - expected(&data[3..], 1.0)).abs() < 1e-12);
    let all = x.var(&[0, 1], false, 0.5).unwrap().item().unwrap();
    assert!((all - expected(&data, 0.5)).abs() < 1e-12);
}

#[test]
fn the_variance_of_bf16_is_computed_in_f32() {
    // bf16 cannot represent the mean, 100.25: near 100, bf16 numbers are 0.5 apart. The distances from the mean are
    // 0.75, 0.25, 0.25 and 0.75, so the variance is (2 · 0.75² + 2 · 0.25²) / 4 = 0.3125.
    let data = [99.5, 100.0, 100.5, 101.0].map(bf16::from_f64);
    let x = Tensor::constant(from_vec(data.to_vec(), 4));
    assert_eq!(x.var(&[0], false, 0.0).unwrap().item().unwrap(), bf16::from_f64(0.3125).to_f64());
}

#[test]
fn reductions_of_too_few_elements_behave_as_in_torch() {
    let x = tensor(&[], &[2, 0]);
    assert_eq!(values(&x.sum(&[1], false).unwrap()), [0.0, 0.0]);
    assert_eq!(values(&x.logsumexp(&[1], false).unwrap()), [f64::NEG_INFINITY; 2]);
    assert!(values(&x.mean(&[1], false).unwrap()).iter().all(|v| v.is_nan()));
    assert!(x.mean_all().unwrap().item().unwrap().is_nan());
    assert!(values(&x.var(&[1], false, 1.0).unwrap()).iter().all(|v| v.is_nan()));
    assert!(tensor(&[3.0], &[1]).var(&[0], false, 1.0).unwrap().item().unwrap().is_nan());
    assert_eq!(x.max(&[0], false).unwrap().dims(), [0]);
    for error in [x.max(&[1], false), x.min_all(), x.max(&[0, 1], true), x.argmax(1, false)] {
        let message = error.unwrap_err().to_string();
        assert!(message.contains("[2, 0]") && message.contains("at least one"), "{message}");
    }
}

#[test]
fn equal_extremes_share_the_gradient_except_over_one_dimension() {
    let x = tensor(&[1.0, 5.0, 5.0, 0.0, 0.0, 5.0], &[2, 3]);
    // Over one dimension, the first of the equal extremes gets the whole gradient.
    assert_eq!(gradient(&x, |x| x.max(&[1], false)), [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]);
    assert_eq!(gradient(&x, |x| x.min(&[1], true)), [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
    let third = 1.0 / 3.0;
    assert_eq!(gradient(&x, Tensor::max_all), [0.0, third, third, 0.0, 0.0, third]);
    assert_eq!(gradient(&x, |x| x.min(&[1, 0], false)), [0.0, 0.0, 0.0, 0.5, 0.5, 0.0]);
    // For a vector, `max_all` still shares the gradient, but `max` over its one dimension does not.
    assert_eq!(gradient(&tensor(&[2.0, 2.0], &[2]), Tensor::max_all), [0.5, 0.5]);
    assert_eq!(gradient(&tensor(&[2.0, 2.0], &[2]), |x| x.max(&[0], false)), [1.0, 0.0]);
}

#[test]
fn nan_is_both_the_largest_and_the_smallest_element() {
    let x = tensor(&[1.0, f64::NAN, 3.0], &[3]);
    for y in [x.max(&[0], false), x.min(&[0], false), x.max_all(), x.min_all()] {
        assert!(y.unwrap().item().unwrap().is_nan());
    }
    assert_eq!(x.argmax(0, false).unwrap().item().unwrap(), 1.0);
}

#[test]
fn argmax_is_the_index_of_the_first_largest_element() {
    let x = tensor(&[1.0, 5.0, 5.0, 0.0, 6.0, 5.0], &[2, 3]);
    assert_eq!(x.argmax(1, false).unwrap().to_vec::<u32>().unwrap(), [1, 1]);
    let first = x.argmax(0, true).unwrap();
    assert_eq!((first.dims(), first.to_vec::<u32>().unwrap()), (&[1, 3][..], vec![0, 1, 0]));
    assert!(!Var::from_tensor(&x).unwrap().argmax(0, true).unwrap().requires_grad());
}

#[test]
fn logsumexp_neither_overflows_nor_makes_nan_of_infinities() {
    let infinity = f64::INFINITY;
    let x = tensor(&[1000.0, 1000.0, -infinity, -infinity, -infinity, 2.0, infinity, 1.0], &[4, 2]);
    let found = values(&x.logsumexp(&[1], false).unwrap());
    assert!((found[0] - (1000.0 + 2f64.ln())).abs() < 1e-12);
    assert_eq!(found[1..], [-infinity, 2.0, infinity]);
    let gradient = gradient(&x, |x| x.logsumexp(&[1], false));
    assert!((gradient[0] - 0.5).abs() < 1e-12 && (gradient[1] - 0.5).abs() < 1e-12);
    // The gradient of the last row is not compared: it contains e^(∞ - ∞), which is NaN.
    assert_eq!(gradient[2..6], [0.0, 0.0, 0.0, 1.0]);
}

#[test]
fn the_gradient_of_logsumexp_of_bf16_sums_to_one() {
    // The gradient is e^(x - result). The result is about 59, where bf16 numbers are 1/4 apart. If the backward pass
    // read the result rounded to bf16, x - result would be wrong by up to 1/8.
    let data: Vec<bf16> = (0..64).map(|i| bf16::from_f32(50.0 + (i % 7) as f32)).collect();
    let x = Tensor::constant(from_vec(data, 64));
    let total: f64 = gradient(&x, |x| x.logsumexp(&[0], false)).iter().sum();
    // Each gradient is rounded to bf16, with a relative error of at most 2^-8 < 4e-3.
    assert!((total - 1.0).abs() < 4e-3, "{total}");
}

#[test]
fn cumulative_sums_run_along_their_dimension() {
    let x = tensor(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[3, 2]);
    assert_eq!(values(&x.cumsum(0).unwrap()), [1.0, 2.0, 4.0, 6.0, 9.0, 12.0]);
    assert_eq!(values(&x.cumsum(1).unwrap()), [1.0, 3.0, 3.0, 7.0, 5.0, 11.0]);
    assert_eq!(gradient(&x, |x| x.cumsum(0)), [3.0, 3.0, 2.0, 2.0, 1.0, 1.0]);
}

#[test]
fn wrong_dimensions_and_dtypes_are_errors() {
    let x = tensor(&[1.0, 2.0], &[1, 2]);
    assert!(matches!(x.sum(&[2], false), Err(Error::Index { op: "sum", .. })));
    assert!(matches!(x.mean(&[1, 0, 1], false), Err(Error::Argument { op: "mean", .. })));
    assert!(matches!(x.cumsum(5), Err(Error::Index { op: "cumsum", .. })));
    assert!(matches!(x.argmax(2, false), Err(Error::Index { op: "argmax", .. })));
    let integers = Tensor::zeros(3, DType::I64, &Device::Cpu).unwrap();
    for result in [integers.mean_all(), integers.cumsum(0), integers.logsumexp(&[0], false)] {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("i64") && message.contains("to()"), "{message}");
    }
}

#[test]
fn integers_sum_to_i64() {
    let bytes = Tensor::from_vec(vec![200u8, 200, 1, 2], (2, 2), &Device::Cpu).unwrap();
    let rows = bytes.sum(&[1], false).unwrap();
    assert_eq!(rows.to_vec::<i64>().unwrap(), [400, 3]);
}
