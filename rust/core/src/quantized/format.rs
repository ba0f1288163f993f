//! [`Format`]: how quantized matrices are stored, with the names of the formats and the sizes of matrices.

use std::str::FromStr;

use super::ggml::Ggml;
use super::nf4::{BLOCK, NESTED};
use crate::{Error, Result};

/// How a quantized matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Integers from -127 to 127, with a scale per row.
    Int8,
    /// e4m3, an 8-bit floating-point format (Micikevicius et al. 2022, arXiv:2209.05433), with a scale per row or one
    /// for the matrix.
    Fp8,
    /// `NormalFloat` of four bits (Dettmers et al. 2023, arXiv:2305.14314), as bitsandbytes stores it.
    Nf4,
    /// A block format of ggml, as in GGUF files.
    Ggml(Ggml),
}

impl Format {
    /// The formats that matrices can be quantized to. Matrices in the other formats can only be read from files.
    pub const ALL: [Self; 5] = [Self::Int8, Self::Fp8, Self::Nf4, Self::Ggml(Ggml::Q8_0), Self::Ggml(Ggml::Q4_0)];

    /// The format's name in settings and in Python.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
            Self::Nf4 => "nf4",
            Self::Ggml(format) => format.name(),
        }
    }

    /// Number of bytes of an NF4 matrix whose scales are not quantized. Files may contain such matrices.
    pub const fn bytes_with_plain_scales(rows: usize, columns: usize) -> usize {
        let count = rows * columns;
        count.div_ceil(2) + count.div_ceil(BLOCK) * size_of::<f32>()
    }

    /// Number of bytes of codes and scales of a matrix that [`Quantized::new`](super::Quantized::new) quantizes to this
    /// format.
    pub const fn bytes(self, rows: usize, columns: usize) -> usize {
        let (count, scale) = (rows * columns, size_of::<f32>());
        match self {
            Self::Int8 | Self::Fp8 => count + rows * scale,
            Self::Nf4 => {
                // Half a byte for each element, one byte for the scale of each block, and an f32 scale for each
                // `NESTED` of these scales.
                let blocks = count.div_ceil(BLOCK);
                count.div_ceil(2) + blocks + blocks.div_ceil(NESTED) * scale
            }
            Self::Ggml(format) => rows * columns.div_ceil(format.block()) * format.block_bytes(),
        }
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(|| {
            if Ggml::ALL.into_iter().any(|format| format.name() == name) {
                let text = format!("\"{name}\" can only be read from GGUF files; quantize to q8_0 or nf4");
                return Error::argument("quantize", text);
            }
            let known: Vec<&str> = Self::ALL.iter().map(|format| format.name()).collect();
            Error::argument("quantize", format!("found the format \"{name}\", expected one of {}", known.join(", ")))
        })
    }
}
