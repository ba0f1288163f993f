//! Attention inside segments on compute capability 9.0: the host side of `attention_varlen_hopper.cu`.

use trainable_candle_cuda::kernels::attention_varlen_hopper::{
    ATTENTION_VARLEN_HOPPER_FORWARD_W64, ATTENTION_VARLEN_HOPPER_FORWARD_W128, AttentionVarlenHopperForwardW64, MODULE,
};
use trainable_candle_cuda::structs::{AttentionForwardMaps, AttentionShape};

use super::VARLEN;
use crate::cuda::Gpu;
use crate::cuda::launch::{Mut, Shape, input, output, suffix};
use crate::cuda::tensor_map::Encoder;
use crate::ops::attention::cuda::hopper::{FEWEST, KEYS, STORED, is_mapped, map};
use crate::ops::attention::cuda::{Heads, Width};
use crate::{Raw, Result};

/// The result and the logarithms of the sums, on tensor cores; false if only the general kernels take the operands.
pub fn forward(
    gpu: &Gpu,
    sizes: &AttentionShape,
    group: u32,
    form: Width,
    [q, k, v, o]: [&Heads; 4],
    log_sums: Mut,
    spans: &Raw,
) -> Result<bool> {
    let (op, dtype) = (VARLEN.name, q.raw.dtype());
    let of_keys = AttentionShape { heads: sizes.heads / group, ..*sizes };
    let operands = [(q, sizes), (k, &of_keys), (v, &of_keys), (o, sizes)];
    let fits = gpu.is_hopper()
        && !MODULE.image.is_empty()
        && sizes.queries >= FEWEST
        && operands.iter().all(|(heads, sizes)| is_mapped(heads, sizes));
    if !fits {
        return Ok(false);
    }
    let (kernel, queries, threads, shared) = match form {
        Width::W64 => (&ATTENTION_VARLEN_HOPPER_FORWARD_W64, 192, 512, 139_392),
        Width::W128 => (&ATTENTION_VARLEN_HOPPER_FORWARD_W128, 128, 384, 229_504),
    };
    let encoder = Encoder::new(op, dtype)?;
    let maps = AttentionForwardMaps {
        q: map(&encoder, q, sizes, sizes.queries, STORED)?,
        k: map(&encoder, k, &of_keys, sizes.keys, KEYS)?,
        v: map(&encoder, v, &of_keys, sizes.keys, KEYS)?,
        o: map(&encoder, o, sizes, sizes.queries, STORED)?,
    };
    let taken = spans.narrow(0, 2 * sizes.queries as usize, 1)?;
    let blocks = (sizes.queries.div_ceil(queries) * sizes.heads).min(gpu.multiprocessors() as u32);
    let shape = Shape { grid: [blocks, 1, 1], block: [threads, 1, 1], shared };
    let (spans, taken) = (input(op, spans)?, output(op, &taken)?);
    let arguments = AttentionVarlenHopperForwardW64 { log_sums, spans, taken, maps, shape: *sizes, group };
    // SAFETY: the maps describe the tensors, there are spans for every row, and the number after them is zero after
    // every launch.
    unsafe { gpu.function(kernel, suffix(op, dtype)?)?.launch(op, gpu, shape, arguments) }?;
    Ok(true)
}
