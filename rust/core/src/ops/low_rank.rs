//! LoRA products s (x Aᵀ) Bᵀ (arXiv:2106.09685) of one input x, each added to a range of columns of a frozen linear
//! layer's result. Operations with one adapter and operations with several use this file.
//!
//! A is `down` (rank, in), B is `up` (out, rank), and x Aᵀ is `hidden` (rows, rank). Adapters that share x have their
//! x Aᵀ side by side in one matrix (rows, Σ rank).

use std::ops::Range;

use candle_core::{DType, Shape};
use smallvec::SmallVec;

use super::linear::as_matrix;
use crate::compute::LowRankTerm;
use crate::quantized::weight::{HeldWeight, WeightRef};
use crate::raw::Raw;
use crate::tape::{Backward, BackwardContext, Saved, Saver};
use crate::{Result, Tensor, Var, compute};

/// The name of the operation in errors of allocations.
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

/// Keeps `operand`, which [`operand()`] has made from `tensor`, for the backward pass. It counts as a saved activation
/// only if `tensor` is the result of an operation, and not a leaf (a variable or a constant).
pub(super) fn keep(saver: &mut Saver<'_>, tensor: &Tensor, operand: &Tensor) -> Saved {
    if tensor.is_leaf() { saver.hold(operand) } else { saver.save(operand) }
}

/// The columns of one adapter in the two matrices that all adapters of the operation share, the result (rows, Σ out)
/// and x Aᵀ (rows, Σ rank); and the adapter's scale and dtypes.
#[derive(Clone, Copy)]
struct Place {
    /// The first of the adapter's columns in the result, and their number.
    columns: [usize; 2],
    /// The first of the adapter's columns in x Aᵀ, and their number (the rank).
    ranks: [usize; 2],
    /// The factor s.
    scale: f64,
    /// Dtypes of the gradients of A and B.
    dtypes: [DType; 2],
}

impl Place {
    /// A view of the adapter's columns of a `matrix` (rows, Σ out): the result, or its gradient.
    fn of_result(&self, matrix: &Raw) -> Result<Raw> {
        Ok(matrix.narrow(1, self.columns[0], self.columns[1])?)
    }

    const fn last_product<B>(&self, up: B) -> LastProduct<B> {
        LastProduct { up, columns: self.columns, ranks: self.ranks, scale: self.scale }
    }

    /// A view of the adapter's columns of a `matrix` (rows, Σ rank): x Aᵀ, or its gradient.
    fn of_hidden(&self, matrix: &Raw) -> Result<Raw> {
        Ok(matrix.narrow(1, self.ranks[0], self.ranks[1])?)
    }
}

/// The second product of an adapter, s · hidden · Bᵀ, not yet computed: B, s, and the adapter's columns of x Aᵀ and of
/// the result.
pub(super) struct LastProduct<B> {
    /// B, (out, rank).
    pub up: B,
    /// The first column of the result that the product is added to, and the number of these columns.
    pub columns: [usize; 2],
    /// The first of the adapter's columns in the x Aᵀ of all adapters, and their number (the rank).
    pub ranks: [usize; 2],
    /// The factor s.
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

/// The number of columns of x Aᵀ of all adapters, Σ rank.
fn total_rank(places: &[Place]) -> usize {
    places.last().map_or(0, |last| last.ranks[0] + last.ranks[1])
}

/// Divides `places` into the longest runs of neighbours with the same scale, and returns their index ranges. The
/// products of one range are computed in one call.
fn of_one_scale(places: &[Place]) -> impl Iterator<Item = Range<usize>> {
    let mut end = 0;
    places.chunk_by(|a, b| a.scale == b.scale).map(move |alike| {
        end += alike.len();
        end - alike.len()..end
    })
}

/// The adapters of one operation, in the order of the result's columns that their products are added to.
#[derive(Default)]
pub(super) struct LowRanks<'a> {
    places: SmallVec<[Place; 1]>,
    /// A and B of each adapter; they are inputs of the operation.
    factors: SmallVec<[[&'a Tensor; 2]; 1]>,
    /// The factors in the compute dtype, off the tape.
    operands: SmallVec<[[Tensor; 2]; 1]>,
    /// How many inputs of the operation precede the first factor, not counting x.
    skipped: usize,
}

impl<'a> LowRanks<'a> {
    /// Returns the same adapters for an operation whose inputs are x, the factors of `others`, then the factors of
    /// `self`.
    pub fn after(self, others: &LowRanks<'_>) -> Self {
        Self { skipped: others.skipped + 2 * others.places.len(), ..self }
    }

    /// Appends the adapter with `factors` [A, B], whose shapes the caller has checked. Its product is computed in
    /// `dtype`, and is added to the result's columns from `column` on.
    pub fn push(&mut self, factors: [&'a Tensor; 2], scale: f64, column: usize, dtype: DType) -> Result<()> {
        let [down, up] = factors;
        let first_rank = total_rank(&self.places);
        self.places.push(Place {
            columns: [column, up.dims()[0]],
            ranks: [first_rank, down.dims()[0]],
            scale,
            dtypes: [down.dtype(), up.dtype()],
        });
        self.operands.push([operand(down, dtype)?, operand(up, dtype)?]);
        self.factors.push(factors);
        Ok(())
    }

    /// A and B of each adapter in the compute dtype, off the tape.
    pub fn operands(&self) -> &[[Tensor; 2]] {
        &self.operands
    }

    /// All factors, in the order in which they follow x among the operation's inputs.
    pub fn factors(&self) -> impl Iterator<Item = &'a Tensor> {
        self.factors.iter().flatten().copied()
    }

    /// Adds s (x Aᵀ) Bᵀ of each adapter to its columns of the matrix `y`, in place; `x` is a matrix too. Returns x Aᵀ
    /// of all adapters, (rows, Σ rank); `None` without adapters.
    pub fn add_to(&self, y: &Raw, x: &Raw) -> Result<Option<Raw>> {
        if self.places.is_empty() {
            return Ok(None);
        }
        // `unset` allocates an uninitialised tensor, in the dtype and on the device of `x`.
        let hidden = compute::unset(OP, x, &[x.dims()[0], total_rank(&self.places)])?;
        for alike in of_one_scale(&self.places) {
            let scale = self.places[alike.start].scale;
            let term = |(place, [down, up]): (&Place, &[Tensor; 2])| -> Result<_> {
                let of_adapter = place.of_hidden(&hidden)?;
                let term = LowRankTerm { input: x.clone(), down: down.raw.t()?, up: up.raw.t()?, hidden: of_adapter };
                Ok((term, place.of_result(y)?))
            };
            let terms = self.places[alike.clone()].iter().zip(&self.operands[alike]).map(term);
            // The factors of the first products, x Aᵀ, and of the second products.
            compute::low_rank(&terms.collect::<Result<Vec<_>>>()?, [1.0, scale])?;
        }
        Ok(Some(hidden))
    }

    /// Computes only the first products: x Aᵀ of all adapters, (rows, Σ rank).
    pub fn hidden(&self, x: &Raw) -> Result<Raw> {
        let hidden = compute::unset(OP, x, &[x.dims()[0], total_rank(&self.places)])?;
        let mut products = Vec::with_capacity(self.places.len());
        for (place, [down, _]) in self.places.iter().zip(&self.operands) {
            products.push((place.of_hidden(&hidden)?, down.raw.t()?));
        }
        let products: Vec<[&Raw; 3]> = products.iter().map(|(of_adapter, down)| [of_adapter, x, down]).collect();
        // 1.0 is the factor of the products; `false` overwrites the destinations, `true` would add to them.
        compute::write_products(&products, 1.0, false)?;
        Ok(hidden)
    }

    /// Adds the second products to `y` in place; `hidden` is x Aᵀ of all adapters.
    pub fn add_last_products(&self, y: &Raw, hidden: &Raw) -> Result<()> {
        for LastProduct { up, columns, ranks, scale } in self.last_products() {
            let (columns, hidden) = (y.narrow(1, columns[0], columns[1])?, hidden.narrow(1, ranks[0], ranks[1])?);
            compute::write_products(&[[&columns, &hidden, &up.t()?]], scale, true)?;
        }
        Ok(())
    }

    /// Returns the second products, for an operation that computes them itself.
    pub fn last_products(&self) -> impl Iterator<Item = LastProduct<&Raw>> {
        self.places.iter().zip(&self.operands).map(|(place, [_, up])| place.last_product(&up.raw))
    }

    /// Returns the second products, each with its B kept for the backward pass.
    pub fn save_last_products(&self, saver: &mut Saver<'_>) -> SmallVec<[LastProduct<Saved>; 2]> {
        let adapters = self.places.iter().zip(self.factors.iter().zip(&self.operands));
        adapters.map(|(place, ([_, up], [_, operand]))| place.last_product(keep(saver, up, operand))).collect()
    }

    /// Returns the backward pass, and saves the tensors that it reads. They are among `x`, the frozen `weight` (Σ out,
    /// in), the factors, and x Aᵀ of all adapters (`hidden`).
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

    /// As [`save`](Self::save), for an operation that computes x itself, and recomputes it in the backward pass. x, of
    /// shape `shape`, is not saved, and counts as an input that needs a gradient.
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
        let mut indices = 0..self.places.len();
        let needs_up = indices.clone().any(|index| saver.needs(backward.up(index)));
        let needs_down = indices.any(|index| saver.needs(backward.down(index)));
        for (index, ([down, up], [down_operand, up_operand])) in self.factors.iter().zip(&self.operands).enumerate() {
            let reads_up = needs_x || saver.needs(backward.down(index));
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

/// The backward pass of a frozen linear map with adapters. The inputs of the node are x, then `skipped` inputs that do
/// not belong to these adapters, then A and B of each adapter.
pub(super) struct LowRankBackward {
    /// Kept if an A needs a gradient.
    x: Option<Saved>,
    /// x Aᵀ of all adapters, (rows, Σ rank); kept if a B needs a gradient.
    hidden: Option<Saved>,
    /// The frozen weight, kept if x needs a gradient.
    weight: Option<HeldWeight>,
    /// A and B of each adapter: A is kept if x needs a gradient, B if x or A needs one.
    factors: SmallVec<[[Option<Saved>; 2]; 1]>,
    places: SmallVec<[Place; 1]>,
    x_shape: Shape,
    /// How many inputs of the node precede the first A, not counting x.
    skipped: usize,
}

impl LowRankBackward {
    /// The index, among the node's inputs, of A of adapter number `adapter`.
    pub const fn down(&self, adapter: usize) -> usize {
        1 + self.skipped + 2 * adapter
    }

    /// The index, among the node's inputs, of B of adapter number `adapter`.
    pub const fn up(&self, adapter: usize) -> usize {
        2 + self.skipped + 2 * adapter
    }

    /// The dtypes of the gradients of A and B of adapter number `adapter`.
    pub fn dtypes(&self, adapter: usize) -> [DType; 2] {
        self.places[adapter].dtypes
    }

    /// A of adapter number `adapter` in the compute dtype; `None` if it is not kept, because x needs no gradient.
    pub fn down_operand(&self, adapter: usize) -> Result<Option<Raw>> {
        self.factors[adapter][0].as_ref().map(Saved::get).transpose()
    }

    /// Computes the gradient of x Aᵀ of all adapters: s g B, (rows, Σ rank), where g (`grad`) is the gradient of the
    /// result. The columns of an adapter whose B is not kept stay uninitialised.
    pub fn hidden_gradient(&self, grad: &Raw) -> Result<Raw> {
        let grad_hidden = compute::unset(OP, grad, &[grad.dims()[0], total_rank(&self.places)])?;
        for alike in of_one_scale(&self.places) {
            let scale = self.places[alike.start].scale;
            let mut products = Vec::new();
            for (place, factors) in self.places[alike.clone()].iter().zip(&self.factors[alike]) {
                if let [_, Some(up)] = factors {
                    products.push([place.of_hidden(&grad_hidden)?, place.of_result(grad)?, up.get()?]);
                }
            }
            let products: Vec<[&Raw; 3]> = products.iter().map(|product| product.each_ref()).collect();
            compute::write_products(&products, scale, false)?;
        }
        Ok(grad_hidden)
    }

    /// Computes g W, the part of the gradient of x that comes through the frozen weight; g (`grad`) is the gradient of
    /// the result. `None` if the weight is not kept, because x needs no gradient.
    pub fn base_gradient(&self, grad: &Raw) -> Result<Option<Raw>> {
        self.weight.as_ref().map(|weight| weight.input_gradient(grad)).transpose()
    }

    /// Adds s g B A of each adapter to the gradient of x, if x needs one; g (`grad`) is the gradient of the result.
    /// Returns s g B, (rows, Σ rank), with the columns of each adapter whose A needs a gradient, or of all adapters if
    /// x needs one; the other columns stay uninitialised. `None` if neither x nor any A needs a gradient.
    fn add_through_adapters(&self, context: &mut BackwardContext<'_>, grad: &Raw) -> Result<Option<Raw>> {
        let needs_x = context.needs(0);
        let needed: SmallVec<[bool; 4]> =
            (0..self.places.len()).map(|index| needs_x || context.needs(self.down(index))).collect();
        if !needed.contains(&true) {
            return Ok(None);
        }
        let grad_hidden = compute::unset(OP, grad, &[grad.dims()[0], total_rank(&self.places)])?;
        for alike in of_one_scale(&self.places) {
            let scale = self.places[alike.start].scale;
            let (mut products, mut terms) = (Vec::new(), Vec::new());
            for index in alike.filter(|&index| needed[index]) {
                let (place, [down, Some(up)]) = (&self.places[index], &self.factors[index]) else { continue };
                let (input, hidden, up) = (place.of_result(grad)?, place.of_hidden(&grad_hidden)?, up.get()?);
                match down {
                    // The gradient passes through B first, then through A.
                    Some(down) if needs_x => terms.push(LowRankTerm { input, down: up, up: down.get()?, hidden }),
                    _ => products.push([hidden, input, up]),
                }
            }
            let products: Vec<[&Raw; 3]> = products.iter().map(|product| product.each_ref()).collect();
            compute::write_products(&products, scale, false)?;
            // Here s is the factor of the first products, so that `grad_hidden` gets s g B.
            context.add_low_rank(0, &self.x_shape, terms, [scale, 1.0])?;
        }
        Ok(Some(grad_hidden))
    }

    /// Adds the gradient of each B that needs one, from `grad`, the gradient of the result, (rows, Σ out).
    /// (`add_product` skips inputs that need none.)
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

    /// Adds the gradient of each A that needs one, from s g B of all adapters (`grad_hidden`).
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

    /// Adds the gradient of x, which must need one, and of each A that needs one. `grad` is the gradient of the result,
    /// and `grad_hidden` is s g B of all adapters.
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

    /// Adds the gradient of each input that needs one, from `grad`, the gradient of the result, (rows, Σ out).
    pub fn run(&self, context: &mut BackwardContext<'_>, grad: &Raw) -> Result<()> {
        self.add_up_gradients(context, grad)?;
        if let (true, Some(weight)) = (context.needs(0), &self.weight) {
            weight.add_input_gradient(context, &self.x_shape, grad)?;
        }
        match self.add_through_adapters(context, grad)? {
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
