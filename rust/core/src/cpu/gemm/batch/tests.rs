//! Products of tensors, compared with candle's products in f64: batches, strides, vectors, destinations, errors.

use candle_core::{D, Device};

use super::*;

/// Fixed numbers from -1 to 1 without a visible pattern, rounded to `dtype`.
fn numbers(dims: &[usize], dtype: DType) -> Raw {
    let len: usize = dims.iter().product();
    let values: Vec<f64> = (0..len).map(|i| ((i * 7919 + 13) % 1009) as f64 / 504.5 - 1.0).collect();
    Raw::from_vec(values, dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Candle's product of contiguous copies, in f64.
fn oracle(a: &Raw, b: &Raw) -> Raw {
    let wide = |x: &Raw| x.to_dtype(DType::F64).unwrap().contiguous().unwrap();
    wide(a).broadcast_matmul(&wide(b)).unwrap()
}

/// Checks that `found` has the shape of `expected`, and its values up to the rounding errors of sums of `k` products.
fn assert_close(found: &Raw, expected: &Raw, k: usize) {
    assert_eq!(found.dims(), expected.dims());
    // The relative error: in bf16 and f16, that of rounding the result, because their sums are in f32; otherwise, that
    // of adding k products. In f64 it is twice as large, because the expected value has the same error.
    let unit = match found.dtype() {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F32 => 2f64.powi(-24) * k as f64,
        _ => 2f64.powi(-52) * k as f64,
    };
    let values = |x: &Raw| x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    for (found, expected) in values(found).into_iter().zip(values(expected)) {
        // A result is a sum of k terms and at most one old value, all of magnitude 1 or less. So it is at most 1 + k.
        assert!((found - expected).abs() <= 2.0 * unit * (1.0 + k as f64), "found {found}, expected {expected}");
    }
}

#[test]
fn batches_broadcast_as_in_candle() {
    for (a, b) in [
        (&[7, 5][..], &[5, 9][..]),
        (&[3, 7, 5], &[3, 5, 9]),
        (&[3, 7, 5], &[5, 9]),
        (&[2, 3, 7, 5], &[5, 9]),
        (&[2, 3, 1, 5], &[5, 9]),
        (&[7, 5], &[3, 5, 9]),
        (&[2, 1, 7, 5], &[3, 5, 9]),
        (&[2, 3, 7, 5], &[3, 5, 9]),
        (&[2, 1, 7, 5], &[1, 4, 5, 9]),
        (&[64, 3, 17], &[64, 17, 5]),
        (&[1, 1, 7, 5], &[1, 5, 1]),
    ] {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let (a, b) = (numbers(a, dtype), numbers(b, dtype));
            assert_close(&matmul(&a, &b).unwrap(), &oracle(&a, &b), a.dim(D::Minus1).unwrap());
        }
    }
}

#[test]
fn operands_may_have_any_strides() {
    let a = numbers(&[4, 6, 10, 8], DType::F32);
    let weight = numbers(&[9, 8], DType::F32);
    let views = [
        a.clone(),
        a.narrow(2, 3, 5).unwrap(),
        a.transpose(0, 2).unwrap(),
        a.transpose(1, 2).unwrap().narrow(1, 2, 7).unwrap(),
        a.narrow(1, 1, 1).unwrap().broadcast_as((4, 6, 10, 8)).unwrap(),
        a.narrow(0, 2, 2).unwrap().transpose(0, 1).unwrap(),
    ];
    for a in views {
        let by_weight = matmul(&a, &weight.t().unwrap()).unwrap();
        assert_close(&by_weight, &oracle(&a, &weight.t().unwrap()), 8);
        let gram = matmul(&a, &a.transpose(2, 3).unwrap()).unwrap();
        assert_close(&gram, &oracle(&a, &a.transpose(2, 3).unwrap()), 8);
        let outer = matmul(&a.transpose(2, 3).unwrap(), &a).unwrap();
        assert_close(&outer, &oracle(&a.transpose(2, 3).unwrap(), &a), a.dim(2).unwrap());
    }
}

#[test]
fn vectors_are_a_row_or_a_column() {
    let (row, column) = (numbers(&[5], DType::F32), numbers(&[10], DType::F32).narrow(0, 2, 5).unwrap());
    let batch = numbers(&[3, 5, 4], DType::F32);
    let as_row = oracle(&row.unsqueeze(0).unwrap(), &batch).squeeze(1).unwrap();
    assert_close(&matmul(&row, &batch).unwrap(), &as_row, 5);
    let transposed = batch.transpose(1, 2).unwrap();
    let as_column = oracle(&transposed, &column.unsqueeze(1).unwrap()).squeeze(2).unwrap();
    assert_close(&matmul(&transposed, &column).unwrap(), &as_column, 5);
    let dot = oracle(&row.unsqueeze(0).unwrap(), &column.unsqueeze(1).unwrap()).reshape(()).unwrap();
    assert_close(&matmul(&row, &column).unwrap(), &dot, 5);
}

#[test]
fn empty_dimensions_give_empty_results_or_zeros() {
    for (a, b, result) in [
        (&[0, 5][..], &[5, 4][..], &[0, 4][..]),
        (&[3, 5], &[5, 0], &[3, 0]),
        (&[0, 3, 5], &[5, 4], &[0, 3, 4]),
        (&[2, 3, 0], &[2, 0, 4], &[2, 3, 4]),
        (&[0], &[0], &[]),
    ] {
        let product = matmul(&numbers(a, DType::BF16), &numbers(b, DType::BF16)).unwrap();
        assert_eq!(product.dims(), result);
        let sum = product.to_dtype(DType::F32).unwrap().abs().unwrap().sum_all().unwrap();
        assert_eq!(sum.to_scalar::<f32>().unwrap(), 0.0);
    }
}

#[test]
fn products_are_added_to_a_part_of_a_buffer() {
    for (operands, buffer) in [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::F16, DType::F16)] {
        let (a, b) = (numbers(&[33, 7], operands), numbers(&[33, 20], operands));
        let a = a.t().unwrap();
        let before = numbers(&[400], buffer);
        let flat = before.copy().unwrap();
        let dst = flat.narrow(0, 100, 140).unwrap().reshape((7, 20)).unwrap();
        matmul_accumulate(&dst, &a, &b, 0.5).unwrap();
        let old = before.narrow(0, 100, 140).unwrap().reshape((7, 20)).unwrap().to_dtype(DType::F64).unwrap();
        assert_close(&dst, &(old + (oracle(&a, &b) * 0.5).unwrap()).unwrap(), 33);
        // `dst` is elements 100 to 239. The other elements of the buffer keep their values.
        for (start, len) in [(0, 100), (240, 160)] {
            let part =
                |x: &Raw| x.narrow(0, start, len).unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(part(&flat), part(&before));
        }
    }
}

#[test]
fn mismatched_shapes_strides_and_dtypes_are_errors() {
    let in_f32 = |dims: &[usize]| numbers(dims, DType::F32);
    let shape_error = |a: &[usize], b: &[usize]| matmul(&in_f32(a), &in_f32(b)).unwrap_err().to_string();
    let expected = "expected (..., m, k) and (..., k, n) with batch dimensions that broadcast";
    assert_eq!(shape_error(&[3, 4], &[5, 6]), format!("matmul: found shapes [3, 4] and [5, 6], {expected}"));
    for (a, b) in [(&[2, 3, 4][..], &[3, 4, 5][..]), (&[], &[4, 5]), (&[4], &[5]), (&[3, 4], &[])] {
        assert!(shape_error(a, b).starts_with("matmul: found shapes"));
    }
    let message = matmul(&in_f32(&[3, 4]), &numbers(&[4, 5], DType::BF16)).unwrap_err().to_string();
    assert_eq!(message, "matmul: found dtypes f32 and bf16, expected the same; convert one with to()");
    let integers = numbers(&[4, 4], DType::U32);
    assert!(matmul(&integers, &integers).unwrap_err().to_string().starts_with("matmul: found dtype u32"));

    let (a, b) = (in_f32(&[3, 4]), in_f32(&[4, 5]));
    let destination_error = |dst: &Raw| matmul_accumulate(dst, &a, &b, 1.0).unwrap_err().to_string();
    let wrong_shape = destination_error(&in_f32(&[5, 3]));
    assert!(wrong_shape.starts_with("matmul_accumulate: found a destination of shape [5, 3]"));
    let wrong_strides = destination_error(&in_f32(&[5, 3]).t().unwrap());
    assert!(wrong_strides.starts_with("matmul_accumulate: found a destination with strides"));
    assert!(destination_error(&numbers(&[3, 5], DType::BF16)).contains("found a result of dtype bf16"));
}

/// Products replace columns of a larger matrix or are added to them; the other columns keep their values.
#[test]
fn products_are_written_to_ranges_of_columns() {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        for (m, k) in [(1, 3), (7, 40), (130, 5), (65, 200)] {
            let (a, b) = (numbers(&[m, k], dtype), numbers(&[2, 6, k], dtype));
            for accumulate in [false, true] {
                let dst = numbers(&[m, 20], dtype);
                let before = dst.to_dtype(DType::F64).unwrap().copy().unwrap();
                let factors = [0, 1].map(|i| b.get(i).unwrap().t().unwrap());
                let ranges = [3, 11].map(|start| dst.narrow(1, start, 6).unwrap());
                // For each product: its destination and its two factors.
                let terms = [[&ranges[0], &a, &factors[0]], [&ranges[1], &a, &factors[1]]];
                write_products(&terms, 0.5, accumulate).unwrap();
                for (range, (start, factor)) in ranges.iter().zip([3, 11].into_iter().zip(&factors)) {
                    let product = (oracle(&a, factor) * 0.5).unwrap();
                    let old = before.narrow(1, start, 6).unwrap();
                    let expected = if accumulate { (product + old).unwrap() } else { product };
                    assert_close(range, &expected, k);
                }
                // The products are in columns 3 to 8 and 11 to 16. The others are not written.
                let wide = dst.to_dtype(DType::F64).unwrap();
                for (start, length) in [(0, 3), (9, 2), (17, 3)] {
                    let part = |x: &Raw| x.narrow(1, start, length).unwrap().flatten_all().unwrap().to_vec1::<f64>();
                    assert_eq!(part(&wide).unwrap(), part(&before).unwrap());
                }
            }
        }
    }
}
