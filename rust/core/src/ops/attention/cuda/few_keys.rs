//! Attention of many queries to few keys on compute capability 9.0: the host side of `attention_few_keys_hopper.cu`.

use candle_core::DType;
use trainable_candle_cuda::kernels::attention_few_keys_hopper::{
    ATTENTION_FEW_KEYS_BACKWARD, ATTENTION_FEW_KEYS_FINISH, ATTENTION_FEW_KEYS_FORWARD,
    AttentionFewKeysBackward as Backward, AttentionFewKeysFinish as Finish, AttentionFewKeysForward as Forward, MODULE,
};
use trainable_candle_cuda::structs::{AttentionFewKeysMaps, AttentionShape, Schedule, TensorMap};

use super::hopper::{FEWEST_ROWS, THREADS, is_mapped, map};
use super::{Attention, Heads, Width};
use crate::Result;
use crate::cuda::Gpu;
use crate::cuda::launch::{Const, Mut, Shape, empty, optional_input, optional_output, suffix};
use crate::cuda::tensor_map::{Encoder, NO_MAP};

/// The most keys that these kernels support.
const KEYS: u32 = 80;
/// Columns of a head in the kernels' tiles.
const COLUMNS: u32 = 64;
/// Queries in the tile of a step (see [`schedule`]).
const QUERIES: u32 = 128;
/// Threads of a block of the forward and of the backward kernel.
const MAIN_THREADS: u32 = 384;
/// Bytes of shared memory of a block of the forward kernel.
const FORWARD_SHARED: u32 = 155_776;
/// Bytes of shared memory of a block of the backward kernel.
const BACKWARD_SHARED: u32 = 221_264;

/// Distributes the work over thread blocks, one per multiprocessor. An item is a head of a sample, and a step is a tile
/// of the head's queries. Several blocks may share the steps of an item. The caller has checked that the general
/// tensor-core kernels support the operands. `widest` is the widest head, 64 or 128 columns, that the general kernel
/// for these heads supports. Returns `None` if the kernels of this file do not support the operands.
fn schedule(gpu: &Gpu, sizes: &AttentionShape, widest: Width, operands: &[&Heads]) -> Option<Schedule> {
    let (blocks, items) = (gpu.multiprocessors() as u32, sizes.batch * sizes.heads);
    let steps = sizes.queries.div_ceil(QUERIES);
    let fits = gpu.runs_hopper_kernels()
        // The image is empty in a build without code for compute capability 9.0.
        && !MODULE.image.is_empty()
        && widest == Width::W64
        && sizes.is_causal == 0
        && sizes.keys <= KEYS
        // With fewer queries, the general kernels are as fast.
        && sizes.queries >= FEWEST_ROWS
        // The kernels compute items * steps * blocks in 32 bits.
        && [steps, blocks].iter().try_fold(items, |product, &factor| product.checked_mul(factor)).is_some()
        // Tensor maps can describe the operands.
        && operands.iter().all(|heads| is_mapped(heads, sizes));
    // `whole` counts the items that are never split between blocks: none here, because blocks may share any item.
    fits.then_some(Schedule { items, steps, whole: 0, blocks })
}

/// The tensor maps of the operands; without `d_o`, the gradient of the result, its map is [`NO_MAP`].
fn maps(
    encoder: &Encoder,
    [q, k, v]: [&Heads; 3],
    d_o: Option<&Heads>,
    sizes: &AttentionShape,
) -> Result<AttentionFewKeysMaps> {
    let of_queries = |heads: &Heads| map(encoder, heads, sizes, sizes.queries, QUERIES);
    let of_keys = |heads: &Heads| map(encoder, heads, sizes, sizes.keys, KEYS);
    let d_o: Result<TensorMap> = d_o.map_or(Ok(NO_MAP), of_queries);
    Ok(AttentionFewKeysMaps { q: of_queries(q)?, k: of_keys(k)?, v: of_keys(v)?, d_o: d_o? })
}

impl Attention<'_> {
    /// Writes the result to `o`, and the logarithms of softmax's sums to `log_sums`; returns false if these kernels do
    /// not support the operands.
    pub(super) fn few_keys_forward(
        &self,
        gpu: &Gpu,
        sizes: &AttentionShape,
        widest: Width,
        [q, k, v, o]: [&Heads; 4],
        log_sums: Mut,
    ) -> Result<bool> {
        let (op, dtype) = (self.op, q.raw.dtype());
        let Some(schedule) = schedule(gpu, sizes, widest, &[q, k, v]) else { return Ok(false) };
        let maps = maps(&Encoder::new(op, dtype)?, [q, k, v], None, sizes)?;
        let shape = Shape { grid: [schedule.blocks, 1, 1], block: [MAIN_THREADS, 1, 1], shared: FORWARD_SHARED };
        let arguments = Forward { o: o.output(), log_sums, maps, o_strides: o.strides, shape: *sizes, schedule };
        // SAFETY: the maps describe the tensors, and the strides stay inside of the result.
        unsafe { gpu.function(&ATTENTION_FEW_KEYS_FORWARD, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        Ok(true)
    }

    /// Writes the gradients of q, k and v for which there is a destination; returns false if these kernels do not
    /// support the operands.
    pub(super) fn few_keys_backward(
        &self,
        gpu: &Gpu,
        sizes: &AttentionShape,
        widest: Width,
        [q, k, v, grad]: [&Heads; 4],
        log_sums: Const,
        [dq, dk, dv]: [Option<&Heads>; 3],
    ) -> Result<bool> {
        let (op, dtype) = (self.op, q.raw.dtype());
        let Some(schedule) = schedule(gpu, sizes, widest, &[q, k, v, grad]) else { return Ok(false) };
        // The most pairs of an item and a block that computes some of its steps. All steps form one sequence, which the
        // blocks share. The first pair begins with the first step, and each further pair begins where a further item or
        // the share of a further block begins: 1 + (items - 1) + (blocks - 1). Each pair has a part of the gradient of
        // the keys, and one of the gradient of the values.
        let pairs = (schedule.items + schedule.blocks - 1) as usize;
        let dims = [pairs, 2, KEYS as usize, COLUMNS as usize];
        let parts = (dk.is_some() || dv.is_some()).then(|| empty(op, gpu, &dims, DType::F32)).transpose()?;
        let maps = maps(&Encoder::new(op, dtype)?, [q, k, v], Some(grad), sizes)?;
        let [(dq, dq_strides), (dk, dk_strides), (dv, dv_strides)] = [dq, dk, dv].map(Heads::place);
        let shape = Shape { grid: [schedule.blocks, 1, 1], block: [MAIN_THREADS, 1, 1], shared: BACKWARD_SHARED };
        let to_parts = optional_output(op, parts.as_ref())?;
        let arguments = Backward { dq, log_sums, parts: to_parts, maps, dq_strides, shape: *sizes, schedule };
        // SAFETY: the maps describe the tensors, the strides stay inside of the gradient, and `parts` has room for each
        // pair of a head and a block that computes steps of this head.
        unsafe { gpu.function(&ATTENTION_FEW_KEYS_BACKWARD, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        if parts.is_none() {
            return Ok(true);
        }
        // Each thread sums the parts of four elements. The second dimension of the grid is for the gradients of keys
        // and of values.
        let blocks = schedule.items * KEYS * COLUMNS / 4 / THREADS;
        let shape = Shape { grid: [blocks, 2, 1], block: [THREADS, 1, 1], shared: 0 };
        let parts = optional_input(op, parts.as_ref())?;
        let arguments = Finish { parts, dk, dv, dk_strides, dv_strides, shape: *sizes, schedule };
        // SAFETY: `parts` has room for each pair, the strides stay inside of the gradients, and gradients that are not
        // wanted are null.
        unsafe { gpu.function(&ATTENTION_FEW_KEYS_FINISH, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        Ok(true)
    }
}
