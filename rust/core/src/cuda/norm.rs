//! Layer, RMS and group norm.

use candle_core::DType;
use trainable_candle_cuda::modules::{GROUP_NORM, NORM};

use super::copy::{cast, contiguous};
use super::gpu::Gpu;
use super::launch::{Shape, accumulator, address, count32, empty, launch, optional, suffix, wide};
use crate::tape::Pending;
use crate::{Error, Raw, Result};

/// Scale and shift as kernels take them: both in the input's dtype, or both in f32.
struct Parameters {
    weight: Option<Raw>,
    bias: Option<Raw>,
    dtype: DType,
}

impl Parameters {
    fn new(input: DType, [weight, bias]: [Option<&Raw>; 2]) -> Result<Self> {
        let mixed = [weight, bias].into_iter().flatten().any(|parameter| parameter.dtype() != input);
        let dtype = if mixed { DType::F32 } else { input };
        let dense = |parameter: &Raw| contiguous(&cast(parameter, dtype)?);
        Ok(Self { weight: weight.map(dense).transpose()?, bias: bias.map(dense).transpose()?, dtype })
    }

    fn is_f32(&self) -> u32 {
        u32::from(self.dtype == DType::F32)
    }
}

/// The gradients of a norm that are wanted: of the input, of the scale and of the shift.
pub struct Gradients {
    pub input: Option<Raw>,
    pub weight: Option<Raw>,
    pub bias: Option<Raw>,
}

/// A norm of rows, as `kernels/norm.cu` has them.
#[derive(Clone, Copy)]
pub enum Kind {
    Layer,
    Rms,
    /// Layer norm with a scale, which is added to 1, and a shift for each sample of so many rows.
    Modulated {
        samples: usize,
        rows: usize,
    },
}

impl Kind {
    const fn centers(self) -> bool {
        !matches!(self, Self::Rms)
    }

    /// How many rows share a scale and a shift; kernels of the other kinds do not ask.
    fn sharing(self, op: &'static str) -> Result<u32> {
        if let Self::Modulated { rows, .. } = self { count32(op, rows) } else { Ok(1) }
    }

    /// How many pairs of scale and shift there are, and for how many of so many rows each.
    fn samples(self, op: &'static str, rows: usize) -> Result<[usize; 2]> {
        /// Blocks in the third dimension of a grid.
        const MOST: usize = 65_535;
        match self {
            Self::Modulated { samples, .. } if samples > MOST => {
                let message =
                    format!("a batch of {samples} is more than a GPU takes at once, expected up to {MOST}; split it");
                Err(Error::argument(op, message))
            }
            Self::Modulated { samples, rows } => Ok([samples, rows]),
            _ => Ok([1, rows]),
        }
    }
}

/// The launch of `kernels/norm.cu` over rows.
fn over_rows(rows: usize, len: usize, dtype: DType) -> Shape {
    const HELD: usize = 3;
    const THREADS: usize = 1 << 17;
    let shape = |held| Shape::teams(rows, len, held, dtype);
    let fits = |held: &usize| rows.saturating_mul(shape(*held).block[0] as usize) <= THREADS;
    shape((1..=HELD).find(fits).unwrap_or(HELD))
}

/// Where the gradient of an input goes: onto the one that it is added to, if that is only ours, else to a new tensor.
fn destination(op: &'static str, gpu: &Gpu, x: &Raw, before: Option<&Pending>) -> Result<Raw> {
    match before {
        Some(Pending { sum, owned: true }) => Ok(sum.clone()),
        _ => empty(op, gpu, x.dims(), x.dtype()),
    }
}

/// Rows that were normalised.
pub struct Rows {
    /// What they were before: the input, or its sum with another tensor.
    pub x: Raw,
    pub y: Raw,
    /// 1/√(var + eps) of each.
    pub rstd: Raw,
    /// The mean of each, if the norm takes it off.
    pub mean: Option<Raw>,
}

/// The normalised rows of a dense (rows, len), or of its sum with another.
pub fn rows(
    op: &'static str,
    kind: Kind,
    x: &Raw,
    residual: Option<&Raw>,
    [rows, len]: [usize; 2],
    parameters: [Option<&Raw>; 2],
    eps: f64,
) -> Result<Rows> {
    let gpu = Gpu::of(op, x)?;
    // What the backward pass could not do.
    kind.samples(op, rows)?;
    let parameters = Parameters::new(x.dtype(), parameters)?;
    let y = empty(op, gpu, x.dims(), x.dtype())?;
    let rstd = empty(op, gpu, &[rows], accumulator(x.dtype()))?;
    let mean = kind.centers().then(|| empty(op, gpu, &[rows], accumulator(x.dtype()))).transpose()?;
    let sum = residual.map(|_| empty(op, gpu, x.dims(), x.dtype())).transpose()?;
    if y.elem_count() > 0 {
        let name = match kind {
            Kind::Layer => "layer_norm_forward",
            Kind::Rms => "rms_norm_forward",
            Kind::Modulated { .. } => "modulated_layer_norm_forward",
        };
        let function = gpu.function(&NORM, name, suffix(op, x.dtype())?)?;
        let shape = over_rows(rows, len, x.dtype());
        let (weight, bias) = (optional(op, parameters.weight.as_ref())?, optional(op, parameters.bias.as_ref())?);
        let (from, to, rstds, means) =
            (address(op, x)?, address(op, &y)?, address(op, &rstd)?, optional(op, mean.as_ref())?);
        let (rows, len, sharing, is_f32) = (rows as u64, count32(op, len)?, kind.sharing(op)?, parameters.is_f32());
        let (residual, total) = (optional(op, residual)?, optional(op, sum.as_ref())?);
        // SAFETY: the kernel takes the input, what is added to it, its parameters, the results, their sizes and numbers.
        unsafe {
            launch!(
                op, gpu, function, shape, from, residual, total, weight, bias, to, means, rstds, rows, len, sharing,
                eps, is_f32
            )
        }?;
    }
    Ok(Rows { x: sum.unwrap_or_else(|| x.clone()), y, rstd, mean })
}

/// What the gradients of a norm are made from.
pub struct Saved<'a> {
    pub x: &'a Raw,
    pub grad: &'a Raw,
    /// If the norm takes it off.
    pub mean: Option<&'a Raw>,
    pub rstd: &'a Raw,
    pub weight: Option<&'a Raw>,
    pub bias: Option<&'a Raw>,
}

/// The gradients of [`rows`]; `wants` are those of input, scale and shift. That of the input is added to the dense gradient `before`.
pub fn rows_backward(
    op: &'static str,
    kind: Kind,
    saved: &Saved<'_>,
    [rows, len]: [usize; 2],
    wants: [bool; 3],
    before: Option<Pending>,
) -> Result<Gradients> {
    let Saved { x, grad, .. } = *saved;
    let gpu = Gpu::of(op, x)?;
    let dtype = x.dtype();
    let parameters = Parameters::new(dtype, [saved.weight, None])?;
    let (from, g, rstd) = (address(op, x)?, address(op, grad)?, address(op, saved.rstd)?);
    let (mean, weight) = (optional(op, saved.mean)?, optional(op, parameters.weight.as_ref())?);
    let (rows64, len32, is_f32) = (rows as u64, count32(op, len)?, parameters.is_f32());
    let mut input = None;
    if wants[0] {
        let dx = destination(op, gpu, x, before.as_ref())?;
        if dx.elem_count() > 0 {
            let name = match kind {
                Kind::Layer => "layer_norm_backward",
                Kind::Rms => "rms_norm_backward",
                Kind::Modulated { .. } => "modulated_layer_norm_backward",
            };
            let function = gpu.function(&NORM, name, suffix(op, dtype)?)?;
            let (before, to) = (optional(op, before.as_ref().map(|pending| &pending.sum))?, address(op, &dx)?);
            let (shape, sharing) = (over_rows(rows, len, dtype), kind.sharing(op)?);
            // SAFETY: the kernel takes what the gradient is made from and added to, the result and their sizes.
            unsafe {
                launch!(
                    op, gpu, function, shape, from, g, before, weight, mean, rstd, to, rows64, len32, sharing, is_f32
                )
            }?;
        }
        input = Some(dx);
    }
    if !(wants[1] || wants[2]) {
        return Ok(Gradients { input, weight: None, bias: None });
    }
    let [samples, rows] = kind.samples(op, rows)?;
    let pieces = rows.div_ceil(64).clamp(1, 128);
    let partials = empty(op, gpu, &[samples, pieces, 2, len], accumulator(dtype))?;
    if partials.elem_count() > 0 {
        let name = if kind.centers() { "layer_norm_affine" } else { "rms_norm_affine" };
        let function = gpu.function(&NORM, name, suffix(op, dtype)?)?;
        let columns = len.div_ceil(32 * wide(dtype)) as u32;
        let shape = Shape { grid: [columns, pieces as u32, samples as u32], block: [32, 8, 1], shared: 0 };
        let (to, rows) = (address(op, &partials)?, rows as u64);
        // SAFETY: as above.
        unsafe { launch!(op, gpu, function, shape, from, g, mean, rstd, to, rows, len32) }?;
    }
    let [weight, bias] = sum_affine(op, gpu, &partials, dtype, [wants[1], wants[2]])?;
    Ok(Gradients { input, weight, bias })
}

/// The gradients of scale and shift that are wanted, in the dtype of arithmetic, from partial sums (samples, pieces, 2, len) of inputs of `dtype`.
pub(super) fn sum_affine(
    op: &'static str,
    gpu: &Gpu,
    partials: &Raw,
    dtype: DType,
    wants: [bool; 2],
) -> Result<[Option<Raw>; 2]> {
    let (samples, pieces, _, len) = partials.dims4()?;
    let result = |wanted: bool| wanted.then(|| empty(op, gpu, &[samples, len], accumulator(dtype))).transpose();
    let sums = [result(wants[0])?, result(wants[1])?];
    if partials.elem_count() > 0 {
        let function = gpu.function(&NORM, "norm_affine_sum", suffix(op, dtype)?)?;
        let shape = Shape { grid: [len.div_ceil(32) as u32, 2, samples as u32], block: [32, 16, 1], shared: 0 };
        let (from, weight, bias) =
            (address(op, partials)?, optional(op, sums[0].as_ref())?, optional(op, sums[1].as_ref())?);
        // The sums stay in f32, where gradients of parameters are collected.
        let (pieces, len, is_f32) = (count32(op, pieces)?, count32(op, len)?, u32::from(dtype != DType::F64));
        // SAFETY: the kernel takes the partial sums, the results and their sizes.
        unsafe { launch!(op, gpu, function, shape, from, weight, bias, pieces, len, is_f32) }?;
    }
    Ok(sums)
}

/// The sizes of a group norm over (batch, positions, channels).
#[derive(Clone, Copy)]
pub struct Groups {
    pub batch: usize,
    pub positions: usize,
    pub channels: usize,
    pub groups: usize,
}

/// How `include/channels.cuh` splits the work.
struct Split {
    tiles: usize,
    pieces: usize,
    over_tensor: Shape,
    over_groups: Shape,
}

impl Groups {
    fn split(&self, dtype: DType) -> Split {
        const THREADS: usize = 320;
        let packs = self.channels.div_ceil(wide(dtype)).max(1);
        let tiles = packs.div_ceil(THREADS);
        let columns = packs.div_ceil(tiles);
        let lines = (THREADS / columns).max(1);
        let most = (256 / (self.batch * tiles).max(1)).max(1);
        let pieces = self.positions.div_ceil(8 * lines).clamp(1, most);
        let threads = 32 * (columns * lines).div_ceil(32) as u32;
        let over_tensor =
            Shape { grid: [(self.batch * pieces) as u32, tiles as u32, 1], block: [threads, 1, 1], shared: 0 };
        let groups = (self.batch * self.groups) as u32;
        let over_groups = Shape { grid: [groups, 1, 1], block: [128, 1, 1], shared: 0 };
        Split { tiles, pieces, over_tensor, over_groups }
    }

    fn partials(&self, op: &'static str, gpu: &Gpu, split: &Split, dtype: DType) -> Result<Raw> {
        empty(op, gpu, &[self.batch, split.tiles, self.groups, split.pieces, 2], accumulator(dtype))
    }
}

/// Group norm of a dense tensor, followed by SiLU if `silu`, with the mean and 1/√(var + eps) of each group.
pub fn groups(
    op: &'static str,
    silu: bool,
    x: &Raw,
    size: Groups,
    parameters: [Option<&Raw>; 2],
    eps: f64,
) -> Result<(Raw, Raw, Raw)> {
    let gpu = Gpu::of(op, x)?;
    let dtype = x.dtype();
    let parameters = Parameters::new(dtype, parameters)?;
    let y = empty(op, gpu, x.dims(), dtype)?;
    let statistic = || empty(op, gpu, &[size.batch, size.groups], accumulator(dtype));
    let (mean, rstd) = (statistic()?, statistic()?);
    if y.elem_count() == 0 {
        return Ok((y, mean, rstd));
    }
    let split = size.split(dtype);
    let partials = size.partials(op, gpu, &split, dtype)?;
    let suffix = suffix(op, dtype)?;
    let name = if silu { "group_norm_silu_forward" } else { "group_norm_forward" };
    let (from, to, parts) = (address(op, x)?, address(op, &y)?, address(op, &partials)?);
    let (means, rstds) = (address(op, &mean)?, address(op, &rstd)?);
    let (weight, bias) = (optional(op, parameters.weight.as_ref())?, optional(op, parameters.bias.as_ref())?);
    let [positions, channels, groups] =
        [count32(op, size.positions)?, count32(op, size.channels)?, count32(op, size.groups)?];
    let (pieces, tiles, is_f32) = (split.pieces as u32, split.tiles as u32, parameters.is_f32());
    let statistics = gpu.function(&GROUP_NORM, "group_norm_statistics", suffix)?;
    let moments = gpu.function(&GROUP_NORM, "group_norm_moments", suffix)?;
    let forward = gpu.function(&GROUP_NORM, name, suffix)?;
    // SAFETY: the kernels take the input, partial sums, statistics, parameters, the result and their sizes.
    unsafe {
        launch!(op, gpu, statistics, split.over_tensor, from, parts, positions, channels, groups, pieces)?;
        launch!(
            op,
            gpu,
            moments,
            split.over_groups,
            parts,
            means,
            rstds,
            positions,
            channels,
            groups,
            pieces,
            tiles,
            eps
        )?;
        launch!(
            op,
            gpu,
            forward,
            split.over_tensor,
            from,
            weight,
            bias,
            means,
            rstds,
            to,
            positions,
            channels,
            groups,
            pieces,
            is_f32
        )?;
    }
    Ok((y, mean, rstd))
}

/// The gradients of [`groups`]; `wants` are those of input, scale and shift. That of the input is added to the dense gradient `before`.
pub fn groups_backward(
    op: &'static str,
    silu: bool,
    saved: &Saved<'_>,
    size: Groups,
    wants: [bool; 3],
    before: Option<Pending>,
) -> Result<Gradients> {
    let Saved { x, grad, .. } = *saved;
    let gpu = Gpu::of(op, x)?;
    let dtype = x.dtype();
    let parameters = Parameters::new(dtype, [saved.weight, saved.bias])?;
    let (wants_input, wants_affine) = (wants[0], wants[1] || wants[2]);
    let dx = wants_input.then(|| destination(op, gpu, x, before.as_ref())).transpose()?;
    let split = size.split(dtype);
    let rows = size.batch * split.pieces;
    let affine = wants_affine.then(|| empty(op, gpu, &[1, rows, 2, size.channels], accumulator(dtype))).transpose()?;
    if x.elem_count() == 0 {
        let zeros = |wanted: bool| {
            wanted.then(|| super::copy::filled(x.device(), 0.0, &[size.channels], accumulator(dtype))).transpose()
        };
        return Ok(Gradients { input: dx, weight: zeros(wants[1])?, bias: zeros(wants[2])? });
    }
    let partials = size.partials(op, gpu, &split, dtype)?;
    let slopes = empty(op, gpu, &[size.batch, size.groups, 2], accumulator(dtype))?;
    let suffix = suffix(op, dtype)?;
    let (sums, backward) = if silu {
        ("group_norm_silu_sums", "group_norm_silu_backward")
    } else {
        ("group_norm_sums", "group_norm_backward")
    };
    let (from, g, parts) = (address(op, x)?, address(op, grad)?, address(op, &partials)?);
    let (means, rstds) = (optional(op, saved.mean)?, address(op, saved.rstd)?);
    let (weight, bias) = (optional(op, parameters.weight.as_ref())?, optional(op, parameters.bias.as_ref())?);
    let (slope, of_channels) = (address(op, &slopes)?, optional(op, affine.as_ref())?);
    let [positions, channels, groups] =
        [count32(op, size.positions)?, count32(op, size.channels)?, count32(op, size.groups)?];
    let (pieces, tiles, is_f32) = (split.pieces as u32, split.tiles as u32, parameters.is_f32());
    let sums = gpu.function(&GROUP_NORM, sums, suffix)?;
    // SAFETY: the kernels take what the gradients are made from, partial sums, the results and their sizes.
    unsafe {
        launch!(
            op,
            gpu,
            sums,
            split.over_tensor,
            from,
            g,
            weight,
            bias,
            means,
            rstds,
            parts,
            of_channels,
            positions,
            channels,
            groups,
            pieces,
            is_f32
        )?;
        if let Some(dx) = &dx {
            let joined = gpu.function(&GROUP_NORM, "group_norm_slopes", suffix)?;
            let backward = gpu.function(&GROUP_NORM, backward, suffix)?;
            let (before, to) = (optional(op, before.as_ref().map(|pending| &pending.sum))?, address(op, dx)?);
            launch!(
                op,
                gpu,
                joined,
                split.over_groups,
                parts,
                rstds,
                slope,
                positions,
                channels,
                groups,
                pieces,
                tiles
            )?;
            launch!(
                op,
                gpu,
                backward,
                split.over_tensor,
                from,
                g,
                before,
                weight,
                bias,
                means,
                rstds,
                slope,
                to,
                positions,
                channels,
                groups,
                pieces,
                is_f32
            )?;
        }
    }
    let [weight, bias] = match &affine {
        Some(affine) => sum_affine(op, gpu, affine, dtype, [wants[1], wants[2]])?,
        None => [None, None],
    };
    Ok(Gradients { input: dx, weight, bias })
}
