//! Negation, absolute value, maximum and minimum of integer tensors. Integers have separate functions because the
//! kernels of differentiable operations do not support them. The results do not take part in backward passes.

use candle_core::DType;

use crate::raw::{Raw, from_vec, to_vec};
use crate::{Error, Result, Tensor};

/// Applies `function` to each element of an i64 tensor, on the host.
fn map(x: &Tensor, function: impl Fn(i64) -> i64) -> Result<Tensor> {
    let values: Vec<i64> = to_vec::<i64>(&x.raw)?.into_iter().map(function).collect();
    Tensor::constant(from_vec(values, x.dims())).to_device(x.device())
}

/// The negative of each element. The smallest i64 stays itself, as in torch.
///
/// # Errors
/// [`Error::DType`] for unsigned integers, which have no negative.
pub(super) fn neg(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::I64 => map(x, i64::wrapping_neg),
        other => Err(Error::dtype(
            "neg",
            format!(
                "found a {} tensor, which cannot hold negative numbers; convert it with to(\"i64\")",
                other.as_str()
            ),
        )),
    }
}

/// The absolute value of each element. The smallest i64 stays itself, as in torch, and so does every unsigned integer.
pub(super) fn abs(x: &Tensor) -> Result<Tensor> {
    if x.dtype() == DType::I64 { map(x, i64::wrapping_abs) } else { Ok(x.clone()) }
}

/// The maximum or the minimum over `dims`. `along` is candle's maximum or minimum over one dimension; it keeps that
/// dimension, with size 1.
pub(super) fn extreme(
    x: &Tensor,
    dims: &[usize],
    keepdim: bool,
    along: impl Fn(&Raw, usize) -> candle_core::Result<Raw>,
) -> Result<Tensor> {
    let mut raw = x.raw.contiguous()?;
    for &dim in dims {
        raw = along(&raw, dim)?;
    }
    if !keepdim {
        let remaining: Vec<usize> =
            x.dims().iter().enumerate().filter(|(dim, _)| !dims.contains(dim)).map(|(_, &size)| size).collect();
        raw = raw.reshape(remaining)?;
    }
    Ok(Tensor::constant(raw))
}

#[cfg(test)]
mod tests {
    use crate::raw::from_vec;
    use crate::{Result, Tensor};

    fn numbers() -> Tensor {
        Tensor::constant(from_vec(vec![3i64, -7, 7, i64::MIN, 0, 5], (2, 3)))
    }

    #[test]
    fn neg_and_abs_of_i64_are_exact_and_unsigned_integers_have_only_abs() -> Result<()> {
        assert_eq!(numbers().neg()?.to_vec::<i64>()?, [-3, 7, -7, i64::MIN, 0, -5]);
        assert_eq!(numbers().abs()?.to_vec::<i64>()?, [3, 7, 7, i64::MIN, 0, 5]);
        let unsigned = Tensor::constant(from_vec(vec![3u32], 1));
        assert_eq!(unsigned.abs()?.to_vec::<u32>()?, [3]);
        assert!(unsigned.neg().unwrap_err().to_string().contains("to(\"i64\")"));
        Ok(())
    }

    #[test]
    fn max_and_min_of_integers_are_exact_and_keep_dimensions_if_asked() -> Result<()> {
        assert_eq!(numbers().max(&[1], false)?.to_vec::<i64>()?, [7, 5]);
        assert_eq!(numbers().t()?.max(&[0], true)?.dims(), [1, 2]);
        assert_eq!(numbers().min(&[0], false)?.to_vec::<i64>()?, [i64::MIN, -7, 5]);
        assert_eq!(numbers().max_all()?.to_vec::<i64>()?, [7]);
        assert_eq!(numbers().min(&[1, 0], true)?.dims(), [1, 1]);
        let unsigned = Tensor::constant(from_vec(vec![3u32, u32::MAX], 2));
        assert_eq!(unsigned.max_all()?.to_vec::<u32>()?, [u32::MAX]);
        Ok(())
    }
}
