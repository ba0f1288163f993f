//! Resizing of images by the nearest pixel.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::case::{Case, Entry};
use super::rows;
use crate::compute::contiguous;
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::raw::{Raw, check_allocation_on, from_vec, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, record};
use crate::{Error, Result, Tensor, dispatch_float};

static UPSAMPLE_NEAREST2D: OpInfo = OpInfo::cheap("upsample_nearest2d");

/// The image in another size, each pixel a copy of the nearest one: `x (batch, height, width, channels)` →
/// (batch, `size[0]`, `size[1]`, channels). Pixel i of n meets pixel ⌊i · (m / n)⌋ of m, computed in f32, as torch's
/// `interpolate(mode="nearest")` does. Saves nothing.
///
/// # Errors
/// [`Error::Shape`] if `x` has not four dimensions, or no pixels while the result has some, [`Error::DType`] if it is not floating
/// point, [`Error::OutOfMemory`] if the result is too large.
pub fn upsample_nearest2d(x: &Tensor, size: [usize; 2]) -> Result<Tensor> {
    let op = UPSAMPLE_NEAREST2D.name;
    let &[batch, height, width, channels] = x.dims() else {
        let found = x.dims();
        return Err(Error::shape(
            op,
            format!("the input has shape {found:?}, expected (batch, height, width, channels)"),
        ));
    };
    if !is_float(x.dtype()) {
        return Err(Error::dtype(
            op,
            format!("expected a floating point input, found {}; convert it with to()", x.dtype().as_str()),
        ));
    }
    let (pixels, wanted) = (height * width, size[0].saturating_mul(size[1]));
    if pixels == 0 && wanted > 0 {
        return Err(Error::shape(op, format!("an image of {height} x {width} pixels cannot be resized to {size:?}")));
    }
    check_allocation_on(x.device(), op, &[batch, size[0], size[1], channels], x.dtype())?;
    let resize = Resize { batch, channels, input: [height, width], output: size };
    record(&UPSAMPLE_NEAREST2D, &[x], || resize.forward(&x.raw), |_, _| resize)
}

/// The sizes of an image before and after; pairs are (height, width).
#[derive(Clone, Copy)]
struct Resize {
    batch: usize,
    channels: usize,
    input: [usize; 2],
    output: [usize; 2],
}

/// For each of `output` positions the one of `input` positions that it copies.
fn sources(input: usize, output: usize) -> Vec<usize> {
    let scale = input as f32 / output as f32;
    // Torch, too, takes equal and doubled sizes exactly.
    let source = |i: usize| match output {
        _ if output == input => i,
        _ if output == 2 * input => i / 2,
        _ => ((i as f32 * scale) as usize).min(input - 1),
    };
    (0..output).map(source).collect()
}

/// For each of `input` positions the run of `output` positions that copy it.
fn copies(input: usize, output: usize) -> Vec<Range<usize>> {
    let sources = sources(input, output);
    let first = |position| sources.partition_point(|&source| source < position);
    (0..input).map(|i| first(i)..first(i + 1)).collect()
}

impl Resize {
    fn forward(&self, x: &Raw) -> Result<Raw> {
        let &Self { batch, channels, input, output } = self;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return cuda::rows::upsample(UPSAMPLE_NEAREST2D.name, x, [batch, channels], [input, output], false);
        }
        let x = contiguous(x)?;
        let (lines, columns) = (sources(input[0], output[0]), sources(input[1], output[1]));
        let (line_len, result_len) = (input[1] * channels, output[1] * channels);
        dispatch_float!(x.dtype(), UPSAMPLE_NEAREST2D.name, T => read_all(UPSAMPLE_NEAREST2D.name, &[&x], |operands| {
            let x = elements::<T>(operands[0])?;
            let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
                for (line, out) in range.zip(out.chunks_exact_mut(result_len)) {
                    let source = line / output[0] * input[0] + lines[line % output[0]];
                    let x = &x[source * line_len..(source + 1) * line_len];
                    for (&column, out) in columns.iter().zip(out.chunks_exact_mut(channels)) {
                        for (o, x) in out.iter_mut().zip(&x[column * channels..(column + 1) * channels]) {
                            o.write(*x);
                        }
                    }
                }
            };
            // SAFETY: each line is written as a whole.
            Ok(unsafe { rows::fill_rows(batch * output[0], result_len, rows::rows_per_block(result_len), write) })
        })
        .map(|y| from_vec(y, &[batch, output[0], output[1], channels][..])))
    }
}

impl Backward for Resize {
    /// Each pixel gets the sum of its copies' gradients, line by line.
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let &Self { batch, channels, input, output } = self;
        #[cfg(feature = "cuda")]
        if context.grad().device().is_cuda() {
            let (op, sizes) = (UPSAMPLE_NEAREST2D.name, [input, output]);
            return context.add(0, cuda::rows::upsample(op, context.grad(), [batch, channels], sizes, true)?);
        }
        let grad = contiguous(context.grad())?;
        let (lines, columns) = (copies(input[0], output[0]), copies(input[1], output[1]));
        let (line_len, result_len) = (input[1] * channels, output[1] * channels);
        let op = UPSAMPLE_NEAREST2D.name;
        let grad_x = dispatch_float!(grad.dtype(), op, T => read_all(op, &[&grad], |operands| {
            let g = elements::<T>(operands[0])?;
            let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
                let mut sum = vec![<T as Elem>::Acc::ZERO; line_len];
                for (line, out) in range.zip(out.chunks_exact_mut(line_len)) {
                    let image = line / input[0] * output[0];
                    sum.fill(Real::ZERO);
                    for copy in lines[line % input[0]].clone() {
                        let g = &g[(image + copy) * result_len..(image + copy + 1) * result_len];
                        let sums = sum.chunks_exact_mut(channels).zip(&columns);
                        dispatch(
                            #[inline(always)]
                            || {
                                for (sum, columns) in sums {
                                    let g = &g[columns.start * channels..columns.end * channels];
                                    for g in g.chunks_exact(channels) {
                                        for (s, g) in sum.iter_mut().zip(g) {
                                            *s += g.to_acc();
                                        }
                                    }
                                }
                            },
                        );
                    }
                    for (o, s) in out.iter_mut().zip(&sum) {
                        o.write(T::from_acc(*s));
                    }
                }
            };
            let block = rows::rows_per_block(line_len);
            // SAFETY: each line is written as a whole.
            Ok(unsafe { rows::fill_rows(batch * input[0], line_len, block, write) })
        })
        .map(|grad_x| from_vec(grad_x, &[batch, input[0], input[1], channels][..])))?;
        context.add(0, grad_x)
    }
}

/// By the rows of an index along each axis, which candle takes.
fn plain(x: &Tensor, size: [usize; 2]) -> Result<Tensor> {
    let index = |axis: usize| {
        let positions = sources(x.dims()[axis], size[axis - 1]).into_iter().map(|i| i as i64).collect::<Vec<_>>();
        Tensor::from_vec(positions, size[axis - 1], x.device())
    };
    x.index_select(&index(1)?, 1)?.index_select(&index(2)?, 2)
}

/// Registry entry of this operation.
pub static ENTRIES: &[Entry] = &[Entry {
    info: &UPSAMPLE_NEAREST2D,
    cases: || {
        let case = |label, dims: &[usize], size| {
            Case::new(label, &[dims], move |x| upsample_nearest2d(&x[0], size)).plain(move |x| plain(&x[0], size))
        };
        vec![
            case("doubled", &[2, 3, 2, 5], [6, 4]),
            case("odd sizes", &[1, 3, 4, 2], [5, 7]),
            case("smaller", &[1, 5, 7, 3], [3, 2]),
            case("no images", &[0, 2, 2, 3], [4, 4]),
            Case::new("no pixels", &[&[1, 2, 0, 3]], |x| upsample_nearest2d(&x[0], [4, 0])),
        ]
    },
}];

#[cfg(test)]
mod tests {
    use super::*;

    /// torch 2.11: `F.interpolate(torch.arange(m).float()[None, None], n, mode="nearest")`.
    #[test]
    fn positions_are_those_of_torch() {
        assert_eq!(sources(3, 5), [0, 0, 1, 1, 2]);
        assert_eq!(sources(4, 7), [0, 0, 1, 1, 2, 2, 3]);
        assert_eq!(sources(7, 3), [0, 2, 4]);
        // Half way, but 41 · (2 / 82) is below 1 in f32.
        assert_eq!(sources(2, 82)[40..44], [0, 0, 1, 1]);
        assert_eq!(copies(2, 5), [0..3, 3..5]);
        assert_eq!(copies(3, 2), [0..1, 1..2, 2..2]);
    }

    #[test]
    fn images_that_do_not_fit_are_errors() {
        let image = |dims: &[usize]| Tensor::constant(from_vec(vec![0f32; dims.iter().product()], dims));
        assert!(matches!(upsample_nearest2d(&image(&[2, 2, 3]), [4, 4]), Err(Error::Shape { .. })));
        assert!(matches!(upsample_nearest2d(&image(&[1, 0, 2, 3]), [4, 4]), Err(Error::Shape { .. })));
        let huge = upsample_nearest2d(&image(&[1, 2, 2, 3]), [1 << 40, 1 << 40]);
        assert!(matches!(huge, Err(Error::OutOfMemory { .. })));
        let bytes = Tensor::constant(from_vec(vec![0u8; 4], &[1usize, 2, 2, 1][..]));
        assert!(matches!(upsample_nearest2d(&bytes, [4, 4]), Err(Error::DType { .. })));
    }
}
