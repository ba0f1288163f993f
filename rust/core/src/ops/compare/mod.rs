//! Comparisons. Their results are u8 (1 for true, 0 for false) and carry no gradient.

#[cfg(feature = "cuda")]
mod cuda;

use candle_core::DType;

use super::arithmetic::check;
use crate::compute::on_device;
use crate::raw::{Raw, check_allocation_on};
use crate::{Result, Tensor, checkpoint};

/// A comparison of two operands.
struct Comparison {
    op: &'static str,
    /// The sum of the relations for which the comparison is true: 1 (less), 2 (equal), 4 (greater) and 8 (an operand is
    /// NaN), as in `kernels/compare.cu`.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only the CUDA kernel reads it"))]
    relations: u32,
    /// The comparison on the CPU, of operands of the same shape.
    on_cpu: fn(&Raw, &Raw) -> candle_core::Result<Raw>,
}

impl Comparison {
    fn apply(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        check(self.op, a, b)?;
        let shape = a.shape().broadcast_shape_binary_op(b.shape(), self.op)?;
        check_allocation_on(a.device(), self.op, shape.dims(), DType::U8)?;
        // A comparison is not on the tape, so checkpoints learn here that it reads its operands.
        checkpoint::reads(&[a, b]);
        on_device!(
            a.device(),
            cuda => cuda::compare(self.op, &a.raw, &b.raw, shape.dims(), self.relations),
            cpu => Ok((self.on_cpu)(&a.raw.broadcast_as(&shape)?, &b.raw.broadcast_as(&shape)?)?),
        )
        .map(Tensor::constant)
    }
}

/// Defines a method of `Tensor` from each line `name relations documentation`; see [`Comparison::relations`].
macro_rules! comparisons {
    ($($name:ident $relations:literal $doc:literal;)*) => {
        impl Tensor {
            $(
                #[doc = $doc]
                ///
                /// Shapes broadcast as in numpy. The result is u8 and carries no gradient. Where an element is NaN,
                /// [`ne`](Self::ne) gives 1, and all other comparisons give 0.
                ///
                /// # Errors
                /// [`Error::Shape`](crate::Error::Shape) if the shapes do not broadcast,
                /// [`Error::DType`](crate::Error::DType) if the dtypes differ, [`Error::Device`](crate::Error::Device)
                /// if the devices differ, [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the result does not fit
                /// in memory.
                pub fn $name(&self, other: &Tensor) -> Result<Tensor> {
                    let comparison =
                        Comparison { op: stringify!($name), relations: $relations, on_cpu: |a, b| a.$name(b) };
                    comparison.apply(self, other)
                }
            )*
        }
    };
}

comparisons! {
    eq 2 "Returns 1 where the elements are equal, else 0.";
    ne 13 "Returns 1 where the elements differ, else 0.";
    lt 1 "Returns 1 where the element of `self` is less than that of `other`, else 0.";
    le 3 "Returns 1 where the element of `self` is less than or equal to that of `other`, else 0.";
    gt 4 "Returns 1 where the element of `self` is greater than that of `other`, else 0.";
    ge 6 "Returns 1 where the element of `self` is greater than or equal to that of `other`, else 0.";
}
