//! The CPU form of rotary position embeddings. A row is the vector of one head's features at one position of a
//! sequence; each pair of its features is rotated by an angle.

use std::mem::MaybeUninit;

use candle_core::WithDType;

use super::super::rows;
use super::ROPE;
use crate::compute::{cast, contiguous};
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
use crate::raw::{Raw, from_vec};
use crate::{Result, dispatch_float};

/// The angles by which pairs of features are rotated, and which pairs and rows they belong to. Rows count from 0 over
/// all sequences and heads. Row i has position ⌊i / `repeats`⌋ mod `positions`.
pub struct Angles<'a, R> {
    /// The cosines, (`positions`, `half`); `sin` has the same shape.
    pub cos: &'a [R],
    pub sin: &'a [R],
    /// Number of positions of a sequence.
    pub positions: usize,
    /// How many consecutive rows have the same position: the number of heads if the heads of a position are adjacent in
    /// memory, else 1.
    pub repeats: usize,
    /// Number of pairs of a row.
    pub half: usize,
    /// Whether features 2i and 2i + 1 form pair i; else features i and i + `half` do.
    pub interleaved: bool,
}

impl<R: Real> Angles<'_, R> {
    /// Rotates the pairs of row number `row` by their angles, or by the negative angles if `back` (in the backward
    /// pass). `x` and `out` are this row alone. `read` converts an element of `x`; `write` stores a result in an
    /// element of `out`.
    #[inline(always)]
    pub fn rotate<X: Copy, Y>(
        &self,
        row: usize,
        (x, out): (&[X], &mut [Y]),
        back: bool,
        read: impl Fn(X) -> R,
        write: impl Fn(&mut Y, R),
    ) {
        let position = row / self.repeats % self.positions;
        let range = position * self.half..(position + 1) * self.half;
        let angles = self.cos[range.clone()].iter().zip(&self.sin[range]);
        let sign = if back { -R::ONE } else { R::ONE };
        let rotate = |a: X, b: X, cos: R, sin: R| {
            let (a, b, sin) = (read(a), read(b), sign * sin);
            (a * cos - b * sin, a * sin + b * cos)
        };
        if self.interleaved {
            for ((out, x), (cos, sin)) in out.chunks_exact_mut(2).zip(x.chunks_exact(2)).zip(angles) {
                let (a, b) = rotate(x[0], x[1], *cos, *sin);
                write(&mut out[0], a);
                write(&mut out[1], b);
            }
        } else {
            let (x, out) = (x.split_at(self.half), out.split_at_mut(self.half));
            let outs = out.0.iter_mut().zip(out.1);
            for (((to_a, to_b), (a, b)), (cos, sin)) in outs.zip(x.0.iter().zip(x.1)).zip(angles) {
                let (a, b) = rotate(*a, *b, *cos, *sin);
                write(to_a, a);
                write(to_b, b);
            }
        }
    }
}

/// Rotates the rows (the last dimension) of a dense `x` as [`Angles::rotate`] does. `cos` and `sin` have one row per
/// position and one column per pair of features. Every `repeats` consecutive rows of `x` have the same position.
pub fn rotate(x: &Raw, [cos, sin]: [&Raw; 2], repeats: usize, interleaved: bool, back: bool) -> Result<Raw> {
    let (positions, half) = (cos.dims()[0], cos.dims()[1]);
    let len = 2 * half;
    let rows = x.elem_count() / len.max(1);
    dispatch_float!(x.dtype(), ROPE.name, T => {
        let dtype = <<T as Elem>::Acc as WithDType>::DTYPE;
        // Casts a table of cosines or sines to the type in which the rotation computes.
        let table = |table: &Raw| contiguous(&cast(table, dtype)?);
        let y = read_all(ROPE.name, &[x, &table(cos)?, &table(sin)?], |operands| {
            let x = elements::<T>(operands[0])?;
            let (cos, sin) = (elements(operands[1])?, elements(operands[2])?);
            let angles = Angles { cos, sin, positions, repeats, half, interleaved };
            // SAFETY: each row is written as a whole.
            let y = unsafe {
                rows::fill_rows::<T>(rows, len, rows::rows_per_block(len), |range, out| {
                    dispatch(
                        #[inline(always)]
                        || {
                            for (row, out) in range.zip(out.chunks_exact_mut(len)) {
                                let x = &x[row * len..(row + 1) * len];
                                let write = |slot: &mut MaybeUninit<T>, y| {
                                    slot.write(T::from_acc(y));
                                };
                                angles.rotate(row, (x, out), back, T::to_acc, write);
                            }
                        },
                    );
                })
            };
            Ok(y)
        })?;
        Ok(from_vec(y, x.shape()))
    })
}
