//! The metadata (text entries) of adapter files.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use trainable_candle_nn::adapter::{AdaptedLayer, AdapterSet};

use super::{AdapterFormat, PartNames, alpha, oft, peft};

/// The name of the entry with peft's configuration of each part as JSON, as diffusers writes and reads it.
pub(super) const CONFIGURATION: &str = "lora_adapter_metadata";

/// The metadata entries that other tools read: those entries of kohya that A1111 needs to recognise SDXL, and the
/// entries of modelspec 1.0.1. Files in the formats of diffusers and peft also have the entry [`CONFIGURATION`], from
/// which diffusers and peft take the alphas. A file in diffusers' format has no configuration if its factors are
/// already multiplied by the scale (`folds`).
///
/// `parts` has, for each part of the pipeline, its names in other tools, its adapters, and the adapted layers as they
/// are written.
pub(super) fn entries(
    format: AdapterFormat,
    folds: bool,
    parts: &[(&PartNames, &AdapterSet, Vec<AdaptedLayer<'_>>)],
    title: &str,
) -> BTreeMap<String, String> {
    // By convention, files of safetensors name the framework of their tensors: "pt" is PyTorch.
    let mut entries = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut add = |name: &str, value: String| entries.insert(name.to_owned(), value);
    if format == AdapterFormat::Peft || format == AdapterFormat::Diffusers && !folds {
        let mut config = Map::new();
        for (names, set, layers) in parts {
            for (field, value) in peft::configuration(set, layers) {
                let prefixed = format == AdapterFormat::Diffusers && !names.diffusers.is_empty();
                config.insert(if prefixed { format!("{}.{field}", names.diffusers) } else { field }, value);
            }
        }
        add(CONFIGURATION, Value::Object(config).to_string());
    }
    // Here `base` is the base model as other tools name it in metadata; models that those tools do not know have none.
    if let Some(base) = parts.iter().find_map(|(names, _, _)| names.base) {
        let (_, first_set, first_layers) = &parts[0];
        let config = first_set.config();
        let kind = first_layers.first().map_or("lora", |layer| layer.kind.name);
        // The entries have one rank and one alpha for the whole file: those of the first layer with a rank. The rank in
        // the settings is 0 only if the adapter was read from a file without low-rank factors. OFT has no rank.
        let mut layers = parts.iter().flat_map(|(_, _, layers)| layers);
        let layer = layers.find(|layer| kind == "oft" || layer.settings.rank > 0);
        let (rank, alpha) = match layer {
            // For OFT, LyCORIS takes the block size from the entry for the rank, and from the entry for alpha a limit
            // of the rotation.
            Some(layer) if kind == "oft" => (layer.settings.oft_block_size, oft::NO_LIMIT),
            Some(layer) => (layer.settings.rank, alpha::of(layer)),
            None => (0, 1.0),
        };
        let arguments = match kind {
            "lora" => json!({}),
            "dora" => json!({"algo": "lora", "dora_wd": "True", "wd_on_output": python_bool(config.wd_on_output)}),
            "oft" => json!({"algo": "diag-oft"}),
            other => json!({"algo": other}),
        };
        add("ss_v2", "False".into());
        add("ss_base_model_version", base.version.into());
        add("ss_network_module", if kind == "lora" { "networks.lora" } else { "lycoris.kohya" }.into());
        add("ss_network_dim", rank.to_string());
        add("ss_network_alpha", alpha.to_string());
        add("ss_network_args", arguments.to_string());
        add("ss_output_name", title.into());
        add("modelspec.sai_model_spec", "1.0.1".into());
        add("modelspec.architecture", format!("{}/lora", base.architecture));
        add("modelspec.implementation", "https://github.com/Stability-AI/generative-models".into());
        add("modelspec.title", title.into());
        add("modelspec.resolution", format!("{0}x{0}", base.resolution));
    }
    entries
}

fn python_bool(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}
