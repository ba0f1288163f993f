//! An optimizer's steps on a CUDA device. States, hyper-parameters and step counters are in device memory. One launch
//! updates all variables that have the same kinds of states and the same dtypes.

mod access;
mod gradient;
mod master;
mod pieces;
mod step;
mod transfer;
mod whole;

use std::sync::Arc;

use smallvec::SmallVec;
use trainable_candle_core::capture::{Follower, HostState, before_replay};
use trainable_candle_core::compute::zeros;
use trainable_candle_core::flat::forget_grads;
use trainable_candle_core::{DType, Device, Error, Raw, Result, Tensor, Var};

use super::quant::BLOCK_SIZE;
use super::rule::{Kernels, Rule, Settings, StateKind, StateSpec};
use super::slots::Slots;
use super::state::{Group, Parameter, StatePlace};
use master::DeviceMaster;
use step::{Groups, Known, Member, STATE_BLOCK, Table};
use transfer::{copy_state_into, host_zeros, overwrite, state_buffer, to_device};
use whole::{Call, Extent, WholeTable};

pub(super) use gradient::{Clip, LossScale, scale_gradients};

const _: () = assert!(STATE_BLOCK == BLOCK_SIZE);

/// The largest number of cached tables. A table describes the variables that one launch updates.
const MAX_TABLES: usize = 32;

type Specs = SmallVec<[StateSpec; 4]>;

/// The device state of an optimizer.
pub(super) struct OnDevice {
    /// The settings, coefficients and step counters of all slots: a slot is a set of variables that share them. There
    /// is room for as many slots as the optimizer has variables.
    settings: Groups,
    /// Which variables share settings and a step counter. A captured step is valid only with the slots that it was
    /// captured with.
    slots: HostState<Arc<Slots>>,
    /// The places of the states, in the order of the optimizer's variables.
    places: Vec<Place>,
    /// The states. There is one layout for each combination of kinds of states.
    layouts: Vec<Layout>,
    /// The cached tables, the oldest first, each with the index of its layout.
    tables: Vec<(usize, Arc<LaunchTable>)>,
    /// f64 numbers that the steps of all variables share, if the optimizer has any.
    shared: Option<Raw>,
    /// The seed of stochastic rounding.
    seed: Option<u64>,
}

/// The table of one launch. Its `Known` has the variables that the table was made for.
enum LaunchTable {
    /// Of an elementwise update.
    Pieces(Table),
    /// Of an update that needs whole variables.
    Whole(WholeTable),
}

impl LaunchTable {
    const fn known(&self) -> &Known {
        match self {
            Self::Pieces(table) => table.known(),
            Self::Whole(table) => table.known(),
        }
    }
}

/// Where the states of a variable are.
struct Place {
    /// The index of the layout in [`OnDevice::layouts`].
    layout: usize,
    /// The first block of each state of the variable in the layout's buffers.
    blocks: SmallVec<[u32; 4]>,
    /// The number of f32 that the variable's update needs as scratch memory; 0 if the update is elementwise.
    scratch: usize,
    master: Option<DeviceMaster>,
}

/// The states of all variables with the same kinds of states.
struct Layout {
    specs: Specs,
    /// Whether the variables are bf16 and rounded stochastically. Their float states are then also bf16, otherwise f32.
    rounded: bool,
    /// One buffer for each state of `specs`.
    buffers: Vec<Raw>,
}

impl Layout {
    /// Whether the states are 8-bit codes and their scales.
    fn has_codes(&self) -> bool {
        self.specs.iter().any(|spec| spec.kind == StateKind::Codes)
    }

    /// Returns the dtype of the buffer of a state of `kind`.
    fn dtype(&self, kind: StateKind) -> DType {
        match kind {
            StateKind::Codes => DType::U8,
            StateKind::Scales => DType::F32,
            _ if self.rounded => DType::BF16,
            _ => DType::F32,
        }
    }
}

/// Returns the number of entries that a state of `kind` has for `blocks` blocks of [`STATE_BLOCK`] elements.
const fn entries(kind: StateKind, blocks: usize) -> usize {
    if matches!(kind, StateKind::Scales) { blocks } else { blocks * STATE_BLOCK }
}

/// Returns the number of blocks that a state takes for a variable of shape `dims`. States with a number per element, a
/// code per element or a scale per block take the same number of blocks.
fn blocks(kind: StateKind, dims: &[usize]) -> usize {
    let elements = match kind {
        StateKind::Float | StateKind::Codes | StateKind::Scales => dims.iter().product(),
        StateKind::Rows | StateKind::Columns | StateKind::Every(_) => kind.dims(dims).iter().product::<usize>(),
    };
    elements.div_ceil(STATE_BLOCK)
}

fn kernels<R: Rule>() -> Result<Kernels<R::Config>> {
    R::KERNELS.ok_or_else(|| no_kernels(R::NAME))
}

/// Converts the hyper-parameters `config` of a group to the settings that kernels read.
fn settings<R: Rule>(config: &R::Config, step: u64, seed: Option<u64>) -> Result<Settings> {
    Ok(Settings { step, seed: seed.unwrap_or_default(), ..(kernels::<R>()?.settings)(config) })
}

fn no_kernels(op: &'static str) -> Error {
    Error::device(op, "there is no CUDA kernel for this optimizer")
}

impl OnDevice {
    /// Moves the states of `groups` to the device of their variables, or to host memory that the device reads.
    /// Variables without states get zeros. `shared` are the numbers that the steps of all variables share, `seed` is
    /// the seed of stochastic rounding.
    pub(super) fn new<R: Rule>(
        groups: &mut [Group<R::Config>],
        state_place: StatePlace,
        (shared, seed): (&[f64], Option<u64>),
    ) -> Result<Self> {
        let count: usize = groups.iter().map(|group| group.parameters.len()).sum();
        let first_parameter = groups.first().and_then(|group| group.parameters.first());
        let device =
            first_parameter.ok_or_else(|| Error::argument(R::NAME, "found no variables"))?.var.device().clone();
        let shared = if shared.is_empty() { None } else { Some(Raw::from_slice(shared, shared.len(), &device)?) };
        let mut on_device = Self {
            settings: Groups::new(R::NAME, &device, count)?,
            slots: HostState::new("the sets of variables an optimizer updates", Arc::new(Slots::new(groups))),
            places: Vec::with_capacity(count),
            layouts: Vec::new(),
            tables: Vec::new(),
            shared,
            seed,
        };
        // For each layout and each of its states: the number of blocks of the variables so far.
        let mut ends: Vec<SmallVec<[usize; 4]>> = Vec::new();
        for group in groups.iter() {
            for parameter in &group.parameters {
                let dims = parameter.var.dims();
                let specs = R::states(&group.config, dims);
                let rounded = parameter.rounded.is_some();
                let has_same_states = |layout: &Layout| layout.specs == specs && layout.rounded == rounded;
                let layout = on_device.layouts.iter().position(has_same_states).unwrap_or_else(|| {
                    ends.push(specs.iter().map(|_| 0).collect());
                    on_device.layouts.push(Layout { specs, rounded, buffers: Vec::new() });
                    on_device.layouts.len() - 1
                });
                let mut first_blocks = SmallVec::new();
                for (spec, end) in on_device.layouts[layout].specs.iter().zip(&mut ends[layout]) {
                    first_blocks.push(u32::try_from(*end).map_err(|_| {
                        Error::argument(R::NAME, "the variables have more elements than kernels can count")
                    })?);
                    *end += blocks(spec.kind, dims);
                }
                let scratch = if R::ELEMENTWISE { 0 } else { R::scratch(dims) };
                on_device.places.push(Place { layout, blocks: first_blocks, scratch, master: None });
            }
        }
        for (layout, ends) in on_device.layouts.iter_mut().zip(ends) {
            for (spec, end) in layout.specs.iter().zip(ends) {
                let (length, dtype) = (entries(spec.kind, end), layout.dtype(spec.kind));
                layout.buffers.push(state_buffer(R::NAME, state_place, length, dtype, &device)?);
            }
        }
        on_device.make_masters(groups, &device)?;
        on_device.take::<R>(groups, seed)?;
        Ok(on_device)
    }

    /// Takes over the states, steps and settings of `groups` and the seed, and drops the states on the host. Device
    /// addresses do not change, so captured steps continue from the new values.
    pub(super) fn take<R: Rule>(&mut self, groups: &mut [Group<R::Config>], seed: Option<u64>) -> Result<()> {
        self.seed = seed;
        let slots = self.slots.get();
        let (slots, steps) = match slots.steps(groups) {
            Some(steps) => (slots, steps),
            None => {
                let new = Slots::new(groups); // one number of steps per slot, so `steps` is not None
                let steps = new.steps(groups).unwrap_or_default();
                (Arc::new(new), steps)
            }
        };
        for (slot, (&index, step)) in slots.group_of.iter().zip(steps).enumerate() {
            // `None`: the slot's counter is set to `step`. `Some(other)` would copy the counter of the slot `other`.
            self.settings.configure(R::NAME, slot, settings::<R>(&groups[index].config, step, seed)?, None)?;
        }
        self.slots.set(slots)?;
        self.write_states(groups)?;
        for (parameter, place) in parameters(groups).zip(&self.places) {
            if let Some(master) = &place.master {
                master.take(parameter)?;
            }
        }
        for parameter in groups.iter_mut().flat_map(|group| &mut group.parameters) {
            parameter.states.clear();
            parameter.master = None;
        }
        Ok(())
    }

    /// Writes the states of the variables to the device, with zeros for variables without states.
    fn write_states<C>(&self, groups: &[Group<C>]) -> Result<()> {
        for (index, layout) in self.layouts.iter().enumerate() {
            let with_states: Vec<(&Place, &Parameter)> = parameters(groups)
                .zip(&self.places)
                .filter(|(parameter, place)| place.layout == index && !parameter.states.is_empty())
                .map(|(parameter, place)| (place, parameter))
                .collect();
            for (number, (spec, buffer)) in layout.specs.iter().zip(&layout.buffers).enumerate() {
                if with_states.is_empty() {
                    overwrite(buffer, |part| zeros(&[part.len()], buffer.dtype(), buffer.device()))?;
                    continue;
                }
                let mut host = host_zeros(buffer.dtype(), buffer.elem_count());
                for (place, parameter) in &with_states {
                    let start = entries(spec.kind, place.blocks[number] as usize);
                    copy_state_into(&mut host, &parameter.states[number].data, start);
                }
                overwrite(buffer, |part| to_device(&host, part, buffer.device()))?;
            }
        }
        Ok(())
    }

    /// Makes one vector for the f32 master values of all f16 variables, and of the bf16 variables that are not rounded
    /// stochastically. [`take`](Self::take) sets the values.
    fn make_masters<C>(&mut self, groups: &[Group<C>], device: &Device) -> Result<()> {
        let total: usize = parameters(groups).filter(|p| p.has_master()).map(|p| p.var.elem_count()).sum();
        if total == 0 {
            return Ok(());
        }
        let values = zeros(&[total], DType::F32, device)?;
        let mut start = 0;
        for (parameter, place) in parameters(groups).zip(&mut self.places).filter(|(p, _)| p.has_master()) {
            let part = values.narrow(0, start, parameter.var.elem_count())?.reshape(parameter.var.shape())?;
            start += parameter.var.elem_count();
            place.master = Some(DeviceMaster { values: part, follower: Follower::default() });
        }
        Ok(())
    }

    /// Tells whether group `index` would have the same states with the hyper-parameters `config`.
    pub(super) fn states_are<R: Rule>(&self, groups: &[Group<R::Config>], index: usize, config: &R::Config) -> bool {
        let first_variable: usize = groups[..index].iter().map(|group| group.parameters.len()).sum();
        let places = groups[index].parameters.iter().zip(&self.places[first_variable..]);
        places.into_iter().all(|(p, place)| self.layouts[place.layout].specs == R::states(config, p.var.dims()))
    }

    /// Sets the hyper-parameters of the optimizer's group `index`, for the steps that are queued after this call. Step
    /// counters do not change.
    pub(super) fn configure<R: Rule>(&self, index: usize, config: &R::Config) -> Result<()> {
        // The step number 0 is not used: each slot keeps its counter (`Some(slot)`).
        let (settings, slots) = (settings::<R>(config, 0, self.seed)?, self.slots.get());
        let group_of = &slots.group_of;
        let mut of_group = (0..group_of.len()).filter(|&slot| group_of[slot] == index);
        of_group.try_for_each(|slot| self.settings.configure(R::NAME, slot, settings, Some(slot)))
    }

    /// Queues a step of the variables that are `wanted` and have a gradient. The step divides gradients by
    /// `loss_scale`, and changes neither variables nor states if `norm` is non-finite. With `zero`, it also clears the
    /// gradients of these variables. The host waits for `norm` only if `norm` is on another device than the variables.
    pub(super) fn step<R: Rule>(
        &mut self,
        groups: &[Group<R::Config>],
        wanted: impl Fn(&Var) -> bool,
        (norm, loss_scale): (Option<&Tensor>, Option<&LossScale>),
        zero: bool,
    ) -> Result<()> {
        let all: Vec<&Parameter> = parameters(groups).collect();
        let vars: Vec<&Var> = all.iter().map(|parameter| &parameter.var).collect();
        let with_grad = |(index, &var): (usize, &&Var)| {
            let grad = var.grad_storage().filter(|_| wanted(var) && var.elem_count() > 0)?;
            Some((index, grad))
        };
        let found: Vec<(usize, Raw)> = vars.iter().enumerate().filter_map(with_grad).collect();
        if found.is_empty() {
            return Ok(());
        }
        self.split_slots::<R>(groups, &vars, &found)?;
        // `read`, unlike `get`, makes a captured step depend on the slots.
        let slots = self.slots.read();
        let kernels = kernels::<R>()?;
        let device = vars[0].device();
        let norm = match norm {
            Some(norm) if norm.device().same_device(device) => {
                Some(Tensor::to_dtype(&norm.detach(), DType::F64)?.raw().clone())
            }
            Some(norm) if !norm.item()?.is_finite() => return Ok(()),
            _ => None,
        };
        let slot_ranges = slots.runs(found.iter().map(|(index, _)| *index));
        let mut launches = Vec::new();
        for launch in self.launches(&all, &slots, found)? {
            launches.push((launch.layout, self.table::<R>(&vars, &launch)?, launch.variables));
        }
        for slot_range in slot_ranges {
            self.settings.prepare(R::NAME, kernels.prepare, slot_range, norm.as_ref(), loss_scale)?;
        }
        self.launch::<R>(&kernels, &launches, zero)?;
        // The kernels change the values; the host marks the variables as changed.
        for (_, _, variables) in launches {
            for index in variables {
                let var = vars[index];
                match &self.places[index].master {
                    Some(master) => {
                        var.update_in_place(|_| Ok(()))?;
                        var.set_followed_by(&master.follower);
                    }
                    None if half_precision_copy(all[index]).is_some() => var.changed_with_copy()?,
                    None => var.update_in_place(|_| Ok(()))?,
                }
            }
        }
        // The kernels have zeroed the gradients; this marks them as cleared.
        if zero {
            let cleared: Vec<Var> = vars.into_iter().filter(|var| wanted(var)).cloned().collect();
            forget_grads(&cleared);
        }
        Ok(())
    }

    /// Moves the variables that take part in a step to a new slot, with its own counter, if the other variables of
    /// their slot take no part: variables that have taken different numbers of steps must not share a counter.
    fn split_slots<R: Rule>(
        &mut self,
        groups: &[Group<R::Config>],
        vars: &[&Var],
        found: &[(usize, Raw)],
    ) -> Result<()> {
        let old = self.slots.get();
        let Some((new, split)) = old.split(vars, found.iter().map(|(index, _)| *index)) else { return Ok(()) };
        // In a captured function `set` returns an error, because captured functions cannot change slots. Therefore this
        // function queues no work before `set`.
        self.slots.set(Arc::new(new))?;
        for (new_slot, slot) in (old.group_of.len()..).zip(split) {
            // The step number 0 is not used: the new slot gets the counter of the old one (`Some(slot)`).
            let settings = settings::<R>(&groups[old.group_of[slot]].config, 0, self.seed)?;
            self.settings.configure(R::NAME, new_slot, settings, Some(slot))?;
        }
        Ok(())
    }

    /// Makes captured steps stale, so that no replay uses this device state any more. The caller then drops it.
    ///
    /// # Errors
    /// [`Error::Device`] within a captured function.
    pub(super) fn retire(&self) -> Result<()> {
        self.slots.set(Arc::default())
    }

    /// Divides the variables of a step, given as indices and gradients, into launches. Variables with the same kinds of
    /// states and the same dtypes share a launch.
    fn launches(&self, all: &[&Parameter], slots: &Slots, found: Vec<(usize, Raw)>) -> Result<Vec<Launch>> {
        let mut launches: Vec<Launch> = Vec::new();
        for (index, grads) in found {
            let (var, place) = (&all[index].var, &self.places[index]);
            let (params, copy) = match &place.master {
                Some(master) => {
                    master.refresh(var)?; // in case the variable was set outside the optimizer
                    let (same_master, same_var) = (master.clone(), var.clone());
                    before_replay(move || same_master.refresh(&same_var)); // the same in each replay
                    (master.values.clone(), Some(var.raw().clone()))
                }
                None => (var.raw().clone(), half_precision_copy(all[index])),
            };
            // Tables call a slot a group.
            let group = u16::try_from(slots.of[index]).map_err(|_| {
                Error::argument(
                    "step",
                    "found more than 65536 sets of variables that differ in group or number of steps",
                )
            })?;
            // f32 parameters without a copy share the launch of those with a bf16 copy.
            let key = (place.layout, grads.dtype(), copy.as_ref().map_or(DType::BF16, Raw::dtype));
            // In an elementwise update, all states of a variable begin at the same block. Other updates read the blocks
            // from `Extent`.
            let state = place.blocks.first().copied().unwrap_or(0);
            // If the variable is rounded stochastically: its first block among those of all variables.
            let first_block = all[index].rounded.map(|element| u32::try_from(element / BLOCK_SIZE as u64));
            let first = first_block.transpose().map_err(|_| {
                Error::argument("step", "the variables have more elements than stochastic rounding can count")
            })?;
            let member = Member { params, grads, copy, state, group, first };
            let number = launches.iter().position(|launch| launch.key == key).unwrap_or_else(|| {
                launches.push(Launch { key, layout: place.layout, members: Vec::new(), variables: Vec::new() });
                launches.len() - 1
            });
            launches[number].members.push(member);
            launches[number].variables.push(index);
        }
        Ok(launches)
    }

    /// Queues the kernels of a step: each kernel for all launches, before the next kernel. With `zero`, the last kernel
    /// also zeroes the gradients. Elementwise updates ([`LaunchTable::Pieces`]) have only the last kernel.
    fn launch<R: Rule>(
        &self,
        kernels: &Kernels<R::Config>,
        launches: &[(usize, Arc<LaunchTable>, Vec<usize>)],
        zero: bool,
    ) -> Result<()> {
        // Each entry is (kernel, whether one block of threads processes all variables, whether it is the last kernel).
        let earlier = kernels.before.iter().map(|&(kernel, is_single)| (kernel, is_single, false));
        for (kernel, is_single, is_step) in earlier.chain([(kernels.step, false, true)]) {
            for (number, (layout, table, _)) in launches.iter().enumerate() {
                let layout = &self.layouts[*layout];
                match &**table {
                    LaunchTable::Pieces(table) => {
                        let kernel = if layout.has_codes() { kernels.step_8bit } else { Some(kernel) };
                        let kernel = kernel.ok_or_else(|| no_kernels(R::NAME))?;
                        pieces::step(R::NAME, kernel, &layout.buffers, table, &self.settings, zero)?;
                    }
                    LaunchTable::Whole(table) => {
                        let (is_first, is_last) = (number == 0, number + 1 == launches.len());
                        let call = Call { kernel, is_single, zero_grads: zero && is_step, is_first, is_last };
                        whole::launch(R::NAME, call, &layout.buffers, table, &self.settings, self.shared.as_ref())?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the table of a launch, from the cache or made now. A new table replaces the oldest one of a full cache.
    fn table<R: Rule>(&mut self, vars: &[&Var], launch: &Launch) -> Result<Arc<LaunchTable>> {
        for (layout, table) in &self.tables {
            if *layout == launch.layout && table.known().is_of(R::NAME, &launch.members)? {
                return Ok(table.clone());
            }
        }
        let known = Known::new(R::NAME, launch.members.clone())?;
        let table = if R::ELEMENTWISE {
            LaunchTable::Pieces(Table::new(R::NAME, known, self.layouts[launch.layout].has_codes())?)
        } else {
            let extent = |&index: &usize| {
                let place = &self.places[index];
                Extent { dims: vars[index].dims().to_vec(), states: place.blocks.to_vec(), scratch: place.scratch }
            };
            let extents: Vec<Extent> = launch.variables.iter().map(extent).collect();
            LaunchTable::Whole(WholeTable::new(R::NAME, known, &extents)?)
        };
        let table = Arc::new(table);
        if self.tables.len() == MAX_TABLES {
            self.tables.remove(0);
        }
        self.tables.push((launch.layout, table.clone()));
        Ok(table)
    }
}

/// The variables that one launch updates.
struct Launch {
    /// The index of the layout, and the dtypes of gradients and copies; bf16 if there are no copies.
    key: (usize, DType, DType),
    /// The index of the layout.
    layout: usize,
    members: Vec<Member>,
    /// The index of each member's variable.
    variables: Vec<usize>,
}

/// Returns the f16 or bf16 copy of an f32 variable, if the variable has one. A step's launch writes this copy.
/// Variables that are rounded stochastically need no copy.
fn half_precision_copy(parameter: &Parameter) -> Option<Raw> {
    let copy = parameter.var.copy_storage().filter(|copy| matches!(copy.dtype(), DType::F16 | DType::BF16));
    copy.filter(|_| parameter.rounded.is_none())
}

/// Lists the parameters of all groups, in the order of the optimizer's variables.
fn parameters<C>(groups: &[Group<C>]) -> impl Iterator<Item = &Parameter> {
    groups.iter().flat_map(|group| &group.parameters)
}
