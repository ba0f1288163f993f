//! Structures that the host passes to the kernels, as arguments or in device memory. The CUDA file that declares a structure documents its
//! fields, and has the constants that are the lengths of its arrays.
//!
//! The build script includes this file too: it compiles the kernels with assertions that each structure of [`LAYOUTS`] has the same size,
//! alignment and fields in CUDA.

use std::mem::{align_of, offset_of, size_of};

/// The memory layout of a structure.
#[derive(Debug)]
pub struct Layout {
    /// The structure's name in CUDA.
    pub name: &'static str,
    /// The structure's size in bytes.
    pub size: usize,
    /// The structure's alignment in bytes.
    pub alignment: usize,
    /// The name of each field, with its offset and size in bytes.
    pub fields: &'static [(&'static str, usize, usize)],
}

/// An address in a GPU's memory.
pub type Address = u64;

/// Declares structures with the layout of C and, for each, a function `layout` that returns its [`Layout`].
macro_rules! structs {
    ($($(#[$attribute:meta])* $name:ident $(<const $n:ident: usize>)? { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$attribute])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[allow(missing_docs, reason = "the fields are those of CUDA")]
        pub struct $name $(<const $n: usize>)? {
            $(pub $field: $type,)*
        }

        impl $(<const $n: usize>)? $name $(<$n>)? {
            const fn layout(name: &'static str) -> Layout {
                let fields = const { &[$((stringify!($field), offset_of!(Self, $field), size_of::<$type>())),*] };
                Layout { name, size: size_of::<Self>(), alignment: align_of::<Self>(), fields }
            }
        }
    )*};
}

// A field `unused` stands where the structure would have padding.
structs! {
    /// Declared in kernels/addresses.cu.
    Addresses { values: [Address; 480], }

    /// Declared in include/attention/shape.cuh.
    AttentionShape {
        batch: u32, heads: u32, queries: u32, keys: u32, width: u32, value_width: u32, is_causal: u32,
        parts: u32,
        scale: f64,
    }

    /// Declared in include/attention/shape.cuh.
    Strides { batch: u64, head: u64, row: u64, }

    /// Declared in include/attention/hopper/schedule.cuh.
    Schedule { items: u32, steps: u32, whole: u32, blocks: u32, }

    /// Declared in include/attention/hopper/copies.cuh.
    AttentionForwardMaps { q: TensorMap, k: TensorMap, v: TensorMap, o: TensorMap, }

    /// Declared in include/attention/hopper/copies.cuh.
    AttentionBackwardMaps {
        q: TensorMap, k: TensorMap, v: TensorMap, d_o: TensorMap, dk: TensorMap, dv: TensorMap,
    }

    /// Declared in include/attention/hopper/few_keys.cuh.
    AttentionFewKeysMaps { q: TensorMap, k: TensorMap, v: TensorMap, d_o: TensorMap, }

    /// Declared in include/attention/plain.cuh.
    ///
    /// A template there, for masks of `float` and of `double`; both have this layout.
    Mask { numbers: Address, batch: u64, head: u64, query: u64, key: u64, }

    /// Declared in include/conv/geometry.cuh.
    Conv2dShape {
        batch: u32, height: u32, width: u32, channels: u32,
        kernel_height: u32, kernel_width: u32,
        out_height: u32, out_width: u32, out_channels: u32,
        stride_height: u32, stride_width: u32, padding_height: u32, padding_width: u32,
        dilation_height: u32, dilation_width: u32,
        groups: u32,
    }

    /// Declared in include/engine.cuh: the driver's `CUtensorMap`.
    #[repr(align(64))]
    TensorMap { opaque: [u64; 16], }

    /// Declared in include/conv/engine.cuh.
    Conv2dMaps { dense: TensorMap, windows: [TensorMap; 4], }

    /// Declared in kernels/low_rank.cu.
    LowRankSizes {
        rows: u32, inner: u32, outer: u32, terms: u32,
        input_row: u32, hidden_row: u32, dst_row: u32, down_row: u32, up_row: u32,
        scale_hidden: f32, scale_dst: f32,
    }

    /// Declared in kernels/low_rank.cu.
    #[derive(Default)]
    LowRankTerm { input: Address, down: Address, up: Address, hidden: Address, dst: Address, }

    /// Declared in kernels/low_rank.cu.
    LowRankTerms { list: [LowRankTerm; 4], }

    /// Declared in kernels/low_rank_add.cu.
    #[derive(Default)]
    LowRankTile { hidden: Address, up: Address, }

    /// Declared in kernels/low_rank_add.cu.
    #[derive(Default)]
    LowRankSum { dst: Address, outer: u32, end: u32, tiles: [LowRankTile; 4], }

    /// Declared in kernels/low_rank_add.cu.
    LowRankSums { list: [LowRankSum; 4], }

    /// Declared in kernels/low_rank_add.cu.
    LowRankAddSizes { rows: u32, hidden_row: u32, up_row: u32, dst_row: u32, scale: f32, }

    /// Declared in kernels/low_rank_gradient.cu.
    #[derive(Default)]
    LowRankFactor {
        wide: Address, narrow: Address, sum: Address, rows: u32, columns: u32, wide_row: u32, narrow_row: u32, rank_step: u32,
        column_step: u32, scale: f32, unused: u32,
    }

    /// Declared in kernels/low_rank_gradient.cu.
    LowRankFactors { ends: [u32; 48], list: [LowRankFactor; 48], }

    /// Declared in kernels/gated_low_rank.cu.
    #[derive(Default)]
    LowRankHalf { hidden: Address, up: Address, hidden_row: u32, up_row: u32, scale: f32, unused: u32, }

    /// Declared in kernels/gated_low_rank.cu.
    LowRankHalves { list: [LowRankHalf; 2], }

    /// Declared in include/codes/parts.cuh.
    #[derive(Default)]
    CodePart { codes: Address, scales: Address, start: u32, rows: u32, scale_count: u32, unused: u32, }

    /// Declared in include/codes/parts.cuh.
    #[derive(Default)]
    CodeParts { list: [CodePart; 8], }

    /// Declared in include/codes/hopper.cuh.
    CodeMaps { x: TensorMap, w: [TensorMap; 8], }

    /// Declared in kernels/dequantize.cu.
    #[derive(Default)]
    QuantizedPart {
        codes: Address, scales: Address, inner: Address,
        start: u64, count: u64,
        columns: u32, format: u32, scale_count: u32, offset: f32,
    }

    /// Declared in kernels/dequantize.cu.
    QuantizedParts { list: [QuantizedPart; 8], }

    /// Declared in include/strided.cuh.
    ///
    /// `K` is the number of tensors that a kernel reads or writes with strides.
    Strided<const K: usize> { count: u64, axes: u32, width: u32, sizes: [u64; 8], strides: [[u64; 8]; K], }

    /// Declared in include/optim.cuh: the hyper-parameters of a parameter group, and `step`, the number of steps that the group has taken.
    /// `lr` is the learning rate; `beta1` and `beta2` are the decay rates of the moments, or momentum and dampening for SGD; `eps` is added
    /// to the square root of the second moment, or for CAME to squared gradients; `maximize` and `nesterov` are 1 or 0; `seed` is the seed
    /// of stochastic rounding; `more` has the further values of an optimizer, in the order in which its kernels read them.
    #[derive(Default)]
    Settings {
        lr: f64, beta1: f64, beta2: f64, eps: f64, weight_decay: f64, step: u64, seed: u64, maximize: u32,
        nesterov: u32,
        more: [f64; 8],
    }

    /// Declared in include/optim.cuh.
    #[repr(align(16))]
    Coefficients {
        gain: f32, skip: u32, decay: f32, l2: f32, step_size: f32, eps: f32, beta1: f32, gain1: f32, beta2: f32, gain2: f32,
        root_correction2: f32, nesterov: u32,
    }

    /// Declared in include/optim.cuh.
    #[repr(align(16))]
    Piece { start: u32, segment: u32, state: u32, length: u16, group: u16, }

    /// Declared in include/optim.cuh.
    Segment { params: Address, grads: Address, copy: Address, }

    /// Declared in include/optim_whole/elements.cuh.
    Whole {
        params: Address, grads: Address, copy: Address, scratch: Address, count: u64, first: u32, rows: u32, columns: u32,
        group: u32, states: [u32; 5], unused: u32,
    }

    /// Declared in include/optim.cuh.
    Clip { norm: f64, factor: f64, }

    /// Declared in include/optim.cuh.
    LossScale { scale: f64, growth_tracker: u64, }
}

/// The layouts of all structures that kernels use, by their names in CUDA.
pub const LAYOUTS: &[Layout] = &[
    Addresses::layout("Addresses"),
    AttentionShape::layout("AttentionShape"),
    Strides::layout("Strides"),
    Schedule::layout("Schedule"),
    AttentionForwardMaps::layout("AttentionForwardMaps"),
    AttentionBackwardMaps::layout("AttentionBackwardMaps"),
    AttentionFewKeysMaps::layout("AttentionFewKeysMaps"),
    Mask::layout("Mask<float>"),
    Mask::layout("Mask<double>"),
    Conv2dShape::layout("Conv2dShape"),
    TensorMap::layout("TensorMap"),
    Conv2dMaps::layout("Conv2dMaps"),
    LowRankSizes::layout("LowRankSizes"),
    LowRankTerm::layout("LowRankTerm"),
    LowRankTerms::layout("LowRankTerms"),
    LowRankTile::layout("LowRankTile"),
    LowRankSum::layout("LowRankSum"),
    LowRankSums::layout("LowRankSums"),
    LowRankAddSizes::layout("LowRankAddSizes"),
    LowRankFactor::layout("LowRankFactor"),
    LowRankFactors::layout("LowRankFactors"),
    LowRankHalf::layout("LowRankHalf"),
    LowRankHalves::layout("LowRankHalves"),
    CodePart::layout("CodePart"),
    CodeParts::layout("CodeParts"),
    CodeMaps::layout("CodeMaps"),
    QuantizedPart::layout("QuantizedPart"),
    QuantizedParts::layout("QuantizedParts"),
    Strided::<1>::layout("Strided<1>"),
    Strided::<2>::layout("Strided<2>"),
    Strided::<3>::layout("Strided<3>"),
    Strided::<4>::layout("Strided<4>"),
    Settings::layout("Settings"),
    Coefficients::layout("Coefficients"),
    Piece::layout("Piece"),
    Segment::layout("Segment"),
    Whole::layout("Whole"),
    Clip::layout("Clip"),
    LossScale::layout("LossScale"),
];
