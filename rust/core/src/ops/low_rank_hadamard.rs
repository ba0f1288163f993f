//! The elementwise product (A₁ B₁) ∘ (A₂ B₂) of two low-rank matrices as one operation (`LoHa`:
//! Hyeon-Woo et al. 2022, arXiv:2108.06098; `LyCORIS`, arXiv:2309.14859).
//!
//! A₁ B₁ and A₂ B₂ are each as large as a layer's weight, so the tape does not save them: the backward pass recomputes
//! them.

#[cfg(feature = "testing")]
use super::case::{Case, Entry};
use super::linear::same_kind;
use crate::cpu::Mul;
use crate::raw::Raw;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, compute};

static HADAMARD: OpInfo = OpInfo::cheap("low_rank_hadamard");

struct HadamardBackward {
    /// The factors A₁, B₁, A₂ and B₂.
    factors: [Saved; 4],
}

impl Backward for HadamardBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = context.grad().clone();
        // Indices of the factors: A and B of the low-rank matrix whose gradient is computed, then of the other.
        for [a, b, other_a, other_b] in [[0, 1, 2, 3], [2, 3, 0, 1]] {
            if !context.needs(a) && !context.needs(b) {
                continue;
            }
            let other_product = compute::matmul(&self.factors[other_a].get()?, &self.factors[other_b].get()?)?;
            let grad_product = compute::binary(&grad, &other_product, Mul)?;
            if context.needs(a) {
                context.add(a, compute::matmul(&grad_product, &self.factors[b].get()?.t()?)?)?;
            }
            if context.needs(b) {
                context.add(b, compute::matmul(&self.factors[a].get()?.t()?, &grad_product)?)?;
            }
        }
        Ok(())
    }
}

fn forward(factors: [&Raw; 4]) -> Result<Raw> {
    let [a1, b1, a2, b2] = factors;
    compute::binary(&compute::matmul(a1, b1)?, &compute::matmul(a2, b2)?, Mul)
}

/// Computes (A₁ B₁) ∘ (A₂ B₂), where ∘ is the elementwise product: `a1 (n, r₁)`, `b1 (r₁, m)`, `a2 (n, r₂)`,
/// `b2 (r₂, m)` → `(n, m)`. Saves the factors.
///
/// # Errors
/// [`Error::Shape`] if the factors do not have the shapes above, [`Error::DType`] if their dtypes differ or are not
/// floating point, [`Error::Device`] if they are on different devices.
pub fn low_rank_hadamard(a1: &Tensor, b1: &Tensor, a2: &Tensor, b2: &Tensor) -> Result<Tensor> {
    let factors = [a1, b1, a2, b2];
    let fits = factors.iter().all(|f| f.rank() == 2)
        && a1.dims()[1] == b1.dims()[0]
        && a2.dims()[1] == b2.dims()[0]
        && a1.dims()[0] == a2.dims()[0]
        && b1.dims()[1] == b2.dims()[1];
    if !fits {
        let found: Vec<&[usize]> = factors.iter().map(|f| f.dims()).collect();
        return Err(Error::shape(
            HADAMARD.name,
            format!("the factors have shapes {found:?}, expected (n, r), (r, m), (n, s), (s, m)"),
        ));
    }
    for (name, other) in [("second factor", b1), ("third factor", a2), ("fourth factor", b2)] {
        same_kind(HADAMARD.name, a1, name, other)?;
    }
    record(
        &HADAMARD,
        &factors,
        || forward(factors.map(|f| &f.raw)),
        |saver, _| HadamardBackward { factors: factors.map(|f| saver.save(f)) },
    )
}

/// Registry entry of this file.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[Entry {
    info: &HADAMARD,
    cases: || {
        let run = |x: &[Tensor]| low_rank_hadamard(&x[0], &x[1], &x[2], &x[3]);
        let plain = |x: &[Tensor]| x[0].matmul(&x[1])?.mul(&x[2].matmul(&x[3])?);
        // Each case: a label, the shapes of A₁, B₁, A₂ and B₂, and the operation.
        vec![
            Case::new("", &[&[4, 2], &[2, 5], &[4, 3], &[3, 5]], run).plain(plain),
            Case::new("no rows", &[&[0, 2], &[2, 5], &[0, 2], &[2, 5]], run).plain(plain),
        ]
    },
}];
