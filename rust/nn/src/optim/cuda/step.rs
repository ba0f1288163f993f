//! Launches the steps of optimizers. Hyper-parameters and step counters are in device memory, and one launch updates
//! any number of variables.
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

/// The number of elements that share a scale of 8-bit states. The states of each variable start at a multiple of this
/// number.
pub const STATE_BLOCK: usize = 256;

/// The largest number of elements of a piece without 8-bit states. One block of threads updates such a piece.
const LONGEST: usize = 4 * STATE_BLOCK;

/// The number of bytes of an element of a copy, which is f16 or bf16.
const COPY_SIZE: usize = 2;

/// The groups of an optimizer in device memory: one [`Settings`] and one [`Coefficients`] for each group. A group here
/// is a set of variables with the same hyper-parameters and the same step counter, which the optimizer calls a slot.
pub struct Groups {
    settings: Raw,
    coefficients: Raw,
}

impl Groups {
    /// Allocates memory for `capacity` groups, without a value.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the device is full.
    pub fn new(op: &'static str, device: &Device, capacity: usize) -> Result<Self> {
        let gpu = Gpu::of_device(op, device)?;
        let allocate = |bytes: usize| empty(op, gpu, &[bytes * capacity], DType::U8);
        Ok(Self { settings: allocate(size_of::<Settings>())?, coefficients: allocate(size_of::<Coefficients>())? })
    }

    /// Sets a group's hyper-parameters and step counter. The new counter is that of the group `like`, or that of
    /// `settings` if `like` is None. The change applies to the steps that are queued after this call; the host does not
    /// wait.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no room for `group` or `like`, [`Error::Device`] if the driver reports an error.
    pub fn configure(&self, op: &'static str, group: usize, settings: Settings, like: Option<usize>) -> Result<()> {
        let gpu = Gpu::of(op, &self.settings)?;
        let function = gpu.function(&OPTIM_CONFIGURE, &[])?;
        // The kernel takes `u32::MAX` as None.
        let like = like.map_or(Ok(u32::MAX), |like| self.index(op, like))?;
        let (all_settings, group) = (output(op, &self.settings)?, self.index(op, group)?);
        let arguments = OptimConfigure { settings: all_settings, group, like, value: settings };
        let one_thread = Shape::linear(op, 1, 1)?;
        // SAFETY: there is room for both groups.
        unsafe { function.launch(op, gpu, one_thread, arguments) }
    }

    /// Checks that there is room for a group, and returns its number.
    fn index(&self, op: &'static str, group: usize) -> Result<u32> {
        let capacity = self.settings.elem_count() / size_of::<Settings>();
        if group < capacity {
            return count32(op, group);
        }
        Err(Error::argument(op, format!("found group {group}, expected less than {capacity}, the number of groups")))
    }

    /// Begins a step of the groups with the indices `groups`. The kernel `<kernel>_prepare` increments their step
    /// counters and computes their coefficients. The step will divide gradients by `loss_scale`. If `norm`, a norm of
    /// the gradients (f64), is non-finite, the step is skipped: counters and variables do not change.
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
        // All kernels `<kernel>_prepare` take the arguments of `adam_prepare`.
        let arguments = AdamPrepare {
            settings: output(op, &self.settings)?.offset_by(first as usize * size_of::<Settings>()),
            groups: count,
            norm: optional_input(op, norm)?,
            loss_scale: optional_input(op, scale)?,
            coefficients: output(op, &self.coefficients)?.offset_by(groups.start * size_of::<Coefficients>()),
        };
        // Each thread prepares one group.
        let shape = Shape::linear(op, count.div_ceil(32) as usize, 32)?;
        // SAFETY: there are settings and coefficients for `count` groups from the first group on.
        unsafe { function.launch(op, gpu, shape, arguments) }
    }

    /// Returns the address of the coefficients of a group, which those of later groups follow.
    pub(super) fn coefficients_from(&self, op: &'static str, group: usize) -> Result<Const> {
        Ok(input(op, &self.coefficients)?.offset_by(group * size_of::<Coefficients>()))
    }

    /// Returns the address of the settings of a group, which those of later groups follow.
    pub(super) fn settings_from(&self, op: &'static str, group: usize) -> Result<Const> {
        Ok(input(op, &self.settings)?.offset_by(group * size_of::<Settings>()))
    }

    /// Returns the number of steps that each group has taken; waits for the device. For groups that were never
    /// configured, the number is arbitrary.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let bytes = to_vec::<u8>(&self.settings)?;
        let step_of = |settings: &[u8]| {
            let mut step = [0; 8];
            let start = std::mem::offset_of!(Settings, step);
            step.copy_from_slice(&settings[start..start + 8]);
            u64::from_le_bytes(step)
        };
        Ok(bytes.chunks_exact(size_of::<Settings>()).map(step_of).collect())
    }
}

/// What a step reads and writes of one variable. The tensors are contiguous, on one device, and have the same number of
/// elements.
#[derive(Clone, Debug)]
pub struct Member {
    /// The parameters or master values, f32; bf16 parameters if they are rounded stochastically.
    pub params: Raw,
    /// The gradient: of f32 or of the copy's dtype; of bf16 if the variable is rounded stochastically.
    pub grads: Raw,
    /// An f16 or bf16 tensor to which the step also writes the new parameters.
    pub copy: Option<Raw>,
    /// Where the variable's states begin in their buffers, in units of [`STATE_BLOCK`] elements.
    pub state: u32,
    /// The index of the variable's group in [`Groups`].
    pub group: u16,
    /// If the variable is rounded stochastically: the number of the variable's first element among all elements of the
    /// optimizer's variables, in units of [`STATE_BLOCK`].
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

/// The variables of one launch, as they were when the launch's table was made. [`is_of`](Self::is_of) tells whether a
/// later step can use this table.
pub struct Known {
    /// One for each of `members`.
    places: Vec<Place>,
    /// The suffixes of the names of the kernels: dtypes, such as `f32` and `bf16` (see `suffixes`).
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
            let message = "this step updates different variables than the first call did; a captured function must do \
                the same in each call";
            return Err(Error::argument(op, message));
        }
        let dtypes = suffixes(op, &members)?;
        let places = members.iter().map(|member| place_of(op, member)).collect::<Result<Vec<_>>>()?;
        let first_group = members.iter().map(|member| member.group).min().unwrap_or(0);
        Ok(Self { places, dtypes, first_group, members })
    }

    /// Returns for each variable the addresses of parameters, gradients and copy (0 if there is none), and the index of
    /// the variable's group relative to `first_group`.
    pub fn addresses(&self) -> impl Iterator<Item = ([Address; 3], u16)> {
        self.places.iter().map(|place| (place.addresses, place.group - self.first_group))
    }

    /// Tells whether `members` have the same tensors, states and groups as these variables.
    ///
    /// # Errors
    /// As [`new`](Self::new) for members that do not fit.
    pub fn is_of(&self, op: &'static str, members: &[Member]) -> Result<bool> {
        if members.len() != self.places.len() || suffixes(op, members)? != self.dtypes {
            return Ok(false);
        }
        for (member, known) in members.iter().zip(&self.places) {
            if place_of(op, member)? != *known {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The table of one launch in device memory: the pieces of its variables, and the segments that the pieces are parts
/// of.
pub struct Table {
    pub(super) known: Known,
    /// The [`Piece`]s. Each is a run of elements that one block of threads updates, or one warp if the states are
    /// 8-bit.
    pub(super) pieces: Raw,
    /// The [`Segment`]s: addresses from which the starts of pieces are counted.
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
        let first_member = &known.members[0];
        let device = Device::Cuda(Gpu::of(op, &first_member.params)?.device().clone());
        let [param_size, grad_size] =
            [&first_member.params, &first_member.grads].map(|tensor| tensor.dtype().size_in_bytes());
        let longest = if has_8bit_states { STATE_BLOCK } else { LONGEST };
        let work = Work::cut(&known.places, [param_size, grad_size, COPY_SIZE], longest, known.first_group);
        let piece_words: Vec<u32> = work.pieces.iter().flat_map(words).collect();
        let segment_addresses: Vec<i64> =
            work.segments.iter().flat_map(addresses).map(|address| address as i64).collect();
        let (count, lengths) = (work.pieces.len(), [piece_words.len(), segment_addresses.len()]);
        let segments = Raw::from_vec(segment_addresses, lengths[1], &device)?;
        let pieces = Raw::from_vec(piece_words, lengths[0], &device)?;
        let firsts = (!work.firsts.is_empty()).then(|| Raw::from_vec(work.firsts, count, &device)).transpose()?;
        Ok(Self { known, pieces, segments, firsts, count })
    }

    /// Returns the variables.
    pub const fn known(&self) -> &Known {
        &self.known
    }
}

/// Returns the suffixes of a kernel's name: the dtypes of gradients and copies, where copies count as bf16 if there are
/// none. If the variables are rounded stochastically, the only suffix is the dtype that variables and gradients share.
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
        _ => {
            let copies = copy.map_or_else(|| "no copies".to_owned(), |copy| format!("copies of {}", copy.as_str()));
            let message = format!(
                "there is no kernel for parameters of {}, gradients of {} and {copies}",
                params.as_str(),
                grads.as_str()
            );
            Err(Error::dtype(op, message))
        }
    }
}

/// Checks the tensors of a member, and returns their addresses with the member's size, state and group.
fn place_of(op: &'static str, member: &Member) -> Result<Place> {
    let tensors = [Some(&member.params), Some(&member.grads), member.copy.as_ref()];
    let len = member.params.elem_count();
    let fits = |tensor: &Raw| tensor.is_contiguous() && tensor.elem_count() == len;
    if !tensors.iter().flatten().all(|tensor| fits(tensor)) {
        return Err(Error::argument(
            op,
            "the parameters, the gradient or the copy of a variable are not contiguous, or they differ in size",
        ));
    }
    same_device(op, &member.params, &[&member.grads])?;
    let [params, grads, copy] = tensors.map(|tensor| tensor.map_or(Ok(0), |tensor| address(op, tensor)));
    let Member { state, group, first, .. } = *member;
    Ok(Place { addresses: [params?, grads?, copy?], len, state, group, first })
}

/// Returns a piece as the 32-bit words that it has in memory.
const fn words(piece: &Piece) -> [u32; 4] {
    let Piece { start, segment, state, length, group } = *piece;
    [start, segment, state, length as u32 | (group as u32) << 16]
}

/// Returns the addresses of parameters, gradients and copy.
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
    /// Cuts variables into pieces of at most `longest` elements. `sizes` are the bytes of an element of parameters,
    /// gradients and copies. Consecutive variables share a segment if their parameters, their gradients and their
    /// copies are all at the same element offsets from the segment's three addresses. Groups of pieces are relative to
    /// `first_group`.
    fn cut(places: &[Place], sizes: [usize; 3], longest: usize, first_group: u16) -> Self {
        let mut work = Self { pieces: Vec::new(), segments: Vec::new(), firsts: Vec::new() };
        for place in places {
            let mut done = 0;
            while done < place.len {
                let length = longest.min(place.len - done);
                let address_of = |i: usize| match place.addresses[i] {
                    0 => 0,
                    address => address + (done * sizes[i]) as Address,
                };
                let [params, grads, copy] = [0, 1, 2].map(address_of);
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

    /// Finds the segment for elements that begin at the three addresses in `target`. Returns the segment's index and
    /// the offset of `target` from the segment's addresses, in elements. Starts a new segment if the three addresses do
    /// not all have the same offset from the addresses of the last segment, or if 32 bits cannot hold the offset.
    fn locate(&mut self, target: Segment, sizes: [usize; 3]) -> (u32, u32) {
        if let Some(last) = self.segments.last() {
            let base = addresses(last);
            let elements = target.params.checked_sub(base[0]).map(|bytes| bytes / sizes[0] as Address);
            if let Some(start) = elements.and_then(|elements| u32::try_from(elements).ok()) {
                let address_of = |i: usize| match base[i] {
                    0 => 0,
                    base => base + Address::from(start) * sizes[i] as Address,
                };
                if addresses(&target) == [0, 1, 2].map(address_of) {
                    return (self.segments.len() as u32 - 1, start);
                }
            }
        }
        self.segments.push(target);
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
        // Variables of 300 and 5 elements: their f32 parameters, f32 gradients and bf16 copies are neighbours. The
        // addresses are arbitrary. The states of the first variable take two blocks, 0 and 1. The variables are in
        // groups 2 and 3, which are 0 and 1 relative to the first group, 2.
        let second = [4096 + 300 * 4, 8192 + 300 * 4, 1024 + 300 * 2];
        let places = [place([4096, 8192, 1024], 300, 0, 2), place(second, 5, 2, 3)];
        let work = Work::cut(&places, [4, 4, 2], 256, 2);
        assert_eq!(work.segments, [segment([4096, 8192, 1024])]);
        assert_eq!(work.pieces, [piece([0, 0, 0], 256, 0), piece([256, 0, 1], 44, 0), piece([300, 0, 2], 5, 1)]);
    }

    #[test]
    fn only_pieces_of_rounded_variables_have_the_number_of_their_first_block() {
        let rounded = |place| Place { first: Some(5), ..place };
        // 2500 elements are three pieces of at most 1024 elements, which have 4 blocks of 256; the first block has
        // number 5.
        let places = [rounded(place([4096, 8192, 0], 2500, 0, 0)), place([1 << 20, 1 << 21, 0], 3, 10, 0)];
        let work = Work::cut(&places[..1], [2, 2, 2], 1024, 0);
        assert_eq!((work.pieces.len(), &work.firsts[..]), (3, &[5, 9, 13][..]));
        assert!(Work::cut(&places[1..], [4, 4, 2], 1024, 0).firsts.is_empty());
    }

    #[test]
    fn variables_without_a_common_offset_have_segments_of_their_own() {
        const FAR: Address = 1 << 35;
        // Addresses of parameters, gradients and copies (0: none) of two variables of 3 elements, which take 12 bytes
        // in f32. A second variable at 4096 + 12 and 8192 + 12 would share the first one's segment.
        let cases = [
            ("the parameters of the second variable come first", [4096, 8192, 0], [64, 8204, 0]),
            ("gradients have a gap", [4096, 8192, 0], [4108, 9000, 0]),
            ("only the second variable has a copy", [4096, 8192, 0], [4108, 8204, 512]),
            ("more than 2^32 elements apart", [4096, 8192, 0], [4096 + FAR, 8192 + FAR, 0]),
        ];
        for (label, first, second) in cases {
            let work = Work::cut(&[place(first, 3, 0, 0), place(second, 3, 1, 0)], [4, 4, 2], 1024, 0);
            assert_eq!(work.segments, [first, second].map(segment), "{label}");
            assert_eq!(work.pieces, [piece([0, 0, 0], 3, 0), piece([0, 1, 1], 3, 0)], "{label}");
        }
    }

    #[test]
    fn elements_whose_offset_exceeds_32_bits_start_a_new_segment() {
        let base: Address = 1 << 40;
        let mut work = Work { pieces: Vec::new(), segments: vec![segment([base, base, 0])], firsts: Vec::new() };
        let far = base + 4 * (u64::from(u32::MAX) + 1);
        assert_eq!(work.locate(segment([far, far, 0]), [4, 4, 2]), (1, 0));
        assert_eq!(work.locate(segment([far + 4096, far + 4096, 0]), [4, 4, 2]), (1, 1024));
    }
}
