//! Code that the CUDA forms of layer, RMS and group norms share.

use candle_core::DType;
use trainable_candle_cuda::kernels::norm::{NORM_AFFINE_SUM, NormAffineSum};

use super::{Affine, Place, SavedAffine};
use crate::compute;
use crate::cuda::launch::{Shape, accumulator, count32, empty, input, optional_output, suffix};
use crate::cuda::{Gpu, cast, contiguous};
use crate::tape::backward::Pending;
use crate::tape::{BackwardContext, Saved};
use crate::{Raw, Result};

/// The index of the norm's input x among the inputs of the operation.
const INPUT: usize = 0;

/// Scale (`weight`) and shift (`bias`) as kernels read them: dense, and both in the input's dtype or both in f32.
pub(super) struct Parameters {
    pub weight: Option<Raw>,
    pub bias: Option<Raw>,
    dtype: DType,
}

impl Parameters {
    pub fn new(input: DType, [weight, bias]: [Option<&Raw>; 2]) -> Result<Self> {
        let mixed = [weight, bias].into_iter().flatten().any(|parameter| parameter.dtype() != input);
        let dtype = if mixed { DType::F32 } else { input };
        let converted = |parameter: &Raw| contiguous(&cast(parameter, dtype)?);
        Ok(Self { weight: weight.map(converted).transpose()?, bias: bias.map(converted).transpose()?, dtype })
    }

    /// 1 if both are f32, else 0: the kernels' argument `affine_f32`.
    pub fn is_f32(&self) -> u32 {
        u32::from(self.dtype == DType::F32)
    }
}

/// The gradients of a norm's input, scale and shift; `None` for one that is not wanted.
#[derive(Default)]
pub(super) struct Gradients {
    pub input: Option<Raw>,
    pub weight: Option<Raw>,
    pub bias: Option<Raw>,
}

impl<'a> Affine<'a> {
    /// Scale and shift in the dtypes that they have; `None` for one that the norm does not have.
    pub(super) fn parameters(&self) -> [Option<&'a Raw>; 2] {
        [self.weight.map(|weight| &weight.raw), self.bias.map(|bias| &bias.raw)]
    }
}

/// Which gradients a backward pass computes.
pub(super) struct Wanted {
    pub input: bool,
    pub weight: bool,
    pub bias: bool,
    /// A dense gradient that the input already has. The new gradient of the input is added to it.
    pub before: Option<Pending>,
}

impl SavedAffine {
    /// Scale and shift in the dtypes that they have; `None` for one that the backward pass does not read.
    pub(super) fn parameters(&self) -> Result<[Option<Raw>; 2]> {
        let get = |saved: &Option<Saved>| saved.as_ref().map(Saved::get).transpose();
        Ok([get(&self.scale)?, get(&self.shift)?])
    }

    /// Says which gradients this backward pass computes. `before` is `None`: the caller sets it. A [`Place`] has the
    /// index of scale or shift among the inputs of the operation, and the shape and dtype of its gradient.
    pub(super) fn wanted(&self, context: &BackwardContext<'_>) -> Wanted {
        let wants = |place: &Option<Place>| place.as_ref().is_some_and(|place| context.needs(place.index));
        Wanted {
            input: context.needs(INPUT),
            weight: wants(&self.scale_place),
            bias: wants(&self.shift_place),
            before: None,
        }
    }

    /// Adds `grads` to the gradients of the operation's inputs. `grads.input` already includes the earlier gradient
    /// that [`BackwardContext::take_pending`] has taken out, if there was one.
    pub(super) fn add_gradients(&self, context: &mut BackwardContext<'_>, grads: Gradients) -> Result<()> {
        if let Some(sum) = grads.input {
            let owned = true;
            context.add_pending(INPUT, Pending::new(sum, owned))?;
        }
        for (place, grad) in [(&self.scale_place, grads.weight), (&self.shift_place, grads.bias)] {
            if let (Some(place), Some(grad)) = (place, grad) {
                context.add(place.index, compute::cast(&grad, place.dtype)?.reshape(place.dims.as_slice())?)?;
            }
        }
        Ok(())
    }
}

/// Returns the tensor to which a kernel writes the gradient of input `x`: the tensor of `before`, the gradient that the
/// input already has, if nothing else uses this tensor; else a new tensor.
pub(super) fn destination(op: &'static str, gpu: &Gpu, x: &Raw, before: Option<&Pending>) -> Result<Raw> {
    match before {
        Some(Pending { sum, owned: true, .. }) => Ok(sum.clone()),
        _ => empty(op, gpu, x.dims(), x.dtype()),
    }
}

/// Returns the gradients of scale and shift, (samples, len), in the accumulator dtype of inputs of `dtype`. Each is the
/// sum over the pieces of `partials` (samples, pieces, 2, len), which has the scale's part at index 0 of the third
/// dimension and the shift's at index 1. The part of a piece is already summed over the rows of this piece.
/// `wants` says whether to compute the gradient of the scale (index 0) and that of the shift (1).
pub(super) fn sum_affine(
    op: &'static str,
    gpu: &Gpu,
    partials: &Raw,
    dtype: DType,
    wants: [bool; 2],
) -> Result<[Option<Raw>; 2]> {
    let (samples, pieces, _, len) = partials.dims4()?;
    let result = |wanted: bool| wanted.then(|| empty(op, gpu, &[samples, len], accumulator(dtype))).transpose();
    let sums = [result(wants[0])?, result(wants[1])?];
    if partials.elem_count() > 0 {
        let function = gpu.function(&NORM_AFFINE_SUM, suffix(op, dtype)?)?;
        // A block computes 32 of the `len` elements: 16 threads add the pieces of an element. The second dimension of
        // the grid has the scale and the shift.
        let shape = Shape { grid: [len.div_ceil(32) as u32, 2, samples as u32], block: [32, 16, 1], shared: 0 };
        let arguments = NormAffineSum {
            partials: input(op, partials)?,
            dweight: optional_output(op, sums[0].as_ref())?,
            dbias: optional_output(op, sums[1].as_ref())?,
            pieces: count32(op, pieces)?,
            len: count32(op, len)?,
            // The kernel writes f32 sums for inputs of 16 bits too: gradients of parameters are accumulated in f32.
            affine_f32: u32::from(dtype != DType::F64),
        };
        // SAFETY: the tensors are dense and have the sizes in the arguments.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(sums)
}
