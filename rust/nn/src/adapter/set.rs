//! [`AdapterSet`]: the adapters of a model, their parameters in one flat buffer.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::{Error, FlatBuffer, Result, Tensor, Var};

use super::{Adapter, AdapterSettings, LoraConfig};
use crate::linear::AdapterSlot;
use crate::{Layer, Linear};

/// One adapted layer.
struct Member {
    name: String,
    settings: AdapterSettings,
    weight: Tensor,
    slot: AdapterSlot,
    adapter: Arc<dyn Adapter>,
    vars: Vec<Var>,
}

/// A weight that stands in for the layer's own.
struct Merged {
    weight: Tensor,
}

impl Adapter for Merged {
    fn forward(&self, x: &Tensor, _weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        linear(x, &self.weight, bias)
    }

    fn merged_weight(&self, _weight: &Tensor) -> Result<Tensor> {
        Ok(self.weight.clone())
    }

    fn replaces_weight(&self) -> Option<Tensor> {
        Some(self.weight.clone())
    }

    fn vars(&self) -> Vec<Var> {
        Vec::new()
    }

    fn scale(&self) -> f64 {
        0.0
    }

    fn set_training(&self, _training: bool) {}
}

/// The adapters that one configuration put on a model. Owns their parameters and gradients as flat vectors.
pub struct AdapterSet {
    config: LoraConfig,
    members: Vec<Member>,
    buffer: FlatBuffer,
}

impl AdapterSet {
    /// Put an adapter on every layer that `config` targets. Until it is trained, the model computes what it did before.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration is wrong, matches no layer, or a layer already has an adapter.
    pub fn attach(config: LoraConfig, layers: &[(String, Layer<'_>)]) -> Result<Self> {
        config.validate()?;
        let kind = config.kind();
        let mut planned: Vec<(&String, &Linear<Tensor>, AdapterSettings)> = Vec::new();
        let mut values = Vec::new();
        for (name, Layer::Linear(linear)) in layers {
            if !config.targets(name)? {
                continue;
            }
            if linear.slot().read().unwrap_or_else(PoisonError::into_inner).is_some() {
                return Err(Error::Config(format!(
                    "add_adapter: {name} already has an adapter; call remove_adapter() or merge_adapter() first"
                )));
            }
            let settings = config.settings(name)?;
            values.extend((kind.init)(&linear.weight, &settings)?);
            planned.push((name, linear, settings));
        }
        if planned.is_empty() {
            let names: Vec<&str> = layers.iter().take(6).map(|(n, _)| n.as_str()).collect();
            return Err(Error::Config(format!(
                "add_adapter: target_modules {:?} match no layer; layers are named like {}",
                config.target_modules,
                names.join(", ")
            )));
        }
        let buffer = FlatBuffer::new(&values)?;
        let mut members = Vec::with_capacity(planned.len());
        for ((name, linear, settings), vars) in planned.into_iter().zip(buffer.vars().chunks(kind.suffixes.len())) {
            let adapter: Arc<dyn Adapter> = (kind.build)(vars, &settings)?.into();
            let slot = linear.slot().clone();
            *slot.write().unwrap_or_else(PoisonError::into_inner) = Some(adapter.clone());
            members.push(Member {
                name: name.clone(),
                settings,
                weight: linear.weight.clone(),
                slot,
                adapter,
                vars: vars.to_vec(),
            });
        }
        Ok(Self { config, members, buffer })
    }

    /// The configuration.
    pub const fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// The parameters and gradients as flat vectors.
    pub const fn buffer(&self) -> &FlatBuffer {
        &self.buffer
    }

    /// The trainable parameters in the order of the layers.
    pub fn vars(&self) -> &[Var] {
        self.buffer.vars()
    }

    /// The trainable parameters under peft's names (`blocks.0.attn.to_q.lora_A.weight`).
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        let suffixes = self.config.kind().suffixes;
        self.members
            .iter()
            .flat_map(|m| {
                suffixes.iter().zip(&m.vars).map(|(suffix, var)| (format!("{}.{suffix}", m.name), var.clone()))
            })
            .collect()
    }

    /// The adapted layers with their sizes.
    pub fn layers(&self) -> impl Iterator<Item = (&str, AdapterSettings)> {
        self.members.iter().map(|m| (m.name.as_str(), m.settings))
    }

    /// Overwrite the parameters from `values` under peft's names.
    ///
    /// # Errors
    /// [`Error::Config`] naming what is missing or unexpected; [`Error::Shape`] if a shape differs. Nothing is changed then.
    pub fn load(&self, values: &BTreeMap<String, Tensor>) -> Result<()> {
        let named = self.named_vars();
        let missing: Vec<&str> =
            named.iter().filter(|(n, _)| !values.contains_key(n)).map(|(n, _)| n.as_str()).collect();
        let unexpected: Vec<&str> =
            values.keys().filter(|k| !named.iter().any(|(n, _)| n == *k)).map(String::as_str).collect();
        if let (Some(_), _) | (_, Some(_)) = (missing.first(), unexpected.first()) {
            return Err(Error::Config(format!(
                "load_adapter: the file does not fit this adapter: {} missing (first: {}), {} unexpected (first: {})",
                missing.len(),
                missing.first().unwrap_or(&"-"),
                unexpected.len(),
                unexpected.first().unwrap_or(&"-"),
            )));
        }
        for (name, var) in &named {
            if values[name].dims() != var.dims() {
                return Err(Error::shape(
                    "load_adapter",
                    format!(
                        "{name} has shape {:?} in the file, {:?} here; is the rank the same?",
                        values[name].dims(),
                        var.dims()
                    ),
                ));
            }
        }
        for (name, var) in &named {
            var.set(&values[name].to_dtype(var.dtype())?)?;
        }
        Ok(())
    }

    /// Let the layers compute through the adapters, or as if there were none (the base, bit for bit).
    pub fn set_enabled(&self, enabled: bool) {
        for member in &self.members {
            *member.slot.write().unwrap_or_else(PoisonError::into_inner) = enabled.then(|| member.adapter.clone());
        }
    }

    /// Training (dropout on) or not.
    pub fn set_training(&self, training: bool) {
        for member in &self.members {
            member.adapter.set_training(training);
        }
    }

    /// Let every adapted layer compute with one merged weight, at the speed of the base. What is trained after that has no effect
    /// until [`set_enabled`](Self::set_enabled) takes the merged weights away again, which restores the adapters exactly.
    ///
    /// # Errors
    /// Those of the arithmetic; the layers are unchanged then.
    pub fn merge(&self) -> Result<()> {
        let merged = self.members.iter().map(|m| m.adapter.merged_weight(&m.weight)).collect::<Result<Vec<_>>>()?;
        for (member, weight) in self.members.iter().zip(merged) {
            *member.slot.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(Merged { weight }));
        }
        Ok(())
    }
}
