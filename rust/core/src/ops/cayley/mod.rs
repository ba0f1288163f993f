//! The Cayley transform of skew-symmetric matrices (Qiu et al. 2023, "Orthogonal Finetuning", arXiv:2306.07280, section
//! 3.3).

#[cfg(feature = "testing")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use crate::compute::on_device;
use crate::raw::{check_allocation_on, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor};

#[cfg(feature = "testing")]
pub use cases::ENTRIES;

static CAYLEY: OpInfo = OpInfo::expensive("cayley");

/// Returns the size n of an n x n matrix whose strict upper triangle has `elements` elements: n (n - 1) / 2 =
/// `elements`. `None` if there is no such n. For 0 elements, n is 1.
pub fn size_of(elements: usize) -> Option<usize> {
    // n = (1 + √(8 · elements + 1)) / 2. If there is such an n, the root is an odd integer, and n is half of it,
    // rounded up.
    let size = elements.checked_mul(8)?.checked_add(1)?.isqrt().div_ceil(2);
    (size * (size - 1) / 2 == elements).then_some(size)
}

/// Computes the Cayley transform of skew-symmetric matrices Q, minus the identity: D = (I - Q) (I + Q)⁻¹ - I. The
/// transform itself, I + D, is orthogonal. `upper (count, n (n - 1) / 2)` has the strict upper triangle of each Q, row
/// by row; the result is (count, n, n). D is computed as the solution of (I + Q) D = -2 Q, so the elements of D are as
/// precise as those of Q, even where they are much smaller than 1. I + Q always has an inverse: the pivots of its
/// elimination are at least 1. Saves the result.
///
/// # Errors
/// [`Error::Shape`] if `upper` does not have this shape, or, on a GPU, if two matrices do not fit in shared memory (n >
/// 110, in f64 n > 78); [`Error::DType`] if `upper` is not floating point; [`Error::OutOfMemory`] if the result does
/// not fit in memory.
pub fn cayley(upper: &Tensor) -> Result<Tensor> {
    let op = CAYLEY.name;
    let result_dims = match upper.dims() {
        &[count, elements] => size_of(elements).map(|size| [count, size, size]),
        _ => None,
    };
    let Some(dims) = result_dims else {
        return Err(Error::shape(
            op,
            format!(
                "found shape {:?}, expected (count, n (n - 1) / 2): the strict upper triangles of n x n matrices",
                upper.dims()
            ),
        ));
    };
    if !is_float(upper.dtype()) {
        return Err(Error::dtype(
            op,
            format!("expected floating point, found {}; convert it with to()", upper.dtype().as_str()),
        ));
    }
    check_allocation_on(upper.device(), op, &dims, upper.dtype())?;
    record(
        &CAYLEY,
        &[upper],
        || on_device!(upper.raw.device(), cuda => cuda::forward(&upper.raw, dims), cpu => cpu::forward(&upper.raw, dims)),
        |saver, result| CayleyBackward { result: saver.save_raw(result) },
    )
}

struct CayleyBackward {
    /// The result D, (count, n, n).
    result: Saved,
}

impl Backward for CayleyBackward {
    /// Let V = (I + Q)⁻¹ = I + D / 2. A change dQ of Q changes D by 2 dV = -2 V dQ V, so with the gradient G of D, the
    /// gradient of Q is M = -2 Vᵀ G Vᵀ. An element of the triangle is both Q_ij and -Q_ji, so its gradient is
    /// M_ij - M_ji.
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let (grad, result) = (context.grad(), self.result.get()?);
        let grad_upper =
            on_device!(grad.device(), cuda => cuda::backward(grad, &result), cpu => cpu::backward(grad, &result))?;
        context.add(0, grad_upper)
    }
}
