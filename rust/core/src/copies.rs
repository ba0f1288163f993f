//! Copies of a variable's values in another dtype, for computing in this dtype.
//!
//! Without a copy, an f32 variable would be cast at every use in bf16. The copy is allocated once and updated when the
//! variable has changed; its storage stays the same, so that a captured graph can read it.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::DType;
use smallvec::SmallVec;

use crate::capture::{Follower, Version};
use crate::raw::{Raw, check_allocation_on};
use crate::{Result, compute};

/// The copies of one variable, at most one for each dtype.
#[derive(Default)]
pub(crate) struct Copies {
    entries: SmallVec<[Entry; 1]>,
    /// If the variable is part of a flat buffer: the vectors that contain the copies, and the variable's offset in each
    /// of the vectors, in elements.
    place_in_flat: Option<(Arc<FlatCopies>, usize)>,
}

struct Entry {
    raw: Raw,
    /// The version of the variable from which the copy was made.
    follower: Follower,
}

impl Copies {
    /// From now on, allocates new copies in the vectors of `flat`, which hold the copies of the variables of a flat
    /// buffer ([`FlatBuffer`](crate::FlatBuffer)). This variable begins at element `start` of the flat buffer. Copies
    /// that exist already keep their storage.
    pub(crate) fn allocate_in(&mut self, flat: Arc<FlatCopies>, start: usize) {
        self.place_in_flat = Some((flat, start));
    }

    /// The copy in `dtype`, brought up to date with `values`, the variable's values at `version`.
    pub(crate) fn get(&mut self, dtype: DType, values: &Raw, version: &Arc<Version>) -> Result<Raw> {
        if let Some(entry) = self.entries.iter().find(|entry| entry.raw.dtype() == dtype) {
            entry.update(values, version)?;
            return Ok(entry.raw.clone());
        }
        let raw = match &self.place_in_flat {
            Some((flat, start)) => {
                let vector = flat.vector(dtype, values)?;
                let raw = vector.narrow(0, *start, values.elem_count())?.reshape(values.shape())?;
                compute::copy_into(&raw, values)?;
                raw
            }
            None => compute::contiguous(&compute::cast(values, dtype)?)?,
        };
        let entry = Entry { raw: raw.clone(), follower: Follower::default() };
        entry.follower.follow(version);
        self.entries.push(entry);
        Ok(raw)
    }

    /// Brings all copies up to date with `values`, the variable's values at `version`.
    pub(crate) fn update(&self, values: &Raw, version: &Arc<Version>) -> Result<()> {
        self.entries.iter().try_for_each(|entry| entry.update(values, version))
    }

    /// The copy that was made first, if there is one. A kernel that changes the variable can write the new values to
    /// this copy, too.
    pub(crate) fn first(&self) -> Option<Raw> {
        self.entries.first().map(|entry| entry.raw.clone())
    }

    /// Marks the [`first`](Self::first) copy as having the values of `version`.
    pub(crate) fn mark_first_current(&self, version: &Arc<Version>) {
        if let Some(entry) = self.entries.first() {
            entry.follower.follow(version);
        }
    }
}

impl Entry {
    fn update(&self, values: &Raw, version: &Arc<Version>) -> Result<()> {
        if !self.follower.is_at(version) {
            compute::copy_into(&self.raw, values)?;
            self.follower.follow(version);
        }
        Ok(())
    }
}

/// The copies of a flat buffer's variables: one vector per dtype, allocated when the first copy in this dtype is
/// requested.
pub(crate) struct FlatCopies {
    /// The number of elements of the flat buffer, and of each vector.
    len: usize,
    vectors: Mutex<SmallVec<[Raw; 1]>>,
}

impl FlatCopies {
    pub(crate) fn new(len: usize) -> Self {
        Self { len, vectors: Mutex::default() }
    }

    /// The vector of `dtype`. If it does not exist yet, it is allocated on the device of `like`.
    fn vector(&self, dtype: DType, like: &Raw) -> Result<Raw> {
        let mut vectors = self.vectors.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = vectors.iter().find(|vector| vector.dtype() == dtype) {
            return Ok(found.clone());
        }
        check_allocation_on(like.device(), "compute copies", &[self.len], dtype)?;
        let vector = compute::zeros(&[self.len], dtype, like.device())?;
        vectors.push(vector.clone());
        Ok(vector)
    }
}
