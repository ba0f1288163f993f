//! The table of pipelines: one entry for each family.

use serde_json::{Map, Value};
use trainable_candle_io::adapter_file::BaseModel;

use super::{AdapterNames, Part, Pipeline, Role, Section};
use crate::clip::{self, Activation, CLIPTextConfig};
use crate::digits::{self, DigitsConfig};
use crate::pretrained::{Configuration, Naming};
use crate::sdxl::{self, UNetConfig};
use crate::t5::{self, T5Config};
use crate::vae::{self, VaeConfig};

/// Every pipeline.
pub static PIPELINES: &[&Pipeline] = &[&SDXL, &DIGITS, &T5];

/// Any configuration of the architecture is this part's.
const fn any(_: &Map<String, Value>) -> bool {
    true
}

/// Whether a CLIP text encoder projects its pooled text.
fn projects(config: &Map<String, Value>) -> bool {
    let names = config.get("architectures").and_then(Value::as_array);
    names.is_some_and(|names| names.iter().any(|name| name.as_str() == Some(clip::PROJECTING_CLASS_NAME)))
}

/// Stable Diffusion XL (Podell et al. 2023, arXiv:2307.01952).
static SDXL: Pipeline = Pipeline {
    name: "sdxl",
    title: "SDXL",
    class_names: &["StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline"],
    base: Some(BaseModel { version: "sdxl_base_v1-0", architecture: "stable-diffusion-xl-v1-base", resolution: 1024 }),
    pixels: 8,
    parts: &[
        Part {
            role: Role::Denoiser,
            model: &sdxl::KIND,
            subfolder: "unet",
            sections: &[Section {
                prefixes: &["model.diffusion_model.", "diffusion_model.", ""],
                naming: Naming::Original,
                probe: "input_blocks.0.0.weight",
            }],
            fits: any,
            published: || UNetConfig::default().to_json(),
            adapter: Some(AdapterNames { kohya: "lora_unet", comfyui: Some("diffusion_model") }),
        },
        Part {
            role: Role::Autoencoder,
            model: &vae::KIND,
            subfolder: "vae",
            sections: &[Section {
                prefixes: &["first_stage_model.", "vae.", ""],
                naming: Naming::Original,
                probe: "decoder.mid.block_1.conv1.weight",
            }],
            fits: any,
            published: || VaeConfig::default().to_json(),
            adapter: None,
        },
        // CLIP ViT-L.
        Part {
            role: Role::TextEncoder,
            model: &clip::KIND,
            subfolder: "text_encoder",
            sections: &[Section {
                prefixes: &["conditioner.embedders.0.transformer.", ""],
                naming: Naming::Own,
                probe: "text_model.embeddings.position_embedding.weight",
            }],
            fits: |config| !projects(config),
            published: || CLIPTextConfig::default().to_json(),
            adapter: Some(AdapterNames { kohya: "lora_te1", comfyui: Some("text_encoders.clip_l.transformer") }),
        },
        // OpenCLIP ViT-bigG; the refiner, which has this encoder alone, counts from 0.
        Part {
            role: Role::TextEncoder,
            model: &clip::KIND,
            subfolder: "text_encoder_2",
            sections: &[Section {
                prefixes: &["conditioner.embedders.1.model.", "conditioner.embedders.0.model."],
                naming: Naming::Original,
                probe: "transformer.resblocks.0.attn.in_proj_weight",
            }],
            fits: projects,
            published: || {
                CLIPTextConfig {
                    hidden_size: 1280,
                    intermediate_size: 5120,
                    num_hidden_layers: 32,
                    num_attention_heads: 20,
                    hidden_act: Activation::Gelu,
                    projection_dim: Some(1280),
                    ..CLIPTextConfig::default()
                }
                .to_json()
            },
            adapter: Some(AdapterNames { kohya: "lora_te2", comfyui: Some("text_encoders.clip_g.transformer") }),
        },
    ],
};

/// The demo's generator of digits, a model that stands alone.
static DIGITS: Pipeline = Pipeline {
    name: "digits",
    title: "the digits",
    class_names: &[],
    base: None,
    pixels: 1,
    parts: &[Part {
        role: Role::Denoiser,
        model: &digits::KIND,
        subfolder: "",
        sections: &[],
        fits: any,
        published: || DigitsConfig::default().to_json(),
        adapter: Some(AdapterNames { kohya: "lora_unet", comfyui: None }),
    }],
};

/// T5's encoder, in a file or folder of its own or among others in a file of one piece.
static T5: Pipeline = Pipeline {
    name: "t5",
    title: "T5",
    class_names: &[],
    base: None,
    pixels: 1,
    parts: &[Part {
        role: Role::TextEncoder,
        model: &t5::KIND,
        subfolder: "",
        sections: &[Section {
            prefixes: &["text_encoders.t5xxl.transformer.", ""],
            naming: Naming::Own,
            probe: "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        }],
        fits: any,
        published: || T5Config::default().to_json(),
        adapter: None,
    }],
};

/// Families that are not supported, by what the keys of their files begin with; of several, the first counts.
pub(super) static UNSUPPORTED: &[(&str, &str)] = &[
    ("cond_stage_model.transformer.", "Stable Diffusion 1"),
    ("cond_stage_model.model.", "Stable Diffusion 2"),
    ("model.diffusion_model.joint_blocks.", "Stable Diffusion 3"),
    ("conditioner.embedders.0.model.", "SDXL's refiner"),
    ("joint_blocks.", "Stable Diffusion 3"),
    ("model.diffusion_model.double_blocks.", "Flux"),
    ("double_blocks.", "Flux"),
];
