//! Functions captured as CUDA graphs, compared with the same calls without capture. The last argument of
//! `Captured::new` gives the shapes and dtypes of the function's inputs, not their values. Calls take inputs on any
//! device and copy them to the GPU.

use trainable_candle_core::capture::{Captured, Function};
use trainable_candle_core::ops::dropout::dropout;
use trainable_candle_core::raw::{storage_identity, to_f64_vec};
use trainable_candle_core::{DType, Device, Error, Result, Tensor, Var, checkpoint, device, rng};

use super::gpu;

/// The bits of the values, with 0 in place of -0. Without capture a gradient may be -0; added to a buffer of zeros, as
/// in a captured function, it becomes 0.
fn bits(x: &Tensor) -> Vec<u64> {
    to_f64_vec(x.raw()).unwrap().iter().map(|x| (x + 0.0).to_bits()).collect()
}

fn normal(dims: (usize, usize), device: &Device) -> Tensor {
    Tensor::randn(0.0, 1.0, dims, DType::F32, &Device::Cpu).unwrap().to_device(device).unwrap()
}

/// The weights of two layers, and a training step for them with dropout and a checkpoint. The step takes a batch x (32,
/// 64) and its targets (32, 10), and returns the loss and the gradient of the first weight.
fn training(device: &Device) -> (Vec<Var>, Function) {
    rng::manual_seed(1);
    let weights: Vec<Var> =
        [(64, 96), (96, 10)].iter().map(|&dims| Var::from_tensor(&normal(dims, device)).unwrap()).collect();
    let vars = weights.clone();
    let step = move |inputs: &[Tensor]| -> Result<Vec<Tensor>> {
        for var in &vars {
            var.zero_grad()?;
        }
        let first = vars[0].clone();
        let layer = move |x: &[Tensor]| dropout(&x[0].matmul(&first)?.relu()?, 0.25, /* training */ true);
        let hidden = checkpoint::checkpoint(layer, &[&inputs[0]])?;
        let noise = Tensor::randn(0.0, 0.01, hidden.shape().clone(), DType::F32, hidden.device())?;
        let loss = hidden.add(&noise)?.matmul(&vars[1])?.sub(&inputs[1])?.sqr()?.mean_all()?;
        loss.backward()?;
        for var in &vars {
            let grad = var.grad().ok_or_else(|| Error::autograd("test", "no gradient"))?;
            var.set(&var.detach().sub(&grad.mul_scalar(0.05)?)?)?;
        }
        Ok(vec![loss.detach(), vars[0].grad().ok_or_else(|| Error::autograd("test", "no gradient"))?])
    };
    (weights, Box::new(step))
}

/// Makes a training step on a batch, whose index is the first argument, and returns the outputs.
type Call = Box<dyn FnMut(usize, &[Tensor; 2]) -> Vec<Tensor>>;

#[test]
#[ignore = "needs a CUDA device"]
fn a_captured_training_step_equals_the_eager_one_to_the_bit() {
    let device = gpu().unwrap();
    let batches: Vec<[Tensor; 2]> = (0..6).map(|_| [normal((32, 64), &device), normal((32, 10), &device)]).collect();
    let run = |is_captured: bool| {
        let (weights, step) = training(&device);
        let mut results = Vec::new();
        let mut call: Call = if is_captured {
            let mut captured = Captured::new(&device, step, &[&batches[0][0], &batches[0][1]]).unwrap();
            Box::new(move |index: usize, [x, target]: &[Tensor; 2]| {
                let outputs = captured.call(&[x, target]).unwrap();
                // The first call is always eager. The second is eager too, because the gradients get buffers only after
                // the first call.
                assert_eq!(captured.is_recorded(), index > 1);
                outputs
            })
        } else {
            Box::new(move |_: usize, batch: &[Tensor; 2]| step(batch).unwrap())
        };
        rng::manual_seed(2);
        // After each call: the outputs, all gradients, and the state of the random generator.
        for (index, batch) in batches.iter().enumerate() {
            let outputs = call(index, batch);
            results.push((outputs, weights.iter().map(|w| w.grad().unwrap()).collect::<Vec<_>>(), rng::state()));
        }
        let results: Vec<_> = results
            .iter()
            .map(|(outputs, grads, state)| (outputs.iter().chain(grads).map(bits).collect::<Vec<_>>(), *state))
            .collect();
        (results, weights.iter().map(|w| bits(w)).collect::<Vec<_>>())
    };
    let (expected, found) = (run(false), run(true));
    for (index, (expected, found)) in expected.0.iter().zip(&found.0).enumerate() {
        assert!(expected == found, "call {index} differs");
    }
    assert!(expected.1 == found.1, "the weights differ");
}

#[test]
#[ignore = "needs a CUDA device"]
fn gradients_add_up_over_replays_until_they_are_cleared() {
    let device = gpu().unwrap();
    let w = Var::new(3f32, &device).unwrap();
    let var = w.clone();
    let x = Tensor::new(1f32, &device).unwrap();
    let function: Function = Box::new(move |x| {
        let y = x[0].mul(&var)?;
        y.backward()?;
        Ok(vec![y])
    });
    let mut step = Captured::new(&device, function, &[&x]).unwrap();
    let mut call = |x: f32| step.call(&[&Tensor::new(x, &Device::Cpu).unwrap()]).unwrap()[0].item().unwrap();
    let grad = || w.grad().map(|grad| grad.item().unwrap());
    assert_eq!((call(1.0), grad()), (3.0, Some(1.0)));
    assert_eq!((call(2.0), grad()), (6.0, Some(3.0)));
    assert_eq!((call(4.0), grad()), (12.0, Some(7.0)));
    w.zero_grad().unwrap();
    assert_eq!(grad(), None);
    w.set(&Tensor::new(5f32, &device).unwrap()).unwrap();
    assert_eq!((call(8.0), grad()), (40.0, Some(8.0)));
}

#[test]
#[ignore = "needs a CUDA device"]
fn work_that_a_graph_cannot_contain_is_rejected_without_an_effect() {
    let device = gpu().unwrap();
    let x = Tensor::new(&[1f32, 2.0][..], &device).unwrap();
    // Reads a value of the device on the host.
    let reads: Function = Box::new(|x| {
        let largest = x[0].max_all()?.item()?;
        Ok(vec![x[0].mul_scalar(largest)?])
    });
    // Copies a random number, which differs between calls, to the device.
    let changes: Function = Box::new(|x| {
        let number = rng::normal_vec(1);
        Ok(vec![x[0].mul(&Tensor::from_vec(number, 1, x[0].device())?)?])
    });
    for (function, expected) in [(reads, "item: values are not known"), (changes, "copies a value from the CPU")] {
        let mut step = Captured::new(&device, function, &[&x]).unwrap();
        let first = step.call(&[&x]).unwrap();
        // The second call records a graph.
        let message = step.call(&[&x]).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
        // After the error the next call runs eagerly, as the first call does.
        assert_eq!(step.call(&[&x]).unwrap()[0].dims(), first[0].dims());
        // The device still works.
        assert_eq!(to_f64_vec(x.add(&x).unwrap().raw()).unwrap(), [2.0, 4.0]);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn values_from_the_cpu_that_do_not_change_are_constants_of_the_graph() {
    let device = gpu().unwrap();
    let x = Tensor::new(&[1f32, 2.0][..], &device).unwrap();
    let constant: Function = Box::new(|x| Ok(vec![x[0].add(&Tensor::new(&[10f32, 20.0][..], x[0].device())?)?]));
    let mut step = Captured::new(&device, constant, &[&x]).unwrap();
    for _ in 0..4 {
        assert_eq!(to_f64_vec(step.call(&[&x]).unwrap()[0].raw()).unwrap(), [11.0, 22.0]);
    }
    assert!(step.is_recorded());
}

#[test]
#[ignore = "needs a CUDA device"]
fn inputs_of_another_shape_or_number_are_errors() {
    let device = gpu().unwrap();
    let x = Tensor::new(&[1f32, 2.0][..], &device).unwrap();
    let mut step = Captured::new(&device, Box::new(|x| Ok(vec![x[0].exp()?])), &[&x]).unwrap();
    let wrong = Tensor::new(&[1f32][..], &device).unwrap();
    assert!(matches!(step.call(&[&wrong]), Err(Error::Shape { .. })));
    assert!(matches!(step.call(&[]), Err(Error::Argument { .. })));
}

#[test]
#[ignore = "needs a CUDA device"]
fn replays_allocate_nothing_and_dropped_graphs_release_their_memory() {
    let device = gpu().unwrap();
    let x = normal((512, 512), &device);
    let before = device::memory_stats(&device).unwrap();
    for round in 0..3 {
        let function: Function = Box::new(|x| {
            let mut y = x[0].clone();
            for _ in 0..20 {
                y = y.matmul(&x[0])?.tanh()?;
            }
            Ok(vec![y])
        });
        let mut step = Captured::new(&device, function, &[&x]).unwrap();
        // The first call is eager, the second records the graph, and all others replay it.
        let expected = bits(&step.call(&[&x]).unwrap()[0]);
        step.call(&[&x]).unwrap();
        let warm = device::memory_stats(&device).unwrap();
        assert!(warm.graphs > 0);
        for _ in 0..50 {
            assert_eq!(bits(&step.call(&[&x]).unwrap()[0]), expected, "round {round}");
        }
        let after = device::memory_stats(&device).unwrap();
        assert_eq!((after.growths, after.reserved, after.allocated), (warm.growths, warm.reserved, warm.allocated));
    }
    let after = device::memory_stats(&device).unwrap();
    assert_eq!((after.graphs, after.allocated), (0, before.allocated));
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_next_call_does_not_overwrite_outputs() {
    let device = gpu().unwrap();
    let x = normal((64, 64), &device);
    let mut step = Captured::new(&device, Box::new(|x| Ok(vec![x[0].exp()?])), &[&x]).unwrap();
    let inputs: Vec<Tensor> = (0..4).map(|_| normal((64, 64), &device)).collect();
    let outputs: Vec<Tensor> = inputs.iter().map(|x| step.call(&[x]).unwrap().remove(0)).collect();
    for (input, output) in inputs.iter().zip(&outputs) {
        assert_eq!(bits(&input.exp().unwrap()), bits(output));
    }
    // Both are outputs of replays of one graph, and still have memory of their own. `.0` is the address of the storage.
    assert_ne!(storage_identity(outputs[2].raw()).0, storage_identity(outputs[3].raw()).0);
}

#[test]
#[ignore = "needs a CUDA device"]
fn ids_out_of_range_are_an_error_when_the_host_waits_for_the_device() {
    let device = gpu().unwrap();
    let x = normal((5, 3), &device);
    let ids = Tensor::from_vec(vec![0i64, 4, 5, -1], 4, &device).unwrap();
    // The kernel finds the wrong ids later, when the device has computed its earlier work.
    let y = x.index_select(&ids, 0).unwrap();
    let message = device::synchronize(&device).unwrap_err().to_string();
    assert!(message.starts_with("index_select: the id or bound at position 2"), "{message}");
    // The error is returned only once.
    device::synchronize(&device).unwrap();
    let y = to_f64_vec(y.raw()).unwrap();
    // The rows of the ids 5 and -1, of three elements each, are zeros.
    assert_eq!(y[6..], [0.0; 6]);
    let wrong = x.gather(&Tensor::from_vec(vec![9i64], (1, 1), &device).unwrap(), 1).unwrap();
    assert!(matches!(wrong.item(), Err(Error::Index { op: "gather", .. })));
}

/// The copies, 40 of 2.8 MB and one of 48 MB, have more bytes than fit in the ring of pinned memory that they go
/// through (32 MiB), and are queued while the device is busy.
#[test]
#[ignore = "needs a CUDA device"]
fn copies_from_the_host_arrive_in_order() {
    let device = gpu().unwrap();
    let mut busy = normal((4096, 4096), &device);
    for _ in 0..20 {
        busy = busy.matmul(&busy).unwrap().tanh().unwrap();
    }
    let values: Vec<Vec<f32>> = (0..40).map(|i| (0..700_001).map(|j| (i * 7 + j) as f32).collect()).collect();
    let copies: Vec<Tensor> = values.iter().map(|v| Tensor::from_vec(v.clone(), v.len(), &device).unwrap()).collect();
    let long: Vec<f32> = (0..12_000_000).map(|i| i as f32).collect();
    let copy = Tensor::from_vec(long.clone(), long.len(), &device).unwrap();
    for (value, copy) in values.iter().zip(&copies) {
        assert!(&copy.to_vec::<f32>().unwrap() == value);
    }
    assert!(copy.to_vec::<f32>().unwrap() == long);
}
