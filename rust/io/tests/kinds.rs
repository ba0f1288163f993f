//! Compares every kind of adapter on convolutions and linear layers with peft and LyCORIS
//! (`tests/golden/peft/make_layers.py`, `make_oft.py`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use trainable_candle_core::ops::conv::Conv2dOptions;
use trainable_candle_core::ops::loss::{Reduction, mse_loss};
use trainable_candle_core::{DType, Device, Result, Tensor, Var};
use trainable_candle_io::{TensorFile, load_tensors};
use trainable_candle_nn::adapter::{AdapterSet, LayerValues, LoraConfig, OftSide};
use trainable_candle_nn::conv::weight_from_file;
use trainable_candle_nn::{Conv2d, Linear, Module, Visitor};

/// The network of `make_layers.py`: a convolution, a 1×1 convolution and a linear layer, with 8, 12 and 10 outputs.
struct Net {
    conv: Conv2d<Tensor>,
    pointwise: Conv2d<Tensor>,
    linear: Linear<Tensor>,
}

impl Net {
    fn load(golden: &BTreeMap<String, Tensor>, dtype: DType) -> Self {
        let get = |name: &str| golden[&format!("base.{name}")].to_dtype(dtype).unwrap();
        let conv = |name: &str, options| {
            let weight = weight_from_file(&get(&format!("{name}.weight"))).unwrap();
            Conv2d::from_parameters(weight, Some(get(&format!("{name}.bias"))), options).unwrap()
        };
        Self {
            conv: conv("conv", Conv2dOptions { stride: [2, 1], padding: [1, 0], ..Conv2dOptions::default() }),
            pointwise: conv("pointwise", Conv2dOptions::default()),
            linear: Linear::from_weight(get("linear.weight"), Some(get("linear.bias"))),
        }
    }

    /// The output (batch, height, width, features) for x (batch, channels, height, width).
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.conv.forward(&x.permute(&[0, 2, 3, 1])?)?.tanh()?;
        self.linear.forward(&self.pointwise.forward(&x)?.tanh()?)
    }
}

impl Module for Net {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.conv("conv", &self.conv)?;
        visitor.conv("pointwise", &self.pointwise)?;
        visitor.linear("linear", &self.linear)
    }
}

/// The results of the references for several adapters (*cases*).
struct Golden {
    tensors: BTreeMap<String, Tensor>,
    /// The adapter's scale alpha / rank by case.
    scales: BTreeMap<String, f64>,
}

impl Golden {
    fn load() -> Self {
        let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/peft");
        let path = folder.join("layers.safetensors");
        let metadata = TensorFile::open(&path).unwrap().metadata();
        let mut tensors: BTreeMap<String, Tensor> = load_tensors(&path, &Device::Cpu).unwrap();
        let mut scales: BTreeMap<String, f64> = serde_json::from_str(&metadata["scales"]).unwrap();
        tensors.extend(load_tensors(&folder.join("oft.safetensors"), &Device::Cpu).unwrap());
        // The cases of `make_oft.py`. OFT has no scale.
        scales.extend(["oft", "oft_series", "oft_terms", "oft_outputs"].map(|case| (case.to_owned(), 1.0)));
        Self { tensors, scales }
    }

    /// The tensors with names `{case}.{group}.LAYER.PARAMETER`, by layer and parameter. `group` is `start` for the
    /// adapter's parameters and `grad` for their gradients.
    fn tensors_of(&self, case: &str, group: &str) -> BTreeMap<(String, String), Tensor> {
        let prefix = format!("{case}.{group}.");
        self.tensors
            .iter()
            .filter_map(|(name, tensor)| {
                let (layer, parameter) = name.strip_prefix(&prefix)?.split_once('.')?;
                Some(((layer.to_string(), parameter.to_string()), tensor.clone()))
            })
            .collect()
    }

    /// The adapters of a case by layer, in the layout of adapter files.
    fn adapters(&self, case: &str) -> BTreeMap<String, LayerValues> {
        let mut layers: BTreeMap<String, LayerValues> = BTreeMap::new();
        // The number of terms of the series that replaces the Cayley transform of OFT, as in `make_oft.py`; 5 is peft's
        // default. None: the transform itself.
        let cayley_neumann_terms = match case {
            "oft_series" => Some(5),
            "oft_terms" => Some(3),
            _ => None,
        };
        for ((layer, parameter), value) in self.tensors_of(case, "start") {
            let entry = layers.entry(layer).or_insert_with(|| LayerValues {
                parameters: BTreeMap::new(),
                scale: self.scales[case],
                cayley_neumann_terms,
            });
            entry.parameters.insert(parameter, value);
        }
        layers
    }
}

/// The largest absolute difference between an element and its expected value, divided by the largest absolute expected
/// value.
fn error_of(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.dims(), expected.dims());
    let values =
        |t: &Tensor| t.to_dtype(DType::F64).and_then(|t| t.contiguous()).and_then(|t| t.to_vec::<f64>()).unwrap();
    let expected = values(expected);
    // 1e-30 avoids a division by 0.
    let largest = expected.iter().fold(1e-30, |m: f64, e| m.max(e.abs()));
    values(found).iter().zip(&expected).fold(0.0, |m: f64, (f, e)| m.max((f - e).abs())) / largest
}

#[test]
fn values_gradients_and_merged_weights_equal_the_references() {
    let golden = Golden::load();
    for case in golden.scales.keys() {
        let get = |name: &str| &golden.tensors[&format!("{case}.{name}")];
        let net = Net::load(&golden.tensors, DType::F32);
        let set = AdapterSet::attach_values(&golden.adapters(case), &net.named_layers()).unwrap();
        let x = Var::from_tensor(&golden.tensors["x"]).unwrap();
        let y = net.forward(&x).unwrap();
        assert!(error_of(&y, get("output")) < 1e-5, "{case}");
        mse_loss(&y, &golden.tensors["target"], Reduction::Mean).unwrap().backward().unwrap();
        assert!(error_of(&x.grad().unwrap(), get("grad_input")) < 1e-4, "{case}");

        // The variables are set to their gradients, so that `layers` returns the gradients in the layout of adapter
        // files.
        let gradients = golden.tensors_of(case, "grad");
        for var in set.vars() {
            var.set(&var.grad().unwrap()).unwrap();
        }
        let mut compared = 0;
        for layer in set.layers().unwrap() {
            for (parameter, gradient) in &layer.parameters {
                let expected = &gradients[&(layer.name.to_string(), parameter.to_string())];
                assert!(error_of(gradient, expected) < 1e-4, "{case} {} {parameter}", layer.name);
                compared += 1;
            }
        }
        assert_eq!(compared, gradients.len());

        // The case's parameters replace the gradients in the variables.
        set.load(&golden.adapters(case)).unwrap();
        set.merge().unwrap();
        for (name, weight) in net.named_tensors() {
            if let Some(layer) = name.strip_suffix(".weight") {
                assert!(error_of(&weight, get(&format!("merged.{layer}"))) < 1e-5, "{case} {layer}");
            }
        }
        assert!(error_of(&net.forward(&golden.tensors["x"]).unwrap(), get("output")) < 1e-5, "{case}");
    }
}

#[test]
fn parameters_have_the_names_and_shapes_of_the_references_and_start_as_the_identity() {
    let golden = Golden::load();
    // The ranks and the other settings are those of the cases in `make_layers.py` and `make_oft.py`.
    let base =
        LoraConfig { r: 3, target_modules: vec!["all-linear".into(), "all-conv".into()], ..LoraConfig::default() };
    let lycoris = |adapter: &str| LoraConfig { r: 2, adapter: adapter.into(), ..base.clone() };
    let oft = LoraConfig { target_modules: vec!["all-linear".into()], oft_block_size: 4, ..lycoris("oft") };
    let configs = [
        ("oft", oft),
        ("lora", base.clone()),
        ("dora", LoraConfig { use_dora: true, ..base.clone() }),
        ("dora_input", LoraConfig { use_dora: true, wd_on_output: false, ..base.clone() }),
        ("loha", lycoris("loha")),
        ("lokr", lycoris("lokr")),
        ("lokr_factor", LoraConfig { decompose_factor: Some(2), ..lycoris("lokr") }),
        ("lokr_both", LoraConfig { r: 1, decompose_both: true, ..lycoris("lokr") }),
    ];
    for (case, config) in configs {
        let net = Net::load(&golden.tensors, DType::F32);
        let before = net.forward(&golden.tensors["x"]).unwrap();
        let set = AdapterSet::attach(config, &net.named_layers()).unwrap();
        assert!(error_of(&net.forward(&golden.tensors["x"]).unwrap(), &before) < 1e-6, "{case}");
        let mut found = BTreeMap::new();
        for layer in set.layers().unwrap() {
            for (parameter, value) in &layer.parameters {
                found.insert((layer.name.to_string(), parameter.to_string()), value.dims().to_vec());
            }
        }
        let expected: BTreeMap<_, _> =
            golden.tensors_of(case, "start").into_iter().map(|(name, value)| (name, value.dims().to_vec())).collect();
        assert_eq!(found, expected, "{case}");
    }
}

#[test]
fn adapters_of_wrong_shapes_and_of_unknown_layers_are_rejected() {
    let golden = Golden::load();
    let net = Net::load(&golden.tensors, DType::F32);
    for case in golden.scales.keys() {
        let mut adapters = golden.adapters(case);
        // Some cases adapt only the linear layer.
        let Some(conv) = adapters.remove("conv") else { continue };
        adapters.insert("pointwise".into(), conv);
        let error = AdapterSet::attach_values(&adapters, &net.named_layers()).err().unwrap().to_string();
        assert!(error.contains("pointwise"), "{case}: {error}");
    }
    let adapters = BTreeMap::from([("other".to_string(), golden.adapters("lora")["conv"].clone())]);
    let error = AdapterSet::attach_values(&adapters, &net.named_layers()).err().unwrap().to_string();
    assert!(error.contains("no layer \"other\""), "{error}");
}

#[test]
fn adapters_of_bf16_layers_have_f32_parameters_and_bf16_results() {
    let golden = Golden::load();
    for case in golden.scales.keys() {
        let net = Net::load(&golden.tensors, DType::BF16);
        let set = AdapterSet::attach_values(&golden.adapters(case), &net.named_layers()).unwrap();
        let y = net.forward(&golden.tensors["x"].to_dtype(DType::BF16).unwrap()).unwrap();
        assert_eq!(y.dtype(), DType::BF16);
        assert!(error_of(&y, &golden.tensors[&format!("{case}.output")]) < 0.05, "{case}");
        y.to_dtype(DType::F32).unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert!(set.vars().iter().all(|v| v.dtype() == DType::F32 && v.grad().is_some()), "{case}");
    }
}

#[test]
fn oft_rotates_outputs_of_every_layer_but_inputs_of_linear_layers_only() {
    let golden = Golden::load();
    let config = LoraConfig {
        adapter: "oft".into(),
        target_modules: vec!["all-linear".into(), "all-conv".into()],
        oft_block_size: 3,
        ..LoraConfig::default()
    };
    let net = Net::load(&golden.tensors, DType::F32);
    let error = AdapterSet::attach(config.clone(), &net.named_layers()).err().unwrap().to_string();
    assert!(error.contains("conv: OFT: the layer is a convolution") && error.contains("--oft-side output"), "{error}");

    let before = net.forward(&golden.tensors["x"]).unwrap();
    let config = LoraConfig { oft_side: Some(OftSide::Output), ..config };
    let set = AdapterSet::attach(config, &net.named_layers()).unwrap();
    assert_eq!(error_of(&net.forward(&golden.tensors["x"]).unwrap(), &before), 0.0);
    let dims: Vec<_> = set.layers().unwrap().iter().map(|layer| layer.parameters[0].1.dims().to_vec()).collect();
    // Each shape is (blocks, size, size). The layers have 8, 12 and 10 outputs. The size is the divisor of the number
    // of outputs that is nearest to the requested size 3. For 8 outputs, 2 and 4 are equally near, and the smaller one
    // is taken.
    assert_eq!(dims, [[4, 2, 2], [4, 3, 3], [5, 2, 2]]);
}

/// For a weight (out, in): a rotation of the inputs keeps the inner product of every two rows. A rotation of the
/// outputs keeps the inner product of every two columns.
#[test]
fn merging_oft_rotates_the_weight() {
    let golden = Golden::load();
    // The axes put the vectors whose inner products are kept (rows or columns) into the columns.
    for (case, axes) in [("oft", [1, 0]), ("oft_outputs", [0, 1])] {
        let net = Net::load(&golden.tensors, DType::F64);
        let mut adapters = golden.adapters(case);
        adapters.retain(|layer, _| layer == "linear");
        let set = AdapterSet::attach_values(&adapters, &net.named_layers()).unwrap();
        // Forty times the parameters rotate the weight by large angles.
        set.vars().iter().for_each(|var| var.set(&var.mul_scalar(40.0).unwrap()).unwrap());
        set.merge().unwrap();
        let products = |weight: &Tensor| {
            let weight = weight.permute(&axes).unwrap();
            weight.t().unwrap().matmul(&weight).unwrap()
        };
        let merged = net.named_tensors().into_iter().find(|(name, _)| name == "linear.weight").unwrap().1;
        let before = golden.tensors["base.linear.weight"].to_dtype(DType::F64).unwrap();
        assert!(error_of(&merged, &before) > 0.1, "{case}");
        assert!(error_of(&products(&merged), &products(&before)) < 1e-9, "{case}");
    }
}
