//! 8-bit codes of a block of values by arithmetic in registers, without a look-up in memory.
//!
//! In a decade of the dynamic map values are evenly spaced: the number of a value, counted from zero, is a linear function of its
//! magnitude, rounded. The few magnitudes so near to the border of two codes that this rounding could be wrong are looked up.

use std::f64::consts::LOG2_10;

use super::lanes::Lanes;
use super::quant::{BLOCK_SIZE, Codebook};

/// Where the middle of a code's range of magnitudes, zero, is in the map for values of both signs.
pub(super) const ZERO: u8 = 127;
/// Decades of the dynamic map; the last ends at 1.
const DECADES: usize = 7;
/// The first decade ends here; the logarithm of smaller magnitudes is not needed.
const FIRST_END: f32 = 1e-6;
/// Distance of a number from halfway between two, up to which it is looked up. Numbers up to 255 and their lines are rounded, and so
/// are borders: together that is off by less than 5e-5.
const UNCERTAIN: f32 = 1.0 / 8192.0;

/// Registers that can look up a table of eight values.
pub(super) trait Registers: Lanes {
    /// `WIDTH` whole numbers.
    type Whole: Copy;

    fn min(self, a: Self::Values, b: Self::Values) -> Self::Values;
    fn sub(self, a: Self::Values, b: Self::Values) -> Self::Values;
    /// The bits of each value as a number.
    fn bits(self, x: Self::Values) -> Self::Values;
    /// To the nearest whole number, of two to the even one.
    fn round(self, x: Self::Values) -> Self::Whole;
    fn float(self, x: Self::Whole) -> Self::Values;
    /// Values of a [`Table`] by index.
    fn pick(self, table: Self::Values, index: Self::Whole) -> Self::Values;
    /// `index`, and one more where `a > b`.
    fn count_above(self, index: Self::Whole, a: Self::Values, b: Self::Values) -> Self::Whole;
    fn any_above(self, a: Self::Values, b: Self::Values) -> bool;
    /// Writes the codes of `values` whose magnitudes have these numbers. With `SIGNED` the code of zero is [`ZERO`]; otherwise 0.
    fn write<const SIGNED: bool>(self, numbers: [Self::Whole; 4], values: [Self::Values; 4], codes: &mut [u8]);
}

/// A value for each decade and one for what is above the last, twice: for registers of 8 and of 16.
#[repr(align(64))]
struct Table([f32; 16]);

impl Table {
    fn of(value: impl Fn(usize) -> f32) -> Self {
        Self(std::array::from_fn(|index| value(index % (DECADES + 1))))
    }
}

/// The dynamic map as lines.
pub(super) struct Lines {
    signed: bool,
    /// The largest magnitude of a decade: borders of codes, exact.
    ends: Table,
    /// The number of a magnitude is `slope * x + offset`, rounded, but not above `last`.
    slopes: Table,
    offsets: Table,
    last: Table,
}

impl Lines {
    /// `border(n)` is the largest magnitude with a number of at most `n`; `signed` if the map has values of both signs.
    pub(super) fn new(signed: bool, border: impl Fn(usize) -> f32) -> Self {
        let items = |decade: usize| 1usize << (decade + usize::from(!signed));
        let first = |decade: usize| 1 + (0..decade).map(items).sum::<usize>();
        let last = |decade: usize| if decade < DECADES { first(decade + 1) - 1 } else { first(DECADES) };
        // (slope, offset). Borders in a decade are at whole steps from a tenth of its end: there a number and a half is reached.
        let line = |decade: usize| match decade {
            DECADES => (0.0, last(DECADES) as f64),
            // Zero's border is not one of them.
            0 => {
                let zero = f64::from(border(0));
                let slope = if signed { 0.5 / zero } else { 1.0 / (f64::from(border(1)) - zero) };
                (slope, 0.5 - slope * zero)
            }
            _ => {
                let (items, end) = (items(decade) as f64, 10f64.powi(decade as i32 + 1 - DECADES as i32));
                (items / (0.9 * end), first(decade) as f64 - items / 9.0 - 0.5)
            }
        };
        Self {
            signed,
            ends: Table::of(|decade| if decade < DECADES { border(last(decade)) } else { f32::INFINITY }),
            slopes: Table::of(|decade| line(decade).0 as f32),
            offsets: Table::of(|decade| line(decade).1 as f32),
            last: Table::of(|decade| last(decade) as f32),
        }
    }
}

/// The codes of `values * scale`, finite numbers within a few roundings of [-1, 1], or [0, 1].
#[inline(always)]
pub(super) fn encode<R: Registers>(
    r: R,
    codebook: &Codebook,
    values: &[f32; BLOCK_SIZE],
    scale: f32,
    codes: &mut [u8; BLOCK_SIZE],
) {
    let lines = codebook.lines();
    if lines.signed {
        encode_block::<R, true>(r, codebook, lines, values, scale, codes);
    } else {
        encode_block::<R, false>(r, codebook, lines, values, scale, codes);
    }
}

#[inline(always)]
fn encode_block<R: Registers, const SIGNED: bool>(
    r: R,
    codebook: &Codebook,
    lines: &Lines,
    values: &[f32; BLOCK_SIZE],
    scale: f32,
    codes: &mut [u8; BLOCK_SIZE],
) {
    let at = Loaded::<R>::new(r, lines, scale);
    for start in (0..BLOCK_SIZE).step_by(4 * R::WIDTH) {
        let range = start..start + 4 * R::WIDTH;
        let (numbers, scaled, farthest) = at.numbers::<SIGNED>(r, &values[range.clone()]);
        r.write::<SIGNED>(numbers, scaled, &mut codes[range.clone()]);
        if r.any_above(farthest, r.splat(0.5 - UNCERTAIN)) {
            look_up(codebook, &values[range.clone()], scale, &mut codes[range]);
        }
    }
}

/// What encoding keeps in registers.
struct Loaded<R: Registers> {
    scale: R::Values,
    ends: R::Values,
    slopes: R::Values,
    offsets: R::Values,
    last: R::Values,
    decades_per_bit: R::Values,
    decade_of_zero: R::Values,
}

impl<R: Registers> Loaded<R> {
    #[inline(always)]
    fn new(r: R, lines: &Lines, scale: f32) -> Self {
        Self {
            scale: r.splat(scale),
            ends: r.load(&lines.ends.0),
            slopes: r.load(&lines.slopes.0),
            offsets: r.load(&lines.offsets.0),
            last: r.load(&lines.last.0),
            // The bits of a value grow with its logarithm, about evenly: by 2^23 an octave.
            decades_per_bit: r.splat((1.0 / (f64::from(1 << 23) * LOG2_10)) as f32),
            decade_of_zero: r.splat(((DECADES - 1) as f64 - 127.0 / LOG2_10) as f32),
        }
    }

    /// Of four registers of values: the numbers of their magnitudes, they themselves scaled, and the largest distances of magnitudes
    /// from the middle between two borders, in steps.
    ///
    /// Each operation is done on all four before the next: a processor holds too few waiting operations to find by itself that
    /// the four do not depend on each other. Loops, because closures would not be compiled for the registers.
    #[inline(always)]
    fn numbers<const SIGNED: bool>(&self, r: R, values: &[f32]) -> ([R::Whole; 4], [R::Values; 4], R::Values) {
        let mut scaled = [self.scale; 4];
        for (part, scaled) in scaled.iter_mut().enumerate() {
            *scaled = r.mul(r.load(&values[part * R::WIDTH..]), self.scale);
        }
        let mut x = scaled;
        let mut logarithm = scaled;
        for (logarithm, x) in logarithm.iter_mut().zip(&mut x) {
            *x = if SIGNED { r.abs(*x) } else { *x };
            let bits = r.bits(r.max(*x, r.splat(FIRST_END)));
            *logarithm = r.mul_add(bits, self.decades_per_bit, self.decade_of_zero);
        }
        // The right decade or the one below, which its end decides.
        let mut decade = [r.round(logarithm[0]); 4];
        for (decade, logarithm) in decade.iter_mut().zip(logarithm) {
            *decade = r.round(logarithm);
        }
        let mut end = x;
        for (end, decade) in end.iter_mut().zip(decade) {
            *end = r.pick(self.ends, decade);
        }
        for ((decade, x), end) in decade.iter_mut().zip(x).zip(end) {
            *decade = r.count_above(*decade, x, end);
        }
        let mut exact = x;
        for (exact, decade) in exact.iter_mut().zip(decade) {
            *exact = r.mul_add(*exact, r.pick(self.slopes, decade), r.pick(self.offsets, decade));
        }
        for (exact, decade) in exact.iter_mut().zip(decade) {
            *exact = r.min(*exact, r.pick(self.last, decade));
        }
        let mut number = decade;
        for (number, exact) in number.iter_mut().zip(exact) {
            *number = r.round(exact);
        }
        let mut farthest = r.splat(0.0);
        for (number, exact) in number.into_iter().zip(exact) {
            farthest = r.max(farthest, r.abs(r.sub(exact, r.float(number))));
        }
        (number, scaled, farthest)
    }
}

#[cold]
#[inline(never)]
fn look_up(codebook: &Codebook, values: &[f32], scale: f32, codes: &mut [u8]) {
    codebook.encode_each(values, scale, codes);
}
