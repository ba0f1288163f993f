"""The exceptions of the library.

Each exception except `ReplayComplete` is an `Error`, and also the builtin exception that Python
code expects: a `ShapeError` is a `ValueError`, a `MissingFileError` is a `FileNotFoundError`. A
message starts with the operation, says what was found and what was expected and, where the caller
can act, what to do.
"""

__all__ = [
    "ArgumentError",
    "AutogradError",
    "ConfigError",
    "CudaUnavailableError",
    "DTypeError",
    "DatasetError",
    "DeviceError",
    "DistributedError",
    "Error",
    "FileError",
    "IndexOutOfRangeError",
    "InternalError",
    "MissingFileError",
    "NoBackwardError",
    "NonFiniteError",
    "OutOfMemoryError",
    "ShapeError",
    "WeightsFormatError",
]


class Error(Exception):
    """The base of all exceptions of the library."""


class ShapeError(Error, ValueError):
    """A shape is not one that an operation takes, or the shapes of operands do not fit together."""


class DTypeError(Error, TypeError):
    """An operation does not take a dtype, or the dtypes of operands differ."""


class DeviceError(Error, ValueError):
    """Operands are on different devices, or a device is unknown or reports an error."""


class CudaUnavailableError(Error, RuntimeError):
    """CUDA is required and cannot be used; the message says why."""


class IndexOutOfRangeError(Error, IndexError):
    """An index is out of range, for example of a dimension or a vocabulary."""


class ArgumentError(Error, ValueError):
    """An argument has a value that is not allowed."""


class NoBackwardError(Error, RuntimeError):
    """An operation without a derivative has an input that needs a gradient."""


class AutogradError(Error, RuntimeError):
    """No gradient exists: the graph was freed or lacks an input, or a saved value changed."""


class OutOfMemoryError(Error, MemoryError):
    """The memory of the host or of a device ran out."""


class NonFiniteError(Error, ArithmeticError):
    """A value is NaN or infinite where it must be finite."""


class WeightsFormatError(Error, ValueError):
    """A weight, adapter or state file cannot be used."""


class DatasetError(Error, ValueError):
    """A data set cannot be used."""


class ConfigError(Error, ValueError):
    """A configuration cannot be used."""


class DistributedError(Error, RuntimeError):
    """Processes that train together cannot connect, have different settings, or one has failed."""


class FileError(Error, OSError):
    """The file system reported an error; has `OSError`'s `errno`, `strerror` and `filename`."""

    def __str__(self) -> str:
        """Return the file, then the reason, without the error's number."""
        if self.strerror is None:
            return super().__str__()
        return f"{self.filename}: {self.strerror}" if self.filename else self.strerror


class MissingFileError(FileError, FileNotFoundError):
    """A file or folder does not exist."""


class InternalError(Error, RuntimeError):
    """A bug in the library; the message asks for a report."""


class ReplayComplete(BaseException):
    """Leaves a checkpointed function when all needed values have been recomputed.

    It never reaches the caller of `backward`. It is no `Exception`, so that a checkpointed function
    with `except Exception` lets it pass.
    """
