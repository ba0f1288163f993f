//! Attention masks for a batch of texts of different lengths, which are padded to one length.

use trainable_candle_core::{DType, Device, Error, Result, Tensor};

/// The largest number of tokens of a padded text if lengths are given.
const MOST_TOKENS: usize = 4096;

/// Makes masks on the device, so that a forward pass that is recorded as a CUDA graph copies nothing from the host.
pub struct TextLengths {
    /// The model's name in messages.
    op: &'static str,
    /// The indices of tokens: 0, 1 and so on, (1, [`MOST_TOKENS`]), f32.
    numbers: Tensor,
}

impl TextLengths {
    /// Masks for the model `op`.
    ///
    /// # Errors
    /// [`Error::Candle`] if the indices cannot be copied to the device.
    pub fn new(op: &'static str, device: &Device) -> Result<Self> {
        let numbers: Vec<f32> = (0..MOST_TOKENS).map(|i| i as f32).collect();
        Ok(Self { op, numbers: Tensor::from_vec(numbers, (1, MOST_TOKENS), &Device::Cpu)?.to_device(device)? })
    }

    /// Check `lengths`, which must have one length for each of `batch` samples. `length` is the number of tokens of the
    /// padded texts.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are not as many lengths as samples, or the texts are too long.
    pub fn check(&self, lengths: Option<&Tensor>, batch: usize, length: usize) -> Result<()> {
        let Some(lengths) = lengths else { return Ok(()) };
        if lengths.dims() != [batch] {
            let message = format!("lengths has shape {:?}, expected ({batch},)", lengths.dims());
            return Err(Error::shape(self.op, message));
        }
        if length > MOST_TOKENS {
            let message = format!("the text has {length} tokens, expected at most {MOST_TOKENS} if lengths are given");
            return Err(Error::shape(self.op, message));
        }
        Ok(())
    }

    /// The mask of keys, (B, 1, 1, L + S), u8: 1 for the text's keys that are not padding and for all keys of the
    /// image. `length` is L, the number of tokens of the padded texts; `area` is S, the number of image tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Index`] for inputs that [`check`](Self::check) rejects.
    pub fn mask(&self, lengths: &Tensor, length: usize, area: usize) -> Result<Tensor> {
        let lengths = lengths.detach().to_dtype(DType::F32)?.unsqueeze(1)?;
        let text = self.numbers.narrow(1, 0, length)?.lt(&lengths)?;
        // Lengths are at least 1, so the mask of a text's first token is 1. The image's keys repeat this value.
        let image = text.narrow(1, 0, 1)?.broadcast_as((lengths.dims()[0], area))?;
        Tensor::cat(&[&text, &image], 1)?.unsqueeze(1)?.unsqueeze(1)
    }
}
