//! Test cases of [`rope`], the rotary position embedding.

use super::{ROPE, rope};
use crate::ops::case::{Case, Entry};
use crate::{Result, Tensor};

/// The plain form of [`rope`], in basic operations: rotates each pair of features (a, b) of `x (..., S, D)` by its
/// angle, whose `cos` and `sin` are (S, D / 2). If `interleaved`, pair i has features 2 i and 2 i + 1, otherwise
/// features i and D / 2 + i.
pub(in crate::ops) fn plain(x: &Tensor, [cos, sin]: [&Tensor; 2], interleaved: bool) -> Result<Tensor> {
    let (rank, half) = (x.rank(), x.dims()[x.rank() - 1] / 2);
    let (a, b) = if interleaved {
        let mut dims = x.dims().to_vec();
        dims[rank - 1] = half;
        dims.push(2);
        let pairs = x.reshape(dims)?;
        (pairs.narrow(rank, 0, 1)?.squeeze(rank)?, pairs.narrow(rank, 1, 1)?.squeeze(rank)?)
    } else {
        (x.narrow(rank - 1, 0, half)?, x.narrow(rank - 1, half, half)?)
    };
    let (rotated_a, rotated_b) = (a.mul(cos)?.sub(&b.mul(sin)?)?, a.mul(sin)?.add(&b.mul(cos)?)?);
    if interleaved {
        Tensor::stack(&[&rotated_a, &rotated_b], rank)?.reshape(x.shape().clone())
    } else {
        Tensor::cat(&[&rotated_a, &rotated_b], rank - 1)
    }
}

/// cos and sin, (S, D / 2) each, for test cases with `x (..., S, D)`. The angles are arbitrary: the operation does not
/// require that they grow with the position.
pub(in crate::ops) fn tables(x: &Tensor) -> Result<[Tensor; 2]> {
    let (length, half) = (x.dims()[x.rank() - 2], x.dims()[x.rank() - 1] / 2);
    let table = |f: fn(f64) -> f64| {
        let values = (0..length * half).map(|i| f(i as f64 * 0.7)).collect::<Vec<_>>();
        Tensor::from_vec(values, (length, half), x.device())?.to_dtype(x.dtype())
    };
    Ok([table(f64::cos)?, table(f64::sin)?])
}

/// Registry entry of this operation.
pub static ENTRIES: &[Entry] = &[Entry {
    info: &ROPE,
    cases: || {
        let case = |label, shape: &[usize], interleaved| {
            let fused = move |x: &[Tensor]| {
                let [cos, sin] = tables(&x[0])?;
                rope(&x[0], &cos, &sin, interleaved)
            };
            Case::new(label, &[shape], fused).plain(move |x| {
                let [cos, sin] = tables(&x[0])?;
                plain(&x[0], [&cos, &sin], interleaved)
            })
        };
        vec![
            case("halves", &[2, 3, 5, 6], false),
            case("interleaved", &[2, 3, 5, 6], true),
            // No dimension before S and D.
            case("one matrix", &[3, 2], false),
            // No positions: S is 0.
            case("empty", &[2, 0, 4], true),
        ]
    },
}];
