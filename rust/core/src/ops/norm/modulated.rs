//! Layer norm whose scale and shift are computed, a pair for each sample: adaLN of diffusion transformers (Peebles & Xie 2022,
//! arXiv:2212.09748, section 3.2).

use std::mem::MaybeUninit;

use super::row::{BackwardPass, MIN_BLOCK, Size, forward};
use super::{Affine, SavedAffine, check_eps};
use crate::compute::contiguous;
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::ops::rows;
use crate::raw::from_vec;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Error, Result, Tensor, dispatch_float};

pub(super) static MODULATED_LAYER_NORM: OpInfo = OpInfo::cheap("modulated_layer_norm");

/// (x - mean) / √(var + eps) · (1 + scale) + shift over the last dimension, with the biased variance: `x (batch, ..., features)`,
/// `scale` and `shift (batch, features)` in the dtype of `x`, or f32. Statistics are in f32 (f64 for f64).
///
/// # Errors
/// [`Error::Argument`] if `eps` is no number of at least 0, [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do
/// not fit.
pub fn modulated_layer_norm(x: &Tensor, scale: &Tensor, shift: &Tensor, eps: f64) -> Result<Tensor> {
    let op = MODULATED_LAYER_NORM.name;
    check_eps(op, eps)?;
    let &[batch, ref positions @ .., len] = x.dims() else {
        return Err(Error::shape(op, format!("the input has shape {:?}, expected (batch, ..., features)", x.dims())));
    };
    let positions = positions.iter().product::<usize>();
    let size = Size { rows: batch * positions, len, sharing: positions.max(1) };
    let affine = Affine::named(op, x, [("scale", Some(scale)), ("shift", Some(shift))], &[batch, len])?;
    record_with_aux(
        &MODULATED_LAYER_NORM,
        &affine.inputs(x),
        || {
            let raw = contiguous(&x.raw)?;
            #[cfg(feature = "cuda")]
            if raw.device().is_cuda() {
                let kind = cuda::norm::Kind::Modulated { samples: batch, rows: positions };
                let cuda::norm::Rows { y, rstd, mean, .. } =
                    cuda::norm::rows(op, kind, &raw, None, [size.rows, len], affine.parameters(), eps)?;
                return Ok((y, std::iter::once(rstd).chain(mean).collect()));
            }
            dispatch_float!(x.dtype(), op, T => {
                let (scale, shift) = (beside_one(affine.scale(len)?), affine.shift(len)?);
                let (y, [mean, rstd]) = read_all(op, &[&raw], |operands| {
                    let x = elements::<T>(operands[0])?;
                    Ok(forward::<T, true>(size, x, &scale, &shift, Real::from_f64(eps)))
                })?;
                Ok((from_vec(y, x.shape()), [rstd, mean].map(|values| from_vec(values, size.rows)).into_iter().collect()))
            })
        },
        |saver, _, statistics| ModulatedBackward {
            size,
            batch,
            // The gradient of the shift alone reads nothing.
            reads: (saver.needs(0) || saver.needs(1)).then(|| Reads {
                x: saver.save(x),
                rstd: saver.save_raw(&statistics[0]),
                mean: saver.save_raw(&statistics[1]),
            }),
            affine: affine.save(saver, false),
        },
    )
}

/// 1 + scale.
fn beside_one<R: Real>(mut scale: Vec<R>) -> Vec<R> {
    for value in &mut scale {
        *value += R::ONE;
    }
    scale
}

struct ModulatedBackward {
    size: Size,
    batch: usize,
    reads: Option<Reads>,
    affine: SavedAffine,
}

struct Reads {
    x: Saved,
    rstd: Saved,
    mean: Saved,
}

impl Backward for ModulatedBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let op = MODULATED_LAYER_NORM.name;
        let Size { rows, len, .. } = self.size;
        let grad = contiguous(context.grad())?;
        let Some(Reads { x, rstd, mean }) = &self.reads else {
            let grad = grad.reshape((self.batch, rows / self.batch.max(1), len))?;
            return self.affine.add_shift_only(context, &grad, 1);
        };
        let x = x.get()?;
        let shape = x.shape().clone();
        let x = contiguous(&x)?;
        let (rstd, mean) = (rstd.get()?, mean.get()?);
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let [weight, _] = self.affine.parameters()?;
            let saved = cuda::norm::Saved {
                x: &x,
                grad: &grad,
                mean: Some(&mean),
                rstd: &rstd,
                weight: weight.as_ref(),
                bias: None,
            };
            let kind = cuda::norm::Kind::Modulated { samples: self.batch, rows: rows / self.batch.max(1) };
            let wants = self.affine.wants(context);
            let before = context.take_pending(0, x.dtype());
            let grads = cuda::norm::rows_backward(op, kind, &saved, [rows, len], wants, before)?;
            return self.affine.add_gradients(context, grads);
        }
        dispatch_float!(x.dtype(), op, T => {
            let scale = beside_one(self.affine.scale(len)?);
            let (wants_input, wants_affine) = (context.needs(0), self.affine.needs_grad(context));
            let (grad_x, [grad_scale, grad_shift]) =
                read_all(op, &[&x, &grad, &mean, &rstd], |operands| {
                    let pass = BackwardPass::<T> {
                        size: self.size,
                        x: elements(operands[0])?,
                        grad: elements(operands[1])?,
                        mean: elements(operands[2])?,
                        rstd: elements(operands[3])?,
                        scale: &scale,
                    };
                    Ok(self.run(&pass, wants_input, wants_affine))
                })?;
            if wants_input {
                context.add(0, from_vec(grad_x, shape))?;
            }
            self.affine.add(context, grad_scale, grad_shift)
        })
    }
}

impl ModulatedBackward {
    /// The gradients of the input and, (batch, len) each, of scale and shift; each empty if not wanted.
    fn run<T: Elem>(
        &self,
        pass: &BackwardPass<'_, T>,
        wants_input: bool,
        wants_affine: bool,
    ) -> (Vec<T>, [Vec<T::Acc>; 2]) {
        let Size { rows, len, sharing } = self.size;
        // Blocks of rows of one sample.
        let block = rows::rows_per_block(len).max(MIN_BLOCK);
        let blocks = if rows * len == 0 { 0 } else { sharing.div_ceil(block) };
        let width = if wants_affine { 2 * len } else { 0 };
        let mut partial = vec![T::Acc::ZERO; self.batch * blocks * width];
        let total = if wants_input { rows * len } else { 0 };
        let mut grad_x = Vec::with_capacity(total);
        let partials = SharedMut::new(&mut partial);
        let results = SharedMut::new(&mut grad_x.spare_capacity_mut()[..total]);
        let grain = if blocks > 1 { 1 } else { rows::rows_per_block(sharing * len) };
        par_ranges(self.batch * blocks, grain, |range| {
            for index in range {
                let sample = index / blocks * sharing;
                let first = index % blocks * block;
                let rows = sample + first..sample + sharing.min(first + block);
                let elements = if wants_input { rows.start * len..rows.end * len } else { 0..0 };
                // SAFETY: blocks do not overlap.
                let partial = unsafe { partials.slice(index * width..(index + 1) * width) };
                // SAFETY: as above.
                let out: &mut [MaybeUninit<T>] = unsafe { results.slice(elements) };
                dispatch(
                    #[inline(always)]
                    || pass.block::<true>(rows, out, partial),
                );
            }
        });
        // SAFETY: the blocks cover everything, and `block` writes every row that it is given.
        unsafe { grad_x.set_len(total) };
        let mut sums = [0, 1].map(|_| vec![T::Acc::ZERO; self.batch * width / 2]);
        for (index, partial) in partial.chunks_exact(width.max(1)).enumerate() {
            let start = index / blocks * len;
            for (sum, half) in sums.iter_mut().zip(partial.chunks_exact(len)) {
                for (s, p) in sum[start..start + len].iter_mut().zip(half) {
                    *s += *p;
                }
            }
        }
        (grad_x, sums)
    }
}
