//! [`Var`]: a value that can be changed and that accumulates a gradient; [`MakeVar`] makes a variable from any tensor.
//!
//! A variable can be a part of a flat buffer ([`FlatBuffer`](crate::FlatBuffer)), which stores the values of many
//! variables in one vector, and their gradients in another.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use candle_core::{DType, Device, NdArray, Shape};

use crate::capture::{Follower, Version};
use crate::raw::{self, Raw};
use crate::tape::{Leaf, Node};
use crate::tensor::Tensor;
use crate::{Error, Result, compute};

/// A trainable variable: a leaf of the tape with storage of its own.
///
/// Its storage never moves: [`set`](Var::set) and the optimizers write in place. A backward pass that needs a value
/// that was overwritten returns an error instead of a wrong gradient. A clone refers to the same variable.
#[derive(Clone)]
pub struct Var(Tensor);

impl Var {
    /// A variable of a scalar, an array, nested arrays or a `Vec` of numbers.
    ///
    /// # Errors
    /// [`Error::DType`] if the values are not floating point.
    pub fn new(data: impl NdArray, device: &Device) -> Result<Self> {
        Self::adopt(Raw::new(data, device)?)
    }

    /// A variable whose values are a contiguous copy of `tensor`, of the same dtype, detached from the graph of
    /// `tensor`.
    ///
    /// # Errors
    /// [`Error::DType`] if the values are not floating point.
    pub fn from_tensor(tensor: &Tensor) -> Result<Self> {
        Self::adopt(raw::own_copy(&tensor.raw)?)
    }

    /// A variable of zeros.
    ///
    /// # Errors
    /// As [`Tensor::zeros`], and [`Error::DType`] if `dtype` is not floating point.
    pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        Self::adopt(Tensor::zeros(shape, dtype, device)?.raw)
    }

    /// A variable of normally distributed values, drawn as [`Tensor::randn`] draws them.
    ///
    /// # Errors
    /// As [`Tensor::randn`], and [`Error::DType`] if `dtype` is not floating point.
    pub fn randn(mean: f64, std: f64, shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        Self::adopt(Tensor::randn(mean, std, shape, dtype, device)?.raw)
    }

    /// A variable whose values are `storage`. Nothing else may share this storage, except a flat buffer of which
    /// `storage` is a view.
    pub(crate) fn adopt(storage: Raw) -> Result<Self> {
        if !raw::is_float(storage.dtype()) {
            return Err(Error::dtype(
                "make_var",
                format!(
                    "a variable must be floating point, found {}; convert the tensor first",
                    storage.dtype().as_str()
                ),
            ));
        }
        let node = Node::leaf_node(Leaf::of(&storage));
        Ok(Self(Tensor { raw: storage, node: Some(Arc::new(node)), version: Some(Arc::new(Version::default())) }))
    }

    /// The variable whose value is `tensor`; `None` if `tensor` is not itself the value of a variable.
    pub fn of(tensor: &Tensor) -> Option<Self> {
        let is_leaf = tensor.node.as_ref().is_some_and(|node| node.leaf().is_some());
        (is_leaf && tensor.version.is_some()).then(|| Self(tensor.clone()))
    }

    /// The value as a tensor on the tape, which shares the variable's storage.
    pub const fn as_tensor(&self) -> &Tensor {
        &self.0
    }

    /// [`as_tensor`](Self::as_tensor), consuming this handle: gradients still flow to the variable.
    pub fn into_inner(self) -> Tensor {
        self.0
    }

    /// Mark this variable as replaced by a copy, for example on another device. A step of an optimizer that still has
    /// this variable then returns an error, because the step would not train the copy.
    pub fn mark_replaced(&self) {
        self.leaf().is_replaced().store(true, Ordering::Relaxed);
    }

    /// Whether a copy has taken the place of this variable.
    pub fn is_replaced(&self) -> bool {
        self.leaf().is_replaced().load(Ordering::Relaxed)
    }

    pub(crate) fn leaf(&self) -> &Leaf {
        // `adopt` always makes a leaf, and `of` takes no tensor without one.
        self.0.node.as_ref().and_then(|n| n.leaf()).expect("a variable is a leaf")
    }

    fn counter(&self) -> &Arc<Version> {
        // `adopt` always sets a version, and `of` takes no tensor without one.
        self.0.version.as_ref().expect("a variable has a version")
    }

    /// Mark the value as changed in place.
    fn changed(&self) -> Result<()> {
        self.counter().bump();
        self.update_copies()
    }

    /// On CUDA, update the copies of the value in other dtypes at once, because a captured graph may read them. On the
    /// CPU, a copy is updated at its next use.
    fn update_copies(&self) -> Result<()> {
        if self.0.device().is_cpu() { Ok(()) } else { self.leaf().copies().update(&self.0.raw, self.counter()) }
    }

    /// A copy of the value in `dtype`. The variable keeps this copy, and casts the value into the same storage again
    /// only after the value has changed.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if it does not fit, [`Error::DType`] if `dtype` is not floating point.
    pub(crate) fn copy_in(&self, dtype: DType) -> Result<Raw> {
        self.leaf().copies().get(dtype, &self.0.raw, self.counter())
    }

    /// The copy of the value for computing in another dtype ([`Tensor::compute_copy`]), if there is one; with copies in
    /// several dtypes, the one that was made first. An update that writes this copy together with the value must then
    /// call [`changed_with_copy`](Self::changed_with_copy).
    pub fn copy_storage(&self) -> Option<Raw> {
        self.leaf().copies().first()
    }

    /// Mark the value and the [`copy_storage`](Self::copy_storage) as changed in place. The copy must have the new
    /// value, rounded to the copy's dtype.
    ///
    /// # Errors
    /// The errors of updating the variable's other copies.
    pub fn changed_with_copy(&self) -> Result<()> {
        self.counter().bump();
        self.leaf().copies().mark_first_current(self.counter());
        self.update_copies()
    }

    /// The accumulated gradient, if there is one.
    ///
    /// # Panics
    /// If there is no memory for a copy of a gradient that is in a flat buffer;
    /// [`try_grad`](Self::try_grad) returns the error.
    pub fn grad(&self) -> Option<Tensor> {
        self.try_grad().unwrap_or_else(|error| panic!("{error}"))
    }

    /// The accumulated gradient, if there is one.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is no memory for a copy of a gradient that is in a flat
    /// buffer; [`Error::Device`] if the device fails.
    pub fn try_grad(&self) -> Result<Option<Tensor>> {
        Ok(self.leaf().grad()?.map(Tensor::constant))
    }

    /// Remove the gradient: [`grad`](Self::grad) is `None` until the next backward pass. If the gradient is in a flat
    /// buffer, its part of the buffer is zeroed.
    pub fn zero_grad(&self) -> Result<()> {
        self.leaf().clear()
    }

    /// Set the gradient to a copy of `grad`, for example a gradient that was clipped, unscaled or averaged.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`] or [`Error::Device`] if the shape, the dtype or the device of `grad` is not
    /// that of the variable.
    pub fn set_grad(&self, grad: &Tensor) -> Result<()> {
        self.check_like("set_grad", grad)?;
        self.leaf().replace(&grad.raw)
    }

    /// The gradient, if there is one, not copied: a view of the flat buffer if the variable has one. Only read it;
    /// later backward passes change it.
    pub fn grad_storage(&self) -> Option<Raw> {
        self.leaf().grad_storage()
    }

    /// Multiply the gradient, if there is one, by `factor`. A tensor that [`grad`](Var::grad) has returned keeps its
    /// values: a gradient outside of a flat buffer is copied first.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is no memory for this copy.
    pub fn scale_grad(&self, factor: f64) -> Result<()> {
        self.change_grad(|grad| compute::scale_in_place(grad, factor))
    }

    /// Change the gradient, if there is one, by a function that writes in place. A tensor that [`grad`](Var::grad) has
    /// returned keeps its values: a gradient outside of a flat buffer is copied first.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is no memory for this copy; the errors of `change`.
    pub fn change_grad(&self, change: impl FnOnce(&Raw) -> Result<()>) -> Result<()> {
        self.leaf().change(change)
    }

    /// Overwrite the value in place.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`] or [`Error::Device`] if the shape, the dtype or the device of `value` is not
    /// that of the variable.
    pub fn set(&self, value: &Tensor) -> Result<()> {
        self.check_like("set", value)?;
        let address = |tensor: &Raw| raw::storage_identity(tensor).0;
        let source = if address(&value.raw) == address(&self.0.raw) {
            // `value` is a view of the variable, such as its transpose, whose elements the copy would overwrite before
            // it reads them.
            raw::own_copy(&value.raw)?
        } else {
            value.raw.clone()
        };
        compute::copy_into(&self.0.raw, &source)?;
        self.changed()
    }

    /// Run `update`, which may change the variable's storage in place (an optimizer's step). The value counts as
    /// changed, even if `update` returns an error.
    pub fn update_in_place<R>(&self, update: impl FnOnce(&Raw) -> Result<R>) -> Result<R> {
        let result = update(&self.0.raw);
        self.changed()?;
        result
    }

    /// How often the value was changed in place.
    pub fn version(&self) -> u64 {
        self.counter().get()
    }

    /// Whether the data of `follower` is up to date: computed from the present value of this variable. A [`Follower`]
    /// belongs to data that is derived from a variable, and records from which version of the variable.
    pub fn is_followed_by(&self, follower: &Follower) -> bool {
        follower.is_at(self.counter())
    }

    /// Mark `follower`'s data as computed from the present value, or as changed together with it.
    pub fn set_followed_by(&self, follower: &Follower) {
        follower.follow(self.counter());
    }

    /// A number that identifies the variable in this process.
    pub fn id(&self) -> u64 {
        // The default is not used: `adopt` always makes a node, and `of` takes no tensor without one.
        self.0.node.as_ref().map_or(0, |n| n.id())
    }

    fn check_like(&self, op: &'static str, other: &Tensor) -> Result<()> {
        if other.dims() != self.0.dims() {
            return Err(Error::shape(
                op,
                format!("the variable has shape {:?}, the value {:?}", self.0.dims(), other.dims()),
            ));
        }
        if other.dtype() != self.0.dtype() {
            return Err(Error::dtype(
                op,
                format!(
                    "the variable is {}, the value {}; convert it with to()",
                    self.0.dtype().as_str(),
                    other.dtype().as_str()
                ),
            ));
        }
        if !other.device().same_device(self.0.device()) {
            return Err(Error::device(op, "the value is on another device than the variable; move it with to()"));
        }
        Ok(())
    }
}

impl Deref for Var {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

impl AsRef<Tensor> for Var {
    fn as_ref(&self) -> &Tensor {
        &self.0
    }
}

impl std::fmt::Debug for Var {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Var({})", self.0.raw)
    }
}

/// Makes a trainable variable from any tensor of candle or of this library: contiguous or not, a slice, a transpose, a
/// broadcast, an intermediate result. The values are copied; the graph is detached.
pub trait MakeVar {
    /// The variable.
    ///
    /// # Errors
    /// [`Error::DType`] if the values are not floating point.
    fn make_var(&self) -> Result<Var>;
}

impl MakeVar for Tensor {
    fn make_var(&self) -> Result<Var> {
        Var::from_tensor(self)
    }
}

impl MakeVar for candle_core::Tensor {
    fn make_var(&self) -> Result<Var> {
        Var::adopt(raw::own_copy(self)?)
    }
}
