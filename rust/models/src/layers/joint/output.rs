//! The last layer of Flux and similar transformers: a layer norm, modulated by the condition, and a projection.

use trainable_candle_core::{DType, Error, Result, Tensor};
use trainable_candle_nn::{Linear, Module, Visitor, Weights};

use super::modulation::modulated;
use crate::saved::Saved;

/// The name of the layer that computes the modulation.
const MODULATION: &str = "norm_out.linear";
/// The name of the projection.
const PROJECTION: &str = "proj_out";

/// A layer norm, modulated by a shift and a scale from the condition, and a projection to the values of the patches.
/// B is the number of samples, S the number of tokens, and D the number of features of a token.
pub struct ModulatedOutput {
    /// The layer that computes the modulation from the condition: D features become 2 D, the scale and the shift. None
    /// if the model passes the modulation to [`modulated`](Self::modulated).
    to_modulation: Option<Linear<Tensor>>,
    projection: Linear<Tensor>,
}

impl ModulatedOutput {
    /// Takes the parameters of `norm_out.linear` and `proj_out` below `weights`. Each token has `dim` features and
    /// becomes `out` values. `bias` says whether the two linear layers have biases.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new([dim, out]: [usize; 2], bias: bool, weights: &mut Weights<'_>) -> Result<Self> {
        Ok(Self {
            to_modulation: Some(weights.linear(MODULATION, dim, 2 * dim, bias)?),
            projection: weights.linear(PROJECTION, dim, out, bias)?,
        })
    }

    /// As [`new`](Self::new), for models that pass the modulation. This function takes only the parameters of
    /// `proj_out`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn with_given_modulation([dim, out]: [usize; 2], bias: bool, weights: &mut Weights<'_>) -> Result<Self> {
        Ok(Self { to_modulation: None, projection: weights.linear(PROJECTION, dim, out, bias)? })
    }

    /// The result (B, S, out) for the tokens `x (B, S, D)` and the condition `(B, D)`, to which the caller has applied
    /// SiLU.
    ///
    /// # Errors
    /// [`Error::Shape`] if an input does not fit, [`Error::Argument`] if the layer was made by
    /// [`with_given_modulation`](Self::with_given_modulation).
    pub fn forward(&self, x: &Tensor, condition: &Tensor) -> Result<Tensor> {
        let Some(to_modulation) = &self.to_modulation else {
            return Err(Error::argument("ModulatedOutput", "the layer has no modulation of its own"));
        };
        let modulation = to_modulation.forward(condition)?;
        let dim = to_modulation.in_features();
        // As in diffusers, the scale comes first here. In the blocks, the shift comes first.
        self.modulated(x, [&modulation.narrow(1, dim, dim)?, &modulation.narrow(1, 0, dim)?])
    }

    /// The result (B, S, out) for the tokens `x (B, S, D)` and a `modulation`: shift and scale, (B, D) each.
    ///
    /// # Errors
    /// [`Error::Shape`] if an input does not fit.
    pub fn modulated(&self, x: &Tensor, modulation: [&Tensor; 2]) -> Result<Tensor> {
        let normalized = modulated(x, modulation)?; // the layer norm, then the scale and the shift
        self.projection.forward(&normalized)
    }

    /// The dtype of the weights.
    pub fn dtype(&self) -> DType {
        self.projection.weight.dtype()
    }

    /// Adds to `saved` what the tape keeps for `tokens` tokens. No checkpoint contains this layer.
    pub fn saved(&self, tokens: usize, saved: &mut Saved) {
        let dim = self.projection.in_features();
        saved.outside(|saved| {
            // A pair has the number of a layer's input values and that of its input rows. The condition is one row of D
            // values.
            self.to_modulation.iter().for_each(|layer| saved.linear(layer, (dim, 1)));
            // The layer norm keeps its input.
            saved.keep(tokens * dim);
            saved.linear(&self.projection, (tokens * dim, tokens));
        });
    }
}

impl Module for ModulatedOutput {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.to_modulation.iter().try_for_each(|layer| visitor.linear(MODULATION, layer))?;
        visitor.linear(PROJECTION, &self.projection)
    }
}
