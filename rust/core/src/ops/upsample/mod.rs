//! Nearest-neighbour resizing of images.

#[cfg(feature = "testing")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use std::ops::Range;

use crate::compute::on_device;
use crate::raw::{Raw, check_allocation_on, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, record};
use crate::{Error, Result, Tensor};

#[cfg(feature = "testing")]
pub use cases::ENTRIES;

static UPSAMPLE_NEAREST2D: OpInfo = OpInfo::cheap("upsample_nearest2d");

/// The images `x` in another size, where each output pixel is a copy of the nearest input pixel:
/// `x (batch, height, width, channels)` → (batch, `size[0]`, `size[1]`, channels). Along an axis with m input pixels
/// and n output pixels, output pixel i copies input pixel ⌊i · (m / n)⌋, computed in f32, as in torch's
/// `interpolate(mode="nearest")`. The backward pass needs no saved tensors.
///
/// # Errors
/// [`Error::Shape`] if `x` does not have four dimensions, or has no pixels while the result has some, [`Error::DType`]
/// if `x` is not floating point, [`Error::OutOfMemory`] if the result is too large.
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
    let (pixels, result_pixels) = (height * width, size[0].saturating_mul(size[1]));
    if pixels == 0 && result_pixels > 0 {
        return Err(Error::shape(op, format!("an image of {height} x {width} pixels cannot be resized to {size:?}")));
    }
    check_allocation_on(x.device(), op, &[batch, size[0], size[1], channels], x.dtype())?;
    let resize = Resize { batch, channels, input: [height, width], output: size };
    record(&UPSAMPLE_NEAREST2D, &[x], || resize.forward(&x.raw), |_, _| resize)
}

/// The sizes of the images before (`input`) and after resizing (`output`), as (height, width). This struct is also the
/// node of the tape.
#[derive(Clone, Copy)]
struct Resize {
    batch: usize,
    channels: usize,
    input: [usize; 2],
    output: [usize; 2],
}

/// For each of the `output` output positions along an axis, the input position that it copies; there are `input` input
/// positions.
fn sources(input: usize, output: usize) -> Vec<usize> {
    let scale = input as f32 / output as f32;
    // If the size is unchanged or doubled, positions are computed in integers, as in torch.
    let source = |i: usize| match output {
        _ if output == input => i,
        _ if output == 2 * input => i / 2,
        _ => ((i as f32 * scale) as usize).min(input - 1),
    };
    (0..output).map(source).collect()
}

/// For each of the `input` input positions along an axis, the range of the output positions that copy it.
fn copies(input: usize, output: usize) -> Vec<Range<usize>> {
    let sources = sources(input, output);
    // The first output position whose source is `position` or a later one; sources are in ascending order.
    let first = |position| sources.partition_point(|&source| source < position);
    (0..input).map(|i| first(i)..first(i + 1)).collect()
}

impl Resize {
    fn forward(&self, x: &Raw) -> Result<Raw> {
        // The last argument of `cuda::resize` says whether it is the backward pass.
        on_device!(x.device(), cuda => cuda::resize(self, x, false), cpu => cpu::forward(self, x))
    }
}

impl Backward for Resize {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = context.grad();
        let grad_x =
            on_device!(grad.device(), cuda => cuda::resize(self, grad, true), cpu => cpu::backward(self, grad))?;
        context.add(0, grad_x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::from_vec;

    /// torch 2.11: `F.interpolate(torch.arange(m).float()[None, None], n, mode="nearest")`.
    #[test]
    fn source_positions_are_those_of_torch() {
        assert_eq!(sources(3, 5), [0, 0, 1, 1, 2]);
        assert_eq!(sources(4, 7), [0, 0, 1, 1, 2, 2, 3]);
        assert_eq!(sources(7, 3), [0, 2, 4]);
        // In exact arithmetic, output position 41 copies input position 41 · 2 / 82 = 1. In f32, 41 · (2 / 82) is below
        // 1.
        assert_eq!(sources(2, 82)[40..44], [0, 0, 1, 1]);
        assert_eq!(copies(2, 5), [0..3, 3..5]);
        assert_eq!(copies(3, 2), [0..1, 1..2, 2..2]);
    }

    #[test]
    fn wrong_images_and_sizes_are_errors() {
        let image = |dims: &[usize]| Tensor::constant(from_vec(vec![0f32; dims.iter().product()], dims));
        assert!(matches!(upsample_nearest2d(&image(&[2, 2, 3]), [4, 4]), Err(Error::Shape { .. })));
        assert!(matches!(upsample_nearest2d(&image(&[1, 0, 2, 3]), [4, 4]), Err(Error::Shape { .. })));
        let huge = upsample_nearest2d(&image(&[1, 2, 2, 3]), [1 << 40, 1 << 40]);
        assert!(matches!(huge, Err(Error::OutOfMemory { .. })));
        let bytes = Tensor::constant(from_vec(vec![0u8; 4], &[1usize, 2, 2, 1][..]));
        assert!(matches!(upsample_nearest2d(&bytes, [4, 4]), Err(Error::DType { .. })));
    }
}
