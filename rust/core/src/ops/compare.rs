//! Comparisons: u8 results (1 true, 0 false) that carry no gradient.

use crate::raw::check_allocation_on;
use crate::{Error, Result, Tensor, checkpoint};

macro_rules! comparisons {
    ($($name:ident $candle:ident $doc:literal;)*) => {
        impl Tensor {
            $(
                #[doc = $doc]
                ///
                /// Shapes broadcast as in numpy; the result is u8 and carries no gradient.
                ///
                /// # Errors
                /// [`Error::Shape`] if the shapes do not broadcast, [`Error::DType`] if the dtypes differ.
                pub fn $name(&self, other: &Tensor) -> Result<Tensor> {
                    if self.dtype() != other.dtype() {
                        return Err(Error::dtype(
                            stringify!($name),
                            format!("dtypes {} and {} differ; convert one with to()", self.dtype().as_str(), other.dtype().as_str()),
                        ));
                    }
                    let shape = self.shape().broadcast_shape_binary_op(other.shape(), stringify!($name))?;
                    check_allocation_on(self.device(), stringify!($name), shape.dims(), self.dtype())?;
                    checkpoint::reads(&[self, other]);
                    Ok(Tensor::constant(self.raw.broadcast_as(&shape)?.$candle(&other.raw.broadcast_as(&shape)?)?))
                }
            )*
        }
    };
}

comparisons! {
    eq eq "1 where an element is equal to `other`'s, else 0.";
    ne ne "1 where an element differs from `other`'s, else 0.";
    lt lt "1 where an element is smaller than `other`'s, else 0.";
    le le "1 where an element is smaller than `other`'s or equal, else 0.";
    gt gt "1 where an element is larger than `other`'s, else 0.";
    ge ge "1 where an element is larger than `other`'s or equal, else 0.";
}
