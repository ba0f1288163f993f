//! The configuration of a decoder (causal language model).

use serde_json::{Map, Value, json};
use trainable_candle_core::{Error, Result};

use super::OP;
use super::rope::Rope;
use crate::fields::Fields;
use crate::pretrained::{Configuration, class_of};

/// The family of a decoder. It determines properties that `config.json` does not state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama 2 and 3, SmolLM2.
    Llama,
    /// Mistral: every layer attends within a sliding window, if the configuration has one.
    Mistral,
    /// Qwen2 and 2.5: biases of queries, keys and values.
    Qwen2,
    /// The language model of Qwen2.5-VL as a text encoder, without the language-model head and without the vision
    /// encoder. The rotary embedding has three position axes (time, height, width). A text token has the same position
    /// on all three axes, so the rotation angles equal those of Qwen2.
    Qwen25Vl,
    /// Qwen3: norms of queries and keys.
    Qwen3,
}

/// Each family with its `model_type` and its class name in `architectures`.
const FAMILIES: [(Family, &str, &str); 5] = [
    (Family::Llama, "llama", "LlamaForCausalLM"),
    (Family::Mistral, "mistral", "MistralForCausalLM"),
    (Family::Qwen2, "qwen2", "Qwen2ForCausalLM"),
    (Family::Qwen3, "qwen3", "Qwen3ForCausalLM"),
    (Family::Qwen25Vl, VL, VL_CLASS),
];

/// The `model_type` of Qwen2.5-VL.
const VL: &str = "qwen2_5_vl";
/// The class name of Qwen2.5-VL in `architectures`.
const VL_CLASS: &str = "Qwen2_5_VLForConditionalGeneration";

/// The class names of all families.
pub(super) static CLASS_NAMES: [&str; 5] = [FAMILIES[0].2, FAMILIES[1].2, FAMILIES[2].2, FAMILIES[3].2, FAMILIES[4].2];

/// `config.json` of a decoder as transformers writes it. The fields of the rotary embedding may have their old names
/// (`rope_theta`, `rope_scaling`) or their new name (`rope_parameters`). The default is the configuration of Qwen2.5
/// 0.5B.
#[derive(Clone, Debug, PartialEq)]
pub struct CausalLMConfig {
    /// The decoder's family.
    pub family: Family,
    /// Number of tokens of the vocabulary, which is the number of rows of the embedding.
    pub vocab_size: usize,
    /// Number of features of a token's hidden state.
    pub hidden_size: usize,
    /// Number of features of the hidden layer of the feed-forward networks.
    pub intermediate_size: usize,
    /// Number of layers of the model.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads, a divisor of `num_attention_heads`. `num_attention_heads / num_key_value_heads`
    /// query heads share one key and value head.
    pub num_key_value_heads: usize,
    /// Number of features of one head, an even number. `num_attention_heads · head_dim` need not equal `hidden_size`.
    pub head_dim: usize,
    /// The epsilon that the norms add to the mean square.
    pub rms_norm_eps: f64,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub out_bias: bool,
    /// Whether the feed-forward networks have biases.
    pub mlp_bias: bool,
    /// Whether the language-model head uses the embedding's matrix.
    pub tie_word_embeddings: bool,
    /// The largest number of tokens of a text that the model was trained for.
    pub max_position_embeddings: usize,
    /// The rotary position embedding of queries and keys.
    pub rope: Rope,
    /// For each layer, the largest number of tokens that a token attends to, itself included; `None` for no limit.
    pub windows: Vec<Option<usize>>,
    /// The ids of the tokens that end a text: those in `config.json`, and for a loaded model also those in
    /// `generation_config.json`.
    pub eos_token_ids: Vec<u32>,
    /// Number of layers in the files. The model consists of the first `num_hidden_layers` of these layers. If it does
    /// not have all layers, it has no language-model head.
    stored_layers: usize,
    /// All fields of the file, so that [`to_json`](Configuration::to_json) keeps the fields that only other tools read.
    json: Map<String, Value>,
}

impl Default for CausalLMConfig {
    fn default() -> Self {
        let json = json!({
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": true,
            "use_sliding_window": false,
            "eos_token_id": 151_643,
        });
        match json.as_object().map(Self::from_json) {
            Some(Ok(config)) => config,
            other => unreachable!("the published configuration is right: {other:?}"),
        }
    }
}

impl Configuration for CausalLMConfig {
    // Fields that are not read here are ignored: those that transformers writes are about initial values, dropout,
    // generation or the vision encoder. A missing field gets transformers' default, except the sizes whose default is
    // None here: they are required.
    fn from_json(map: &Map<String, Value>) -> Result<Self> {
        // Qwen2.5-VL may have the language model's fields in an object of their own.
        let (all_fields, text_fields) = (map, text_part(map));
        let map = text_fields.as_ref().unwrap_or(all_fields);
        let mut fields = Fields::new(OP, map);
        let family = family(&mut fields, map)?;
        // Two names of the same function.
        let silu = ["silu", "swish"];
        if fields.text("hidden_act").is_some_and(|name| !silu.contains(&name)) {
            return Err(fields.wrong("hidden_act", "\"silu\""));
        }
        let hidden_size = fields.size("hidden_size", None)?;
        let num_hidden_layers = fields.size("num_hidden_layers", None)?;
        let num_attention_heads = fields.size("num_attention_heads", None)?;
        // In transformers, null means as many key and value heads as query heads. Only a missing field gets the
        // family's default.
        let default_kv_heads = match family {
            _ if fields.is_null("num_key_value_heads") => num_attention_heads,
            Family::Llama => num_attention_heads,
            Family::Mistral => 8,
            Family::Qwen2 | Family::Qwen25Vl | Family::Qwen3 => 32,
        };
        let default_head_dim = if family == Family::Qwen3 { 128 } else { hidden_size / num_attention_heads };
        let head_dim = fields.size("head_dim", Some(default_head_dim))?;
        let default_positions = match family {
            Family::Llama => 2048,
            Family::Mistral => 131_072,
            Family::Qwen2 | Family::Qwen25Vl | Family::Qwen3 => 32_768,
        };
        let max_position_embeddings = fields.size("max_position_embeddings", Some(default_positions))?;
        let attention_bias = matches!(family, Family::Llama | Family::Qwen3) && fields.flag("attention_bias", false)?;
        let config = Self {
            family,
            vocab_size: fields.size("vocab_size", None)?,
            hidden_size,
            intermediate_size: fields.size("intermediate_size", None)?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: fields.size("num_key_value_heads", Some(default_kv_heads))?,
            head_dim,
            rms_norm_eps: fields.number("rms_norm_eps", Some(1e-6))?,
            qkv_bias: matches!(family, Family::Qwen2 | Family::Qwen25Vl) || attention_bias,
            out_bias: attention_bias,
            mlp_bias: family == Family::Llama && fields.flag("mlp_bias", false)?,
            tie_word_embeddings: fields.flag("tie_word_embeddings", false)?,
            max_position_embeddings,
            rope: Rope::read(&mut fields, head_dim, max_position_embeddings)?,
            windows: windows(&mut fields, family, num_hidden_layers)?,
            eos_token_ids: token_ids(map.get("eos_token_id")),
            stored_layers: num_hidden_layers,
            json: all_fields.clone(),
        };
        config.validate()?;
        Ok(config)
    }

    fn to_json(&self) -> Map<String, Value> {
        let mut json = self.json.clone();
        json.insert("num_hidden_layers".into(), self.num_hidden_layers.into());
        json
    }
}

/// The fields of Qwen2.5-VL's language model, if `map` has them in the object `text_config`: the fields of `map`,
/// overwritten by those of `text_config`, except `model_type` and `architectures`. `None` for other models, and for a
/// configuration without `text_config`.
fn text_part(map: &Map<String, Value>) -> Option<Map<String, Value>> {
    let is_vl = match map.get("model_type") {
        Some(kind) => kind.as_str() == Some(VL),
        None => class_of(map).as_deref() == Some(VL_CLASS),
    };
    let text_config = map.get("text_config").and_then(Value::as_object).filter(|_| is_vl)?;
    let mut fields = map.clone();
    let names_model = |name: &str| matches!(name, "model_type" | "architectures");
    let of_text = text_config.iter().filter(|(name, _)| !names_model(name));
    fields.extend(of_text.map(|(name, value)| (name.clone(), value.clone())));
    Some(fields)
}

impl CausalLMConfig {
    /// Add the end tokens of a `generation_config.json`, which may differ from those of `config.json`.
    pub(super) fn add_eos_tokens(&mut self, settings: &Map<String, Value>) {
        for id in token_ids(settings.get("eos_token_id")) {
            if !self.eos_token_ids.contains(&id) {
                self.eos_token_ids.push(id);
            }
        }
    }

    /// Whether the model has a language-model head whose matrix is not that of the embedding.
    pub(super) fn has_own_head(&self) -> bool {
        !self.tie_word_embeddings && self.has_head()
    }

    /// Whether the model has a language-model head, which computes the scores of the next token.
    pub(super) fn has_head(&self) -> bool {
        self.family != Family::Qwen25Vl && !self.is_part()
    }

    /// Whether the tensors in the files have Qwen2.5-VL's names.
    pub(super) fn is_vl(&self) -> bool {
        self.family == Family::Qwen25Vl
    }

    /// Whether the model has fewer layers than the files. Such a model computes hidden states and has no language-model
    /// head.
    pub const fn is_part(&self) -> bool {
        self.num_hidden_layers < self.stored_layers
    }

    /// The configuration of a model that consists of the first `count` layers of this model.
    ///
    /// # Errors
    /// [`Error::Argument`] if `count` is 0 or larger than this model's number of layers.
    pub fn first_layers(self, count: usize) -> Result<Self> {
        if !(1..=self.num_hidden_layers).contains(&count) {
            let most = self.num_hidden_layers;
            return Err(Error::argument(OP, format!("layers is {count}, expected 1 to {most} for this model")));
        }
        Ok(Self { num_hidden_layers: count, ..self })
    }

    /// The name of the model's class in `architectures`.
    pub(super) fn class_name(&self) -> &'static str {
        FAMILIES.iter().find(|(family, ..)| *family == self.family).map_or("", |&(_, _, class)| class)
    }

    /// Check that `num_key_value_heads` divides `num_attention_heads`, and that `head_dim` is even.
    fn validate(&self) -> Result<()> {
        let wrong = |text: String| Err(Error::Config(format!("{OP}: {text}")));
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            return wrong(format!(
                "num_attention_heads is {heads}, expected a multiple of num_key_value_heads, {kv_heads}"
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return wrong(format!("head_dim is {}, expected an even number", self.head_dim));
        }
        Ok(())
    }
}

/// The family that `model_type` names or, if there is no `model_type`, the class name in `architectures`.
///
/// # Errors
/// [`Error::Config`] if this name is not in [`FAMILIES`], or if both fields are missing.
fn family(fields: &mut Fields<'_>, map: &Map<String, Value>) -> Result<Family> {
    let (kind, class) = (fields.text("model_type"), class_of(map));
    let known = FAMILIES.iter().find(|(_, name, class_name)| match kind {
        Some(kind) => kind == *name,
        None => class.as_deref() == Some(class_name),
    });
    known.map(|&(family, ..)| family).ok_or_else(|| {
        let names: Vec<String> = FAMILIES.iter().map(|(_, name, _)| format!("\"{name}\"")).collect();
        fields.wrong("model_type", &names.join(", "))
    })
}

/// For each layer, the largest number of tokens that a token attends to, itself included; `None` for no limit.
fn windows(fields: &mut Fields<'_>, family: Family, layers: usize) -> Result<Vec<Option<usize>>> {
    // If `sliding_window` is missing, the window has transformers' default. If it is null, there is no window.
    let default = (!fields.is_null("sliding_window")).then_some(4096);
    let read_window = |fields: &mut Fields<'_>| match fields.optional_number("sliding_window")? {
        None => Ok(default),
        Some(_) => fields.size("sliding_window", None).map(Some),
    };
    match family {
        Family::Llama => Ok(vec![None; layers]),
        Family::Mistral => Ok(vec![read_window(fields)?; layers]),
        Family::Qwen2 | Family::Qwen25Vl | Family::Qwen3 => {
            let window = if fields.flag("use_sliding_window", false)? { read_window(fields)? } else { None };
            let windowed: Vec<bool> = if fields.is_given("layer_types") {
                fields.names("layer_types", layers, &[("full_attention", false), ("sliding_attention", true)])?
            } else {
                // The first `max_window_layers` layers have no window. The field is read as a number because it may
                // be 0, which `size` rejects.
                let full_layers = fields.number("max_window_layers", Some(28.0))?; // transformers' default
                (0..layers).map(|layer| layer as f64 >= full_layers).collect()
            };
            Ok(windowed.into_iter().map(|is_windowed| window.filter(|_| is_windowed)).collect())
        }
    }
}

/// The token ids in a field whose value is one id or a list of ids. Values that are not ids, such as null, are skipped.
/// Empty if the field is missing.
fn token_ids(value: Option<&Value>) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
    }
}
