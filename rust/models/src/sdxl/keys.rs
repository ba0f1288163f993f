//! The names of the parameters of SDXL's UNet in files: diffusers' names, which are also the model's own, and the names
//! in original checkpoints (Stability AI's).

use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFiles;

use super::UNetConfig;
use crate::pretrained::{CheckpointNaming, Key, Layout, Naming, OwnNames};

/// The keys of the UNet's parameters: original names after a prefix if `checkpoint` has original naming, otherwise
/// diffusers' names. `checkpoint` is None for a model in a folder.
pub(super) fn layout(checkpoint: Option<CheckpointNaming>, config: &UNetConfig) -> Box<dyn Layout> {
    match checkpoint {
        Some(CheckpointNaming { prefix, naming: Naming::Original }) => {
            Box::new(OriginalUNet { prefix, config: config.clone() })
        }
        _ => Box::new(OwnNames),
    }
}

struct OriginalUNet {
    prefix: &'static str,
    config: UNetConfig,
}

impl Layout for OriginalUNet {
    fn prefix(&self) -> &str {
        self.prefix
    }

    fn keys(&self, name: &str) -> Vec<Key> {
        original_name(name, &self.config).map(Key::plain).into_iter().collect()
    }
}

/// The name of a parameter or layer in original checkpoints, without the checkpoint's prefix. For example,
/// `down_blocks.1.resnets.0.conv1` becomes `input_blocks.4.0.in_layers.2`. None for a name that no UNet has.
pub fn original_name(name: &str, config: &UNetConfig) -> Option<String> {
    let (block, rest) = name.split_once('.')?;
    // The entries of a level in `input_blocks`: one for each residual block, then one for the downsampling.
    // `output_blocks` has as many entries of a level: one for each residual block, because an up block has one residual
    // block more than a down block. The last of these entries also has the upsampling.
    let entries_per_level = config.layers_per_block + 1;
    match block {
        "time_embedding" => Some(format!("time_embed.{}", mlp(rest)?)),
        "add_embedding" => Some(format!("label_emb.0.{}", mlp(rest)?)),
        "conv_in" => Some(format!("input_blocks.0.0.{rest}")),
        "conv_norm_out" => Some(format!("out.0.{rest}")),
        "conv_out" => Some(format!("out.2.{rest}")),
        "mid_block" => {
            let (kind, index, rest) = split_index(rest)?;
            match kind {
                // The attention between the two residual blocks is `middle_block.1`.
                "resnets" => Some(format!("middle_block.{}.{}", 2 * index, resnet(rest))),
                "attentions" => Some(format!("middle_block.1.{rest}")),
                _ => None,
            }
        }
        "down_blocks" => {
            let (level, rest) = split_number(rest)?;
            let (kind, index, rest) = split_index(rest)?;
            // Entry 0 is `conv_in`.
            let first = 1 + level * entries_per_level;
            match kind {
                "resnets" => Some(format!("input_blocks.{}.0.{}", first + index, resnet(rest))),
                "attentions" => Some(format!("input_blocks.{}.1.{rest}", first + index)),
                "downsamplers" => {
                    Some(format!("input_blocks.{}.0.op{}", first + entries_per_level - 1, rest.strip_prefix("conv")?))
                }
                _ => None,
            }
        }
        "up_blocks" => {
            let (up_block, rest) = split_number(rest)?;
            let (kind, index, rest) = split_index(rest)?;
            let first = up_block * entries_per_level;
            match kind {
                "resnets" => Some(format!("output_blocks.{}.0.{}", first + index, resnet(rest))),
                "attentions" => Some(format!("output_blocks.{}.1.{rest}", first + index)),
                "upsamplers" => {
                    // In an entry, the upsampling follows the residual block (0) and, if there is one, the attention
                    // (1).
                    let index = 1 + usize::from(*config.up_attention.get(up_block)?);
                    Some(format!("output_blocks.{}.{index}.{rest}", first + entries_per_level - 1))
                }
                _ => None,
            }
        }
        _ => None,
    }
}

/// Splits `3.rest` into 3 and `rest`.
fn split_number(text: &str) -> Option<(usize, &str)> {
    let (number, rest) = text.split_once('.')?;
    Some((number.parse().ok()?, rest))
}

/// Splits `kind.3.rest` into `kind`, 3 and `rest`. For `kind.3`, the rest is empty.
fn split_index(text: &str) -> Option<(&str, usize, &str)> {
    let (kind, rest) = text.split_once('.')?;
    let (index, rest) = rest.split_once('.').unwrap_or((rest, ""));
    Some((kind, index.parse().ok()?, rest))
}

/// The original name of one of an embedding's two linear layers, or of a parameter of it.
fn mlp(text: &str) -> Option<String> {
    let places = [("linear_1", 0), ("linear_2", 2)];
    places.iter().find_map(|(name, index)| Some(format!("{index}{}", text.strip_prefix(name)?)))
}

/// The original name of a parameter or layer of a residual block. Other names stay unchanged.
fn resnet(text: &str) -> String {
    const PARTS: [(&str, &str); 6] = [
        ("norm1", "in_layers.0"),
        ("conv1", "in_layers.2"),
        ("time_emb_proj", "emb_layers.1"),
        ("norm2", "out_layers.0"),
        ("conv2", "out_layers.3"),
        ("conv_shortcut", "skip_connection"),
    ];
    PARTS
        .iter()
        .find_map(|(ours, theirs)| Some(format!("{theirs}{}", text.strip_prefix(ours)?)))
        .unwrap_or_else(|| text.to_owned())
}

/// The first level's number of channels in the published models: the base model and the refiner.
const PUBLISHED_WIDTHS: [usize; 2] = [320, 384];
/// The number of channels of each attention head in the published models.
const PUBLISHED_HEAD_DIM: usize = 64;

/// The configuration of the UNet in an original checkpoint, from the shapes of its tensors. Fields that shapes do not
/// determine, such as the number of heads, come from the first of the `known` configurations that have the deduced
/// sizes, or else from the published models.
///
/// # Errors
/// [`Error::Config`] if a size or the number of heads cannot be determined, or if the checkpoint belongs to Stable
/// Diffusion 1 or 2.
pub(super) fn deduce(files: &WeightFiles, prefix: &str, known: Vec<UNetConfig>) -> Result<UNetConfig> {
    let shape = |key: String| files.shape(&format!("{prefix}{key}"));
    let undetermined = |what: &str| {
        Error::Config(format!(
            "{}: the shapes of the checkpoint do not determine {what}; give config=, the path of the UNet's \
             config.json",
            files.path().display()
        ))
    };
    let size = |key: &str, axis: usize| {
        shape(key.to_owned())
            .and_then(|dims| dims.get(axis).copied())
            .ok_or_else(|| undetermined(&format!("the size of {key}")))
    };
    if shape("input_blocks.0.0.weight".to_owned()).is_some() && shape("label_emb.0.0.weight".to_owned()).is_none() {
        return Err(Error::Config(format!(
            "{}: the UNet has no {prefix}label_emb, which embeds image sizes in SDXL, so it belongs to Stable \
             Diffusion 1 or 2, which are not supported",
            files.path().display()
        )));
    }
    // The number of transformer blocks in an entry of `input_blocks` or `output_blocks`, or in `middle_block`.
    let depth = |block: &str| {
        (0..).take_while(|i| shape(format!("{block}.1.transformer_blocks.{i}.norm1.weight")).is_some()).count()
    };
    // For each level: number of channels, of transformer blocks after a residual block, and of residual blocks. The
    // next level begins after a downsampling.
    let (mut channels, mut depths, mut layers) = (vec![0], vec![0], vec![0]);
    for i in 1.. {
        let level = channels.len() - 1;
        if let Some(dims) = shape(format!("input_blocks.{i}.0.in_layers.2.weight")) {
            channels[level] = dims[0];
            depths[level] = depth(&format!("input_blocks.{i}"));
            layers[level] += 1;
        } else if shape(format!("input_blocks.{i}.0.op.weight")).is_some() {
            channels.push(0);
            depths.push(0);
            layers.push(0);
        } else {
            break;
        }
    }
    let (levels, entries_per_level) = (channels.len(), layers[0] + 1);
    if layers.iter().any(|&count| count != layers[0] || count == 0) || depth("middle_block") != depths[levels - 1] {
        return Err(undetermined("the UNet's levels, because its blocks are not those of an SDXL model"));
    }
    // The key of the first attention in `input_blocks`. All attentions read the same features of the text.
    let attention = (1..=levels * entries_per_level)
        .map(|i| format!("input_blocks.{i}.1"))
        .find(|block| shape(format!("{block}.proj_in.weight")).is_some())
        .ok_or_else(|| undetermined("the number of features of the text, because no level attends to the text"))?;
    let projection = size("label_emb.0.0.weight", 1)?;
    // The UNet's shapes determine how many features the pooled text and the sinusoids of `time_ids` have together, but
    // not how many each has. The projection of the text encoder in the same file shows how many the pooled text has.
    let pooled = files.shape("conditioner.embedders.1.model.text_projection").and_then(|dims| dims.get(1).copied());
    let deduced = UNetConfig {
        in_channels: size("input_blocks.0.0.weight", 1)?,
        out_channels: size("out.2.weight", 0)?,
        layers_per_block: layers[0],
        down_attention: depths.iter().map(|&depth| depth > 0).collect(),
        up_attention: (0..levels).map(|i| depth(&format!("output_blocks.{}", i * entries_per_level)) > 0).collect(),
        // A level without attention has depth 0 in the file, but the configuration has at least 1 for each level.
        transformer_layers_per_block: depths.iter().map(|&depth| depth.max(1)).collect(),
        num_attention_heads: channels.iter().map(|&width| (width / PUBLISHED_HEAD_DIM).max(1)).collect(),
        cross_attention_dim: vec![size(&format!("{attention}.transformer_blocks.0.attn2.to_k.weight"), 1)?; levels],
        use_linear_projection: shape(format!("{attention}.proj_in.weight")).is_some_and(|dims| dims.len() == 2),
        addition_time_embed_dim: match pooled {
            Some(pooled) if pooled < projection => (projection - pooled) / super::config::TIME_IDS,
            _ => UNetConfig::default().addition_time_embed_dim,
        },
        projection_class_embeddings_input_dim: projection,
        block_out_channels: channels,
        ..UNetConfig::default()
    };
    match known.into_iter().find(|known| same_sizes(known, &deduced)) {
        Some(known) => Ok(known),
        None if PUBLISHED_WIDTHS.contains(&deduced.block_out_channels[0]) => Ok(deduced),
        None => Err(undetermined("the number of attention heads")),
    }
}

/// Whether `candidate` has the same values as `deduced` in all fields that shapes determine.
fn same_sizes(candidate: &UNetConfig, deduced: &UNetConfig) -> bool {
    // Shapes determine the depth only of levels with attention.
    let depths = |config: &UNetConfig| {
        let levels = config.transformer_layers_per_block.iter().zip(&deduced.down_attention);
        levels.filter(|(_, attends)| **attends).map(|(&depth, _)| depth).collect::<Vec<_>>()
    };
    depths(candidate) == depths(deduced)
        && UNetConfig {
            num_attention_heads: candidate.num_attention_heads.clone(),
            transformer_layers_per_block: candidate.transformer_layers_per_block.clone(),
            sample_size: candidate.sample_size,
            norm_num_groups: candidate.norm_num_groups,
            norm_eps: candidate.norm_eps,
            addition_time_embed_dim: candidate.addition_time_embed_dim,
            ..deduced.clone()
        } == *candidate
}
