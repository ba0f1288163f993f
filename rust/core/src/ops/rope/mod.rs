//! Rotary position embedding (Su et al. 2021, arXiv:2104.09864): pairs of features are rotated by angles that grow with
//! the position.

#[cfg(feature = "testing")]
pub(super) mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use crate::compute::{contiguous, on_device};
use crate::raw::{Raw, heads_are_adjacent, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, is_grad_enabled, record};
use crate::{Error, Result, Tensor, checkpoint};

#[cfg(feature = "testing")]
pub use cases::ENTRIES;
pub(super) use cpu::{Angles, rotate as rotate_rows};

static ROPE: OpInfo = OpInfo::cheap("rope");

/// Rotates each pair (a, b) of features of `x (..., S, D)`, which has D features at each of S positions, to
/// (a cos - b sin, a sin + b cos). `cos` and `sin` have the shape `(S, D/2)` and any floating-point dtype; they get no
/// gradient.
///
/// Pair i consists of the features 2i and 2i + 1 if `interleaved` (Flux, original LLaMA), else of the features i and
/// i + D/2 (GPT-NeoX, Hugging Face's LLaMA). If `x` is (..., heads, S, D) and the heads of a position are adjacent in
/// memory, they are adjacent in the result too; any other result is contiguous.
///
/// # Errors
/// [`Error::Shape`] if `x` has fewer than two dimensions, D is odd, or `cos` or `sin` does not fit; [`Error::DType`] if
/// an operand is not floating point; [`Error::Device`] if `cos` or `sin` is on another device than `x`;
/// [`Error::NoBackward`] if `cos` or `sin` needs a gradient.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, interleaved: bool) -> Result<Tensor> {
    check(ROPE.name, x, cos, sin)?;
    record(
        &ROPE,
        &[x],
        || rotate(&x.raw, &cos.raw, &sin.raw, interleaved, /* back */ false),
        // `hold` keeps the tables as parameters are kept: they do not count as memory that the tape saves.
        |saver, _| RopeBackward { cos: saver.hold(cos), sin: saver.hold(sin), interleaved },
    )
}

/// Checks the operands of an operation that rotates pairs. `cos` and `sin` are not inputs of its tape node, so this
/// function also reports to checkpoints that the operation reads them.
pub(super) fn check(op: &'static str, x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<()> {
    let &[.., length, width] = x.dims() else {
        return Err(Error::shape(op, format!("the input has shape {:?}, expected (..., length, width)", x.dims())));
    };
    if width % 2 != 0 {
        return Err(Error::shape(
            op,
            format!("the width {width} of shape {:?} is odd, expected an even width", x.dims()),
        ));
    }
    for (name, table) in [("cos", cos), ("sin", sin)] {
        if *table.dims() != [length, width / 2] {
            return Err(Error::shape(
                op,
                format!(
                    "{name} has shape {:?}, expected {:?} for an input of shape {:?}",
                    table.dims(),
                    [length, width / 2],
                    x.dims()
                ),
            ));
        }
        if !is_float(table.dtype()) {
            let found = table.dtype().as_str();
            return Err(Error::dtype(op, format!("{name} is {found}, expected floating point; convert it with to()")));
        }
        if !table.device().same_device(x.device()) {
            return Err(Error::device(op, format!("{name} is on another device than the input; move one with to()")));
        }
        if table.requires_grad() && is_grad_enabled() {
            return Err(Error::NoBackward { op });
        }
    }
    checkpoint::reads(&[cos, sin]);
    Ok(())
}

struct RopeBackward {
    cos: Saved,
    sin: Saved,
    interleaved: bool,
}

impl Backward for RopeBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let (cos, sin) = (self.cos.get()?, self.sin.get()?);
        let grad = rotate(context.grad(), &cos, &sin, self.interleaved, /* back */ true)?;
        context.add(0, grad)
    }
}

/// The order in which the rows of `(..., S, D)` are in memory. A row is the D features of one position.
#[derive(Clone, Copy)]
pub(super) struct RowOrder {
    /// The number of heads, if the heads of a position are adjacent in memory: dimensions (..., heads, S, D), memory
    /// order (..., S, heads, D). `None` for any other memory order.
    heads: Option<usize>,
}

impl RowOrder {
    pub fn of(x: &Raw) -> Self {
        Self { heads: heads_are_adjacent(x).then(|| x.dims()[x.rank() - 3]) }
    }

    /// How many rows that are consecutive in memory have the same position, and so the same row of `cos` and `sin`.
    pub fn repeats(self) -> usize {
        self.heads.unwrap_or(1)
    }

    /// Permutes the dimensions of `x` to the memory order; a second call restores them.
    pub fn swap(self, x: &Raw) -> Result<Raw> {
        let rank = x.rank();
        Ok(if self.heads.is_some() { x.transpose(rank - 3, rank - 2)? } else { x.clone() })
    }
}

/// Rotates the pairs of `x` by their angles, or by the negative angles if `back`.
fn rotate(x: &Raw, cos: &Raw, sin: &Raw, interleaved: bool, back: bool) -> Result<Raw> {
    let order = RowOrder::of(x);
    let x = contiguous(&order.swap(x)?)?;
    let (tables, repeats) = ([cos, sin], order.repeats());
    let y = on_device!(
        x.device(),
        cuda => cuda::rotate(ROPE.name, &x, tables, repeats, interleaved, back),
        cpu => cpu::rotate(&x, tables, repeats, interleaved, back),
    )?;
    order.swap(&y)
}
