//! Linear maps with low-rank adapters, each map as a single operation.
//!
//! LoRA (Hu et al. 2021, arXiv:2106.09685): y = x Wᵀ + b + s (x Aᵀ) Bᵀ with A = `down (r, in)`, B = `up (out, r)`. DoRA
//! (Liu et al. 2024, arXiv:2402.09353): y = c ∘ (x Wᵀ + s (x Aᵀ) Bᵀ) + b. The vector c has one element, m / ‖w‖, for
//! each row w of W + s B A, where m is the row's trained magnitude. ‖w‖ is a constant in the backward pass (section 4.3
//! of the paper), as in peft.
//!
//! The base (W and b) is frozen, so no activation is saved for its gradient.
//!
//! x and W may be f16 or bf16 while the trained tensors are f32. Products then use copies of the trained tensors in the
//! dtype of x, and the gradients of A and B are summed and stored in f32.

use candle_core::DType;

#[cfg(feature = "testing")]
use super::case::{Case, Entry};
#[cfg(feature = "testing")]
use super::linear::linear;
use super::linear::{as_matrix, check, forward, forward_unless_unread, same_kind, with_last};
use super::low_rank::{LowRankBackward, LowRanks, operand};
use crate::compute::{Destination, Product};
use crate::cpu::{self, Div, Mul};
use crate::quantized::WeightRef;
#[cfg(feature = "testing")]
use crate::quantized::{Format, example};
use crate::raw::own_copy;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Error, Result, Tensor, Var, checkpoint, compute};

static LORA: OpInfo = OpInfo::expensive("lora_linear");
static DORA: OpInfo = OpInfo::expensive("dora_linear");

/// Checks that `down (r, in)` and `up (out, r)` fit a base of shape `(out, in)`, and the dtype and device of `x`.
pub(super) fn check_factors(
    op: &'static str,
    x: &Tensor,
    (out, inner): (usize, usize),
    down: &Tensor,
    up: &Tensor,
) -> Result<()> {
    let fits = down.rank() == 2
        && up.rank() == 2
        && down.dims()[1] == inner
        && up.dims()[0] == out
        && down.dims()[0] == up.dims()[1];
    if !fits {
        return Err(Error::shape(
            op,
            format!(
                "down has shape {:?} and up {:?}, expected (rank, {inner}) and ({out}, rank)",
                down.dims(),
                up.dims()
            ),
        ));
    }
    trainable_kind(op, x, "down matrix", down)?;
    trainable_kind(op, x, "up matrix", up)
}

/// Checks that a trained tensor is on the device of `x`, and has the dtype of `x`; for an f16 or bf16 `x` it may be
/// f32, as master parameters are in mixed precision.
fn trainable_kind(op: &'static str, x: &Tensor, name: &str, tensor: &Tensor) -> Result<()> {
    let is_master = tensor.dtype() == DType::F32 && matches!(x.dtype(), DType::F16 | DType::BF16);
    if is_master && tensor.device().same_device(x.device()) {
        return Ok(());
    }
    same_kind(op, x, name, tensor)
}

/// Checks that the base needs no gradient. The base is not an input on the tape, so this function also reports to
/// checkpoints that the operation reads it.
pub(super) fn check_frozen(op: &'static str, weight: WeightRef<'_>, bias: Option<&Tensor>) -> Result<()> {
    if weight.requires_grad() || bias.is_some_and(Tensor::requires_grad) {
        return Err(Error::argument(
            op,
            "the base weight and bias must be frozen, but one needs a gradient; detach() it, or train it with linear()",
        ));
    }
    weight.report_read();
    bias.into_iter().for_each(|bias| checkpoint::reads(&[bias]));
    Ok(())
}

/// Checks that `scale` is finite.
pub(super) fn check_scale(op: &'static str, scale: f64) -> Result<()> {
    if scale.is_finite() {
        return Ok(());
    }
    Err(Error::argument(op, format!("the scale is {scale}, expected a finite number")))
}

/// Checks the arguments of [`lora_backward`].
fn check_backward(
    op: &'static str,
    grad_output: &Tensor,
    input: &Tensor,
    down: &Tensor,
    up: &Tensor,
    scale: f64,
) -> Result<()> {
    let (Some(&out), Some(&inner)) = (grad_output.dims().last(), input.dims().last()) else {
        return Err(Error::shape(op, "grad_output or input is a scalar; both need at least one dimension"));
    };
    if grad_output.dims()[..grad_output.rank() - 1] != input.dims()[..input.rank() - 1] {
        return Err(Error::shape(
            op,
            format!(
                "grad_output has shape {:?}, input {:?}; expected the same shape except for the last dimension",
                grad_output.dims(),
                input.dims()
            ),
        ));
    }
    check_scale(op, scale)?;
    check_factors(op, input, (out, inner), down, up)?;
    same_kind(op, input, "grad_output", grad_output)
}

/// Computes the gradients of the two LoRA matrices alone, not that of the input.
///
/// y is s (x Aᵀ) Bᵀ with x = `input (..., in)`, A = `down (r, in)`, B = `up (out, r)` and s = `scale`;
/// `grad_output (..., out)` is its gradient. Returns the gradients of `down` and `up`, in their shapes and dtypes.
/// `down` and `up` have the dtype of the input; for an f16 or bf16 input they may be f32. All tensors must be on one
/// device.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit, [`Error::Argument`] if `scale` is
/// not finite.
pub fn lora_backward(
    grad_output: &Tensor,
    input: &Tensor,
    down: &Tensor,
    up: &Tensor,
    scale: f64,
) -> Result<(Tensor, Tensor)> {
    check_backward("lora_backward", grad_output, input, down, up, scale)?;
    let (grad, x) = (as_matrix(&grad_output.raw)?, as_matrix(&input.raw)?);
    // x Aᵀ, and its gradient s g B, where g is the gradient of y. The third argument of `product` is a factor.
    let hidden = compute::matmul(&x, &operand(down, x.dtype())?.raw.t()?)?;
    let grad_hidden = compute::product(&grad, &operand(up, x.dtype())?.raw, scale, x.dtype())?;
    let grad_down = compute::product(&grad_hidden.t()?, &x, 1.0, down.dtype())?;
    let grad_up = compute::product(&grad.t()?, &hidden, scale, up.dtype())?;
    Ok((Tensor::constant(grad_down), Tensor::constant(grad_up)))
}

/// One layer of [`lora_backward_`]: y = s (x Aᵀ) Bᵀ.
#[derive(Clone, Copy)]
pub struct LoraLayer<'a> {
    /// The gradient of y, (..., out).
    pub grad_output: &'a Tensor,
    /// The input x, (..., in).
    pub input: &'a Tensor,
    /// A, (r, in).
    pub down: &'a Var,
    /// B, (out, r).
    pub up: &'a Var,
    /// The scale s.
    pub scale: f64,
}

/// Does what [`lora_backward`] does, for many layers at once, but adds the results to the gradients of the variables.
/// Where these gradients are parts of a [`FlatBuffer`](crate::FlatBuffer), the products are added in place. On CUDA,
/// many products run together, without synchronization.
///
/// # Errors
/// As [`lora_backward`]; if an operand does not fit, no gradient changes.
pub fn lora_backward_(layers: &[LoraLayer<'_>]) -> Result<()> {
    const OP: &str = "lora_backward_";
    let (mut matrices, mut first_products) = (Vec::with_capacity(layers.len()), Vec::with_capacity(2 * layers.len()));
    for layer in layers {
        check_backward(OP, layer.grad_output, layer.input, layer.down, layer.up, layer.scale)?;
        let (grad, x) = (as_matrix(&layer.grad_output.raw)?, as_matrix(&layer.input.raw)?);
        let new = || Destination::New(x.dtype());
        let (down, up) = (operand(layer.down, x.dtype())?.raw.t()?, operand(layer.up, x.dtype())?.raw);
        first_products.push(Product { a: x.clone(), b: down, alpha: 1.0, to: new() });
        first_products.push(Product { a: grad.clone(), b: up, alpha: layer.scale, to: new() });
        matrices.push((grad, x));
    }
    // For each layer, x Aᵀ and its gradient s g B, where g is the gradient of y.
    let pairs = compute::products(&first_products)?;
    let (mut last_products, mut targets) = (Vec::with_capacity(pairs.len()), Vec::with_capacity(pairs.len()));
    for ((layer, (grad, x)), pair) in layers.iter().zip(matrices).zip(pairs.chunks_exact(2)) {
        let (hidden, grad_hidden) = (&pair[0], &pair[1]);
        let of_down = (layer.down, grad_hidden.t()?, x, 1.0);
        let of_up = (layer.up, grad.t()?, hidden.clone(), layer.scale);
        // Adds alpha · a · b to the gradient of `var`: in its buffer, if that is possible.
        for (var, a, b, alpha) in [of_down, of_up] {
            let buffer = var.leaf().product_buffer(&a, &b);
            targets.push((var, buffer.is_some()));
            let to = buffer.map_or_else(|| Destination::New(var.dtype()), Destination::Sum);
            last_products.push(Product { a, b, alpha, to });
        }
    }
    for (grad, (var, is_in_place)) in compute::products(&last_products)?.into_iter().zip(targets) {
        if !is_in_place {
            var.leaf().accumulate(grad)?;
        }
    }
    Ok(())
}

/// The operands that LoRA and DoRA have in common, except the input.
#[derive(Clone, Copy)]
pub struct LoraWeights<'a> {
    /// The frozen W, (out, in).
    pub weight: WeightRef<'a>,
    /// The frozen b, (out).
    pub bias: Option<&'a Tensor>,
    /// A, (rank, in).
    pub down: &'a Tensor,
    /// B, (out, rank).
    pub up: &'a Tensor,
    /// The scale s: alpha / rank for LoRA, alpha / √rank for rsLoRA.
    pub scale: f64,
}

impl LoraWeights<'_> {
    fn check(&self, op: &'static str, x: &Tensor) -> Result<()> {
        check(op, x, self.weight, self.bias)?;
        check_scale(op, self.scale)?;
        check_frozen(op, self.weight, self.bias)?;
        check_factors(op, x, (self.weight.dims()[0], self.weight.dims()[1]), self.down, self.up)
    }
}

impl<'a> LoraWeights<'a> {
    /// The low-rank product for inputs of `dtype`.
    fn low_rank(&self, dtype: DType) -> Result<LowRanks<'a>> {
        let mut low_rank = LowRanks::default();
        // The product is added to all columns of the result.
        let first_column = 0;
        low_rank.push([self.down, self.up], self.scale, first_column, dtype)?;
        Ok(low_rank)
    }
}

/// y = x Wᵀ + b + s (x Aᵀ) Bᵀ: `x (..., in)` → `(..., out)`. Saves x and x Aᵀ if the gradients of A and B need them.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit, [`Error::Argument`] if the base
/// needs a gradient or the scale is not finite.
pub fn lora_linear(x: &Tensor, w: LoraWeights<'_>) -> Result<Tensor> {
    w.check(LORA.name, x)?;
    let low_rank = w.low_rank(x.dtype())?;
    record_with_aux(
        &LORA,
        &[x, w.down, w.up],
        || {
            let matrix = as_matrix(&x.raw)?;
            // x Wᵀ + b; or zeros, if a checkpoint recomputes this operation only for `hidden` and nothing reads y.
            let y = forward_unless_unread(&matrix, w.weight, w.bias.map(|b| &b.raw))?;
            // Adds s (x Aᵀ) Bᵀ to y in place; `hidden` is x Aᵀ.
            let hidden = low_rank.add_to(&y, &matrix)?;
            Ok((y.reshape(with_last(&x.raw, w.weight.dims()[0]))?, hidden.into_iter().collect()))
        },
        |saver, _, aux| low_rank.save(saver, x, w.weight, aux.first()),
    )
}

struct DoraBackward {
    low_rank: LowRankBackward,
    /// The vector c: the magnitude of each row of W + s B A divided by the row's norm, (out), in the dtype of x.
    ratio: Saved,
    /// The norm of each row of W + s B A, (out), in f32 (f64 for f64).
    norm: Saved,
    /// x Wᵀ + s (x Aᵀ) Bᵀ, if the magnitude needs a gradient.
    direction: Option<Saved>,
    magnitude_dtype: DType,
}

/// The index of the magnitude among the inputs of the operation.
const MAGNITUDE: usize = 3;

impl Backward for DoraBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = as_matrix(context.grad())?;
        if let (true, Some(direction)) = (context.needs(MAGNITUDE), &self.direction) {
            // The sum over the rows of g ∘ `direction`, (out): the gradient of c = magnitude / norm.
            let product = compute::sum(&compute::binary(&grad, &as_matrix(&direction.get()?)?, Mul)?, &[0], false)?;
            let norm = self.norm.get()?;
            let grad_magnitude = compute::binary(&compute::cast(&product, norm.dtype())?, &norm, Div)?;
            context.add(MAGNITUDE, compute::cast(&grad_magnitude, self.magnitude_dtype)?)?;
        }
        let scaled = compute::binary(&grad, &self.ratio.get()?, Mul)?;
        self.low_rank.run(context, &scaled)
    }
}

/// The norm of each row of W + s B A, (out). Norms are computed in f32 (f64 for f64), because squares of small weights
/// are 0 in f16.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit.
pub fn adapted_row_norm<'a>(
    weight: impl Into<WeightRef<'a>>,
    down: &Tensor,
    up: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    let adapted = match weight.into() {
        WeightRef::Plain(weight) if matches!(weight.dtype(), DType::F16 | DType::BF16) => {
            compute::cast(&weight.raw, DType::F32)?
        }
        WeightRef::Plain(weight) => own_copy(&weight.raw)?,
        WeightRef::Quantized(weight) => {
            weight.values(if down.dtype() == DType::F64 { DType::F64 } else { DType::F32 })?
        }
        WeightRef::Streamed(weight) => return adapted_row_norm(&weight.here()?, down, up, scale),
    };
    // Adds s B A to `adapted` in place. So `adapted` must not share memory with the weight.
    compute::matmul_accumulate(&adapted, &up.raw, &down.raw, scale)?;
    let squares = compute::sum(&compute::binary(&adapted, &adapted, Mul)?, &[1], false)?;
    Tensor::constant(squares).sqrt()
}

/// y = c ∘ (x Wᵀ + s (x Aᵀ) Bᵀ) + b (DoRA): `x (..., in)` → `(..., out)`, where c is `magnitude (out)` divided by the
/// norm of each row of W + s B A. Saves c and the norms, and x and x Aᵀ if the gradients of A and B need them. If the
/// magnitude needs a gradient, also saves the matrix that c scales.
///
/// # Errors
/// As [`lora_linear`]; `magnitude` is one of the operands that must fit.
pub fn dora_linear(x: &Tensor, w: LoraWeights<'_>, magnitude: &Tensor) -> Result<Tensor> {
    w.check(DORA.name, x)?;
    let out = w.weight.dims()[0];
    if magnitude.dims() != [out] {
        return Err(Error::shape(
            DORA.name,
            format!("the magnitude has shape {:?}, expected ({out},)", magnitude.dims()),
        ));
    }
    trainable_kind(DORA.name, x, "magnitude", magnitude)?;
    let low_rank = w.low_rank(x.dtype())?;
    record_with_aux(
        &DORA,
        &[x, w.down, w.up, magnitude],
        || {
            let matrix = as_matrix(&x.raw)?;
            // A and B in the dtype of x. The index is that of the low-rank product, of which there is one.
            let [down, up] = &low_rank.operands()[0];
            let norm = adapted_row_norm(w.weight, down, up, w.scale)?.raw;
            let ratio = compute::binary(&compute::cast(&magnitude.raw, norm.dtype())?, &norm, Div)?;
            let ratio = compute::cast(&ratio, x.dtype())?;
            let direction = forward(&matrix, w.weight, None)?;
            let hidden = low_rank.add_to(&direction, &matrix)?;
            let mut y = compute::binary(&direction, &ratio, Mul)?;
            if let Some(bias) = w.bias {
                y = compute::binary(&y, &bias.raw, cpu::Add)?;
            }
            Ok((y.reshape(with_last(&x.raw, out))?, [ratio, norm, direction].into_iter().chain(hidden).collect()))
        },
        // `aux` is ratio, norm, direction, hidden.
        |saver, _, aux| DoraBackward {
            low_rank: low_rank.save(saver, x, w.weight, aux.get(3)),
            ratio: saver.save_raw(&aux[0]),
            norm: saver.save_raw(&aux[1]),
            direction: saver.needs(MAGNITUDE).then(|| saver.save_raw(&aux[2])),
            magnitude_dtype: magnitude.dtype(),
        },
    )
}

/// The plain form of [`lora_linear`] for `x` = \[input, A, B, W, b\]; b may be missing.
#[cfg(feature = "testing")]
fn lora_plain(x: &[Tensor], scale: f64) -> Result<Tensor> {
    let base = linear(&x[0], &x[3].detach(), x.get(4).map(Tensor::detach).as_ref())?;
    base.add(&linear(&linear(&x[0], &x[1], None)?, &x[2], None)?.mul_scalar(scale)?)
}

/// `x` in f32 if it is f16 or bf16, as trained tensors are in mixed precision; otherwise `x` itself.
#[cfg(feature = "testing")]
fn master(x: &Tensor) -> Result<Tensor> {
    if matches!(x.dtype(), DType::F16 | DType::BF16) { x.to_dtype(DType::F32) } else { Ok(x.clone()) }
}

/// Registry entries of this file. All inputs of a case get gradients. The base gets none, so it is not an input: each
/// case makes its own.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[
    Entry {
        info: &LORA,
        cases: || {
            fn frozen(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
                let n = dims.iter().product::<usize>();
                let values: Vec<f64> = (0..n).map(|i| (i as f64 * 0.7).sin()).collect();
                Tensor::from_vec(values, dims, x.device())?.to_dtype(x.dtype())
            }
            // All cases have 5 input features and 4 output features; `x` is [input, A, B].
            let run = |x: &[Tensor]| {
                let (weight, bias) = (frozen(&x[0], &[4, 5])?, frozen(&x[0], &[4])?);
                lora_linear(
                    &x[0],
                    LoraWeights { weight: (&weight).into(), bias: Some(&bias), down: &x[1], up: &x[2], scale: 0.5 },
                )
            };
            let plain = |x: &[Tensor]| {
                let all = [x[0].clone(), x[1].clone(), x[2].clone(), frozen(&x[0], &[4, 5])?, frozen(&x[0], &[4])?];
                lora_plain(&all, 0.5)
            };
            let run_quantized = |x: &[Tensor]| {
                let (base, bias) = (example(&x[0], [4, 5], Format::Nf4)?, frozen(&x[0], &[4])?);
                let weight = (&base).into();
                lora_linear(&x[0], LoraWeights { weight, bias: Some(&bias), down: &x[1], up: &x[2], scale: 0.5 })
            };
            let plain_quantized = |x: &[Tensor]| {
                let weight = example(&x[0], [4, 5], Format::Nf4)?.dequantize(x[0].dtype())?;
                lora_plain(&[x[0].clone(), x[1].clone(), x[2].clone(), weight, frozen(&x[0], &[4])?], 0.5)
            };
            vec![
                Case::new("", &[&[2, 3, 5], &[2, 5], &[4, 2]], run).plain(plain),
                Case::new("one row", &[&[5], &[1, 5], &[4, 1]], run).plain(plain),
                Case::new("no rows", &[&[0, 5], &[2, 5], &[4, 2]], run).plain(plain),
                Case::new("nf4 base", &[&[2, 3, 5], &[2, 5], &[4, 2]], run_quantized).plain(plain_quantized),
                Case::new("f32 factors", &[&[2, 3, 5], &[2, 5], &[4, 2]], move |x| {
                    run(&[x[0].clone(), master(&x[1])?, master(&x[2])?])
                })
                .plain(plain),
            ]
        },
    },
    Entry {
        info: &DORA,
        cases: || {
            // The norm is a constant in the backward pass, but a finite difference of A or B would change it. So only x
            // and the magnitude are inputs. All cases have 5 input features, 4 output features and rank 2.
            // Another `phase` gives other values.
            fn fixed(x: &Tensor, dims: &[usize], phase: f64) -> Result<Tensor> {
                let n = dims.iter().product::<usize>();
                let values: Vec<f64> = (0..n).map(|i| (i as f64 * 0.7 + phase).sin()).collect();
                Tensor::from_vec(values, dims, x.device())?.to_dtype(x.dtype())
            }
            let run_quantized = |x: &[Tensor]| {
                let (base, bias) = (example(&x[0], [4, 5], Format::Int8)?, fixed(&x[0], &[4], 0.2)?);
                let (down, up) = (fixed(&x[0], &[2, 5], 0.3)?, fixed(&x[0], &[4, 2], 0.4)?);
                let w = LoraWeights { weight: (&base).into(), bias: Some(&bias), down: &down, up: &up, scale: 0.5 };
                dora_linear(&x[0], w, &x[1])
            };
            let run = |x: &[Tensor]| {
                let (weight, bias) = (fixed(&x[0], &[4, 5], 0.1)?, fixed(&x[0], &[4], 0.2)?);
                let (down, up) = (fixed(&x[0], &[2, 5], 0.3)?, fixed(&x[0], &[4, 2], 0.4)?);
                let w = LoraWeights { weight: (&weight).into(), bias: Some(&bias), down: &down, up: &up, scale: 0.5 };
                dora_linear(&x[0], w, &x[1])
            };
            let plain_over = |x: &[Tensor], weight: Tensor| {
                let bias = fixed(&x[0], &[4], 0.2)?;
                let (down, up) = (fixed(&x[0], &[2, 5], 0.3)?, fixed(&x[0], &[4, 2], 0.4)?);
                let adapted = weight.add(&up.matmul(&down)?.mul_scalar(0.5)?)?;
                let norm = adapted.sqr()?.sum(&[1], false)?.sqrt()?;
                linear(&x[0], &adapted, None)?.mul(&x[1].div(&norm)?)?.add(&bias)
            };
            let plain = move |x: &[Tensor]| plain_over(x, fixed(&x[0], &[4, 5], 0.1)?);
            let plain_quantized =
                move |x: &[Tensor]| plain_over(x, example(&x[0], [4, 5], Format::Int8)?.dequantize(x[0].dtype())?);
            vec![
                Case::new("", &[&[2, 3, 5], &[4]], run).plain(plain),
                Case::new("no rows", &[&[0, 5], &[4]], run).plain(plain),
                Case::new("int8 base", &[&[2, 3, 5], &[4]], run_quantized).plain(plain_quantized),
                Case::new("f32 magnitude", &[&[2, 3, 5], &[4]], move |x| run(&[x[0].clone(), master(&x[1])?]))
                    .plain(plain),
            ]
        },
    },
];
