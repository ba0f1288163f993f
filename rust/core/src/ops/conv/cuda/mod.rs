//! Convolution of channels-last images. Pointwise convolutions are matrix products. Kernels for tensor cores compute
//! the f16 and bf16 convolutions whose sizes and addresses they support. They also compute f32 forward passes, if
//! products are computed [in pairs](crate::compute::with_bf16_pairs) of bf16 numbers. Plain kernels compute all other
//! convolutions.

mod add;
mod hopper;
pub mod pairs;

use candle_core::DType;
use trainable_candle_cuda::kernels::conv::{
    CONV2D_FORWARD_DIRECT, CONV2D_FORWARD_M64N64, CONV2D_FORWARD_M64N64V4, CONV2D_FORWARD_M128N16,
    CONV2D_FORWARD_M128N128, CONV2D_FORWARD_PLAIN, CONV2D_GRAD_INPUT_DIRECT, CONV2D_GRAD_INPUT_M64N64,
    CONV2D_GRAD_INPUT_M64N64V4, CONV2D_GRAD_INPUT_M128N16, CONV2D_GRAD_INPUT_M128N128, CONV2D_GRAD_INPUT_PLAIN,
    CONV2D_GRAD_WEIGHT_DIRECT, CONV2D_GRAD_WEIGHT_M16, CONV2D_GRAD_WEIGHT_M64, CONV2D_GRAD_WEIGHT_M128,
    CONV2D_GRAD_WEIGHT_PLAIN, CONV2D_SUM, Conv2dForwardM64n64, Conv2dForwardPlain, Conv2dGradInputM64n64,
    Conv2dGradInputPlain, Conv2dGradWeightM64, Conv2dGradWeightPlain, Conv2dSum,
};
use trainable_candle_cuda::structs::Conv2dShape;

use self::add::Addend;
pub(super) use self::add::forward_add;
use super::CONV2D;
use super::geometry::{Conv2dOptions, Geometry};
use crate::cuda::launch::{
    Address, Const, Kernel, Mut, Shape, accumulator, count32, empty, input, optional_input, optional_output, output,
    suffix,
};
use crate::cuda::{Gpu, contiguous, fill, matmul};
use crate::ops::linear;
use crate::product::uses_pairs;
use crate::{Raw, Result};

/// The sizes of a [`Geometry`] in 32 bits, as kernels read them. Arrays are [height, width].
#[derive(Clone, Copy, Debug)]
struct Sizes {
    pub batch: u32,
    pub input: [u32; 2],
    pub channels: u32,
    pub kernel: [u32; 2],
    pub output: [u32; 2],
    pub out_channels: u32,
    pub stride: [u32; 2],
    pub padding: [u32; 2],
    pub dilation: [u32; 2],
    pub groups: u32,
}

/// The number of thread blocks that fills a large GPU. Sums are split into parts to bring a launch up to about this
/// number. The number does not depend on the GPU, so that GPUs that run the same kernels split the sums in the same way
/// and compute the same results.
const BLOCKS: usize = 132;
/// The maximum size of a grid in its second dimension, and in its third. If there are more groups than this, blocks of
/// the plain kernels compute several.
const MAX_GRID_YZ: u32 = 65_535;
/// Number of terms of each sum that a block adds at a time.
const STEP: usize = 64;

/// A kernel for tensor cores, and the tiles of the result that its blocks compute: `rows` pixels by `columns` channels.
/// Kernels of one pass for different tiles take the same arguments, the structure `A`.
struct Tile<A: 'static> {
    kernel: &'static Kernel<A>,
    rows: usize,
    columns: usize,
    /// Bytes of shared memory of a block, as `cuda/kernels/conv.cu` states them.
    shared: u32,
}

impl Sizes {
    fn of(geometry: &Geometry) -> Result<Self> {
        let count = |size| count32(CONV2D.name, size);
        let pair = |[height, width]: [usize; 2]| -> Result<[u32; 2]> { Ok([count(height)?, count(width)?]) };
        let Conv2dOptions { stride, padding, dilation, groups } = geometry.options;
        Ok(Self {
            batch: count(geometry.batch)?,
            input: pair(geometry.input)?,
            channels: count(geometry.channels)?,
            kernel: pair(geometry.kernel)?,
            output: pair(geometry.output)?,
            out_channels: count(geometry.out_channels)?,
            stride: pair(stride)?,
            padding: pair(padding)?,
            dilation: pair(dilation)?,
            groups: count(groups)?,
        })
    }

    /// The sizes as an argument of the kernels.
    const fn shape(&self) -> Conv2dShape {
        Conv2dShape {
            batch: self.batch,
            height: self.input[0],
            width: self.input[1],
            channels: self.channels,
            kernel_height: self.kernel[0],
            kernel_width: self.kernel[1],
            out_height: self.output[0],
            out_width: self.output[1],
            out_channels: self.out_channels,
            stride_height: self.stride[0],
            stride_width: self.stride[1],
            padding_height: self.padding[0],
            padding_width: self.padding[1],
            dilation_height: self.dilation[0],
            dilation_width: self.dilation[1],
            groups: self.groups,
        }
    }

    /// The number of pixels of the result, of all images together.
    fn pixels(&self) -> usize {
        [self.batch, self.output[0], self.output[1]].map(|size| size as usize).iter().product()
    }

    /// The number of terms of each sum of the forward pass: the elements of a window, in the channels of one group.
    fn window(&self) -> usize {
        [self.kernel[0], self.kernel[1], self.channels / self.groups].map(|size| size as usize).iter().product()
    }

    /// The number of phases of the input's gradient (see [`phase_pixels`](Self::phase_pixels)).
    fn phases(&self) -> u32 {
        self.stride[0] * self.stride[1]
    }

    /// The maximum number of input pixels of a phase, of all images together. The pixels of a phase have the same
    /// (line, column) modulo the stride, so the same kernel taps contribute to their gradients.
    fn phase_pixels(&self) -> usize {
        let along = |i: usize| self.input[i].div_ceil(self.stride[i]) as usize;
        self.batch as usize * along(0) * along(1)
    }

    /// The numbers of input and output channels of a group.
    fn group_channels(&self) -> [usize; 2] {
        [self.channels, self.out_channels].map(|channels| (channels / self.groups) as usize)
    }

    /// Dimensions of the weight, the innermost first: channels, kernel taps, output channels.
    fn weight_shape(&self) -> [u64; 3] {
        let taps = u64::from(self.kernel[0]) * u64::from(self.kernel[1]);
        [u64::from(self.channels), taps, u64::from(self.out_channels)]
    }

    /// Whether there are several groups, and each has fewer than 8 input or output channels, too few for tiles. Kernels
    /// without tiles then compute each element of the result separately.
    fn is_direct(&self) -> bool {
        self.groups > 1 && self.group_channels().iter().any(|&channels| channels < 8)
    }

    /// Whether the tensor-core kernels support the operands; each of the numbers of `channels` must be a multiple of
    /// `multiple`.
    fn fits(&self, dtype: DType, channels: &[u32], multiple: u32, addresses: &[Address]) -> bool {
        matches!(dtype, DType::F16 | DType::BF16)
            && self.groups == 1
            && self.kernel.iter().all(|&size| size <= 16)
            && channels.iter().all(|channels| channels.is_multiple_of(multiple))
            && addresses.iter().all(|address| address.is_multiple_of(16))
    }
}

/// Returns the number of parts that each sum of `length` terms is split into. If there are several parts, then `tiles`
/// times this number is at most [`BLOCKS`], and parts have at least 8 · [`STEP`] terms on average.
fn splits(tiles: usize, length: usize) -> usize {
    (BLOCKS / tiles.max(1)).clamp(1, (length / (8 * STEP)).max(1))
}

/// Adds the `splits` parts in `partials`, then `bias` and `addend`, and writes the sums to `y`, whose rows have
/// `columns` elements. `bias` may be null.
fn sum_parts(
    op: &'static str,
    gpu: &Gpu,
    y: &Raw,
    partials: &Raw,
    (bias, addend): (Const, Addend),
    columns: u32,
    splits: u32,
) -> Result<()> {
    let function = gpu.function(&CONV2D_SUM, suffix(op, y.dtype())?)?;
    let count = y.elem_count();
    // Four elements for each of a block's 256 threads.
    let shape = Shape { grid: [count.div_ceil(1024).clamp(1, 1 << 20) as u32, 1, 1], block: [256, 1, 1], shared: 0 };
    let (y, partials) = (output(op, y)?, input(op, partials)?);
    let Addend { rows: addend, sharing } = addend;
    let arguments = Conv2dSum { y, partials, bias, addend, count: count as u64, columns, splits, sharing };
    // SAFETY: each of the `splits` parts has as many elements as `y`, the bias, if any, has `columns` elements, and the
    // addend, if any, has one row for every `sharing` rows of `y`.
    unsafe { function.launch(op, gpu, shape, arguments) }
}

/// Dense operands of `dtype`: the image `from` and the weight. The bias has the dtype of the result, and is null if
/// there is none.
#[derive(Clone, Copy)]
struct Operands {
    dtype: DType,
    from: Const,
    weights: Const,
    bias: Const,
}

/// Where a kernel of the forward pass writes its sums, and the biases that it adds; biases may be null. If `partials`
/// is null, the kernel writes the sums plus `bias` to `y`, in the operands' dtype. Otherwise the kernel writes the sums
/// plus `sums_bias` to `partials`, in f32.
struct Places {
    y: Mut,
    bias: Const,
    partials: Mut,
    sums_bias: Const,
}

/// The tensors that a forward pass on tensor cores writes.
struct Sums<'a> {
    /// The result.
    y: &'a Raw,
    /// The parts of the sums in f32, (splits, pixels, output channels), if sums are split.
    partials: Option<Raw>,
    splits: usize,
}

impl<'a> Sums<'a> {
    fn new(op: &'static str, gpu: &Gpu, sizes: &Sizes, y: &'a Raw, splits: usize) -> Result<Self> {
        let dims = [splits, sizes.pixels(), sizes.out_channels as usize];
        let partials = (splits > 1).then(|| empty(op, gpu, &dims, DType::F32)).transpose()?;
        Ok(Self { y, partials, splits })
    }

    /// Returns the kernel's arguments. If sums are not split and the operands have a narrower dtype than `y`, which is
    /// then f32, the argument `partials` is the tensor `y`.
    fn places(&self, op: &'static str, operands: &Operands) -> Result<Places> {
        let y = if self.y.dtype() == operands.dtype { output(op, self.y)? } else { Mut::NULL };
        let without_bias = Places { y, bias: Const::NULL, partials: Mut::NULL, sums_bias: Const::NULL };
        Ok(match &self.partials {
            Some(partials) => Places { partials: output(op, partials)?, ..without_bias },
            None if y != Mut::NULL => Places { bias: operands.bias, ..without_bias },
            None => Places { partials: output(op, self.y)?, sums_bias: operands.bias, ..without_bias },
        })
    }

    /// If sums are split, adds up the parts, the bias and the addend.
    fn finish(&self, op: &'static str, gpu: &Gpu, sizes: &Sizes, bias_and_addend: (Const, Addend)) -> Result<()> {
        let Some(partials) = &self.partials else { return Ok(()) };
        sum_parts(op, gpu, self.y, partials, bias_and_addend, sizes.out_channels, self.splits as u32)
    }
}

impl Geometry {
    /// The image or the result of a pointwise convolution as a matrix (pixels, channels).
    fn as_rows(&self, image: &Raw) -> Result<Raw> {
        Ok(image.reshape((self.pixels(), image.dims()[3]))?)
    }

    /// The weight of a pointwise convolution as a matrix (out channels, channels).
    fn as_matrix(&self, weight: &Raw) -> Result<Raw> {
        Ok(weight.reshape((self.out_channels, self.channels))?)
    }
}

/// Computes the convolution of `x` with `weight`, plus `bias`.
pub(super) fn forward(geometry: &Geometry, x: &Raw, weight: &Raw, bias: Option<&Raw>) -> Result<Raw> {
    let (x, weight) = (contiguous(x)?, contiguous(weight)?);
    let bias = bias.map(contiguous).transpose()?;
    let dims = geometry.result_dims();
    if geometry.is_pointwise() {
        let y = linear::forward_plain(&geometry.as_rows(&x)?, &geometry.as_matrix(&weight)?, bias.as_ref())?;
        return Ok(y.reshape(dims.as_slice())?);
    }
    run(CONV2D.name, Sizes::of(geometry)?, dims, [&x, &weight], bias.as_ref())
}

/// Computes the gradient of the input from `grad`, the gradient of the result.
pub(super) fn grad_input(geometry: &Geometry, grad: &Raw, weight: &Raw) -> Result<Raw> {
    let (grad, weight) = (contiguous(grad)?, contiguous(weight)?);
    let dims = geometry.input_dims();
    if geometry.is_pointwise() {
        let dx = matmul(&geometry.as_rows(&grad)?, &geometry.as_matrix(&weight)?)?;
        return Ok(dx.reshape(dims.as_slice())?);
    }
    run_grad_input(CONV2D.name, Sizes::of(geometry)?, dims, [&grad, &weight])
}

/// Computes the gradient of the weight from `grad`, the gradient of the result.
pub(super) fn grad_weight(geometry: &Geometry, grad: &Raw, x: &Raw) -> Result<Raw> {
    let (grad, x) = (contiguous(grad)?, contiguous(x)?);
    let dims = geometry.weight_dims();
    if geometry.is_pointwise() {
        let dw = matmul(&geometry.as_rows(&grad)?.t()?, &geometry.as_rows(&x)?)?;
        return Ok(dw.reshape(dims.as_slice())?);
    }
    run_grad_weight(CONV2D.name, Sizes::of(geometry)?, dims, [&grad, &x])
}

/// Computes y (batch, out height, out width, out channels) from dense operands.
fn run(op: &'static str, sizes: Sizes, dims: [usize; 4], [x, weight]: [&Raw; 2], bias: Option<&Raw>) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let dtype = x.dtype();
    let y = empty(op, gpu, &dims, dtype)?;
    if y.elem_count() == 0 {
        return Ok(y);
    }
    let bias = optional_input(op, bias)?;
    if uses_pairs(dtype)
        && let Some((pair_sizes, [x_pairs, weight_pairs])) = pairs::operands(op, sizes, [x, weight])?
    {
        let (from, weights) = (input(op, &x_pairs)?, input(op, &weight_pairs)?);
        if on_tensor_cores(op, gpu, &pair_sizes, &y, Operands { dtype: x_pairs.dtype(), from, weights, bias })? {
            return Ok(y);
        }
    }
    let (to, from, weights) = (output(op, &y)?, input(op, x)?, input(op, weight)?);
    if on_tensor_cores(op, gpu, &sizes, &y, Operands { dtype, from, weights, bias })? {
        return Ok(y);
    }
    let [_, out_per_group] = sizes.group_channels();
    let (kernel, shape) = if sizes.is_direct() {
        // 1: each thread computes about one element of the result.
        (&CONV2D_FORWARD_DIRECT, Shape::flat(y.elem_count(), 1))
    } else {
        let tiles = sizes.pixels().div_ceil(64) * out_per_group.div_ceil(64);
        let grid = [tiles as u32, 1, sizes.groups.min(MAX_GRID_YZ)];
        (&CONV2D_FORWARD_PLAIN, Shape { grid, block: [256, 1, 1], shared: 0 })
    };
    let function = gpu.function(kernel, suffix(op, dtype)?)?;
    let arguments = Conv2dForwardPlain { y: to, x: from, weight: weights, bias, shape: sizes.shape() };
    // SAFETY: the tensors are dense and of these sizes.
    unsafe { function.launch(op, gpu, shape, arguments) }?;
    Ok(y)
}

/// Runs the forward pass on tensor cores. Returns false, without writing to `y`, if they do not support the operands.
fn on_tensor_cores(op: &'static str, gpu: &Gpu, sizes: &Sizes, y: &Raw, operands: Operands) -> Result<bool> {
    if hopper::forward(op, gpu, sizes, y, operands, Addend::NONE)? {
        return Ok(true);
    }
    let Operands { dtype, from, weights, bias } = operands;
    let to = output(op, y)?;
    let (pixels, out) = (sizes.pixels(), sizes.out_channels as usize);
    let count_tiles = |rows: usize, columns: usize| pixels.div_ceil(rows) * out.div_ceil(columns);
    let new_tile = |kernel, rows, columns, shared| Tile { kernel, rows, columns, shared };
    // The kernels copy 8 channels at a time, the V4 kernels 4.
    let tile = if sizes.fits(dtype, &[sizes.channels], 8, &[to.address, from.address, weights.address]) {
        Some(if out <= 16 {
            new_tile(&CONV2D_FORWARD_M128N16, 128, 16, 73_728)
        } else if count_tiles(128, 128) >= BLOCKS {
            new_tile(&CONV2D_FORWARD_M128N128, 128, 128, 98_304)
        } else {
            new_tile(&CONV2D_FORWARD_M64N64, 64, 64, 65_536)
        })
    } else if sizes.fits(dtype, &[sizes.channels], 4, &[to.address, from.address, weights.address]) {
        Some(new_tile(&CONV2D_FORWARD_M64N64V4, 64, 64, 65_536))
    } else {
        None
    };
    let Some(tile) = tile else { return Ok(false) };
    let tiles = count_tiles(tile.rows, tile.columns);
    let splits = splits(tiles, sizes.window());
    let sums = Sums::new(op, gpu, sizes, y, splits)?;
    let Places { y, bias: y_bias, partials, sums_bias } = sums.places(op, &operands)?;
    let function = gpu.function(tile.kernel, suffix(op, dtype)?)?;
    let shape = Shape { grid: [tiles as u32, 1, splits as u32], block: [128, 1, 1], shared: tile.shared };
    let arguments =
        Conv2dForwardM64n64 { y, x: from, weight: weights, bias: y_bias, partials, sums_bias, shape: sizes.shape() };
    // SAFETY: the tensors are dense and of these sizes; `partials` has room for the sums of each split.
    unsafe { function.launch(op, gpu, shape, arguments) }?;
    sums.finish(op, gpu, sizes, (bias, Addend::NONE))?;
    Ok(true)
}

/// Computes the gradient of the input (batch, height, width, channels) from dense operands.
fn run_grad_input(op: &'static str, sizes: Sizes, dims: [usize; 4], [grad, weight]: [&Raw; 2]) -> Result<Raw> {
    let gpu = Gpu::of(op, grad)?;
    let dtype = grad.dtype();
    let dx = empty(op, gpu, &dims, dtype)?;
    if dx.elem_count() == 0 || grad.elem_count() == 0 {
        fill(&dx, 0.0)?;
        return Ok(dx);
    }
    let (to, from, weights) = (output(op, &dx)?, input(op, grad)?, input(op, weight)?);
    if hopper::grad_input(op, gpu, &sizes, &dx, [from, weights])? {
        return Ok(dx);
    }
    let (pixels, channels) = (sizes.phase_pixels(), sizes.channels as usize);
    let channel_counts = [sizes.channels, sizes.out_channels];
    let count_tiles = |rows: usize, columns: usize| pixels.div_ceil(rows) * channels.div_ceil(columns);
    let new_tile = |kernel, rows, columns, shared| Tile { kernel, rows, columns, shared };
    // The kernels copy 8 channels at a time, the V4 kernels 4.
    let tile = if sizes.fits(dtype, &channel_counts, 8, &[to.address, from.address, weights.address]) {
        Some(if channels <= 16 {
            new_tile(&CONV2D_GRAD_INPUT_M128N16, 128, 16, 98_304)
        } else if count_tiles(128, 128) * sizes.phases() as usize >= BLOCKS {
            new_tile(&CONV2D_GRAD_INPUT_M128N128, 128, 128, 98_304)
        } else {
            new_tile(&CONV2D_GRAD_INPUT_M64N64, 64, 64, 65_536)
        })
    } else if sizes.fits(dtype, &channel_counts, 4, &[to.address, from.address, weights.address]) {
        Some(new_tile(&CONV2D_GRAD_INPUT_M64N64V4, 64, 64, 65_536))
    } else {
        None
    };
    let Some(tile) = tile else {
        let [channels_per_group, _] = sizes.group_channels();
        let (kernel, shape) = if sizes.is_direct() {
            // 1: about one element for each thread.
            let flat = Shape::flat(dx.elem_count(), 1);
            (&CONV2D_GRAD_INPUT_DIRECT, Shape { grid: [flat.grid[0], sizes.phases(), 1], ..flat })
        } else {
            let tiles = pixels.div_ceil(64) * channels_per_group.div_ceil(64);
            let grid = [tiles as u32, sizes.phases(), sizes.groups.min(MAX_GRID_YZ)];
            (&CONV2D_GRAD_INPUT_PLAIN, Shape { grid, block: [256, 1, 1], shared: 0 })
        };
        let function = gpu.function(kernel, suffix(op, dtype)?)?;
        let arguments = Conv2dGradInputPlain { grad_x: to, grad_y: from, weight: weights, shape: sizes.shape() };
        // SAFETY: the tensors are dense and of these sizes.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
        return Ok(dx);
    };
    let tiles = count_tiles(tile.rows, tile.columns);
    // Each kernel tap belongs to one phase. So a sum in one phase has about `length` / (number of phases) terms, where
    // `length` counts the terms of all kernel taps.
    let length = sizes.out_channels as usize * (sizes.kernel[0] * sizes.kernel[1]) as usize;
    let splits = splits(tiles * sizes.phases() as usize, length / sizes.phases() as usize);
    let partials = (splits > 1).then(|| empty(op, gpu, &[splits, dx.elem_count()], accumulator(dtype))).transpose()?;
    let parts = optional_output(op, partials.as_ref())?;
    let function = gpu.function(tile.kernel, suffix(op, dtype)?)?;
    let grid = [tiles as u32, sizes.phases(), splits as u32];
    let shape = Shape { grid, block: [128, 1, 1], shared: tile.shared };
    let arguments =
        Conv2dGradInputM64n64 { grad_x: to, grad_y: from, weight: weights, partials: parts, shape: sizes.shape() };
    // SAFETY: the tensors are dense and of these sizes; `partials` has room for the sums of each split.
    unsafe { function.launch(op, gpu, shape, arguments) }?;
    if let Some(partials) = &partials {
        sum_parts(op, gpu, &dx, partials, (Const::NULL, Addend::NONE), sizes.channels, splits as u32)?;
    }
    Ok(dx)
}

/// Computes the gradient of the weight (out channels, kernel height, kernel width, channels / groups) from dense
/// operands.
fn run_grad_weight(op: &'static str, sizes: Sizes, dims: [usize; 4], [grad, x]: [&Raw; 2]) -> Result<Raw> {
    let gpu = Gpu::of(op, grad)?;
    let dtype = grad.dtype();
    let dw = empty(op, gpu, &dims, dtype)?;
    if dw.elem_count() == 0 || grad.elem_count() == 0 {
        fill(&dw, 0.0)?;
        return Ok(dw);
    }
    let (to, from, images) = (output(op, &dw)?, input(op, grad)?, input(op, x)?);
    if hopper::grad_weight(op, gpu, &sizes, &dw, [from, images])? {
        return Ok(dw);
    }
    let (pixels, window, out) = (sizes.pixels(), sizes.window(), sizes.out_channels as usize);
    let channel_counts = [sizes.channels, sizes.out_channels];
    // The same number as `window`, in 32 bits: the length of a row of the weight's gradient.
    let columns = (sizes.channels / sizes.groups) * sizes.kernel[0] * sizes.kernel[1];
    if sizes.fits(dtype, &channel_counts, 8, &[to.address, from.address, images.address]) {
        let (kernel, rows) = match out {
            ..=16 => (&CONV2D_GRAD_WEIGHT_M16, 16),
            17..=64 => (&CONV2D_GRAD_WEIGHT_M64, 64),
            _ => (&CONV2D_GRAD_WEIGHT_M128, 128),
        };
        // Tiles have `rows` output channels and 128 columns.
        let tiles = out.div_ceil(rows) * window.div_ceil(128);
        let splits = splits(tiles, pixels);
        let partials =
            (splits > 1).then(|| empty(op, gpu, &[splits, dw.elem_count()], accumulator(dtype))).transpose()?;
        let parts = optional_output(op, partials.as_ref())?;
        let function = gpu.function(kernel, suffix(op, dtype)?)?;
        let shape = Shape { grid: [tiles as u32, 1, splits as u32], block: [128, 1, 1], shared: 98_304 };
        let arguments =
            Conv2dGradWeightM64 { grad_weight: to, grad_y: from, x: images, partials: parts, shape: sizes.shape() };
        // SAFETY: the tensors are dense and of these sizes; `partials` has room for the sums of each split.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
        if let Some(partials) = &partials {
            sum_parts(op, gpu, &dw, partials, (Const::NULL, Addend::NONE), columns, splits as u32)?;
        }
        return Ok(dw);
    }
    let [_, out_per_group] = sizes.group_channels();
    let groups = sizes.groups.min(MAX_GRID_YZ);
    // `cuda/kernels/conv.cu` says which grids the kernels need.
    let (kernel, grid) = if sizes.is_direct() {
        (&CONV2D_GRAD_WEIGHT_DIRECT, [out.div_ceil(32) as u32, (window as u32).min(MAX_GRID_YZ)])
    } else {
        (&CONV2D_GRAD_WEIGHT_PLAIN, [(out_per_group.div_ceil(64) * window.div_ceil(64)) as u32, groups])
    };
    // The plain kernels write parts even if sums are not split.
    let splits = splits((grid[0] * grid[1]) as usize, pixels);
    let partials = empty(op, gpu, &[splits, dw.elem_count()], accumulator(dtype))?;
    let parts = output(op, &partials)?;
    let function = gpu.function(kernel, suffix(op, dtype)?)?;
    let shape = Shape { grid: [grid[0], grid[1], splits as u32], block: [256, 1, 1], shared: 0 };
    let arguments = Conv2dGradWeightPlain { partials: parts, grad_y: from, x: images, shape: sizes.shape() };
    // SAFETY: the tensors are dense and of these sizes; `partials` has room for the sums of each split.
    unsafe { function.launch(op, gpu, shape, arguments) }?;
    sum_parts(op, gpu, &dw, &partials, (Const::NULL, Addend::NONE), columns, splits as u32)?;
    Ok(dw)
}
