//! Processes large images in overlapping tiles whose seams are blended, as in diffusers. The memory of the network's
//! activations then depends on the size of a tile and not of the image. Images are (batch, height, width, channels).

use trainable_candle_core::{Result, Tensor};

/// How an image is split into tiles and the tiles' results are joined. `tile` and `step` count pixels of the input,
/// `blend` and `keep` count pixels of the result. If the input or the result consists of latents, its fields count
/// latents.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiling {
    /// Height and width of a tile of the input.
    pub tile: usize,
    /// The distance from the start of one tile of the input to the start of the next.
    pub step: usize,
    /// Width of the band in which the results of neighbouring tiles are blended.
    pub blend: usize,
    /// Height and width of the region of the joined result that each tile fills.
    pub keep: usize,
}

impl Tiling {
    /// Tiles with `tile` pixels along a side, whose results have `result` pixels along a side. Neighbouring tiles
    /// overlap by a quarter of the side.
    pub fn new(tile: usize, result: usize) -> Self {
        let blend = result / 4;
        Self { tile, step: (tile * 3 / 4).max(1), blend, keep: result - blend }
    }

    /// Calls `run` on every tile of `x` and joins the results.
    pub fn run(&self, x: &Tensor, run: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let (height, width) = (x.dims()[1], x.dims()[2]);
        let mut rows = Vec::new();
        let mut above: Vec<Tensor> = Vec::new();
        for top in (0..height).step_by(self.step) {
            let strip = x.narrow(1, top, self.tile.min(height - top))?;
            let mut row: Vec<Tensor> = Vec::new();
            let mut kept = Vec::new();
            for (j, left) in (0..width).step_by(self.step).enumerate() {
                let mut tile = run(&strip.narrow(2, left, self.tile.min(width - left))?.contiguous()?)?;
                if let Some(above) = above.get(j) {
                    tile = blend(above, &tile, 1, self.blend)?;
                }
                if let Some(before) = row.last() {
                    tile = blend(before, &tile, 2, self.blend)?;
                }
                let (h, w) = (self.keep.min(tile.dims()[1]), self.keep.min(tile.dims()[2]));
                kept.push(tile.narrow(1, 0, h)?.narrow(2, 0, w)?);
                row.push(tile);
            }
            rows.push(Tensor::cat(&kept.iter().collect::<Vec<_>>(), 2)?);
            above = row;
        }
        Tensor::cat(&rows.iter().collect::<Vec<_>>(), 1)
    }
}

/// Blends the first `extent` pixels of `tile` along `dim` linearly with the last `extent` pixels of `before`:
/// the weight of `tile` rises from 0 to 1.
fn blend(before: &Tensor, tile: &Tensor, dim: usize, extent: usize) -> Result<Tensor> {
    let length = tile.dims()[dim];
    let extent = extent.min(length).min(before.dims()[dim]);
    if extent == 0 {
        return Ok(tile.clone());
    }
    let weights: Vec<f32> = (0..extent).map(|i| (i as f64 / extent as f64) as f32).collect();
    let mut shape = vec![1; tile.rank()];
    shape[dim] = extent;
    let weights = Tensor::from_vec(weights, shape, &trainable_candle_core::Device::Cpu)?
        .to_device(tile.device())?
        .to_dtype(tile.dtype())?;
    let tail = before.narrow(dim, before.dims()[dim] - extent, extent)?;
    let fading = tail.mul(&weights.affine(-1.0, 1.0)?)?.add(&tile.narrow(dim, 0, extent)?.mul(&weights)?)?;
    Tensor::cat(&[&fading, &tile.narrow(dim, extent, length - extent)?], dim)
}
