//! Reads GGUF files tensor by tensor. GGUF is the file format of llama.cpp, and of image models whose weights are
//! quantized in llama.cpp's formats.

mod header;

use std::fs::File;
use std::io::BufReader;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use trainable_candle_core::compute::cast;
use trainable_candle_core::quantized::Ggml;
use trainable_candle_core::raw::{check_allocation, filled_in_parts};
use trainable_candle_core::{DType, Device, Error, Quantized, Raw, Result, Tensor};

pub(crate) use header::MAGIC;
use header::{BLOCK_DTYPE, Header, Info, Kind};

/// The number of bytes that a thread reads in one call.
const PART: usize = 4 << 20;

/// An open GGUF file whose tensors are read one at a time.
pub struct GgufFile {
    path: PathBuf,
    file: File,
    header: Header,
}

impl GgufFile {
    /// Open the file at `path`, parse its header, and check that every tensor of the header lies inside the file.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read; [`Error::WeightsFormat`] if it is damaged, or has tensors of a type
    /// that is not supported.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let file = File::open(&path).map_err(|source| Error::io(&path, source))?;
        let length = file.metadata().map_err(|source| Error::io(&path, source))?.len();
        let header = header::parse(BufReader::new(&file), length).map_err(|text| Error::weights(&path, text))?;
        Ok(Self { path, file, header })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's metadata, under GGUF's names (`general.architecture`).
    pub const fn facts(&self) -> &Map<String, Value> {
        &self.header.facts
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        self.header.tensors.keys().cloned().collect()
    }

    /// The shape of the tensor `name`, with the slowest dimension first. `None` if the file has no tensor `name`.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.header.tensors.get(name)?.dims)
    }

    /// The dtype of the values of the tensor `name`, bf16 if the tensor is quantized. `None` if the file has no tensor
    /// `name`.
    pub fn dtype_of(&self, name: &str) -> Option<DType> {
        Some(self.header.tensors.get(name)?.kind.dtype())
    }

    /// The block format of the matrix `name`. `None` if the file has no tensor `name`, or if the tensor is not a matrix
    /// of quantized blocks whose rows are whole blocks.
    pub fn format_of(&self, name: &str) -> Option<Ggml> {
        let info = self.header.tensors.get(name)?;
        let (Kind::Blocks(format), &[_, columns]) = (info.kind, info.dims.as_slice()) else { return None };
        format.row_bytes(columns).is_some().then_some(format)
    }

    /// Read the values of the tensor `name` to `device`, converted to `dtype`. If `dtype` is `None`, the values have
    /// the dtype [`dtype_of`](Self::dtype_of).
    ///
    /// # Errors
    /// [`Error::WeightsFormat`] if there is no such tensor, [`Error::Io`] if reading fails,
    /// [`Error::OutOfMemory`] if the tensor does not fit in memory, [`Error::DType`] if `dtype` is not floating point.
    pub fn read_as(&self, name: &str, dtype: Option<DType>, device: &Device) -> Result<Tensor> {
        let info = self.info(name)?;
        let dtype = dtype.unwrap_or(info.kind.dtype());
        check_allocation("load", &info.dims, dtype)?;
        match info.kind {
            Kind::Plain(stored) => {
                let read = self.read_stored(info, &info.dims, stored)?.to_device(device)?;
                Ok(Tensor::from_raw(&if dtype == stored { read } else { cast(&read, dtype)? }))
            }
            Kind::Blocks(format) => {
                // The matrix has a row for each block, because the tensor's own rows need not be whole blocks. A block
                // has `columns` values.
                let columns = format.block();
                let rows = info.bytes / format.block_bytes();
                let blocks = self.read_stored(info, &[rows, format.block_bytes()], DType::U8)?;
                // `BLOCK_DTYPE` is the dtype that the matrix has by default; `dequantize` below gets `dtype` instead.
                let matrix =
                    Quantized::from_ggml(format, &Tensor::from_raw(&blocks), BLOCK_DTYPE)?.to_device(device)?;
                debug_assert_eq!(matrix.dims(), [rows, columns], "a block is a row");
                matrix.dequantize(dtype)?.reshape(info.dims.as_slice())
            }
        }
    }

    /// Read the stored bytes of the matrix `name`, u8 (rows, bytes of a row), and the format of its blocks. `None` if
    /// the tensor is not a matrix of quantized blocks, or if its rows are not whole blocks.
    ///
    /// # Errors
    /// As [`read_as`](Self::read_as).
    pub fn read_blocks(&self, name: &str) -> Result<Option<(Ggml, Tensor)>> {
        let info = self.info(name)?;
        let (Kind::Blocks(format), &[rows, columns]) = (info.kind, info.dims.as_slice()) else { return Ok(None) };
        let Some(bytes) = format.row_bytes(columns) else { return Ok(None) };
        check_allocation("load", &[rows, bytes], DType::U8)?;
        Ok(Some((format, Tensor::from_raw(&self.read_stored(info, &[rows, bytes], DType::U8)?))))
    }

    /// The header's entry of the tensor `name`.
    fn info(&self, name: &str) -> Result<&Info> {
        let missing = || Error::weights(&self.path, format!("there is no tensor \"{name}\""));
        self.header.tensors.get(name).ok_or_else(missing)
    }

    /// Read the bytes of a tensor with several threads. The result interprets them as elements of `dtype` in the shape
    /// `dims`.
    fn read_stored(&self, info: &Info, dims: &[usize], dtype: DType) -> Result<Raw> {
        // `at` is the offset of `part` in the tensor, in bytes.
        filled_in_parts(dims, dtype, PART, |at, part| {
            self.file.read_exact_at(part, info.start + at as u64).map_err(|error| Error::io(&self.path, error))
        })
    }
}
