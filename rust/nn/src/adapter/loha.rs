//! LoHa (Hyeon-Woo et al. 2022, arXiv:2108.06098, as in `LyCORIS`, arXiv:2309.14859): W + s (A₁ B₁) ∘ (A₂ B₂), where ∘
//! is the elementwise product and s the adapter's scale.
//!
//! A convolution's weight counts as a matrix (out, height · width · in), in files (out, in · height · width). LyCORIS'
//! Tucker form of convolutions is not supported.
//!
//! The code follows
//! <https://github.com/KohakuBlueleaf/LyCORIS/blob/f49d30d670591ec8841d241d79aaa8449b30a715/lycoris/functional/loha.py#L78>.

use trainable_candle_core::ops::low_rank_hadamard::low_rank_hadamard;
use trainable_candle_core::{DType, Error, Result, Tensor, Var};

use super::delta::{Added, Delta};
use super::kind::{Parameters, SavedByAdapter, Start, StartValues, find};
use super::{Adapter, AdapterKind, AdapterSettings, Layout};
use crate::base::Base;

const A1: &str = "hada_w1_a";
const B1: &str = "hada_w1_b";
const A2: &str = "hada_w2_a";
const B2: &str = "hada_w2_b";

/// LoHa in the registry.
pub static KIND: AdapterKind = AdapterKind {
    name: "loha",
    parameters: &[(A1, Layout::Same), (B1, Layout::FlatKernel), (A2, Layout::Same), (B2, Layout::FlatKernel)],
    // A file with A₁ holds LoHa, as no other kind has this parameter. The first dimension of B₁ is the rank.
    mark: &[A1],
    ranked: &[B1],
    saved: SavedByAdapter::low_rank,
    start,
    build,
};

/// The initial values of `LyCORIS`: A₁ is normal with a standard deviation of 0.1, B₁ and B₂ are normal with a standard
/// deviation of 1, and A₂ is zero.
fn start(base: &Base<'_>, settings: &AdapterSettings) -> Parameters<Start> {
    let (rows, columns, rank) = (base.rows(), base.columns(), settings.rank);
    vec![
        (A1, Start::new([rows, rank], StartValues::Normal(0.1))),
        (B1, Start::new([rank, columns], StartValues::Normal(1.0))),
        (A2, Start::new([rows, rank], StartValues::Zero)),
        (B2, Start::new([rank, columns], StartValues::Normal(1.0))),
    ]
}

fn build(parameters: &[(&'static str, Var)], base: &Base<'_>, settings: &AdapterSettings) -> Result<Box<dyn Adapter>> {
    let get = |name: &str| {
        find(parameters, name).ok_or_else(|| Error::Config(format!("LoHa: the parameter {name} is missing")))
    };
    let loha = LoHa { a: [get(A1)?, get(A2)?], b: [get(B1)?, get(B2)?] };
    let fits = loha.a.iter().zip(&loha.b).all(|(a, b)| {
        let dims = (a.dims(), b.dims());
        matches!(dims, (&[n, r], &[b_rank, m]) if n == base.rows() && m == base.columns() && r == b_rank)
    });
    if !fits {
        let found: Vec<String> = parameters.iter().map(|(name, var)| format!("{name} {:?}", var.dims())).collect();
        return Err(Error::shape(
            "LoHa",
            format!(
                "found {}, expected ({}, r) for {A1} and {A2}, (r, {}) for {B1} and {B2}",
                found.join(", "),
                base.rows(),
                base.columns()
            ),
        ));
    }
    Ok(Box::new(Added::new(loha, settings)))
}

/// The factors of one layer.
struct LoHa {
    /// A₁ and A₂, (out, r).
    a: [Var; 2],
    /// B₁ and B₂, (r, height · width · in).
    b: [Var; 2],
}

impl Delta for LoHa {
    /// Compute (A₁ B₁) ∘ (A₂ B₂). [`Added`] multiplies it by s and adds it to W.
    fn delta(&self, base: &Base<'_>, dtype: DType) -> Result<Tensor> {
        let cast = |var: &Var| var.to_dtype(dtype);
        low_rank_hadamard(&cast(&self.a[0])?, &cast(&self.b[0])?, &cast(&self.a[1])?, &cast(&self.b[1])?)?
            .reshape(base.weight.dims())
    }
}
