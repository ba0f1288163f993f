//! Linear maps of one input as a single map: y = x [W₁; W₂; …]ᵀ + [b₁, b₂, …]. Each map may have a low-rank product of
//! its own.
//!
//! The rows of the frozen weights are stacked, so that the base is one matrix product in each pass. The low-rank
//! products s (x Aᵀ) Bᵀ (LoRA, arXiv:2106.09685) of the maps, and their dtypes, are as in [`lora`](super::lora).

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
    /// The factor s.
    pub scale: f64,
}

/// The maps of a group.
#[derive(Clone, Copy)]
pub struct LinearGroup<'a> {
    /// Frozen weights, their rows stacked, (Σ out, in).
    pub weight: WeightRef<'a>,
    /// Frozen biases one after the other, (Σ out).
    pub bias: Option<&'a Tensor>,
    /// The number of rows of each map's weight, in the order of the stacked weights.
    pub sizes: &'a [usize],
    /// The low-rank product of each map, if any.
    pub low_rank: &'a [Option<LowRank>],
}

impl LinearGroup<'_> {
    /// Checks that the maps can be applied to `x`.
    pub(super) fn check(&self, op: &'static str, x: &Tensor) -> Result<()> {
        check(op, x, self.weight, self.bias)?;
        check_frozen(op, self.weight, self.bias)?;
        let (rows, inner) = (self.weight.dims()[0], self.weight.dims()[1]);
        if self.sizes.iter().sum::<usize>() != rows || self.sizes.len() != self.low_rank.len() {
            return Err(Error::shape(
                op,
                format!(
                    "found sizes {:?} and {} entries for low-rank products for a weight of {rows} rows; expected sizes that add up to \
                     the rows, and one entry for each size",
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
        let dtypes = || self.adapted().flat_map(|low_rank| [low_rank.down.dtype(), low_rank.up.dtype()]);
        if let (Some(first), Some(other)) = (dtypes().next(), dtypes().find(|&dtype| Some(dtype) != dtypes().next())) {
            let message =
                format!("found factors of dtypes {} and {}, expected one dtype", first.as_str(), other.as_str());
            return Err(Error::dtype(op, message));
        }
        Ok(())
    }

    fn adapted(&self) -> impl Iterator<Item = &LowRank> {
        self.low_rank.iter().flatten()
    }

    /// The low-rank products of the maps, for inputs of `dtype`.
    pub(super) fn low_ranks(&self, dtype: DType) -> Result<LowRanks<'_>> {
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

/// The results of linear maps of one input side by side: `x (..., in)` → `(..., Σ out)`, columns in the order of the
/// maps.
///
/// Saves x and x Aᵀ if the gradients of low-rank factors need them. A group without low-rank products saves nothing.
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
            let y = forward_unless_unread(&matrix, group.weight, group.bias.map(|b| &b.raw))?;
            let hidden = low_ranks.add_to(&y, &matrix)?;
            Ok((y.reshape(with_last(&x.raw, group.weight.dims()[0]))?, hidden.into_iter().collect()))
        },
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

/// Registry entry of this file. The inputs of a case get gradients and the base gets none, so each case makes the base
/// itself.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[Entry {
    info: &LINEAR_GROUP,
    cases: || {
        /// A group of maps of 5 input features. For each map, `sizes` has the number of outputs, and `adapted` says
        /// whether the map has a low-rank product. The products have different scales if `mixed`.
        fn case(
            label: &'static str,
            shapes: &[&[usize]],
            sizes: &'static [usize],
            adapted: &'static [bool],
            mixed: bool,
        ) -> Case {
            let scale = move |i: usize| if mixed { 0.5 + i as f64 } else { 0.5 };
            let base = move |x: &Tensor| -> Result<(Tensor, Tensor)> {
                let rows = sizes.iter().sum();
                Ok((frozen(x, &[rows, 5])?, frozen(x, &[rows])?))
            };
            let run = move |x: &[Tensor]| {
                let (weight, bias) = base(&x[0])?;
                let mut factors = x[1..].chunks_exact(2);
                let low_rank: Vec<Option<LowRank>> = adapted
                    .iter()
                    .enumerate()
                    .map(|(i, &adapted)| {
                        let pair = if adapted { factors.next() } else { None };
                        pair.map(|f| LowRank { down: f[0].clone(), up: f[1].clone(), scale: scale(i) })
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
                for (i, (&out, &adapted)) in sizes.iter().zip(adapted).enumerate() {
                    let y = linear(&x[0], &weight.narrow(0, start, out)?, Some(&bias.narrow(0, start, out)?))?;
                    let pair = if adapted { factors.next() } else { None };
                    results.push(match pair {
                        Some(f) => y.add(&linear(&linear(&x[0], &f[0], None)?, &f[1], None)?.mul_scalar(scale(i))?)?,
                        None => y,
                    });
                    start += out;
                }
                Tensor::cat(&results.iter().collect::<Vec<_>>(), x[0].rank() - 1)
            };
            Case::new(label, shapes, run).plain(plain)
        }
        /// Two adapted maps whose weights are rows of one NF4 matrix.
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
                &[true; 3],
                false,
            ),
            case(
                "some adapted",
                &[&[3, 5], &[2, 5], &[4, 2], &[3, 5], &[1, 3]],
                &[4, 6, 1],
                &[true, false, true],
                true,
            ),
            case("none adapted", &[&[5]], &[2, 3], &[false; 2], false),
            quantized(),
            case("no rows", &[&[0, 5], &[1, 5], &[3, 1]], &[3, 3], &[false, true], false),
        ]
    },
}];
