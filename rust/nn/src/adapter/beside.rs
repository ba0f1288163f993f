//! Frozen low-rank products, which layers add to their results in training besides the products of the trained adapter.
//! An example is a training adapter: a LoRA that is published for a distilled model, used in training and removed
//! afterwards.

use std::collections::BTreeMap;
use std::sync::Arc;

use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::ops::linear_group::LowRank;
use trainable_candle_core::ops::lora::{LoraWeights, lora_linear};
use trainable_candle_core::{DType, Error, Result, Tensor};

use super::{Adapter, LayerValues, lora};
use crate::Layer;
use crate::base::{Base, Operation};
use crate::slot::AdapterSlot;

/// A frozen LoRA. Each layer that has the LoRA adds a low-rank product to its result, whether or not the layer has
/// another adapter. Saved and merged weights do not include the LoRA.
///
/// The weights of the layers do not change. So [`set_enabled`](Self::set_enabled) with `false` restores the results
/// without the LoRA exactly in every dtype, and no copy of the weights is needed.
pub struct TrainingAdapter {
    /// The slots of the layers that have the LoRA.
    slots: Vec<AdapterSlot>,
    /// The number of elements of all factors.
    elements: usize,
}

impl TrainingAdapter {
    /// Attach each LoRA of `values` to the layer that its key names, and multiply its low-rank product by `scale`.
    ///
    /// # Errors
    /// [`Error::Config`] if a layer is missing, is not linear or already has a training adapter, or if an adapter is
    /// not a LoRA or lacks a factor; [`Error::Shape`] if the factors do not fit their layer; [`Error::OutOfMemory`] if
    /// the factors do not fit into the device's memory. After an error, no layer has changed.
    pub fn attach(values: &BTreeMap<String, LayerValues>, scale: f64, layers: &[(String, Layer<'_>)]) -> Result<Self> {
        let by_name: BTreeMap<&str, Layer<'_>> = layers.iter().map(|(name, layer)| (name.as_str(), *layer)).collect();
        let wrong = |name: &str, what: &str| Error::Config(format!("training adapter: {name}: {what}"));
        let mut products = Vec::with_capacity(values.len());
        for (name, adapter) in values {
            let layer = by_name.get(name.as_str()).ok_or_else(|| wrong(name, "the model has no such layer"))?;
            if layer.slot().has_product() {
                return Err(wrong(name, "the layer has a training adapter already"));
            }
            let kind = adapter.kind().map_err(|error| wrong(name, &error.to_string()))?;
            if kind.name != lora::KIND.name {
                return Err(wrong(name, &format!("the adapter is a \"{}\", expected a \"lora\"", kind.name)));
            }
            let base = layer.base();
            if base.operation != Operation::Linear {
                return Err(wrong(name, "the layer is a convolution, expected a linear layer"));
            }
            let (device, dtype) = (base.weight.device(), base.weight.dtype());
            let factor = |parameter: &str| {
                let stored = adapter.parameters.get(parameter);
                let stored = stored.ok_or_else(|| wrong(name, &format!("the parameter {parameter} is missing")))?;
                stored.to_dtype(DType::F32)?.to_device(device)
            };
            let (down, up) = (factor(lora::DOWN)?, factor(lora::UP)?);
            let rank = down.dims().first().copied().unwrap_or(0);
            if down.dims() != [rank, base.inputs()] || up.dims() != [base.rows(), rank] {
                let (down, up, weight) = (down.dims(), up.dims(), base.weight.dims());
                let text = format!("{name}: down {down:?} and up {up:?} do not fit a weight {weight:?}");
                return Err(Error::shape("training adapter", text));
            }
            let up = up.mul_scalar(adapter.scale * scale)?.to_dtype(dtype)?;
            products.push((layer.slot().clone(), Product { down: down.to_dtype(dtype)?, up }));
        }
        // From here on no error can occur, so either all slots change or none.
        let elements = products.iter().map(|(_, product)| product.down.elem_count() + product.up.elem_count()).sum();
        let slots = products.into_iter().map(|(slot, product)| {
            slot.set_product(Some(Arc::new(product)));
            slot
        });
        Ok(Self { slots: slots.collect(), elements })
    }

    /// Set whether the layers add the products. While they are disabled, the layers compute exactly the same as without
    /// the training adapter.
    pub fn set_enabled(&self, enabled: bool) {
        self.slots.iter().for_each(|slot| slot.enable_product(enabled));
    }

    /// Remove the training adapter from the layers.
    pub fn remove(&self) {
        self.slots.iter().for_each(|slot| slot.set_product(None));
    }

    /// The number of layers to which the training adapter was attached.
    pub const fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether the training adapter was attached to no layer.
    pub const fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The number of elements of all factors.
    pub const fn elements(&self) -> usize {
        self.elements
    }
}

/// The factors of one layer's product B A, in the layer's dtype; B includes the scale.
pub(crate) struct Product {
    /// A, (rank, in).
    down: Tensor,
    /// B, (out, rank).
    up: Tensor,
}

/// A frozen product together with the layer's adapter, if it has one. To the layer, both are one adapter.
pub(crate) struct Beside {
    /// The layer's adapter.
    inner: Option<Arc<dyn Adapter>>,
    product: Arc<Product>,
}

impl Beside {
    pub(crate) const fn new(inner: Option<Arc<dyn Adapter>>, product: Arc<Product>) -> Self {
        Self { inner, product }
    }

    /// Return the adapter's product and the frozen product as a single product, whose rank is the sum of their ranks.
    /// Without an adapter, this is the frozen product alone. None if the adapter is not a low-rank product, or if its
    /// scale is 0, by which the frozen product could not be divided.
    fn joined(&self, dtype: DType) -> Result<Option<LowRank>> {
        let (down, up) = (self.product.down.to_dtype(dtype)?, self.product.up.to_dtype(dtype)?);
        let Some(inner) = &self.inner else { return Ok(Some(LowRank { down, up, scale: 1.0 })) };
        let Some(trained) = inner.as_low_rank(dtype)?.filter(|trained| trained.scale != 0.0) else { return Ok(None) };
        // The joined product is multiplied by the adapter's scale, so the frozen `up` is divided by that scale.
        let up = if trained.scale == 1.0 { up } else { up.mul_scalar(1.0 / trained.scale)? };
        let down = Tensor::cat(&[&trained.down.to_dtype(dtype)?, &down], 0)?;
        let up = Tensor::cat(&[&trained.up.to_dtype(dtype)?, &up], 1)?;
        Ok(Some(LowRank { down, up, scale: trained.scale }))
    }
}

impl Adapter for Beside {
    fn forward(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        if let Some(LowRank { down, up, scale }) = self.joined(x.dtype())? {
            let (weight, bias) = (base.weight, base.bias);
            return lora_linear(x, LoraWeights { weight, bias, down: &down, up: &up, scale });
        }
        let result = match &self.inner {
            Some(inner) => inner.forward(x, base)?,
            None => base.forward(x)?,
        };
        let Product { down, up } = &*self.product;
        let (down, up) = (down.to_dtype(x.dtype())?, up.to_dtype(x.dtype())?);
        let no_bias = None;
        result.add(&linear(&linear(x, &down, no_bias)?, &up, no_bias)?)
    }

    fn as_low_rank(&self, dtype: DType) -> Result<Option<LowRank>> {
        self.joined(dtype)
    }

    /// Leaves the frozen product out: merged weights do not include it.
    fn adapted_weight(&self, base: &Base<'_>) -> Result<Tensor> {
        self.inner.as_ref().map_or_else(|| base.weight.values(base.weight.dtype()), |inner| inner.adapted_weight(base))
    }

    fn replaces_weight(&self) -> Option<Tensor> {
        self.inner.as_ref().and_then(|inner| inner.replaces_weight())
    }

    /// The scale of the trained adapter; 0 if there is none.
    fn scale(&self) -> f64 {
        self.inner.as_ref().map_or(0.0, |inner| inner.scale())
    }

    fn set_training(&self, training: bool) {
        if let Some(inner) = &self.inner {
            inner.set_training(training);
        }
    }
}
