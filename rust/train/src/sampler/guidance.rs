//! Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598).

use trainable_candle_core::{Error, Result, Tensor};

/// `negative` + `scale` · (`positive` - `negative`): the model's output for the prompt, moved away from the output for
/// the negative prompt. Up to rounding, scale 1 gives the output for the prompt.
///
/// # Errors
/// [`Error::Shape`] if the shapes of the two outputs do not broadcast, [`Error::DType`] if their dtypes differ.
pub fn classifier_free_guidance(negative: &Tensor, positive: &Tensor, scale: f64) -> Result<Tensor> {
    negative.add(&positive.sub(negative)?.mul_scalar(scale)?)
}

/// A model with classifier-free guidance; see [`classifier_free_guidance`].
pub struct Guided<M> {
    model: M,
    conditions: Conditions,
    scale: f64,
}

enum Conditions {
    /// The tensors of the prompt alone, for scale 1.
    Positive(Vec<Tensor>),
    /// The tensors of the negative prompt and of the prompt, concatenated along the batch for one call with twice the
    /// batch.
    Pair(Vec<Tensor>),
    /// The tensors for one call for each prompt. A call for one prompt needs half of the memory of a call for both.
    Each { negative: Vec<Tensor>, positive: Vec<Tensor> },
}

impl<M: FnMut(&Tensor, f64, &[Tensor]) -> Result<Tensor>> Guided<M> {
    /// Guide `model(x, timestep, conditioning)` away from `negative` towards `positive`. `negative` and `positive` are
    /// lists of equally many tensors. The first dimension of each tensor is the batch, and tensors with the same index
    /// must have the same shape. With `batched`, one call of the model gets the tensors of both lists and two copies of
    /// `x`, concatenated along the batch (negative first). With a `scale` of 1, the model is called with `positive`
    /// alone.
    ///
    /// # Errors
    /// [`Error::Argument`] if the scale is not finite or the numbers of tensors differ. With `batched` and a scale
    /// other than 1, [`Error::Shape`] if two tensors cannot be concatenated along the batch.
    pub fn new(model: M, positive: Vec<Tensor>, negative: Vec<Tensor>, scale: f64, batched: bool) -> Result<Self> {
        if !scale.is_finite() || positive.len() != negative.len() {
            return Err(Error::argument(
                "guidance",
                format!(
                    "found scale {scale}, {} positive and {} negative tensors, expected a finite scale and equal \
                     numbers of tensors",
                    positive.len(),
                    negative.len()
                ),
            ));
        }
        let conditions = if scale == 1.0 {
            Conditions::Positive(positive)
        } else if batched {
            let pairs = negative.iter().zip(&positive).map(|(n, p)| Tensor::cat(&[n, p], 0));
            Conditions::Pair(pairs.collect::<Result<_>>()?)
        } else {
            Conditions::Each { negative, positive }
        };
        Ok(Self { model, conditions, scale })
    }

    /// The guided prediction for `x` at `timestep`.
    ///
    /// # Errors
    /// Those of the model and of [`classifier_free_guidance`].
    pub fn predict(&mut self, x: &Tensor, timestep: f64) -> Result<Tensor> {
        let (negative, positive) = match &self.conditions {
            Conditions::Positive(condition) => return (self.model)(x, timestep, condition),
            Conditions::Pair(condition) => {
                let both = (self.model)(&Tensor::cat(&[x, x], 0)?, timestep, condition)?;
                let batch = x.dims()[0];
                (both.narrow(0, 0, batch)?, both.narrow(0, batch, batch)?)
            }
            Conditions::Each { negative, positive } => {
                ((self.model)(x, timestep, negative)?, (self.model)(x, timestep, positive)?)
            }
        };
        classifier_free_guidance(&negative, &positive, self.scale)
    }
}
