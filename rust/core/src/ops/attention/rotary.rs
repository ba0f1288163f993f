//! Attention inside the segments of a packed row, with queries and keys that are rotated by their positions, for the
//! blocks of language models. The operation reads queries, keys and values in place in the projection, and writes their
//! gradients side by side in the same layout.

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

/// How a projection is divided into heads, and how its queries and keys are normalised and rotated.
#[derive(Clone, Copy)]
pub struct RotaryHeads<'a> {
    /// Number of heads of queries.
    pub heads: usize,
    /// Number of heads of keys and values, a divisor of `heads`.
    pub key_heads: usize,
    /// cos and sin of the angles by which the pairs of columns (i, i + width / 2) are rotated: (N, width / 2) for the N
    /// rows of the projection.
    pub angles: [&'a Tensor; 2],
    /// Scales of the RMS norms of queries and of keys, (width), frozen, and the epsilon of the norms. `None` for models
    /// without these norms; a scale is `None` for a norm without a scale.
    pub norms: Option<([Option<&'a Tensor>; 2], f64)>,
}

/// Causal attention inside each segment of a packed row, like [`varlen_attention`](super::varlen_attention):
/// `x (N, (heads + 2 key heads) · width)` → `(N, heads · width)`. `x` has queries, keys and values of a token side by
/// side, each with its heads one after the other. Queries and keys are first normalised, if `heads` has norms, and
/// rotated.
///
/// `cu_seqlens` and `window` are those of `varlen_attention`. Saves the projection, the result, one number per query
/// and head, and two numbers per token; the backward pass computes queries and keys again.
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
    check_allocation_on(x.device(), ROTARY.name, &rotary.result(), x.dtype())?;
    checkpoint::reads(&[cu_seqlens]);
    let [cos, sin] = heads.angles;
    let scales = heads.norms.map_or([None, None], |(scales, _)| scales);
    record_with_aux(
        &ROTARY,
        &[x],
        || {
            let (x, spans) = (contiguous(&x.raw)?, spans(ROTARY.name, &cu_seqlens.raw, rotary.varlen.rows, window)?);
            let norms = rotary.norms([&cos.raw, &sin.raw], scales.map(|scale| scale.map(Tensor::raw)));
            let (qkv, _) = rotary.heads(&x, &norms)?;
            let (o, log_sums) = rotary.varlen.forward(qkv.each_ref(), &spans)?;
            Ok((o.reshape(rotary.result().as_slice())?, [log_sums, spans].into_iter().collect()))
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

#[derive(Clone, Copy)]
struct Rotary {
    varlen: Varlen,
    width: usize,
    eps: Option<f64>,
}

impl Rotary {
    fn new(x: &Tensor, heads: &RotaryHeads<'_>, cu_seqlens: &Tensor, window: Option<usize>) -> Result<Self> {
        let op = ROTARY.name;
        let &RotaryHeads { heads, key_heads, angles, norms } = heads;
        let all = heads.saturating_add(key_heads.saturating_mul(2));
        let (rows, width) = match *x.dims() {
            [rows, columns]
                if key_heads > 0 && heads.is_multiple_of(key_heads) && heads > 0 && columns.is_multiple_of(2 * all) =>
            {
                (rows, columns / all)
            }
            _ => {
                let found = x.dims();
                let message = format!(
                    "found {heads} heads of queries, {key_heads} heads of keys and a projection of shape {found:?}; expected \
                     the number of heads of queries to be a multiple of that of keys, and a projection of shape \
                     (rows, ({heads} + 2 * {key_heads}) * an even width)"
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
        check_head_norms(op, x, [1, rows], width, scales, Some(angles), eps)?;
        check_bounds(op, x, rows, cu_seqlens, window)?;
        let scale = scale_of(op, width, None)?;
        Ok(Self { varlen: Varlen { rows, heads, key_heads, scale }, width, eps })
    }

    /// The shape of the result.
    const fn result(&self) -> [usize; 2] {
        [self.varlen.rows, self.varlen.heads * self.width]
    }

    const fn norms<'a>(&self, tables: [&'a Raw; 2], weights: [Option<&'a Raw>; 2]) -> HeadNorms<'a> {
        let Varlen { heads, key_heads, .. } = self.varlen;
        HeadNorms {
            op: ROTARY.name,
            weights,
            tables: Some(tables),
            heads: [heads, key_heads],
            width: self.width,
            interleaved: false,
            eps: self.eps,
        }
    }

    /// A view (N, count, width) of `count` heads of dense `tokens (N, heads · width)`, from head `first` on.
    fn part(&self, tokens: &Raw, first: usize, count: usize) -> Result<Raw> {
        let (rows, columns) = (tokens.dims()[0], tokens.dims()[1]);
        Ok(tokens.reshape((rows, columns / self.width, self.width))?.narrow(1, first, count)?)
    }

    /// Queries, keys and values of dense tokens, each (N, heads, width).
    fn parts(&self, tokens: &Raw) -> Result<[Raw; 3]> {
        let Varlen { heads, key_heads, .. } = self.varlen;
        let part = |first, count| self.part(tokens, first, count);
        Ok([part(0, heads)?, part(heads, key_heads)?, part(heads + key_heads, key_heads)?])
    }

    /// The queries and keys of a dense projection, normalised and rotated, and its values; the statistics of the norms.
    fn heads(&self, x: &Raw, norms: &HeadNorms<'_>) -> Result<([Raw; 3], HeadStatistics)> {
        let Varlen { rows, heads, key_heads, .. } = self.varlen;
        let rotated = compute::unset(ROTARY.name, x, &[rows, (heads + key_heads) * self.width])?;
        let place = self.part(&rotated, 0, heads + key_heads)?;
        let statistics = norms.forward(&x.unsqueeze(0)?, &place.unsqueeze(0)?)?;
        let [_, _, values] = self.parts(x)?;
        Ok(([self.part(&rotated, 0, heads)?, self.part(&rotated, heads, key_heads)?, values], statistics))
    }
}

struct RotaryBackward {
    x: Saved,
    result: Saved,
    log_sums: Saved,
    spans: Saved,
    angles: [Saved; 2],
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
        let (inputs, statistics) = rotary.heads(&x, &norms)?;
        let grad = context.grad();
        let grad = on_device!(grad.device(), cuda => grad.clone(), cpu => contiguous(grad)?);
        let by_head = |tokens: &Raw| rotary.part(tokens, 0, heads);
        let saved =
            SavedValues { inputs, mask: None, result: by_head(&self.result.get()?)?, log_sums: self.log_sums.get()? };
        let dx = compute::unset(ROTARY.name, &x, x.dims())?;
        let places = rotary.parts(&dx)?;
        rotary.varlen.backward_into(&saved, &self.spans.get()?, &by_head(&grad)?, places.each_ref())?;
        drop(saved);
        // The backward pass of the norms runs in place: it reads each value of the gradient of the rotated queries and
        // keys before it overwrites the value.
        let rotated = rotary.part(&dx, 0, heads + key_heads)?.unsqueeze(0)?;
        norms.backward(&x.unsqueeze(0)?, &rotated, &statistics, &dx.unsqueeze(0)?)?;
        context.add(0, dx)
    }
}

/// The cases of the registry.
#[cfg(feature = "testing")]
pub(super) fn cases() -> Vec<Case> {
    #[derive(Clone, Copy)]
    struct Kind {
        heads: [usize; 2],
        width: usize,
        normed: bool,
        bounds: &'static [usize],
        window: Option<usize>,
    }
    fn fixed(x: &Tensor, dims: &[usize], function: fn(f64) -> f64) -> Result<Tensor> {
        let values = (0..dims.iter().product()).map(|i: usize| function(i as f64 * 0.7)).collect();
        Tensor::from_vec(values, dims, &candle_core::Device::Cpu)?.to_dtype(x.dtype())?.to_device(x.device())
    }
    impl Kind {
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
            let norms = self.normed.then_some(([Some(&of_queries), Some(&of_keys)], 1e-6));
            let bounds = self.bounds.iter().map(|&bound| bound as i64).collect();
            let bounds = Tensor::from_vec(bounds, self.bounds.len(), x.device())?;
            let heads = RotaryHeads { heads, key_heads, angles: [&cos, &sin], norms };
            rotary_attention(x, heads, &bounds, self.window)
        }

        /// The plain form, from views, norms and attention.
        fn plain(&self, x: &Tensor) -> Result<Tensor> {
            let ([cos, sin], scales) = (self.angles(x)?, self.scales(x)?);
            let ([heads, key_heads], rows) = (self.heads, x.dims()[0]);
            let part = |first: usize, count: usize| {
                x.narrow(1, first * self.width, count * self.width)?.reshape((rows, count, self.width))
            };
            let rotated = |rows: Tensor, scale: &Tensor| {
                let rows = rows.transpose(0, 1)?;
                let rotated = match self.normed {
                    true => rms_norm_rope(&rows, Some(scale), &cos, &sin, false, 1e-6)?,
                    false => rope(&rows, &cos, &sin, false)?,
                };
                rotated.transpose(0, 1)
            };
            let (q, k) = (rotated(part(0, heads)?, &scales[0])?, rotated(part(heads, key_heads)?, &scales[1])?);
            let mixed =
                plain_varlen(&[q, k, part(heads + key_heads, key_heads)?], self.bounds, self.window.unwrap_or(rows))?;
            mixed.reshape((rows, heads * self.width))
        }
    }
    const GROUPS: Kind = Kind { heads: [4, 2], width: 4, normed: false, bounds: &[0, 5, 6, 6, 11], window: None };
    let case = |label, rows: usize, kind: Kind| {
        let columns = (kind.heads[0] + 2 * kind.heads[1]) * kind.width;
        Case::new(label, &[&[rows, columns]], move |x| kind.run(&x[0])).plain(move |x| kind.plain(&x[0]))
    };
    vec![
        case("groups", 11, GROUPS),
        case("normed", 11, Kind { normed: true, ..GROUPS }),
        case("tokens after the last segment", 13, GROUPS),
        case("window", 9, Kind { heads: [2, 1], bounds: &[0, 7, 9], window: Some(3), ..GROUPS }),
        case("equal heads", 7, Kind { heads: [3, 3], width: 6, normed: true, bounds: &[0, 2, 7], window: None }),
        case("wide", 6, Kind { heads: [2, 1], width: 16, bounds: &[0, 6], ..GROUPS }),
        case("one row", 1, Kind { bounds: &[0, 1], ..GROUPS }),
        case("no rows", 0, Kind { bounds: &[0, 0], ..GROUPS }),
    ]
}
