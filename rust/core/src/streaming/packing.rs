//! The placement of the weights of a unit side by side.

use std::collections::HashMap;

use candle_core::DType;

use crate::quantized::Weight;
use crate::raw::{Raw, storage_identity};
use crate::{Error, Result};

use super::OP;

/// Parts are aligned to this many bytes, with which copies and kernels are fastest.
const ALIGNMENT: usize = 256;

/// The place of each part of a joined weight, for weights without values. The key is the identity of the part's
/// storage. The value is the identity of the joined weight's storage, and the index of the part's first element there.
pub(super) type Joined = HashMap<usize, (usize, usize)>;

/// A piece of storage of weights, and its offset among the elements of its dtype in the packing.
struct Part {
    /// The identity of the storage, and the index of the first element in it.
    storage: usize,
    start: usize,
    raw: Raw,
    offset: usize,
}

/// The places of all storage of a unit, separately for each dtype. Weights that share storage keep sharing it.
#[derive(Default)]
pub(super) struct Packing {
    parts: Vec<Part>,
    joined: Joined,
}

impl Packing {
    /// The packing of some weights on the CPU; `hollow` if they have no values.
    pub(super) fn of(weights: &[Weight], hollow: Option<&Joined>) -> Result<Self> {
        let mut raws = Vec::new();
        for weight in weights {
            weight.map(|raw| {
                raws.push(raw.clone());
                Ok(raw.clone())
            })?;
        }
        // Larger tensors first, so that parts are found in them.
        raws.sort_by_key(|raw| std::cmp::Reverse(raw.elem_count()));
        let mut packing = Self { joined: hollow.cloned().unwrap_or_default(), ..Self::default() };
        for raw in raws {
            if hollow.is_none() && !raw.is_contiguous() {
                return Err(Error::argument(OP, "found a weight that is not contiguous"));
            }
            if packing.place(&raw).is_none() {
                let offset = packing.count(raw.dtype());
                let (storage, start) = packing.origin(&raw);
                packing.parts.push(Part { storage, start, raw, offset });
            }
        }
        Ok(packing)
    }

    /// The index of the first element of `raw` among those of its dtype; `None` if it has no place.
    pub(super) fn place(&self, raw: &Raw) -> Option<usize> {
        let (storage, start) = self.origin(raw);
        let has = |part: &&Part| {
            part.storage == storage
                && part.start <= start
                && start + raw.elem_count() <= part.start + part.raw.elem_count()
        };
        self.parts.iter().find(has).map(|part| part.offset + (start - part.start))
    }

    /// The identity of the storage of `raw`, and the index of its first element there.
    fn origin(&self, raw: &Raw) -> (usize, usize) {
        let (storage, start) = (storage_identity(raw).0, raw.layout().start_offset());
        self.joined.get(&storage).copied().unwrap_or((storage, start))
    }

    /// The number of elements of `dtype`, rounded up so that the next part is aligned.
    pub(super) fn count(&self, dtype: DType) -> usize {
        let ends =
            self.parts.iter().filter(|part| part.raw.dtype() == dtype).map(|part| part.offset + part.raw.elem_count());
        ends.max().unwrap_or(0).next_multiple_of(ALIGNMENT / dtype.size_in_bytes().max(1))
    }

    /// The dtypes, in an order that is always the same.
    pub(super) fn dtypes(&self) -> Vec<DType> {
        let mut found: Vec<DType> = Vec::new();
        for part in &self.parts {
            if !found.contains(&part.raw.dtype()) {
                found.push(part.raw.dtype());
            }
        }
        found.sort_by_key(|dtype| dtype.as_str());
        found
    }

    /// The tensors of `dtype`, each with its offset in elements.
    pub(super) fn parts(&self, dtype: DType) -> impl Iterator<Item = (usize, &Raw)> {
        self.parts.iter().filter(move |part| part.raw.dtype() == dtype).map(|part| (part.offset, &part.raw))
    }
}
