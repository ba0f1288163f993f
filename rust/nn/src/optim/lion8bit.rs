//! Lion with an 8-bit momentum, as bitsandbytes' `Lion8bit`.
//!
//! Follows <https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/csrc/kernels.cu#L1153>.

use smallvec::{SmallVec, smallvec};
use trainable_candle_core::cpu::dispatch;
use trainable_candle_core::{Result, Var};

use super::Stepper;
use super::lion::{Coefficients, update_float};
use super::quant::{BLOCK_SIZE, Codebook, padded};
use super::rule::{
    Chunk, Family, KernelSettings, Kernels, Rule, StateKind, StateSlice, StateSpec, Update, check_betas,
    check_not_negative,
};

/// Hyper-parameters of [`Lion8bit`]; names, meaning and defaults are those of bitsandbytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Lion8bitConfig {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Weight of the momentum in the update, and its decay rate; each in [0, 1).
    pub betas: (f64, f64),
    /// At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
    pub weight_decay: f64,
    /// Parameters with fewer elements keep their momentum in f32.
    pub min_8bit_size: usize,
}

impl Default for Lion8bitConfig {
    fn default() -> Self {
        Self { lr: 1e-4, betas: (0.9, 0.99), weight_decay: 0.0, min_8bit_size: 4096 }
    }
}

/// Lion with an 8-bit momentum, as bitsandbytes' `Lion8bit`.
pub type Lion8bit = Stepper<Lion8bitRule>;

impl Lion8bit {
    /// Lion8bit on `params` with the defaults of [`Lion8bitConfig`] but for `lr` and `weight_decay`.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn new(params: Vec<Var>, lr: f64, weight_decay: f64) -> Result<Self> {
        Self::with_config(params, Lion8bitConfig { lr, weight_decay, ..Lion8bitConfig::default() })
    }
}

/// The arithmetic of [`Lion8bit`].
pub struct Lion8bitRule;

impl Rule for Lion8bitRule {
    const NAME: &'static str = "Lion8bit";
    type Config = Lion8bitConfig;
    const UPDATE: Update<Lion8bitConfig, f32> = update;
    const UPDATE_F64: Option<Update<Lion8bitConfig, f64>> = None;
    const KERNELS: Option<Kernels<Lion8bitConfig>> = Some(Kernels {
        family: Family::Lion,
        settings: |&Lion8bitConfig { lr, betas, weight_decay, .. }| KernelSettings {
            lr,
            betas,
            weight_decay,
            ..KernelSettings::default()
        },
    });

    fn validate(config: &Lion8bitConfig) -> Result<()> {
        check_not_negative(Self::NAME, "lr", config.lr)?;
        check_not_negative(Self::NAME, "weight_decay", config.weight_decay)?;
        check_betas(Self::NAME, config.betas)
    }

    fn states(config: &Lion8bitConfig, dims: &[usize]) -> SmallVec<[StateSpec; 4]> {
        if dims.iter().product::<usize>() < config.min_8bit_size {
            return smallvec![StateKind::Float.named("state1")];
        }
        smallvec![StateKind::Codes.named("state1"), StateKind::Scales.named("absmax1")]
    }

    fn lr(config: &mut Lion8bitConfig) -> &mut f64 {
        &mut config.lr
    }
}

fn update(config: &Lion8bitConfig, _step: u64, chunk: Chunk<'_, f32>) {
    let at = Coefficients::new(config.lr, config.betas, config.weight_decay);
    if matches!(chunk.states.as_slice(), [StateSlice::Float(_)]) {
        return update_float(at, chunk);
    }
    dispatch(
        #[inline(always)]
        || update_blocks(at, chunk),
    );
}

#[inline(always)]
fn update_blocks(at: Coefficients<f32>, mut chunk: Chunk<'_, f32>) {
    let [StateSlice::Codes(codes), StateSlice::Scales(absmax)] = chunk.states.as_mut_slice() else {
        unreachable!("the states are those that the rule declares");
    };
    let (params, param_rest) = chunk.param.as_chunks_mut();
    let (grads, grad_rest) = chunk.grad.as_chunks();
    let (blocks, codes_rest) = codes.as_chunks_mut();
    let full = params.len();
    for block in 0..full {
        update_block(at, &mut params[block], &grads[block], &mut blocks[block], &mut absmax[block]);
    }
    if !param_rest.is_empty() {
        // The code that bitsandbytes reads behind the end.
        let mut block = padded(codes_rest, 128);
        let (mut param, grad) = (padded(param_rest, 0.0), padded(grad_rest, 0.0));
        update_block(at, &mut param, &grad, &mut block, &mut absmax[full]);
        let len = param_rest.len();
        param_rest.copy_from_slice(&param[..len]);
        codes_rest.copy_from_slice(&block[..len]);
    }
}

/// One step on a block. An element with a non-finite gradient loses its momentum and does not change (where bitsandbytes
/// would write the block's largest value to its momentum).
#[inline(always)]
fn update_block(
    at: Coefficients<f32>,
    param: &mut [f32; BLOCK_SIZE],
    grad: &[f32; BLOCK_SIZE],
    codes: &mut [u8; BLOCK_SIZE],
    absmax: &mut f32,
) {
    let codebook = Codebook::sign_preserving();
    let mut m = codebook.decode_block(codes);
    let mut max = 0;
    for i in 0..BLOCK_SIZE {
        // Here CUDA fuses the gradient's multiplication, not the momentum's as in f32.
        let (g, old) = (grad[i], m[i] * *absmax);
        let direction = (1.0 - at.beta1).mul_add(g, old * at.beta1);
        let momentum = (1.0 - at.beta2).mul_add(g, old * at.beta2);
        let finite = g.is_finite();
        param[i] = if finite { at.descend(param[i], direction) } else { param[i] };
        m[i] = if finite { momentum } else { 0.0 };
        // Magnitudes compare as their bits do, and integers have a maximum that vectorises.
        max = max.max(m[i].abs().to_bits());
    }
    *absmax = f32::from_bits(max);
    *codes = codebook.encode_block(&m, 1.0 / *absmax);
}
