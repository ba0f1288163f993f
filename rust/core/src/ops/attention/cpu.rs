//! The CPU kernels: blocks of queries against blocks of keys, with a running maximum and sum for each query (Milakov &
//! Gimelshein 2018, arXiv:1805.02867). One thread works on a head and a range of its queries.

use std::ops::Range;

use super::ATTENTION;
use super::tile::{Matrices, Output, Rows};
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, MatMut, MatRef, Real, dispatch, elements, gemm, read_all};
use smallvec::SmallVec;
use crate::ops::rows;
use crate::raw::{Raw, from_vec};
use crate::{Result, dispatch_float};

/// Queries in a block.
const QUERIES: usize = 64;
/// Keys in a block: its scores stay in the second-level cache.
const KEYS: usize = 512;
/// Multiplications worth a task of their own.
const TASK: usize = 1 << 19;
/// Tasks that the backward pass is split into, if it has as many blocks of queries.
const BACKWARD_TASKS: usize = 16;

/// What is computed.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    /// The shape of the scores: (..., queries, keys).
    pub scores: Vec<usize>,
    pub scale: f64,
    pub is_causal: bool,
}

/// What the backward pass reads.
pub(super) struct SavedValues {
    pub inputs: [Raw; 3],
    pub mask: Option<Raw>,
    pub result: Raw,
    /// The logarithm of the sum of e^score of each query.
    pub log_sums: Raw,
}

impl Attention {
    fn heads(&self) -> usize {
        self.scores[..self.scores.len() - 2].iter().product()
    }

    fn queries(&self) -> usize {
        self.scores[self.scores.len() - 2]
    }

    fn keys(&self) -> usize {
        self.scores[self.scores.len() - 1]
    }

    /// The mask, one number for each score.
    fn broadcast(&self, mask: Option<&Raw>) -> Result<Option<Raw>> {
        Ok(mask.map(|mask| mask.broadcast_as(self.scores.as_slice())).transpose()?)
    }

    /// The queries of block `index`.
    fn query_block(&self, index: usize) -> Range<usize> {
        index * QUERIES..self.queries().min((index + 1) * QUERIES)
    }

    /// The blocks of keys that some query of a block sees.
    fn key_blocks(&self, queries: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let end = if self.is_causal { self.keys().min(queries.end) } else { self.keys() };
        (0..end).step_by(KEYS).map(move |start| start..end.min(start + KEYS))
    }
}

/// Queries and keys, for the scores of their blocks.
struct Scores<'a, T: Elem> {
    attention: &'a Attention,
    queries: Matrices<'a, T>,
    keys: Matrices<'a, T>,
    mask: Option<Matrices<'a, T::Acc>>,
}

impl<T: Elem<Acc: Elem<Acc = T::Acc>>> Scores<'_, T> {
    /// Scores of a block, one row for each query, negative infinity where a key is not seen.
    fn block(&self, head: usize, queries: &Range<usize>, keys: &Range<usize>, out: &mut [T::Acc]) {
        let width = keys.len();
        let (q, k) = (self.queries.rows(head, queries), self.keys.rows(head, keys));
        gemm(MatMut::row_major(out, queries.len(), width), q, k.t(), self.attention.scale, false);
        if let Some(mask) = &self.mask {
            dispatch(
                #[inline(always)]
                || {
                    for (query, scores) in queries.clone().zip(out.chunks_exact_mut(width)) {
                        add_mask(mask.row(head, query), keys, scores);
                    }
                },
            );
        }
        if self.attention.is_causal && keys.end > queries.start + 1 {
            for (query, scores) in queries.clone().zip(out.chunks_exact_mut(width)) {
                let seen = (query + 1).saturating_sub(keys.start).min(width);
                scores[seen..].fill(T::Acc::NEG_INFINITY);
            }
        }
    }
}

/// Adds the mask of a query, one number or one for each key, to its scores of some keys.
#[inline(always)]
fn add_mask<R: Real>(mask: &[R], keys: &Range<usize>, scores: &mut [R]) {
    if let [number] = mask {
        for s in scores {
            *s += *number;
        }
    } else {
        for (s, m) in scores.iter_mut().zip(&mask[keys.clone()]) {
            *s += *m;
        }
    }
}

/// The result and the logarithms of the sums.
pub(super) fn forward(attention: &Attention, inputs: [&Raw; 3], mask: Option<&Raw>) -> Result<(Raw, Raw)> {
    let op = ATTENTION.name;
    let [q, _, v] = inputs;
    let value_width = v.dims()[v.rank() - 1];
    let mask = attention.broadcast(mask)?;
    let operands: SmallVec<[&Raw; 4]> = inputs.into_iter().chain(&mask).collect();
    dispatch_float!(q.dtype(), op, T => {
        let mut output = Output::<T>::like(q, value_width);
        let rows = output.rows();
        let log_sums = read_all(op, &operands, |operands| {
            let scores = Scores {
                attention,
                queries: Matrices::new(&operands[0])?,
                keys: Matrices::new(&operands[1])?,
                mask: operands.get(3).map(Matrices::new).transpose()?,
            };
            Ok(forward_blocks(&scores, &Matrices::new(&operands[2])?, value_width, &rows))
        })?;
        let log_sums = from_vec(log_sums, &attention.scores[..attention.scores.len() - 1]);
        // SAFETY: each block of queries of each head is written.
        Ok((unsafe { output.finish() }?, log_sums))
    })
}

fn forward_blocks<T: Elem<Acc: Elem<Acc = T::Acc>>>(
    scores: &Scores<'_, T>,
    values: &Matrices<'_, T>,
    value_width: usize,
    output: &Rows<'_, T>,
) -> Vec<T::Acc> {
    let attention = scores.attention;
    let (queries, keys) = (attention.queries(), attention.keys());
    let blocks = queries.div_ceil(QUERIES);
    let mut log_sums = vec![T::Acc::ZERO; attention.heads() * queries];
    let shared = SharedMut::new(&mut log_sums);
    let (tall, wide) = (queries.min(QUERIES), keys.min(KEYS));
    let grain = TASK / (tall * keys * 2 * value_width).max(1);
    par_ranges(attention.heads() * blocks, grain, |tasks| {
        let mut block = vec![T::Acc::ZERO; tall * wide];
        let mut result = vec![T::Acc::ZERO; tall * value_width];
        let mut state = vec![Running::default(); tall];
        for task in tasks {
            let (head, queries) = (task / blocks, attention.query_block(task % blocks));
            let state = &mut state[..queries.len()];
            let result = &mut result[..queries.len() * value_width];
            state.fill(Running::default());
            result.fill(T::Acc::ZERO);
            for keys in attention.key_blocks(&queries) {
                let block = &mut block[..queries.len() * keys.len()];
                scores.block(head, &queries, &keys, block);
                dispatch(
                    #[inline(always)]
                    || {
                        for (row, (state, scores)) in state.iter_mut().zip(block.chunks_exact_mut(keys.len())).enumerate() {
                            let correction = state.exponentiate(scores);
                            for r in &mut result[row * value_width..(row + 1) * value_width] {
                                *r *= correction;
                            }
                        }
                    },
                );
                let block = MatRef::row_major(block, queries.len(), keys.len());
                let result = MatMut::row_major(result, queries.len(), value_width);
                gemm(result, block, values.rows(head, &keys), 1.0, true);
            }
            let start = head * attention.queries() + queries.start;
            // SAFETY: tasks have different queries or heads.
            let log_sums = unsafe { shared.slice(start..start + queries.len()) };
            dispatch(
                #[inline(always)]
                || {
                    for (row, (state, log_sum)) in state.iter().zip(log_sums).enumerate() {
                        *log_sum = state.max + state.sum.ln();
                        // Nothing is seen: the result is zero, not zero divided by zero.
                        let scale = if state.sum == T::Acc::ZERO { T::Acc::ZERO } else { T::Acc::ONE / state.sum };
                        for r in &mut result[row * value_width..(row + 1) * value_width] {
                            *r *= scale;
                        }
                    }
                },
            );
            // SAFETY: as above.
            unsafe { output.write(head, queries.start, result) };
        }
    });
    log_sums
}

/// The largest score of a query so far, and the sum of e^(score - largest).
#[derive(Clone, Copy)]
struct Running<R> {
    max: R,
    sum: R,
}

impl<R: Real> Default for Running<R> {
    fn default() -> Self {
        Self { max: R::NEG_INFINITY, sum: R::ZERO }
    }
}

impl<R: Real> Running<R> {
    /// Turns scores into e^(score - largest) and adds them up. Returns what earlier results are to be multiplied with.
    #[inline(always)]
    fn exponentiate(&mut self, scores: &mut [R]) -> R {
        let max = self.max.max(rows::max_by(scores, |s| s));
        let base = finite_or_zero(max);
        for s in scores.iter_mut() {
            *s = (*s - base).exp();
        }
        let correction = if self.max == R::NEG_INFINITY { R::ZERO } else { (self.max - base).exp() };
        self.sum = self.sum * correction + rows::sum(scores, |s| s);
        self.max = max;
        correction
    }
}

/// The number to take off scores: their maximum or log-sum, unless no key is seen, when all are negative infinity.
#[inline(always)]
fn finite_or_zero<R: Real>(x: R) -> R {
    if x == R::NEG_INFINITY { R::ZERO } else { x }
}

/// The gradients of q, k and v that are wanted.
pub(super) fn backward(
    attention: &Attention,
    saved: &SavedValues,
    grad: &Raw,
    wanted: [bool; 3],
) -> Result<[Option<Raw>; 3]> {
    let op = ATTENTION.name;
    let [q, k, v] = &saved.inputs;
    let widths = [q, v].map(|raw| raw.dims()[raw.rank() - 1]);
    // Rows of the result and its gradient are multiplied element by element.
    let grad = if grad.stride()[grad.rank() - 1] == 1 { grad.clone() } else { crate::cpu::contiguous(grad)? };
    let mask = attention.broadcast(saved.mask.as_ref())?;
    let operands: SmallVec<[&Raw; 8]> =
        [q, k, v, &saved.result, &grad, &saved.log_sums].into_iter().chain(&mask).collect();
    dispatch_float!(q.dtype(), op, T => {
        let mut outputs = [0, 1, 2].map(|i| {
            let input = &saved.inputs[i];
            wanted[i].then(|| Output::<T>::like(input, input.dims()[input.rank() - 1]))
        });
        let rows = outputs.each_mut().map(|output| output.as_mut().map(Output::rows));
        read_all(op, &operands, |operands| {
            let pass = BackwardPass {
                scores: Scores {
                    attention,
                    queries: Matrices::new(&operands[0])?,
                    keys: Matrices::new(&operands[1])?,
                    mask: operands.get(6).map(Matrices::new).transpose()?,
                },
                values: Matrices::new(&operands[2])?,
                result: Matrices::new(&operands[3])?,
                grad: Matrices::new(&operands[4])?,
                log_sums: elements(operands[5])?,
                widths,
                rows: &rows,
            };
            pass.run();
            Ok(())
        })?;
        let mut grads = [None, None, None];
        for (grad, output) in grads.iter_mut().zip(outputs) {
            // SAFETY: the pass writes all rows of each output.
            *grad = output.map(|output| unsafe { output.finish() }).transpose()?;
        }
        Ok(grads)
    })
}

/// Turns scores into probabilities, the rows of which belong to `log_sums`.
fn probabilities<R: Real>(scores: &mut [R], width: usize, log_sums: &[R]) {
    dispatch(
        #[inline(always)]
        || {
            for (scores, log_sum) in scores.chunks_exact_mut(width).zip(log_sums) {
                let base = finite_or_zero(*log_sum);
                for s in scores {
                    *s = (*s - base).exp();
                }
            }
        },
    );
}

struct BackwardPass<'a, T: Elem> {
    scores: Scores<'a, T>,
    values: Matrices<'a, T>,
    result: Matrices<'a, T>,
    grad: Matrices<'a, T>,
    log_sums: &'a [T::Acc],
    /// Of queries and keys, of values.
    widths: [usize; 2],
    /// Of the gradients of q, k and v that are wanted.
    rows: &'a [Option<Rows<'a, T>>; 3],
}

/// Working memory of a thread.
struct Scratch<R> {
    probabilities: Vec<R>,
    score_grads: Vec<R>,
    query_grads: Vec<R>,
}

impl<T: Elem<Acc: Elem<Acc = T::Acc>>> BackwardPass<'_, T> {
    fn run(&self) {
        let attention = self.scores.attention;
        let (heads, keys) = (attention.heads(), attention.keys());
        let blocks = attention.queries().div_ceil(QUERIES);
        // With few heads, ranges of queries make the gradients of keys and values in parts.
        let parts = BACKWARD_TASKS.div_ceil(heads.max(1)).clamp(1, blocks.max(1));
        let per_part = blocks.div_ceil(parts).max(1);
        let parts = blocks.div_ceil(per_part).max(1);
        let size = keys * (self.widths[0] + self.widths[1]);
        if parts == 1 {
            let grain = TASK / (attention.queries() * size).max(1);
            par_ranges(heads, grain, |range| {
                let mut scratch = self.scratch();
                let mut grads = vec![T::Acc::ZERO; size];
                for head in range {
                    grads.fill(T::Acc::ZERO);
                    self.query_blocks(head, 0..blocks, &mut scratch, &mut grads);
                    self.write(head, &grads);
                }
            });
            return;
        }
        let mut partial = vec![T::Acc::ZERO; heads * parts * size];
        let shared = SharedMut::new(&mut partial);
        par_ranges(heads * parts, 1, |range| {
            let mut scratch = self.scratch();
            for task in range {
                let first = task % parts * per_part;
                // SAFETY: each task has its own part.
                let grads = unsafe { shared.slice(task * size..(task + 1) * size) };
                self.query_blocks(task / parts, first..blocks.min(first + per_part), &mut scratch, grads);
            }
        });
        let shared = SharedMut::new(&mut partial);
        par_ranges(heads, 1, |range| {
            for head in range {
                // SAFETY: each head has its own parts.
                let grads = unsafe { shared.slice(head * parts * size..(head + 1) * parts * size) };
                let (total, others) = grads.split_at_mut(size);
                for other in others.chunks_exact(size.max(1)) {
                    for (t, o) in total.iter_mut().zip(other) {
                        *t += *o;
                    }
                }
                self.write(head, total);
            }
        });
    }

    fn scratch(&self) -> Scratch<T::Acc> {
        let attention = self.scores.attention;
        let tall = attention.queries().min(QUERIES);
        let block = vec![T::Acc::ZERO; tall * attention.keys().min(KEYS)];
        Scratch {
            score_grads: block.clone(),
            probabilities: block,
            query_grads: vec![T::Acc::ZERO; tall * self.widths[0]],
        }
    }

    /// The gradients of the queries of some blocks, and those of keys and values, one after the other in `grads`, as far as
    /// these queries contribute.
    fn query_blocks(&self, head: usize, blocks: Range<usize>, scratch: &mut Scratch<T::Acc>, grads: &mut [T::Acc]) {
        let attention = self.scores.attention;
        let [width, value_width] = self.widths;
        let [wants_q, wants_k, wants_v] = self.rows.each_ref().map(Option::is_some);
        let (key_grads, value_grads) = grads.split_at_mut(attention.keys() * width);
        for index in blocks {
            let queries = attention.query_block(index);
            let tall = queries.len();
            let log_sums = &self.log_sums[head * attention.queries()..][queries.clone()];
            let grad = self.grad.rows(head, &queries);
            let query_grads = &mut scratch.query_grads[..tall * width];
            query_grads.fill(T::Acc::ZERO);
            for keys in attention.key_blocks(&queries) {
                let wide = keys.len();
                let p = &mut scratch.probabilities[..tall * wide];
                self.scores.block(head, &queries, &keys, p);
                probabilities(p, wide, log_sums);
                if wants_v {
                    let out = &mut value_grads[keys.start * value_width..keys.end * value_width];
                    let p = MatRef::row_major(p, tall, wide);
                    gemm(MatMut::row_major(out, wide, value_width), p.t(), grad, 1.0, true);
                }
                if !wants_q && !wants_k {
                    continue;
                }
                let ds = &mut scratch.score_grads[..tall * wide];
                let v = self.values.rows(head, &keys);
                gemm(MatMut::row_major(ds, tall, wide), grad, v.t(), 1.0, false);
                self.score_gradients(head, &queries, p, ds);
                let ds = MatRef::row_major(ds, tall, wide);
                if wants_q {
                    let out = MatMut::row_major(query_grads, tall, width);
                    gemm(out, ds, self.scores.keys.rows(head, &keys), attention.scale, true);
                }
                if wants_k {
                    let out = &mut key_grads[keys.start * width..keys.end * width];
                    let q = self.scores.queries.rows(head, &queries);
                    gemm(MatMut::row_major(out, wide, width), ds.t(), q, attention.scale, true);
                }
            }
            if let Some(rows) = &self.rows[0] {
                // SAFETY: these queries belong to this call.
                unsafe { rows.write(head, queries.start, query_grads) };
            }
        }
    }

    /// Turns gradients of probabilities into gradients of scores: p (dp - Σ o do), where the sum over the keys that softmax
    /// asks for, Σ p dp, is written as one over the width of the values.
    fn score_gradients(&self, head: usize, queries: &Range<usize>, p: &[T::Acc], ds: &mut [T::Acc]) {
        let wide = p.len() / queries.len();
        dispatch(
            #[inline(always)]
            || {
                for (query, (ds, p)) in queries.clone().zip(ds.chunks_exact_mut(wide).zip(p.chunks_exact(wide))) {
                    let (o, g) = (self.result.row(head, query), self.grad.row(head, query));
                    let dot = rows::sum_pairs(o, g, |o: T, g: T| o.to_acc() * g.to_acc());
                    for (d, p) in ds.iter_mut().zip(p) {
                        *d = *p * (*d - dot);
                    }
                }
            },
        );
    }

    /// Write the gradients of keys and values of a head.
    fn write(&self, head: usize, grads: &[T::Acc]) {
        let (key_grads, value_grads) = grads.split_at(self.scores.attention.keys() * self.widths[0]);
        for (rows, grads) in [(&self.rows[1], key_grads), (&self.rows[2], value_grads)] {
            if let Some(rows) = rows {
                // SAFETY: one thread works on a head.
                unsafe { rows.write(head, 0, grads) };
            }
        }
    }
}
