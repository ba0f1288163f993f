//! [`AdapterSlot`]: the slot of a layer that holds its adapter.

use std::sync::Arc;

use trainable_candle_core::capture::HostState;
use trainable_candle_core::{Result, Tensor, Weight, WeightRef};

use crate::adapter::Adapter;
use crate::base::Base;

/// Holds a layer's adapter. Shared, so that a set of adapters can be removed again.
#[derive(Clone)]
pub(crate) struct AdapterSlot(HostState<Occupant>);

/// An adapter, or none.
#[derive(Clone)]
struct Occupant(Option<Arc<dyn Adapter>>);

impl PartialEq for Occupant {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        }
    }
}

impl Default for AdapterSlot {
    fn default() -> Self {
        Self(HostState::new("the adapter of a layer", Occupant(None)))
    }
}

impl AdapterSlot {
    /// The adapter, if any.
    pub(crate) fn get(&self) -> Option<Arc<dyn Adapter>> {
        self.0.read().0
    }

    /// Put `adapter` into the slot, or empty it.
    pub(crate) fn set(&self, adapter: Option<Arc<dyn Adapter>>) {
        self.0.change(|occupant| occupant.0 = adapter);
    }

    /// The layer's result, with the adapter if there is one.
    pub(crate) fn forward(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        match self.get() {
            Some(adapter) => adapter.forward(x, base),
            None => base.forward(x),
        }
    }

    /// The weight that the layer computes with: its own, or a merged one.
    pub(crate) fn effective_weight(&self, own: WeightRef<'_>) -> Weight {
        let replaced = self.get().and_then(|adapter| adapter.replaces_weight());
        replaced.map_or_else(|| own.to_owned(), Weight::from)
    }
}
