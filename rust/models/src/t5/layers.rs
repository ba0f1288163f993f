//! One block of T5's encoder.
//!
//! In the published models, three kinds of values exceed the largest f16, 65504: the residual stream (the sum of the
//! blocks' results), the results of `wo`, and the elementwise products gelu(`wi_0` x) · `wi_1` x. In half precision the
//! stream, the norms' statistics and the elementwise products are therefore in f32. Weights and the inputs of linear
//! layers have the model's dtype. bf16 has enough range, but a bf16 model's stream is in f32 too, for precision.

use trainable_candle_core::ops::activation::Gelu;
use trainable_candle_core::ops::attention::scaled_dot_product_attention;
use trainable_candle_core::ops::norm::rms_norm;
use trainable_candle_core::{DType, Error, Result, Tensor};
use trainable_candle_nn::{Init, Linear, LinearGroup, Module, Projected, Visitor, Weights};

use super::{FeedForward, T5Config};

/// The dtype of the residual stream in a model of `dtype`.
pub(super) const fn stream_dtype(dtype: DType) -> DType {
    if matches!(dtype, DType::F64) { DType::F64 } else { DType::F32 }
}

/// An RMS norm that reads the stream in the stream's dtype and returns the model's dtype.
pub(super) struct Norm {
    weight: Tensor,
    eps: f64,
}

impl Norm {
    pub(super) fn new(name: &str, config: &T5Config, weights: &mut Weights<'_>) -> Result<Self> {
        let weight = weights.pp(name).get("weight", config.d_model, Init::Constant(1.0))?;
        Ok(Self { weight, eps: config.layer_norm_epsilon })
    }

    /// The norm of the stream `x (B, L, D)`, in the same shape and the model's dtype.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        rms_norm(x, Some(&self.weight.to_dtype(x.dtype())?), self.eps)?.to_dtype(self.weight.dtype())
    }
}

impl Module for Norm {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.tensor("weight", &self.weight)
    }
}

/// The names of a block's linear layers.
const QKV: [&str; 3] = ["layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"];
const OUT: &str = "layer.0.SelfAttention.o";
const GATED: [&str; 2] = ["layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1"];
const UNGATED: &str = "layer.1.DenseReluDense.wi";
const WO: &str = "layer.1.DenseReluDense.wo";

/// The linear layers of a feed-forward network before its activation.
enum Middle {
    /// `wi_0` and `wi_1`.
    Gated(LinearGroup),
    /// `wi`.
    Relu(Linear<Tensor>),
}

/// Attention and a feed-forward network. Each reads the normalised stream, and its result is added to the stream.
pub(super) struct EncoderBlock {
    attention_norm: Norm,
    /// `q`, `k` and `v`.
    projections: LinearGroup,
    out: Linear<Tensor>,
    heads: usize,
    feed_forward_norm: Norm,
    middle: Middle,
    wo: Linear<Tensor>,
}

impl EncoderBlock {
    pub(super) fn new(config: &T5Config, weights: &mut Weights<'_>) -> Result<Self> {
        let (dim, inner, d_ff) = (config.d_model, config.inner_dim(), config.d_ff);
        let bias = false;
        Ok(Self {
            attention_norm: Norm::new("layer.0.layer_norm", config, weights)?,
            projections: weights.linear_group(&QKV.map(|name| (name, inner)), dim, bias, Init::Kaiming)?,
            out: weights.linear(OUT, inner, dim, bias)?,
            heads: config.num_heads,
            feed_forward_norm: Norm::new("layer.1.layer_norm", config, weights)?,
            middle: match config.feed_forward_proj {
                FeedForward::GatedGelu => {
                    let layers = GATED.map(|name| (name, d_ff));
                    Middle::Gated(weights.linear_group(&layers, dim, bias, Init::Kaiming)?)
                }
                FeedForward::Relu => Middle::Relu(weights.linear(UNGATED, dim, d_ff, bias)?),
            },
            wo: weights.linear(WO, d_ff, dim, bias)?,
        })
    }

    /// The stream after the block, in the shape and dtype of `x (B, L, D)`, the stream before the block. `bias`, of
    /// shape (1, heads, L, L) or (B, heads, L, L), is added to the scores.
    pub(super) fn forward(&self, x: &Tensor, bias: &Tensor) -> Result<Tensor> {
        let mixed = self.attend(&self.attention_norm.forward(x)?, bias)?;
        let x = x.add(&self.out.forward(&mixed)?.to_dtype(x.dtype())?)?;
        x.add(&self.feed_forward(&self.feed_forward_norm.forward(&x)?)?)
    }

    /// The result of attention before its output projection: `normed (B, L, D)` → (B, L, heads · `d_kv`). The scores
    /// are not divided by √`d_kv`, because T5's initial weights include this factor.
    fn attend(&self, normed: &Tensor, bias: &Tensor) -> Result<Tensor> {
        let [q, k, v] = split_heads(&self.projections.forward(normed)?, self.heads)?;
        let (is_causal, scale) = (false, Some(1.0));
        let mixed = scaled_dot_product_attention(&q, &k, &v, Some(bias), is_causal, scale)?;
        let &[batch, heads, length, width] = mixed.dims() else {
            return Err(Error::shape(
                "T5Encoder",
                format!("the result of attention has shape {:?}, expected (B, heads, L, d_kv)", mixed.dims()),
            ));
        };
        mixed.transpose(1, 2)?.reshape((batch, length, heads * width))
    }

    /// The feed-forward network's result for `normed (B, L, D)`, in the same shape and the stream's dtype.
    fn feed_forward(&self, normed: &Tensor) -> Result<Tensor> {
        // The dtype of the elementwise products: f32, or f64 in an f64 model.
        let wide = stream_dtype(normed.dtype());
        let hidden = match &self.middle {
            Middle::Gated(group) => {
                // gelu(wi_0 x) · (wi_1 x)
                let [gate, values] = halves(&group.forward(normed)?)?;
                gate.to_dtype(wide)?.gelu(Gelu::Tanh)?.mul(&values.to_dtype(wide)?)?
            }
            Middle::Relu(linear) => linear.forward(normed)?.to_dtype(wide)?.relu()?,
        };
        if normed.dtype() != DType::F16 {
            return self.wo.forward(&hidden.to_dtype(normed.dtype())?)?.to_dtype(wide);
        }
        // A linear layer without bias commutes with a scalar factor for each token. So each token's vector is divided
        // by its largest magnitude before `wo`, and the result of `wo` is multiplied by this magnitude. The result of
        // `wo` then stays in the range of f16 without f32 weights. The backward pass treats the magnitude as a
        // constant. The gradient is the same, because the magnitude cancels. The lower bound prevents a division by 0.
        let keep_dim = true;
        let largest = hidden.detach().abs()?.max(&[2], keep_dim)?.clamp(Some(f64::from(f32::MIN_POSITIVE)), None)?;
        self.wo.forward(&hidden.div(&largest)?.to_dtype(DType::F16)?)?.to_dtype(wide)?.mul(&largest)
    }
}

/// `q`, `k` and `v` as (B, heads, L, `d_kv`). `projected` has the results of the three layers, joined in one tensor or
/// separate.
fn split_heads(projected: &Projected, heads: usize) -> Result<[Tensor; 3]> {
    let by_head = |x: &Tensor| {
        let (batch, length, inner) = (x.dims()[0], x.dims()[1], x.dims()[2]);
        x.reshape((batch, length, heads, inner / heads))?.transpose(1, 2)
    };
    match projected {
        Projected::Joined(all) => {
            // q, k and v are one after the other in the features of a token. They become views, without copies.
            let (batch, length, inner) = (all.dims()[0], all.dims()[1], all.dims()[2] / 3);
            let parts = all.reshape((batch, length, 3, heads, inner / heads))?;
            let part = |index: usize| parts.narrow(2, index, 1)?.squeeze(2)?.transpose(1, 2);
            Ok([part(0)?, part(1)?, part(2)?])
        }
        Projected::Separate(parts) => match parts.as_slice() {
            [q, k, v] => Ok([by_head(q)?, by_head(k)?, by_head(v)?]),
            _ => Err(Error::argument("T5Encoder", format!("found {} projections, expected q, k and v", parts.len()))),
        },
    }
}

/// The results of the group's two layers, `wi_0` and `wi_1`.
fn halves(projected: &Projected) -> Result<[Tensor; 2]> {
    match projected {
        Projected::Joined(both) => {
            let width = both.dims()[2] / 2;
            Ok([both.narrow(2, 0, width)?, both.narrow(2, width, width)?])
        }
        Projected::Separate(parts) => match parts.as_slice() {
            [first, second] => Ok([first.clone(), second.clone()]),
            _ => Err(Error::argument("T5Encoder", format!("found {} layers, expected wi_0 and wi_1", parts.len()))),
        },
    }
}

impl Module for EncoderBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.projections.visit(visitor)?;
        visitor.linear(OUT, &self.out)?;
        visitor.module("layer.0.layer_norm", &self.attention_norm)?;
        match &self.middle {
            Middle::Gated(group) => group.visit(visitor)?,
            Middle::Relu(linear) => visitor.linear(UNGATED, linear)?,
        }
        visitor.linear(WO, &self.wo)?;
        visitor.module("layer.1.layer_norm", &self.feed_forward_norm)
    }
}
