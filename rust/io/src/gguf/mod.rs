//! Reads GGUF files tensor by tensor. This is the format of llama.cpp, and of image models with llama.cpp's
//! quantization.

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
use header::{Header, Info, Kind};

/// Bytes that each of several threads reads at a time.
const PART: usize = 4 << 20;
/// The dtype of dequantized blocks unless another is requested.
const BLOCK_DTYPE: DType = DType::BF16;

/// An open GGUF file whose tensors are read one at a time.
pub struct GgufFile {
    path: PathBuf,
    file: File,
    header: Header,
}

impl GgufFile {
    /// Open `path` and check its header against its length.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read; [`Error::WeightsFormat`] if it is damaged, or has tensors of a type that is not
    /// supported.
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

    /// The file's metadata about its model, under the names of the format.
    pub const fn facts(&self) -> &Map<String, Value> {
        &self.header.facts
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        self.header.tensors.keys().cloned().collect()
    }

    /// The shape of a tensor, its slowest dimension first, if there is one of that name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.header.tensors.get(name)?.dims)
    }

    /// The dtype of a tensor's values, if there is one of that name; bf16 if it is quantized.
    pub fn dtype_of(&self, name: &str) -> Option<DType> {
        Some(match self.header.tensors.get(name)?.kind {
            Kind::Plain(dtype) => dtype,
            Kind::Blocks(_) => BLOCK_DTYPE,
        })
    }

    /// The format of a matrix whose rows are whole blocks, if there is one of that name.
    pub fn format_of(&self, name: &str) -> Option<Ggml> {
        let info = self.header.tensors.get(name)?;
        let (Kind::Blocks(format), &[_, columns]) = (info.kind, info.dims.as_slice()) else { return None };
        format.row_bytes(columns).is_some().then_some(format)
    }

    /// Read the values of one tensor to `device`, in `dtype` if one is given.
    ///
    /// # Errors
    /// [`Error::WeightsFormat`] if there is no such tensor, [`Error::Io`] if reading fails,
    /// [`Error::OutOfMemory`] if the tensor does not fit in memory.
    pub fn read_as(&self, name: &str, dtype: Option<DType>, device: &Device) -> Result<Tensor> {
        let info = self.info(name)?;
        check_allocation("load", &info.dims, dtype.unwrap_or(BLOCK_DTYPE))?;
        match info.kind {
            Kind::Plain(stored) => {
                let read = self.read_stored(info, &info.dims, stored)?.to_device(device)?;
                let dtype = dtype.unwrap_or(stored);
                Ok(Tensor::from_raw(&if dtype == stored { read } else { cast(&read, dtype)? }))
            }
            Kind::Blocks(format) => {
                let columns = format.block();
                let rows = info.bytes / format.block_bytes();
                let blocks = self.read_stored(info, &[rows, format.block_bytes()], DType::U8)?;
                let matrix =
                    Quantized::from_ggml(format, &Tensor::from_raw(&blocks), BLOCK_DTYPE)?.to_device(device)?;
                debug_assert_eq!(matrix.dims(), [rows, columns], "a block is a row");
                matrix.dequantize(dtype.unwrap_or(BLOCK_DTYPE))?.reshape(info.dims.as_slice())
            }
        }
    }

    /// Read the blocks of a matrix as stored, u8 (rows, bytes of a row), and their format. `None` for tensors that
    /// are not matrices of blocks, and for matrices whose rows are not whole blocks.
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

    fn info(&self, name: &str) -> Result<&Info> {
        let missing = || Error::weights(&self.path, format!("there is no tensor \"{name}\""));
        self.header.tensors.get(name).ok_or_else(missing)
    }

    /// The bytes of a tensor as elements of `dtype` in the shape `dims`, read by several threads.
    fn read_stored(&self, info: &Info, dims: &[usize], dtype: DType) -> Result<Raw> {
        filled_in_parts(dims, dtype, PART, |at, part| {
            self.file.read_exact_at(part, info.start + at as u64).map_err(|error| Error::io(&self.path, error))
        })
    }
}
