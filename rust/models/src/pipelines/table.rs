//! The table of pipelines: one entry per family. `sizes` pairs tests of the denoiser's configuration with names that
//! replace `base.architecture` if their test holds; `pixels` is the number of pixels of an image's side per unit of the
//! denoiser's `sample_size`. A part's `sections` say where a checkpoint in one file may have the part: a prefix, then
//! names of diffusers (`Naming::Own`), the authors (`Original`) or llama.cpp (in `LLAMA_CPP`); `probe` is a key of each
//! such section. `fits` tells whether a `config.json` may belong to the part; `published` returns that of the published
//! model. `kohya` and `comfyui` name the part in these tools' adapter files; `readers` lists the tools that load them.

use serde_json::{Map, Value};
use trainable_candle_io::adapter_file::{BaseModel, Reader, readers as tools};

use super::encoders::{LLAMA_CPP, QWEN3_ENCODER, QWEN25_VL_ENCODER, t5_part};
use super::{AdapterNames, Part, Pipeline, Role, Section, readers};
use crate::causal_lm::{self, CausalLMConfig};
use crate::chroma::{self, ChromaConfig};
use crate::clip::{self, Activation, CLIPTextConfig};
use crate::digits::{self, DigitsConfig};
use crate::flux::{self, FluxConfig};
use crate::flux2::{self, Flux2Config};
use crate::pretrained::{Configuration, Naming};
use crate::qwen_image::{self, QwenImageConfig};
use crate::qwen_vae::{self, QwenVaeConfig};
use crate::registry::ModelKind;
use crate::sd3::{self, SD3Config};
use crate::sdxl::{self, UNetConfig};
use crate::vae::{self, VaeConfig};
use crate::z_image::{self, ZImageConfig};

/// All pipelines. If several pipelines have the same part, and a file does not show to which pipeline the part belongs,
/// the part belongs to the pipeline that comes first here.
pub static PIPELINES: &[&Pipeline] = &[&SDXL, &FLUX, &SD3, &DIGITS, &CAUSAL_LM, &Z_IMAGE, &FLUX2, &CHROMA, &QWEN_IMAGE];

/// Accepts any configuration of the architecture.
const fn any(_: &Map<String, Value>) -> bool {
    true
}

/// Whether the field `field` of a configuration is `size`.
fn has_size(config: &Map<String, Value>, field: &str, size: u64) -> bool {
    config.get(field).and_then(Value::as_u64) == Some(size)
}

/// Whether the configuration is that of a CLIP text encoder that projects its pooled state.
fn projects(config: &Map<String, Value>) -> bool {
    let names = config.get("architectures").and_then(Value::as_array);
    names.is_some_and(|names| names.iter().any(|name| name.as_str() == Some(clip::PROJECTING_CLASS_NAME)))
}

/// The configuration of OpenCLIP ViT-bigG.
fn big_g() -> Map<String, Value> {
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
}

/// Possible prefixes of a denoiser's keys in a checkpoint in one file.
const DENOISER_PREFIXES: &[&str] = &["model.diffusion_model.", "diffusion_model.", ""];

/// The transformer of a flow-matching pipeline.
const fn transformer(
    model: &'static ModelKind,
    sections: &'static [Section],
    published: fn() -> Map<String, Value>,
    readers: &'static [Reader],
) -> Part {
    let adapter = AdapterNames { kohya: "lora_unet", comfyui: Some("diffusion_model"), readers };
    Part {
        role: Role::Denoiser,
        model,
        subfolder: "transformer",
        sections,
        fits: any,
        published,
        adapter: Some(adapter),
    }
}

/// The sections that contain an autoencoder in a checkpoint in one file.
const AUTOENCODER_SECTIONS: &[Section] = &[Section {
    prefixes: &["first_stage_model.", "vae.", ""],
    naming: Naming::Original,
    probe: "decoder.mid.block_1.conv1.weight",
}];

/// Whether an autoencoder's `scaling_factor` is `factor`. This factor tells Flux.1's autoencoder from SD3's.
fn has_scaling_factor(config: &Map<String, Value>, factor: f64) -> bool {
    config.get("scaling_factor").and_then(Value::as_f64) == Some(factor)
}

/// The configuration of an autoencoder whose latents have 16 channels.
fn autoencoder_config(scaling_factor: f64, shift_factor: f64) -> Map<String, Value> {
    VaeConfig {
        latent_channels: 16,
        scaling_factor,
        shift_factor: Some(shift_factor),
        use_quant_conv: false,
        use_post_quant_conv: false,
        force_upcast: true,
        ..VaeConfig::default()
    }
    .to_json()
}

/// The autoencoder of Flux.1, which Chroma and Z-Image use too.
const FLUX_AUTOENCODER: Part = Part {
    role: Role::Autoencoder,
    model: &vae::KIND,
    subfolder: "vae",
    sections: AUTOENCODER_SECTIONS,
    fits: |config| has_scaling_factor(config, 0.3611),
    published: || autoencoder_config(0.3611, 0.1159),
    adapter: None,
};

/// Stable Diffusion XL (Podell et al. 2023, arXiv:2307.01952).
static SDXL: Pipeline = Pipeline {
    name: "sdxl",
    title: "SDXL",
    class_names: &["StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline"],
    base: Some(BaseModel { version: "sdxl_base_v1-0", architecture: "stable-diffusion-xl-v1-base", resolution: 1024 }),
    sizes: &[],
    pixels: 8,
    parts: &[
        Part {
            role: Role::Denoiser,
            model: &sdxl::KIND,
            subfolder: "unet",
            sections: &[Section {
                prefixes: DENOISER_PREFIXES,
                naming: Naming::Original,
                probe: "input_blocks.0.0.weight",
            }],
            fits: any,
            published: || UNetConfig::default().to_json(),
            adapter: Some(AdapterNames {
                kohya: "lora_unet",
                comfyui: Some("diffusion_model"),
                readers: readers::UNET,
            }),
        },
        Part {
            role: Role::Autoencoder,
            model: &vae::KIND,
            subfolder: "vae",
            sections: AUTOENCODER_SECTIONS,
            // The latents of the other families have 16 or 32 channels.
            fits: |config| !matches!(config.get("latent_channels").and_then(Value::as_u64), Some(16 | 32)),
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
            adapter: Some(AdapterNames {
                kohya: "lora_te1",
                comfyui: Some("text_encoders.clip_l.transformer"),
                readers: readers::TEXT_ENCODER,
            }),
        },
        // OpenCLIP ViT-bigG: embedder 1 in files of the base model, embedder 0, the only one, in files of the refiner.
        // The refiner itself is not supported (see `UNSUPPORTED`), but this encoder can be read from its files.
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
            published: big_g,
            adapter: Some(AdapterNames {
                kohya: "lora_te2",
                comfyui: Some("text_encoders.clip_g.transformer"),
                readers: readers::TEXT_ENCODER,
            }),
        },
    ],
};

/// Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv:2403.03206).
static SD3: Pipeline = Pipeline {
    name: "sd3",
    title: "SD3.5",
    class_names: &["StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline"],
    base: Some(BaseModel { version: "sd3", architecture: "stable-diffusion-3.5-medium", resolution: 1024 }),
    sizes: &[(|config| has_size(config, "num_layers", 38), "stable-diffusion-3.5-large")],
    pixels: 8,
    parts: &[
        transformer(
            &sd3::KIND,
            &[
                Section {
                    prefixes: DENOISER_PREFIXES,
                    naming: Naming::Original,
                    probe: "joint_blocks.0.context_block.attn.qkv.weight",
                },
                Section {
                    prefixes: &[""],
                    naming: Naming::Own,
                    probe: "transformer_blocks.0.norm1_context.linear.weight",
                },
            ],
            || SD3Config::default().to_json(),
            readers::SD3,
        ),
        Part {
            role: Role::Autoencoder,
            model: &vae::KIND,
            subfolder: "vae",
            sections: AUTOENCODER_SECTIONS,
            fits: |config| has_scaling_factor(config, 1.5305),
            published: || autoencoder_config(1.5305, 0.0609),
            adapter: None,
        },
        Part {
            role: Role::TextEncoder,
            model: &clip::KIND,
            subfolder: "text_encoder",
            sections: &[Section {
                prefixes: &["text_encoders.clip_l.transformer.", ""],
                naming: Naming::Own,
                probe: "text_model.embeddings.position_embedding.weight",
            }],
            fits: projects,
            published: || CLIPTextConfig { projection_dim: Some(768), ..CLIPTextConfig::default() }.to_json(),
            adapter: Some(AdapterNames {
                kohya: "lora_te1",
                comfyui: Some("text_encoders.clip_l.transformer"),
                readers: readers::TEXT_ENCODER,
            }),
        },
        Part {
            role: Role::TextEncoder,
            model: &clip::KIND,
            subfolder: "text_encoder_2",
            sections: &[Section {
                prefixes: &["text_encoders.clip_g.transformer.", ""],
                naming: Naming::Own,
                probe: "text_model.embeddings.position_embedding.weight",
            }],
            fits: projects,
            published: big_g,
            adapter: Some(AdapterNames {
                kohya: "lora_te2",
                comfyui: Some("text_encoders.clip_g.transformer"),
                readers: readers::TEXT_ENCODER,
            }),
        },
        t5_part("text_encoder_3"),
    ],
};

/// Flux.1 (Black Forest Labs 2024).
static FLUX: Pipeline = Pipeline {
    name: "flux",
    title: "Flux",
    class_names: &["FluxPipeline", "FluxImg2ImgPipeline"],
    base: Some(BaseModel { version: "flux1", architecture: "flux-1-dev", resolution: 1024 }),
    sizes: &[],
    pixels: 8,
    parts: &[
        transformer(
            &flux::KIND,
            &[
                Section { prefixes: DENOISER_PREFIXES, naming: Naming::Original, probe: "vector_in.in_layer.weight" },
                Section {
                    prefixes: &[""],
                    naming: Naming::Own,
                    probe: "single_transformer_blocks.0.norm.linear.weight",
                },
            ],
            || FluxConfig::default().to_json(),
            readers::FLUX,
        ),
        FLUX_AUTOENCODER,
        Part {
            role: Role::TextEncoder,
            model: &clip::KIND,
            subfolder: "text_encoder",
            sections: &[Section {
                prefixes: &["text_encoders.clip_l.transformer.", ""],
                naming: Naming::Own,
                probe: "text_model.embeddings.position_embedding.weight",
            }],
            fits: |config| !projects(config),
            published: || CLIPTextConfig::default().to_json(),
            adapter: Some(AdapterNames {
                kohya: "lora_te1",
                comfyui: Some("text_encoders.clip_l.transformer"),
                readers: readers::TEXT_ENCODER,
            }),
        },
        t5_part("text_encoder_2"),
    ],
};

/// Chroma (lodestones 2025), derived from Flux.1-schnell.
static CHROMA: Pipeline = Pipeline {
    name: "chroma",
    title: "Chroma",
    class_names: &["ChromaPipeline", "ChromaImg2ImgPipeline"],
    base: Some(BaseModel { version: "chroma", architecture: "chroma", resolution: 1024 }),
    sizes: &[],
    pixels: 8,
    parts: &[
        transformer(
            &chroma::KIND,
            &[
                Section {
                    prefixes: DENOISER_PREFIXES,
                    naming: Naming::Original,
                    probe: "distilled_guidance_layer.layers.0.in_layer.weight",
                },
                Section {
                    prefixes: &[""],
                    naming: Naming::Own,
                    probe: "distilled_guidance_layer.layers.0.linear_1.weight",
                },
            ],
            || ChromaConfig::default().to_json(),
            readers::CHROMA,
        ),
        FLUX_AUTOENCODER,
        t5_part("text_encoder"),
    ],
};

/// Z-Image (Tongyi-MAI 2025, arXiv:2511.22699).
static Z_IMAGE: Pipeline = Pipeline {
    name: "zimage",
    title: "Z-Image",
    class_names: &["ZImagePipeline", "ZImageImg2ImgPipeline"],
    base: Some(BaseModel { version: "z-image", architecture: "Z-Image", resolution: 1024 }),
    sizes: &[],
    pixels: 8,
    parts: &[
        transformer(
            &z_image::KIND,
            &[
                Section {
                    prefixes: DENOISER_PREFIXES,
                    naming: Naming::Original,
                    probe: "noise_refiner.0.attention.k_norm.weight",
                },
                Section {
                    prefixes: DENOISER_PREFIXES,
                    naming: Naming::Own,
                    probe: "noise_refiner.0.attention.norm_k.weight",
                },
            ],
            || ZImageConfig::default().to_json(),
            readers::Z_IMAGE,
        ),
        FLUX_AUTOENCODER,
        QWEN3_ENCODER,
    ],
};

/// FLUX.2-klein (Black Forest Labs 2026).
static FLUX2: Pipeline = Pipeline {
    name: "flux2",
    title: "FLUX.2-klein",
    class_names: &["Flux2KleinPipeline"],
    base: Some(BaseModel { version: "flux2", architecture: "Flux.2-klein-4b", resolution: 1024 }),
    sizes: &[(|config| has_size(config, "num_attention_heads", 32), "Flux.2-klein-9b")],
    pixels: 8,
    parts: &[
        transformer(
            &flux2::KIND,
            &[
                Section {
                    prefixes: DENOISER_PREFIXES,
                    naming: Naming::Original,
                    probe: "double_stream_modulation_img.lin.weight",
                },
                Section { prefixes: &[""], naming: Naming::Own, probe: "double_stream_modulation_img.linear.weight" },
            ],
            || Flux2Config::default().to_json(),
            readers::FLUX2,
        ),
        Part {
            role: Role::Autoencoder,
            model: &vae::KIND,
            subfolder: "vae",
            sections: AUTOENCODER_SECTIONS,
            fits: |config| config.contains_key("batch_norm_eps"),
            published: || {
                VaeConfig {
                    latent_channels: 32,
                    latent_norm_eps: Some(1e-4), // the field `batch_norm_eps` in files
                    scaling_factor: 1.0,
                    ..VaeConfig::default()
                }
                .to_json()
            },
            adapter: None,
        },
        QWEN3_ENCODER,
    ],
};

/// Qwen-Image (Qwen 2025, arXiv:2508.02324).
static QWEN_IMAGE: Pipeline = Pipeline {
    name: "qwen-image",
    title: "Qwen-Image",
    class_names: &["QwenImagePipeline", "QwenImageImg2ImgPipeline"],
    base: Some(BaseModel { version: "qwen-image", architecture: "Qwen-Image", resolution: 1024 }),
    sizes: &[],
    pixels: 8,
    parts: &[
        transformer(
            &qwen_image::KIND,
            &[Section {
                prefixes: DENOISER_PREFIXES,
                naming: Naming::Own,
                probe: "transformer_blocks.0.img_mod.1.weight",
            }],
            || QwenImageConfig::default().to_json(),
            readers::QWEN_IMAGE,
        ),
        Part {
            role: Role::Autoencoder,
            model: &qwen_vae::KIND,
            subfolder: "vae",
            sections: &[Section {
                prefixes: &["first_stage_model.", "vae.", ""],
                naming: Naming::Original,
                probe: "decoder.middle.0.residual.0.gamma",
            }],
            fits: any,
            published: || QwenVaeConfig::default().to_json(),
            adapter: None,
        },
        QWEN25_VL_ENCODER,
    ],
};

/// The demo's model that draws digits, a pipeline of one model.
static DIGITS: Pipeline = Pipeline {
    name: "digits",
    title: "the digits",
    class_names: &[],
    base: None,
    sizes: &[],
    pixels: 1,
    parts: &[Part {
        role: Role::Denoiser,
        model: &digits::KIND,
        subfolder: "",
        sections: &[],
        fits: any,
        published: || DigitsConfig::default().to_json(),
        // No other tool has this model.
        adapter: Some(AdapterNames { kohya: "lora_unet", comfyui: None, readers: &[] }),
    }],
};

/// Language models. Each is a pipeline of one model. Of the other tools, only peft (`UNKNOWN`) loads their adapters.
static CAUSAL_LM: Pipeline = Pipeline {
    name: "causal-lm",
    title: "a language model",
    class_names: &[],
    base: None,
    sizes: &[],
    pixels: 1, // not read, because there is no denoiser
    parts: &[Part {
        role: Role::LanguageModel,
        model: &causal_lm::KIND,
        subfolder: "",
        sections: &[LLAMA_CPP],
        fits: any,
        published: || CausalLMConfig::default().to_json(),
        adapter: Some(AdapterNames { kohya: "lora_lm", comfyui: None, readers: tools::UNKNOWN }),
    }],
};

/// Prefixes of keys in checkpoints of unsupported families, with the families' names. The first prefix that a file has
/// decides.
pub(super) static UNSUPPORTED: &[(&str, &str)] = &[
    ("cond_stage_model.transformer.", "Stable Diffusion 1"),
    ("cond_stage_model.model.", "Stable Diffusion 2"),
    ("conditioner.embedders.0.model.", "SDXL's refiner"),
];
