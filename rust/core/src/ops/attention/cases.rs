//! Test cases of attention, most of them with a plain form for comparison.

use candle_core::Device;

use super::{
    HeadSizes, Stream, normed_attention, packed_attention, plain, scaled_dot_product_attention, varlen_attention,
};
use crate::ops::case::Case;
use crate::ops::norm::{rms_norm, rms_norm_rope};
use crate::{Result, Tensor};

pub(super) fn attention() -> Vec<Case> {
    const QKV: &[&[usize]] = &[&[2, 3, 5, 4], &[2, 3, 7, 4], &[2, 3, 7, 6]];
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
    let numbers = |device: &Device| {
        let values = (0..35).map(|i| f64::from(i % 11) * 0.3 - 1.0).collect::<Vec<_>>();
        Tensor::from_vec(values, (5, 7), device).map(Some)
    };
    let visible = |device: &Device| {
        let values = (0..14u8).map(|i| u8::from(i % 4 != 1)).collect::<Vec<_>>();
        Tensor::from_vec(values, (2, 1, 1, 7), device).map(Some)
    };
    vec![
        case("heads", QKV, |_| Ok(None), false, None),
        case("one matrix", &[&[5, 4], &[7, 4], &[7, 3]], |_| Ok(None), false, Some(0.7)),
        case("causal", QKV, |_| Ok(None), true, None),
        case("more queries than keys, causal", &[&[2, 9, 4], &[2, 3, 4], &[2, 3, 4]], |_| Ok(None), true, None),
        case("added mask", QKV, numbers, false, None),
        case("mask of keys", QKV, visible, false, None),
        case("mask and causal", QKV, numbers, true, None),
        case("several blocks", &[&[130, 2], &[3, 2], &[3, 2]], |_| Ok(None), false, None),
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

/// The plain form of packed attention: views and [`scaled_dot_product_attention`].
fn plain_packed(x: &[Tensor], heads: usize, is_causal: bool) -> Result<Tensor> {
    let split = |tensor: &Tensor, parts: usize| -> Result<Vec<Tensor>> {
        let (batch, length, width) = (tensor.dims()[0], tensor.dims()[1], tensor.dims()[2] / parts);
        let views = tensor.chunk(parts, 2)?;
        views.iter().map(|part| part.reshape((batch, length, heads, width / heads))?.transpose(1, 2)).collect()
    };
    let mut parts = split(&x[0], if x.len() > 1 { 1 } else { 3 })?;
    if let Some(context) = x.get(1) {
        parts.extend(split(context, 2)?);
    }
    let mixed = scaled_dot_product_attention(&parts[0], &parts[1], &parts[2], None, is_causal, None)?;
    let (batch, length, width) = (mixed.dims()[0], mixed.dims()[2], mixed.dims()[1] * mixed.dims()[3]);
    mixed.transpose(1, 2)?.reshape((batch, length, width))
}

pub(super) fn packed() -> Vec<Case> {
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

/// The settings of a case of normed attention. The projections are the case's inputs; the other operands are fixed.
#[derive(Clone, Copy)]
struct NormedCase {
    heads: usize,
    width: usize,
    has_norms: bool,
    rotates: bool,
    /// Whether each sample has angles of its own.
    per_sample: bool,
    masked: bool,
}

/// The scales of the norms of queries and keys; cos and sin of the rotation.
type NormedOperands = ([Option<Tensor>; 2], Option<[Tensor; 2]>);

impl NormedCase {
    const EPS: f64 = 1e-6;

    fn fixed(x: &Tensor, dims: &[usize], phase: f64, function: fn(f64) -> f64) -> Result<Tensor> {
        let values = (0..dims.iter().product()).map(|i: usize| function(i as f64 * 0.7 + phase)).collect();
        Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(x.dtype())?.to_device(x.device())
    }

    /// The fixed operands of stream `index`.
    fn operands(&self, x: &Tensor, index: usize) -> Result<NormedOperands> {
        let phase = index as f64;
        let scale = |more: f64| Self::fixed(x, &[self.width], phase + more, |angle| 1.0 + 0.5 * angle.sin());
        let norms = if self.has_norms { [Some(scale(0.1)?), Some(scale(0.2)?)] } else { [None, None] };
        let table = |function| {
            let dims = [x.dims()[0], x.dims()[1], self.width / 2];
            Self::fixed(x, if self.per_sample { &dims } else { &dims[1..] }, phase, function)
        };
        Ok((norms, if self.rotates { Some([table(f64::cos)?, table(f64::sin)?]) } else { None }))
    }

    fn mask(&self, xs: &[Tensor]) -> Result<Option<Tensor>> {
        if !self.masked {
            return Ok(None);
        }
        let (batch, tokens) = (xs[0].dims()[0], xs.iter().map(|x| x.dims()[1]).sum());
        let values = (0..batch * tokens).map(|i| u8::from(i % 4 != 1)).collect();
        Tensor::from_vec(values, (batch, 1, 1, tokens), xs[0].device()).map(Some)
    }

    fn run(&self, xs: &[Tensor]) -> Result<Tensor> {
        let operands = xs.iter().enumerate().map(|(i, x)| self.operands(x, i)).collect::<Result<Vec<_>>>()?;
        let streams: Vec<_> = xs
            .iter()
            .zip(&operands)
            .map(|(x, (norms, angles))| Stream {
                x,
                norms: norms.each_ref().map(Option::as_ref),
                angles: angles.as_ref().map(|angles| angles.each_ref()),
            })
            .collect();
        let sizes = HeadSizes { heads: self.heads, width: self.width, eps: Self::EPS };
        normed_attention(&streams, sizes, self.mask(xs)?.as_ref())
    }

    /// The plain form: views, norms with a rotation (sample by sample), then attention.
    fn plain(&self, xs: &[Tensor]) -> Result<Tensor> {
        let mut parts: [Vec<Tensor>; 3] = Default::default();
        for (index, x) in xs.iter().enumerate() {
            let (norms, angles) = self.operands(x, index)?;
            let (batch, length, columns) = (x.dims()[0], x.dims()[1], self.heads * self.width);
            for (part, all) in parts.iter_mut().enumerate() {
                let heads = (batch, length, self.heads, self.width);
                let rows = x.narrow(2, part * columns, columns)?.reshape(heads)?.transpose(1, 2)?;
                let Some(norm) = norms.get(part) else {
                    all.push(rows);
                    continue;
                };
                let Some([cos, sin]) = &angles else {
                    all.push(rms_norm(&rows, norm.as_ref(), Self::EPS)?);
                    continue;
                };
                let sample = |sample: usize| {
                    let row = |table: &Tensor| {
                        if self.per_sample { table.narrow(0, sample, 1)?.squeeze(0) } else { Ok(table.clone()) }
                    };
                    rms_norm_rope(&rows.narrow(0, sample, 1)?, norm.as_ref(), &row(cos)?, &row(sin)?, true, Self::EPS)
                };
                let samples = (0..batch).map(sample).collect::<Result<Vec<_>>>()?;
                all.push(Tensor::cat(&samples.iter().collect::<Vec<_>>(), 0)?);
            }
        }
        let join = |parts: &Vec<Tensor>| Tensor::cat(&parts.iter().collect::<Vec<_>>(), 2);
        let [q, k, v] = [join(&parts[0])?, join(&parts[1])?, join(&parts[2])?];
        let mixed = plain(&q, &k, &v, self.mask(xs)?.as_ref(), false, 1.0 / (self.width as f64).sqrt())?;
        let (batch, tokens) = (mixed.dims()[0], mixed.dims()[2]);
        mixed.transpose(1, 2)?.reshape((batch, tokens, self.heads * self.width))
    }
}

pub(super) fn normed() -> Vec<Case> {
    const BOTH: NormedCase =
        NormedCase { heads: 3, width: 4, has_norms: true, rotates: true, per_sample: false, masked: false };
    let case = |label, shapes: &[&[usize]], kind: NormedCase| {
        Case::new(label, shapes, move |x| kind.run(x)).plain(move |x| kind.plain(x))
    };
    vec![
        case("one stream", &[&[2, 5, 36]], BOTH),
        case("one stream, more columns", &[&[2, 5, 41]], BOTH),
        case("two streams", &[&[2, 3, 36], &[2, 5, 38]], BOTH),
        case("nothing is rotated", &[&[2, 3, 36], &[2, 5, 36]], NormedCase { rotates: false, ..BOTH }),
        case("no scales", &[&[2, 5, 36]], NormedCase { has_norms: false, ..BOTH }),
        case("angles per sample, masked", &[&[2, 5, 36]], NormedCase { per_sample: true, masked: true, ..BOTH }),
        case("wide", &[&[1, 4, 96], &[1, 3, 112]], NormedCase { heads: 2, width: 16, ..BOTH }),
        case("one token", &[&[2, 1, 36]], BOTH),
        Case::new("projection read twice", &[&[2, 5, 38]], move |x| BOTH.run(x)?.mul(&x[0].narrow(2, 26, 12)?))
            .plain(move |x| BOTH.plain(x)?.mul(&x[0].narrow(2, 26, 12)?)),
        Case::new("no tokens", &[&[2, 0, 36]], move |x| BOTH.run(x)),
    ]
}

/// Attention segment by segment, with keys and values repeated for the heads that share them.
pub(super) fn plain_varlen(x: &[Tensor], bounds: &[usize], window: usize) -> Result<Tensor> {
    let &[rows, heads, width] = x[0].dims() else { unreachable!("cases have three dimensions") };
    let key_heads = x[1].dims()[1];
    let mut results = Vec::new();
    for segment in bounds.windows(2).filter(|segment| segment[0] < segment[1]) {
        let len = segment[1] - segment[0];
        let part = |x: &Tensor| x.narrow(0, segment[0], len)?.transpose(0, 1);
        let repeated = |x: &Tensor| {
            let groups = (key_heads, heads / key_heads, len, width);
            part(x)?.unsqueeze(1)?.broadcast_as(groups)?.reshape((heads, len, width))
        };
        let seen = (0..len).flat_map(|q| (0..len).map(move |k| u8::from(k <= q && k + window > q))).collect();
        let seen = Tensor::from_vec(seen, (len, len), x[0].device())?;
        let scale = 1.0 / (width as f64).sqrt();
        let (q, k, v) = (part(&x[0])?, repeated(&x[1])?, repeated(&x[2])?);
        results.push(plain(&q, &k, &v, Some(&seen), false, scale)?.transpose(0, 1)?);
    }
    let last = bounds[bounds.len() - 1];
    // Rows after the last segment have zeros as results.
    results.push(x[0].narrow(0, last, rows - last)?.mul_scalar(0.0)?);
    Tensor::cat(&results.iter().collect::<Vec<_>>(), 0)
}

pub(super) fn varlen() -> Vec<Case> {
    let case = |label, rows: usize, [heads, key_heads]: [usize; 2], bounds: &'static [usize], window: Option<usize>| {
        let run = move |x: &[Tensor]| {
            let numbers = bounds.iter().map(|&bound| bound as i64).collect();
            let bounds = Tensor::from_vec(numbers, bounds.len(), x[0].device())?;
            varlen_attention(&x[0], &x[1], &x[2], &bounds, window, None)
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
