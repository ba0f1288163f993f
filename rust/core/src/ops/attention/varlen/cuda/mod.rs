//! Attention inside the segments of a packed row, on CUDA devices: the host side of `attention_varlen.cu`. A packed row
//! has the tokens of several texts (segments) one after the other; `rows` is the number of all tokens, and `cu_seqlens`
//! has the bounds of the segments. The host never reads these bounds: grids depend on sizes alone.

mod hopper;

use candle_core::DType;
use trainable_candle_cuda::kernels::attention_varlen::{
    ATTENTION_VARLEN_BACKWARD_W64, ATTENTION_VARLEN_BACKWARD_W128, ATTENTION_VARLEN_FORWARD_W64,
    ATTENTION_VARLEN_FORWARD_W128, ATTENTION_VARLEN_PLAIN_BACKWARD_KEY, ATTENTION_VARLEN_PLAIN_BACKWARD_QUERY,
    ATTENTION_VARLEN_PLAIN_BACKWARD_VALUE, ATTENTION_VARLEN_PLAIN_FORWARD, ATTENTION_VARLEN_SPANS,
    AttentionVarlenBackwardW64, AttentionVarlenForwardW64, AttentionVarlenPlainBackwardQuery,
    AttentionVarlenPlainForward, AttentionVarlenSpans,
};
use trainable_candle_cuda::structs::AttentionShape;

use super::{VARLEN, Varlen};
use crate::cuda::launch::{Kernel, Shape, accumulator, count32, empty, input, optional_output, output, suffix};
use crate::cuda::{Gpu, contiguous};
use crate::ops::attention::cpu::SavedValues;
use crate::ops::attention::cuda::{Attention, Heads, Width, empty_like};
use crate::ops::index::cuda::id_bytes;
use crate::{Raw, Result};

/// The number of thread blocks that keeps the multiprocessors busy although the work per block is uneven: the first
/// keys of a segment have the most queries. It is 8 for each of the 132 multiprocessors of an H100.
const BLOCKS: u32 = 1056;
/// Queries, or keys, of a thread block of the tensor core kernels.
const TILE: u32 = 64;
/// Threads in a block of the tensor core kernels.
const THREADS: u32 = 128;
/// Rows (queries or keys) and columns of the result of a thread block of the plain kernels.
const PLAIN_TILE: [u32; 2] = [32, 64];
/// Threads in a block of the plain kernels, and of the kernel that computes the spans.
const PLAIN_THREADS: u32 = 256;

/// The spans, as on the CPU: for each token the first key that its query sees; then for each token the end (exclusive)
/// of the queries that see its key. A query sees at most `window` keys, its own included. After the spans comes a
/// counter, initially zero, with which the blocks of the forward kernel for compute capability 9.0 distribute the work
/// among themselves. A bound that is out of order or range is reported on the device; the host reads the report later.
pub fn spans(op: &'static str, cu_seqlens: &Raw, rows: usize, window: Option<usize>) -> Result<Raw> {
    let gpu = Gpu::of(op, cu_seqlens)?;
    let spans = empty(op, gpu, &[2 * rows + 1], DType::U32)?;
    if rows == 0 {
        return Ok(spans);
    }
    let bounds = contiguous(cu_seqlens)?;
    // Thread i checks bound i, if there is one, and computes the spans of token i, if there is one.
    let threads = PLAIN_THREADS as usize;
    let shape = Shape::linear(op, rows.max(bounds.elem_count()).div_ceil(threads), PLAIN_THREADS)?;
    let arguments = AttentionVarlenSpans {
        bounds: input(op, &bounds)?,
        spans: output(op, &spans)?,
        // The address of the report.
        out_of_range: gpu.board().place(op),
        // The bytes of each bound: 4 for u32, 8 for i64.
        id_bytes: id_bytes(op, &bounds)?,
        count: count32(op, bounds.elem_count())?,
        rows: count32(op, rows)?,
        // Without a window, a query sees all keys up to its own.
        window: window.and_then(|window| u32::try_from(window).ok()).unwrap_or(u32::MAX),
    };
    // SAFETY: the tensors are dense and of these sizes. The spans stay inside of the packed row whatever the bounds
    // are.
    unsafe { gpu.function(&ATTENTION_VARLEN_SPANS, &[])?.launch(op, gpu, shape, arguments) }?;
    Ok(spans)
}

/// The result (heads, rows, width), and the log-sum-exp of the scores of each query (heads, rows), for operands (heads,
/// rows, width). k and v may have fewer heads than q: `varlen.group()` query heads share a key head.
pub fn forward(varlen: &Varlen, [q, k, v]: [&Raw; 3], spans: &Raw) -> Result<(Raw, Raw)> {
    let (op, dtype) = (VARLEN.name, q.dtype());
    let gpu = Gpu::of(op, q)?;
    // The shape of the scores: (heads, queries, keys).
    let scores = [varlen.heads, varlen.rows, varlen.rows];
    let attention = Attention { op, scores: &scores, scale: varlen.scale, is_causal: true };
    let width = q.dims()[2];
    let o = empty_like(op, gpu, q, width)?;
    let log_sums = empty(op, gpu, &scores[..2], accumulator(dtype))?;
    if log_sums.elem_count() == 0 {
        return Ok((o, log_sums));
    }
    // The width of queries and keys, and that of values.
    let sizes = attention.sizes(width, width)?;
    let group = count32(op, varlen.group())?;
    let [q, k, v, result] = [Heads::new(op, q)?, Heads::new(op, k)?, Heads::new(op, v)?, Heads::new(op, &o)?];
    let sums = output(op, &log_sums)?;
    let mask = None;
    // The widest head that the tensor core kernels for these operands support; `None` if no kernel supports them.
    if let Some(widest) = attention.tensor_cores(&sizes, &[&q, &k, &v, &result], mask) {
        // Returns early if the kernels for compute capability 9.0 support the operands: they have written the result.
        if hopper::forward(gpu, &sizes, group, widest, [&q, &k, &v, &result], sums, spans)? {
            return Ok((o, log_sums));
        }
        let spans = input(op, spans)?;
        // The kernels for both widths have the same parameters.
        let kernel = match widest {
            Width::W64 => &ATTENTION_VARLEN_FORWARD_W64,
            Width::W128 => &ATTENTION_VARLEN_FORWARD_W128,
        };
        let blocks = sizes.queries.div_ceil(TILE) * sizes.heads;
        let shape = Shape { grid: [blocks, 1, 1], block: [THREADS, 1, 1], shared: widest.forward_shared(gpu) };
        let arguments = AttentionVarlenForwardW64 {
            q: q.input(),
            k: k.input(),
            v: v.input(),
            o: result.output(),
            log_sums: sums,
            spans,
            q_strides: q.strides,
            k_strides: k.strides,
            v_strides: v.strides,
            o_strides: result.strides,
            shape: sizes,
            group,
        };
        // SAFETY: the strides stay inside of the tensors, which are of these sizes.
        unsafe { gpu.function(kernel, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        return Ok((o, log_sums));
    }
    let [rows, columns] = PLAIN_TILE;
    // At least one block per tile of queries, because the kernel also writes `log_sums`, even for a width of 0.
    let grid = [sizes.queries.div_ceil(rows) * sizes.heads, sizes.width.div_ceil(columns).max(1), 1];
    let spans = input(op, spans)?;
    let arguments = AttentionVarlenPlainForward {
        q: q.input(),
        k: k.input(),
        v: v.input(),
        o: result.output(),
        log_sums: sums,
        spans,
        q_strides: q.strides,
        k_strides: k.strides,
        v_strides: v.strides,
        o_strides: result.strides,
        shape: sizes,
        group,
    };
    let function = gpu.function(&ATTENTION_VARLEN_PLAIN_FORWARD, suffix(op, dtype)?)?;
    // SAFETY: as above.
    unsafe { function.launch(op, gpu, Shape { grid, block: [PLAIN_THREADS, 1, 1], shared: 0 }, arguments) }?;
    Ok((o, log_sums))
}

/// Those of the gradients of q, k and v that are `wanted`.
pub fn backward(
    varlen: &Varlen,
    saved: &SavedValues,
    spans: &Raw,
    grad: &Raw,
    wanted: [bool; 3],
) -> Result<[Option<Raw>; 3]> {
    let op = VARLEN.name;
    let gpu = Gpu::of(op, grad)?;
    let mut grads = [None, None, None];
    for (place, (input, wanted)) in grads.iter_mut().zip(saved.inputs.iter().zip(wanted)) {
        if wanted {
            *place = Some(empty_like(op, gpu, input, input.dims()[2])?);
        }
    }
    backward_into(varlen, saved, spans, grad, grads.each_ref().map(Option::as_ref))?;
    Ok(grads)
}

/// Writes the gradients of q, k and v to the tensors `places`. Where a place is `None`, writes no gradient. `grad` is
/// the gradient of the result.
pub fn backward_into(
    varlen: &Varlen,
    saved: &SavedValues,
    spans: &Raw,
    grad: &Raw,
    places: [Option<&Raw>; 3],
) -> Result<()> {
    let op = VARLEN.name;
    let gpu = Gpu::of(op, grad)?;
    let [q, k, v] = &saved.inputs;
    if q.elem_count() == 0 {
        return Ok(());
    }
    // The shape of the scores: (heads, queries, keys).
    let scores = [varlen.heads, varlen.rows, varlen.rows];
    let attention = Attention { op, scores: &scores, scale: varlen.scale, is_causal: true };
    let width = q.dims()[2];
    let mut grads = [None, None, None];
    // Only in this loop, `grad` is one of `grads`; elsewhere it is the gradient of the result.
    for (grad, place) in grads.iter_mut().zip(places) {
        *grad = place.map(|place| Heads::new(op, place)).transpose()?;
    }
    let pass = Pass {
        gpu,
        group: count32(op, varlen.group())?,
        sizes: attention.sizes(width, width)?,
        inputs: [Heads::new(op, q)?, Heads::new(op, k)?, Heads::new(op, v)?],
        result: Heads::new(op, &saved.result)?,
        grad: Heads::new(op, grad)?,
        log_sums: &saved.log_sums,
        spans,
        grads,
        attention,
    };
    let operands: Vec<&Heads> = pass.inputs.iter().chain([&pass.grad]).chain(pass.grads.iter().flatten()).collect();
    let mask = None;
    // The widest head that the tensor core kernels for these operands support; `None` if no kernel supports them.
    let widest = attention.tensor_cores(&pass.sizes, &operands, mask);
    // Returns early if the kernels for compute capability 9.0 support the operands: they have written the gradients.
    if let Some(widest) = widest
        && pass.on_hopper(widest)?
    {
        return Ok(());
    }
    // For each query, the sum of `result · grad` over the columns.
    let deltas = attention.deltas(gpu, &pass.sizes, &pass.result, &pass.grad)?;
    match widest {
        Some(widest) => pass.on_tensor_cores(widest, &deltas),
        None => pass.plain(&deltas),
    }
}

/// The operands of a backward pass.
struct Pass<'a> {
    attention: Attention<'a>,
    gpu: &'a Gpu,
    sizes: AttentionShape,
    /// The number of query heads that share a key head.
    group: u32,
    /// q, k and v.
    inputs: [Heads; 3],
    result: Heads,
    /// The gradient of the result.
    grad: Heads,
    log_sums: &'a Raw,
    spans: &'a Raw,
    /// Where the gradients of q, k and v are written; `None` for those that are not wanted.
    grads: [Option<Heads>; 3],
}

impl Pass<'_> {
    /// Writes the gradients with the general tensor core kernels.
    fn on_tensor_cores(&self, widest: Width, deltas: &Raw) -> Result<()> {
        let (op, gpu, dtype) = (self.attention.op, self.gpu, self.grad.raw.dtype());
        let ([q, k, v], grad) = (&self.inputs, &self.grad);
        let key_heads = self.sizes.heads / self.group;
        // The tiles of queries, and also those of keys: a packed row has as many keys as queries.
        let tiles = self.sizes.queries.div_ceil(TILE);
        // To fill the device, the query heads of a group are split into parts. Each part computes its own sums for the
        // gradients of k and v.
        let heads_per_part = self.group.div_ceil((BLOCKS / (tiles * key_heads)).clamp(1, self.group));
        let parts = self.group.div_ceil(heads_per_part);
        let sizes = AttentionShape { parts, ..self.sizes };
        let [(dq, dq_strides), (dk, dk_strides), (dv, dv_strides)] =
            self.grads.each_ref().map(|grad| Heads::place(grad.as_ref()));
        let wanted = self.grads.each_ref().map(Option::is_some);
        let partial = |wanted: bool| -> Result<Option<Raw>> {
            let dims = [parts, key_heads, sizes.keys, sizes.width].map(|size| size as usize);
            (wanted && parts > 1).then(|| empty(op, gpu, &dims, DType::F32)).transpose()
        };
        let (dk_parts, dv_parts) = (partial(wanted[1])?, partial(wanted[2])?);
        let wants_keys_or_values = wanted[1] || wanted[2];
        let key_blocks = if wants_keys_or_values { parts * tiles * key_heads } else { 0 };
        let query_blocks = if wanted[0] { tiles * sizes.heads } else { 0 };
        let grid = [key_blocks + query_blocks, 1, 1];
        let arguments = AttentionVarlenBackwardW64 {
            q: q.input(),
            k: k.input(),
            v: v.input(),
            d_o: grad.input(),
            log_sums: input(op, self.log_sums)?,
            delta: input(op, deltas)?,
            dq,
            dk,
            dv,
            dk_parts: optional_output(op, dk_parts.as_ref())?,
            dv_parts: optional_output(op, dv_parts.as_ref())?,
            spans: input(op, self.spans)?,
            q_strides: q.strides,
            k_strides: k.strides,
            v_strides: v.strides,
            do_strides: grad.strides,
            dq_strides,
            dk_strides,
            dv_strides,
            shape: sizes,
            group: self.group,
        };
        // The kernels for both widths have the same parameters.
        let kernel = match widest {
            Width::W64 => &ATTENTION_VARLEN_BACKWARD_W64,
            Width::W128 => &ATTENTION_VARLEN_BACKWARD_W128,
        };
        let shape = Shape { grid, block: [THREADS, 1, 1], shared: widest.backward_shared() };
        // SAFETY: the strides stay inside of the tensors, which are of these sizes; gradients that are not wanted are
        // null.
        unsafe { gpu.function(kernel, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
        if parts > 1 && wants_keys_or_values {
            // The gradients of k and v have as many heads as k and v.
            let sizes = AttentionShape { heads: key_heads, ..sizes };
            let places = [(dk, dk_strides), (dv, dv_strides)];
            self.attention.sum_parts(gpu, dtype, &sizes, [dk_parts.as_ref(), dv_parts.as_ref()], places)?;
        }
        Ok(())
    }

    /// Writes the gradients with the plain kernels, which support all operands.
    fn plain(&self, deltas: &Raw) -> Result<()> {
        // The three kernels have the same parameters. Each writes one gradient.
        const KERNELS: [&Kernel<AttentionVarlenPlainBackwardQuery>; 3] = [
            &ATTENTION_VARLEN_PLAIN_BACKWARD_QUERY,
            &ATTENTION_VARLEN_PLAIN_BACKWARD_KEY,
            &ATTENTION_VARLEN_PLAIN_BACKWARD_VALUE,
        ];
        let (op, gpu, sizes) = (self.attention.op, self.gpu, self.sizes);
        let ([q, k, v], grad) = (&self.inputs, &self.grad);
        for (index, (kernel, place)) in KERNELS.into_iter().zip(&self.grads).enumerate() {
            let Some(place) = place else { continue };
            let heads = if index == 0 { sizes.heads } else { sizes.heads / self.group };
            let [rows, columns] = PLAIN_TILE;
            // A packed row has as many keys as queries.
            let grid = [sizes.queries.div_ceil(rows) * heads, sizes.width.div_ceil(columns), 1];
            let arguments = AttentionVarlenPlainBackwardQuery {
                q: q.input(),
                k: k.input(),
                v: v.input(),
                d_o: grad.input(),
                log_sums: input(op, self.log_sums)?,
                delta: input(op, deltas)?,
                grad: place.output(),
                spans: input(op, self.spans)?,
                q_strides: q.strides,
                k_strides: k.strides,
                v_strides: v.strides,
                do_strides: grad.strides,
                grad_strides: place.strides,
                shape: sizes,
                group: self.group,
            };
            let function = gpu.function(kernel, suffix(op, grad.raw.dtype())?)?;
            // SAFETY: the strides stay inside of the tensors, which are of these sizes.
            unsafe { function.launch(op, gpu, Shape { grid, block: [PLAIN_THREADS, 1, 1], shared: 0 }, arguments) }?;
        }
        Ok(())
    }
}
