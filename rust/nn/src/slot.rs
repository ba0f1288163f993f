//! [`AdapterSlot`]: the place in a layer for its adapter.

use std::sync::Arc;

use trainable_candle_core::capture::HostState;
use trainable_candle_core::{Result, Tensor, Weight, WeightRef};

use crate::adapter::{Adapter, Beside, Product};
use crate::base::Base;

/// Holds a layer's adapter and frozen product. Clones share their contents. An adapter set keeps a clone, with which it
/// removes the adapter later.
#[derive(Clone)]
pub(crate) struct AdapterSlot(HostState<Occupant>);

/// An adapter, and a frozen low-rank product whose result is added to the result of the adapted layer, such as that of
/// a LoRA that is used only in training. Each of the two may be missing.
#[derive(Clone, Default)]
struct Occupant {
    adapter: Option<Arc<dyn Adapter>>,
    product: Option<Arc<Product>>,
    /// If there is a product: an adapter that computes `adapter` and `product` together. It is not made anew for each
    /// call, because a CUDA graph is recorded again if the object has changed.
    both: Option<Arc<dyn Adapter>>,
    /// Whether the product is disabled.
    is_product_disabled: bool,
}

/// Two occupants are equal if the layer computes with the same adapter object for both, or with none for both. A CUDA
/// graph stays valid for an equal occupant.
impl PartialEq for Occupant {
    fn eq(&self, other: &Self) -> bool {
        match (self.active(), other.active()) {
            (Some(mine), Some(theirs)) => Arc::ptr_eq(mine, theirs),
            (mine, theirs) => mine.is_none() && theirs.is_none(),
        }
    }
}

impl Occupant {
    /// The adapter that the layer computes with, if there is one.
    fn active(&self) -> Option<&Arc<dyn Adapter>> {
        self.both.as_ref().filter(|_| !self.is_product_disabled).or(self.adapter.as_ref())
    }

    /// Sets `both` after `adapter` or `product` has changed.
    fn update_both(&mut self) {
        let beside = |product: &Arc<Product>| Arc::new(Beside::new(self.adapter.clone(), product.clone()));
        self.both = self.product.as_ref().map(|product| beside(product) as Arc<dyn Adapter>);
    }
}

impl Default for AdapterSlot {
    fn default() -> Self {
        Self(HostState::new("the adapter of a layer", Occupant::default()))
    }
}

impl AdapterSlot {
    /// The adapter that the layer computes with, if there is one.
    pub(crate) fn get(&self) -> Option<Arc<dyn Adapter>> {
        self.0.read().active().cloned()
    }

    /// Whether an adapter is attached. A frozen product does not count.
    pub(crate) fn is_taken(&self) -> bool {
        self.0.read().adapter.is_some()
    }

    /// Puts `adapter` into the slot, or removes the slot's adapter if `adapter` is None. A frozen product in the slot
    /// does not change.
    pub(crate) fn set(&self, adapter: Option<Arc<dyn Adapter>>) {
        self.0.change(|occupant| {
            occupant.adapter = adapter;
            occupant.update_both();
        });
    }

    /// Sets the frozen product and enables it, or removes it if `product` is None. An attached adapter does not change.
    pub(crate) fn set_product(&self, product: Option<Arc<Product>>) {
        self.0.change(|occupant| {
            occupant.product = product;
            occupant.is_product_disabled = false;
            occupant.update_both();
        });
    }

    /// Enables or disables the frozen product.
    pub(crate) fn enable_product(&self, enabled: bool) {
        self.0.change(|occupant| occupant.is_product_disabled = !enabled);
    }

    /// Whether there is a frozen product.
    pub(crate) fn has_product(&self) -> bool {
        self.0.read().product.is_some()
    }

    /// The result of the layer with the frozen parameters `base`, including its adapter and its frozen product.
    pub(crate) fn forward(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        match self.get() {
            Some(adapter) => adapter.forward(x, base),
            None => base.forward(x),
        }
    }

    /// The weight that the layer computes with: its own weight, or the merged weight while an adapter is merged.
    pub(crate) fn effective_weight(&self, own: WeightRef<'_>) -> Weight {
        let replaced = self.get().and_then(|adapter| adapter.replaces_weight());
        replaced.map_or_else(|| own.to_owned(), Weight::from)
    }
}
