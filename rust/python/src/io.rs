//! Reading and writing safetensors files, and copying tensors so that they can be written later.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use trainable_candle_core as tc;
use trainable_candle_io as io;

use crate::argument::Argument;
use crate::arguments::FilePath;
use crate::call::detached;
use crate::device;
use crate::error::Result;
use crate::named::NamedTensors;
use crate::tensor::Tensor;

/// Write tensors to a safetensors file. If writing fails, no incomplete file remains.
///
/// ```python
/// tc.save_file({"a": tc.ones(2)}, "tensors.safetensors", metadata={"made": "here"})
/// assert tc.load_file("tensors.safetensors")["a"].tolist() == [1.0, 1.0]
/// ```
///
/// Args:
///     tensors: tensors by name.
///     path: the file.
///     metadata: text entries for the file's header.
///     codes: the dtype in the file, "int8" or "fp8" (e4m3), of each u8 tensor that holds the codes of a
///         QuantizedTensor, by the tensor's name.
///
/// Raises:
///     FileError: if the file cannot be written.
///     ArgumentError: if a tensor has the name "__metadata__", if `tensors` has no tensor with a name in `codes`, or if
///         a dtype in `codes` is neither "int8" nor "fp8".
///     DTypeError: if a tensor of codes is not u8, or if safetensors files do not support the dtype of a tensor.
#[pyfunction]
#[pyo3(signature = (tensors, path, metadata=Argument::of(None), codes=Argument::of(None)))]
pub fn save_file(
    py: Python<'_>,
    tensors: Argument<BTreeMap<String, PyRef<'_, Tensor>>>,
    path: FilePath,
    metadata: Argument<Option<BTreeMap<String, String>>>,
    codes: Argument<Option<BTreeMap<String, String>>>,
) -> Result<()> {
    const OP: &str = "save_file";
    let path = path.get(OP)?;
    let tensors = tensors.get(OP, "tensors")?;
    let tensors: BTreeMap<String, tc::Tensor> =
        tensors.into_iter().map(|(name, tensor)| (name, tensor.0.clone())).collect();
    let metadata = metadata.get(OP, "metadata")?.unwrap_or_default();
    let codes = codes.get(OP, "codes")?.unwrap_or_default();
    let codes = codes
        .into_iter()
        .map(|(name, dtype)| {
            if !tensors.contains_key(&name) {
                return Err(tc::Error::argument(OP, format!("codes has {name:?}, which is not the name of a tensor")));
            }
            match dtype.as_str() {
                "int8" => Ok((name, io::EightBits::Int8)),
                "fp8" => Ok((name, io::EightBits::Fp8)),
                _ => {
                    Err(tc::Error::argument(OP, format!("codes[{name:?}] is {dtype:?}, expected \"int8\" or \"fp8\"")))
                }
            }
        })
        .collect::<tc::Result<BTreeMap<_, _>>>()?;
    detached(py, || {
        let entry = |(name, tensor)| io::TensorEntry::of(name, tensor).with_codes(codes.get(name).copied());
        io::save_entries(&path, tensors.iter().map(entry).collect(), &metadata)
    })
}

/// Read all tensors of a safetensors file.
///
/// ```python
/// tc.save_file({"a": tc.ones(2)}, "tensors.safetensors")
/// assert tc.load_file("tensors.safetensors")["a"].tolist() == [1.0, 1.0]
/// ```
///
/// Args:
///     path: the file.
///     device: the device of the tensors.
///
/// Returns:
///     Tensors by name. fp8 tensors are converted to bf16, and bool tensors to u8.
///
/// Raises:
///     MissingFileError, FileError: if there is no such file, or it cannot be read.
///     WeightsFormatError: if the file is not a complete safetensors file, or a tensor in it has a dtype that is not
///         supported.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the tensors do not fit into memory.
#[pyfunction]
#[pyo3(signature = (path, device="cpu"))]
pub fn load_file<'py>(py: Python<'py>, path: FilePath, device: &str) -> Result<NamedTensors<'py>> {
    let (path, device) = (path.get("load_file")?, device::parse(device)?);
    NamedTensors::new(py, detached(py, || io::load_tensors(&path, &device))?)
}

/// Copy tensors to the CPU, to write them while training continues. Later changes of variables do not affect the
/// copies.
///
/// ```python
/// v = tc.Var([1.0])
/// copy = tc.snapshot({"v": v})
/// v.set(tc.tensor([2.0]))
/// assert copy["v"].tolist() == [1.0]
/// ```
///
/// Args:
///     tensors: tensors or variables by name.
///
/// Returns:
///     The copies by name.
///
/// Raises:
///     OutOfMemoryError: if the copies do not fit into memory.
#[pyfunction]
pub fn snapshot<'py>(
    py: Python<'py>,
    tensors: Argument<BTreeMap<String, PyRef<'py, Tensor>>>,
) -> Result<NamedTensors<'py>> {
    let tensors = tensors.get("snapshot", "tensors")?;
    let tensors: Vec<(String, tc::Tensor)> =
        tensors.into_iter().map(|(name, tensor)| (name, tensor.0.clone())).collect();
    let copies = detached(py, || {
        let copy =
            |(name, tensor): (String, tc::Tensor)| Ok((name, tc::Tensor::from_raw(&tc::raw::host_copy(tensor.raw())?)));
        tensors.into_iter().map(copy).collect::<tc::Result<Vec<_>>>()
    })?;
    NamedTensors::new(py, copies)
}
