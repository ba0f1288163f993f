//! CLIP's text encoder (Radford et al. 2021, arXiv:2103.00020), for weights that OpenAI or OpenCLIP trained. Follows
//! <https://github.com/huggingface/transformers/blob/679021a6b0ded09d623a96e2bd2f822c5a548872/src/transformers/models/clip/modeling_clip.py>.

mod config;
pub mod keys;
mod layers;
mod model;

pub use config::{Activation, CLIPTextConfig};
pub use model::{CLIPTextModel, TextFeatures};

use crate::registry::ModelKind;

/// The class name in the `config.json` of a text encoder that projects the pooled state.
pub const PROJECTING_CLASS_NAME: &str = "CLIPTextModelWithProjection";

/// The registry entry of CLIP's text encoder. Messages about a wrong file name this encoder if keys begin with
/// `text_model.`.
pub static KIND: ModelKind = ModelKind::of::<CLIPTextModel>(
    "CLIPTextModel",
    ("a text encoder", "text_model."),
    &[CLIPTextModel::CLASS_NAME, PROJECTING_CLASS_NAME],
    "model.safetensors",
);
