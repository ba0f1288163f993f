//! Computes the 8-bit codes of a block of values by arithmetic in registers, without look-ups in memory.
//!
//! Within a decade, the values of the dynamic map are evenly spaced. The number of a value, counted from zero, is
//! therefore a linear function of its magnitude, rounded. Magnitudes so near to the border of two codes that this could
//! be wrong are looked up; they are few.

use super::lanes::Lanes;
use super::quant::{BLOCK_SIZE, Codebook};

/// The code of zero in the map for values of both signs.
pub(super) const ZERO: u8 = 127;
/// Decades of the dynamic map; the last ends at 1.
const DECADES: usize = 7;
/// The first decade ends here; the logarithm of smaller magnitudes is not needed.
const FIRST_END: f32 = 1e-6;
/// Decades in 2^16 steps of the upper half of a value's bits, which grows by 2^7 steps an octave: 154.1. For the value
/// 1 the product is 38.2 decades. Less 32, its whole part is the decade or the one below, up to the end of each. The
/// first decade ends 1.9 times above its last whole power of ten.
const DECADES_PER_BIT: u16 = 154;
/// Values whose number has a fraction below this many 2^-16 are looked up. The rounding of numbers (up to 255), lines
/// and borders together is off by less than half of this. Lines are raised by that half, so that no fraction just below
/// a whole number is uncertain.
const UNCERTAIN: u16 = 8;

/// Registers that can look up a table of eight values.
pub(super) trait Registers: Lanes {
    /// The bits of `WIDTH` values.
    type Bits: Copy;

    /// The smaller of two magnitudes.
    fn min(self, a: Self::Values, b: Self::Values) -> Self::Values;
    fn bits(self, x: Self::Values) -> Self::Bits;
    /// The upper half of each value's bits times `factor`, without the lower half of the product.
    fn upper_times(self, x: Self::Bits, factor: u16) -> Self::Bits;
    /// Moves each value's bits up by one.
    fn double(self, x: Self::Bits) -> Self::Bits;
    /// Values of a [`Table`] by the lowest three bits of each index.
    fn pick(self, table: Self::Values, index: Self::Bits) -> Self::Values;
    /// `index`, and one more where `a > b`; both are magnitudes.
    fn count_above(self, index: Self::Bits, a: Self::Values, b: Self::Values) -> Self::Bits;
    /// Whether the lower half of any number's bits is below `limit`. Upper halves are not.
    fn any_fraction_below(self, limit: u16, numbers: [Self::Bits; 4]) -> bool;
    /// Writes the codes of `values` whose magnitudes' numbers are the third bytes of `numbers`. With `SIGNED` the code of zero is
    /// [`ZERO`]; otherwise 0.
    fn write<const SIGNED: bool>(self, numbers: [Self::Bits; 4], values: [Self::Values; 4], codes: &mut [u8]);
}

/// A value for each decade and one for what is above the last, all stored twice: for registers of 8 and of 16 values.
#[repr(align(64))]
struct Table([f32; 16]);

impl Table {
    fn of(value: impl Fn(usize) -> f32) -> Self {
        Self(std::array::from_fn(|index| value(index % (DECADES + 1))))
    }
}

/// Added to numbers so that all are in one binade, where their bits are the number and, below, its fraction. With both
/// signs, the number above the last decade is at the start of the next binade.
const fn base(signed: bool) -> f32 {
    if signed { 128.0 } else { 256.0 }
}

/// The dynamic map as lines.
pub(super) struct Lines {
    signed: bool,
    /// The largest magnitude of a decade: borders of codes, exact.
    ends: Table,
    /// The number of a magnitude is the whole part of `slope * x + offset`, less [`base`], but not above the decade's last. Offsets
    /// include half of [`UNCERTAIN`].
    slopes: Table,
    offsets: Table,
}

impl Lines {
    /// `border(n)` is the largest magnitude with a number of at most `n`; `signed` if the map has values of both signs.
    pub(super) fn new(signed: bool, border: impl Fn(usize) -> f32) -> Self {
        let items = |decade: usize| 1usize << (decade + usize::from(!signed));
        let first = |decade: usize| 1 + (0..decade).map(items).sum::<usize>();
        // (slope, offset). Borders in a decade are at whole steps from a tenth of its end: there a whole number is reached.
        let line = |decade: usize| match decade {
            DECADES => (0.0, first(DECADES) as f64 + 0.5),
            // Zero's border is not one of them.
            0 => {
                let zero = f64::from(border(0));
                let slope = if signed { 0.5 / zero } else { 1.0 / (f64::from(border(1)) - zero) };
                (slope, 1.0 - slope * zero)
            }
            _ => {
                let (items, end) = (items(decade) as f64, 10f64.powi(decade as i32 + 1 - DECADES as i32));
                (items / (0.9 * end), first(decade) as f64 - items / 9.0)
            }
        };
        let end = |decade: usize| if decade < DECADES { border(first(decade + 1) - 1) } else { f32::INFINITY };
        Self {
            signed,
            ends: Table::of(end),
            slopes: Table::of(|decade| line(decade).0 as f32),
            offsets: Table::of(|decade| {
                (line(decade).1 + f64::from(base(signed)) + f64::from(UNCERTAIN / 2) / 65536.0) as f32
            }),
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
    for start in (0..BLOCK_SIZE).step_by(4 * R::WIDTH) {
        let range = start..start + 4 * R::WIDTH;
        let (values, codes) = (&values[range.clone()], &mut codes[range]);
        let mut scaled = [r.splat(scale); 4];
        for (part, scaled) in scaled.iter_mut().enumerate() {
            *scaled = r.mul(r.load(&values[part * R::WIDTH..]), *scaled);
        }
        let mut x = scaled;
        if SIGNED {
            for x in &mut x {
                *x = r.abs(*x);
            }
        }
        let numbers = numbers::<R, SIGNED>(r, lines, x);
        r.write::<SIGNED>(numbers, scaled, codes);
        if r.any_fraction_below(UNCERTAIN, numbers) {
            look_up(codebook, values, scale, codes);
        }
    }
}

/// The numbers of four registers of magnitudes, in the third byte, and their fractions, in the two below.
///
/// Each operation is done on all four before the next: a processor holds too few waiting operations to find by itself that
/// the four do not depend on each other. Loops, because closures would not be compiled for the registers.
#[inline(always)]
fn numbers<R: Registers, const SIGNED: bool>(r: R, lines: &Lines, x: [R::Values; 4]) -> [R::Bits; 4] {
    let ends = r.load(&lines.ends.0);
    // The bits of a value grow with its logarithm, about evenly: by 2^23 an octave.
    let mut decade = [r.bits(ends); 4];
    for (decade, x) in decade.iter_mut().zip(x) {
        let bits = r.bits(r.max_bits(x, r.splat(FIRST_END)));
        *decade = r.upper_times(bits, DECADES_PER_BIT);
    }
    // It is the right decade or the one below; comparing with the end of that decides.
    for (decade, x) in decade.iter_mut().zip(x) {
        *decade = r.count_above(*decade, x, r.pick(ends, *decade));
    }
    let (slopes, offsets) = (r.load(&lines.slopes.0), r.load(&lines.offsets.0));
    // A decade's last number is 9/4 of its offset, less a constant; a fraction away from a whole number makes room for
    // the first decade, whose line differs.
    let last_of_zero = r.splat(if SIGNED { -0.06 } else { 0.95 } - 1.25 * base(SIGNED));
    let mut number = decade;
    for ((number, x), decade) in number.iter_mut().zip(x).zip(decade) {
        let offset = r.pick(offsets, decade);
        let exact = r.mul_add(x, r.pick(slopes, decade), offset);
        let last = r.mul_add(offset, r.splat(2.25), last_of_zero);
        let bits = r.bits(r.min(exact, last));
        *number = if SIGNED { bits } else { r.double(bits) };
    }
    number
}

#[cold]
#[inline(never)]
fn look_up(codebook: &Codebook, values: &[f32], scale: f32, codes: &mut [u8]) {
    codebook.encode_each(values, scale, codes);
}
