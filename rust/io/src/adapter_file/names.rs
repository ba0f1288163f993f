//! [`PartNames`]: what tools call a part of a pipeline and its layers.

use std::sync::Arc;

use super::AdapterFormat;

/// The base model that an adapter is for, as metadata names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseModel {
    /// kohya's `ss_base_model_version`: `sdxl_base_v1-0`.
    pub version: &'static str,
    /// `modelspec.architecture` without `/lora`: `stable-diffusion-xl-v1-base`.
    pub architecture: &'static str,
    /// Height and width in pixels of the pictures that it was made for: 1024 is `modelspec.resolution` `1024x1024`.
    pub resolution: usize,
}

/// The name of a layer in the original checkpoint, if it has one.
pub type Original = Arc<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// What tools call one part of a pipeline and its layers.
#[derive(Clone)]
pub struct PartNames {
    /// diffusers' and peft's name of the part: `unet`, `text_encoder`. Empty for a model that belongs to no pipeline.
    pub diffusers: &'static str,
    /// kohya's: `lora_unet`, `lora_te1`.
    pub kohya: &'static str,
    /// `ComfyUI`'s: `diffusion_model`, `text_encoders.clip_l.transformer`. None if it knows no such model.
    pub comfyui: Option<&'static str>,
    /// The base model, if other tools know it.
    pub base: Option<BaseModel>,
    /// Whether this is the part that makes pictures, not one that reads text.
    pub is_denoiser: bool,
    /// The layers' names in original checkpoints.
    pub original: Original,
    /// What the keys of every known part begin with, this one among them.
    pub prefixes: Arc<[String]>,
}

impl Default for PartNames {
    /// A model that only this library knows.
    fn default() -> Self {
        Self {
            diffusers: "",
            kohya: "lora_unet",
            comfyui: None,
            base: None,
            is_denoiser: true,
            original: Arc::new(|_| None),
            prefixes: Arc::new([]),
        }
    }
}

/// A way to write the name of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// kohya's prefix and the original name with underscores.
    KohyaOriginal,
    /// kohya's prefix and diffusers' name with underscores.
    Kohya,
    /// `lycoris_` and diffusers' name with underscores (`SimpleTuner`).
    Lycoris,
    /// diffusers' prefix and name.
    Diffusers,
    /// diffusers' name with `.processor` before the projections of attention, as its first releases wrote it.
    Processor,
    /// `ComfyUI`'s prefix and the original name.
    ComfyUi,
    /// `base_model.model.` and diffusers' name.
    Peft,
    /// diffusers' name alone.
    Bare,
}

const PEFT: &str = "base_model.model.";
/// What the keys of a denoiser begin with in LyCORIS' style.
const LYCORIS: &str = "lycoris_";

impl PartNames {
    /// The format that most tools load.
    pub const fn default_format(&self) -> AdapterFormat {
        if self.base.is_some() { AdapterFormat::Kohya } else { AdapterFormat::Peft }
    }

    /// What `key` begins with, if that says which part it is of.
    pub(super) fn prefix_of<'a>(&'a self, key: &str) -> Option<&'a str> {
        self.prefixes.iter().map(String::as_str).chain([LYCORIS]).find(|prefix| key.starts_with(prefix))
    }

    /// Whether `prefix`, with which a key begins, is this part's.
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
        let prefixed = |name: &str| match self.diffusers {
            "" => name.to_owned(),
            part => format!("{part}.{name}"),
        };
        match style {
            Style::KohyaOriginal => Some(format!("{}_{}", self.kohya, (self.original)(layer)?.replace('.', "_"))),
            Style::Kohya => Some(format!("{}_{}", self.kohya, layer.replace('.', "_"))),
            Style::Lycoris => self.is_denoiser.then(|| format!("{LYCORIS}{}", layer.replace('.', "_"))),
            Style::Diffusers => Some(prefixed(layer)),
            Style::Processor => {
                let name = layer.contains(".to_").then(|| layer.replace(".to_", ".processor.to_"))?;
                Some(prefixed(name.strip_suffix("to_out.0").map_or(&*name, |_| &name[..name.len() - 2])))
            }
            Style::ComfyUi => Some(format!("{}.{}", self.comfyui?, (self.original)(layer)?)),
            Style::Peft => Some(format!("{PEFT}{layer}")),
            Style::Bare => Some(layer.to_owned()),
        }
    }

    /// Every style in which files may name a layer, the likeliest first.
    pub(super) const STYLES: [Style; 8] = [
        Style::KohyaOriginal,
        Style::Kohya,
        Style::Diffusers,
        Style::ComfyUi,
        Style::Peft,
        Style::Lycoris,
        Style::Processor,
        Style::Bare,
    ];
}
