//! Determines the sizes of a model from the shapes of the tensors in its file, if the model has no `config.json`.

use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFiles;

use super::Layout;

/// Looks up the shapes of a file's tensors by a model's own names.
pub struct StoredSizes<'a> {
    files: &'a WeightFiles,
    names: Box<dyn Layout>,
}

impl<'a> StoredSizes<'a> {
    /// The shapes in `files`; `names` maps a model's names to the keys in the files.
    pub fn new(files: &'a WeightFiles, names: Box<dyn Layout>) -> Self {
        Self { files, names }
    }

    /// The stored shape of the tensor that holds a parameter.
    fn shape(&self, name: &str) -> Option<&[usize]> {
        let places = self.names.places(name).into_iter();
        places.into_iter().find_map(|place| self.files.shape(&format!("{}{}", self.names.prefix(), place.key)))
    }

    /// Whether the file has a parameter.
    pub fn has(&self, name: &str) -> bool {
        self.shape(name).is_some()
    }

    /// The size of a parameter along dimension `dim`. The file must store the dimensions in the same order as
    /// the model.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such parameter or dimension.
    pub fn size(&self, name: &str, dim: usize) -> Result<usize> {
        self.shape(name).and_then(|dims| dims.get(dim).copied()).ok_or_else(|| {
            self.wrong(&format!(
                "the shapes of the checkpoint do not determine the size of {name}; give config=, the path of the \
                 transformer's config.json"
            ))
        })
    }

    /// The number of blocks `{blocks}.0`, `{blocks}.1` and so on that have the layer.
    pub fn count(&self, blocks: &str, layer: &str) -> usize {
        (0..).take_while(|i| self.has(&format!("{blocks}.{i}.{layer}.weight"))).count()
    }

    /// An error about the file.
    pub fn wrong(&self, what: &str) -> Error {
        Error::Config(format!("{}: {what}", self.files.path().display()))
    }
}
