//! Tests of the diffusion transformers without their weights: names and shapes at full size. The default of each
//! configuration is a published model; the other models change some fields.

mod published;

use published::{Shapes, published};
use trainable_candle_core::DType;
use trainable_candle_models::chroma::{ChromaConfig, ChromaTransformer};
use trainable_candle_models::flux::{FluxConfig, FluxTransformer};
use trainable_candle_models::flux2::{Flux2Config, Flux2Transformer};
use trainable_candle_models::qwen_image::{QwenImageConfig, QwenImageTransformer};
use trainable_candle_models::sd3::{SD3Config, SD3Transformer};
use trainable_candle_models::z_image::{ZImageConfig, ZImageTransformer};
use trainable_candle_nn::{Module, Source};

fn shapes(model: &dyn Module) -> Shapes {
    model.named_tensors().into_iter().map(|(name, tensor)| (name, tensor.dims().to_vec())).collect()
}

fn sd3(config: SD3Config) -> Shapes {
    shapes(&SD3Transformer::new(config, &mut Source::shapes(DType::F16).root()).unwrap())
}

fn flux(config: FluxConfig) -> Shapes {
    shapes(&FluxTransformer::new(config, &mut Source::shapes(DType::F16).root()).unwrap())
}

#[test]
fn sd35_at_full_size_has_the_published_names_and_shapes() {
    assert_eq!(sd3(SD3Config::default()), published("full_size/sd35_medium.json"));
    let large = SD3Config {
        num_layers: 38,
        num_attention_heads: 38,
        pos_embed_max_size: 192,
        dual_attention_layers: Vec::new(),
        ..SD3Config::default()
    };
    assert_eq!(sd3(large), published("full_size/sd35_large.json"));
}

#[test]
fn flux_at_full_size_has_the_published_names_and_shapes() {
    let expected_dev = published("full_size/flux_dev.json");
    assert_eq!(flux(FluxConfig::default()), expected_dev);
    let schnell = FluxConfig { guidance_embeds: false, ..FluxConfig::default() };
    let expected_schnell: Shapes = expected_dev.into_iter().filter(|(name, _)| !name.contains("guidance")).collect();
    assert_eq!(flux(schnell), expected_schnell);
}

/// `chroma.json` has only the parameters that Flux does not have. The rest of Chroma's parameters are those of Flux
/// without the modulation.
#[test]
fn chroma_at_full_size_has_the_published_names_and_shapes() {
    let model = ChromaTransformer::new(ChromaConfig::default(), &mut Source::shapes(DType::F16).root()).unwrap();
    let is_modulation = |name: &str| {
        ["time_text_embed.", "norm_out."].iter().any(|prefix| name.starts_with(prefix))
            || ["norm.linear", "norm1"].iter().any(|part| name.contains(part))
    };
    let mut expected = published("full_size/flux_dev.json");
    expected.retain(|name, _| !is_modulation(name));
    expected.extend(published("full_size/chroma.json"));
    assert_eq!(shapes(&model), expected);
}

#[test]
fn z_image_at_full_size_has_the_published_names_and_shapes() {
    let model = ZImageTransformer::new(ZImageConfig::default(), &mut Source::shapes(DType::F16).root()).unwrap();
    assert_eq!(shapes(&model), published("full_size/zimage.json"));
}

#[test]
fn flux2_at_full_size_has_the_published_names_and_shapes() {
    let flux2 = |config| shapes(&Flux2Transformer::new(config, &mut Source::shapes(DType::F16).root()).unwrap());
    assert_eq!(flux2(Flux2Config::default()), published("full_size/flux2_klein_4b.json"));
    let klein_9b = Flux2Config {
        num_layers: 8,
        num_single_layers: 24,
        num_attention_heads: 32,
        joint_attention_dim: 12288,
        ..Flux2Config::default()
    };
    assert_eq!(flux2(klein_9b), published("full_size/flux2_klein_9b.json"));
}

#[test]
fn qwen_image_at_full_size_has_the_published_names_and_shapes() {
    let model = QwenImageTransformer::new(QwenImageConfig::default(), &mut Source::shapes(DType::F16).root()).unwrap();
    assert_eq!(shapes(&model), published("full_size/qwen_image.json"));
}
