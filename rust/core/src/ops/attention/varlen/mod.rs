//! Causal attention inside the segments of a packed row. A packed row consists of several sequences, its segments, one
//! after another. A query sees only keys of its own segment (Krell et al. 2021, arXiv:2107.02027). q, k and v have one
//! row for each token. Query heads may share key and value heads (grouped-query attention, Ainslie et al. 2023,
//! arXiv:2305.13245), and a window may limit how far back a query sees (Beltagy et al. 2020, arXiv:2004.05150).
//!
//! The forward pass turns the bounds of the segments into spans: for each token the first key that its query sees, and
//! the end (exclusive) of the queries that see its key. The attention kernels read only the spans, not the bounds or
//! the window. On CUDA, a kernel computes the spans. So the host never waits for the bounds, and a CUDA graph can be
//! replayed with other bounds.

#[cfg(feature = "cuda")]
mod cuda;

use candle_core::DType;

use super::cpu::{self, SavedValues, Spans, VisibleKeys};
use crate::compute::{self, on_device};
use crate::raw::{Raw, from_vec, is_float, to_vec};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Error, Result, Tensor, checkpoint};

pub(super) static VARLEN: OpInfo = OpInfo::expensive("varlen_attention");

/// Computes softmax(scale · q kᵀ) v inside each segment of a packed row: `q (N, heads, D)`, `k (N, key heads, D)`,
/// `v (N, key heads, D)` → `(N, heads, D)`, where N is the number of tokens. A query sees the keys of its segment up to
/// its own position.
///
/// `cu_seqlens (M + 1)`, i64 or u32 on the device of q, has the bounds of M segments: the first bound is 0, the bounds
/// do not decrease, and segment i has the tokens from bound i up to bound i + 1, exclusive. Bounds may repeat, so that
/// a buffer of fixed size can hold the bounds of fewer segments. Tokens from the last bound on belong to no segment:
/// their results and gradients are zero. With `window` w, a query at position i sees only keys at positions above
/// i - w: at most w keys, including its own. Head h of q sees head h / (heads / key heads) of k and v. Without a
/// `scale`, the scale is 1/√D. Scores are in f32 (in f64 for f64 operands).
///
/// Saves q, k, v, the result, one number per token and query head, and two numbers per token. On CUDA the host does not
/// wait for the bounds.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit together, or if N is 2³² or more;
/// [`Error::Argument`] if the window is 0 or the scale is not finite; [`Error::Index`] naming a bound that is out of
/// order or range. On CUDA, such a bound makes the results undefined, and the next function that reads a value or waits
/// for the device returns the error.
pub fn varlen_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cu_seqlens: &Tensor,
    window: Option<usize>,
    scale: Option<f64>,
) -> Result<Tensor> {
    let varlen = Varlen::new(q, k, v, cu_seqlens, window, scale)?;
    // A checkpoint must know every tensor that an operation reads. `record_with_aux` names only q, k and v.
    checkpoint::reads(&[cu_seqlens]);
    record_with_aux(
        &VARLEN,
        &[q, k, v],
        || {
            let spans = spans(VARLEN.name, &cu_seqlens.raw, varlen.rows, window)?;
            let (o, log_sums) = varlen.forward([&q.raw, &k.raw, &v.raw], &spans)?;
            Ok((o, [log_sums, spans].into_iter().collect()))
        },
        |saver, o, aux| VarlenBackward {
            inputs: [saver.save(q), saver.save(k), saver.save(v)],
            result: saver.save_raw(o),
            log_sums: saver.save_raw(&aux[0]),
            spans: saver.save_raw(&aux[1]),
            varlen,
        },
    )
}

/// The sizes of an attention over a packed row.
#[derive(Clone, Copy)]
pub(super) struct Varlen {
    /// The number of tokens: the rows of q, k and v.
    pub rows: usize,
    pub heads: usize,
    pub key_heads: usize,
    pub scale: f64,
}

impl Varlen {
    fn new(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        cu_seqlens: &Tensor,
        window: Option<usize>,
        scale: Option<f64>,
    ) -> Result<Self> {
        let op = VARLEN.name;
        let &[rows, heads, width] = q.dims() else {
            return Err(Error::shape(op, format!("q has shape {:?}, expected (rows, heads, width)", q.dims())));
        };
        let key_heads = match *k.dims() {
            [r, h, w] if [r, w] == [rows, width] && h > 0 && heads.is_multiple_of(h) => h,
            _ => {
                return Err(Error::shape(
                    op,
                    format!(
                        "k has shape {:?}, expected ({rows}, key heads, {width}) for q of shape {:?}, with a number of \
                         key heads that divides {heads}",
                        k.dims(),
                        q.dims()
                    ),
                ));
            }
        };
        if v.dims() != k.dims() {
            return Err(Error::shape(op, format!("v has shape {:?}, expected that of k, {:?}", v.dims(), k.dims())));
        }
        // The same dtype and device as q.
        for (name, other) in [("tensor k", k), ("tensor v", v)] {
            crate::ops::linear::same_kind(op, q, name, other)?;
        }
        if !is_float(q.dtype()) {
            return Err(Error::dtype(
                op,
                format!("q, k and v are {}, expected floating point; convert them with to()", q.dtype().as_str()),
            ));
        }
        check_bounds(op, q, rows, cu_seqlens, window)?;
        Ok(Self { rows, heads, key_heads, scale: scale_of(op, width, scale)? })
    }

    /// The number of query heads that share a key head.
    pub const fn group(&self) -> usize {
        self.heads / self.key_heads
    }

    /// The result (rows, heads, width) and the log-sum-exp of the scores of each query (heads, rows), for operands
    /// (rows, heads, width).
    pub fn forward(&self, inputs: [&Raw; 3], spans: &Raw) -> Result<(Raw, Raw)> {
        let [q, k, v] = inputs.map(|raw| raw.transpose(0, 1));
        let inputs = [&q?, &k?, &v?];
        let (o, log_sums) = on_device!(
            spans.device(),
            cuda => cuda::forward(self, inputs, spans),
            // `None`: there is no mask, as the spans say what a query sees.
            cpu => cpu::forward(&self.on_cpu(spans)?, inputs, None),
        )?;
        Ok((o.transpose(0, 1)?, log_sums))
    }

    /// Those of the gradients of q, k and v that are `wanted`. The gradients, `saved` and `grad` have the dimensions
    /// (heads, rows, width).
    fn backward(&self, saved: &SavedValues, spans: &Raw, grad: &Raw, wanted: [bool; 3]) -> Result<[Option<Raw>; 3]> {
        on_device!(
            spans.device(),
            cuda => cuda::backward(self, saved, spans, grad, wanted),
            cpu => cpu::backward(&self.on_cpu(spans)?, saved, grad, wanted),
        )
    }

    /// Writes the gradients of q, k and v to `places`, which may be parts of larger tensors. These destinations,
    /// `grad`, and the inputs and the result in `saved` have the dimensions (rows, heads, width).
    pub fn backward_into(&self, saved: &SavedValues, spans: &Raw, grad: &Raw, places: [&Raw; 3]) -> Result<()> {
        let by_head = |raw: &Raw| raw.transpose(0, 1);
        let [q, k, v] = &saved.inputs;
        let saved = SavedValues {
            inputs: [by_head(q)?, by_head(k)?, by_head(v)?],
            mask: None,
            result: by_head(&saved.result)?,
            log_sums: saved.log_sums.clone(),
        };
        let (grad, [dq, dk, dv]) = (by_head(grad)?, places);
        let places = [by_head(dq)?, by_head(dk)?, by_head(dv)?];
        on_device!(
            spans.device(),
            cuda => cuda::backward_into(self, &saved, spans, &grad, places.each_ref().map(Some)),
            cpu => {
                let grads = cpu::backward(&self.on_cpu(spans)?, &saved, &grad, [true; 3])?;
                places.iter().zip(grads).try_for_each(|(place, grad)| match grad {
                    Some(grad) => compute::copy_into(place, &grad),
                    None => Ok(()),
                })
            },
        )
    }

    /// The attention for the CPU kernels, which need only the first half of the spans: the first keys.
    fn on_cpu(&self, spans: &Raw) -> Result<cpu::Attention> {
        let mut first_keys = to_vec::<u32>(spans)?;
        first_keys.truncate(self.rows);
        let scores_shape = vec![self.heads, self.rows, self.rows];
        Ok(cpu::Attention {
            scores: scores_shape,
            scale: self.scale,
            visible_keys: VisibleKeys::Segments(Spans(first_keys)),
            group: self.group(),
        })
    }
}

/// Checks the bounds of the segments (their shape, their dtype, and that they are on the device of `like`), the number
/// of tokens `rows` and the window. Does not read the bounds.
pub(super) fn check_bounds(
    op: &'static str,
    like: &Tensor,
    rows: usize,
    cu_seqlens: &Tensor,
    window: Option<usize>,
) -> Result<()> {
    if cu_seqlens.rank() != 1 || cu_seqlens.elem_count() == 0 {
        return Err(Error::shape(
            op,
            format!("cu_seqlens has shape {:?}, expected (segments + 1,)", cu_seqlens.dims()),
        ));
    }
    if !matches!(cu_seqlens.dtype(), DType::I64 | DType::U32) {
        return Err(Error::dtype(
            op,
            format!("cu_seqlens is {}, expected i64 or u32; convert it with to()", cu_seqlens.dtype().as_str()),
        ));
    }
    if !cu_seqlens.device().same_device(like.device()) {
        return Err(Error::device(op, "cu_seqlens is on another device than the input; move one with to()"));
    }
    if window == Some(0) {
        return Err(Error::argument(op, "the window is 0, expected at least 1: a query sees its own key"));
    }
    if u32::try_from(rows).is_err() {
        return Err(Error::shape(op, format!("found {rows} tokens, expected fewer than 2^32; split the packed row")));
    }
    Ok(())
}

/// The scale of the scores: `scale`, or 1/√width if it is `None`.
pub(super) fn scale_of(op: &'static str, width: usize, scale: Option<f64>) -> Result<f64> {
    let scale = scale.unwrap_or_else(|| 1.0 / (width.max(1) as f64).sqrt());
    if scale.is_finite() {
        return Ok(scale);
    }
    Err(Error::argument(op, format!("the scale is {scale}, expected a finite number")))
}

/// The spans of a packed row, u32: for each token the first key that its query sees; then for each token the end
/// (exclusive) of the queries that see its key. For a token i outside of the segments, the first key is i + 1 and the
/// end is i, so its query sees no key, and no query sees its key. On CUDA one more number follows, a counter with
/// which the thread blocks of the forward pass take their tiles.
pub(super) fn spans(op: &'static str, cu_seqlens: &Raw, rows: usize, window: Option<usize>) -> Result<Raw> {
    on_device!(
        cu_seqlens.device(),
        cuda => cuda::spans(op, cu_seqlens, rows, window),
        cpu => Ok(from_vec(spans_of(op, &bounds_of(cu_seqlens)?, rows, window)?, (2, rows))),
    )
}

fn bounds_of(cu_seqlens: &Raw) -> Result<Vec<i64>> {
    if cu_seqlens.dtype() == DType::U32 {
        return Ok(to_vec::<u32>(cu_seqlens)?.into_iter().map(i64::from).collect());
    }
    to_vec::<i64>(cu_seqlens)
}

fn spans_of(op: &'static str, bounds: &[i64], rows: usize, window: Option<usize>) -> Result<Vec<u32>> {
    // The spans of tokens outside of the segments.
    let mut spans: Vec<u32> = (1..=rows as u32).chain(0..rows as u32).collect();
    let mut start = 0;
    for (at, &bound) in bounds.iter().enumerate() {
        let fits = usize::try_from(bound).ok().filter(|&b| b <= rows && b >= start && (at > 0 || b == 0));
        let Some(bound) = fits else {
            return Err(Error::index(
                op,
                format!(
                    "bound {at} of cu_seqlens is {bound}, expected {}",
                    if at == 0 { "0".into() } else { format!("{start} to {rows}: bounds ascend, found {rows} tokens") }
                ),
            ));
        };
        let window = window.unwrap_or(rows);
        for position in start..bound {
            spans[position] = start.max((position + 1).saturating_sub(window)) as u32;
            spans[rows + position] = bound.min(position.saturating_add(window)) as u32;
        }
        start = bound;
    }
    Ok(spans)
}

struct VarlenBackward {
    inputs: [Saved; 3],
    result: Saved,
    log_sums: Saved,
    spans: Saved,
    varlen: Varlen,
}

impl Backward for VarlenBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let [q, k, v] = &self.inputs;
        let saved = SavedValues {
            inputs: [q.get()?.transpose(0, 1)?, k.get()?.transpose(0, 1)?, v.get()?.transpose(0, 1)?],
            mask: None,
            result: self.result.get()?.transpose(0, 1)?,
            log_sums: self.log_sums.get()?,
        };
        let wanted = [context.needs(0), context.needs(1), context.needs(2)];
        let grad = context.grad().transpose(0, 1)?;
        let grads = self.varlen.backward(&saved, &self.spans.get()?, &grad, wanted)?;
        for (index, grad) in grads.into_iter().enumerate() {
            if let Some(grad) = grad {
                context.add(index, grad.transpose(0, 1)?)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first keys that the queries of all tokens see, then the ends of the queries that see the tokens' keys.
    fn spans_for(bounds: &[i64], rows: usize, window: Option<usize>) -> Result<Vec<u32>> {
        spans_of(VARLEN.name, bounds, rows, window)
    }

    #[test]
    fn spans_are_limited_by_segments_and_windows() -> Result<()> {
        assert_eq!(spans_for(&[0, 3, 4, 4], 6, None)?, [0, 0, 0, 3, 5, 6, 3, 3, 3, 4, 4, 5]);
        assert_eq!(spans_for(&[0, 0, 5], 5, Some(2))?, [0, 0, 1, 2, 3, 2, 3, 4, 5, 5]);
        assert_eq!(spans_for(&[0, 2], 2, Some(usize::MAX))?, [0, 0, 2, 2]);
        assert_eq!(spans_for(&[0], 2, None)?, [1, 2, 0, 1]);
        Ok(())
    }

    #[test]
    fn bounds_out_of_order_or_range_are_errors() {
        for (bounds, message) in [
            (&[1, 2][..], "bound 0 of cu_seqlens is 1, expected 0"),
            (&[0, 3, 2], "bound 2 of cu_seqlens is 2, expected 3 to 4"),
            (&[0, 5], "bound 1 of cu_seqlens is 5, expected 0 to 4"),
            (&[0, -1], "bound 1 of cu_seqlens is -1"),
        ] {
            let error = spans_for(bounds, 4, None).unwrap_err();
            let message = format!("varlen_attention: {message}");
            assert!(matches!(error, Error::Index { .. }) && error.to_string().contains(&message), "{error}");
        }
    }

    /// The inputs of the tokens after the last segment are not zero.
    #[test]
    fn tokens_after_the_last_segment_have_zero_results_and_gradients() -> Result<()> {
        let device = candle_core::Device::Cpu;
        let inputs = [4, 2, 2].map(|heads| {
            let values = (0..300 * heads * 8).map(|i| (i as f64 * 0.37).sin()).collect();
            crate::Var::from_tensor(&Tensor::from_vec(values, (300, heads, 8), &device).unwrap()).unwrap()
        });
        let bounds = Tensor::from_vec(vec![0i64, 100, 150, 150], 4, &device)?;
        let [q, k, v] = inputs.each_ref().map(|var| var.as_tensor());
        let y = varlen_attention(q, k, v, &bounds, None, None)?;
        y.sqr()?.add(&y)?.sum_all()?.backward()?;
        let tail = |tensor: &Tensor| tensor.narrow(0, 150, 150)?.contiguous()?.to_vec::<f64>();
        assert!(tail(&y.detach())?.iter().all(|&x| x == 0.0));
        for var in &inputs {
            assert!(tail(&var.grad().unwrap())?.iter().all(|&x| x == 0.0));
        }
        Ok(())
    }
}
