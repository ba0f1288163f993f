//! Attention whose queries and keys are normalised, if the model has norms for them. [`JointAttention`] has two
//! streams, image and text: every token attends to all tokens of both streams. [`SelfAttention`] has one stream.

use trainable_candle_core::ops::attention::{
    HeadSizes, Stream as Tokens, normed_attention, scaled_dot_product_attention,
};
use trainable_candle_core::ops::norm::rms_norm_rope;
use trainable_candle_core::ops::rope::rope;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Init, Linear, LinearGroup, Module, Projected, RmsNorm, Visitor, Weights};

use super::{AttentionInputs, BlockSizes, Rope};
use crate::saved::Saved;

/// The names of one stream's projections and norms.
struct Names {
    /// The layers that compute queries, keys and values.
    qkv: [&'static str; 3],
    /// The norms of queries and keys.
    norms: [&'static str; 2],
}

const IMAGE: Names = Names { qkv: ["to_q", "to_k", "to_v"], norms: ["norm_q", "norm_k"] };
const TEXT: Names = Names { qkv: ["add_q_proj", "add_k_proj", "add_v_proj"], norms: ["norm_added_q", "norm_added_k"] };

/// The projections of one stream.
struct Projections {
    qkv: LinearGroup,
    /// Norms of queries and keys, per head.
    norms: Option<[RmsNorm; 2]>,
    names: &'static Names,
    sizes: BlockSizes,
}

impl Projections {
    fn new(names: &'static Names, sizes: BlockSizes, weights: &mut Weights<'_>) -> Result<Self> {
        let dim = sizes.dim();
        let mut norm = |name| weights.rms_norm(name, sizes.head_dim, sizes.eps);
        let norms = if sizes.qk_norm { Some([norm(names.norms[0])?, norm(names.norms[1])?]) } else { None };
        let qkv = weights.linear_group(&names.qkv.map(|name| (name, dim)), dim, sizes.bias, Init::Kaiming)?;
        Ok(Self { qkv, norms, names, sizes })
    }

    /// The stream of the tokens `x (B, S, D)`, for [`mix`].
    fn forward(&self, x: &Tensor, angles: Option<Rope>) -> Result<Stream<'_>> {
        Ok(Stream { projected: self.qkv.forward(x)?, norms: self.norms.as_ref(), angles })
    }

    /// Adds to `saved` what the tape keeps for `tokens` tokens.
    fn saved(&self, tokens: usize, saved: &mut Saved) {
        let values = tokens * self.sizes.dim();
        // The input, `values` values of `tokens` tokens, comes from a norm, which is cheap to recompute.
        let is_input_cheap = true;
        saved.layers(&self.qkv.layers(), (values, tokens), is_input_cheap);
        // The queries and keys (before their norms) and the values that attention reads: `values` numbers each.
        saved.keep(3 * values);
    }
}

impl Module for Projections {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.qkv.visit(visitor)?;
        for (name, norm) in self.names.norms.iter().zip(self.norms.iter().flatten()) {
            visitor.module(name, norm)?;
        }
        Ok(())
    }
}

/// One stream of tokens in an attention.
pub(crate) struct Stream<'a> {
    /// Queries, keys and values of the tokens, in this order. Results of other layers that read the same input may
    /// follow; attention ignores them.
    pub projected: Projected,
    /// Norms of queries and keys, per head.
    pub norms: Option<&'a [RmsNorm; 2]>,
    /// The rotary embedding's angles of the tokens.
    pub angles: Option<Rope>,
}

/// Attention of the tokens of all streams to the tokens of all streams. If there is a `mask` (u8, broadcast to (B,
/// heads, N, N)), its zeros hide keys from queries. The result is (B, N, D): the N tokens of all streams, in the order
/// of the streams.
pub(crate) fn mix(streams: &[Stream<'_>], sizes: BlockSizes, mask: Option<&Tensor>) -> Result<Tensor> {
    let tokens: Option<Vec<Tokens<'_>>> = streams.iter().map(Stream::as_tokens).collect();
    if let Some(tokens) = tokens {
        return normed_attention(
            &tokens,
            HeadSizes { heads: sizes.heads, width: sizes.head_dim, eps: sizes.eps },
            mask,
        );
    }
    let qkvs = streams.iter().map(|stream| stream.qkv(sizes)).collect::<Result<Vec<_>>>()?;
    // The queries (index 0), keys (1) or values (2) of all streams.
    let joined = |index: usize| match qkvs.as_slice() {
        [qkv] => Ok(qkv[index].clone()),
        several => Tensor::cat(&several.iter().map(|qkv| &qkv[index]).collect::<Vec<_>>(), 2),
    };
    let (q, k, v) = (joined(0)?, joined(1)?, joined(2)?);
    let (batch, length) = (q.dims()[0], q.dims()[2]);
    let (is_causal, scale) = (false, None);
    let mixed = scaled_dot_product_attention(&q, &k, &v, mask, is_causal, scale)?;
    mixed.transpose(1, 2)?.reshape((batch, length, sizes.dim()))
}

impl Stream<'_> {
    /// The stream as an input of [`normed_attention`]. None if the stream's projections are not joined, if the stream
    /// has no norms, or if its norms are trainable.
    fn as_tokens(&self) -> Option<Tokens<'_>> {
        let (Projected::Joined(x), Some(norms)) = (&self.projected, self.norms) else { return None };
        let norms = norms.each_ref().map(|norm| norm.weight.as_ref());
        let are_trainable = norms.iter().flatten().any(|weight| weight.requires_grad());
        let angles = self.angles.as_ref().map(|Rope { cos, sin }| [cos, sin]);
        (!are_trainable).then_some(Tokens { x, norms, angles })
    }

    /// q, k and v, each (B, heads, S, width of a head). q and k are normalised if the stream has norms, and rotated if
    /// it has angles.
    fn qkv(&self, sizes: BlockSizes) -> Result<[Tensor; 3]> {
        // Parts 0, 1 and 2 are q, k and v.
        let part = |index: usize| {
            let (dim, heads) = (sizes.dim(), sizes.heads);
            let is_rotated = index < 2;
            let x = match &self.projected {
                Projected::Joined(joined) => joined.narrow(2, index * dim, dim)?,
                Projected::Separate(parts) => parts[index].clone(),
            };
            let (batch, length) = (x.dims()[0], x.dims()[1]);
            let x = x.reshape((batch, length, heads, sizes.head_dim))?.transpose(1, 2)?;
            // There are two norms, so v has none.
            let norm = self.norms.and_then(|norms| norms.get(index));
            let interleaved = true;
            let rotate = |x: &Tensor, Rope { cos, sin }: &Rope| match norm {
                Some(norm) => rms_norm_rope(x, norm.weight.as_ref(), cos, sin, interleaved, norm.eps),
                None => rope(x, cos, sin, interleaved),
            };
            match (norm, self.angles.as_ref().filter(|_| is_rotated)) {
                (_, Some(angles)) if angles.is_per_sample() => {
                    let rotate_sample = |i: usize| rotate(&x.narrow(0, i, 1)?, &angles.sample(i)?);
                    let samples = (0..batch).map(rotate_sample).collect::<Result<Vec<_>>>()?;
                    Tensor::cat(&samples.iter().collect::<Vec<_>>(), 0)
                }
                (_, Some(angles)) => rotate(&x, angles),
                (Some(norm), None) => norm.forward(&x),
                (None, None) => Ok(x),
            }
        };
        Ok([part(0)?, part(1)?, part(2)?])
    }
}

/// Attention in which every token of an image and of a text attends to all tokens of the image and the text.
pub struct JointAttention {
    image: Projections,
    text: Projections,
    to_out: Linear<Tensor>,
    /// The output projection of the text; None if no later layer reads the text.
    to_add_out: Option<Linear<Tensor>>,
}

impl JointAttention {
    /// Takes parameters below `weights`. With `image_only`, the text's result is not computed.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: BlockSizes, image_only: bool, weights: &mut Weights<'_>) -> Result<Self> {
        let dim = sizes.dim();
        Ok(Self {
            image: Projections::new(&IMAGE, sizes, weights)?,
            text: Projections::new(&TEXT, sizes, weights)?,
            to_out: weights.linear("to_out.0", dim, dim, sizes.bias)?,
            to_add_out: (!image_only).then(|| weights.linear("to_add_out", dim, dim, sizes.bias)).transpose()?,
        })
    }

    /// The layer's results for the tokens `image (B, S, D)` and `text (B, L, D)`, in the same shapes. The text's result
    /// is None if the layer was made with `image_only`.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if an input does not fit.
    pub fn forward(
        &self,
        image: &Tensor,
        text: &Tensor,
        attention_inputs: AttentionInputs<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        // The numbers of text and image tokens. The text comes first, in `angles` and in the joint sequence.
        let (length, area) = (text.dims()[1], image.dims()[1]);
        let angles =
            |start: usize, tokens: usize| attention_inputs.angles.map(|all| all.narrow(start, tokens)).transpose();
        let streams = [self.text.forward(text, angles(0, length)?)?, self.image.forward(image, angles(length, area)?)?];
        let mixed = mix(&streams, self.image.sizes, attention_inputs.mask)?;
        let image = self.to_out.forward(&mixed.narrow(1, length, area)?)?;
        let text = self.to_add_out.as_ref().map(|layer| layer.forward(&mixed.narrow(1, 0, length)?)).transpose()?;
        Ok((image, text))
    }

    /// Adds to `saved` what the tape keeps for an image of `area` tokens and a text of `length` tokens.
    pub fn saved(&self, area: usize, length: usize, saved: &mut Saved) {
        self.text.saved(length, saved);
        self.image.saved(area, saved);
        let dim = self.to_out.in_features();
        let (queries, keys) = (area + length, area + length);
        saved.attention(queries, keys, dim);
        // One tensor holds attention's results for both streams. Each output projection reads a copy of its part, which
        // is cheap to recompute. The pairs give the number of the copy's values, and of its tokens.
        saved.keep((area + length) * dim);
        saved.cheap_linear(&self.to_out, (area * dim, area));
        if let Some(layer) = &self.to_add_out {
            saved.cheap_linear(layer, (length * dim, length));
        }
    }
}

impl Module for JointAttention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.image.visit(visitor)?;
        self.text.visit(visitor)?;
        visitor.linear("to_out.0", &self.to_out)?;
        self.to_add_out.iter().try_for_each(|layer| visitor.linear("to_add_out", layer))
    }
}

/// Attention of the tokens of one stream to one another. Its layers are named like [`JointAttention`]'s image layers.
pub struct SelfAttention {
    stream: Projections,
    to_out: Linear<Tensor>,
}

impl SelfAttention {
    /// Takes parameters below `weights`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: BlockSizes, weights: &mut Weights<'_>) -> Result<Self> {
        let dim = sizes.dim();
        let to_out = weights.linear("to_out.0", dim, dim, sizes.bias)?;
        Ok(Self { stream: Projections::new(&IMAGE, sizes, weights)?, to_out })
    }

    /// The layer's result for the tokens `x (B, S, D)`, in the same shape.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if an input does not fit.
    pub fn forward(&self, x: &Tensor, attention_inputs: AttentionInputs<'_>) -> Result<Tensor> {
        let stream = self.stream.forward(x, attention_inputs.angles.cloned())?;
        self.to_out.forward(&mix(&[stream], self.stream.sizes, attention_inputs.mask)?)
    }

    /// Adds to `saved` what the tape keeps for `tokens` tokens.
    pub fn saved(&self, tokens: usize, saved: &mut Saved) {
        self.stream.saved(tokens, saved);
        let (queries, keys) = (tokens, tokens);
        saved.attention(queries, keys, self.to_out.in_features());
        saved.keep(tokens * self.to_out.in_features());
        // Attention's result is the input of `to_out`, and is counted already, so 0 values are added.
        saved.linear(&self.to_out, (0, tokens));
    }
}

impl Module for SelfAttention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.stream.visit(visitor)?;
        visitor.linear("to_out.0", &self.to_out)
    }
}
