//! Lion with an 8-bit momentum, as bitsandbytes' `Lion8bit`:
//! <https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/csrc/kernels.cu#L1153>.

use smallvec::{SmallVec, smallvec};
use trainable_candle_core::{Result, Var};

use super::Stepper;
use super::blocks::{Block, Step, Values, update_blocks};
use super::kind::{hyper_parameters, registered};
use super::lanes::Lanes;
use super::lion::{Coefficients, update_float};
use super::quant::{BLOCK_SIZE, Codebook};
use super::rule::{
    Chunk, Kernels, Rule, Settings, StateKind, StateSlice, StateSpec, Update, check_betas, check_not_negative,
};

hyper_parameters! {
    /// Hyper-parameters of [`Lion8bit`]; names, meaning and defaults are those of bitsandbytes.
    pub struct Lion8bitConfig {
        /// Learning rate, at least 0.
        pub lr: f64,
        /// The momentum's weight in the update, and the momentum's decay rate; each in [0, 1).
        pub betas: (f64, f64),
        /// At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
        pub weight_decay: f64,
        /// Parameters with fewer elements than this number keep their momentum in f32.
        pub min_8bit_size: usize,
    }
}

impl Default for Lion8bitConfig {
    fn default() -> Self {
        Self { lr: 1e-4, betas: (0.9, 0.99), weight_decay: 0.0, min_8bit_size: 4096 }
    }
}

/// Lion with an 8-bit momentum, as bitsandbytes' `Lion8bit`.
pub type Lion8bit = Stepper<Lion8bitRule>;

impl Lion8bit {
    /// Makes a Lion8bit that updates `params`, with the defaults of [`Lion8bitConfig`] except `lr` and `weight_decay`.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn new(params: Vec<Var>, lr: f64, weight_decay: f64) -> Result<Self> {
        Self::with_config(params, Lion8bitConfig { lr, weight_decay, ..Lion8bitConfig::default() })
    }
}

// 3: bitsandbytes takes three hyper-parameters by position: `lr`, `betas` and `weight_decay`.
registered!(
    Lion8bitRule,
    "Lion with an 8-bit momentum, as bitsandbytes' `Lion8bit`.",
    positional: 3,
    Lion8bitConfig::default()
);

/// The arithmetic of [`Lion8bit`].
pub struct Lion8bitRule;

impl Rule for Lion8bitRule {
    const NAME: &'static str = "Lion8bit";
    type Config = Lion8bitConfig;
    const UPDATE: Update<Lion8bitConfig, f32> = update;
    const UPDATE_F64: Option<Update<Lion8bitConfig, f64>> = None;
    const KERNELS: Option<Kernels<Lion8bitConfig>> = Some(Kernels {
        prepare: "lion",
        step: "lion",
        // No kernels run before `step`.
        before: &[],
        step_8bit: Some("lion_8bit"),
        settings: |&Lion8bitConfig { lr, betas, weight_decay, .. }| Settings {
            lr,
            beta1: betas.0,
            beta2: betas.1,
            weight_decay,
            ..Settings::default()
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
    let coefficients = Coefficients::new(config.lr, config.betas, config.weight_decay);
    // Variables below `min_8bit_size` have a momentum in f32.
    if matches!(chunk.states.as_slice(), [StateSlice::Float(_)]) {
        return update_float(coefficients, chunk);
    }
    update_blocks(coefficients, chunk);
}

impl Step<1> for Coefficients<f32> {
    /// The code of the momentum of missing elements in a last block that is not full, as in bitsandbytes.
    const PADDING_CODES: [u8; 1] = [128];

    /// Updates the block's parameters and momentum. If a gradient is non-finite, its element's parameter does not
    /// change and the element's momentum becomes zero; bitsandbytes would set this momentum to the block's largest
    /// value. `m` is room for the block's new momentum in f32, which is encoded at the end.
    #[inline(always)]
    fn update<L: Lanes>(self, l: L, block: Block<'_, 1>, [Values(m)]: &mut [Values; 1]) {
        let Block { param, grad, states: [(codes, absmax)] } = block;
        let codebook = Codebook::sign_preserving();
        let (zero, scale) = (l.splat(0.0), l.splat(*absmax));
        let (beta1, beta2) = (l.splat(self.beta1), l.splat(self.beta2));
        let (gradient_weight1, gradient_weight2) = (l.splat(1.0 - self.beta1), l.splat(1.0 - self.beta2));
        let (lr, minus_lr, decay) = (l.splat(self.lr), l.splat(-self.lr), l.splat(self.decay));
        let mut largest = zero;
        for start in (0..BLOCK_SIZE).step_by(4 * L::WIDTH) {
            let codes = &codes[start..];
            // `decode` looks up four vectors of `WIDTH` values.
            let decoded = l.decode(codebook, codes);
            for part in 0..4 {
                let here = start + part * L::WIDTH;
                // The additions are fused with the products of the gradient, as in the 8-bit kernel of bitsandbytes. In
                // the f32 kernel, they are fused with the products of the momentum.
                let g = l.load(&grad[here..]);
                let old_momentum = l.mul(l.part(codebook, decoded, codes, part), scale);
                let direction = l.mul_add(gradient_weight1, g, l.mul(old_momentum, beta1));
                let momentum = l.mul_add(gradient_weight2, g, l.mul(old_momentum, beta2));
                // A parameter moves by `lr` against the sign of its direction, and not at all if the direction is 0.
                let down = l.select(l.at_most(direction, zero), zero, minus_lr);
                let up = l.select(l.at_most(zero, direction), zero, lr);
                let finite = l.at_most(l.abs(g), l.splat(f32::MAX));
                let momentum = l.or_zero(finite, momentum);
                let change = l.or_zero(finite, l.add(down, up));
                let decay = l.select(finite, decay, l.splat(1.0));
                l.store(l.add(l.mul(l.load(&param[here..]), decay), change), &mut param[here..]);
                l.store(momentum, &mut m[here..]);
                largest = l.max(largest, l.abs(momentum));
            }
        }
        *absmax = l.largest(largest);
        // `encode_block` accepts the infinite scale of a block of zeros.
        codebook.encode_block(l, m, 1.0 / *absmax, codes);
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::check_equal_steps;
    use super::{Coefficients, Lion8bitConfig};

    #[test]
    fn all_implementations_of_lanes_give_equal_steps() {
        let Lion8bitConfig { lr, betas, .. } = Lion8bitConfig::default();
        // 0.01 is the weight decay; the default, 0, would not test the decay.
        check_equal_steps(Coefficients::<f32>::new(lr, betas, 0.01));
    }
}
