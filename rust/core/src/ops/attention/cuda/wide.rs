//! The forward pass of attention with heads too wide for the attention kernels that use tensor cores: matrix products
//! around a softmax, for one block of queries at a time. The backward pass uses the plain kernels, those without tensor
//! cores.

use trainable_candle_cuda::kernels::softmax::{LOGSUMEXP_FORWARD, LogsumexpForward};

use super::Attention;
use crate::cuda::launch::{Mut, Shape, accumulator, count32, input, output, suffix};
use crate::cuda::{Gpu, cast, contiguous, product, write_products};
use crate::ops::conv::cuda::pairs::{LEFT, RIGHT, pairs};
use crate::ops::softmax;
use crate::product::uses_pairs;
use crate::{Raw, Result};

/// Widest head of the attention kernels that use tensor cores.
const WIDEST: usize = 128;
/// The most scores in memory at a time: 128 MiB in f32.
const MOST_SCORES: usize = 1 << 25;
/// The most elements (keys · value width) of a head's v for the `pairs` kernel. It writes three numbers for each
/// element, and counts them in 32 bits.
const MOST_VALUES: usize = 1 << 30;

impl Attention<'_> {
    /// Whether heads are so wide that the plain kernel would be slow: the plain kernel computes the scores again for
    /// every 64 columns of the result. `width` is that of queries and keys, `value_width` that of values and the
    /// result. Both must be wide: with narrow queries and keys a score is cheap, and with narrow values the plain
    /// kernel seldom repeats it. False without keys, and for masked and causal attention, which only the plain kernel
    /// supports at this width.
    pub(super) fn is_wide(&self, [width, value_width]: [usize; 2], mask: Option<&Raw>) -> bool {
        // `scores` is the shape of the scores, (..., queries, keys).
        width.min(value_width) > WIDEST && mask.is_none() && !self.is_causal && self.scores.last() != Some(&0)
    }

    /// Writes the result to `o`, and the log-sums (for each query, log Σ e^score over its keys) to `log_sums`, which
    /// is dense, (..., queries). There must be at least one query and one key. Shapes: `q` (..., queries, width), `k`
    /// (..., keys, width), `v` (..., keys, value width), `o` (..., queries, value width).
    pub(super) fn wide_forward(&self, [q, k, v]: [&Raw; 3], o: &Raw, log_sums: &Raw) -> Result<()> {
        let (op, dtype, rank) = (self.op, q.dtype(), self.scores.len());
        let gpu = Gpu::of(op, q)?;
        let [queries, keys] = [self.scores[rank - 2], self.scores[rank - 1]];
        let heads: usize = self.scores[..rank - 2].iter().product();
        // The number of queries in a block; the last block may have fewer.
        let most_queries = (MOST_SCORES / keys).clamp(1, queries);
        let score_dtype = accumulator(dtype);
        let function = gpu.function(&LOGSUMEXP_FORWARD, suffix(op, score_dtype)?)?;
        let sums = output(op, log_sums)?;
        // `pairs` splits each f32 number of a row into hi + lo in bf16, and writes three parts one after the other: the
        // hi, hi and lo numbers of the row for a left factor (q, probabilities), the hi, lo and hi numbers for a right
        // factor (k, v). A product of such rows sums hi·hi + hi·lo + lo·hi. The products with the probabilities sum
        // over the keys, which are the rows of v, so the parts of v must be one below the other: `pairs` gets all of v
        // as one row. It pads rows to a multiple of 8 numbers. With a multiple of 8 keys, it pads neither v
        // nor the rows of the probabilities, so the two fit together.
        let in_pairs = uses_pairs(dtype) && keys.is_multiple_of(8) && v.dims()[rank - 1] <= MOST_VALUES / keys;
        for head in 0..heads {
            let [q, k, v, o] =
                [self.matrix(q, head)?, self.matrix(k, head)?, self.matrix(v, head)?, self.matrix(o, head)?];
            let (k, v) = if in_pairs {
                // The last argument of `pairs` is the length of a row.
                let (width, value_width) = (k.dims()[1], v.dims()[1]);
                let v = pairs(op, RIGHT, &contiguous(&v)?, keys * value_width)?;
                (pairs(op, RIGHT, &contiguous(&k)?, width)?, v.reshape((3 * keys, value_width))?)
            } else {
                (k, v)
            };
            for start in (0..queries).step_by(most_queries) {
                let count = most_queries.min(queries - start);
                let q = q.narrow(0, start, count)?;
                let q = if in_pairs { pairs(op, LEFT, &contiguous(&q)?, q.dims()[1])? } else { q };
                let scores = product(&q, &k.t()?, self.scale, score_dtype)?;
                let arguments = LogsumexpForward {
                    x: input(op, &scores)?,
                    // No copy rounded to another dtype.
                    y: Mut::NULL,
                    exact: sums.offset_by((head * queries + start) * score_dtype.size_in_bytes()),
                    rows: count as u64,
                    len: count32(op, keys)?,
                };
                // SAFETY: there are this many rows of scores, and `log_sums` has a number for each row.
                unsafe { function.launch(op, gpu, Shape::rows(count, keys, score_dtype), arguments) }?;
                let probs = softmax::cuda::forward("softmax", &scores)?;
                let probs = if in_pairs { pairs(op, LEFT, &probs, keys)? } else { cast(&probs, dtype)? };
                let (alpha, accumulate) = (1.0, false);
                write_products(&[[&o.narrow(0, start, count)?, &probs, &v]], alpha, accumulate)?;
            }
        }
        Ok(())
    }

    /// The matrix (rows, columns) of a head in a tensor (..., rows, columns). Heads are numbered in row-major order
    /// over the leading dimensions.
    fn matrix(&self, tensor: &Raw, head: usize) -> Result<Raw> {
        let (mut matrix, mut rest) = (tensor.clone(), head);
        for (dim, &size) in self.scores[..self.scores.len() - 2].iter().enumerate().rev() {
            matrix = matrix.narrow(dim, rest % size, 1)?;
            rest /= size;
        }
        for _ in 2..self.scores.len() {
            matrix = matrix.squeeze(0)?;
        }
        Ok(matrix)
    }
}
