//! Conversions of a tensor to another dtype, to another device, or to a contiguous layout.

use candle_core::{DType, Device};

#[cfg(feature = "testing")]
use super::case::{Case, Entry};
use crate::raw::{Raw, is_float, to_cpu};
use crate::tape::{Backward, BackwardContext, OpInfo, record};
use crate::{Result, Tensor, Var, capture, checkpoint, compute};

static CAST: OpInfo = OpInfo::cheap("to_dtype");
static TO_DEVICE: OpInfo = OpInfo::cheap("to_device");
static CONTIGUOUS: OpInfo = OpInfo::cheap("contiguous");

/// Casts the gradient to the dtype of the input.
struct CastBackward(DType);

impl Backward for CastBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = compute::cast(context.grad(), self.0)?;
        context.add(0, grad)
    }
}

/// Copies the gradient to the device of the input.
struct ToDeviceBackward(Device);

impl Backward for ToDeviceBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = copied(context.grad(), &self.0)?;
        context.add(0, grad)
    }
}

/// A copy of the elements of `x` on `device`. Candle's `to_device` alone would copy the whole storage of `x`, even if
/// `x` is a small view of it. A copy to a GPU does not block the host.
fn copied(x: &Raw, device: &Device) -> Result<Raw> {
    if device.is_cpu() {
        // A copy to the CPU waits for the GPU, which a CUDA graph cannot do.
        capture::refuse(TO_DEVICE.name)?;
        return to_cpu(x);
    }
    Ok(compute::contiguous(x)?.to_device(device)?)
}

struct ContiguousBackward;

impl Backward for ContiguousBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = context.grad().clone();
        context.add(0, grad)
    }
}

impl Tensor {
    /// Converts the values to another dtype. The gradient has this tensor's dtype; an integer result carries no
    /// gradient.
    ///
    /// # Errors
    /// Candle's, for dtypes that it cannot convert.
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        if !is_float(dtype) {
            // Integers carry no gradient, as in torch. So the operation is not recorded, and checkpoints must be told
            // that it reads this tensor.
            checkpoint::reads(&[self]);
            return compute::convert(&self.raw, dtype).map(Self::constant);
        }
        let from = self.dtype();
        record(&CAST, &[self], || compute::convert(&self.raw, dtype), |_, _| CastBackward(from))
    }

    /// Returns a variable's value in `dtype`. The variable keeps a copy in this dtype, and the result is a view of the
    /// copy. If the variable has changed since the last use, the value is cast again, unless the optimizer that changed
    /// it has also written the copy. A later change of the variable overwrites the copy, so a backward pass through the
    /// result is then an error. For a tensor that is not a variable, and for an integer `dtype`, this is
    /// [`to_dtype`](Self::to_dtype).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the copy does not fit in memory.
    pub fn compute_copy(&self, dtype: DType) -> Result<Self> {
        let Some(var) = Var::of(self).filter(|_| dtype != self.dtype() && is_float(dtype)) else {
            return self.to_dtype(dtype);
        };
        let from = self.dtype();
        let mut copy = record(&CAST, &[self], || var.copy_in(dtype), |_, _| CastBackward(from))?;
        // The result has the variable's version, so that a backward pass notices if the variable has changed since.
        copy.version.clone_from(&self.version);
        Ok(copy)
    }

    /// Copies the values to another device. The gradient is on this tensor's device.
    ///
    /// # Errors
    /// Candle's, if the copy fails; [`Error::Device`](crate::Error::Device) for a copy from a GPU to the CPU while a
    /// CUDA graph is recorded.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        if self.device().same_device(device) {
            return Ok(self.clone());
        }
        record(&TO_DEVICE, &[self], || copied(&self.raw, device), |_, _| ToDeviceBackward(self.device().clone()))
    }

    /// Returns the values in row-major order without gaps; copies them only if necessary.
    ///
    /// # Errors
    /// Candle's, if the copy fails.
    pub fn contiguous(&self) -> Result<Self> {
        if self.raw.is_contiguous() {
            return Ok(self.clone());
        }
        record(&CONTIGUOUS, &[self], || compute::contiguous(&self.raw), |_, _| ContiguousBackward)
    }
}

/// Registry entries of this file. A case has a label, the shapes of its inputs, and the function to test.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[
    Entry {
        info: &CAST,
        cases: || {
            vec![
                Case::new("to f64", &[&[3, 3]], |x| x[0].to_dtype(DType::F64)),
                Case::new("to f64 empty", &[&[0]], |x| x[0].to_dtype(DType::F64)),
                Case::new("same dtype", &[&[3, 3]], |x| x[0].to_dtype(x[0].dtype())),
            ]
        },
    },
    Entry { info: &TO_DEVICE, cases: || vec![Case::new("same device", &[&[3]], |x| x[0].to_device(x[0].device()))] },
    Entry {
        info: &CONTIGUOUS,
        cases: || {
            vec![
                Case::new("permuted", &[&[3, 4, 2]], |x| x[0].permute(&[2, 0, 1])?.contiguous()),
                Case::new("empty", &[&[3, 0]], |x| x[0].t()?.contiguous()),
                Case::new("already contiguous", &[&[3, 4]], |x| x[0].contiguous()),
            ]
        },
    },
];
