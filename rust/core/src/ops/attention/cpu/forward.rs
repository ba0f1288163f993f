//! The forward pass of attention on the CPU: a block of queries at a time reads the keys and values block by block.

use smallvec::SmallVec;

use super::tile::{Matrices, Output, Rows};
use super::{ATTENTION, Attention, KEYS, QUERIES, Scores, TASK, finite_or_zero};
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, MatMut, MatRef, Real, dispatch, gemm, read_all};
use crate::ops::rows;
use crate::raw::{Raw, from_vec};
use crate::{Result, dispatch_float};

/// Computes the result and the log-sums from `inputs`, which are queries, keys and values: (..., heads, tokens, width)
/// each. The log-sum of a query is log Σ e^score over its keys; the log-sums are (..., heads, queries).
pub(in crate::ops::attention) fn forward(
    attention: &Attention,
    inputs: [&Raw; 3],
    mask: Option<&Raw>,
) -> Result<(Raw, Raw)> {
    let op = ATTENTION.name;
    let [q, _, v] = inputs;
    let value_width = v.dims()[v.rank() - 1];
    let mask = attention.broadcast(mask)?;
    let operands: SmallVec<[&Raw; 4]> = inputs.into_iter().chain(&mask).collect();
    dispatch_float!(q.dtype(), op, T => {
        let mut output = Output::<T>::like(q, value_width);
        let result_rows = output.rows();
        let log_sums = read_all(op, &operands, |operands| {
            let scores = Scores {
                attention,
                queries: Matrices::new(&operands[0])?,
                keys: Matrices::new(&operands[1])?,
                // The operand after queries, keys and values, if there is a mask.
                mask: operands.get(3).map(Matrices::new).transpose()?,
            };
            Ok(forward_blocks(&scores, &Matrices::new(&operands[2])?, value_width, &result_rows))
        })?;
        // `attention.scores` is the shape of all scores, (..., heads, queries, keys).
        let [log_sums_dims @ .., _keys] = &attention.scores[..] else { unreachable!("scores have dimensions") };
        let log_sums = from_vec(log_sums, log_sums_dims);
        // SAFETY: `forward_blocks` has written each block of queries of each head.
        Ok((unsafe { output.finish() }?, log_sums))
    })
}

/// Writes the result to `output`; returns the log-sums. The bound on `T::Acc` lets `gemm` multiply exponentials, which
/// have this type.
fn forward_blocks<T: Elem<Acc: Elem<Acc = T::Acc>>>(
    scores: &Scores<'_, T>,
    values: &Matrices<'_, T>,
    value_width: usize,
    output: &Rows<'_, T>,
) -> Vec<T::Acc> {
    let attention = scores.attention;
    let (query_count, key_count) = (attention.queries(), attention.keys());
    let blocks_per_head = query_count.div_ceil(QUERIES);
    let mut log_sums = vec![T::Acc::ZERO; attention.heads() * query_count];
    let shared = SharedMut::new(&mut log_sums);
    // The most rows and columns of a block of scores.
    let (block_rows, block_columns) = (query_count.min(QUERIES), key_count.min(KEYS));
    // A block of queries takes two multiplications for each query, key and element: one of query and key for the score,
    // one of e^score and value for the result. Queries are about as wide as values, so `value_width` stands for both.
    // `grain`, the number of blocks that a thread takes at a time, is chosen for about TASK multiplications.
    let grain = TASK / (block_rows * key_count * 2 * value_width).max(1);
    par_ranges(attention.heads() * blocks_per_head, grain, |tasks| {
        let mut block_scores = vec![T::Acc::ZERO; block_rows * block_columns];
        let mut result = vec![T::Acc::ZERO; block_rows * value_width];
        let mut state = vec![Running::default(); block_rows];
        for task in tasks {
            let (head, queries) = (task / blocks_per_head, attention.query_block(task % blocks_per_head));
            let state = &mut state[..queries.len()];
            let result = &mut result[..queries.len() * value_width];
            state.fill(Running::default());
            result.fill(T::Acc::ZERO);
            for keys in attention.key_blocks(&queries) {
                let block_scores = &mut block_scores[..queries.len() * keys.len()];
                scores.block(head, &queries, &keys, block_scores);
                dispatch(
                    #[inline(always)]
                    || {
                        for (row, (state, scores)) in
                            state.iter_mut().zip(block_scores.chunks_exact_mut(keys.len())).enumerate()
                        {
                            let correction = state.exponentiate(scores);
                            for r in &mut result[row * value_width..(row + 1) * value_width] {
                                *r *= correction;
                            }
                        }
                    },
                );
                let exponentials = MatRef::row_major(block_scores, queries.len(), keys.len());
                let result = MatMut::row_major(result, queries.len(), value_width);
                // `group` consecutive query heads share a head of values.
                let values = values.rows(head / attention.group, &keys);
                // Adds the product, with the factor 1, to `result`.
                gemm(result, exponentials, values, 1.0, true);
            }
            let start = head * query_count + queries.start;
            // SAFETY: tasks have different queries or heads.
            let log_sums = unsafe { shared.slice(start..start + queries.len()) };
            dispatch(
                #[inline(always)]
                || {
                    for (row, (state, log_sum)) in state.iter().zip(log_sums).enumerate() {
                        *log_sum = state.max + state.sum.ln();
                        // If the query sees no key, the sum is zero, and the result is zero instead of 0 / 0.
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
    /// Turns the scores of further keys into e^(score - largest), and adds these to the sum. Returns the factor by
    /// which other sums over the earlier keys must be multiplied.
    #[inline(always)]
    fn exponentiate(&mut self, scores: &mut [R]) -> R {
        let max = self.max.max(rows::max_by(scores, |s| s));
        // If the query has seen no key yet, the maximum is negative infinity, and zero is subtracted instead.
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
