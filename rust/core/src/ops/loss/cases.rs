//! Test cases of losses.

use super::cross_entropy::CROSS_ENTROPY;
use super::linear_cross_entropy::{LINEAR_CROSS_ENTROPY, LOG_PROBS};
use super::{
    IGNORE_INDEX, Reduction, cross_entropy, huber_loss, l1_loss, linear_cross_entropy, linear_log_probs, mse_loss,
    regression, smooth_l1_loss,
};
use crate::ops::case::{Case, Domain, Entry};
use crate::quantized::{Format, example};
use crate::raw::from_vec;
use crate::{Result, Tensor};

/// The argument `delta` of the Huber loss and `beta` of the smooth L1 loss: the |difference| at which the loss changes
/// from a parabola to a line.
const THRESHOLD: f64 = 0.7;
/// The argument `smoothing` of [`cross_entropy_plain`] for operations that do not smooth the targets.
const NO_SMOOTHING: f64 = 0.0;

/// `losses`, reduced by `reduction`.
fn reduced(losses: &Tensor, reduction: Reduction) -> Result<Tensor> {
    match reduction {
        Reduction::Mean => losses.mean_all(),
        Reduction::Sum => losses.sum_all(),
        Reduction::None => Ok(losses.clone()),
    }
}

/// The plain form of [`huber_loss`], in basic operations.
fn huber_plain(x: &[Tensor], delta: f64, reduction: Reduction) -> Result<Tensor> {
    let difference = x[0].sub(&x[1])?;
    let clamped = difference.clamp(Some(-delta), Some(delta))?;
    // The loss of a difference d is d²/2 up to |d| = δ, and δ²/2 + δ (|d| - δ) beyond. Both are c²/2 + δ (|d| - |c|),
    // where c is d clamped to the range -δ to δ.
    let beyond = difference.abs()?.sub(&clamped.abs()?)?.mul_scalar(delta)?;
    reduced(&clamped.sqr()?.mul_scalar(0.5)?.add(&beyond)?, reduction)
}

/// The plain form of [`cross_entropy`]. A row with the target t has the loss `-(1 - smoothing) * log_p[t] - smoothing *
/// mean(log_p)`, or 0 if t is [`IGNORE_INDEX`] (-100). The mean of the losses is over the rows that are not ignored.
fn cross_entropy_plain(logits: &Tensor, targets: &[i64], smoothing: f64, reduction: Reduction) -> Result<Tensor> {
    let classes = logits.dims()[logits.rank() - 1];
    let log_p = logits.reshape((targets.len(), classes))?.log_softmax(1)?;
    // The only target below 0 is `IGNORE_INDEX`: id 0 replaces it for `gather`, and the mask is 0 for its rows.
    let ids: Vec<i64> = targets.iter().map(|&t| t.max(0)).collect();
    let ids = Tensor::constant(from_vec(ids, (targets.len(), 1)));
    let mask: Vec<f64> = targets.iter().map(|&t| f64::from(u8::from(t >= 0))).collect();
    let rows_in_mean: f64 = mask.iter().sum();
    let mask = Tensor::constant(from_vec(mask, targets.len()).to_dtype(logits.dtype())?);
    let at_target = log_p.gather(&ids, 1)?.squeeze(1)?.mul_scalar(smoothing - 1.0)?;
    let losses = at_target.add(&log_p.mean(&[1], false)?.mul_scalar(-smoothing)?)?.mul(&mask)?;
    match reduction {
        Reduction::Mean => losses.sum_all()?.mul_scalar(1.0 / rows_in_mean),
        Reduction::Sum => losses.sum_all(),
        Reduction::None => losses.reshape(&logits.dims()[..logits.rank() - 1]),
    }
}

fn regression_case(
    label: &'static str,
    dims: &[usize],
    reduction: Reduction,
    fused: impl Fn(&Tensor, &Tensor, Reduction) -> Result<Tensor> + Send + Sync + 'static,
    plain: impl Fn(&[Tensor], Reduction) -> Result<Tensor> + Send + Sync + 'static,
) -> Case {
    Case::new(label, &[dims, dims], move |x| fused(&x[0], &x[1], reduction)).plain(move |x| plain(x, reduction))
}

fn regression_cases(
    fused: impl Fn(&Tensor, &Tensor, Reduction) -> Result<Tensor> + Copy + Send + Sync + 'static,
    plain: impl Fn(&[Tensor], Reduction) -> Result<Tensor> + Copy + Send + Sync + 'static,
) -> Vec<Case> {
    vec![
        regression_case("mean", &[3, 5], Reduction::Mean, fused, plain),
        regression_case("sum", &[3, 5], Reduction::Sum, fused, plain),
        regression_case("no reduction", &[3, 5], Reduction::None, fused, plain),
        regression_case("sum of no elements", &[0, 5], Reduction::Sum, fused, plain),
    ]
}

fn cross_entropy_case(
    label: &'static str,
    dims: &[usize],
    targets: &'static [i64],
    smoothing: f64,
    reduction: Reduction,
) -> Case {
    let leading = dims[..dims.len() - 1].to_vec();
    Case::new(label, &[dims], move |x| {
        let targets = Tensor::from_vec(targets.to_vec(), leading.as_slice(), x[0].device())?;
        cross_entropy(&x[0], &targets, IGNORE_INDEX, smoothing, reduction)
    })
    .plain(move |x| cross_entropy_plain(&x[0], targets, smoothing, reduction))
}

/// A case of [`linear_cross_entropy`]: `x[0]` are hidden states (rows, 3), and `x[1]` is the weight (7, 3) of a
/// language model's head, which computes the logits of 7 classes. `weights`, if given, has a factor for the loss of
/// each row.
fn head_case(label: &'static str, targets: &'static [i64], weights: Option<&'static [f32]>) -> Case {
    let rows = targets.len();
    let vector = move |values: &[f32], x: &Tensor| Tensor::from_vec(values.to_vec(), rows, x.device());
    Case::new(label, &[&[rows, 3], &[7, 3]], move |x| {
        let targets = Tensor::from_vec(targets.to_vec(), rows, x[0].device())?;
        let weights = weights.map(|weights| vector(weights, &x[0])).transpose()?;
        // The sum is in f32, or in f64 for states in f64. The result of the plain form has the dtype of the states.
        linear_cross_entropy(&x[0], &x[1], &targets, weights.as_ref())?.to_dtype(x[0].dtype())
    })
    .plain(move |x| {
        let losses = cross_entropy_plain(&x[0].matmul(&x[1].t()?)?, targets, NO_SMOOTHING, Reduction::None)?;
        match weights {
            Some(weights) => losses.mul(&vector(weights, &x[0])?.to_dtype(losses.dtype())?)?.sum_all(),
            None => losses.sum_all(),
        }
    })
}

/// What a head's operation computes from the rows' losses.
#[derive(Clone, Copy)]
enum HeadResult {
    /// The sum of the losses, as [`linear_cross_entropy`].
    Sum,
    /// The negative of each loss, as [`linear_log_probs`].
    LogProbs,
}

/// A case with a quantized weight (7, 27) of a head of 7 classes, for states of 27 features. With rows of 27 elements,
/// NF4's blocks of 64 elements cross the ends of rows. `example` makes the same weight each time.
fn quantized_head_case(label: &'static str, format: Format, result: HeadResult) -> Case {
    const TARGETS: [i64; 4] = [3, IGNORE_INDEX, 0, 6];
    Case::new(label, &[&[TARGETS.len(), 27]], move |x| {
        let targets = Tensor::from_vec(TARGETS.to_vec(), TARGETS.len(), x[0].device())?;
        let weight = example(&x[0], [7, 27], format)?;
        match result {
            HeadResult::Sum => linear_cross_entropy(&x[0], &weight, &targets, None),
            HeadResult::LogProbs => linear_log_probs(&x[0], &weight, &targets),
        }?
        .to_dtype(x[0].dtype())
    })
    .plain(move |x| {
        let weight = example(&x[0], [7, 27], format)?.dequantize(x[0].dtype())?;
        let losses = cross_entropy_plain(&x[0].matmul(&weight.t()?)?, &TARGETS, NO_SMOOTHING, Reduction::None)?;
        match result {
            HeadResult::Sum => losses.sum_all(),
            HeadResult::LogProbs => losses.neg(),
        }
    })
}

/// A case of [`linear_log_probs`], with the head of [`head_case`].
fn log_probs_case(label: &'static str, targets: &'static [i64]) -> Case {
    Case::new(label, &[&[targets.len(), 3], &[7, 3]], move |x| {
        let targets = Tensor::from_vec(targets.to_vec(), targets.len(), x[0].device())?;
        linear_log_probs(&x[0], &x[1], &targets)?.to_dtype(x[0].dtype())
    })
    .plain(move |x| cross_entropy_plain(&x[0].matmul(&x[1].t()?)?, targets, NO_SMOOTHING, Reduction::None)?.neg())
}

/// Registry entries of this folder.
pub static ENTRIES: &[Entry] = &[
    Entry {
        info: &regression::MSE,
        cases: || regression_cases(mse_loss, |x, reduction| reduced(&x[0].sub(&x[1])?.sqr()?, reduction)),
    },
    Entry {
        info: &regression::L1,
        cases: || {
            let cases = regression_cases(l1_loss, |x, reduction| reduced(&x[0].sub(&x[1])?.abs()?, reduction));
            // The loss has a kink where the inputs are equal, so they must differ for finite differences.
            cases.into_iter().map(|case| case.domain(Domain::Distinct)).collect()
        },
    },
    Entry {
        info: &regression::HUBER,
        cases: || {
            regression_cases(
                |a, b, reduction| huber_loss(a, b, THRESHOLD, reduction),
                |x, reduction| huber_plain(x, THRESHOLD, reduction),
            )
        },
    },
    Entry {
        info: &regression::SMOOTH_L1,
        cases: || {
            let mut cases = regression_cases(
                |a, b, reduction| smooth_l1_loss(a, b, THRESHOLD, reduction),
                // With a threshold above 0, the smooth L1 loss is the Huber loss divided by the threshold.
                |x, reduction| huber_plain(x, THRESHOLD, reduction)?.mul_scalar(1.0 / THRESHOLD),
            );
            // With a `beta` of 0, the loss is |difference|, which has a kink where the inputs are equal.
            let (dims, reduction): (&[usize], _) = (&[3, 5], Reduction::Mean);
            let without_threshold = |a: &Tensor, b: &Tensor, reduction| smooth_l1_loss(a, b, 0.0, reduction);
            let absolute = |x: &[Tensor], reduction| reduced(&x[0].sub(&x[1])?.abs()?, reduction);
            cases.push(
                regression_case("beta of 0", dims, reduction, without_threshold, absolute).domain(Domain::Distinct),
            );
            cases
        },
    },
    Entry {
        info: &CROSS_ENTROPY,
        cases: || {
            vec![
                cross_entropy_case("mean", &[4, 5], &[0, 4, 2, 2], 0.0, Reduction::Mean),
                cross_entropy_case("ignored targets", &[4, 5], &[0, -100, 2, -100], 0.0, Reduction::Mean),
                cross_entropy_case("smoothing, sum", &[3, 7], &[6, -100, 1], 0.1, Reduction::Sum),
                cross_entropy_case("smoothing, mean", &[3, 7], &[6, -100, 1], 0.3, Reduction::Mean),
                cross_entropy_case(
                    "no reduction, two leading dimensions",
                    &[2, 2, 3],
                    &[0, 2, -100, 1],
                    0.2,
                    Reduction::None,
                ),
                cross_entropy_case("sum of no rows", &[0, 5], &[], 0.0, Reduction::Sum),
            ]
        },
    },
    Entry {
        info: &LINEAR_CROSS_ENTROPY,
        cases: || {
            vec![
                head_case("all rows", &[0, 6, 2, 2], None),
                head_case("ignored targets", &[-100, 6, -100, 2, 1], None),
                head_case("weights", &[3, -100, 6], Some(&[0.5, 2.0, -3.0])),
                head_case("no rows", &[], None),
                quantized_head_case("int8", Format::Int8, HeadResult::Sum),
                quantized_head_case("nf4", Format::Nf4, HeadResult::Sum),
            ]
        },
    },
    Entry {
        info: &LOG_PROBS,
        cases: || {
            vec![
                log_probs_case("ignored targets", &[-100, 6, -100, 2, 1]),
                log_probs_case("no rows", &[]),
                quantized_head_case("int8", Format::Int8, HeadResult::LogProbs),
            ]
        },
    },
];
