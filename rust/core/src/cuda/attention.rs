//! Attention without a matrix of all scores: on tensor cores where the operands allow it, else a plain form.

mod wide;

use candle_core::{DType, Layout};
use trainable_candle_cuda::modules::ATTENTION;

use super::copy::contiguous;
use super::gpu::Gpu;
use super::launch::{Address, Shape, accumulator, address, count32, empty, launch, optional, suffix};
use crate::raw::storage_identity;
use crate::{Error, Raw, Result};

/// What is computed: the shape of the scores (..., queries, keys), their scale, and whether a query sees the keys up to it alone.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    pub op: &'static str,
    pub scores: &'a [usize],
    pub scale: f64,
    pub is_causal: bool,
}

/// `AttentionShape` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Sizes {
    batch: u32,
    heads: u32,
    queries: u32,
    keys: u32,
    width: u32,
    value_width: u32,
    is_causal: u32,
    parts: u32,
    scale: f64,
}

/// Where the matrices of the heads lie, in elements.
#[repr(C)]
#[derive(Clone, Copy)]
struct Strides {
    batch: u64,
    head: u64,
    row: u64,
}

/// `Mask` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Mask {
    numbers: Address,
    batch: u64,
    head: u64,
    query: u64,
    key: u64,
}

/// A tensor (..., rows, width) as matrices of heads.
struct Heads {
    raw: Raw,
    address: Address,
    strides: Strides,
}

impl Heads {
    /// The tensor, copied if its elements do not lie side by side or its outer dimensions are not evenly spaced.
    fn new(op: &'static str, raw: &Raw) -> Result<Self> {
        let is_dense = |raw: &Raw| raw.dims().last() == Some(&1) || raw.stride().last() == Some(&1);
        let strides = Some(raw).filter(|raw| is_dense(raw)).and_then(|raw| head_strides(raw.layout()));
        let (raw, strides) = match strides {
            Some(strides) => (raw.clone(), strides),
            None => {
                let raw = contiguous(raw)?;
                let strides = head_strides(raw.layout()).unwrap_or(Strides { batch: 0, head: 0, row: 0 });
                (raw, strides)
            }
        };
        Ok(Self { address: address(op, &raw)?, raw, strides })
    }

    /// Whether rows can be read 16 bytes at a time.
    fn is_aligned(&self) -> bool {
        let Strides { batch, head, row } = self.strides;
        let wide = super::launch::wide(self.raw.dtype()) as u64;
        self.address.is_multiple_of(16) && [batch, head, row].iter().all(|stride| stride.is_multiple_of(wide))
    }
}

/// The strides of batch, head and row; nothing if the dimensions before the heads do not follow one another.
fn head_strides(layout: &Layout) -> Option<Strides> {
    let (dims, strides) = (layout.dims(), layout.stride());
    let rank = dims.len();
    let stride =
        |from_end: usize| rank.checked_sub(from_end).map_or(0, |i| if dims[i] == 1 { 0 } else { strides[i] as u64 });
    let mut batch: Option<u64> = None;
    let mut run = 1u64;
    for i in (0..rank.saturating_sub(3)).rev().filter(|&i| dims[i] != 1) {
        match batch {
            None => batch = Some(strides[i] as u64),
            Some(batch) if strides[i] as u64 == batch * run => {}
            Some(_) => return None,
        }
        run *= dims[i] as u64;
    }
    Some(Strides { batch: batch.unwrap_or(0), head: stride(3), row: stride(2) })
}

/// A new tensor that lies in memory as `like` does: heads next to one another where its are.
fn empty_like(op: &'static str, gpu: &Gpu, like: &Raw, width: usize) -> Result<Raw> {
    let mut dims = like.dims().to_vec();
    let rank = dims.len();
    dims[rank - 1] = width;
    if !crate::ops::attention::heads_lie_inside(like) {
        return empty(op, gpu, &dims, like.dtype());
    }
    dims.swap(rank - 3, rank - 2);
    Ok(empty(op, gpu, &dims, like.dtype())?.transpose(rank - 3, rank - 2)?)
}

impl Attention<'_> {
    fn sizes(&self, width: usize, value_width: usize) -> Result<Sizes> {
        let rank = self.scores.len();
        let heads = rank.checked_sub(3).map_or(1, |i| self.scores[i]);
        let batch = self.scores[..rank.saturating_sub(3)].iter().product();
        let count = |size| count32(self.op, size);
        Ok(Sizes {
            batch: count(batch)?,
            heads: count(heads)?,
            queries: count(self.scores[rank - 2])?,
            keys: count(self.scores[rank - 1])?,
            width: count(width)?,
            value_width: count(value_width)?,
            is_causal: u32::from(self.is_causal),
            parts: 1,
            scale: self.scale,
        })
    }

    /// The mask, one number a score, by its strides, and the tensor that it lies in.
    fn mask(&self, mask: Option<&Raw>) -> Result<(Mask, Option<Raw>)> {
        let Some(mask) = mask else { return Ok((Mask { numbers: 0, batch: 0, head: 0, query: 0, key: 0 }, None)) };
        let mask = mask.broadcast_as(self.scores)?;
        let strides = head_strides(mask.layout());
        let (mask, strides) = match strides {
            Some(strides) => (mask, strides),
            None => {
                let mask = contiguous(&mask)?;
                let strides = head_strides(mask.layout()).unwrap_or(Strides { batch: 0, head: 0, row: 0 });
                (mask, strides)
            }
        };
        let key = mask.stride().last().copied().unwrap_or(0) as u64;
        let Strides { batch, head, row } = strides;
        Ok((Mask { numbers: address(self.op, &mask)?, batch, head, query: row, key }, Some(mask)))
    }

    /// The name of the form on tensor cores, if the operands are such that it takes them.
    fn tensor_cores(&self, sizes: &Sizes, operands: &[&Heads], mask: Option<&Raw>) -> Option<Width> {
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

    /// The result and the logarithms of the sums.
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
        let sums = address(op, &log_sums)?;
        let strides = [q.strides, k.strides, v.strides, to.strides];
        let [qs, ks, vs, os] = strides;
        if let Some(form) = self.tensor_cores(&sizes, &[&q, &k, &v, &to], mask) {
            let function = gpu.function(&ATTENTION, form.forward(), suffix(op, dtype)?)?;
            let shared = match form {
                Width::W128 => 81_920,
                Width::W64 if gpu.is_hopper() => 73_728,
                Width::W64 => 40_960,
            };
            let blocks = sizes.queries.div_ceil(64) * heads;
            let shape = Shape { grid: [blocks, 1, 1], block: [128, 1, 1], shared };
            // SAFETY: the kernel takes the operands, the results, their strides, which stay inside, and sizes.
            unsafe {
                launch!(
                    op, gpu, function, shape, q.address, k.address, v.address, to.address, sums, qs, ks, vs, os, sizes
                )
            }?;
        } else {
            let (numbers, _mask) = self.mask(mask)?;
            let function = gpu.function(&ATTENTION, "attention_plain_forward", suffix(op, dtype)?)?;
            let grid = [sizes.queries.div_ceil(32) * heads, sizes.value_width.div_ceil(64).max(1), 1];
            let shape = Shape { grid, block: [256, 1, 1], shared: 0 };
            // SAFETY: as above, and the mask.
            unsafe {
                launch!(
                    op, gpu, function, shape, q.address, k.address, v.address, to.address, sums, qs, ks, vs, os,
                    numbers, sizes
                )
            }?;
        }
        Ok((o, log_sums))
    }

    /// The gradients of q, k and v that are wanted.
    pub fn backward(
        &self,
        inputs: [&Raw; 3],
        mask: Option<&Raw>,
        saved: [&Raw; 3],
        wanted: [bool; 3],
    ) -> Result<[Option<Raw>; 3]> {
        let gpu = Gpu::of(self.op, inputs[0])?;
        let mut grads = [None, None, None];
        for (grad, (input, wanted)) in grads.iter_mut().zip(inputs.into_iter().zip(wanted)) {
            if wanted {
                *grad = Some(empty_like(self.op, gpu, input, input.dims()[input.rank() - 1])?);
            }
        }
        self.backward_into(inputs, mask, saved, grads.each_ref().map(Option::as_ref))?;
        Ok(grads)
    }

    /// Writes the gradients of q, k and v for which there is a tensor, which may be a part of another.
    pub fn backward_into(
        &self,
        inputs: [&Raw; 3],
        mask: Option<&Raw>,
        [o, log_sums, grad]: [&Raw; 3],
        grads: [Option<&Raw>; 3],
    ) -> Result<()> {
        let op = self.op;
        let [q, k, v] = inputs;
        let gpu = Gpu::of(op, q)?;
        let (dtype, rank) = (q.dtype(), q.rank());
        let sizes = self.sizes(q.dims()[rank - 1], v.dims()[rank - 1])?;
        let heads = sizes.batch * sizes.heads;
        let wanted = grads.map(|grad| grad.is_some());
        if heads == 0 || sizes.queries == 0 || sizes.keys == 0 {
            // Without queries keys and values get nothing, and without keys queries get nothing.
            for grad in grads.into_iter().flatten() {
                super::copy::fill(grad, 0.0)?;
            }
            return Ok(());
        }
        let delta = empty(op, gpu, log_sums.dims(), accumulator(dtype))?;
        let [q, k, v] = [Heads::new(op, q)?, Heads::new(op, k)?, Heads::new(op, v)?];
        let (o, grad) = (Heads::new(op, o)?, Heads::new(op, grad)?);
        let results = [result_heads(op, grads[0])?, result_heads(op, grads[1])?, result_heads(op, grads[2])?];
        let (sums, deltas) = (address(op, log_sums)?, address(op, &delta)?);
        let [qs, ks, vs] = [q.strides, k.strides, v.strides];
        let rows = (sizes.queries as usize) * heads as usize;
        let shape = Shape::linear(op, rows.div_ceil(32), 256)?;
        let function = gpu.function(&ATTENTION, "attention_delta", suffix(op, dtype)?)?;
        // SAFETY: the kernel takes the result, its gradient, their strides and sizes, and writes one number a row.
        unsafe { launch!(op, gpu, function, shape, o.address, grad.address, deltas, o.strides, grad.strides, sizes) }?;
        let operands: Vec<&Heads> = [&q, &k, &v, &grad].into_iter().chain(results.iter().flatten()).collect();
        if let Some(form) = self.tensor_cores(&sizes, &operands, mask) {
            let place = |heads: &Option<Heads>| heads.as_ref().map_or((0, qs), |heads| (heads.address, heads.strides));
            let [(dq, dqs), (dk, dks), (dv, dvs)] = [place(&results[0]), place(&results[1]), place(&results[2])];
            let parts = self.parts(&sizes);
            let sizes = Sizes { parts, ..sizes };
            let others = wanted[1] || wanted[2];
            let partial = |wanted: bool| -> Result<Option<Raw>> {
                let dims = [parts as usize, heads as usize, sizes.keys as usize, sizes.width as usize];
                (wanted && parts > 1).then(|| empty(op, gpu, &dims, DType::F32)).transpose()
            };
            let (dk_parts, dv_parts) = (partial(wanted[1])?, partial(wanted[2])?);
            let (dk_part, dv_part) = (optional(op, dk_parts.as_ref())?, optional(op, dv_parts.as_ref())?);
            let key_blocks = if others { parts * sizes.keys.div_ceil(64) * heads } else { 0 };
            let query_blocks = if wanted[0] { sizes.queries.div_ceil(64) * heads } else { 0 };
            let shared = if form == Width::W128 { 99_328 } else { 50_176 };
            let shape = Shape { grid: [key_blocks + query_blocks, 1, 1], block: [128, 1, 1], shared };
            let function = gpu.function(&ATTENTION, form.backward(), suffix(op, dtype)?)?;
            // SAFETY: the kernel takes what the gradients are made from, those that are wanted, their strides and sizes.
            unsafe {
                launch!(
                    op,
                    gpu,
                    function,
                    shape,
                    q.address,
                    k.address,
                    v.address,
                    grad.address,
                    sums,
                    deltas,
                    dq,
                    dk,
                    dv,
                    dk_part,
                    dv_part,
                    qs,
                    ks,
                    vs,
                    grad.strides,
                    dqs,
                    dks,
                    dvs,
                    sizes
                )?;
                if parts > 1 && others {
                    let function = gpu.function(&ATTENTION, "attention_sum_parts", suffix(op, dtype)?)?;
                    let elements = heads as usize * (sizes.keys * sizes.width) as usize;
                    let shape = Shape { grid: [elements.div_ceil(1024) as u32, 2, 1], block: [256, 1, 1], shared: 0 };
                    launch!(op, gpu, function, shape, dk_part, dv_part, dk, dv, dks, dvs, sizes)?;
                }
            }
            return Ok(());
        }
        let (numbers, _mask) = self.mask(mask)?;
        const NAMES: [&str; 3] =
            ["attention_plain_backward_query", "attention_plain_backward_key", "attention_plain_backward_value"];
        for (i, result) in results.iter().enumerate() {
            let Some(result) = result else { continue };
            let rows = if i == 0 { sizes.queries } else { sizes.keys };
            let columns = if i == 2 { sizes.value_width } else { sizes.width };
            if columns == 0 {
                continue;
            }
            let function = gpu.function(&ATTENTION, NAMES[i], suffix(op, dtype)?)?;
            let grid = [rows.div_ceil(32) * heads, columns.div_ceil(64), 1];
            let shape = Shape { grid, block: [256, 1, 1], shared: 0 };
            // SAFETY: as above, and the mask.
            unsafe {
                launch!(
                    op,
                    gpu,
                    function,
                    shape,
                    q.address,
                    k.address,
                    v.address,
                    grad.address,
                    sums,
                    deltas,
                    result.address,
                    qs,
                    ks,
                    vs,
                    grad.strides,
                    result.strides,
                    numbers,
                    sizes
                )
            }?;
        }
        Ok(())
    }

    /// Into how many ranges of queries the gradients of few keys are split, so that they fill the device.
    fn parts(&self, sizes: &Sizes) -> u32 {
        const BLOCKS: u32 = 396;
        let blocks = sizes.keys.div_ceil(64) * sizes.batch * sizes.heads;
        (BLOCKS / blocks.max(1)).clamp(1, sizes.queries.div_ceil(256).max(1))
    }
}

/// Where a gradient is written, which must be in place.
fn result_heads(op: &'static str, grad: Option<&Raw>) -> Result<Option<Heads>> {
    let Some(grad) = grad else { return Ok(None) };
    let heads = Heads::new(op, grad)?;
    if storage_identity(&heads.raw).0 != storage_identity(grad).0 {
        return Err(Error::shape(
            op,
            format!("a gradient has strides {:?}, expected rows of neighbours", grad.stride()),
        ));
    }
    Ok(Some(heads))
}

/// The widest head of a form on tensor cores.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Width {
    W64,
    W128,
}

impl Width {
    const fn forward(self) -> &'static str {
        match self {
            Self::W64 => "attention_forward_w64",
            Self::W128 => "attention_forward_w128",
        }
    }

    const fn backward(self) -> &'static str {
        match self {
            Self::W64 => "attention_backward_w64",
            Self::W128 => "attention_backward_w128",
        }
    }
}
