//! Tests of SDXL's models without their weights: names and shapes at full size, configurations, and errors.

mod published;

use std::path::Path;

use published::{Shapes, published};
use trainable_candle_core::DType;
use trainable_candle_models::clip::{CLIPTextConfig, CLIPTextModel};
use trainable_candle_models::sdxl::keys::original_name;
use trainable_candle_models::sdxl::{SDXLUNet, UNetConfig};
use trainable_candle_models::vae::{AutoencoderKL, VaeConfig};
use trainable_candle_models::{Architecture, Choice, Configuration, Model, Pretrained};
use trainable_candle_nn::{Module, Source};

fn shapes(model: &dyn Module) -> Shapes {
    model.named_tensors().into_iter().map(|(name, tensor)| (name, tensor.dims().to_vec())).collect()
}

/// The number of values in all parameters.
fn parameter_count(model: &dyn Module) -> usize {
    model.named_tensors().iter().map(|(_, tensor)| tensor.elem_count()).sum()
}

fn unet() -> SDXLUNet {
    SDXLUNet::new(UNetConfig::default(), &mut Source::shapes(DType::F16).root()).unwrap()
}

#[test]
fn unet_at_full_size_has_the_published_names_and_shapes() {
    assert_eq!(shapes(&unet()), published("sdxl/unet_shapes.json"));
}

#[test]
fn autoencoder_and_encoders_at_full_size_have_the_published_numbers_of_parameters() {
    let mut source = Source::shapes(DType::F16);
    assert_eq!(parameter_count(&AutoencoderKL::new(VaeConfig::default(), &mut source.root()).unwrap()), 83_653_863);
    assert_eq!(
        parameter_count(&CLIPTextModel::new(CLIPTextConfig::default(), &mut source.root()).unwrap()),
        123_060_480
    );
    let second = CLIPTextConfig {
        hidden_size: 1280,
        intermediate_size: 5120,
        num_hidden_layers: 32,
        num_attention_heads: 20,
        projection_dim: Some(1280),
        ..CLIPTextConfig::default()
    };
    assert_eq!(parameter_count(&CLIPTextModel::new(second, &mut source.root()).unwrap()), 694_659_840);
}

#[test]
fn original_names_are_unique_and_examples_occur_in_the_published_checkpoint() {
    let config = UNetConfig::default();
    let names: Vec<String> = unet().named_tensors().into_iter().map(|(name, _)| name).collect();
    let unique: std::collections::BTreeSet<String> =
        names.iter().map(|name| original_name(name, &config).unwrap_or_else(|| panic!("{name}"))).collect();
    assert_eq!(unique.len(), names.len());
    // Right: names in the published checkpoint, which is one file. Left: the same parameters in diffusers and here.
    for (ours, theirs) in [
        ("down_blocks.1.attentions.0.proj_in.weight", "input_blocks.4.1.proj_in.weight"),
        ("down_blocks.1.resnets.0.conv_shortcut.weight", "input_blocks.4.0.skip_connection.weight"),
        ("down_blocks.0.downsamplers.0.conv.bias", "input_blocks.3.0.op.bias"),
        ("mid_block.resnets.1.norm2.weight", "middle_block.2.out_layers.0.weight"),
        ("up_blocks.0.upsamplers.0.conv.weight", "output_blocks.2.2.conv.weight"),
        ("up_blocks.2.resnets.2.time_emb_proj.weight", "output_blocks.8.0.emb_layers.1.weight"),
        ("add_embedding.linear_2.bias", "label_emb.0.2.bias"),
    ] {
        assert_eq!(original_name(ours, &config).as_deref(), Some(theirs));
    }
}

#[test]
fn default_configurations_are_read_as_written() {
    let config = UNetConfig::default();
    assert_eq!(UNetConfig::from_json(&config.to_json()).unwrap(), config);
    assert_eq!(VaeConfig::from_json(&VaeConfig::default().to_json()).unwrap(), VaeConfig::default());
    assert_eq!(CLIPTextConfig::from_json(&CLIPTextConfig::default().to_json()).unwrap(), CLIPTextConfig::default());
}

#[test]
fn wrong_and_unsupported_fields_are_reported() {
    for (field, value, expected) in [
        ("act_fn", r#""gelu""#, r#"act_fn is "gelu", expected "silu""#),
        ("resnet_time_scale_shift", r#""scale_shift""#, "expected \"default\""),
        ("addition_embed_type", "null", "addition_embed_type is null, expected \"text_time\""),
        ("layers_per_block", "[1, 2, 2]", "layers_per_block is [1,2,2], expected the same number"),
        ("attention_head_dim", "[5, 10]", "a list of 3"),
        ("attention_head_dim", "7", "it must divide"),
        (
            "down_block_types",
            r#"["DownBlock2D"]"#,
            "expected a list of 3 names, each one of CrossAttnDownBlock2D, DownBlock2D",
        ),
        ("encoder_hid_dim", "64", "encoder_hid_dim is 64, but the field is not supported"),
        ("block_out_channels", "[320, 640, 0]", "a list of positive integers"),
    ] {
        let mut map = UNetConfig::default().to_json();
        map.insert(field.into(), serde_json::from_str(value).unwrap());
        let error = UNetConfig::from_json(&map).unwrap_err().to_string();
        assert!(error.starts_with("UNet2DConditionModel: ") && error.contains(expected), "{error}");
    }
}

#[test]
fn the_error_for_an_empty_folder_says_where_the_reader_looked() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no_pipeline");
    std::fs::create_dir_all(&folder).unwrap();
    let result = Pretrained::find(&folder, CLIPTextModel::KIND, &Choice::default());
    assert!(result.unwrap_err().to_string().contains("config.json in this folder or in text_encoder, text_encoder_2"));
    let choice = Choice { subfolder: Some("text_encoder_3".into()), ..Choice::default() };
    let result = Pretrained::find(&folder, CLIPTextModel::KIND, &choice);
    assert!(result.unwrap_err().to_string().contains("config.json in the subfolder text_encoder_3"));
}

#[test]
fn the_unets_class_name_is_that_of_diffusers() {
    assert_eq!(unet().class_name(), "UNet2DConditionModel");
}
