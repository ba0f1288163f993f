//! Muon, as `torch.optim.Muon`: the update is the momentum, made orthogonal.
//!
//! Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
//! <https://kellerjordan.github.io/posts/muon/>. `match_rms_adamw` is from Liu et al., "Muon is Scalable for LLM
//! Training", <https://arxiv.org/abs/2502.16982>. The reference,
//! <https://github.com/pytorch/pytorch/blob/v2.9.0/torch/optim/_muon.py>, rounds the products of matrices to bf16. Here
//! the products are f32 (f64 for f64 variables).

use smallvec::{SmallVec, smallvec};
use trainable_candle_core::cpu::{Real, dispatch};
use trainable_candle_core::{Error, Result};

use super::Stepper;
use super::adafactor::sum_of_squares;
use super::kind::{hyper_parameters, registered};
use super::rule::{
    Chunk, Kernels, Rule, Settings, StateKind, StateSlice, StateSpec, Update, check_betas, check_not_negative,
};

hyper_parameters! {
    /// Hyper-parameters of [`Muon`]. Names, meaning and defaults are those of `torch.optim.Muon`, with three
    /// exceptions: `match_rms_adamw` replaces torch's `adjust_lr_fn`, and torch has no `vector_betas` and `vector_eps`.
    pub struct MuonConfig {
        /// Learning rate, at least 0.
        pub lr: f64,
        /// At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
        pub weight_decay: f64,
        /// Decay rate of the momentum, in [0, 1).
        pub momentum: f64,
        /// Nesterov momentum: orthogonalize `(1 - momentum) * g + momentum * m` instead of m, where g is the gradient
        /// and m the new momentum.
        pub nesterov: bool,
        /// Coefficients (a, b, c) of the Newton-Schulz iteration: X becomes `a X + b S X + c S^2 X`, where S is
        /// `X X^T`.
        pub ns_coefficients: (f64, f64, f64),
        /// Above 0: the iteration starts with the matrix to orthogonalize, divided by the larger of its norm and `eps`.
        pub eps: f64,
        /// The number of steps of the Newton-Schulz iteration, less than 100.
        pub ns_steps: usize,
        /// Scale the update of an A x B matrix by `0.2 * sqrt(max(A, B))`, which suits learning rates of AdamW (torch:
        /// `adjust_lr_fn="match_rms_adamw"`). If false, scale it by `sqrt(max(1, A / B))`.
        pub match_rms_adamw: bool,
        /// Decay rates of the first and the second moment of AdamW, which updates vectors; each in [0, 1).
        pub vector_betas: (f64, f64),
        /// At least 0: AdamW, which updates vectors, adds this to the root of the second moment.
        pub vector_eps: f64,
    }
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            weight_decay: 0.1,
            momentum: 0.95,
            nesterov: true,
            ns_coefficients: (3.4445, -4.775, 2.0315),
            eps: 1e-7,
            ns_steps: 5,
            match_rms_adamw: false,
            vector_betas: (0.9, 0.999),
            vector_eps: 1e-8,
        }
    }
}

/// Muon, as `torch.optim.Muon`. A parameter of more than two dimensions counts as a matrix with one row for each index
/// of the first dimension. AdamW updates parameters of fewer than two dimensions. The implementation is for the low
/// ranks of adapters: the time of a step is proportional to the matrix's number of elements times its smaller side.
pub type Muon = Stepper<MuonRule>;

registered!(
    MuonRule,
    "Muon (Jordan et al. 2024), as `torch.optim.Muon` in f32: the update of a matrix is its momentum, made orthogonal; \
     AdamW updates vectors.",
    // torch takes the first seven hyper-parameters by position.
    positional: 7,
    MuonConfig::default()
);

/// The arithmetic of [`Muon`].
pub struct MuonRule;

impl Rule for MuonRule {
    const NAME: &'static str = "Muon";
    type Config = MuonConfig;
    const UPDATE: Update<MuonConfig, f32> = update::<f32>;
    const UPDATE_F64: Option<Update<MuonConfig, f64>> = Some(update::<f64>);
    const KERNELS: Option<Kernels<MuonConfig>> = Some(Kernels {
        // The kernel `whole_prepare` begins a step, and no other kernel runs before `muon_step`.
        prepare: "whole",
        step: "muon_step",
        before: &[],
        step_8bit: None,
        settings: |config| Settings {
            lr: config.lr,
            beta1: config.vector_betas.0,
            beta2: config.vector_betas.1,
            eps: config.vector_eps,
            weight_decay: config.weight_decay,
            nesterov: config.nesterov.into(),
            // In the order in which the kernel `muon_step` reads them.
            more: [
                config.momentum,
                config.ns_coefficients.0,
                config.ns_coefficients.1,
                config.ns_coefficients.2,
                config.eps,
                config.ns_steps as f64,
                f64::from(u8::from(config.match_rms_adamw)),
                0.0, // not read
            ],
            ..Settings::default()
        },
    });
    const ELEMENTWISE: bool = false;

    fn validate(config: &MuonConfig) -> Result<()> {
        check_not_negative(Self::NAME, "lr", config.lr)?;
        check_not_negative(Self::NAME, "weight_decay", config.weight_decay)?;
        check_not_negative(Self::NAME, "vector_eps", config.vector_eps)?;
        check_betas(Self::NAME, config.vector_betas)?;
        let (a, b, c) = config.ns_coefficients;
        let message = if !(0.0..1.0).contains(&config.momentum) {
            format!("found momentum {}, expected at least 0 and less than 1", config.momentum)
        } else if !(config.eps > 0.0 && config.eps.is_finite()) {
            format!("found eps {}, expected a number above 0", config.eps)
        } else if config.ns_steps >= 100 {
            format!("found ns_steps {}, expected less than 100", config.ns_steps)
        } else if ![a, b, c].iter().all(|x| x.is_finite()) {
            format!("found ns_coefficients {:?}, expected finite numbers", config.ns_coefficients)
        } else {
            return Ok(());
        };
        Err(Error::argument(Self::NAME, message))
    }

    fn states(_config: &MuonConfig, dims: &[usize]) -> SmallVec<[StateSpec; 4]> {
        if dims.len() < 2 {
            return smallvec![StateKind::Float.named("exp_avg"), StateKind::Float.named("exp_avg_sq")];
        }
        smallvec![StateKind::Float.named("momentum_buffer")]
    }

    /// Returns the number of elements of four square matrices whose side is the smaller side of the parameter; 0 for a
    /// vector.
    fn scratch(dims: &[usize]) -> usize {
        let Some((&rows, rest)) = dims.split_first().filter(|(_, rest)| !rest.is_empty()) else { return 0 };
        let smaller = rows.min(rest.iter().product());
        4 * smaller * smaller
    }

    fn lr(config: &mut MuonConfig) -> &mut f64 {
        &mut config.lr
    }
}

fn update<T: Real>(config: &MuonConfig, step: u64, chunk: Chunk<'_, T>) {
    dispatch(
        #[inline(always)]
        || {
            if chunk.dims.len() < 2 { update_vector(config, step, chunk) } else { update_matrix(config, chunk) }
        },
    );
}

/// Takes a step of AdamW.
#[inline(always)]
fn update_vector<T: Real>(config: &MuonConfig, step: u64, mut chunk: Chunk<'_, T>) {
    let [StateSlice::Float(mean), StateSlice::Float(square)] = chunk.states.as_mut_slice() else {
        unreachable!("the states are those that the rule declares")
    };
    let (beta1, beta2) = config.vector_betas;
    let corrections = (1.0 - beta1.powf(step as f64), 1.0 - beta2.powf(step as f64));
    let (step_size, correction_root) = (T::from_f64(config.lr / corrections.0), T::from_f64(corrections.1.sqrt()));
    let (gain1, beta2, gain2) = (T::from_f64(1.0 - beta1), T::from_f64(beta2), T::from_f64(1.0 - beta2));
    let (decay, eps) = (T::from_f64(1.0 - config.lr * config.weight_decay), T::from_f64(config.vector_eps));
    let elements = chunk.param.iter_mut().zip(chunk.grad).zip(mean.iter_mut().zip(square.iter_mut()));
    for ((p, &g), (m, v)) in elements {
        *m += gain1 * (g - *m);
        *v = *v * beta2 + gain2 * g * g;
        *p = *p * decay - step_size * *m / (v.sqrt() / correction_root + eps);
    }
}

/// Takes a step of Muon. The parameter is a matrix with one row for each index of the first dimension.
#[inline(always)]
fn update_matrix<T: Real>(config: &MuonConfig, mut chunk: Chunk<'_, T>) {
    let [StateSlice::Float(momentum_buffer)] = chunk.states.as_mut_slice() else {
        unreachable!("the states are those that the rule declares")
    };
    let (height, width) = (chunk.dims[0], chunk.param.len() / chunk.dims[0]);
    let (momentum, gain) = (T::from_f64(config.momentum), T::from_f64(1.0 - config.momentum));
    let mut direction = Vec::with_capacity(momentum_buffer.len());
    for (m, &g) in momentum_buffer.iter_mut().zip(chunk.grad) {
        *m += gain * (g - *m);
        direction.push(if config.nesterov { g + momentum * (*m - g) } else { *m });
    }
    let norm = sum_of_squares(&direction).sqrt().max(config.eps);
    let is_tall = height > width;
    let (short, long) = if is_tall { (width, height) } else { (height, width) };
    if is_tall {
        direction = transposed(&direction, height, width);
    }
    let orthogonal = orthogonalize(config, &direction, (short, long), T::from_f64(1.0 / norm));
    let orthogonal = if is_tall { transposed(&orthogonal, width, height) } else { orthogonal };

    let (a, b) = (height as f64, width as f64);
    let ratio = if config.match_rms_adamw { 0.2 * a.max(b).sqrt() } else { (a / b).max(1.0).sqrt() };
    let (decay, lr) = (T::from_f64(1.0 - config.lr * config.weight_decay), T::from_f64(config.lr * ratio));
    for (p, x) in chunk.param.iter_mut().zip(orthogonal) {
        *p = *p * decay - lr * x;
    }
}

/// Runs the Newton-Schulz iteration, which starts with `scale` times `x`, and returns the last iterate. `x` has `short`
/// rows and `long` columns.
///
/// Every iterate is P x, where the square matrix P commutes with x xᵀ. So the iteration needs only P (`product`) and
/// G = P² (x xᵀ) (`gram`), which have `short` rows and columns. A step multiplies P by M (`factor`) and G by M², where
/// M = a I + b G + c G² and I is the identity matrix.
#[inline(always)]
fn orthogonalize<T: Real>(config: &MuonConfig, x: &[T], (short, long): (usize, usize), scale: T) -> Vec<T> {
    let (a, b, c) = config.ns_coefficients;
    let (a, b, c) = (T::from_f64(a), T::from_f64(b), T::from_f64(c));
    let mut gram = vec![T::ZERO; short * short];
    for (i, row) in x.chunks(long).enumerate() {
        for (j, other) in x.chunks(long).enumerate().take(i + 1) {
            let entry = scale * scale * dot(row, other);
            (gram[i * short + j], gram[j * short + i]) = (entry, entry);
        }
    }
    let mut product = vec![T::ZERO; short * short];
    product.iter_mut().step_by(short + 1).for_each(|diagonal| *diagonal = scale);
    for _ in 0..config.ns_steps {
        let mut factor = multiply(&gram, &gram, short);
        for (index, (m, &g)) in factor.iter_mut().zip(&gram).enumerate() {
            let diagonal = if index % (short + 1) == 0 { a } else { T::ZERO };
            *m = diagonal + b * g + c * *m;
        }
        product = multiply(&factor, &product, short);
        gram = multiply(&factor, &multiply(&factor, &gram, short), short);
    }
    multiply(&product, x, short)
}

/// Returns the dot product, summed in an order that vectorises.
#[inline(always)]
fn dot<T: Real>(x: &[T], y: &[T]) -> T {
    const LANES: usize = 16;
    let mut sums = [T::ZERO; LANES];
    for (x, y) in x.chunks(LANES).zip(y.chunks(LANES)) {
        for ((sum, &x), &y) in sums.iter_mut().zip(x).zip(y) {
            *sum += x * y;
        }
    }
    let mut total = T::ZERO;
    sums.into_iter().for_each(|sum| total += sum);
    total
}

/// Multiplies the square matrix `left` by the matrix `right`. Both have `rows` rows.
#[inline(always)]
fn multiply<T: Real>(left: &[T], right: &[T], rows: usize) -> Vec<T> {
    let width = right.len() / rows;
    let mut result = vec![T::ZERO; right.len()];
    for (left_row, result_row) in left.chunks(rows).zip(result.chunks_mut(width)) {
        for (&factor, right_row) in left_row.iter().zip(right.chunks(width)) {
            for (sum, &x) in result_row.iter_mut().zip(right_row) {
                *sum += factor * x;
            }
        }
    }
    result
}

/// Returns the transpose of the matrix `x` of `height` rows and `width` columns.
fn transposed<T: Copy>(x: &[T], height: usize, width: usize) -> Vec<T> {
    (0..width).flat_map(|column| (0..height).map(move |row| x[row * width + column])).collect()
}
