//! The exception classes of `trainable_candle.errors`. Each is imported when it is first used.

pyo3::import_exception!(trainable_candle.errors, Error);
pyo3::import_exception!(trainable_candle.errors, ShapeError);
pyo3::import_exception!(trainable_candle.errors, DTypeError);
pyo3::import_exception!(trainable_candle.errors, DeviceError);
pyo3::import_exception!(trainable_candle.errors, CudaUnavailableError);
pyo3::import_exception!(trainable_candle.errors, IndexOutOfRangeError);
pyo3::import_exception!(trainable_candle.errors, ArgumentError);
pyo3::import_exception!(trainable_candle.errors, NoBackwardError);
pyo3::import_exception!(trainable_candle.errors, AutogradError);
pyo3::import_exception!(trainable_candle.errors, OutOfMemoryError);
pyo3::import_exception!(trainable_candle.errors, NonFiniteError);
pyo3::import_exception!(trainable_candle.errors, WeightsFormatError);
pyo3::import_exception!(trainable_candle.errors, ConfigError);
pyo3::import_exception!(trainable_candle.errors, FileError);
pyo3::import_exception!(trainable_candle.errors, MissingFileError);
pyo3::import_exception!(trainable_candle.errors, InternalError);
pyo3::import_exception!(trainable_candle.errors, ReplayComplete);
