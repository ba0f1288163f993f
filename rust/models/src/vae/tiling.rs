//! Processes large images in overlapping tiles whose seams are blended, as in diffusers. The memory of the network's
//! activations then depends on the size of a tile, not on the size of the image. Images are (batch, height, width,
//! channels).

use trainable_candle_core::{Result, Tensor};

/// The dimension of an image's height.
const HEIGHT: usize = 1;
/// The dimension of an image's width.
const WIDTH: usize = 2;

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
    /// Tiles with `tile` pixels along a side, whose results have `result` pixels along a side. One of these numbers is
    /// a multiple of the other; the smaller one counts latents. Neighbouring tiles overlap by a quarter of the side,
    /// rounded down to whole latents.
    pub fn new(tile: usize, result: usize) -> Self {
        let latents = tile.min(result);
        let overlap = latents / 4;
        // A step of the input and the kept part of the result must cover the same number of latents.
        let blend = overlap * (result / latents);
        Self { tile, step: tile - overlap * (tile / latents), blend, keep: result - blend }
    }

    /// Calls `process` on every tile of `x` and joins the results.
    pub fn run(&self, x: &Tensor, process: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let (height, width) = (x.dims()[HEIGHT], x.dims()[WIDTH]);
        let mut joined_rows = Vec::new();
        // The tiles of the row above, blended with their neighbours, but not cropped to `keep`.
        let mut row_above: Vec<Tensor> = Vec::new();
        for top in (0..height).step_by(self.step) {
            let strip = x.narrow(HEIGHT, top, self.tile.min(height - top))?;
            let mut row: Vec<Tensor> = Vec::new();
            let mut cropped = Vec::new();
            for (column, left) in (0..width).step_by(self.step).enumerate() {
                let mut tile = process(&strip.narrow(WIDTH, left, self.tile.min(width - left))?.contiguous()?)?;
                if let Some(above) = row_above.get(column) {
                    tile = blend(above, &tile, HEIGHT, self.blend)?;
                }
                if let Some(left_neighbour) = row.last() {
                    tile = blend(left_neighbour, &tile, WIDTH, self.blend)?;
                }
                let (h, w) = (self.keep.min(tile.dims()[HEIGHT]), self.keep.min(tile.dims()[WIDTH]));
                cropped.push(tile.narrow(HEIGHT, 0, h)?.narrow(WIDTH, 0, w)?);
                row.push(tile);
            }
            joined_rows.push(Tensor::cat(&cropped.iter().collect::<Vec<_>>(), WIDTH)?);
            row_above = row;
        }
        Tensor::cat(&joined_rows.iter().collect::<Vec<_>>(), HEIGHT)
    }
}

/// Blends the first `extent` pixels of `tile` along `dim` linearly with the last `extent` pixels of `before`, the tile
/// above or to the left; blends fewer pixels if a tile is shorter. The weight of `tile` starts at 0 and rises by
/// 1 / `extent` per pixel.
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
    let tail_weights = weights.affine(-1.0, 1.0)?; // 1 - weights
    let fading = tail.mul(&tail_weights)?.add(&tile.narrow(dim, 0, extent)?.mul(&weights)?)?;
    Tensor::cat(&[&fading, &tile.narrow(dim, extent, length - extent)?], dim)
}

#[cfg(test)]
mod tests {
    use trainable_candle_core::Device;

    use super::*;

    #[test]
    fn tiles_of_every_size_join_to_their_image() {
        let values: Vec<f32> = (0..23 * 17).map(|i| i as f32).collect();
        let image = Tensor::from_vec(values.clone(), vec![1, 23, 17, 1], &Device::Cpu).unwrap();
        for side in 4..=9 {
            let joined = Tiling::new(side, side).run(&image, |tile| Ok(tile.clone())).unwrap();
            assert_eq!(joined.dims(), image.dims(), "tiles of {side} pixels");
            let found: Vec<f32> = joined.to_vec().unwrap();
            let is_near = found.iter().zip(&values).all(|(found, expected)| (found - expected).abs() < 1e-3);
            assert!(is_near, "tiles of {side} pixels");
        }
    }

    #[test]
    fn a_step_and_the_kept_part_cover_the_same_latents() {
        // With 8 pixels per latent, as in SDXL's autoencoder.
        for latents in 4..=70 {
            let encoding = Tiling::new(8 * latents, latents);
            assert_eq!(encoding.step, 8 * encoding.keep, "{latents} latents");
            let decoding = Tiling::new(latents, 8 * latents);
            assert_eq!(8 * decoding.step, decoding.keep, "{latents} latents");
        }
    }
}
