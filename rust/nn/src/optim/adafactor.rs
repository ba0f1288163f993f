//! Adafactor, as `torch.optim.Adafactor`: Adam without a first moment. The second moment of each element of a matrix is
//! estimated from the second moments of the element's row and column.
//!
//! Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
//! <https://arxiv.org/abs/1804.04235>.

use smallvec::{SmallVec, smallvec};
use trainable_candle_core::cpu::{Real, dispatch};
use trainable_candle_core::{Error, Result, Var};

use super::Stepper;
use super::kind::{hyper_parameters, registered};
use super::rule::{Chunk, Kernels, Rule, Settings, StateKind, StateSlice, StateSpec, Update, check_not_negative};

hyper_parameters! {
    /// Hyper-parameters of [`Adafactor`]; names, meaning and defaults are torch's.
    pub struct AdafactorConfig {
        /// Upper bound of the relative step size; at least 0. The step size of step t is min(lr, 1/√t) times the
        /// parameter's root mean square.
        pub lr: f64,
        /// At most 0: in step t, the squared gradient enters the second moments with weight t^`beta2_decay`.
        pub beta2_decay: f64,
        /// Two numbers of at least 0. The square of the first number is the smallest second moment; the first number is
        /// by default the machine epsilon of the dtype of the computation. The second number is the smallest root mean
        /// square of a parameter in the formula of the step size.
        pub eps: (Option<f64>, f64),
        /// At least 1: the largest root mean square of an update (the gradient divided by the roots of the second
        /// moments). A larger update is scaled down to it before the multiplication by the step size.
        pub d: f64,
        /// At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
        pub weight_decay: f64,
        /// Ascend instead of descend.
        pub maximize: bool,
    }
}

impl Default for AdafactorConfig {
    fn default() -> Self {
        Self { lr: 1e-2, beta2_decay: -0.8, eps: (None, 1e-3), d: 1.0, weight_decay: 0.0, maximize: false }
    }
}

/// Adafactor, as `torch.optim.Adafactor`. The states of a matrix have as many elements as the matrix has rows and
/// columns together; the state of a vector has one for each element.
pub type Adafactor = Stepper<AdafactorRule>;

impl Adafactor {
    /// Makes Adafactor on `params` with the defaults of [`AdafactorConfig`] except `lr`.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn new(params: Vec<Var>, lr: f64) -> Result<Self> {
        Self::with_config(params, AdafactorConfig { lr, ..AdafactorConfig::default() })
    }
}

registered!(
    AdafactorRule,
    "Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), as `torch.optim.Adafactor`: Adam without a first moment; the \
     second moments of a matrix are estimated from the second moments of its rows and columns.",
    // torch takes all hyper-parameters but `maximize` by position.
    positional: 5,
    AdafactorConfig::default()
);

/// The arithmetic of [`Adafactor`].
pub struct AdafactorRule;

impl Rule for AdafactorRule {
    const NAME: &'static str = "Adafactor";
    type Config = AdafactorConfig;
    const UPDATE: Update<AdafactorConfig, f32> = update::<f32>;
    const UPDATE_F64: Option<Update<AdafactorConfig, f64>> = Some(update::<f64>);
    const KERNELS: Option<Kernels<AdafactorConfig>> = Some(Kernels {
        // The kernel `whole_prepare` begins a step, and no other kernel runs before `adafactor_step`.
        prepare: "whole",
        step: "adafactor_step",
        before: &[],
        // No state has 8 bits.
        step_8bit: None,
        settings: |config| Settings {
            lr: config.lr,
            weight_decay: config.weight_decay,
            maximize: config.maximize.into(),
            // In the order in which the kernel `adafactor_step` reads them; it ignores the zeros.
            more: [
                config.beta2_decay,
                config.eps.0.unwrap_or(f32::EPSILON.into()),
                config.eps.1,
                config.d,
                0.0,
                0.0,
                0.0,
                0.0,
            ],
            ..Settings::default()
        },
    });
    const ELEMENTWISE: bool = false;

    fn validate(config: &AdafactorConfig) -> Result<()> {
        check_not_negative(Self::NAME, "lr", config.lr)?;
        check_not_negative(Self::NAME, "eps[0]", config.eps.0.unwrap_or(0.0))?;
        check_not_negative(Self::NAME, "eps[1]", config.eps.1)?;
        check_not_negative(Self::NAME, "weight_decay", config.weight_decay)?;
        let out_of_range = |name: &str, found: f64, expected: &str| {
            Err(Error::argument(Self::NAME, format!("found {name} {found}, expected a number of {expected}")))
        };
        if !(config.beta2_decay.is_finite() && config.beta2_decay <= 0.0) {
            return out_of_range("beta2_decay", config.beta2_decay, "at most 0");
        }
        if !(config.d.is_finite() && config.d >= 1.0) {
            return out_of_range("d", config.d, "at least 1");
        }
        Ok(())
    }

    fn states(_config: &AdafactorConfig, dims: &[usize]) -> SmallVec<[StateSpec; 4]> {
        if dims.len() < 2 {
            return smallvec![StateKind::Float.named("variance")];
        }
        smallvec![StateKind::Rows.named("row_var"), StateKind::Columns.named("col_var")]
    }

    fn scratch(dims: &[usize]) -> usize {
        // For each matrix, the mean of its rows' second moments.
        matrices(dims)
    }

    fn lr(config: &mut AdafactorConfig) -> &mut f64 {
        &mut config.lr
    }
}

/// Returns the number of matrices in a parameter: the product of all dimensions but the last two, or 0 if the parameter
/// has fewer than two dimensions.
pub(super) fn matrices(dims: &[usize]) -> usize {
    if dims.len() < 2 { 0 } else { dims[..dims.len() - 2].iter().product() }
}

fn update<T: Precision>(config: &AdafactorConfig, step: u64, chunk: Chunk<'_, T>) {
    dispatch(
        #[inline(always)]
        || update_all(config, step, chunk),
    );
}

trait Precision: Real {
    /// The machine epsilon: the distance from 1 to the next larger number of the type.
    const EPSILON: f64;
}

impl Precision for f32 {
    const EPSILON: f64 = f32::EPSILON as f64;
}

impl Precision for f64 {
    const EPSILON: f64 = f64::EPSILON;
}

#[inline(always)]
fn update_all<T: Precision>(config: &AdafactorConfig, step: u64, mut chunk: Chunk<'_, T>) {
    let (step, numel) = (step as f64, chunk.param.len() as f64);
    let weight = step.powf(config.beta2_decay);
    let eps = config.eps.0.unwrap_or(T::EPSILON);
    let param_rms = (sum_of_squares(chunk.param) / numel).sqrt().max(config.eps.1);
    let step_size = param_rms * config.lr.min(1.0 / step.sqrt());

    // `direction` holds the roots of the second moments at first, and then the gradient divided by these roots.
    let mut direction = vec![T::ZERO; chunk.param.len()];
    match chunk.states.as_mut_slice() {
        [StateSlice::Float(variance)] => {
            for ((root, v), &g) in direction.iter_mut().zip(variance.iter_mut()).zip(chunk.grad) {
                *v = lerp(*v, g * g, T::from_f64(weight));
                *root = v.max(T::from_f64(eps * eps)).sqrt();
            }
        }
        [StateSlice::Float(rows), StateSlice::Float(columns)] => {
            let (height, width) = (chunk.dims[chunk.dims.len() - 2], chunk.dims[chunk.dims.len() - 1]);
            let matrix_len = height * width;
            let moments = rows.chunks_mut(height).zip(columns.chunks_mut(width));
            let elements = chunk.grad.chunks(matrix_len).zip(direction.chunks_mut(matrix_len));
            for ((rows, columns), (grad, roots)) in moments.zip(elements) {
                update_moments(rows, columns, grad, weight);
                factored_roots(rows, columns, eps, roots);
            }
        }
        _ => unreachable!("the states are those that the rule declares"),
    }
    let sign = if config.maximize { -T::ONE } else { T::ONE };
    for (x, &g) in direction.iter_mut().zip(chunk.grad) {
        *x = sign * g / *x;
    }

    let clip_divisor = ((sum_of_squares(&direction) / numel).sqrt() / config.d).max(1.0);
    let decay = T::from_f64(1.0 - config.lr * config.weight_decay);
    let step_size = T::from_f64(step_size / clip_divisor);
    for (p, x) in chunk.param.iter_mut().zip(direction) {
        *p = *p * decay - step_size * x;
    }
}

/// Moves the second moments of the rows and columns of a matrix towards the mean squares of the gradient in each row
/// and column, by the fraction `weight` of the way.
#[inline(always)]
fn update_moments<T: Real>(rows: &mut [T], columns: &mut [T], grad: &[T], weight: f64) {
    let (height, width) = (rows.len() as f64, columns.len() as f64);
    let mut column_sums = vec![0f64; columns.len()];
    for (row, row_grad) in rows.iter_mut().zip(grad.chunks(columns.len())) {
        *row = lerp(*row, T::from_f64(sum_of_squares(row_grad) / width), T::from_f64(weight));
        for (sum, g) in column_sums.iter_mut().zip(row_grad) {
            *sum += g.to_f64() * g.to_f64();
        }
    }
    for (column, sum) in columns.iter_mut().zip(column_sums) {
        *column = lerp(*column, T::from_f64(sum / height), T::from_f64(weight));
    }
}

/// Estimates the second moment of each element of a matrix from the second moments of its row and its column: their
/// product divided by the mean of all rows' second moments, or by `eps` if the mean is smaller. Writes the root of each
/// element's second moment, or `eps` if the root is smaller, to `roots`.
#[inline(always)]
fn factored_roots<T: Real>(rows: &[T], columns: &[T], eps: f64, roots: &mut [T]) {
    let mean = rows.iter().map(|row| row.to_f64()).sum::<f64>() / rows.len() as f64;
    let mean = T::from_f64(mean.max(eps));
    for (row_roots, &row) in roots.chunks_mut(columns.len()).zip(rows) {
        for (root, &column) in row_roots.iter_mut().zip(columns) {
            *root = (row * column / mean).max(T::from_f64(eps * eps)).sqrt();
        }
    }
}

/// Returns `a + weight * (b - a)`, and exactly `b` if `weight` is 1.
#[inline(always)]
fn lerp<T: Real>(a: T, b: T, weight: T) -> T {
    if weight.to_f64() < 0.5 { a + weight * (b - a) } else { b - (T::ONE - weight) * (b - a) }
}

/// Returns the sum of the squares, computed in f64. The compiler can vectorize the loop because the partial sums are
/// separate.
#[inline(always)]
pub(super) fn sum_of_squares<T: Real>(data: &[T]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0f64; LANES];
    for block in data.chunks(LANES) {
        for (sum, x) in sums.iter_mut().zip(block) {
            *sum += x.to_f64() * x.to_f64();
        }
    }
    sums.iter().sum()
}
