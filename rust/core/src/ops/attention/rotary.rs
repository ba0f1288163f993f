//! Attention inside the segments of a packed row, for the blocks of language models. The operation takes a projection
//! that has queries, keys and values side by side, rotates queries and keys by their positions, and writes the gradient
//! of the projection in the same layout.

#[cfg(feature = "testing")]
use super::cases::plain_varlen;
use super::cpu::SavedValues;
use super::varlen::{Varlen, check_bounds, scale_of, spans};
use crate::compute::{self, contiguous, on_device};
#[cfg(feature = "testing")]
use crate::ops::case::Case;
use crate::ops::norm::{HeadNorms, HeadStatistics, check_head_norms};
#[cfg(feature = "testing")]
use crate::ops::{norm::rms_norm_rope, rope::rope};
use crate::raw::{Raw, check_allocation_on, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Error, Result, Tensor, checkpoint};

pub(super) static ROTARY: OpInfo = OpInfo::expensive("rotary_attention");

/// How a projection of N tokens is divided into heads, and how its queries and keys are normalised and rotated. Each
/// head has `width` columns.
#[derive(Clone, Copy)]
pub struct RotaryHeads<'a> {
    /// Number of heads of queries.
    pub heads: usize,
    /// Number of heads of keys and values, a divisor of `heads`.
    pub key_heads: usize,
    /// cos and sin of the angles by which the pairs of columns (i, i + width / 2) of a head are rotated, each
    /// (N, width / 2).
    pub angles: [&'a Tensor; 2],
    /// The scales of the RMS norms of queries and of keys, each (width) and frozen, and the epsilon of both norms.
    /// `None` for models without these norms. A scale is `None` if its norm has no scale.
    pub norms: Option<([Option<&'a Tensor>; 2], f64)>,
}

/// Computes causal attention inside each segment of a packed row, like
/// [`varlen_attention`](super::varlen_attention): `x (N, (heads + 2 key heads) · width)` → `(N, heads · width)`. A row
/// of `x` has all heads of a token's queries, then those of its keys, then those of its values. Queries and keys are
/// first normalised, if `heads` has norms, and then rotated.
///
/// `cu_seqlens` and `window` are those of `varlen_attention`: the bounds of the segments, and the maximum number of
/// keys that a query sees. Saves the projection, the result, one number per token and query head (the log-sum), and two
/// numbers per token (the spans); the backward pass normalises and rotates queries and keys again.
///
/// # Errors
/// As [`varlen_attention`](super::varlen_attention); [`Error::Argument`] also if a norm's scale needs a gradient or the
/// epsilon is negative or not finite; [`Error::NoBackward`] if cos or sin needs a gradient; [`Error::OutOfMemory`] if
/// the result does not fit in memory.
pub fn rotary_attention(
    x: &Tensor,
    heads: RotaryHeads<'_>,
    cu_seqlens: &Tensor,
    window: Option<usize>,
) -> Result<Tensor> {
    let rotary = Rotary::new(x, &heads, cu_seqlens, window)?;
    check_allocation_on(x.device(), ROTARY.name, &rotary.result_dims(), x.dtype())?;
    checkpoint::reads(&[cu_seqlens]);
    let [cos, sin] = heads.angles;
    let scales = heads.norms.map_or([None, None], |(scales, _eps)| scales);
    record_with_aux(
        &ROTARY,
        &[x],
        || {
            let (x, spans) = (contiguous(&x.raw)?, spans(ROTARY.name, &cu_seqlens.raw, rotary.varlen.rows, window)?);
            let norms = rotary.norms([&cos.raw, &sin.raw], scales.map(|scale| scale.map(Tensor::raw)));
            let (qkv, _) = rotary.rotated_heads(&x, &norms)?;
            let (o, log_sums) = rotary.varlen.forward(qkv.each_ref(), &spans)?;
            Ok((o.reshape(rotary.result_dims().as_slice())?, [log_sums, spans].into_iter().collect()))
        },
        |saver, o, aux| RotaryBackward {
            x: saver.save(x),
            result: saver.save_raw(o),
            log_sums: saver.save_raw(&aux[0]),
            spans: saver.save_raw(&aux[1]),
            angles: [saver.hold(cos), saver.hold(sin)],
            scales: scales.map(|scale| scale.map(|scale| saver.hold(scale))),
            rotary,
        },
    )
}

/// The sizes of a rotary attention.
#[derive(Clone, Copy)]
struct Rotary {
    varlen: Varlen,
    /// The number of columns of a head.
    width: usize,
    /// The epsilon of the norms; `None` without norms.
    eps: Option<f64>,
}

impl Rotary {
    fn new(x: &Tensor, heads: &RotaryHeads<'_>, cu_seqlens: &Tensor, window: Option<usize>) -> Result<Self> {
        let op = ROTARY.name;
        let &RotaryHeads { heads, key_heads, angles, norms } = heads;
        let all_heads = heads.saturating_add(key_heads.saturating_mul(2));
        let (rows, width) = match *x.dims() {
            [rows, columns]
                if key_heads > 0
                    && heads.is_multiple_of(key_heads)
                    && heads > 0
                    && columns.is_multiple_of(2 * all_heads) =>
            {
                (rows, columns / all_heads)
            }
            _ => {
                let found = x.dims();
                let message = format!(
                    "found {heads} heads of queries, {key_heads} heads of keys and a projection of shape {found:?}; expected \
                     at least one head of queries and one of keys, the first number a multiple of the second, and a \
                     projection of shape (tokens, ({heads} + 2 * {key_heads}) * an even width)"
                );
                return Err(Error::shape(op, message));
            }
        };
        if !is_float(x.dtype()) {
            let found = x.dtype().as_str();
            let message = format!("expected a floating point projection, found {found}; convert it with to()");
            return Err(Error::dtype(op, message));
        }
        let (scales, eps) = norms.map_or(([None, None], None), |(scales, eps)| (scales, Some(eps)));
        // The tokens count as one sample.
        check_head_norms(op, x, [1, rows], width, scales, Some(angles), eps)?;
        check_bounds(op, x, rows, cu_seqlens, window)?;
        // `None`: the default scale of the scores, 1 / √width.
        let scale = scale_of(op, width, None)?;
        Ok(Self { varlen: Varlen { rows, heads, key_heads, scale }, width, eps })
    }

    const fn result_dims(&self) -> [usize; 2] {
        [self.varlen.rows, self.varlen.heads * self.width]
    }

    /// The norms and the rotation of queries and keys, with `angles` (cos and sin) and the `scales` of the norms.
    const fn norms<'a>(&self, angles: [&'a Raw; 2], scales: [Option<&'a Raw>; 2]) -> HeadNorms<'a> {
        let Varlen { heads, key_heads, .. } = self.varlen;
        HeadNorms {
            op: ROTARY.name,
            weights: scales,
            tables: Some(angles),
            heads: [heads, key_heads],
            width: self.width,
            interleaved: false,
            eps: self.eps,
        }
    }

    /// `count` heads of `tokens`, from head `first` on: (N, count, width). A row of `tokens` has the heads of one token
    /// side by side. The result is a view if `tokens` is dense.
    fn part(&self, tokens: &Raw, first: usize, count: usize) -> Result<Raw> {
        let (rows, columns) = (tokens.dims()[0], tokens.dims()[1]);
        Ok(tokens.reshape((rows, columns / self.width, self.width))?.narrow(1, first, count)?)
    }

    /// Views of the queries, keys and values of a dense projection (or of their gradients), each (N, heads, width).
    fn parts(&self, projection: &Raw) -> Result<[Raw; 3]> {
        let Varlen { heads, key_heads, .. } = self.varlen;
        let part = |first, count| self.part(projection, first, count);
        Ok([part(0, heads)?, part(heads, key_heads)?, part(heads + key_heads, key_heads)?])
    }

    /// The queries and keys of a dense projection `x`, normalised and rotated, and its values; and the statistics of
    /// the norms.
    fn rotated_heads(&self, x: &Raw, norms: &HeadNorms<'_>) -> Result<([Raw; 3], HeadStatistics)> {
        let Varlen { rows, heads, key_heads, .. } = self.varlen;
        let rotated = compute::unset(ROTARY.name, x, &[rows, (heads + key_heads) * self.width])?;
        let by_head = self.part(&rotated, 0, heads + key_heads)?;
        // `HeadNorms` takes a batch of samples: here one.
        let statistics = norms.forward(&x.unsqueeze(0)?, &by_head.unsqueeze(0)?)?;
        let [_, _, values] = self.parts(x)?;
        Ok(([self.part(&rotated, 0, heads)?, self.part(&rotated, heads, key_heads)?, values], statistics))
    }
}

struct RotaryBackward {
    x: Saved,
    result: Saved,
    /// For each query, the logarithm of the sum of the exponentials of its scores.
    log_sums: Saved,
    /// For each token, the first key that its query sees; then for each token, the end (exclusive) of the
    /// queries that see its key.
    spans: Saved,
    /// cos and sin.
    angles: [Saved; 2],
    /// The scales of the norms of queries and of keys.
    scales: [Option<Saved>; 2],
    rotary: Rotary,
}

impl Backward for RotaryBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let rotary = &self.rotary;
        let Varlen { heads, key_heads, .. } = rotary.varlen;
        let x = contiguous(&self.x.get()?)?;
        let (cos, sin) = (self.angles[0].get()?, self.angles[1].get()?);
        let scale = |index: usize| self.scales[index].as_ref().map(Saved::get).transpose();
        let scales = [scale(0)?, scale(1)?];
        let norms = rotary.norms([&cos, &sin], scales.each_ref().map(Option::as_ref));
        let (inputs, statistics) = rotary.rotated_heads(&x, &norms)?;
        let grad = context.grad();
        // The CUDA kernels read gradients with any strides; the CPU kernels need contiguous rows.
        let grad = on_device!(grad.device(), cuda => grad.clone(), cpu => contiguous(grad)?);
        let by_head = |tokens: &Raw| rotary.part(tokens, 0, heads);
        let saved =
            SavedValues { inputs, mask: None, result: by_head(&self.result.get()?)?, log_sums: self.log_sums.get()? };
        let dx = compute::unset(ROTARY.name, &x, x.dims())?;
        let parts_of_dx = rotary.parts(&dx)?;
        rotary.varlen.backward_into(&saved, &self.spans.get()?, &by_head(&grad)?, parts_of_dx.each_ref())?;
        drop(saved); // frees the rotated queries and keys
        // `dx` now has the gradients of the rotated queries and keys. The backward pass of the norms runs in place: it
        // reads each of these values before it overwrites the value.
        let rotated_grad = rotary.part(&dx, 0, heads + key_heads)?.unsqueeze(0)?;
        norms.backward(&x.unsqueeze(0)?, &rotated_grad, &statistics, &dx.unsqueeze(0)?)?;
        context.add(0, dx)
    }
}

/// The cases of the registry.
#[cfg(feature = "testing")]
pub(super) fn cases() -> Vec<Case> {
    /// The epsilon of the norms.
    const EPS: f64 = 1e-6;
    #[derive(Clone, Copy)]
    struct RotaryCase {
        /// The number of heads of queries, and that of keys.
        heads: [usize; 2],
        width: usize,
        is_normed: bool,
        /// `cu_seqlens`: segment i begins at token `bounds[i]` and ends before token `bounds[i + 1]`.
        bounds: &'static [usize],
        window: Option<usize>,
    }
    /// A constant of shape `dims`, with the dtype and device of `x`. Its element i is `function(0.7 i)`.
    fn fixed(x: &Tensor, dims: &[usize], function: fn(f64) -> f64) -> Result<Tensor> {
        let values = (0..dims.iter().product()).map(|i: usize| function(i as f64 * 0.7)).collect();
        Tensor::from_vec(values, dims, &candle_core::Device::Cpu)?.to_dtype(x.dtype())?.to_device(x.device())
    }
    impl RotaryCase {
        fn angles(&self, x: &Tensor) -> Result<[Tensor; 2]> {
            let dims = [x.dims()[0], self.width / 2];
            Ok([fixed(x, &dims, f64::cos)?, fixed(x, &dims, f64::sin)?])
        }

        fn scales(&self, x: &Tensor) -> Result<[Tensor; 2]> {
            let scale = |function| fixed(x, &[self.width], function);
            Ok([scale(|angle| 1.0 + 0.5 * angle.sin())?, scale(|angle| 1.0 + 0.5 * angle.cos())?])
        }

        fn run(&self, x: &Tensor) -> Result<Tensor> {
            let ([cos, sin], [of_queries, of_keys]) = (self.angles(x)?, self.scales(x)?);
            let [heads, key_heads] = self.heads;
            let norms = self.is_normed.then_some(([Some(&of_queries), Some(&of_keys)], EPS));
            let bounds = self.bounds.iter().map(|&bound| bound as i64).collect();
            let bounds = Tensor::from_vec(bounds, self.bounds.len(), x.device())?;
            let heads = RotaryHeads { heads, key_heads, angles: [&cos, &sin], norms };
            rotary_attention(x, heads, &bounds, self.window)
        }

        /// The plain form: views, norms, rotations and attention, one operation after another.
        fn plain(&self, x: &Tensor) -> Result<Tensor> {
            let ([cos, sin], scales) = (self.angles(x)?, self.scales(x)?);
            let ([heads, key_heads], rows) = (self.heads, x.dims()[0]);
            let part = |first: usize, count: usize| {
                x.narrow(1, first * self.width, count * self.width)?.reshape((rows, count, self.width))
            };
            let interleaved = false;
            let rotate = |tokens: Tensor, scale: &Tensor| {
                let by_head = tokens.transpose(0, 1)?;
                let rotated = match self.is_normed {
                    true => rms_norm_rope(&by_head, Some(scale), &cos, &sin, interleaved, EPS)?,
                    false => rope(&by_head, &cos, &sin, interleaved)?,
                };
                rotated.transpose(0, 1)
            };
            let (q, k) = (rotate(part(0, heads)?, &scales[0])?, rotate(part(heads, key_heads)?, &scales[1])?);
            let y =
                plain_varlen(&[q, k, part(heads + key_heads, key_heads)?], self.bounds, self.window.unwrap_or(rows))?;
            y.reshape((rows, heads * self.width))
        }
    }
    // Two heads of queries share a head of keys. The segments have 5, 1, 0 and 5 tokens.
    const GROUPS: RotaryCase =
        RotaryCase { heads: [4, 2], width: 4, is_normed: false, bounds: &[0, 5, 6, 6, 11], window: None };
    // `rows` is the number of tokens.
    let case = |label, rows: usize, settings: RotaryCase| {
        let columns = (settings.heads[0] + 2 * settings.heads[1]) * settings.width;
        Case::new(label, &[&[rows, columns]], move |x| settings.run(&x[0])).plain(move |x| settings.plain(&x[0]))
    };
    vec![
        case("groups", 11, GROUPS),
        case("normed", 11, RotaryCase { is_normed: true, ..GROUPS }),
        case("tokens after the last segment", 13, GROUPS),
        case("window", 9, RotaryCase { heads: [2, 1], bounds: &[0, 7, 9], window: Some(3), ..GROUPS }),
        case(
            "as many key heads as query heads",
            7,
            RotaryCase { heads: [3, 3], width: 6, is_normed: true, bounds: &[0, 2, 7], window: None },
        ),
        case("wide heads", 6, RotaryCase { heads: [2, 1], width: 16, bounds: &[0, 6], ..GROUPS }),
        case("one token", 1, RotaryCase { bounds: &[0, 1], ..GROUPS }),
        case("no tokens", 0, RotaryCase { bounds: &[0, 0], ..GROUPS }),
    ]
}
