//! Steps of optimizers: hyper-parameters and counters in device memory, one launch for any number of variables.
//!
//! What a step needs from the host are launches alone, with the same arguments each time: it can be captured.

use candle_core::{DType, Device};
use trainable_candle_cuda::modules::{OPTIM, OPTIM_8BIT};

use super::gpu::Gpu;
use super::gradient::LossScale;
use super::launch::{Address, Shape, address, count32, empty, launch, optional, same_device};
use crate::raw::to_vec;
use crate::{Error, Raw, Result, capture};

/// Elements that share the scale of 8-bit states, and to whose multiples the states of a variable are aligned.
pub const STATE_BLOCK: usize = 256;

/// The most elements that one block of threads updates.
const PIECE: usize = 4 * STATE_BLOCK;

/// The hyper-parameters of a group and the steps that it has taken, as kernels read them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Settings {
    /// Learning rate.
    pub lr: f64,
    /// SGD: momentum.
    pub beta1: f64,
    /// SGD: dampening.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decay of the parameters.
    pub weight_decay: f64,
    /// Steps taken.
    pub step: u64,
    /// 1 to ascend.
    pub maximize: u32,
    /// 1 for Nesterov's momentum.
    pub nesterov: u32,
}

/// How coefficients follow from settings.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Adam.
    Adam = 0,
    /// Adam with decoupled weight decay.
    AdamW = 1,
    /// Both with 8-bit states.
    Adam8bit = 2,
    /// Lion, also with 8-bit states.
    Lion = 3,
    /// Gradient descent.
    Sgd = 4,
}

/// The groups of an optimizer in device memory.
pub struct Groups {
    settings: Raw,
    coefficients: Raw,
}

impl Groups {
    /// Room for `capacity` groups.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the device is full.
    pub fn new(op: &'static str, device: &Device, capacity: usize) -> Result<Self> {
        /// Bytes of a group's coefficients.
        const COEFFICIENTS: usize = 48;
        let gpu = Gpu::of_device(op, device)?;
        let room = |bytes: usize| empty(op, gpu, &[bytes * capacity], DType::U8);
        Ok(Self { settings: room(size_of::<Settings>())?, coefficients: room(COEFFICIENTS)? })
    }

    /// Sets a group's hyper-parameters, and its steps to those of the group `like` or to those in `settings`. Takes effect between the
    /// steps before and after; nothing waits.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses.
    pub fn configure(&self, op: &'static str, group: usize, settings: Settings, like: Option<usize>) -> Result<()> {
        let gpu = Gpu::of(op, &self.settings)?;
        let function = gpu.function(&OPTIM, "optim_configure", &[])?;
        let like = like.map_or(Ok(u32::MAX), |like| self.index(op, like))?;
        let (to, group) = (address(op, &self.settings)?, self.index(op, group)?);
        // SAFETY: the kernel takes the settings, two groups that exist, and a group's settings by value.
        unsafe { launch!(op, gpu, function, Shape::linear(op, 1, 1)?, to, group, like, settings) }
    }

    /// The number of a group that there is room for.
    fn index(&self, op: &'static str, group: usize) -> Result<u32> {
        if group < self.settings.elem_count() / size_of::<Settings>() {
            return count32(op, group);
        }
        Err(Error::argument(op, format!("there is no room for group {group}")))
    }

    /// Begins a step of the groups `groups`: counts it and computes their coefficients. Gradients are to be divided by
    /// `loss_scale`; if `norm` (f64) is not finite, the step counts nothing and changes nothing.
    ///
    /// # Errors
    /// [`Error::Device`] if `norm` or `loss_scale` is on another device.
    pub fn prepare(
        &self,
        op: &'static str,
        family: Family,
        groups: std::ops::Range<usize>,
        norm: Option<&Raw>,
        loss_scale: Option<&LossScale>,
    ) -> Result<()> {
        if groups.is_empty() {
            return Ok(());
        }
        let (first, last) = (self.index(op, groups.start)?, self.index(op, groups.end - 1)?);
        let scale = loss_scale.map(LossScale::raw);
        for tensor in [norm, scale].into_iter().flatten() {
            same_device(op, &self.settings, &[tensor])?;
        }
        let gpu = Gpu::of(op, &self.settings)?;
        let function = gpu.function(&OPTIM, "optim_prepare", &[])?;
        let settings = address(op, &self.settings)? + u64::from(first) * size_of::<Settings>() as u64;
        let coefficients = self.coefficients_at(op, groups.start)?;
        let (family, count) = (family as u32, last - first + 1);
        let (norm, scale) = (optional(op, norm)?, optional(op, scale)?);
        let shape = Shape::linear(op, count.div_ceil(32) as usize, 32)?;
        // SAFETY: the kernel takes the settings of that many groups, the norm and the loss scale or null, and room for coefficients.
        unsafe { launch!(op, gpu, function, shape, family, settings, count, norm, scale, coefficients) }
    }

    fn coefficients_at(&self, op: &'static str, group: usize) -> Result<Address> {
        let size = self.coefficients.elem_count() / (self.settings.elem_count() / size_of::<Settings>()).max(1);
        Ok(address(op, &self.coefficients)? + (group * size) as Address)
    }

    /// The steps that each group has taken; waits for the device. Groups that were never configured have any number.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let bytes = to_vec::<u8>(&self.settings)?;
        let step = |settings: &[u8]| {
            let mut step = [0; 8];
            let start = std::mem::offset_of!(Settings, step);
            step.copy_from_slice(&settings[start..start + 8]);
            u64::from_le_bytes(step)
        };
        Ok(bytes.chunks_exact(size_of::<Settings>()).map(step).collect())
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.settings.elem_count() + self.coefficients.elem_count()
    }
}

/// One variable's part in a step. All tensors are contiguous, on one device, and of one size.
#[derive(Clone, Debug)]
pub struct Member {
    /// f32.
    pub params: Raw,
    /// f32, or the dtype of the copy.
    pub grads: Raw,
    /// f16 or bf16; takes the new parameters.
    pub copy: Option<Raw>,
    /// Where its states begin, in units of [`STATE_BLOCK`] elements.
    pub state: u32,
    /// Its group.
    pub group: u16,
}

/// Addresses in bytes, and the size of a gradient, of one member.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    addresses: [Address; 3],
    len: usize,
    state: u32,
    group: u16,
}

/// The work of one launch: pieces of variables, in device memory.
pub struct Table {
    places: Vec<Place>,
    pieces: Raw,
    segments: Raw,
    count: usize,
    dtypes: &'static [&'static str],
    /// The first group, which the others are counted from.
    first_group: u16,
    /// What the addresses are those of.
    _members: Vec<Member>,
}

impl Table {
    /// The pieces of `members`, which have at least one element together. Their gradients have one dtype, and so have their copies.
    ///
    /// # Errors
    /// [`Error::DType`] if there is no kernel for the dtypes, [`Error::Argument`] while a graph is captured: tables are
    /// made by a step before it.
    pub fn new(op: &'static str, members: Vec<Member>, has_8bit_states: bool) -> Result<Self> {
        let Some(first) = members.first() else { return Err(Error::argument(op, "found no variables")) };
        let gpu = Gpu::of(op, &first.params)?;
        if capture::is_capturing() {
            let message = "this step updates other variables than that of the first call; a captured function must do the same in \
                           each call";
            return Err(Error::argument(op, message));
        }
        let dtypes = suffixes(op, &members)?;
        let places = members.iter().map(|member| place(op, member)).collect::<Result<Vec<_>>>()?;
        let first_group = members.iter().map(|member| member.group).min().unwrap_or(0);
        let grad_size = first.grads.dtype().size_in_bytes();
        let longest = if has_8bit_states { STATE_BLOCK } else { PIECE };
        let work = Work::cut(&places, [4, grad_size, 2], longest, first_group);
        let device = Device::Cuda(gpu.device().clone());
        let (words, addresses) = (work.pieces.concat(), work.segments.concat());
        let (count, len) = (work.pieces.len(), words.len());
        let segments = Raw::from_vec(addresses, 3 * work.segments.len(), &device)?;
        let pieces = Raw::from_vec(words, len, &device)?;
        Ok(Self { places, pieces, segments, count, dtypes, first_group, _members: members })
    }

    /// Whether the table is of these members.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn is_of(&self, op: &'static str, members: &[Member]) -> Result<bool> {
        if members.len() != self.places.len() || suffixes(op, members)? != self.dtypes {
            return Ok(false);
        }
        for (member, known) in members.iter().zip(&self.places) {
            if place(op, member)? != *known {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The dtypes of gradients and copies at the end of a kernel's name.
fn suffixes(op: &'static str, members: &[Member]) -> Result<&'static [&'static str]> {
    let grads = members.first().map_or(DType::F32, |member| member.grads.dtype());
    let copy = members.iter().find_map(|member| member.copy.as_ref().map(Raw::dtype));
    let same = members.iter().all(|member| {
        member.params.dtype() == DType::F32
            && member.grads.dtype() == grads
            && member.copy.as_ref().is_none_or(|found| Some(found.dtype()) == copy)
    });
    match (grads, copy) {
        (DType::F32, None | Some(DType::BF16)) if same => Ok(&["f32", "bf16"]),
        (DType::F32, Some(DType::F16)) if same => Ok(&["f32", "f16"]),
        (DType::BF16, Some(DType::BF16)) if same => Ok(&["bf16", "bf16"]),
        (DType::F16, Some(DType::F16)) if same => Ok(&["f16", "f16"]),
        _ => Err(Error::dtype(op, "there is no kernel for parameters, gradients and copies of these dtypes")),
    }
}

fn place(op: &'static str, member: &Member) -> Result<Place> {
    let tensors = [Some(&member.params), Some(&member.grads), member.copy.as_ref()];
    let len = member.params.elem_count();
    let fits = |tensor: &Raw| tensor.is_contiguous() && tensor.elem_count() == len;
    if !tensors.iter().flatten().all(|tensor| fits(tensor)) {
        return Err(Error::argument(op, "a gradient or a copy differs from its variable"));
    }
    same_device(op, &member.params, &[&member.grads])?;
    let [params, grads, copy] = tensors.map(|tensor| optional(op, tensor));
    Ok(Place { addresses: [params?, grads?, copy?], len, state: member.state, group: member.group })
}

/// Pieces and segments as kernels read them.
struct Work {
    /// Start, segment, state, length and group of each.
    pieces: Vec<[u32; 4]>,
    /// Addresses of parameters, gradients and copies.
    segments: Vec<[i64; 3]>,
}

impl Work {
    /// Variables that lie behind one another in all three vectors share a segment.
    fn cut(places: &[Place], sizes: [usize; 3], longest: usize, first_group: u16) -> Self {
        let mut work = Self { pieces: Vec::new(), segments: Vec::new() };
        for place in places {
            let mut done = 0;
            while done < place.len {
                let length = longest.min(place.len - done);
                let at = |i: usize| match place.addresses[i] {
                    0 => 0,
                    address => address + (done * sizes[i]) as Address,
                };
                let addresses = [at(0), at(1), at(2)];
                let (segment, start) = work.locate(addresses, sizes);
                let state = place.state + (done / STATE_BLOCK) as u32;
                let group = u32::from(place.group - first_group);
                work.pieces.push([start, segment, state, length as u32 | group << 16]);
                done += length;
            }
        }
        work
    }

    /// The segment that addresses lie in and how many elements behind its beginning; a new one if they do not lie in the last.
    fn locate(&mut self, addresses: [Address; 3], sizes: [usize; 3]) -> (u32, u32) {
        if let Some(last) = self.segments.last() {
            let base = last.map(|address| address as Address);
            let elements = addresses[0].checked_sub(base[0]).map(|bytes| bytes / sizes[0] as Address);
            if let Some(start) = elements.and_then(|elements| u32::try_from(elements).ok()) {
                let behind = |i: usize| match base[i] {
                    0 => 0,
                    base => base + Address::from(start) * sizes[i] as Address,
                };
                if addresses == [behind(0), behind(1), behind(2)] {
                    return (self.segments.len() as u32 - 1, start);
                }
            }
        }
        self.segments.push(addresses.map(|address| address as i64));
        (self.segments.len() as u32 - 1, 0)
    }
}

/// The arithmetic of a launch, with its states: f32, or 8-bit codes (u8) and their scales (f32).
#[derive(Clone, Copy, Debug)]
pub enum Kernel<'a> {
    /// Both moments, and with AMSGrad the largest second one so far.
    Adam([&'a Raw; 2], Option<&'a Raw>),
    /// The form of `Adam8bit` for small variables: both moments.
    SmallAdam([&'a Raw; 2]),
    /// The momentum.
    Lion(&'a Raw),
    /// The momentum, if there is one.
    Sgd(Option<&'a Raw>),
    /// Codes and scales of both moments.
    Adam8bit([&'a Raw; 4]),
    /// Codes and scales of the momentum.
    Lion8bit([&'a Raw; 2]),
}

/// Updates the variables of `table` with the coefficients of the last [`Groups::prepare`] of their groups, and zeroes their
/// gradients if `zero_grads`.
///
/// # Errors
/// [`Error::Device`] if the states are on another device.
pub fn step(op: &'static str, kernel: Kernel<'_>, table: &Table, groups: &Groups, zero_grads: bool) -> Result<()> {
    let gpu = Gpu::of(op, &table.pieces)?;
    let (pieces, segments) = (address(op, &table.pieces)?, address(op, &table.segments)?);
    let coefficients = groups.coefficients_at(op, usize::from(table.first_group))?;
    let zero_grads = u32::from(zero_grads);
    let function = |module, name| gpu.function(module, name, table.dtypes);
    let shape = Shape::linear(op, table.count, 256)?;
    // SAFETY: the kernels take the table, coefficients of all its groups, and states that the table's pieces lie in.
    unsafe {
        match kernel {
            Kernel::Adam([first, second], largest) => {
                let function = function(&OPTIM, "adam_step")?;
                let (first, second, largest) = (address(op, first)?, address(op, second)?, optional(op, largest)?);
                launch!(op, gpu, function, shape, pieces, segments, coefficients, zero_grads, first, second, largest)
            }
            Kernel::SmallAdam([first, second]) => {
                let function = function(&OPTIM, "small_adam_step")?;
                let (first, second) = (address(op, first)?, address(op, second)?);
                launch!(op, gpu, function, shape, pieces, segments, coefficients, zero_grads, first, second)
            }
            Kernel::Lion(momentum) => {
                let (function, momentum) = (function(&OPTIM, "lion_step")?, address(op, momentum)?);
                launch!(op, gpu, function, shape, pieces, segments, coefficients, zero_grads, momentum)
            }
            Kernel::Sgd(momentum) => {
                let (function, momentum) = (function(&OPTIM, "sgd_step")?, optional(op, momentum)?);
                launch!(op, gpu, function, shape, pieces, segments, coefficients, zero_grads, momentum)
            }
            Kernel::Adam8bit([codes1, scales1, codes2, scales2]) => {
                let function = function(&OPTIM_8BIT, "adam_8bit_step")?;
                let (shape, count) = (shape_8bit(op, gpu, table.count)?, count32(op, table.count)?);
                let [c1, s1, c2, s2] = [codes1, scales1, codes2, scales2].map(|state| address(op, state));
                let (c1, s1, c2, s2) = (c1?, s1?, c2?, s2?);
                launch!(op, gpu, function, shape, pieces, count, segments, coefficients, zero_grads, c1, s1, c2, s2)
            }
            Kernel::Lion8bit([codes, scales]) => {
                let function = function(&OPTIM_8BIT, "lion_8bit_step")?;
                let (shape, count) = (shape_8bit(op, gpu, table.count)?, count32(op, table.count)?);
                let (codes, scales) = (address(op, codes)?, address(op, scales)?);
                launch!(op, gpu, function, shape, pieces, count, segments, coefficients, zero_grads, codes, scales)
            }
        }
    }
}

/// A warp for each piece in turn, and as many blocks as are at work at a time.
fn shape_8bit(op: &'static str, gpu: &Gpu, pieces: usize) -> Result<Shape> {
    const BLOCKS: usize = 3;
    const WARPS: usize = 8;
    Shape::linear(op, pieces.div_ceil(WARPS).min(BLOCKS * gpu.multiprocessors()), 256)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(addresses: [Address; 3], len: usize, state: u32, group: u16) -> Place {
        Place { addresses, len, state, group }
    }

    #[test]
    fn settings_are_as_large_as_the_kernels_think() {
        assert_eq!(size_of::<Settings>(), 56);
        assert_eq!(std::mem::offset_of!(Settings, step), 40);
    }

    #[test]
    fn neighbours_in_flat_buffers_share_a_segment() {
        // Parameters, bf16 copies and f32 gradients of 300 and 5 elements, one behind the other.
        let places = [place([4096, 8192, 1024], 300, 0, 2), place([4096 + 1200, 8192 + 1200, 1024 + 600], 5, 2, 3)];
        let work = Work::cut(&places, [4, 4, 2], 256, 2);
        assert_eq!(work.segments, [[4096, 8192, 1024]]);
        assert_eq!(work.pieces, [[0, 0, 0, 256], [256, 0, 1, 44], [300, 0, 2, 5 | 1 << 16]]);
    }

    #[test]
    fn loose_variables_have_segments_of_their_own() {
        let cases = [
            // Another order, a gap in the gradients, a copy that the first one lacks, parameters further than 32 bits count.
            [place([4096, 8192, 0], 3, 0, 0), place([64, 8204, 0], 3, 1, 0)],
            [place([4096, 8192, 0], 3, 0, 0), place([4108, 9000, 0], 3, 1, 0)],
            [place([4096, 8192, 0], 3, 0, 0), place([4108, 8204, 512], 3, 1, 0)],
            [place([0x1000, 0x2000, 0], 3, 0, 0), place([0x1000 + (1 << 35), 0x2000 + (1 << 35), 0], 3, 1, 0)],
        ];
        for places in cases {
            let work = Work::cut(&places, [4, 4, 2], 1024, 0);
            assert_eq!(work.segments, places.map(|place| place.addresses.map(|address| address as i64)));
            assert_eq!(work.pieces, [[0, 0, 0, 3], [0, 1, 1, 3]]);
        }
    }

    #[test]
    fn a_variable_of_more_elements_than_32_bits_count_goes_on_in_another_segment() {
        let base: Address = 1 << 40;
        let mut work = Work { pieces: Vec::new(), segments: vec![[base as i64, base as i64, 0]] };
        let far = base + 4 * (u64::from(u32::MAX) + 1);
        assert_eq!(work.locate([far, far, 0], [4, 4, 2]), (1, 0));
        assert_eq!(work.locate([far + 4096, far + 4096, 0], [4, 4, 2]), (1, 1024));
    }
}
