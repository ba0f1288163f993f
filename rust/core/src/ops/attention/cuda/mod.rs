//! Attention on CUDA devices: the host side of `kernels/attention.cu`. These kernels never store the matrix of all
//! scores. They use tensor cores where the operands allow it; otherwise plain kernels compute the attention. For very
//! wide heads, matrix products compute the forward pass (`wide.rs`).

mod few_keys;
pub(super) mod hopper;
mod wide;

use candle_core::{DType, Layout};
use trainable_candle_cuda::kernels::attention::{
    ATTENTION_BACKWARD_W64, ATTENTION_BACKWARD_W128, ATTENTION_DELTA, ATTENTION_FORWARD_W64, ATTENTION_FORWARD_W128,
    ATTENTION_PLAIN_BACKWARD_KEY, ATTENTION_PLAIN_BACKWARD_QUERY, ATTENTION_PLAIN_BACKWARD_VALUE,
    ATTENTION_PLAIN_FORWARD, ATTENTION_SUM_PARTS, AttentionBackwardW64, AttentionDelta, AttentionForwardW64,
    AttentionPlainBackwardQuery, AttentionPlainForward, AttentionSumParts,
};
use trainable_candle_cuda::structs::{AttentionShape, Mask, Strides};

use super::ATTENTION;
use super::cpu::{self, SavedValues};
use crate::cuda::launch::{
    Address, Const, Kernel, Mut, Shape, accumulator, address, count32, element, empty, input, optional_input,
    optional_output, output, suffix,
};
use crate::cuda::{Gpu, contiguous, fill};
use crate::raw::{heads_are_adjacent, storage_identity};
use crate::{Error, Raw, Result};

/// The settings of an attention operation.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// The operation's name, for errors.
    pub op: &'static str,
    /// The shape of the scores: (..., queries, keys).
    pub scores: &'a [usize],
    /// The factor of the scores before the softmax.
    pub scale: f64,
    /// Whether query i sees only keys 0 to i.
    pub is_causal: bool,
}

// Settings with `VisibleKeys::Segments` do not come here: `varlen` makes its own. So visible keys are all or causal.
impl<'a> From<&'a cpu::Attention> for Attention<'a> {
    fn from(cpu::Attention { scores, scale, visible_keys, .. }: &'a cpu::Attention) -> Self {
        Self { op: ATTENTION.name, scores, scale: *scale, is_causal: matches!(visible_keys, cpu::VisibleKeys::Causal) }
    }
}

/// A tensor (..., rows, width) as one matrix per head, with the address and the strides for kernels.
#[derive(Clone)]
pub(super) struct Heads {
    pub(super) raw: Raw,
    pub(super) address: Address,
    pub(super) strides: Strides,
}

impl Heads {
    /// The tensor, copied if the elements of a row are not contiguous or [`head_strides`] finds no strides.
    pub(super) fn new(op: &'static str, raw: &Raw) -> Result<Self> {
        let rows_are_dense = raw.dims().last() == Some(&1) || raw.stride().last() == Some(&1);
        let (raw, strides) = with_strides(raw, rows_are_dense)?;
        Ok(Self { address: address(op, &raw)?, raw, strides })
    }

    pub(super) fn input(&self) -> Const {
        Const::new(self.address, element(self.raw.dtype()))
    }

    pub(super) fn output(&self) -> Mut {
        Mut::new(self.address, element(self.raw.dtype()))
    }

    /// The address and the strides of a gradient that a kernel writes; null and zeros if there is no gradient.
    pub(super) fn place(gradient: Option<&Self>) -> (Mut, Strides) {
        gradient.map_or((Mut::NULL, NO_STRIDES), |gradient| (gradient.output(), gradient.strides))
    }

    /// Whether rows can be read 16 bytes at a time.
    pub(super) fn is_aligned(&self) -> bool {
        let Strides { batch, head, row } = self.strides;
        let in_16_bytes = crate::cuda::launch::wide(self.raw.dtype()) as u64;
        self.address.is_multiple_of(16) && [batch, head, row].iter().all(|stride| stride.is_multiple_of(in_16_bytes))
    }
}

/// The strides of an absent tensor, which no kernel reads.
const NO_STRIDES: Strides = Strides { batch: 0, head: 0, row: 0 };

/// The strides of batch, head and row of a tensor (..., heads, rows, width); `None` if the dimensions before the heads
/// cannot be merged into one, the batch. The stride of an absent dimension and of one of size 1 is 0.
fn head_strides(layout: &Layout) -> Option<Strides> {
    let (dims, strides) = (layout.dims(), layout.stride());
    let rank = dims.len();
    let stride =
        |from_end: usize| rank.checked_sub(from_end).map_or(0, |i| if dims[i] == 1 { 0 } else { strides[i] as u64 });
    let mut batch: Option<u64> = None;
    let mut merged = 1u64; // the product of the sizes of the merged dimensions
    for i in (0..rank.saturating_sub(3)).rev().filter(|&i| dims[i] != 1) {
        match batch {
            None => batch = Some(strides[i] as u64),
            Some(batch) if strides[i] as u64 == batch * merged => {}
            Some(_) => return None,
        }
        merged *= dims[i] as u64;
    }
    Some(Strides { batch: batch.unwrap_or(0), head: stride(3), row: stride(2) })
}

/// The tensor and its [`head_strides`]; a contiguous copy of the tensor if it has none, or if `fits` is false.
fn with_strides(raw: &Raw, fits: bool) -> Result<(Raw, Strides)> {
    if let Some(strides) = head_strides(raw.layout()).filter(|_| fits) {
        return Ok((raw.clone(), strides));
    }
    let raw = contiguous(raw)?;
    // The dimensions of a contiguous tensor can always be merged, so `NO_STRIDES` does not occur here.
    Ok((raw.clone(), head_strides(raw.layout()).unwrap_or(NO_STRIDES)))
}

/// A new tensor with the shape of `like`, except that its last dimension is `width`. If the heads of one row (query or
/// key) are adjacent in the memory of `like`, they are adjacent in the new tensor, too.
pub(super) fn empty_like(op: &'static str, gpu: &Gpu, like: &Raw, width: usize) -> Result<Raw> {
    let mut dims = like.dims().to_vec();
    let rank = dims.len();
    dims[rank - 1] = width;
    if !heads_are_adjacent(like) {
        return empty(op, gpu, &dims, like.dtype());
    }
    dims.swap(rank - 3, rank - 2);
    Ok(empty(op, gpu, &dims, like.dtype())?.transpose(rank - 3, rank - 2)?)
}

impl Attention<'_> {
    /// The sizes and settings for kernels; each query or key has `width` columns.
    pub(super) fn sizes(&self, width: usize, value_width: usize) -> Result<AttentionShape> {
        let rank = self.scores.len();
        let heads = rank.checked_sub(3).map_or(1, |i| self.scores[i]);
        let batch = self.scores[..rank.saturating_sub(3)].iter().product();
        let count = |size| count32(self.op, size);
        Ok(AttentionShape {
            batch: count(batch)?,
            heads: count(heads)?,
            queries: count(self.scores[rank - 2])?,
            keys: count(self.scores[rank - 1])?,
            width: count(width)?,
            value_width: count(value_width)?,
            is_causal: u32::from(self.is_causal),
            parts: 1, // only the backward pass may split sums into more parts
            scale: self.scale,
        })
    }

    /// The mask, broadcast to the scores: its description for kernels (null without a mask), and the tensor, which must
    /// live until the launch.
    fn mask(&self, mask: Option<&Raw>) -> Result<(Mask, Option<Raw>)> {
        let Some(mask) = mask else { return Ok((Mask { numbers: 0, batch: 0, head: 0, query: 0, key: 0 }, None)) };
        let mask = mask.broadcast_as(self.scores)?;
        let (mask, strides) = with_strides(&mask, /* fits: */ true)?; // kernels support any stride of the keys
        let key = mask.stride().last().copied().unwrap_or(0) as u64;
        let Strides { batch, head, row } = strides;
        Ok((Mask { numbers: address(self.op, &mask)?, batch, head, query: row, key }, Some(mask)))
    }

    /// The tensor-core kernels for the width of these operands; `None` if none support the operands.
    pub(super) fn tensor_cores(
        &self,
        sizes: &AttentionShape,
        operands: &[&Heads],
        mask: Option<&Raw>,
    ) -> Option<Width> {
        let dtype = operands[0].raw.dtype();
        let fits = matches!(dtype, DType::F16 | DType::BF16)
            && mask.is_none()
            && sizes.width == sizes.value_width
            && sizes.width.is_multiple_of(8)
            && (8..=128).contains(&sizes.width)
            && sizes.scale > 0.0
            && sizes.keys > 0
            && operands.iter().all(|operand| operand.is_aligned());
        fits.then_some(if sizes.width <= 64 { Width::W64 } else { Width::W128 })
    }

    /// Computes the result and the log-sums. The log-sum of a query is log Σ e^score over its keys.
    pub fn forward(&self, [q, k, v]: [&Raw; 3], mask: Option<&Raw>) -> Result<(Raw, Raw)> {
        let op = self.op;
        let gpu = Gpu::of(op, q)?;
        let (dtype, rank) = (q.dtype(), q.rank());
        let (width, value_width) = (q.dims()[rank - 1], v.dims()[rank - 1]);
        let o = empty_like(op, gpu, q, value_width)?;
        let log_sums = empty(op, gpu, &self.scores[..rank - 1], accumulator(dtype))?;
        let sizes = self.sizes(width, value_width)?;
        let heads = sizes.batch * sizes.heads;
        if log_sums.elem_count() == 0 {
            return Ok((o, log_sums));
        }
        if self.is_wide([width, value_width], mask) {
            self.wide_forward([q, k, v], &o, &log_sums)?;
            return Ok((o, log_sums));
        }
        let [q, k, v, to] = [Heads::new(op, q)?, Heads::new(op, k)?, Heads::new(op, v)?, Heads::new(op, &o)?];
        let sums = output(op, &log_sums)?;
        if let Some(widest) = self.tensor_cores(&sizes, &[&q, &k, &v, &to], mask) {
            let operands = [&q, &k, &v, &to];
            // Each returns false, and writes nothing, if its kernels do not support the operands.
            if self.hopper_forward(gpu, &sizes, widest, operands, sums)?
                || self.few_keys_forward(gpu, &sizes, widest, operands, sums)?
            {
                return Ok((o, log_sums));
            }
            let function = gpu.function(widest.forward(), suffix(op, dtype)?)?;
            // A block computes 64 queries of a head. `AttentionForwardW64` has the arguments for both widths.
            let blocks = sizes.queries.div_ceil(64) * heads;
            let shape = Shape { grid: [blocks, 1, 1], block: [128, 1, 1], shared: widest.forward_shared(gpu) };
            let arguments = AttentionForwardW64 {
                q: q.input(),
                k: k.input(),
                v: v.input(),
                o: to.output(),
                log_sums: sums,
                q_strides: q.strides,
                k_strides: k.strides,
                v_strides: v.strides,
                o_strides: to.strides,
                shape: sizes,
            };
            // SAFETY: the strides stay inside of the tensors, which are of these sizes.
            unsafe { function.launch(op, gpu, shape, arguments) }?;
        } else {
            let (mask, _keeps_alive) = self.mask(mask)?;
            let function = gpu.function(&ATTENTION_PLAIN_FORWARD, suffix(op, dtype)?)?;
            // A block computes 32 rows and 64 columns of a head's result.
            let grid = [sizes.queries.div_ceil(32) * heads, sizes.value_width.div_ceil(64).max(1), 1];
            let shape = Shape { grid, block: [256, 1, 1], shared: 0 };
            let arguments = AttentionPlainForward {
                q: q.input(),
                k: k.input(),
                v: v.input(),
                o: to.output(),
                log_sums: sums,
                q_strides: q.strides,
                k_strides: k.strides,
                v_strides: v.strides,
                o_strides: to.strides,
                mask,
                shape: sizes,
            };
            // SAFETY: as above; the strides of the mask stay inside of the mask, too.
            unsafe { function.launch(op, gpu, shape, arguments) }?;
        }
        Ok((o, log_sums))
    }

    /// Computes the gradients of q, k and v; `None` where `wanted` is false.
    pub fn backward(&self, saved: &SavedValues, grad: &Raw, wanted: [bool; 3]) -> Result<[Option<Raw>; 3]> {
        let gpu = Gpu::of(self.op, grad)?;
        let mut grads = [None, None, None];
        for (input_grad, (input, wanted)) in grads.iter_mut().zip(saved.inputs.iter().zip(wanted)) {
            if wanted {
                *input_grad = Some(empty_like(self.op, gpu, input, input.dims()[input.rank() - 1])?);
            }
        }
        self.backward_into(saved, grad, grads.each_ref().map(Option::as_ref))?;
        Ok(grads)
    }

    /// Writes the gradients of q, k and v for which `grads` has a tensor; each may be a view of a larger tensor.
    pub fn backward_into(
        &self,
        SavedValues { inputs: [q, k, v], mask, result: o, log_sums }: &SavedValues,
        grad: &Raw,
        grads: [Option<&Raw>; 3],
    ) -> Result<()> {
        let (op, mask) = (self.op, mask.as_ref());
        let gpu = Gpu::of(op, q)?;
        let (dtype, rank) = (q.dtype(), q.rank());
        let sizes = self.sizes(q.dims()[rank - 1], v.dims()[rank - 1])?;
        let heads = sizes.batch * sizes.heads;
        let wanted = grads.map(|grad| grad.is_some());
        if heads == 0 || sizes.queries == 0 || sizes.keys == 0 {
            // Without queries the gradients of keys and values are zero, and without keys the gradient of the queries
            // is zero.
            for grad in grads.into_iter().flatten() {
                fill(grad, 0.0)?;
            }
            return Ok(());
        }
        let [q, k, v] = [Heads::new(op, q)?, Heads::new(op, k)?, Heads::new(op, v)?];
        let (o, grad) = (Heads::new(op, o)?, Heads::new(op, grad)?);
        let places = [destination(op, grads[0])?, destination(op, grads[1])?, destination(op, grads[2])?];
        let operands: Vec<&Heads> = [&q, &k, &v, &grad].into_iter().chain(places.iter().flatten()).collect();
        let widest = self.tensor_cores(&sizes, &operands, mask);
        // `hopper_backward` also reads `o`, 16 bytes at a time. `few_keys_backward` does not, but shares the check: the
        // result of the forward pass is almost always aligned.
        if let Some(widest) = widest.filter(|_| o.is_aligned()) {
            let log_sums = input(op, log_sums)?;
            let places = places.each_ref().map(Option::as_ref);
            if self.hopper_backward(gpu, &sizes, widest, [&q, &k, &v, &o, &grad], log_sums, places)?
                || self.few_keys_backward(gpu, &sizes, widest, [&q, &k, &v, &grad], log_sums, places)?
            {
                return Ok(());
            }
        }
        let deltas = self.deltas(gpu, &sizes, &o, &grad)?;
        let log_sums = input(op, log_sums)?;
        let delta = input(op, &deltas)?;
        if let Some(widest) = widest {
            let [(dq, dq_strides), (dk, dk_strides), (dv, dv_strides)] =
                places.each_ref().map(|place| Heads::place(place.as_ref()));
            let parts = self.parts(&sizes);
            let sizes = AttentionShape { parts, ..sizes };
            let wants_k_or_v = wanted[1] || wanted[2];
            let partial = |is_wanted: bool| -> Result<Option<Raw>> {
                let dims = [parts as usize, heads as usize, sizes.keys as usize, sizes.width as usize];
                (is_wanted && parts > 1).then(|| empty(op, gpu, &dims, DType::F32)).transpose()
            };
            let (dk_parts, dv_parts) = (partial(wanted[1])?, partial(wanted[2])?);
            // A block computes one part of the gradients of 64 keys and their values, or the gradient of 64 queries.
            let key_blocks = if wants_k_or_v { parts * sizes.keys.div_ceil(64) * heads } else { 0 };
            let query_blocks = if wanted[0] { sizes.queries.div_ceil(64) * heads } else { 0 };
            let grid = [key_blocks + query_blocks, 1, 1];
            let shape = Shape { grid, block: [128, 1, 1], shared: widest.backward_shared() };
            let function = gpu.function(widest.backward(), suffix(op, dtype)?)?;
            let arguments = AttentionBackwardW64 {
                q: q.input(),
                k: k.input(),
                v: v.input(),
                d_o: grad.input(),
                log_sums,
                delta,
                dq,
                dk,
                dv,
                dk_parts: optional_output(op, dk_parts.as_ref())?,
                dv_parts: optional_output(op, dv_parts.as_ref())?,
                q_strides: q.strides,
                k_strides: k.strides,
                v_strides: v.strides,
                do_strides: grad.strides,
                dq_strides,
                dk_strides,
                dv_strides,
                shape: sizes,
            };
            // SAFETY: as in `forward`; gradients that are not wanted are null.
            unsafe { function.launch(op, gpu, shape, arguments) }?;
            if parts > 1 && wants_k_or_v {
                let dk_dv_parts = [dk_parts.as_ref(), dv_parts.as_ref()];
                self.sum_parts(gpu, dtype, &sizes, dk_dv_parts, [(dk, dk_strides), (dv, dv_strides)])?;
            }
            return Ok(());
        }
        let (mask, _keeps_alive) = self.mask(mask)?;
        // The kernels for the gradients of q, k and v have the same parameters.
        const KERNELS: [&Kernel<AttentionPlainBackwardQuery>; 3] =
            [&ATTENTION_PLAIN_BACKWARD_QUERY, &ATTENTION_PLAIN_BACKWARD_KEY, &ATTENTION_PLAIN_BACKWARD_VALUE];
        for (i, place) in places.iter().enumerate() {
            let Some(place) = place else { continue };
            let rows = if i == 0 { sizes.queries } else { sizes.keys };
            let columns = if i == 2 { sizes.value_width } else { sizes.width };
            if columns == 0 {
                continue;
            }
            let function = gpu.function(KERNELS[i], suffix(op, dtype)?)?;
            // A block computes 32 rows and 64 columns of a head's gradient.
            let grid = [rows.div_ceil(32) * heads, columns.div_ceil(64), 1];
            let shape = Shape { grid, block: [256, 1, 1], shared: 0 };
            let arguments = AttentionPlainBackwardQuery {
                q: q.input(),
                k: k.input(),
                v: v.input(),
                d_o: grad.input(),
                log_sums,
                delta,
                grad: place.output(),
                q_strides: q.strides,
                k_strides: k.strides,
                v_strides: v.strides,
                do_strides: grad.strides,
                grad_strides: place.strides,
                mask,
                shape: sizes,
            };
            // SAFETY: as above; the strides of the mask stay inside of the mask, too.
            unsafe { function.launch(op, gpu, shape, arguments) }?;
        }
        Ok(())
    }

    /// For each query, Σ `o · grad` over the columns, where `o` is the result and `grad` the gradient of the result.
    pub(super) fn deltas(&self, gpu: &Gpu, sizes: &AttentionShape, o: &Heads, grad: &Heads) -> Result<Raw> {
        let (op, dtype) = (self.op, o.raw.dtype());
        let deltas = empty(op, gpu, &self.scores[..self.scores.len() - 1], accumulator(dtype))?;
        // A block of 256 threads computes 32 of the sums.
        let shape = Shape::linear(op, deltas.elem_count().div_ceil(32), 256)?;
        let arguments = AttentionDelta {
            o: o.input(),
            d_o: grad.input(),
            delta: output(op, &deltas)?,
            o_strides: o.strides,
            do_strides: grad.strides,
            shape: *sizes,
        };
        // SAFETY: the strides stay inside of the tensors, which are of these sizes.
        unsafe { gpu.function(&ATTENTION_DELTA, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        Ok(deltas)
    }

    /// Sums the parts of the gradients of the keys and of the values; each part is what some of the queries contribute.
    /// Does nothing for a gradient without parts. `sizes.heads` must be the number of heads of the keys. With grouped
    /// queries (in `varlen`), queries have more heads than keys.
    pub(super) fn sum_parts(
        &self,
        gpu: &Gpu,
        dtype: DType,
        sizes: &AttentionShape,
        [dk_parts, dv_parts]: [Option<&Raw>; 2],
        [(dk, dk_strides), (dv, dv_strides)]: [(Mut, Strides); 2],
    ) -> Result<()> {
        let op = self.op;
        let elements = (sizes.batch * sizes.heads) as usize * (sizes.keys * sizes.width) as usize;
        // A thread sums four elements. The second dimension of the grid is for the gradients of keys and of values.
        let shape = Shape { grid: [elements.div_ceil(1024) as u32, 2, 1], block: [256, 1, 1], shared: 0 };
        let arguments = AttentionSumParts {
            dk_parts: optional_input(op, dk_parts)?,
            dv_parts: optional_input(op, dv_parts)?,
            dk,
            dv,
            dk_strides,
            dv_strides,
            shape: *sizes,
        };
        // SAFETY: as in `forward`; gradients that are not wanted are null.
        unsafe { gpu.function(&ATTENTION_SUM_PARTS, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }
    }

    /// The number of ranges into which the queries are split. With few keys, the gradients of keys and values are
    /// summed in parts, one part per range, to fill the device. There is at most one range for every 256 queries.
    fn parts(&self, sizes: &AttentionShape) -> u32 {
        /// The number of thread blocks that fills the device: 3 for each of the 132 multiprocessors of an H100.
        const BLOCKS: u32 = 396;
        let blocks = sizes.keys.div_ceil(64) * sizes.batch * sizes.heads;
        (BLOCKS / blocks.max(1)).clamp(1, sizes.queries.div_ceil(256).max(1))
    }
}

/// The destination of a gradient, as matrices of heads; an error if its strides require a copy, in storage of its own.
fn destination(op: &'static str, grad: Option<&Raw>) -> Result<Option<Heads>> {
    let Some(grad) = grad else { return Ok(None) };
    let heads = Heads::new(op, grad)?;
    if storage_identity(&heads.raw).0 != storage_identity(grad).0 {
        return Err(Error::shape(
            op,
            format!(
                "the gradient has strides {:?}, expected contiguous rows and batch dimensions that can be merged",
                grad.stride()
            ),
        ));
    }
    Ok(Some(heads))
}

/// The widest head that a tensor-core kernel supports, 64 or 128 columns. Such a kernel pads narrower heads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    W64,
    W128,
}

impl Width {
    /// Bytes of shared memory of the forward kernel: for 64 queries, and for two stages of 64 keys and values (128 on
    /// Hopper if there are 64 columns), with 2 bytes for each column.
    pub(super) const fn forward_shared(self, gpu: &Gpu) -> u32 {
        match self {
            Self::W128 => 81_920,
            Self::W64 if gpu.is_hopper() => 73_728,
            Self::W64 => 40_960,
        }
    }

    /// Bytes of shared memory of the backward kernel: six tiles of 64 rows, and 256 log-sums and deltas of 4 bytes.
    pub(super) const fn backward_shared(self) -> u32 {
        match self {
            Self::W128 => 99_328,
            Self::W64 => 50_176,
        }
    }

    // The kernels of both widths have the same parameters, so they share one structure of arguments.
    const fn forward(self) -> &'static Kernel<AttentionForwardW64> {
        match self {
            Self::W64 => &ATTENTION_FORWARD_W64,
            Self::W128 => &ATTENTION_FORWARD_W128,
        }
    }

    const fn backward(self) -> &'static Kernel<AttentionBackwardW64> {
        match self {
            Self::W64 => &ATTENTION_BACKWARD_W64,
            Self::W128 => &ATTENTION_BACKWARD_W128,
        }
    }
}
