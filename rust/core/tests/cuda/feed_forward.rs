//! Feed-forward networks with a gated unit on a CUDA device, at sizes of several thread blocks in each dimension,
//! compared with the CPU in f64.

use trainable_candle_core::ops::gated::swiglu_feed_forward;
use trainable_candle_core::ops::linear_group::{LinearGroup, LowRank};
use trainable_candle_core::raw::to_f64_vec;
use trainable_candle_core::{DType, FlatBuffer, Result, Tensor};

use super::gpu;
use super::products::{TOLERANCE, compare_with, in_f64, near, random};

const RANK: usize = 16;

/// A network of three linear maps with LoRA: the features and the gate of the unit, and the map after the unit.
struct Network {
    /// The frozen weights of the features and the gate, stacked.
    stacked_weight: Tensor,
    /// The frozen weight of the map after the unit.
    last_weight: Tensor,
    /// The network's input, then A and B of each map.
    inputs: Vec<Tensor>,
}

impl Network {
    /// A network for `rows` tokens of `inner` features each, whose unit has `width` features. A weight is (results,
    /// inputs).
    fn new(rows: usize, inner: usize, width: usize, dtype: DType) -> Self {
        let matrix = |rows: usize, columns: usize| random(&[rows, columns], 1.0 / (columns as f64).sqrt(), dtype);
        let mut inputs = vec![random(&[rows, inner], 1.0, dtype)];
        for [inputs_of_map, results] in [[inner, width], [inner, width], [width, inner]] {
            inputs.extend([matrix(RANK, inputs_of_map), matrix(results, RANK)]);
        }
        Self { stacked_weight: matrix(2 * width, inner), last_weight: matrix(inner, width), inputs }
    }

    /// Computes the network's result for `x`, which replaces `self.inputs`. The frozen weights are converted to the
    /// dtype and the device of `x`; each map has a different LoRA scale.
    fn run(&self, x: &[Tensor]) -> Result<Tensor> {
        let base = |tensor: &Tensor| tensor.to_dtype(x[0].dtype())?.to_device(x[0].device());
        let (stacked_weight, last_weight) = (base(&self.stacked_weight)?, base(&self.last_weight)?);
        let [features, gate, last_factors] = [0, 1, 2].map(|map| {
            let [a, b] = [&x[1 + 2 * map], &x[2 + 2 * map]].map(Clone::clone);
            Some(LowRank { down: a, up: b, scale: 0.5 + map as f64 / 4.0 })
        });
        let (inner, width) = (self.last_weight.dims()[0], self.last_weight.dims()[1]);
        let (sizes, low_rank, last_low_rank) = ([width; 2], [features, gate], [last_factors]);
        let group = LinearGroup { weight: (&stacked_weight).into(), bias: None, sizes: &sizes, low_rank: &low_rank };
        let last = LinearGroup { weight: (&last_weight).into(), bias: None, sizes: &[inner], low_rank: &last_low_rank };
        swiglu_feed_forward(&x[0], group, last)
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn feed_forward_networks_equal_the_cpu() {
    let device = gpu().unwrap();
    for (rows, inner, width) in [(1130, 64, 288), (560, 32, 256), (33, 96, 1056), (2000, 320, 864)] {
        for (dtype, tolerance) in TOLERANCE {
            let network = Network::new(rows, inner, width, dtype);
            let function = |x: &[Tensor]| network.run(x);
            let expected = in_f64(&function, &network.inputs);
            let what = format!("{} {rows} x {inner}, unit of {width}", dtype.as_str());
            compare_with(&what, &function, &expected, &network.inputs, &device, tolerance);
        }
    }
}

/// Argument of `sum`: the summed dimensions are removed.
const KEEPDIM: bool = false;

/// The gradients of A and B are added to f32 buffers. Two backward passes from cleared buffers compute the same bits,
/// and a further pass, whose gradients are added to those in the buffers, doubles them.
#[test]
#[ignore = "needs a CUDA device"]
fn gradients_of_feed_forward_networks_are_added_in_place() {
    let device = gpu().unwrap();
    let network = Network::new(1130, 64, 288, DType::BF16);
    let x = network.inputs[0].to_device(&device).unwrap();
    let masters = network.inputs.iter().map(|x| x.to_device(&device)?.to_dtype(DType::F32));
    let flat = FlatBuffer::new(&masters.collect::<Result<Vec<_>>>().unwrap()).unwrap();
    let vars = flat.vars();
    // Computes the forward and the backward pass.
    let run_passes = || {
        // The input depends on a variable, so that the backward pass computes the gradient of the input, too.
        let zero = vars[0].as_tensor().mul_scalar(0.0)?.to_dtype(DType::BF16)?;
        let all: Vec<Tensor> =
            std::iter::once(x.add(&zero)?).chain(vars[1..].iter().map(|v| v.as_tensor().clone())).collect();
        network.run(&all)?.to_dtype(DType::F32)?.sum(&[0, 1], KEEPDIM)?.backward()
    };
    let gradients = || vars[1..].iter().map(|v| to_f64_vec(v.grad().unwrap().raw()).unwrap()).collect::<Vec<_>>();
    let clear = || vars.iter().try_for_each(|v| v.zero_grad()).unwrap();
    run_passes().unwrap();
    let first = gradients();
    clear();
    run_passes().unwrap();
    assert_eq!(gradients(), first, "the second run differs");
    run_passes().unwrap();
    let wide: Vec<Tensor> = network.inputs.iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
    let leaves: Vec<_> = wide.iter().map(|x| trainable_candle_core::Var::from_tensor(x).unwrap()).collect();
    let inputs: Vec<Tensor> = leaves.iter().map(|v| v.as_tensor().clone()).collect();
    network.run(&inputs).unwrap().sum(&[0, 1], KEEPDIM).unwrap().backward().unwrap();
    for (index, (found, leaf)) in gradients().iter().zip(&leaves[1..]).enumerate() {
        // The buffers have the sum of two passes.
        let expected: Vec<f64> = to_f64_vec(leaf.grad().unwrap().raw()).unwrap().iter().map(|g| 2.0 * g).collect();
        let (_, bf16_tolerance) = TOLERANCE[2];
        near(&format!("gradient of factor {index}"), found, &expected, 2.0 * bf16_tolerance);
    }
}
