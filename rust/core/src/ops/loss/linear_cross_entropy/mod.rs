//! The head of a language model and its loss as one operation, so that the matrix of all logits never exists.
//!
//! The forward pass takes some rows at a time: it computes their logits and losses, and the gradients of the hidden
//! states and of the weight. As the result is a sum, the backward pass only multiplies these saved gradients by a
//! number (Hsu et al. 2024, Liger Kernel, arXiv:2410.10989; Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary
//! Language Models, arXiv:2411.09009).

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod log_probs;

use std::ops::Range;

use smallvec::SmallVec;

use crate::compute::{self, on_device};
use crate::cpu::Mul;
use crate::quantized::weight::WeightRef;
use crate::raw::{Raw, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, is_grad_enabled, record_with_aux};
use crate::{DType, Error, Quantized, Result, Tensor, checkpoint};

#[cfg(feature = "testing")]
pub(super) use log_probs::LOG_PROBS;
pub use log_probs::linear_log_probs;

// Cheap, although it multiplies matrices: a selective checkpoint that keeps the result would also keep the gradients.
pub(super) static LINEAR_CROSS_ENTROPY: OpInfo = OpInfo::cheap("linear_cross_entropy");
const OP: &str = LINEAR_CROSS_ENTROPY.name;

/// Limit of the bytes of the logits of a chunk of rows on a GPU: enough to keep the GPU busy and to read the weight
/// only a few times.
const CHUNK_BYTES: usize = 256 << 20;
/// Limit of the bytes of the logits of a chunk of rows on the CPU.
const CPU_CHUNK_BYTES: usize = 16 << 20;

/// Σ wᵢ · cross-entropy(h Wᵀ, targets)ᵢ → a number in f32 (f64 for f64), for states `h (N, D)`, W = `weight (V, D)` and
/// class ids `targets (N)`, i64 or u32. The factors w of the rows are `weights (N)`, f32 or f64; without `weights` they
/// are 1. The factors get no gradient.
///
/// Rows whose target is [`IGNORE_INDEX`](super::IGNORE_INDEX) add 0. Sums are in f32 (f64 for f64). Logits are in the
/// dtype of `h`, and only those of a chunk of rows exist at a time. The forward pass computes the gradients of `h` and
/// `weight` if they need one. Of a quantized weight, only some rows are dequantized at a time.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit, [`Error::Index`] if a target is
/// out of range, [`Error::NoBackward`] if `weights` needs a gradient, [`Error::Argument`] if `weight` is streamed. On
/// CUDA a target out of range makes the result NaN, and the next function that reads a value or waits for the device
/// returns the error.
pub fn linear_cross_entropy<'a>(
    h: &Tensor,
    weight: impl Into<WeightRef<'a>>,
    targets: &Tensor,
    weights: Option<&Tensor>,
) -> Result<Tensor> {
    let weight = weight.into();
    in_chunks(h, weight, targets, weights, chunk_rows(h, weight))
}

/// [`linear_cross_entropy`] in chunks of `rows` rows.
pub(super) fn in_chunks<'a>(
    h: &Tensor,
    weight: impl Into<WeightRef<'a>>,
    targets: &Tensor,
    weights: Option<&Tensor>,
    rows: usize,
) -> Result<Tensor> {
    let weight = weight.into();
    check(OP, h, weight, targets)?;
    if let Some(weights) = weights {
        check_weights(h, targets, weights)?;
        // `weights` is no input of the operation on the tape, so checkpoints learn here that it is read.
        checkpoint::reads(&[weights]);
    }
    let wanted = [h.requires_grad(), weight.requires_grad()].map(|needs| needs && is_grad_enabled());
    let head = Head { h: &h.raw, weight: Matrix::of(OP, weight)?, rows, wanted };
    let weights = weights.map(|weights| &weights.raw);
    record_with_aux(
        &LINEAR_CROSS_ENTROPY,
        &inputs(h, weight),
        || {
            let (sum, gradients) = on_device!(
                h.device(),
                cuda => cuda::sum(&head, targets, weights),
                cpu => cpu::sum(&head, targets, weights),
            )?;
            Ok((sum, gradients.into_iter().flatten().collect()))
        },
        |saver, _, aux| {
            let mut aux = aux.iter();
            // `aux` has only the wanted gradients.
            let gradients = wanted.map(|wanted| {
                let gradient = if wanted { aux.next() } else { None };
                gradient.map(|gradient| saver.save_raw(gradient))
            });
            LinearCrossEntropyBackward { gradients, dtypes: [h.dtype(), weight.dtype()] }
        },
    )
}

/// The gradients of the sum with respect to states and weight. The backward pass multiplies them by the sum's gradient.
struct LinearCrossEntropyBackward {
    gradients: [Option<Saved>; 2],
    /// The dtypes of the states and of the weight.
    dtypes: [DType; 2],
}

impl Backward for LinearCrossEntropyBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        for (index, (gradient, dtype)) in self.gradients.iter().zip(self.dtypes).enumerate() {
            let Some(gradient) = gradient.as_ref().filter(|_| context.needs(index)) else { continue };
            // The product is in f32 or f64, so that the gradient of the sum is not rounded to the dtype of the states.
            let gradient = compute::cast(&gradient.get()?, accumulator(dtype))?;
            context.add(index, compute::cast(&compute::binary(&gradient, context.grad(), Mul)?, dtype)?)?;
        }
        Ok(())
    }
}

/// The inputs of the operation on the tape: the states and, if it is a tensor, the weight.
fn inputs<'a>(h: &'a Tensor, weight: WeightRef<'a>) -> SmallVec<[&'a Tensor; 2]> {
    std::iter::once(h).chain(weight.tensor()).collect()
}

/// The weight of a head, (V, D).
#[derive(Clone, Copy)]
enum Matrix<'a> {
    Plain(&'a Raw),
    Quantized(&'a Quantized),
}

/// The error for a streamed weight: a head is never streamed.
fn streamed_error(op: &'static str) -> Error {
    Error::argument(op, "the weight is streamed, expected one that stays on the device of the states")
}

impl<'a> Matrix<'a> {
    fn of(op: &'static str, weight: WeightRef<'a>) -> Result<Self> {
        match weight {
            WeightRef::Plain(weight) => Ok(Self::Plain(&weight.raw)),
            WeightRef::Quantized(weight) => Ok(Self::Quantized(weight)),
            WeightRef::Streamed(_) => Err(streamed_error(op)),
        }
    }

    fn dims(self) -> &'a [usize] {
        match self {
            Self::Plain(weight) => weight.dims(),
            Self::Quantized(weight) => weight.dims(),
        }
    }

    /// The logits h Wᵀ.
    fn logits(self, h: &Raw) -> Result<Raw> {
        match self {
            Self::Plain(weight) => compute::matmul(h, &weight.t()?),
            Self::Quantized(weight) => {
                let logits = compute::unset(OP, h, &[h.dims()[0], weight.dims()[0]])?;
                let accumulates = false;
                weight.product(&logits, h, accumulates)?;
                Ok(logits)
            }
        }
    }

    /// Writes dh = g W, the gradient of the states, for the gradient g of the logits.
    fn write_gradient(self, dh: &Raw, g: &Raw) -> Result<()> {
        match self {
            Self::Plain(weight) => {
                let (alpha, accumulates) = (1.0, false);
                compute::write_products(&[[dh, g, weight]], alpha, accumulates)
            }
            Self::Quantized(weight) => weight.input_gradient(dh, g),
        }
    }
}

/// A head and its states. The logits h Wᵀ are computed for a chunk of rows at a time.
struct Head<'a> {
    /// The states, (N, D).
    h: &'a Raw,
    weight: Matrix<'a>,
    /// Number of rows of a chunk.
    rows: usize,
    /// Whether to compute the gradient of the states, and whether to compute that of the weight.
    wanted: [bool; 2],
}

impl Head<'_> {
    /// Calls `function` for each chunk, with the logits and the range of rows of the chunk. `function` returns a result
    /// and, if gradients are wanted, the gradient of these logits. `run` returns the results of all chunks and the
    /// wanted gradients: that of the states, and that of the weight in f32 (f64 for f64).
    fn run<R>(
        &self,
        mut function: impl FnMut(Raw, Range<usize>) -> Result<(R, Option<Raw>)>,
    ) -> Result<(Vec<R>, [Option<Raw>; 2])> {
        let count = self.h.dims()[0];
        let h = compute::contiguous(self.h)?;
        let of_states = self.wanted[0].then(|| compute::zeros(h.dims(), h.dtype(), h.device())).transpose()?;
        let sum_dtype = accumulator(h.dtype());
        let of_weight =
            self.wanted[1].then(|| compute::zeros(self.weight.dims(), sum_dtype, h.device())).transpose()?;
        let mut results = Vec::new();
        for start in (0..count).step_by(self.rows) {
            let length = self.rows.min(count - start);
            let states = h.narrow(0, start, length)?;
            let (result, gradient) = function(self.weight.logits(&states)?, start..start + length)?;
            results.push(result);
            let Some(gradient) = gradient else { continue };
            if let Some(of_states) = &of_states {
                let of_chunk = of_states.narrow(0, start, length)?;
                self.weight.write_gradient(&of_chunk, &gradient)?;
            }
            if let Some(of_weight) = &of_weight {
                let alpha = 1.0;
                compute::matmul_accumulate(of_weight, &gradient.t()?, &states, alpha)?;
            }
        }
        Ok((results, [of_states, of_weight]))
    }

    /// Whether any gradient is computed.
    fn wants_gradients(&self) -> bool {
        self.wanted.contains(&true)
    }
}

/// The dtype of sums of `dtype` values.
const fn accumulator(dtype: DType) -> DType {
    if matches!(dtype, DType::F64) { DType::F64 } else { DType::F32 }
}

/// The number of rows of a chunk.
fn chunk_rows(h: &Tensor, weight: WeightRef<'_>) -> usize {
    // `check` rejects a weight without dimensions later.
    let row_bytes = weight.dims().first().map_or(1, |classes| classes * h.dtype().size_in_bytes());
    let chunk_bytes = if h.device().is_cpu() { CPU_CHUNK_BYTES } else { CHUNK_BYTES };
    let rows = (chunk_bytes / row_bytes.max(1)).max(1);
    // Multiples of 128 rows fill whole tiles of the matrix products.
    if rows > 128 { rows / 128 * 128 } else { rows }
}

fn check(op: &'static str, h: &Tensor, weight: WeightRef<'_>, targets: &Tensor) -> Result<()> {
    let (&[rows, width], &[_, columns]) = (h.dims(), weight.dims()) else {
        let text = format!(
            "h has shape {:?} and the weight {:?}, expected (rows, features) and (classes, features)",
            h.dims(),
            weight.dims()
        );
        return Err(Error::shape(op, text));
    };
    if width != columns {
        let text =
            format!("h has shape {:?}, expected (rows, {columns}) for a weight of shape {:?}", h.dims(), weight.dims());
        return Err(Error::shape(op, text));
    }
    if *targets.dims() != [rows] {
        let text =
            format!("the targets have shape {:?}, expected ({rows},) for h of shape {:?}", targets.dims(), h.dims());
        return Err(Error::shape(op, text));
    }
    if !is_float(h.dtype()) {
        let found = h.dtype().as_str();
        return Err(Error::dtype(op, format!("expected floating point states, found {found}; convert them with to()")));
    }
    crate::ops::linear::same_weight(op, h, weight)?;
    if !targets.device().same_device(h.device()) {
        return Err(Error::device(op, "the targets are on another device than h; move one with to()"));
    }
    Ok(())
}

fn check_weights(h: &Tensor, targets: &Tensor, weights: &Tensor) -> Result<()> {
    if weights.dims() != targets.dims() {
        let text =
            format!("the weights have shape {:?}, expected {:?}, like the targets", weights.dims(), targets.dims());
        return Err(Error::shape(OP, text));
    }
    if !matches!(weights.dtype(), DType::F32 | DType::F64) {
        let found = weights.dtype().as_str();
        return Err(Error::dtype(OP, format!("the weights are {found}, expected f32 or f64; convert them with to()")));
    }
    if !weights.device().same_device(h.device()) {
        return Err(Error::device(OP, "the weights are on another device than h; move one with to()"));
    }
    if weights.requires_grad() && is_grad_enabled() {
        return Err(Error::NoBackward { op: OP });
    }
    Ok(())
}
