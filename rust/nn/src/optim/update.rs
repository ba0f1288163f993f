//! Steps on the CPU. A step updates the storage of variables in place: all variables of a flat buffer together, and
//! large variables on several threads.

use std::cell::Cell;

use candle_core::{CpuStorage, InplaceOp2, Layout};
use half::{bf16, f16};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use trainable_candle_core::cpu::pool::par_chunks_mut;
use trainable_candle_core::cpu::{Elem, Real, dispatch};
use trainable_candle_core::raw::{Raw, own_copy, storage_identity};
use trainable_candle_core::{DType, Error, Result, Var};

use super::quant::BLOCK_SIZE;
use super::rounding::Bits;
use super::rule::{Chunk, Rule, StateSlice, Update};
use super::state::{Master, Number, Parameter};

/// The largest number of elements that one thread updates at a time, if the update is elementwise.
const CHUNK: usize = 32 * BLOCK_SIZE;

/// A variable to update, with its gradient.
pub(super) struct Item<'a, C> {
    pub(super) parameter: &'a mut Parameter,
    pub(super) config: &'a C,
    pub(super) grad: Raw,
}

impl<C> Item<'_, C> {
    fn numel(&self) -> usize {
        self.parameter.var.elem_count()
    }

    /// The index of the variable's first element in its storage.
    fn offset(&self) -> usize {
        self.parameter.var.raw().layout().start_offset()
    }
}

/// Variables whose values share one storage and whose gradients share another storage. They are updated together,
/// because candle locks whole storages.
struct Bucket<'a, C> {
    items: Vec<Item<'a, C>>,
    /// The result of the update; an error of a pool thread reaches the caller here.
    result: Result<()>,
}

/// Checks that the optimizer can update variables of `var`'s dtype on its device.
pub(super) fn check_var<R: Rule>(var: &Var) -> Result<()> {
    if !var.device().is_cpu() && R::KERNELS.is_none() {
        let message = "does not support CUDA devices; keep its variables on the CPU, or use an optimizer that \
            supports them, such as AdamW";
        return Err(Error::device(R::NAME, message));
    }
    match var.dtype() {
        DType::F64 if !var.device().is_cpu() => {
            let message = "found a Var of dtype f64 on a CUDA device, expected f32, f16 or bf16; convert it first";
            Err(Error::dtype(R::NAME, message))
        }
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        DType::F64 if R::UPDATE_F64.is_some() => Ok(()),
        other => {
            let message =
                format!("found a Var of dtype {}, expected f32, f16 or bf16; convert it first", other.as_str());
            Err(Error::dtype(R::NAME, message))
        }
    }
}

/// Updates every item once. `seed` is the seed of stochastic rounding.
pub(super) fn run<R: Rule>(items: Vec<Item<'_, R::Config>>, seed: Option<u64>) -> Result<()> {
    let mut buckets: Vec<Bucket<'_, R::Config>> = Vec::new();
    let mut index_of = FxHashMap::default();
    for mut item in items {
        if !item.grad.is_contiguous() {
            item.grad = own_copy(&item.grad)?;
        }
        let (var_storage, _size) = storage_identity(item.parameter.var.raw());
        let (grad_storage, _size) = storage_identity(&item.grad);
        let index = *index_of.entry((var_storage, grad_storage)).or_insert_with(|| {
            buckets.push(Bucket { items: Vec::new(), result: Ok(()) });
            buckets.len() - 1
        });
        buckets[index].items.push(item);
    }
    // Large buckets run one after another, each on all threads. Small buckets run at the same time, each on one thread
    // of the pool: such a thread holds the lock of its bucket's storage and must not wait for other threads meanwhile.
    // A bucket of one variable that cannot be cut into pieces occupies one thread, so it counts as small.
    let is_small = |bucket: &Bucket<'_, R::Config>| {
        let numel: usize = bucket.items.iter().map(Item::numel).sum();
        numel <= CHUNK || (bucket.items.len() == 1 && !R::ELEMENTWISE)
    };
    let (mut small, large): (Vec<_>, Vec<_>) = buckets.into_iter().partition(is_small);
    for bucket in large {
        run_bucket::<R>(bucket.items, seed, /* parallel: */ true)?;
    }
    // Each chunk is one bucket.
    par_chunks_mut(&mut small, 1, |_, bucket| {
        bucket[0].result = run_bucket::<R>(std::mem::take(&mut bucket[0].items), seed, /* parallel: */ false);
    });
    small.into_iter().try_for_each(|bucket| bucket.result)
}

/// Updates the variables of one bucket, on several threads if `parallel`. Empty variables take no step.
fn run_bucket<R: Rule>(mut items: Vec<Item<'_, R::Config>>, seed: Option<u64>, parallel: bool) -> Result<()> {
    items.retain(|item| item.numel() > 0);
    items.sort_unstable_by_key(Item::offset);
    let Some(first) = items.first() else { return Ok(()) };
    match (first.parameter.var.dtype(), R::UPDATE_F64, seed) {
        (DType::F32, ..) => run_direct::<R, f32>(items, R::UPDATE, parallel),
        (DType::F64, Some(update), _) => run_direct::<R, f64>(items, update, parallel),
        (DType::F16, ..) => run_mastered::<R, f16>(items, parallel),
        (DType::BF16, _, None) => run_mastered::<R, bf16>(items, parallel),
        (DType::BF16, _, Some(seed)) => run_rounded::<R>(items, seed, parallel),
        // `Stepper::with_groups`, which takes the variables, has rejected all other dtypes with this error.
        _ => check_var::<R>(&first.parameter.var),
    }
}

/// Updates f32 or f64 variables; the update computes in their dtype `T`. As in the functions below, the number of steps
/// increases only if the rule `COUNTS` its step: not if the rule is the second half of a step of two rules.
fn run_direct<R: Rule, T: Number + Real>(
    mut items: Vec<Item<'_, R::Config>>,
    update: Update<R::Config, T>,
    parallel: bool,
) -> Result<()> {
    for item in &mut items {
        let specs = R::states(item.config, item.parameter.var.dims());
        item.parameter.make_states::<T>(&specs);
        item.parameter.step += u64::from(R::COUNTS);
    }
    with_storages::<_, T>(R::NAME, &mut items, |parts, items| {
        let work = items.iter_mut().zip(parts).map(|(item, (param, grad))| {
            let Parameter { states, step, var, sums, .. } = &mut *item.parameter;
            let states = states.iter_mut().map(|state| state.slice()).collect();
            let sums = Some(sums);
            let (config, step, dims) = (item.config, *step, var.dims());
            Work { config, step, dims, start: 0, stored: &mut [][..], grad, param, states, sums }
        });
        for_each_piece(work.collect(), longest::<R>(), parallel, |work| {
            let Work { dims, param, grad, states, sums, .. } = work;
            update(work.config, work.step, Chunk { dims, param, grad, states, sums });
        });
    })
}

/// Converts f16 or bf16 values to f32.
fn widen<D: Elem<Acc = f32>>(stored: &[D], values: &mut [f32]) {
    dispatch(
        #[inline(always)]
        || values.iter_mut().zip(stored).for_each(|(value, stored)| *value = stored.to_acc()),
    );
}

/// Rounds f32 values to f16 or bf16.
fn narrow<D: Elem<Acc = f32>>(values: &[f32], stored: &mut [D]) {
    dispatch(
        #[inline(always)]
        || stored.iter_mut().zip(values).for_each(|(stored, value)| *stored = D::from_acc(*value)),
    );
}

/// Updates the f32 master values of f16 or bf16 variables, and rounds them to the variables' dtype `D`.
fn run_mastered<R: Rule, D: Elem<Acc = f32>>(mut items: Vec<Item<'_, R::Config>>, parallel: bool) -> Result<()> {
    for item in &mut items {
        let specs = R::states(item.config, item.parameter.var.dims());
        item.parameter.make_states::<f32>(&specs);
        item.parameter.step += u64::from(R::COUNTS);
    }
    with_storages::<_, D>(R::NAME, &mut items, |parts, items| {
        let work = items.iter_mut().zip(parts).map(|(item, (stored, grad))| {
            let Parameter { states, step, master, var, sums, .. } = &mut *item.parameter;
            // There are no master values yet, or something else has changed the variable since the last step.
            if master.as_ref().is_none_or(|master| master.version != var.version()) {
                let mut values = vec![0.0; stored.len()];
                widen(stored, &mut values);
                *master = Some(Master { values, version: var.version() });
            }
            // There are master values now, so the default is not used.
            let param = master.as_mut().map_or(&mut [][..], |master| &mut master.values);
            let states = states.iter_mut().map(|state| state.slice()).collect();
            let sums = Some(sums);
            let (config, step, dims) = (item.config, *step, var.dims());
            Work { config, step, dims, start: 0, stored, grad, param, states, sums }
        });
        for_each_piece(work.collect(), longest::<R>(), parallel, |mut work| {
            let mut grad = SmallVec::<[f32; CHUNK]>::from_elem(0.0, work.grad.len());
            widen(work.grad, &mut grad);
            let states = work.states.iter_mut().map(StateSlice::reborrow).collect();
            let chunk = Chunk { dims: work.dims, param: work.param, grad: &grad, states, sums: work.sums };
            (R::UPDATE)(work.config, work.step, chunk);
            narrow(work.param, work.stored);
        });
    })?;
    // This step has changed the variables, and the master values agree with them.
    for item in items {
        if let Some(master) = &mut item.parameter.master {
            master.version = item.parameter.var.version();
        }
    }
    Ok(())
}

/// Updates bf16 variables in f32, and rounds the new values and states to bf16 stochastically.
fn run_rounded<R: Rule>(mut items: Vec<Item<'_, R::Config>>, seed: u64, parallel: bool) -> Result<()> {
    for item in &mut items {
        let specs = R::states(item.config, item.parameter.var.dims());
        item.parameter.make_states::<bf16>(&specs);
        item.parameter.step += u64::from(R::COUNTS);
    }
    with_storages::<_, bf16>(R::NAME, &mut items, |parts, items| {
        let work = items.iter_mut().zip(parts).map(|(item, (param, grad))| {
            let Parameter { states, step, var, rounded, .. } = &mut *item.parameter;
            let states = states.iter_mut().map(|state| state.slice()).collect();
            // With a seed, every bf16 variable has a number in `rounded`, so the default is not used.
            let (config, step, dims, start) = (item.config, *step, var.dims(), rounded.unwrap_or_default());
            Work { config, step, dims, start, stored: &mut [][..], grad, param, states, sums: None }
        });
        for_each_piece(work.collect(), longest::<R>(), parallel, |mut work| {
            let wide = |stored: &[bf16]| {
                let mut values = vec![0.0; stored.len()];
                widen(stored, &mut values);
                values
            };
            let (mut param, grad) = (wide(work.param), wide(work.grad));
            // The values of float states in f32; empty for codes and scales, which the update changes in place.
            let mut floats: SmallVec<[Vec<f32>; 4]> = SmallVec::new();
            for state in &work.states {
                floats.push(if let StateSlice::Float(data) = state { wide(data) } else { Vec::new() });
            }
            let states = work.states.iter_mut().zip(&mut floats).map(|(state, values)| match state {
                StateSlice::Float(_) => StateSlice::Float(values),
                StateSlice::Codes(data) => StateSlice::Codes(data),
                StateSlice::Scales(data) => StateSlice::Scales(data),
            });
            let states = states.collect();
            (R::UPDATE)(
                work.config,
                work.step,
                Chunk { dims: work.dims, param: &mut param, grad: &grad, states, sums: None },
            );
            // The parameter takes its random bits under number 0, the states under 1 and later numbers.
            let bits = Bits { seed, step: work.step, first: work.start };
            bits.round(&param, work.param, 0);
            for (number, (state, values)) in (1..).zip(work.states.iter_mut().zip(&floats)) {
                if let StateSlice::Float(data) = state {
                    bits.round(values, data, number);
                }
            }
        });
    })
}

/// Consecutive elements of one variable, at first all of them, and what their update needs. The update changes values
/// of type `T`; the gradient has the variable's type `D`.
struct Work<'a, C, T, D> {
    config: &'a C,
    step: u64,
    /// The shape of the variable.
    dims: &'a [usize],
    /// The number of the first element (see [`Parameter::rounded`]), for stochastic rounding.
    start: u64,
    /// The values to change: the variable's own, or its master values.
    param: &'a mut [T],
    /// The variable's own elements if `param` has its master values; otherwise empty.
    stored: &'a mut [D],
    grad: &'a [D],
    states: SmallVec<[StateSlice<'a, T>; 4]>,
    /// Numbers that the update may return ([`Chunk::sums`]); None if the elements are not the whole variable, or with
    /// stochastic rounding.
    sums: Option<&'a mut [f64; 2]>,
}

/// The largest number of elements that an update gets at a time.
const fn longest<R: Rule>() -> usize {
    if R::ELEMENTWISE { CHUNK } else { usize::MAX }
}

/// Cuts work into pieces of at most `longest` elements and calls `run` with each, on several threads if `parallel`.
fn for_each_piece<C: Sync, T: Elem, D: Elem>(
    work: Vec<Work<'_, C, T, D>>,
    longest: usize,
    parallel: bool,
    run: impl Fn(Work<'_, C, T, D>) + Sync,
) {
    let mut pieces = Vec::new();
    for mut rest in work {
        while rest.param.len() > longest {
            let (piece, tail) = rest.split_at(longest);
            pieces.push(Some(piece));
            rest = tail;
        }
        pieces.push(Some(rest));
    }
    if parallel {
        // Each chunk is one piece. `take`, because `run` consumes the piece.
        par_chunks_mut(&mut pieces, 1, |_, piece| piece[0].take().map_or((), &run));
    } else {
        pieces.into_iter().flatten().for_each(run);
    }
}

impl<'a, C, T, D> Work<'a, C, T, D> {
    /// Splits the work after `at` elements, a multiple of [`BLOCK_SIZE`], so that no block of an 8-bit state is
    /// divided.
    fn split_at(self, at: usize) -> (Self, Self) {
        let (param, param_rest) = self.param.split_at_mut(at);
        // `stored` may be empty.
        let (stored, stored_rest) = self.stored.split_at_mut(at.min(self.stored.len()));
        let (grad, grad_rest) = self.grad.split_at(at);
        let (states, states_rest) = self.states.into_iter().map(|state| state.split_at(at)).unzip();
        let start = self.start;
        let rest = Self {
            start: start + at as u64,
            param: param_rest,
            stored: stored_rest,
            grad: grad_rest,
            states: states_rest,
            sums: None,
            ..self
        };
        (Self { start, param, stored, grad, states, sums: None, ..rest }, rest)
    }
}

/// The values and the gradient of one variable.
type Part<'s, D> = (&'s mut [D], &'s [D]);

/// Calls `f` with the values and the gradient of each item, and with the items. Then marks the variables as changed.
/// All items have their values in one storage and their gradients in another storage, and are sorted by the offsets of
/// their values.
fn with_storages<C, D: Elem>(
    op: &'static str,
    items: &mut [Item<'_, C>],
    f: impl for<'s> FnOnce(Vec<Part<'s, D>>, &'s mut [Item<'_, C>]),
) -> Result<()> {
    let (var, grad) = (items[0].parameter.var.clone(), items[0].grad.clone());
    let vars: Vec<Var> = items.iter().map(|item| item.parameter.var.clone()).collect();
    let in_place = InPlace {
        op,
        f: Cell::new(Some(|values: &mut CpuStorage, grads: &CpuStorage| {
            let (mut rest, grads) = (D::slice_mut(values)?, D::cpu_storage_as_slice(grads)?);
            // `rest` begins at the element `position` of the values' storage.
            let mut position = 0;
            let mut parts = Vec::with_capacity(items.len());
            for item in items.iter() {
                let (start, numel) = (item.offset(), item.numel());
                let (_, tail) = rest.split_at_mut(start - position);
                let (values, tail) = tail.split_at_mut(numel);
                let grad_start = item.grad.layout().start_offset();
                parts.push((values, &grads[grad_start..grad_start + numel]));
                (rest, position) = (tail, start + numel);
            }
            f(parts, items);
            Ok(())
        })),
    };
    let result = var.update_in_place(|raw| Ok(raw.inplace_op2(&grad, &in_place)?));
    // The line above has marked the first variable.
    vars.iter().skip(1).try_for_each(|var| var.update_in_place(|_| Ok(())))?;
    result
}

/// Makes a closure an in-place operation of candle. Candle locks the storages of values and gradients and passes both
/// to the closure. The closure is in a `Cell`, because the call consumes it, and candle lends `self` only immutably.
struct InPlace<F> {
    op: &'static str,
    f: Cell<Option<F>>,
}

impl<F: FnOnce(&mut CpuStorage, &CpuStorage) -> candle_core::Result<()>> InplaceOp2 for InPlace<F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, values: &mut CpuStorage, _: &Layout, grads: &CpuStorage, _: &Layout) -> candle_core::Result<()> {
        self.f.take().map_or(Ok(()), |f| f(values, grads))
    }
}
