//! [`Saved`]: a value kept for a backward pass, or a reference to the checkpoint or the node that recomputes it.

use std::sync::Arc;

use crate::capture::Version;
use crate::checkpoint::Region;
use crate::memory::SavedBytes;
use crate::raw::Raw;
use crate::tape::Node;
use crate::tensor::Tensor;
use crate::{Error, Result};

/// A value that a backward pass will read.
pub struct Saved(Kind);

enum Kind {
    Kept {
        raw: Raw,
        /// If this is a variable's storage: the counter of the variable's changes in place, and the count when the
        /// value was kept.
        version: Option<(Arc<Version>, u64)>,
        /// Counts the value in [`saved_bytes`](crate::memory::saved_bytes) until it is dropped. Absent for variables
        /// and other parameters, which would be in memory without the tape too.
        _bytes: Option<SavedBytes>,
    },
    /// The value is recomputed by a checkpoint when it is first read.
    Slot { region: Arc<Region>, index: usize },
    /// The value is recomputed by the node whose result it is, from the values that this node saved. They still exist
    /// when the value is read: the backward pass frees them when it reaches the node, after all nodes that use its
    /// result.
    Again(Arc<Node>),
    /// The value is not kept, because it is never read: while a checkpoint recomputes, the nodes of its operations are
    /// dropped unused.
    Nothing,
}

impl Saved {
    /// If [`recomputed`](Tensor::recomputed) has marked `tensor`: its value, which is recomputed when it is read.
    /// Otherwise `None`.
    pub(crate) fn again(tensor: &Tensor) -> Option<Self> {
        tensor.node.as_ref().filter(|node| node.is_recomputed()).map(|node| Self(Kind::Again(node.clone())))
    }

    /// Keep an activation, counted in [`saved_bytes`](crate::memory::saved_bytes) unless it is a variable's storage.
    pub(crate) fn keep(tensor: &Tensor) -> Self {
        let bytes = tensor.version.is_none().then(|| SavedBytes::new(&tensor.raw));
        Self(Kind::Kept { raw: tensor.raw.clone(), version: versioned(tensor), _bytes: bytes })
    }

    /// Keep a value that is no variable, counted in [`saved_bytes`](crate::memory::saved_bytes).
    pub(crate) fn keep_raw(raw: &Raw) -> Self {
        Self(Kind::Kept { raw: raw.clone(), version: None, _bytes: Some(SavedBytes::new(raw)) })
    }

    /// Keep a parameter, which is not counted in [`saved_bytes`](crate::memory::saved_bytes).
    pub(crate) fn hold(tensor: &Tensor) -> Self {
        Self(Kind::Kept { raw: tensor.raw.clone(), version: versioned(tensor), _bytes: None })
    }

    /// Value number `index` of those that `region`, a checkpoint, recomputes.
    pub(crate) const fn slot(region: Arc<Region>, index: usize) -> Self {
        Self(Kind::Slot { region, index })
    }

    /// A value that is not kept, because it is never read.
    pub(crate) const fn nothing() -> Self {
        Self(Kind::Nothing)
    }

    /// The value.
    ///
    /// # Errors
    /// [`Error::Autograd`] if the value is a variable's and the variable was changed in place after the value was kept,
    /// if a checkpointed function behaves differently when it is run again, or if an earlier backward pass has freed
    /// the values from which this value is recomputed. The errors of the recomputation.
    pub fn get(&self) -> Result<Raw> {
        match &self.0 {
            Kind::Kept { raw, version, .. } => {
                if let Some((version, count)) = version {
                    check_version(version, *count)?;
                }
                Ok(raw.clone())
            }
            Kind::Slot { region, index } => region.value(*index),
            Kind::Again(node) => node.result(),
            Kind::Nothing => {
                Err(Error::autograd("backward", "a backward pass reached a node of a checkpoint's recomputation"))
            }
        }
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        // The checkpoint can free the value that it has recomputed.
        if let Kind::Slot { region, index } = &self.0 {
            region.release(*index);
        }
    }
}

/// If `tensor` has the storage of a variable: the counter of the variable's changes, and its present count.
fn versioned(tensor: &Tensor) -> Option<(Arc<Version>, u64)> {
    tensor.version.as_ref().map(|v| (v.clone(), v.get()))
}

/// An error if the variable was changed in place after its counter of changes, `version`, was at `count`.
pub(crate) fn check_version(version: &Version, count: u64) -> Result<()> {
    if version.get() == count {
        return Ok(());
    }
    Err(Error::autograd(
        "backward",
        "a variable needed for this gradient was changed in place (set, an optimizer step) after it was used; \
         call backward() before changing it, or compute the loss again",
    ))
}
