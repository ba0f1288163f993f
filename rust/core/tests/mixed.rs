//! f32 variables in f16 and bf16 computation: the copies of their values in f16 or bf16 (`compute_copy`), and their
//! gradients in f32.

use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::ops::lora::{
    LoraLayer, LoraWeights, dora_linear, lora_backward, lora_backward_, lora_linear,
};
use trainable_candle_core::raw::{storage_identity, to_f64_vec};
use trainable_candle_core::{DType, Device, Error, FlatBuffer, Result, Tensor, Var};

const CPU: Device = Device::Cpu;
const SIXTEEN_BIT: [DType; 2] = [DType::BF16, DType::F16];
/// Backward passes free the graph.
const RETAIN_GRAPH: bool = false;

/// Multiples of 1/64 in [-1, 1), which are exact in f16 and bf16, different for each `seed`.
fn draw(dims: &[usize], seed: usize) -> Tensor {
    let number = |i: usize| ((i * 7919 + seed * 104_729 + 13) % 127) as f32 / 64.0 - 1.0;
    Tensor::from_vec((0..dims.iter().product()).map(number).collect(), dims, &CPU).unwrap()
}

fn var(dims: &[usize], seed: usize) -> Var {
    Var::from_tensor(&draw(dims, seed)).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    to_f64_vec(tensor.raw()).unwrap()
}

/// Asserts that the elements differ by at most `tolerance` times the largest expected magnitude, or by at most
/// `tolerance` if this magnitude is less than 1.
fn close(found: &Tensor, expected: &Tensor, tolerance: f64) {
    let (found, expected) = (values(found), values(expected));
    assert_eq!(found.len(), expected.len());
    let size = expected.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
    for (f, e) in found.iter().zip(&expected) {
        assert!((f - e).abs() <= tolerance * size, "{f}, expected {e}");
    }
}

#[test]
fn a_copy_gets_the_new_value_after_a_change_and_keeps_its_storage() -> Result<()> {
    for flat in [false, true] {
        let initial = [draw(&[3], 0), draw(&[4, 2], 1)];
        let buffer = FlatBuffer::new(&initial)?;
        let x = if flat { buffer.vars()[1].clone() } else { Var::from_tensor(&initial[1])? };
        let first = x.compute_copy(DType::BF16)?;
        assert_eq!((first.dtype(), values(&first)), (DType::BF16, values(&initial[1])));
        // The storage of a copy, and the index of its first element in the storage.
        let location = |copy: &Tensor| (storage_identity(copy.raw()).0, copy.raw().layout().start_offset());
        x.set(&Tensor::full(2.0, (4, 2), DType::F32, &CPU)?)?;
        let second = x.compute_copy(DType::BF16)?;
        assert_eq!(values(&second), [2.0; 8]);
        assert_eq!(location(&first), location(&second));
        assert_eq!(location(&x.compute_copy(DType::BF16)?), location(&second));
        if flat {
            let other = buffer.vars()[0].compute_copy(DType::BF16)?;
            assert_eq!(
                location(&other).0,
                location(&second).0,
                "the copies of a flat buffer's variables share one storage"
            );
            assert_eq!(location(&second).1, 3, "the first variable has three elements");
        }
    }
    Ok(())
}

#[test]
fn a_copy_that_an_update_has_written_is_not_cast() -> Result<()> {
    let x = var(&[4], 0);
    assert!(x.copy_storage().is_none());
    x.compute_copy(DType::F16)?;
    // Not the value of `x`, so that a new cast of `x` would be noticed.
    let marker = Tensor::full(7.0, 4, DType::F16, &CPU)?;
    trainable_candle_core::compute::copy_into(&x.copy_storage().unwrap(), marker.raw())?;
    // Says that both the variable and its copy have a new value, so the copy needs no cast.
    x.changed_with_copy()?;
    assert_eq!(values(&x.compute_copy(DType::F16)?), [7.0; 4]);
    // This counts as a change of the variable but not of its copy, so the copy is cast again.
    x.update_in_place(|_| Ok(()))?;
    assert_eq!(values(&x.compute_copy(DType::F16)?), values(&x));
    Ok(())
}

#[test]
fn gradients_through_a_copy_are_those_of_a_cast() -> Result<()> {
    for dtype in SIXTEEN_BIT {
        let (cast, copied) = (var(&[4, 3], 1), var(&[4, 3], 1));
        let x = draw(&[5, 3], 2).to_dtype(dtype)?;
        let g = draw(&[5, 4], 3).to_dtype(dtype)?;
        linear(&x, &cast.to_dtype(dtype)?, None)?.backward_with(Some(&g), RETAIN_GRAPH)?;
        linear(&x, &copied.compute_copy(dtype)?, None)?.backward_with(Some(&g), RETAIN_GRAPH)?;
        assert_eq!(values(&copied.grad().unwrap()), values(&cast.grad().unwrap()));
        assert_eq!(copied.grad().unwrap().dtype(), DType::F32);
    }
    Ok(())
}

#[test]
fn a_variable_changed_after_its_copy_was_read_is_an_error_of_the_backward_pass() -> Result<()> {
    for dtype in SIXTEEN_BIT {
        let copied = var(&[4, 3], 1);
        let x = Var::from_tensor(&draw(&[5, 3], 2).to_dtype(dtype)?)?;
        let g = draw(&[5, 4], 3).to_dtype(dtype)?;
        let y = linear(&x, &copied.compute_copy(dtype)?, None)?;
        copied.set(&draw(&[4, 3], 9))?;
        assert!(matches!(y.backward_with(Some(&g), RETAIN_GRAPH), Err(Error::Autograd { .. })));
    }
    Ok(())
}

/// The operands of a layer with LoRA or DoRA: an input `x (2, 33, 45)` and a weight (37, 45), with factors of rank 5.
struct Layer {
    x: Var,
    weight: Tensor,
    bias: Tensor,
    down: Var,
    up: Var,
    magnitude: Var,
}

impl Layer {
    /// The input, the weight and the bias are in `dtype`; the factors and the magnitude are in `factor_dtype`.
    fn new(dtype: DType, factor_dtype: DType) -> Result<Self> {
        let (out, inner, rank) = (37, 45, 5);
        let trained = |dims: &[usize], seed| Var::from_tensor(&draw(dims, seed).to_dtype(factor_dtype)?);
        let mut layer = Self {
            x: Var::from_tensor(&draw(&[2, 33, inner], 0).to_dtype(dtype)?)?,
            weight: draw(&[out, inner], 1).to_dtype(dtype)?,
            bias: draw(&[out], 2).to_dtype(dtype)?,
            down: trained(&[rank, inner], 3)?,
            up: trained(&[out, rank], 4)?,
            magnitude: trained(&[out], 5)?,
        };
        if factor_dtype == DType::F32 {
            // As in an adapter, the factors are in a flat buffer.
            let buffer = FlatBuffer::new(&[layer.down.detach(), layer.up.detach(), layer.magnitude.detach()])?;
            [layer.down, layer.up, layer.magnitude] = [0, 1, 2].map(|i| buffer.vars()[i].clone());
        }
        Ok(layer)
    }

    fn run(&self, dora: bool) -> Result<Tensor> {
        let Self { x, weight, bias, down, up, magnitude } = self;
        let weights = LoraWeights { weight: weight.into(), bias: Some(bias), down, up, scale: 0.5 };
        if dora { dora_linear(x, weights, magnitude) } else { lora_linear(x, weights) }
    }

    /// Runs the layer forward and backward twice. Returns the layer's result, and the gradients that the two backward
    /// passes have added up: of x, down, up and, with DoRA, magnitude.
    fn train(&self, dora: bool) -> Result<Vec<Tensor>> {
        let mut results = Vec::new();
        for seed in [7, 8] {
            let y = self.run(dora)?;
            let grads = y.backward_with(Some(&draw(y.dims(), seed).to_dtype(y.dtype())?), RETAIN_GRAPH)?;
            assert_eq!(grads.len(), if dora { 4 } else { 3 });
            assert!(grads.contains(&self.down) && grads.contains(&self.up));
            results = vec![y, self.x.grad().unwrap(), self.down.grad().unwrap(), self.up.grad().unwrap()];
            results.extend(self.magnitude.grad());
        }
        Ok(results)
    }
}

#[test]
fn f32_factors_in_16_bit_computation_agree_with_f64_and_have_f32_gradients() -> Result<()> {
    for dora in [false, true] {
        let exact = Layer::new(DType::F64, DType::F64)?.train(dora)?;
        for (dtype, tolerance) in [(DType::BF16, 3e-2), (DType::F16, 4e-3), (DType::F32, 1e-5)] {
            let layer = Layer::new(dtype, DType::F32)?;
            let found = layer.train(dora)?;
            assert_eq!(found.len(), exact.len());
            for (index, (found, exact)) in found.iter().zip(&exact).enumerate() {
                // The result and the gradient of x come first.
                assert_eq!(found.dtype(), if index < 2 { dtype } else { DType::F32 });
                close(found, exact, tolerance);
            }
            // Hidden values and results are rounded to `dtype`; the gradients of f32 factors, such as `up`, are not.
            let up_grad = &found[3];
            let (gradient, rounded) = (values(up_grad), values(&up_grad.to_dtype(dtype)?));
            assert!(dtype == DType::F32 || gradient != rounded, "gradients were rounded to {}", dtype.as_str());
        }
    }
    Ok(())
}

/// The norms of the weight's rows must not be computed in f16: there, squares of numbers below 2^-7 are subnormal, and
/// squares of numbers below 2^-12.5 are 0.
#[test]
fn untrained_dora_of_small_f16_weights_equals_the_base_layer() -> Result<()> {
    let x = draw(&[3, 64], 5).to_dtype(DType::F16)?;
    for size in [2e-2, 3e-4, 1e-4, 1e-5] {
        let weight = draw(&[8, 64], 6).mul_scalar(size)?.to_dtype(DType::F16)?;
        let magnitude = weight.to_dtype(DType::F64)?.sqr()?.sum(&[1], false)?.sqrt()?.to_dtype(DType::F32)?;
        let (down, up) = (var(&[2, 64], 7), Var::zeros((8, 2), DType::F32, &CPU)?);
        let w = LoraWeights { weight: (&weight).into(), bias: None, down: &down, up: &up, scale: 0.5 };
        let magnitude = Var::from_tensor(&magnitude)?;
        let found = dora_linear(&x, w, &magnitude)?;
        assert_eq!(values(&found), values(&linear(&x, &weight, None)?), "weights of size {size}");
    }
    Ok(())
}

#[test]
fn gradients_in_a_flat_buffer_equal_those_of_separate_variables() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let flat = Layer::new(dtype, DType::F32)?;
        // Variables outside of a buffer, with the values that `Layer::new` draws.
        let separate = Layer { down: var(&[5, 45], 3), up: var(&[37, 5], 4), ..Layer::new(dtype, DType::F32)? };
        for (flat, separate) in flat.train(/* dora: */ false)?.iter().zip(&separate.train(/* dora: */ false)?) {
            close(flat, separate, 1e-6);
        }
    }
    Ok(())
}

#[test]
fn dtypes_that_do_not_fit_are_errors() -> Result<()> {
    let layer = Layer::new(DType::BF16, DType::F16)?;
    assert!(matches!(layer.run(/* dora: */ false), Err(Error::DType { .. })));
    let layer = Layer::new(DType::F32, DType::F64)?;
    assert!(matches!(layer.run(/* dora: */ true), Err(Error::DType { .. })));
    Ok(())
}

#[test]
fn lora_backward_of_many_layers_equals_that_of_each_layer_and_an_error_changes_nothing() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        // The outputs, inputs and rank of each layer.
        let shapes = [(6, 5, 2), (6, 5, 2), (4, 7, 3)];
        let drawn = |dims: &[usize], seed| draw(dims, seed).to_dtype(dtype);
        let grads = shapes.iter().enumerate().map(|(i, s)| drawn(&[2, 9, s.0], i)).collect::<Result<Vec<_>>>()?;
        let inputs = shapes.iter().enumerate().map(|(i, s)| drawn(&[2, 9, s.1], 10 + i)).collect::<Result<Vec<_>>>()?;
        let initial: Vec<Tensor> = shapes
            .iter()
            .enumerate()
            .flat_map(|(i, &(out, inner, rank))| [draw(&[rank, inner], 20 + i), draw(&[out, rank], 30 + i)])
            .collect();
        let flat = FlatBuffer::new(&initial)?.vars().to_vec();
        let separate = initial.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
        for vars in [flat, separate] {
            let layers: Vec<LoraLayer<'_>> = (0..3)
                .map(|i| LoraLayer {
                    grad_output: &grads[i],
                    input: &inputs[i],
                    down: &vars[2 * i],
                    up: &vars[2 * i + 1],
                    scale: 0.25,
                })
                .collect();
            // `lora_backward_` adds to the gradients of the variables, so they are twice those of `lora_backward`.
            lora_backward_(&layers)?;
            lora_backward_(&layers)?;
            for layer in &layers {
                let (down, up) = lora_backward(layer.grad_output, layer.input, layer.down, layer.up, layer.scale)?;
                assert_eq!((down.dtype(), up.dtype()), (DType::F32, DType::F32));
                close(&layer.down.grad().unwrap(), &down.mul_scalar(2.0)?, 1e-6);
                close(&layer.up.grad().unwrap(), &up.mul_scalar(2.0)?, 1e-6);
            }
            // The shapes of the last layer do not fit, so nothing is added to the gradients of the first layer either.
            let before = values(&layers[0].down.grad().unwrap());
            let wrong = [layers[0], LoraLayer { input: &grads[2], ..layers[2] }];
            assert!(matches!(lora_backward_(&wrong), Err(Error::Shape { .. })));
            assert_eq!(values(&layers[0].down.grad().unwrap()), before);
        }
    }
    Ok(())
}
