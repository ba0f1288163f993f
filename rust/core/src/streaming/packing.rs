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

/// For each weight that is a part of a joined weight ([`Streamed::join`](super::Streamed::join) joins the rows of
/// several weights to one): where the part begins in the joined weight. Only weights without values need it: with
/// values, a part is a view of the joined weight's storage, and so has this position itself. The key is the address of
/// the part's storage. The value is the address of the joined weight's storage, and the index of the part's first
/// element in the joined weight.
pub(super) type Joined = HashMap<usize, (usize, usize)>;

/// A tensor that the packing holds. Weights that are views of this tensor have no entry of their own.
struct Packed {
    /// The address of the tensor's storage.
    storage: usize,
    /// The index of the tensor's first element in its storage.
    start: usize,
    raw: Raw,
    /// The position of the tensor among the elements of its dtype, in elements, with the gaps of [`ALIGNMENT`].
    offset: usize,
}

/// The offset of every tensor of a unit's weights, counted separately for each dtype. Weights that share storage share
/// it in the packing too.
#[derive(Default)]
pub(super) struct Packing {
    tensors: Vec<Packed>,
    joined: Joined,
}

impl Packing {
    /// The packing of some weights on the CPU. `hollow` is `Some` if the weights have no values (because only another
    /// process has them), and then says where the parts of joined weights are.
    pub(super) fn of(weights: &[Weight], hollow: Option<&Joined>) -> Result<Self> {
        let mut raws = Vec::new();
        for weight in weights {
            // `map` serves only to visit the tensors of a weight: its values or, if it is quantized, its codes and
            // scales.
            weight.map(|raw| {
                raws.push(raw.clone());
                Ok(raw.clone())
            })?;
        }
        // Larger tensors first: a joined weight comes before its parts, so the parts are found in it and not packed
        // again.
        raws.sort_by_key(|raw| std::cmp::Reverse(raw.elem_count()));
        let mut packing = Self { joined: hollow.cloned().unwrap_or_default(), ..Self::default() };
        for raw in raws {
            // A weight without values is one element in memory, broadcast to its shape, and so not contiguous.
            if hollow.is_none() && !raw.is_contiguous() {
                return Err(Error::argument(OP, "found a weight that is not contiguous"));
            }
            if packing.offset_of(&raw).is_none() {
                let offset = packing.count(raw.dtype());
                let (storage, start) = packing.origin(&raw);
                packing.tensors.push(Packed { storage, start, raw, offset });
            }
        }
        Ok(packing)
    }

    /// The offset of `raw` among the packed elements of its dtype; `None` if `raw` is not in the packing.
    pub(super) fn offset_of(&self, raw: &Raw) -> Option<usize> {
        let (storage, start) = self.origin(raw);
        let contains = |packed: &&Packed| {
            packed.storage == storage
                && packed.start <= start
                && start + raw.elem_count() <= packed.start + packed.raw.elem_count()
        };
        self.tensors.iter().find(contains).map(|packed| packed.offset + (start - packed.start))
    }

    /// The address of the storage of `raw`, and the index of `raw`'s first element in this storage. If `raw` is a part
    /// of a joined weight without values: the address of the joined weight's storage, and the index of the part's first
    /// element in the joined weight.
    fn origin(&self, raw: &Raw) -> (usize, usize) {
        let (storage, start) = (storage_identity(raw).0, raw.layout().start_offset());
        self.joined.get(&storage).copied().unwrap_or((storage, start))
    }

    /// The number of elements that the packing takes for `dtype`, with the gaps between tensors: a multiple of
    /// [`ALIGNMENT`] bytes. The next tensor of `dtype` would begin there.
    pub(super) fn count(&self, dtype: DType) -> usize {
        let ends = self.tensors(dtype).map(|(offset, raw)| offset + raw.elem_count());
        // `max(1)`: candle gives dtypes of less than a byte a size of 0.
        ends.max().unwrap_or(0).next_multiple_of(ALIGNMENT / dtype.size_in_bytes().max(1))
    }

    /// The dtypes of the packed tensors, sorted by name: all processes must have the same order.
    pub(super) fn dtypes(&self) -> Vec<DType> {
        let mut found: Vec<DType> = Vec::new();
        for packed in &self.tensors {
            if !found.contains(&packed.raw.dtype()) {
                found.push(packed.raw.dtype());
            }
        }
        found.sort_by_key(|dtype| dtype.as_str());
        found
    }

    /// The packed tensors of `dtype`, each with its offset among the packed elements of `dtype`.
    pub(super) fn tensors(&self, dtype: DType) -> impl Iterator<Item = (usize, &Raw)> {
        self.tensors.iter().filter(move |packed| packed.raw.dtype() == dtype).map(|packed| (packed.offset, &packed.raw))
    }
}
