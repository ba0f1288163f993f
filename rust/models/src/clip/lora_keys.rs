//! What other tools call the text encoders and their layers in adapter files.

use std::path::Path;
use std::sync::Arc;

use trainable_candle_core::{DType, Result};
use trainable_candle_io::adapter_file::{Outline, PartNames};
use trainable_candle_nn::Source;

use super::{Activation, CLIPTextConfig, CLIPTextModel, keys};
use crate::outline::outline_of;
use crate::sdxl::lora_keys::BASE;
use crate::{Choice, Pretrained};

/// SDXL's second encoder, OpenCLIP ViT-bigG.
fn second() -> CLIPTextConfig {
    CLIPTextConfig {
        hidden_size: 1280,
        intermediate_size: 5120,
        num_hidden_layers: 32,
        num_attention_heads: 20,
        hidden_act: Activation::Gelu,
        projection_dim: Some(1280),
        ..CLIPTextConfig::default()
    }
}

/// The names of an encoder's layers: the one that projects its pooled text is SDXL's second.
pub fn names(config: &CLIPTextConfig) -> PartNames {
    let (diffusers, kohya, comfyui) = if config.projection_dim.is_some() {
        ("text_encoder_2", "lora_te2", "text_encoders.clip_g.transformer")
    } else {
        ("text_encoder", "lora_te1", "text_encoders.clip_l.transformer")
    };
    let original = Arc::new(|layer: &str| Some(layer.to_owned()));
    PartNames { diffusers, kohya, comfyui: Some(comfyui), base: Some(BASE), original }
}

/// The layers of the two encoders at `weights`, or of SDXL's base model without it.
///
/// # Errors
/// As [`Pretrained::find`] and [`Pretrained::config`].
pub fn outlines(weights: Option<&Path>) -> Result<Vec<Outline>> {
    let mut outlines = Vec::new();
    for (part, published) in keys::PARTS.iter().zip([CLIPTextConfig::default(), second()]) {
        let config = match weights {
            Some(path) => {
                let choice = Choice { subfolder: Some(part.subfolder.to_owned()), ..Choice::default() };
                Pretrained::find(path, &CLIPTextModel::COMPONENT, &choice)?.config(
                    &CLIPTextModel::COMPONENT,
                    CLIPTextConfig::from_json,
                    keys::deduce,
                )?
            }
            None => published,
        };
        let names = names(&config);
        outlines.push(outline_of(names, &CLIPTextModel::new(config, &mut Source::shapes(DType::F16).root())?));
    }
    Ok(outlines)
}
