//! [`WeightFile`]: a file of weights in one of the supported file formats, safetensors and GGUF.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use trainable_candle_core::{DType, Device, Error, Result, Tensor};

use crate::gguf::{self, GgufFile};
use crate::tensor_file::TensorFile;

/// An open file of weights whose tensors are read one at a time.
pub enum WeightFile {
    /// A safetensors file.
    Safetensors(TensorFile),
    /// A GGUF file.
    Gguf(GgufFile),
}

impl WeightFile {
    /// Open the file at `path`: as GGUF if it begins with GGUF's first four bytes, otherwise as safetensors.
    ///
    /// # Errors
    /// As [`TensorFile::open`] and [`GgufFile::open`].
    pub fn open(path: &Path) -> Result<Self> {
        // If the file cannot be read here, or is too short, `TensorFile::open` returns the error.
        let mut start = [0; gguf::MAGIC.len()];
        let is_gguf = File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok() && start == gguf::MAGIC;
        if is_gguf { Ok(Self::Gguf(GgufFile::open(path)?)) } else { Ok(Self::Safetensors(TensorFile::open(path)?)) }
    }

    /// The GGUF file; `None` if this is a safetensors file.
    pub const fn gguf(&self) -> Option<&GgufFile> {
        match self {
            Self::Safetensors(_) => None,
            Self::Gguf(file) => Some(file),
        }
    }

    /// The safetensors file; `None` if this is a GGUF file.
    pub(crate) const fn safetensors(&self) -> Option<&TensorFile> {
        match self {
            Self::Safetensors(file) => Some(file),
            Self::Gguf(_) => None,
        }
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        match self {
            Self::Safetensors(file) => file.names(),
            Self::Gguf(file) => file.names(),
        }
    }

    /// The text entries of a safetensors file's header; empty for a GGUF file.
    pub fn metadata(&self) -> HashMap<String, String> {
        self.safetensors().map_or_else(HashMap::new, TensorFile::metadata)
    }

    /// The shape of the tensor `name`; `None` if the file has no tensor `name`.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        match self {
            Self::Safetensors(file) => file.shape(name),
            Self::Gguf(file) => file.shape(name),
        }
    }

    /// The dtype in which [`read_as`](Self::read_as) returns the tensor `name` if no other dtype is requested. `None`
    /// if the file has no tensor `name`, or if the tensor's dtype is not supported.
    pub fn dtype_of(&self, name: &str) -> Option<DType> {
        match self {
            Self::Safetensors(file) => file.dtype_of(name),
            Self::Gguf(file) => file.dtype_of(name),
        }
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        match self {
            Self::Safetensors(file) => file.path(),
            Self::Gguf(file) => file.path(),
        }
    }

    /// Read one tensor to `device` in the dtype [`dtype_of`](Self::dtype_of).
    ///
    /// # Errors
    /// As [`read_as`](Self::read_as).
    pub(crate) fn read(&mut self, name: &str, device: &Device) -> Result<Tensor> {
        self.read_as(name, None, device)
    }

    /// Read one tensor to `device`. Floating-point values are converted to `dtype`, if it is given.
    ///
    /// # Errors
    /// As [`TensorFile::read_as`] and [`GgufFile::read_as`].
    pub fn read_as(&mut self, name: &str, dtype: Option<DType>, device: &Device) -> Result<Tensor> {
        match self {
            Self::Safetensors(file) => file.read_as(name, dtype, device),
            Self::Gguf(file) => file.read_as(name, dtype, device),
        }
    }

    /// Read the bytes of the tensor `name` of a safetensors file, whatever the tensor's dtype is, as u8 in one
    /// dimension.
    ///
    /// # Errors
    /// [`Error::WeightsFormat`] if there is no such tensor, or if this is a GGUF file; [`Error::Io`] if reading fails;
    /// [`Error::OutOfMemory`] if the bytes do not fit in memory.
    pub(crate) fn read_bytes(&self, name: &str) -> Result<Tensor> {
        match self {
            Self::Safetensors(file) => file.read_bytes(name),
            Self::Gguf(file) => {
                Err(Error::weights(file.path(), format!("\"{name}\" is in a GGUF file, expected a safetensors file")))
            }
        }
    }
}
