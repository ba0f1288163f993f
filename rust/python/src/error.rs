//! Converts the core's errors to Python's exceptions, and exceptions of callbacks to errors.

use pyo3::prelude::*;
use trainable_candle_core as tc;

use crate::exceptions;

/// A result whose error becomes a Python exception.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a function of the bindings failed.
#[derive(Debug)]
pub enum Error {
    /// The library returned an error.
    Core(tc::Error),
    /// Python code or the interpreter raised.
    Python(PyErr),
    /// The library panicked, which is a bug. Holds the message of the panic.
    Panic(String),
}

impl From<tc::Error> for Error {
    fn from(error: tc::Error) -> Self {
        Self::Core(error)
    }
}

impl From<PyErr> for Error {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<pyo3::CastError<'_, '_>> for Error {
    fn from(error: pyo3::CastError<'_, '_>) -> Self {
        Self::Python(error.into())
    }
}

impl From<Error> for PyErr {
    #[cold]
    fn from(error: Error) -> Self {
        match error {
            Error::Core(error) => exception(error),
            Error::Python(error) => error,
            Error::Panic(message) => exceptions::InternalError::new_err(format!(
                "internal error: {message}; this is a bug in trainable-candle, please report it with the code that led here"
            )),
        }
    }
}

/// The exception for a core error.
fn exception(error: tc::Error) -> PyErr {
    use tc::Error as E;
    let text = error.to_string();
    // Not a failure: recomputation has all values that it needs, and ends the checkpointed function by this exception.
    if error.ends_recomputation() {
        return exceptions::ReplayComplete::new_err(text);
    }
    match error {
        E::Shape { .. } => exceptions::ShapeError::new_err(text),
        E::DType { .. } => exceptions::DTypeError::new_err(text),
        E::Device { .. } => exceptions::DeviceError::new_err(text),
        E::CudaUnavailable(_) => exceptions::CudaUnavailableError::new_err(text),
        E::Index { .. } => exceptions::IndexOutOfRangeError::new_err(text),
        E::Argument { .. } => exceptions::ArgumentError::new_err(text),
        E::NoBackward { .. } => exceptions::NoBackwardError::new_err(text),
        E::Autograd { .. } => exceptions::AutogradError::new_err(text),
        E::OutOfMemory { .. } => exceptions::OutOfMemoryError::new_err(text),
        E::NonFinite { .. } => exceptions::NonFiniteError::new_err(text),
        E::WeightsFormat { .. } => exceptions::WeightsFormatError::new_err(text),
        E::Config(_) => exceptions::ConfigError::new_err(text),
        E::Io { path, source } => io_exception(&path, &source),
        E::External(source) => match source.downcast::<PyErr>() {
            Ok(exception) => *exception,
            Err(other) => exceptions::Error::new_err(other.to_string()),
        },
        // Candle's own errors, and variants that newer versions of the core may add.
        _ => exceptions::Error::new_err(text),
    }
}

/// The exception for an I/O error. It gets the arguments from which `OSError` sets `errno`, `strerror` and `filename`.
fn io_exception(path: &std::path::Path, source: &std::io::Error) -> PyErr {
    let reason = source.to_string();
    // The text of an operating system error ends with the error's number, which `OSError` takes as a separate argument.
    let reason = reason.split(" (os error").next().unwrap_or_default().to_owned();
    let arguments = (source.raw_os_error(), reason, path.as_os_str().to_owned());
    if source.kind() == std::io::ErrorKind::NotFound {
        let (number, _, file) = arguments;
        exceptions::MissingFileError::new_err((number, "there is no such file or folder", file))
    } else {
        exceptions::FileError::new_err(arguments)
    }
}

/// Return an error if the user has pressed Ctrl-C. Long computations call this function from time to time.
pub fn check_signals() -> tc::Result<()> {
    Python::attach(|py| py.check_signals().map_err(from_callback))
}

/// Wrap an exception that a callback raised, so that it passes through the library unchanged.
pub fn from_callback(error: PyErr) -> tc::Error {
    tc::Error::External(Box::new(error))
}
