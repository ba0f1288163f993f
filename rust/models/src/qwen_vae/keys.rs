//! The names of the autoencoder's parameters in files. diffusers' files have the model's own names; `ComfyUI`'s files
//! have the names of Wan's code. In both, convolution kernels have a time dimension, which the model's kernels lack.

use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFiles;

use super::QwenVaeConfig;
use crate::pretrained::{Form, Key, Layout, Naming, Original};

/// The layout of a folder, or of a checkpoint in one file.
pub(super) fn layout(original: Option<Original>, config: &QwenVaeConfig) -> Box<dyn Layout> {
    // The decoder's levels have one block more than the encoder's, and an upsampling.
    let per_level = config.num_res_blocks + 2;
    match original {
        Some(Original { prefix, naming }) => Box::new(Files { prefix, wan: naming == Naming::Original, per_level }),
        None => Box::new(Files { prefix: "", wan: false, per_level }),
    }
}

struct Files {
    prefix: &'static str,
    /// Whether names are those of Wan's code.
    wan: bool,
    /// Number of layers of a level of the decoder.
    per_level: usize,
}

impl Layout for Files {
    fn prefix(&self) -> &str {
        self.prefix
    }

    fn places(&self, name: &str) -> Vec<Key> {
        let key = if self.wan { wan(name, self.per_level) } else { Some(name.to_owned()) };
        key.map(|key| Key { key, form: form(name) }).into_iter().collect()
    }

    /// Readers skip layers that change the number of frames.
    fn ignores(&self, key: &str) -> bool {
        key.contains(".time_conv.")
    }
}

/// The form in which files store a parameter.
fn form(name: &str) -> Form {
    let is = |part: &str| name.contains(part);
    match name.rsplit_once('.') {
        // In files, the scale of the attention's norm is (C, 1, 1). The scales of other norms have a time dimension
        // too: (C, 1, 1, 1).
        Some((_, "gamma")) => Form::Vector { rank: if is(".attentions.") { 3 } else { 4 } },
        Some((_, "weight")) if is(".attentions.") => Form::Pointwise,
        Some((_, "weight")) if is(".resample.") => Form::Plain,
        Some((_, "weight")) if is("quant_conv") || is("conv_shortcut") => Form::LastFrame { frames: 1 },
        Some((_, "weight")) => Form::LastFrame { frames: 3 },
        _ => Form::Plain,
    }
}

/// The beginnings of the names of layers outside of residual blocks: the model's and Wan's.
const OUTSIDE: [(&str, &str); 4] = [
    ("conv_in.", "conv1."),
    ("norm_out.", "head.0."),
    ("conv_out.", "head.2."),
    ("mid_block.attentions.0.", "middle.1."),
];
/// The beginnings of the names of a residual block's layers: the model's and Wan's.
const RESIDUAL: [(&str, &str); 5] = [
    ("norm1.", "residual.0."),
    ("conv1.", "residual.2."),
    ("norm2.", "residual.3."),
    ("conv2.", "residual.6."),
    ("conv_shortcut.", "shortcut."),
];

/// Replaces the beginning of a name.
fn replaced(name: &str, renamings: &[(&str, &str)]) -> Option<String> {
    renamings.iter().find_map(|(ours, theirs)| Some(format!("{theirs}{}", name.strip_prefix(ours)?)))
}

/// Wan's name of a parameter.
fn wan(name: &str, per_level: usize) -> Option<String> {
    let (coder, rest) = name.split_once('.')?;
    match coder {
        "quant_conv" => return Some(format!("conv1.{rest}")),
        "post_quant_conv" => return Some(format!("conv2.{rest}")),
        _ => {}
    }
    let inside = |rest: &str| replaced(rest, &RESIDUAL).unwrap_or_else(|| rest.to_owned());
    let key = if let Some(rest) = rest.strip_prefix("mid_block.resnets.") {
        let (index, rest) = rest.split_once('.')?;
        format!("middle.{}.{}", 2 * index.parse::<usize>().ok()?, inside(rest))
    } else if let Some(rest) = rest.strip_prefix("down_blocks.") {
        let (index, rest) = rest.split_once('.')?;
        format!("downsamples.{index}.{}", inside(rest))
    } else if let Some(rest) = rest.strip_prefix("up_blocks.") {
        let (level, rest) = rest.split_once('.')?;
        let first = level.parse::<usize>().ok()? * per_level;
        if let Some(rest) = rest.strip_prefix("upsamplers.0.") {
            format!("upsamples.{}.{rest}", first + per_level - 1)
        } else {
            let (index, rest) = rest.strip_prefix("resnets.")?.split_once('.')?;
            format!("upsamples.{}.{}", first + index.parse::<usize>().ok()?, inside(rest))
        }
    } else {
        replaced(rest, &OUTSIDE)?
    };
    Some(format!("{coder}.{key}"))
}

/// The configuration of the autoencoder in a file: the first of `known` with the `base_dim` and `z_dim` of the file.
///
/// # Errors
/// [`Error::Config`] if no known configuration has them.
pub(super) fn deduce(files: &WeightFiles, prefix: &str, known: Vec<QwenVaeConfig>) -> Result<QwenVaeConfig> {
    let size = |key: &str| files.shape(&format!("{prefix}{key}")).and_then(|dims| dims.first().copied());
    let (base, latent) = (size("encoder.conv1.weight"), size("conv2.weight"));
    let fits = |config: &QwenVaeConfig| (Some(config.base_dim), Some(config.z_dim)) == (base, latent);
    known.into_iter().find(fits).ok_or_else(|| {
        let count = |size: Option<usize>| size.map_or_else(|| "no".to_owned(), |size| size.to_string());
        Error::Config(format!(
            "{}: the autoencoder has {} channels in its latents and {} after its first convolution, unlike \
             Qwen-Image's; give config=, the path of the autoencoder's config.json",
            files.path().display(),
            count(latent),
            count(base)
        ))
    })
}
