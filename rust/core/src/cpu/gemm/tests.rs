//! Tests of matrix products: results against a naive loop in f64, numbers of threads, and invalid arguments.

use half::{bf16, f16};

use super::*;
use crate::cpu::pool::tests::with_1_and_n_threads;

/// Returns pseudorandom numbers from -1 to 1, rounded to `T`.
fn numbers<T: Elem>(len: usize, seed: u64) -> Vec<T> {
    // Knuth's MMIX generator. The upper 24 of its 64 bits are a number from 0 to 2^24 - 1.
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            T::from_acc(T::Acc::from_f64((state >> 40) as f64 / (1 << 23) as f64 - 1.0))
        })
        .collect()
}

/// Returns the elements in f64, row by row.
fn elements<T: Elem>(a: MatRef<'_, T>) -> Vec<f64> {
    let at = |i: usize, j: usize| Real::to_f64(a.data[i * a.row_stride + j * a.col_stride].to_acc());
    (0..a.rows).flat_map(|i| (0..a.cols).map(move |j| at(i, j))).collect()
}

/// Returns for each element of `alpha * a * b`, row by row, its value and the sum of the magnitudes of its k terms.
fn naive<A: Elem, B: Elem>(a: MatRef<'_, A>, b: MatRef<'_, B>, alpha: f64) -> Vec<(f64, f64)> {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    let (a, b) = (elements(a), elements(b));
    let element = |i: usize, j: usize| {
        let terms = (0..k).map(|p| alpha * a[i * k + p] * b[p * n + j]);
        terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
    };
    (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| element(i, j)).collect()
}

/// Bounds the error of a sum of `terms` products whose magnitudes add up to `magnitude`, rounded to `C` at the end
/// (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1).
fn error_bound<C: Elem>(terms: usize, magnitude: f64) -> f64 {
    let unit = |bits: i32| f64::exp2(f64::from(-bits));
    let accumulator = if size_of::<C::Acc>() == 4 { unit(24) } else { unit(53) };
    let result = match C::DTYPE {
        candle_core::DType::BF16 => unit(8),
        candle_core::DType::F16 => unit(11),
        _ => accumulator,
    };
    // Half the distance of 2^-24 between subnormal numbers of f16.
    let smallest = if C::DTYPE == candle_core::DType::F16 { unit(25) } else { 0.0 };
    // Alpha and the old element of the result add two rounding errors. `unit(53)` is for the f64 reference, which has
    // rounding errors too, and 1.01 for products of errors.
    1.01 * ((terms as f64 + 2.0) * (accumulator + unit(53)) + result) * magnitude + smallest
}

/// Checks [`gemm`] with these operands: with and without `accumulate`, for several `alpha` and several strides of `c`.
fn check_product<A, B, C>(a: MatRef<'_, A>, b: MatRef<'_, B>)
where
    A: Elem,
    B: Elem<Acc = A::Acc>,
    C: Elem<Acc = A::Acc>,
{
    let (m, n) = (a.rows, b.cols);
    let old_elements = numbers::<C>(m * n, 3);
    for (alpha, accumulate) in [(1.0, false), (0.5, true), (-2.0, false)] {
        let product = naive(a, b, alpha);
        // Row-major, column-major, and with a gap between all elements.
        for strides in [[n, 1], [1, m], [2 * n + 1, 2]] {
            let len = if m * n == 0 { 0 } else { (m - 1) * strides[0] + (n - 1) * strides[1] + 1 };
            let nan = C::from_acc(C::Acc::NAN);
            let mut c = vec![nan; len];
            for i in 0..m {
                for j in 0..n {
                    // Without `accumulate`, the old elements must not be read: they are NaN.
                    c[i * strides[0] + j * strides[1]] = if accumulate { old_elements[i * n + j] } else { nan };
                }
            }
            gemm(MatMut::new(&mut c, [m, n], strides), a, b, alpha, accumulate);
            for i in 0..m {
                for j in 0..n {
                    // NaN replaces each element of the result. After these loops `c` has a number only if `gemm` wrote
                    // between the elements of the result.
                    let found = std::mem::replace(&mut c[i * strides[0] + j * strides[1]], nan).to_acc().to_f64();
                    let old = if accumulate { old_elements[i * n + j].to_acc().to_f64() } else { 0.0 };
                    let (sum, magnitude) = product[i * n + j];
                    let (error, bound) = ((found - old - sum).abs(), error_bound::<C>(a.cols, magnitude + old.abs()));
                    assert!(error <= bound, "({i}, {j}) of {m} x {} x {n}: {error:e} > {bound:e}", a.cols);
                }
            }
            assert!(c.iter().all(|x| x.to_acc().is_nan()), "elements between those of the result were written");
        }
    }
}

/// Sizes (m, k, n) of products: of one element, of less than a register, with incomplete tiles, of several blocks, with
/// k = 0, and without elements.
const SIZES: [[usize; 3]; 16] = [
    [1, 1, 1],
    [3, 5, 7],
    [1, 300, 65],
    [65, 300, 1],
    [2, 64, 130],
    [130, 64, 4],
    [16, 16, 12],
    [33, 17, 29],
    [100, 801, 37],
    [530, 20, 45],
    [13, 9, 1100],
    [48, 400, 48],
    [0, 3, 4],
    [4, 3, 0],
    [5, 0, 3],
    [0, 0, 0],
];

/// Checks [`gemm`] with operands of all [`SIZES`] and with several strides.
fn check_layouts<A, B, C>()
where
    A: Elem,
    B: Elem<Acc = A::Acc>,
    C: Elem<Acc = A::Acc>,
{
    for [m, k, n] in SIZES {
        // Enough elements for the widest of the strides below.
        let (a, b) = (numbers::<A>(3 * m * k + 3, 1), numbers::<B>(3 * k * n + 3, 2));
        check_product::<A, B, C>(MatRef::row_major(&a, m, k), MatRef::row_major(&b, k, n));
        check_product::<A, B, C>(MatRef::row_major(&a, k, m).t(), MatRef::row_major(&b, n, k).t());
        // Columns of a wider matrix, and a column-major matrix with a gap of one element after each column.
        check_product::<A, B, C>(MatRef::new(&a[1..], [m, k], [k + 2, 1]), MatRef::new(&b[2..], [k, n], [1, k + 1]));
        // Every second row, every second element.
        check_product::<A, B, C>(MatRef::new(&a, [m, k], [2 * k, 1]), MatRef::new(&b, [k, n], [2 * n + 1, 2]));
        // Equal rows of `a` and equal columns of `b`, then equal columns of `a` and equal rows of `b`.
        check_product::<A, B, C>(MatRef::new(&a, [m, k], [0, 1]), MatRef::new(&b, [k, n], [1, 0]));
        check_product::<A, B, C>(MatRef::new(&a, [m, k], [1, 0]), MatRef::new(&b, [k, n], [0, 1]));
    }
}

#[test]
fn f32_products_match_the_naive_loop() {
    check_layouts::<f32, f32, f32>();
}

#[test]
fn f64_products_match_the_naive_loop() {
    check_layouts::<f64, f64, f64>();
}

#[test]
fn f16_and_bf16_products_are_summed_in_f32() {
    check_layouts::<bf16, bf16, bf16>();
    check_layouts::<f16, f16, f16>();
}

#[test]
fn f16_and_bf16_operands_combine_with_f32_operands_and_results() {
    check_layouts::<bf16, bf16, f32>();
    check_layouts::<f16, f32, f32>();
}

#[test]
fn f32_results_do_not_depend_on_the_number_of_threads() {
    for [m, k, n] in [[300, 500, 200], [16, 700, 1024], [1024, 700, 16], [1, 1024, 1024], [700, 16, 300]] {
        let (a, b) = (numbers::<f32>(m * k, 1), numbers::<f32>(k * n, 2));
        for b in [MatRef::row_major(&b, k, n), MatRef::row_major(&b, n, k).t()] {
            let product = || {
                let mut c = vec![0.0f32; m * n];
                gemm(MatMut::row_major(&mut c, m, n), MatRef::row_major(&a, m, k), b, 1.0, false);
                c
            };
            for threads in [2, 3, 7] {
                let (one, many) = with_1_and_n_threads(threads, product);
                assert!(one == many, "{m} x {k} x {n} with {threads} threads");
            }
        }
    }
}

#[test]
#[should_panic(expected = "does not fit in 11 elements")]
fn matrices_larger_than_their_slices_panic() {
    MatRef::row_major(&[0.0f32; 11], 3, 4);
}

#[test]
#[should_panic(expected = "overlap")]
fn destinations_with_overlapping_elements_panic() {
    MatMut::new(&mut [0.0f32; 11], [3, 4], [2, 1]);
}

#[test]
#[should_panic(expected = "gemm: 2 x 3 times 2 x 3 does not give 2 x 3")]
fn operands_with_different_k_panic() {
    let a = [0.0f32; 6];
    gemm(
        MatMut::row_major(&mut [0.0f32; 6], 2, 3),
        MatRef::row_major(&a, 2, 3),
        MatRef::row_major(&a, 2, 3),
        1.0,
        false,
    );
}
