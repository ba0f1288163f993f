//! [`Ring`]: the slots on the device, and the units in them.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use candle_core::{DType, Device};

use super::packing::Packing;
use super::{Inner, OP, Streamed};
use crate::cuda::streaming::{Copier, Pinned};
use crate::raw::{Raw, own_copy, with_bytes};
use crate::tape::{Backward, BackwardContext, Inputs, Node};
use crate::{Error, Result, Tensor, checkpoint, compute};

const SLOTS: usize = 2;

/// The weights that are used together, those of a block; collects them while a model is built.
#[derive(Clone, Default)]
pub struct Unit(Arc<Mutex<Vec<Weak<Inner>>>>);

impl Unit {
    pub(super) fn add(&self, weight: &Streamed) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&weight.0));
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The weights that still exist.
    fn weights(&self) -> Vec<Streamed> {
        let weights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        weights.iter().filter_map(Weak::upgrade).map(Streamed).collect()
    }
}

/// Two slots on a device for units in the memory of the host. Unit i is copied to slot i mod 2.
pub struct Ring {
    /// Dropped first: copies to the slots must end before these are freed.
    copier: Option<Copier>,
    /// For each slot a tensor of each dtype.
    slots: [Vec<Raw>; SLOTS],
    units: Vec<OnceLock<Arc<Held>>>,
    state: Mutex<State>,
}

/// The bytes of a unit in the memory of the host, one part for each dtype.
struct Held(Vec<(DType, Bytes)>);

enum Bytes {
    /// The bytes of a unit of a ring on the CPU.
    Plain(Raw),
    Pinned(Pinned),
}

#[derive(Default)]
struct State {
    /// The copier's epoch of this state. A graph recorded or replayed since may have changed the slots.
    epoch: u64,
    slots: [Option<usize>; SLOTS],
    current: Option<usize>,
}

/// The order in which units are used.
#[derive(Clone, Copy)]
enum Direction {
    Up,
    Down,
}

impl Ring {
    /// Move the weights of `units` to pinned memory of the host, which `device` can read by itself. Units are used in
    /// their order, and in reverse order by backward passes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the slots do not fit on the device, or the units in the memory of the host.
    pub fn new(device: &Device, units: &[Unit]) -> Result<Arc<Self>> {
        let gathered: Vec<Vec<Streamed>> = units.iter().map(Unit::weights).collect();
        let mut sizes: [Vec<(DType, usize)>; SLOTS] = Default::default();
        for (index, weights) in gathered.iter().enumerate() {
            let (packing, sizes) = (packing(weights)?, &mut sizes[index % SLOTS]);
            for dtype in packing.dtypes() {
                let count = packing.count(dtype);
                match sizes.iter_mut().find(|(known, _)| *known == dtype) {
                    Some((_, most)) => *most = count.max(*most),
                    None => sizes.push((dtype, count)),
                }
            }
        }
        let slot = |sizes: &Vec<(DType, usize)>| {
            sizes.iter().map(|&(dtype, count)| compute::zeros(&[count], dtype, device)).collect::<Result<Vec<_>>>()
        };
        let slots = [slot(&sizes[0])?, slot(&sizes[1])?];
        let copier = if device.is_cpu() { None } else { Some(Copier::new(device, SLOTS)?) };
        let units = units.iter().map(|_| OnceLock::new()).collect();
        let ring = Arc::new(Self { units, slots, copier, state: Mutex::default() });
        for (unit, weights) in gathered.into_iter().enumerate() {
            ring.take(unit, weights)?;
        }
        Ok(ring)
    }

    /// Move the weights of a unit. The originals are freed before the next unit is moved.
    fn take(self: &Arc<Self>, unit: usize, weights: Vec<Streamed>) -> Result<()> {
        let packing = packing(&weights)?;
        let slot = &self.slots[unit % SLOTS];
        let mut views = Vec::with_capacity(weights.len());
        for weight in &weights {
            views.push(weight.gathered()?.map(|raw| {
                let part = slot.iter().find(|part| part.dtype() == raw.dtype());
                let (Some(offset), Some(part)) = (packing.place(raw), part) else {
                    return Err(Error::argument(OP, "the weights have changed meanwhile"));
                };
                Ok(part.narrow(0, offset, raw.elem_count())?.reshape(raw.shape())?)
            })?);
        }
        let held = Held::new(&packing, self.copier.as_ref())?;
        drop(self.units[unit].set(Arc::new(held)));
        for (weight, view) in weights.iter().zip(views) {
            weight.place(self, unit, view);
        }
        Ok(())
    }

    /// Bring `unit` to its slot and start to copy the unit that is needed next: the one after it, or the one before it
    /// while a checkpoint recomputes.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver reports an error.
    pub fn enter(&self, unit: usize) -> Result<()> {
        self.go(unit, if checkpoint::is_replaying() { Direction::Down } else { Direction::Up })
    }

    /// Have the backward pass bring `unit` to its slot before it reaches the operations that computed `result`.
    #[must_use]
    pub fn reenter(self: &Arc<Self>, unit: usize, result: Tensor) -> Tensor {
        let Some(node) = result.node.clone() else { return result };
        let backward = Reenter { ring: self.clone(), unit };
        let node = Node::op_node(OP, Inputs::from_iter([Some(node)]), Box::new(backward));
        Tensor { node: Some(Arc::new(node)), ..result }
    }

    fn go(&self, unit: usize, direction: Direction) -> Result<()> {
        let mut state = self.state();
        if state.current == Some(unit) {
            return Ok(());
        }
        // No unit is current until the new one is in its slot.
        state.current = None;
        self.bring(&mut state, unit)?;
        if let Some(copier) = &self.copier {
            copier.wait(unit % SLOTS)?;
        }
        state.current = Some(unit);
        let next = match direction {
            Direction::Up => Some(unit + 1).filter(|&next| next < self.units.len()),
            Direction::Down => unit.checked_sub(1),
        };
        next.map_or(Ok(()), |next| self.bring(&mut state, next))
    }

    /// Copy a unit to its slot, after all work that is queued now, unless it is there already.
    fn bring(&self, state: &mut State, unit: usize) -> Result<()> {
        let slot = unit % SLOTS;
        if state.slots[slot] == Some(unit) {
            return Ok(());
        }
        state.slots[slot] = None;
        let Some(held) = self.units[unit].get() else { return Err(Error::argument(OP, "a unit is not complete")) };
        let mut pinned = Vec::with_capacity(held.0.len());
        for (dtype, bytes) in &held.0 {
            let Some(to) = self.slots[slot].iter().find(|part| part.dtype() == *dtype) else { continue };
            match bytes {
                Bytes::Plain(raw) => compute::copy_into(&to.narrow(0, 0, raw.elem_count())?, raw)?,
                Bytes::Pinned(bytes) => pinned.push((bytes, to)),
            }
        }
        if let Some(copier) = &self.copier {
            copier.copy(slot, &pinned, held)?;
        }
        state.slots[slot] = Some(unit);
        Ok(())
    }

    /// Whether `unit` is the one that work may use now.
    pub(super) fn has(&self, unit: usize) -> bool {
        self.state().current == Some(unit)
    }

    /// A copy on the CPU of the values that `view`, a part of a slot, has while `unit` is there.
    pub(super) fn read(&self, unit: usize, view: &Raw) -> Result<Raw> {
        let held = self.units[unit].get().and_then(|held| held.0.iter().find(|(dtype, _)| *dtype == view.dtype()));
        let Some((_, bytes)) = held else { return Err(Error::argument(OP, "a unit is not complete")) };
        let (start, count) = (view.layout().start_offset(), view.elem_count());
        match bytes {
            Bytes::Plain(raw) => Ok(own_copy(&raw.narrow(0, start, count)?)?.reshape(view.shape())?),
            Bytes::Pinned(pinned) => {
                let size = view.dtype().size_in_bytes();
                let bytes = &pinned.bytes()[start * size..(start + count) * size];
                Ok(Raw::from_raw_buffer(bytes, view.dtype(), view.dims(), &Device::Cpu)?)
            }
        }
    }

    /// Bytes of the slots on the device.
    pub fn slot_bytes(&self) -> usize {
        self.slots.iter().flatten().map(|part| part.elem_count() * part.dtype().size_in_bytes()).sum()
    }

    /// Bytes of all units in the memory of the host.
    pub fn host_bytes(&self) -> usize {
        self.units.iter().filter_map(OnceLock::get).flat_map(|held| &held.0).map(|(_, bytes)| bytes.len()).sum()
    }

    /// The units in the slots. Nothing is known about the slots after a graph was recorded or replayed.
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let epoch = self.copier.as_ref().map_or(0, Copier::epoch);
        if state.epoch != epoch {
            *state = State { epoch, ..State::default() };
        }
        state
    }
}

impl Held {
    fn new(packing: &Packing, copier: Option<&Copier>) -> Result<Self> {
        let mut held = Vec::new();
        for dtype in packing.dtypes() {
            let (count, size) = (packing.count(dtype), dtype.size_in_bytes());
            let bytes = match copier {
                None => {
                    let all = compute::zeros(&[count], dtype, &Device::Cpu)?;
                    for (offset, raw) in packing.parts(dtype) {
                        compute::copy_into(&all.narrow(0, offset, raw.elem_count())?, &raw.flatten_all()?)?;
                    }
                    Bytes::Plain(all)
                }
                Some(copier) => {
                    let mut pinned = copier.pinned(count * size)?;
                    for (offset, raw) in packing.parts(dtype) {
                        with_bytes(raw, |bytes| pinned.write(offset * size, bytes))?;
                    }
                    Bytes::Pinned(pinned)
                }
            };
            held.push((dtype, bytes));
        }
        Ok(Self(held))
    }
}

impl Bytes {
    fn len(&self) -> usize {
        match self {
            Self::Plain(raw) => raw.elem_count() * raw.dtype().size_in_bytes(),
            Self::Pinned(pinned) => pinned.bytes().len(),
        }
    }
}

fn packing(weights: &[Streamed]) -> Result<Packing> {
    Packing::of(&weights.iter().map(Streamed::gathered).collect::<Result<Vec<_>>>()?)
}

/// Brings the unit to its slot for the backward pass; the gradient passes unchanged.
struct Reenter {
    ring: Arc<Ring>,
    unit: usize,
}

impl Backward for Reenter {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        self.ring.go(self.unit, Direction::Down)?;
        context.add(0, context.grad().clone())
    }
}
