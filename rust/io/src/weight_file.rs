//! [`WeightFile`]: a file of weights in any supported file format.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use trainable_candle_core::{DType, Device, Result, Tensor};

use crate::gguf::{self, GgufFile};
use crate::tensor_file::TensorFile;
use crate::tensor_writer::EightBits;

/// An open file whose tensors are read one at a time.
pub enum WeightFile {
    /// safetensors.
    Safetensors(TensorFile),
    /// GGUF.
    Gguf(GgufFile),
}

impl WeightFile {
    /// Open `path` in the format that its first bytes indicate.
    ///
    /// # Errors
    /// As [`TensorFile::open`] and [`GgufFile::open`].
    pub fn open(path: &Path) -> Result<Self> {
        let mut start = [0; gguf::MAGIC.len()];
        let is_gguf = File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok() && start == gguf::MAGIC;
        if is_gguf { Ok(Self::Gguf(GgufFile::open(path)?)) } else { Ok(Self::Safetensors(TensorFile::open(path)?)) }
    }

    /// The GGUF file, if it is one.
    pub const fn gguf(&self) -> Option<&GgufFile> {
        match self {
            Self::Safetensors(_) => None,
            Self::Gguf(file) => Some(file),
        }
    }

    /// The safetensors file, if it is one.
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

    /// The text entries of a safetensors file's header.
    pub fn metadata(&self) -> HashMap<String, String> {
        self.safetensors().map_or_else(HashMap::new, TensorFile::metadata)
    }

    /// The shape of a tensor, if there is one of that name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        match self {
            Self::Safetensors(file) => file.shape(name),
            Self::Gguf(file) => file.shape(name),
        }
    }

    /// The dtype of a tensor, if there is one of that name and its dtype is supported.
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

    /// Read one tensor to `device` in its own dtype.
    ///
    /// # Errors
    /// As [`read_as`](Self::read_as).
    pub(crate) fn read(&mut self, name: &str, device: &Device) -> Result<Tensor> {
        self.read_as(name, None, device)
    }

    /// Read one tensor to `device`, floating-point values in `dtype` if one is given.
    ///
    /// # Errors
    /// As [`TensorFile::read_as`] and [`GgufFile::read_as`].
    pub fn read_as(&mut self, name: &str, dtype: Option<DType>, device: &Device) -> Result<Tensor> {
        match self {
            Self::Safetensors(file) => file.read_as(name, dtype, device),
            Self::Gguf(file) => file.read_as(name, dtype, device),
        }
    }

    /// The kind of eight-bit numbers of a tensor, if its elements are such numbers.
    pub(crate) fn eight_bits(&self, name: &str) -> Option<EightBits> {
        self.safetensors()?.eight_bits(name)
    }
}
