//! `swiglu_linear_group`: the gated unit SwiGLU of linear maps with LoRA adapters, as one operation. On CUDA, low-rank
//! products s (x Aᵀ) Bᵀ that the kernels support are "late": the kernel of SwiGLU computes them from x Aᵀ and adds them
//! to the maps' results while it reads these results. A separate addition would read and write the maps' results once
//! more.

#[cfg(feature = "cuda")]
mod cuda;

use candle_core::Shape;
use smallvec::SmallVec;

use super::{SWIGLU, run, run_backward, swiglu};
use crate::compute::{self, on_device};
use crate::ops::activation::Silu;
use crate::ops::linear::{as_matrix, forward, with_last};
use crate::ops::linear_group::{LinearGroup, linear_group};
use crate::ops::low_rank::{LastProduct, LowRankBackward, LowRanks};
use crate::raw::{Raw, own_copy};
use crate::tape::{Again, Backward, BackwardContext, OpInfo, Saved, Saver, record_with_aux};
use crate::{Error, Result, Tensor, checkpoint};

pub(super) static SWIGLU_LINEAR_GROUP: OpInfo = OpInfo::expensive("swiglu_linear_group");

/// Computes [`swiglu`](super::swiglu) of [`linear_group`](crate::ops::linear_group::linear_group): `x (..., in)` →
/// `(..., n)`. The maps of `group` have 2 n output features in all, the second half of which is the gate.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit, [`Error::Shape`] if the number of
/// output features is odd, [`Error::Argument`] if the base needs a gradient or a scale is not finite.
pub fn swiglu_linear_group(x: &Tensor, group: LinearGroup<'_>) -> Result<Tensor> {
    let op = SWIGLU_LINEAR_GROUP.name;
    if checkpoint::is_selective() {
        // Of two operations, a selective checkpoint keeps only the maps' results and recomputes SwiGLU, which is cheap.
        // Of one fused operation, which is expensive, it would also keep the result.
        return swiglu(&linear_group(x, group)?);
    }
    group.check(op, x)?;
    let out_features = group.weight.dims()[0];
    if !out_features.is_multiple_of(2) {
        return Err(Error::shape(
            op,
            format!(
                "the linear maps have {out_features} output features, expected an even number: one half is the gate"
            ),
        ));
    }
    let low_ranks = group.low_ranks(x.dtype())?;
    let inputs: Vec<&Tensor> = std::iter::once(x).chain(low_ranks.factors()).collect();
    let are_late = on_device!(
        x.device(),
        cuda => cuda::supports(x.dtype(), out_features / 2, low_ranks.last_products()),
        cpu => false,
    );
    let shape = with_last(&x.raw, out_features / 2);
    record_with_aux(
        &SWIGLU_LINEAR_GROUP,
        &inputs,
        || {
            let Maps { y, hidden, late } = Maps::of(&as_matrix(&x.raw)?, group, &low_ranks, are_late)?;
            let result = unit(&y, late.as_ref())?.reshape(&shape)?;
            Ok((result, std::iter::once(y).chain(hidden).collect()))
        },
        // `aux` has y, then x Aᵀ if there are adapters.
        |saver, _, aux| Gated {
            low_rank: low_ranks.save(saver, x, group.weight, aux.get(1)),
            y: saver.save_raw(&aux[0]),
            late: aux.get(1).filter(|_| are_late).map(|hidden| Late::save(saver, hidden, &low_ranks)),
            shape: shape.clone(),
        },
    )
}

/// The results of the maps.
pub(super) struct Maps {
    /// The maps' results without the products in `late`, (rows, 2 n).
    pub y: Raw,
    /// x Aᵀ of all adapters side by side; `None` without adapters.
    pub hidden: Option<Raw>,
    /// The low-rank products that are not added to `y`; `None` if there are none.
    pub late: Option<Late<Raw>>,
}

impl Maps {
    /// Applies the maps to the matrix `x`. If `are_late`, returns the low-rank products in `late`, otherwise adds them
    /// to `y`.
    pub fn of(x: &Raw, group: LinearGroup<'_>, low_ranks: &LowRanks<'_>, are_late: bool) -> Result<Self> {
        let y = forward(x, group.weight, group.bias.map(|bias| &bias.raw))?;
        if !are_late {
            let hidden = low_ranks.add_to(&y, x)?;
            return Ok(Self { y, hidden, late: None });
        }
        let hidden = low_ranks.hidden(x)?;
        let products = low_ranks.last_products().map(LastProduct::cloned).collect();
        Ok(Self { y, hidden: Some(hidden.clone()), late: Some(Late { hidden, products }) })
    }
}

/// Low-rank products that are not yet added to the maps' results. `S` is [`Raw`], or [`Saved`] in the backward pass.
pub(super) struct Late<S> {
    /// x Aᵀ of all adapters side by side.
    pub hidden: S,
    /// For each adapter, its product of `hidden` and Bᵀ, not yet computed.
    pub products: SmallVec<[LastProduct<S>; 2]>,
}

impl Late<Saved> {
    pub fn save(saver: &mut Saver<'_>, hidden: &Raw, low_ranks: &LowRanks<'_>) -> Self {
        Self { hidden: saver.save_raw(hidden), products: low_ranks.save_last_products(saver) }
    }

    pub fn get(&self) -> Result<Late<Raw>> {
        let products = self.products.iter().map(LastProduct::get).collect::<Result<_>>()?;
        Ok(Late { hidden: self.hidden.get()?, products })
    }
}

impl Late<Raw> {
    /// The sum of y (rows, 2 n) and the late products, in new storage.
    pub fn added_to(&self, y: &Raw) -> Result<Raw> {
        let sum = own_copy(y)?;
        // The first index and the number of an adapter's columns: `columns` in y, `ranks` in `hidden`.
        for LastProduct { up, columns, ranks, scale } in &self.products {
            let target = sum.narrow(1, columns[0], columns[1])?;
            let hidden = self.hidden.narrow(1, ranks[0], ranks[1])?;
            // target += scale · hidden · upᵀ
            let accumulate = true;
            compute::write_products(&[[&target, &hidden, &up.t()?]], *scale, accumulate)?;
        }
        Ok(sum)
    }
}

/// Applies SwiGLU to the sum of y (rows, 2 n) and the late products, if any. There are late products only on CUDA;
/// `on_device!` needs a CPU form all the same.
pub(super) fn unit(y: &Raw, late: Option<&Late<Raw>>) -> Result<Raw> {
    let width = y.dims()[1] / 2;
    match late {
        Some(late) => on_device!(
            y.device(),
            cuda => cuda::forward(y, late),
            cpu => run(SWIGLU.name, &late.added_to(y)?, width, Silu),
        ),
        None => run(SWIGLU.name, y, width, Silu),
    }
}

/// The backward pass of [`swiglu_linear_group`].
struct Gated {
    low_rank: LowRankBackward,
    /// The results of the maps, (rows, 2 n), without the products in `late`.
    y: Saved,
    /// On CUDA, the low-rank products that are not added to `y`.
    late: Option<Late<Saved>>,
    /// The shape of the result.
    shape: Shape,
}

impl Backward for Gated {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let (y, grad) = (self.y.get()?, as_matrix(context.grad())?);
        let grad = match &self.late {
            Some(late) => {
                let late = late.get()?;
                on_device!(
                    y.device(),
                    cuda => cuda::backward(&y, &grad, &late)?,
                    cpu => run_backward(SWIGLU.name, &late.added_to(&y)?, &grad, grad.dims()[1], Silu)?,
                )
            }
            None => run_backward(SWIGLU.name, &y, &grad, grad.dims()[1], Silu)?,
        };
        self.low_rank.run(context, &grad)
    }

    /// A function that recomputes the result from the saved values.
    fn again(&self) -> Option<Again<'_>> {
        Some(Box::new(|| {
            let late = self.late.as_ref().map(Late::get).transpose()?;
            Ok(unit(&self.y.get()?, late.as_ref())?.reshape(&self.shape)?)
        }))
    }
}
