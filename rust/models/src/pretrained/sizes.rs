//! Determines the sizes of a model without a `config.json` from the shapes of the tensors in its file.

use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFiles;

use super::Layout;

/// Looks up the shapes of a file's tensors by the names that the model gives to its parameters.
pub struct StoredSizes<'a> {
    files: &'a WeightFiles,
    layout: Box<dyn Layout>,
}

impl<'a> StoredSizes<'a> {
    /// Looks up shapes in `files`. `layout` maps the model's names to the keys in the files.
    pub fn new(files: &'a WeightFiles, layout: Box<dyn Layout>) -> Self {
        Self { files, layout }
    }

    /// The shape of the tensor that holds the parameter `name`, if there is one.
    fn shape(&self, name: &str) -> Option<&[usize]> {
        // A layout may list several keys for a parameter; a file has one of them.
        let mut candidates = self.layout.keys(name).into_iter();
        candidates.find_map(|candidate| self.files.shape(&format!("{}{}", self.layout.prefix(), candidate.key)))
    }

    /// Whether the file has the parameter `name`.
    pub fn has(&self, name: &str) -> bool {
        self.shape(name).is_some()
    }

    /// Returns the size of dimension `dim` of the tensor that holds the parameter `name`. The file must store the
    /// parameter's dimensions in the order of the model.
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

    /// The number of consecutive blocks `{blocks}.0`, `{blocks}.1` and so on that have the layer `layer`.
    pub fn count(&self, blocks: &str, layer: &str) -> usize {
        (0..).take_while(|i| self.has(&format!("{blocks}.{i}.{layer}.weight"))).count()
    }

    /// Returns an error with the message `what` and the path of the file.
    pub fn wrong(&self, what: &str) -> Error {
        Error::Config(format!("{}: {what}", self.files.path().display()))
    }
}
