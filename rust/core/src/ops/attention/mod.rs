//! Scaled dot-product attention (Vaswani et al. 2017, arXiv:1706.03762), computed block by block so that the matrix of
//! all scores is never in memory (Dao et al. 2022, arXiv:2205.14135), except with a mask that needs a gradient.

#[cfg(feature = "testing")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod normed;
mod packed;
mod rotary;
mod varlen;

use candle_core::{D, DType};

pub use normed::{HeadSizes, Stream, normed_attention};
pub use packed::packed_attention;
pub use rotary::{RotaryHeads, rotary_attention};
pub use varlen::varlen_attention;

#[cfg(feature = "testing")]
use super::case::Entry;
use super::select::select_raw;
use crate::compute::on_device;
use crate::raw::{Raw, check_allocation_on, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Error, Result, Tensor, checkpoint, compute};

static ATTENTION: OpInfo = OpInfo::expensive("scaled_dot_product_attention");

/// Computes softmax(scale · q kᵀ + mask) v: `q (..., S, D)`, `k (..., L, D)`, `v (..., L, E)` → `(..., S, E)`, for S
/// queries and L keys of width D, and values of width E.
///
/// `mask` broadcasts to `(..., S, L)`. It has numbers to add to the scores, or it is u8, where 0 hides a key from a
/// query. With `is_causal`, query i sees only keys 0 to i; a mask may be given too. `scale` is 1/√D unless given. A
/// query that sees no key gets zeros. Scores are in f32 (in f64 for f64 operands).
///
/// With a mask that needs a gradient, the function computes the plain form: it saves the matrix of all scores, scores
/// are in the dtype of the operands, and a query whose scores are all -∞ gets NaN.
///
/// Otherwise it saves q, k, v, the mask if there is one, the result and one number per query. If the heads of a query are
/// adjacent in the memory of `q` (after `reshape` and `transpose`), they are adjacent in the result too, so joining the
/// heads needs no copy.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit; [`Error::Argument`] if `scale` is
/// not finite; [`Error::OutOfMemory`] if the result does not fit in memory.
pub fn scaled_dot_product_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    is_causal: bool,
    scale: Option<f64>,
) -> Result<Tensor> {
    check(q, k, v, mask)?;
    let (rank, width) = (q.rank(), q.dims()[q.rank() - 1]);
    let result_dims = [&q.dims()[..rank - 1], &v.dims()[rank - 1..]].concat();
    check_allocation_on(q.device(), ATTENTION.name, &result_dims, q.dtype())?;
    let scale = scale.unwrap_or_else(|| 1.0 / (width.max(1) as f64).sqrt());
    if !scale.is_finite() {
        return Err(Error::argument(ATTENTION.name, format!("the scale is {scale}, expected a finite number")));
    }
    // The gradient of a mask (a learned position bias) needs the gradient of every score, which only the plain form
    // keeps.
    if let Some(mask) = mask.filter(|mask| mask.requires_grad()) {
        return plain(q, k, v, Some(mask), is_causal, scale);
    }
    let mut score_dims = q.dims().to_vec();
    score_dims[rank - 1] = k.dims()[rank - 2];
    let mask = mask.map(|mask| additive(mask, q.dtype())).transpose()?;
    // A group of 1: each head of queries has its own head of keys and values.
    let attention =
        cpu::Attention { scores: score_dims, scale, visible_keys: cpu::VisibleKeys::of(is_causal), group: 1 };
    record_with_aux(
        &ATTENTION,
        &[q, k, v],
        || {
            let (o, log_sums) = forward(&attention, [&q.raw, &k.raw, &v.raw], mask.as_ref().map(Tensor::raw))?;
            Ok((o, std::iter::once(log_sums).collect()))
        },
        |saver, o, log_sums| AttentionBackward {
            inputs: [saver.save(q), saver.save(k), saver.save(v)],
            mask: mask.as_ref().map(|mask| saver.save(mask)),
            result: saver.save_raw(o),
            log_sums: saver.save_raw(&log_sums[0]),
            attention: attention.clone(),
        },
    )
}

/// Checks the shapes, dtypes and devices of the operands.
fn check(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Result<()> {
    let op = ATTENTION.name;
    let rank = q.rank();
    if rank < 2 {
        return Err(Error::shape(op, format!("q has shape {:?}, expected (..., length, width)", q.dims())));
    }
    let (batch, width) = (&q.dims()[..rank - 2], q.dims()[rank - 1]);
    if k.rank() != rank || k.dims()[..rank - 2] != *batch || k.dims()[rank - 1] != width {
        return Err(Error::shape(
            op,
            format!(
                "k has shape {:?}, expected {batch:?} followed by (length, {width}) for q of shape {:?}",
                k.dims(),
                q.dims()
            ),
        ));
    }
    let keys = k.dims()[rank - 2];
    if v.rank() != rank || v.dims()[..rank - 2] != *batch || v.dims()[rank - 2] != keys {
        return Err(Error::shape(
            op,
            format!(
                "v has shape {:?}, expected {batch:?} followed by ({keys}, width) for k of shape {:?}",
                v.dims(),
                k.dims()
            ),
        ));
    }
    for (name, other) in [("tensor k", k), ("tensor v", v)] {
        super::linear::same_kind(op, q, name, other)?;
    }
    let Some(mask) = mask else { return Ok(()) };
    let mut score_dims = q.dims().to_vec();
    score_dims[rank - 1] = keys;
    check_mask(op, q, mask, &score_dims)
}

/// Checks that a mask broadcasts to the shape `scores` of the scores, is u8 or floating point, and is on the device of
/// `q`.
fn check_mask(op: &'static str, q: &Tensor, mask: &Tensor, scores: &[usize]) -> Result<()> {
    if crate::cpu::broadcast_dims(mask.dims(), scores).is_none_or(|dims| *dims != *scores) {
        return Err(Error::shape(
            op,
            format!("the mask has shape {:?}, expected one that broadcasts to {scores:?}", mask.dims()),
        ));
    }
    if mask.dtype() != DType::U8 && !is_float(mask.dtype()) {
        return Err(Error::dtype(op, format!("the mask is {}, expected u8 or floating point", mask.dtype().as_str())));
    }
    if !mask.device().same_device(q.device()) {
        return Err(Error::device(op, "the mask is on another device than q; move one with to()"));
    }
    Ok(())
}

/// The dtype of the scores of queries and keys of `dtype`.
const fn score_dtype(dtype: DType) -> DType {
    if matches!(dtype, DType::F64) { DType::F64 } else { DType::F32 }
}

/// Returns the mask as contiguous numbers to add to scores, for queries of `dtype`. Does not copy a mask that has this
/// form already.
fn additive(mask: &Tensor, dtype: DType) -> Result<Tensor> {
    let dtype = score_dtype(dtype);
    // The mask is not among the inputs of the operation, but a checkpoint must know of the mask, to check that it has
    // not changed when the checkpoint recomputes the operation.
    checkpoint::reads(&[mask]);
    if mask.dtype() != DType::U8 {
        return mask.detach().to_dtype(dtype)?.contiguous();
    }
    let number = |x: f64| compute::full(x, &[], dtype, mask.device());
    select_raw(&mask.raw, &number(0.0)?, &number(f64::NEG_INFINITY)?, mask.dims()).map(Tensor::constant)
}

/// Computes the result and the log-sums. The log-sum of a query is log Σ e^score over its keys.
fn forward(attention: &cpu::Attention, inputs: [&Raw; 3], mask: Option<&Raw>) -> Result<(Raw, Raw)> {
    on_device!(
        inputs[0].device(),
        cuda => cuda::Attention::from(attention).forward(inputs, mask),
        cpu => cpu::forward(attention, inputs, mask),
    )
}

/// Computes the gradients of q, k and v; `None` where `wanted` is false.
fn backward(
    attention: &cpu::Attention,
    saved: &cpu::SavedValues,
    grad: &Raw,
    wanted: [bool; 3],
) -> Result<[Option<Raw>; 3]> {
    on_device!(
        grad.device(),
        cuda => cuda::Attention::from(attention).backward(saved, grad, wanted),
        cpu => cpu::backward(attention, saved, grad, wanted),
    )
}

/// Writes the gradients of q, k and v to `places`, which may be views of larger tensors.
fn backward_into(attention: &cpu::Attention, saved: &cpu::SavedValues, grad: &Raw, places: [&Raw; 3]) -> Result<()> {
    on_device!(
        grad.device(),
        cuda => cuda::Attention::from(attention).backward_into(saved, grad, places.map(Some)),
        cpu => {
            let grads = cpu::backward(attention, saved, grad, [true; 3])?;
            places.into_iter().zip(grads).try_for_each(|(place, grad)| match grad {
                Some(grad) => compute::copy_into(place, &grad),
                None => Ok(()),
            })
        },
    )
}

/// Whether [`backward_into`] still computes the right gradients if `places` are the inputs themselves, or views of them.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only the CUDA form reads them"))]
fn may_overwrite_inputs(
    attention: &cpu::Attention,
    saved: &cpu::SavedValues,
    grad: &Raw,
    places: [&Raw; 3],
) -> Result<bool> {
    on_device!(
        grad.device(),
        cuda => cuda::Attention::from(attention).may_overwrite_inputs(saved, grad, places),
        // Gradients are computed before they are copied to their places.
        cpu => Ok(true),
    )
}

struct AttentionBackward {
    inputs: [Saved; 3],
    mask: Option<Saved>,
    result: Saved,
    log_sums: Saved,
    attention: cpu::Attention,
}

impl Backward for AttentionBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let [q, k, v] = &self.inputs;
        let saved = cpu::SavedValues {
            inputs: [q.get()?, k.get()?, v.get()?],
            mask: self.mask.as_ref().map(Saved::get).transpose()?,
            result: self.result.get()?,
            log_sums: self.log_sums.get()?,
        };
        let wanted = [context.needs(0), context.needs(1), context.needs(2)];
        let grads = backward(&self.attention, &saved, context.grad(), wanted)?;
        for (index, grad) in grads.into_iter().enumerate() {
            if let Some(grad) = grad {
                context.add(index, grad)?;
            }
        }
        Ok(())
    }
}

/// Registry entries of this folder.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[
    Entry { info: &ATTENTION, cases: cases::attention },
    Entry { info: &packed::PACKED, cases: cases::packed },
    Entry { info: &normed::NORMED, cases: cases::normed },
    Entry { info: &varlen::VARLEN, cases: cases::varlen },
    Entry { info: &rotary::ROTARY, cases: rotary::cases },
];

/// Computes the plain form of attention, with the matrix of all scores. For masks that need a gradient, and for tests.
fn plain(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>, is_causal: bool, scale: f64) -> Result<Tensor> {
    let dtype = q.dtype();
    let number = |x: f64| Tensor::full(x, (), dtype, q.device());
    let mut scores = q.matmul(&k.t()?)?.mul_scalar(scale)?;
    if let Some(mask) = mask {
        let mask = match mask.dtype() {
            DType::U8 => Tensor::select(mask, &number(0.0)?, &number(f64::NEG_INFINITY)?)?,
            _ => mask.to_dtype(dtype)?,
        };
        scores = scores.add(&mask)?;
    }
    if is_causal {
        let (queries, keys) = (q.raw.dim(D::Minus2)?, k.raw.dim(D::Minus2)?);
        let seen: Vec<u8> = (0..queries).flat_map(|i| (0..keys).map(move |j| u8::from(j <= i))).collect();
        let seen = Tensor::from_vec(seen, (queries, keys), q.device())?;
        scores = Tensor::select(&seen, &scores, &number(f64::NEG_INFINITY)?)?;
    }
    scores.softmax(scores.rank() - 1)?.matmul(v)
}
