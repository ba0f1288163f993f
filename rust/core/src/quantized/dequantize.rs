//! Dequantization: codes to values. A matrix consists of one or more parts, one below the other, each of which was
//! quantized by itself.

use std::ops::Range;

use candle_core::DType;

use super::{Part, Quantized, Scales, floats, nf4, rows};
use crate::compute::on_device;
use crate::cpu::pool::par_chunks_mut;
use crate::cpu::{Elem, Real};
use crate::raw::{Raw, check_allocation, from_vec, with_bytes};
use crate::{Result, dispatch_float};

/// Number of elements of NF4 that a thread takes at a time; a multiple of the block size.
const GRAIN: usize = 32 * 1024;

impl Quantized {
    /// The values in `dtype`, (rows, columns).
    pub(crate) fn values(&self, dtype: DType) -> Result<Raw> {
        on_device!(
            self.device(),
            cuda => super::cuda::values(self, dtype),
            cpu => self.rows_on_cpu(0..self.dims[0], dtype),
        )
    }

    /// The values of the rows `wanted` in `dtype`, (number of these rows, columns).
    pub(super) fn rows_on_cpu(&self, wanted: Range<usize>, dtype: DType) -> Result<Raw> {
        let dims = [wanted.len(), self.dims[1]];
        check_allocation("dequantize", &dims, dtype)?;
        dispatch_float!(dtype, "dequantize", T => {
            let mut values = vec![T::default(); dims[0] * dims[1]];
            let (mut first, mut rest) = (0, values.as_mut_slice());
            for part in self.parts.iter() {
                // `first` is the part's first row in the matrix.
                let in_part = |row: usize| row.clamp(first, first + part.rows) - first;
                let range = in_part(wanted.start)..in_part(wanted.end);
                let (out, after) = rest.split_at_mut(range.len() * self.dims[1]);
                part.decode(range.start * self.dims[1], self.dims[1], out)?;
                (first, rest) = (first + part.rows, after);
            }
            Ok(from_vec(values, &dims[..]))
        })
    }
}

impl Part {
    /// Fills `out` with the values of the part's elements from element number `start` on; `start` must be the beginning
    /// of a row.
    fn decode<T: Elem>(&self, start: usize, columns: usize, out: &mut [T]) -> Result<()> {
        with_bytes(&self.codes, |codes| match &self.scales {
            Scales::Int8(scales) => {
                let number = |code: u8| f32::from(code as i8);
                with_bytes(scales, |scales| by_rows(codes, floats(scales), (start, columns), number, out))
            }
            Scales::Fp8(scales) => {
                let table: Vec<f32> = (0..=u8::MAX).map(rows::from_e4m3).collect();
                let number = |code: u8| table[usize::from(code)];
                with_bytes(scales, |scales| by_rows(codes, floats(scales), (start, columns), number, out))
            }
            Scales::Nf4(scales) => {
                with_bytes(scales, |scales| by_blocks(codes, |block| floats(scales)[block], start, out))
            }
            // NF4 whose block scales are quantized too: a block's scale is the value of its code in `inner`, times the
            // scale of a group of `NESTED` blocks, plus the offset.
            Scales::Nested { codes: inner, scales, offset } => with_bytes(inner, |inner| {
                with_bytes(scales, |scales| {
                    let outer = floats(scales);
                    let scale =
                        |block: usize| nf4::SCALES[usize::from(inner[block])] * outer[block / nf4::NESTED] + offset;
                    by_blocks(codes, scale, start, out);
                })
            })?,
            Scales::Ggml(format) => {
                // Each row consists of whole blocks, so `start` is the beginning of a block.
                format.decode(codes, start / format.block(), out);
                Ok(())
            }
        })?
    }
}

/// Fills `out` with values of formats that have a code per element, and a scale per row or a single scale. The first
/// value is that of element number `start`; `number` returns the number that a code stands for.
fn by_rows<T: Elem>(
    codes: &[u8],
    scales: &[f32],
    (start, columns): (usize, usize),
    number: impl Fn(u8) -> f32 + Sync,
    out: &mut [T],
) {
    if columns == 0 {
        return;
    }
    par_chunks_mut(out, columns, |row, out| {
        let row = start / columns + row;
        let scale = if let [scale] = scales { *scale } else { scales[row] };
        for (out, code) in out.iter_mut().zip(&codes[row * columns..]) {
            *out = rounded(number(*code) * scale);
        }
    });
}

/// Fills `out` with values of formats that have two codes per byte and a scale per block. The first value is that of
/// element number `start`; `scale` returns the scale of a block.
fn by_blocks<T: Elem>(codes: &[u8], scale: impl Fn(usize) -> f32 + Sync, start: usize, out: &mut [T]) {
    par_chunks_mut(out, GRAIN, |piece, out| {
        // The number of the first element of `rest`.
        let mut at = start + piece * GRAIN;
        let mut rest = out;
        while !rest.is_empty() {
            // The elements of `rest` that are in the block of element `at`.
            let count = (nf4::BLOCK - at % nf4::BLOCK).min(rest.len());
            let (block, after) = rest.split_at_mut(count);
            let scale = scale(at / nf4::BLOCK);
            let values: [T; 16] = nf4::VALUES.map(|value| rounded(value * scale));
            let value = |index: usize| {
                let code = codes[index / 2] >> (if index.is_multiple_of(2) { 4 } else { 0 }) & 0xf;
                values[usize::from(code)]
            };
            // Decode the bytes whose two elements are both in the block, then a single element before and after them.
            // If `at` is odd, element `at` is the second of its byte.
            let single_count = at % 2;
            let (single, whole) = block.split_at_mut(single_count);
            let bytes = &codes[(at + single_count) / 2..];
            let mut pairs = whole.chunks_exact_mut(2);
            for (pair, &byte) in pairs.by_ref().zip(bytes) {
                (pair[0], pair[1]) = (values[usize::from(byte >> 4)], values[usize::from(byte & 0xf)]);
            }
            single.iter_mut().for_each(|out| *out = value(at));
            pairs.into_remainder().iter_mut().for_each(|out| *out = value(at + count - 1));
            (at, rest) = (at + count, after);
        }
    });
}

/// The number of `T` nearest to `x`.
pub(super) fn rounded<T: Elem>(x: f32) -> T {
    T::from_acc(T::Acc::from_f64(f64::from(x)))
}
