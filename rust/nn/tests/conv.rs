//! Tests of convolutional layers: names and shapes in files, results, and adapters.

use std::collections::{BTreeMap, BTreeSet};

use trainable_candle_core::ops::conv::{Conv2dOptions, conv2d_nchw};
use trainable_candle_core::{DType, Device, Result, Tensor, Var};
use trainable_candle_nn::adapter::{AdapterSet, LoraConfig};
use trainable_candle_nn::{Conv2d, Module, Source, Stored, Visitor};

const OPTIONS: Conv2dOptions = Conv2dOptions { stride: [2, 1], padding: [1, 0], dilation: [1, 1], groups: 2 };

/// A model of one convolution.
struct One(Conv2d<Tensor>);

impl Module for One {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.conv("conv", &self.0)
    }
}

/// Parameters in the layout of a file.
struct InFile(BTreeMap<String, Tensor>);

impl Stored for InFile {
    fn shape(&self, name: &str) -> Result<Option<Vec<usize>>> {
        Ok(self.0.get(name).map(|tensor| tensor.dims().to_vec()))
    }

    fn read(&mut self, name: &str) -> Result<Tensor> {
        Ok(self.0[name].clone())
    }

    fn unexpected(&self, taken: &BTreeSet<String>) -> Vec<String> {
        self.0.keys().filter(|name| !taken.contains(*name)).cloned().collect()
    }
}

fn random(shape: &[usize]) -> Tensor {
    Tensor::randn(0.0, 1.0, shape, DType::F32, &Device::Cpu).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.contiguous().unwrap().to_vec().unwrap()
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    values(a).iter().zip(values(b)).fold(0.0, |m, (a, b)| m.max((a - b).abs()))
}

#[test]
fn a_layer_from_a_file_is_frozen_keeps_its_parameters_and_computes_conv2d_nchw() {
    // In files: 6 output channels, 2 input channels for each of 2 groups, a kernel of 3 x 2 elements.
    let (weight, bias) = (random(&[6, 2, 3, 2]), random(&[6]));
    let tensors =
        BTreeMap::from([("conv.weight".to_string(), weight.clone()), ("conv.bias".to_string(), bias.clone())]);
    let mut source = Source::stored(InFile(tensors));
    // 4 input and 6 output channels, the kernel, and `true` for a bias.
    let model = One(source.root().conv2d("conv", 4, 6, [3, 2], OPTIONS, true).unwrap());
    source.finish().unwrap();
    let named: BTreeMap<String, Tensor> = model.named_tensors().into_iter().collect();
    assert_eq!(values(&named["conv.weight"]), values(&weight));
    assert_eq!(values(&named["conv.bias"]), values(&bias));
    assert!(model.named_vars().is_empty());
    assert_eq!((model.0.in_channels(), model.0.out_channels()), (4, 6));

    // `conv2d_nchw` takes (batch, channels, height, width), the layer (batch, height, width, channels).
    let x = random(&[2, 4, 7, 5]);
    let expected = conv2d_nchw(&x, &weight, Some(&bias), OPTIONS).unwrap();
    let y = model.0.forward(&x.permute(&[0, 2, 3, 1]).unwrap()).unwrap().permute(&[0, 3, 1, 2]).unwrap();
    assert!(largest_difference(&y, &expected) < 1e-5);
}

#[test]
fn fresh_layers_are_trainable_and_start_within_torchs_bound() {
    let mut source = Source::fresh(&Device::Cpu);
    // 4 input and 6 output channels, a kernel of 3 x 2 elements, and `true` for a bias.
    let model = One(source.root().conv2d("conv", 4, 6, [3, 2], OPTIONS, true).unwrap());
    source.finish().unwrap();
    let vars = model.named_vars();
    // Variables are channels-last; tensors have the layout of files.
    assert_eq!(
        vars.iter().map(|(n, v)| (n.as_str(), v.dims().to_vec())).collect::<Vec<_>>(),
        [("conv.weight", vec![6, 3, 2, 2]), ("conv.bias", vec![6])]
    );
    assert_eq!(model.named_tensors()[0].1.dims(), [6, 2, 3, 2]);
    // An output channel reads the 2 input channels of its group, each with a kernel of 3 x 2 elements.
    let bound = 1.0 / f32::sqrt(2.0 * 6.0);
    assert!(vars.iter().all(|(_, v)| values(v).iter().all(|x| x.abs() <= bound)));
    model.0.forward(&random(&[1, 5, 4, 4])).unwrap().sum_all().unwrap().backward().unwrap();
    assert!(vars.iter().all(|(_, v)| v.grad().is_some()));
}

#[test]
fn errors_name_a_wrong_shape_and_channels_that_do_not_divide_into_groups() {
    let mut source = Source::stored(InFile(BTreeMap::from([("conv.weight".to_string(), random(&[6, 3, 3, 3]))])));
    // The layer has 4 input channels, the weight in the file 3.
    let error = source.root().conv2d("conv", 4, 6, [3, 3], Conv2dOptions::default(), /* bias: */ false).err().unwrap();
    assert!(error.to_string().contains("conv.weight has shape [6, 3, 3, 3]"), "{error}");
    // 3 input channels do not divide into the 2 groups of `OPTIONS`.
    let error = Conv2d::<Var>::new(3, 4, [1, 1], OPTIONS, &Device::Cpu).err().unwrap();
    assert!(error.to_string().contains("3 input and 4 output channels"), "{error}");
}

#[test]
fn adapters_start_without_effect_and_can_be_merged_and_disabled() {
    let options = Conv2dOptions { groups: 1, ..OPTIONS };
    // `from_parameters` takes a channels-last weight: 6 outputs, a kernel of 3 x 2, 4 inputs.
    let weight = random(&[6, 3, 2, 4]);
    let model = One(Conv2d::from_parameters(weight, Some(random(&[6])), options).unwrap());
    let x = random(&[2, 7, 5, 4]);
    let plain = values(&model.0.forward(&x).unwrap());
    // With `wd_on_output`, DoRA has a magnitude for each output, otherwise for each input.
    for (adapter, wd_on_output) in [("lora", true), ("dora", true), ("dora", false)] {
        let config = LoraConfig {
            r: 2,
            target_modules: vec!["all-conv".into()],
            adapter: adapter.into(),
            wd_on_output,
            ..LoraConfig::default()
        };
        let set = AdapterSet::attach(config, &model.named_layers()).unwrap();
        let start = model.0.forward(&x).unwrap();
        assert!(values(&start).iter().zip(&plain).all(|(a, b)| (a - b).abs() < 1e-5));
        for var in set.vars() {
            var.set(&var.add(&random(var.dims()).mul_scalar(0.3).unwrap()).unwrap().detach()).unwrap();
        }
        let adapted = model.0.forward(&x).unwrap().detach();
        assert!(largest_difference(&adapted, &start.detach()) > 0.1);
        set.merge().unwrap();
        assert!(largest_difference(&model.0.forward(&x).unwrap(), &adapted) < 1e-4);
        // This removes the merged weight, so that the next set can be attached. Merging does not change the base.
        set.set_enabled(false);
        assert_eq!(values(&model.0.forward(&x).unwrap()), plain);
    }
}

#[test]
fn low_rank_adapters_reject_convolutions_with_groups() {
    let model = One(Conv2d::from_parameters(random(&[6, 3, 2, 2]), None, OPTIONS).unwrap());
    let config = LoraConfig { r: 2, target_modules: vec!["all-conv".into()], ..LoraConfig::default() };
    let error = AdapterSet::attach(config, &model.named_layers()).err().unwrap().to_string();
    assert!(error.contains("conv") && error.contains("2 groups"), "{error}");
}
