//! The gradients of attention on the CPU, block by block, from the log-sums of the forward pass (Dao et al. 2022,
//! algorithm 4).

use std::ops::Range;

use smallvec::SmallVec;

use super::tile::{Matrices, Output, Rows};
use super::{ATTENTION, Attention, KEYS, QUERIES, Scores, TASK, finite_or_zero};
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, MatMut, MatRef, Real, dispatch, elements, gemm, read_all};
use crate::ops::rows;
use crate::raw::Raw;
use crate::{Result, dispatch_float};

/// With fewer key heads than this, the queries that read a key head are split, so that the backward pass has about this
/// many tasks.
const BACKWARD_TASKS: usize = 16;

/// What the forward pass saves for the backward pass.
pub(in crate::ops::attention) struct SavedValues {
    /// q, k and v.
    pub inputs: [Raw; 3],
    /// The numbers that are added to the scores.
    pub mask: Option<Raw>,
    /// The result of the forward pass.
    pub result: Raw,
    /// For each query, log Σ e^score over its keys.
    pub log_sums: Raw,
}

/// Computes the gradients of q, k and v from `grad`, the gradient of the result; `None` where `wanted` is false.
pub(in crate::ops::attention) fn backward(
    attention: &Attention,
    saved: &SavedValues,
    grad: &Raw,
    wanted: [bool; 3],
) -> Result<[Option<Raw>; 3]> {
    let op = ATTENTION.name;
    let [q, k, v] = &saved.inputs;
    let widths = [q, v].map(|raw| raw.dims()[raw.rank() - 1]);
    // Rows of the result and of its gradient are multiplied as slices, so each row must be contiguous. Those of the
    // result always are.
    let grad = if grad.stride()[grad.rank() - 1] == 1 { grad.clone() } else { crate::cpu::contiguous(grad)? };
    let mask = attention.broadcast(saved.mask.as_ref())?;
    let operands: SmallVec<[&Raw; 8]> =
        [q, k, v, &saved.result, &grad, &saved.log_sums].into_iter().chain(&mask).collect();
    dispatch_float!(q.dtype(), op, T => {
        let mut outputs = [0, 1, 2].map(|i| {
            let input = &saved.inputs[i];
            wanted[i].then(|| Output::<T>::like(input, input.dims()[input.rank() - 1]))
        });
        let grad_rows = outputs.each_mut().map(|output| output.as_mut().map(Output::rows));
        // The storage and the layout of each of `operands`, in the same order; the mask, if there is one, is number 6.
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
                grad_rows: &grad_rows,
            };
            pass.run();
            Ok(())
        })?;
        let mut grads = [None, None, None];
        for (grad, output) in grads.iter_mut().zip(outputs) {
            // SAFETY: `run` has written all rows of each output.
            *grad = output.map(|output| unsafe { output.finish() }).transpose()?;
        }
        Ok(grads)
    })
}

/// Turns rows of scores into probabilities, given the log-sum of each row.
fn probabilities<R: Real>(scores: &mut [R], width: usize, log_sums: &[R]) {
    dispatch(
        #[inline(always)]
        || {
            for (scores, log_sum) in scores.chunks_exact_mut(width).zip(log_sums) {
                // A query that sees no key has only scores of -inf, and so the log-sum -inf. With 0 instead, its
                // probabilities are exp(-inf) = 0, not NaN.
                let base = finite_or_zero(*log_sum);
                for s in scores {
                    *s = (*s - base).exp();
                }
            }
        },
    );
}

/// The operands of the backward pass.
struct BackwardPass<'a, T: Elem> {
    scores: Scores<'a, T>,
    values: Matrices<'a, T>,
    result: Matrices<'a, T>,
    grad: Matrices<'a, T>,
    log_sums: &'a [T::Acc],
    /// The width of queries and keys, and the width of values.
    widths: [usize; 2],
    /// Where the gradients of q, k and v are written; `None` if a gradient is not wanted.
    grad_rows: &'a [Option<Rows<'a, T>>; 3],
}

/// Working memory of a thread.
struct Scratch<R> {
    /// Of a block of queries and a block of keys.
    probabilities: Vec<R>,
    /// The gradients of the scores of these two blocks.
    score_grads: Vec<R>,
    /// The gradients of a block of queries.
    query_grads: Vec<R>,
}

// `gemm` takes a matrix only of an `Elem`, so the accumulator must be one too, with itself as its accumulator: f32 or
// f64.
impl<T: Elem<Acc: Elem<Acc = T::Acc>>> BackwardPass<'_, T> {
    /// Computes the wanted gradients and writes them to `grad_rows`.
    fn run(&self) {
        let attention = self.scores.attention;
        // A group of query heads shares each key head. `blocks` is the number of blocks of queries in a group; the
        // blocks of one query head come before those of the next.
        let (key_heads, keys) = (attention.heads() / attention.group, attention.keys());
        let blocks = attention.group * attention.queries().div_ceil(QUERIES);
        // With few key heads, the blocks of a group are split into parts. Each part sums what its queries add to the
        // gradients of all keys and values of the key head; these sums are added up at the end.
        let wanted_parts = BACKWARD_TASKS.div_ceil(key_heads.max(1)).clamp(1, blocks.max(1));
        let blocks_per_part = blocks.div_ceil(wanted_parts).max(1);
        let parts = blocks.div_ceil(blocks_per_part).max(1);
        // Elements of the gradients of a key head's keys and values.
        let size = keys * (self.widths[0] + self.widths[1]);
        if parts == 1 {
            // `par_ranges(len, grain, f)` calls `f` for pieces of 0..len that have `grain` indices each. Here these are
            // the key heads of a task, so many that it has about `TASK` multiplications.
            let grain = TASK / (attention.group * attention.queries() * size).max(1);
            par_ranges(key_heads, grain, |range| {
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
        let mut partial = vec![T::Acc::ZERO; key_heads * parts * size];
        let shared = SharedMut::new(&mut partial);
        par_ranges(key_heads * parts, 1, |range| {
            let mut scratch = self.scratch();
            for task in range {
                let first_block = task % parts * blocks_per_part;
                // SAFETY: each task has its own part.
                let grads = unsafe { shared.slice(task * size..(task + 1) * size) };
                let part_blocks = first_block..blocks.min(first_block + blocks_per_part);
                self.query_blocks(task / parts, part_blocks, &mut scratch, grads);
            }
        });
        let shared = SharedMut::new(&mut partial);
        par_ranges(key_heads, 1, |range| {
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
        let block_rows = attention.queries().min(QUERIES);
        let block = vec![T::Acc::ZERO; block_rows * attention.keys().min(KEYS)];
        Scratch {
            score_grads: block.clone(),
            probabilities: block,
            query_grads: vec![T::Acc::ZERO; block_rows * self.widths[0]],
        }
    }

    /// Writes the gradients of the queries in `blocks`, which are blocks of the group of query heads that share the key
    /// head `key_head`. Also adds to `grads` what these queries contribute to the gradients of the key head's keys and
    /// values. `grads` holds the gradients of the keys and, after them, those of the values.
    fn query_blocks(&self, key_head: usize, blocks: Range<usize>, scratch: &mut Scratch<T::Acc>, grads: &mut [T::Acc]) {
        let attention = self.scores.attention;
        let [width, value_width] = self.widths;
        let [wants_q, wants_k, wants_v] = self.grad_rows.each_ref().map(Option::is_some);
        let (key_grads, value_grads) = grads.split_at_mut(attention.keys() * width);
        let blocks_per_head = attention.queries().div_ceil(QUERIES);
        for index in blocks {
            let head = key_head * attention.group + index / blocks_per_head;
            let queries = attention.query_block(index % blocks_per_head);
            let block_rows = queries.len();
            let log_sums = &self.log_sums[head * attention.queries()..][queries.clone()];
            let grad = self.grad.rows(head, &queries);
            let query_grads = &mut scratch.query_grads[..block_rows * width];
            query_grads.fill(T::Acc::ZERO);
            for keys in attention.key_blocks(&queries) {
                let block_columns = keys.len();
                let p = &mut scratch.probabilities[..block_rows * block_columns];
                self.scores.block(head, &queries, &keys, p);
                probabilities(p, block_columns, log_sums);
                // `gemm(c, a, b, alpha, accumulate)` sets c to alpha a b, or adds alpha a b to c if `accumulate`.
                if wants_v {
                    let out = &mut value_grads[keys.start * value_width..keys.end * value_width];
                    let p = MatRef::row_major(p, block_rows, block_columns);
                    gemm(MatMut::row_major(out, block_columns, value_width), p.t(), grad, 1.0, true);
                }
                if !wants_q && !wants_k {
                    continue;
                }
                let ds = &mut scratch.score_grads[..block_rows * block_columns];
                let v = self.values.rows(key_head, &keys);
                gemm(MatMut::row_major(ds, block_rows, block_columns), grad, v.t(), 1.0, false);
                self.score_gradients(head, &queries, p, ds);
                let ds = MatRef::row_major(ds, block_rows, block_columns);
                if wants_q {
                    let out = MatMut::row_major(query_grads, block_rows, width);
                    gemm(out, ds, self.scores.keys.rows(key_head, &keys), attention.scale, true);
                }
                if wants_k {
                    let out = &mut key_grads[keys.start * width..keys.end * width];
                    let q = self.scores.queries.rows(head, &queries);
                    gemm(MatMut::row_major(out, block_columns, width), ds.t(), q, attention.scale, true);
                }
            }
            if let Some(rows) = &self.grad_rows[0] {
                // SAFETY: no other task has these queries of this query head.
                unsafe { rows.write(head, queries.start, query_grads) };
            }
        }
    }

    /// Turns `ds`, which holds the gradients dp of the probabilities p, into the gradients of the scores:
    /// `p (dp - Σ o·go)`, where `o` is the result and `go` its gradient. The derivative of softmax has `Σ p·dp` over
    /// the keys, which equals `Σ o·go` over the columns of the values.
    fn score_gradients(&self, head: usize, queries: &Range<usize>, p: &[T::Acc], ds: &mut [T::Acc]) {
        let block_columns = p.len() / queries.len();
        dispatch(
            #[inline(always)]
            || {
                for (query, (ds, p)) in
                    queries.clone().zip(ds.chunks_exact_mut(block_columns).zip(p.chunks_exact(block_columns)))
                {
                    let (o, go) = (self.result.row(head, query), self.grad.row(head, query));
                    let dot = rows::sum_pairs(o, go, |o: T, go: T| o.to_acc() * go.to_acc());
                    for (d, p) in ds.iter_mut().zip(p) {
                        *d = *p * (*d - dot);
                    }
                }
            },
        );
    }

    /// Writes the gradients of the keys and values of a key head.
    fn write(&self, key_head: usize, grads: &[T::Acc]) {
        let (key_grads, value_grads) = grads.split_at(self.scores.attention.keys() * self.widths[0]);
        for (rows, grads) in [(&self.grad_rows[1], key_grads), (&self.grad_rows[2], value_grads)] {
            if let Some(rows) = rows {
                // SAFETY: only one thread writes the rows of a key head.
                unsafe { rows.write(key_head, 0, grads) };
            }
        }
    }
}
