//! The table of position embeddings of SD3's transformer: fixed sines and cosines. An image uses the middle of the
//! table.

use std::sync::{Mutex, PoisonError};

use trainable_candle_core::{Device, Error, Result, Tensor};

/// The number of image sizes whose position embeddings are cached on the device. A further size replaces the size that
/// has been cached for the longest time.
const CACHED_SIZES: usize = 8;

/// The embeddings of `side` × `side` positions. The table stays in host memory, because in SD3.5-medium it is a tenth
/// of the transformer's file, and an image of 1024 × 1024 pixels uses 1/36 of it.
pub(super) struct Positions {
    /// The embeddings of all positions, row by row, as in files: (1, side², D), where D is the width of the tokens.
    pub table: Tensor,
    side: usize,
    /// The device on which the model computes.
    device: Device,
    /// The embeddings of up to `CACHED_SIZES` image sizes, each size as [height, width] in tokens, on the device.
    cached: Mutex<Vec<([usize; 2], Tensor)>>,
}

impl Positions {
    /// The embeddings in `table (1, side², D)`, for a model that computes on `device`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the table does not fit into host memory.
    pub fn new(table: &Tensor, side: usize, device: &Device) -> Result<Self> {
        let table = table.to_device(&Device::Cpu)?;
        Ok(Self { table, side, device: device.clone(), cached: Mutex::new(Vec::new()) })
    }

    /// The embeddings of the middle `height` × `width` positions, row by row, (1, height · width, D), on the device.
    ///
    /// # Errors
    /// [`Error::Shape`] if `height` or `width` exceeds the side of the table, [`Error::OutOfMemory`] if the embeddings
    /// do not fit on the device.
    pub fn middle(&self, height: usize, width: usize) -> Result<Tensor> {
        let side = self.side;
        if height > side || width > side {
            return Err(Error::shape(
                super::SD3Transformer::CLASS_NAME,
                format!("the image has {height} x {width} tokens, but the model has only {side} x {side} positions"),
            ));
        }
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, positions)) = cached.iter().find(|(size, _)| *size == [height, width]) {
            return Ok(positions.clone());
        }
        let dim = self.table.dims()[2];
        let grid = self.table.detach().reshape((side, side, dim))?;
        let middle = grid.narrow(0, (side - height) / 2, height)?.narrow(1, (side - width) / 2, width)?;
        let positions = middle.contiguous()?.reshape((1, height * width, dim))?.to_device(&self.device)?;
        if cached.len() == CACHED_SIZES {
            cached.remove(0);
        }
        cached.push(([height, width], positions.clone()));
        Ok(positions)
    }
}
