//! The lengths of texts that are padded to one length, as a mask of attention.

use trainable_candle_core::{DType, Device, Error, Result, Tensor};

/// The largest number of tokens of a text if lengths are given.
const MOST_TOKENS: usize = 4096;

/// Makes masks on the device, so that a recorded forward pass copies nothing from the host.
pub struct TextLengths {
    /// The model's name in messages.
    op: &'static str,
    /// 0, 1 and so on, (1, [`MOST_TOKENS`]), f32.
    numbers: Tensor,
}

impl TextLengths {
    /// Masks for the model `op`.
    ///
    /// # Errors
    /// [`Error::Candle`] if the numbers cannot be copied to the device.
    pub fn new(op: &'static str, device: &Device) -> Result<Self> {
        let numbers: Vec<f32> = (0..MOST_TOKENS).map(|i| i as f32).collect();
        Ok(Self { op, numbers: Tensor::from_vec(numbers, (1, MOST_TOKENS), &Device::Cpu)?.to_device(device)? })
    }

    /// Check the `lengths` of the texts of `batch` samples, padded to `length` tokens.
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

    /// The mask of keys, (B, 1, 1, L + S), u8: 1 for the text's keys below its length and for all keys of the image.
    ///
    /// # Errors
    /// [`Error::Shape`] if [`check`](Self::check) fails.
    pub fn mask(&self, lengths: &Tensor, length: usize, area: usize) -> Result<Tensor> {
        let lengths = lengths.detach().to_dtype(DType::F32)?.unsqueeze(1)?;
        let text = self.numbers.narrow(1, 0, length)?.lt(&lengths)?;
        // The mask of a text's first token is always 1, so it is repeated for the image.
        let image = text.narrow(1, 0, 1)?.broadcast_as((lengths.dims()[0], area))?;
        Tensor::cat(&[&text, &image], 1)?.unsqueeze(1)?.unsqueeze(1)
    }
}
