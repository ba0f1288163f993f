//! [`AdapterSet`]: the adapters of a model, with their parameters in one flat buffer.

use std::collections::BTreeMap;
use std::sync::Arc;

use trainable_candle_core::ops::cayley::size_of;
use trainable_candle_core::ops::fake_quantize::Grid;
use trainable_candle_core::{DType, Error, FlatBuffer, Result, Tensor, Var, Weight};

use super::dora::PER_INPUT;
use super::kind::Parameters;
use super::merged::Merged;
use super::{Adapter, AdapterKind, AdapterSettings, LayerValues, LoraConfig, OftSide, QuantizationAware};
use crate::Layer;
use crate::base::{Base, Operation};
use crate::slot::AdapterSlot;

/// The last part of `LAYER.qat_scales`, the name of the variable with the logarithms of learned factors on scales.
const SCALES: &str = "qat_scales";

/// One adapted layer.
struct Member {
    /// The layer's name.
    name: String,
    kind: &'static AdapterKind,
    settings: AdapterSettings,
    /// The layer's frozen weight.
    weight: Weight,
    /// The layer's frozen bias.
    bias: Option<Tensor>,
    operation: Operation,
    /// Where the layer looks for an adapter.
    slot: AdapterSlot,
    adapter: Arc<dyn Adapter>,
    /// The adapter's variables by name, views of the set's buffer.
    parameters: Parameters<Var>,
    /// With quantization-aware training, the logarithms of learned factors on the rounded weight's scales, if any.
    log_factors: Option<Var>,
}

impl Member {
    fn base(&self) -> Base<'_> {
        Base { weight: (&self.weight).into(), bias: self.bias.as_ref(), operation: self.operation }
    }

    /// Whether the adapter has a parameter whose size depends on the rank.
    fn has_rank(&self) -> bool {
        self.parameters.iter().any(|(name, _)| self.kind.ranked.contains(name))
    }
}

/// An adapter that is about to be attached.
struct Planned<'a> {
    name: &'a str,
    layer: Layer<'a>,
    kind: &'static AdapterKind,
    settings: AdapterSettings,
    /// The initial values of its parameters, by name.
    values: Parameters<Tensor>,
}

/// One layer of a set.
pub struct AdaptedLayer<'a> {
    /// The layer's name.
    pub name: &'a str,
    /// The kind of its adapter.
    pub kind: &'static AdapterKind,
    /// The rank, scale and other settings of its adapter.
    pub settings: AdapterSettings,
    /// The frozen layer under the adapter.
    pub base: Base<'a>,
    /// The adapter's parameters under peft's names, in the layout of files.
    pub parameters: Parameters<Tensor>,
}

/// All adapters that one configuration puts on a model. The set owns their parameters and gradients as flat vectors.
pub struct AdapterSet {
    config: LoraConfig,
    members: Vec<Member>,
    buffer: FlatBuffer,
}

impl AdapterSet {
    /// Put an adapter on every layer that `config` targets. Until the adapters are trained, the model's results do not
    /// change, except by the rounding that `config.qat` requests.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration is invalid, matches no layer, or does not suit a layer, or if a layer
    /// already has an adapter; [`Error::OutOfMemory`] if the parameters do not fit into memory.
    pub fn attach(config: LoraConfig, layers: &[(String, Layer<'_>)]) -> Result<Self> {
        config.validate()?;
        let kind = config.kind()?;
        let mut planned = Vec::new();
        let selected = config.select(layers.iter().map(|(name, layer)| (name.as_str(), layer.is_conv())))?;
        for (name, layer) in layers {
            if selected.contains_key(name) {
                let mut settings = config.settings(name, layer.is_conv())?;
                let values = kind.init(&layer.base(), &settings).map_err(|e| at_layer(name, e))?;
                let values = values.into_iter().map(|(name, value)| Ok((name, value.to_dtype(config.dtype)?)));
                let values = values.collect::<Result<Parameters<Tensor>>>()?;
                if !values.iter().any(|(name, _)| kind.ranked.contains(name)) {
                    // Without a rank, alpha has no divisor; LyCORIS and programs that read its files use a scale of 1.
                    settings.scale = 1.0;
                }
                planned.push(Planned { name, layer: *layer, kind, settings, values });
            }
        }
        if planned.is_empty() {
            let names: Vec<&str> = layers.iter().take(6).map(|(n, _)| n.as_str()).collect();
            let excluded = match config.exclude_modules.as_slice() {
                [] => String::new(),
                excluded => format!(" that exclude_modules {excluded:?} leave"), // after "match no layer"
            };
            return Err(Error::Config(format!(
                "add_adapter: target_modules {:?} match no layer{excluded}; layers are named like {}",
                config.target_modules,
                names.join(", ")
            )));
        }
        Self::build(config, planned)
    }

    /// Attach each adapter of `values` to the layer that its key names. Other layers do not change.
    ///
    /// # Errors
    /// [`Error::Config`] if there are no values, if a layer is missing or already has an adapter, if no kind has the
    /// parameters, or if the layer cannot have this kind; [`Error::Shape`] if the parameters do not fit the layer;
    /// [`Error::OutOfMemory`] if they do not fit into memory.
    pub fn attach_values(values: &BTreeMap<String, LayerValues>, layers: &[(String, Layer<'_>)]) -> Result<Self> {
        let by_name: BTreeMap<&str, Layer<'_>> = layers.iter().map(|(name, layer)| (name.as_str(), *layer)).collect();
        let mut planned = Vec::new();
        let mut config = LoraConfig { target_modules: Vec::new(), ..LoraConfig::default() };
        for (name, given) in values {
            let Some(&layer) = by_name.get(name.as_str()) else {
                return Err(Error::Config(format!(
                    "load_adapter: the model has no layer \"{name}\"; the adapter is for another model"
                )));
            };
            let kind = given.kind().map_err(|e| Error::Config(format!("load_adapter: {name}: {e}")))?;
            let rank = given.rank()?;
            let parameters = in_memory(name, kind, &layer.base(), &given.parameters)?;
            let mut settings = AdapterSettings {
                rank,
                scale: given.scale,
                // DoRA has one magnitude for each input or one for each output.
                wd_on_output: !given.parameters.contains_key(PER_INPUT),
                cayley_neumann_terms: given.cayley_neumann_terms,
                ..AdapterSettings::default()
            };
            if let Some(side) = OftSide::of(parameters.iter().map(|(name, _)| *name)) {
                settings.oft_side = side;
                // A row of OFT's parameter has the elements of one block's strict upper triangle.
                // `size_of` computes the block's size from their number.
                let elements = parameters.first().and_then(|(_, value)| value.dims().get(1)).copied();
                settings.oft_block_size = elements.and_then(size_of).unwrap_or(settings.oft_block_size);
            }
            // Adds this layer and its settings to `config`.
            config.describe(name, kind, &settings);
            planned.push(Planned { name, layer, kind, settings, values: parameters });
        }
        if planned.is_empty() {
            return Err(Error::Config("load_adapter: the file has no adapters".into()));
        }
        Self::build(config, planned)
    }

    /// Copy the initial values of all adapters into one flat buffer, build the adapters over it and put them on the
    /// layers.
    fn build(config: LoraConfig, planned: Vec<Planned<'_>>) -> Result<Self> {
        if let Some(taken) = planned.iter().find(|p| p.layer.slot().is_taken()) {
            return Err(Error::Config(format!(
                "add_adapter: {} already has an adapter; call remove_adapter() first",
                taken.name
            )));
        }
        let grid_of_learned_scales = config.qat.filter(|_| config.qat_learned_scales);
        let mut values = Vec::new();
        for Planned { name, layer, values: initial, .. } in &planned {
            values.extend(initial.iter().map(|(_, value)| value.clone()));
            if let Some(grid) = grid_of_learned_scales {
                values.push(initial_logarithms(grid, &layer.base()).map_err(|e| at_layer(name, e))?);
            }
        }
        let buffer = FlatBuffer::new(&values)?;
        let mut vars = buffer.vars().iter().cloned();
        let mut members = Vec::with_capacity(planned.len());
        for Planned { name, layer, kind, settings, values } in planned {
            let parameters: Parameters<Var> =
                values.iter().map(|(name, _)| *name).zip(vars.by_ref().take(values.len())).collect();
            let log_factors = if grid_of_learned_scales.is_some() { vars.next() } else { None };
            let base = layer.base();
            let mut adapter = (kind.build)(&parameters, &base, &settings).map_err(|e| at_layer(name, e))?;
            if let Some(grid) = config.qat {
                let rounding = QuantizationAware::over(adapter, &base, &settings, grid);
                let rounding = rounding.map_err(|e| at_layer(name, e))?;
                adapter = Box::new(rounding.with_activations(config.qat_activations).with_scales(log_factors.clone()));
            }
            members.push(Member {
                name: name.to_string(),
                kind,
                settings,
                weight: base.weight.to_owned(),
                bias: base.bias.cloned(),
                operation: base.operation,
                slot: layer.slot().clone(),
                adapter: adapter.into(),
                parameters,
                log_factors,
            });
        }
        let set = Self { config, members, buffer };
        set.set_enabled(true);
        Ok(set)
    }

    /// The configuration. In a set that was read from a file, `target_modules` lists every adapted layer.
    pub const fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// The parameters and gradients as flat vectors.
    pub const fn buffer(&self) -> &FlatBuffer {
        &self.buffer
    }

    /// The trainable parameters in the order of the layers, including the logarithms of learned factors.
    pub fn vars(&self) -> &[Var] {
        self.buffer.vars()
    }

    /// The trainable parameters under peft's names (`blocks.0.attn.to_q.lora_A.weight`), and the logarithms of learned
    /// factors as `qat_scales`. Parameters of convolutions are channels-last; [`Layout`](super::Layout) describes their
    /// shapes in files.
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        self.members
            .iter()
            .flat_map(|m| {
                let log_factors = m.log_factors.iter().map(|var| (SCALES, var));
                let all = m.parameters.iter().map(|(suffix, var)| (*suffix, var)).chain(log_factors);
                all.map(|(suffix, var)| (format!("{}.{suffix}", m.name), var.clone()))
            })
            .collect()
    }

    /// Compute the learned factors on the scales of rounded weights, by layer. The list is empty if no factors are
    /// learned.
    ///
    /// # Errors
    /// The errors of the operations on tensors.
    pub fn scales(&self) -> Result<Vec<(&str, Tensor)>> {
        let learned = self.members.iter().filter_map(|m| Some((m.name.as_str(), m.log_factors.as_ref()?)));
        learned.map(|(name, var)| Ok((name, var.detach().exp()?))).collect()
    }

    /// Set the learned factors by layer, as returned by [`scales`](Self::scales). Layers that are not in `factors` keep
    /// their factors.
    ///
    /// # Errors
    /// [`Error::Shape`] if the factors of a layer do not have the shape of its scales, [`Error::Config`] if a factor is
    /// not a finite number above 0. After an error, nothing has changed.
    pub fn set_scales(&self, factors: &BTreeMap<String, Tensor>) -> Result<()> {
        let mut updates = Vec::new();
        for member in &self.members {
            let Some((var, value)) = member.log_factors.as_ref().zip(factors.get(&member.name)) else { continue };
            if value.dims() != var.dims() {
                let text = format!("{}.{SCALES} has shape {:?}, expected {:?}", member.name, value.dims(), var.dims());
                return Err(Error::shape("load_adapter", text));
            }
            let values = value.to_dtype(DType::F32)?.to_vec::<f32>()?;
            let is_valid = |factor: &f32| *factor > 0.0 && factor.is_finite();
            if let Some(wrong) = values.iter().find(|&factor| !is_valid(factor)) {
                let name = &member.name;
                let text = format!("load_adapter: {name}.{SCALES}: found {wrong}, expected finite factors above 0");
                return Err(Error::Config(text));
            }
            let logarithms = values.into_iter().map(f32::ln).collect::<Vec<_>>();
            updates.push((var, Tensor::from_vec(logarithms, var.dims(), var.device())?));
        }
        updates.into_iter().try_for_each(|(var, value)| var.set(&value))
    }

    /// Return the adapted layers, with parameters laid out as in files.
    ///
    /// # Errors
    /// The errors of the operations on tensors.
    pub fn layers(&self) -> Result<Vec<AdaptedLayer<'_>>> {
        self.members
            .iter()
            .map(|m| {
                let base = m.base();
                let parameters = m
                    .parameters
                    .iter()
                    .map(|(name, var)| {
                        // Every name is one of the kind's, so the default is never used.
                        let (_, layout) = m.kind.parameter(name).unwrap_or((name, super::Layout::Same));
                        Ok((*name, layout.to_file(&base, &var.detach())?))
                    })
                    .collect::<Result<_>>()?;
                Ok(AdaptedLayer { name: &m.name, kind: m.kind, settings: m.settings, base, parameters })
            })
            .collect()
    }

    /// The number of adapted layers.
    pub const fn len(&self) -> usize {
        self.members.len()
    }

    /// Always false: a set has at least one adapted layer.
    pub const fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Overwrite the parameters with `values` from a file. The file must have the same layers, kinds, ranks and scales
    /// as this set.
    ///
    /// # Errors
    /// [`Error::Config`] that names a missing or unexpected parameter, or a kind, a rank, a scale or a setting of OFT
    /// that differs; [`Error::Shape`] if a shape differs. After an error, nothing has changed.
    pub fn load(&self, values: &BTreeMap<String, LayerValues>) -> Result<()> {
        self.check_settings(values)?;
        let names = |m: &Member| m.parameters.iter().map(|(name, _)| format!("{}.{name}", m.name)).collect::<Vec<_>>();
        let own_names: Vec<String> = self.members.iter().flat_map(names).collect();
        let file_names: Vec<String> = values
            .iter()
            .flat_map(|(layer, given)| given.parameters.keys().map(move |name| format!("{layer}.{name}")))
            .collect();
        let missing: Vec<&String> = own_names.iter().filter(|name| !file_names.contains(name)).collect();
        let unexpected: Vec<&String> = file_names.iter().filter(|name| !own_names.contains(name)).collect();
        if !missing.is_empty() || !unexpected.is_empty() {
            return Err(Error::Config(format!(
                "load_adapter: the file does not fit this adapter: {} missing (first: {}), {} unexpected (first: {})",
                missing.len(),
                missing.first().map_or("-", |n| n.as_str()),
                unexpected.len(),
                unexpected.first().map_or("-", |n| n.as_str()),
            )));
        }
        let mut updates = Vec::new();
        for member in &self.members {
            let given = &values[&member.name];
            let loaded = in_memory(&member.name, member.kind, &member.base(), &given.parameters)?;
            // Both have the order of the kind's parameters, and the same names.
            for ((name, value), (_, var)) in loaded.into_iter().zip(&member.parameters) {
                if value.dims() != var.dims() {
                    return Err(Error::shape(
                        "load_adapter",
                        format!(
                            "{}.{name} has shape {:?} in the file, {:?} here (channels last); is the {} the same?",
                            member.name,
                            value.dims(),
                            var.dims(),
                            if member.kind.ranked.is_empty() { "oft_block_size" } else { "rank" },
                        ),
                    ));
                }
                updates.push((var, value));
            }
        }
        for (var, value) in updates {
            var.set(&value.to_dtype(var.dtype())?)?;
        }
        Ok(())
    }

    /// Check that kinds, ranks, scales and settings of OFT agree in the layers that are both in this set and in
    /// `values`.
    fn check_settings(&self, values: &BTreeMap<String, LayerValues>) -> Result<()> {
        for member in &self.members {
            let Some(given) = values.get(&member.name) else { continue };
            let (kind, rank) = (given.kind().map_err(|e| at_layer(&member.name, e))?, given.rank()?);
            // `own` describes this set's adapter, and says what to do.
            let differs = |found: &str, own: &str| {
                Err(Error::Config(format!(
                    "load_adapter: {}: the file has {found}, this adapter is {own}",
                    member.name
                )))
            };
            if kind.name != member.kind.name {
                let found = format!("a \"{}\"", kind.name);
                let own =
                    format!("a \"{}\"; make it with adapter=\"{1}\" (--adapter {1})", member.kind.name, kind.name);
                return differs(&found, &own);
            }
            let own_side = OftSide::of(member.parameters.iter().map(|(name, _)| *name));
            if let Some(side) = OftSide::of(given.parameters.keys().map(String::as_str)).filter(|_| own_side.is_some())
            {
                if own_side != Some(side) {
                    let side = side.name();
                    let own = format!("OFT of the other side; make it with oft_side=\"{side}\" (--oft-side {side})");
                    return differs(&format!("OFT of {side}s"), &own);
                }
                if given.cayley_neumann_terms != member.settings.cayley_neumann_terms {
                    let arguments = |terms: Option<usize>| {
                        terms.map_or("use_cayley_neumann=False".into(), |terms| {
                            format!("use_cayley_neumann=True, num_cayley_neumann_terms={terms}")
                        })
                    };
                    let own = arguments(member.settings.cayley_neumann_terms);
                    let own = format!("made with {own}; make it with the file's values");
                    return differs(&arguments(given.cayley_neumann_terms), &own);
                }
            }
            // A rank of 0 means that the adapter has no rank.
            let own_rank = if member.has_rank() { member.settings.rank } else { 0 };
            if (rank == 0) != (own_rank == 0) {
                // Either the file or this set has parameters that the other lacks. The caller (`load`) reports them.
                continue;
            }
            // Files store f32, so equal scales may differ a little.
            let (file_scale, own_scale) = (given.scale, member.settings.scale);
            let same_scale = (file_scale - own_scale).abs() <= 1e-4 * own_scale.abs();
            if rank == 0 && !same_scale {
                let own = format!("of scale {own_scale}; remove it, and attach the file with load_adapter()");
                return differs(&format!("the scale {file_scale}"), &own);
            }
            if rank != own_rank || !same_scale {
                let (alpha, own_alpha) = (rounded(file_scale * rank as f64), rounded(own_scale * own_rank as f64));
                let found = format!("rank {rank} and alpha {alpha}");
                let own = format!(
                    "of rank {own_rank} and alpha {own_alpha}; make it with r={rank} and lora_alpha={alpha} \
                     (--rank {rank} --alpha {alpha})"
                );
                return differs(&found, &own);
            }
        }
        Ok(())
    }

    /// If `enabled`, put the adapters on the layers, in place of merged weights if there are any. Otherwise remove the
    /// adapters or merged weights; the layers then compute the same results as before [`attach`](Self::attach), bit for
    /// bit.
    pub fn set_enabled(&self, enabled: bool) {
        for member in &self.members {
            member.slot.set(enabled.then(|| member.adapter.clone()));
        }
    }

    /// Set whether the adapters are in training mode, in which dropout is active.
    pub fn set_training(&self, training: bool) {
        for member in &self.members {
            member.adapter.set_training(training);
        }
    }

    /// Make every adapted layer compute with one merged weight, as fast as an unquantized layer without an adapter.
    /// Later changes of the adapters have no effect until [`set_enabled`](Self::set_enabled) with `true` puts the
    /// adapters in the place of the merged weights again.
    ///
    /// # Errors
    /// The errors of the operations on tensors. After an error, the layers have not changed.
    pub fn merge(&self) -> Result<()> {
        let merged = self.members.iter().map(|m| m.adapter.merged_weight(&m.base())).collect::<Result<Vec<_>>>()?;
        for (member, weight) in self.members.iter().zip(merged) {
            member.slot.set(Some(Arc::new(Merged { weight })));
        }
        Ok(())
    }
}

/// Make the initial logarithms of the factors on a layer's scales: zeros, for factors of 1.
fn initial_logarithms(grid: Grid, base: &Base<'_>) -> Result<Tensor> {
    let dims = base.weight.dims();
    // For a weight that does not fit the grid, `QuantizationAware` returns the error later.
    let count = if grid.check(dims).is_ok() { grid.scales(base.rows(), base.columns()) } else { 0 };
    Tensor::zeros(count, DType::F32, base.weight.device())
}

/// Convert a layer's parameters from a file to their layout in memory, to f32 and to the layer's device. The result has
/// the order of the kind's parameters.
fn in_memory(
    layer: &str,
    kind: &AdapterKind,
    base: &Base<'_>,
    given: &BTreeMap<String, Tensor>,
) -> Result<Parameters<Tensor>> {
    kind.parameters
        .iter()
        .filter_map(|(name, layout)| Some((*name, *layout, given.get(*name)?)))
        .map(|(name, layout, value)| {
            let value = layout.from_file(base, value).map_err(|e| at_layer(&format!("{layer}.{name}"), e))?;
            Ok((name, value.to_dtype(DType::F32)?.to_device(base.weight.device())?))
        })
        .collect()
}

/// Round a number for a message. Files store f32, so a number from a file has more digits in f64 than the user gave.
fn rounded(number: f64) -> f64 {
    (number * 1e5).round() / 1e5
}

/// Put the layer's name at the start of the message of a shape or configuration error.
fn at_layer(layer: &str, error: Error) -> Error {
    match error {
        Error::Shape { op, message } => Error::Shape { op, message: format!("{layer}: {message}") },
        Error::Config(message) => Error::Config(format!("{layer}: {message}")),
        other => other,
    }
}
