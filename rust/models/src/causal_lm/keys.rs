//! The names of a decoder's parameters in files: transformers', with or without the prefix `model.`.

use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFiles;

use super::CausalLMConfig;
use crate::pretrained::{Key, Layout, Original};

pub(super) const EMBEDDING: &str = "model.embed_tokens";
pub(super) const LAYERS: &str = "model.layers";
pub(super) const NORM: &str = "model.norm";
pub(super) const HEAD: &str = "lm_head";
/// The prefix of all names except the head's. Files of a model without its head omit the prefix.
const BODY: &str = "model.";
/// The same prefix in files of Qwen2.5-VL that transformers 5 wrote.
const VL_BODY: &str = "model.language_model.";
/// The keys of the part of Qwen2.5-VL that reads images begin with this, after the prefix.
const VISUAL: &str = "visual.";

/// The name of the parameter that holds the matrix `name`.
pub(super) fn weight_of(name: &str) -> String {
    format!("{name}.weight")
}

/// The names in a folder, or in a file that holds other models too. In such a file, the model's prefix precedes each
/// name.
pub(super) fn layout(config: &CausalLMConfig, original: Option<Original>) -> Box<dyn Layout> {
    Box::new(Transformers {
        prefix: original.map_or("", |original| original.prefix),
        layers: config.num_hidden_layers,
        is_part: config.is_part(),
        has_head: config.has_own_head(),
        is_vl: config.is_vl(),
    })
}

struct Transformers {
    prefix: &'static str,
    layers: usize,
    is_part: bool,
    has_head: bool,
    is_vl: bool,
}

impl Layout for Transformers {
    fn prefix(&self) -> &str {
        self.prefix
    }

    fn places(&self, name: &str) -> Vec<Key> {
        let inside = name.strip_prefix(BODY);
        let nested = inside.filter(|_| self.is_vl).map(|inside| Key::plain(format!("{VL_BODY}{inside}")));
        std::iter::once(name).chain(inside).map(Key::plain).chain(nested).collect()
    }

    /// Readers skip angles, which are computed; the head, if it is tied to the embedding or not used; the final norm
    /// and layers that are not built; and the part of Qwen2.5-VL that reads images.
    fn ignores(&self, key: &str) -> bool {
        let key = key.strip_prefix(BODY).unwrap_or(key);
        let layer = key.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        key.ends_with("rotary_emb.inv_freq")
            || (key.strip_suffix(".weight") == Some(HEAD) && !self.has_head)
            || (self.is_vl && key.starts_with(VISUAL))
            || (self.is_part && (key == "norm.weight" || layer.is_some_and(|layer| layer >= self.layers)))
    }
}

/// The configuration of a decoder in a file: the first of `known` whose sizes fit the tensors. Shapes alone do not
/// determine the number of heads or the angles.
///
/// # Errors
/// [`Error::Config`] if none of `known` fits.
pub(super) fn deduce(files: &WeightFiles, original: Original, known: Vec<CausalLMConfig>) -> Result<CausalLMConfig> {
    let shape = |name: &str| {
        let inside = name.strip_prefix(BODY);
        let nested = inside.map(|inside| format!("{VL_BODY}{inside}"));
        let places = std::iter::once(name).chain(inside).map(str::to_owned).chain(nested);
        places.into_iter().find_map(|name| files.shape(&format!("{}{name}", original.prefix)))
    };
    let layers = (0..).take_while(|i| shape(&format!("{LAYERS}.{i}.mlp.down_proj.weight")).is_some()).count();
    let fits = |config: &CausalLMConfig| {
        shape(&weight_of(EMBEDDING)) == Some(&[config.vocab_size, config.hidden_size])
            && shape(&format!("{LAYERS}.0.mlp.down_proj.weight"))
                == Some(&[config.hidden_size, config.intermediate_size])
            && config.num_hidden_layers == layers
    };
    known.into_iter().find(fits).ok_or_else(|| {
        Error::Config(format!(
            "{}: the shapes of the checkpoint do not determine the number of heads of its language model; give \
             config=, the path of its config.json",
            files.path().display()
        ))
    })
}
