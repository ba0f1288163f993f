//! Attention on compute capability 9.0, whose copy engine (TMA) loads the tiles: the host side of
//! `attention_hopper.cu`.

use candle_core::DType;
use trainable_candle_cuda::kernels::attention_hopper::{
    ATTENTION_HOPPER_BACKWARD_W64, ATTENTION_HOPPER_BACKWARD_W128, ATTENTION_HOPPER_FINISH_W64,
    ATTENTION_HOPPER_FINISH_W128, ATTENTION_HOPPER_FORWARD_W64, ATTENTION_HOPPER_FORWARD_W128,
    ATTENTION_HOPPER_STATISTICS_W64, ATTENTION_HOPPER_STATISTICS_W128, ATTENTION_HOPPER_SUM_W64,
    ATTENTION_HOPPER_SUM_W128, AttentionHopperBackwardW64 as Backward, AttentionHopperFinishW64 as Finish,
    AttentionHopperForwardW64 as Forward, AttentionHopperStatisticsW64 as Statistics, AttentionHopperSumW64 as Sum,
    MODULE,
};
use trainable_candle_cuda::structs::{
    AttentionBackwardMaps, AttentionForwardMaps, AttentionShape, Schedule, Strides, TensorMap,
};

use super::{Attention, Heads, SavedValues, Width, empty_like};
use crate::cuda::Gpu;
use crate::cuda::launch::{Const, Kernel, Mut, Shape, empty, input, optional_input, optional_output, output, suffix};
use crate::cuda::tensor_map::Encoder;
use crate::{Raw, Result};

/// These kernels take at least this many queries, and at least this many keys: with fewer, the general kernels
/// (`attention.cu`) are as fast.
pub(in crate::ops::attention) const FEWEST_ROWS: u32 = 256;
/// Keys in a tile.
pub(in crate::ops::attention) const KEYS: u32 = 128;
/// Rows that one copy stores to a result or a gradient. The forward pass also loads this many queries per copy.
pub(in crate::ops::attention) const STORED_ROWS: u32 = 64;
/// The time that it takes to add up the parts of split items, as a number of steps (see [`schedule`]).
const SPLIT_COST: u64 = 5;
/// Threads in a block of the backward kernels.
const BACKWARD_THREADS: u32 = 384;
/// Threads in a block of the kernels that compute statistics, sum parts or finish the backward pass.
pub(in crate::ops::attention) const THREADS: u32 = 256;

/// The kernels for heads of at most `columns` columns, and their constants, which the kernels' comments in
/// `attention_hopper.cu` state. The kernels for both widths take the same structures of arguments.
struct Form {
    columns: u32,
    /// Queries in a tile of the forward pass.
    forward_queries: u32,
    /// The kernel, its threads per block, and its bytes of shared memory.
    forward: (&'static Kernel<Forward>, u32, u32),
    sum: &'static Kernel<Sum>,
    /// Queries in a tile of the backward pass.
    backward_queries: u32,
    statistics: &'static Kernel<Statistics>,
    /// The kernel, and its bytes of shared memory.
    backward: (&'static Kernel<Backward>, u32),
    finish: &'static Kernel<Finish>,
}

static W64: Form = Form {
    columns: 64,
    forward_queries: 192,
    forward: (&ATTENTION_HOPPER_FORWARD_W64, 512, 139_360),
    sum: &ATTENTION_HOPPER_SUM_W64,
    backward_queries: 128,
    statistics: &ATTENTION_HOPPER_STATISTICS_W64,
    backward: (&ATTENTION_HOPPER_BACKWARD_W64, 216_216),
    finish: &ATTENTION_HOPPER_FINISH_W64,
};

static W128: Form = Form {
    columns: 128,
    forward_queries: 128,
    forward: (&ATTENTION_HOPPER_FORWARD_W128, 384, 229_472),
    sum: &ATTENTION_HOPPER_SUM_W128,
    backward_queries: 64,
    statistics: &ATTENTION_HOPPER_STATISTICS_W128,
    backward: (&ATTENTION_HOPPER_BACKWARD_W128, 214_680),
    finish: &ATTENTION_HOPPER_FINISH_W128,
};

impl Width {
    fn hopper(self) -> &'static Form {
        match self {
            Self::W64 => &W64,
            Self::W128 => &W128,
        }
    }
}

/// Distributes `items` items of `steps` steps each over `blocks` thread blocks. An item is a tile of queries (forward
/// pass) or of keys (backward pass) of a head; its steps are the tiles that the kernel loops over: of keys (forward) or
/// of queries (backward). The last items, which would leave blocks idle, are split if splitting saves more time than it
/// costs. The first `whole` items of the schedule are not split.
fn schedule(blocks: u32, items: u32, steps: u32) -> Schedule {
    // The steps of the busiest block without and with split items.
    let unsplit_steps = u64::from(items.div_ceil(blocks)) * u64::from(steps);
    let split_steps = (u64::from(items) * u64::from(steps)).div_ceil(u64::from(blocks));
    let whole = if unsplit_steps > split_steps + SPLIT_COST { items / blocks * blocks } else { items };
    Schedule { items, steps, whole, blocks }
}

/// Allocates the partial results of split items: two parts of `values` numbers per thread block, because a block does
/// parts of at most two items. Returns `None` if no item is split.
fn parts(op: &'static str, gpu: &Gpu, schedule: &Schedule, values: u32) -> Result<Option<Raw>> {
    let dims = [2 * schedule.blocks as usize, values as usize];
    (schedule.whole < schedule.items).then(|| empty(op, gpu, &dims, DType::F32)).transpose()
}

/// Whether a tensor map can describe the operand: the strides of a map must be above 0 and below 2^39 elements.
pub(in crate::ops::attention) fn is_mapped(heads: &Heads, sizes: &AttentionShape) -> bool {
    let Strides { batch, head, row } = heads.strides;
    // The stride of a dimension of size 1 has no meaning: `map` replaces it by the stride of rows. That stride must
    // always be valid, so it counts as that of a dimension of size 2.
    [(2, row), (sizes.heads, head), (sizes.batch, batch)]
        .iter()
        .all(|&(size, stride)| size == 1 || (1..1 << 39).contains(&stride))
}

/// A tensor map of the matrices of heads, which have `rows` rows; one copy takes `at_once` rows of 64 columns.
pub(in crate::ops::attention) fn map(
    encoder: &Encoder,
    heads: &Heads,
    sizes: &AttentionShape,
    rows: u32,
    at_once: u32,
) -> Result<TensorMap> {
    let Strides { batch, head, row } = heads.strides;
    // Distances are in bytes, with 2 bytes per element. The stride of a dimension of size 1 has no meaning, but must
    // not be zero.
    let distance = |size: u32, stride: u64| 2 * if size == 1 { row } else { stride };
    let distances = [2 * row, distance(sizes.heads, head), distance(sizes.batch, batch)];
    let shape = [sizes.width, rows, sizes.heads, sizes.batch].map(u64::from);
    encoder.strided(heads.address, shape, &distances, [64, at_once, 1, 1])
}

/// The destination of the gradient of the keys or values `like` in a backward kernel: `wanted`, or new memory if the
/// gradient is not wanted, because the kernel writes it in any case.
pub(in crate::ops::attention) fn key_place(
    op: &'static str,
    gpu: &Gpu,
    like: &Heads,
    wanted: Option<&Heads>,
) -> Result<Heads> {
    let width = like.raw.dims()[like.raw.rank() - 1];
    wanted.map_or_else(|| Heads::new(op, &empty_like(op, gpu, &like.raw, width)?), |wanted| Ok(wanted.clone()))
}

/// The maps of a backward pass over tiles of `queries` queries. `of_queries` has the number of query heads, `of_keys`
/// the number of key heads.
pub(in crate::ops::attention) fn backward_maps(
    encoder: &Encoder,
    [q, k, v, grad]: [&Heads; 4],
    [dk, dv]: [&Heads; 2],
    [of_queries, of_keys]: [&AttentionShape; 2],
    queries: u32,
) -> Result<AttentionBackwardMaps> {
    let query_rows = |heads: &Heads| map(encoder, heads, of_queries, of_queries.queries, queries);
    let key_rows = |heads: &Heads, at_once: u32| map(encoder, heads, of_keys, of_keys.keys, at_once);
    Ok(AttentionBackwardMaps {
        q: query_rows(q)?,
        k: key_rows(k, KEYS)?,
        v: key_rows(v, KEYS)?,
        d_o: query_rows(grad)?,
        dk: key_rows(dk, STORED_ROWS)?,
        dv: key_rows(dv, STORED_ROWS)?,
    })
}

impl Attention<'_> {
    /// The kernels of this file and their constants; `None` if these kernels do not support the operands. The caller
    /// has checked that the general tensor-core kernels support the operands. `widest` is the width of the kernels for
    /// the widest operand.
    fn hopper_form(
        &self,
        gpu: &Gpu,
        sizes: &AttentionShape,
        widest: Width,
        operands: &[&Heads],
    ) -> Option<&'static Form> {
        let blocks = gpu.multiprocessors() as u64;
        // No pass has more steps: its tiles have at least 64 rows.
        let steps = u64::from(sizes.queries.max(sizes.keys).div_ceil(64));
        let fits = gpu.runs_hopper_kernels()
            && !MODULE.image.is_empty()
            && sizes.is_causal == 0
            && sizes.queries.min(sizes.keys) >= FEWEST_ROWS
            // The kernels compute steps * blocks * blocks in 32 bits.
            && steps * blocks * blocks <= u64::from(u32::MAX)
            && operands.iter().all(|heads| is_mapped(heads, sizes));
        fits.then(|| widest.hopper())
    }

    /// Writes the result to `o`, and the log-sum of each query, log Σ e^score over its keys, to `log_sums`; returns
    /// false if these kernels do not support the operands.
    pub(super) fn hopper_forward(
        &self,
        gpu: &Gpu,
        sizes: &AttentionShape,
        widest: Width,
        [q, k, v, o]: [&Heads; 4],
        log_sums: Mut,
    ) -> Result<bool> {
        let (op, dtype) = (self.op, q.raw.dtype());
        let Some(form) = self.hopper_form(gpu, sizes, widest, &[q, k, v, o]) else { return Ok(false) };
        let (queries, columns) = (form.forward_queries, form.columns);
        let items = sizes.queries.div_ceil(queries) * sizes.batch * sizes.heads;
        let schedule = schedule(gpu.multiprocessors() as u32, items, sizes.keys.div_ceil(KEYS));
        // For each query of a tile: the sum of the softmax's weights, the base that was subtracted in their exponents,
        // and the result before its division by the sum.
        let parts = parts(op, gpu, &schedule, queries * (columns + 2))?;
        let encoder = Encoder::new(op, dtype)?;
        let maps = AttentionForwardMaps {
            q: map(&encoder, q, sizes, sizes.queries, STORED_ROWS)?,
            k: map(&encoder, k, sizes, sizes.keys, KEYS)?,
            v: map(&encoder, v, sizes, sizes.keys, KEYS)?,
            o: map(&encoder, o, sizes, sizes.queries, STORED_ROWS)?,
        };
        let (kernel, threads, shared) = form.forward;
        let shape = Shape { grid: [schedule.blocks, 1, 1], block: [threads, 1, 1], shared };
        let arguments =
            Forward { log_sums, parts: optional_output(op, parts.as_ref())?, maps, shape: *sizes, schedule };
        // SAFETY: the maps describe the tensors, and `parts` has room for the parts of every thread block.
        unsafe { gpu.function(kernel, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        if let Some(parts) = &parts {
            // Each of the 256 threads of a block sums 8 numbers.
            let blocks = (schedule.items - schedule.whole) * (queries * columns / 2048);
            let shape = Shape { grid: [blocks, 1, 1], block: [THREADS, 1, 1], shared: 0 };
            let parts = input(op, parts)?;
            let arguments = Sum { o: o.output(), log_sums, parts, o_strides: o.strides, shape: *sizes, schedule };
            // SAFETY: as above.
            unsafe { gpu.function(form.sum, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        }
        Ok(true)
    }

    /// Whether [`backward_into`](Self::backward_into) may write the gradients of q, k and v over q, k and v. It may if
    /// the kernels of this file run. They write the gradients of a tile of keys and values after the last read of the
    /// tile: if its item is not split, only one thread block reads the tile, and then writes its gradients; if the item
    /// is split, several blocks read the tile, and a later kernel writes its gradients. The gradients of queries are
    /// written after the last query is read. Other kernels read keys and values that may have been replaced by then.
    pub fn may_overwrite_inputs(
        &self,
        SavedValues { inputs: [q, k, v], mask, result, .. }: &SavedValues,
        grad: &Raw,
        places: [&Raw; 3],
    ) -> Result<bool> {
        let (gpu, rank) = (Gpu::of(self.op, q)?, q.rank());
        let sizes = self.sizes(q.dims()[rank - 1], v.dims()[rank - 1])?;
        // `Heads::new` below may copy; these kernels support neither a mask nor empty sizes.
        if mask.is_some() || [sizes.batch, sizes.heads, sizes.queries, sizes.keys].contains(&0) {
            return Ok(false);
        }
        let heads = [q, k, v, result, grad].into_iter().chain(places).map(|raw| Heads::new(self.op, raw));
        let heads = heads.collect::<Result<Vec<_>>>()?;
        let operands: Vec<&Heads> = heads.iter().collect();
        let widest = self.tensor_cores(&sizes, &operands, mask.as_ref());
        Ok(widest.is_some_and(|widest| self.hopper_form(gpu, &sizes, widest, &operands).is_some()))
    }

    /// Writes the gradients of q, k and v for which there is a destination; returns false if these kernels do not
    /// support the operands.
    pub(super) fn hopper_backward(
        &self,
        gpu: &Gpu,
        sizes: &AttentionShape,
        widest: Width,
        [q, k, v, o, grad]: [&Heads; 5],
        log_sums: Const,
        [dq, dk, dv]: [Option<&Heads>; 3],
    ) -> Result<bool> {
        let (op, dtype) = (self.op, q.raw.dtype());
        let operands: Vec<&Heads> = [q, k, v, o, grad].into_iter().chain([dq, dk, dv].into_iter().flatten()).collect();
        let Some(form) = self.hopper_form(gpu, sizes, widest, &operands) else { return Ok(false) };
        let (queries, columns) = (form.backward_queries, form.columns);
        let heads = sizes.batch * sizes.heads;
        let steps = sizes.queries.div_ceil(queries);
        let schedule = schedule(gpu.multiprocessors() as u32, sizes.keys.div_ceil(KEYS) * heads, steps);
        let tiles = (heads * steps) as usize;
        // The gradients of a tile of keys and of its values.
        let parts = parts(op, gpu, &schedule, 2 * KEYS * columns)?;
        // For each query, its log-sum and its sum of result · gradient.
        let statistics = empty(op, gpu, &[tiles, 2 * queries as usize], DType::F32)?;
        // The gradients of the queries of each tile, which the blocks of the backward kernel add up one after another:
        // `turns`, which the statistics kernel sets to zero, says whose turn it is. In a tile's first turn,
        // the block stores its sums instead of adding them, so `sums` needs no initial values.
        let sums = empty(op, gpu, &[tiles, (queries * columns) as usize], DType::F32)?;
        let turns = empty(op, gpu, &[tiles], DType::U32)?;
        let places = [key_place(op, gpu, k, dk)?, key_place(op, gpu, v, dv)?];
        let encoder = Encoder::new(op, dtype)?;
        // There are as many key heads as query heads.
        let maps = backward_maps(&encoder, [q, k, v, grad], places.each_ref(), [sizes, sizes], queries)?;
        let shape = Shape { grid: [tiles as u32, 1, 1], block: [THREADS, 1, 1], shared: 0 };
        let arguments = Statistics {
            o: o.input(),
            d_o: grad.input(),
            log_sums,
            statistics: output(op, &statistics)?,
            turns: output(op, &turns)?,
            o_strides: o.strides,
            do_strides: grad.strides,
            shape: *sizes,
        };
        // SAFETY: the strides stay inside of the tensors, which are of these sizes.
        unsafe { gpu.function(form.statistics, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        let (kernel, shared) = form.backward;
        let shape = Shape { grid: [schedule.blocks, 1, 1], block: [BACKWARD_THREADS, 1, 1], shared };
        let arguments = Backward {
            statistics: input(op, &statistics)?,
            sums: output(op, &sums)?,
            turns: output(op, &turns)?,
            parts: optional_output(op, parts.as_ref())?,
            maps,
            shape: *sizes,
            schedule,
        };
        // SAFETY: the maps describe the tensors, and `parts` has room for the parts of every thread block. Blocks wait
        // for one another, but all run at once because each has a multiprocessor.
        unsafe { gpu.function(kernel, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        let [(dq, dq_strides), (dk, dk_strides), (dv, dv_strides)] = [dq, dk, dv].map(Heads::place);
        // One block for each tile of queries converts its `sums` to dq. The other blocks sum the parts of split items:
        // each item has 2 · `KEYS` · `columns` numbers, and a block sums 2048 of them. With 128 for `KEYS`, these are
        // `columns` / 8 blocks for each item.
        let blocks = tiles as u32 + (schedule.items - schedule.whole) * columns / 8;
        let shape = Shape { grid: [blocks, 1, 1], block: [THREADS, 1, 1], shared: 0 };
        let arguments = Finish {
            sums: input(op, &sums)?,
            parts: optional_input(op, parts.as_ref())?,
            dq,
            dk,
            dv,
            dq_strides,
            dk_strides,
            dv_strides,
            shape: *sizes,
            schedule,
        };
        // SAFETY: as above; gradients that are not wanted are null.
        unsafe { gpu.function(form.finish, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_split_if_splitting_saves_more_than_it_costs() {
        // An H100 has 132 multiprocessors, and each has one block.
        let whole = |items, steps| schedule(132, items, steps).whole;
        // All blocks have the same number of items.
        assert_eq!(whole(264, 36), 264);
        // After 10 items per block, 10 items are left, which would leave most blocks idle.
        assert_eq!(whole(1330, 35), 1320);
        // There are fewer items than blocks.
        assert_eq!(whole(20, 32), 0);
        // Adding up the parts would take longer than blocks would be idle.
        assert_eq!(whole(640, 8), 640);
        assert_eq!(whole(1, 1), 1);
    }
}
