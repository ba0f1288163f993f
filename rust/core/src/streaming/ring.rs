//! [`Ring`]: the slots on the device, and the copies of units to them.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::{DType, Device};

use super::held::{Bytes, Held, description};
use super::packing::Packing;
use super::pages::Pages;
use super::shards::{Place, Shards};
use super::sharing::{Origin, Sharing};
use super::{OP, Streamed, Unit};
use crate::cuda::streaming::Copier;
use crate::raw::{Raw, with_bytes};
use crate::tape::{Backward, BackwardContext, Inputs, Node};
use crate::{Error, Result, Tensor, checkpoint, compute};

const SLOTS: usize = 2;

/// Two slots on a device, to which units are copied from the memory of the host, or from slices on the devices of a
/// machine. Unit i is copied to slot i mod 2.
pub struct Ring {
    /// The first field, so that it is dropped first: copies to the slots must end before the slots are freed.
    copier: Option<Copier>,
    /// For each slot, one tensor for each dtype, large enough for each unit that is copied to the slot.
    slots: [Vec<Raw>; SLOTS],
    /// The values of each unit, in the memory where the ring keeps them; empty while [`Ring::new`] runs.
    units: Vec<OnceLock<Arc<Held>>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The copier's epoch when this state was set. Recording or replaying a graph starts a new epoch, and may change
    /// the slots.
    epoch: u64,
    /// The unit in each slot, or on its way there.
    slots: [Option<usize>; SLOTS],
    /// The unit that was entered last.
    current: Option<usize>,
}

/// The order in which units are used.
#[derive(Clone, Copy)]
enum Direction {
    /// From the first unit to the last, as in a forward pass.
    Up,
    /// From the last unit to the first, as in a backward pass.
    Down,
}

impl Ring {
    /// Create the slots on `device`, and move the weights of `units` to pinned memory of the host, which `device` can
    /// read by itself. If the system gives too little pinned memory, the last units are in pageable memory, from which
    /// a thread copies them. If `device` is the CPU, the weights move to other memory of this process. Forward passes
    /// use the units in the given order, backward passes in reverse order.
    ///
    /// With `sharing`, the processes of a machine share one copy of the weights. The copy is in the memory of the host,
    /// or in slices on the devices of these processes ([`Origin`]). All processes of `sharing` must then call this
    /// function.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the slots do not fit on the device, or the units do not fit where they are kept;
    /// [`Error::Argument`] if another process has other weights or has failed.
    pub fn new(device: &Device, units: &[Unit], sharing: Option<&Sharing>) -> Result<Arc<Self>> {
        let unit_weights: Vec<Vec<Streamed>> = units.iter().map(Unit::weights).collect();
        // For each slot and each dtype, the number of elements of the largest unit of the slot.
        let mut slot_sizes: [Vec<(DType, usize)>; SLOTS] = Default::default();
        let mut descriptions = Vec::with_capacity(units.len());
        for (index, (weights, unit)) in unit_weights.iter().zip(units).enumerate() {
            let (packing, sizes) = (unit.packing(weights)?, &mut slot_sizes[index % SLOTS]);
            descriptions.push(description(&packing, unit));
            for dtype in packing.dtypes() {
                let count = packing.count(dtype);
                match sizes.iter_mut().find(|(known, _)| *known == dtype) {
                    Some((_, largest)) => *largest = count.max(*largest),
                    None => sizes.push((dtype, count)),
                }
            }
        }
        let allocate = |sizes: &Vec<(DType, usize)>| {
            sizes.iter().map(|&(dtype, count)| compute::zeros(&[count], dtype, device)).collect::<Result<Vec<_>>>()
        };
        let slots = [allocate(&slot_sizes[0])?, allocate(&slot_sizes[1])?];
        let copier = if device.is_cpu() { None } else { Some(Copier::new(device, SLOTS)?) };
        let empty = units.iter().map(|_| OnceLock::new()).collect();
        let ring = Arc::new(Self { units: empty, slots, copier, state: Mutex::default() });
        if let Some(sharing) = sharing {
            sharing.agree(&descriptions)?;
            match sharing.origin() {
                Origin::Host => ring.share(units, unit_weights, sharing)?,
                Origin::Peers => ring.slice(units, unit_weights, sharing, device)?,
            }
            return Ok(ring);
        }
        // `replace_by_views` frees the original weights of a unit before the next unit is moved.
        let mut held_units = Vec::with_capacity(units.len());
        for (index, (weights, unit)) in unit_weights.into_iter().zip(units).enumerate() {
            let packing = unit.packing(&weights)?;
            let held = ring.hold(&packing, &mut held_units)?;
            held_units.push(held);
            ring.replace_by_views(index, &weights, &packing)?;
        }
        for (unit, held) in ring.units.iter().zip(held_units) {
            // `set` succeeds: each unit is set only once, here or in `share` or `slice`.
            drop(unit.set(Arc::new(held)));
        }
        Ok(ring)
    }

    /// Copy the weights of `packing` to the memory where the ring keeps them; `held` has the units before this one. If
    /// there is no pinned memory for this unit, this unit and all later units get pageable memory, and the last three
    /// tenths of the units in `held` move to pageable memory too.
    fn hold(&self, packing: &Packing, held: &mut [Held]) -> Result<Held> {
        let outcome = Held::new(packing, self.copier.as_ref());
        let (Err(Error::OutOfMemory { .. }), Some(copier)) = (&outcome, &self.copier) else { return outcome };
        if copier.is_staging() {
            // The copier allocates pageable memory already, so there is not even enough of that.
            return outcome;
        }
        // Of the pinned memory that the system gives, this leaves about three tenths for other copies, such as those of
        // batches.
        let pinned = held.len() * 7 / 10;
        held[pinned..].iter_mut().for_each(|unit| unit.unpin(copier));
        // From now on, the copier allocates pageable memory, and its thread copies from there.
        copier.start_staging()?;
        Held::new(packing, Some(copier))
    }

    /// Keep all units in host memory that the processes of the machine share. One process copies its weights to this
    /// memory; the others use these copies.
    fn share(self: &Arc<Self>, units: &[Unit], unit_weights: Vec<Vec<Streamed>>, sharing: &Sharing) -> Result<()> {
        // For each unit and each dtype, the unit's range of bytes in the shared memory.
        let mut ranges: Vec<Vec<(DType, Range<usize>)>> = Vec::with_capacity(units.len());
        // The bytes of the shared memory that are taken so far.
        let mut end = 0;
        for (weights, unit) in unit_weights.iter().zip(units) {
            let packing = unit.packing(weights)?;
            let range = |dtype: DType| {
                let start = end;
                end += packing.count(dtype) * dtype.size_in_bytes();
                (dtype, start..end)
            };
            ranges.push(packing.dtypes().into_iter().map(range).collect());
        }
        // `pages` is the shared memory in the process that writes it, and `None` in the others.
        let fill = |mut pages: Option<&mut Pages>| {
            for (index, (weights, unit)) in unit_weights.into_iter().zip(units).enumerate() {
                let packing = unit.packing(&weights)?;
                for (dtype, range) in &ranges[index] {
                    let Some(pages) = &mut pages else { continue };
                    for (offset, raw) in packing.tensors(*dtype) {
                        let start = range.start + offset * dtype.size_in_bytes();
                        with_bytes(raw, |bytes| pages.write(start, bytes))??;
                    }
                }
                self.replace_by_views(index, &weights, &packing)?;
            }
            Ok(())
        };
        // Every process calls this after the shared memory is written.
        let attach = |pages: Pages| {
            let bytes: Box<dyn Fn(Range<usize>) -> Bytes> = if let Some(copier) = &self.copier {
                let registered = copier.register(pages)?;
                Box::new(move |range| Bytes::HostMemory(copier.part(&registered, range)))
            } else {
                let pages = Arc::new(pages);
                Box::new(move |range| Bytes::Shared(pages.clone(), range))
            };
            for (unit, ranges) in self.units.iter().zip(&ranges) {
                let parts = ranges.iter().map(|(dtype, range)| (*dtype, bytes(range.clone())));
                drop(unit.set(Arc::new(Held(parts.collect()))));
            }
            Ok(())
        };
        sharing.pages(end, fill, attach)
    }

    /// Divide every unit into slices, one on the device of each of the machine's N processes. The slices of all units
    /// on one device are a shard. Process i mod N has loaded the values of the unit with the number i
    /// ([`Unit::new`]), and writes all slices of this unit.
    fn slice(
        self: &Arc<Self>,
        units: &[Unit],
        unit_weights: Vec<Vec<Streamed>>,
        sharing: &Sharing,
        device: &Device,
    ) -> Result<()> {
        // For each unit and each dtype, where the unit's slices are in the shards.
        let mut places: Vec<Vec<(DType, Place)>> = Vec::with_capacity(units.len());
        // The bytes of a shard that are taken so far; all shards have the same layout.
        let mut end = 0;
        for (weights, unit) in unit_weights.iter().zip(units) {
            let packing = unit.packing(weights)?;
            let next_place = |dtype: DType| {
                let place = Place::new(end, packing.count(dtype) * dtype.size_in_bytes(), sharing.processes());
                end = place.end();
                (dtype, place)
            };
            places.push(packing.dtypes().into_iter().map(next_place).collect());
        }
        let fill = |shards: &mut Shards| {
            for (index, (weights, unit)) in unit_weights.into_iter().zip(units).enumerate() {
                let packing = unit.packing(&weights)?;
                let has_values = sharing.keeps(unit.number());
                for (dtype, place) in places[index].iter().filter(|_| has_values) {
                    for (offset, raw) in packing.tensors(*dtype) {
                        let start = offset * dtype.size_in_bytes();
                        with_bytes(raw, |bytes| shards.write(*place, start, bytes))??;
                    }
                }
                self.replace_by_views(index, &weights, &packing)?;
            }
            Ok(())
        };
        let shards = Arc::new(Shards::new(sharing, device, end, fill)?);
        for (unit, places) in self.units.iter().zip(&places) {
            let parts = places.iter().map(|(dtype, place)| (*dtype, Bytes::Sliced(shards.clone(), *place)));
            drop(unit.set(Arc::new(Held(parts.collect()))));
        }
        Ok(())
    }

    /// Replace the weights of a unit by views of the unit's slot, and drop the original weights.
    fn replace_by_views(self: &Arc<Self>, unit: usize, weights: &[Streamed], packing: &Packing) -> Result<()> {
        let slot = &self.slots[unit % SLOTS];
        let mut views = Vec::with_capacity(weights.len());
        for weight in weights {
            // `gathered` is the weight on the CPU. `map` applies the closure to each of its tensors: to its values or,
            // if it is quantized, to its codes and scales.
            views.push(weight.gathered()?.map(|raw| {
                let part = slot.iter().find(|part| part.dtype() == raw.dtype());
                let (Some(offset), Some(part)) = (packing.offset_of(raw), part) else {
                    return Err(Error::argument(OP, "a streamed weight was replaced before the model was complete"));
                };
                Ok(part.narrow(0, offset, raw.elem_count())?.reshape(raw.shape())?)
            })?);
        }
        for (weight, view) in weights.iter().zip(views) {
            weight.move_to_ring(self, unit, view);
        }
        Ok(())
    }

    /// Make the device wait until `unit` is in its slot, and start to copy the unit that is needed next: `unit + 1`, or
    /// `unit - 1` while a checkpoint recomputes. After this call only the weights of `unit` can be used.
    ///
    /// # Errors
    /// [`Error::Argument`] if the model is not complete yet, [`Error::Device`] if the driver reports an error.
    pub fn enter(&self, unit: usize) -> Result<()> {
        self.enter_in_direction(unit, if checkpoint::is_recomputing() { Direction::Down } else { Direction::Up })
    }

    /// `result`, with a node on the tape that [enters](Self::enter) `unit` in the backward pass. The backward pass
    /// reaches this node before the operations that computed `result`.
    #[must_use]
    pub fn reenter(self: &Arc<Self>, unit: usize, result: Tensor) -> Tensor {
        let Some(node) = result.node.clone() else { return result };
        let backward = Reenter { ring: self.clone(), unit };
        let node = Node::op_node(OP, Inputs::from_iter([Some(node)]), Box::new(backward));
        Tensor { node: Some(Arc::new(node)), ..result }
    }

    /// [`enter`](Self::enter) with a given direction.
    fn enter_in_direction(&self, unit: usize, direction: Direction) -> Result<()> {
        let mut state = self.state();
        if state.current == Some(unit) {
            return Ok(());
        }
        // If one of the calls below fails, no unit is current.
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

    /// Copy a unit to its slot, unless the unit is there already. The copy starts after all work that is queued on the
    /// device at this call, which may still use the unit that was in the slot.
    fn bring(&self, state: &mut State, unit: usize) -> Result<()> {
        let slot = unit % SLOTS;
        if state.slots[slot] == Some(unit) {
            return Ok(());
        }
        state.slots[slot] = None;
        let Some(held) = self.units[unit].get() else {
            return Err(Error::argument(OP, "a streamed block is used before the model is complete"));
        };
        let mut copies = Vec::with_capacity(held.0.len());
        for (dtype, bytes) in &held.0 {
            // A slot has a tensor for each dtype of its units, so there always is one.
            if let Some(to) = self.slots[slot].iter().find(|part| part.dtype() == *dtype) {
                bytes.copy_to_slot(to, &mut copies)?;
            }
        }
        if let Some(copier) = &self.copier {
            copier.copy(slot, &copies, held)?;
        }
        state.slots[slot] = Some(unit);
        Ok(())
    }

    /// Whether `unit` was entered last, so that its weights can be used.
    pub(super) fn is_current(&self, unit: usize) -> bool {
        self.state().current == Some(unit)
    }

    /// The values that `view`, a weight's view of its slot, has while `unit` is in the slot. They are copied to the CPU
    /// from the memory where the ring keeps the unit, so the slot need not have the unit now.
    pub(super) fn read(&self, unit: usize, view: &Raw) -> Result<Raw> {
        let held = self.units[unit].get().and_then(|held| held.0.iter().find(|(dtype, _)| *dtype == view.dtype()));
        let Some((_, bytes)) = held else {
            return Err(Error::argument(OP, "a streamed block is used before the model is complete"));
        };
        Ok(bytes.read(view)?.reshape(view.shape())?)
    }

    /// Bytes of the slots on the device.
    pub fn slot_bytes(&self) -> usize {
        self.slots.iter().flatten().map(|part| part.elem_count() * part.dtype().size_in_bytes()).sum()
    }

    /// Bytes of all units outside of the slots: in the memory of the host, or in the slices on all devices of the
    /// machine.
    pub fn unit_bytes(&self) -> usize {
        self.units.iter().filter_map(OnceLock::get).flat_map(|held| &held.0).map(|(_, bytes)| bytes.len()).sum()
    }

    /// The state of the slots. After a graph was recorded or replayed, the contents of the slots are not known, and the
    /// state is that of empty slots.
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let epoch = self.copier.as_ref().map_or(0, Copier::epoch);
        if state.epoch != epoch {
            *state = State { epoch, ..State::default() };
        }
        state
    }
}

/// In the backward pass, enters `unit`; the gradient of the input is that of the output.
struct Reenter {
    ring: Arc<Ring>,
    unit: usize,
}

impl Backward for Reenter {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        self.ring.enter_in_direction(self.unit, Direction::Down)?;
        context.add(0, context.grad().clone())
    }
}
