//! Access of CPU kernels to the storage of candle tensors.
//!
//! Each storage is behind a lock. `Tensor::storage_and_layout`, the only access that candle exports, waits while
//! another thread waits to write the storage. If two operands share a storage, the second access could wait for a
//! thread that itself waits for the end of the first access: a deadlock. Candle's custom operations cannot deadlock: a
//! thread may read a storage again while other threads wait to write it, and operations in place lock their storages in
//! the order of the addresses. So kernels run inside custom operations, which this module makes from closures.

use std::cell::Cell;

use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, InplaceOp1, InplaceOp2, InplaceOp3, Layout, Result, Shape, WithDType,
};

use smallvec::SmallVec;

use crate::Raw;

/// A closure as a custom operation of candle, named `op` in candle's error messages.
struct Call<F> {
    op: &'static str,
    f: F,
}

/// A storage, and the layout of a tensor in it.
pub(crate) type Operand<'a> = (&'a CpuStorage, &'a Layout);

/// The elements of an operand's storage, from the tensor's first element to the end of the storage.
pub(crate) fn elements<'a, T: WithDType>((storage, layout): Operand<'a>) -> Result<&'a [T]> {
    // A view without elements may start beyond the end of the storage.
    Ok(T::cpu_storage_as_slice(storage)?.get(layout.start_offset()..).unwrap_or_default())
}

impl<F: Fn(Operand<'_>) -> Result<(CpuStorage, Shape)>> CustomOp1 for Call<F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        (self.f)((s, l))
    }
}

impl<F: Fn([Operand<'_>; 2]) -> Result<(CpuStorage, Shape)>> CustomOp2 for Call<F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        (self.f)([(s1, l1), (s2, l2)])
    }
}

impl<F: Fn([Operand<'_>; 3]) -> Result<(CpuStorage, Shape)>> CustomOp3 for Call<F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        (self.f)([(s1, l1), (s2, l2), (s3, l3)])
    }
}

impl<F: Fn(&mut CpuStorage, &Layout) -> Result<()>> InplaceOp1 for Call<F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        (self.f)(storage, layout)
    }
}

impl<F: Fn(&mut CpuStorage, &Layout, Operand<'_>) -> Result<()>> InplaceOp2 for Call<F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, s1: &mut CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<()> {
        (self.f)(s1, l1, (s2, l2))
    }
}

impl<F: Fn(&mut CpuStorage, &Layout, [Operand<'_>; 2]) -> Result<()>> InplaceOp3 for Call<F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(
        &self,
        s1: &mut CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<()> {
        (self.f)(s1, l1, [(s2, l2), (s3, l3)])
    }
}

/// Checks that all tensors are on the CPU: CPU kernels read host memory only, and no operation moves a tensor by
/// itself.
fn check_cpu(op: &'static str, tensors: &[&Raw]) -> crate::Result<()> {
    if tensors.iter().all(|tensor| tensor.device().is_cpu()) {
        return Ok(());
    }
    Err(crate::Error::device(
        op,
        "expected all tensors on the CPU, found one on another device; move all tensors to one device with to()",
    ))
}

/// Computes a new tensor from one tensor's storage.
pub(super) fn read1(
    op: &'static str,
    x: &Raw,
    f: impl Fn(Operand<'_>) -> Result<(CpuStorage, Shape)>,
) -> crate::Result<Raw> {
    check_cpu(op, &[x])?;
    Ok(x.apply_op1_no_bwd(&Call { op, f })?)
}

/// Computes a new tensor from the storages of two tensors.
pub(super) fn read2(
    op: &'static str,
    a: &Raw,
    b: &Raw,
    f: impl Fn([Operand<'_>; 2]) -> Result<(CpuStorage, Shape)>,
) -> crate::Result<Raw> {
    check_cpu(op, &[a, b])?;
    Ok(a.apply_op2_no_bwd(b, &Call { op, f })?)
}

/// Computes a new tensor from the storages of three tensors.
pub(super) fn read3(
    op: &'static str,
    [a, b, c]: [&Raw; 3],
    f: impl Fn([Operand<'_>; 3]) -> Result<(CpuStorage, Shape)>,
) -> crate::Result<Raw> {
    check_cpu(op, &[a, b, c])?;
    Ok(a.apply_op3_no_bwd(b, c, &Call { op, f })?)
}

/// Calls `f` with the storages of any number of tensors, in the order of `tensors`, and returns its result.
pub(crate) fn read_all<R>(
    op: &'static str,
    tensors: &[&Raw],
    f: impl FnOnce(&[Operand<'_>]) -> Result<R>,
) -> crate::Result<R> {
    check_cpu(op, tensors)?;
    // Candle calls an operation's function by shared reference and returns a tensor only. So the cells pass `f`, which
    // can be called once, into the innermost operation, and its result out of it.
    let f = Cell::new(Some(f));
    let result = Cell::new(None);
    nest(op, tensors, &[], &|operands| {
        if let Some(f) = f.take() {
            result.set(Some(f(operands)?));
        }
        Ok(())
    })?;
    result.take().ok_or_else(|| crate::Error::argument(op, "the kernel did not run"))
}

/// Nests custom operations, one for each tensor of `rest`, and calls `f` in the innermost operation with the storages
/// of all tensors. `before` are the storages of the tensors before `rest`, which the outer operations read. Candle
/// passes at most three storages to one operation, so nesting is the way to read more.
fn nest(
    op: &'static str,
    rest: &[&Raw],
    before: &[Operand<'_>],
    f: &dyn Fn(&[Operand<'_>]) -> Result<()>,
) -> Result<()> {
    let Some((next, rest)) = rest.split_first() else {
        return f(before);
    };
    let call = |operand: Operand<'_>| {
        let mut operands: SmallVec<[Operand<'_>; 4]> = before.iter().copied().collect();
        operands.push(operand);
        nest(op, rest, &operands, f)?;
        // Candle expects a result: an empty tensor.
        Ok((CpuStorage::U8(Vec::new()), Shape::from(0)))
    };
    next.apply_op1_no_bwd(&Call { op, f: call })?;
    Ok(())
}

/// Changes the storage of `dst` in place.
pub(super) fn write1(
    op: &'static str,
    dst: &Raw,
    f: impl Fn(&mut CpuStorage, &Layout) -> Result<()>,
) -> crate::Result<()> {
    check_cpu(op, &[dst])?;
    // There is nothing to change. Candle would reject some empty tensors: it takes their strides of 0 for repeated
    // elements.
    if dst.elem_count() == 0 {
        return Ok(());
    }
    Ok(dst.inplace_op1(&Call { op, f })?)
}

/// Changes the storage of `dst` in place, reading the storage of `src`.
pub(super) fn write2(
    op: &'static str,
    dst: &Raw,
    src: &Raw,
    f: impl Fn(&mut CpuStorage, &Layout, Operand<'_>) -> Result<()>,
) -> crate::Result<()> {
    check_cpu(op, &[dst, src])?;
    // As in `write1`.
    if dst.elem_count() == 0 {
        return Ok(());
    }
    Ok(dst.inplace_op2(src, &Call { op, f })?)
}

/// Changes the storage of `dst` in place, reading the storages of `a` and `b`.
pub(super) fn write3(
    op: &'static str,
    dst: &Raw,
    a: &Raw,
    b: &Raw,
    f: impl Fn(&mut CpuStorage, &Layout, [Operand<'_>; 2]) -> Result<()>,
) -> crate::Result<()> {
    check_cpu(op, &[dst, a, b])?;
    // As in `write1`.
    if dst.elem_count() == 0 {
        return Ok(());
    }
    Ok(dst.inplace_op3(a, b, &Call { op, f })?)
}
