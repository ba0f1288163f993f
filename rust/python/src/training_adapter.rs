//! The frozen adapter over which a distilled model is trained.

use pyo3::prelude::*;
use trainable_candle_models::Loaded;
use trainable_candle_nn::adapter;

use crate::call::quick;
use crate::error::Result;

/// A frozen LoRA beside the adapter that is trained on a model, made by `add_training_adapter`.
///
/// ```python
/// unet = tc.models.load("sdxl")
/// frozen = unet.add_training_adapter("adapter.safetensors")
/// adapter = unet.add_adapter(tc.LoraConfig(r=4))  # trained beside it
/// frozen.set_enabled(False)
/// ```
#[pyclass(frozen, module = "trainable_candle")]
pub struct TrainingAdapter {
    inner: adapter::TrainingAdapter,
    // Keeps the model alive whose layers it is on.
    _model: Loaded,
}

impl TrainingAdapter {
    /// The object of an adapter of `model`.
    pub const fn new(inner: adapter::TrainingAdapter, model: Loaded) -> Self {
        Self { inner, _model: model }
    }
}

#[pymethods]
impl TrainingAdapter {
    /// Let the model compute with it, or exactly as if it were not there.
    fn set_enabled(&self, enabled: bool) -> Result<()> {
        quick(|| {
            self.inner.set_enabled(enabled);
            Ok(())
        })
    }

    /// Remove it from the model.
    fn remove(&self) -> Result<()> {
        quick(|| {
            self.inner.remove();
            Ok(())
        })
    }

    /// How many numbers it consists of.
    fn numel(&self) -> usize {
        self.inner.elements()
    }

    /// How many layers have it.
    fn __len__(&self) -> usize {
        self.inner.len()
    }
}
