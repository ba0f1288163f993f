//! [`AdapterSlot`]: the place in a layer where an adapter sits.

use std::sync::{Arc, PoisonError, RwLock};

use trainable_candle_core::{Result, Tensor};

use crate::adapter::Adapter;
use crate::base::Base;

/// Where an adapter sits. Shared, so that a set of adapters can be taken off again.
#[derive(Clone, Default)]
pub(crate) struct AdapterSlot(Arc<RwLock<Option<Arc<dyn Adapter>>>>);

impl AdapterSlot {
    /// What sits here.
    pub(crate) fn get(&self) -> Option<Arc<dyn Adapter>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Put `adapter` here, or leave the place empty.
    pub(crate) fn set(&self, adapter: Option<Arc<dyn Adapter>>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = adapter;
    }

    /// The layer's result, through the adapter if there is one.
    pub(crate) fn forward(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        match self.get() {
            Some(adapter) => adapter.forward(x, base),
            None => base.forward(x),
        }
    }

    /// The weight that the layer computes with: its own, or the merged one that stands in for it.
    pub(crate) fn effective_weight(&self, own: &Tensor) -> Tensor {
        self.get().and_then(|adapter| adapter.replaces_weight()).unwrap_or_else(|| own.clone())
    }
}
