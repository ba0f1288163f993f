//! Devices by name.

use candle_core::DeviceLocation;
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::type_hint_identifier;
use pyo3::types::PyString;
use trainable_candle_core as tc;

use crate::error::Result;

/// A device argument: `"cpu"`, `"cuda"` or `"cuda:1"`.
#[derive(Clone)]
pub struct DeviceArg(pub tc::Device);

impl Default for DeviceArg {
    fn default() -> Self {
        Self(tc::Device::Cpu)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for DeviceArg {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("builtins", "str");

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(parse(object.cast::<PyString>()?.to_str()?)?))
    }
}

/// Whether `text` means a device (known or not), as opposed to a dtype.
pub fn looks_like_device(text: &str) -> bool {
    matches!(text.split(':').next(), Some("cpu" | "cuda"))
}

/// The device of a name.
///
/// # Errors
/// `DeviceError` if the name is unknown, `CudaUnavailableError` if CUDA cannot be used.
pub fn parse(text: &str) -> Result<tc::Device> {
    let (kind, index) = match text.split_once(':') {
        Some((kind, index)) => (kind, Some(index)),
        None => (text, None),
    };
    let index_is_number = index.is_none_or(|i| i.parse::<usize>().is_ok());
    match kind {
        "cpu" if index.is_none_or(|i| i == "0") => Ok(tc::Device::Cpu),
        "cuda" if index_is_number => {
            Err(tc::Error::CudaUnavailable("this build has no CUDA support".to_owned()).into())
        }
        _ => {
            let message = format!("unknown device \"{text}\"; expected \"cpu\", \"cuda\" or \"cuda:N\"");
            Err(tc::Error::device("device", message).into())
        }
    }
}

/// The name of a device, as it is given and shown.
pub fn name(device: &tc::Device) -> String {
    match device.location() {
        DeviceLocation::Cpu => "cpu".to_owned(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    }
}
