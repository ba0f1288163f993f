//! The sizes of a model in a file without its configuration, from the shapes of the tensors.

use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFiles;

use super::Layout;

/// Shapes in a file by a model's own names.
pub struct StoredSizes<'a> {
    files: &'a WeightFiles,
    names: Box<dyn Layout>,
}

impl<'a> StoredSizes<'a> {
    /// The shapes in `files`, which has a model under these names.
    pub fn new(files: &'a WeightFiles, names: Box<dyn Layout>) -> Self {
        Self { files, names }
    }

    /// The stored shape of what holds a parameter.
    fn shape(&self, name: &str) -> Option<&[usize]> {
        let places = self.names.places(name).into_iter();
        places.into_iter().find_map(|place| self.files.shape(&format!("{}{}", self.names.prefix(), place.key)))
    }

    /// Whether there is a parameter.
    pub fn has(&self, name: &str) -> bool {
        self.shape(name).is_some()
    }

    /// The size of a parameter along a dimension that is stored as it is.
    ///
    /// # Errors
    /// [`Error::Config`] if there is none.
    pub fn size(&self, name: &str, dim: usize) -> Result<usize> {
        self.shape(name).and_then(|dims| dims.get(dim).copied()).ok_or_else(|| {
            self.wrong(&format!(
                "the shapes of the checkpoint do not tell the size of {name}; give config=, the config.json of the transformer"
            ))
        })
    }

    /// How many blocks `{blocks}.0`, `{blocks}.1` and so on have the layer.
    pub fn count(&self, blocks: &str, layer: &str) -> usize {
        (0..).take_while(|i| self.has(&format!("{blocks}.{i}.{layer}.weight"))).count()
    }

    /// An error about the file.
    pub fn wrong(&self, what: &str) -> Error {
        Error::Config(format!("{}: {what}", self.files.path().display()))
    }
}
