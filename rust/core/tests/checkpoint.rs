//! What checkpoints keep, recompute and reject.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use trainable_candle_core::checkpoint::{Policy, checkpoint, checkpoint_with};
use trainable_candle_core::ops::activation::Gelu;
use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::{Device, Error, Result, Tensor, Var};

const CPU: Device = Device::Cpu;

/// Different fixed values between -1 and 1.
fn sines(shape: &[usize], phase: f32) -> Tensor {
    let n: usize = shape.iter().product();
    Tensor::from_vec((0..n).map(|i| (i as f32 * 0.37 + phase).sin()).collect::<Vec<_>>(), shape, &CPU).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Two trainable layers with an activation in between and a residual connection around them.
#[derive(Clone)]
struct Block {
    first: Var,
    second: Var,
    /// How many calls of `forward` have begun.
    calls: Arc<AtomicUsize>,
    /// How many calls of `forward` have returned a result.
    finished: Arc<AtomicUsize>,
}

impl Block {
    fn new() -> Result<Self> {
        Ok(Self {
            first: Var::from_tensor(&sines(&[12, 6], 0.1))?,
            second: Var::from_tensor(&sines(&[6, 12], 0.2))?,
            calls: Arc::default(),
            finished: Arc::default(),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let hidden = linear(x, &self.first, None)?.gelu(Gelu::Tanh)?.mul_scalar(0.5)?;
        let y = x.add(&linear(&hidden, &self.second, None)?)?;
        self.finished.fetch_add(1, Ordering::Relaxed);
        Ok(y)
    }

    /// Returns the bits of the gradients of `x` and of the variables, and sets the gradients to zero.
    fn gradients(&self, x: &Var) -> Vec<Vec<u32>> {
        let gradients = [x, &self.first, &self.second].map(|v| bits(&v.grad().unwrap()));
        for v in [x, &self.first, &self.second] {
            v.zero_grad().unwrap();
        }
        gradients.to_vec()
    }
}

fn ones_like(t: &Tensor) -> Tensor {
    Tensor::ones(t.shape(), t.dtype(), &CPU).unwrap()
}

#[test]
fn the_policies_none_full_and_selective_give_the_same_gradients_bit_for_bit() -> Result<()> {
    let (block, x) = (Block::new()?, Var::from_tensor(&sines(&[5, 6], 0.0))?);
    let mut expected = None;
    for policy in [Policy::None, Policy::Full, Policy::Selective] {
        let inner = block.clone();
        let y = checkpoint_with(policy, move |xs| Ok(vec![inner.forward(&xs[0])?]), &[&x])?.remove(0);
        // The gradient of the result is ones, and `false` means that the graph is not retained; also in the tests below.
        y.backward_with(Some(&ones_like(&y)), false)?;
        let found = (bits(&y), block.gradients(&x));
        assert_eq!(*expected.get_or_insert_with(|| found.clone()), found, "{policy:?}");
    }
    Ok(())
}

#[test]
fn a_recomputation_stops_at_the_last_value_that_was_saved() -> Result<()> {
    let (block, x) = (Block::new()?, Var::from_tensor(&sines(&[5, 6], 0.0))?);
    let inner = block.clone();
    let y = checkpoint(move |xs| inner.forward(&xs[0]), &[&x])?;
    assert_eq!(block.calls.load(Ordering::Relaxed), 1);
    y.backward_with(Some(&ones_like(&y)), false)?;
    assert_eq!(block.calls.load(Ordering::Relaxed), 2, "recomputed once");
    // The last saved value is the input of the second layer, so the sum after this layer is not recomputed.
    assert_eq!(block.finished.load(Ordering::Relaxed), 1, "the recomputation ended early");
    Ok(())
}

#[test]
fn several_inputs_outputs_and_a_captured_variable_get_their_gradients() -> Result<()> {
    let (a, b, w) = (Var::new(2f32, &CPU)?, Var::new(3f32, &CPU)?, Var::new(5f32, &CPU)?);
    for policy in [Policy::Full, Policy::Selective] {
        let captured = w.clone();
        let outputs = checkpoint_with(
            policy,
            move |xs| Ok(vec![xs[0].mul(&captured)?.sqr()?, xs[1].mul(&captured)?.exp()?]),
            &[&a, &b],
        )?;
        let y = outputs[0].add(&outputs[1].log()?)?;
        y.backward()?;
        let found = [&a, &b, &w].map(|v| v.grad().unwrap().item().unwrap());
        // y = (a w)² + log(e^(b w)) = (a w)² + b w, so dy/da = 2 a w², dy/db = w and dy/dw = 2 a² w + b.
        for (found, expected) in found.into_iter().zip([100.0, 5.0, 43.0]) {
            assert!((found - expected).abs() < 1e-4, "{found} {expected}");
        }
        for v in [&a, &b, &w] {
            v.zero_grad()?;
        }
    }
    Ok(())
}

#[test]
fn checkpoints_nest_and_follow_one_another() -> Result<()> {
    let (block, x) = (Block::new()?, Var::from_tensor(&sines(&[5, 6], 0.0))?);
    let y = block.forward(&block.forward(&block.forward(&x)?)?)?;
    y.backward_with(Some(&ones_like(&y)), false)?;
    let expected = block.gradients(&x);
    for policy in [Policy::Full, Policy::Selective] {
        let (one, two, three) = (block.clone(), block.clone(), block.clone());
        let y = checkpoint_with(
            policy,
            move |xs| {
                let inner = one.clone();
                let h = checkpoint_with(policy, move |ys| Ok(vec![inner.forward(&ys[0])?]), &[&xs[0]])?.remove(0);
                Ok(vec![two.forward(&h)?])
            },
            &[&x],
        )?
        .remove(0);
        let y = checkpoint_with(policy, move |xs| Ok(vec![three.forward(&xs[0])?]), &[&y])?.remove(0);
        y.backward_with(Some(&ones_like(&y)), false)?;
        assert_eq!(block.gradients(&x), expected, "{policy:?}");
    }
    Ok(())
}

#[test]
fn a_retained_graph_can_be_differentiated_twice() -> Result<()> {
    let (block, x) = (Block::new()?, Var::from_tensor(&sines(&[5, 6], 0.0))?);
    let inner = block.clone();
    let y = checkpoint(move |xs| inner.forward(&xs[0]), &[&x])?;
    y.backward_with(Some(&ones_like(&y)), /* retain_graph: */ true)?;
    let first = block.gradients(&x);
    y.backward_with(Some(&ones_like(&y)), /* retain_graph: */ false)?;
    assert_eq!(block.gradients(&x), first);
    Ok(())
}

#[test]
fn a_function_that_computes_something_else_when_run_again_is_an_error() -> Result<()> {
    let x = Var::from_tensor(&sines(&[4], 0.0))?;
    let calls = AtomicUsize::new(0);
    let y = checkpoint(
        move |xs| if calls.fetch_add(1, Ordering::Relaxed) == 0 { xs[0].sqr()?.sqr() } else { xs[0].add_scalar(1.0) },
        &[&x],
    )?;
    let error = y.backward_with(Some(&ones_like(&y)), false).unwrap_err().to_string();
    assert!(error.contains("something else"), "{error}");
    Ok(())
}

#[test]
fn a_captured_variable_changed_before_the_backward_pass_is_an_error() -> Result<()> {
    let (w, x) = (Var::new(3f32, &CPU)?, Var::new(2f32, &CPU)?);
    let captured = w.clone();
    let y = checkpoint(move |xs| xs[0].mul(&captured.detach())?.exp(), &[&x])?;
    w.set(&Tensor::new(4f32, &CPU)?)?;
    assert!(matches!(y.backward(), Err(Error::Autograd { .. })));
    Ok(())
}

#[test]
fn errors_of_the_function_pass_through_and_leave_the_thread_usable() -> Result<()> {
    let x = Var::new(2f32, &CPU)?;
    let error = checkpoint(|_| Err(Error::Config("mine".into())), &[&x]).unwrap_err();
    assert_eq!(error.to_string(), "mine");
    x.sqr()?.backward()?;
    assert_eq!(x.grad().unwrap().item()?, 4.0);
    Ok(())
}

#[test]
fn long_chains_of_checkpoints_drop_without_recursion() -> Result<()> {
    let x = Var::new(1f32, &CPU)?;
    let mut y = x.as_tensor().clone();
    for _ in 0..20_000 {
        // Each function captures the previous result, so that its drop drops the previous checkpoint.
        let previous = y.clone();
        y = checkpoint(move |xs| xs[0].add(&previous)?.mul_scalar(0.5), &[&y])?;
    }
    // A stack of 128 KiB is too small for a recursion over all checkpoints.
    let thread = std::thread::Builder::new().stack_size(128 * 1024).spawn(move || drop(y));
    thread.unwrap().join().unwrap();
    Ok(())
}
