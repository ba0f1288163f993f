//! The names of the parameters of `AutoencoderKL`, the image autoencoder, in files: diffusers' names (also the names in
//! this library), diffusers' older names of the attention's layers, and the names in original checkpoints.

use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFiles;

use super::VaeConfig;
use super::config::DEFAULT_NORM_EPS;
use crate::pretrained::{CheckpointNaming, Form, Key, Layout, Naming};

/// The layout of the autoencoder's parameters. `checkpoint` tells how a checkpoint in one file names them; it is None
/// for a folder in diffusers' layout. With [`Naming::Original`], the keys are the original names after the prefix; in
/// all other cases they are diffusers' names. `files` is the original checkpoint, or `None` if it is still to be
/// written.
pub(super) fn layout(
    checkpoint: Option<CheckpointNaming>,
    config: &VaeConfig,
    files: Option<&WeightFiles>,
) -> Box<dyn Layout> {
    let Some(CheckpointNaming { prefix, naming: Naming::Original }) = checkpoint else { return Box::new(Diffusers) };
    let has_level = |files: &WeightFiles, level: &usize| {
        files.shape(&format!("{prefix}decoder.up.{level}.block.0.conv1.weight")).is_some()
    };
    // The index in the file of the level that the decoder runs first. Usually this is the number of levels minus 1, but
    // diffusers' converter writes index 3 even if there are fewer than 4 levels. So if the file exists, look for the
    // largest index in it.
    let largest_level = files.and_then(|files| (0..LEVEL_LIMIT).rev().find(|level| has_level(files, level)));
    let largest_level = largest_level.unwrap_or(config.block_out_channels.len() - 1);
    Box::new(OriginalAutoencoder { prefix, largest_level, is_normed: config.latent_norm_eps.is_some() })
}

/// Levels are looked for at the indices below this number. No autoencoder has as many levels.
const LEVEL_LIMIT: usize = 16;

/// The key of a parameter of the attention, in which only the layer is renamed; None if `name` is another parameter.
/// `names` pairs this library's names of layers with a file's names. The projections are linear layers in this library,
/// but 1×1 convolutions in files that use other names than this library.
fn attention(name: &str, names: [(&str, &str); 5]) -> Option<Key> {
    // `coder` is `encoder.` or `decoder.`.
    let (coder, rest) = name.split_once("mid_block.attentions.0.")?;
    names.iter().find_map(|(ours, theirs)| {
        let parameter = rest.strip_prefix(ours)?.strip_prefix('.')?;
        let form = if parameter == "weight" && *ours != "group_norm" { Form::Pointwise } else { Form::Plain };
        Some(Key { key: format!("{coder}mid_block.attentions.0.{theirs}.{parameter}"), form })
    })
}

/// The layout of diffusers' files, which have the current or the older names.
struct Diffusers;

impl Layout for Diffusers {
    fn keys(&self, name: &str) -> Vec<Key> {
        const OLDER: [(&str, &str); 5] = [
            ("group_norm", "group_norm"),
            ("to_q", "query"),
            ("to_k", "key"),
            ("to_v", "value"),
            ("to_out.0", "proj_attn"),
        ];
        std::iter::once(Key::plain(name)).chain(attention(name, OLDER)).collect()
    }

    fn ignores(&self, key: &str) -> bool {
        key == BATCH_COUNT
    }
}

/// The layout of original checkpoints.
struct OriginalAutoencoder {
    prefix: &'static str,
    /// The file's index of the level that the decoder runs first, the largest index. It falls by 1 from each level to
    /// the next.
    largest_level: usize,
    /// Whether the file has the means and variances of the latents, as FLUX.2's files have.
    is_normed: bool,
}

/// The key of the number of batches from which the means and variances of the latents were computed. Readers skip this
/// tensor.
const BATCH_COUNT: &str = "bn.num_batches_tracked";
/// In original files of FLUX.2, the convolutions next to the latents are part of the encoder and the decoder. Each
/// entry has a convolution's name in this library, and the prefix that precedes the same name in these files.
const QUANT: [(&str, &str); 2] = [("quant_conv.", "encoder."), ("post_quant_conv.", "decoder.")];

impl Layout for OriginalAutoencoder {
    fn prefix(&self) -> &str {
        self.prefix
    }

    fn keys(&self, name: &str) -> Vec<Key> {
        // Readers try FLUX.2's key first, then the usual key.
        let quant = QUANT.iter().find(|(layer, _)| self.is_normed && name.starts_with(layer));
        let quant = quant.map(|(_, coder)| Key::plain(format!("{coder}{name}")));
        quant.into_iter().chain(self.usual_key(name)).collect()
    }

    fn ignores(&self, key: &str) -> bool {
        key == BATCH_COUNT
    }
}

impl OriginalAutoencoder {
    /// The key of the parameter `name` without FLUX.2's exception ([`QUANT`]); None if the autoencoder has no such
    /// parameter.
    fn usual_key(&self, name: &str) -> Option<Key> {
        const ATTENTION: [(&str, &str); 5] =
            [("group_norm", "norm"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out")];
        if let Some(found) = attention(name, ATTENTION) {
            return Some(Key { key: found.key.replace("mid_block.attentions.0", "mid.attn_1"), ..found });
        }
        let Some((coder, rest)) = name.split_once('.').filter(|(coder, _)| matches!(*coder, "encoder" | "decoder"))
        else {
            return Some(Key::plain(name));
        };
        let (block, in_block) = rest.split_once('.')?;
        let key = match block {
            "conv_norm_out" => format!("norm_out.{in_block}"),
            "mid_block" => {
                let (index, rest) = in_block.strip_prefix("resnets.")?.split_once('.')?;
                format!("mid.block_{}.{rest}", index.parse::<usize>().ok()? + 1)
            }
            // The encoder's levels have the same index in this library and in the file.
            "down_blocks" => level(in_block, "down", Some)?,
            // In original files, the level with the largest feature map, which the decoder runs last, has the lowest
            // index.
            "up_blocks" => level(in_block, "up", |index| self.largest_level.checked_sub(index))?,
            _ => rest.to_owned(),
        };
        Some(Key::plain(format!("{coder}.{}", key.replace("conv_shortcut", "nin_shortcut"))))
    }
}

/// The original name of a parameter in a level: `1.resnets.0.conv1.weight` becomes `down.1.block.0.conv1.weight`.
/// `direction` is `down` or `up`; `file_index` maps this library's index of a level to the file's. None if no level has
/// such a parameter.
fn level(name: &str, direction: &str, file_index: impl Fn(usize) -> Option<usize>) -> Option<String> {
    let (index, rest) = name.split_once('.')?;
    let index = file_index(index.parse().ok()?)?;
    if let Some(rest) = rest.strip_prefix("resnets.") {
        return Some(format!("{direction}.{index}.block.{rest}"));
    }
    let rest = rest.strip_prefix(&format!("{direction}samplers.0."))?;
    Some(format!("{direction}.{index}.{direction}sample.{rest}"))
}

/// The configuration of the autoencoder in an original checkpoint, from the shapes of its tensors. Fields that shapes
/// do not determine, such as the scale of the latents, come from the first of the `known` configurations that have
/// the deduced sizes. Without such a configuration, they come from SDXL's autoencoder; only the scaling factor is 1 for
/// a file with the means and variances of the latents.
///
/// # Errors
/// [`Error::Config`] if a size cannot be determined.
pub(super) fn deduce(files: &WeightFiles, prefix: &str, known: Vec<VaeConfig>) -> Result<VaeConfig> {
    let shape = |key: &str| files.shape(&format!("{prefix}{key}"));
    let size = |key: &str, dim: usize| {
        shape(key).and_then(|dims| dims.get(dim).copied()).ok_or_else(|| {
            Error::Config(format!(
                "{}: the shapes of the checkpoint do not determine the size of {key}; give config=, the path of the \
                 autoencoder's config.json",
                files.path().display()
            ))
        })
    };
    let block = |level: usize, i: usize| format!("encoder.down.{level}.block.{i}.conv1.weight");
    let deduced = VaeConfig {
        in_channels: size("encoder.conv_in.weight", 1)?,
        out_channels: size("decoder.conv_out.weight", 0)?,
        block_out_channels: (0..).map_while(|level| shape(&block(level, 0))?.first().copied()).collect(),
        layers_per_block: (0..).take_while(|&i| shape(&block(0, i)).is_some()).count(),
        latent_channels: size("decoder.conv_in.weight", 1)?,
        use_quant_conv: shape("quant_conv.weight").or_else(|| shape("encoder.quant_conv.weight")).is_some(),
        use_post_quant_conv: shape("post_quant_conv.weight")
            .or_else(|| shape("decoder.post_quant_conv.weight"))
            .is_some(),
        latent_norm_eps: shape("bn.running_mean").map(|_| DEFAULT_NORM_EPS),
        mid_block_add_attention: shape("encoder.mid.attn_1.q.weight").is_some(),
        ..VaeConfig::default()
    };
    if deduced.block_out_channels.is_empty() {
        // Returns the error for the missing size.
        size(&block(0, 0), 0)?;
    }
    // Whether a candidate has the deduced value in every field that shapes determine.
    let agrees = |candidate: &VaeConfig| {
        VaeConfig {
            norm_num_groups: candidate.norm_num_groups,
            sample_size: candidate.sample_size,
            scaling_factor: candidate.scaling_factor,
            shift_factor: candidate.shift_factor,
            force_upcast: candidate.force_upcast,
            // Shapes tell whether there is an epsilon, but not its value.
            latent_norm_eps: deduced.latent_norm_eps.and(candidate.latent_norm_eps),
            ..deduced.clone()
        } == *candidate
    };
    let scaling_factor = if deduced.latent_norm_eps.is_some() { 1.0 } else { deduced.scaling_factor };
    Ok(known.into_iter().find(agrees).unwrap_or(VaeConfig { scaling_factor, ..deduced }))
}
