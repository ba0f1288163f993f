//! The names of the autoencoder's parameters in files. diffusers' files have the model's own names; `ComfyUI`'s files
//! have the names of Wan's code. In both, most convolution kernels have a time dimension, which the model's kernels
//! lack.

use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFiles;

use super::QwenVaeConfig;
use crate::pretrained::{CheckpointNaming, Form, Key, Layout, Naming};

/// The layout of the autoencoder's parameters. `original` tells how a checkpoint in one file names them; it is None for
/// a folder in diffusers' layout.
pub(super) fn layout(original: Option<CheckpointNaming>, config: &QwenVaeConfig) -> Box<dyn Layout> {
    // A level of the encoder has `num_res_blocks` residual blocks. A level of the decoder has one more, and an
    // upsampling layer.
    let layers_per_level = config.num_res_blocks + 2;
    match original {
        Some(CheckpointNaming { prefix, naming }) => {
            Box::new(AutoencoderLayout { prefix, has_wan_names: naming == Naming::Original, layers_per_level })
        }
        None => Box::new(AutoencoderLayout { prefix: "", has_wan_names: false, layers_per_level }),
    }
}

struct AutoencoderLayout {
    prefix: &'static str,
    /// Whether names are those of Wan's code.
    has_wan_names: bool,
    /// Number of layers of each level of the decoder but the last: residual blocks and the upsampling layer. The last
    /// level has no upsampling layer.
    layers_per_level: usize,
}

impl Layout for AutoencoderLayout {
    fn prefix(&self) -> &str {
        self.prefix
    }

    fn keys(&self, name: &str) -> Vec<Key> {
        let key = if self.has_wan_names { wan_name(name, self.layers_per_level) } else { Some(name.to_owned()) };
        key.map(|key| Key { key, form: form(name) }).into_iter().collect()
    }

    /// Whether readers of a file skip the tensor under `key`: it belongs to a layer that changes the number of frames,
    /// which the model lacks.
    fn ignores(&self, key: &str) -> bool {
        key.contains(".time_conv.")
    }
}

/// The form in which files store a parameter. `LastFrame` is the kernel of a convolution in time and space, of which
/// the model's kernel is the last of `frames` slices: the other slices multiply the frames before a single image, which
/// are zeros. `Pointwise` is the kernel of a 1×1 convolution, a matrix in the model. `Vector` has `rank` dimensions in
/// files, all but one of size 1.
fn form(name: &str) -> Form {
    let contains = |part: &str| name.contains(part);
    match name.rsplit_once('.') {
        // In files, the scale of the attention's norm is (C, 1, 1). The scales of other norms have a time dimension
        // too: (C, 1, 1, 1).
        Some((_, "gamma")) => Form::Vector { rank: if contains(".attentions.") { 3 } else { 4 } },
        Some((_, "weight")) if contains(".attentions.") => Form::Pointwise,
        Some((_, "weight")) if contains(".resample.") => Form::Plain,
        Some((_, "weight")) if contains("quant_conv") || contains("conv_shortcut") => Form::LastFrame { frames: 1 },
        Some((_, "weight")) => Form::LastFrame { frames: 3 },
        _ => Form::Plain,
    }
}

/// How the names of layers outside of residual blocks begin, after `encoder.` or `decoder.`: in the model, and in Wan's
/// code.
const OUTSIDE: [(&str, &str); 4] = [
    ("conv_in.", "conv1."),
    ("norm_out.", "head.0."),
    ("conv_out.", "head.2."),
    ("mid_block.attentions.0.", "middle.1."),
];
/// How the names of a residual block's layers begin, after the block's name: in the model, and in Wan's code.
const RESIDUAL: [(&str, &str); 5] = [
    ("norm1.", "residual.0."),
    ("conv1.", "residual.2."),
    ("norm2.", "residual.3."),
    ("conv2.", "residual.6."),
    ("conv_shortcut.", "shortcut."),
];

/// Replaces the beginning of a name by the first of `renamings` that fits; None if none fits.
fn replaced(name: &str, renamings: &[(&str, &str)]) -> Option<String> {
    renamings.iter().find_map(|(ours, theirs)| Some(format!("{theirs}{}", name.strip_prefix(ours)?)))
}

/// Wan's name of a parameter.
fn wan_name(name: &str, layers_per_level: usize) -> Option<String> {
    let (coder, rest) = name.split_once('.')?;
    match coder {
        "quant_conv" => return Some(format!("conv1.{rest}")),
        "post_quant_conv" => return Some(format!("conv2.{rest}")),
        _ => {}
    }
    // Inside of resampling layers, both codes have the same names.
    let in_block = |rest: &str| replaced(rest, &RESIDUAL).unwrap_or_else(|| rest.to_owned());
    let key = if let Some(rest) = rest.strip_prefix("mid_block.resnets.") {
        let (index, rest) = rest.split_once('.')?;
        // In Wan's code, the attention between the two blocks is `middle.1`.
        format!("middle.{}.{}", 2 * index.parse::<usize>().ok()?, in_block(rest))
    } else if let Some(rest) = rest.strip_prefix("down_blocks.") {
        let (index, rest) = rest.split_once('.')?;
        // Both codes number the layers of all levels of the encoder together.
        format!("downsamples.{index}.{}", in_block(rest))
    } else if let Some(rest) = rest.strip_prefix("up_blocks.") {
        let (level, rest) = rest.split_once('.')?;
        // In the decoder, only Wan's code numbers the layers of all levels together.
        let first_layer = level.parse::<usize>().ok()? * layers_per_level;
        if let Some(rest) = rest.strip_prefix("upsamplers.0.") {
            format!("upsamples.{}.{rest}", first_layer + layers_per_level - 1)
        } else {
            let (index, rest) = rest.strip_prefix("resnets.")?.split_once('.')?;
            format!("upsamples.{}.{}", first_layer + index.parse::<usize>().ok()?, in_block(rest))
        }
    } else {
        replaced(rest, &OUTSIDE)?
    };
    Some(format!("{coder}.{key}"))
}

/// The configuration of the autoencoder in a file: the first of `known` with the `base_dim` and `z_dim` of the file.
///
/// # Errors
/// [`Error::Config`] if no configuration in `known` has them, or a tensor that shows them is missing.
pub(super) fn deduce(files: &WeightFiles, prefix: &str, known: Vec<QwenVaeConfig>) -> Result<QwenVaeConfig> {
    let size = |key: &str| {
        let size = files.shape(&format!("{prefix}{key}")).and_then(|dims| dims.first().copied());
        size.ok_or_else(|| {
            Error::Config(format!(
                "{}: {prefix}{key}, which shows a size of the autoencoder, is missing; give config=, the path of the \
                 autoencoder's config.json",
                files.path().display()
            ))
        })
    };
    // These are Wan's names of the encoder's first convolution and of `post_quant_conv`.
    let (base_dim, z_dim) = (size("encoder.conv1.weight")?, size("conv2.weight")?);
    let fits = |config: &QwenVaeConfig| (config.base_dim, config.z_dim) == (base_dim, z_dim);
    known.into_iter().find(fits).ok_or_else(|| {
        Error::Config(format!(
            "{}: the autoencoder has {z_dim} channels in its latents and {base_dim} after its first convolution, \
             unlike Qwen-Image's; give config=, the path of the autoencoder's config.json",
            files.path().display()
        ))
    })
}
