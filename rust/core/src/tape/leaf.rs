//! [`Leaf`]: a variable's node, which collects its gradient.

use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Shape};

use crate::capture::{self, GradientSlot, Place, Settle};
use crate::copies::Copies;
use crate::cpu::Add;
use crate::raw::{self, Raw};
use crate::{Error, Result, compute};

/// The gradient of a variable, and copies of the variable's values in other dtypes.
pub(crate) struct Leaf {
    shape: Shape,
    dtype: DType,
    /// Locked by `read`, `change` or `peek`. `read` and `change` report the access to captures of CUDA graphs; `peek`
    /// does not.
    gradient: GradientSlot<Gradient>,
    copies: Mutex<Copies>,
    /// Whether a copy has taken the variable's place ([`Var::mark_replaced`](crate::Var::mark_replaced)).
    is_replaced: AtomicBool,
}

struct Gradient {
    shape: Shape,
    dtype: DType,
    device: Device,
    /// The gradient, if there is a gradient and no buffer.
    own: Option<Raw>,
    /// Fixed storage to which gradients are added in place; in most cases a view of a flat gradient buffer.
    buffer: Option<Raw>,
    /// The flat gradient buffer that `buffer` is a view of, and the range of its elements there.
    flat: Option<(Raw, Range<usize>)>,
    /// Whether there is a gradient in `buffer`. If not, all elements of `buffer` are zero.
    filled: bool,
}

impl Gradient {
    /// The gradient, if there is one: the buffer itself, or the tensor that is kept without a buffer.
    fn current(&self) -> Option<&Raw> {
        match &self.buffer {
            Some(buffer) => self.filled.then_some(buffer),
            None => self.own.as_ref(),
        }
    }

    /// The flat buffer and the range of this gradient in it. A buffer that is not a part of a flat buffer is returned
    /// whole, as a vector.
    fn vector(&self) -> Option<(Raw, Range<usize>)> {
        let buffer = self.buffer.as_ref()?;
        let whole = || buffer.reshape(buffer.elem_count()).ok().map(|vector| (vector, 0..buffer.elem_count()));
        self.flat.clone().or_else(whole)
    }
}

// What captures of CUDA graphs need: a graph contains the addresses of gradients, so gradients must stay in one place.
impl Settle for Gradient {
    // Moves the gradient to a buffer, or makes a buffer of zeros if there is no gradient. Returns false if there is a
    // buffer already.
    fn settle(&mut self) -> Result<bool> {
        if self.buffer.is_some() {
            return Ok(false);
        }
        let existing = self.own.take();
        self.filled = existing.is_some();
        self.buffer = Some(match existing {
            Some(gradient) => raw::own_copy(&gradient)?,
            None => compute::zeros(self.shape.dims(), self.dtype, &self.device)?,
        });
        Ok(true)
    }

    // The address of the gradient's storage; the other value of `storage_identity` is the size.
    fn place(&self) -> Option<Place> {
        self.current().map(|gradient| raw::storage_identity(gradient).0)
    }

    fn is_filled(&self) -> bool {
        self.filled
    }

    fn set_filled(&mut self, filled: bool) {
        self.filled = filled;
    }
}

impl Leaf {
    /// The leaf of a variable whose values are `storage`.
    pub(crate) fn of(storage: &Raw) -> Self {
        let (shape, dtype) = (storage.shape().clone(), storage.dtype());
        let gradient = Gradient {
            shape: shape.clone(),
            dtype,
            device: storage.device().clone(),
            own: None,
            buffer: None,
            flat: None,
            filled: false,
        };
        let (gradient, copies) = (GradientSlot::new(gradient), Mutex::default());
        Self { shape, dtype, gradient, copies, is_replaced: AtomicBool::new(false) }
    }

    /// Whether a copy has taken the variable's place ([`Var::mark_replaced`](crate::Var::mark_replaced)).
    pub(crate) const fn is_replaced(&self) -> &AtomicBool {
        &self.is_replaced
    }

    /// The gradient, if there is one: a copy of the buffer or, if there is no buffer, the kept tensor, which never
    /// changes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is no memory for the copy.
    pub(crate) fn grad(&self) -> Result<Option<Raw>> {
        let gradient = self.gradient.read();
        match &gradient.buffer {
            Some(buffer) => gradient.filled.then(|| raw::own_copy(buffer)).transpose(),
            None => Ok(gradient.own.clone()),
        }
    }

    /// The gradient, if there is one. It is not a copy: if the gradient is in a buffer, this is the buffer.
    pub(crate) fn grad_storage(&self) -> Option<Raw> {
        self.gradient.read().current().cloned()
    }

    /// The flat buffer that the gradient is accumulated in, as a vector, and the gradient's range in this vector.
    /// `None` if there is no buffer, or no gradient in it.
    pub(crate) fn vector(&self) -> Option<(Raw, Range<usize>)> {
        let gradient = self.gradient.read();
        gradient.vector().filter(|_| gradient.filled)
    }

    /// As [`vector`](Self::vector), for setting the gradient to zero. During a capture, the vector is returned even if
    /// there is no gradient now, because there may be a gradient when the capture is replayed.
    pub(crate) fn vector_to_clear(&self) -> Option<(Raw, Range<usize>)> {
        let gradient = self.gradient.peek();
        gradient.vector().filter(|_| gradient.filled || capture::is_capturing())
    }

    /// The dtype of the variable and of its gradient.
    #[cfg(feature = "cuda")]
    pub(crate) const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether gradients are accumulated in a buffer.
    pub(crate) fn is_bound(&self) -> bool {
        self.gradient.peek().buffer.is_some()
    }

    /// Change the gradient, if there is one, by a function that writes in place.
    pub(crate) fn change(&self, change: impl FnOnce(&Raw) -> Result<()>) -> Result<()> {
        if self.gradient.read().current().is_none() {
            return Ok(());
        }
        let mut gradient = self.gradient.change();
        if let Some(buffer) = &gradient.buffer {
            return change(buffer);
        }
        // A copy: a tensor that `grad` has returned may share the storage and must not change.
        if let Some(own) = &gradient.own {
            let changed = raw::own_copy(own)?;
            change(&changed)?;
            gradient.own = Some(changed);
        }
        Ok(())
    }

    /// The copies of the variable's values in other dtypes.
    pub(crate) fn copies(&self) -> MutexGuard<'_, Copies> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is neither a gradient nor a buffer. (A buffer that has no gradient now may have a gradient when a
    /// capture is replayed.)
    fn is_empty(&self) -> bool {
        let gradient = self.gradient.peek();
        gradient.buffer.is_none() && gradient.own.is_none()
    }

    /// Remove the gradient. A buffer is kept, and zeroed.
    pub(crate) fn clear(&self) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let mut gradient = self.gradient.change();
        gradient.own = None;
        // During a capture, always zero the buffer: it may have a gradient when the capture is replayed.
        let is_due = gradient.filled || capture::is_capturing();
        if let Some(buffer) = gradient.buffer.as_ref().filter(|_| is_due) {
            compute::fill(buffer, 0.0)?;
        }
        gradient.filled = false;
        Ok(())
    }

    /// Mark the gradient as cleared; the caller has zeroed its part of the vector.
    pub(crate) fn mark_cleared(&self) {
        if !self.is_empty() {
            let mut gradient = self.gradient.change();
            gradient.filled = false;
            gradient.own = None;
        }
    }

    /// Mark the gradient as present, if there is a buffer: it has the values of the buffer, maybe zeros.
    pub(crate) fn mark_present(&self) {
        let mut gradient = self.gradient.change();
        gradient.filled = gradient.buffer.is_some();
    }

    /// Accumulate gradients in the range `part` of the vector `flat` from now on. The caller has zeroed this range. The
    /// variable must not have a buffer yet; a gradient that it has already is added to the range.
    pub(crate) fn bind(&self, flat: &Raw, part: Range<usize>) -> Result<()> {
        let view = flat.narrow(0, part.start, part.len())?.reshape(&self.shape)?;
        let existing = {
            let mut gradient = self.gradient.change();
            gradient.buffer = Some(view);
            gradient.flat = Some((flat.clone(), part));
            gradient.own.take()
        };
        existing.map_or(Ok(()), |gradient| self.accumulate(gradient))
    }

    /// Set the gradient to a copy of `value`.
    pub(crate) fn replace(&self, value: &Raw) -> Result<()> {
        let mut gradient = self.gradient.change();
        if let Some(buffer) = &gradient.buffer {
            compute::copy_into(buffer, value)?;
            gradient.filled = true;
        } else {
            gradient.own = Some(raw::own_copy(value)?);
        }
        Ok(())
    }

    /// If the product of a and b can be added to the gradient buffer in place, mark the gradient as present and return
    /// the buffer; the caller must add the product to it.
    pub(crate) fn product_buffer(&self, a: &Raw, b: &Raw) -> Option<Raw> {
        let is_16_bit = matches!(a.dtype(), DType::F16 | DType::BF16);
        let is_product = self.shape.dims() == [a.dims()[0], b.dims()[1]]
            && (self.dtype == a.dtype() || (is_16_bit && self.dtype == DType::F32));
        if is_product { self.buffer() } else { None }
    }

    /// If there is a gradient buffer, mark the gradient as present and return the buffer; the caller must add a
    /// gradient to it.
    pub(crate) fn buffer(&self) -> Option<Raw> {
        if !self.is_bound() {
            return None;
        }
        let mut gradient = self.gradient.change();
        gradient.filled = true;
        gradient.buffer.clone()
    }

    /// Add `value`, which has the variable's shape and any floating dtype, to the gradient. The sum is in the
    /// variable's dtype.
    pub(crate) fn accumulate(&self, value: Raw) -> Result<()> {
        debug_assert_eq!(value.dims(), self.shape.dims());
        let mut gradient = self.gradient.change();
        if let Some(buffer) = &gradient.buffer {
            compute::accumulate(buffer, &value)?;
            gradient.filled = true;
            return Ok(());
        }
        if capture::is_capturing() {
            return Err(Error::autograd(
                "capture",
                "the function makes a gradient for a variable that got no gradient in the function's first call; \
                 every call must make gradients for the same variables",
            ));
        }
        // A tensor that `grad` has returned must not change, so the sum is a new tensor.
        let sum = match &gradient.own {
            Some(old) => compute::binary(old, &cast(value, self.dtype)?, Add)?,
            None => compute::contiguous(&cast(value, self.dtype)?)?,
        };
        gradient.own = Some(sum);
        Ok(())
    }
}

fn cast(raw: Raw, dtype: DType) -> Result<Raw> {
    if raw.dtype() == dtype { Ok(raw) } else { compute::cast(&raw, dtype) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::Run;

    type Change = (&'static str, fn(&Leaf, &Raw) -> Result<()>);

    /// The methods that change a gradient, by name.
    const CHANGES: &[Change] = &[
        ("change", |leaf, _| leaf.change(|gradient| compute::scale_in_place(gradient, 2.0))),
        ("clear", |leaf, _| leaf.clear()),
        ("mark_cleared", |leaf, _| {
            leaf.mark_cleared();
            Ok(())
        }),
        ("replace", Leaf::replace),
        ("product_buffer", |leaf, value| {
            leaf.product_buffer(value, value).map(drop).ok_or_else(|| Error::argument("test", "no buffer"))
        }),
        ("accumulate", |leaf, value| leaf.accumulate(value.clone())),
        ("bind", |leaf, value| leaf.bind(&compute::zeros(&[4], value.dtype(), value.device())?, 0..4)),
    ];

    #[test]
    fn captures_know_of_every_change_of_a_gradient() {
        let value = compute::zeros(&[2, 2], DType::F32, &Device::Cpu).unwrap();
        for &(name, change) in CHANGES {
            let leaf = Leaf::of(&value);
            leaf.accumulate(value.clone()).unwrap();
            // `product_buffer` returns nothing for a gradient without a buffer.
            let is_bound = name == "product_buffer";
            if is_bound {
                leaf.bind(&compute::zeros(&[4], DType::F32, &Device::Cpu).unwrap(), 0..4).unwrap();
            }
            let run = Run::begin(/* capturing */ false).unwrap();
            change(&leaf, &value).unwrap();
            let mut effects = run.finish();
            assert_eq!(effects.changed_gradients(), 1, "{name}");
            // This gives a buffer to a gradient that has none, and returns whether there was such a gradient.
            assert_eq!(effects.settle_gradients().unwrap(), !is_bound && name != "bind", "{name}");
        }
    }

    // A run is stale if a replay would no longer do the same as a call of the function.
    #[test]
    fn a_run_that_read_a_gradient_is_stale_after_the_gradient_is_cleared() {
        let value = compute::zeros(&[2, 2], DType::F32, &Device::Cpu).unwrap();
        type Read = fn(&Leaf) -> bool;
        let reads: [(&str, Read); 3] = [
            ("grad", |leaf| leaf.grad().unwrap().is_some()),
            ("grad_storage", |leaf| leaf.grad_storage().is_some()),
            ("vector", |leaf| leaf.vector().is_some()),
        ];
        for (name, read) in reads {
            let leaf = Leaf::of(&value);
            leaf.bind(&compute::zeros(&[4], DType::F32, &Device::Cpu).unwrap(), 0..4).unwrap();
            leaf.accumulate(value.clone()).unwrap();
            let run = Run::begin(/* capturing */ true).unwrap();
            assert!(read(&leaf));
            let effects = run.finish();
            assert!(!effects.is_stale(), "{name}");
            leaf.clear().unwrap();
            assert!(effects.is_stale(), "{name}");
        }
    }
}
