//! Compares the digits transformer with torch (`tests/golden/digits/make_torch.py`), and tests its checkpointing,
//! adapters, dtypes, files and errors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use trainable_candle_core::checkpoint::Policy;
use trainable_candle_core::ops::loss::{Reduction, mse_loss};
use trainable_candle_core::{DType, Device, Error, Tensor, Var};
use trainable_candle_io::load_tensors;
use trainable_candle_models::digits::DigitsConfig;
use trainable_candle_models::{Architecture, Choice, DigitsTransformer, Model, load, save_pretrained};
use trainable_candle_nn::Module;
use trainable_candle_nn::adapter::{AdapterSet, LoraConfig};

/// Loads weights in the dtype of the file.
const FILE_DTYPE: Option<DType> = None;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/digits")
}

/// The model of `tests/golden/digits`.
fn frozen() -> DigitsTransformer {
    DigitsTransformer::from_pretrained(&golden(), FILE_DTYPE, &Device::Cpu).unwrap()
}

/// The same model, but with trainable parameters.
fn trainable() -> DigitsTransformer {
    let config = frozen().config().clone();
    let model = DigitsTransformer::fresh(config, &Device::Cpu).unwrap();
    let values: BTreeMap<String, Tensor> = frozen().named_tensors().into_iter().collect();
    for (name, var) in model.named_vars() {
        var.set(&values[&name]).unwrap();
    }
    model
}

/// The inputs of `tests/golden/digits/case.safetensors`, and torch's results.
struct Case(BTreeMap<String, Tensor>);

impl Case {
    fn load() -> Self {
        Self(load_tensors(&golden().join("case.safetensors"), &Device::Cpu).unwrap())
    }

    fn run(&self, model: &DigitsTransformer) -> Tensor {
        model.forward(&self.0["sample"], &self.0["timestep"], &self.0["class_labels"]).unwrap()
    }

    fn loss(&self, model: &DigitsTransformer) -> Tensor {
        mse_loss(&self.run(model), &self.0["target"], Reduction::Mean).unwrap()
    }
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec().unwrap()
}

/// The largest absolute difference, divided by the largest absolute expected value.
fn relative_error(found: &Tensor, expected: &Tensor) -> f32 {
    assert_eq!(found.dims(), expected.dims());
    let expected = values(expected);
    let largest = expected.iter().fold(0f32, |m, e| m.max(e.abs()));
    values(found).iter().zip(&expected).fold(0f32, |m, (f, e)| m.max((f - e).abs())) / largest
}

#[test]
fn velocity_and_gradients_are_near_those_of_torch() {
    let case = Case::load();
    assert!(relative_error(&case.run(&frozen()), &case.0["velocity"]) < 1e-5);
    let model = trainable();
    case.loss(&model).backward().unwrap();
    let vars = model.named_vars();
    assert_eq!(vars.len(), case.0.keys().filter(|name| name.starts_with("grad.")).count());
    for (name, var) in vars {
        let expected = &case.0[&format!("grad.{name}")];
        // The bias of `to_k` adds the same number to all scores of a query, which does not change the softmax. So the
        // gradient of this bias is only rounding error.
        if !name.ends_with("to_k.bias") {
            assert!(relative_error(&var.grad().unwrap(), expected) < 1e-4, "{name}");
        }
    }
}

#[test]
fn checkpointing_changes_no_bit_of_the_loss_or_the_gradients() {
    let case = Case::load();
    let loss_and_gradients = |policy| {
        let model = trainable();
        model.set_checkpointing(policy);
        let loss = case.loss(&model);
        loss.backward().unwrap();
        let grads: Vec<Vec<f32>> = model.named_vars().iter().map(|(_, var)| values(&var.grad().unwrap())).collect();
        (loss.item().unwrap(), grads)
    };
    let expected = loss_and_gradients(Policy::None);
    assert_eq!(loss_and_gradients(Policy::Full), expected);
    assert_eq!(loss_and_gradients(Policy::Selective), expected);
}

#[test]
fn a_disabled_adapter_does_not_change_a_bit_of_the_velocity() {
    let (case, model) = (Case::load(), frozen());
    let expected = values(&case.run(&model));
    let config = LoraConfig { target_modules: vec!["to_q".into(), "ff.net.2".into()], ..LoraConfig::default() };
    let set = AdapterSet::attach(config, &model.named_layers()).unwrap();
    // Both layers in each of two blocks.
    assert_eq!(set.len(), 4);
    for var in set.vars() {
        var.set(&Tensor::randn(0.0, 1.0, var.shape(), DType::F32, &Device::Cpu).unwrap()).unwrap();
    }
    assert_ne!(values(&case.run(&model)), expected);
    set.set_enabled(false);
    assert_eq!(values(&case.run(&model)), expected);
}

#[test]
fn only_adapters_get_gradients() {
    let (case, model) = (Case::load(), frozen());
    assert!(model.named_vars().is_empty());
    let set = AdapterSet::attach(LoraConfig::default(), &model.named_layers()).unwrap();
    let grads = case.loss(&model).backward().unwrap();
    assert_eq!(grads.len(), set.vars().len());
    assert!(set.vars().iter().all(|var: &Var| grads.contains(var)));
}

#[test]
fn a_saved_model_loads_unchanged() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("saved_model");
    let case = Case::load();
    let unquantized = None;
    save_pretrained(&trainable(), &folder, unquantized).unwrap();
    let loaded = load(&folder, &Choice::default(), FILE_DTYPE, &Device::Cpu).unwrap();
    assert_eq!(loaded.class_name(), "DigitsTransformer");
    let parameters =
        |model: &dyn Model| model.named_tensors().into_iter().map(|(n, t)| (n, values(&t))).collect::<Vec<_>>();
    assert_eq!(parameters(&*loaded), parameters(&frozen()));
    let from_file =
        DigitsTransformer::from_pretrained(&folder.join("model.safetensors"), FILE_DTYPE, &Device::Cpu).unwrap();
    assert_eq!(values(&case.run(&from_file)), values(&case.run(&frozen())));
}

#[test]
fn bf16_weights_compute_in_bf16() {
    let case = Case::load();
    let model = DigitsTransformer::from_pretrained(&golden(), Some(DType::BF16), &Device::Cpu).unwrap();
    assert_eq!(model.dtype(), DType::BF16);
    let velocity = case.run(&model);
    assert_eq!(velocity.dtype(), DType::BF16);
    assert!(relative_error(&velocity.to_dtype(DType::F32).unwrap(), &case.0["velocity"]) < 0.05);
}

#[test]
fn wrong_inputs_are_reported() {
    let (case, model) = (Case::load(), frozen());
    let (sample, timestep, labels) = (&case.0["sample"], &case.0["timestep"], &case.0["class_labels"]);
    let message = |result: Result<Tensor, Error>| result.unwrap_err().to_string();
    // The sample has shape (4, 2, 6, 6), so B is 4.
    let narrowed = sample.narrow(3, 0, 4).unwrap();
    assert!(
        message(model.forward(&narrowed, timestep, labels))
            .contains("sample has shape [4, 2, 6, 4], expected (B, 2, 6, 6)")
    );
    let short = timestep.narrow(0, 0, 3).unwrap();
    assert!(message(model.forward(sample, &short, labels)).contains("timestep has shape [3], expected (4,)"));
    // The model has the classes 0 to 2.
    let unknown_class = Tensor::new(&[0i64, 1, 2, 3], &Device::Cpu).unwrap();
    assert!(matches!(model.forward(sample, timestep, &unknown_class), Err(Error::Index { .. })));
}

#[test]
fn wrong_configurations_and_files_are_reported() {
    let indivisible = DigitsConfig { patch_size: 3, ..DigitsConfig::default() };
    let message = |result: Result<DigitsTransformer, Error>| result.err().unwrap().to_string();
    assert!(
        message(DigitsTransformer::fresh(indivisible, &Device::Cpu))
            .contains("sample_size 8 is not a multiple of patch_size 3")
    );
    let empty = DigitsConfig { num_layers: 0, ..DigitsConfig::default() };
    assert!(message(DigitsTransformer::fresh(empty, &Device::Cpu)).contains("num_layers is 0"));

    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("wrong_model");
    // Remove files of an earlier run of this test.
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let load_with = |config: &str| {
        std::fs::write(folder.join("config.json"), config).unwrap();
        message(DigitsTransformer::from_pretrained(&folder, FILE_DTYPE, &Device::Cpu))
    };
    assert!(load_with("{}").contains("there are no weights in this folder"));
    std::fs::copy(golden().join("model.safetensors"), folder.join("model.safetensors")).unwrap();
    assert!(
        load_with(r#"{"_class_name": "UNet2DConditionModel"}"#)
            .contains("\"UNet2DConditionModel\", expected \"DigitsTransformer\"")
    );
    assert!(load_with(r#"{"_class_name": "DigitsTransformer", "depth": 3}"#).contains("unknown field `depth`"));
    // The default sizes differ from those of the copied weights.
    assert!(load_with(r#"{"_class_name": "DigitsTransformer"}"#).contains("are these the weights of another model?"));
}
