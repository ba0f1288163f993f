//! Linear maps that share their input as one: y = x [W₁; W₂; …]ᵀ + [b₁, b₂, …], each with a low-rank product of its own or without.
//!
//! The frozen weights lie one below the other, so that the base is one matrix product forward and one backward. The low-rank
//! products s (x Aᵀ) Bᵀ (LoRA, arXiv:2106.09685) are those of [`lora`](super::lora), for any of the maps, their dtypes too.

use std::ops::Range;

use candle_core::{DType, Shape};

use super::case::{Case, Entry};
use super::linear::{as_matrix, check, forward, linear, with_last};
use super::lora::{check_factors, check_frozen, check_scale, keep, operand};
use crate::compute::LowRankTerm;
use crate::raw::Raw;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Error, Result, Tensor, compute};

static LINEAR_GROUP: OpInfo = OpInfo::dear("linear_group");

/// The low-rank product that is added to one of the maps.
#[derive(Clone)]
pub struct LowRank {
    /// A, (rank, in).
    pub down: Tensor,
    /// B, (out, rank).
    pub up: Tensor,
    /// s.
    pub scale: f64,
}

/// The maps of a group.
#[derive(Clone, Copy)]
pub struct LinearGroup<'a> {
    /// Frozen weights one below the other, (Σ out, in).
    pub weight: &'a Tensor,
    /// Frozen biases one after the other, (Σ out).
    pub bias: Option<&'a Tensor>,
    /// Rows of each map's weight.
    pub sizes: &'a [usize],
    /// What is added to each map's result.
    pub low_rank: &'a [Option<LowRank>],
}

/// Where an adapted map's values lie among those of all.
#[derive(Clone, Copy)]
struct Place {
    /// First column and number of columns of the result.
    columns: [usize; 2],
    /// Those of x Aᵀ.
    ranks: [usize; 2],
    scale: f64,
}

impl Place {
    /// The map's columns of a matrix of all results.
    fn of_result(&self, matrix: &Raw) -> Result<Raw> {
        Ok(matrix.narrow(1, self.columns[0], self.columns[1])?)
    }

    /// The map's columns of a matrix of all x Aᵀ.
    fn of_hidden(&self, matrix: &Raw) -> Result<Raw> {
        Ok(matrix.narrow(1, self.ranks[0], self.ranks[1])?)
    }
}

impl LinearGroup<'_> {
    fn check(&self, x: &Tensor) -> Result<()> {
        let op = LINEAR_GROUP.name;
        check(op, x, self.weight, self.bias)?;
        check_frozen(op, self.weight, self.bias)?;
        let (rows, inner) = (self.weight.dims()[0], self.weight.dims()[1]);
        if self.sizes.iter().sum::<usize>() != rows || self.sizes.len() != self.low_rank.len() {
            return Err(Error::shape(
                op,
                format!(
                    "found sizes {:?} and {} places for low-rank products for a weight of {rows} rows; expected sizes that add up, and \
                     one place each",
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
            let message = format!("found factors of dtypes {} and {}, expected one", first.as_str(), other.as_str());
            return Err(Error::dtype(op, message));
        }
        Ok(())
    }

    fn adapted(&self) -> impl Iterator<Item = &LowRank> {
        self.low_rank.iter().flatten()
    }

    fn places(&self) -> Vec<Place> {
        let (mut column, mut rank) = (0, 0);
        let mut places = Vec::new();
        for (&out, low_rank) in self.sizes.iter().zip(self.low_rank) {
            if let Some(LowRank { down, scale, .. }) = low_rank {
                places.push(Place { columns: [column, out], ranks: [rank, down.dims()[0]], scale: *scale });
                rank += down.dims()[0];
            }
            column += out;
        }
        places
    }
}

/// The ranges of places of one scale, whose products run together.
fn of_one_scale(places: &[Place]) -> impl Iterator<Item = Range<usize>> {
    let mut end = 0;
    places.chunk_by(|a, b| a.scale == b.scale).map(move |alike| {
        end += alike.len();
        end - alike.len()..end
    })
}

struct GroupBackward {
    x: Option<Saved>,
    /// x Aᵀ of all adapted maps, (rows, Σ rank).
    hidden: Option<Saved>,
    weight: Option<Saved>,
    downs: Vec<Option<Saved>>,
    ups: Vec<Option<Saved>>,
    places: Vec<Place>,
    factor_dtype: DType,
    x_shape: Shape,
}

impl GroupBackward {
    /// The inputs of the node are x, and A and B of each adapted map.
    const fn down(place: usize) -> usize {
        1 + 2 * place
    }

    const fn up(place: usize) -> usize {
        2 + 2 * place
    }

    /// s (g B) of the adapted maps that need it, (rows, Σ rank), of which those that x needs are added to its gradient.
    fn grad_hidden(&self, context: &mut BackwardContext<'_>, grad: &Raw) -> Result<Option<Raw>> {
        let needs_x = context.needs(0);
        let needed: Vec<bool> =
            (0..self.places.len()).map(|place| needs_x || context.needs(Self::down(place))).collect();
        let Some(last) = self.places.last().filter(|_| needed.contains(&true)) else { return Ok(None) };
        let all = compute::unset(LINEAR_GROUP.name, grad, &[grad.dims()[0], last.ranks[0] + last.ranks[1]])?;
        for alike in of_one_scale(&self.places) {
            let scale = self.places[alike.start].scale;
            let (mut products, mut terms) = (Vec::new(), Vec::new());
            for index in alike.filter(|&index| needed[index]) {
                let (place, Some(up)) = (&self.places[index], &self.ups[index]) else { continue };
                let (input, hidden, up) = (place.of_result(grad)?, place.of_hidden(&all)?, up.get()?);
                match &self.downs[index] {
                    Some(down) if needs_x => terms.push(LowRankTerm { input, down: up, up: down.get()?, hidden }),
                    _ => products.push([hidden, input, up]),
                }
            }
            let products: Vec<[&Raw; 3]> = products.iter().map(|product| product.each_ref()).collect();
            compute::write_products(&products, scale, false)?;
            context.add_low_rank(0, &self.x_shape, terms, [scale, 1.0])?;
        }
        Ok(Some(all))
    }
}

impl Backward for GroupBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = compute::contiguous(&as_matrix(context.grad())?)?;
        if let Some(hidden) = &self.hidden {
            let hidden = hidden.get()?;
            for (index, place) in self.places.iter().enumerate() {
                let (grad, hidden) = (place.of_result(&grad)?, place.of_hidden(&hidden)?);
                let shape = (grad.dims()[1], hidden.dims()[1]);
                let product = [&grad.t()?, &hidden];
                context.add_product(Self::up(index), shape, self.factor_dtype, product, place.scale)?;
            }
        }
        if let (true, Some(weight)) = (context.needs(0), &self.weight) {
            context.add_product(0, &self.x_shape, grad.dtype(), [&grad, &weight.get()?], 1.0)?;
        }
        let grad_hidden = self.grad_hidden(context, &grad)?;
        if let (Some(grad_hidden), Some(x)) = (&grad_hidden, &self.x) {
            let x = as_matrix(&x.get()?)?;
            for (index, place) in self.places.iter().enumerate() {
                let grad_hidden = place.of_hidden(grad_hidden)?;
                let shape = (grad_hidden.dims()[1], x.dims()[1]);
                let product = [&grad_hidden.t()?, &x];
                context.add_product(Self::down(index), shape, self.factor_dtype, product, 1.0)?;
            }
        }
        Ok(())
    }
}

/// The results of linear maps of one input side by side: `x (..., in)` → `(..., Σ out)`, columns in the order of the maps.
///
/// Saves x and x Aᵀ where a low-rank product needs them; without one a group saves nothing.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit, [`Error::Argument`] if the base needs a gradient.
pub fn linear_group(x: &Tensor, group: LinearGroup<'_>) -> Result<Tensor> {
    group.check(x)?;
    let places = group.places();
    let adapted: Vec<&LowRank> = group.adapted().collect();
    let operands: Vec<[Tensor; 2]> = adapted
        .iter()
        .map(|low_rank| Ok([operand(&low_rank.down, x.dtype())?, operand(&low_rank.up, x.dtype())?]))
        .collect::<Result<_>>()?;
    let factors = adapted.iter().flat_map(|low_rank| [&low_rank.down, &low_rank.up]);
    let inputs: Vec<&Tensor> = std::iter::once(x).chain(factors).collect();
    record_with_aux(
        &LINEAR_GROUP,
        &inputs,
        || {
            let matrix = as_matrix(&x.raw)?;
            let y = forward(&matrix, &group.weight.raw, group.bias.map(|b| &b.raw))?;
            let mut aux = smallvec::SmallVec::new();
            if let Some(last) = places.last() {
                let ranks = last.ranks[0] + last.ranks[1];
                let hidden = compute::unset(LINEAR_GROUP.name, &matrix, &[matrix.dims()[0], ranks])?;
                for alike in of_one_scale(&places) {
                    let scale = places[alike.start].scale;
                    let term = |(place, [down, up]): (&Place, &[Tensor; 2])| -> Result<_> {
                        let (input, hidden) = (matrix.clone(), place.of_hidden(&hidden)?);
                        let term = LowRankTerm { input, down: down.raw.t()?, up: up.raw.t()?, hidden };
                        Ok((term, place.of_result(&y)?))
                    };
                    let terms = places[alike.clone()].iter().zip(&operands[alike]).map(term);
                    compute::low_rank(&terms.collect::<Result<Vec<_>>>()?, [1.0, scale])?;
                }
                aux.push(hidden);
            }
            Ok((y.reshape(with_last(&x.raw, group.weight.dims()[0]))?, aux))
        },
        |saver, _, aux| {
            let members = 0..places.len();
            let needs_up = members.clone().any(|i| saver.needs(GroupBackward::up(i)));
            let needs_down = members.clone().any(|i| saver.needs(GroupBackward::down(i)));
            let needs_x = saver.needs(0);
            GroupBackward {
                x: needs_down.then(|| saver.save(x)),
                hidden: aux.first().filter(|_| needs_up).map(|hidden| saver.save_raw(hidden)),
                weight: needs_x.then(|| saver.hold(group.weight)),
                downs: adapted
                    .iter()
                    .zip(&operands)
                    .map(|(low_rank, [down, _])| needs_x.then(|| keep(saver, &low_rank.down, down)))
                    .collect(),
                ups: members
                    .map(|i| {
                        let is_read = needs_x || saver.needs(GroupBackward::down(i));
                        is_read.then(|| keep(saver, &adapted[i].up, &operands[i][1]))
                    })
                    .collect(),
                factor_dtype: adapted.first().map_or(x.dtype(), |low_rank| low_rank.down.dtype()),
                places: places.clone(),
                x_shape: x.shape().clone(),
            }
        },
    )
}

/// A frozen tensor of fixed values, of the dtype and on the device of `x`.
fn frozen(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let n = dims.iter().product::<usize>();
    let values: Vec<f64> = (0..n).map(|i| (i as f64 * 0.7).sin()).collect();
    Tensor::from_vec(values, dims, &candle_core::Device::Cpu)?.to_dtype(x.dtype())?.to_device(x.device())
}

/// Registry entry of this file. The base is an input that gets no gradient, so cases close over it.
pub static ENTRIES: &[Entry] = &[Entry {
    info: &LINEAR_GROUP,
    cases: || {
        /// A group over 5 features with the maps' outputs, and which of them are adapted; scales differ if `mixed`.
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
                linear_group(&x[0], LinearGroup { weight: &weight, bias: Some(&bias), sizes, low_rank: &low_rank })
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
            case("no rows", &[&[0, 5], &[1, 5], &[3, 1]], &[3, 3], &[false, true], false),
        ]
    },
}];
