//! Attention inside the segments of a packed row on compute capability 9.0: the host side of
//! `attention_varlen_hopper.cu`. A packed row has the tokens of several texts (segments) one after the other. `spans`
//! has the first key that each query sees, the end of the queries that see each key, and a counter.

use candle_core::DType;
use trainable_candle_cuda::kernels::attention_varlen_hopper::{
    ATTENTION_VARLEN_HOPPER_BACKWARD_W64, ATTENTION_VARLEN_HOPPER_BACKWARD_W128, ATTENTION_VARLEN_HOPPER_FINISH_W64,
    ATTENTION_VARLEN_HOPPER_FINISH_W128, ATTENTION_VARLEN_HOPPER_FORWARD_W64, ATTENTION_VARLEN_HOPPER_FORWARD_W128,
    ATTENTION_VARLEN_HOPPER_STATISTICS_W64, ATTENTION_VARLEN_HOPPER_STATISTICS_W128,
    AttentionVarlenHopperBackwardW64 as Backward, AttentionVarlenHopperFinishW64 as Finish,
    AttentionVarlenHopperForwardW64, AttentionVarlenHopperStatisticsW64 as Statistics, MODULE,
};
use trainable_candle_cuda::structs::{AttentionForwardMaps, AttentionShape};

use super::{Pass, VARLEN};
use crate::cuda::Gpu;
use crate::cuda::launch::{Kernel, Mut, Shape, empty, input, output, suffix};
use crate::cuda::tensor_map::Encoder;
use crate::ops::attention::cuda::hopper::{
    FEWEST_ROWS, KEYS, STORED_ROWS, THREADS, backward_maps, is_mapped, key_place, map,
};
use crate::ops::attention::cuda::{Heads, Width};
use crate::{Raw, Result};

/// Whether the kernels of this file support the operands. The first entry of `operands` has the operands with query
/// heads, the second those with key heads; `sizes` has the sizes of each entry.
fn fits(gpu: &Gpu, sizes: [&AttentionShape; 2], operands: [&[&Heads]; 2]) -> bool {
    gpu.runs_hopper_kernels()
        && !MODULE.image.is_empty()
        && sizes[0].queries >= FEWEST_ROWS
        && operands.iter().zip(sizes).all(|(heads, sizes)| heads.iter().all(|heads| is_mapped(heads, sizes)))
}

/// Writes the result to `o` and log Σ e^score of each query to `log_sums`. Returns false, and writes nothing, if only
/// the general kernels (`attention_varlen.cu`) support the operands. `sizes` has the number of query heads, of which
/// `group` share a key head.
pub fn forward(
    gpu: &Gpu,
    sizes: &AttentionShape,
    group: u32,
    widest: Width,
    [q, k, v, o]: [&Heads; 4],
    log_sums: Mut,
    spans: &Raw,
) -> Result<bool> {
    let (op, dtype) = (VARLEN.name, q.raw.dtype());
    let key_sizes = AttentionShape { heads: sizes.heads / group, ..*sizes };
    if !fits(gpu, [sizes, &key_sizes], [&[q, o], &[k, v]]) {
        return Ok(false);
    }
    // `queries` is the number of queries in a tile, `shared` the shared memory in bytes. The comment of the kernel
    // states these numbers.
    let (kernel, queries, threads, shared) = match widest {
        Width::W64 => (&ATTENTION_VARLEN_HOPPER_FORWARD_W64, 192, 512, 139_392),
        Width::W128 => (&ATTENTION_VARLEN_HOPPER_FORWARD_W128, 128, 384, 229_504),
    };
    let encoder = Encoder::new(op, dtype)?;
    // A tensor map describes an operand to the copy engine. The last two arguments of `map` are the number of rows of
    // the operand, and how many of them one copy takes.
    let maps = AttentionForwardMaps {
        q: map(&encoder, q, sizes, sizes.queries, STORED_ROWS)?,
        k: map(&encoder, k, &key_sizes, sizes.keys, KEYS)?,
        v: map(&encoder, v, &key_sizes, sizes.keys, KEYS)?,
        o: map(&encoder, o, sizes, sizes.queries, STORED_ROWS)?,
    };
    // The counter after the spans (two numbers for each token), with which the blocks take tiles.
    let taken = spans.narrow(0, 2 * sizes.queries as usize, 1)?;
    let blocks = (sizes.queries.div_ceil(queries) * sizes.heads).min(gpu.multiprocessors() as u32);
    let shape = Shape { grid: [blocks, 1, 1], block: [threads, 1, 1], shared };
    let (spans, taken) = (input(op, spans)?, output(op, &taken)?);
    let arguments = AttentionVarlenHopperForwardW64 { log_sums, spans, taken, maps, shape: *sizes, group };
    // SAFETY: the maps describe the tensors, there are spans for every token, and the counter after the spans is zero
    // before and after every launch.
    unsafe { gpu.function(kernel, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
    Ok(true)
}

/// The backward kernels for operands of at most `columns` columns. The kernels of both widths have the same arguments,
/// so the types of the arguments for 64 columns serve for 128 columns, too.
struct Form {
    columns: u32,
    /// The number of queries in a tile.
    queries: u32,
    statistics: &'static Kernel<Statistics>,
    /// The kernel and its shared memory in bytes, as the comment of the kernel states it.
    backward: (&'static Kernel<Backward>, u32),
    finish: &'static Kernel<Finish>,
}

static W64: Form = Form {
    columns: 64,
    queries: 128,
    statistics: &ATTENTION_VARLEN_HOPPER_STATISTICS_W64,
    backward: (&ATTENTION_VARLEN_HOPPER_BACKWARD_W64, 216_216),
    finish: &ATTENTION_VARLEN_HOPPER_FINISH_W64,
};

static W128: Form = Form {
    columns: 128,
    queries: 64,
    statistics: &ATTENTION_VARLEN_HOPPER_STATISTICS_W128,
    backward: (&ATTENTION_VARLEN_HOPPER_BACKWARD_W128, 214_680),
    finish: &ATTENTION_VARLEN_HOPPER_FINISH_W128,
};

impl Pass<'_> {
    /// Writes the gradients that are wanted. Returns false, and writes nothing, if only the general kernels support the
    /// operands.
    pub(super) fn on_hopper(&self, widest: Width) -> Result<bool> {
        let (op, gpu, dtype, sizes) = (self.attention.op, self.gpu, self.grad.raw.dtype(), &self.sizes);
        let ([q, k, v], grad, group) = (&self.inputs, &self.grad, self.group);
        let key_sizes = AttentionShape { heads: sizes.heads / group, ..*sizes };
        let [dq, dk, dv] = self.grads.each_ref().map(Option::as_ref);
        let with_query_heads: Vec<&Heads> = [q, &self.result, grad].into_iter().chain(dq).collect();
        let with_key_heads: Vec<&Heads> = [k, v].into_iter().chain(dk).chain(dv).collect();
        let form = match widest {
            Width::W64 => &W64,
            Width::W128 => &W128,
        };
        let (queries, columns) = (form.queries, form.columns);
        let (query_tiles, key_tiles) = (sizes.queries.div_ceil(queries), sizes.keys.div_ceil(KEYS));
        // A step of the backward pass is a tile of queries with a tile of keys. `steps` is the number of steps if every
        // query saw every key; the kernels require fewer than 2^31.
        let steps = u64::from(sizes.heads) * u64::from(query_tiles) * u64::from(key_tiles);
        // The caller has checked the alignment of the other operands.
        if !fits(gpu, [sizes, &key_sizes], [&with_query_heads, &with_key_heads])
            || !self.result.is_aligned()
            || steps >= 1 << 31
        {
            return Ok(false);
        }
        // `tiles` counts the tiles of queries of all heads. Each multiprocessor runs one block.
        let (tiles, blocks) = (sizes.heads * query_tiles, gpu.multiprocessors() as u32);
        let floats = |dims: [u32; 2]| empty(op, gpu, &dims.map(|size| size as usize), DType::F32);
        let numbers = |count: u32| empty(op, gpu, &[count as usize], DType::U32);
        // `plan` divides the work among the blocks; the first kernel computes it. It has, for one query head, the
        // number of steps that precede each tile of keys, then the number of all steps (`key_tiles` + 1 numbers in
        // all). After these it has the first item of each block. An item is a tile of keys of a key head. `turns` says
        // which block adds next to a tile of `sums`, the gradients of the queries; the first kernel sets it to zero.
        // `statistics` has two numbers for each query. A block may share its first and its last item with other blocks.
        // So `parts` has two parts for each block, each with the gradients of an item's keys, then of its values.
        let (plan, turns) = (numbers(key_tiles + 1 + blocks)?, numbers(tiles)?);
        let (statistics, sums) = (floats([tiles, 2 * queries])?, floats([tiles, queries * columns])?);
        let parts = floats([2 * blocks, 2 * KEYS * columns])?;
        let spans = input(op, self.spans)?;
        let arguments = Statistics {
            o: self.result.input(),
            d_o: grad.input(),
            log_sums: input(op, self.log_sums)?,
            spans,
            plan: output(op, &plan)?,
            statistics: output(op, &statistics)?,
            turns: output(op, &turns)?,
            o_strides: self.result.strides,
            do_strides: grad.strides,
            shape: *sizes,
            group,
            blocks,
        };
        // The first block computes the plan, the others the statistics of a tile each.
        let shape = Shape { grid: [1 + tiles, 1, 1], block: [THREADS, 1, 1], shared: 0 };
        // SAFETY: the strides stay inside of the tensors, which are of these sizes, and the spans stay inside of the
        // packed row.
        unsafe { gpu.function(form.statistics, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        let plan = input(op, &plan)?;
        // The kernel writes the gradients of keys and of values in any case: one that is not wanted goes to new memory.
        let places = [key_place(op, gpu, k, dk)?, key_place(op, gpu, v, dv)?];
        let encoder = Encoder::new(op, dtype)?;
        let maps = backward_maps(&encoder, [q, k, v, grad], places.each_ref(), [sizes, &key_sizes], queries)?;
        let (kernel, shared) = form.backward;
        // Three warpgroups.
        let threads = 384;
        let shape = Shape { grid: [blocks, 1, 1], block: [threads, 1, 1], shared };
        let arguments = Backward {
            statistics: input(op, &statistics)?,
            spans,
            plan,
            sums: output(op, &sums)?,
            turns: output(op, &turns)?,
            parts: output(op, &parts)?,
            maps,
            shape: *sizes,
            group,
            blocks,
        };
        // SAFETY: the maps describe the tensors, and `parts` has room for the parts of every thread block. Blocks wait
        // for one another, and all run at once because each has a multiprocessor.
        unsafe { gpu.function(kernel, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        let [(dq, dq_strides), (dk, dk_strides), (dv, dv_strides)] = [dq, dk, dv].map(Heads::place);
        // The first `tiles` thread blocks convert the gradients of the queries. The others sum the parts of the at most
        // `blocks` - 1 items that blocks share. Such an item has 2 · `KEYS` · `columns` numbers, and a thread block
        // sums 2048 of them (8 per thread). With 128 for `KEYS`, these are `columns` / 8 thread blocks for each item.
        let shape = Shape { grid: [tiles + (blocks - 1) * columns / 8, 1, 1], block: [THREADS, 1, 1], shared: 0 };
        let arguments = Finish {
            sums: input(op, &sums)?,
            parts: input(op, &parts)?,
            spans,
            plan,
            dq,
            dk,
            dv,
            dq_strides,
            dk_strides,
            dv_strides,
            shape: *sizes,
            group,
            blocks,
        };
        // SAFETY: as above; gradients that are not wanted are null.
        unsafe { gpu.function(form.finish, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        Ok(true)
    }
}
