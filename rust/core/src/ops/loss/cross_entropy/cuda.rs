//! The CUDA form of the cross-entropy of logits and class ids: `kernels/cross_entropy.cu`.

use candle_core::DType;
use trainable_candle_cuda::kernels::cross_entropy::{
    CROSS_ENTROPY_BACKWARD, CROSS_ENTROPY_FORWARD, CROSS_ENTROPY_TOTAL, CrossEntropyBackward as Gradient,
    CrossEntropyForward, CrossEntropyTotal,
};

use super::{CROSS_ENTROPY, OP, Reduction};
use crate::cuda::launch::{Shape, accumulator, count32, empty, input, optional_input, output, suffix};
use crate::cuda::{Gpu, cast, contiguous};
use crate::ops::index::cuda::id_bytes;
use crate::tape::{Backward, BackwardContext, Saved, record_with_aux};
use crate::{Raw, Result, Tensor};

struct CrossEntropyBackward {
    logits: Saved,
    /// The log-sum-exp of each row of logits.
    lse: Saved,
    /// What the sum of the losses was divided by; `None` with [`Reduction::None`], where each loss has a gradient.
    divisor: Option<Saved>,
    targets: Targets,
    smoothing: f64,
}

impl Backward for CrossEntropyBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let (logits, lse) = (self.logits.get()?, self.lse.get()?);
        let divisor = self.divisor.as_ref().map(Saved::get).transpose()?;
        let x = contiguous(&logits)?;
        let dx = empty(OP, Gpu::of(OP, &x)?, x.dims(), x.dtype())?;
        let factors = GradientFactors {
            grad: Some(context.grad()),
            of_rows: divisor.is_none(),
            divisor: divisor.as_ref(),
            weights: None,
            smoothing: self.smoothing,
        };
        write_gradient(OP, &x, &lse, &self.targets, &dx, &factors)?;
        context.add(0, dx)
    }
}

/// [`cross_entropy`](super::cross_entropy) of arguments that the caller has checked, except the dtype and values of the
/// targets. The host does not read the values.
pub(super) fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    ignore_index: i64,
    smoothing: f64,
    reduction: Reduction,
) -> Result<Tensor> {
    let ids = Targets::new(OP, &targets.raw, ignore_index)?;
    record_with_aux(
        &CROSS_ENTROPY,
        &[logits],
        || {
            let (losses, lse) = losses(OP, &logits.raw, &ids, smoothing)?;
            if matches!(reduction, Reduction::None) {
                let result = cast(&losses.reshape(targets.dims())?, logits.dtype())?;
                return Ok((result, [lse].into_iter().collect()));
            }
            let mean = matches!(reduction, Reduction::Mean);
            let (result, divisor) = total(OP, &losses, &ids, mean, logits.dtype())?;
            Ok((result, [lse, divisor].into_iter().collect()))
        },
        |saver, _, aux| CrossEntropyBackward {
            logits: saver.save(logits),
            lse: saver.save_raw(&aux[0]),
            divisor: aux.get(1).map(|divisor| saver.save_raw(divisor)),
            targets: ids.clone(),
            smoothing,
        },
    )
}

/// The class id of each row of logits, and the id that marks rows to ignore.
#[derive(Clone)]
pub(in crate::ops::loss) struct Targets {
    /// i64 or u32, dense.
    ids: Raw,
    ignore_index: i64,
}

impl Targets {
    /// Takes the ids without reading them on the host. If a target is out of range, a kernel writes its position to the
    /// device's board (memory that the host reads later, to return the error), and the loss of its row is NaN.
    pub(in crate::ops::loss) fn new(op: &'static str, ids: &Raw, ignore_index: i64) -> Result<Self> {
        id_bytes(op, ids)?;
        Ok(Self { ids: contiguous(ids)?, ignore_index })
    }

    fn len(&self) -> usize {
        self.ids.elem_count()
    }
}

/// The loss and the log-sum-exp of each row of `logits (..., classes)` in the accumulator dtype. The loss of an ignored
/// row is 0.
pub(in crate::ops::loss) fn losses(
    op: &'static str,
    logits: &Raw,
    targets: &Targets,
    smoothing: f64,
) -> Result<(Raw, Raw)> {
    let gpu = Gpu::of(op, logits)?;
    let x = contiguous(logits)?;
    let (dtype, rows) = (x.dtype(), targets.len());
    let losses = empty(op, gpu, &[rows], accumulator(dtype))?;
    let lse = empty(op, gpu, &[rows], accumulator(dtype))?;
    if rows > 0 {
        let function = gpu.function(&CROSS_ENTROPY_FORWARD, suffix(op, dtype)?)?;
        let classes = x.dims()[x.rank() - 1];
        let shape = Shape::rows(rows, classes, dtype);
        let arguments = CrossEntropyForward {
            x: input(op, &x)?,
            targets: input(op, &targets.ids)?,
            losses: output(op, &losses)?,
            lse: output(op, &lse)?,
            // The address to which the kernel writes the position of a target that is out of range.
            out_of_range: gpu.board().place(op),
            rows: rows as u64,
            // Row r begins at element (r / inner) · outer_stride + (r % inner) · inner_stride. The logits are dense, so
            // this is r · classes.
            inner: rows as u64,
            outer_stride: 0,
            inner_stride: classes as u64,
            classes: count32(op, classes)?,
            ignore_index: targets.ignore_index,
            id_bytes: id_bytes(op, &targets.ids)?,
            smoothing,
        };
        // SAFETY: the tensors are dense and of these sizes.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok((losses, lse))
}

/// Returns the sum of the rows' losses in `dtype`, and 1. If `mean`, returns the mean of the losses over the rows that
/// are not ignored, and the number of these rows. The second result is in the accumulator dtype.
fn total(op: &'static str, losses: &Raw, targets: &Targets, mean: bool, dtype: DType) -> Result<(Raw, Raw)> {
    let gpu = Gpu::of(op, losses)?;
    let result = empty(op, gpu, &[], dtype)?;
    let divisor = empty(op, gpu, &[], accumulator(dtype))?;
    let function = gpu.function(&CROSS_ENTROPY_TOTAL, suffix(op, dtype)?)?;
    let arguments = CrossEntropyTotal {
        losses: input(op, losses)?,
        targets: input(op, &targets.ids)?,
        result: output(op, &result)?,
        divisor: output(op, &divisor)?,
        rows: targets.len() as u64,
        ignore_index: targets.ignore_index,
        id_bytes: id_bytes(op, &targets.ids)?,
        mean: u32::from(mean),
    };
    // One block, of 1024 threads, adds the losses of all rows.
    // SAFETY: there is a loss and a target for each row.
    unsafe { function.launch(op, gpu, Shape::linear(op, 1, 1024)?, arguments) }?;
    Ok((result, divisor))
}

/// What [`write_gradient`] multiplies the gradient of each row's loss by, and the label smoothing.
pub(in crate::ops::loss) struct GradientFactors<'a> {
    /// The gradient of each row's loss, or of the sum or mean of the losses; 1 if absent.
    pub grad: Option<&'a Raw>,
    /// Whether `grad` has an element for each row.
    pub of_rows: bool,
    /// What the sum of the losses was divided by; 1 if absent.
    pub divisor: Option<&'a Raw>,
    /// One more factor for each row, in the accumulator dtype; 1 if absent.
    pub weights: Option<&'a Raw>,
    /// The label smoothing of the loss.
    pub smoothing: f64,
}

/// Writes the gradient of dense `logits (..., classes)` to `dx`, which may be `logits` itself. `lse` is the log-sum-exp
/// of each row.
pub(in crate::ops::loss) fn write_gradient(
    op: &'static str,
    logits: &Raw,
    lse: &Raw,
    targets: &Targets,
    dx: &Raw,
    factors: &GradientFactors<'_>,
) -> Result<()> {
    if dx.elem_count() == 0 {
        return Ok(());
    }
    let gpu = Gpu::of(op, logits)?;
    let (dtype, rows) = (logits.dtype(), targets.len());
    let grad = factors.grad.map(|grad| contiguous(&cast(grad, dtype)?)).transpose()?;
    let function = gpu.function(&CROSS_ENTROPY_BACKWARD, suffix(op, dtype)?)?;
    let classes = logits.dims()[logits.rank() - 1];
    let arguments = Gradient {
        x: input(op, logits)?,
        lse: input(op, lse)?,
        targets: input(op, &targets.ids)?,
        grad: optional_input(op, grad.as_ref())?,
        divisor: optional_input(op, factors.divisor)?,
        weights: optional_input(op, factors.weights)?,
        dx: output(op, dx)?,
        rows: rows as u64,
        // As in `losses`: row r of the dense logits begins at element r · classes.
        inner: rows as u64,
        outer_stride: 0,
        inner_stride: classes as u64,
        classes: count32(op, classes)?,
        ignore_index: targets.ignore_index,
        id_bytes: id_bytes(op, &targets.ids)?,
        smoothing: factors.smoothing,
        of_rows: u32::from(factors.of_rows),
    };
    // SAFETY: the tensors are dense and of these sizes. If `dx` is `logits`, the thread that writes an element is the
    // only one that reads it.
    unsafe { function.launch(op, gpu, Shape::rows(rows, classes, dtype), arguments) }
}
