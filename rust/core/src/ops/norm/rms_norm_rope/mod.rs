//! RMS norm followed by rotary position embedding, as one operation, for models that normalise queries and keys (Flux,
//! Qwen3). `heads` applies the two to the queries and keys inside of one projection.

#[cfg(feature = "testing")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod heads;

use super::{Affine, SavedAffine, check_eps};
use crate::compute::{contiguous, on_device};
use crate::ops::rope::{self, RowOrder};
use crate::raw::Raw;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Result, Tensor};

#[cfg(feature = "testing")]
pub(super) use cases::cases;
pub(in crate::ops) use heads::{HeadNorms, HeadStatistics, check_head_norms};

pub(super) static RMS_NORM_ROPE: OpInfo = OpInfo::cheap("rms_norm_rope");

/// Computes [`rope`](crate::ops::rope::rope) of [`rms_norm`](super::rms_norm), for `x (..., S, D)`, `weight (D)`,
/// `cos (S, D/2)` and `sin (S, D/2)`.
///
/// `weight` has the dtype of `x`; for a 16-bit `x` it may be f32. `cos` and `sin` have any floating-point dtype and get
/// no gradient. The normalised values are not rounded to the dtype of `x` before they are rotated. As in `rope`,
/// `interleaved` says which two features form a pair, and the result has the memory order of `x`. Saves `x` and, for
/// each row, 1/√(mean(x²) + eps).
///
/// # Errors
/// [`Error::Argument`](crate::Error::Argument) if `eps` is negative or not finite;
/// [`Error::Shape`](crate::Error::Shape) if `x` has fewer than two dimensions, D is odd, or an operand does not have
/// the shape above; [`Error::DType`](crate::Error::DType) if `x`, `cos` or `sin` is not floating point, or `weight`
/// does not have one of the dtypes above; [`Error::Device`](crate::Error::Device) if the devices differ;
/// [`Error::NoBackward`](crate::Error::NoBackward) if `cos` or `sin` needs a gradient.
pub fn rms_norm_rope(
    x: &Tensor,
    weight: Option<&Tensor>,
    cos: &Tensor,
    sin: &Tensor,
    interleaved: bool,
    eps: f64,
) -> Result<Tensor> {
    let op = RMS_NORM_ROPE.name;
    check_eps(op, eps)?;
    rope::check(op, x, cos, sin)?;
    let bias = None;
    let affine = Affine::new(op, x, weight, bias, &x.dims()[x.rank() - 1..])?;
    // `order.swap` exchanges the dimensions of heads and positions if they have the opposite order in memory; a second
    // call restores them. Between the calls, `order.repeats()` successive rows (heads) have the same position.
    let order = RowOrder::of(&x.raw);
    record_with_aux(
        &RMS_NORM_ROPE,
        &affine.inputs(x),
        || {
            let rows = contiguous(&order.swap(&x.raw)?)?;
            let rotation = Rotation { tables: [&cos.raw, &sin.raw], repeats: order.repeats(), interleaved };
            let [y, rstd] = on_device!(
                x.device(),
                cuda => cuda::forward(op, &rows, affine.weight.map(Tensor::raw), &rotation, eps),
                cpu => cpu::forward(op, &rows, affine.weight.map(Tensor::raw), &rotation, eps),
            )?;
            Ok((order.swap(&y)?, std::iter::once(rstd).collect()))
        },
        // `save` keeps an input, `save_raw` another value. `hold` keeps a parameter or a table, which is in memory
        // anyway and does not count as saved.
        |saver, _, statistics| RmsNormRopeBackward {
            x: saver.save(x),
            rstd: saver.save_raw(&statistics[0]),
            tables: [saver.hold(cos), saver.hold(sin)],
            order,
            interleaved,
            // The backward pass does not recompute the result, so it reads the weight only for the gradient of `x`.
            affine: affine.save(saver, /* recomputes */ false),
        },
    )
}

/// The rotary embedding of contiguous rows: the angles of each row's pairs, and which two features form a pair.
struct Rotation<'a> {
    /// cos and sin, (S, D/2) for S positions and rows of D elements.
    pub tables: [&'a Raw; 2],
    /// How many successive rows have the same position.
    pub repeats: usize,
    /// As the argument of [`rms_norm_rope`].
    pub interleaved: bool,
}

impl Rotation<'_> {
    /// Rotates contiguous rows on the CPU; if `back`, by the negative angles, which undoes the rotation.
    fn rotate(&self, rows: &Raw, back: bool) -> Result<Raw> {
        rope::rotate_rows(rows, self.tables, self.repeats, self.interleaved, back)
    }
}

struct RmsNormRopeBackward {
    x: Saved,
    /// 1/√(mean(x²) + eps) of each row.
    rstd: Saved,
    /// cos and sin.
    tables: [Saved; 2],
    order: RowOrder,
    interleaved: bool,
    affine: SavedAffine,
}

impl Backward for RmsNormRopeBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let order = self.order;
        let x = contiguous(&order.swap(&self.x.get()?)?)?;
        let grad = contiguous(&order.swap(context.grad())?)?;
        let (rstd, cos, sin) = (self.rstd.get()?, self.tables[0].get()?, self.tables[1].get()?);
        let rotation = Rotation { tables: [&cos, &sin], repeats: order.repeats(), interleaved: self.interleaved };
        on_device!(
            x.device(),
            cuda => cuda::backward(self, context, [&x, &grad, &rstd], &rotation),
            cpu => cpu::backward(self, context, [&x, &grad, &rstd], &rotation),
        )
    }
}
