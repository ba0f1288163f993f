//! Causal attention inside each segment of a row of tokens.

use trainable_candle_core::ops::attention::scaled_dot_product_attention;
use trainable_candle_core::{DType, Device, Error, Result, Tensor};

use super::config::OP;

/// Attention of each token to those before it in its segment, itself included, or to the last `window` of them: `q (N, heads, D)`, `k`
/// and `v (N, kv_heads, D)` → `(N, heads, D)`. Segment i is the tokens from `cu_seqlens[i]` to before `cu_seqlens[i + 1]`; it may be
/// empty. Each head of keys and values serves the same number of heads of queries, one after the other. `scale` is 1/√D unless given.
///
/// # Errors
/// [`Error::Argument`] if the bounds do not rise from 0 to N; those of the attention.
pub(super) fn varlen_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cu_seqlens: &Tensor,
    window: Option<usize>,
    scale: Option<f64>,
) -> Result<Tensor> {
    let heads = q.dims()[1];
    let mut results = Vec::new();
    for (start, end) in segments(cu_seqlens, q.dims()[0])? {
        let length = end - start;
        let part = |x: &Tensor| x.narrow(0, start, length)?.transpose(0, 1);
        let (q, k, v) = (part(q)?, repeated(&part(k)?, heads)?, repeated(&part(v)?, heads)?);
        let mask =
            window.filter(|&window| window < length).map(|window| seen(length, window, q.device())).transpose()?;
        results.push(scaled_dot_product_attention(&q, &k, &v, mask.as_ref(), true, scale)?.transpose(0, 1)?);
    }
    match results.as_slice() {
        [] => q.contiguous(),
        [one] => one.contiguous(),
        several => Tensor::cat(&several.iter().collect::<Vec<_>>(), 0),
    }
}

/// The segments that are not empty.
fn segments(cu_seqlens: &Tensor, tokens: usize) -> Result<Vec<(usize, usize)>> {
    let bounds = cu_seqlens.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec::<i64>()?;
    let rises = bounds.first() == Some(&0) && bounds.windows(2).all(|pair| pair[0] <= pair[1]);
    if !rises || bounds.last().copied() != i64::try_from(tokens).ok() {
        let text =
            format!("cu_seqlens is {bounds:?}, expected numbers that rise from 0 to {tokens}, the number of tokens");
        return Err(Error::argument(OP, text));
    }
    let pairs = bounds.windows(2).map(|pair| (pair[0] as usize, pair[1] as usize));
    Ok(pairs.filter(|(start, end)| start < end).collect())
}

/// Heads of keys or values `(kv_heads, L, D)`, each as often as heads of queries read it.
fn repeated(x: &Tensor, heads: usize) -> Result<Tensor> {
    let &[kv_heads, length, width] = x.dims() else {
        return Err(Error::shape(OP, format!("keys have shape {:?}", x.dims())));
    };
    if kv_heads == heads {
        return Ok(x.clone());
    }
    x.unsqueeze(1)?.broadcast_as((kv_heads, heads / kv_heads, length, width))?.reshape((heads, length, width))
}

/// Which keys are in the window of each query; later ones among them.
fn seen(length: usize, window: usize, device: &Device) -> Result<Tensor> {
    let seen = (0..length).flat_map(|query| (0..length).map(move |key| u8::from(key + window > query)));
    Tensor::from_vec(seen.collect::<Vec<u8>>(), (length, length), device)
}
