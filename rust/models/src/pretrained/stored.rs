//! Parameters in weight files, read by a model's names.

use std::collections::BTreeSet;

use trainable_candle_core::{DType, Device, Error, Result, Tensor};
use trainable_candle_io::WeightFiles;
use trainable_candle_nn::Stored;

use super::layout::{Form, Layout};

/// Reads parameters one at a time from open files through a layout.
pub(super) struct StoredWeights {
    pub files: WeightFiles,
    pub layout: Box<dyn Layout>,
    pub dtype: Option<DType>,
    pub device: Device,
}

impl StoredWeights {
    /// The key under which the parameter `name` is, and its form.
    fn find(&self, name: &str) -> Option<(String, Form)> {
        self.layout.places(name).into_iter().find_map(|place| {
            let key = format!("{}{}", self.layout.prefix(), place.key);
            self.files.shape(&key).is_some().then_some((key, place.form))
        })
    }
}

impl Stored for StoredWeights {
    fn shape(&self, name: &str) -> Result<Option<Vec<usize>>> {
        let Some((key, form)) = self.find(name) else { return Ok(None) };
        let stored = self.files.shape(&key).unwrap_or_default();
        let misfit =
            || Error::weights(self.files.path(), format!("\"{key}\" has shape {stored:?}, which is no {name}"));
        form.shape(stored).map(Some).ok_or_else(misfit)
    }

    fn read(&mut self, name: &str) -> Result<Tensor> {
        let Some((key, form)) = self.find(name) else {
            return Err(Error::weights(self.files.path(), format!("there is no parameter \"{name}\"")));
        };
        if form == Form::Plain {
            return self.files.read(&key, self.dtype, &self.device);
        }
        // A part of a tensor is cut out before it moves.
        form.read(&self.files.read(&key, self.dtype, &Device::Cpu)?)?.to_device(&self.device)
    }

    fn unexpected(&self, taken: &BTreeSet<String>) -> Vec<String> {
        let known: BTreeSet<String> = taken.iter().filter_map(|name| Some(self.find(name)?.0)).collect();
        let prefix = self.layout.prefix();
        self.files
            .names()
            .filter(|key| key.strip_prefix(prefix).is_some_and(|rest| !self.layout.ignores(rest)))
            .filter(|key| !known.contains(*key))
            .map(str::to_owned)
            .collect()
    }
}
