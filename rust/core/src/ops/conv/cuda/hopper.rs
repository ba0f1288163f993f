//! The host side of `conv_hopper.cu`: convolution on GPUs of compute capability 9.0, whose copy engine (TMA) loads the
//! windows, the pixels that each result pixel reads. A tensor map tells the copy engine where the windows are.

use candle_core::DType;
use trainable_candle_cuda::kernels::conv_hopper::{
    CONV2D_FORWARD_HOPPER_M128N128, CONV2D_FORWARD_HOPPER_M128N160, CONV2D_FORWARD_HOPPER_M256N128,
    CONV2D_FORWARD_HOPPER_M256N160, CONV2D_GRAD_INPUT_HOPPER_M128N128, CONV2D_GRAD_INPUT_HOPPER_M128N160,
    CONV2D_GRAD_INPUT_HOPPER_M256N128, CONV2D_GRAD_INPUT_HOPPER_M256N160, CONV2D_GRAD_WEIGHT_HOPPER_M64,
    CONV2D_GRAD_WEIGHT_HOPPER_M128, CONV2D_GRAD_WEIGHT_HOPPER_M192, Conv2dForwardHopperM128n128 as Forward,
    Conv2dGradInputHopperM128n128 as GradInput, Conv2dGradWeightHopperM64 as GradWeight, MODULE,
};
use trainable_candle_cuda::structs::Conv2dMaps;

use super::{Addend, BLOCKS, Operands, Places, STEP, Sizes, Sums, splits, sum_parts};
use crate::cuda::Gpu;
use crate::cuda::launch::{Address, Const, Kernel, Shape, accumulator, empty, optional_output, output, suffix};
use crate::cuda::tensor_map::{Encoder, NO_MAP, Windows};
use crate::{Error, Raw, Result};

/// Number of threads of a block: two groups of 128 threads multiply, and a third group copies.
const THREADS: u32 = 384;
/// The maximum number of parts that a [`Plan`] splits a sum into. More parts are not faster.
const MOST_SPLITS: usize = 32;
/// Bytes per microsecond that the kernel that adds up the parts reads and writes.
const SUM_RATE: f64 = 3e6;

/// The kernels of `conv.cu` are faster if the result has at most this many channels, or, for the gradient of the
/// weight, if the weight has at most this many output channels.
const FEW_CHANNELS: u32 = 16;

/// A size of tiles, the parts of the result that a block computes, for which there are kernels of the forward pass and
/// of the gradient of the input.
struct Tile {
    /// Number of pixels.
    rows: usize,
    /// Number of channels of the result.
    columns: usize,
    /// Microseconds that a block needs for [`STEP`] terms of the sums of a tile.
    cost: f64,
    /// The kernel of the forward pass, and the bytes of shared memory that a block of it needs (`conv_hopper.cu` says
    /// for what).
    forward: (&'static Kernel<Forward>, u32),
    /// The kernel of the gradient of the input, and its bytes of shared memory.
    grad_input: (&'static Kernel<GradInput>, u32),
}

static TILES: [Tile; 4] = [
    Tile {
        rows: 256,
        columns: 160,
        cost: 1.0,
        forward: (&CONV2D_FORWARD_HOPPER_M256N160, 213_120),
        grad_input: (&CONV2D_GRAD_INPUT_HOPPER_M256N160, 229_504),
    },
    Tile {
        rows: 256,
        columns: 128,
        cost: 0.97,
        forward: (&CONV2D_FORWARD_HOPPER_M256N128, 196_736),
        grad_input: (&CONV2D_GRAD_INPUT_HOPPER_M256N128, 196_736),
    },
    Tile {
        rows: 128,
        columns: 160,
        cost: 0.82,
        forward: (&CONV2D_FORWARD_HOPPER_M128N160, 221_312),
        grad_input: (&CONV2D_GRAD_INPUT_HOPPER_M128N160, 204_928),
    },
    Tile {
        rows: 128,
        columns: 128,
        cost: 0.75,
        forward: (&CONV2D_FORWARD_HOPPER_M128N128, 196_736),
        grad_input: (&CONV2D_GRAD_INPUT_HOPPER_M128N128, 196_736),
    },
];

/// The tiles and the grid of a launch.
struct Plan {
    tile: &'static Tile,
    /// Number of thread blocks for each phase and each part of the sums.
    blocks: usize,
    /// Number of parts that each sum is split into.
    splits: usize,
}

impl Plan {
    /// Returns the plan with the least estimated time for `phases` matrices of `pixels` rows and `results` columns.
    /// Each element of a matrix is a sum of `steps` · [`STEP`] terms.
    fn of(phases: usize, pixels: usize, results: usize, steps: usize) -> Self {
        let mut best: Option<(f64, Self)> = None;
        for tile in &TILES {
            // A cluster of two blocks computes two neighbouring tiles of pixels.
            let blocks = pixels.div_ceil(2 * tile.rows) * 2 * results.div_ceil(tile.columns);
            for splits in 1..=steps.clamp(1, MOST_SPLITS) {
                // `BLOCKS` blocks run at the same time.
                let rounds = (blocks * phases * splits).div_ceil(BLOCKS);
                let products = (rounds * steps.div_ceil(splits)) as f64 * tile.cost;
                // The bytes of the parts, in f32, and about as many for the result as for one part.
                let moved = if splits > 1 { (splits + 1) * 4 * phases * pixels * results } else { 0 };
                let time = products + moved as f64 / SUM_RATE;
                if best.as_ref().is_none_or(|(least, _)| time < *least) {
                    best = Some((time, Self { tile, blocks, splits }));
                }
            }
        }
        // Never `None`: there are tiles, and at least one number of splits.
        best.map_or(Self { tile: &TILES[0], blocks: 0, splits: 1 }, |(_, plan)| plan)
    }
}

/// The height or the width of a phase of the gradient of the input, as in `grad_input_axis` of the kernels. A phase is
/// the input pixels whose coordinates modulo the stride are equal, so that the same kernel taps contribute to them.
#[derive(Clone, Copy)]
struct Axis {
    /// Number of input pixels of the phase.
    pixels: i64,
    /// Number of kernel taps that contribute to these pixels.
    taps: i64,
    /// The pixel of the result that the first pixel of the phase reads at its first tap.
    origin: i64,
    /// The distance in the result from the pixel read at one tap to the pixel read at the next tap.
    tap_step: i64,
}

impl Sizes {
    /// The windows in the image that the pixels of the result read. As [`Windows`] requires, `lower` and `upper` are
    /// the positions of the first kernel tap in the first and in the last window; `upper` counts from the last pixel of
    /// the image.
    fn windows(&self) -> Windows {
        let bounds = |i: usize| {
            let padding = i64::from(self.padding[i]);
            (-padding, padding - i64::from(self.dilation[i]) * (i64::from(self.kernel[i]) - 1))
        };
        let [(lower_y, upper_y), (lower_x, upper_x)] = [bounds(0), bounds(1)];
        Windows { lower: [lower_y, lower_x], upper: [upper_y, upper_x], stride: self.stride }
    }

    /// The height (`i` = 0) or the width (`i` = 1) of a phase. `phase` is the coordinate of its pixels modulo the
    /// stride.
    fn grad_input_axis(&self, i: usize, phase: u32) -> Axis {
        let [size, kernel, stride, padding, dilation] =
            [self.input[i], self.kernel[i], self.stride[i], self.padding[i], self.dilation[i]].map(i64::from);
        let phase = i64::from(phase);
        let pixels = if phase < size { (size - phase + stride - 1) / stride } else { 0 };
        // Tap k contributes if phase + padding - k · dilation is a multiple of the stride: `first`, and then every
        // `every`-th tap.
        let every = (1..=stride).find(|taps| taps * dilation % stride == 0).unwrap_or(stride);
        let first = (0..every).find(|tap| (phase + padding - tap * dilation) % stride == 0);
        match first.filter(|&first| first < kernel) {
            Some(first) => Axis {
                pixels,
                taps: (kernel - first + every - 1) / every,
                origin: (phase + padding - first * dilation) / stride,
                tap_step: -(every * dilation / stride),
            },
            None => Axis { pixels, taps: 0, origin: 0, tap_step: 0 },
        }
    }

    /// The axes (height, width) of phase number `phase` of the gradient of the input.
    fn grad_input_axes(&self, phase: u32) -> [Axis; 2] {
        [self.grad_input_axis(0, phase / self.stride[1]), self.grad_input_axis(1, phase % self.stride[1])]
    }

    /// The windows in the gradient of the result that the pixels of a phase read; `None` if the phase has no pixels, or
    /// if no kernel tap contributes to its pixels.
    fn grad_windows(&self, phase: u32) -> Option<Windows> {
        let axes = self.grad_input_axes(phase);
        if axes.iter().any(|axis| axis.pixels == 0 || axis.taps == 0) {
            return None;
        }
        // `tap_step` is not positive, so the last tap reads the pixel with the smallest coordinate: `lower` for the
        // first pixel of the phase, lower + pixels - 1 for the last. `upper` is the latter minus the last coordinate of
        // the gradient, output - 1.
        let lower = axes.map(|axis| axis.origin + (axis.taps - 1) * axis.tap_step);
        let upper = [0, 1].map(|i| lower[i] + axes[i].pixels - i64::from(self.output[i]));
        Some(Windows { lower, upper, stride: [1, 1] })
    }

    /// Whether tensor maps can represent the windows' corners, in 8 bits with a sign, and the distances of the kernel
    /// taps from the first tap, in 8 bits without a sign.
    fn fit_in_maps(&self, windows: impl IntoIterator<Item = Windows>) -> bool {
        let is_in_range = |corner: &i64| (-128..=127).contains(corner);
        let do_taps_fit = |i: usize| u64::from(self.dilation[i]) * u64::from(self.kernel[i].saturating_sub(1)) <= 255;
        do_taps_fit(0) && do_taps_fit(1) && windows.into_iter().all(|w| w.lower.iter().chain(&w.upper).all(is_in_range))
    }
}

/// Whether the GPU and the operands meet the requirements that all kernels of this file share. Each of the numbers of
/// `channels` must be a multiple of 8. The module has no image in a build without code for compute capability 9.0.
fn runs_on(gpu: &Gpu, sizes: &Sizes, dtype: DType, channels: &[u32], addresses: &[Address]) -> bool {
    gpu.runs_hopper_kernels() && !MODULE.image.is_empty() && sizes.fits(dtype, channels, 8, addresses)
}

/// Computes y from dense operands, the image (`from`) and the weights, plus the addend. If y has another dtype than the
/// operands, there must be no addend. Returns false, without writing to y, if these kernels do not support the operands
/// or are slower than those of `conv.cu`.
pub(super) fn forward(
    op: &'static str,
    gpu: &Gpu,
    sizes: &Sizes,
    y: &Raw,
    operands: Operands,
    addend: Addend,
) -> Result<bool> {
    let Operands { dtype, from, weights, bias } = operands;
    let (to, windows) = (output(op, y)?, sizes.windows());
    // 8 is the largest stride that a tensor map can have.
    let fits = runs_on(gpu, sizes, dtype, &[sizes.channels], &[to.address, from.address, weights.address])
        && sizes.out_channels > FEW_CHANNELS
        && sizes.stride.iter().all(|&stride| stride <= 8)
        && sizes.fit_in_maps([windows]);
    if !fits {
        return Ok(false);
    }
    let (pixels, out) = (sizes.pixels(), sizes.out_channels as usize);
    let steps = (sizes.kernel[0] * sizes.kernel[1]) as usize * (sizes.channels as usize).div_ceil(STEP);
    let Plan { tile, blocks, splits } = Plan::of(1, pixels, out, steps);
    let encoder = Encoder::new(op, dtype)?;
    let [height, width] = sizes.input;
    // The two blocks of a cluster need the same weights; each copies one half of them. A copy has STEP channels of one
    // kernel tap, for half of a tile's output channels. The forward pass has one phase, so one map of windows. A copy
    // of windows has STEP channels of the pixels that one kernel tap reads for the `rows` pixels of a tile.
    let maps = Conv2dMaps {
        dense: encoder.boxes(weights.address, sizes.weight_shape(), [STEP as u32, 1, tile.columns as u32 / 2])?,
        windows: [
            encoder.windows(from.address, [sizes.batch, height, width, sizes.channels], windows, STEP, tile.rows)?,
            NO_MAP,
            NO_MAP,
            NO_MAP,
        ],
    };
    // The kernel writes y, or the parts of the sums if they are split; then `finish` adds the parts.
    let sums = Sums::new(op, gpu, sizes, y, splits)?;
    let Places { y, bias: y_bias, partials, sums_bias } = sums.places(op, &operands)?;
    let (kernel, shared) = tile.forward;
    let function = gpu.function(kernel, suffix(op, dtype)?)?;
    let launch = Shape { grid: [grid(op, blocks)?, 1, splits as u32], block: [THREADS, 1, 1], shared };
    let (Addend { rows, sharing }, shape) = (addend, sizes.shape());
    let arguments = Forward { y, bias: y_bias, addend: rows, partials, sums_bias, sharing, shape, maps };
    // SAFETY: the tensors are dense and of these sizes; `partials` has room for the sums of each split.
    unsafe { function.launch(op, gpu, launch, arguments) }?;
    sums.finish(op, gpu, sizes, (bias, addend))?;
    Ok(true)
}

/// Computes dx, the gradient of the input, from dense operands: the gradient of the result (`from`) and the weights.
/// Returns false, without writing to dx, if these kernels do not support the operands or are slower than those of
/// `conv.cu`.
pub(super) fn grad_input(
    op: &'static str,
    gpu: &Gpu,
    sizes: &Sizes,
    dx: &Raw,
    [from, weights]: [Const; 2],
) -> Result<bool> {
    let (dtype, to) = (dx.dtype(), output(op, dx)?);
    // `Conv2dMaps` has room for the maps of 2 x 2 phases, which is why strides are at most 2.
    let fits =
        runs_on(gpu, sizes, dtype, &[sizes.channels, sizes.out_channels], &[to.address, from.address, weights.address])
            && sizes.channels > FEW_CHANNELS
            && sizes.stride.iter().all(|&stride| stride <= 2)
            && sizes.fit_in_maps((0..sizes.phases()).filter_map(|phase| sizes.grad_windows(phase)));
    if !fits {
        return Ok(false);
    }
    let (pixels, channels) = (sizes.phase_pixels(), sizes.channels as usize);
    let phase_taps =
        (0..sizes.phases()).map(|phase| sizes.grad_input_axes(phase).iter().map(|axis| axis.taps).product());
    let taps = phase_taps.max().unwrap_or(0i64) as usize;
    let steps = taps * (sizes.out_channels as usize).div_ceil(STEP);
    let Plan { tile, blocks, splits } = Plan::of(sizes.phases() as usize, pixels, channels, steps);
    let encoder = Encoder::new(op, dtype)?;
    let [height, width] = sizes.output;
    // As in `forward`, each block of a cluster copies one half of the weights: here, the weights of one half of the
    // STEP output channels that a step sums over. A copy has STEP input channels of one kernel tap.
    let mut maps = Conv2dMaps {
        dense: encoder.boxes(weights.address, sizes.weight_shape(), [STEP as u32, 1, STEP as u32 / 2])?,
        windows: [NO_MAP; 4],
    };
    for (phase, map) in (0..sizes.phases()).zip(&mut maps.windows) {
        if let Some(windows) = sizes.grad_windows(phase) {
            *map = encoder.windows(
                from.address,
                [sizes.batch, height, width, sizes.out_channels],
                windows,
                STEP,
                tile.rows,
            )?;
        }
    }
    let partials = (splits > 1).then(|| empty(op, gpu, &[splits, dx.elem_count()], accumulator(dtype))).transpose()?;
    let parts = optional_output(op, partials.as_ref())?;
    let (kernel, shared) = tile.grad_input;
    let function = gpu.function(kernel, suffix(op, dtype)?)?;
    let grid = [grid(op, blocks)?, sizes.phases(), splits as u32];
    let shape = Shape { grid, block: [THREADS, 1, 1], shared };
    let arguments = GradInput { grad_x: to, partials: parts, shape: sizes.shape(), maps };
    // SAFETY: as in `forward`.
    unsafe { function.launch(op, gpu, shape, arguments) }?;
    if let Some(partials) = &partials {
        let bias_and_addend = (Const::NULL, Addend::NONE);
        let row_len = sizes.channels; // a row of dx is one pixel
        sum_parts(op, gpu, dx, partials, bias_and_addend, row_len, splits as u32)?;
    }
    Ok(true)
}

/// Computes dw, the gradient of the weight, from dense operands: the gradient of the result (`from`) and the images.
/// Returns false, without writing to dw, if these kernels do not support the operands or are slower than those of
/// `conv.cu`.
pub(super) fn grad_weight(
    op: &'static str,
    gpu: &Gpu,
    sizes: &Sizes,
    dw: &Raw,
    [from, images]: [Const; 2],
) -> Result<bool> {
    let (dtype, to, windows) = (dw.dtype(), output(op, dw)?, sizes.windows());
    // Strides are at most 8, as in `forward`.
    let fits =
        runs_on(gpu, sizes, dtype, &[sizes.channels, sizes.out_channels], &[to.address, from.address, images.address])
            && sizes.channels.is_multiple_of(STEP as u32)
            && sizes.out_channels > FEW_CHANNELS
            && sizes.stride.iter().all(|&stride| stride <= 8)
            && sizes.fit_in_maps([windows]);
    if !fits {
        return Ok(false);
    }
    let (pixels, window, out) = (sizes.pixels(), sizes.window(), sizes.out_channels as usize);
    // `rows` is the number of output channels of a cluster of two blocks. Blocks of the first kernel form no clusters;
    // there, it is the number of output channels of a block.
    let (kernel, shared, rows) = match out {
        ..=64 => (&CONV2D_GRAD_WEIGHT_HOPPER_M64, 204_928, 64),
        65..=256 => (&CONV2D_GRAD_WEIGHT_HOPPER_M128, 196_736, 256),
        _ => (&CONV2D_GRAD_WEIGHT_HOPPER_M192, 229_504, 384),
    };
    // A block computes 256 of the `window` weights of each of its output channels.
    let blocks_per_cluster = if rows == 64 { 1 } else { 2 };
    let blocks = out.div_ceil(rows) * blocks_per_cluster * window.div_ceil(256);
    let splits = splits(blocks, pixels);
    let encoder = Encoder::new(op, dtype)?;
    let [height, width] = sizes.input;
    let grad_shape = [u64::from(sizes.out_channels), 1, pixels as u64];
    // A step sums over STEP pixels. A copy has STEP channels of each.
    let maps = Conv2dMaps {
        dense: encoder.boxes(from.address, grad_shape, [STEP as u32, 1, STEP as u32])?,
        windows: [
            encoder.windows(images.address, [sizes.batch, height, width, sizes.channels], windows, STEP, STEP)?,
            NO_MAP,
            NO_MAP,
            NO_MAP,
        ],
    };
    let partials = (splits > 1).then(|| empty(op, gpu, &[splits, dw.elem_count()], accumulator(dtype))).transpose()?;
    let parts = optional_output(op, partials.as_ref())?;
    let function = gpu.function(kernel, suffix(op, dtype)?)?;
    let shape = Shape { grid: [grid(op, blocks)?, 1, splits as u32], block: [THREADS, 1, 1], shared };
    let arguments = GradWeight { grad_weight: to, partials: parts, shape: sizes.shape(), maps };
    // SAFETY: as in `forward`.
    unsafe { function.launch(op, gpu, shape, arguments) }?;
    if let Some(partials) = &partials {
        let bias_and_addend = (Const::NULL, Addend::NONE);
        let row_len = window as u32; // a row of dw is the weight of one output channel
        sum_parts(op, gpu, dw, partials, bias_and_addend, row_len, splits as u32)?;
    }
    Ok(true)
}

/// Returns `blocks` as the size of a grid in its first dimension.
fn grid(op: &'static str, blocks: usize) -> Result<u32> {
    u32::try_from(blocks).ok().filter(|&blocks| blocks <= i32::MAX as u32).ok_or_else(|| {
        Error::argument(op, format!("{blocks} thread blocks are more than a GPU can launch; use a smaller batch"))
    })
}
