//! Copies of parts of a stencil's source, in the accumulator type, with the zeros of the padding.
//! A stencil computes each target position from source positions, one per kernel tap; a phase is a set of target
//! positions that use the same taps (see [`stencil`](super::stencil)). A part is a rectangle of target positions of a
//! phase; its copy has the source positions that the part reads. The matrix product reads the copy in register tiles,
//! each of several target positions of a line.

use std::ops::Range;

use smallvec::SmallVec;

use crate::cpu::gemm::Run;
use crate::cpu::{Elem, Real, dispatch};

/// The maximum number of target columns of a part.
const MAX_COLUMNS: usize = 96;
/// The maximum number of elements of a copy, so that the copy stays in the second-level cache. Only the copy for a
/// single target line may have more.
const MAX_PATCH: usize = 128 << 10;
/// A part has at most an eighth of the target lines of a phase, rounded up, so that threads can share an image. But a
/// part may have this many lines even if they are more than an eighth, as long as `MAX_PATCH` permits it: smaller parts
/// would mostly copy lines that neighbouring parts copy too.
const MIN_LINES: usize = 4;

/// One direction, vertical or horizontal, of one phase of a stencil.
pub(in crate::ops::conv) struct Axis {
    /// The first target position of the phase, counted in the whole target.
    pub first: usize,
    /// Distance in the target between neighbouring target positions of the phase.
    pub stride: usize,
    /// Number of target positions of the phase.
    pub count: usize,
    /// Number of positions of the whole source in this direction, without padding.
    pub source: usize,
    /// Distance in the source between the source positions that neighbouring target positions of the phase read at the
    /// same kernel tap.
    pub step: usize,
    /// The kernel taps of the phase: the index in the kernel and the offset of each, in the order of rising offsets. At
    /// a tap, target position i, counted in the phase, reads source position i · step + offset, which may be in the
    /// padding.
    pub taps: SmallVec<[(usize, isize); 8]>,
}

impl Axis {
    /// The smallest offset of a kernel tap; 0 if the phase has no taps.
    fn origin(&self) -> isize {
        self.taps.first().map_or(0, |&(_, offset)| offset)
    }

    /// Distance in the source between the first and the last kernel tap.
    fn span(&self) -> usize {
        self.taps.last().map_or(0, |&(_, offset)| offset.abs_diff(self.origin()))
    }

    /// Distance in the source between neighbouring positions of a copy: 1 if there are several kernel taps, `step` if
    /// there is only one. With one tap, the copy has only the source positions that are read.
    fn jump(&self) -> usize {
        if self.span() == 0 { self.step } else { 1 }
    }

    /// Distance between the positions of a copy that neighbouring target positions read at the same kernel tap.
    fn copy_step(&self) -> usize {
        self.step / self.jump()
    }

    /// The number of positions of the copy for `count` neighbouring target positions.
    fn copied(&self, count: usize) -> usize {
        (count - 1) * self.copy_step() + self.span() + 1
    }

    /// For the copy that the target positions `range` read, returns the range of the copy's positions that are inside
    /// the source, and the source position at which the copy begins. The copy may begin before the source (a negative
    /// position).
    fn inside(&self, range: &Range<usize>) -> (Range<usize>, isize) {
        let first = (range.start * self.step) as isize + self.origin();
        // The number of positions of the copy that are before a source position.
        let count_before = |position: isize| ((position - first).max(0) as usize).div_ceil(self.jump());
        let copied = self.copied(range.len());
        let (start, end) = (count_before(0).min(copied), count_before(self.source as isize).min(copied));
        (start..end.max(start), first)
    }

    /// Whether a target position reads adjacent source positions at consecutive kernel taps.
    pub fn is_dense(&self) -> bool {
        self.taps.windows(2).all(|pair| pair[1].1 - pair[0].1 == 1)
    }

    /// For each kernel tap, its index in the kernel, and the position in a copy that the first target position of the
    /// part reads at this tap.
    pub fn copied_taps(&self) -> impl Iterator<Item = (usize, usize)> {
        self.taps.iter().map(|&(tap, offset)| (tap, offset.abs_diff(self.origin())))
    }
}

/// A rectangle of target positions, counted in their phase.
#[derive(Clone, Debug)]
pub(in crate::ops::conv) struct Rect {
    pub lines: Range<usize>,
    pub columns: Range<usize>,
}

/// Splits the target positions of a phase (see [`Stencil`](super::stencil::Stencil)) into parts whose copies, with
/// `channels` channels, stay in the second-level cache. The parts depend on sizes alone, not on the number of threads.
pub(in crate::ops::conv) fn rects(axes: &[Axis; 2], channels: usize) -> Vec<Rect> {
    let [lines, columns] = axes;
    if lines.count == 0 || columns.count == 0 {
        return Vec::new();
    }
    // As few parts as `MAX_COLUMNS` permits, about equally wide. Register tiles compute multiples of 4 columns.
    let width = columns.count.div_ceil(columns.count.div_ceil(MAX_COLUMNS)).next_multiple_of(4);
    let line_len = (columns.copied(width) * channels).max(1);
    // The number of target lines whose copy has at most `MAX_PATCH` elements, but at least one: the largest `count`
    // for which `lines.copied(count)` lines of `line_len` elements fit.
    let fitting = (MAX_PATCH / line_len).saturating_sub(lines.span() + 1) / lines.copy_step() + 1;
    let height = fitting.min(lines.count.div_ceil(8).max(MIN_LINES));
    // As many parts as with this height, but about equally high.
    let height = lines.count.div_ceil(lines.count.div_ceil(height));
    let ranges = |count: usize, size: usize| (0..count).step_by(size).map(move |start| start..count.min(start + size));
    ranges(lines.count, height)
        .flat_map(|lines| ranges(columns.count, width).map(move |columns| Rect { lines: lines.clone(), columns }))
        .collect()
}

/// The layout of the copy of one part: (lines, columns, channels). A position is a line and a column.
pub(super) struct Patch {
    channels: usize,
    /// Lines and columns of the copy.
    size: [usize; 2],
    /// Distance in the copy, in lines and in columns, between the positions that neighbouring target positions read at
    /// the same kernel tap.
    step: [usize; 2],
    /// Lines and columns of the copy that are inside the source; the other elements are zero.
    inside: [Range<usize>; 2],
    /// The source line and column of the copy's first position, which may be outside of the source.
    first: [isize; 2],
    /// Distances in the source between neighbouring lines and between neighbouring columns of the copy.
    jump: [usize; 2],
}

impl Patch {
    pub fn new(axes: &[Axis; 2], rect: &Rect, channels: usize) -> Self {
        let [(lines, first_line), (columns, first_column)] =
            [axes[0].inside(&rect.lines), axes[1].inside(&rect.columns)];
        Self {
            channels,
            size: [axes[0].copied(rect.lines.len()), axes[1].copied(rect.columns.len())],
            step: axes.each_ref().map(Axis::copy_step),
            inside: [lines, columns],
            first: [first_line, first_column],
            jump: axes.each_ref().map(Axis::jump),
        }
    }

    /// The number of elements of the copy, plus a margin after its end, which the last tiles read: a tile may have up
    /// to 3 columns more than the part, and reads whole registers.
    pub fn len(&self) -> usize {
        // More elements than a register holds.
        const SLACK: usize = 64;
        self.size[0] * self.line_len() + 3 * self.column_step() + SLACK
    }

    /// The number of elements of a line of the copy.
    pub fn line_len(&self) -> usize {
        self.size[1] * self.channels
    }

    /// Distance in the copy between the elements that neighbouring positions of a target line read at the same kernel
    /// tap.
    pub fn column_step(&self) -> usize {
        self.step[1] * self.channels
    }

    /// Distance in the copy between the elements that neighbouring target lines read at the same kernel tap.
    pub fn line_step(&self) -> usize {
        self.step[0] * self.line_len()
    }

    /// The index in the copy of the first element that a target position, counted in the part, reads at the first
    /// kernel tap.
    pub fn at(&self, line: usize, column: usize) -> usize {
        line * self.line_step() + column * self.column_step()
    }

    /// The runs of adjacent elements of the copy that the part's first target position reads at all kernel taps, and
    /// the number of elements of each run. If the taps of a kernel line read adjacent positions, a run has all taps of
    /// the kernel line, otherwise one tap.
    pub fn runs(&self, axes: &[Axis; 2]) -> (Vec<Run>, usize) {
        let width = axes[1].taps.len();
        let dense = axes[1].is_dense();
        let columns: SmallVec<[usize; 8]> =
            axes[1].copied_taps().take(if dense { 1 } else { width }).map(|(_, at)| at).collect();
        let starts = axes[0]
            .copied_taps()
            .flat_map(|(_, line)| columns.iter().map(move |column| line * self.line_len() + column * self.channels));
        let k = if dense { width * self.channels } else { self.channels };
        // `a`, the place in the packed weight, depends on the panel of the weight, so the caller sets it.
        (starts.map(|b| Run { a: 0, b }).collect(), k)
    }

    /// Fills `copy` from one image of the source; `size` is the image's height, width and channels. The first channel
    /// of the copy is channel `first_channel` of the image.
    pub fn copy<T: Elem>(&self, copy: &mut [T::Acc], image: &[T], size: [usize; 3], first_channel: usize) {
        let [_, width, image_channels] = size;
        let channels = self.channels;
        if channels == 0 {
            return;
        }
        let lines = copy.chunks_exact_mut(self.line_len()).take(self.size[0]);
        for (line_index, line) in lines.enumerate() {
            if !self.inside[0].contains(&line_index) {
                line.fill(Real::ZERO);
                continue;
            }
            let columns = self.inside[1].clone();
            line[..columns.start * channels].fill(Real::ZERO);
            line[columns.end * channels..].fill(Real::ZERO);
            if columns.is_empty() {
                continue;
            }
            let source_line = (self.first[0] + (line_index * self.jump[0]) as isize) as usize;
            let source_column = (self.first[1] + (columns.start * self.jump[1]) as isize) as usize;
            let image = &image[(source_line * width + source_column) * image_channels + first_channel..];
            let inside = &mut line[columns.start * channels..columns.end * channels];
            // Distance in the image between the pixels of neighbouring columns of the copy.
            let distance = self.jump[1] * image_channels;
            if distance == channels {
                convert(inside, image);
            } else {
                for (position, pixel) in inside.chunks_exact_mut(channels).zip(image.chunks(distance)) {
                    convert(position, pixel);
                }
            }
        }
    }
}

/// Fills `to` with the first elements of `from`, converted to the accumulator type.
#[inline(always)]
fn convert<T: Elem>(to: &mut [T::Acc], from: &[T]) {
    let pairs = to.iter_mut().zip(from);
    // Runs the loop compiled for the widest SIMD instructions of the CPU.
    dispatch(
        #[inline(always)]
        || {
            for (to, from) in pairs {
                *to = from.to_acc();
            }
        },
    );
}
