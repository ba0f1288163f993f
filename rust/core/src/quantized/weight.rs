//! [`Weight`]: the weight of a linear map, stored as values or as codes.

use candle_core::{DType, Device, Shape};

use super::Quantized;
use crate::streaming::Streamed;
use crate::tape::backward::Pending;
use crate::tape::{BackwardContext, Saved, Saver};
use crate::{Raw, Result, Tensor, checkpoint, compute};

/// The weight of a linear layer: a tensor, a frozen quantized matrix, or a frozen weight of either kind that is
/// streamed. A streamed weight is in the memory of the host, or in slices on the devices of a machine, and is copied to
/// the device for each use.
#[derive(Clone, Debug)]
pub enum Weight {
    /// Values: an ordinary tensor.
    Plain(Tensor),
    /// Codes and scales.
    Quantized(Quantized),
    /// Values or codes that are copied to the device for each use.
    Streamed(Streamed),
}

/// A borrowed [`Weight`], the argument of operations.
#[derive(Clone, Copy, Debug)]
pub enum WeightRef<'a> {
    /// Values: an ordinary tensor.
    Plain(&'a Tensor),
    /// Codes and scales.
    Quantized(&'a Quantized),
    /// Values or codes that are copied to the device for each use.
    Streamed(&'a Streamed),
}

impl From<Tensor> for Weight {
    fn from(tensor: Tensor) -> Self {
        Self::Plain(tensor)
    }
}

impl From<Quantized> for Weight {
    fn from(quantized: Quantized) -> Self {
        Self::Quantized(quantized)
    }
}

impl<'a> From<&'a Tensor> for WeightRef<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::Plain(tensor)
    }
}

impl<'a> From<&'a crate::Var> for WeightRef<'a> {
    fn from(var: &'a crate::Var) -> Self {
        Self::Plain(var)
    }
}

impl<'a> From<&'a Quantized> for WeightRef<'a> {
    fn from(quantized: &'a Quantized) -> Self {
        Self::Quantized(quantized)
    }
}

impl<'a> From<&'a Weight> for WeightRef<'a> {
    fn from(weight: &'a Weight) -> Self {
        match weight {
            Weight::Plain(tensor) => Self::Plain(tensor),
            Weight::Quantized(quantized) => Self::Quantized(quantized),
            Weight::Streamed(streamed) => Self::Streamed(streamed),
        }
    }
}

impl Weight {
    /// The sizes of the dimensions.
    pub fn dims(&self) -> &[usize] {
        WeightRef::from(self).dims()
    }

    /// The dtype of the values.
    pub fn dtype(&self) -> DType {
        WeightRef::from(self).dtype()
    }

    /// The device on which operations use the weight.
    pub fn device(&self) -> &Device {
        WeightRef::from(self).device()
    }

    /// The tensor, if the weight is a tensor.
    pub const fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Plain(tensor) => Some(tensor),
            Self::Quantized(_) | Self::Streamed(_) => None,
        }
    }

    /// The quantized matrix, if the weight is quantized.
    pub const fn quantized(&self) -> Option<&Quantized> {
        match self {
            Self::Plain(_) | Self::Streamed(_) => None,
            Self::Quantized(quantized) => Some(quantized),
        }
    }

    /// The streamed weight, if the weight is streamed.
    pub const fn streamed(&self) -> Option<&Streamed> {
        match self {
            Self::Plain(_) | Self::Quantized(_) => None,
            Self::Streamed(streamed) => Some(streamed),
        }
    }
}

impl<'a> WeightRef<'a> {
    /// The sizes of the dimensions.
    pub fn dims(self) -> &'a [usize] {
        match self {
            Self::Plain(tensor) => tensor.dims(),
            Self::Quantized(quantized) => quantized.dims(),
            Self::Streamed(streamed) => streamed.dims(),
        }
    }

    /// The number of dimensions.
    pub fn rank(self) -> usize {
        self.dims().len()
    }

    /// The dtype of the values.
    pub fn dtype(self) -> DType {
        match self {
            Self::Plain(tensor) => tensor.dtype(),
            Self::Quantized(quantized) => quantized.dtype(),
            Self::Streamed(streamed) => streamed.dtype(),
        }
    }

    /// The device on which operations use the weight.
    pub fn device(self) -> &'a Device {
        match self {
            Self::Plain(tensor) => tensor.device(),
            Self::Quantized(quantized) => quantized.device(),
            Self::Streamed(streamed) => streamed.device(),
        }
    }

    /// The tensor, if the weight is a tensor.
    pub const fn tensor(self) -> Option<&'a Tensor> {
        match self {
            Self::Plain(tensor) => Some(tensor),
            Self::Quantized(_) | Self::Streamed(_) => None,
        }
    }

    /// An owned weight that shares storage with this one.
    pub fn to_owned(self) -> Weight {
        match self {
            Self::Plain(tensor) => Weight::Plain(tensor.clone()),
            Self::Quantized(quantized) => Weight::Quantized(quantized.clone()),
            Self::Streamed(streamed) => Weight::Streamed(streamed.clone()),
        }
    }

    /// Whether the weight needs a gradient; a quantized or streamed weight never does.
    pub fn requires_grad(self) -> bool {
        self.tensor().is_some_and(Tensor::requires_grad)
    }

    /// The values in `dtype`, detached from the tape.
    ///
    /// # Errors
    /// [`Error::DType`](crate::Error::DType) if `dtype` is not floating point,
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the values do not fit. For a streamed weight, as
    /// [`Streamed::values`].
    pub fn values(self, dtype: DType) -> Result<Tensor> {
        match self {
            Self::Plain(tensor) => tensor.detach().to_dtype(dtype),
            Self::Quantized(quantized) => quantized.dequantize(dtype),
            Self::Streamed(streamed) => streamed.values(dtype),
        }
    }

    /// Tells checkpoints that an operation reads this weight, which is not among the inputs of the operation's tape
    /// node. Quantized and streamed weights are no tensors of the tape, so there is nothing to tell.
    pub(crate) fn report_read(self) {
        if let Self::Plain(tensor) = self {
            checkpoint::reads(&[tensor]);
        }
    }

    /// Keeps a reference to the weight for a backward pass.
    pub(crate) fn hold(self, saver: &mut Saver<'_>) -> HeldWeight {
        match self {
            Self::Plain(tensor) => HeldWeight::Plain(saver.hold(tensor)),
            Self::Quantized(quantized) => HeldWeight::Quantized(quantized.clone()),
            Self::Streamed(streamed) => HeldWeight::Streamed(streamed.clone()),
        }
    }
}

/// A weight that a backward pass will read.
pub(crate) enum HeldWeight {
    Plain(Saved),
    Quantized(Quantized),
    Streamed(Streamed),
}

impl HeldWeight {
    /// Adds g W to the gradient of a node's first input, for this weight W (out, in). `grad` is the matrix g (rows,
    /// out); `shape` is the shape of the input, which has the elements of a matrix (rows, in).
    pub(crate) fn add_input_gradient(
        &self,
        context: &mut BackwardContext<'_>,
        shape: &Shape,
        grad: &Raw,
    ) -> Result<()> {
        if !context.needs(0) {
            return Ok(());
        }
        let alpha = 1.0;
        match self.held()? {
            Held::Plain(values) => context.add_product(0, shape, grad.dtype(), [grad, &values], alpha),
            Held::Quantized(quantized) => quantized.add_input_gradient(context, shape, grad),
        }
    }

    /// Computes g W (rows, in), where `grad` is the matrix g (rows, out).
    pub(crate) fn input_gradient(&self, grad: &Raw) -> Result<Raw> {
        match self.held()? {
            Held::Plain(values) => compute::matmul(grad, &values),
            // A product of codes if the weight and the device allow it, else a product of values.
            Held::Quantized(quantized) => match quantized.input_gradient_of_codes(grad)? {
                Some(product) => Ok(product),
                None => compute::matmul(grad, &quantized.values(grad.dtype())?),
            },
        }
    }

    /// The weight on its device; for a streamed weight, the copy that the device has while the weight's block runs.
    fn held(&self) -> Result<Held> {
        Ok(match self {
            Self::Plain(saved) => Held::Plain(saved.get()?),
            Self::Quantized(quantized) => Held::Quantized(quantized.clone()),
            Self::Streamed(streamed) => match streamed.here()? {
                Weight::Quantized(quantized) => Held::Quantized(quantized),
                Weight::Plain(tensor) => Held::Plain(tensor.raw),
                Weight::Streamed(_) => unreachable!("a copy of a streamed weight on its device is not streamed"),
            },
        })
    }
}

/// The values or the codes of a [`HeldWeight`], on the device.
enum Held {
    Plain(Raw),
    Quantized(Quantized),
}

impl Quantized {
    /// [`HeldWeight::add_input_gradient`] for a quantized weight.
    fn add_input_gradient(&self, context: &mut BackwardContext<'_>, shape: &Shape, grad: &Raw) -> Result<()> {
        let (owned, alpha) = (true, 1.0);
        match self.input_gradient_of_codes(grad)? {
            // Nothing else uses the product, so later gradients can be added to it in place (`owned`).
            Some(product) => context.add_pending(0, Pending::new(product.reshape(shape)?, owned)),
            None => context.add_product(0, shape, grad.dtype(), [grad, &self.values(grad.dtype())?], alpha),
        }
    }
}
