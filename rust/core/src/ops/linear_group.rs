//! Several linear maps of one input, computed as a single map: y = x [W₁; W₂; …]ᵀ + [b₁, b₂, …]. Each map may add a
//! low-rank product of its own.
//!
//! The rows of the frozen weights are stacked, so that the base takes one matrix product in the forward pass and one
//! in the backward pass. The low-rank products s (x Aᵀ) Bᵀ (LoRA, arXiv:2106.09685) of the maps, and their dtypes, are
//! as in [`lora`](super::lora).

use candle_core::DType;

#[cfg(feature = "testing")]
use super::case::{Case, Entry};
#[cfg(feature = "testing")]
use super::linear::linear;
use super::linear::{as_matrix, check, forward_unless_unread, with_last};
use super::lora::{check_factors, check_frozen, check_scale};
use super::low_rank::LowRanks;
use crate::quantized::WeightRef;
#[cfg(feature = "testing")]
use crate::quantized::{Format, example};
use crate::tape::{OpInfo, record_with_aux};
use crate::{Error, Result, Tensor};

static LINEAR_GROUP: OpInfo = OpInfo::expensive("linear_group");

/// The low-rank product that is added to one of the maps.
#[derive(Clone)]
pub struct LowRank {
    /// A, (rank, in).
    pub down: Tensor,
    /// B, (out, rank).
    pub up: Tensor,
    /// The scale s.
    pub scale: f64,
}

/// The maps of a group.
#[derive(Clone, Copy)]
pub struct LinearGroup<'a> {
    /// The frozen weights, stacked by rows, (Σ out, in).
    pub weight: WeightRef<'a>,
    /// The frozen biases, one after the other, (Σ out).
    pub bias: Option<&'a Tensor>,
    /// The number of rows (out) of each map's weight, in the order of the stacked weights.
    pub sizes: &'a [usize],
    /// One entry for each map: its low-rank product, or `None` if it has none.
    pub low_rank: &'a [Option<LowRank>],
}

impl LinearGroup<'_> {
    /// Checks that the maps can be applied to `x`, and that `sizes` and `low_rank` fit the weight.
    pub(super) fn check(&self, op: &'static str, x: &Tensor) -> Result<()> {
        check(op, x, self.weight, self.bias)?;
        check_frozen(op, self.weight, self.bias)?;
        let (rows, inner) = (self.weight.dims()[0], self.weight.dims()[1]);
        if self.sizes.iter().sum::<usize>() != rows || self.sizes.len() != self.low_rank.len() {
            return Err(Error::shape(
                op,
                format!(
                    "found sizes {:?} and {} entries of low-rank products for a weight of {rows} rows; expected \
                     sizes that add up to {rows}, and one entry for each size",
                    self.sizes,
                    self.low_rank.len()
                ),
            ));
        }
        for (&out, low_rank) in self.sizes.iter().zip(self.low_rank) {
            if let Some(LowRank { down, up, scale }) = low_rank {
                check_scale(op, *scale)?;
                check_factors(op, x, (out, inner), down, up)?;
            }
        }
        // All factors must have the dtype of the first.
        let dtypes = || self.adapted().flat_map(|low_rank| [low_rank.down.dtype(), low_rank.up.dtype()]);
        if let (Some(first), Some(other)) = (dtypes().next(), dtypes().find(|&dtype| Some(dtype) != dtypes().next())) {
            let message =
                format!("found factors of dtypes {} and {}, expected one dtype", first.as_str(), other.as_str());
            return Err(Error::dtype(op, message));
        }
        Ok(())
    }

    /// The low-rank products of the maps that have one.
    fn adapted(&self) -> impl Iterator<Item = &LowRank> {
        self.low_rank.iter().flatten()
    }

    /// The low-rank products of the maps, for inputs of `dtype`.
    pub(super) fn low_ranks(&self, dtype: DType) -> Result<LowRanks<'_>> {
        // `column` is the first column of a map's results in y.
        let (mut low_ranks, mut column) = (LowRanks::default(), 0);
        for (&out, low_rank) in self.sizes.iter().zip(self.low_rank) {
            if let Some(LowRank { down, up, scale }) = low_rank {
                low_ranks.push([down, up], *scale, column, dtype)?;
            }
            column += out;
        }
        Ok(low_ranks)
    }
}

/// Applies several linear maps to one input: `x (..., in)` → `(..., Σ out)`, the results side by side in the order of
/// the maps.
///
/// Saves x and x Aᵀ if the gradients of A and B need them. A group without low-rank products saves no activation.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit, [`Error::Argument`] if the base
/// needs a gradient or a scale is not finite.
pub fn linear_group(x: &Tensor, group: LinearGroup<'_>) -> Result<Tensor> {
    group.check(LINEAR_GROUP.name, x)?;
    let low_ranks = group.low_ranks(x.dtype())?;
    let inputs: Vec<&Tensor> = std::iter::once(x).chain(low_ranks.factors()).collect();
    record_with_aux(
        &LINEAR_GROUP,
        &inputs,
        || {
            let matrix = as_matrix(&x.raw)?;
            // The base's result; zeros where a checkpoint recomputes only saved values, because y is not saved.
            let y = forward_unless_unread(&matrix, group.weight, group.bias.map(|b| &b.raw))?;
            // Adds the low-rank products to `y` in place, and returns x Aᵀ.
            let hidden = low_ranks.add_to(&y, &matrix)?;
            Ok((y.reshape(with_last(&x.raw, group.weight.dims()[0]))?, hidden.into_iter().collect()))
        },
        // `aux` has x Aᵀ, if there are low-rank products.
        |saver, _, aux| low_ranks.save(saver, x, group.weight, aux.first()),
    )
}

/// A frozen tensor of fixed values, of the dtype and on the device of `x`.
#[cfg(feature = "testing")]
pub(super) fn frozen(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let n = dims.iter().product::<usize>();
    let values: Vec<f64> = (0..n).map(|i| (i as f64 * 0.7).sin()).collect();
    Tensor::from_vec(values, dims, &candle_core::Device::Cpu)?.to_dtype(x.dtype())?.to_device(x.device())
}

/// Registry entry of this file. All inputs of a case get gradients. The base gets none, so it is not an input: each
/// case makes its own.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[Entry {
    info: &LINEAR_GROUP,
    cases: || {
        /// A group of maps of 5 input features. For each map, `sizes` has the number of output features, and `scales`
        /// has the scale of its low-rank product, if it has one. `shapes` are the shapes of x and of A and B of each
        /// low-rank product.
        fn case(
            label: &'static str,
            shapes: &[&[usize]],
            sizes: &'static [usize],
            scales: &'static [Option<f64>],
        ) -> Case {
            let base = move |x: &Tensor| -> Result<(Tensor, Tensor)> {
                let rows = sizes.iter().sum();
                Ok((frozen(x, &[rows, 5])?, frozen(x, &[rows])?))
            };
            let run = move |x: &[Tensor]| {
                let (weight, bias) = base(&x[0])?;
                let mut factors = x[1..].chunks_exact(2);
                let low_rank: Vec<Option<LowRank>> = scales
                    .iter()
                    .map(|&scale| {
                        let scale = scale?;
                        factors.next().map(|f| LowRank { down: f[0].clone(), up: f[1].clone(), scale })
                    })
                    .collect();
                linear_group(
                    &x[0],
                    LinearGroup { weight: (&weight).into(), bias: Some(&bias), sizes, low_rank: &low_rank },
                )
            };
            let plain = move |x: &[Tensor]| {
                let (weight, bias) = base(&x[0])?;
                let mut factors = x[1..].chunks_exact(2);
                let mut start = 0;
                let mut results = Vec::new();
                for (&out, &scale) in sizes.iter().zip(scales) {
                    let y = linear(&x[0], &weight.narrow(0, start, out)?, Some(&bias.narrow(0, start, out)?))?;
                    let product = scale.and_then(|scale| factors.next().map(|f| (f, scale)));
                    results.push(match product {
                        Some((f, scale)) => {
                            y.add(&linear(&linear(&x[0], &f[0], None)?, &f[1], None)?.mul_scalar(scale)?)?
                        }
                        None => y,
                    });
                    start += out;
                }
                Tensor::cat(&results.iter().collect::<Vec<_>>(), x[0].rank() - 1)
            };
            Case::new(label, shapes, run).plain(plain)
        }
        /// A group of two adapted maps whose weights are the rows of one NF4 matrix (7, 5). The plain form uses the
        /// dequantized matrix.
        fn quantized() -> Case {
            const SIZES: &[usize] = &[4, 3];
            let low_rank =
                |x: &[Tensor], i: usize| LowRank { down: x[1 + 2 * i].clone(), up: x[2 + 2 * i].clone(), scale: 0.5 };
            let run = move |x: &[Tensor]| {
                let base = example(&x[0], [7, 5], Format::Nf4)?;
                let low_rank = [Some(low_rank(x, 0)), Some(low_rank(x, 1))];
                linear_group(
                    &x[0],
                    LinearGroup { weight: (&base).into(), bias: None, sizes: SIZES, low_rank: &low_rank },
                )
            };
            let plain = move |x: &[Tensor]| {
                let base = example(&x[0], [7, 5], Format::Nf4)?.dequantize(x[0].dtype())?;
                let low_rank = [Some(low_rank(x, 0)), Some(low_rank(x, 1))];
                linear_group(
                    &x[0],
                    LinearGroup { weight: (&base).into(), bias: None, sizes: SIZES, low_rank: &low_rank },
                )
            };
            Case::new("nf4 base", &[&[2, 3, 5], &[2, 5], &[4, 2], &[2, 5], &[3, 2]], run).plain(plain)
        }
        vec![
            case(
                "all adapted",
                &[&[2, 3, 5], &[2, 5], &[4, 2], &[2, 5], &[4, 2], &[2, 5], &[4, 2]],
                &[4, 4, 4],
                &[Some(0.5); 3],
            ),
            case(
                "some adapted",
                &[&[3, 5], &[2, 5], &[4, 2], &[3, 5], &[1, 3]],
                &[4, 6, 1],
                &[Some(0.5), None, Some(2.5)],
            ),
            case("none adapted", &[&[5]], &[2, 3], &[None; 2]),
            quantized(),
            case("no rows", &[&[0, 5], &[1, 5], &[3, 1]], &[3, 3], &[None, Some(0.5)]),
        ]
    },
}];
