//! DLPack (data interchange of the Python array API): shares tensors with other libraries without a copy.
//!
//! The values of tensors are immutable. Export shares memory with consumers of DLPack 1.0, which get the flag
//! "read-only". Older consumers do not support this flag and get a copy, unless they request `copy=False`. Import
//! copies the values, on the device that they are on, because other owners of their memory may change them.

mod cuda;

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use candle_core::{CpuStorage, Storage};
use pyo3::exceptions::PyBufferError;
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use pyo3::{ffi, type_hint_identifier};
use tc::{DType, Raw};
use trainable_candle_core as tc;

use crate::error::Result;
use crate::tensor::Tensor;
use crate::tensor::source::{Element, Source};

const OP: &str = "dlpack";
// Values of `DLDeviceType`.
const CPU: i32 = 1;
const CUDA: i32 = 2;
// Bits of the flags of a `ManagedVersioned`.
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

// Values of `DLDataTypeCode`.
const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const BOOL: u8 = 6;

/// `DLTensor`.
#[repr(C)]
struct View {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    view: View,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    view: View,
}

/// One of the two structures that a capsule can hold.
trait Exchange: Sized {
    /// The name of a capsule with this structure.
    const NAME: &'static CStr;
    /// The name of the capsule after a consumer has taken the structure.
    const USED: &'static CStr;

    fn view(&self) -> &View;
    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)>;
    fn context(&self) -> *mut c_void;
    /// The structure with [`delete`](Self::delete) as its deleter.
    fn pack(view: View, context: *mut c_void, flags: u64) -> Self;

    /// Free the structure that [`export`] made, and its tensor. A consumer calls this function as the deleter.
    unsafe extern "C" fn delete(this: *mut Self) {
        // SAFETY: `this` and its context were leaked by `export`, and a deleter is called once.
        unsafe {
            drop(Box::from_raw((*this).context().cast::<Exported>()));
            drop(Box::from_raw(this));
        }
    }
}

impl Exchange for Managed {
    const NAME: &'static CStr = c"dltensor";
    const USED: &'static CStr = c"used_dltensor";

    fn view(&self) -> &View {
        &self.view
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }

    fn context(&self) -> *mut c_void {
        self.context
    }

    fn pack(view: View, context: *mut c_void, _flags: u64) -> Self {
        Self { view, context, deleter: Some(Self::delete) }
    }
}

impl Exchange for ManagedVersioned {
    const NAME: &'static CStr = c"dltensor_versioned";
    const USED: &'static CStr = c"used_dltensor_versioned";

    fn view(&self) -> &View {
        &self.view
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }

    fn context(&self) -> *mut c_void {
        self.context
    }

    fn pack(view: View, context: *mut c_void, flags: u64) -> Self {
        Self { major: 1, minor: 0, context, deleter: Some(Self::delete), flags, view }
    }
}

/// Owns the memory to which an exported structure points, and frees it after the work that the consumer has queued.
struct Exported {
    tensor: Raw,
    shape: Vec<i64>,
    strides: Vec<i64>,
    /// The consumer's stream, from [`cuda::consumer`]; `None` on the CPU, or if the consumer wants no synchronization.
    consumer: Option<usize>,
}

impl Drop for Exported {
    fn drop(&mut self) {
        if self.tensor.device().is_cuda() {
            cuda::engine::released(self.tensor.clone(), self.consumer);
        }
    }
}

/// DLPack's description of a tensor's device.
fn device_of(tensor: &Raw) -> Device {
    let device = tensor.device();
    if device.is_cuda() { Device { kind: CUDA, id: cuda::ordinal(device) } } else { Device { kind: CPU, id: 0 } }
}

/// The error for a tensor of a dtype that DLPack cannot describe.
fn not_exported(dtype: DType) -> tc::Error {
    let message = format!("a tensor of dtype {} cannot be exported; convert it with to() first", dtype.as_str());
    tc::Error::dtype(OP, message)
}

/// DLPack's description of a tensor's dtype.
fn data_type(tensor: &Raw) -> tc::Result<DataType> {
    let dtype = tensor.dtype();
    let code = match dtype {
        DType::F32 | DType::F64 | DType::F16 => FLOAT,
        DType::BF16 => BFLOAT,
        DType::U8 | DType::U32 => UINT,
        DType::I64 => INT,
        _ => return Err(not_exported(dtype)),
    };
    Ok(DataType { code, bits: (dtype.size_in_bytes() * 8) as u8, lanes: 1 })
}

/// The address of `values[offset]`.
fn address<T>(values: &[T], offset: usize) -> *const c_void {
    values[offset..].as_ptr().cast()
}

/// The address of the first element: valid as long as a clone of the tensor exists, which keeps the storage in place.
/// Null, as the protocol requires, if there are no elements; such a view may start beyond the end of its storage.
fn data_of(tensor: &Raw) -> tc::Result<*const c_void> {
    if tensor.elem_count() == 0 {
        return Ok(std::ptr::null());
    }
    if tensor.device().is_cuda() {
        return Ok(cuda::engine::address(tensor)? as *const c_void);
    }
    let (storage, layout) = tensor.storage_and_layout();
    let offset = layout.start_offset();
    let Storage::Cpu(storage) = &*storage else {
        return Err(tc::Error::device(OP, "only tensors on the CPU or on CUDA devices can be exported"));
    };
    Ok(match storage {
        CpuStorage::F32(values) => address(values, offset),
        CpuStorage::F64(values) => address(values, offset),
        CpuStorage::F16(values) => address(values, offset),
        CpuStorage::BF16(values) => address(values, offset),
        CpuStorage::U8(values) => address(values, offset),
        CpuStorage::U32(values) => address(values, offset),
        CpuStorage::I64(values) => address(values, offset),
        _ => return Err(not_exported(tensor.dtype())),
    })
}

/// Make a capsule that keeps the memory of `tensor` until the consumer or the capsule's destructor releases the memory.
fn export<'py, E: Exchange>(
    py: Python<'py>,
    tensor: Raw,
    consumer: Option<usize>,
    flags: u64,
) -> Result<Bound<'py, PyAny>> {
    let (data, dtype, device) = (data_of(&tensor)?, data_type(&tensor)?, device_of(&tensor));
    let shape: Vec<i64> = tensor.dims().iter().map(|&size| size as i64).collect();
    let strides: Vec<i64> = tensor.stride().iter().map(|&stride| stride as i64).collect();
    let exported = Box::leak(Box::new(Exported { tensor, shape, strides, consumer }));
    let view = View {
        data: data.cast_mut(),
        device,
        ndim: exported.tensor.rank() as i32,
        dtype,
        shape: exported.shape.as_mut_ptr(),
        strides: exported.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let managed = Box::into_raw(Box::new(E::pack(view, std::ptr::from_mut(exported).cast(), flags)));
    // SAFETY: `managed` is valid until its deleter runs: in the destructor, unless a consumer took `managed`.
    let capsule = unsafe {
        Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(managed.cast(), E::NAME.as_ptr(), Some(dispose::<E>)))
    };
    if capsule.is_err() {
        // SAFETY: `managed` has no other reference.
        unsafe { E::delete(managed) };
    }
    Ok(capsule?)
}

/// The destructor of a capsule. It frees the structure, unless a consumer took it and thus renamed the capsule.
unsafe extern "C" fn dispose<E: Exchange>(capsule: *mut ffi::PyObject) {
    // SAFETY: Python passes the capsule that it frees. Its name says whether a consumer has taken the structure.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, E::NAME.as_ptr()) == 1 {
            E::delete(ffi::PyCapsule_GetPointer(capsule, E::NAME.as_ptr()).cast::<E>());
        }
    }
}

/// The element type that `dtype` describes; `None` if no dtype can represent its values.
fn element(dtype: DataType) -> Option<Element> {
    Some(match (dtype.code, dtype.bits, dtype.lanes) {
        (BOOL, 8, 1) => Element::Bool,
        (INT, 8, 1) => Element::I8,
        (INT, 16, 1) => Element::I16,
        (INT, 32, 1) => Element::I32,
        (INT, 64, 1) => Element::I64,
        (UINT, 8, 1) => Element::U8,
        (UINT, 16, 1) => Element::U16,
        (UINT, 32, 1) => Element::U32,
        (FLOAT, 16, 1) => Element::F16,
        (BFLOAT, 16, 1) => Element::BF16,
        (FLOAT, 32, 1) => Element::F32,
        (FLOAT, 64, 1) => Element::F64,
        _ => return None,
    })
}

/// A structure that was taken out of a producer's capsule. Dropping the `Taken` frees the structure.
struct Taken<E: Exchange>(NonNull<E>);

impl<E: Exchange> Drop for Taken<E> {
    fn drop(&mut self) {
        // SAFETY: the capsule was renamed, so this `Taken` is the structure's only owner.
        unsafe {
            if let Some(deleter) = self.0.as_ref().deleter() {
                deleter(self.0.as_ptr());
            }
        }
    }
}

/// Take the structure out of its capsule and copy the tensor that it describes.
fn take<E: Exchange>(capsule: &Bound<'_, PyCapsule>) -> Result<Raw> {
    // SAFETY: the caller has checked the name, so the pointer refers to an `E` that is valid until its deleter runs.
    let taken = unsafe {
        let pointer = ffi::PyCapsule_GetPointer(capsule.as_ptr(), E::NAME.as_ptr()).cast::<E>();
        ffi::PyCapsule_SetName(capsule.as_ptr(), E::USED.as_ptr());
        let Some(pointer) = NonNull::new(pointer) else {
            return Err(tc::Error::argument(OP, "the capsule is empty").into());
        };
        Taken(pointer)
    };
    // SAFETY: the structure is valid until its deleter runs.
    let view = unsafe { taken.0.as_ref() }.view();
    let device = match view.device.kind {
        CPU => None,
        CUDA => Some(crate::device::parse(&format!("cuda:{}", view.device.id))?),
        kind => {
            let message = format!(
                "the data are on a device of DLPack type {kind}, expected 1 (CPU) or 2 (CUDA); copy them there first"
            );
            return Err(tc::Error::device(OP, message).into());
        }
    };
    let Some(element) = element(view.dtype) else {
        let DataType { code, bits, lanes } = view.dtype;
        let message = format!(
            "elements of DLPack type code {code}, {bits} bits, {lanes} lanes cannot be imported; convert them first"
        );
        return Err(tc::Error::dtype(OP, message).into());
    };
    let rank = usize::try_from(view.ndim).map_err(|_| tc::Error::shape(OP, "the number of dimensions is negative"))?;
    // SAFETY: DLPack guarantees that `shape` has `ndim` entries. Negative sizes, which it does not allow, count as 0.
    let dims: Vec<usize> = (0..rank).map(|dim| unsafe { *view.shape.add(dim) }.max(0) as usize).collect();
    let byte_strides = if view.strides.is_null() {
        let mut strides = vec![element.size() as isize; rank];
        for dim in (1..rank).rev() {
            strides[dim - 1] = strides[dim] * dims[dim] as isize;
        }
        strides
    } else {
        // SAFETY: DLPack guarantees that `strides` has `ndim` entries if it is not null.
        (0..rank).map(|dim| unsafe { *view.strides.add(dim) } as isize * element.size() as isize).collect()
    };
    let data = view.data.cast::<u8>().wrapping_add(view.byte_offset as usize);
    let source = Source { data, dims, strides: byte_strides, element, swapped: false }; // this machine's byte order
    // SAFETY: DLPack guarantees that the memory within the shape and the strides is readable until the deleter runs.
    unsafe {
        match device {
            None => Ok(source.read(OP)?),
            Some(device) => cuda::read(&source, &device),
        }
    }
}

/// Copy the values of an object with `__dlpack__`, or of a capsule.
///
/// # Errors
/// As [`from_dlpack`].
pub fn import(object: &Bound<'_, PyAny>) -> Result<Raw> {
    let py = object.py();
    let capsule = if object.is_instance_of::<PyCapsule>() {
        object.clone()
    } else {
        let options = PyDict::new(py);
        if object.hasattr("__dlpack_device__")? {
            let (kind, id): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
            if kind == CUDA {
                let device = crate::device::parse(&format!("cuda:{id}"))?;
                options.set_item("stream", cuda::engine::stream(&device)?)?;
            }
        }
        options.set_item("max_version", (1, 0))?;
        match object.call_method("__dlpack__", (), Some(&options)) {
            // Producers that are older than DLPack 1.0 do not accept the argument `max_version`.
            Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => {
                options.del_item("max_version")?;
                object.call_method("__dlpack__", (), Some(&options))?
            }
            other => other?,
        }
    };
    let capsule = capsule.cast::<PyCapsule>()?;
    // SAFETY: the capsule is a valid Python object, and checking its name has no side effects.
    let is_named = |name: &CStr| unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 1 };
    if is_named(ManagedVersioned::NAME) {
        take::<ManagedVersioned>(capsule)
    } else if is_named(Managed::NAME) {
        take::<Managed>(capsule)
    } else {
        Err(tc::Error::argument(OP, "the capsule is not a DLPack tensor, or was used before").into())
    }
}

/// Make a tensor with a copy of the values of another library's array, on the device of the values.
///
/// ```python
/// assert tc.from_dlpack(np.array([1.0, 2.0])).tolist() == [1.0, 2.0]
/// ```
///
/// Args:
///     data: an object with `__dlpack__`, or a DLPack capsule.
///
/// Raises:
///     DeviceError: if the values are neither on the CPU nor on a CUDA device.
///     CudaUnavailableError: if the values are on a CUDA device and CUDA cannot be used.
///     DTypeError: if no dtype can represent the values. On a CUDA device, also for int8, int16, int32 and uint16.
///     ShapeError: if the values are on a CUDA device and a stride is negative.
///     ArgumentError: if `data` has no `__dlpack__` and is no capsule, or if the capsule has no tensor or was used
///         before.
///     OutOfMemoryError: if the copy does not fit into memory.
///     The exceptions of the producer.
#[pyfunction]
pub fn from_dlpack(data: &Bound<'_, PyAny>) -> Result<Tensor> {
    if !data.is_instance_of::<PyCapsule>() && !data.hasattr("__dlpack__")? {
        let kind = data.get_type().name()?;
        return Err(tc::Error::argument("from_dlpack", format!("{kind} has no __dlpack__; use tensor()")).into());
    }
    Ok(Tensor(import(data)?.into()))
}

/// A DLPack capsule as a result.
pub struct Capsule<'py>(Bound<'py, PyAny>);

impl<'py> IntoPyObject<'py> for Capsule<'py> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = std::convert::Infallible;
    const OUTPUT_TYPE: PyStaticExpr = type_hint_identifier!("typing", "Any");

    fn into_pyobject(self, _: Python<'py>) -> std::result::Result<Self::Output, Self::Error> {
        Ok(self.0)
    }
}

#[pymethods]
impl Tensor {
    /// Return a capsule for other libraries' `from_dlpack`. The memory is reused only after the consumer has released
    /// the capsule's tensor.
    ///
    /// Args:
    ///     stream: on a CUDA device, the consumer's stream, which waits for the values: 1 (the default stream; also if
    ///         None), 2 (the per-thread default stream) or the address of a stream. With -1, no stream waits.
    ///     max_version: the newest version of DLPack that the consumer supports. Before 1.0 there are no read-only
    ///         tensors.
    ///     dl_device: this tensor's device, as `__dlpack_device__` returns it.
    ///     copy: whether the capsule has a copy instead of sharing this tensor's memory. Default: only if the consumer
    ///         does not support read-only tensors.
    ///
    /// Raises:
    ///     BufferError: if `dl_device` is another device, or `stream` does not suit this tensor's device.
    ///     AutogradError: if this tensor needs a gradient.
    ///     DeviceError: if the driver reports an error, or inside a captured function.
    ///     OutOfMemoryError: if the copy does not fit into memory.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> Result<Capsule<'py>> {
        let Device { kind, id } = device_of(self.0.raw());
        if let Some(stream) = stream.filter(|_| kind == CPU) {
            let message = format!("dlpack: stream is {stream}, expected None: tensors on the CPU have no streams");
            return Err(PyBufferError::new_err(message).into());
        }
        if let Some(wanted) = dl_device.filter(|&device| device != (kind, id)) {
            let name = if kind == CPU { "the CPU".to_owned() } else { format!("cuda:{id}") };
            let message =
                format!("dlpack: dl_device is {wanted:?}, but the tensor is on {name}; move it with to() first");
            return Err(PyBufferError::new_err(message).into());
        }
        if self.0.requires_grad() {
            let message = "the tensor needs a gradient, which would be lost; detach() it first";
            return Err(tc::Error::autograd(OP, message).into());
        }
        let consumer = if kind == CUDA { cuda::consumer(stream)? } else { None };
        let is_versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let is_copied = copy.unwrap_or(!is_versioned);
        let tensor = if is_copied { tc::raw::own_copy(self.0.raw())? } else { self.0.raw().clone() };
        if let Some(consumer) = consumer {
            // SAFETY: the protocol guarantees that the stream belongs to this tensor's device.
            unsafe { cuda::engine::ready_for(tensor.device(), consumer) }?;
        }
        let flags = if is_copied { IS_COPIED } else { READ_ONLY };
        let capsule = if is_versioned {
            export::<ManagedVersioned>(py, tensor, consumer, flags)
        } else {
            export::<Managed>(py, tensor, consumer, 0)
        };
        capsule.map(Capsule)
    }

    /// Return DLPack's type of this tensor's device (1 for the CPU, 2 for CUDA), and the device's index.
    fn __dlpack_device__(&self) -> (i32, i32) {
        let Device { kind, id } = device_of(self.0.raw());
        (kind, id)
    }
}
