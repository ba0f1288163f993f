//! The gradient of a convolution's weight on the CPU. At each kernel tap, it is a sum over the positions (pixels) of
//! the result. Each term is the outer product of two vectors: the channels of the result's gradient at the position,
//! and the channels of the image's pixel that the position reads at the tap. The lanes of a SIMD vector are adjacent
//! channels of the image.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::super::geometry::Geometry;
use super::patch::{Axis, Patch, rects};
use super::stencil::{Stencil, splits};
use crate::cpu::gemm::{Along, Broadcast, Run, Side, Target, Tile, TileShape, pack, packed_len, with_scratch};
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, Real, vectorized};

/// Adjacent elements of an output channel's weight whose gradients are computed from adjacent elements of a copied part
/// of the image (see [`patch`](super::patch)).
struct Stretch {
    /// Index of the first element in the weight of an output channel.
    weight: usize,
    /// Index in the copy of the element that this first element multiplies at the first result position that reads the
    /// part.
    copy: usize,
    /// Number of elements.
    len: usize,
}

/// The gradient of the weight, from the gradient of the result and the image.
pub(super) fn grad_weight<T: Elem>(geometry: &Geometry, grad: &[T], x: &[T]) -> Vec<T::Acc> {
    let stencil = Stencil::forward(geometry);
    let shape = TileShape::detect::<T::Acc>();
    // `row_len` is the number of elements in the weight of one output channel.
    let mut result = vec![T::Acc::ZERO; geometry.out_channels * geometry.row_len()];
    // Input and output channels of a group.
    let depth = geometry.channels_per_group();
    let out = geometry.out_channels_per_group();
    // A task has as many input channels as a tile has rows, or all channels of a group if these are fewer.
    let channels = depth.min(shape.rows).max(1);
    // How many chunks of `channels` input channels a group has, and how many panels of output channels, each as wide as
    // a tile.
    let (chunks, panels) = (depth.div_ceil(channels), out.div_ceil(shape.columns));
    let tasks = geometry.groups() * chunks;
    // If there are too few tasks for all threads, the panels of each task are split among several.
    let splits = splits(tasks, panels);
    let target = SharedMut::new(&mut result);
    par_ranges(tasks * splits, 1, |range| {
        for index in range {
            let (index, split) = (index / splits, index % splits);
            let (group, start) = (index / chunks, index % chunks * channels);
            let panels = panels * split / splits..panels * (split + 1) / splits;
            let outs = panels.start * shape.columns..(panels.end * shape.columns).min(out);
            let task = Task {
                geometry,
                // A phase has the positions that use the same kernel taps. In the forward pass all positions do, so
                // there is a single phase.
                axes: &stencil.phases[0],
                shape,
                group,
                channels: start..depth.min(start + channels),
                outs,
            };
            task.run(grad, x, target.as_ptr());
        }
    });
    result
}

/// The gradients of the weights between some input channels and some output channels of a group.
struct Task<'a> {
    geometry: &'a Geometry,
    /// For height and width: which pixels of the image the positions of the result read at each kernel tap.
    axes: &'a [Axis; 2],
    shape: TileShape,
    group: usize,
    /// Input channels, counted from the start of their group.
    channels: Range<usize>,
    /// Output channels, counted from the start of their group.
    outs: Range<usize>,
}

impl Task<'_> {
    fn run<T: Elem>(&self, grad: &[T], x: &[T], target: *mut T::Acc) {
        let Self { geometry, shape, group, outs, .. } = self;
        let ([height, width], channels) = (geometry.input, self.channels.len());
        let [out_height, out_width] = geometry.output;
        let first_channel = group * geometry.channels_per_group() + self.channels.start;
        let first_out = group * geometry.out_channels_per_group() + outs.start;
        let image_len = height * width * geometry.channels;
        // Rectangles of positions of the result. Each reads one part of the image, which is copied.
        let rects = rects(self.axes, channels);
        let largest_copy = rects.iter().map(|rect| Patch::new(self.axes, rect, channels).len()).max().unwrap_or(0);
        let positions = rects.iter().map(|rect| rect.lines.len() * rect.columns.len()).max().unwrap_or(0);
        let len_grad = packed_len(*shape, Along::Columns, outs.len(), positions);
        // The third region of the scratch memory is not needed.
        with_scratch([largest_copy, len_grad, 0], |[memory, packed, _]: [*mut T::Acc; 3]| {
            for image in 0..geometry.batch {
                for rect in &rects {
                    let patch = Patch::new(self.axes, rect, channels);
                    let (lines, columns) = (rect.lines.len(), rect.columns.len());
                    // SAFETY: the scratch has room for the largest copy, and all of its elements are initialised.
                    let copy = unsafe { std::slice::from_raw_parts_mut(memory, patch.len()) };
                    let source = &x[image * image_len..(image + 1) * image_len];
                    patch.copy(copy, source, [height, width, geometry.channels], first_channel);
                    for out in (0..outs.len()).step_by(shape.columns) {
                        let count = shape.columns.min(outs.len() - out);
                        // A packed panel has its columns (output channels) rounded up to a multiple of 4.
                        let line_len = count.next_multiple_of(4) * columns;
                        for (line, y) in rect.lines.clone().enumerate() {
                            let at = ((image * out_height + y) * out_width + rect.columns.start)
                                * geometry.out_channels
                                + first_out
                                + out;
                            // The strides of output channels (outer) and of positions (inner, which the tiles sum
                            // over).
                            let src = Side { ptr: grad[at..].as_ptr(), outer: 1, inner: geometry.out_channels };
                            // SAFETY: the gradient has `columns` positions from `at` on, and the scratch has room for
                            // them.
                            unsafe {
                                // The panels before this one have `out` columns, none of them added by rounding:
                                // `shape.columns` is a multiple of 4.
                                let dst = packed.add(out * lines * columns + line * line_len);
                                pack(dst, *shape, Along::Columns, src, count, columns);
                            }
                        }
                    }
                    let runs: Vec<Run> =
                        (0..lines).map(|line| Run { a: line * patch.line_step(), b: line * columns }).collect();
                    let stretches = self.stretches(&patch);
                    vectorized(Tiles {
                        task: self,
                        stretches: &stretches,
                        runs,
                        k: columns,
                        step: patch.column_step(),
                        copy: memory,
                        grad: packed,
                        target: target.wrapping_add(first_out * geometry.row_len()),
                    });
                }
            }
        });
    }

    /// The stretches of an output channel's weight whose gradients this task computes. There is one per line of the
    /// kernel if the task has all input channels of the group and the taps of a line read adjacent pixels, otherwise
    /// one per kernel tap.
    fn stretches(&self, patch: &Patch) -> Vec<Stretch> {
        let (depth, channels) = (self.geometry.channels_per_group(), self.channels.len());
        let kernel_width = self.geometry.kernel[1];
        let is_by_line = channels == depth && self.axes[1].is_dense();
        // By line, the first tap stands for all taps of its line.
        let columns = if is_by_line { 1 } else { kernel_width };
        let len = if is_by_line { kernel_width * channels } else { channels };
        // `i` and `j` are a tap's indices in the kernel. `line` and `column` are the place in the copy that the first
        // result position reads at this tap.
        self.axes[0]
            .copied_taps()
            .flat_map(|(i, line)| self.axes[1].copied_taps().take(columns).map(move |(j, column)| (i, line, j, column)))
            .map(|(i, line, j, column)| Stretch {
                weight: (i * kernel_width + j) * depth + self.channels.start,
                copy: line * patch.line_len() + column * channels,
                len,
            })
            .collect()
    }
}

/// The tiles of a task, for the result positions that read one copy. The rows of a tile are elements of a stretch, its
/// columns are output channels.
struct Tiles<'a, T> {
    task: &'a Task<'a>,
    stretches: &'a [Stretch],
    /// A run for each line of result positions. `a` is the offset of the line in the copy. `b` is not yet an offset: it
    /// is the number of positions before the line, to be multiplied by the width of a panel of the packed gradient.
    runs: Vec<Run>,
    /// Number of result positions of a line.
    k: usize,
    /// Distance in the copy between the elements that neighbouring result positions read at the same kernel tap.
    step: usize,
    copy: *const T,
    /// The packed gradient of the result.
    grad: *const T,
    /// The gradient of the weight of the task's first output channel.
    target: *mut T,
}

impl<T: Real> WithSimd for Tiles<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let shape = TileShape::of::<T, S>();
        let (row_len, positions) = (self.task.geometry.row_len(), self.runs.len() * self.k);
        let mut runs = self.runs.clone();
        for out in (0..self.task.outs.len()).step_by(shape.columns) {
            let columns = shape.columns.min(self.task.outs.len() - out);
            let b = Broadcast::packed(self.grad.wrapping_add(out * positions), columns);
            for (run, line) in runs.iter_mut().zip(&self.runs) {
                run.b = line.b * b.step;
            }
            for stretch in self.stretches {
                for row in (0..stretch.len).step_by(shape.rows) {
                    let c = Target {
                        ptr: self.target.wrapping_add(out * row_len + stretch.weight + row),
                        row_stride: 1,
                        column_stride: row_len,
                        alpha: T::ONE,
                        accumulate: true,
                    };
                    let rows = shape.rows.min(stretch.len - row);
                    let a = self.copy.wrapping_add(stretch.copy + row);
                    // SAFETY: the tile reads the copy, which has room for a register after its end, and the packed
                    // gradient. It writes gradients of the weight that no other task writes.
                    unsafe { Tile { runs: &runs, k: self.k, a, a_step: self.step, b, c, rows, columns }.run(simd) };
                }
            }
        }
    }
}
