//! Launches the steps of optimizers. Hyper-parameters and step counters are in device memory, and one launch updates any
//! number of variables.
//!
//! In a step the host only launches kernels, with the same arguments each time, so steps can be captured.

use candle_core::{DType, Device};
use trainable_candle_cuda::kernels::optim::{AdamPrepare, OPTIM_CONFIGURE, OptimConfigure};
use trainable_candle_cuda::structs::{Coefficients, Piece, Segment, Settings};

use trainable_candle_core::cuda::Gpu;
use trainable_candle_core::cuda::launch::{
    Address, Const, Shape, address, count32, empty, input, optional_input, output, same_device,
};
use trainable_candle_core::raw::to_vec;
use trainable_candle_core::{Error, Raw, Result, capture};

use super::gradient::LossScale;

/// The number of elements that share a scale of 8-bit states. The states of each variable start at a multiple of this number.
pub const STATE_BLOCK: usize = 256;

/// The largest number of elements of a piece without 8-bit states. One block of threads updates such a piece.
const LONGEST: usize = 4 * STATE_BLOCK;

/// The groups of an optimizer in device memory: one [`Settings`] and one [`Coefficients`] for each group. A group here is a set
/// of variables with the same hyper-parameters and the same step counter, which the optimizer calls a slot.
pub struct Groups {
    settings: Raw,
    coefficients: Raw,
}

impl Groups {
    /// Memory for `capacity` groups.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the device is full.
    pub fn new(op: &'static str, device: &Device, capacity: usize) -> Result<Self> {
        let gpu = Gpu::of_device(op, device)?;
        let room = |bytes: usize| empty(op, gpu, &[bytes * capacity], DType::U8);
        Ok(Self { settings: room(size_of::<Settings>())?, coefficients: room(size_of::<Coefficients>())? })
    }

    /// Sets a group's hyper-parameters and step counter. The new counter is that of the group `like`, or that of `settings` if
    /// `like` is None. The change applies to the steps that are queued after this call; the host does not wait.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no room for the group, [`Error::Device`] if the driver reports an error.
    pub fn configure(&self, op: &'static str, group: usize, settings: Settings, like: Option<usize>) -> Result<()> {
        let gpu = Gpu::of(op, &self.settings)?;
        let function = gpu.function(&OPTIM_CONFIGURE, &[])?;
        let like = like.map_or(Ok(u32::MAX), |like| self.index(op, like))?;
        let (to, group) = (output(op, &self.settings)?, self.index(op, group)?);
        let arguments = OptimConfigure { settings: to, group, like, value: settings };
        // SAFETY: both groups exist.
        unsafe { function.launch(op, gpu, Shape::linear(op, 1, 1)?, arguments) }
    }

    /// Checks that there is room for a group, and returns its number.
    fn index(&self, op: &'static str, group: usize) -> Result<u32> {
        if group < self.settings.elem_count() / size_of::<Settings>() {
            return count32(op, group);
        }
        Err(Error::argument(op, format!("there is no room for group {group}")))
    }

    /// Begins a step of `groups` with the kernel `<kernel>_prepare`, which increments their step counters and computes
    /// their coefficients. The step will divide gradients by `loss_scale`. If `norm` (f64) is non-finite, the step is
    /// skipped: counters and variables do not change.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no room for the groups, [`Error::Device`] if `norm` or `loss_scale` is on
    /// another device.
    pub fn prepare(
        &self,
        op: &'static str,
        kernel: &'static str,
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
        let function = gpu.named(kernel, "_prepare", &[])?;
        let count = last - first + 1;
        let arguments = AdamPrepare {
            settings: output(op, &self.settings)?.behind(first as usize * size_of::<Settings>()),
            groups: count,
            norm: optional_input(op, norm)?,
            loss_scale: optional_input(op, scale)?,
            coefficients: output(op, &self.coefficients)?.behind(groups.start * size_of::<Coefficients>()),
        };
        let shape = Shape::linear(op, count.div_ceil(32) as usize, 32)?;
        // SAFETY: there are settings and coefficients for `count` groups from the first group on.
        unsafe { function.launch(op, gpu, shape, arguments) }
    }

    /// The address of the coefficients of a group, followed by those of later groups.
    pub(super) fn coefficients_from(&self, op: &'static str, group: usize) -> Result<Const> {
        Ok(input(op, &self.coefficients)?.behind(group * size_of::<Coefficients>()))
    }

    /// The address of the settings of a group, followed by those of later groups.
    pub(super) fn settings_from(&self, op: &'static str, group: usize) -> Result<Const> {
        Ok(input(op, &self.settings)?.behind(group * size_of::<Settings>()))
    }

    /// The number of steps that each group has taken; waits for the device. For groups that were never configured, the
    /// number is arbitrary.
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
}

/// What a step reads and writes of one variable. The tensors are contiguous, on one device, and have the same number of
/// elements.
#[derive(Clone, Debug)]
pub struct Member {
    /// The parameters or master values, f32; bf16 parameters if they are rounded stochastically.
    pub params: Raw,
    /// The gradient: f32 or the dtype of the copy; bf16 if the variable is rounded stochastically.
    pub grads: Raw,
    /// An f16 or bf16 tensor to which the step also writes the new parameters.
    pub copy: Option<Raw>,
    /// Where the variable's states begin in their buffers, in units of [`STATE_BLOCK`] elements.
    pub state: u32,
    /// The index of the variable's group in [`Groups`].
    pub group: u16,
    /// If the variable is rounded stochastically: the number of the variable's first element, counted over all variables, in
    /// units of [`STATE_BLOCK`].
    pub first: Option<u32>,
}

/// The addresses of a member's parameters, gradients and copy (0 if there is none), with its size, state and group.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    addresses: [Address; 3],
    len: usize,
    state: u32,
    group: u16,
    /// As [`Member::first`].
    first: Option<u32>,
}

/// The variables of one launch.
pub struct Known {
    places: Vec<Place>,
    pub(super) dtypes: &'static [&'static str],
    /// The smallest group index of the members. The table on the device holds group indices relative to this index.
    pub(super) first_group: u16,
    /// The members, which own the tensors at the addresses in `places`.
    pub(super) members: Vec<Member>,
}

impl Known {
    /// Collects `members`, which must have at least one element in total. Their gradients must share a dtype, and so
    /// must their copies.
    ///
    /// # Errors
    /// [`Error::DType`] if there is no kernel for the dtypes; [`Error::Device`] if tensors are on different devices;
    /// [`Error::Argument`] if there are no members, if a tensor is not contiguous or does not have the size of its
    /// variable, or while a graph is captured, because an earlier step must have made the table.
    pub fn new(op: &'static str, members: Vec<Member>) -> Result<Self> {
        if members.is_empty() {
            return Err(Error::argument(op, "found no variables"));
        }
        if capture::is_capturing() {
            let message = "this step updates different variables than the first call did; a captured function must do the \
                same in each call";
            return Err(Error::argument(op, message));
        }
        let dtypes = suffixes(op, &members)?;
        let places = members.iter().map(|member| place(op, member)).collect::<Result<Vec<_>>>()?;
        let first_group = members.iter().map(|member| member.group).min().unwrap_or(0);
        Ok(Self { places, dtypes, first_group, members })
    }

    /// For each variable, the addresses of parameters, gradients and copy (0 if there is none), and the variable's group
    /// relative to `first_group`.
    pub fn addresses(&self) -> impl Iterator<Item = ([Address; 3], u16)> {
        self.places.iter().map(|place| (place.addresses, place.group - self.first_group))
    }

    /// Whether `members` are the same tensors and groups.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new) for members that do not fit.
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

/// The table of one launch in device memory: the pieces of its variables, and the segments of memory that hold the pieces.
pub struct Table {
    pub(super) known: Known,
    /// A [`Piece`] for each run of elements that is updated together: by one block of threads, or if the states are 8-bit, by
    /// one warp.
    pub(super) pieces: Raw,
    /// The addresses from which the starts of pieces are counted.
    pub(super) segments: Raw,
    /// For stochastic rounding, the number of each piece's first element in units of [`STATE_BLOCK`]; otherwise None.
    pub(super) firsts: Option<Raw>,
    /// The number of pieces.
    pub(super) count: usize,
}

impl Table {
    /// Cuts the variables into pieces and copies the descriptions of pieces and segments to the device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the device is full.
    pub fn new(op: &'static str, known: Known, has_8bit_states: bool) -> Result<Self> {
        let first = &known.members[0];
        let device = Device::Cuda(Gpu::of(op, &first.params)?.device().clone());
        let grad_size = first.grads.dtype().size_in_bytes();
        let longest = if has_8bit_states { STATE_BLOCK } else { LONGEST };
        let param_size = first.params.dtype().size_in_bytes();
        let work = Work::cut(&known.places, [param_size, grad_size, 2], longest, known.first_group);
        let words: Vec<u32> = work.pieces.iter().flat_map(words).collect();
        let addresses: Vec<i64> = work.segments.iter().flat_map(addresses).map(|address| address as i64).collect();
        let (count, sizes) = (work.pieces.len(), [words.len(), addresses.len()]);
        let segments = Raw::from_vec(addresses, sizes[1], &device)?;
        let pieces = Raw::from_vec(words, sizes[0], &device)?;
        let firsts = (!work.firsts.is_empty()).then(|| Raw::from_vec(work.firsts, count, &device)).transpose()?;
        Ok(Self { known, pieces, segments, firsts, count })
    }

    /// The variables.
    pub const fn known(&self) -> &Known {
        &self.known
    }
}

/// The suffixes of a kernel's name: the dtypes of gradients and copies. If the variables are rounded stochastically, the only
/// suffix is the dtype that variables and gradients share.
fn suffixes(op: &'static str, members: &[Member]) -> Result<&'static [&'static str]> {
    let grads = members.first().map_or(DType::F32, |member| member.grads.dtype());
    let copy = members.iter().find_map(|member| member.copy.as_ref().map(Raw::dtype));
    let rounded = members.first().is_some_and(|member| member.first.is_some());
    let params = if rounded { DType::BF16 } else { DType::F32 };
    let same = members.iter().all(|member| {
        member.params.dtype() == params
            && member.first.is_some() == rounded
            && member.grads.dtype() == grads
            && member.copy.as_ref().is_none_or(|found| Some(found.dtype()) == copy)
    });
    match (grads, copy) {
        (DType::BF16, None) if same && rounded => Ok(&["bf16"]),
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
        return Err(Error::argument(
            op,
            "a gradient or a copy is not contiguous or does not have the size of its variable",
        ));
    }
    same_device(op, &member.params, &[&member.grads])?;
    let [params, grads, copy] = tensors.map(|tensor| tensor.map_or(Ok(0), |tensor| address(op, tensor)));
    let Member { state, group, first, .. } = *member;
    Ok(Place { addresses: [params?, grads?, copy?], len, state, group, first })
}

/// A piece as 32-bit words, as laid out in memory.
const fn words(piece: &Piece) -> [u32; 4] {
    let Piece { start, segment, state, length, group } = *piece;
    [start, segment, state, length as u32 | (group as u32) << 16]
}

const fn addresses(segment: &Segment) -> [Address; 3] {
    [segment.params, segment.grads, segment.copy]
}

/// Pieces and segments in the layout that kernels read.
struct Work {
    pieces: Vec<Piece>,
    segments: Vec<Segment>,
    /// One for each piece of variables that are rounded stochastically, as [`Table::firsts`].
    firsts: Vec<u32>,
}

impl Work {
    /// Cuts variables into pieces of at most `longest` elements. Variables share a segment if their parameters, their
    /// gradients and their copies are all at the same element offsets from the segment's three addresses.
    fn cut(places: &[Place], sizes: [usize; 3], longest: usize, first_group: u16) -> Self {
        let mut work = Self { pieces: Vec::new(), segments: Vec::new(), firsts: Vec::new() };
        for place in places {
            let mut done = 0;
            while done < place.len {
                let length = longest.min(place.len - done);
                let at = |i: usize| match place.addresses[i] {
                    0 => 0,
                    address => address + (done * sizes[i]) as Address,
                };
                let [params, grads, copy] = [at(0), at(1), at(2)];
                let (segment, start) = work.locate(Segment { params, grads, copy }, sizes);
                let state = place.state + (done / STATE_BLOCK) as u32;
                let group = place.group - first_group;
                work.pieces.push(Piece { start, segment, state, length: length as u16, group });
                work.firsts.extend(place.first.map(|first| first + (done / STATE_BLOCK) as u32));
                done += length;
            }
        }
        work
    }

    /// The index of the segment of `place`, and the offset of `place` from the segment's addresses, in elements. Starts a new
    /// segment if the three addresses of `place` do not all have the same offset from the addresses of the last segment.
    fn locate(&mut self, place: Segment, sizes: [usize; 3]) -> (u32, u32) {
        if let Some(last) = self.segments.last() {
            let base = addresses(last);
            let elements = place.params.checked_sub(base[0]).map(|bytes| bytes / sizes[0] as Address);
            if let Some(start) = elements.and_then(|elements| u32::try_from(elements).ok()) {
                let behind = |i: usize| match base[i] {
                    0 => 0,
                    base => base + Address::from(start) * sizes[i] as Address,
                };
                if addresses(&place) == [behind(0), behind(1), behind(2)] {
                    return (self.segments.len() as u32 - 1, start);
                }
            }
        }
        self.segments.push(place);
        (self.segments.len() as u32 - 1, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(addresses: [Address; 3], len: usize, state: u32, group: u16) -> Place {
        Place { addresses, len, state, group, first: None }
    }

    const fn segment([params, grads, copy]: [Address; 3]) -> Segment {
        Segment { params, grads, copy }
    }

    const fn piece([start, segment, state]: [u32; 3], length: u16, group: u16) -> Piece {
        Piece { start, segment, state, length, group }
    }

    #[test]
    fn words_have_the_memory_layout_of_a_piece() {
        let piece = piece([1, 2, 3], 0x1234, 0x5678);
        // SAFETY: a piece has no padding.
        let bytes: [u32; 4] = unsafe { std::mem::transmute(piece) };
        assert_eq!(words(&piece), bytes);
    }

    #[test]
    fn neighbours_in_flat_buffers_share_a_segment() {
        // Variables of 300 and 5 elements: their parameters, their f32 gradients and their bf16 copies are neighbours.
        let places = [place([4096, 8192, 1024], 300, 0, 2), place([4096 + 1200, 8192 + 1200, 1024 + 600], 5, 2, 3)];
        let work = Work::cut(&places, [4, 4, 2], 256, 2);
        assert_eq!(work.segments, [segment([4096, 8192, 1024])]);
        assert_eq!(work.pieces, [piece([0, 0, 0], 256, 0), piece([256, 0, 1], 44, 0), piece([300, 0, 2], 5, 1)]);
    }

    #[test]
    fn pieces_of_rounded_variables_have_the_number_of_their_first_block() {
        let rounded = |place| Place { first: Some(5), ..place };
        let places = [rounded(place([4096, 8192, 0], 2500, 0, 0)), place([1 << 20, 1 << 21, 0], 3, 10, 0)];
        let work = Work::cut(&places[..1], [2, 2, 2], 1024, 0);
        assert_eq!((work.pieces.len(), &work.firsts[..]), (3, &[5, 9, 13][..]));
        assert!(Work::cut(&places[1..], [4, 4, 2], 1024, 0).firsts.is_empty());
    }

    #[test]
    fn loose_variables_have_segments_of_their_own() {
        let cases = [
            // One case after the other: the order of parameters and gradients differs, gradients have a gap, only one
            // variable has a copy, or parameters are more than 2^32 elements apart.
            [place([4096, 8192, 0], 3, 0, 0), place([64, 8204, 0], 3, 1, 0)],
            [place([4096, 8192, 0], 3, 0, 0), place([4108, 9000, 0], 3, 1, 0)],
            [place([4096, 8192, 0], 3, 0, 0), place([4108, 8204, 512], 3, 1, 0)],
            [place([0x1000, 0x2000, 0], 3, 0, 0), place([0x1000 + (1 << 35), 0x2000 + (1 << 35), 0], 3, 1, 0)],
        ];
        for places in cases {
            let work = Work::cut(&places, [4, 4, 2], 1024, 0);
            assert_eq!(work.segments, places.map(|place| segment(place.addresses)));
            assert_eq!(work.pieces, [piece([0, 0, 0], 3, 0), piece([0, 1, 1], 3, 0)]);
        }
    }

    #[test]
    fn a_variable_with_more_elements_than_32_bits_can_count_spans_two_segments() {
        let base: Address = 1 << 40;
        let mut work = Work { pieces: Vec::new(), segments: vec![segment([base, base, 0])], firsts: Vec::new() };
        let far = base + 4 * (u64::from(u32::MAX) + 1);
        assert_eq!(work.locate(segment([far, far, 0]), [4, 4, 2]), (1, 0));
        assert_eq!(work.locate(segment([far + 4096, far + 4096, 0]), [4, 4, 2]), (1, 1024));
    }
}
