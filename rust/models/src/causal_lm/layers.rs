//! One decoder layer of a language model: attention and a feed-forward network.

use trainable_candle_core::ops::attention::{
    RotaryHeads, rotary_attention, scaled_dot_product_attention, varlen_attention,
};
use trainable_candle_core::ops::norm::rms_norm_rope;
use trainable_candle_core::ops::rope::rope;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Init, Layer, Linear, LinearGroup, Module, Projected, RmsNorm, Visitor, Weights};

use super::{CausalLMConfig, Family};
use crate::saved::Saved;

/// The names of the query, key and value projections.
const PROJECTIONS: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
const OUT: &str = "self_attn.o_proj";
const QUERY_NORM: &str = "self_attn.q_norm";
const KEY_NORM: &str = "self_attn.k_norm";
/// The names of the feed-forward network's two input projections. The gate comes last, as
/// [`LinearGroup::forward_swiglu`] requires.
const MLP_IN: [&str; 2] = ["mlp.up_proj", "mlp.gate_proj"];
const MLP_OUT: &str = "mlp.down_proj";
const INPUT_NORM: &str = "input_layernorm";
const MLP_NORM: &str = "post_attention_layernorm";
/// Attention divides its scores by the square root of `head_dim`.
const DEFAULT_SCALE: Option<f64> = None;

/// A pre-norm decoder layer: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.
pub(super) struct DecoderLayer {
    /// The norm before attention.
    input_norm: RmsNorm,
    /// `q_proj`, `k_proj` and `v_proj`.
    projections: LinearGroup,
    /// The norms of queries and of keys, over the features of a head. `None` if the family has no such norms.
    head_norms: Option<[RmsNorm; 2]>,
    /// The output projection of attention.
    out: Linear<Tensor>,
    /// The number of query heads.
    heads: usize,
    /// The number of key and value heads.
    kv_heads: usize,
    /// The largest number of tokens that a token attends to, itself included; `None` for no limit.
    window: Option<usize>,
    /// The norm before the feed-forward network.
    mlp_norm: RmsNorm,
    /// `up_proj` and `gate_proj`.
    mlp_in: LinearGroup,
    /// The output projection of the feed-forward network.
    mlp_out: Linear<Tensor>,
}

impl DecoderLayer {
    /// A layer with the parameters below `weights`.
    pub(super) fn new(config: &CausalLMConfig, window: Option<usize>, weights: &mut Weights<'_>) -> Result<Self> {
        let &CausalLMConfig { hidden_size: dim, intermediate_size: wide, head_dim, rms_norm_eps: eps, .. } = config;
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let sizes = [heads, kv_heads, kv_heads].map(|heads| heads * head_dim);
        let projections = [0, 1, 2].map(|i| (PROJECTIONS[i], sizes[i]));
        Ok(Self {
            input_norm: weights.rms_norm(INPUT_NORM, dim, eps)?,
            projections: weights.linear_group(&projections, dim, config.qkv_bias, Init::Kaiming)?,
            head_norms: match config.family {
                Family::Qwen3 => {
                    Some([weights.rms_norm(QUERY_NORM, head_dim, eps)?, weights.rms_norm(KEY_NORM, head_dim, eps)?])
                }
                Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen25Vl => None,
            },
            out: weights.linear(OUT, heads * head_dim, dim, config.out_bias)?,
            heads,
            kv_heads,
            window,
            mlp_norm: weights.rms_norm(MLP_NORM, dim, eps)?,
            mlp_in: weights.linear_group(&MLP_IN.map(|name| (name, wide)), dim, config.mlp_bias, Init::Kaiming)?,
            mlp_out: weights.linear(MLP_OUT, wide, dim, config.mlp_bias)?,
        })
    }

    /// The layer's result (N, D) for the hidden states `x (N, D)` of N tokens, with D = `hidden_size`. The cosines and
    /// sines of the tokens' rotary angles are `cos` and `sin`, each (N, `head_dim` / 2). The N tokens are those of one
    /// or more packed texts. `cu_seqlens` has the bounds of the texts: text i has the tokens `cu_seqlens[i]` to
    /// `cu_seqlens[i + 1]` - 1.
    pub(super) fn forward(&self, x: &Tensor, [cos, sin, cu_seqlens]: [&Tensor; 3]) -> Result<Tensor> {
        // `recomputed`: the tape does not keep the norm's result; the backward pass computes it again.
        let projected = self.projections.forward(&self.input_norm.forward(x)?.recomputed())?;
        let mixed = if let Projected::Joined(all) = &projected {
            // Queries, keys and values are side by side in one tensor. One operation normalizes and rotates queries
            // and keys, and attends.
            let norms = self.head_norms.as_ref().map(|[q, k]| ([q.weight.as_ref(), k.weight.as_ref()], q.eps));
            let rotary = RotaryHeads { heads: self.heads, key_heads: self.kv_heads, angles: [cos, sin], norms };
            rotary_attention(all, rotary, cu_seqlens, self.window)?
        } else {
            let [q, k, v] = self.rotate(&projected, [cos, sin])?;
            varlen_attention(&q, &k, &v, cu_seqlens, self.window, DEFAULT_SCALE)?
        };
        self.finish(x, &mixed)
    }

    /// As [`forward`](Self::forward), for one text that is followed by padding. The first `text_tokens` of the N rows
    /// are the text's tokens, 0 < text_tokens < N, and the other rows are padding tokens. `cu_seqlens` is [0,
    /// text_tokens]. Each padding token attends to all tokens of the text, but to no padding token.
    pub(super) fn forward_padded(
        &self,
        x: &Tensor,
        text_tokens: usize,
        [cos, sin, cu_seqlens]: [&Tensor; 3],
    ) -> Result<Tensor> {
        let [q, k, v] = self.project(x, [cos, sin])?;
        let text = |x: &Tensor| x.narrow(0, 0, text_tokens);
        let (keys, values) = (text(&k)?, text(&v)?);
        let mixed = varlen_attention(&text(&q)?, &keys, &values, cu_seqlens, self.window, DEFAULT_SCALE)?;
        let (padding, width) = (x.dims()[0] - text_tokens, q.dims()[2]);
        // All padding tokens attend to the same keys. So one attention for each key head suffices: its queries are
        // those of all padding tokens, in the `group` query heads that share the key head.
        let group = self.heads / self.kv_heads;
        let by_key_head = (padding, self.kv_heads, group, width);
        let queries = q.narrow(0, text_tokens, padding)?.reshape(by_key_head)?.permute(&[1, 0, 2, 3])?;
        let queries = queries.reshape((self.kv_heads, padding * group, width))?;
        let (keys, values) = (keys.transpose(0, 1)?.contiguous()?, values.transpose(0, 1)?.contiguous()?);
        let (mask, is_causal) = (None, false);
        let of_padding = scaled_dot_product_attention(&queries, &keys, &values, mask, is_causal, DEFAULT_SCALE)?;
        let of_padding = of_padding.reshape((self.kv_heads, padding, group, width))?.permute(&[1, 0, 2, 3])?;
        self.finish(x, &Tensor::cat(&[&mixed, &of_padding.reshape((padding, self.heads, width))?], 0)?)
    }

    /// The queries, keys and values of the layer's input `x (N, D)`, each (N, heads, `head_dim`). `x` is normalized
    /// first. Queries and keys are normalized, if the family has norms of queries and keys, and rotated by the angles
    /// with the cosines and sines `tables`.
    pub(super) fn project(&self, x: &Tensor, tables: [&Tensor; 2]) -> Result<[Tensor; 3]> {
        self.rotate(&self.projections.forward(&self.input_norm.forward(x)?)?, tables)
    }

    /// Splits the projections as [`split`](Self::split), and normalizes and rotates queries and keys as
    /// [`project`](Self::project).
    fn rotate(&self, projected: &Projected, tables: [&Tensor; 2]) -> Result<[Tensor; 3]> {
        let [q, k, v] = self.split(projected)?;
        // Pair i of a head consists of the features i and i + head_dim / 2.
        let interleaved = false;
        let rotate = |x: &Tensor, norm: Option<&RmsNorm>| {
            // (heads, N, head_dim).
            let (by_head, [cos, sin]) = (x.transpose(0, 1)?, tables);
            let rotated = match norm {
                Some(norm) => rms_norm_rope(&by_head, norm.weight.as_ref(), cos, sin, interleaved, norm.eps),
                None => rope(&by_head, cos, sin, interleaved),
            };
            rotated?.transpose(0, 1)
        };
        let [of_queries, of_keys] = self.head_norms.as_ref().map_or([None, None], |[q, k]| [Some(q), Some(k)]);
        Ok([rotate(&q, of_queries)?, rotate(&k, of_keys)?, v])
    }

    /// Splits the projections into queries, keys and values, each (N, heads, `head_dim`).
    fn split(&self, projected: &Projected) -> Result<[Tensor; 3]> {
        // The numbers of heads of queries, keys and values.
        let counts = [self.heads, self.kv_heads, self.kv_heads];
        match projected {
            Projected::Joined(all) => {
                let (tokens, total) = (all.dims()[0], counts.iter().sum::<usize>());
                let all = all.reshape((tokens, total, all.dims()[1] / total))?;
                let part = |start, count| all.narrow(1, start, count);
                let [heads, kv_heads, _] = counts;
                Ok([part(0, heads)?, part(heads, kv_heads)?, part(heads + kv_heads, kv_heads)?])
            }
            Projected::Separate(parts) => {
                let by_head = |index: usize| {
                    let part = &parts[index];
                    part.reshape((part.dims()[0], counts[index], part.dims()[1] / counts[index]))
                };
                Ok([by_head(0)?, by_head(1)?, by_head(2)?])
            }
        }
    }

    /// Computes the layer's result from the layer's input `x (N, D)` and from `mixed`, the result of attention before
    /// the output projection, of shape (N, heads, `head_dim`) or (N, heads · `head_dim`).
    pub(super) fn finish(&self, x: &Tensor, mixed: &Tensor) -> Result<Tensor> {
        let mixed = mixed.reshape((x.dims()[0], self.out.in_features()))?;
        let (x, normed) = self.mlp_norm.add_forward(x, &self.out.forward(&mixed)?)?;
        x.add(&self.mlp_in.feed_forward(&normed.recomputed(), &self.mlp_out)?)
    }

    /// Adds to `saved` what the tape keeps of a forward pass over `tokens` tokens.
    pub(super) fn saved(&self, tokens: usize, saved: &mut Saved) {
        let &[dim, wide] = self.mlp_out.weight.dims() else { return };
        // Numbers of values: of the hidden states, between the projections of the feed-forward network, of the queries,
        // and of the keys.
        let (states, between, queries) = (tokens * dim, tokens * wide, tokens * self.out.in_features());
        let keys = queries / self.heads * self.kv_heads;
        // Full checkpointing recomputes each layer alone.
        let joins_previous = false;
        // In each pair below: the values of the layers' common input, and the tokens. The tape keeps this input, or the
        // backward pass recomputes it.
        saved.block(states, joins_previous, |saved| {
            // The input of the first norm.
            saved.keep(states);
            saved.layers_of_recomputed_input(&self.projections.layers(), (states, tokens));
            // Each token attends to itself and the tokens before it: on average, to half of all tokens.
            saved.attention(tokens, tokens / 2, self.out.in_features());
            // Attention keeps queries, keys, values and its result.
            saved.keep(2 * queries + 2 * keys);
            // 0: the input of the output projection is the result of attention, which has been counted above.
            saved.linear(&self.out, (0, tokens));
            // The input of the second norm.
            saved.keep(states);
            saved.layers_of_recomputed_input(&self.mlp_in.layers(), (states, tokens));
            // The results of both input projections.
            saved.keep(2 * between);
            saved.layers_of_recomputed_input(&[Layer::Linear(&self.mlp_out)], (between, tokens));
        });
    }
}

impl Module for DecoderLayer {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module(INPUT_NORM, &self.input_norm)?;
        self.projections.visit(visitor)?;
        if let Some([of_queries, of_keys]) = &self.head_norms {
            visitor.module(QUERY_NORM, of_queries)?;
            visitor.module(KEY_NORM, of_keys)?;
        }
        visitor.linear(OUT, &self.out)?;
        visitor.module(MLP_NORM, &self.mlp_norm)?;
        self.mlp_in.visit(visitor)?;
        visitor.linear(MLP_OUT, &self.mlp_out)
    }
}
