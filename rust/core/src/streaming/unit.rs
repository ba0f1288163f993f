//! [`Unit`]: the streamed weights of one block of a model. They are kept in host memory, or on the devices of a
//! machine, and are copied together to the device that runs the block.

use std::hash::Hasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use candle_core::Device;
use rustc_hash::FxHasher;

use super::packing::{Joined, Packing};
use super::{Inner, Sharing, Streamed};
use crate::quantized::Weight;
use crate::raw::{Raw, storage_identity, with_bytes};
use crate::{Result, Tensor};

/// Weights that are used together, those of one block of a model. They are collected while the model is built.
#[derive(Clone, Default)]
pub struct Unit(Arc<Mutex<Contents>>);

#[derive(Default)]
struct Contents {
    number: usize,
    weights: Vec<Weak<Inner>>,
    /// The digest of the values that [`Unit::share`] was called with, in the order of the calls.
    digest: u64,
    /// `Some` if this process does not keep the weights' values, because another process has them. [`Unit::cat`] joins
    /// several weights to one; the map says where in the joined weight each of them, a part, begins.
    hollow: Option<Joined>,
    /// Tensors whose storage `hollow` names by its address, kept alive so that no other storage gets that address.
    keep_alive: Vec<Raw>,
}

impl Unit {
    /// The unit with this number, from 0, among the units of a [`Ring`](super::Ring), which copies one unit after the
    /// other to the device. The number matters only if processes [share](Self::share) units; by default it is 0.
    pub fn new(number: usize) -> Self {
        Self(Arc::new(Mutex::new(Contents { number, ..Contents::default() })))
    }

    /// The unit's number among the units of a ring.
    pub(super) fn number(&self) -> usize {
        self.contents().number
    }

    pub(super) fn add(&self, weight: &Streamed) {
        self.contents().weights.push(Arc::downgrade(&weight.0));
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The weights that still exist.
    pub(super) fn weights(&self) -> Vec<Streamed> {
        self.contents().weights.iter().filter_map(Weak::upgrade).map(Streamed).collect()
    }

    /// Add the values of `weight` to the unit's digest. Returns the weight that this process keeps for its model:
    /// `weight` itself if this process writes the unit for all processes of the machine; in other processes a weight of
    /// the same shape and dtype that has one element in memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the system gives no memory.
    pub fn share(&self, weight: Weight, sharing: &Sharing) -> Result<Weight> {
        let mut digest = FxHasher::default();
        digest.write_u64(self.contents().digest);
        // `map` serves only to visit the tensors of a weight: its values or, if it is quantized, its codes and scales.
        weight.map(|raw| {
            with_bytes(raw, |bytes| digest.write(bytes))?;
            Ok(raw.clone())
        })?;
        let mut contents = self.contents();
        contents.digest = digest.finish();
        if sharing.keeps(contents.number) {
            return Ok(weight);
        }
        // This marks the unit as one whose weights have no values in this process.
        contents.hollow.get_or_insert_default();
        weight.map(|raw| hollow_tensor(raw, raw.dims()))
    }

    /// The digest of the values that [`share`](Self::share) was called with, in the order of the calls.
    pub(super) fn digest(&self) -> u64 {
        self.contents().digest
    }

    /// Whether the unit's weights have no values in this process.
    pub(super) fn is_hollow(&self) -> bool {
        self.contents().hollow.is_some()
    }

    /// Where `weights` lie in the memory of the unit. They belong to this unit and are not in a ring yet.
    pub(super) fn packing(&self, weights: &[Streamed]) -> Result<Packing> {
        let weights = weights.iter().map(Streamed::gathered).collect::<Result<Vec<_>>>()?;
        Packing::of(&weights, self.contents().hollow.as_ref())
    }

    /// The tensors concatenated along their first dimension (the joined weight), and for each of them the part of the
    /// result that it became. Without values (`hollow`), this only makes tensors of the same shapes and remembers where
    /// the parts begin.
    pub(super) fn cat(&self, tensors: &[&Tensor]) -> Result<(Tensor, Vec<Tensor>)> {
        let rows = tensors.iter().map(|tensor| tensor.dims()[0]).sum();
        let contents = &mut *self.contents();
        let all = match &contents.hollow {
            None => Tensor::cat(tensors, 0)?.detach(),
            Some(_) => {
                let mut dims = tensors[0].dims().to_vec();
                dims[0] = rows;
                Tensor::constant(hollow_tensor(&tensors[0].raw, &dims)?)
            }
        };
        let (mut start, mut parts) = (0, Vec::with_capacity(tensors.len()));
        for tensor in tensors {
            let count = tensor.dims()[0];
            parts.push(match &mut contents.hollow {
                None => all.narrow(0, start, count)?,
                Some(joined) => {
                    let part = hollow_tensor(&tensor.raw, tensor.dims())?;
                    // The index of the part's first element in `all`: `start` rows come before the part.
                    let first = start * tensor.elem_count() / count.max(1);
                    joined.insert(storage_identity(&part).0, (storage_identity(&all.raw).0, first));
                    contents.keep_alive.extend([part.clone(), all.raw.clone()]);
                    Tensor::constant(part)
                }
            });
            start += count;
        }
        Ok((all, parts))
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A tensor of shape `dims` on the CPU that has the dtype of `like` and one element in memory.
fn hollow_tensor(like: &Raw, dims: &[usize]) -> Result<Raw> {
    Ok(Raw::zeros((), like.dtype(), &Device::Cpu)?.broadcast_as(dims)?)
}
