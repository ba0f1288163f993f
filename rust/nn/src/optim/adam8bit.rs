//! Adam with 8-bit states, as bitsandbytes' `Adam8bit` and `AdamW8bit`.

use trainable_candle_core::cpu::dispatch;

use super::quant::{BLOCK_SIZE, Codebook, Codes, padded};

/// Hyper-parameters of [`Adam8bit`] and [`AdamW8bit`]; names and meaning are those of bitsandbytes. The two differ only
/// in the default of `weight_decay`: it is decoupled from the gradient in both.
#[derive(Clone, Debug, PartialEq)]
pub struct Adam8bitConfig {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Decay rates of the first and the second moment, each in [0, 1).
    pub betas: (f64, f64),
    /// Added to the root of the second moment, at least 0.
    pub eps: f64,
    /// At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
    pub weight_decay: f64,
    /// Parameters with fewer elements keep their moments in f32.
    pub min_8bit_size: usize,
}

impl Adam8bitConfig {
    /// The defaults of Adam8bit: no weight decay.
    pub const fn adam(lr: f64) -> Self {
        Self { lr, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, min_8bit_size: 4096 }
    }

    /// The defaults of AdamW8bit: weight decay of 0.01.
    pub const fn adamw(lr: f64) -> Self {
        Self { weight_decay: 0.01, ..Self::adam(lr) }
    }
}

/// What one step needs of an [`Adam8bitConfig`], rounded as the kernels of bitsandbytes round it. Fused multiply-adds are
/// where its CUDA code has them, so that moments are equal bit for bit.
#[derive(Clone, Copy)]
pub(crate) struct Coefficients {
    beta1: f32,
    beta2: f32,
    step_size: f32,
    eps: f32,
    decay: f32,
}

impl Coefficients {
    /// The coefficients of step `step`, which counts from 1.
    pub(crate) fn new(config: &Adam8bitConfig, step: u64) -> Self {
        let (beta1, beta2, lr) = (config.betas.0 as f32, config.betas.1 as f32, config.lr as f32);
        let correction1 = (1.0 - f64::from(beta1).powf(step as f64)) as f32;
        let correction2 = (1.0 - f64::from(beta2).powf(step as f64)).sqrt() as f32;
        Self {
            beta1,
            beta2,
            step_size: -lr * correction2 / correction1,
            eps: config.eps as f32 * correction2,
            decay: 1.0 - lr * config.weight_decay as f32,
        }
    }

    #[inline(always)]
    fn first_moment(&self, m: f32, g: f32) -> f32 {
        (1.0 - self.beta1).mul_add(g, m * self.beta1)
    }

    #[inline(always)]
    fn second_moment(&self, v: f32, g: f32) -> f32 {
        ((1.0 - self.beta2) * g).mul_add(g, v * self.beta2)
    }

    #[inline(always)]
    fn updated(&self, param: f32, m: f32, v: f32) -> f32 {
        self.step_size.mul_add(m / (v.sqrt() + self.eps), param) * self.decay
    }
}

/// One step on `param` with 8-bit moments, all zeros to begin with. An element whose gradient is not finite loses its
/// moments and stays as it is.
pub(crate) fn update_blockwise(at: Coefficients, param: &mut [f32], grad: &[f32], state1: Codes<'_>, state2: Codes<'_>) {
    dispatch(
        #[inline(always)]
        || update_blocks(at, param, grad, state1, state2),
    );
}

#[inline(always)]
fn update_blocks(at: Coefficients, param: &mut [f32], grad: &[f32], state1: Codes<'_>, state2: Codes<'_>) {
    let (params, param_rest) = param.as_chunks_mut();
    let (grads, grad_rest) = grad.as_chunks();
    let (codes1, codes1_rest) = state1.codes.as_chunks_mut();
    let (codes2, codes2_rest) = state2.codes.as_chunks_mut();
    let full = params.len();
    for block in 0..full {
        let moment1 = (&mut codes1[block], &mut state1.absmax[block]);
        let moment2 = (&mut codes2[block], &mut state2.absmax[block]);
        update_block(at, &mut params[block], &grads[block], moment1, moment2);
    }
    if !param_rest.is_empty() {
        let (mut param, grad) = (padded(param_rest, 0.0), padded(grad_rest, 0.0));
        let (mut codes1, mut codes2) = (padded(codes1_rest, 128), padded(codes2_rest, 0));
        let moment1 = (&mut codes1, &mut state1.absmax[full]);
        let moment2 = (&mut codes2, &mut state2.absmax[full]);
        update_block(at, &mut param, &grad, moment1, moment2);
        let len = param_rest.len();
        param_rest.copy_from_slice(&param[..len]);
        codes1_rest.copy_from_slice(&codes1[..len]);
        codes2_rest.copy_from_slice(&codes2[..len]);
    }
}

#[inline(always)]
fn update_block(
    at: Coefficients,
    param: &mut [f32; BLOCK_SIZE],
    grad: &[f32; BLOCK_SIZE],
    (codes1, absmax1): (&mut [u8; BLOCK_SIZE], &mut f32),
    (codes2, absmax2): (&mut [u8; BLOCK_SIZE], &mut f32),
) {
    let (codebook1, codebook2) = (Codebook::sign_preserving(), Codebook::unsigned());
    let (mut m, mut v) = ([0f32; BLOCK_SIZE], [0f32; BLOCK_SIZE]);
    let (mut max1, mut max2) = (0, 0);
    for i in 0..BLOCK_SIZE {
        let g = grad[i];
        let moment1 = at.first_moment(codebook1.decode(codes1[i]) * *absmax1, g);
        let moment2 = at.second_moment(codebook2.decode(codes2[i]) * *absmax2, g);
        let updated = at.updated(param[i], moment1, moment2);
        let finite = g.is_finite();
        param[i] = if finite { updated } else { param[i] };
        m[i] = if finite { moment1 } else { 0.0 };
        v[i] = if finite { moment2 } else { 0.0 };
        // Magnitudes compare as their bits do, and integers have a maximum that vectorises.
        max1 = max1.max(m[i].abs().to_bits());
        max2 = max2.max(v[i].abs().to_bits());
    }
    *absmax1 = f32::from_bits(max1);
    *absmax2 = f32::from_bits(max2);
    *codes1 = codebook1.encode_block(&m, 1.0 / *absmax1);
    *codes2 = codebook2.encode_block(&v, 1.0 / *absmax2);
}

/// The moments of a run of elements in f32, zeros to begin with.
pub(crate) struct Moments<'a> {
    pub(crate) state1: &'a mut [f32],
    pub(crate) state2: &'a mut [f32],
}

/// One step with f32 moments, for parameters smaller than [`Adam8bitConfig::min_8bit_size`].
pub(crate) fn update_small(at: Coefficients, param: &mut [f32], grad: &[f32], moments: Moments<'_>) {
    dispatch(
        #[inline(always)]
        || update_elements(at, param, grad, moments),
    );
}

#[inline(always)]
fn update_elements(at: Coefficients, param: &mut [f32], grad: &[f32], moments: Moments<'_>) {
    let states = moments.state1.iter_mut().zip(moments.state2);
    for ((p, &g), (m, v)) in param.iter_mut().zip(grad).zip(states) {
        *m = at.first_moment(*m, g);
        *v = (1.0 - at.beta2).mul_add(g * g, *v * at.beta2);
        *p = at.updated(*p, *m, *v);
    }
}
