//! Test cases of `activate_beside`, which computes `[before | f(x[..., start:])]`: the columns of `before`, if given,
//! and to the right of them an activation f of the columns of `x` from `start` on.

use super::{Activation, GELU_TANH_BESIDE, SWIGLU_BESIDE, activate_beside};
use crate::ops::activation::Gelu;
use crate::ops::case::{Case, Entry};
use crate::{Result, Tensor};

/// The plain form: `activate_beside` in basic operations.
fn plain(before: Option<&Tensor>, x: &Tensor, start: usize, activation: Activation) -> Result<Tensor> {
    let last = x.rank() - 1;
    let columns = x.narrow(last, start, x.dims()[last] - start)?;
    let y = match activation {
        Activation::GeluTanh => columns.gelu(Gelu::Tanh)?,
        Activation::SwiGlu => {
            let half = columns.dims()[last] / 2;
            columns.narrow(last, 0, half)?.silu()?.mul(&columns.narrow(last, half, half)?)?
        }
    };
    before.map_or(Ok(y.clone()), |before| Tensor::cat(&[before, &y], last))
}

fn cases(activation: Activation) -> Vec<Case> {
    // `shapes` has the shape of x and, if `before` is given, the shape of `before`.
    let case = |label, shapes: &[&[usize]], start| {
        Case::new(label, shapes, move |x| activate_beside(x.get(1), &x[0], start, activation))
            .plain(move |x| plain(x.get(1), &x[0], start, activation))
    };
    // `before` is computed from columns 1 to 3 of x, and the activation reads the columns from 6 on. So the gradient of
    // x has two parts, and columns 0, 4 and 5 get no gradient.
    let read_twice =
        move |x: &[Tensor], activate: fn(Option<&Tensor>, &Tensor, usize, Activation) -> Result<Tensor>| {
            let before = x[0].narrow(2, 1, 3)?.sqr()?;
            activate(Some(&before), &x[0], 6, activation)
        };
    vec![
        case("nothing before", &[&[2, 3, 34]], 0),
        case("nothing before, from a column on", &[&[2, 3, 22]], 4),
        case("from a column on", &[&[2, 3, 22], &[2, 3, 5]], 4),
        // All sizes are multiples of 16, so CUDA kernels access 16 bytes at a time, and not one element.
        case("wide", &[&[3, 48], &[3, 16]], 16),
        Case::new("input read twice", &[&[2, 3, 16]], move |x| read_twice(x, activate_beside))
            .plain(move |x| read_twice(x, plain)),
        case("one row", &[&[10]], 2),
        case("no rows", &[&[0, 4], &[0, 3]], 0),
        case("no columns", &[&[3, 4], &[3, 2]], 4),
    ]
}

/// Registry entries of this folder.
pub static ENTRIES: &[Entry] = &[
    Entry { info: &GELU_TANH_BESIDE, cases: || cases(Activation::GeluTanh) },
    Entry { info: &SWIGLU_BESIDE, cases: || cases(Activation::SwiGlu) },
];
