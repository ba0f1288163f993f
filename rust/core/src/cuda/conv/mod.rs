//! Convolution of channels-last images: on tensor cores for f16 and bf16 where the channels allow it, and the forward pass for f32
//! where it is to be [in pairs](crate::compute::with_bf16_pairs); else a plain form.

mod hopper;
mod pairs;

use candle_core::DType;
use trainable_candle_cuda::modules::CONV;

use super::gpu::Gpu;
use super::launch::{Address, Shape, accumulator, address, empty, launch, optional, suffix};
use crate::compute::uses_pairs;
use crate::{Raw, Result};

pub use pairs::linear;
pub(super) use pairs::{LEFT, RIGHT, pairs};

/// `Conv2dShape` of the kernels; pairs are (height, width).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
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

/// Blocks that fill a large GPU; sums are split where there are fewer. The same on every GPU, so that results are.
const BLOCKS: usize = 132;
/// The largest grid in its second and third dimension.
const MOST: u32 = 65_535;
/// Values along a sum that a block takes at a time.
const STEP: usize = 64;

/// A kernel on tensor cores: its name, the rows and columns of its tiles and its shared memory.
struct Tile {
    name: &'static str,
    rows: usize,
    columns: usize,
    shared: u32,
}

impl Sizes {
    fn pixels(&self) -> usize {
        [self.batch, self.output[0], self.output[1]].map(|size| size as usize).iter().product()
    }

    fn window(&self) -> usize {
        [self.kernel[0], self.kernel[1], self.channels / self.groups].map(|size| size as usize).iter().product()
    }

    fn phases(&self) -> u32 {
        self.stride[0] * self.stride[1]
    }

    /// Pixels of the input of one phase of the stride.
    fn phase_pixels(&self) -> usize {
        let along = |i: usize| self.input[i].div_ceil(self.stride[i]) as usize;
        self.batch as usize * along(0) * along(1)
    }

    fn group_channels(&self) -> [usize; 2] {
        [self.channels, self.out_channels].map(|channels| (channels / self.groups) as usize)
    }

    /// Dimensions of the weight, the densest first.
    fn weight_shape(&self) -> [u64; 3] {
        let taps = u64::from(self.kernel[0]) * u64::from(self.kernel[1]);
        [u64::from(self.channels), taps, u64::from(self.out_channels)]
    }

    /// Whether groups have so few channels that each result is a sum of its own.
    fn is_direct(&self) -> bool {
        self.groups > 1 && self.group_channels().iter().any(|&channels| channels < 8)
    }

    /// Whether tensor cores take it, with channels in multiples of `multiple`.
    fn fits(&self, dtype: DType, channels: &[u32], multiple: u32, addresses: &[Address]) -> bool {
        matches!(dtype, DType::F16 | DType::BF16)
            && self.groups == 1
            && self.kernel.iter().all(|&size| size <= 16)
            && channels.iter().all(|channels| channels.is_multiple_of(multiple))
            && addresses.iter().all(|address| address.is_multiple_of(16))
    }
}

/// In how many parts a sum of `length` is taken so that `tiles` blocks become enough.
fn splits(tiles: usize, length: usize) -> usize {
    (BLOCKS / tiles.max(1)).clamp(1, (length / (8 * STEP)).max(1))
}

/// Adds the parts of sums, and the bias.
fn sum_parts(
    op: &'static str,
    gpu: &Gpu,
    y: &Raw,
    partials: &Raw,
    bias: Address,
    columns: u32,
    splits: u32,
) -> Result<()> {
    let function = gpu.function(&CONV, "conv2d_sum", suffix(op, y.dtype())?)?;
    let count = y.elem_count();
    let shape = Shape { grid: [count.div_ceil(1024).clamp(1, 1 << 20) as u32, 1, 1], block: [256, 1, 1], shared: 0 };
    let (to, from, count) = (address(op, y)?, address(op, partials)?, count as u64);
    // SAFETY: the kernel takes the result, the parts, the bias and sizes.
    unsafe { launch!(op, gpu, function, shape, to, from, bias, count, columns, splits) }
}

/// Addresses of dense operands of `dtype`, and of a bias in the dtype of the result; null if there is none.
#[derive(Clone, Copy)]
struct Operands {
    dtype: DType,
    from: Address,
    weights: Address,
    bias: Address,
}

/// Where tensor cores put the sums of a forward pass.
struct Sums<'a> {
    y: &'a Raw,
    /// The parts of sums that are split.
    partials: Option<Raw>,
    splits: usize,
}

impl<'a> Sums<'a> {
    fn new(op: &'static str, gpu: &Gpu, sizes: &Sizes, y: &'a Raw, splits: usize) -> Result<Self> {
        let dims = [splits, sizes.pixels(), sizes.out_channels as usize];
        let partials = (splits > 1).then(|| empty(op, gpu, &dims, DType::F32)).transpose()?;
        Ok(Self { y, partials, splits })
    }

    /// The bias of the result, the place of f32 sums and their bias, as kernels take them: of operands narrower than the result the sums
    /// are the result.
    fn arguments(&self, op: &'static str, operands: &Operands) -> Result<[Address; 3]> {
        Ok(match &self.partials {
            Some(partials) => [0, address(op, partials)?, 0],
            None if self.y.dtype() == operands.dtype => [operands.bias, 0, 0],
            None => [0, address(op, self.y)?, operands.bias],
        })
    }

    fn finish(&self, op: &'static str, gpu: &Gpu, sizes: &Sizes, bias: Address) -> Result<()> {
        let Some(partials) = &self.partials else { return Ok(()) };
        sum_parts(op, gpu, self.y, partials, bias, sizes.out_channels, self.splits as u32)
    }
}

/// y (batch, out height, out width, out channels) of dense operands.
pub fn forward(
    op: &'static str,
    sizes: Sizes,
    dims: [usize; 4],
    [x, weight]: [&Raw; 2],
    bias: Option<&Raw>,
) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let dtype = x.dtype();
    let y = empty(op, gpu, &dims, dtype)?;
    if y.elem_count() == 0 {
        return Ok(y);
    }
    let bias = optional(op, bias)?;
    if uses_pairs(dtype)
        && let Some((sizes, [x, weight])) = pairs::operands(op, sizes, [x, weight])?
    {
        let (from, weights) = (address(op, &x)?, address(op, &weight)?);
        if on_tensor_cores(op, gpu, &sizes, &y, Operands { dtype: x.dtype(), from, weights, bias })? {
            return Ok(y);
        }
    }
    let (to, from, weights) = (address(op, &y)?, address(op, x)?, address(op, weight)?);
    if on_tensor_cores(op, gpu, &sizes, &y, Operands { dtype, from, weights, bias })? {
        return Ok(y);
    }
    let [_, results] = sizes.group_channels();
    let (name, shape) = if sizes.is_direct() {
        ("conv2d_forward_direct", Shape::flat(y.elem_count(), 1))
    } else {
        let tiles = sizes.pixels().div_ceil(64) * results.div_ceil(64);
        let grid = [tiles as u32, 1, sizes.groups.min(MOST)];
        ("conv2d_forward_plain", Shape { grid, block: [256, 1, 1], shared: 0 })
    };
    let function = gpu.function(&CONV, name, suffix(op, dtype)?)?;
    // SAFETY: the kernel takes the result, the dense operands and sizes.
    unsafe { launch!(op, gpu, function, shape, to, from, weights, bias, sizes) }?;
    Ok(y)
}

/// The forward pass on tensor cores, unless the operands do not suit them.
fn on_tensor_cores(op: &'static str, gpu: &Gpu, sizes: &Sizes, y: &Raw, operands: Operands) -> Result<bool> {
    if hopper::forward(op, gpu, sizes, y, operands)? {
        return Ok(true);
    }
    let Operands { dtype, from, weights, bias } = operands;
    let to = address(op, y)?;
    let (pixels, out) = (sizes.pixels(), sizes.out_channels as usize);
    let blocks = |rows: usize, columns: usize| pixels.div_ceil(rows) * out.div_ceil(columns);
    let tile = |name, rows, columns, shared| Tile { name, rows, columns, shared };
    let tile = if sizes.fits(dtype, &[sizes.channels], 8, &[to, from, weights]) {
        Some(if out <= 16 {
            tile("conv2d_forward_m128n16", 128, 16, 73_728)
        } else if blocks(128, 128) >= BLOCKS {
            tile("conv2d_forward_m128n128", 128, 128, 98_304)
        } else {
            tile("conv2d_forward_m64n64", 64, 64, 65_536)
        })
    } else if sizes.fits(dtype, &[sizes.channels], 4, &[to, from, weights]) {
        Some(tile("conv2d_forward_m64n64v4", 64, 64, 65_536))
    } else {
        None
    };
    let Some(tile) = tile else { return Ok(false) };
    let tiles = blocks(tile.rows, tile.columns);
    let splits = splits(tiles, sizes.window());
    let sums = Sums::new(op, gpu, sizes, y, splits)?;
    let [narrow_bias, parts, parts_bias] = sums.arguments(op, &operands)?;
    let sizes = *sizes;
    let function = gpu.function(&CONV, tile.name, suffix(op, dtype)?)?;
    let shape = Shape { grid: [tiles as u32, 1, splits as u32], block: [128, 1, 1], shared: tile.shared };
    // SAFETY: the kernel takes the result, the dense operands, the sums in f32 with their bias, and sizes.
    unsafe { launch!(op, gpu, function, shape, to, from, weights, narrow_bias, parts, parts_bias, sizes) }?;
    sums.finish(op, gpu, &sizes, bias)?;
    Ok(true)
}

/// The gradient of the input (batch, height, width, channels) from dense operands.
pub fn grad_input(op: &'static str, sizes: Sizes, dims: [usize; 4], [grad, weight]: [&Raw; 2]) -> Result<Raw> {
    let gpu = Gpu::of(op, grad)?;
    let dtype = grad.dtype();
    let dx = empty(op, gpu, &dims, dtype)?;
    if dx.elem_count() == 0 || grad.elem_count() == 0 {
        super::copy::fill(&dx, 0.0)?;
        return Ok(dx);
    }
    let (to, from, weights) = (address(op, &dx)?, address(op, grad)?, address(op, weight)?);
    if hopper::grad_input(op, gpu, &sizes, &dx, [from, weights])? {
        return Ok(dx);
    }
    let (pixels, channels) = (sizes.phase_pixels(), sizes.channels as usize);
    let sides = [sizes.channels, sizes.out_channels];
    let blocks = |rows: usize, columns: usize| pixels.div_ceil(rows) * channels.div_ceil(columns);
    let tile = |name, rows, columns, shared| Tile { name, rows, columns, shared };
    let tile = if sizes.fits(dtype, &sides, 8, &[to, from, weights]) {
        Some(if channels <= 16 {
            tile("conv2d_grad_input_m128n16", 128, 16, 98_304)
        } else if blocks(128, 128) * sizes.phases() as usize >= BLOCKS {
            tile("conv2d_grad_input_m128n128", 128, 128, 98_304)
        } else {
            tile("conv2d_grad_input_m64n64", 64, 64, 65_536)
        })
    } else if sizes.fits(dtype, &sides, 4, &[to, from, weights]) {
        Some(tile("conv2d_grad_input_m64n64v4", 64, 64, 65_536))
    } else {
        None
    };
    let Some(tile) = tile else {
        let [results, _] = sizes.group_channels();
        let (name, shape) = if sizes.is_direct() {
            let flat = Shape::flat(dx.elem_count(), 1);
            ("conv2d_grad_input_direct", Shape { grid: [flat.grid[0], sizes.phases(), 1], ..flat })
        } else {
            let tiles = pixels.div_ceil(64) * results.div_ceil(64);
            let grid = [tiles as u32, sizes.phases(), sizes.groups.min(MOST)];
            ("conv2d_grad_input_plain", Shape { grid, block: [256, 1, 1], shared: 0 })
        };
        let function = gpu.function(&CONV, name, suffix(op, dtype)?)?;
        // SAFETY: the kernel takes the result, the dense operands and sizes.
        unsafe { launch!(op, gpu, function, shape, to, from, weights, sizes) }?;
        return Ok(dx);
    };
    let tiles = blocks(tile.rows, tile.columns);
    let length = sizes.out_channels as usize * (sizes.kernel[0] * sizes.kernel[1]) as usize;
    let splits = splits(tiles * sizes.phases() as usize, length / sizes.phases() as usize);
    let partials = (splits > 1).then(|| empty(op, gpu, &[splits, dx.elem_count()], accumulator(dtype))).transpose()?;
    let parts = optional(op, partials.as_ref())?;
    let function = gpu.function(&CONV, tile.name, suffix(op, dtype)?)?;
    let grid = [tiles as u32, sizes.phases(), splits as u32];
    let shape = Shape { grid, block: [128, 1, 1], shared: tile.shared };
    // SAFETY: as above, and the parts of the sums.
    unsafe { launch!(op, gpu, function, shape, to, from, weights, parts, sizes) }?;
    if let Some(partials) = &partials {
        sum_parts(op, gpu, &dx, partials, 0, sizes.channels, splits as u32)?;
    }
    Ok(dx)
}

/// The gradient of the weight (out channels, kernel height, kernel width, channels / groups) from dense operands.
pub fn grad_weight(op: &'static str, sizes: Sizes, dims: [usize; 4], [grad, x]: [&Raw; 2]) -> Result<Raw> {
    let gpu = Gpu::of(op, grad)?;
    let dtype = grad.dtype();
    let dw = empty(op, gpu, &dims, dtype)?;
    if dw.elem_count() == 0 || grad.elem_count() == 0 {
        super::copy::fill(&dw, 0.0)?;
        return Ok(dw);
    }
    let (to, from, images) = (address(op, &dw)?, address(op, grad)?, address(op, x)?);
    if hopper::grad_weight(op, gpu, &sizes, &dw, [from, images])? {
        return Ok(dw);
    }
    let (pixels, window, out) = (sizes.pixels(), sizes.window(), sizes.out_channels as usize);
    let sides = [sizes.channels, sizes.out_channels];
    let columns = (sizes.channels / sizes.groups) * sizes.kernel[0] * sizes.kernel[1];
    if sizes.fits(dtype, &sides, 8, &[to, from, images]) {
        let (name, rows) = match out {
            ..=16 => ("conv2d_grad_weight_m16", 16),
            17..=64 => ("conv2d_grad_weight_m64", 64),
            _ => ("conv2d_grad_weight_m128", 128),
        };
        let tiles = out.div_ceil(rows) * window.div_ceil(128);
        let splits = splits(tiles, pixels);
        let partials =
            (splits > 1).then(|| empty(op, gpu, &[splits, dw.elem_count()], accumulator(dtype))).transpose()?;
        let parts = optional(op, partials.as_ref())?;
        let function = gpu.function(&CONV, name, suffix(op, dtype)?)?;
        let shape = Shape { grid: [tiles as u32, 1, splits as u32], block: [128, 1, 1], shared: 98_304 };
        // SAFETY: the kernel takes the result, the dense operands, the parts of the sums and sizes.
        unsafe { launch!(op, gpu, function, shape, to, from, images, parts, sizes) }?;
        if let Some(partials) = &partials {
            sum_parts(op, gpu, &dw, partials, 0, columns, splits as u32)?;
        }
        return Ok(dw);
    }
    let [_, results] = sizes.group_channels();
    let groups = sizes.groups.min(MOST);
    let (name, grid) = if sizes.is_direct() {
        ("conv2d_grad_weight_direct", [out.div_ceil(32) as u32, (window as u32).min(MOST)])
    } else {
        ("conv2d_grad_weight_plain", [(results.div_ceil(64) * window.div_ceil(64)) as u32, groups])
    };
    let splits = splits((grid[0] * grid[1]) as usize, pixels);
    let partials = empty(op, gpu, &[splits, dw.elem_count()], accumulator(dtype))?;
    let parts = address(op, &partials)?;
    let function = gpu.function(&CONV, name, suffix(op, dtype)?)?;
    let shape = Shape { grid: [grid[0], grid[1], splits as u32], block: [256, 1, 1], shared: 0 };
    // SAFETY: the kernel takes the parts of the sums, the dense operands and sizes.
    unsafe { launch!(op, gpu, function, shape, parts, from, images, sizes) }?;
    sum_parts(op, gpu, &dw, &partials, 0, columns, splits as u32)?;
    Ok(dw)
}
