//! Reads safetensors files, tensor by tensor.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use trainable_candle_core::compute::{cast, copy_into};
use trainable_candle_core::raw::{check_allocation, filled_in_parts, from_vec, is_float};
use trainable_candle_core::{DType, Device, Error, Raw, Result, Tensor};

use crate::eight_bits;

/// The largest size of a header, in bytes, that the format allows.
const LONGEST_HEADER: u64 = 100_000_000;
/// The number of bytes that are read and converted at a time, a multiple of the size of every dtype's elements.
const CHUNK: usize = 1 << 20;
/// The number of bytes that a thread reads in one call when several threads read one tensor.
const PART: usize = 4 << 20;

/// An open safetensors file whose tensors are read one at a time.
pub struct TensorFile {
    path: PathBuf,
    file: File,
    /// The offset of the tensors' data from the beginning of the file, in bytes.
    data: u64,
    metadata: Metadata,
}

impl TensorFile {
    /// Open the file at `path`, parse its header, and check that the file's size is the size that follows from the
    /// header.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read; [`Error::WeightsFormat`] if it is not a complete safetensors file.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let io = |source| Error::io(&path, source);
        let mut file = File::open(&path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        // Eight bytes with the header's length, and the brace with which every header begins.
        let mut start = [0u8; 9];
        if length < start.len() as u64 {
            return Err(Error::weights(&path, format!("not a safetensors file: the file has only {length} bytes")));
        }
        file.read_exact(&mut start).map_err(io)?;
        let [length_bytes @ .., brace] = start;
        if brace != b'{' && looks_like_pickle(&length_bytes) {
            return Err(Error::weights(
                &path,
                "this is a pickle checkpoint, which is not supported because opening it can run code; convert it to \
                 safetensors",
            ));
        }
        let header_length = u64::from_le_bytes(length_bytes);
        if brace != b'{' || header_length == 0 || header_length > LONGEST_HEADER || header_length + 8 > length {
            return Err(Error::weights(
                &path,
                format!(
                    "not a safetensors file, or an incomplete one: the file has {length} bytes, and its first eight \
                     bytes give a header of {header_length} bytes"
                ),
            ));
        }
        // The header begins with the brace, which is already read. The rest is read over the other bytes.
        let mut header = vec![brace; header_length as usize];
        file.read_exact(&mut header[1..]).map_err(io)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|e| Error::weights(&path, format!("the safetensors header is damaged: {e}")))?;
        // Parsing has checked that the tensors are consecutive and that their lengths match their shapes.
        let end = metadata.tensors().values().map(|info| info.data_offsets.1 as u64).max().unwrap_or(0);
        let data = 8 + header_length;
        if data + end != length {
            return Err(Error::weights(
                &path,
                format!(
                    "the file is incomplete or damaged: it has {length} bytes, but its header says {}; download or copy \
                     it again",
                    data + end
                ),
            ));
        }
        Ok(Self { path, file, data, metadata })
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.metadata.tensors().into_keys().collect();
        names.sort();
        names
    }

    /// The text entries of the header (`__metadata__`).
    pub fn metadata(&self) -> HashMap<String, String> {
        self.metadata.metadata().clone().unwrap_or_default()
    }

    /// The shape of the tensor `name`; `None` if the file has no tensor `name`.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.metadata.info(name).map(|info| info.shape.as_slice())
    }

    /// The dtype in which [`read`](Self::read) returns the tensor `name`: the stored dtype, bf16 for fp8 and u8 for
    /// bool. `None` if the file has no tensor `name`, or if the tensor's dtype is not supported.
    pub fn dtype_of(&self, name: &str) -> Option<DType> {
        let info = self.metadata.info(name)?;
        self.dtype(name, info).ok()
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Read one tensor to `device`.
    ///
    /// # Errors
    /// [`Error::WeightsFormat`] if there is no such tensor or its dtype is not supported, [`Error::Io`] if reading
    /// fails, [`Error::OutOfMemory`] if the tensor does not fit in memory.
    pub fn read(&mut self, name: &str, device: &Device) -> Result<Tensor> {
        self.read_as(name, None, device)
    }

    /// Read one tensor to `device`. Floating-point values are converted to `dtype`, if it is given. For the CPU, values
    /// that need a conversion, except fp8, are read and converted 1 MiB at a time, so that reading needs little memory
    /// beside the result. Other devices get the stored values and convert them.
    ///
    /// # Errors
    /// As [`read`](Self::read); [`Error::DType`] if the values are floating-point and `dtype` is not.
    pub fn read_as(&mut self, name: &str, dtype: Option<DType>, device: &Device) -> Result<Tensor> {
        let Some(info) = self.metadata.info(name).cloned() else {
            return Err(Error::weights(&self.path, format!("there is no tensor \"{name}\"")));
        };
        // bf16 for fp8, whose values `read_fp8` converts.
        let stored = self.dtype(name, &info)?;
        let value_of = match info.dtype {
            Dtype::F8_E4M3 => Some(eight_bits::value_of_e4m3 as fn(u8) -> bf16),
            Dtype::F8_E5M2 => Some(eight_bits::value_of_e5m2 as fn(u8) -> bf16),
            _ => None,
        };
        if let Some(value_of) = value_of {
            return self.read_fp8(&info, value_of, dtype.unwrap_or(stored), device);
        }
        let dtype = dtype.filter(|_| is_float(stored)).unwrap_or(stored);
        let elements = check_allocation("load", &info.shape, dtype)?;
        if dtype == stored || !device.is_cpu() {
            let read = self.read_stored(&info, stored)?.to_device(device)?;
            return Ok(Tensor::from_raw(&if dtype == stored { read } else { cast(&read, dtype)? }));
        }
        let result = Raw::zeros(elements, dtype, &Device::Cpu)?;
        let (start, end) = info.data_offsets;
        self.file.seek(SeekFrom::Start(self.data + start as u64)).map_err(|error| Error::io(&self.path, error))?;
        let mut bytes = vec![0u8; CHUNK.min(end - start)];
        let mut done = 0;
        while done < elements {
            let count = (elements - done).min(CHUNK / stored.size_in_bytes());
            let bytes = &mut bytes[..count * stored.size_in_bytes()];
            self.file.read_exact(bytes).map_err(|error| Error::io(&self.path, error))?;
            let part = Raw::from_raw_buffer(bytes, stored, &[count], &Device::Cpu)?;
            copy_into(&result.narrow(0, done, count)?, &part)?;
            done += count;
        }
        Ok(Tensor::from_raw(&result.reshape(info.shape)?))
    }

    /// Read a tensor of fp8 numbers. `value_of` converts a number to bf16 exactly. The bf16 numbers are then converted
    /// to `dtype`.
    fn read_fp8(&self, info: &TensorInfo, value_of: fn(u8) -> bf16, dtype: DType, device: &Device) -> Result<Tensor> {
        let elements = check_allocation("load", &info.shape, dtype)?;
        let bytes = self.read_stored(info, DType::U8)?.reshape(elements)?.to_vec1::<u8>()?;
        let table: Vec<bf16> = (0..=u8::MAX).map(value_of).collect();
        let values: Vec<bf16> = bytes.into_iter().map(|byte| table[usize::from(byte)]).collect();
        let read = from_vec(values, info.shape.as_slice()).to_device(device)?;
        Ok(Tensor::from_raw(&if dtype == DType::BF16 { read } else { cast(&read, dtype)? }))
    }

    /// Read the bytes of a tensor, whatever its dtype, as u8 in one dimension.
    pub(crate) fn read_bytes(&self, name: &str) -> Result<Tensor> {
        let Some(info) = self.metadata.info(name) else {
            return Err(Error::weights(&self.path, format!("there is no tensor \"{name}\"")));
        };
        let (start, end) = info.data_offsets;
        check_allocation("load", &[end - start], DType::U8)?;
        Ok(Tensor::from_raw(&self.read_range(start, &[end - start], DType::U8)?))
    }

    /// The dtype of the tensor `name` in the file, such as fp8, which [`dtype_of`](Self::dtype_of) replaces by bf16.
    pub(crate) fn stored_dtype(&self, name: &str) -> Option<Dtype> {
        self.metadata.info(name).map(|info| info.dtype)
    }

    /// Read the stored values of a tensor. `stored` is the dtype of these values.
    fn read_stored(&self, info: &TensorInfo, stored: DType) -> Result<Raw> {
        self.read_range(info.data_offsets.0, &info.shape, stored)
    }

    /// Read values of `dtype` with several threads, beginning `start` bytes after the beginning of the tensors' data.
    /// Each call of the closure reads one slice `part` of the result, which begins at byte `at` of the result.
    fn read_range(&self, start: usize, dims: &[usize], dtype: DType) -> Result<Raw> {
        let start = self.data + start as u64;
        filled_in_parts(dims, dtype, PART, |at, part| {
            self.file.read_exact_at(part, start + at as u64).map_err(|error| Error::io(&self.path, error))
        })
    }

    /// The dtype in which a tensor is read.
    fn dtype(&self, name: &str, info: &TensorInfo) -> Result<DType> {
        match info.dtype {
            Dtype::F64 => Ok(DType::F64),
            Dtype::F32 => Ok(DType::F32),
            Dtype::F16 => Ok(DType::F16),
            // The values of fp8 numbers are read as bf16.
            Dtype::BF16 | Dtype::F8_E4M3 | Dtype::F8_E5M2 => Ok(DType::BF16),
            Dtype::I64 => Ok(DType::I64),
            Dtype::U32 => Ok(DType::U32),
            Dtype::U8 | Dtype::BOOL => Ok(DType::U8),
            other => Err(Error::weights(
                &self.path,
                format!("tensor \"{name}\" has dtype {other:?}, which is not supported"),
            )),
        }
    }
}

/// Whether a file that begins with `start` looks like a zip archive (`torch.save`) or a bare pickle. Call this function
/// only for files that are not safetensors files: the header length of a safetensors file could have the same bytes.
fn looks_like_pickle(start: &[u8; 8]) -> bool {
    start.starts_with(b"PK\x03\x04")
        // A pickle begins with the opcode PROTO (0x80) and the version of its protocol. If six zeros follow, the eight
        // bytes are a small number: the length of a header. Then the file is more likely a damaged safetensors file.
        || (start[0] == 0x80 && (2..=5).contains(&start[1]) && start[2..].iter().any(|&b| b != 0))
}

/// Read every tensor of the file at `path` to `device`.
///
/// # Errors
/// As [`TensorFile::open`] and [`TensorFile::read`].
pub fn load_tensors(path: &Path, device: &Device) -> Result<BTreeMap<String, Tensor>> {
    let mut file = TensorFile::open(path)?;
    file.names().into_iter().map(|name| Ok((name.clone(), file.read(&name, device)?))).collect()
}
