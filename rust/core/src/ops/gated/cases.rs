//! What the registry's walk tries gated units on.

use super::{GEGLU, SWIGLU, geglu, swiglu};
use crate::ops::activation::Gelu;
use crate::ops::case::{Case, Entry};
use crate::{Result, Tensor};

fn plain(x: &Tensor, activation: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let last = x.rank() - 1;
    let width = x.dims()[last] / 2;
    x.narrow(last, 0, width)?.mul(&activation(&x.narrow(last, width, width)?)?)
}

fn cases(
    fused: fn(&Tensor) -> Result<Tensor>,
    activation: impl Fn(&Tensor) -> Result<Tensor> + Copy + Send + Sync + 'static,
) -> Vec<Case> {
    let case = |label, dims: &[usize]| {
        Case::new(label, &[dims], move |x| fused(&x[0])).plain(move |x| plain(&x[0], activation))
    };
    vec![case("rows", &[2, 3, 34]), case("one row", &[10]), case("no rows", &[0, 4]), case("no features", &[3, 0])]
}

/// Registry entries of this folder.
pub static ENTRIES: &[Entry] = &[
    Entry { info: &GEGLU, cases: || cases(geglu, |gate| gate.gelu(Gelu::Exact)) },
    Entry { info: &SWIGLU, cases: || cases(swiglu, Tensor::silu) },
];
