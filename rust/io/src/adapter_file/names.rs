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

/// A function from a layer's name to the name of its matrix in the original checkpoint (the file of the model's
/// authors), and to the rows of the matrix that belong to the layer. `None` for a layer without a matrix there.
pub type OriginalNames = Arc<dyn Fn(&str) -> Option<Key> + Send + Sync>;

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
    /// True for the part that denoises images, false for a text encoder.
    pub is_denoiser: bool,
    /// The matrix and rows of each layer in original checkpoints.
    pub original: OriginalNames,
    /// The tools that load adapters of the part.
    pub readers: &'static [Reader],
    /// The prefixes that keys of adapter files have for all known parts, including this part.
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

/// What peft puts before the name of a layer.
const PEFT: &str = "base_model.model.";
/// The prefix of the keys of a denoiser in LyCORIS' style.
const LYCORIS: &str = "lycoris_";

impl PartNames {
    /// The format that the most tools load for this part.
    pub fn default_format(&self) -> AdapterFormat {
        match self.base {
            _ if self.folds() => AdapterFormat::Diffusers,
            Some(_) => AdapterFormat::Kohya,
            None => AdapterFormat::Peft,
        }
    }

    /// Whether the factors in a file in diffusers' format are multiplied by the scale. This is so if the part is a
    /// denoiser and `ComfyUI` reads diffusers' names of the layers that are usually adapted. (diffusers takes the scale
    /// from the metadata, `ComfyUI` from tensors. Both compute the same if the scale is 1.)
    pub(super) fn folds(&self) -> bool {
        self.is_denoiser && readers::knows_usual(self.readers, Tool::ComfyUi, Style::Diffusers)
    }

    /// The prefix of a known part, or `LyCORIS`' prefix, that `key` begins with. `None` if `key` begins with no known
    /// prefix.
    pub(super) fn prefix_of<'a>(&'a self, key: &str) -> Option<&'a str> {
        self.prefixes.iter().map(String::as_str).chain([LYCORIS]).find(|prefix| key.starts_with(prefix))
    }

    /// Whether keys that begin with `prefix` belong to this part.
    pub(super) fn owns_prefix(&self, prefix: &str) -> bool {
        // Whether it is the part's prefix in LyCORIS' or kohya's style, which have `_` in place of dots.
        // kohya's trainers number text encoders only if there are several, so `lora_te` may stand for `lora_te1`.
        let is_flat = prefix == LYCORIS && self.is_denoiser
            || prefix
                .strip_suffix('_')
                .is_some_and(|name| name == self.kohya || self.kohya.strip_suffix('1') == Some(name));
        let before_dot = prefix.strip_suffix('.').unwrap_or_default();
        is_flat
            || before_dot == self.diffusers && !before_dot.is_empty()
            // `ComfyUI`'s prefix is its name and a dot, which the first test accepts. The second test would also accept
            // a prefix that is only a beginning of the name.
            || self.comfyui.is_some_and(|name| prefix.starts_with(name) || name.starts_with(prefix))
    }

    /// The name in the style `style` of the module that holds a layer. `None` if the style has no name for the layer.
    pub fn key(&self, layer: &str, style: Style) -> Option<String> {
        self.place(layer, style).map(|place| place.key)
    }

    /// The module that holds a layer: the module's name in the style `style`, and the rows of the module that belong to
    /// the layer. `None` if the style has no name for the layer.
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
                // These names have `to_out` in place of `to_out.0`: cut off the two characters `.0`.
                Some(prefixed(name.strip_suffix("to_out.0").map_or(&*name, |_| &name[..name.len() - 2])))
            }
            // `ComfyUI`'s prefix before diffusers' name, not before the original name as in `Style::ComfyUi`.
            Style::ComfyUiOwn => self.comfyui.map(|prefix| format!("{prefix}.{layer}")),
            Style::Peft => Some(format!("{PEFT}{layer}")),
            Style::Bare => Some(layer.to_owned()),
        }
        .map(Key::plain)
    }
}
