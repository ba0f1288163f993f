//! Adam and AdamW, as in torch: one update, which differ in where weight decay goes.
//!
//! Kingma and Ba, "Adam", <https://arxiv.org/abs/1412.6980>; Loshchilov and Hutter, "Decoupled Weight Decay
//! Regularization", <https://arxiv.org/abs/1711.05101>.

use trainable_candle_core::cpu::{Real, dispatch};

/// Hyper-parameters of [`Adam`] and [`AdamW`]; names, meaning and defaults are torch's.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamConfig {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Decay rates of the first and the second moment, each in [0, 1).
    pub betas: (f64, f64),
    /// Added to the root of the second moment, at least 0.
    pub eps: f64,
    /// At least 0. Decoupled: each step multiplies the parameters by `1 - lr * weight_decay`; otherwise an L2 penalty,
    /// `weight_decay * param` added to the gradient.
    pub weight_decay: f64,
    /// Whether weight decay is decoupled from the gradient, the only difference between AdamW and Adam.
    pub decoupled: bool,
    /// Divide by the largest second moment so far instead of the current one.
    pub amsgrad: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
}

impl AdamConfig {
    /// The defaults of Adam: no weight decay, and coupled where it is set.
    pub const fn adam(lr: f64) -> Self {
        Self {
            lr,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled: false,
            amsgrad: false,
            maximize: false,
        }
    }

    /// The defaults of AdamW: decoupled weight decay of 0.01.
    pub const fn adamw(lr: f64) -> Self {
        Self { weight_decay: 0.01, decoupled: true, ..Self::adam(lr) }
    }
}

/// What one step needs of an [`AdamConfig`].
#[derive(Clone, Copy)]
pub(crate) struct Coefficients<T> {
    gain1: T,
    beta2: T,
    gain2: T,
    eps: T,
    step_size: T,
    root_correction2: T,
    /// 1 or -1.
    sign: T,
    decay: T,
    l2: T,
}

impl<T: Real> Coefficients<T> {
    /// The coefficients of step `step`, which counts from 1.
    pub(crate) fn new(config: &AdamConfig, step: u64) -> Self {
        let (beta1, beta2) = config.betas;
        let correction1 = 1.0 - beta1.powf(step as f64);
        let correction2 = 1.0 - beta2.powf(step as f64);
        let (decay, l2) =
            if config.decoupled { (1.0 - config.lr * config.weight_decay, 0.0) } else { (1.0, config.weight_decay) };
        Self {
            gain1: T::from_f64(1.0 - beta1),
            beta2: T::from_f64(beta2),
            gain2: T::from_f64(1.0 - beta2),
            eps: T::from_f64(config.eps),
            step_size: T::from_f64(config.lr / correction1),
            root_correction2: T::from_f64(correction2.sqrt()),
            sign: if config.maximize { -T::ONE } else { T::ONE },
            decay: T::from_f64(decay),
            l2: T::from_f64(l2),
        }
    }

    /// The decayed parameter and the moments after a gradient.
    #[inline(always)]
    fn advance(&self, p: T, g: T, m: T, v: T) -> (T, T, T) {
        let p = p * self.decay;
        let g = self.sign * g + self.l2 * p;
        (p, m + self.gain1 * (g - m), v * self.beta2 + self.gain2 * g * g)
    }

    #[inline(always)]
    fn descend(&self, p: T, m: T, v: T) -> T {
        p - self.step_size * m / (v.sqrt() / self.root_correction2 + self.eps)
    }
}

/// The moments of a run of elements, zeros to begin with.
pub(crate) struct Moments<'a, T> {
    pub(crate) exp_avg: &'a mut [T],
    pub(crate) exp_avg_sq: &'a mut [T],
    /// There if and only if `amsgrad` is set.
    pub(crate) max_exp_avg_sq: Option<&'a mut [T]>,
}

/// One step.
pub(crate) fn update<T: Real>(at: Coefficients<T>, param: &mut [T], grad: &[T], moments: Moments<'_, T>) {
    dispatch(
        #[inline(always)]
        || update_all(at, param, grad, moments),
    );
}

#[inline(always)]
fn update_all<T: Real>(at: Coefficients<T>, param: &mut [T], grad: &[T], moments: Moments<'_, T>) {
    let states = moments.exp_avg.iter_mut().zip(moments.exp_avg_sq);
    let elements = param.iter_mut().zip(grad).zip(states);
    match moments.max_exp_avg_sq {
        None => {
            for ((p, &g), (m, v)) in elements {
                (*p, *m, *v) = at.advance(*p, g, *m, *v);
                *p = at.descend(*p, *m, *v);
            }
        }
        Some(max) => {
            for (((p, &g), (m, v)), max) in elements.zip(max) {
                (*p, *m, *v) = at.advance(*p, g, *m, *v);
                *max = max.max(*v);
                *p = at.descend(*p, *m, *max);
            }
        }
    }
}
