//! Runs the readers of models and adapters on damaged files. A test gives [`run`] valid files, a function that damages
//! them, and a function that reads a file and returns whether the reader accepts it. The reader must accept the valid
//! files. It may accept or reject a damaged file, but must neither panic nor take too much memory.
//!
//! By default, a test tries 1000 files. This command tries more, with all readers or with those whose tests have READER
//! in their names:
//!
//! ```text
//! FUZZ_CASES=1000000 FUZZ_SEED=1 cargo test --release -p trainable-candle-models --test fuzz -- --nocapture [READER]
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr)] // prints the number of cases

mod harness;
mod mutate;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use harness::{Folder, run};
use trainable_candle_core::{DType, Device, Result, Tensor};
use trainable_candle_io::adapter_file::{AdapterFormat, Outline, verify_adapter};
use trainable_candle_io::{
    PartLayers, SaveOptions, TensorFile, WeightFiles, attach_adapter, save_adapters, save_tensors,
};
use trainable_candle_models::{Choice, Loaded, load, save_checkpoint};
use trainable_candle_nn::adapter::{AdapterSet, LoraConfig};

const CPU: Device = Device::Cpu;
/// The total size in bytes of the other files that a reader reads, if it reads only the damaged file. [`run`] takes
/// this size into account when it checks how much memory a reader takes.
const NO_OTHERS: usize = 0;
/// The factor by which [`attach_adapter`] multiplies the scales in an adapter's file: 1 keeps them.
const FILE_SCALES: f64 = 1.0;
/// For [`load`]: the model keeps the dtype of its file.
const FILE_DTYPE: Option<DType> = None;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

/// The model in the folder `name` of `tests/golden`, in the dtype of its file.
fn load_golden(name: &str) -> Loaded {
    load(&golden(name), &Choice::default(), FILE_DTYPE, &CPU).unwrap()
}

/// Writes a valid file with small tensors of several dtypes, whose names begin with `prefix`, and returns its bytes.
fn small_file(path: &Path, prefix: &str) -> Vec<u8> {
    let base = Tensor::randn(0.0, 1.0, (3, 4), DType::F32, &CPU).unwrap();
    let dtypes = [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::U32, DType::U8];
    let tensors: Vec<(String, Tensor)> =
        dtypes.iter().map(|&dtype| (format!("{prefix}{}", dtype.as_str()), base.to_dtype(dtype).unwrap())).collect();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    save_tensors(path, tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)), &metadata).unwrap();
    std::fs::read(path).unwrap()
}

/// Reads everything in a file, each tensor in its own dtype and in bf16.
fn read_whole(path: &Path) -> Result<()> {
    let mut file = TensorFile::open(path)?;
    drop(file.metadata());
    for name in file.names() {
        drop((file.shape(&name).map(<[usize]>::to_vec), file.dtype_of(&name)));
        drop(file.read(&name, &CPU)?);
        drop(file.read_as(&name, Some(DType::BF16), &CPU)?);
    }
    Ok(())
}

#[test]
fn damaged_weights_are_read_or_rejected() {
    let folder = Folder::new("weights");
    let path = folder.join("weights.safetensors");
    let valid = [small_file(&path, ""), std::fs::read(golden("digits/model.safetensors")).unwrap()];
    run("weights", &path, &valid, NO_OTHERS, mutate::safetensors, || read_whole(&path).is_ok());
}

#[test]
fn damaged_shards_are_read_or_rejected() {
    let folder = Folder::new("shards");
    let paths = [folder.join("a.safetensors"), folder.join("b.safetensors")];
    let others = small_file(&paths[1], "b.").len();
    let valid = [small_file(&paths[0], "a."), small_file(&paths[0], "a.much.longer.")];
    run("shards", &paths[0], &valid, others, mutate::safetensors, || {
        let read = || -> Result<()> {
            let mut files = WeightFiles::open(&paths)?;
            drop((files.common_dtype("a."), files.metadata()));
            let names: Vec<String> = files.names().map(str::to_owned).collect();
            names.iter().try_for_each(|name| files.read(name, Some(DType::F32), &CPU).map(drop))
        };
        read().is_ok()
    });
}

#[test]
fn damaged_adapters_are_read_or_rejected() {
    let folder = Folder::new("adapters");
    // The file has peft's name. So if its header has no configuration, the reader looks for one beside it: that of the
    // last adapters saved in peft's format below. Its size is so small that it counts as 0 here.
    let path = folder.join("adapter_model.safetensors");
    let model = load_golden("digits");
    let (names, layers) = (model.adapter_names(), model.named_layers());
    let mut valid = Vec::new();
    for kind in ["lora", "dora", "loha", "lokr", "oft"] {
        let config = LoraConfig {
            r: 2,
            adapter: kind.into(),
            target_modules: vec!["all-linear".into()],
            ..LoraConfig::default()
        };
        let set = AdapterSet::attach(config, &layers).unwrap();
        for format in [AdapterFormat::Kohya, AdapterFormat::Diffusers, AdapterFormat::Peft] {
            let options = SaveOptions { format: Some(format), ..SaveOptions::default() };
            // Some formats cannot store some kinds.
            if save_adapters(&path, &[(&names, &set)], &options).is_ok() {
                valid.push(std::fs::read(&path).unwrap());
            }
        }
        // Removes the adapters from the layers, so that the next ones can be attached.
        set.set_enabled(false);
    }
    assert!(valid.len() >= 8, "{} pairs of kind and format could be saved, expected at least 8", valid.len());
    let shapes = layers.iter().map(|(name, layer)| (name.clone(), layer.base().weight.dims().to_vec()));
    let outlines = [Outline { names: names.clone(), layers: shapes.collect() }];
    run("adapters", &path, &valid, NO_OTHERS, mutate::safetensors, || {
        let verified = verify_adapter(&path, &outlines);
        let attached = attach_adapter(&path, FILE_SCALES, PartLayers { names: &names, layers: &layers });
        let is_attached = attached.as_ref().is_ok_and(|set| {
            // Removes the adapters from the layers, so that the next case can attach its own.
            set.set_enabled(false);
            true
        });
        verified.is_ok() && is_attached
    });
}

#[test]
fn damaged_adapter_configurations_are_read_or_rejected() {
    let folder = Folder::new("adapter_configurations");
    let model = load_golden("digits");
    let (names, layers) = (model.adapter_names(), model.named_layers());
    let config = LoraConfig { r: 2, target_modules: vec!["all-linear".into()], ..LoraConfig::default() };
    let set = AdapterSet::attach(config, &layers).unwrap();
    // A configuration in the header of the safetensors file takes precedence over `adapter_config.json`. The header's
    // entry for it is empty here, so that the reader uses `adapter_config.json`.
    let metadata = BTreeMap::from([("lora_adapter_metadata".to_owned(), String::new())]);
    let options = SaveOptions { format: Some(AdapterFormat::Peft), metadata, ..SaveOptions::default() };
    save_adapters(folder.path(), &[(&names, &set)], &options).unwrap();
    set.set_enabled(false);
    let path = folder.join("adapter_config.json");
    let others = std::fs::metadata(folder.join("adapter_model.safetensors")).unwrap().len() as usize;
    let valid = [std::fs::read(&path).unwrap()];
    run("adapter_configurations", &path, &valid, others, mutate::json, || {
        match attach_adapter(folder.path(), FILE_SCALES, PartLayers { names: &names, layers: &layers }) {
            Ok(set) => {
                set.set_enabled(false);
                true
            }
            Err(_) => false,
        }
    });
}

/// Copies the configuration and the weights of a model in `tests/golden` to `folder`. Returns their total size in
/// bytes.
fn copy_golden(name: &str, folder: &Folder) -> usize {
    let files = ["config.json", "model.safetensors"];
    files.iter().map(|file| std::fs::copy(golden(name).join(file), folder.join(file)).unwrap() as usize).sum()
}

fn loads(path: &Path) -> bool {
    load(path, &Choice::default(), FILE_DTYPE, &CPU).is_ok()
}

#[test]
fn damaged_configurations_are_read_or_rejected() {
    for name in ["digits", "sdxl/text_encoder"] {
        let folder = Folder::new(&format!("configurations-{}", name.replace('/', "-")));
        let others = copy_golden(name, &folder);
        let path = folder.join("config.json");
        let valid = [std::fs::read(&path).unwrap()];
        run("configurations", &path, &valid, others, mutate::json, || loads(folder.path()));
    }
}

#[test]
fn damaged_configurations_of_other_models_are_read_or_rejected() {
    let folder = Folder::new("configurations_of_other_models");
    // These weights fit no model, so the reader rejects every configuration at the model's first parameter.
    let others = small_file(&folder.join("model.safetensors"), "").len();
    let path = folder.join("config.json");
    let valid = ["sdxl/unet", "sdxl/vae", "sdxl/text_encoder_2"]
        .map(|name| std::fs::read(golden(name).join("config.json")).unwrap());
    let are_json = valid.iter().all(|file| serde_json::from_slice::<serde_json::Value>(file).is_ok());
    let mut valid_files_left = valid.len();
    run("configurations_of_other_models", &path, &valid, others, mutate::json, || {
        let loaded = loads(folder.path());
        // `run` reads the valid files first and requires `true` for them. For these files `true` means here that they
        // are JSON and that the reader rejects the configuration.
        let is_valid_file = valid_files_left > 0;
        valid_files_left = valid_files_left.saturating_sub(1);
        if is_valid_file { are_json && !loaded } else { loaded }
    });
}

#[test]
fn damaged_models_are_read_or_rejected() {
    let folder = Folder::new("models");
    let others = copy_golden("digits", &folder);
    let path = folder.join("model.safetensors");
    let valid = [std::fs::read(&path).unwrap()];
    run("models", &path, &valid, others, mutate::safetensors, || loads(folder.path()));
}

#[test]
fn damaged_indexes_are_read_or_rejected() {
    let folder = Folder::new("indexes");
    let mut others = copy_golden("digits", &folder);
    std::fs::rename(folder.join("model.safetensors"), folder.join("model-00001-of-00002.safetensors")).unwrap();
    others += small_file(&folder.join("model-00002-of-00002.safetensors"), "unused.").len();
    let path = folder.join("model.safetensors.index.json");
    // The reader takes only the names of the shards from the index; it takes the parameters' names from the shards. So
    // the name "a" and the size 4000 are arbitrary. Only a damaged index names the second shard.
    let index = br#"{"metadata": {"total_size": 4000}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}"#;
    run("indexes", &path, &[index.to_vec()], others, mutate::json, || loads(folder.path()));
}

#[test]
fn damaged_original_checkpoints_are_read_or_rejected() {
    // An original checkpoint is one file that may hold several models, with its own names for their parameters.
    let folder = Folder::new("original_checkpoints");
    let path = folder.join("checkpoint.safetensors");
    let model = load_golden("sdxl/text_encoder");
    // `None`: no tensors of another checkpoint are copied.
    save_checkpoint(&path, &[("text_encoder", &*model)], None, &trainable_candle_models::WriteOptions::default())
        .unwrap();
    let valid = [std::fs::read(&path).unwrap()];
    let choice = Choice { subfolder: Some("text_encoder".into()), ..Choice::default() };
    run("original_checkpoints", &path, &valid, NO_OTHERS, mutate::safetensors, || {
        load(&path, &choice, FILE_DTYPE, &CPU).is_ok()
    });
}
