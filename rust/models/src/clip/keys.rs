//! The names of the parameters of CLIP's text encoder in files: transformers' names, with and without `text_model.`,
//! and OpenCLIP's names. Also, the configuration of a text encoder from the shapes of a file's tensors.

use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFiles;

use super::{Activation, CLIPTextConfig};
use crate::pretrained::{CheckpointNaming, Form, Key, Layout, Naming};

/// The prefix of all parameter names except that of the projection.
const WRAPPER: &str = "text_model.";

/// The names of a text encoder's parameters in a folder of transformers (`original` is `None`) or in an original
/// checkpoint: one file, often with several models, in the layout of the models' publishers.
pub(super) fn layout(original: Option<CheckpointNaming>) -> Box<dyn Layout> {
    match original {
        Some(CheckpointNaming { prefix, naming: Naming::Original }) => Box::new(OpenClip { prefix }),
        // Some original checkpoints, such as those of Stable Diffusion 1, have transformers' names after a prefix.
        other => Box::new(Transformers { prefix: other.map_or("", |original| original.prefix) }),
    }
}

/// Whether readers skip the tensor `key`, because it is no parameter of the text encoder. The position ids are
/// constants, and only CLIP's comparison of texts with images uses the logit scale.
fn is_unused(key: &str) -> bool {
    key.ends_with("position_ids") || key == "logit_scale"
}

/// transformers' names.
struct Transformers {
    /// The prefix of the text encoder's keys in a file that holds other models too, otherwise empty.
    prefix: &'static str,
}

impl Layout for Transformers {
    fn prefix(&self) -> &str {
        self.prefix
    }

    fn keys(&self, name: &str) -> Vec<Key> {
        // transformers 5 omits `text_model.` in files of models without a projection.
        std::iter::once(name).chain(name.strip_prefix(WRAPPER)).map(Key::plain).collect()
    }

    fn ignores(&self, key: &str) -> bool {
        is_unused(key)
    }
}

/// OpenCLIP's names.
struct OpenClip {
    /// The prefix of the text encoder's keys in an original checkpoint.
    prefix: &'static str,
}

impl Layout for OpenClip {
    fn prefix(&self) -> &str {
        self.prefix
    }

    fn keys(&self, name: &str) -> Vec<Key> {
        if name == "text_projection.weight" {
            // OpenCLIP has a plain matrix (in, out) in place of a linear layer.
            let transposed = Key { key: "text_projection".to_owned(), form: Form::Transposed };
            return vec![transposed, Key::plain(name)]; // readers use the first key that the file has
        }
        name.strip_prefix(WRAPPER).and_then(open_clip).into_iter().collect()
    }

    fn ignores(&self, key: &str) -> bool {
        is_unused(key)
    }
}

/// The key and form in OpenCLIP's files of the parameter whose name in transformers is `text_model.{name}`. `None` if
/// OpenCLIP's files have no such parameter.
fn open_clip(name: &str) -> Option<Key> {
    // Parameters outside of the encoder's layers: transformers' name, OpenCLIP's name.
    const OUTSIDE: [(&str, &str); 4] = [
        ("embeddings.token_embedding.weight", "token_embedding.weight"),
        ("embeddings.position_embedding.weight", "positional_embedding"),
        ("final_layer_norm.weight", "ln_final.weight"),
        ("final_layer_norm.bias", "ln_final.bias"),
    ];
    // Modules of each of the encoder's layers, whose parameters have the same names in both: transformers' name,
    // OpenCLIP's name.
    const INSIDE: [(&str, &str); 5] = [
        ("self_attn.out_proj", "attn.out_proj"),
        ("layer_norm1", "ln_1"),
        ("layer_norm2", "ln_2"),
        ("mlp.fc1", "mlp.c_fc"),
        ("mlp.fc2", "mlp.c_proj"),
    ];
    if let Some((_, theirs)) = OUTSIDE.iter().find(|(ours, _)| *ours == name) {
        return Some(Key::plain(*theirs));
    }
    let (index, rest) = name.strip_prefix("encoder.layers.")?.split_once('.')?;
    let block = format!("transformer.resblocks.{index}");
    // OpenCLIP stacks the three projections in one tensor. Each is a share of its rows, number `part` of 3.
    for (part, projection) in ["self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."].iter().enumerate() {
        if let Some(parameter) = rest.strip_prefix(projection) {
            return Some(Key { key: format!("{block}.attn.in_proj_{parameter}"), form: Form::share(part, 3) });
        }
    }
    INSIDE.iter().find_map(|(ours, theirs)| {
        let parameter = rest.strip_prefix(ours)?.strip_prefix('.')?;
        Some(Key::plain(format!("{block}.{theirs}.{parameter}")))
    })
}

/// `hidden_size`, number of heads and activation of the published text encoders: CLIP ViT-L, OpenCLIP ViT-H and
/// ViT-bigG.
const PUBLISHED: [(usize, usize, Activation); 3] =
    [(768, 12, Activation::QuickGelu), (1024, 16, Activation::Gelu), (1280, 20, Activation::Gelu)];

/// The configuration of a text encoder in an original checkpoint, from the shapes of the checkpoint's tensors. The
/// shapes do not determine the number of heads, the activation, the norms' epsilon and the id of the end token. These
/// fields come from the first configuration in `known` whose other fields agree; `known` has configurations found with
/// the checkpoint, then those of published models. If none agrees, the number of heads and the activation are those of
/// the published text encoder with the same `hidden_size`, and the epsilon and the id are those of
/// [`CLIPTextConfig::default`].
///
/// # Errors
/// [`Error::Config`] if a size, the number of heads or the activation cannot be determined.
pub(super) fn deduce(
    files: &WeightFiles,
    original: CheckpointNaming,
    known: Vec<CLIPTextConfig>,
) -> Result<CLIPTextConfig> {
    let CheckpointNaming { prefix, naming } = original;
    // The last one is a template: `{}` stands for the index of a layer.
    let (tokens_key, positions_key, fc1_template) = match naming {
        Naming::Original => {
            ("token_embedding.weight", "positional_embedding", "transformer.resblocks.{}.mlp.c_fc.weight")
        }
        // `Own` are transformers' names. No file has llama.cpp's names for CLIP's text encoder.
        Naming::Own | Naming::LlamaCpp => (
            "text_model.embeddings.token_embedding.weight",
            "text_model.embeddings.position_embedding.weight",
            "text_model.encoder.layers.{}.mlp.fc1.weight",
        ),
    };
    let unknown = |what: &str| {
        Error::Config(format!(
            "{}: the shapes of the checkpoint do not determine {what}; give config=, the path of the text encoder's \
             config.json",
            files.path().display()
        ))
    };
    // The two sizes of the matrix with this key.
    let matrix = |key: &str| match files.shape(&format!("{prefix}{key}")) {
        Some(&[rows, columns]) => Ok((rows, columns)),
        _ => Err(unknown(&format!("the size of {prefix}{key}"))),
    };
    let fc1_key = |layer: usize| fc1_template.replace("{}", &layer.to_string());
    let (positions, hidden_size) = matrix(positions_key)?;
    let deduced = CLIPTextConfig {
        vocab_size: matrix(tokens_key)?.0,
        hidden_size,
        intermediate_size: matrix(&fc1_key(0))?.0,
        num_hidden_layers: (0..).take_while(|&layer| matrix(&fc1_key(layer)).is_ok()).count(),
        max_position_embeddings: positions,
        // OpenCLIP's matrix is (in, out), a linear layer's is (out, in).
        projection_dim: match matrix("text_projection") {
            Ok((_, out)) => Some(out),
            Err(_) => matrix("text_projection.weight").ok().map(|(out, _)| out),
        },
        ..CLIPTextConfig::default()
    };
    let agrees = |candidate: &CLIPTextConfig| {
        let CLIPTextConfig { num_attention_heads, hidden_act, layer_norm_eps, eos_token_id, .. } = candidate.clone();
        CLIPTextConfig { num_attention_heads, hidden_act, layer_norm_eps, eos_token_id, ..deduced.clone() }
            == *candidate
    };
    if let Some(config) = known.into_iter().find(agrees) {
        return Ok(config);
    }
    match PUBLISHED.iter().find(|(published, ..)| *published == hidden_size) {
        Some(&(_, num_attention_heads, hidden_act)) => {
            Ok(CLIPTextConfig { num_attention_heads, hidden_act, ..deduced })
        }
        None => Err(unknown("the number of attention heads and the activation")),
    }
}
