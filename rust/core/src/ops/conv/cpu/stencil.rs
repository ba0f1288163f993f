//! Convolutions as sums over the kernel taps (the elements of the kernel's height x width): the forward pass, and the
//! gradient of the image, which is a convolution too. The source is what the sums read: the image in the forward pass,
//! the gradient of the result in the backward pass. The target is what the sums are written to. A position is a line
//! and a column. A phase is a set of target positions that use the same kernel taps.
//!
//! A part of the source, with the zeros around it, is copied to memory that stays in the second-level cache. The
//! register tiles of the matrix product read this copy directly, for several target positions at a time, and multiply
//! it by packed panels of the weight. There is no im2col matrix. The terms of an element of the target are added up in
//! the same order, however the image is divided into parts.

use std::ops::Range;

use pulp::{Simd, WithSimd};
use smallvec::SmallVec;

use super::super::geometry::Geometry;
use super::patch::{Axis, Patch, Rect, rects};
use crate::cpu::gemm::{Along, Broadcast, Run, Side, Target, Tile, TileShape, pack, packed_len, with_scratch};
use crate::cpu::pool::{SharedMut, num_threads, par_ranges};
use crate::cpu::{Elem, Real, vectorized};

/// About the maximum number of terms (kernel taps times source channels) that a tile adds up for one block of source
/// channels, so that the panels of the weight stay in the second-level cache. A block may always have `MIN_CHANNELS`
/// channels.
const STEPS: usize = 2944;
/// The number of source channels of a block is a multiple of this number, except for the last block of a group.
const MIN_CHANNELS: usize = 16;
/// The minimum number of multiply-adds of a task; for fewer, the cost of a separate task is too high.
const MIN_WORK: usize = 1 << 18;

/// A convolution: target(position) = Σ weight(tap) · source(i · step + offset of the tap), summed over the kernel taps
/// and the source channels of the group. Here i is the index of the target position in its phase: along each axis, the
/// position is first + i · stride. Outside of its bounds, the source counts as zero.
pub(in crate::ops::conv) struct Stencil {
    pub batch: usize,
    pub groups: usize,
    /// Height, width and channels of the source.
    pub source: [usize; 3],
    /// Height, width and channels of the target.
    pub target: [usize; 3],
    /// The target positions, divided into phases. The two axes of a phase are its lines and its columns.
    pub phases: Vec<[Axis; 2]>,
    weight: WeightStrides,
}

/// The strides of the weight (out_channels, kernel height, kernel width, channels of a group), in elements. The output
/// channels are the target channels in the forward pass, and the source channels in the backward pass.
#[derive(Clone, Copy)]
struct WeightStrides {
    /// Distance in the weight between neighbouring target channels of a group.
    target: usize,
    /// Distance in the weight between neighbouring source channels of a group.
    source: usize,
    /// Distances in the weight between neighbouring lines and neighbouring columns of the kernel.
    tap: [usize; 2],
    /// Distance in the weight between neighbouring groups.
    group: usize,
}

impl Stencil {
    /// Makes the stencil of the forward pass: from the image to the result.
    pub fn forward(geometry: &Geometry) -> Self {
        let options = &geometry.options;
        // The axis of the vertical direction (i = 0) or of the horizontal one (i = 1). The only phase has all target
        // positions.
        let axis = |i: usize| Axis {
            first: 0,
            stride: 1,
            count: geometry.output[i],
            source: geometry.input[i],
            step: options.stride[i],
            // The index and the offset of each kernel tap.
            taps: (0..geometry.kernel[i])
                .map(|tap| (tap, (tap * options.dilation[i]) as isize - options.padding[i] as isize))
                .collect(),
        };
        let ([height, width], [out_height, out_width]) = (geometry.input, geometry.output);
        Self {
            batch: geometry.batch,
            groups: geometry.groups(),
            source: [height, width, geometry.channels],
            target: [out_height, out_width, geometry.out_channels],
            phases: vec![[axis(0), axis(1)]],
            weight: WeightStrides { target: geometry.row_len(), source: 1, ..WeightStrides::of(geometry) },
        }
    }

    /// Makes the stencil of the backward pass: from the gradient of the result to the gradient of the image. In each
    /// direction, pixel i of the image contributed to pixel o of the result at kernel tap k if
    /// o · stride = i + padding - k · dilation. Two pixels of the image whose distance is a multiple of the stride use
    /// the same taps, and are in one phase.
    pub fn transposed(geometry: &Geometry) -> Self {
        let options = &geometry.options;
        // The axis of direction i, for the phase with the target positions `first`, `first + stride`, and so on.
        let axis = |i: usize, first: usize| {
            let stride = options.stride[i];
            let offset = |k: usize| (first + options.padding[i]) as isize - (k * options.dilation[i]) as isize;
            let is_used = |k: &usize| offset(*k).rem_euclid(stride as isize) == 0;
            // From the last tap to the first, so that the offsets rise.
            let taps = (0..geometry.kernel[i]).rev().filter(is_used);
            Axis {
                first,
                stride,
                count: (geometry.input[i] - first).div_ceil(stride),
                source: geometry.output[i],
                step: 1,
                taps: taps.map(|k| (k, offset(k).div_euclid(stride as isize))).collect(),
            }
        };
        let ([height, width], [out_height, out_width]) = (geometry.input, geometry.output);
        // The first target positions of the phases in direction i.
        let firsts = |i: usize| 0..options.stride[i].min(geometry.input[i]);
        Self {
            batch: geometry.batch,
            groups: geometry.groups(),
            source: [out_height, out_width, geometry.out_channels],
            target: [height, width, geometry.channels],
            phases: firsts(0).flat_map(|y| firsts(1).map(move |x| [axis(0, y), axis(1, x)])).collect(),
            weight: WeightStrides { target: 1, source: geometry.row_len(), ..WeightStrides::of(geometry) },
        }
    }

    /// Computes the target from all images in `source`.
    pub fn run<T: Elem>(&self, source: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T::Acc> {
        let len = self.batch * self.target.iter().product::<usize>();
        let mut target = Vec::<T::Acc>::with_capacity(len);
        if len > 0 {
            for axes in &self.phases {
                let shape = TileShape::detect::<T::Acc>();
                let phase = Phase { stencil: self, axes, shape };
                phase.run(source, &phase.pack(weight), bias, SharedMut::new(&mut target.spare_capacity_mut()[..len]));
            }
        }
        // SAFETY: each target position is in one phase, whose parts write all channels of the position.
        unsafe { target.set_len(len) };
        target
    }
}

impl WeightStrides {
    /// The strides that the forward and the transposed stencil share; `target` and `source` are zero. The distance
    /// between neighbouring output channels is `row_len`.
    fn of(geometry: &Geometry) -> Self {
        let width = geometry.channels_per_group();
        let group = geometry.out_channels_per_group() * geometry.row_len();
        Self { target: 0, source: 0, tap: [geometry.kernel[1] * width, width], group }
    }
}

/// One phase of a stencil.
struct Phase<'a> {
    stencil: &'a Stencil,
    axes: &'a [Axis; 2],
    shape: TileShape,
}

impl Phase<'_> {
    /// The number of kernel taps of the phase.
    fn taps(&self) -> usize {
        self.axes[0].taps.len() * self.axes[1].taps.len()
    }

    /// The number of source channels of a group.
    fn depth(&self) -> usize {
        self.stencil.source[2] / self.stencil.groups
    }

    /// The number of target channels of a group, which are the rows of the matrix product.
    fn rows(&self) -> usize {
        self.stencil.target[2] / self.stencil.groups
    }

    /// Splits the source channels of a group into blocks. All blocks except for the last have the same size. There is
    /// at least one block; it is empty if the group has no channels.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let depth = self.depth();
        let most = (STEPS / self.taps().max(1)).max(MIN_CHANNELS);
        let size = depth.div_ceil(depth.div_ceil(most).max(1)).next_multiple_of(MIN_CHANNELS);
        (0..depth.max(1)).step_by(size.max(1)).map(move |start| start..depth.min(start + size))
    }

    /// The index of a panel's first element in the packed weight. The panel belongs to `group` and to `block`, a range
    /// of source channels. `row` is the panel's first target channel.
    fn packed_at(&self, group: usize, block: &Range<usize>, row: usize) -> usize {
        // Before the panel are all rows of the earlier source channels (of earlier groups and blocks), then the earlier
        // rows of this block. `rows` is the number of rows with padding.
        let rows = packed_len(self.shape, Along::Rows, self.rows(), 1);
        self.taps() * (rows * (group * self.depth() + block.start) + row * block.len())
    }

    /// Packs the weight: for each group and each block of source channels, panels of target channels. The columns of a
    /// panel are ordered by kernel tap, then by source channel.
    fn pack<T: Elem>(&self, weight: &[T]) -> Vec<T::Acc> {
        let strides = self.stencil.weight;
        // The end of the last group is where the next group would begin.
        let len = self.packed_at(self.stencil.groups, &(0..0), 0);
        let mut packed = Vec::<T::Acc>::with_capacity(len);
        let blocks: SmallVec<[Range<usize>; 8]> = self.blocks().collect();
        let panels = self.rows().div_ceil(self.shape.rows);
        let shared = SharedMut::new(&mut packed.spare_capacity_mut()[..len]);
        let panel_len = len / (self.stencil.groups * panels).max(1);
        // To pack an element counts as much work as 16 multiply-adds. `panel_len` is the length of a panel in all
        // blocks together, and `grain` the number of panels of a task.
        let grain = (MIN_WORK / 16 / panel_len.max(1)).max(1);
        par_ranges(self.stencil.groups * panels, grain, |range| {
            for index in range {
                let (group, row) = (index / panels, index % panels * self.shape.rows);
                let rows = self.shape.rows.min(self.rows() - row);
                for block in &blocks {
                    let tap_len = packed_len(self.shape, Along::Rows, rows, block.len());
                    let mut at = self.packed_at(group, block, row);
                    for (line, _) in &self.axes[0].taps {
                        for (column, _) in &self.axes[1].taps {
                            let tap_start = group * strides.group
                                + row * strides.target
                                + line * strides.tap[0]
                                + column * strides.tap[1]
                                + block.start * strides.source;
                            // SAFETY: the slice belongs to this panel, block and kernel tap alone; the strides stay
                            // inside of the weight.
                            unsafe {
                                let dst = shared.slice(at..at + tap_len).as_mut_ptr().cast();
                                let ptr = weight.as_ptr().wrapping_add(tap_start);
                                let src = Side { ptr, outer: strides.target, inner: strides.source };
                                pack(dst, self.shape, Along::Rows, src, rows, block.len());
                            }
                            at += tap_len;
                        }
                    }
                }
            }
        });
        // SAFETY: the panels cover all `len` elements.
        unsafe { packed.set_len(len) };
        packed
    }

    /// Computes the target positions of the phase, with the packed `weight`.
    fn run<T: Elem>(
        &self,
        source: &[T],
        weight: &[T::Acc],
        bias: Option<&[T]>,
        target: SharedMut<'_, std::mem::MaybeUninit<T::Acc>>,
    ) {
        let Stencil { batch, groups, source: [height, width, channels], .. } = *self.stencil;
        let panels = self.rows().div_ceil(self.shape.rows);
        let widest = self.blocks().map(|block| block.len()).max().unwrap_or(0);
        // Rectangles of target positions whose copies of the source, with `widest` channels, stay in the cache.
        let rects = rects(self.axes, widest);
        // A task is a rectangle of one image, for one group. If that gives too few tasks, `splits` divides its panels.
        let tasks = rects.len() * batch * groups;
        let splits = splits(tasks, panels);
        // `work` counts multiply-adds as if the phase had all target positions. `grain` is the number of tasks that a
        // thread takes at a time.
        let work = self.taps() * self.depth() * self.stencil.target.iter().product::<usize>() * batch;
        let task_work = work / (tasks * splits).max(1);
        let grain = (MIN_WORK / task_work.max(1)).max(1);
        par_ranges(tasks * splits, grain, |range| {
            for index in range {
                let (index, split) = (index / splits, index % splits);
                let (index, rect) = (index / rects.len(), &rects[index % rects.len()]);
                let (image, group) = (index / groups, index % groups);
                let part = Part {
                    phase: self,
                    rect,
                    image,
                    group,
                    panels: panels * split / splits..panels * (split + 1) / splits,
                };
                let image_len = height * width * channels;
                let source = &source[image * image_len..(image + 1) * image_len];
                part.run(source, weight, bias, target.as_ptr().cast());
            }
        });
    }
}

/// The number of smaller tasks into which each of `tasks` tasks is split: at most `most`, and 1 if the tasks keep all
/// threads busy until the end as they are.
pub(super) fn splits(tasks: usize, most: usize) -> usize {
    let threads = num_threads();
    if tasks >= 4 * threads || tasks.is_multiple_of(threads) {
        return 1;
    }
    (4 * threads).div_ceil(tasks.max(1)).min(most.max(1))
}

/// A part of the work: some panels of a group's target channels, at the target positions of a rectangle of one image.
struct Part<'a> {
    phase: &'a Phase<'a>,
    rect: &'a Rect,
    image: usize,
    group: usize,
    panels: Range<usize>,
}

impl Part<'_> {
    /// The target channels of the part, counted from the start of their group.
    fn channels(&self) -> Range<usize> {
        let rows = self.phase.shape.rows;
        self.panels.start * rows..(self.panels.end * rows).min(self.phase.rows())
    }

    /// The index in the target of the group's channel `row`, at a line and a column counted in the part's rectangle.
    fn target_at(&self, line: usize, column: usize, row: usize) -> usize {
        let [height, width, channels] = self.phase.stencil.target;
        let [lines, columns] = self.phase.axes;
        let line = lines.first + (self.rect.lines.start + line) * lines.stride;
        let column = columns.first + (self.rect.columns.start + column) * columns.stride;
        ((self.image * height + line) * width + column) * channels + self.group * self.phase.rows() + row
    }

    /// Computes the part from `source`, one image, and the packed `weight`.
    fn run<T: Elem>(&self, source: &[T], weight: &[T::Acc], bias: Option<&[T]>, target: *mut T::Acc) {
        let (phase, channels) = (self.phase, self.channels());
        if let Some(bias) = bias {
            let group_start = self.group * phase.rows();
            let bias = &bias[group_start + channels.start..group_start + channels.end];
            for line in 0..self.rect.lines.len() {
                for column in 0..self.rect.columns.len() {
                    let at = self.target_at(line, column, channels.start);
                    for (i, x) in bias.iter().enumerate() {
                        // SAFETY: an element of this part, which no other part writes.
                        unsafe { target.add(at + i).write(x.to_acc()) };
                    }
                }
            }
        }
        let widest = phase.blocks().map(|block| block.len()).max().unwrap_or(0);
        let patch = Patch::new(phase.axes, self.rect, widest);
        // Of the three regions of scratch memory, only the first is needed.
        with_scratch([patch.len(), 0, 0], |[memory, ..]: [*mut T::Acc; 3]| {
            for block in phase.blocks() {
                let patch = Patch::new(phase.axes, self.rect, block.len());
                let first_channel = self.group * phase.depth() + block.start;
                // SAFETY: the scratch has room for the widest patch, and all of its elements are initialised.
                let copy = unsafe { std::slice::from_raw_parts_mut(memory, patch.len()) };
                patch.copy(copy, source, phase.stencil.source, first_channel);
                let runs = patch.runs(phase.axes);
                let accumulate = bias.is_some() || block.start > 0;
                // The packed weight, starting at the panel whose first target channel is `row`.
                let weight = |row| &weight[phase.packed_at(self.group, &block, row)..];
                vectorized(Tiles { part: self, patch: &patch, memory, runs: &runs, weight, target, accumulate });
            }
        });
    }
}

/// The tiles of a part, for one block of source channels.
struct Tiles<'a, T, W> {
    part: &'a Part<'a>,
    patch: &'a Patch,
    /// The elements of the copy.
    memory: *const T,
    /// The runs of adjacent elements of the copy that the first target position reads, in the order of the packed
    /// weight, and the number of elements of each run.
    runs: &'a (Vec<Run>, usize),
    /// Takes the first target channel of a panel, and returns the packed weight, starting at this panel.
    weight: W,
    target: *mut T,
    /// Whether the tiles add to what `target` already has: the bias, or the sums over earlier blocks.
    accumulate: bool,
}

/// The number of columns of the next tile, if `rest` columns remain and a tile has at most `most`. If the tile after it
/// would be the last and have fewer than 8 columns, the two tiles share the rest about evenly.
fn tile_columns(rest: usize, most: usize) -> usize {
    if rest > most && rest < most + 8 { rest.div_ceil(2).next_multiple_of(4).min(most) } else { rest.min(most) }
}

impl<'a, T: Real, W: Fn(usize) -> &'a [T]> WithSimd for Tiles<'_, T, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { part, patch, target, .. } = self;
        let shape = TileShape::of::<T, S>();
        // `k` is the number of elements of a run.
        let (runs, k) = self.runs;
        let mut runs = runs.clone();
        let [_, columns] = part.phase.axes;
        for row in part.channels().step_by(shape.rows) {
            let rows = shape.rows.min(part.channels().end - row);
            let (a, a_step) = ((self.weight)(row).as_ptr(), rows.next_multiple_of(shape.lanes));
            // Where each run begins in the panel, which has `a_step` elements for each step of a run.
            for (index, run) in runs.iter_mut().enumerate() {
                run.a = index * k * a_step;
            }
            for line in 0..part.rect.lines.len() {
                let mut column = 0;
                while column < part.rect.columns.len() {
                    let count = tile_columns(part.rect.columns.len() - column, shape.columns);
                    let c = Target {
                        ptr: target.wrapping_add(part.target_at(line, column, row)),
                        row_stride: 1,
                        column_stride: columns.stride * part.phase.stencil.target[2],
                        alpha: T::ONE,
                        accumulate: self.accumulate,
                    };
                    let ptr = self.memory.wrapping_add(patch.at(line, column));
                    let b = Broadcast { ptr, step: 1, column: patch.column_step() };
                    // SAFETY: `a` is the packed panel of these rows, the copy has a margin for a whole tile, and `c`
                    // has elements of this part.
                    unsafe { Tile { runs: &runs, k: *k, a, a_step, b, c, rows, columns: count }.run(simd) };
                    column += count;
                }
            }
        }
    }
}
