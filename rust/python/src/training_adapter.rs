//! Frozen training adapters, which undo the distillation of a distilled model while it is trained.

use pyo3::prelude::*;
use trainable_candle_models::Loaded;
use trainable_candle_nn::adapter;

use crate::call::catch_panics;
use crate::error::Result;

/// A frozen LoRA that `add_training_adapter` puts on a model, in addition to the adapter that is trained. Such LoRAs
/// are published for distilled models, for use in training only.
///
/// ```python
/// unet = tc.models.load("sdxl")
/// frozen = unet.add_training_adapter("adapter.safetensors")
/// adapter = unet.add_adapter(tc.LoraConfig(r=4))  # the adapter that is trained
/// frozen.set_enabled(False)  # such as for a preview
/// ```
#[pyclass(frozen, module = "trainable_candle")]
pub struct TrainingAdapter {
    inner: adapter::TrainingAdapter,
    // Keeps the model alive, because the training adapter acts on the model's layers.
    _model: Loaded,
}

impl TrainingAdapter {
    /// The Python object of a training adapter on `model`.
    pub const fn new(inner: adapter::TrainingAdapter, model: Loaded) -> Self {
        Self { inner, _model: model }
    }
}

#[pymethods]
impl TrainingAdapter {
    /// Set whether the model computes with the training adapter. While it is disabled, the model computes exactly what
    /// it would compute without the training adapter.
    fn set_enabled(&self, enabled: bool) -> Result<()> {
        catch_panics(|| {
            self.inner.set_enabled(enabled);
            Ok(())
        })
    }

    /// Remove the training adapter from the model.
    fn remove(&self) -> Result<()> {
        catch_panics(|| {
            self.inner.remove();
            Ok(())
        })
    }

    /// Return the number of elements of all factors of the training adapter.
    fn numel(&self) -> usize {
        self.inner.elements()
    }

    /// Return the number of layers to which the training adapter was added. `remove` does not change this number.
    fn __len__(&self) -> usize {
        self.inner.len()
    }
}
