//! Checks whether the inputs of an image transformer, such as Flux.1's, have the sizes that its configuration gives.

use trainable_candle_core::raw::is_float;
use trainable_candle_core::{Error, Result, Tensor};

/// The sizes that the inputs of a model must have, from the model's configuration.
#[derive(Clone, Copy)]
pub struct TokenSizes {
    /// The model's name in messages.
    pub op: &'static str,
    /// Number of values of an image token.
    pub channels: usize,
    /// Width of a text token.
    pub text: usize,
    /// Width of the pooled text embedding, if the model takes one.
    pub pooled: Option<usize>,
    /// Number of axes of a token's position.
    pub axes: usize,
    /// Whether the model takes a guidance scale.
    pub guidance: bool,
}

/// The inputs of one forward pass, for B samples of S image tokens and L text tokens.
#[derive(Clone, Copy)]
pub struct TokenInputs<'a> {
    /// Tokens of the noisy image, (B, S, channels).
    pub hidden_states: &'a Tensor,
    /// Tokens of the text, (B, L, [`TokenSizes::text`]).
    pub encoder_hidden_states: &'a Tensor,
    /// The pooled text embedding, (B, [`TokenSizes::pooled`]). Models that take one always set this field; for other
    /// models [`TokenSizes::check`] ignores it.
    pub pooled_projections: Option<&'a Tensor>,
    /// The time from 0 (clean latents) to 1 (noise): (B), (1) or a scalar.
    pub timestep: &'a Tensor,
    /// The guidance scale: (B), (1) or a scalar.
    pub guidance: Option<&'a Tensor>,
    /// Positions of the image's tokens, (S, axes).
    pub img_ids: &'a Tensor,
    /// Positions of the text's tokens, (L, axes).
    pub txt_ids: &'a Tensor,
}

impl TokenSizes {
    /// Check the inputs, and return the number of image tokens and the number of text tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] if the inputs do not fit the sizes or one another, or if there are no image tokens or no text
    /// tokens; [`Error::DType`] if the image tokens are not floating-point; [`Error::Argument`] if the guidance scale
    /// is missing, or given to a model that takes none.
    pub fn check(&self, inputs: TokenInputs<'_>) -> Result<[usize; 2]> {
        let misfit = |name: &str, found: &Tensor, expected: String| {
            Err(Error::shape(self.op, format!("{name} has shape {:?}, expected {expected}", found.dims())))
        };
        let (hidden_states, channels) = (inputs.hidden_states, self.channels);
        let &[batch, image_tokens, width] = hidden_states.dims() else {
            return misfit("hidden_states", hidden_states, format!("(B, S, {channels})"));
        };
        if width != channels || image_tokens == 0 {
            let expected = format!("(B, S, {channels}) with at least one token");
            return misfit("hidden_states", hidden_states, expected);
        }
        if !is_float(hidden_states.dtype()) {
            let message =
                format!("hidden_states is {}, expected floating-point latents", hidden_states.dtype().as_str());
            return Err(Error::dtype(self.op, message));
        }
        let states = inputs.encoder_hidden_states;
        let text_tokens = match *states.dims() {
            [b, length, width] if b == batch && width == self.text && length > 0 => length,
            _ => {
                let expected = format!("({batch}, L, {}) with at least one token", self.text);
                return misfit("encoder_hidden_states", states, expected);
            }
        };
        if let (Some(pooled), Some(width)) = (inputs.pooled_projections, self.pooled)
            && pooled.dims() != [batch, width]
        {
            return misfit("pooled_projections", pooled, format!("({batch}, {width})"));
        }
        for (name, input) in [("timestep", Some(inputs.timestep)), ("guidance", inputs.guidance)] {
            let Some(input) = input else { continue };
            if !matches!(*input.dims(), [] | [1]) && input.dims() != [batch] {
                return misfit(name, input, format!("({batch},), (1,) or ()"));
            }
        }
        for (name, ids, tokens) in [("img_ids", inputs.img_ids, image_tokens), ("txt_ids", inputs.txt_ids, text_tokens)]
        {
            if ids.dims() != [tokens, self.axes] {
                return misfit(name, ids, format!("({tokens}, {})", self.axes));
            }
        }
        if inputs.guidance.is_some() != self.guidance {
            let message = if self.guidance {
                "guidance is missing, but the model takes a guidance scale; give 1 in training, about 3.5 for sampling"
            } else {
                "found guidance, but this model takes none (guidance_embeds is false)"
            };
            return Err(Error::argument(self.op, message));
        }
        Ok([image_tokens, text_tokens])
    }
}
