//! [`FlatBuffer`]: many variables in one piece of memory, their gradients in another.
//!
//! An optimizer, a gradient norm or an all-reduce then works on one long vector instead of a thousand small ones.

use std::ops::Range;

use candle_core::{DType, Device};

use crate::raw::{Raw, check_allocation_on};
use crate::tape::Leaf;
use crate::{Error, Result, Tensor, Var, compute};

/// Variables that are consecutive views of one vector, with gradients that are views of another.
#[derive(Clone)]
pub struct FlatBuffer {
    data: Raw,
    grad: Raw,
    vars: Vec<Var>,
    ranges: Vec<Range<usize>>,
}

impl FlatBuffer {
    /// Copy `values` (of one dtype and device) behind one another; each becomes a variable.
    ///
    /// # Errors
    /// [`Error::Argument`] without values, [`Error::DType`] or [`Error::Device`] if they disagree,
    /// [`Error::OutOfMemory`] if the buffers do not fit.
    pub fn new(values: &[Tensor]) -> Result<Self> {
        const OP: &str = "flat buffer";
        let Some(first) = values.first() else {
            return Err(Error::argument(OP, "expected at least one tensor, found none"));
        };
        let (dtype, device) = (first.dtype(), first.device());
        for (index, value) in values.iter().enumerate() {
            if value.dtype() != dtype {
                return Err(Error::dtype(
                    OP,
                    format!("tensor {index} is {}, the first is {}", value.dtype().as_str(), dtype.as_str()),
                ));
            }
            if !value.device().same_device(device) {
                return Err(Error::device(OP, format!("tensor {index} is on another device than the first")));
            }
        }
        let total = values.iter().map(Tensor::elem_count).sum();
        let (data, grad) = (zeros(total, dtype, device)?, zeros(total, dtype, device)?);
        let mut ranges = Vec::with_capacity(values.len());
        let mut vars = Vec::with_capacity(values.len());
        let mut start = 0;
        for value in values {
            let range = start..start + value.elem_count();
            let view = |buffer: &Raw| -> Result<Raw> {
                Ok(buffer.narrow(0, range.start, range.len())?.reshape(value.shape())?)
            };
            let storage = view(&data)?;
            compute::copy_into(&storage, value.raw())?;
            let var = Var::adopt(storage)?;
            leaf(&var)?.bind(view(&grad)?)?;
            vars.push(var);
            start = range.end;
            ranges.push(range);
        }
        Ok(Self { data, grad, vars, ranges })
    }

    /// The variables, in the order of the values they were made of.
    pub fn vars(&self) -> &[Var] {
        &self.vars
    }

    /// Where each variable lies in the vectors.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// All values, one vector.
    pub const fn data(&self) -> &Raw {
        &self.data
    }

    /// All gradients, one vector; zero where a variable has none.
    pub const fn grad(&self) -> &Raw {
        &self.grad
    }
}

fn zeros(n: usize, dtype: DType, device: &Device) -> Result<Raw> {
    check_allocation_on(device, "flat buffer", &[n], dtype)?;
    compute::zeros(&[n], dtype, device)
}

fn leaf(var: &Var) -> Result<&Leaf> {
    let node = var.as_tensor().node.as_ref().and_then(|n| n.leaf());
    node.ok_or_else(|| Error::autograd("flat buffer", "the variable is not a leaf"))
}
