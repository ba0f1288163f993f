//! LoRA products s (x Aᵀ) Bᵀ (arXiv:2106.09685) of one input, added to column ranges of a frozen linear layer's result.
//! Operations on single adapted layers and on groups of layers use this file.

use std::ops::Range;

use candle_core::{DType, Shape};
use smallvec::SmallVec;

use super::linear::as_matrix;
use crate::compute::LowRankTerm;
use crate::quantized::weight::{HeldWeight, WeightRef};
use crate::raw::Raw;
use crate::tape::{Backward, BackwardContext, Saved, Saver};
use crate::{Result, Tensor, Var, compute};

const OP: &str = "low_rank";

/// Returns `tensor` in `dtype`, off the tape. If `tensor` is a variable of another dtype, this is the copy in `dtype`
/// that the variable keeps.
pub(super) fn operand(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    match Var::of(tensor) {
        _ if tensor.dtype() == dtype => Ok(tensor.detach()),
        Some(var) => Ok(Tensor { raw: var.copy_in(dtype)?, node: None, version: tensor.version.clone() }),
        None => Ok(Tensor::constant(compute::cast(&tensor.raw, dtype)?)),
    }
}

/// Keeps `operand`, which [`operand()`] has made from `tensor`, for the backward pass. If `tensor` is a leaf (a
/// parameter), `operand` is held, and not counted as a saved activation; if `tensor` is the result of an operation,
/// `operand` is saved.
pub(super) fn keep(saver: &mut Saver<'_>, tensor: &Tensor, operand: &Tensor) -> Saved {
    if tensor.is_leaf() { saver.hold(operand) } else { saver.save(operand) }
}

/// The columns of one adapted layer in the two matrices that all adapted layers of the operation share: the result
/// (rows, Σ out) and x Aᵀ (rows, Σ rank).
#[derive(Clone, Copy)]
struct Place {
    /// The first of the layer's columns in the result, and their number.
    columns: [usize; 2],
    /// The first of the layer's columns in x Aᵀ, and their number (the rank).
    ranks: [usize; 2],
    scale: f64,
    /// Dtypes of the gradients of A and B.
    dtypes: [DType; 2],
}

impl Place {
    /// The layer's columns of a `matrix` (rows, Σ out): the result, or its gradient.
    fn of_result(&self, matrix: &Raw) -> Result<Raw> {
        Ok(matrix.narrow(1, self.columns[0], self.columns[1])?)
    }

    const fn last_product<B>(&self, up: B) -> LastProduct<B> {
        LastProduct { up, columns: self.columns, ranks: self.ranks, scale: self.scale }
    }

    /// The layer's columns of a `matrix` (rows, Σ rank): x Aᵀ, or its gradient.
    fn of_hidden(&self, matrix: &Raw) -> Result<Raw> {
        Ok(matrix.narrow(1, self.ranks[0], self.ranks[1])?)
    }
}

/// The second product of an adapter, s · hidden · Bᵀ, where hidden is the adapter's x Aᵀ, and the result's columns that
/// it is added to.
pub(super) struct LastProduct<B> {
    /// B, (out, rank).
    pub up: B,
    /// The first column of the result that the product is added to, and the number of these columns.
    pub columns: [usize; 2],
    /// The first of the adapter's columns in the x Aᵀ of all adapters, and their number (the rank).
    pub ranks: [usize; 2],
    pub scale: f64,
}

impl LastProduct<&Raw> {
    pub fn cloned(self) -> LastProduct<Raw> {
        let Self { up, columns, ranks, scale } = self;
        LastProduct { up: up.clone(), columns, ranks, scale }
    }
}

impl LastProduct<Saved> {
    pub fn get(&self) -> Result<LastProduct<Raw>> {
        let &Self { ref up, columns, ranks, scale } = self;
        Ok(LastProduct { up: up.get()?, columns, ranks, scale })
    }
}

/// The index ranges of consecutive places with the same scale. The products of one range run in one call.
fn of_one_scale(places: &[Place]) -> impl Iterator<Item = Range<usize>> {
    let mut end = 0;
    places.chunk_by(|a, b| a.scale == b.scale).map(move |alike| {
        end += alike.len();
        end - alike.len()..end
    })
}

/// The low-rank products of one operation, in the order of the columns that they are added to.
#[derive(Default)]
pub(super) struct LowRanks<'a> {
    places: SmallVec<[Place; 1]>,
    /// A (rank, in) and B (out, rank) of each product; they are inputs of the operation.
    factors: SmallVec<[[&'a Tensor; 2]; 1]>,
    /// The factors in the compute dtype, off the tape.
    operands: SmallVec<[[Tensor; 2]; 1]>,
    /// How many inputs of the operation precede the first factor, not counting x.
    skipped: usize,
}

impl<'a> LowRanks<'a> {
    /// The same products, for an operation whose inputs are x, the factors of `others`, and then the factors of `self`.
    pub fn after(self, others: &LowRanks<'_>) -> Self {
        Self { skipped: others.skipped + 2 * others.places.len(), ..self }
    }

    /// Appends the product of `factors` (A, B), whose shapes the caller has checked. Its result has dtype `dtype`, and
    /// is added to the columns from `column` on.
    pub fn push(&mut self, factors: [&'a Tensor; 2], scale: f64, column: usize, dtype: DType) -> Result<()> {
        let [down, up] = factors;
        let first = self.places.last().map_or(0, |last| last.ranks[0] + last.ranks[1]);
        self.places.push(Place {
            columns: [column, up.dims()[0]],
            ranks: [first, down.dims()[0]],
            scale,
            dtypes: [down.dtype(), up.dtype()],
        });
        self.operands.push([operand(down, dtype)?, operand(up, dtype)?]);
        self.factors.push(factors);
        Ok(())
    }

    /// A and B of each product in the compute dtype, off the tape.
    pub fn operands(&self) -> &[[Tensor; 2]] {
        &self.operands
    }

    /// All factors, in the order in which they follow x among the operation's inputs.
    pub fn factors(&self) -> impl Iterator<Item = &'a Tensor> {
        self.factors.iter().flatten().copied()
    }

    /// Adds the products of `x` to `y` in place (both are matrices). Returns x Aᵀ of all adapters side by side, (rows,
    /// Σ rank); `None` without adapters.
    pub fn add_to(&self, y: &Raw, x: &Raw) -> Result<Option<Raw>> {
        let Some(last) = self.places.last() else { return Ok(None) };
        let all = compute::unset(OP, x, &[x.dims()[0], last.ranks[0] + last.ranks[1]])?;
        for alike in of_one_scale(&self.places) {
            let scale = self.places[alike.start].scale;
            let term = |(place, [down, up]): (&Place, &[Tensor; 2])| -> Result<_> {
                let hidden = place.of_hidden(&all)?;
                let term = LowRankTerm { input: x.clone(), down: down.raw.t()?, up: up.raw.t()?, hidden };
                Ok((term, place.of_result(y)?))
            };
            let terms = self.places[alike.clone()].iter().zip(&self.operands[alike]).map(term);
            compute::low_rank(&terms.collect::<Result<Vec<_>>>()?, [1.0, scale])?;
        }
        Ok(Some(all))
    }

    /// Computes the first products alone: x Aᵀ of all adapters side by side, (rows, Σ rank).
    pub fn hidden(&self, x: &Raw) -> Result<Raw> {
        let ranks = self.places.last().map_or(0, |last| last.ranks[0] + last.ranks[1]);
        let all = compute::unset(OP, x, &[x.dims()[0], ranks])?;
        let mut products = Vec::with_capacity(self.places.len());
        for (place, [down, _]) in self.places.iter().zip(&self.operands) {
            products.push((place.of_hidden(&all)?, down.raw.t()?));
        }
        let products: Vec<[&Raw; 3]> = products.iter().map(|(hidden, down)| [hidden, x, down]).collect();
        compute::write_products(&products, 1.0, false)?;
        Ok(all)
    }

    /// Adds the second products to `y` in place; `hidden` is x Aᵀ of all adapters side by side.
    pub fn add_last_products(&self, y: &Raw, hidden: &Raw) -> Result<()> {
        for LastProduct { up, columns, ranks, scale } in self.last_products() {
            let (columns, hidden) = (y.narrow(1, columns[0], columns[1])?, hidden.narrow(1, ranks[0], ranks[1])?);
            compute::write_products(&[[&columns, &hidden, &up.t()?]], scale, true)?;
        }
        Ok(())
    }

    /// The second products, for an operation that computes them itself.
    pub fn last_products(&self) -> impl Iterator<Item = LastProduct<&Raw>> {
        self.places.iter().zip(&self.operands).map(|(place, [_, up])| place.last_product(&up.raw))
    }

    /// Keeps B of each product for the backward pass, and returns the second products with these saved B.
    pub fn save_last_products(&self, saver: &mut Saver<'_>) -> SmallVec<[LastProduct<Saved>; 2]> {
        let all = self.places.iter().zip(self.factors.iter().zip(&self.operands));
        all.map(|(place, ([_, up], [_, operand]))| place.last_product(keep(saver, up, operand))).collect()
    }

    /// Saves what the backward pass reads of `x`, the frozen `weight` (Σ out, in), the factors and x Aᵀ (`hidden`).
    pub fn save(
        &self,
        saver: &mut Saver<'_>,
        x: &Tensor,
        weight: WeightRef<'_>,
        hidden: Option<&Raw>,
    ) -> LowRankBackward {
        let needs_x = saver.needs(0);
        self.save_for(saver, (x.shape(), needs_x), Some(x), weight, hidden)
    }

    /// As [`save`](Self::save), but does not save x: for an operation that computes x itself, and recomputes x in the
    /// backward pass.
    pub fn save_without_input(
        &self,
        saver: &mut Saver<'_>,
        shape: &Shape,
        weight: WeightRef<'_>,
        hidden: Option<&Raw>,
    ) -> LowRankBackward {
        self.save_for(saver, (shape, true), None, weight, hidden)
    }

    fn save_for(
        &self,
        saver: &mut Saver<'_>,
        (x_shape, needs_x): (&Shape, bool),
        x: Option<&Tensor>,
        weight: WeightRef<'_>,
        hidden: Option<&Raw>,
    ) -> LowRankBackward {
        let mut backward = LowRankBackward {
            x: None,
            hidden: None,
            weight: None,
            factors: SmallVec::new(),
            places: self.places.clone(),
            x_shape: x_shape.clone(),
            skipped: self.skipped,
        };
        let mut members = 0..self.places.len();
        let needs_up = members.clone().any(|i| saver.needs(backward.up(i)));
        let needs_down = members.any(|i| saver.needs(backward.down(i)));
        for (i, ([down, up], [down_operand, up_operand])) in self.factors.iter().zip(&self.operands).enumerate() {
            let reads_up = needs_x || saver.needs(backward.down(i));
            backward.factors.push([
                needs_x.then(|| keep(saver, down, down_operand)),
                reads_up.then(|| keep(saver, up, up_operand)),
            ]);
        }
        backward.x = x.filter(|_| needs_down).map(|x| saver.save(x));
        backward.hidden = hidden.filter(|_| needs_up).map(|hidden| saver.save_raw(hidden));
        backward.weight = needs_x.then(|| weight.hold(saver));
        backward
    }
}

/// The backward pass of a frozen linear map with low-rank products. The inputs of the node are x, then
/// `skipped` inputs that do not belong to these products, then A and B of each product.
pub(super) struct LowRankBackward {
    x: Option<Saved>,
    /// x Aᵀ of all adapters, (rows, Σ rank).
    hidden: Option<Saved>,
    weight: Option<HeldWeight>,
    /// A and B of each product: A is kept if x needs a gradient, B if x or A needs one.
    factors: SmallVec<[[Option<Saved>; 2]; 1]>,
    places: SmallVec<[Place; 1]>,
    x_shape: Shape,
    /// How many inputs of the node precede the first A, not counting x.
    skipped: usize,
}

impl LowRankBackward {
    /// The index of A of product number `place` among the node's inputs.
    pub const fn down(&self, place: usize) -> usize {
        1 + self.skipped + 2 * place
    }

    /// The index of B of product number `place` among the node's inputs.
    pub const fn up(&self, place: usize) -> usize {
        2 + self.skipped + 2 * place
    }

    /// The dtypes of the gradients of A and B of a product.
    pub fn dtypes(&self, place: usize) -> [DType; 2] {
        self.places[place].dtypes
    }

    /// A of a product in the compute dtype; `None` if it is not kept, because x needs no gradient.
    pub fn down_operand(&self, place: usize) -> Result<Option<Raw>> {
        self.factors[place][0].as_ref().map(Saved::get).transpose()
    }

    /// s g B of all products side by side, (rows, Σ rank), where g (`grad`) is the gradient of the result. The columns
    /// of a product whose B is not kept stay uninitialised.
    pub fn hidden_gradient(&self, grad: &Raw) -> Result<Raw> {
        let ranks = self.places.last().map_or(0, |last| last.ranks[0] + last.ranks[1]);
        let all = compute::unset(OP, grad, &[grad.dims()[0], ranks])?;
        for alike in of_one_scale(&self.places) {
            let scale = self.places[alike.start].scale;
            let mut products = Vec::new();
            for (place, factors) in self.places[alike.clone()].iter().zip(&self.factors[alike]) {
                if let [_, Some(up)] = factors {
                    products.push([place.of_hidden(&all)?, place.of_result(grad)?, up.get()?]);
                }
            }
            let products: Vec<[&Raw; 3]> = products.iter().map(|product| product.each_ref()).collect();
            compute::write_products(&products, scale, false)?;
        }
        Ok(all)
    }

    /// g W: the gradient of x through the frozen weight alone. `None` if no weight is kept, because x needs no
    /// gradient.
    pub fn base_gradient(&self, grad: &Raw) -> Result<Option<Raw>> {
        self.weight.as_ref().map(|weight| weight.input_gradient(grad)).transpose()
    }

    /// Returns s g B, (rows, Σ rank), where g is the gradient of the result, for each adapted layer whose x or A needs
    /// a gradient; the columns of other layers stay uninitialised. `None` if no layer needs it. If x needs a gradient,
    /// also adds s g B A to the gradient of x.
    fn grad_hidden(&self, context: &mut BackwardContext<'_>, grad: &Raw) -> Result<Option<Raw>> {
        let needs_x = context.needs(0);
        let needed: SmallVec<[bool; 4]> =
            (0..self.places.len()).map(|place| needs_x || context.needs(self.down(place))).collect();
        let Some(last) = self.places.last().filter(|_| needed.contains(&true)) else { return Ok(None) };
        let all = compute::unset(OP, grad, &[grad.dims()[0], last.ranks[0] + last.ranks[1]])?;
        for alike in of_one_scale(&self.places) {
            let scale = self.places[alike.start].scale;
            let (mut products, mut terms) = (Vec::new(), Vec::new());
            for index in alike.filter(|&index| needed[index]) {
                let (place, [down, Some(up)]) = (&self.places[index], &self.factors[index]) else { continue };
                let (input, hidden, up) = (place.of_result(grad)?, place.of_hidden(&all)?, up.get()?);
                match down {
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

    /// Adds the gradients of B, from `grad`, the gradient of the result, (rows, Σ out).
    pub fn add_up_gradients(&self, context: &mut BackwardContext<'_>, grad: &Raw) -> Result<()> {
        let Some(hidden) = &self.hidden else { return Ok(()) };
        let hidden = hidden.get()?;
        for (index, place) in self.places.iter().enumerate() {
            let (grad, hidden) = (place.of_result(grad)?, place.of_hidden(&hidden)?);
            let shape = (grad.dims()[1], hidden.dims()[1]);
            let product = [&grad.t()?, &hidden];
            context.add_product(self.up(index), shape, place.dtypes[1], product, place.scale)?;
        }
        Ok(())
    }

    /// Adds the gradients of A, from s g B (`grad_hidden`).
    fn add_down_gradients(&self, context: &mut BackwardContext<'_>, grad_hidden: &Raw) -> Result<()> {
        let Some(x) = &self.x else { return Ok(()) };
        let x = as_matrix(&x.get()?)?;
        for (index, place) in self.places.iter().enumerate() {
            let grad_hidden = place.of_hidden(grad_hidden)?;
            let shape = (grad_hidden.dims()[1], x.dims()[1]);
            let product = [&grad_hidden.t()?, &x];
            context.add_product(self.down(index), shape, place.dtypes[0], product, 1.0)?;
        }
        Ok(())
    }

    /// Adds the gradients of x and of A, from `grad`, the gradient of the result, and from s g B (`grad_hidden`). x
    /// must need a gradient.
    pub fn add_from_hidden(&self, context: &mut BackwardContext<'_>, grad: &Raw, grad_hidden: &Raw) -> Result<()> {
        let mut products = Vec::with_capacity(self.places.len());
        for (place, [down, _]) in self.places.iter().zip(&self.factors) {
            if let Some(down) = down {
                products.push([place.of_hidden(grad_hidden)?, down.get()?]);
            }
        }
        if let Some(weight) = &self.weight {
            weight.add_input_gradient(context, &self.x_shape, grad)?;
        }
        context.add_products(0, &self.x_shape, &products)?;
        self.add_down_gradients(context, grad_hidden)
    }

    /// Adds the gradients that are wanted, from `grad`, the gradient of the result, (rows, Σ out).
    pub fn run(&self, context: &mut BackwardContext<'_>, grad: &Raw) -> Result<()> {
        self.add_up_gradients(context, grad)?;
        if let (true, Some(weight)) = (context.needs(0), &self.weight) {
            weight.add_input_gradient(context, &self.x_shape, grad)?;
        }
        match self.grad_hidden(context, grad)? {
            Some(grad_hidden) => self.add_down_gradients(context, &grad_hidden),
            None => Ok(()),
        }
    }
}

impl Backward for LowRankBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = as_matrix(context.grad())?;
        self.run(context, &grad)
    }
}
