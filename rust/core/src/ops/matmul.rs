//! Matrix products with numpy's batch broadcasting.

#[cfg(feature = "testing")]
use super::case::{Case, Entry};
use crate::raw::Raw;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, compute};

static MATMUL: OpInfo = OpInfo::expensive("matmul");

struct MatmulBackward {
    /// The left operand, if the right one needs a gradient.
    a: Option<Saved>,
    /// The right operand, if the left one needs a gradient.
    b: Option<Saved>,
    /// The shapes of the left and the right operand.
    dims: [Vec<usize>; 2],
}

/// Returns a view with the last two dimensions exchanged.
fn transposed(raw: &Raw) -> Result<Raw> {
    Ok(raw.transpose(raw.rank() - 2, raw.rank() - 1)?)
}

impl Backward for MatmulBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        // With the result y = a b: grad_a = grad_y bᵀ and grad_b = aᵀ grad_y, summed over broadcast batch dimensions.
        let grad = context.grad().clone();
        if let (true, Some(b)) = (context.needs(0), &self.b) {
            let product = compute::matmul(&grad, &transposed(&b.get()?)?)?;
            context.add(0, compute::sum_to_shape(&product, &self.dims[0])?)?;
        }
        if let (true, Some(a)) = (context.needs(1), &self.a) {
            let product = compute::matmul(&transposed(&a.get()?)?, &grad)?;
            context.add(1, compute::sum_to_shape(&product, &self.dims[1])?)?;
        }
        Ok(())
    }
}

impl Tensor {
    /// Computes the matrix product (..., m, k) × (..., k, n) → (..., m, n). Batch dimensions broadcast. As in numpy, a
    /// vector on the left is a row (1, k), and a vector on the right is a column (k, 1). The result then lacks the
    /// dimension m or n, which would have size 1.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand has no dimensions, the sizes k of the two operands differ, or the batch
    /// dimensions do not broadcast; [`Error::DType`] if the dtypes differ or are not floating point; [`Error::Device`]
    /// if the devices differ; [`Error::OutOfMemory`] if the result does not fit in memory.
    pub fn matmul(&self, other: &Self) -> Result<Self> {
        if self.rank() == 0 || other.rank() == 0 {
            return Err(Error::shape("matmul", "a number is not a matrix; use * to multiply a tensor by a number"));
        }
        if self.rank() == 1 {
            let product = self.unsqueeze(0)?.matmul(other)?;
            // Remove m, the last dimension but one. If `other` is a vector, m is the last dimension, because `product`
            // lacks n already.
            return product.squeeze(product.rank() - if other.rank() == 1 { 1 } else { 2 });
        }
        if other.rank() == 1 {
            let product = self.matmul(&other.unsqueeze(1)?)?;
            return product.squeeze(product.rank() - 1);
        }
        if self.dtype() != other.dtype() {
            return Err(Error::dtype(
                "matmul",
                format!(
                    "dtypes {} and {} differ; convert one with to()",
                    self.dtype().as_str(),
                    other.dtype().as_str()
                ),
            ));
        }
        record(
            &MATMUL,
            &[self, other],
            || compute::matmul(&self.raw, &other.raw),
            |saver, _| MatmulBackward {
                a: saver.needs(1).then(|| saver.save(self)),
                b: saver.needs(0).then(|| saver.save(other)),
                dims: [self.dims().to_vec(), other.dims().to_vec()],
            },
        )
    }
}

/// Registry entry of this file.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[Entry {
    info: &MATMUL,
    cases: || {
        let product = |x: &[Tensor]| x[0].matmul(&x[1]);
        vec![
            Case::new("matrices", &[&[3, 5], &[5, 4]], product),
            Case::new("batch", &[&[2, 3, 3, 5], &[2, 3, 5, 2]], product),
            Case::new("batch broadcast", &[&[2, 1, 3, 5], &[3, 5, 2]], product),
            Case::new("batch times one matrix", &[&[2, 3, 5], &[5, 2]], product),
            Case::new("vector left", &[&[5], &[5, 2]], product),
            Case::new("vector right", &[&[3, 5], &[5]], product),
            Case::new("dot", &[&[5], &[5]], product),
            Case::new("empty rows", &[&[0, 5], &[5, 2]], product),
            Case::new("empty sum", &[&[3, 0], &[0, 2]], product),
        ]
    },
}];
