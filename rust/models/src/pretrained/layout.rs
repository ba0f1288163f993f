//! How a file stores a model's parameters: under which keys and in which forms. A [`Form`] says how the stored tensor
//! differs from the parameter: not at all (plain), transposed, joined with other parameters.

pub use trainable_candle_io::form::{Form, Key};

/// The names that the tensors of a file have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// The names of diffusers and transformers, which are the models' own names in this library.
    Own,
    /// The names of the code that the model was published with.
    Original,
    /// llama.cpp's names, in GGUF files of language models and text encoders.
    LlamaCpp,
}

/// How a checkpoint in one file, which may hold several models, names the parameters of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointNaming {
    /// The prefix of the keys.
    pub prefix: &'static str,
    /// The names that follow the prefix.
    pub naming: Naming,
}

/// The names of a model's parameters in one kind of file. A model's `keys.rs` has the layouts for the kinds of files.
pub trait Layout {
    /// The prefix of the model's keys. It is empty unless the file may hold other models too.
    fn prefix(&self) -> &str {
        ""
    }

    /// The keys, without the prefix, under which a file may store the parameter `name`, each with the form of the
    /// stored tensor. Readers use the first key that the file has; writers use the first key.
    fn keys(&self, name: &str) -> Vec<Key>;

    /// Whether readers skip the tensor under this key (without the prefix), because the model does not use it.
    fn ignores(&self, key: &str) -> bool {
        let _ = key;
        false
    }
}

/// The layout of files whose keys are the model's own names.
pub struct OwnNames;

impl Layout for OwnNames {
    fn keys(&self, name: &str) -> Vec<Key> {
        vec![Key::plain(name)]
    }
}

/// The layout of a file that may hold other models too. Each key consists of the prefix and the model's own name.
pub struct PrefixedNames(pub &'static str);

impl Layout for PrefixedNames {
    fn prefix(&self) -> &str {
        self.0
    }

    fn keys(&self, name: &str) -> Vec<Key> {
        OwnNames.keys(name)
    }
}

/// A layer's name in the model, the layer's name in a file, and the form in which the file stores the layer's
/// parameters.
pub type Renaming = (&'static str, &'static str, Form);

/// The key of the parameter `name`, if `renamings` has its layer. For example, `("ff.net.2", "mlp.fc2", Form::Plain)`
/// renames `ff.net.2.bias` to `mlp.fc2.bias`.
pub fn renamed(name: &str, renamings: &[Renaming]) -> Option<Key> {
    renamings.iter().find_map(|(ours, theirs, form)| {
        let parameter = name.strip_prefix(ours)?.strip_prefix('.')?;
        Some(Key { key: format!("{theirs}.{parameter}"), form: *form })
    })
}
