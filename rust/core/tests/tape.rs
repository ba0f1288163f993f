//! Tests of the tape: sums of gradients, long graphs, freed graphs, changed variables, gradients without side effects.
//!
//! `backward_with(gradient, retain_graph)` takes the gradient of the tensor on which it is called; `None` stands for 1.
//! The last two arguments of `grad` have the same meaning.

use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::{DType, Device, Error, FlatBuffer, MakeVar, Raw, Result, Tensor, Var, grad, no_grad};

const CPU: Device = Device::Cpu;

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec::<f32>().unwrap()
}

/// A tensor of the `n` values sin(0.37 i), i from 0.
fn ramp(n: usize, shape: &[usize]) -> Tensor {
    Tensor::from_vec((0..n).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<_>>(), shape, &CPU).unwrap()
}

#[test]
fn the_gradient_of_a_square_is_twice_the_value() -> Result<()> {
    let x = Var::new(2f32, &CPU)?;
    let grads = (&x * &x)?.backward()?;
    assert_eq!(grads.get(&x).unwrap().item()?, 4.0);
    assert_eq!(x.grad().unwrap().item()?, 4.0);
    Ok(())
}

#[test]
fn gradients_accumulate_until_cleared() -> Result<()> {
    let x = Var::new(3f32, &CPU)?;
    (&x * 2.0)?.backward()?;
    let first = x.grad().unwrap();
    (&x * 5.0)?.backward()?;
    assert_eq!(x.grad().unwrap().item()?, 7.0);
    assert_eq!(first.item()?, 2.0, "a gradient that was read stays as it was");
    x.zero_grad()?;
    assert!(x.grad().is_none());
    Ok(())
}

#[test]
fn a_value_used_many_times_gets_the_sum_of_its_gradients() -> Result<()> {
    let x = Var::new([1f32, 2.0, 3.0].as_slice(), &CPU)?;
    let y = x.sqr()?;
    // total = 5 x²
    let total = [&y, &y, &y, &y].iter().try_fold(y.clone(), |sum, y| sum.add(y))?;
    total.backward_with(Some(&Tensor::ones(3, DType::F32, &CPU)?), false)?;
    assert_eq!(values(&x.grad().unwrap()), [10.0, 20.0, 30.0]);
    Ok(())
}

#[test]
fn gradients_of_overlapping_slices_add_up() -> Result<()> {
    let x = Var::new([1f32, 2.0, 3.0, 4.0].as_slice(), &CPU)?;
    let (a, b) = (x.narrow(0, 0, 3)?, x.narrow(0, 1, 3)?);
    // y[i] = x[i] x[i + 1] + x[i]
    let y = a.mul(&b)?.add(&x.narrow(0, 0, 3)?)?;
    y.backward_with(Some(&Tensor::ones(3, DType::F32, &CPU)?), false)?;
    assert_eq!(values(&x.grad().unwrap()), [3.0, 5.0, 7.0, 3.0]);
    Ok(())
}

#[test]
fn graphs_of_a_hundred_thousand_nodes_run_and_drop() -> Result<()> {
    let x = Var::new(1f32, &CPU)?;
    let chain = |n: usize| (0..n).try_fold(x.as_tensor().clone(), |y, _| y.add_scalar(1e-6));
    chain(100_000)?.backward()?;
    assert_eq!(x.grad().unwrap().item()?, 1.0);
    drop(chain(100_000)?);
    let on_small_stack = std::thread::Builder::new().stack_size(128 * 1024).spawn({
        let y = chain(100_000)?;
        move || drop(y)
    });
    on_small_stack.unwrap().join().unwrap();
    Ok(())
}

#[test]
fn a_second_backward_pass_needs_retain_graph() -> Result<()> {
    let x = Var::new(2f32, &CPU)?;
    let y = x.exp()?.sqr()?;
    y.backward_with(None, true)?;
    y.backward()?;
    let error = y.backward().unwrap_err().to_string();
    assert!(error.contains("retain_graph"), "{error}");
    Ok(())
}

#[test]
fn a_changed_variable_is_an_error_not_a_wrong_gradient() -> Result<()> {
    let (x, w) = (Var::new(2f32, &CPU)?, Var::new(3f32, &CPU)?);
    let y = (&x * &w)?;
    w.set(&Tensor::new(5f32, &CPU)?)?;
    let error = y.backward().unwrap_err();
    assert!(matches!(error, Error::Autograd { .. }) && error.to_string().contains("changed in place"), "{error}");
    // A view shares the version of its variable: the count of changes that the backward pass checks.
    let m = Var::new([1f32, 2.0].as_slice(), &CPU)?;
    // The backward pass to `x` needs the value of the view.
    let z = m.narrow(0, 0, 1)?.detach().mul(&x)?;
    m.set(&Tensor::zeros(2, DType::F32, &CPU)?)?;
    assert!(z.backward().is_err());
    Ok(())
}

#[test]
fn functional_gradients_leave_the_variables_alone() -> Result<()> {
    let (x, w, other) = (Var::new(2f32, &CPU)?, Var::new(3f32, &CPU)?, Var::new(1f32, &CPU)?);
    let middle = (&x * &w)?;
    let y = middle.sqr()?;
    // y = (x w)², so dy/dx = 2 x w² and dy/d(x w) = 2 x w.
    let grads = grad(&y, &[&x, &middle, &other], None, false)?;
    assert_eq!(grads[0].as_ref().unwrap().item()?, 36.0);
    assert_eq!(grads[1].as_ref().unwrap().item()?, 12.0);
    assert!(grads[2].is_none(), "y does not depend on `other`");
    assert!(x.grad().is_none() && w.grad().is_none());
    // A tensor that needs no gradient is an error.
    assert!(grad(&(&x * 2.0)?, &[&Tensor::new(1f32, &CPU)?], None, false).is_err());
    Ok(())
}

#[test]
fn nothing_is_recorded_under_no_grad_or_from_detached_tensors() -> Result<()> {
    let x = Var::new(2f32, &CPU)?;
    let guard = no_grad();
    assert!(!x.sqr()?.requires_grad());
    drop(guard);
    assert!(x.sqr()?.requires_grad());
    let error = x.detach().sqr()?.backward().unwrap_err().to_string();
    assert!(error.contains("does not depend on a variable"), "{error}");
    Ok(())
}

#[test]
fn many_elements_need_a_gradient_argument() -> Result<()> {
    let x = Var::zeros((2, 3), DType::F32, &CPU)?;
    let y = x.exp()?;
    assert!(matches!(y.backward(), Err(Error::Shape { .. })));
    assert!(matches!(y.backward_with(Some(&Tensor::ones(3, DType::F32, &CPU)?), false), Err(Error::Shape { .. })));
    Ok(())
}

#[test]
fn make_var_copies_any_layout_and_detaches_the_copy_from_the_graph() -> Result<()> {
    let source = Raw::arange(0f32, 24f32, &CPU)?.reshape((2, 3, 4))?;
    let layouts = [
        source.clone(),
        source.transpose(0, 2)?,
        source.narrow(1, 1, 2)?,
        source.narrow(2, 3, 1)?.broadcast_as((2, 3, 5))?,
        source.get(1)?,
    ];
    for raw in layouts {
        let var = raw.make_var()?;
        assert!(var.raw().is_contiguous() && var.requires_grad() && var.is_leaf());
        assert_eq!(values(&var), raw.flatten_all()?.to_vec1::<f32>()?);
        var.set(&Tensor::zeros(raw.shape(), DType::F32, &CPU)?)?;
    }
    assert_eq!(source.flatten_all()?.to_vec1::<f32>()?[23], 23.0, "the source keeps its values");
    let x = Var::new(2f32, &CPU)?;
    let copy = x.sqr()?.make_var()?;
    copy.sqr()?.backward()?;
    assert!(x.grad().is_none() && copy.grad().unwrap().item()? == 8.0);
    for dtype in [DType::F16, DType::BF16, DType::F64] {
        assert_eq!(Tensor::ones(3, dtype, &CPU)?.make_var()?.dtype(), dtype);
    }
    assert!(matches!(Raw::zeros(3, DType::U32, &CPU)?.make_var(), Err(Error::DType { .. })));
    Ok(())
}

#[test]
fn gradients_of_f32_parameters_stay_f32_under_half_precision() -> Result<()> {
    let w = Var::from_tensor(&ramp(6, &[2, 3]))?;
    let x = ramp(12, &[4, 3]).to_dtype(DType::BF16)?;
    let y = linear(&x, &w.to_dtype(DType::BF16)?, None)?;
    y.backward_with(Some(&Tensor::ones((4, 2), DType::BF16, &CPU)?), false)?;
    assert_eq!(w.grad().unwrap().dtype(), DType::F32);
    Ok(())
}

#[test]
fn flat_buffers_hold_all_values_in_one_vector_and_all_gradients_in_another() -> Result<()> {
    let buffer = FlatBuffer::new(&[ramp(6, &[2, 3]), ramp(4, &[4])])?;
    let (a, b) = (&buffer.vars()[0], &buffer.vars()[1]);
    // The last two elements of a do not occur in the loss.
    let loss = a.sqr()?.reshape(6)?.narrow(0, 0, 4)?.mul(b)?;
    loss.backward_with(Some(&Tensor::ones(4, DType::F32, &CPU)?), false)?;
    let flat = buffer.grad().to_vec1::<f32>()?;
    assert_eq!(flat[..6], values(&a.grad().unwrap()));
    assert_eq!(flat[6..], values(&b.grad().unwrap()));
    assert_eq!(flat[4..6], [0.0, 0.0]);
    b.set(&Tensor::ones(4, DType::F32, &CPU)?)?;
    assert_eq!(buffer.data().to_vec1::<f32>()?[6..], [1.0; 4]);
    let read_before = a.grad().unwrap();
    a.zero_grad()?;
    assert!(a.grad().is_none());
    // Clearing leaves gradients that were read before as they are.
    assert_eq!(values(&read_before), flat[..6]);
    Ok(())
}

#[test]
fn impossible_sizes_are_errors() {
    // The number of elements of the first shape overflows; a tensor of the second shape has 16 TiB.
    assert!(matches!(Tensor::zeros((usize::MAX / 2, 8), DType::F32, &CPU), Err(Error::OutOfMemory { .. })));
    assert!(matches!(Tensor::zeros((1 << 22, 1 << 20), DType::F32, &CPU), Err(Error::OutOfMemory { .. })));
}
