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
use crate::tensor_writer::EightBits;

/// The longest header that the format allows.
const LONGEST_HEADER: u64 = 100_000_000;
/// Bytes read at a time; a multiple of every element's size.
const CHUNK: usize = 1 << 20;
/// Bytes that a thread reads at a time when several threads read one tensor.
const PART: usize = 4 << 20;

/// An open safetensors file whose tensors are read one at a time.
pub struct TensorFile {
    path: PathBuf,
    file: File,
    /// The offset of the data in the file.
    data: u64,
    metadata: Metadata,
}

impl TensorFile {
    /// Open `path` and check its header against its length.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read; [`Error::WeightsFormat`] if it is not a complete safetensors file.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let io = |source| Error::io(&path, source);
        let mut file = File::open(&path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        // The length of the header, and the brace that every header begins with.
        let mut start = [0u8; 9];
        if length < start.len() as u64 {
            return Err(Error::weights(&path, format!("not a safetensors file: only {length} bytes long")));
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
                    "not a safetensors file, or an incomplete one: {length} bytes long with a header of {header_length}"
                ),
            ));
        }
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
                    "the file is incomplete or damaged: {length} bytes long, its header says {}; download or copy it again",
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

    /// The text entries of the header.
    pub fn metadata(&self) -> HashMap<String, String> {
        self.metadata.metadata().clone().unwrap_or_default()
    }

    /// The shape of a tensor, if there is one of that name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.metadata.info(name).map(|info| info.shape.as_slice())
    }

    /// The dtype of a tensor, if there is one of that name and its dtype is supported.
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
    /// [`Error::WeightsFormat`] if there is no such tensor or its dtype is not supported, [`Error::Io`] if reading fails,
    /// [`Error::OutOfMemory`] if the tensor does not fit in memory.
    pub fn read(&mut self, name: &str, device: &Device) -> Result<Tensor> {
        self.read_as(name, None, device)
    }

    /// Read one tensor to `device`, with floating-point values converted to `dtype` if one is given. For the CPU, small parts
    /// are converted one after another, so that this needs memory for the result and a few megabytes. Another device
    /// converts the values after they were copied to it.
    ///
    /// # Errors
    /// As [`read`](Self::read); [`Error::DType`] if `dtype` is not floating-point.
    pub fn read_as(&mut self, name: &str, dtype: Option<DType>, device: &Device) -> Result<Tensor> {
        let Some(info) = self.metadata.info(name).cloned() else {
            return Err(Error::weights(&self.path, format!("there is no tensor \"{name}\"")));
        };
        let stored = self.dtype(name, &info)?;
        if info.dtype == Dtype::F8_E4M3 {
            return self.read_fp8(&info, dtype.unwrap_or(stored), device);
        }
        let dtype = dtype.filter(|_| is_float(stored)).unwrap_or(stored);
        let elements = check_allocation("load", &info.shape, dtype)?;
        if dtype == stored || !device.is_cpu() {
            let read = self.read_stored(&info, stored)?.to_device(device)?;
            return Ok(Tensor::from_raw(&if dtype == stored { read } else { cast(&read, dtype)? }));
        }
        let result = Raw::zeros(elements, dtype, &Device::Cpu)?;
        let (start, end) = info.data_offsets;
        let io = |path: &Path, source| Error::io(path, source);
        self.file.seek(SeekFrom::Start(self.data + start as u64)).map_err(|e| io(&self.path, e))?;
        let mut bytes = vec![0u8; CHUNK.min(end - start)];
        let mut done = 0;
        while done < elements {
            let count = (elements - done).min(CHUNK / stored.size_in_bytes());
            let bytes = &mut bytes[..count * stored.size_in_bytes()];
            self.file.read_exact(bytes).map_err(|e| io(&self.path, e))?;
            let part = Raw::from_raw_buffer(bytes, stored, &[count], &Device::Cpu)?;
            copy_into(&result.narrow(0, done, count)?, &part)?;
            done += count;
        }
        Ok(Tensor::from_raw(&result.reshape(info.shape)?))
    }

    /// A tensor of e4m3 numbers, which are converted to bf16 without loss and then to `dtype`.
    fn read_fp8(&mut self, info: &TensorInfo, dtype: DType, device: &Device) -> Result<Tensor> {
        let elements = check_allocation("load", &info.shape, dtype)?;
        let bytes = self.read_stored(info, DType::U8)?.reshape(elements)?.to_vec1::<u8>()?;
        let known: Vec<bf16> = (0..=u8::MAX).map(eight_bits::value).collect();
        let values: Vec<bf16> = bytes.into_iter().map(|byte| known[usize::from(byte)]).collect();
        let read = from_vec(values, info.shape.as_slice()).to_device(device)?;
        Ok(Tensor::from_raw(&if dtype == DType::BF16 { read } else { cast(&read, dtype)? }))
    }

    /// The bytes of a tensor of eight-bit numbers, u8 in the shape of the tensor.
    pub(crate) fn read_codes(&self, name: &str) -> Result<Tensor> {
        let Some(info) = self.metadata.info(name) else {
            return Err(Error::weights(&self.path, format!("there is no tensor \"{name}\"")));
        };
        check_allocation("load", &info.shape, DType::U8)?;
        Ok(Tensor::from_raw(&self.read_stored(info, DType::U8)?))
    }

    /// The kind of eight-bit numbers of a tensor, if its elements are such numbers.
    pub(crate) fn eight_bits(&self, name: &str) -> Option<EightBits> {
        match self.metadata.info(name)?.dtype {
            Dtype::F8_E4M3 => Some(EightBits::Fp8),
            Dtype::I8 => Some(EightBits::Int8),
            _ => None,
        }
    }

    /// The values of a tensor as they are stored, read by several threads.
    fn read_stored(&self, info: &TensorInfo, stored: DType) -> Result<Raw> {
        let start = self.data + info.data_offsets.0 as u64;
        filled_in_parts(&info.shape, stored, PART, |at, part| {
            self.file.read_exact_at(part, start + at as u64).map_err(|error| Error::io(&self.path, error))
        })
    }

    fn dtype(&self, name: &str, info: &TensorInfo) -> Result<DType> {
        match info.dtype {
            Dtype::F64 => Ok(DType::F64),
            Dtype::F32 => Ok(DType::F32),
            Dtype::F16 => Ok(DType::F16),
            // e4m3 numbers are converted to bf16.
            Dtype::BF16 | Dtype::F8_E4M3 => Ok(DType::BF16),
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

/// Whether these are the first bytes of a zip archive (`torch.save`) or of a bare pickle. Call it only for files that
/// are not safetensors files, because the header length of a safetensors file could have the same bytes.
fn looks_like_pickle(start: &[u8; 8]) -> bool {
    start.starts_with(b"PK\x03\x04")
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
