//! The block formats of ggml, as in GGUF files. A row is divided into blocks, and each block contains its scales and
//! its codes.
//!
//! Follows `ggml-common.h` and `ggml-quants.c` of
//! <https://github.com/ggml-org/llama.cpp/tree/0b03adaa632b76c7651dd1f6fa3b7a0b5eda479c/ggml/src>. Values are computed
//! in f32 with the same operations as there, and then rounded to the requested dtype.

use half::f16;

use super::dequantize::rounded;
use crate::cpu::Elem;
use crate::cpu::pool::par_chunks_mut;
use crate::raw::{Raw, from_vec};
use crate::{Error, Result};

/// Number of elements of the largest block.
const LARGEST_BLOCK: usize = 256;
/// Number of elements that a thread takes at a time; a multiple of every block size.
const GRAIN: usize = 32 * 1024;

/// A block format of ggml. Each format below says how many codes a block has, and which value the code n represents.
/// The scale d and the minimum m of a block are f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ggml {
    /// 32 codes of four bits: d (n - 8).
    Q4_0,
    /// 32 codes of four bits: d n + m.
    Q4_1,
    /// 32 codes of five bits: d (n - 16).
    Q5_0,
    /// 32 codes of five bits: d n + m.
    Q5_1,
    /// 32 integers of eight bits: d n.
    Q8_0,
    /// 256 codes of four bits: d s n - m t. The block has eight parts, each with a scale s and a minimum t of six bits.
    Q4K,
    /// 256 codes of five bits: d s n - m t. The block has eight parts, each with a scale s and a minimum t of six bits.
    Q5K,
    /// 256 codes of six bits: d s (n - 32). The block has sixteen parts, each with a scale s of eight bits.
    Q6K,
}

impl Ggml {
    /// All formats, in the order of `kernels/dequantize.cu`.
    pub const ALL: [Self; 8] =
        [Self::Q4_0, Self::Q4_1, Self::Q5_0, Self::Q5_1, Self::Q8_0, Self::Q4K, Self::Q5K, Self::Q6K];

    /// The name in settings and in Python.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::Q8_0 => "q8_0",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
        }
    }

    /// The format of this name.
    ///
    /// # Errors
    /// [`Error::Argument`] for an unknown name; the message lists all names.
    pub fn of_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            Error::argument("quantize", format!("found the block format \"{name}\", expected one of {known}"))
        })
    }

    /// The format's type number in GGUF files.
    pub const fn id(self) -> u32 {
        match self {
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
        }
    }

    /// Number of elements of a block; they all belong to the same row.
    pub const fn block(self) -> usize {
        match self {
            Self::Q4K | Self::Q5K | Self::Q6K => LARGEST_BLOCK,
            _ => 32,
        }
    }

    /// Number of bytes of a block. The terms of the sums are the sizes of the block's fields, in the order in which
    /// they are stored: d (2 bytes) or d and m (4), the scales and minimums of the parts (12), the fifth bits of the
    /// codes (4 or 32), their other bits. Q6K has the low four bits of the codes, their two high bits, the scales of
    /// the parts, and d.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Q4_0 => 2 + 16,
            Self::Q4_1 => 4 + 16,
            Self::Q5_0 => 2 + 4 + 16,
            Self::Q5_1 => 4 + 4 + 16,
            Self::Q8_0 => 2 + 32,
            Self::Q4K => 4 + 12 + 128,
            Self::Q5K => 4 + 12 + 32 + 128,
            Self::Q6K => 128 + 64 + 16 + 2,
        }
    }

    /// Number of bytes of a row of `columns` elements; `None` if `columns` is not a multiple of the block size.
    pub const fn row_bytes(self, columns: usize) -> Option<usize> {
        if columns.is_multiple_of(self.block()) {
            (columns / self.block()).checked_mul(self.block_bytes())
        } else {
            None
        }
    }

    /// Whether [`encode`](Self::encode) can write this format.
    pub const fn can_encode(self) -> bool {
        matches!(self, Self::Q4_0 | Self::Q8_0)
    }

    /// The blocks that represent `values`, rounded as in ggml's reference code. The length of a row must be a multiple
    /// of the block size, and [`can_encode`](Self::can_encode) must be true. `None` if a value is non-finite or too
    /// large for an f16 scale.
    pub(super) fn encode(self, values: &[f32]) -> Option<Raw> {
        let (len, bytes) = (self.block(), self.block_bytes());
        let mut blocks = vec![0u8; values.len() / len * bytes];
        par_chunks_mut(&mut blocks, GRAIN / len * bytes, |piece, blocks| {
            for (values, block) in values[piece * GRAIN..].chunks_exact(len).zip(blocks.chunks_exact_mut(bytes)) {
                match self {
                    Self::Q4_0 => encode_q4_0(values, block),
                    _ => encode_q8_0(values, block),
                }
            }
        });
        let is_finite = values.iter().all(|x| x.is_finite())
            && blocks.chunks_exact(bytes).all(|block| f16_at(block, 0).is_finite());
        let count = blocks.len();
        is_finite.then(|| from_vec(blocks, count))
    }

    /// Fills `out` with the values of the blocks in `blocks`, from the first element of block number `first` on.
    pub(super) fn decode<T: Elem>(self, blocks: &[u8], first: usize, out: &mut [T]) {
        let (len, bytes) = (self.block(), self.block_bytes());
        par_chunks_mut(out, GRAIN, |piece, out| {
            let blocks = &blocks[(first + piece * GRAIN / len) * bytes..];
            let mut values = [0f32; LARGEST_BLOCK];
            for (block, out) in blocks.chunks_exact(bytes).zip(out.chunks_mut(len)) {
                self.decode_block(block, &mut values[..len]);
                for (out, value) in out.iter_mut().zip(&values) {
                    *out = rounded(*value);
                }
            }
        });
    }

    fn decode_block(self, block: &[u8], out: &mut [f32]) {
        match self {
            Self::Q4_0 => nibbles(&block[2..], 0, out, |n| f16_at(block, 0) * (n - 8.0)),
            Self::Q4_1 => nibbles(&block[4..], 0, out, |n| f16_at(block, 0) * n + f16_at(block, 2)),
            Self::Q5_0 => nibbles(&block[6..], u32_at(block, 2), out, |n| f16_at(block, 0) * (n - 16.0)),
            Self::Q5_1 => nibbles(&block[8..], u32_at(block, 4), out, |n| f16_at(block, 0) * n + f16_at(block, 2)),
            Self::Q8_0 => {
                let d = f16_at(block, 0);
                for (out, &code) in out.iter_mut().zip(&block[2..]) {
                    *out = d * f32::from(code as i8);
                }
            }
            Self::Q4K => parts_of_32(block, &[], &block[16..], out),
            Self::Q5K => parts_of_32(block, &block[16..48], &block[48..], out),
            Self::Q6K => parts_of_16(block, out),
        }
    }
}

/// The f16 number that begins at byte `at`.
fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The 32-bit word that begins at byte `at`.
fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Writes `value(code)` for the 32 codes of a block. The low four bits of the sixteen bytes `codes` are the codes 0 to
/// 15, and the high four bits the codes 16 to 31. Bit i of `fifth` is the fifth bit of code i; `fifth` is 0 for codes
/// of four bits.
fn nibbles(codes: &[u8], fifth: u32, out: &mut [f32], value: impl Fn(f32) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for (i, &code) in codes.iter().take(16).enumerate() {
        let bit = |at: usize| (fifth >> at & 1) << 4;
        low[i] = value((u32::from(code & 0xf) | bit(i)) as f32);
        high[i] = value((u32::from(code >> 4) | bit(i + 16)) as f32);
    }
}

/// The scale s and the minimum t of part number `part`. The twelve bytes `scales` contain these two numbers of all
/// eight parts, six bits each. The low six bits of bytes 0 to 3 are s of parts 0 to 3, those of bytes 4 to 7 their t.
/// Bytes 8 to 11 have the low four bits of s and t of parts 4 to 7; the two high bits of these numbers are the two high
/// bits of bytes 0 to 3 (s) and 4 to 7 (t).
fn part_scales(scales: &[u8], part: usize) -> [f32; 2] {
    let pair = if part < 4 {
        [scales[part] & 63, scales[part + 4] & 63]
    } else {
        let both = scales[part + 4];
        [both & 15 | scales[part - 4] >> 6 << 4, both >> 4 | scales[part] >> 6 << 4]
    };
    pair.map(f32::from)
}

/// Writes the values of a block of eight parts of 32 elements. Each 32 bytes of `codes` hold two parts: the first in
/// the low four bits, the second in the high four bits. Bit j of byte i of `fifth` is the fifth bit of code i of part
/// j; `fifth` is empty for codes of four bits.
fn parts_of_32(block: &[u8], fifth: &[u8], codes: &[u8], out: &mut [f32]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        let [s, t] = part_scales(&block[4..16], part);
        let (factor, minimum) = (d * s, m * t);
        let codes = &codes[part / 2 * 32..][..32];
        for (i, out) in out.iter_mut().enumerate() {
            let bit = fifth.get(i).map_or(0, |bits| (bits >> part & 1) << 4);
            *out = factor * f32::from(codes[i] >> (part % 2 * 4) & 0xf | bit) - minimum;
        }
    }
}

/// Writes the values of a block of sixteen parts of 16 elements. The block has the low four bits of all codes, then the
/// two high bits of all codes, then the scales of the parts, then the scale of the block.
fn parts_of_16(block: &[u8], out: &mut [f32]) {
    let (low, high, scales, d) = (&block[..128], &block[128..192], &block[192..208], f16_at(block, 208));
    for (part, out) in out.chunks_exact_mut(16).enumerate() {
        let factor = d * f32::from(scales[part] as i8);
        // Each half of the block (128 elements) has 64 bytes of `low` and 32 bytes of `high`. Quarter r of a half has
        // 32 elements. Their low bits are in the first (r even) or the last (r odd) 32 of the 64 bytes: in the low four
        // bits of each byte if r < 2, otherwise in the high four. Their high bits are bits 2 r and 2 r + 1 of the 32
        // bytes.
        let (half, quarter, start) = (part / 8, part / 2 % 4, part % 2 * 16);
        let low = &low[64 * half + 32 * (quarter % 2) + start..][..16];
        let high = &high[32 * half + start..][..16];
        for (out, (low, high)) in out.iter_mut().zip(low.iter().zip(high)) {
            let code = low >> (quarter / 2 * 4) & 0xf | (high >> (2 * quarter) & 3) << 4;
            *out = factor * (f32::from(code) - 32.0);
        }
    }
}

fn encode_q8_0(values: &[f32], block: &mut [u8]) {
    let d = values.iter().fold(0f32, |m, x| m.max(x.abs())) / 127.0;
    let reciprocal = if d == 0.0 { 0.0 } else { 1.0 / d };
    block[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
    for (code, x) in block[2..].iter_mut().zip(values) {
        *code = (x * reciprocal).round() as i8 as u8;
    }
}

fn encode_q4_0(values: &[f32], block: &mut [u8]) {
    // The codes represent -8 d to 7 d. The element of the largest magnitude (the first of several) becomes -8 d, so d
    // has the opposite sign.
    let largest = values.iter().fold(0f32, |m, &x| if x.abs() > m.abs() { x } else { m });
    let d = largest / -8.0;
    let reciprocal = if d == 0.0 { 0.0 } else { 1.0 / d };
    block[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
    // The code n of x is x / d + 8, rounded: the conversion to u8 drops the fraction.
    let code = |x: f32| ((x * reciprocal + 8.5) as u8).min(15);
    for (i, byte) in block[2..].iter_mut().enumerate() {
        *byte = code(values[i]) | code(values[i + 16]) << 4;
    }
}
