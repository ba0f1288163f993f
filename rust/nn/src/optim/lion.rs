//! Lion: the sign of an interpolated momentum.
//!
//! Chen et al., "Symbolic Discovery of Optimization Algorithms", <https://arxiv.org/abs/2302.06675>; the order of
//! operations is that of bitsandbytes' `Lion32bit`.

use trainable_candle_core::cpu::{Real, dispatch};

/// Hyper-parameters of [`Lion`]; names, meaning and defaults are those of the paper's implementation and bitsandbytes.
#[derive(Clone, Debug, PartialEq)]
pub struct LionConfig {
    /// Learning rate, at least 0; 3 to 10 times smaller than Adam's.
    pub lr: f64,
    /// Weight of the momentum in the update, and its decay rate; each in [0, 1).
    pub betas: (f64, f64),
    /// At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
    pub weight_decay: f64,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self { lr: 1e-4, betas: (0.9, 0.99), weight_decay: 0.0 }
    }
}

/// What one step needs of a [`LionConfig`].
#[derive(Clone, Copy)]
pub(crate) struct Coefficients<T> {
    beta1: T,
    beta2: T,
    lr: T,
    decay: T,
}

impl<T: Real> Coefficients<T> {
    pub(crate) fn new(lr: f64, betas: (f64, f64), weight_decay: f64) -> Self {
        let (beta1, beta2, lr) = (T::from_f64(betas.0), T::from_f64(betas.1), T::from_f64(lr));
        Self { beta1, beta2, lr, decay: T::ONE - lr * T::from_f64(weight_decay) }
    }

    /// The parameter and the momentum after a gradient.
    #[inline(always)]
    pub(crate) fn advance(&self, p: T, g: T, m: T) -> (T, T) {
        let direction = (T::ONE - self.beta1).mul_add(g, m * self.beta1);
        let up = if direction > T::ZERO { self.lr } else { T::ZERO };
        let down = if direction < T::ZERO { self.lr } else { T::ZERO };
        let m = (T::ONE - self.beta2).mul_add(g, m * self.beta2);
        (p * self.decay - up + down, m)
    }
}

/// The momentum of a run of elements, zeros to begin with.
pub(crate) struct Momentum<'a, T>(pub(crate) &'a mut [T]);

/// One step.
pub(crate) fn update<T: Real>(at: Coefficients<T>, param: &mut [T], grad: &[T], exp_avg: Momentum<'_, T>) {
    dispatch(
        #[inline(always)]
        || update_all(at, param, grad, exp_avg),
    );
}

#[inline(always)]
fn update_all<T: Real>(at: Coefficients<T>, param: &mut [T], grad: &[T], exp_avg: Momentum<'_, T>) {
    for ((p, &g), m) in param.iter_mut().zip(grad).zip(exp_avg.0) {
        (*p, *m) = at.advance(*p, g, *m);
    }
}
