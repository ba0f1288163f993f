//! [`Tensor`]: an immutable value that may be part of the tape.

use std::sync::Arc;

use candle_core::{DType, Device, NdArray, Shape};

use crate::capture::{self, Version};
use crate::raw::{self, Raw};
use crate::tape::Node;
use crate::{Error, Result};

/// A value of the computation: a candle tensor and, if a gradient flows through it, its node on the tape.
///
/// Cloning is cheap (reference counts). Values never change, with one exception: when a [`Var`](crate::Var) is set, the
/// tensors that share its storage (its own tensor, detached ones, views) change with it.
#[derive(Clone)]
pub struct Tensor {
    pub(crate) raw: Raw,
    pub(crate) node: Option<Arc<Node>>,
    /// The version of the variable that owns the storage, if a variable owns it; views share the version. It counts the
    /// in-place changes, so that a backward pass detects that a saved value was overwritten.
    pub(crate) version: Option<Arc<Version>>,
}

impl Tensor {
    /// A constant with the values of `raw` (shared storage): no gradient flows through it. If `raw` has a candle graph,
    /// the constant is detached from it.
    pub fn from_raw(raw: &Raw) -> Self {
        Self::constant(raw.detach())
    }

    pub(crate) const fn constant(raw: Raw) -> Self {
        Self { raw, node: None, version: None }
    }

    /// A tensor of a scalar, an array, nested arrays or a `Vec` of numbers, on `device`.
    pub fn new(data: impl NdArray, device: &Device) -> Result<Self> {
        Ok(Self::constant(Raw::new(data, device)?))
    }

    /// A tensor of shape `shape` with the elements `data`, in row-major order.
    ///
    /// # Errors
    /// [`Error::Shape`] if `shape` has another number of elements than `data`.
    pub fn from_vec<T: candle_core::WithDType>(data: Vec<T>, shape: impl Into<Shape>, device: &Device) -> Result<Self> {
        let shape = shape.into();
        if shape.elem_count() != data.len() {
            return Err(Error::shape(
                "from_vec",
                format!("{} elements do not fill shape {:?}", data.len(), shape.dims()),
            ));
        }
        Ok(Self::constant(Raw::from_vec(data, shape, device)?))
    }

    /// A tensor filled with `value`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the tensor does not fit in memory.
    pub fn full(value: f64, shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        let shape = shape.into();
        raw::check_allocation_on(device, "full", shape.dims(), dtype)?;
        Ok(Self::constant(crate::compute::full(value, shape.dims(), dtype, device)?))
    }

    /// A tensor of zeros.
    ///
    /// # Errors
    /// As [`full`](Self::full).
    pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        let shape = shape.into();
        raw::check_allocation_on(device, "zeros", shape.dims(), dtype)?;
        Ok(Self::constant(crate::compute::zeros(shape.dims(), dtype, device)?))
    }

    /// A tensor of ones.
    ///
    /// # Errors
    /// As [`full`](Self::full).
    pub fn ones(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        Self::full(1.0, shape, dtype, device)
    }

    /// Normally distributed values with mean `mean` and standard deviation `std` from the library's generator
    /// ([`rng`](crate::rng)), drawn in f32 and converted to `dtype`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the tensor does not fit in memory, [`Error::DType`] if `dtype` is not floating point.
    pub fn randn(mean: f64, std: f64, shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        Ok(Self::constant(crate::rng::normal(mean, std, &shape.into(), dtype, device)?))
    }

    /// Uniformly distributed values in `[low, high)` from the library's generator ([`rng`](crate::rng)), drawn in f32
    /// and converted to `dtype`.
    ///
    /// # Errors
    /// As [`randn`](Self::randn).
    pub fn rand(low: f64, high: f64, shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        Ok(Self::constant(crate::rng::uniform(low, high, &shape.into(), dtype, device)?))
    }

    /// Mark this result of an operation as one to recompute. An operation that needs the result in its backward pass
    /// does not keep it. Instead, the backward pass recomputes the result from the values that the result's own
    /// operation has saved. Use this for results that take much memory and little time: norms of rows, gated units. The
    /// mark has no effect on a result that its operation cannot recompute, or inside of a checkpoint, which decides
    /// itself which values to keep.
    #[must_use]
    pub fn recomputed(self) -> Self {
        if let Some(node) = &self.node {
            node.set_recomputed();
        }
        self
    }

    /// The candle tensor with the values. The tape does not record the operations that candle itself does on it.
    pub const fn raw(&self) -> &Raw {
        &self.raw
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        self.raw.shape()
    }

    /// The sizes of the dimensions.
    pub fn dims(&self) -> &[usize] {
        self.raw.dims()
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.raw.rank()
    }

    /// The number of elements.
    pub fn elem_count(&self) -> usize {
        self.raw.elem_count()
    }

    /// The dtype.
    pub fn dtype(&self) -> DType {
        self.raw.dtype()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.raw.device()
    }

    /// Whether a gradient flows through this value.
    pub const fn requires_grad(&self) -> bool {
        self.node.is_some()
    }

    /// Whether this value is a variable or a constant. The result of an operation on the tape is neither.
    pub fn is_leaf(&self) -> bool {
        self.node.as_ref().is_none_or(|n| n.leaf().is_some())
    }

    /// The same values (shared storage), detached from the tape.
    #[must_use]
    pub fn detach(&self) -> Self {
        Self { raw: self.raw.clone(), node: None, version: self.version.clone() }
    }

    /// The only element as f64.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is not exactly one element; for a tensor on a GPU, as [`to_cpu`](raw::to_cpu).
    pub fn item(&self) -> Result<f64> {
        if self.elem_count() != 1 {
            return Err(Error::shape(
                "item",
                format!("shape {:?} has {} elements, expected 1", self.dims(), self.elem_count()),
            ));
        }
        self.check_readable("item")?;
        Ok(raw::to_f64_vec(&self.raw)?[0])
    }

    /// The only element as a `T`. The name is that of candle's method.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is not exactly one element, [`Error::DType`] if `T` is not the type of the tensor's
    /// elements; for a tensor on a GPU, as [`to_cpu`](raw::to_cpu).
    pub fn to_scalar<T: candle_core::WithDType>(&self) -> Result<T> {
        if self.elem_count() != 1 {
            return Err(Error::shape(
                "to_scalar",
                format!("shape {:?} has {} elements, expected 1", self.dims(), self.elem_count()),
            ));
        }
        self.check_rust_type::<T>("to_scalar")?;
        self.check_readable("to_scalar")?;
        Ok(raw::to_vec::<T>(&self.raw)?[0])
    }

    /// All elements in row-major order.
    ///
    /// # Errors
    /// [`Error::DType`] if `T` is not the type of the tensor's elements; for a tensor on a GPU, as
    /// [`to_cpu`](raw::to_cpu).
    pub fn to_vec<T: candle_core::WithDType>(&self) -> Result<Vec<T>> {
        self.check_rust_type::<T>("to_vec")?;
        self.check_readable("to_vec")?;
        raw::to_vec(&self.raw)
    }

    /// Checks that the host may read the values. It may not read those of a GPU while a function is captured as a CUDA
    /// graph, because the capture records the kernels without running them: `refuse` returns an error only during a
    /// capture.
    fn check_readable(&self, op: &'static str) -> Result<()> {
        if self.device().is_cpu() { Ok(()) } else { capture::refuse(op) }
    }

    /// Checks that `T` is the type of the elements.
    fn check_rust_type<T: candle_core::WithDType>(&self, op: &'static str) -> Result<()> {
        if T::DTYPE == self.dtype() {
            return Ok(());
        }
        Err(Error::dtype(
            op,
            format!("the tensor is {}, not {}; convert it with to_dtype()", self.dtype().as_str(), T::DTYPE.as_str()),
        ))
    }
}

impl AsRef<Self> for Tensor {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.raw)?;
        if self.requires_grad() {
            write!(f, " requires_grad")?;
        }
        Ok(())
    }
}

impl From<&Raw> for Tensor {
    fn from(raw: &Raw) -> Self {
        Self::from_raw(raw)
    }
}

impl From<Raw> for Tensor {
    fn from(raw: Raw) -> Self {
        Self::from_raw(&raw)
    }
}
