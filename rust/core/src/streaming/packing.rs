//! [`Packing`]: where the weights of a unit (the streamed weights of one block) lie in the memory of the unit, one
//! after the other.

use std::collections::HashMap;

use candle_core::DType;

use crate::quantized::Weight;
use crate::raw::{Raw, storage_identity};
use crate::{Error, Result};

use super::OP;

/// Packed tensors begin at multiples of this many bytes, from which copies and kernels are fastest.
const ALIGNMENT: usize = 256;

/// For each weight that is a part of a joined weight ([`Streamed::join`](super::Streamed::join)): where the part begins
/// in the joined weight. Used for weights without values: with values, a part is a view of the joined weight's storage.
/// The key is the address of the part's storage. The value is the address of the joined weight's storage, and the index
/// of the part's first element in the joined weight.
pub(super) type Joined = HashMap<usize, (usize, usize)>;

/// A tensor that the packing holds. Weights that are views of this tensor have no entry of their own.
struct Part {
    /// The address of the tensor's storage.
    storage: usize,
    /// The index of the tensor's first element in its storage.
    start: usize,
    raw: Raw,
    /// The number of elements of the same dtype that the packing has before the tensor.
    offset: usize,
}

/// The offset of every tensor of a unit's weights, counted separately for each dtype. Weights that share storage share
/// it in the packing too.
#[derive(Default)]
pub(super) struct Packing {
    parts: Vec<Part>,
    joined: Joined,
}

impl Packing {
    /// The packing of some weights on the CPU. `hollow` is `Some` if the weights have no values (because only another
    /// process has them), and then says where the parts of joined weights are.
    pub(super) fn of(weights: &[Weight], hollow: Option<&Joined>) -> Result<Self> {
        let mut raws = Vec::new();
        for weight in weights {
            weight.map(|raw| {
                raws.push(raw.clone());
                Ok(raw.clone())
            })?;
        }
        // Larger tensors first: a joined weight comes before its parts, so `place` finds the parts in it.
        raws.sort_by_key(|raw| std::cmp::Reverse(raw.elem_count()));
        let mut packing = Self { joined: hollow.cloned().unwrap_or_default(), ..Self::default() };
        for raw in raws {
            if hollow.is_none() && !raw.is_contiguous() {
                return Err(Error::argument(OP, "found a weight that is not contiguous"));
            }
            if packing.offset_of(&raw).is_none() {
                let offset = packing.count(raw.dtype());
                let (storage, start) = packing.origin(&raw);
                packing.parts.push(Part { storage, start, raw, offset });
            }
        }
        Ok(packing)
    }

    /// The offset of `raw` among the packed elements of its dtype; `None` if `raw` is not in the packing.
    pub(super) fn offset_of(&self, raw: &Raw) -> Option<usize> {
        let (storage, start) = self.origin(raw);
        let contains = |part: &&Part| {
            part.storage == storage
                && part.start <= start
                && start + raw.elem_count() <= part.start + part.raw.elem_count()
        };
        self.parts.iter().find(contains).map(|part| part.offset + (start - part.start))
    }

    /// The address of the storage of `raw`, and the index of `raw`'s first element in this storage. If `raw` is a part
    /// of a joined weight without values: the address of the joined weight's storage, and the index of the part's first
    /// element in the joined weight.
    fn origin(&self, raw: &Raw) -> (usize, usize) {
        let (storage, start) = (storage_identity(raw).0, raw.layout().start_offset());
        self.joined.get(&storage).copied().unwrap_or((storage, start))
    }

    /// The number of packed elements of `dtype`, rounded up to a multiple of [`ALIGNMENT`] bytes.
    pub(super) fn count(&self, dtype: DType) -> usize {
        let ends =
            self.parts.iter().filter(|part| part.raw.dtype() == dtype).map(|part| part.offset + part.raw.elem_count());
        ends.max().unwrap_or(0).next_multiple_of(ALIGNMENT / dtype.size_in_bytes().max(1))
    }

    /// The dtypes of the packed tensors, sorted by name: all processes must have the same order.
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

    /// The packed tensors of `dtype`, each with its offset among the packed elements of `dtype`.
    pub(super) fn parts(&self, dtype: DType) -> impl Iterator<Item = (usize, &Raw)> {
        self.parts.iter().filter(move |part| part.raw.dtype() == dtype).map(|part| (part.offset, &part.raw))
    }
}
