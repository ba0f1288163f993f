//! Attention of two streams of tokens to both, and of one to itself, with normalised queries and keys.

use trainable_candle_core::ops::attention::scaled_dot_product_attention;
use trainable_candle_core::ops::norm::rms_norm_rope;
use trainable_candle_core::ops::rope::rope;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Init, Linear, LinearGroup, Module, Projected, RmsNorm, Visitor, Weights};

use super::{BlockSizes, Rope};
use crate::saved::Saved;

/// What the projections of one stream are called.
struct Names {
    qkv: [&'static str; 3],
    norms: [&'static str; 2],
}

const IMAGE: Names = Names { qkv: ["to_q", "to_k", "to_v"], norms: ["norm_q", "norm_k"] };
const TEXT: Names = Names { qkv: ["add_q_proj", "add_k_proj", "add_v_proj"], norms: ["norm_added_q", "norm_added_k"] };

/// Queries, keys and values of one stream.
struct Stream {
    qkv: LinearGroup,
    /// Of queries and keys, each head by itself.
    norms: Option<[RmsNorm; 2]>,
    names: &'static Names,
    sizes: BlockSizes,
}

impl Stream {
    fn new(names: &'static Names, sizes: BlockSizes, weights: &mut Weights<'_>) -> Result<Self> {
        let dim = sizes.dim();
        let mut norm = |name| weights.rms_norm(name, sizes.head_dim, sizes.eps);
        let norms = if sizes.qk_norm { Some([norm(names.norms[0])?, norm(names.norms[1])?]) } else { None };
        let qkv = weights.linear_group(&names.qkv.map(|name| (name, dim)), dim, sizes.bias, Init::Kaiming)?;
        Ok(Self { qkv, norms, names, sizes })
    }

    /// `x (B, S, D)` → q, k and v, (B, heads, S, width of a head).
    fn forward(&self, x: &Tensor, angles: Option<&Rope>) -> Result<[Tensor; 3]> {
        heads_of(&self.qkv.forward(x)?, self.sizes, self.norms.as_ref(), angles)
    }

    /// What the tape keeps for `tokens` tokens.
    fn saved(&self, tokens: usize, saved: &mut Saved) {
        let inside = tokens * self.sizes.dim();
        saved.layers(&self.qkv.layers(), (inside, tokens), true);
        saved.keep(3 * inside);
        // After their norms.
        saved.keep_cheap(if self.norms.is_some() { 2 * inside } else { 0 });
    }
}

impl Module for Stream {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.qkv.visit(visitor)?;
        for (name, norm) in self.names.norms.iter().zip(self.norms.iter().flatten()) {
            visitor.module(name, norm)?;
        }
        Ok(())
    }
}

/// q, k and v, (B, heads, S, width of a head), of projections whose first columns are they; q and k normalised and turned.
pub(crate) fn heads_of(
    projected: &Projected,
    sizes: BlockSizes,
    norms: Option<&[RmsNorm; 2]>,
    angles: Option<&Rope>,
) -> Result<[Tensor; 3]> {
    let part = |index: usize| {
        let (dim, heads) = (sizes.dim(), sizes.heads);
        let x = match projected {
            Projected::Joined(all) => all.narrow(2, index * dim, dim)?,
            Projected::Separate(parts) => parts[index].clone(),
        };
        let (batch, length) = (x.dims()[0], x.dims()[1]);
        let x = x.reshape((batch, length, heads, sizes.head_dim))?.transpose(1, 2)?;
        let norm = norms.and_then(|norms| norms.get(index));
        let turned = |x: &Tensor, Rope { cos, sin }: &Rope| match norm {
            Some(norm) => rms_norm_rope(x, norm.weight.as_ref(), cos, sin, true, norm.eps),
            None => rope(x, cos, sin, true),
        };
        match (norm, angles.filter(|_| index < 2)) {
            (_, Some(angles)) if angles.is_per_sample() => {
                let sample = |i: usize| turned(&x.narrow(0, i, 1)?, &angles.sample(i)?);
                let samples = (0..batch).map(sample).collect::<Result<Vec<_>>>()?;
                Tensor::cat(&samples.iter().collect::<Vec<_>>(), 0)
            }
            (_, Some(angles)) => turned(&x, angles),
            (Some(norm), None) => norm.forward(&x),
            (None, None) => Ok(x),
        }
    };
    Ok([part(0)?, part(1)?, part(2)?])
}

/// Attention of q, k and v, (B, heads, S, width of a head), to the keys that `mask` (u8, broadcasting to (B, heads, S, S)) lets be
/// seen → (B, S, D).
pub(crate) fn attend([q, k, v]: &[Tensor; 3], mask: Option<&Tensor>) -> Result<Tensor> {
    let &[batch, heads, length, head_dim] = q.dims() else { unreachable!("made of four dimensions") };
    let mixed = scaled_dot_product_attention(q, k, v, mask, false, None)?;
    mixed.transpose(1, 2)?.reshape((batch, length, heads * head_dim))
}

/// Attention of an image and a text to both.
pub struct JointAttention {
    image: Stream,
    text: Stream,
    to_out: Linear<Tensor>,
    /// None where nothing follows on the text.
    to_add_out: Option<Linear<Tensor>>,
}

impl JointAttention {
    /// Parameters below `weights`; with `image_only`, the text's result is left out.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: BlockSizes, image_only: bool, weights: &mut Weights<'_>) -> Result<Self> {
        let dim = sizes.dim();
        Ok(Self {
            image: Stream::new(&IMAGE, sizes, weights)?,
            text: Stream::new(&TEXT, sizes, weights)?,
            to_out: weights.linear("to_out.0", dim, dim, sizes.bias)?,
            to_add_out: (!image_only).then(|| weights.linear("to_add_out", dim, dim, sizes.bias)).transpose()?,
        })
    }

    /// `image (B, S, D)` and `text (B, L, D)` → what each gets, the text's only if something follows on it. `angles` are those of the
    /// text's tokens, then of the image's.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if an input does not fit.
    pub fn forward(&self, image: &Tensor, text: &Tensor, angles: Option<&Rope>) -> Result<(Tensor, Option<Tensor>)> {
        let (length, area) = (text.dims()[1], image.dims()[1]);
        let part = |start: usize, length: usize| angles.map(|angles| angles.narrow(start, length)).transpose();
        let texts = self.text.forward(text, part(0, length)?.as_ref())?;
        let images = self.image.forward(image, part(length, area)?.as_ref())?;
        let both = |i: usize| Tensor::cat(&[&texts[i], &images[i]], 2);
        let mixed = attend(&[both(0)?, both(1)?, both(2)?], None)?;
        let image = self.to_out.forward(&mixed.narrow(1, length, area)?)?;
        let text = self.to_add_out.as_ref().map(|layer| layer.forward(&mixed.narrow(1, 0, length)?)).transpose()?;
        Ok((image, text))
    }

    /// What the tape keeps for an image of `area` tokens and a text of `length`.
    pub fn saved(&self, area: usize, length: usize, saved: &mut Saved) {
        self.text.saved(length, saved);
        self.image.saved(area, saved);
        let dim = self.to_out.in_features();
        saved.keep((area + length) * dim);
        // The result lies with the other stream's, so a copy goes into the layer.
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

/// Attention of an image to itself.
pub struct SelfAttention {
    stream: Stream,
    to_out: Linear<Tensor>,
}

impl SelfAttention {
    /// Parameters below `weights`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: BlockSizes, weights: &mut Weights<'_>) -> Result<Self> {
        let dim = sizes.dim();
        let to_out = weights.linear("to_out.0", dim, dim, sizes.bias)?;
        Ok(Self { stream: Stream::new(&IMAGE, sizes, weights)?, to_out })
    }

    /// `x (B, S, D)` → the same shape. `mask` (u8, (B, 1, 1, S)) says which keys are seen.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if an input does not fit.
    pub fn forward(&self, x: &Tensor, angles: Option<&Rope>, mask: Option<&Tensor>) -> Result<Tensor> {
        self.to_out.forward(&attend(&self.stream.forward(x, angles)?, mask)?)
    }

    /// What the tape keeps for `tokens` tokens.
    pub fn saved(&self, tokens: usize, saved: &mut Saved) {
        self.stream.saved(tokens, saved);
        saved.keep(tokens * self.to_out.in_features());
        // Whose input is that result.
        saved.linear(&self.to_out, (0, tokens));
    }
}

impl Module for SelfAttention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.stream.visit(visitor)?;
        visitor.linear("to_out.0", &self.to_out)
    }
}
