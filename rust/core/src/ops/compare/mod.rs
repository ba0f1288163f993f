//! Comparisons: u8 results (1 true, 0 false) that carry no gradient.

#[cfg(feature = "cuda")]
mod cuda;

use super::arithmetic::check;
use crate::compute::on_device;
use crate::raw::{Raw, check_allocation_on};
use crate::{Result, Tensor, checkpoint};

/// A comparison: its name, the sum of the relations for which it holds (1 less, 2 equal, 4 greater, 8 an operand is
/// NaN, as in `kernels/compare.cu`), and its function on the CPU.
struct Comparison {
    op: &'static str,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the kernel reads it"))]
    relations: u32,
    on_cpu: fn(&Raw, &Raw) -> candle_core::Result<Raw>,
}

impl Comparison {
    fn apply(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        check(self.op, a, b)?;
        let shape = a.shape().broadcast_shape_binary_op(b.shape(), self.op)?;
        check_allocation_on(a.device(), self.op, shape.dims(), a.dtype())?;
        checkpoint::reads(&[a, b]);
        on_device!(
            a.device(),
            cuda => cuda::compare(self.op, &a.raw, &b.raw, shape.dims(), self.relations),
            cpu => Ok((self.on_cpu)(&a.raw.broadcast_as(&shape)?, &b.raw.broadcast_as(&shape)?)?),
        )
        .map(Tensor::constant)
    }
}

macro_rules! comparisons {
    ($($name:ident $relations:literal $doc:literal;)*) => {
        impl Tensor {
            $(
                #[doc = $doc]
                ///
                /// Shapes broadcast as in numpy; the result is u8 and carries no gradient. Of the comparisons with NaN,
                /// only [`ne`](Self::ne) is 1.
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
    eq 2 "1 where elements are equal.";
    ne 13 "1 where elements differ.";
    lt 1 "1 where this element is smaller.";
    le 3 "1 where this element is smaller or equal.";
    gt 4 "1 where this element is larger.";
    ge 6 "1 where this element is larger or equal.";
}
