//! Stochastic gradient descent with momentum, as `torch.optim.SGD`.

use trainable_candle_core::cpu::{Real, dispatch};

/// Hyper-parameters of [`SGD`]; names, meaning and defaults are torch's.
#[derive(Clone, Debug, PartialEq)]
pub struct SGDConfig {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Share of the momentum buffer that stays from step to step; 0 for no buffer.
    pub momentum: f64,
    /// The gradient enters the buffer with weight `1 - dampening`.
    pub dampening: f64,
    /// L2 penalty, at least 0: `weight_decay * param` is added to the gradient.
    pub weight_decay: f64,
    /// Look ahead along the momentum. Needs `momentum > 0` and `dampening == 0`.
    pub nesterov: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
}

impl Default for SGDConfig {
    fn default() -> Self {
        Self { lr: 1e-3, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false }
    }
}

/// One step. `momentum_buffer` is there if and only if `momentum` is not 0; the first gradient fills it.
pub(crate) fn update<T: Real>(
    config: &SGDConfig,
    first: bool,
    param: &mut [T],
    grad: &[T],
    momentum_buffer: Option<&mut [T]>,
) {
    dispatch(
        #[inline(always)]
        || update_all(config, first, param, grad, momentum_buffer),
    );
}

#[inline(always)]
fn update_all<T: Real>(
    config: &SGDConfig,
    first: bool,
    param: &mut [T],
    grad: &[T],
    momentum_buffer: Option<&mut [T]>,
) {
    let sign = if config.maximize { -T::ONE } else { T::ONE };
    let (lr, weight_decay) = (T::from_f64(config.lr), T::from_f64(config.weight_decay));
    let (momentum, gain) = (T::from_f64(config.momentum), T::from_f64(1.0 - config.dampening));
    let Some(buffer) = momentum_buffer else {
        for (p, &g) in param.iter_mut().zip(grad) {
            *p -= lr * (sign * g + weight_decay * *p);
        }
        return;
    };
    for ((p, &g), b) in param.iter_mut().zip(grad).zip(buffer) {
        let g = sign * g + weight_decay * *p;
        *b = if first { g } else { momentum * *b + gain * g };
        let direction = if config.nesterov { g + momentum * *b } else { *b };
        *p -= lr * direction;
    }
}
