//! Models of trainable-candle.
//!
//! Each model has a folder of source files with its configuration, its blocks and its forward pass. The table of
//! [pipelines] lists the models that work together. The code of a model does not depend on adapters or optimizers: it
//! lists the model's layers and parameters ([`trainable_candle_nn::Module`]), and computes the forward pass.

pub mod causal_lm;
pub mod chroma;
pub mod clip;
pub mod digits;
pub mod facts;
mod fields;
pub mod flux;
pub mod flux2;
pub mod layers;
pub mod pipelines;
pub mod pretrained;
pub mod qwen_image;
pub mod qwen_vae;
pub mod registry;
pub mod saved;
pub mod sd3;
pub mod sdxl;
pub mod t5;
pub mod vae;
pub mod z_image;

pub use causal_lm::CausalLM;
pub use chroma::ChromaTransformer;
pub use clip::CLIPTextModel;
pub use digits::DigitsTransformer;
pub use facts::{AdapterMemory, Facts, PartFacts, inspect};
pub use flux::FluxTransformer;
pub use flux2::Flux2Transformer;
pub use pipelines::Pipeline;
pub use pretrained::{Architecture, Choice, Configuration, Pretrained, WriteOptions, save_checkpoint, save_pretrained};
pub use qwen_image::QwenImageTransformer;
pub use qwen_vae::AutoencoderKLQwenImage;
pub use registry::{Loaded, Model, load};
pub use sd3::SD3Transformer;
pub use sdxl::SDXLUNet;
pub use t5::T5Encoder;
pub use vae::AutoencoderKL;
pub use z_image::ZImageTransformer;
