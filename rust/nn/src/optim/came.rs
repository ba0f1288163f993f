//! CAME, as in `came-pytorch`: Adafactor with smaller steps for the elements whose recent updates differ more from the
//! moving average of their updates.
//!
//! Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", <https://arxiv.org/abs/2307.02047>;
//! the order of operations is that of `came_pytorch.CAME` 0.1.3, <https://github.com/yangluo7/CAME>.

use smallvec::{SmallVec, smallvec};
use trainable_candle_core::cpu::{Real, dispatch};
use trainable_candle_core::{Error, Result};

use super::Stepper;
use super::adafactor::{matrices, sum_of_squares};
use super::kind::{hyper_parameters, registered};
use super::rule::{Chunk, Kernels, Rule, Settings, StateKind, StateSlice, StateSpec, Update, check_not_negative};

hyper_parameters! {
    /// Hyper-parameters of [`CAME`]; names, meaning and defaults are those of `came-pytorch`, which has no default for
    /// `lr`.
    pub struct CAMEConfig {
        /// Learning rate, at least 0.
        pub lr: f64,
        /// Two numbers of at least 0: the first is added to squared gradients, the second to the squared differences
        /// between the update and the moving average of updates.
        pub eps: (f64, f64),
        /// Above 0: the largest root mean square of an update (the gradient divided by the roots of the second
        /// moments). A larger update is scaled down to it.
        pub clip_threshold: f64,
        /// Decay rates of three moving averages: updates, squared gradients and squared differences; each in [0, 1).
        pub betas: (f64, f64, f64),
        /// At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
        pub weight_decay: f64,
    }
}

impl Default for CAMEConfig {
    fn default() -> Self {
        Self { lr: 2e-4, eps: (1e-30, 1e-16), clip_threshold: 1.0, betas: (0.9, 0.999, 0.9999), weight_decay: 0.0 }
    }
}

/// CAME, as `came_pytorch.CAME`. Its states are a moving average of updates for each element, and for each row and each
/// column of a matrix the moving averages of squared gradients and of squared differences. A parameter of more than two
/// dimensions is a stack of matrices, which its last two dimensions index. A vector has a moving average of squared
/// gradients for each element, and none of squared differences: the steps of its elements are not made smaller.
pub type CAME = Stepper<CAMERule>;

// The 5: the reference implementation takes so many hyper-parameters by position.
registered!(
    CAMERule,
    "CAME (Luo et al. 2023, arXiv:2307.02047), as `came_pytorch.CAME`: Adafactor with smaller steps where successive \
     updates differ more.",
    positional: 5,
    CAMEConfig::default()
);

/// The arithmetic of [`CAME`].
pub struct CAMERule;

impl Rule for CAMERule {
    const NAME: &'static str = "CAME";
    type Config = CAMEConfig;
    const UPDATE: Update<CAMEConfig, f32> = update::<f32>;
    const UPDATE_F64: Option<Update<CAMEConfig, f64>> = Some(update::<f64>);
    const KERNELS: Option<Kernels<CAMEConfig>> = Some(Kernels {
        // The kernel `whole_prepare` begins a step, and no other kernel runs before `came_step`.
        prepare: "whole",
        step: "came_step",
        before: &[],
        step_8bit: None,
        settings: |config| Settings {
            lr: config.lr,
            beta1: config.betas.0,
            beta2: config.betas.1,
            eps: config.eps.0,
            weight_decay: config.weight_decay,
            // In the order in which the kernel `came_step` reads them.
            more: [config.eps.1, config.clip_threshold, config.betas.2, 0.0, 0.0, 0.0, 0.0, 0.0],
            ..Settings::default()
        },
    });
    const ELEMENTWISE: bool = false;

    fn validate(config: &CAMEConfig) -> Result<()> {
        let CAMEConfig { lr, eps, clip_threshold, betas, weight_decay } = *config;
        for (name, value) in [("lr", lr), ("eps[0]", eps.0), ("eps[1]", eps.1), ("weight_decay", weight_decay)] {
            check_not_negative(Self::NAME, name, value)?;
        }
        if !(clip_threshold > 0.0 && clip_threshold.is_finite()) {
            let message = format!("found clip_threshold {clip_threshold}, expected a number above 0");
            return Err(Error::argument(Self::NAME, message));
        }
        if [betas.0, betas.1, betas.2].iter().any(|beta| !(0.0..1.0).contains(beta)) {
            let message = format!("found betas {betas:?}, expected all at least 0 and less than 1");
            return Err(Error::argument(Self::NAME, message));
        }
        Ok(())
    }

    fn states(_config: &CAMEConfig, dims: &[usize]) -> SmallVec<[StateSpec; 4]> {
        if dims.len() < 2 {
            return smallvec![StateKind::Float.named("exp_avg"), StateKind::Float.named("exp_avg_sq")];
        }
        smallvec![
            StateKind::Float.named("exp_avg"),
            StateKind::Rows.named("exp_avg_sq_row"),
            StateKind::Columns.named("exp_avg_sq_col"),
            StateKind::Rows.named("exp_avg_res_row"),
            StateKind::Columns.named("exp_avg_res_col"),
        ]
    }

    fn scratch(dims: &[usize]) -> usize {
        // On a CUDA device the kernel stores, for each matrix, the mean of each of the two averages of rows.
        2 * matrices(dims)
    }

    fn lr(config: &mut CAMEConfig) -> &mut f64 {
        &mut config.lr
    }
}

fn update<T: Real>(config: &CAMEConfig, _step: u64, chunk: Chunk<'_, T>) {
    dispatch(
        #[inline(always)]
        || update_all(config, chunk),
    );
}

#[inline(always)]
fn update_all<T: Real>(config: &CAMEConfig, chunk: Chunk<'_, T>) {
    let Chunk { dims, param, grad, mut states, .. } = chunk;
    let (beta1, beta2, beta3) = config.betas;
    let (eps1, eps2) = (T::from_f64(config.eps.0), T::from_f64(config.eps.1));
    // `direction` holds the squared gradients plus `eps1` at first, then the update, and at the end the step without
    // the factor of the learning rate.
    let mut direction: Vec<T> = grad.iter().map(|&g| g * g + eps1).collect();
    match states.as_mut_slice() {
        [_, StateSlice::Float(moments)] => {
            update_averages(moments, &direction, beta2);
            for (x, v) in direction.iter_mut().zip(moments.iter()) {
                *x = T::ONE / v.sqrt();
            }
        }
        [_, StateSlice::Float(rows), StateSlice::Float(columns), ..] => {
            factored_inverse_roots(dims, rows, columns, &mut direction, beta2);
        }
        _ => unreachable!("the states are those that the rule declares"),
    }
    for (x, &g) in direction.iter_mut().zip(grad) {
        *x *= g;
    }
    let rms = (sum_of_squares(&direction) / direction.len() as f64).sqrt();
    let clip_factor = T::from_f64(1.0 / (rms / config.clip_threshold).max(1.0));
    for x in &mut direction {
        *x *= clip_factor;
    }
    let [StateSlice::Float(mean), other_states @ ..] = states.as_mut_slice() else {
        unreachable!("the states are those that the rule declares")
    };
    update_averages(mean, &direction, beta1);
    // The states of a matrix end with the averages of squared differences.
    if let [_, _, StateSlice::Float(rows), StateSlice::Float(columns)] = other_states {
        for (x, &m) in direction.iter_mut().zip(mean.iter()) {
            *x = (*x - m) * (*x - m) + eps2;
        }
        factored_inverse_roots(dims, rows, columns, &mut direction, beta3);
        for (x, &m) in direction.iter_mut().zip(mean.iter()) {
            *x *= m;
        }
    } else {
        direction.copy_from_slice(mean);
    }
    let (decay, lr) = (T::from_f64(1.0 - config.lr * config.weight_decay), T::from_f64(config.lr));
    for (p, x) in param.iter_mut().zip(direction) {
        *p = *p * decay - lr * x;
    }
}

/// Moves `averages` towards `values`: the old averages have the weight `beta`.
#[inline(always)]
fn update_averages<T: Real>(averages: &mut [T], values: &[T], beta: f64) {
    let (beta, gain) = (T::from_f64(beta), T::from_f64(1.0 - beta));
    for (average, &value) in averages.iter_mut().zip(values) {
        *average = *average * beta + gain * value;
    }
}

/// Moves the averages of each matrix's rows and columns towards the means of `values` in each row and column. Then
/// replaces each value by 1/√(row average · column average / mean of the row averages).
#[inline(always)]
fn factored_inverse_roots<T: Real>(dims: &[usize], rows: &mut [T], columns: &mut [T], values: &mut [T], beta: f64) {
    let (height, width) = (dims[dims.len() - 2], dims[dims.len() - 1]);
    let matrices = values.chunks_mut((height * width).max(1));
    for ((values, rows), columns) in matrices.zip(rows.chunks_mut(height)).zip(columns.chunks_mut(width)) {
        let mut column_sums = vec![0f64; width];
        let row_means = values.chunks(width).map(|row| {
            let mut row_sum = 0.0;
            for (x, column_sum) in row.iter().zip(&mut column_sums) {
                row_sum += x.to_f64();
                *column_sum += x.to_f64();
            }
            T::from_f64(row_sum / width as f64)
        });
        let row_means: Vec<T> = row_means.collect();
        update_averages(rows, &row_means, beta);
        let column_means: Vec<T> = column_sums.iter().map(|sum| T::from_f64(sum / height as f64)).collect();
        update_averages(columns, &column_means, beta);
        let mean = rows.iter().map(|row| row.to_f64()).sum::<f64>() / height as f64;
        let by_column: Vec<T> = columns.iter().map(|column| T::ONE / column.sqrt()).collect();
        for (values, row) in values.chunks_mut(width).zip(rows.iter()) {
            let by_row = T::ONE / (*row / T::from_f64(mean)).sqrt();
            for (x, &by_column) in values.iter_mut().zip(&by_column) {
                *x = by_row * by_column;
            }
        }
    }
}
