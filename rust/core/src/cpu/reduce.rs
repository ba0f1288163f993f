//! Reductions and cumulative sums on the CPU.
//!
//! Sums are computed in f32 (f64 for f64); results do not depend on the number of threads. A reduction over no
//! dimensions copies the tensor, whatever its dtype.

use candle_core::{CpuStorage, Shape, WithDType};
use smallvec::SmallVec;

use super::access::{elements, read1};
use super::contiguous::contiguous;
use super::elem::Elem;
use super::fold::{Fold, Max, Min, Sum, TILE, fold};
use super::pool::{GRAIN, SharedMut, par_ranges};
use super::simd::{Real, dispatch};
use super::strided::Dims;
use crate::raw::{check_allocation, own_copy};
use crate::{Error, Raw, Result, dispatch_float};

/// Computes the sums over `dims`, which stay with size 1 if `keepdim`. A sum of no elements is 0.
///
/// # Errors
/// [`Error::DType`] if the dtype is not a floating-point one, [`Error::Index`] if a dimension does not exist,
/// [`Error::OutOfMemory`] if the result or a contiguous copy of `x` does not fit into memory.
pub fn sum(x: &Raw, dims: &[usize], keepdim: bool) -> Result<Raw> {
    reduce::<Sum>("sum", x, dims, keepdim, 1.0)
}

/// Computes the means over `dims`, which must be distinct and stay with size 1 if `keepdim`. A mean of no elements is
/// NaN.
///
/// # Errors
/// As [`sum`].
pub fn mean(x: &Raw, dims: &[usize], keepdim: bool) -> Result<Raw> {
    check_dims("mean", x, dims)?;
    let count: usize = dims.iter().map(|&d| x.dims()[d]).product();
    reduce::<Sum>("mean", x, dims, keepdim, count as f64)
}

/// Computes the maxima over `dims`, which stay with size 1 if `keepdim`. A maximum is NaN if an element is NaN.
///
/// # Errors
/// As [`sum`], and [`Error::Shape`] if a dimension of `dims` has size 0.
pub fn max(x: &Raw, dims: &[usize], keepdim: bool) -> Result<Raw> {
    check_not_empty("max", x, dims)?;
    reduce::<Max>("max", x, dims, keepdim, 1.0)
}

/// Computes the minima over `dims`, which stay with size 1 if `keepdim`. A minimum is NaN if an element is NaN.
///
/// # Errors
/// As [`max`].
pub fn min(x: &Raw, dims: &[usize], keepdim: bool) -> Result<Raw> {
    check_not_empty("min", x, dims)?;
    reduce::<Min>("min", x, dims, keepdim, 1.0)
}

/// Finds the index along `dim` of the first NaN if there is one, otherwise of the largest element (the first if several
/// are equal). The indices are u32. `dim` stays with size 1 if `keepdim`.
///
/// # Errors
/// As [`max`].
pub fn argmax(x: &Raw, dim: usize, keepdim: bool) -> Result<Raw> {
    const OP: &str = "argmax";
    check_not_empty(OP, x, &[dim])?;
    let x = contiguous(x)?;
    let [outer, n, inner] = outer_n_inner(x.dims(), dim);
    let dims = reduced_dims(x.dims(), &[dim], keepdim);
    dispatch_float!(x.dtype(), OP, T => read1(OP, &x, |x| {
        let x = elements::<T>(x)?;
        let mut result = vec![0u32; outer * inner];
        let shared = SharedMut::new(&mut result);
        // A result reads n elements, so a thread takes GRAIN / n results at a time.
        par_ranges(outer * inner, GRAIN / n.max(1), |range| {
            // SAFETY: the ranges are disjoint.
            let result = unsafe { shared.slice(range.clone()) };
            for (index, i) in result.iter_mut().zip(range) {
                // The first element for this result, at (i / inner, 0, i % inner). The others follow `inner` apart.
                let start = i / inner * n * inner + i % inner;
                *index = first_max(x[start..].iter().step_by(inner).take(n)) as u32;
            }
        });
        Ok((CpuStorage::U32(result), Shape::from(dims.as_slice())))
    }))
}

/// Computes the cumulative sums along `dim`: result i is the sum of the elements 0 to i, both included.
///
/// # Errors
/// As [`sum`].
pub fn cumsum(x: &Raw, dim: usize) -> Result<Raw> {
    const OP: &str = "cumsum";
    check_dims(OP, x, &[dim])?;
    let x = contiguous(x)?;
    let [outer, n, inner] = outer_n_inner(x.dims(), dim);
    dispatch_float!(x.dtype(), OP, T => read1(OP, &x, |(storage, layout)| {
        let x = elements::<T>((storage, layout))?;
        // The elements, which the sums replace. As (outer, n, inner): n rows of `inner` columns for each outer index.
        let mut result = x[..outer * n * inner].to_vec();
        let shared = SharedMut::new(&mut result);
        // A task computes the sums of up to TILE columns of one outer index.
        let tiles = inner.div_ceil(TILE);
        let elements_per_task = n * inner.min(TILE);
        let tasks_at_a_time = (GRAIN / elements_per_task.max(1)).max(1);
        par_ranges(outer * tiles, tasks_at_a_time, |range| {
            let mut sums = vec![Real::ZERO; inner.min(TILE)];
            for task in range {
                let (o, first_column) = (task / tiles, task % tiles * TILE);
                let width = TILE.min(inner - first_column);
                sums.fill(Real::ZERO);
                for row in 0..n {
                    let start = (o * n + row) * inner + first_column;
                    // SAFETY: two tasks have different outer indices or different columns.
                    add_to_sums::<T>(&mut sums[..width], unsafe { shared.slice(start..start + width) });
                }
            }
        });
        Ok((T::to_cpu_storage_owned(result), layout.shape().clone()))
    }))
}

/// Checks that all `dims` are dimensions of `x`, and, if `x` is empty, that its reduction fits into memory.
///
/// # Errors
/// [`Error::Index`] if a dimension does not exist, [`Error::OutOfMemory`] if the reduction does not fit.
pub(crate) fn check_dims(op: &'static str, x: &Raw, dims: &[usize]) -> Result<()> {
    match dims.iter().find(|&&d| d >= x.rank()) {
        Some(d) => {
            let message =
                format!("found dimension {d}, but a tensor of shape {:?} has {} dimensions", x.dims(), x.rank());
            Err(Error::index(op, message))
        }
        // The result for an empty tensor can be large: the sum of a tensor of shape (0, n) over dimension 0 has n
        // zeros.
        None if x.elem_count() == 0 => check_allocation(op, &reduced_dims(x.dims(), dims, true), x.dtype()).map(|_| ()),
        None => Ok(()),
    }
}

/// Does what [`check_dims`] does, and checks that no dimension of `dims` has size 0.
///
/// # Errors
/// As [`check_dims`], and [`Error::Shape`] if a dimension of `dims` has size 0.
pub(crate) fn check_not_empty(op: &'static str, x: &Raw, dims: &[usize]) -> Result<()> {
    check_dims(op, x, dims)?;
    match dims.iter().find(|&&d| x.dims()[d] == 0) {
        Some(d) => Err(Error::shape(op, format!("found shape {:?}, expected dimension {d} not to be empty", x.dims()))),
        None => Ok(()),
    }
}

/// Returns the shape of the reduction over `dims` of a tensor of the shape `x`.
pub(crate) fn reduced_dims(x: &[usize], dims: &[usize], keepdim: bool) -> Dims {
    let kept = x.iter().enumerate().filter(|(i, _)| keepdim || !dims.contains(i));
    kept.map(|(i, &size)| if dims.contains(&i) { 1 } else { size }).collect()
}

/// Returns three sizes: the product of the sizes before dimension `dim`, its own size, and the product of the sizes
/// after it.
pub(crate) fn outer_n_inner(dims: &[usize], dim: usize) -> [usize; 3] {
    [dims[..dim].iter().product(), dims[dim], dims[dim + 1..].iter().product()]
}

/// Reduces `x` over `dims`, divides each result by `divisor`, then rounds it to the dtype of `x`.
fn reduce<F: Fold>(op: &'static str, x: &Raw, dims: &[usize], keepdim: bool, divisor: f64) -> Result<Raw> {
    check_dims(op, x, dims)?;
    if dims.is_empty() {
        return own_copy(x);
    }
    let x = contiguous(x)?;
    let result_dims = reduced_dims(x.dims(), dims, keepdim);
    let merged = groups(x.dims(), dims);
    dispatch_float!(x.dtype(), op, T => read1(op, &x, |x| {
        let result = reduce_groups::<T, F>(elements::<T>(x)?, merged.clone(), divisor);
        Ok((T::to_cpu_storage_owned(result), Shape::from(result_dims.as_slice())))
    }))
}

/// Merges neighbouring dimensions of the shape `x` if `dims` has all of them or none. For each merged dimension,
/// returns whether it is reduced, and its size.
pub(crate) fn groups(x: &[usize], dims: &[usize]) -> SmallVec<[(bool, usize); 6]> {
    let mut merged = SmallVec::<[(bool, usize); 6]>::new();
    for (i, &size) in x.iter().enumerate() {
        let is_reduced = dims.contains(&i);
        match merged.last_mut() {
            Some((last_is_reduced, last_size)) if *last_is_reduced == is_reduced => *last_size *= size,
            _ => merged.push((is_reduced, size)),
        }
    }
    merged
}

/// Reduces contiguous elements over those [`groups`] (merged dimensions) that are marked as reduced, the last one
/// first. Divides the results by `divisor`, then rounds them.
fn reduce_groups<T: Elem, F: Fold>(x: &[T], mut groups: SmallVec<[(bool, usize); 6]>, divisor: f64) -> Vec<T> {
    let mut result: Option<Vec<T::Acc>> = None;
    while let Some(last) = groups.iter().rposition(|&(is_reduced, _)| is_reduced) {
        let product = |groups: &[(bool, usize)]| groups.iter().map(|&(_, size)| size).product();
        let outer_n_inner = [product(&groups[..last]), groups[last].1, product(&groups[last + 1..])];
        result = Some(match result {
            None => fold::<T, T::Acc, F>(x, T::to_acc, outer_n_inner),
            Some(x) => fold::<T::Acc, T::Acc, F>(&x, std::convert::identity, outer_n_inner),
        });
        groups[last] = (false, 1); // the fold left one element of this dimension
    }
    let divisor = T::Acc::from_f64(divisor);
    // At least one group is reduced (see `reduce`), so there is a result.
    result.unwrap_or_default().into_iter().map(|x| T::from_acc(x / divisor)).collect()
}

/// Adds a row to the running sums, and replaces the row by them.
fn add_to_sums<T: Elem>(sums: &mut [T::Acc], row: &mut [T]) {
    dispatch(
        #[inline(always)]
        || {
            for (sum, x) in sums.iter_mut().zip(row) {
                *sum += x.to_acc();
                *x = T::from_acc(*sum);
            }
        },
    );
}

/// Returns the index of the first NaN if there is one, otherwise of the first of the largest elements; 0 if `x` is
/// empty.
fn first_max<'a, T: WithDType>(x: impl Iterator<Item = &'a T>) -> usize {
    let mut best: Option<(usize, T)> = None;
    for (i, &x) in x.enumerate() {
        // Only NaN differs from itself.
        #[allow(clippy::eq_op)]
        let is_nan = x != x;
        if is_nan {
            return i;
        }
        if best.is_none_or(|(_, b)| x > b) {
            best = Some((i, x));
        }
    }
    best.map_or(0, |(i, _)| i)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use half::bf16;

    use super::super::pool::tests::with_1_and_n_threads;
    use super::*;
    use crate::raw::from_vec;

    const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

    /// A tensor of small whole numbers, whose sums are exact.
    fn whole_numbers(dims: &[usize], dtype: DType) -> Raw {
        let n: usize = dims.iter().product();
        let data: Vec<f64> = (0..n).map(|i| ((i * 7) % 11) as f64 - 5.0).collect();
        from_vec(data, dims).to_dtype(dtype).unwrap()
    }

    fn to_f64(x: &Raw) -> Raw {
        x.to_dtype(DType::F64).unwrap()
    }

    fn values(x: &Raw) -> Vec<f64> {
        to_f64(x).flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn sums_over_any_dimensions_are_those_of_candle() {
        let shapes: [&[usize]; 6] = [&[3, 4, 5, 2], &[40, 300], &[2, 9000, 3], &[70_000], &[3, 5, 2500], &[5, 0, 3]];
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            for shape in shapes {
                let plain = whole_numbers(shape, dtype);
                let transposed = plain.transpose(0, shape.len() - 1).unwrap();
                for x in [plain, transposed] {
                    // Bit d of `summed` says whether to sum over dimension d.
                    for summed in 1..1usize << x.rank() {
                        let dims: Vec<usize> = (0..x.rank()).filter(|d| summed >> d & 1 == 1).collect();
                        for keepdim in [false, true] {
                            let x_f64 = to_f64(&x);
                            let expected =
                                if keepdim { x_f64.sum_keepdim(&dims[..]) } else { x_f64.sum(&dims[..]) }.unwrap();
                            let result = sum(&x, &dims, keepdim).unwrap();
                            assert_eq!((result.dims(), result.dtype()), (expected.dims(), dtype), "{shape:?} {dims:?}");
                            let expected = expected.to_dtype(dtype).unwrap();
                            assert_eq!(values(&result), values(&expected), "{shape:?} {dims:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn bf16_is_summed_in_f32() {
        // 132,096 = 129 * 2^10 is a bf16 number. If each sum were rounded to bf16, the sums of ones would stay at 256.
        for (dims, dim) in [([132_096, 1], 0), ([1, 132_096], 1), ([132_096, 3], 0)] {
            let ones = from_vec(vec![bf16::ONE; dims.iter().product()], &dims[..]);
            let sums = values(&sum(&ones, &[dim], false).unwrap());
            assert!(sums.iter().all(|&x| x == 132_096.0), "{sums:?}");
            assert_eq!(values(&mean(&ones, &[dim], false).unwrap())[0], 1.0);
        }
    }

    #[test]
    fn f32_sums_are_accurate() {
        let data: Vec<f32> = (0..3_000_000).map(|i| (i as f32 * 0.618_034).fract()).collect();
        let exact: f64 = data.iter().map(|&x| f64::from(x)).sum();
        for dims in [[3_000_000, 1], [1_500_000, 2]] {
            let x = from_vec(data.clone(), &dims[..]);
            let total = values(&sum(&x, &[0, 1], false).unwrap())[0];
            // About three roundings of f32, 6e-8 each. One running sum over all elements would have a far larger error.
            assert!(((total - exact) / exact).abs() < 2e-7, "{total} against {exact}");
        }
    }

    #[test]
    fn means_are_those_of_candle_in_f64() {
        for dtype in FLOATS {
            let x = whole_numbers(&[6, 50], dtype);
            let expected = to_f64(&x).mean(1).unwrap().to_dtype(dtype).unwrap();
            let result = values(&mean(&x, &[1], false).unwrap());
            for (r, e) in result.iter().zip(values(&expected)) {
                assert!((r - e).abs() <= 1e-6 * e.abs(), "{r} {e} {dtype:?}");
            }
        }
    }

    #[test]
    fn means_of_no_elements_are_nan() {
        assert!(values(&mean(&whole_numbers(&[0, 2], DType::F32), &[0], false).unwrap()).iter().all(|x| x.is_nan()));
    }

    #[test]
    fn max_and_min_agree_with_candle() {
        for dtype in FLOATS {
            for (dims, dim) in [([40, 1000], 0), ([40, 1000], 1), ([5000, 3], 0)] {
                let x = whole_numbers(&dims, dtype);
                assert_eq!(values(&max(&x, &[dim], true).unwrap()), values(&to_f64(&x).max_keepdim(dim).unwrap()));
                assert_eq!(values(&min(&x, &[dim], true).unwrap()), values(&to_f64(&x).min_keepdim(dim).unwrap()));
            }
        }
    }

    #[test]
    fn max_and_min_pass_nan_on_and_argmax_finds_it() {
        // A fold has 32 lanes: NaN in the first and the last lane, in the second chunk, and in the incomplete chunk.
        for at in [0, 31, 32, 99] {
            let mut data = vec![1f32; 100];
            data[at] = f32::NAN;
            let x = from_vec(data, 100);
            assert!(values(&max(&x, &[0], false).unwrap())[0].is_nan());
            assert!(values(&min(&x, &[0], false).unwrap())[0].is_nan());
            assert_eq!(argmax(&x, 0, false).unwrap().to_scalar::<u32>().unwrap(), at as u32);
        }
    }

    #[test]
    fn max_is_an_error_over_an_empty_dimension_only() {
        assert!(matches!(max(&whole_numbers(&[2, 0], DType::F32), &[1], false), Err(Error::Shape { .. })));
        assert_eq!(max(&whole_numbers(&[2, 0], DType::F32), &[0], false).unwrap().dims(), [0]);
    }

    #[test]
    fn argmax_gives_the_first_of_equals() {
        let x = from_vec(vec![1f32, 3.0, 3.0, 2.0, 5.0, 5.0], &[2usize, 3][..]);
        assert_eq!(argmax(&x, 1, false).unwrap().to_vec1::<u32>().unwrap(), [1, 1]);
        assert_eq!(argmax(&x, 0, true).unwrap().to_vec2::<u32>().unwrap(), [[1, 1, 1]]);
        assert_eq!(argmax(&x.t().unwrap(), 0, false).unwrap().to_vec1::<u32>().unwrap(), [1, 1]);
        let large = whole_numbers(&[300, 400], DType::BF16);
        let expected = to_f64(&large).argmax(1).unwrap().to_vec1::<u32>().unwrap();
        assert_eq!(argmax(&large, 1, false).unwrap().to_vec1::<u32>().unwrap(), expected);
    }

    #[test]
    fn cumsum_adds_up_along_a_dimension() {
        for dtype in FLOATS {
            for (dims, dim) in [([40, 30], 0), ([40, 30], 1), ([3, 5000], 0)] {
                let x = whole_numbers(&dims, dtype);
                let expected = to_f64(&x).cumsum(dim).unwrap();
                assert_eq!(values(&cumsum(&x, dim).unwrap()), values(&expected), "{dims:?} {dim} {dtype:?}");
            }
        }
    }

    #[test]
    fn cumsum_adds_bf16_in_f32() {
        // If each sum were rounded to bf16 before the next addition, the sums of ones would stay at 256.
        let ones = from_vec(vec![bf16::ONE; 1000], 1000);
        assert_eq!(values(&cumsum(&ones, 0).unwrap())[999], 1000.0);
    }

    #[test]
    fn cumsum_of_an_empty_tensor_is_empty() {
        assert_eq!(cumsum(&whole_numbers(&[0, 3], DType::F32), 0).unwrap().dims(), [0, 3]);
    }

    #[test]
    fn sums_do_not_depend_on_the_number_of_threads() {
        let data: Vec<f32> = (0..1_000_000).map(|i| (i as f32 * 0.618_034).fract()).collect();
        for dims in [[1_000_000, 1], [1000, 1000], [100_000, 10]] {
            let x = from_vec(data.clone(), &dims[..]);
            let (one, many) = with_1_and_n_threads(3, || values(&sum(&x, &[0], false).unwrap()));
            assert_eq!(one, many);
        }
    }

    #[test]
    fn missing_dimensions_and_integers_are_errors() {
        let x = whole_numbers(&[2, 3], DType::F32);
        assert!(matches!(sum(&x, &[2], false), Err(Error::Index { .. })));
        assert!(matches!(cumsum(&x, 2), Err(Error::Index { .. })));
        let integers = Raw::zeros((2, 3), DType::U32, &Device::Cpu).unwrap();
        assert!(matches!(sum(&integers, &[0], false), Err(Error::DType { .. })));
    }
}
