//! Strided and broadcast operands, read in the row-major order of the result.

use std::ops::Range;

use candle_core::Layout;
use smallvec::SmallVec;

/// Sizes of dimensions.
pub type Dims = SmallVec<[usize; 6]>;

/// The number of elements that [`Blocks`] reads at a time, a block: small enough for several blocks to stay in the
/// first-level cache, large enough for the work on a block to outweigh the work of gathering it.
pub(super) const BLOCK: usize = 1024;

/// Returns the shape to which two shapes broadcast by numpy's rules, or `None` if they do not broadcast.
pub fn broadcast_dims(a: &[usize], b: &[usize]) -> Option<Dims> {
    let (long, short) = if a.len() >= b.len() { (a, b) } else { (b, a) };
    let mut dims = Dims::from_slice(long);
    for (d, &s) in dims.iter_mut().rev().zip(short.iter().rev()) {
        match (*d, s) {
            (d, s) if d == s => {}
            (1, s) => *d = s,
            (_, 1) => {}
            _ => return None,
        }
    }
    Some(dims)
}

/// A dimension: its size, and the distance in memory between neighbouring elements along it, in elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Axis {
    pub size: usize,
    pub stride: usize,
}

/// Returns the axes of `layout` broadcast to `dims`, outermost first, without axes of size 1. Two neighbouring axes are
/// merged if the stride of the outer axis is the stride of the inner axis times the size of the inner axis.
pub(super) fn collapse(layout: &Layout, dims: &[usize]) -> SmallVec<[Axis; 6]> {
    // Broadcasting adds dimensions before those of the layout.
    let added = dims.len() - layout.dims().len();
    let mut axes = SmallVec::<[Axis; 6]>::new();
    for (i, &size) in dims.iter().enumerate() {
        if size == 1 {
            continue;
        }
        let stride = match i.checked_sub(added) {
            Some(i) if layout.dims()[i] != 1 => layout.stride()[i],
            _ => 0,
        };
        match axes.last_mut() {
            Some(outer) if outer.stride == stride * size => {
                *outer = Axis { size: outer.size * size, stride };
            }
            _ => axes.push(Axis { size, stride }),
        }
    }
    axes
}

/// Splits the elements with the row-major indices `range` into runs of elements along the innermost axis, and calls
/// `f(position, offset, stride, length)` for each run. The run's first element has the row-major index `range.start +
/// position` and is stored at index `offset` in memory. The run has `length` elements, `stride` apart in memory. No
/// axis may have size 0.
#[inline(always)]
pub(super) fn for_each_run(axes: &[Axis], range: Range<usize>, mut f: impl FnMut(usize, usize, usize, usize)) {
    let Some((inner, outer)) = axes.split_last() else {
        // A tensor without axes has one element.
        if !range.is_empty() {
            f(0, 0, 1, 1);
        }
        return;
    };
    // The indices of the run's first element: `index` along the outer axes, `at` along the innermost axis. `offset` is
    // the index in memory of the element with these outer indices and the innermost index 0.
    let mut index: SmallVec<[usize; 6]> = SmallVec::from_elem(0, outer.len());
    let mut at = range.start % inner.size;
    let mut rest = range.start / inner.size;
    let mut offset = 0;
    for (i, axis) in index.iter_mut().zip(outer).rev() {
        *i = rest % axis.size;
        rest /= axis.size;
        offset += *i * axis.stride;
    }
    let mut position = 0;
    while position < range.len() {
        let length = (inner.size - at).min(range.len() - position);
        f(position, offset + at * inner.stride, inner.stride, length);
        position += length;
        at = 0;
        // Advance the outer indices by one, the last index first: an index that reaches its axis' size returns to 0,
        // and the index before it advances.
        for (i, axis) in index.iter_mut().zip(outer).rev() {
            *i += 1;
            offset += axis.stride;
            if *i < axis.size {
                break;
            }
            offset -= axis.size * axis.stride;
            *i = 0;
        }
    }
}

/// An operand that is read as if it were a contiguous tensor of the result's shape.
pub(super) struct View<'a, T> {
    data: &'a [T],
    axes: SmallVec<[Axis; 6]>,
}

impl<'a, T: Copy> View<'a, T> {
    /// Creates a view of the elements of `layout`, broadcast to `dims`; `data` begins at the layout's first element.
    pub fn new(data: &'a [T], layout: &Layout, dims: &[usize]) -> Self {
        Self { data, axes: collapse(layout, dims) }
    }

    /// Returns a slice that begins with the elements, if they are consecutive in memory.
    pub fn contiguous(&self) -> Option<&'a [T]> {
        match self.axes.as_slice() {
            [] => Some(self.data),
            [Axis { size, stride: 1 }] => Some(&self.data[..*size]),
            _ => None,
        }
    }

    /// Returns true if all elements are one broadcast element.
    fn is_constant(&self) -> bool {
        matches!(self.axes.as_slice(), [Axis { stride: 0, .. }])
    }

    /// Converts the elements with the row-major indices `range` by `wrap` and writes them to `out`.
    pub fn gather<U: Copy>(&self, range: Range<usize>, out: &mut [U], wrap: impl Fn(T) -> U) {
        for_each_run(&self.axes, range, |position, offset, stride, length| {
            let out = &mut out[position..position + length];
            match stride {
                0 => out.fill(wrap(self.data[offset])),
                1 => {
                    for (o, x) in out.iter_mut().zip(&self.data[offset..offset + length]) {
                        *o = wrap(*x);
                    }
                }
                _ => {
                    for (o, x) in out.iter_mut().zip(self.data[offset..].iter().step_by(stride)) {
                        *o = wrap(*x);
                    }
                }
            }
        });
    }
}

/// Reads a [`View`] block by block.
pub(super) struct Blocks<'v, 'a, T> {
    view: &'v View<'a, T>,
    /// The result of [`View::contiguous`].
    contiguous: Option<&'a [T]>,
    /// Whether all elements of the view are one broadcast element.
    constant: bool,
    /// Memory for one block, if the view is not contiguous.
    scratch: Vec<T>,
}

impl<'v, 'a, T: Copy> Blocks<'v, 'a, T> {
    /// Starts reading `view`, which must not be empty.
    pub fn new(view: &'v View<'a, T>) -> Self {
        let contiguous = view.contiguous();
        let constant = view.is_constant();
        // If the view is constant, all blocks equal this initial scratch, and `get` never writes to it.
        let scratch = if contiguous.is_none() { vec![view.data[0]; BLOCK] } else { Vec::new() };
        Self { view, contiguous, constant, scratch }
    }

    /// Returns the elements with the row-major indices `range`, at most [`BLOCK`] of them.
    pub fn get(&mut self, range: Range<usize>) -> &[T] {
        if let Some(data) = self.contiguous {
            return &data[range];
        }
        let length = range.len();
        if !self.constant {
            self.view.gather(range, &mut self.scratch[..length], |x| x);
        }
        &self.scratch[..length]
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Shape;

    use super::*;

    /// A layout that starts at index 0 in memory.
    fn layout(dims: &[usize], stride: &[usize]) -> Layout {
        Layout::new(Shape::from(dims), stride.to_vec(), 0)
    }

    #[test]
    fn shapes_broadcast_as_in_numpy() {
        let broadcast = |a: &[usize], b: &[usize]| broadcast_dims(a, b).map(SmallVec::into_vec);
        assert_eq!(broadcast(&[2, 1, 3], &[4, 1]), Some(vec![2, 4, 3]));
        assert_eq!(broadcast(&[], &[2, 3]), Some(vec![2, 3]));
        assert_eq!(broadcast(&[1], &[0]), Some(vec![0]));
        assert_eq!(broadcast(&[0, 1], &[1, 5]), Some(vec![0, 5]));
        assert_eq!(broadcast(&[2], &[0]), None);
        assert_eq!(broadcast(&[2, 3], &[2]), None);
    }

    #[test]
    fn axes_with_matching_strides_merge_and_axes_of_size_1_are_left_out() {
        let axes = |source: &Layout, dims: &[usize]| {
            collapse(source, dims).iter().map(|a| (a.size, a.stride)).collect::<Vec<_>>()
        };
        assert_eq!(axes(&layout(&[2, 3, 4], &[12, 4, 1]), &[2, 3, 4]), [(24, 1)]);
        // A gap of 12 elements after each matrix keeps the first axis apart.
        assert_eq!(axes(&layout(&[2, 3, 4], &[24, 4, 1]), &[2, 3, 4]), [(2, 24), (12, 1)]);
        // The stride of an axis of size 1 (here 7) has no effect. Broadcast axes get stride 0.
        assert_eq!(axes(&layout(&[3, 1], &[1, 7]), &[2, 3, 4]), [(2, 0), (3, 1), (4, 0)]);
        assert_eq!(axes(&layout(&[], &[]), &[2, 3]), [(6, 0)]);
        assert_eq!(axes(&layout(&[1, 1], &[5, 9]), &[1, 1]), []);
    }

    #[test]
    fn blocks_read_any_range_in_row_major_order() {
        let data: Vec<u32> = (0..4000).collect();
        // Dimensions and strides of a layout, and the dimensions to which it broadcasts: contiguous, transposed,
        // broadcast along two axes, one element, every second element.
        let cases: [(&[usize], &[usize], &[usize]); 5] = [
            (&[30, 7, 11], &[77, 11, 1], &[30, 7, 11]),
            (&[11, 7, 30], &[1, 11, 77], &[11, 7, 30]),
            (&[7, 1], &[3, 1], &[50, 7, 11]),
            (&[], &[], &[3000]),
            (&[20, 100], &[200, 2], &[20, 100]),
        ];
        for (layout_dims, stride, dims) in cases {
            let source = layout(layout_dims, stride);
            let total: usize = dims.iter().product();
            let added = dims.len() - layout_dims.len();
            let expected: Vec<u32> = (0..total)
                .map(|i| {
                    let (mut rest, mut offset) = (i, 0);
                    for d in (0..dims.len()).rev() {
                        let at = rest % dims[d];
                        rest /= dims[d];
                        if d >= added && layout_dims[d - added] != 1 {
                            offset += at * stride[d - added];
                        }
                    }
                    data[offset]
                })
                .collect();
            let view = View::new(&data, &source, dims);
            let mut blocks = Blocks::new(&view);
            for start in [0, 1, 37, 900, total - 1] {
                let end = total.min(start + BLOCK);
                assert_eq!(blocks.get(start..end), &expected[start..end], "{layout_dims:?} {stride:?} from {start}");
            }
        }
    }
}
