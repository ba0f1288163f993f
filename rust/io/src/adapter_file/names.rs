//! [`PartNames`]: the names that tools use for a part of a pipeline and its layers.

use std::sync::Arc;

use super::readers::{self, Reader, Tool};
use super::{AdapterFormat, Style};
use crate::form::Key;

/// The base model that an adapter is for, as metadata names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseModel {
    /// kohya's `ss_base_model_version`: `sdxl_base_v1-0`.
    pub version: &'static str,
    /// `modelspec.architecture` without `/lora`: `stable-diffusion-xl-v1-base`.
    pub architecture: &'static str,
    /// Height and width, in pixels, of the images that the base model was trained for. For 1024,
    /// `modelspec.resolution` is `1024x1024`.
    pub resolution: usize,
}

/// A function from a layer's name to its place in the original checkpoint, if it has one: the name of a matrix, and
/// which of the matrix's rows belong to the layer.
pub type Original = Arc<dyn Fn(&str) -> Option<Key> + Send + Sync>;

/// The names that tools use for one part of a pipeline and its layers.
#[derive(Clone)]
pub struct PartNames {
    /// diffusers' and peft's name of the part: `unet`, `text_encoder`. Empty for a model that belongs to no pipeline.
    pub diffusers: &'static str,
    /// kohya's name: `lora_unet`, `lora_te1`.
    pub kohya: &'static str,
    /// `ComfyUI`'s name: `diffusion_model`, `text_encoders.clip_l.transformer`. `None` if `ComfyUI` does not support
    /// the model.
    pub comfyui: Option<&'static str>,
    /// The base model, if other tools know it.
    pub base: Option<BaseModel>,
    /// Whether this is the part that generates images, not a text encoder.
    pub is_denoiser: bool,
    /// The layers' places in original checkpoints.
    pub original: Original,
    /// The tools that load adapters of the part.
    pub readers: &'static [Reader],
    /// The prefixes of the keys of all known parts, including this one.
    pub prefixes: Arc<[String]>,
}

impl Default for PartNames {
    /// The names of a model that no other tool supports.
    fn default() -> Self {
        Self {
            diffusers: "",
            kohya: "lora_unet",
            comfyui: None,
            base: None,
            is_denoiser: true,
            original: Arc::new(|_| None),
            readers: readers::UNKNOWN,
            prefixes: Arc::new([]),
        }
    }
}

const PEFT: &str = "base_model.model.";
/// The prefix of the keys of a denoiser in LyCORIS' style.
const LYCORIS: &str = "lycoris_";

impl PartNames {
    /// The format that most tools load.
    pub fn default_format(&self) -> AdapterFormat {
        match self.base {
            _ if self.folds() => AdapterFormat::Diffusers,
            Some(_) => AdapterFormat::Kohya,
            None => AdapterFormat::Peft,
        }
    }

    /// Whether a file in diffusers' format includes the scale in its factors. It does if the part is a denoiser and
    /// `ComfyUI` reads diffusers' names of the layers that are usually adapted, because diffusers and `ComfyUI` look for
    /// the scale in different places.
    pub(super) fn folds(&self) -> bool {
        self.is_denoiser && readers::knows_usual(self.readers, Tool::ComfyUi, Style::Diffusers)
    }

    /// The known prefix that `key` begins with, a part's or `LyCORIS`'; `None` if there is none.
    pub(super) fn prefix_of<'a>(&'a self, key: &str) -> Option<&'a str> {
        self.prefixes.iter().map(String::as_str).chain([LYCORIS]).find(|prefix| key.starts_with(prefix))
    }

    /// Whether `prefix`, the beginning of a key, identifies this part.
    pub(super) fn begins(&self, prefix: &str) -> bool {
        let kohya = prefix == LYCORIS && self.is_denoiser
            || prefix
                .strip_suffix('_')
                .is_some_and(|name| name == self.kohya || self.kohya.strip_suffix('1') == Some(name));
        let dotted = prefix.strip_suffix('.').unwrap_or_default();
        kohya
            || dotted == self.diffusers && !dotted.is_empty()
            || self.comfyui.is_some_and(|name| prefix.starts_with(name) || name.starts_with(prefix))
    }

    /// The name of a layer in a style, if it has one.
    pub fn key(&self, layer: &str, style: Style) -> Option<String> {
        self.place(layer, style).map(|place| place.key)
    }

    /// The module that holds a layer: its name in a style, and which of its rows belong to the layer.
    pub(super) fn place(&self, layer: &str, style: Style) -> Option<Key> {
        let flat = || layer.replace('.', "_");
        let prefixed = |name: &str| match self.diffusers {
            "" => name.to_owned(),
            part => format!("{part}.{name}"),
        };
        let original = |write: &dyn Fn(&str) -> String| {
            let Key { key, form } = (self.original)(layer)?;
            Some(Key { key: write(&key), form })
        };
        match style {
            Style::KohyaOriginal => return original(&|name| format!("{}_{}", self.kohya, name.replace('.', "_"))),
            Style::ComfyUi => {
                let prefix = self.comfyui?;
                return original(&|name| format!("{prefix}.{name}"));
            }
            Style::Kohya => Some(format!("{}_{}", self.kohya, flat())),
            Style::OneTrainer => self.is_denoiser.then(|| format!("lora_{}_{}", self.diffusers, flat())),
            Style::Lycoris => self.is_denoiser.then(|| format!("{LYCORIS}{}", flat())),
            Style::Diffusers => Some(prefixed(layer)),
            Style::Processor => {
                let name = layer.contains(".to_").then(|| layer.replace(".to_", ".processor.to_"))?;
                Some(prefixed(name.strip_suffix("to_out.0").map_or(&*name, |_| &name[..name.len() - 2])))
            }
            Style::ComfyUiOwn => self.comfyui.map(|prefix| format!("{prefix}.{layer}")),
            Style::Peft => Some(format!("{PEFT}{layer}")),
            Style::Bare => Some(layer.to_owned()),
        }
        .map(Key::plain)
    }
}
