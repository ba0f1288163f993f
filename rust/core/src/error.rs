//! The error type of the library, and the conversion of candle's errors to it.

use std::path::PathBuf;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong. A message starts with the operation or the file, if there is one. It says what was
/// found and what was expected and, where the caller can act, what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Shapes that do not fit together, or a shape that the operation does not support.
    #[error("{op}: {message}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// What was found, what was expected.
        message: String,
    },
    /// A dtype that the operation does not support, or operands of different dtypes.
    #[error("{op}: {message}")]
    DType {
        /// The operation.
        op: &'static str,
        /// What was found, what was expected.
        message: String,
    },
    /// Operands on different devices, an unknown device, or a device that cannot do the work or has failed.
    #[error("{op}: {message}")]
    Device {
        /// The operation.
        op: &'static str,
        /// What was found, what was expected.
        message: String,
    },
    /// CUDA is required and cannot be used; the message says why.
    #[error("CUDA is unavailable: {0}")]
    CudaUnavailable(String),
    /// An index outside its dimension.
    #[error("{op}: {message}")]
    Index {
        /// The operation.
        op: &'static str,
        /// What was found, what was expected.
        message: String,
    },
    /// An argument outside its range.
    #[error("{op}: {message}")]
    Argument {
        /// The operation.
        op: &'static str,
        /// What was found, what was expected.
        message: String,
    },
    /// An operation without a derivative has an input that needs a gradient.
    #[error("{op}: has no backward, but an input needs a gradient; detach() the input, or call {op} under no_grad()")]
    NoBackward {
        /// The operation.
        op: &'static str,
    },
    /// The graph cannot be differentiated: for example, it was freed, a saved value was changed in place, or an input
    /// is not part of the graph. Or a gradient is wrong ([`gradcheck`](crate::gradcheck::gradcheck)).
    #[error("{op}: {message}")]
    Autograd {
        /// The operation.
        op: &'static str,
        /// What was found, what to do.
        message: String,
    },
    /// Memory ran out.
    #[error("{op}: {message}")]
    OutOfMemory {
        /// The operation.
        op: &'static str,
        /// What does not fit, what to do.
        message: String,
    },
    /// A non-finite value where all must be finite.
    #[error("{op}: {message}")]
    NonFinite {
        /// The operation.
        op: &'static str,
        /// Which tensor, what to do.
        message: String,
    },
    /// A weight, adapter or state file that cannot be used.
    #[error("{path}: {message}")]
    WeightsFormat {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A configuration that cannot be used.
    #[error("{0}")]
    Config(String),
    /// The system cannot read or write the file at `path`.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// An error of candle that has no variant here.
    #[error("{0}")]
    Candle(String),
    /// An error of the caller's own code, passed through unchanged: for example a Python exception inside a
    /// checkpointed function.
    #[error("{0}")]
    External(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Whether this is the error with which a checkpoint leaves its function once all needed values are recomputed. The
    /// function must pass this error on. [`backward`](crate::Tensor::backward) never returns it.
    #[doc(hidden)]
    pub fn ends_recomputation(&self) -> bool {
        matches!(self, Self::External(source) if source.is::<crate::checkpoint::Complete>())
    }

    /// A shape error of `op`.
    #[cold]
    pub fn shape(op: &'static str, message: impl Into<String>) -> Self {
        Self::Shape { op, message: message.into() }
    }

    /// A dtype error of `op`.
    #[cold]
    pub fn dtype(op: &'static str, message: impl Into<String>) -> Self {
        Self::DType { op, message: message.into() }
    }

    /// A device error of `op`.
    #[cold]
    pub fn device(op: &'static str, message: impl Into<String>) -> Self {
        Self::Device { op, message: message.into() }
    }

    /// An index error of `op`.
    #[cold]
    pub fn index(op: &'static str, message: impl Into<String>) -> Self {
        Self::Index { op, message: message.into() }
    }

    /// An argument error of `op`.
    #[cold]
    pub fn argument(op: &'static str, message: impl Into<String>) -> Self {
        Self::Argument { op, message: message.into() }
    }

    /// An error of `op` about the graph or its gradients.
    #[cold]
    pub fn autograd(op: &'static str, message: impl Into<String>) -> Self {
        Self::Autograd { op, message: message.into() }
    }

    /// Replaces the name of the operation in a shape or dtype error with `op`, the operation that the caller used.
    /// Other errors stay unchanged.
    #[cold]
    pub(crate) fn under(self, op: &'static str) -> Self {
        match self {
            Self::Shape { message, .. } => Self::Shape { op, message },
            Self::DType { message, .. } => Self::DType { op, message },
            other => other,
        }
    }

    /// A file-system error on `path`.
    #[cold]
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }

    /// A format error of the file at `path`.
    #[cold]
    pub fn weights(path: impl Into<PathBuf>, message: impl Into<String>) -> Self {
        Self::WeightsFormat { path: path.into(), message: message.into() }
    }
}

/// Converts to the variant with the same meaning, or else to [`Error::Candle`]. Drops the backtraces that candle
/// attaches when `RUST_BACKTRACE` is set, so that a message has only the reason.
impl From<candle_core::Error> for Error {
    #[cold]
    fn from(error: candle_core::Error) -> Self {
        use candle_core::Error as C;
        match error {
            C::WithBacktrace { inner, .. } => (*inner).into(),
            C::Context { inner, context } => match (*inner).into() {
                Self::Candle(reason) => Self::Candle(format!("{context}: {reason}")),
                other => other,
            },
            C::WithPath { inner, path } => match (*inner).into() {
                Self::Candle(reason) => Self::WeightsFormat { path, message: reason },
                other => other,
            },
            C::ShapeMismatchBinaryOp { lhs, rhs, op } => {
                Self::shape(op, format!("shapes {:?} and {:?} do not fit together", lhs.dims(), rhs.dims()))
            }
            C::DTypeMismatchBinaryOp { lhs, rhs, op } => {
                Self::dtype(op, format!("dtypes {} and {} differ; convert one with to()", lhs.as_str(), rhs.as_str()))
            }
            C::DeviceMismatchBinaryOp { lhs, rhs, op } => {
                Self::device(op, format!("tensors are on different devices ({lhs:?} and {rhs:?}); move one with to()"))
            }
            C::UnsupportedDTypeForOp(dtype, op) => {
                Self::dtype(op, format!("dtype {} is not supported", dtype.as_str()))
            }
            C::Cuda(source) => crate::cuda::from_candle(source),
            C::NotCompiledWithCudaSupport => Self::CudaUnavailable("this build has no CUDA support".into()),
            // `Self::Io` needs a path, which candle does not report here.
            C::Io(source) => Self::Candle(source.to_string()),
            other => Self::Candle(other.to_string()),
        }
    }
}
