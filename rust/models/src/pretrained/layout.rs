//! Where the parameters of a model are in a file: under what key, and in what form.

pub use trainable_candle_io::form::{Form, Key};

/// Whose names the tensors of a file have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// Those of diffusers and transformers, which are the models' own.
    Own,
    /// Those of the code that the model was published with.
    Original,
    /// Those of llama.cpp, in GGUF files of language models.
    LlamaCpp,
}

/// How the keys of a model are written in a file that holds others too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Original {
    /// What they begin with.
    pub prefix: &'static str,
    /// Whose names follow the prefix.
    pub naming: Naming,
}

/// The names of a model's parameters in one kind of file. A model's `keys.rs` has one for each kind.
pub trait Layout {
    /// What the keys of this model begin with in a file that holds others too.
    fn prefix(&self) -> &str {
        ""
    }

    /// Where the parameter `name` may be, without the prefix. Files are written with the first.
    fn places(&self, name: &str) -> Vec<Key>;

    /// Whether the key (without the prefix) may be left unread: its tensor is computed, or concerns training alone.
    fn ignores(&self, key: &str) -> bool {
        let _ = key;
        false
    }
}

/// Files whose names are the model's own.
pub struct OwnNames;

impl Layout for OwnNames {
    fn places(&self, name: &str) -> Vec<Key> {
        vec![Key::plain(name)]
    }
}

/// A model's own names after a prefix, in a file that holds other models too.
pub struct PrefixedNames(pub &'static str);

impl Layout for PrefixedNames {
    fn prefix(&self) -> &str {
        self.0
    }

    fn places(&self, name: &str) -> Vec<Key> {
        OwnNames.places(name)
    }
}

/// A layer of a model, the layer of a file that holds it, and in what form.
pub type Renaming = (&'static str, &'static str, Form);

/// The key of a parameter whose layer is in `renamings`: `ff.net.2.bias` is `mlp.fc2.bias`.
pub fn renamed(name: &str, renamings: &[Renaming]) -> Option<Key> {
    renamings.iter().find_map(|(ours, theirs, form)| {
        let parameter = name.strip_prefix(ours)?.strip_prefix('.')?;
        Some(Key { key: format!("{theirs}.{parameter}"), form: *form })
    })
}
