//! Test cases of attention, most of them with a plain form for comparison.

use candle_core::Device;

use super::{
    HeadSizes, Stream, normed_attention, packed_attention, plain, scaled_dot_product_attention, varlen_attention,
};
use crate::ops::case::Case;
use crate::ops::norm::{rms_norm, rms_norm_rope};
use crate::{Result, Tensor};

pub(super) fn attention() -> Vec<Case> {
    /// Shapes of q, k and v: (batch, heads, tokens, width), with 5 queries, 7 keys, and values of another width.
    const QKV: &[&[usize]] = &[&[2, 3, 5, 4], &[2, 3, 7, 4], &[2, 3, 7, 6]];
    // `scale` is None for 1/√width, the default.
    let case =
        |label, shapes: &[&[usize]], mask: fn(&Device) -> Result<Option<Tensor>>, is_causal, scale: Option<f64>| {
            let fused = move |x: &[Tensor]| {
                let mask = mask(x[0].device())?;
                scaled_dot_product_attention(&x[0], &x[1], &x[2], mask.as_ref(), is_causal, scale)
            };
            Case::new(label, shapes, fused).plain(move |x| {
                let scale = scale.unwrap_or_else(|| 1.0 / (x[0].dims()[x[0].rank() - 1] as f64).sqrt());
                plain(&x[0], &x[1], &x[2], mask(x[0].device())?.as_ref(), is_causal, scale)
            })
        };
    let no_mask = |_: &Device| -> Result<Option<Tensor>> { Ok(None) };
    // Numbers that are added to the scores of 5 queries and 7 keys.
    let added_mask = |device: &Device| {
        let values = (0..35).map(|i| f64::from(i % 11) * 0.3 - 1.0).collect::<Vec<_>>();
        Tensor::from_vec(values, (5, 7), device).map(Some)
    };
    // For each of the 7 keys of the 2 samples, whether queries see it.
    let u8_mask = |device: &Device| {
        let values = (0..14u8).map(|i| u8::from(i % 4 != 1)).collect::<Vec<_>>();
        Tensor::from_vec(values, (2, 1, 1, 7), device).map(Some)
    };
    vec![
        case("heads", QKV, no_mask, false, None),
        case("one matrix", &[&[5, 4], &[7, 4], &[7, 3]], no_mask, false, Some(0.7)),
        case("causal", QKV, no_mask, true, None),
        case("more queries than keys, causal", &[&[2, 9, 4], &[2, 3, 4], &[2, 3, 4]], no_mask, true, None),
        case("added mask", QKV, added_mask, false, None),
        case("u8 mask of keys", QKV, u8_mask, false, None),
        case("added mask and causal", QKV, added_mask, true, None),
        case("several blocks of queries", &[&[130, 2], &[3, 2], &[3, 2]], no_mask, false, None),
        // No comparison with the plain form, which attention itself uses for a mask that needs a gradient.
        Case::new("learned mask", &[&[5, 4], &[7, 4], &[7, 4], &[5, 7]], |x| {
            scaled_dot_product_attention(&x[0], &x[1], &x[2], Some(&x[3]), false, None)
        }),
        Case::new("no keys", &[&[2, 3, 4], &[2, 0, 4], &[2, 0, 4]], |x| {
            scaled_dot_product_attention(&x[0], &x[1], &x[2], None, false, None)
        }),
        Case::new("no queries", &[&[2, 0, 4], &[2, 3, 4], &[2, 3, 4]], |x| {
            scaled_dot_product_attention(&x[0], &x[1], &x[2], None, false, None)
        }),
    ]
}

/// Computes the plain form of packed attention: [`scaled_dot_product_attention`] of views. `x` is either one tensor
/// (batch, tokens, 3 D) with the columns of queries, keys and values side by side, or two tensors: the queries
/// (batch, tokens, D), and the keys and values (batch, other tokens, 2 D). D is the width of all heads together.
fn plain_packed(x: &[Tensor], heads: usize, is_causal: bool) -> Result<Tensor> {
    // Divides the columns into `parts` groups (queries, keys, values): views (batch, heads, tokens, width of a head).
    let split = |tensor: &Tensor, parts: usize| -> Result<Vec<Tensor>> {
        let (batch, length, width) = (tensor.dims()[0], tensor.dims()[1], tensor.dims()[2] / parts);
        let views = tensor.chunk(parts, 2)?;
        views.iter().map(|part| part.reshape((batch, length, heads, width / heads))?.transpose(1, 2)).collect()
    };
    let mut qkv = split(&x[0], if x.len() > 1 { 1 } else { 3 })?;
    if let Some(context) = x.get(1) {
        qkv.extend(split(context, 2)?);
    }
    let result = scaled_dot_product_attention(&qkv[0], &qkv[1], &qkv[2], None, is_causal, None)?;
    let (batch, length, width) = (result.dims()[0], result.dims()[2], result.dims()[1] * result.dims()[3]);
    result.transpose(1, 2)?.reshape((batch, length, width))
}

pub(super) fn packed() -> Vec<Case> {
    // The shapes are those of `plain_packed`.
    let case = |label, shapes: &[&[usize]], heads, is_causal| {
        Case::new(label, shapes, move |x| packed_attention(&x[0], x.get(1), heads, is_causal))
            .plain(move |x| plain_packed(x, heads, is_causal))
    };
    vec![
        case("self-attention", &[&[2, 5, 18]], 3, false),
        case("cross-attention", &[&[2, 5, 6], &[2, 3, 12]], 3, false),
        case("causal", &[&[1, 7, 12]], 2, true),
        case("one head", &[&[2, 3, 15]], 1, false),
        case("one token", &[&[2, 1, 12]], 2, false),
        Case::new("no tokens", &[&[2, 0, 12]], |x| packed_attention(&x[0], None, 2, false)),
    ]
}

/// The settings of a case of normed attention. A stream is a sequence of tokens for each sample, such as the text or
/// the image; the tokens of all streams attend to each other. The streams' projections are the case's inputs; the other
/// operands are fixed.
#[derive(Clone, Copy)]
struct NormedCase {
    heads: usize,
    /// The width of a head.
    width: usize,
    /// Whether the norms have scales.
    has_scales: bool,
    /// Whether queries and keys are rotated.
    rotates: bool,
    /// Whether each sample has angles of its own.
    angles_per_sample: bool,
    /// Whether some keys of each sample are masked.
    is_masked: bool,
}

/// The scales of the norms of queries and keys, if there are any; cos and sin of the rotation, if there is one.
type NormedOperands = ([Option<Tensor>; 2], Option<[Tensor; 2]>);

impl NormedCase {
    const EPS: f64 = 1e-6;

    /// A tensor of shape `dims`, like `x` in dtype and device, whose element i is `function(0.7 i + phase)`.
    fn fixed(x: &Tensor, dims: &[usize], phase: f64, function: fn(f64) -> f64) -> Result<Tensor> {
        let values = (0..dims.iter().product()).map(|i: usize| function(i as f64 * 0.7 + phase)).collect();
        Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(x.dtype())?.to_device(x.device())
    }

    /// The fixed operands of stream `index`, which differ from those of other streams.
    fn operands(&self, x: &Tensor, index: usize) -> Result<NormedOperands> {
        let phase = index as f64;
        let scale = |shift: f64| Self::fixed(x, &[self.width], phase + shift, |angle| 1.0 + 0.5 * angle.sin());
        let scales = if self.has_scales { [Some(scale(0.1)?), Some(scale(0.2)?)] } else { [None, None] };
        let table = |function| {
            let dims = [x.dims()[0], x.dims()[1], self.width / 2];
            Self::fixed(x, if self.angles_per_sample { &dims } else { &dims[1..] }, phase, function)
        };
        Ok((scales, if self.rotates { Some([table(f64::cos)?, table(f64::sin)?]) } else { None }))
    }

    /// A u8 mask of the keys of each sample, if the case has a mask.
    fn mask(&self, xs: &[Tensor]) -> Result<Option<Tensor>> {
        if !self.is_masked {
            return Ok(None);
        }
        let (batch, tokens) = (xs[0].dims()[0], xs.iter().map(|x| x.dims()[1]).sum());
        let values = (0..batch * tokens).map(|i| u8::from(i % 4 != 1)).collect();
        Tensor::from_vec(values, (batch, 1, 1, tokens), xs[0].device()).map(Some)
    }

    /// Computes normed attention of streams with the projections `xs`: one tensor (batch, tokens, columns) for each
    /// stream. The first 3 · heads · width columns are queries, keys and values; further columns are not read.
    fn run(&self, xs: &[Tensor]) -> Result<Tensor> {
        let operands = xs.iter().enumerate().map(|(i, x)| self.operands(x, i)).collect::<Result<Vec<_>>>()?;
        let streams: Vec<_> = xs
            .iter()
            .zip(&operands)
            .map(|(x, (scales, angles))| Stream {
                x,
                norms: scales.each_ref().map(Option::as_ref),
                angles: angles.as_ref().map(|angles| angles.each_ref()),
            })
            .collect();
        let sizes = HeadSizes { heads: self.heads, width: self.width, eps: Self::EPS };
        normed_attention(&streams, sizes, self.mask(xs)?.as_ref())
    }

    /// Computes the plain form: makes views of heads, normalises and rotates queries and keys of each sample, and
    /// computes attention.
    fn plain(&self, xs: &[Tensor]) -> Result<Tensor> {
        // Queries, keys and values, each with one tensor per stream.
        let mut qkv: [Vec<Tensor>; 3] = Default::default();
        for (index, x) in xs.iter().enumerate() {
            let (scales, angles) = self.operands(x, index)?;
            let (batch, length, columns) = (x.dims()[0], x.dims()[1], self.heads * self.width);
            for (part, streams) in qkv.iter_mut().enumerate() {
                let dims = (batch, length, self.heads, self.width);
                let heads = x.narrow(2, part * columns, columns)?.reshape(dims)?.transpose(1, 2)?;
                // There are no scales for the values (part 2), which are neither normalised nor rotated.
                let Some(scale) = scales.get(part) else {
                    streams.push(heads);
                    continue;
                };
                let Some([cos, sin]) = &angles else {
                    streams.push(rms_norm(&heads, scale.as_ref(), Self::EPS)?);
                    continue;
                };
                let rotated = |sample: usize| {
                    let angles_of = |table: &Tensor| {
                        if self.angles_per_sample { table.narrow(0, sample, 1)?.squeeze(0) } else { Ok(table.clone()) }
                    };
                    let (heads, cos, sin) = (heads.narrow(0, sample, 1)?, angles_of(cos)?, angles_of(sin)?);
                    let is_interleaved = true;
                    rms_norm_rope(&heads, scale.as_ref(), &cos, &sin, is_interleaved, Self::EPS)
                };
                let samples = (0..batch).map(rotated).collect::<Result<Vec<_>>>()?;
                streams.push(Tensor::cat(&samples.iter().collect::<Vec<_>>(), 0)?);
            }
        }
        let join = |streams: &Vec<Tensor>| Tensor::cat(&streams.iter().collect::<Vec<_>>(), 2);
        let [q, k, v] = [join(&qkv[0])?, join(&qkv[1])?, join(&qkv[2])?];
        let result = plain(&q, &k, &v, self.mask(xs)?.as_ref(), false, 1.0 / (self.width as f64).sqrt())?;
        let (batch, tokens) = (result.dims()[0], result.dims()[2]);
        result.transpose(1, 2)?.reshape((batch, tokens, self.heads * self.width))
    }
}

pub(super) fn normed() -> Vec<Case> {
    // Queries, keys and values take 3 · 3 · 4 = 36 columns.
    const BASE: NormedCase =
        NormedCase { heads: 3, width: 4, has_scales: true, rotates: true, angles_per_sample: false, is_masked: false };
    let case = |label, shapes: &[&[usize]], settings: NormedCase| {
        Case::new(label, shapes, move |x| settings.run(x)).plain(move |x| settings.plain(x))
    };
    vec![
        case("one stream", &[&[2, 5, 36]], BASE),
        case("one stream, columns after the values", &[&[2, 5, 41]], BASE),
        case("two streams", &[&[2, 3, 36], &[2, 5, 38]], BASE),
        case("nothing is rotated", &[&[2, 3, 36], &[2, 5, 36]], NormedCase { rotates: false, ..BASE }),
        case("no scales", &[&[2, 5, 36]], NormedCase { has_scales: false, ..BASE }),
        case(
            "angles per sample, masked",
            &[&[2, 5, 36]],
            NormedCase { angles_per_sample: true, is_masked: true, ..BASE },
        ),
        case("wider heads", &[&[1, 4, 96], &[1, 3, 112]], NormedCase { heads: 2, width: 16, ..BASE }),
        case("one token", &[&[2, 1, 36]], BASE),
        // Attention and the product both read the projection, so its gradient is a sum of two. The product reads
        // columns 26 to 37: most of the values (columns 24 to 35), and the columns after them.
        Case::new("projection read twice", &[&[2, 5, 38]], move |x| BASE.run(x)?.mul(&x[0].narrow(2, 26, 12)?))
            .plain(move |x| BASE.plain(x)?.mul(&x[0].narrow(2, 26, 12)?)),
        Case::new("no tokens", &[&[2, 0, 36]], move |x| BASE.run(x)),
    ]
}

/// Computes the plain form of attention in a packed row: attention of each segment, with keys and values repeated for
/// the query heads that share them. `x` is q (tokens, heads, width), k and v (tokens, key heads, width). Segment i has
/// the tokens from bound i up to bound i + 1. A query sees at most `window` keys: its own and those before it.
pub(super) fn plain_varlen(x: &[Tensor], bounds: &[usize], window: usize) -> Result<Tensor> {
    let &[rows, heads, width] = x[0].dims() else { unreachable!("cases have three dimensions") };
    let key_heads = x[1].dims()[1];
    let mut results = Vec::new();
    for segment in bounds.windows(2).filter(|segment| segment[0] < segment[1]) {
        let len = segment[1] - segment[0];
        let part = |x: &Tensor| x.narrow(0, segment[0], len)?.transpose(0, 1);
        let repeated = |x: &Tensor| {
            let repeated_dims = (key_heads, heads / key_heads, len, width);
            part(x)?.unsqueeze(1)?.broadcast_as(repeated_dims)?.reshape((heads, len, width))
        };
        let seen = (0..len).flat_map(|q| (0..len).map(move |k| u8::from(k <= q && k + window > q))).collect();
        let seen = Tensor::from_vec(seen, (len, len), x[0].device())?;
        let scale = 1.0 / (width as f64).sqrt();
        let (q, k, v) = (part(&x[0])?, repeated(&x[1])?, repeated(&x[2])?);
        results.push(plain(&q, &k, &v, Some(&seen), false, scale)?.transpose(0, 1)?);
    }
    let end = bounds[bounds.len() - 1];
    // Rows after the last segment have zeros as results.
    results.push(x[0].narrow(0, end, rows - end)?.mul_scalar(0.0)?);
    Tensor::cat(&results.iter().collect::<Vec<_>>(), 0)
}

pub(super) fn varlen() -> Vec<Case> {
    // The arguments are those of `plain_varlen`; `rows` is the number of tokens.
    let case = |label, rows: usize, [heads, key_heads]: [usize; 2], bounds: &'static [usize], window: Option<usize>| {
        let run = move |x: &[Tensor]| {
            let numbers = bounds.iter().map(|&bound| bound as i64).collect();
            let bounds = Tensor::from_vec(numbers, bounds.len(), x[0].device())?;
            let default_scale = None;
            varlen_attention(&x[0], &x[1], &x[2], &bounds, window, default_scale)
        };
        Case::new(label, &[&[rows, heads, 4], &[rows, key_heads, 4], &[rows, key_heads, 4]], run)
            .plain(move |x| plain_varlen(x, bounds, window.unwrap_or(rows)))
    };
    vec![
        case("one segment", 7, [2, 2], &[0, 7], None),
        case("segments and groups", 11, [6, 2], &[0, 5, 6, 6, 11], None),
        case("window", 9, [2, 1], &[0, 7, 9], Some(3)),
        case("window of one", 5, [2, 2], &[0, 5], Some(1)),
        case("tokens after the last segment, repeated bounds", 10, [4, 2], &[0, 1, 2, 7, 7, 7], None),
        case("no segment", 3, [1, 1], &[0], None),
        case("several blocks", 140, [2, 1], &[0, 3, 131, 139], Some(100)),
        case("no rows", 0, [2, 1], &[0, 0], None),
    ]
}
