//! [`Held`]: the bytes of a unit (the streamed weights of one block) in the memory where a [`Ring`](super::Ring) keeps
//! them. The ring copies them to a slot on the device before the block runs.

use std::fmt::Write as _;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device};
use rustc_hash::FxHasher;

use super::Unit;
use super::packing::Packing;
use super::pages::Pages;
use super::shards::{Place, Shards};
use crate::cuda::streaming::{Copier, HostMemory, Source};
use crate::raw::{Raw, own_copy, with_bytes};
use crate::{Result, compute};

/// The bytes of a unit, one entry for each dtype.
pub(super) struct Held(pub(super) Vec<(DType, Bytes)>);

/// Where the bytes of a unit's weights of one dtype are.
pub(super) enum Bytes {
    /// For a ring on the CPU: in memory of this process.
    Plain(Raw),
    /// For a ring on the CPU: in memory that processes share, at this range of bytes.
    Shared(Arc<Pages>, Range<usize>),
    /// For a ring on a GPU: in host memory, from which the GPU copies. The memory is pinned if the system gives enough
    /// pinned memory.
    HostMemory(HostMemory),
    /// For any ring: in slices, at this place. Each process of the machine has one slice: in memory that processes
    /// share if the ring is on the CPU, otherwise on its GPU.
    Sliced(Arc<Shards>, Place),
}

impl Held {
    /// A copy of the weights of `packing`, which lists a unit's tensors with their offsets among the elements of their
    /// dtype. A ring on a GPU has a `copier`, which allocates the memory; without a copier, the copy is a CPU tensor.
    pub(super) fn new(packing: &Packing, copier: Option<&Copier>) -> Result<Self> {
        let mut held = Vec::new();
        for dtype in packing.dtypes() {
            // The number of elements, and the bytes of one.
            let (count, size) = (packing.count(dtype), dtype.size_in_bytes());
            let bytes = match copier {
                None => {
                    let all = compute::zeros(&[count], dtype, &Device::Cpu)?;
                    for (offset, raw) in packing.tensors(dtype) {
                        compute::copy_into(&all.narrow(0, offset, raw.elem_count())?, &raw.flatten_all()?)?;
                    }
                    Bytes::Plain(all)
                }
                Some(copier) => {
                    let mut memory = copier.allocate(count * size)?;
                    for (offset, raw) in packing.tensors(dtype) {
                        with_bytes(raw, |bytes| memory.write(offset * size, bytes))?;
                    }
                    Bytes::HostMemory(memory)
                }
            };
            held.push((dtype, bytes));
        }
        Ok(Self(held))
    }

    /// Move pinned bytes to pageable memory.
    pub(super) fn unpin(&mut self, copier: &Copier) {
        for (_, bytes) in &mut self.0 {
            if let Bytes::HostMemory(memory) = bytes {
                *memory = copier.unpinned(memory);
            }
        }
    }
}

impl Bytes {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Plain(raw) => raw.elem_count() * raw.dtype().size_in_bytes(),
            Self::Shared(_, range) => range.len(),
            Self::HostMemory(memory) => memory.bytes().len(),
            Self::Sliced(_, place) => place.len(),
        }
    }

    /// Copies the bytes to `to`, the tensor of this dtype in a slot. On the CPU, the bytes are copied at once. On a
    /// GPU, the copies that a [`Copier`] must make are added to `copies`.
    pub(super) fn copy_to_slot<'a>(&'a self, to: &Raw, copies: &mut Vec<(Source<'a>, Raw)>) -> Result<()> {
        match self {
            Self::Plain(raw) => compute::copy_into(&to.narrow(0, 0, raw.elem_count())?, raw),
            Self::Shared(pages, range) => copy_bytes(to, pages.bytes(range.clone())),
            Self::HostMemory(memory) => {
                copies.push((Source::Host(memory), to.clone()));
                Ok(())
            }
            // `gathered` returns `None` if the slices are on GPUs.
            Self::Sliced(shards, place) => match shards.gathered(*place, 0..place.len()) {
                Some(bytes) => copy_bytes(to, &bytes),
                None => {
                    copies.extend(shards.copies(*place, to)?);
                    Ok(())
                }
            },
        }
    }

    /// A copy of the values that `view` has while its slot holds this unit; `view` is a view of this dtype's tensor in
    /// a slot. The copy is on the CPU and has one dimension.
    pub(super) fn read(&self, view: &Raw) -> Result<Raw> {
        // The tensor in the slot is at the start of its memory, so the view has the same offset there as its elements
        // have among the unit's elements of this dtype.
        let (start, count) = (view.layout().start_offset(), view.elem_count());
        let size = view.dtype().size_in_bytes();
        let range = start * size..(start + count) * size;
        let tensor = |bytes: &[u8]| Ok(Raw::from_raw_buffer(bytes, view.dtype(), &[count], &Device::Cpu)?);
        match self {
            Self::Plain(raw) => own_copy(&raw.narrow(0, start, count)?),
            Self::Shared(pages, all) => tensor(&pages.bytes(all.clone())[range]),
            Self::HostMemory(memory) => tensor(&memory.bytes()[range]),
            Self::Sliced(shards, place) => match shards.gathered(*place, range.clone()) {
                Some(bytes) => tensor(&bytes),
                None => shards.downloaded(*place, range, view),
            },
        }
    }
}

/// Copy `bytes` to the first elements of `to`, the tensor of one dtype in a slot on the CPU.
fn copy_bytes(to: &Raw, bytes: &[u8]) -> Result<()> {
    let count = bytes.len() / to.dtype().size_in_bytes();
    let raw = Raw::from_raw_buffer(bytes, to.dtype(), &[count], &Device::Cpu)?;
    compute::copy_into(&to.narrow(0, 0, count)?, &raw)
}

/// A text by which processes compare the weights that each of them has for `unit`: the number of bytes in each dtype, a
/// hash of the offsets and shapes of the packed tensors, and the digest of the values.
pub(super) fn description(packing: &Packing, unit: &Unit) -> String {
    let mut text = String::new();
    let mut layout_hash = FxHasher::default();
    for dtype in packing.dtypes() {
        for (offset, raw) in packing.tensors(dtype) {
            (offset, raw.dims()).hash(&mut layout_hash);
        }
        // Writing to a string does not fail.
        let _ = write!(text, "{} bytes of {}, ", packing.count(dtype) * dtype.size_in_bytes(), dtype.as_str());
    }
    format!("{text}digest {:016x}{:016x}", layout_hash.finish(), unit.digest())
}
