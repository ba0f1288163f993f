//! Attention masks for a batch of texts of different lengths, which are padded to one length.

use trainable_candle_core::{DType, Device, Error, Result, Tensor};

/// The largest number of tokens of a padded text for which there are masks.
const MOST_TOKENS: usize = 4096;

/// Makes masks on the device, so that a forward pass that is recorded as a CUDA graph copies nothing from the host.
pub struct TextLengths {
    /// The model's name in messages.
    op: &'static str,
    /// The indices of tokens, from 0 to [`MOST_TOKENS`] - 1: (1, [`MOST_TOKENS`]), f32.
    indices: Tensor,
}

impl TextLengths {
    /// Makes masks for the model `op` on `device`.
    ///
    /// # Errors
    /// [`Error::Candle`] if the indices cannot be copied to the device.
    pub fn new(op: &'static str, device: &Device) -> Result<Self> {
        let indices: Vec<f32> = (0..MOST_TOKENS).map(|i| i as f32).collect();
        Ok(Self { op, indices: Tensor::from_vec(indices, (1, MOST_TOKENS), &Device::Cpu)?.to_device(device)? })
    }

    /// Check that `lengths` has one length for each of `batch` samples, and that there are masks for texts that are
    /// padded to `padded` tokens. The lengths themselves are not checked.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are not as many lengths as samples, or if `padded` is too large.
    pub fn check(&self, lengths: Option<&Tensor>, batch: usize, padded: usize) -> Result<()> {
        let Some(lengths) = lengths else { return Ok(()) };
        if lengths.dims() != [batch] {
            let message = format!("lengths has shape {:?}, expected ({batch},)", lengths.dims());
            return Err(Error::shape(self.op, message));
        }
        if padded > MOST_TOKENS {
            let message = format!("the text has {padded} tokens, expected at most {MOST_TOKENS} if lengths are given");
            return Err(Error::shape(self.op, message));
        }
        Ok(())
    }

    /// The mask of keys, (B, 1, 1, L + S), u8: 1 for the text's keys that are not padding and for all keys of the
    /// image. `padded` is L, the number of tokens of the padded texts; `area` is S, the number of image tokens. Each of
    /// the `lengths (B)` must be at least 1.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Index`] for inputs that [`check`](Self::check) rejects.
    pub fn mask(&self, lengths: &Tensor, padded: usize, area: usize) -> Result<Tensor> {
        let lengths = lengths.detach().to_dtype(DType::F32)?.unsqueeze(1)?;
        let text = self.indices.narrow(1, 0, padded)?.lt(&lengths)?;
        // Lengths are at least 1, so the mask of a text's first token is 1. The mask of the image repeats this value.
        let image = text.narrow(1, 0, 1)?.broadcast_as((lengths.dims()[0], area))?;
        Tensor::cat(&[&text, &image], 1)?.unsqueeze(1)?.unsqueeze(1)
    }
}
