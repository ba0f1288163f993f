//! Variables that an operation reads in addition to its inputs on the tape: masks, tables of cosines and sines, frozen
//! weights, operands of comparisons. If such a variable changes before the backward pass, the pass returns an error or
//! the gradient for the value before the change.

use trainable_candle_core::checkpoint::{Policy, checkpoint, checkpoint_with};
use trainable_candle_core::ops::attention::{RotaryHeads, rotary_attention, scaled_dot_product_attention};
use trainable_candle_core::ops::linear_group::{LinearGroup, LowRank, linear_group};
use trainable_candle_core::ops::lora::{LoraWeights, dora_linear, lora_linear};
use trainable_candle_core::ops::loss::{Reduction, mse_loss};
use trainable_candle_core::ops::norm::{rms_norm, rms_norm_rope};
use trainable_candle_core::ops::rope::rope;
use trainable_candle_core::raw::to_f64_vec;
use trainable_candle_core::{DType, Device, Error, Result, Tensor, Var};

const CPU: Device = Device::Cpu;

/// 16 different values between -1 and 1, (4, 4). Another phase gives other values.
fn ramp(phase: f64) -> Tensor {
    Tensor::from_vec((0..16).map(|i| (f64::from(i) * 0.7 + phase).sin()).collect(), (4, 4), &CPU).unwrap()
}

fn weights<'a>(weight: &'a Tensor, bias: Option<&'a Tensor>, factors: &'a [Tensor; 2]) -> LoraWeights<'a> {
    LoraWeights { weight: weight.into(), bias, down: &factors[0], up: &factors[1], scale: 0.5 }
}

/// Rotary attention on the projection [x, x] of 8 columns: two heads of queries, one of keys and one of values, each of
/// two features. The first two columns of `tables` are cos and sin. With `scale`, queries and keys have RMS norms, of
/// which that of the queries has this scale. Rows 0 to 2 and row 3 are two texts, and attention has no window. The
/// result is multiplied by x.
fn rotary(x: &Tensor, tables: &Tensor, scale: Option<&Tensor>) -> Result<Tensor> {
    let bounds = Tensor::from_vec(vec![0i64, 3, 4], 3, &CPU)?;
    let (cos, sin) = (tables.narrow(1, 0, 1)?, tables.narrow(1, 1, 1)?);
    let norms = scale.map(|scale| ([Some(scale), None], 1e-5));
    let heads = RotaryHeads { heads: 2, key_heads: 1, angles: [&cos, &sin], norms };
    rotary_attention(&Tensor::cat(&[x, x], 1)?, heads, &bounds, None)?.mul(x)
}

/// A function of x and of a (4, 4) tensor that gets no gradient.
type Function = fn(&Tensor, &Tensor) -> Result<Tensor>;

/// The functions, each with the role of its second tensor. The last arguments of `scaled_dot_product_attention` mean no
/// causal mask and the default scale; the bool of `rope` and `rms_norm_rope` chooses interleaved pairs of features. The
/// `None` of `rms_norm_rope` means a norm without a scale.
const FUNCTIONS: [(&str, Function); 16] = [
    ("factor", |x, v| x.mul(v)),
    ("addend", |x, v| x.add(v)),
    ("mask", |x, v| scaled_dot_product_attention(x, x, x, Some(v), false, None)),
    ("transposed mask", |x, v| scaled_dot_product_attention(x, x, x, Some(&v.t()?), false, None)),
    ("table of rope", |x, v| rope(x, &v.narrow(1, 0, 2)?, &v.narrow(1, 1, 2)?, false)),
    ("table of rms_norm_rope", |x, v| rms_norm_rope(x, None, &v.narrow(1, 0, 2)?, &v.narrow(1, 1, 2)?, true, 1e-5)),
    ("scale of a norm that is recomputed", |x, v| {
        Ok(rms_norm(x, Some(&v.narrow(0, 0, 1)?.squeeze(0)?), 1e-5)?.recomputed())
    }),
    ("table of rotary_attention", |x, v| rotary(x, v, None)),
    ("scale of rotary_attention", |x, v| {
        let scale = v.narrow(0, 1, 1)?.squeeze(0)?.narrow(0, 0, 2)?;
        rotary(x, &ramp(0.5), Some(&scale))
    }),
    ("weight of lora", |x, v| {
        lora_linear(x, weights(v, None, &[ramp(0.1).narrow(0, 0, 2)?, ramp(0.2).narrow(1, 0, 2)?]))
    }),
    ("bias of lora", |x, v| {
        let bias = v.narrow(0, 1, 1)?.squeeze(0)?;
        lora_linear(x, weights(&ramp(0.3), Some(&bias), &[ramp(0.1).narrow(0, 0, 2)?, ramp(0.2).narrow(1, 0, 2)?]))
    }),
    ("weight of dora", |x, v| {
        let magnitude = ramp(0.4).narrow(0, 0, 1)?.squeeze(0)?;
        dora_linear(x, weights(v, None, &[ramp(0.1).narrow(0, 0, 2)?, ramp(0.2).narrow(1, 0, 2)?]), &magnitude)
    }),
    ("weight of a group", |x, v| {
        let low_rank = LowRank { down: ramp(0.1).narrow(0, 0, 2)?, up: ramp(0.2).narrow(1, 0, 2)?, scale: 0.5 };
        linear_group(x, LinearGroup { weight: v.into(), bias: None, sizes: &[4], low_rank: &[Some(low_rank)] })
    }),
    ("compared", |x, v| Tensor::select(&x.detach().gt(v)?, x, &x.mul_scalar(3.0)?)),
    ("argmax", |x, v| x.index_select(&v.argmax(1, false)?, 0)),
    ("target", |x, v| mse_loss(x, v, Reduction::None)),
];

/// The gradient of x. With `change`, the variable v changes between the forward and the backward pass.
fn gradient(f: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>, change: bool) -> Result<Vec<f64>> {
    let (x, v) = (Var::from_tensor(&ramp(0.0))?, Var::from_tensor(&ramp(1.0))?);
    // The backward pass of a square reads its input, so the first sqr makes the backward pass read the result of f. The
    // second sqr makes the gradient of the first one's result differ from element to element.
    let loss = f(&x, &v.detach())?.sqr()?.sqr()?.sum_all()?;
    if change {
        v.set(&ramp(2.0))?;
    }
    loss.backward()?;
    to_f64_vec(x.grad().unwrap().raw())
}

fn check(name: &str, f: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>) {
    let expected = gradient(f, false).unwrap();
    match gradient(f, true) {
        Ok(found) => assert_eq!(found, expected, "{name}"),
        Err(error) => assert!(matches!(error, Error::Autograd { .. }), "{name}: {error}"),
    }
}

#[test]
fn a_change_before_the_backward_pass_is_an_error_or_has_no_effect() {
    for (name, function) in FUNCTIONS {
        check(name, &function);
    }
}

#[test]
fn a_change_before_a_recomputation_is_an_error_or_has_no_effect() {
    for policy in [Policy::Full, Policy::Selective] {
        for (name, function) in FUNCTIONS {
            let recomputed = move |x: &Tensor, v: &Tensor| -> Result<Tensor> {
                let v = v.clone();
                let run = move |xs: &[Tensor]| Ok(vec![function(&xs[0], &v)?.sqr()?.mul_scalar(0.5)?]);
                Ok(checkpoint_with(policy, run, &[x])?.remove(0))
            };
            check(&format!("{name}, {policy:?}"), &recomputed);
            // The inner checkpoint alone could miss the change: the recomputation of the outer checkpoint runs the
            // inner checkpoint anew, which then records the variable as it is after the change. So the outer checkpoint
            // must also check the variables that the inner function reads.
            let nested = move |x: &Tensor, v: &Tensor| -> Result<Tensor> {
                let v = v.clone();
                let outer = move |xs: &[Tensor]| -> Result<Vec<Tensor>> {
                    let v = v.clone();
                    let inner = checkpoint(move |xs| function(&xs[0], &v), &[&xs[0]])?;
                    Ok(vec![inner.sqr()?.mul_scalar(0.5)?])
                };
                Ok(checkpoint_with(policy, outer, &[x])?.remove(0))
            };
            check(&format!("{name}, nested {policy:?}"), &nested);
        }
    }
}

#[test]
fn a_change_of_a_mask_that_was_cast_is_not_an_error() -> Result<()> {
    // Attention in f32 casts the f16 mask to f32 and keeps the result, which does not change with the mask.
    let mask = Var::from_tensor(&ramp(1.0).to_dtype(DType::F16)?)?;
    let x = Var::from_tensor(&ramp(0.0).to_dtype(DType::F32)?)?;
    let y = scaled_dot_product_attention(&x, &x, &x, Some(&mask.detach()), false, None)?;
    mask.set(&mask.mul_scalar(2.0)?.detach())?;
    y.sum_all()?.backward().map(drop)
}
