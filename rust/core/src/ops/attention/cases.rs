//! What the registry's walk tries attention on.

use candle_core::Device;

use super::{packed_attention, plain, scaled_dot_product_attention};
use crate::ops::case::Case;
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

/// The same from views and [`scaled_dot_product_attention`].
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
        case("of itself", &[&[2, 5, 18]], 3, false),
        case("of a context", &[&[2, 5, 6], &[2, 3, 12]], 3, false),
        case("causal", &[&[1, 7, 12]], 2, true),
        case("one head", &[&[2, 3, 15]], 1, false),
        case("one token", &[&[2, 1, 12]], 2, false),
        Case::new("no tokens", &[&[2, 0, 12]], |x| packed_attention(&x[0], None, 2, false)),
    ]
}
