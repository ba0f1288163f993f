//! Adam with 8-bit states, as bitsandbytes' `Adam8bit` and `AdamW8bit`.

use super::quant::{BLOCK_SIZE, Codebook};

/// Hyper-parameters of [`Adam8bit`] and [`AdamW8bit`]; names and meaning are those of bitsandbytes. The two differ only in
/// the default of `weight_decay`, which is decoupled from the gradient in both.
#[derive(Clone, Debug, PartialEq)]
pub struct Adam8bitConfig {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the first and second moment, each in [0, 1).
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Each step multiplies the parameters by `1 - lr * weight_decay`.
    pub weight_decay: f64,
    /// Parameters with fewer elements keep their states in f32.
    pub min_8bit_size: usize,
}

/// What one step needs of an [`Adam8bitConfig`], rounded as the kernels of bitsandbytes round it.
#[derive(Clone, Copy)]
pub struct Coefficients {
    beta1: f32,
    beta2: f32,
    step_size: f32,
    eps: f32,
    decay: f32,
}

impl Coefficients {
    /// The coefficients of step `step`, which counts from 1.
    pub fn new(config: &Adam8bitConfig, step: u64) -> Self {
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

    /// The moments after a gradient. Fused multiply-adds are placed where CUDA places them: moments are equal bit for bit.
    #[inline(always)]
    fn moments(&self, m: f32, v: f32, grad: f32) -> (f32, f32) {
        let m = (1.0 - self.beta1).mul_add(grad, m * self.beta1);
        let v = ((1.0 - self.beta2) * grad).mul_add(grad, v * self.beta2);
        (m, v)
    }

    #[inline(always)]
    fn updated(&self, param: f32, m: f32, v: f32) -> f32 {
        self.step_size.mul_add(m / (v.sqrt() + self.eps), param) * self.decay
    }
}

/// One step on `param` with 8-bit moments: `state1` and `state2` hold a code for each element, `absmax1` and `absmax2` a
/// scale for each [`BLOCK_SIZE`] elements; zeros to begin with. An element whose gradient is not finite loses its moments
/// and stays as it is.
pub fn update_blockwise(
    at: Coefficients,
    param: &mut [f32],
    grad: &[f32],
    (state1, absmax1): (&mut [u8], &mut [f32]),
    (state2, absmax2): (&mut [u8], &mut [f32]),
) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            let (params, param_rest) = param.as_chunks_mut();
            let (grads, grad_rest) = grad.as_chunks();
            let (codes1, rest1) = state1.as_chunks_mut();
            let (codes2, rest2) = state2.as_chunks_mut();
            let full = params.len();
            for block in 0..full {
                let state1 = (&mut codes1[block], &mut absmax1[block]);
                let state2 = (&mut codes2[block], &mut absmax2[block]);
                update_block(at, &mut params[block], &grads[block], state1, state2);
            }
            if !param_rest.is_empty() {
                let mut param = padded(param_rest, 0.0);
                let (mut codes1, mut codes2) = (padded(rest1, 128), padded(rest2, 0));
                let state1 = (&mut codes1, &mut absmax1[full]);
                let state2 = (&mut codes2, &mut absmax2[full]);
                update_block(at, &mut param, &padded(grad_rest, 0.0), state1, state2);
                let len = param_rest.len();
                param_rest.copy_from_slice(&param[..len]);
                rest1.copy_from_slice(&codes1[..len]);
                rest2.copy_from_slice(&codes2[..len]);
            }
        },
    );
}

fn padded<T: Copy>(data: &[T], value: T) -> [T; BLOCK_SIZE] {
    let mut block = [value; BLOCK_SIZE];
    block[..data.len()].copy_from_slice(data);
    block
}

#[inline(always)]
fn update_block(
    at: Coefficients,
    param: &mut [f32; BLOCK_SIZE],
    grad: &[f32; BLOCK_SIZE],
    (state1, absmax1): (&mut [u8; BLOCK_SIZE], &mut f32),
    (state2, absmax2): (&mut [u8; BLOCK_SIZE], &mut f32),
) {
    let (codebook1, codebook2) = (Codebook::sign_preserving(), Codebook::unsigned());
    let (mut m, mut v) = ([0f32; BLOCK_SIZE], [0f32; BLOCK_SIZE]);
    let (mut max1, mut max2) = (0, 0);
    for i in 0..BLOCK_SIZE {
        let g = grad[i];
        let old1 = codebook1.decode(state1[i]) * *absmax1;
        let old2 = codebook2.decode(state2[i]) * *absmax2;
        let (new1, new2) = at.moments(old1, old2, g);
        let finite = g.is_finite();
        m[i] = if finite { new1 } else { 0.0 };
        v[i] = if finite { new2 } else { 0.0 };
        let updated = at.updated(param[i], new1, new2);
        param[i] = if finite { updated } else { param[i] };
        // Magnitudes compare as their bits do, and integers have a maximum that vectorises.
        max1 = max1.max(m[i].abs().to_bits());
        max2 = max2.max(v[i].abs().to_bits());
    }
    *absmax1 = f32::from_bits(max1);
    *absmax2 = f32::from_bits(max2);
    *state1 = codebook1.encode_block(&m, 1.0/ *absmax1);
    *state2 = codebook2.encode_block(&v, 1.0/ *absmax2);
}

/// One step on `param` with f32 moments, for parameters smaller than [`Adam8bitConfig::min_8bit_size`].
pub fn update_small(at: Coefficients, param: &mut [f32], grad: &[f32], state1: &mut [f32], state2: &mut [f32]) {
    for (((param, &grad), m), v) in param.iter_mut().zip(grad).zip(state1).zip(state2) {
        *m = (1.0 - at.beta1).mul_add(grad, *m * at.beta1);
        *v = (1.0 - at.beta2).mul_add(grad * grad, *v * at.beta2);
        *param = at.updated(*param, *m, *v);
    }
}
