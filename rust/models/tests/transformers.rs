//! The transformers of SD3.5 and Flux without their files: names and shapes at full size.

use std::collections::BTreeMap;
use std::path::Path;

use trainable_candle_core::DType;
use trainable_candle_models::flux::{FluxConfig, FluxTransformer};
use trainable_candle_models::sd3::{SD3Config, SD3Transformer};
use trainable_candle_nn::{Module, Source};

type Shapes = BTreeMap<String, Vec<usize>>;

fn shapes(model: &dyn Module) -> Shapes {
    model.named_tensors().into_iter().map(|(name, tensor)| (name, tensor.dims().to_vec())).collect()
}

fn published(name: &str) -> Shapes {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/golden/full_size/{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn sd3(config: SD3Config) -> Shapes {
    shapes(&SD3Transformer::new(config, &mut Source::shapes(DType::F16).root()).unwrap())
}

fn flux(config: FluxConfig) -> Shapes {
    shapes(&FluxTransformer::new(config, &mut Source::shapes(DType::F16).root()).unwrap())
}

#[test]
fn sd35_at_full_size_has_the_published_names_and_shapes() {
    assert_eq!(sd3(SD3Config::default()), published("sd35_medium"));
    let large = SD3Config {
        num_layers: 38,
        num_attention_heads: 38,
        pos_embed_max_size: 192,
        dual_attention_layers: Vec::new(),
        ..SD3Config::default()
    };
    assert_eq!(sd3(large), published("sd35_large"));
}

#[test]
fn flux_at_full_size_has_the_published_names_and_shapes() {
    let dev = published("flux_dev");
    assert_eq!(flux(FluxConfig::default()), dev);
    let schnell = FluxConfig { guidance_embeds: false, ..FluxConfig::default() };
    let without_guidance: Shapes = dev.into_iter().filter(|(name, _)| !name.contains("guidance")).collect();
    assert_eq!(flux(schnell), without_guidance);
}
