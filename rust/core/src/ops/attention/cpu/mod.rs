//! The CPU kernels: blocks of queries against blocks of keys, with a running maximum and sum for each query (Milakov &
//! Gimelshein 2018, arXiv:1805.02867). One thread works on a head and a range of its queries.

mod backward;
mod forward;
mod tile;

use std::ops::Range;

use tile::Matrices;

use super::ATTENTION;
use crate::Result;
use crate::cpu::{Elem, MatMut, Real, dispatch, gemm};
use crate::raw::Raw;

pub(super) use backward::{SavedValues, backward};
pub(super) use forward::forward;
pub(crate) use tile::heads_lie_inside;

/// Queries in a block.
const QUERIES: usize = 128;
/// Keys in a block. The scores of a block stay in the second-level cache.
const KEYS: usize = 256;
/// Multiplications worth a task of their own.
const TASK: usize = 1 << 19;

/// What is computed.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    /// The shape of the scores: (..., queries, keys).
    pub scores: Vec<usize>,
    pub scale: f64,
    pub is_causal: bool,
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

/// The number to take off scores: their maximum or log-sum, unless no key is seen, when all are negative infinity.
#[inline(always)]
fn finite_or_zero<R: Real>(x: R) -> R {
    if x == R::NEG_INFINITY { R::ZERO } else { x }
}
