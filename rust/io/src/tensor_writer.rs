//! Writes safetensors files.
//!
//! The safetensors crate writes text entries in random order and needs the bytes of all tensors in memory. This module
//! writes equal files for equal contents, and computes and writes one tensor at a time. A file consists of the header's
//! length in eight bytes, a JSON header with the tensors' offsets, and the data
//! (<https://github.com/huggingface/safetensors#format>).

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value, json};
use trainable_candle_core::raw::with_bytes;
use trainable_candle_core::{DType, Error, Raw, Result, Tensor};

use crate::atomic::write_atomically;

#[cfg(target_endian = "big")]
compile_error!("big-endian targets are not supported: safetensors stores little-endian numbers");

/// A tensor to write. The tensor's values are computed when it is written.
pub struct TensorEntry<'a> {
    /// The tensor's name in the file.
    pub name: String,
    /// The tensor's shape.
    pub shape: Vec<usize>,
    /// The dtype of the tensor that `values` returns.
    pub dtype: DType,
    /// The type of the tensor's elements in the file if the u8 values are the bytes of eight-bit numbers. `None` if the
    /// elements in the file have the dtype `dtype`.
    pub codes: Option<EightBits>,
    /// Computes the tensor's values.
    pub values: Box<dyn FnOnce() -> Result<Tensor> + 'a>,
}

/// Types of eight-bit numbers that are no [`DType`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EightBits {
    /// Signed integers in two's complement.
    Int8,
    /// e4m3 (Micikevicius et al. 2022, arXiv:2209.05433).
    Fp8,
}

impl<'a> TensorEntry<'a> {
    /// The entry of a tensor whose values are known.
    pub fn of(name: impl Into<String>, tensor: &'a Tensor) -> Self {
        Self {
            name: name.into(),
            shape: tensor.dims().to_vec(),
            dtype: tensor.dtype(),
            codes: None,
            values: Box::new(|| Ok(tensor.clone())),
        }
    }

    /// The same entry with other `codes`: its u8 values are the bytes of eight-bit numbers of this type, or numbers of
    /// the dtype u8 if `codes` is `None`.
    #[must_use]
    pub fn with_codes(self, codes: Option<EightBits>) -> Self {
        Self { codes, ..self }
    }
}

/// Write `tensors` and text `metadata` to `path`, atomically.
///
/// # Errors
/// As [`save_entries`].
pub fn save_tensors<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    save_entries(path, tensors.into_iter().map(|(name, tensor)| TensorEntry::of(name, tensor)).collect(), metadata)
}

/// Write tensors and text `metadata` to `path`, atomically, one tensor at a time.
///
/// # Errors
/// [`Error::Io`] with the path if the file cannot be written, [`Error::DType`] for a dtype that safetensors files
/// cannot hold and for an entry with `codes` whose dtype is not u8, [`Error::Argument`] for a tensor with the name
/// `__metadata__`, [`Error::Shape`] if computed values do not have the shape and dtype of their entry, and the errors
/// of computing the values.
pub fn save_entries(path: &Path, mut entries: Vec<TensorEntry<'_>>, metadata: &BTreeMap<String, String>) -> Result<()> {
    // The tensors with the largest elements come first, so that the offset of every tensor is a multiple of the size of
    // the tensor's elements. Equal sizes are in the order of the names, so that equal contents give equal files.
    entries.sort_by(|a, b| (b.dtype.size_in_bytes(), &a.name).cmp(&(a.dtype.size_in_bytes(), &b.name)));
    let header = header(&entries, metadata)?;
    // An error of computing or reading a tensor. `write_atomically` passes on only errors of the file.
    let mut failure = None;
    let written = write_atomically(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        for entry in entries {
            let values = (entry.values)().and_then(|tensor| {
                if tensor.dims() == entry.shape && tensor.dtype() == entry.dtype {
                    return Ok(tensor);
                }
                let (dims, dtype) = (tensor.dims(), tensor.dtype().as_str());
                let message = format!(
                    "the values of \"{}\" have shape {dims:?} and dtype {dtype}, expected {:?} and {}",
                    entry.name,
                    entry.shape,
                    entry.dtype.as_str()
                );
                Err(Error::shape("save", message))
            });
            match values {
                Ok(tensor) => write_elements(file, tensor.raw(), &mut failure)?,
                Err(error) => {
                    failure = Some(error);
                    return Err(std::io::Error::other("a tensor cannot be read"));
                }
            }
        }
        Ok(())
    });
    failure.map_or(written, Err)
}

/// The JSON header, padded with spaces to a multiple of eight bytes.
fn header(tensors: &[TensorEntry<'_>], metadata: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    let mut fields = Map::new();
    if !metadata.is_empty() {
        fields.insert("__metadata__".into(), json!(metadata));
    }
    let mut start = 0;
    for entry in tensors {
        let TensorEntry { name, shape, dtype, .. } = entry;
        if name == "__metadata__" {
            return Err(Error::argument(
                "save",
                "a tensor cannot be named \"__metadata__\" in a safetensors file; rename it",
            ));
        }
        let end = start + shape.iter().product::<usize>() * dtype.size_in_bytes();
        let field = json!({"dtype": dtype_name(entry)?, "shape": shape, "data_offsets": [start, end]});
        fields.insert(name.clone(), field);
        start = end;
    }
    let mut header = Value::Object(fields).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

/// The name of the type of the tensor's elements in the header.
fn dtype_name(entry: &TensorEntry<'_>) -> Result<&'static str> {
    let TensorEntry { name, dtype, codes, .. } = entry;
    Ok(match (dtype, codes) {
        (DType::U8, Some(EightBits::Int8)) => "I8",
        (DType::U8, Some(EightBits::Fp8)) => "F8_E4M3",
        (other, Some(_)) => {
            let message = format!("tensor \"{name}\" has dtype {}, expected u8 for eight-bit numbers", other.as_str());
            return Err(Error::dtype("save", message));
        }
        (dtype, None) => match dtype {
            DType::F64 => "F64",
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::I64 => "I64",
            DType::U32 => "U32",
            DType::U8 => "U8",
            other => {
                let message =
                    format!("tensor \"{name}\" has dtype {}, which safetensors files do not hold", other.as_str());
                return Err(Error::dtype("save", message));
            }
        },
    })
}

/// Write the elements of `raw` in row-major order. An error of reading the elements is stored in `failure`.
fn write_elements(file: &mut dyn Write, raw: &Raw, failure: &mut Option<Error>) -> std::io::Result<()> {
    with_bytes(raw, |bytes| file.write_all(bytes)).unwrap_or_else(|error| {
        *failure = Some(error);
        Err(std::io::Error::other("a tensor cannot be read"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor_file::{TensorFile, load_tensors};
    use trainable_candle_core::Device;

    #[test]
    fn equal_contents_give_equal_files_that_read_back() -> Result<()> {
        let folder = std::env::temp_dir().join(format!("tensor_writer_{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, e))?;
        let tensors: Vec<(String, Tensor)> = [DType::U8, DType::BF16, DType::F64, DType::F32, DType::I64]
            .into_iter()
            .enumerate()
            .map(|(i, dtype)| {
                Ok((format!("t{i}"), Tensor::full(i as f64, (2, i + 1), DType::F32, &Device::Cpu)?.to_dtype(dtype)?))
            })
            .collect::<Result<_>>()?;
        // So many entries that two files with a random order of entries would differ.
        let metadata: BTreeMap<String, String> = (0..20).map(|i| (format!("key{i}"), i.to_string())).collect();
        let mut files = Vec::new();
        for (name, reversed) in [("a", false), ("b", true)] {
            let path = folder.join(name);
            let mut order: Vec<_> = tensors.iter().map(|(n, t)| (n.as_str(), t)).collect();
            if reversed {
                order.reverse();
            }
            save_tensors(&path, order, &metadata)?;
            files.push(std::fs::read(&path).map_err(|e| Error::io(&path, e))?);
        }
        assert_eq!(files[0], files[1]);
        let read = load_tensors(&folder.join("a"), &Device::Cpu)?;
        for (name, tensor) in &tensors {
            assert_eq!((read[name].dims(), read[name].dtype()), (tensor.dims(), tensor.dtype()));
            assert_eq!(
                read[name].to_dtype(DType::F64)?.to_vec::<f64>()?,
                tensor.to_dtype(DType::F64)?.to_vec::<f64>()?
            );
        }
        assert_eq!(TensorFile::open(folder.join("a"))?.metadata().len(), 20);
        // The reference implementation reads the files too.
        let parsed = safetensors::SafeTensors::deserialize(&files[0]).map_err(|e| Error::Config(e.to_string()))?;
        assert_eq!(parsed.len(), 5);
        std::fs::remove_dir_all(&folder).map_err(|e| Error::io(&folder, e))
    }
}
