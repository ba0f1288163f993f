//! Tests of linear layers that share their input: common storage, adapters, and equality with separate layers.

use std::sync::{Mutex, PoisonError};

use trainable_candle_core::raw::storage_identity;
use trainable_candle_core::{DType, Device, Result, Tensor, Var, rng};
use trainable_candle_nn::adapter::{AdapterSet, LoraConfig};
use trainable_candle_nn::{Linear, LinearGroup, Module, Projected, Visitor};

const NAMES: [&str; 3] = ["to_q", "to_k", "to_v"];

/// A lock of the process's random number generator. Tests run at the same time, and each of them seeds the generator.
static GENERATOR: Mutex<()> = Mutex::new(());

struct Projections(LinearGroup);

impl Module for Projections {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.0.visit(visitor)
    }
}

/// Three layers with 8 input features and 6, 4 and 4 output features, with the same random values in each call. If
/// `trainable`, their parameters are the tensors of variables.
fn layers(trainable: bool) -> Vec<(&'static str, Linear<Tensor>)> {
    let _guard = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    rng::manual_seed(5);
    NAMES
        .iter()
        .zip([6, 4, 4])
        .map(|(&name, out)| {
            let draw = |dims: &[usize]| {
                let tensor = Tensor::randn(0.0, 0.5, dims, DType::F32, &Device::Cpu).unwrap();
                if trainable { Var::from_tensor(&tensor).unwrap().into_inner() } else { tensor }
            };
            (name, Linear::from_weight(draw(&[out, 8]), Some(draw(&[out]))))
        })
        .collect()
}

fn group(trainable: bool) -> Projections {
    Projections(LinearGroup::new(layers(trainable)).unwrap())
}

fn config(targets: &[&str]) -> LoraConfig {
    LoraConfig { r: 2, target_modules: targets.iter().map(ToString::to_string).collect(), ..LoraConfig::default() }
}

/// Attaches adapters with random factors, so that their products are not zero.
fn adapt(module: &impl Module, config: LoraConfig) -> AdapterSet {
    let _guard = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let set = AdapterSet::attach(config, &module.named_layers()).unwrap();
    rng::manual_seed(9);
    for (_, var) in set.named_vars() {
        var.set(&Tensor::randn(0.0, 0.3, var.shape().clone(), DType::F32, &Device::Cpu).unwrap()).unwrap();
    }
    set
}

fn input() -> Var {
    let values: Vec<f32> = (0..40).map(|i| (i as f32 * 0.3).sin()).collect();
    Var::from_tensor(&Tensor::from_vec(values, (5, 8), &Device::Cpu).unwrap()).unwrap()
}

/// The results of a group's layers, concatenated along the features, and whether one matrix product computed all of
/// them.
fn joined(projected: Projected) -> (Tensor, bool) {
    match projected {
        Projected::Joined(all) => (all, true),
        Projected::Separate(parts) => (Tensor::cat(&parts.iter().collect::<Vec<_>>(), 1).unwrap(), false),
    }
}

fn assert_close(found: &Tensor, expected: &Tensor) {
    assert_eq!(found.dims(), expected.dims());
    for (f, e) in found.to_vec::<f32>().unwrap().iter().zip(expected.to_vec::<f32>().unwrap()) {
        assert!((f - e).abs() < 2e-5, "found {f}, expected {e}");
    }
}

/// A module with the same layers outside of a group.
struct Apart(Vec<(&'static str, Linear<Tensor>)>);

impl Module for Apart {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.0.iter().try_for_each(|(name, layer)| visitor.linear(name, layer))
    }
}

impl Apart {
    fn forward(&self, x: &Tensor) -> Tensor {
        let parts: Vec<Tensor> = self.0.iter().map(|(_, layer)| layer.forward(x).unwrap()).collect();
        Tensor::cat(&parts.iter().collect::<Vec<_>>(), 1).unwrap()
    }
}

#[test]
fn frozen_parameters_share_a_storage_and_keep_names_and_values() {
    let (group, apart) = (group(false), Apart(layers(false)));
    let (tensors, expected) = (group.named_tensors(), apart.named_tensors());
    assert_eq!(tensors.len(), 6);
    for ((name, tensor), (expected_name, expected)) in tensors.iter().zip(&expected) {
        assert_eq!(name, expected_name);
        assert_eq!(tensor.to_vec::<f32>().unwrap(), expected.to_vec::<f32>().unwrap());
    }
    let storage = |name: &str| {
        let (_, tensor) = tensors.iter().find(|(found, _)| found == name).unwrap();
        let (address, _size) = storage_identity(tensor.raw());
        address
    };
    assert_eq!(storage("to_q.weight"), storage("to_v.weight"));
    assert_eq!(storage("to_q.bias"), storage("to_k.bias"));
}

#[test]
fn a_group_equals_separate_layers_with_adapters_on_none_some_or_all_of_them() {
    for targets in [&[][..], &["to_q", "to_k", "to_v"], &["to_k"], &["to_q", "to_v"]] {
        let (group, apart) = (group(false), Apart(layers(false)));
        let sets = (!targets.is_empty()).then(|| (adapt(&group, config(targets)), adapt(&apart, config(targets))));
        let (x, other_x) = (input(), input());
        let (found, is_joined) = joined(group.0.forward(&x).unwrap());
        assert!(is_joined);
        let expected = apart.forward(&other_x);
        assert_close(&found, &expected);
        found.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        expected.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert_close(&x.grad().unwrap(), &other_x.grad().unwrap());
        if let Some((set, other_set)) = sets {
            // Both sets list the same names in the same order.
            for ((name, found), (_, expected)) in set.named_vars().iter().zip(other_set.named_vars()) {
                assert!(found.grad().is_some(), "{name}");
                assert_close(&found.grad().unwrap(), &expected.grad().unwrap());
            }
        }
    }
}

#[test]
fn with_adapters_that_are_no_low_rank_products_a_group_runs_layer_by_layer_and_equals_separate_layers() {
    // DoRA is no low-rank product, because it also scales the frozen weight. LoRA with dropout is no low-rank product
    // of the group's input: its product has an input of its own, the layer's input after dropout, so the layers no
    // longer share one input.
    let dora = LoraConfig { use_dora: true, ..config(&["to_k"]) };
    let dropout = LoraConfig { lora_dropout: 0.5, ..config(&["to_k"]) };
    for settings in [dora, dropout] {
        let (group, apart) = (group(false), Apart(layers(false)));
        let (set, other_set) = (adapt(&group, settings.clone()), adapt(&apart, settings));
        // Both forward passes draw the same dropout mask.
        let guard = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
        rng::manual_seed(1);
        let (found, is_joined) = joined(group.0.forward(&input()).unwrap());
        assert!(!is_joined);
        rng::manual_seed(1);
        assert_close(&found, &apart.forward(&input()));
        drop(guard);
        // With merged adapters, the weights of layers include the changes, and nothing is dropped.
        set.merge().unwrap();
        other_set.merge().unwrap();
        assert_close(&joined(group.0.forward(&input()).unwrap()).0, &apart.forward(&input()));
    }
}

#[test]
fn trainable_layers_run_layer_by_layer_and_stay_trainable() {
    let (_, is_joined) = joined(group(true).0.forward(&input()).unwrap());
    assert!(!is_joined);
    // A weight and a bias for each layer.
    assert_eq!(group(true).named_vars().len(), 6);
}

#[test]
fn layers_with_different_numbers_of_input_features_are_rejected() {
    let mut layers = layers(false);
    layers[1].1 = Linear::from_weight(Tensor::zeros((4, 7), DType::F32, &Device::Cpu).unwrap(), None);
    let error = LinearGroup::new(layers).err().unwrap().to_string();
    assert!(error.contains("8 and 7 input features"), "{error}");
}
