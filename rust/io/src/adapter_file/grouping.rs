//! The assignment of a model's layers to the modules of an adapter file. A module is the set of adapter parameters
//! under one name in the file. It holds the adapter of one layer, or the joined adapters of several layers.

use std::collections::BTreeMap;

use trainable_candle_core::{Error, Result};
use trainable_candle_nn::adapter::AdaptedLayer;

use super::readers::{self, Tool};
use super::{AdapterFormat, OP, PartNames, Style, oft};
use crate::form::{Form, Key};

/// The modules of a part by their names in a file. Each module lists its layers as (the rows of the module that belong
/// to the layer, the layer's index among the layers given to [`modules`]).
pub(super) type Modules = BTreeMap<String, Vec<(Form, usize)>>;

/// The properties of a layer's adapter that decide which module of a file can hold it.
#[derive(Clone, Copy)]
pub(super) struct Adapted<'a> {
    pub name: &'a str,
    pub kind: &'static str,
    /// For DoRA: true if the adapter has one magnitude for each input, false if it has one for each output.
    pub per_input: bool,
    /// For `LoKr`: whether the left factor (`lokr_w1` or `lokr_w1_a`) has an odd number of rows. For OFT that rotates
    /// the outputs: whether the number of blocks is odd.
    pub odd_rows: bool,
    /// For OFT that rotates the outputs: the number of outputs in a block. `None` for other adapters, or if it is
    /// unknown.
    pub block: Option<usize>,
}

impl<'a> Adapted<'a> {
    /// The properties of a layer in an adapter set.
    pub(super) fn of(layer: &AdaptedLayer<'a>) -> Self {
        let height = |name: &str| {
            layer.parameters.iter().find(|(known, _)| *known == name).and_then(|(_, value)| value.dims().first())
        };
        let rows = height("lokr_w1").or_else(|| height("lokr_w1_a")).or_else(|| height(oft::BLOCKS));
        let blocks = layer.parameters.iter().find(|(name, _)| *name == oft::BLOCKS).map(|(_, value)| value);
        Self {
            name: layer.name,
            kind: layer.kind.name,
            // Only magnitudes of inputs have this name.
            per_input: height("dora_scale").is_some(),
            odd_rows: rows.is_some_and(|rows| rows % 2 == 1),
            block: blocks.and_then(|blocks| blocks.dims().last().copied()),
        }
    }
}

/// Check that a file format can represent adapters of the kind `kind` on the given layers of a part. `None` stands for
/// the part's default format. The check does not know the adapters' shapes. It assumes that a DoRA has one
/// magnitude for each output, that the left factor of LoKr has an even number of rows, and that OFT has an even number
/// of blocks, all of one size.
///
/// # Errors
/// [`Error::Argument`] if the format cannot represent these adapters; the message names a format that can.
pub fn check_format(
    format: Option<AdapterFormat>,
    names: &PartNames,
    kind: &'static str,
    layers: &[&str],
) -> Result<()> {
    let layers: Vec<Adapted<'_>> =
        layers.iter().map(|name| Adapted { name, kind, per_input: false, odd_rows: false, block: None }).collect();
    modules(format.unwrap_or_else(|| names.default_format()), names, &layers).map(drop)
}

/// The modules of a part in a file of the given format. kohya's format has two styles of names
/// ([`Style::KohyaOriginal`] and [`Style::Kohya`]). If a file mixes the two styles, diffusers ignores the names of one
/// of them. Therefore all layers of a part get names of the same style.
///
/// # Errors
/// As [`check_format`].
pub(super) fn modules(format: AdapterFormat, names: &PartNames, layers: &[Adapted<'_>]) -> Result<Modules> {
    if format == AdapterFormat::Diffusers
        && let Some(layer) = layers.iter().find(|layer| !matches!(layer.kind, "lora" | "dora"))
    {
        // `folds` is true only for a denoiser of which `ComfyUI` reads diffusers' names. Then format "comfyui" can hold
        // adapters of all kinds, because it falls back to these names below.
        let instead = if names.folds() { "comfyui" } else { "kohya" };
        return Err(Error::argument(
            OP,
            format!("diffusers does not load \"{}\" adapters; save with format \"{instead}\"", layer.kind),
        ));
    }
    let style = match format {
        AdapterFormat::Kohya if layers.iter().all(|layer| (names.original)(layer.name).is_some()) => {
            Style::KohyaOriginal
        }
        AdapterFormat::Kohya => Style::Kohya,
        AdapterFormat::Diffusers => Style::Diffusers,
        AdapterFormat::Peft => Style::Peft,
        AdapterFormat::ComfyUi => Style::ComfyUi,
    };
    let mut joined = Modules::new();
    for (index, layer) in layers.iter().enumerate() {
        let Key { key, form } = names.place(layer.name, style).ok_or_else(|| unnamed(format, layer.name))?;
        joined.entry(key).or_default().push((form, index));
    }
    // Layers whose adapters cannot share a module are stored under diffusers' names, if `ComfyUI` reads these.
    let falls_back =
        format == AdapterFormat::ComfyUi && readers::knows_usual(names.readers, Tool::ComfyUi, Style::Diffusers);
    let mut modules = Modules::new();
    for (key, members) in joined {
        let adapters: Vec<(Form, Adapted<'_>)> = members.iter().map(|&(form, index)| (form, layers[index])).collect();
        match obstacle(&adapters) {
            None => {
                modules.insert(key, members);
            }
            Some(_) if falls_back => {
                // Diffusers' style has a name for every layer, so the default is never used.
                let own_key = |index: usize| names.key(layers[index].name, Style::Diffusers).unwrap_or_default();
                modules.extend(members.iter().map(|&(_, index)| (own_key(index), vec![(Form::Plain, index)])));
            }
            Some(why) => {
                let Adapted { name, kind, .. } = layers[members[0].1];
                let (format, cure) = (format.name(), if names.folds() { "comfyui" } else { "peft" });
                return Err(Error::argument(
                    OP,
                    format!(
                        "format \"{format}\" stores the adapter of \"{name}\" in the module \"{key}\", which cannot \
                         hold this \"{kind}\" adapter: {why}; save with format \"{cure}\""
                    ),
                ));
            }
        }
    }
    Ok(modules)
}

fn unnamed(format: AdapterFormat, layer: &str) -> Error {
    Error::argument(
        OP,
        format!("format \"{}\" has no name for the layer \"{layer}\"; save with format \"peft\"", format.name()),
    )
}

/// The reason why one module cannot hold the adapters of all its layers; `None` if it can.
fn obstacle(members: &[(Form, Adapted<'_>)]) -> Option<&'static str> {
    let [(form, first), ..] = members else { return None };
    // A module of one layer. `Swapped`: the file has the second half of the rows first.
    let Form::Rows { of, .. } = *form else {
        return (*form == Form::Swapped && first.odd_rows)
            .then_some("the adapter has an odd number of rows or blocks, so its two halves cannot be exchanged");
    };
    // How many of the `of` equal shares of the module's rows belong to layers with adapters.
    let shares: usize = members.iter().map(|(form, _)| count(*form)).sum();
    match first.kind {
        kind if members.iter().any(|(_, layer)| layer.kind != kind) => {
            Some("the module's layers have adapters of different kinds")
        }
        "lora" | "loha" => None,
        "dora" if first.per_input => {
            Some("the adapter has one magnitude for each input, which applies to all outputs of the module")
        }
        "oft" if members.iter().any(|(_, layer)| layer.block != first.block) => {
            Some("the module's layers have blocks of different sizes")
        }
        "oft" => None,
        "dora" if shares < of => Some("DoRA would change the module's layers that have no adapter"),
        "dora" => None,
        _ => Some("the adapter's parameters apply to all outputs of the module"),
    }
}

/// The number of shares of the module's rows that a layer has.
fn count(form: Form) -> usize {
    if let Form::Rows { count, .. } = form { count } else { 1 }
}
