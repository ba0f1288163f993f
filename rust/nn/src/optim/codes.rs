//! Computes the 8-bit codes of a block of values by arithmetic in registers, with look-ups in memory for few values.
//!
//! The codes represent the values of the dynamic map. Within a decade (the magnitudes between two powers of ten), the
//! map's values are evenly spaced. Here the map's magnitudes are numbered from zero in ascending order. To encode a
//! magnitude is to find the number of the nearest magnitude in the map. Within a decade, this number is a linear
//! function of the magnitude to encode, rounded. The rounding may be wrong near the border between two codes. Few
//! magnitudes are so near to a border, and their codes are looked up.

use super::lanes::Lanes;
use super::quant::{BLOCK_SIZE, Codebook};

/// The code of zero in the map for values of both signs.
pub(super) const ZERO: u8 = 127;
/// The number of decades of the dynamic map; the last decade ends at 1.
const DECADES: usize = 7;
/// The nominal end of the first decade. All smaller magnitudes are in this decade, so this value replaces them where
/// the decade is computed.
const FIRST_END: f32 = 1e-6;
/// The factor that converts the upper 16 bits of an f32 to decades. The bits as an integer, multiplied by this factor
/// and divided by 2^16, are approximately the f32's logarithm in decades plus a constant, because the upper 16 bits
/// grow by 2^7 per octave, that is by 2^16 in 512 octaves, which are 154.1 decades. For the value 1 the result is 38.2.
/// The whole part of the result, minus 32, is the index of the value's decade or of the decade below. This also holds
/// at the actual end of the first decade, which is up to 1.9e-6 instead of 1e-6.
const UPPER_BITS_TO_DECADES: u16 = 154;
/// A limit for fractions, in units of 2^-16. Before rounding, the number of a magnitude has a fraction. If this
/// fraction is below the limit, the code of the magnitude is looked up. The rounding errors of numbers (up to 255),
/// lines and borders together are less than half of the limit, so rounding may be wrong only within half of the limit
/// above or below a whole number. Half of the limit is added to each line: the uncertain fractions are then those from
/// 0 to the limit.
const UNCERTAIN: u16 = 8;

/// Registers that can look up a table of eight values.
pub(super) trait Registers: Lanes {
    /// The bits of `WIDTH` values.
    type Bits: Copy;

    /// Returns the smaller of two magnitudes.
    fn min(self, a: Self::Values, b: Self::Values) -> Self::Values;
    /// Returns the bits of values.
    fn bits(self, x: Self::Values) -> Self::Bits;
    /// Multiplies the upper 16 bits of each value, as an integer, by `factor`, and shifts the product right by 16.
    fn upper_times(self, x: Self::Bits, factor: u16) -> Self::Bits;
    /// Shifts each value's bits left by one.
    fn double(self, x: Self::Bits) -> Self::Bits;
    /// Returns the entry of a [`Table`] for the lowest three bits of each index.
    fn pick(self, table: Self::Values, index: Self::Bits) -> Self::Values;
    /// Returns `index`, plus one where `a > b`. `a` and `b` are magnitudes.
    fn count_above(self, index: Self::Bits, a: Self::Values, b: Self::Values) -> Self::Bits;
    /// Tells whether the lower half of any number's bits is below `limit`. The upper halves must not be below `limit`,
    /// because implementations compare all halves.
    fn any_fraction_below(self, limit: u16, numbers: [Self::Bits; 4]) -> bool;
    /// Writes the codes of `values`. Bits 16 to 23 of each element of `numbers` are the number of the corresponding
    /// value's magnitude. The code of zero is [`ZERO`] with `SIGNED`, otherwise 0.
    fn write<const SIGNED: bool>(self, numbers: [Self::Bits; 4], values: [Self::Values; 4], codes: &mut [u8]);
}

/// A value for each decade, and one for magnitudes above the last decade. All are stored twice, so that registers of 8
/// and of 16 values can be loaded.
#[repr(align(64))]
struct Table([f32; 16]);

impl Table {
    fn of(value: impl Fn(usize) -> f32) -> Self {
        Self(std::array::from_fn(|index| value(index % (DECADES + 1))))
    }
}

/// Returns the constant that is added to numbers so that all sums have the same exponent: they are at least this power
/// of two and less than the next. The upper bits of such a sum's mantissa are the whole part of the number, the lower
/// bits the fraction. There is one exception: in the map for values of both signs, the sum for a magnitude above the
/// last decade is the next power of two.
const fn base(signed: bool) -> f32 {
    if signed { 128.0 } else { 256.0 }
}

/// The dynamic map as one line (a slope and an offset) for each decade, from which the number of a magnitude is
/// computed.
pub(super) struct Lines {
    signed: bool,
    /// The largest magnitude of each decade, which is exactly a border of two codes.
    ends: Table,
    /// The number of a magnitude x is the whole part of `slope * x + offset`, minus [`base`], but at most the decade's
    /// last number. Offsets include [`base`] and half of [`UNCERTAIN`].
    slopes: Table,
    offsets: Table,
}

impl Lines {
    /// Computes the lines of a map. `border(n)` is the largest magnitude with a number of at most `n`. `signed` tells
    /// whether the map has values of both signs.
    pub(super) fn new(signed: bool, border: impl Fn(usize) -> f32) -> Self {
        // How many map values a decade has, and the number of the first of them.
        let count = |decade: usize| 1usize << (decade + usize::from(!signed));
        let first_number = |decade: usize| 1 + (0..decade).map(count).sum::<usize>();
        // The slope and the offset of a decade. The distance of each border in a decade from the decade's start (a
        // tenth of its end) is a multiple of the distance between two map values. At each border the line reaches a
        // whole number.
        let line = |decade: usize| match decade {
            // Above the last decade, all magnitudes have the same number; its fraction is not near a whole number.
            DECADES => (0.0, first_number(DECADES) as f64 + 0.5),
            // The first decade is an exception: its lowest border is the one between zero and the smallest magnitude.
            // If `signed`, the decade has a single value, so the line only has to reach 1 at that border; it begins at
            // 0.5 for the magnitude 0.
            0 => {
                let lowest = f64::from(border(0));
                let slope = if signed { 0.5 / lowest } else { 1.0 / (f64::from(border(1)) - lowest) };
                (slope, 1.0 - slope * lowest)
            }
            // At the decade's start, 0.1 · end, slope · x is count / 9, so the line has the value `first_number`.
            _ => {
                let (count, end) = (count(decade) as f64, 10f64.powi(decade as i32 + 1 - DECADES as i32));
                (count / (0.9 * end), first_number(decade) as f64 - count / 9.0)
            }
        };
        let end = |decade: usize| if decade < DECADES { border(first_number(decade + 1) - 1) } else { f32::INFINITY };
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

/// Writes the codes of `values * scale` to `codes`. The products must be finite and, up to a few roundings, in [-1, 1]
/// or, in a map without negative values, in [0, 1].
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
        // Each register holds `scale` first, and then the product.
        let mut scaled = [r.splat(scale); 4];
        for (part, product) in scaled.iter_mut().enumerate() {
            *product = r.mul(r.load(&values[part * R::WIDTH..]), *product);
        }
        let mut magnitudes = scaled;
        if SIGNED {
            for x in &mut magnitudes {
                *x = r.abs(*x);
            }
        }
        let numbers = number_magnitudes::<R, SIGNED>(r, lines, magnitudes);
        r.write::<SIGNED>(numbers, scaled, codes);
        if r.any_fraction_below(UNCERTAIN, numbers) {
            look_up(codebook, values, scale, codes);
        }
    }
}

/// Computes the numbers of four registers of magnitudes. Bits 16 to 23 of a result are the number, and the lower 16
/// bits are the number's fraction.
///
/// Each operation runs on all four registers before the next operation, so that the processor can overlap these
/// independent computations. If all operations ran on one register before the next register, the processor could not
/// look far enough ahead. The code uses loops, because closures would be compiled without the instruction set of the
/// registers.
#[inline(always)]
fn number_magnitudes<R: Registers, const SIGNED: bool>(
    r: R,
    lines: &Lines,
    magnitudes: [R::Values; 4],
) -> [R::Bits; 4] {
    let ends = r.load(&lines.ends.0);
    // The bits of an f32, as an integer, are about linear in its logarithm: they grow by 2^23 per octave. The decades
    // are too large by 32, which `pick` ignores. The initial values of the registers are not used.
    let mut decades = [r.bits(ends); 4];
    for (decade, x) in decades.iter_mut().zip(magnitudes) {
        let bits = r.bits(r.max_bits(x, r.splat(FIRST_END)));
        *decade = r.upper_times(bits, UPPER_BITS_TO_DECADES);
    }
    // `decade` is the magnitude's decade or the decade below. If the magnitude is above the end of `decade`, add one.
    for (decade, x) in decades.iter_mut().zip(magnitudes) {
        *decade = r.count_above(*decade, x, r.pick(ends, *decade));
    }
    let (slopes, offsets) = (r.load(&lines.slopes.0), r.load(&lines.offsets.0));
    // The last number of a decade, plus `base`, is the whole part of 9/4 of the decade's offset plus a constant. With
    // `SIGNED`, decade d has the numbers from 2^d to 2^(d+1) - 1, and its offset is 8/9 · 2^d + `base`: 9/4 of it,
    // minus 5/4 of `base`, is 2^(d+1) + `base`, just above the last number plus `base`. Without `SIGNED`, the numbers
    // go from 2^(d+1) - 1 to 2^(d+2) - 2, and the offset is 8/9 · 2^(d+1) - 1 + `base`. `fraction` corrects the whole
    // part; it is chosen so that the whole part is also right for the first decade, whose line differs.
    let fraction = if SIGNED { -0.06 } else { 0.95 };
    let constant = r.splat(fraction - 1.25 * base(SIGNED));
    let mut numbers = decades;
    for ((number, x), decade) in numbers.iter_mut().zip(magnitudes).zip(decades) {
        let offset = r.pick(offsets, decade);
        let exact = r.mul_add(x, r.pick(slopes, decade), offset);
        let last = r.mul_add(offset, r.splat(2.25), constant);
        let bits = r.bits(r.min(exact, last));
        // In the map without negative values, `base` is twice as large, so the mantissa has one bit less for the
        // fraction.
        *number = if SIGNED { bits } else { r.double(bits) };
    }
    numbers
}

/// Looks up the codes of `values * scale`. This is for the few groups of registers that have a number near a border.
#[cold]
#[inline(never)]
fn look_up(codebook: &Codebook, values: &[f32], scale: f32, codes: &mut [u8]) {
    codebook.encode_each(values, scale, codes);
}
