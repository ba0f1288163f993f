//! Adam with 8-bit states, as bitsandbytes' `Adam8bit` and `AdamW8bit`.
//!
//! Follows <https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/csrc/kernels.cu#L915>.

use smallvec::{SmallVec, smallvec};
use trainable_candle_core::cpu::dispatch;
use trainable_candle_core::{Result, Var};

use super::Stepper;
use super::blocks::{Block, Step, Values, update_blocks};
use super::kind::{hyper_parameters, registered};
use super::lanes::Lanes;
use super::quant::{BLOCK_SIZE, Codebook};
use super::rule::{
    Chunk, Kernels, Rule, Settings, StateKind, StateSlice, StateSpec, Update, check_betas, check_not_negative,
};

hyper_parameters! {
    /// Hyper-parameters of [`Adam8bit`] and [`AdamW8bit`]; names and meaning are those of bitsandbytes. The two
    /// optimizers differ only in the default of `weight_decay`. In both, weight decay is decoupled from the gradient.
    pub struct Adam8bitConfig {
        /// Learning rate, at least 0.
        pub lr: f64,
        /// Decay rates of the first and the second moment, each in [0, 1).
        pub betas: (f64, f64),
        /// Added to the root of the second moment, at least 0.
        pub eps: f64,
        /// At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
        pub weight_decay: f64,
        /// Parameters with fewer elements than this number keep their moments unquantized.
        pub min_8bit_size: usize,
    }
}

impl Adam8bitConfig {
    /// Returns the defaults of Adam8bit: no weight decay.
    pub const fn adam(lr: f64) -> Self {
        Self { lr, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, min_8bit_size: 4096 }
    }

    /// Returns the defaults of AdamW8bit: weight decay of 0.01.
    pub const fn adamw(lr: f64) -> Self {
        Self { weight_decay: 0.01, ..Self::adam(lr) }
    }
}

/// Adam with 8-bit states, as bitsandbytes' `Adam8bit`.
pub type Adam8bit = Stepper<Adam8bitRule>;

/// AdamW with 8-bit states, as bitsandbytes' `AdamW8bit`.
pub type AdamW8bit = Stepper<AdamW8bitRule>;

impl Adam8bit {
    /// Makes Adam8bit on `params` with the defaults of [`Adam8bitConfig::adam`] except `weight_decay`.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn new(params: Vec<Var>, lr: f64, weight_decay: f64) -> Result<Self> {
        Self::with_config(params, Adam8bitConfig { weight_decay, ..Adam8bitConfig::adam(lr) })
    }
}

impl AdamW8bit {
    /// Makes AdamW8bit on `params` with the defaults of [`Adam8bitConfig::adamw`] except `weight_decay`.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn new(params: Vec<Var>, lr: f64, weight_decay: f64) -> Result<Self> {
        Self::with_config(params, Adam8bitConfig { weight_decay, ..Adam8bitConfig::adamw(lr) })
    }
}

// bitsandbytes takes four hyper-parameters by position: lr, betas, eps, weight_decay.
registered!(
    Adam8bitRule,
    "Adam with 8-bit states (Dettmers et al. 2022, arXiv:2110.02861), as bitsandbytes' `Adam8bit`.",
    positional: 4,
    Adam8bitConfig::adam(1e-3)
);
registered!(
    AdamW8bitRule,
    "AdamW with 8-bit states (Dettmers et al. 2022, arXiv:2110.02861), as bitsandbytes' `AdamW8bit`.",
    positional: 4,
    Adam8bitConfig::adamw(1e-3)
);

/// The arithmetic of [`Adam8bit`].
pub struct Adam8bitRule;

/// The arithmetic of [`AdamW8bit`], which is that of [`Adam8bit`].
pub struct AdamW8bitRule;

macro_rules! rule {
    ($rule:ident, $name:literal) => {
        impl Rule for $rule {
            const NAME: &'static str = $name;
            type Config = Adam8bitConfig;
            const UPDATE: Update<Adam8bitConfig, f32> = update;
            const UPDATE_F64: Option<Update<Adam8bitConfig, f64>> = None;
            const KERNELS: Option<Kernels<Adam8bitConfig>> = Some(Kernels {
                prepare: "adam_8bit",
                // For variables with fewer elements than `min_8bit_size`, whose moments are not quantized.
                step: "small_adam",
                // No kernel runs before the step's.
                before: &[],
                step_8bit: Some("adam_8bit"),
                settings: kernel_settings,
            });

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

fn kernel_settings(config: &Adam8bitConfig) -> Settings {
    let Adam8bitConfig { lr, betas, eps, weight_decay, .. } = *config;
    Settings { lr, beta1: betas.0, beta2: betas.1, eps, weight_decay, ..Settings::default() }
}

/// The values of an [`Adam8bitConfig`] that a step uses, rounded as the kernels of bitsandbytes round them. A step also
/// fuses the same multiplications and additions as these kernels, so that its moments equal the kernels' moments bit
/// for bit.
#[derive(Clone, Copy)]
struct Coefficients {
    beta1: f32,
    beta2: f32,
    /// -lr √(1 - beta2^step) / (1 - beta1^step): negative, so that adding a step descends.
    step_size: f32,
    /// `eps` of the configuration times √(1 - beta2^step).
    eps: f32,
    /// The factor of the parameter: 1 - lr * weight_decay.
    decay: f32,
}

impl Coefficients {
    fn new(config: &Adam8bitConfig, step: u64) -> Self {
        let (beta1, beta2, lr) = (config.betas.0 as f32, config.betas.1 as f32, config.lr as f32);
        let correction1 = (1.0 - f64::from(beta1).powf(step as f64)) as f32;
        let root_correction2 = (1.0 - f64::from(beta2).powf(step as f64)).sqrt() as f32;
        Self {
            beta1,
            beta2,
            step_size: -lr * root_correction2 / correction1,
            eps: config.eps as f32 * root_correction2,
            decay: 1.0 - lr * config.weight_decay as f32,
        }
    }

    /// Returns the parameter after a move along `ratio` (the first moment divided by the root of the second plus
    /// `eps`) and weight decay.
    #[inline(always)]
    fn updated(&self, param: f32, ratio: f32) -> f32 {
        self.step_size.mul_add(ratio, param) * self.decay
    }
}

fn update(config: &Adam8bitConfig, step: u64, mut chunk: Chunk<'_, f32>) {
    let coefficients = Coefficients::new(config, step);
    match chunk.states.as_mut_slice() {
        [StateSlice::Float(state1), StateSlice::Float(state2)] => dispatch(
            #[inline(always)]
            || update_elements(coefficients, chunk.param, chunk.grad, state1, state2),
        ),
        _ => update_blocks(coefficients, chunk),
    }
}

#[inline(always)]
fn update_elements(
    coefficients: Coefficients,
    param: &mut [f32],
    grad: &[f32],
    state1: &mut [f32],
    state2: &mut [f32],
) {
    for ((p, &g), (m, v)) in param.iter_mut().zip(grad).zip(state1.iter_mut().zip(state2)) {
        // A moment is the sum of two products. The kernels of bitsandbytes fuse one of them with the addition: for f32
        // states the product with the old moment, for 8-bit states the product with the gradient.
        *m = m.mul_add(coefficients.beta1, (1.0 - coefficients.beta1) * g);
        *v = v.mul_add(coefficients.beta2, (1.0 - coefficients.beta2) * (g * g));
        *p = coefficients.updated(*p, *m / (v.sqrt() + coefficients.eps));
    }
}

impl Step<2> for Coefficients {
    /// With these codes of the first and of the second moment, bitsandbytes fills up a last block that is not full.
    const PADDING_CODES: [u8; 2] = [128, 0];

    /// If an element's gradient or its new second moment is non-finite, the element does not change and its moments
    /// become zero.
    #[inline(always)]
    fn update<L: Lanes>(self, l: L, block: Block<'_, 2>, values: &mut [Values; 2]) {
        let mut largest = l.splat(0.0);
        for grad in block.grad.chunks_exact(L::WIDTH) {
            // NaN is larger than all numbers to `max_bits`, so the condition below is false if a gradient is NaN.
            largest = l.max_bits(largest, l.abs(l.load(grad)));
        }
        // `states[1].1` is the scale of the second moments, which is the largest of them. If the condition holds, the
        // squares of the gradients are at most 1e36, and all new second moments are finite in f32.
        if l.all_at_most(largest, l.splat(1e18)) && *block.states[1].1 <= 1e37 {
            self.update_block::<L, false>(l, block, values);
        } else {
            self.update_block::<L, true>(l, block, values);
        }
    }
}

/// The number of vector registers whose elements are updated together: each operation runs on all of these registers
/// before the next operation. With one register, the processor would have too little other work during the root and the
/// division. With more than two registers, the loop would need more registers than a processor has.
const TOGETHER: usize = 2;

impl Coefficients {
    /// Updates a block with the vector operations of `l`, on registers of `L::WIDTH` values. With `CHECKED`, elements
    /// whose new second moment is non-finite do not change, and their moments become zero; without, the new second
    /// moments of all elements must be finite.
    #[inline(always)]
    fn update_block<L: Lanes, const CHECKED: bool>(
        self,
        l: L,
        block: Block<'_, 2>,
        [Values(m), Values(v)]: &mut [Values; 2],
    ) {
        let Block { param, grad, states: [(codes1, absmax1), (codes2, absmax2)] } = block;
        let (codebook1, codebook2) = (Codebook::sign_preserving(), Codebook::unsigned());
        let (scale1, scale2) = (l.splat(*absmax1), l.splat(*absmax2));
        let (beta1, beta2) = (l.splat(self.beta1), l.splat(self.beta2));
        let (one_minus_beta1, one_minus_beta2) = (l.splat(1.0 - self.beta1), l.splat(1.0 - self.beta2));
        let (step_size, eps, decay) = (l.splat(self.step_size), l.splat(self.eps), l.splat(self.decay));
        let zero = l.splat(0.0);
        let (mut max1, mut max2) = (zero, zero);
        // `decode` looks up the codes of four registers at once; `part` returns one of the four.
        for start in (0..BLOCK_SIZE).step_by(4 * L::WIDTH) {
            let (codes1, codes2) = (&codes1[start..], &codes2[start..]);
            let (decoded1, decoded2) = (l.decode(codebook1, codes1), l.decode(codebook2, codes2));
            for part in (0..4).step_by(TOGETHER) {
                let starts: [usize; TOGETHER] = std::array::from_fn(|i| start + (part + i) * L::WIDTH);
                let (mut moment1, mut moment2, mut ratio) = ([zero; TOGETHER], [zero; TOGETHER], [zero; TOGETHER]);
                for i in 0..TOGETHER {
                    let g = l.load(&grad[starts[i]..]);
                    let old2 = l.mul(l.part(codebook2, decoded2, codes2, part + i), scale2);
                    moment2[i] = l.mul_add(l.mul(one_minus_beta2, g), g, l.mul(old2, beta2));
                }
                // Until the division below, `ratio` has the roots.
                for i in 0..TOGETHER {
                    ratio[i] = l.sqrt(moment2[i]);
                }
                for i in 0..TOGETHER {
                    let g = l.load(&grad[starts[i]..]);
                    let old1 = l.mul(l.part(codebook1, decoded1, codes1, part + i), scale1);
                    moment1[i] = l.mul_add(one_minus_beta1, g, l.mul(old1, beta1));
                }
                for i in 0..TOGETHER {
                    ratio[i] = l.div(moment1[i], l.add(ratio[i], eps));
                }
                let mut decays = [decay; TOGETHER];
                if CHECKED {
                    for i in 0..TOGETHER {
                        // False if the gradient is infinite or NaN, or if the second moment overflows.
                        let finite = l.at_most(moment2[i], l.splat(f32::MAX));
                        moment1[i] = l.or_zero(finite, moment1[i]);
                        moment2[i] = l.or_zero(finite, moment2[i]);
                        // Zero for `ratio` and 1 for `decays` keep the parameter. The compiler would turn a choice
                        // between the new and the old parameter into a masked store, which is slow on AMD's processors.
                        ratio[i] = l.or_zero(finite, ratio[i]);
                        decays[i] = l.select(finite, decay, l.splat(1.0));
                    }
                }
                for i in 0..TOGETHER {
                    l.store(moment1[i], &mut m[starts[i]..]);
                    l.store(moment2[i], &mut v[starts[i]..]);
                    max1 = l.max_bits(max1, l.abs(moment1[i]));
                    max2 = l.max_bits(max2, moment2[i]);
                }
                for i in 0..TOGETHER {
                    let moved = l.mul_add(step_size, ratio[i], l.load(&param[starts[i]..]));
                    l.store(l.mul(moved, decays[i]), &mut param[starts[i]..]);
                }
            }
        }
        (*absmax1, *absmax2) = (l.largest(max1), l.largest(max2));
        // `encode_block` also takes the infinite factor of a block whose moments are all 0.
        codebook1.encode_block(l, m, 1.0 / *absmax1, codes1);
        codebook2.encode_block(l, v, 1.0 / *absmax2, codes2);
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::check_equal_steps;
    use super::{Adam8bitConfig, Coefficients};

    #[test]
    fn all_implementations_of_lanes_give_equal_steps() {
        // The coefficients of the third step.
        check_equal_steps(Coefficients::new(&Adam8bitConfig::adamw(0.01), 3));
    }
}
