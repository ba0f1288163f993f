//! Adam with 8-bit states, as bitsandbytes' `Adam8bit` and `AdamW8bit`.
//!
//! Follows <https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/csrc/kernels.cu#L915>.

use smallvec::{SmallVec, smallvec};
use trainable_candle_core::cpu::dispatch;
use trainable_candle_core::{Result, Var};

use super::Stepper;
use super::quant::{BLOCK_SIZE, Codebook, padded};
use super::rule::{
    Chunk, Family, KernelSettings, Kernels, Rule, StateKind, StateSlice, StateSpec, Update, check_betas,
    check_not_negative,
};

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

/// Adam with 8-bit states, as bitsandbytes' `Adam8bit`.
pub type Adam8bit = Stepper<Adam8bitRule>;

/// AdamW with 8-bit states, as bitsandbytes' `AdamW8bit`.
pub type AdamW8bit = Stepper<AdamW8bitRule>;

impl Adam8bit {
    /// Adam8bit on `params` with the defaults of [`Adam8bitConfig::adam`] but for `lr` and `weight_decay`.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn new(params: Vec<Var>, lr: f64, weight_decay: f64) -> Result<Self> {
        Self::with_config(params, Adam8bitConfig { weight_decay, ..Adam8bitConfig::adam(lr) })
    }
}

impl AdamW8bit {
    /// AdamW8bit on `params` with the defaults of [`Adam8bitConfig::adamw`] but for `lr` and `weight_decay`.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn new(params: Vec<Var>, lr: f64, weight_decay: f64) -> Result<Self> {
        Self::with_config(params, Adam8bitConfig { weight_decay, ..Adam8bitConfig::adamw(lr) })
    }
}

/// The arithmetic of [`Adam8bit`].
pub struct Adam8bitRule;

/// The arithmetic of [`AdamW8bit`], which is that of [`Adam8bit`] under another name.
pub struct AdamW8bitRule;

macro_rules! rule {
    ($rule:ident, $name:literal) => {
        impl Rule for $rule {
            const NAME: &'static str = $name;
            type Config = Adam8bitConfig;
            const UPDATE: Update<Adam8bitConfig, f32> = update;
            const UPDATE_F64: Option<Update<Adam8bitConfig, f64>> = None;
            const KERNELS: Option<Kernels<Adam8bitConfig>> =
                Some(Kernels { family: Family::Adam8bit, settings: kernel_settings });

            fn validate(config: &Adam8bitConfig) -> Result<()> {
                check_not_negative(Self::NAME, "lr", config.lr)?;
                check_not_negative(Self::NAME, "eps", config.eps)?;
                check_not_negative(Self::NAME, "weight_decay", config.weight_decay)?;
                check_betas(Self::NAME, config.betas)
            }

            fn states(config: &Adam8bitConfig, dims: &[usize]) -> SmallVec<[StateSpec; 4]> {
                if dims.iter().product::<usize>() < config.min_8bit_size {
                    return smallvec![StateKind::Float.named("state1"), StateKind::Float.named("state2")];
                }
                smallvec![
                    StateKind::Codes.named("state1"),
                    StateKind::Scales.named("absmax1"),
                    StateKind::Codes.named("state2"),
                    StateKind::Scales.named("absmax2"),
                ]
            }

            fn lr(config: &mut Adam8bitConfig) -> &mut f64 {
                &mut config.lr
            }
        }
    };
}

rule!(Adam8bitRule, "Adam8bit");
rule!(AdamW8bitRule, "AdamW8bit");

fn kernel_settings(config: &Adam8bitConfig) -> KernelSettings {
    let Adam8bitConfig { lr, betas, eps, weight_decay, .. } = *config;
    KernelSettings { lr, betas, eps, weight_decay, ..KernelSettings::default() }
}

/// The values of an [`Adam8bitConfig`] that a step uses, rounded as the kernels of bitsandbytes round them. Fused multiply-adds are
/// where its CUDA code has them, so that moments are equal bit for bit.
#[derive(Clone, Copy)]
struct Coefficients {
    beta1: f32,
    beta2: f32,
    step_size: f32,
    eps: f32,
    decay: f32,
}

impl Coefficients {
    fn new(config: &Adam8bitConfig, step: u64) -> Self {
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

    /// The parameter after a move along `ratio`, the first moment over the root of the second, and decay.
    #[inline(always)]
    fn updated(&self, param: f32, ratio: f32) -> f32 {
        self.step_size.mul_add(ratio, param) * self.decay
    }
}

/// 1 / x for a positive x, to within 2^-22: a first guess from the bits and two Newton steps of third order.
///
/// Division would take the most time of an update; CUDA's kernel, too, has an approximation (`__fdividef`) there.
#[inline(always)]
fn reciprocal(x: f32) -> f32 {
    let mut y = f32::from_bits(0x7ef3_11c7_u32.wrapping_sub(x.to_bits()));
    for _ in 0..2 {
        let error = (-x).mul_add(y, 1.0);
        y = error.mul_add(error, error).mul_add(y, y);
    }
    y
}

fn update(config: &Adam8bitConfig, step: u64, chunk: Chunk<'_, f32>) {
    let at = Coefficients::new(config, step);
    dispatch(
        #[inline(always)]
        || update_chunk(at, chunk),
    );
}

#[inline(always)]
fn update_chunk(at: Coefficients, mut chunk: Chunk<'_, f32>) {
    let (param, grad) = (chunk.param, chunk.grad);
    match chunk.states.as_mut_slice() {
        [StateSlice::Float(state1), StateSlice::Float(state2)] => update_elements(at, param, grad, state1, state2),
        [
            StateSlice::Codes(codes1),
            StateSlice::Scales(absmax1),
            StateSlice::Codes(codes2),
            StateSlice::Scales(absmax2),
        ] => update_blocks(at, param, grad, (codes1, absmax1), (codes2, absmax2)),
        _ => unreachable!("the states are those that the rule declares"),
    }
}

#[inline(always)]
fn update_elements(at: Coefficients, param: &mut [f32], grad: &[f32], state1: &mut [f32], state2: &mut [f32]) {
    for ((p, &g), (m, v)) in param.iter_mut().zip(grad).zip(state1.iter_mut().zip(state2)) {
        // Here CUDA fuses the moments' multiplication, not the gradient's as with 8 bits.
        *m = m.mul_add(at.beta1, (1.0 - at.beta1) * g);
        *v = v.mul_add(at.beta2, (1.0 - at.beta2) * (g * g));
        *p = at.updated(*p, *m / (v.sqrt() + at.eps));
    }
}

#[inline(always)]
fn update_blocks(
    at: Coefficients,
    param: &mut [f32],
    grad: &[f32],
    (codes1, absmax1): (&mut [u8], &mut [f32]),
    (codes2, absmax2): (&mut [u8], &mut [f32]),
) {
    let (params, param_rest) = param.as_chunks_mut();
    let (grads, grad_rest) = grad.as_chunks();
    let (blocks1, codes1_rest) = codes1.as_chunks_mut();
    let (blocks2, codes2_rest) = codes2.as_chunks_mut();
    let full = params.len();
    for block in 0..full {
        let moment1 = (&mut blocks1[block], &mut absmax1[block]);
        let moment2 = (&mut blocks2[block], &mut absmax2[block]);
        update_block(at, &mut params[block], &grads[block], moment1, moment2);
    }
    if !param_rest.is_empty() {
        // The codes that bitsandbytes reads behind the end.
        let (mut block1, mut block2) = (padded(codes1_rest, 128), padded(codes2_rest, 0));
        let (mut param, grad) = (padded(param_rest, 0.0), padded(grad_rest, 0.0));
        let (moment1, moment2) = ((&mut block1, &mut absmax1[full]), (&mut block2, &mut absmax2[full]));
        update_block(at, &mut param, &grad, moment1, moment2);
        let len = param_rest.len();
        param_rest.copy_from_slice(&param[..len]);
        codes1_rest.copy_from_slice(&block1[..len]);
        codes2_rest.copy_from_slice(&block2[..len]);
    }
}

/// One step on a block. An element whose gradient or its square is non-finite loses its moments and does not change.
#[inline(always)]
fn update_block(
    at: Coefficients,
    param: &mut [f32; BLOCK_SIZE],
    grad: &[f32; BLOCK_SIZE],
    (codes1, absmax1): (&mut [u8; BLOCK_SIZE], &mut f32),
    (codes2, absmax2): (&mut [u8; BLOCK_SIZE], &mut f32),
) {
    let (codebook1, codebook2) = (Codebook::sign_preserving(), Codebook::unsigned());
    let (mut m, mut v) = (codebook1.decode_block(codes1), codebook2.decode_block(codes2));
    let (mut max1, mut max2) = (0, 0);
    for i in 0..BLOCK_SIZE {
        let g = grad[i];
        let moment1 = at.first_moment(m[i] * *absmax1, g);
        let moment2 = at.second_moment(v[i] * *absmax2, g);
        let updated = at.updated(param[i], moment1 * reciprocal(moment2.sqrt() + at.eps));
        // Not so if the gradient is infinite or NaN, or its square is infinite.
        let finite = moment2 <= f32::MAX;
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

#[cfg(test)]
mod tests {
    use super::reciprocal;

    #[test]
    fn reciprocals_are_accurate() {
        for exponent in -100..=100 {
            for fraction in 0..1000 {
                let x = (1.0 + fraction as f32 / 1000.0) * 2f32.powi(exponent);
                let error = (f64::from(reciprocal(x)) * f64::from(x) - 1.0).abs();
                assert!(error <= 2f64.powi(-22), "1 / {x:e} is off by {error:e}");
            }
        }
    }
}
