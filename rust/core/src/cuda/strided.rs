//! The description of an elementwise kernel's tensors: `Strided` of `cuda/include/strided.cuh`.

use candle_core::{DType, Layout};
use smallvec::SmallVec;
use trainable_candle_cuda::structs::Strided;

use super::launch::{Address, Const, Element, Mut, Shape, address, element};
use crate::{Error, Raw, Result};

/// `MAX_AXES` of `strided.cuh`.
const MAX_AXES: usize = 8;
/// The widest access of a thread, in bytes.
const ACCESS: usize = 16;

/// A tensor of an elementwise kernel.
#[derive(Clone, Copy)]
pub struct Member<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) address: Address,
    pub(crate) dtype: DType,
}

impl<'a> Member<'a> {
    /// The layout, address and dtype of a tensor.
    ///
    /// # Errors
    /// As [`address`].
    pub fn new(op: &'static str, tensor: &'a Raw) -> Result<Self> {
        Ok(Self { layout: tensor.layout(), address: address(op, tensor)?, dtype: tensor.dtype() })
    }

    /// The tensor as an input of a kernel.
    pub const fn input(&self) -> Const {
        Const::new(self.address, element(self.dtype))
    }

    /// The tensor as an output of a kernel.
    pub const fn output(&self) -> Mut {
        Mut::new(self.address, element(self.dtype))
    }

    /// The unsigned integer type with the size of the tensor's elements, for kernels that only copy elements.
    pub fn unsigned_element(&self) -> Element {
        Element::of_bytes(self.dtype.size_in_bytes())
    }
}

/// A dimension, or several merged dimensions: its size, and its stride in elements in each tensor.
#[derive(Clone, Copy)]
struct Axis<const K: usize> {
    size: usize,
    strides: [usize; K],
}

/// The description of tensors that broadcast to `dims`, and the shape of a launch (grid and blocks). A thread computes
/// as many neighbouring elements as one access can read of the largest dtype, or one element if not all tensors allow
/// wide accesses. The first tensor is the result and has the shape `dims`; the others are operands.
///
/// # Errors
/// [`Error::Shape`] if more dimensions than [`MAX_AXES`] remain after neighbours are merged, and as [`Shape::threads`].
pub fn strided<const K: usize>(
    op: &'static str,
    dims: &[usize],
    members: [Member<'_>; K],
) -> Result<(Strided<K>, Shape)> {
    let axes = merged(dims, &members.map(|member| member.layout));
    if axes.len() > MAX_AXES {
        let message = format!(
            "the strides of shape {dims:?} make {} separate dimensions, expected at most {MAX_AXES}; call contiguous() first",
            axes.len()
        );
        return Err(Error::shape(op, message));
    }
    let width = ACCESS / members.iter().map(|member| member.dtype.size_in_bytes()).max().unwrap_or(ACCESS);
    let width = if is_wide(&axes, &members, width) { width } else { 1 };
    let count = dims.iter().product::<usize>();
    let mut tensors = Strided {
        count: count as u64,
        axes: axes.len() as u32,
        width: width as u32,
        sizes: [1; MAX_AXES],
        strides: [[0; MAX_AXES]; K],
    };
    for (i, axis) in axes.iter().enumerate() {
        tensors.sizes[i] = axis.size as u64;
        for (strides, stride) in tensors.strides.iter_mut().zip(axis.strides) {
            strides[i] = stride as u64;
        }
    }
    Ok((tensors, Shape::threads(op, count.div_ceil(width))?))
}

/// The axes, outermost first, at least one. Axes of size 1 are left out. Two neighbouring axes are merged if in every
/// tensor the stride of the outer axis is the stride of the inner axis times the size of the inner axis.
fn merged<const K: usize>(dims: &[usize], layouts: &[&Layout; K]) -> SmallVec<[Axis<K>; MAX_AXES]> {
    let mut axes = SmallVec::<[Axis<K>; MAX_AXES]>::new();
    for (i, &size) in dims.iter().enumerate().filter(|(_, size)| **size != 1) {
        // Broadcasting aligns the last dimensions, so dimension `i` of `dims` may have a smaller index `dim` in a
        // tensor. A tensor that lacks the dimension, or has size 1 there, repeats its values: the stride is 0.
        let strides = layouts.map(|layout| match (i + layout.dims().len()).checked_sub(dims.len()) {
            Some(dim) if layout.dims()[dim] != 1 => layout.stride()[dim],
            _ => 0,
        });
        match axes.last_mut() {
            Some(outer) if (0..K).all(|k| outer.strides[k] == strides[k] * size) => {
                *outer = Axis { size: outer.size * size, strides };
            }
            _ => axes.push(Axis { size, strides }),
        }
    }
    if axes.is_empty() {
        // The only index of this axis is 0, so its strides do not matter.
        axes.push(Axis { size: 1, strides: [1; K] });
    }
    axes
}

/// Whether a thread can access `width` neighbouring elements of each tensor at once. The elements must be contiguous
/// and aligned. Instead, an operand may have one broadcast element (stride 0) for all `width` elements of the result.
fn is_wide<const K: usize>(axes: &[Axis<K>], members: &[Member<'_>; K], width: usize) -> bool {
    let Some((inner, outer)) = axes.split_last() else { return false };
    inner.size % width == 0
        && inner.strides[0] == 1
        && members.iter().enumerate().all(|(k, member)| match inner.strides[k] {
            0 => true,
            1 => {
                member.address % (width * member.dtype.size_in_bytes()) as Address == 0
                    && outer.iter().all(|axis| axis.strides[k] % width == 0)
            }
            _ => false,
        })
}
