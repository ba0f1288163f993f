//! Steps of optimizers whose update of an element depends on the whole variable. One block of threads updates each
//! variable.

use candle_core::{DType, Device};
use trainable_candle_core::cuda::Gpu;
use trainable_candle_core::cuda::launch::{Shape, address, count32, empty, input, optional_output};
use trainable_candle_core::{Error, Raw, Result};
use trainable_candle_cuda::kernels::optim_whole::AdafactorStep;
use trainable_candle_cuda::structs::{Address, Whole};

use super::step::{Groups, Known};

/// The number of threads of a block: WHOLE_THREADS in the kernels.
const THREADS: u32 = 512;

/// The shape, states and scratch memory of a variable.
#[derive(Clone, Debug)]
pub struct Extent {
    /// The shape of the variable.
    pub dims: Vec<usize>,
    /// Where the variable's values begin in the buffer of each state, in units of
    /// [`STATE_BLOCK`](super::step::STATE_BLOCK).
    pub states: Vec<u32>,
    /// The number of f32 that the variable's update needs as scratch memory.
    pub scratch: usize,
}

/// The variables of one launch, in device memory.
pub struct WholeTable {
    /// The variables as the optimizer knows them: their tensors, dtypes and groups.
    known: Known,
    /// A [`Whole`] for each variable, as 32-bit words.
    variables: Raw,
    /// The number of variables.
    count: usize,
    /// The scratch memory of all variables. The table owns it, because `variables` contains addresses in it.
    _scratch: Raw,
}

impl WholeTable {
    /// Makes the table of the variables `known`. `extents` has an entry for each variable, in the same order.
    ///
    /// # Errors
    /// [`Error::Shape`] if one of the dimensions that kernels read has 2^32 elements or more, [`Error::OutOfMemory`] if
    /// the device is full.
    pub fn new(op: &'static str, known: Known, extents: &[Extent]) -> Result<Self> {
        /// The alignment of each variable's scratch memory, in f32 elements; 64 elements are 256 bytes.
        const ALIGNMENT: usize = 64;
        let gpu = Gpu::of(op, &known.members[0].params)?;
        let sizes = extents.iter().map(|extent| extent.scratch.next_multiple_of(ALIGNMENT));
        let scratch = empty(op, gpu, &[sizes.clone().sum::<usize>().max(1)], DType::F32)?;
        let (mut scratch_start, mut words) = (address(op, &scratch)?, Vec::new());
        for (((addresses, group), extent), size) in known.addresses().zip(extents).zip(sizes) {
            words.extend(to_words(&structure(op, addresses, group, extent, scratch_start)?));
            scratch_start += (size * size_of::<f32>()) as Address;
        }
        let (count, len) = (extents.len(), words.len());
        let variables = Raw::from_vec(words, len, &Device::Cuda(gpu.device().clone()))?;
        Ok(Self { known, variables, count, _scratch: scratch })
    }

    /// Returns the variables.
    pub const fn known(&self) -> &Known {
        &self.known
    }
}

/// Makes the structure that kernels read for a variable, from the addresses of the variable's values, its gradient, its
/// 16-bit copy (0 if there is none) and its scratch memory. The structure's field `count` is the number of elements of
/// the variable, `first` is the size of the first dimension, and `rows` and `columns` are the sizes of the last two
/// dimensions. The size of a dimension that does not exist is 1.
fn structure(
    op: &'static str,
    [params, grads, copy]: [Address; 3],
    group: u16,
    extent: &Extent,
    scratch: Address,
) -> Result<Whole> {
    let dims = &extent.dims;
    let size = |index: Option<usize>| count32(op, index.and_then(|index| dims.get(index)).copied().unwrap_or(1));
    // Kernels take five states. The entries of states that the optimizer does not have stay 0, and are not read.
    let mut states = [0; 5];
    for (entry, &start) in states.iter_mut().zip(&extent.states) {
        *entry = start;
    }
    Ok(Whole {
        params,
        grads,
        copy,
        scratch,
        count: dims.iter().product::<usize>() as u64,
        first: size(Some(0))?,
        rows: size(dims.len().checked_sub(2))?,
        columns: size(dims.len().checked_sub(1))?,
        group: group.into(),
        states,
        unused: 0,
    })
}

/// Converts a variable's structure to 32-bit words, in the order of its fields. Each 64-bit field becomes two words,
/// the lower half first.
fn to_words(whole: &Whole) -> [u32; 20] {
    let Whole { params, grads, copy, scratch, count, first, rows, columns, group, states, unused } = *whole;
    let mut words = [0; 20];
    for (pair, field) in words.chunks_exact_mut(2).zip([params, grads, copy, scratch, count]) {
        (pair[0], pair[1]) = (field as u32, (field >> 32) as u32);
    }
    words[10..14].copy_from_slice(&[first, rows, columns, group]);
    words[14..19].copy_from_slice(&states);
    words[19] = unused;
    words
}

/// The launch of one kernel in a step.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// The kernel's name, without the dtypes.
    pub kernel: &'static str,
    /// Whether to launch one block for all variables, whatever their dtypes, instead of one block per variable.
    pub is_single: bool,
    /// Whether to clear the gradients.
    pub zero_grads: bool,
    /// Whether this is the step's first launch of the kernel.
    pub is_first: bool,
    /// Whether this is the step's last launch of the kernel.
    pub is_last: bool,
}

/// Launches a kernel over the variables of `table`. The kernel uses the coefficients that the last [`Groups::prepare`]
/// of the variables' groups has computed. `states` are f32; `shared` are the f64 numbers that the steps of all
/// variables share.
///
/// # Errors
/// [`Error::Argument`] if the variables have more than five states; [`Error::Device`] if the states are on another
/// device, or if there is no such kernel.
pub fn launch(
    op: &'static str,
    call: Call,
    states: &[Raw],
    table: &WholeTable,
    groups: &Groups,
    shared: Option<&Raw>,
) -> Result<()> {
    let gpu = Gpu::of(op, &table.variables)?;
    let first_group = usize::from(table.known.first_group);
    let state = |index: usize| optional_output(op, states.get(index));
    if states.len() > 5 {
        let message = format!("the variables have {} states, but a kernel takes at most five", states.len());
        return Err(Error::argument(op, message));
    }
    // All kernels over whole variables take the arguments of this kernel.
    let arguments = AdafactorStep {
        variables: input(op, &table.variables)?,
        count: count32(op, table.count)?,
        // The table counts groups from `first_group`.
        settings: groups.settings_from(op, first_group)?,
        coefficients: groups.coefficients_from(op, first_group)?,
        shared: optional_output(op, shared)?,
        // Bits 0 to 2 of the kernels' flags.
        flags: u32::from(call.zero_grads) | u32::from(call.is_first) << 1 | u32::from(call.is_last) << 2,
        state1: state(0)?,
        state2: state(1)?,
        state3: state(2)?,
        state4: state(3)?,
        state5: state(4)?,
    };
    // The name of a kernel for all variables has no dtypes.
    let (blocks, dtypes) = if call.is_single { (1, &[][..]) } else { (table.count, table.known.dtypes) };
    let shape = Shape::linear(op, blocks, THREADS)?;
    // `call.kernel` is the whole name, except for the dtypes, so nothing is added to it.
    // SAFETY: there are settings and coefficients for all groups of the table, and states for all its variables.
    unsafe { gpu.named(call.kernel, "", dtypes)?.launch(op, gpu, shape, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_have_the_memory_layout_of_the_structure() {
        // One address has bits in both halves, one only in the upper half: exchanged halves would show.
        let extent = Extent { dims: vec![2, 3, 5, 7], states: vec![1 << 31, 9, 11, 13, 17], scratch: 0 };
        let whole = structure("test", [1 << 40 | 1, 2, 3 << 33], 19, &extent, 23).unwrap();
        // SAFETY: the structure has no padding.
        let memory: [u32; 20] = unsafe { std::mem::transmute(whole) };
        assert_eq!(to_words(&whole), memory);
    }

    #[test]
    fn sizes_are_those_of_the_first_and_the_last_two_dimensions_and_a_vector_is_one_row() {
        for (dims, sizes) in [(vec![2, 3, 5, 7], (210, 2, 5, 7)), (vec![6], (6, 6, 1, 6))] {
            let extent = Extent { dims, states: vec![4], scratch: 0 };
            let whole = structure("test", [0; 3], 0, &extent, 0).unwrap();
            assert_eq!((whole.count, whole.first, whole.rows, whole.columns), sizes);
            assert_eq!(whole.states, [4, 0, 0, 0, 0]);
        }
    }
}
