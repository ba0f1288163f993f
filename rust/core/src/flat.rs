//! [`FlatBuffer`]: many variables in one vector, and their gradients in another.
//!
//! An optimizer, a gradient norm or an all-reduce then works on one long vector instead of a thousand small ones.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device};

use crate::copies::FlatCopies;
use crate::raw::{Raw, check_allocation_on, storage_identity};
use crate::{Error, Result, Tensor, Var, compute};

/// Variables that are consecutive views of one vector, with gradients that are views of a second vector.
#[derive(Clone)]
pub struct FlatBuffer {
    data: Raw,
    grad: Raw,
    vars: Vec<Var>,
    /// The range of each variable in `data` and in `grad`.
    ranges: Vec<Range<usize>>,
}

impl FlatBuffer {
    /// Copy `values`, which have one dtype and one device, into a vector, one after the other. Each copy becomes a
    /// variable.
    ///
    /// # Errors
    /// [`Error::Argument`] if there are no values, [`Error::DType`] if their dtypes differ or are not floating point,
    /// [`Error::Device`] if their devices differ, [`Error::OutOfMemory`] if the buffers do not fit.
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
                    format!(
                        "tensor {index} is {}, the first is {}; convert one with to()",
                        value.dtype().as_str(),
                        dtype.as_str()
                    ),
                ));
            }
            if !value.device().same_device(device) {
                return Err(Error::device(
                    OP,
                    format!(
                        "tensor {index} is on {}, the first is on {}; move it with to()",
                        crate::device::name(value.device()),
                        crate::device::name(device)
                    ),
                ));
            }
        }
        let total = values.iter().map(Tensor::elem_count).sum();
        let (data, grad) = (zeros(total, dtype, device)?, zeros(total, dtype, device)?);
        let copies = Arc::new(FlatCopies::new(total));
        let mut ranges = Vec::with_capacity(values.len());
        let mut vars = Vec::with_capacity(values.len());
        let mut start = 0;
        for value in values {
            let range = start..start + value.elem_count();
            let view = data.narrow(0, range.start, range.len())?.reshape(value.shape())?;
            compute::copy_into(&view, value.raw())?;
            let var = Var::adopt(view)?;
            var.leaf().bind(&grad, range.clone())?;
            // Copies of the variable's values in other dtypes are also parts of one vector per dtype.
            var.leaf().copies().allocate_in(copies.clone(), start);
            vars.push(var);
            start = range.end;
            ranges.push(range);
        }
        Ok(Self { data, grad, vars, ranges })
    }

    /// The variables, in the order of the values from which they were made.
    pub fn vars(&self) -> &[Var] {
        &self.vars
    }

    /// The range of each variable in the vectors [`data`](Self::data) and [`grad`](Self::grad).
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// All values as one vector.
    pub const fn data(&self) -> &Raw {
        &self.data
    }

    /// All gradients as one vector, with zeros for variables that have no gradient.
    pub const fn grad(&self) -> &Raw {
        &self.grad
    }
}

fn zeros(n: usize, dtype: DType, device: &Device) -> Result<Raw> {
    check_allocation_on(device, "flat buffer", &[n], dtype)?;
    compute::zeros(&[n], dtype, device)
}

/// The gradients of variables, as views instead of copies.
pub struct Gradients {
    /// The gradients that are accumulated in buffers. Gradients that are adjacent in a flat buffer are joined to one
    /// vector.
    pub vectors: Vec<Raw>,
    /// The variables whose gradients are not in a buffer.
    pub unbound: Vec<Var>,
}

impl Gradients {
    /// The gradients of all of `vars` that have a gradient, each list in the order of `vars`.
    ///
    /// # Errors
    /// If a view of a vector cannot be made.
    pub fn of(vars: &[Var]) -> Result<Self> {
        let vectors = joined(vars.iter().filter_map(|var| var.leaf().vector()))?;
        let is_unbound = |var: &&Var| !var.leaf().is_bound() && var.grad_storage().is_some();
        Ok(Self { vectors, unbound: vars.iter().filter(is_unbound).cloned().collect() })
    }
}

/// Views of the parts of vectors; adjacent parts of one vector become one view.
fn joined(parts: impl Iterator<Item = (Raw, Range<usize>)>) -> Result<Vec<Raw>> {
    let mut runs: Vec<(Raw, Range<usize>)> = Vec::new();
    for (vector, part) in parts.filter(|(_, part)| !part.is_empty()) {
        match runs.last_mut() {
            Some((last, run)) if run.end == part.start && same_storage(last, &vector) => run.end = part.end,
            _ => runs.push((vector, part)),
        }
    }
    runs.into_iter().map(|(vector, run)| Ok(vector.narrow(0, run.start, run.len())?)).collect()
}

fn same_storage(a: &Raw, b: &Raw) -> bool {
    let address = |raw: &Raw| storage_identity(raw).0;
    address(a) == address(b)
}

/// Collects the gradients of all of `vars` in vectors that may be changed in place, for example summed over processes.
/// A variable without a gradient gets a gradient of zeros, so that every process has vectors of the same sizes.
///
/// # Errors
/// As [`collect_grads`].
pub fn all_gradients(vars: &[Var]) -> Result<Vec<Raw>> {
    collect_grads(vars)?;
    // After `mark_present`, every variable has a gradient, maybe zeros, so `vector` returns one for each.
    vars.iter().for_each(|var| var.leaf().mark_present());
    joined(vars.iter().filter_map(|var| var.leaf().vector()))
}

/// Clear the gradients of `vars`; one fill clears all gradients that are adjacent in a flat buffer.
///
/// # Errors
/// If a buffer cannot be written.
pub fn zero_grads(vars: &[Var]) -> Result<()> {
    for vector in joined(vars.iter().filter_map(|var| var.leaf().vector_to_clear()))? {
        compute::fill(&vector, 0.0)?;
    }
    forget_grads(vars);
    Ok(())
}

/// Mark the gradients of `vars` as cleared. The caller must have zeroed their parts of flat buffers.
pub fn forget_grads(vars: &[Var]) {
    vars.iter().for_each(|var| var.leaf().mark_cleared());
}

/// Allocate common vectors, one per dtype and device, for the variables whose gradients are not yet in a buffer, and
/// move their gradients there. The storage of these gradients is then fixed, and a norm or a fill of a whole vector
/// is one operation.
///
/// # Errors
/// [`Error::OutOfMemory`] if the vectors do not fit.
pub fn collect_grads(vars: &[Var]) -> Result<()> {
    let mut unbound: Vec<&Var> = vars.iter().filter(|var| !var.leaf().is_bound()).collect();
    while let Some((dtype, device)) = unbound.first().map(|var| (var.dtype(), var.device().clone())) {
        let alike = |var: &&Var| var.dtype() == dtype && var.device().same_device(&device);
        let (group, rest): (Vec<&Var>, Vec<&Var>) = unbound.into_iter().partition(alike);
        let vector = zeros(group.iter().map(|var| var.elem_count()).sum(), dtype, &device)?;
        let mut start = 0;
        for var in group {
            let end = start + var.elem_count();
            var.leaf().bind(&vector, start..end)?;
            start = end;
        }
        unbound = rest;
    }
    Ok(())
}
