//! The sizes of an SDXL UNet.

use serde_json::{Map, Value, json};
use trainable_candle_core::{Error, Result};

use super::SDXLUNet;
use crate::fields::Fields;
use crate::pretrained::Configuration;

/// The `config.json` of a UNet as diffusers writes it (`UNet2DConditionModel`): the fields in which the UNets of SDXL's
/// models differ. Lists have one entry per level, from the level with the largest feature map to the level
/// with the smallest; only `up_attention` has the reverse order. The default is SDXL's base model.
#[derive(Clone, Debug, PartialEq)]
pub struct UNetConfig {
    /// Number of channels of the latents.
    pub in_channels: usize,
    /// Number of channels of the prediction.
    pub out_channels: usize,
    /// Height and width of the latents that the model was made for.
    pub sample_size: usize,
    /// Number of channels of each level.
    pub block_out_channels: Vec<usize>,
    /// Number of residual blocks of each down block; up blocks have one more.
    pub layers_per_block: usize,
    /// Whether each level's down block has attention (`CrossAttnDownBlock2D`) or not (`DownBlock2D`).
    pub down_attention: Vec<bool>,
    /// Whether each up block has attention (`CrossAttnUpBlock2D`) or not (`UpBlock2D`), in the order in which the up
    /// blocks run: the block with the smallest feature map first.
    pub up_attention: Vec<bool>,
    /// Number of transformer blocks after each residual block of a level with attention.
    pub transformer_layers_per_block: Vec<usize>,
    /// Number of heads of each attention; `config.json` calls this field `attention_head_dim`.
    pub num_attention_heads: Vec<usize>,
    /// Number of features of each text token.
    pub cross_attention_dim: Vec<usize>,
    /// Number of groups of the group norms.
    pub norm_num_groups: usize,
    /// Added to the variance in the norms.
    pub norm_eps: f64,
    /// Whether projections around transformers are linear layers instead of 1×1 convolutions.
    pub use_linear_projection: bool,
    /// Number of sinusoids for each of the six `time_ids`.
    pub addition_time_embed_dim: usize,
    /// Number of features of the pooled text, plus the number of sinusoids for all six `time_ids`.
    pub projection_class_embeddings_input_dim: usize,
}

impl Default for UNetConfig {
    fn default() -> Self {
        Self {
            in_channels: 4,
            out_channels: 4,
            sample_size: 128,
            block_out_channels: vec![320, 640, 1280],
            layers_per_block: 2,
            down_attention: vec![false, true, true],
            up_attention: vec![true, true, false],
            transformer_layers_per_block: vec![1, 2, 10],
            num_attention_heads: vec![5, 10, 20],
            cross_attention_dim: vec![2048; 3],
            norm_num_groups: 32,
            norm_eps: 1e-5,
            use_linear_projection: true,
            addition_time_embed_dim: 256,
            projection_class_embeddings_input_dim: 2816,
        }
    }
}

/// The number of values in `time_ids`: original height and width, top and left of the crop, target height and width.
pub const TIME_IDS: usize = 6;

/// The types of down blocks, and whether they have attention; the type with attention first.
const DOWN: [(&str, bool); 2] = [("CrossAttnDownBlock2D", true), ("DownBlock2D", false)];
/// The types of up blocks, and whether they have attention; the type with attention first.
const UP: [(&str, bool); 2] = [("CrossAttnUpBlock2D", true), ("UpBlock2D", false)];

/// Fields that have the same value in all of SDXL's models.
fn fixed() -> [(&'static str, Value); 24] {
    [
        ("act_fn", json!("silu")),
        ("addition_embed_type", json!("text_time")),
        ("attention_type", json!("default")),
        ("center_input_sample", json!(false)),
        ("class_embeddings_concat", json!(false)),
        ("conv_in_kernel", json!(3)),
        ("conv_out_kernel", json!(3)),
        ("downsample_padding", json!(1)),
        ("dropout", json!(0.0)),
        ("dual_cross_attention", json!(false)),
        ("flip_sin_to_cos", json!(true)),
        ("freq_shift", json!(0)),
        ("mid_block_scale_factor", json!(1)),
        ("mid_block_type", json!("UNetMidBlock2DCrossAttn")),
        ("only_cross_attention", json!(false)),
        ("mid_block_only_cross_attention", json!(false)),
        ("resnet_out_scale_factor", json!(1.0)),
        ("resnet_skip_time_act", json!(false)),
        ("resnet_time_scale_shift", json!("default")),
        ("time_embedding_type", json!("positional")),
        ("reverse_transformer_layers_per_block", Value::Null),
        ("class_embed_type", Value::Null),
        ("encoder_hid_dim_type", Value::Null),
        ("time_embedding_act_fn", Value::Null),
    ]
}

impl Configuration for UNetConfig {
    // The defaults below are diffusers', not those of `UNetConfig::default`. `sample_size` has no default in diffusers;
    // here it is 128, as in SDXL's base model. `block_out_channels` and fields with `None` are required.
    fn from_json(map: &Map<String, Value>) -> Result<Self> {
        let mut fields = Fields::new(SDXLUNet::CLASS_NAME, map);
        fields.only(&fixed())?;
        // upcast_attention requests attention scores in f32: this library always computes them in f32.
        // addition_embed_type_num_heads belongs to other values of addition_embed_type. sample_size is read below; it
        // does not affect the model, so a value of another type counts as missing.
        fields.ignore(&["upcast_attention", "addition_embed_type_num_heads", "sample_size"]);
        // `only` accepts a missing or null field, but without a value `addition_embed_type` means no additional
        // embedding.
        if fields.text("addition_embed_type").is_none() {
            return Err(fields.wrong("addition_embed_type", "\"text_time\", which SDXL's models have"));
        }
        let block_out_channels = fields.list("block_out_channels")?;
        let levels = block_out_channels.len();
        let layers = fields.sizes("layers_per_block", levels, Some(2))?;
        if layers.iter().any(|&count| count != layers[0]) {
            return Err(fields.wrong("layers_per_block", "the same number for every level"));
        }
        let config = Self {
            in_channels: fields.size("in_channels", Some(4))?,
            out_channels: fields.size("out_channels", Some(4))?,
            sample_size: map.get("sample_size").and_then(Value::as_u64).map_or(128, |size| size as usize),
            layers_per_block: layers[0],
            down_attention: fields.names("down_block_types", levels, &DOWN)?,
            up_attention: fields.names("up_block_types", levels, &UP)?,
            transformer_layers_per_block: fields.sizes("transformer_layers_per_block", levels, Some(1))?,
            num_attention_heads: fields.sizes("attention_head_dim", levels, Some(8))?,
            cross_attention_dim: fields.sizes("cross_attention_dim", levels, Some(1280))?,
            norm_num_groups: fields.size("norm_num_groups", Some(32))?,
            norm_eps: fields.number("norm_eps", Some(1e-5))?,
            use_linear_projection: fields.flag("use_linear_projection", false)?,
            addition_time_embed_dim: fields.size("addition_time_embed_dim", None)?,
            projection_class_embeddings_input_dim: fields.size("projection_class_embeddings_input_dim", None)?,
            block_out_channels,
        };
        fields.finish()?;
        config.validate()?;
        Ok(config)
    }

    fn to_json(&self) -> Map<String, Value> {
        let name = |types: [(&'static str, bool); 2], attends: bool| if attends { types[0].0 } else { types[1].0 };
        let mut map: Map<String, Value> = fixed().into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        let varying = json!({
            "_class_name": SDXLUNet::CLASS_NAME,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "sample_size": self.sample_size,
            "block_out_channels": self.block_out_channels,
            "layers_per_block": self.layers_per_block,
            "down_block_types": self.down_attention.iter().map(|&attends| name(DOWN, attends)).collect::<Vec<_>>(),
            "up_block_types": self.up_attention.iter().map(|&attends| name(UP, attends)).collect::<Vec<_>>(),
            "transformer_layers_per_block": self.transformer_layers_per_block,
            "attention_head_dim": self.num_attention_heads,
            "cross_attention_dim": self.cross_attention_dim[0],
            "norm_num_groups": self.norm_num_groups,
            "norm_eps": self.norm_eps,
            "use_linear_projection": self.use_linear_projection,
            "addition_time_embed_dim": self.addition_time_embed_dim,
            "projection_class_embeddings_input_dim": self.projection_class_embeddings_input_dim,
        });
        if let Value::Object(varying) = varying {
            map.extend(varying);
        }
        // The published configurations have null instead of false here; `from_json` accepts both.
        map.insert("mid_block_only_cross_attention".into(), Value::Null);
        map
    }
}

impl UNetConfig {
    /// Check that the sizes fit together.
    ///
    /// # Errors
    /// [`Error::Config`] that names the wrong fields and what they must be.
    pub fn validate(&self) -> Result<()> {
        let wrong = |text: String| Err(Error::Config(format!("{}: {text}", SDXLUNet::CLASS_NAME)));
        for (level, (&channels, &heads)) in self.block_out_channels.iter().zip(&self.num_attention_heads).enumerate() {
            if channels % self.norm_num_groups != 0 {
                return wrong(format!(
                    "block_out_channels[{level}] is {channels}, expected a multiple of norm_num_groups, {}",
                    self.norm_num_groups
                ));
            }
            if channels % heads != 0 {
                return wrong(format!(
                    "attention_head_dim (the number of heads) is {heads} at level {level}; it must divide the \
                     level's {channels} channels"
                ));
            }
        }
        if !self.block_out_channels[0].is_multiple_of(2) || !self.addition_time_embed_dim.is_multiple_of(2) {
            return wrong(format!(
                "block_out_channels[0] is {} and addition_time_embed_dim is {}, expected even numbers, because half of \
                 the sinusoids are sines and half are cosines",
                self.block_out_channels[0], self.addition_time_embed_dim
            ));
        }
        if self.cross_attention_dim.iter().any(|&dim| dim != self.cross_attention_dim[0]) {
            return wrong(format!(
                "cross_attention_dim is {:?}, expected the same value for every level, because all levels read the \
                 same text",
                self.cross_attention_dim
            ));
        }
        if self.projection_class_embeddings_input_dim <= TIME_IDS * self.addition_time_embed_dim {
            return wrong(format!(
                "projection_class_embeddings_input_dim is {}, expected more than {}, {TIME_IDS} times \
                 addition_time_embed_dim",
                self.projection_class_embeddings_input_dim,
                TIME_IDS * self.addition_time_embed_dim
            ));
        }
        Ok(())
    }

    /// The number of features of the pooled text.
    pub const fn pooled_dim(&self) -> usize {
        self.projection_class_embeddings_input_dim - TIME_IDS * self.addition_time_embed_dim
    }

    /// Width of the time's embedding.
    pub fn time_embed_dim(&self) -> usize {
        4 * self.block_out_channels[0]
    }
}
