//! The CPU form of attention. Its kernels compute the scores of a block of queries and a block of keys at a time, with
//! a running maximum and sum for each query (Milakov & Gimelshein 2018, arXiv:1805.02867). A task of the forward pass
//! is a block of queries of a head. A task of the backward pass is a head of keys, or a part of the queries that read
//! this head.

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

/// The most queries in a block.
const QUERIES: usize = 128;
/// The most keys in a block. The scores of a block stay in the second-level cache.
const KEYS: usize = 256;
/// The least number of multiplications that are worth a task of their own.
const TASK: usize = 1 << 19;

/// The shape and the settings of an attention operation.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    /// The shape of the scores: (..., queries, keys).
    pub scores: Vec<usize>,
    /// The factor of the products of queries and keys.
    pub scale: f64,
    pub visible_keys: VisibleKeys,
    /// How many consecutive query heads share a head of keys and values.
    pub group: usize,
}

/// Which keys a query sees.
#[derive(Clone, Debug)]
pub(super) enum VisibleKeys {
    All,
    /// The keys up to the query's own position.
    Causal,
    /// The keys that are in the query's segment of a packed row, inside its window, and not after its own position.
    Segments(Spans),
}

impl VisibleKeys {
    /// [`Causal`](Self::Causal) or [`All`](Self::All).
    pub const fn of(is_causal: bool) -> Self {
        if is_causal { Self::Causal } else { Self::All }
    }
}

/// For each query of a packed row, the first key that it sees: the query sees the keys from there up to its own
/// position. For a query that sees no key, the number is the query's position plus 1. The numbers do not decrease, and
/// the queries that see no key come last.
#[derive(Clone, Debug)]
pub(super) struct Spans(pub Vec<u32>);

impl Spans {
    /// The range of keys that at least one of the queries sees.
    fn keys(&self, queries: &Range<usize>) -> Range<usize> {
        let first_keys = &self.0[queries.clone()];
        let is_seeing = |(first_key, query): &(&u32, usize)| **first_key as usize <= *query;
        // The queries that see a key come first. Each of them sees the key at its own position.
        let seeing = first_keys.iter().zip(queries.clone()).filter(is_seeing).count();
        let start = first_keys.first().map_or(0, |&first_key| first_key as usize);
        // If no query sees a key, the range is empty.
        start..(queries.start + seeing).max(start)
    }
}

impl Attention {
    /// The number of query heads of all samples.
    fn heads(&self) -> usize {
        self.scores[..self.scores.len() - 2].iter().product()
    }

    fn queries(&self) -> usize {
        self.scores[self.scores.len() - 2]
    }

    fn keys(&self) -> usize {
        self.scores[self.scores.len() - 1]
    }

    /// The mask, broadcast to the shape of the scores.
    fn broadcast(&self, mask: Option<&Raw>) -> Result<Option<Raw>> {
        Ok(mask.map(|mask| mask.broadcast_as(self.scores.as_slice())).transpose()?)
    }

    /// The queries of the block `index` of a head.
    fn query_block(&self, index: usize) -> Range<usize> {
        index * QUERIES..self.queries().min((index + 1) * QUERIES)
    }

    /// The blocks of keys that at least one of the queries sees.
    fn key_blocks(&self, queries: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let seen = match &self.visible_keys {
            VisibleKeys::All => 0..self.keys(),
            VisibleKeys::Causal => 0..self.keys().min(queries.end),
            VisibleKeys::Segments(spans) => spans.keys(queries),
        };
        let end = seen.end;
        seen.step_by(KEYS).map(move |start| start..end.min(start + KEYS))
    }

    /// Sets the scores of keys that a query does not see to negative infinity. `scores` has one row for each query.
    fn hide<R: Real>(&self, queries: &Range<usize>, keys: &Range<usize>, scores: &mut [R]) {
        let first_key = |query: usize| match &self.visible_keys {
            VisibleKeys::Segments(spans) => spans.0[query] as usize,
            _ => 0,
        };
        // First keys do not decrease, so that of the last query is the largest. The first query sees no key after its
        // own position, so it sees the fewest keys at the end of the block.
        let all_see_start = first_key(queries.end - 1) <= keys.start;
        let all_see_end = keys.end <= queries.start + 1;
        if matches!(self.visible_keys, VisibleKeys::All) || (all_see_start && all_see_end) {
            return;
        }
        let width = keys.len();
        for (query, scores) in queries.clone().zip(scores.chunks_exact_mut(width)) {
            // The query sees the keys from `start` to `end` (exclusive) of the block.
            let [start, end] = [first_key(query), query + 1].map(|key| key.saturating_sub(keys.start).min(width));
            scores[..start].fill(R::NEG_INFINITY);
            scores[end..].fill(R::NEG_INFINITY);
        }
    }
}

/// What scores are computed from.
struct Scores<'a, T: Elem> {
    attention: &'a Attention,
    queries: Matrices<'a, T>,
    keys: Matrices<'a, T>,
    mask: Option<Matrices<'a, T::Acc>>,
}

// Scores and masks have the type of the accumulator. The bound says that `gemm` can write this type like any element.
impl<T: Elem<Acc: Elem<Acc = T::Acc>>> Scores<'_, T> {
    /// Computes the scores of the query head `head` for a block of queries and a block of keys, one row for each query.
    /// The score of a key that the query does not see is negative infinity.
    fn block(&self, head: usize, queries: &Range<usize>, keys: &Range<usize>, out: &mut [T::Acc]) {
        let width = keys.len();
        let (q, k) = (self.queries.rows(head, queries), self.keys.rows(head / self.attention.group, keys));
        let accumulate = false;
        gemm(MatMut::row_major(out, queries.len(), width), q, k.t(), self.attention.scale, accumulate);
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
        self.attention.hide(queries, keys, out);
    }
}

/// Adds the mask of a query to its scores for `keys`. The mask has a number for each key of the head, or a single
/// number for all of them.
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

/// Returns the number to subtract from the scores of a query before the exponential: `x`, which is their maximum or
/// log-sum-exp. If `x` is negative infinity, because the query sees no key, the number is zero: -∞ - (-∞) would be NaN.
#[inline(always)]
fn finite_or_zero<R: Real>(x: R) -> R {
    if x == R::NEG_INFINITY { R::ZERO } else { x }
}
