//! The assignment of layers to the modules of a file. A module is an adapter under one name in the file; it holds the
//! adapters of one or several layers.

use std::collections::BTreeMap;

use trainable_candle_core::{Error, Result};
use trainable_candle_nn::adapter::AdaptedLayer;

use super::readers::{self, Tool};
use super::{AdapterFormat, OP, PartNames, Style, oft};
use crate::form::{Form, Key};

/// The modules of a part by their names in a file. Each entry lists the module's layers by index, with the rows of the
/// module that belong to each layer.
pub(super) type Modules = BTreeMap<String, Vec<(Form, usize)>>;

/// The properties of a layer's adapter that decide its place in a file.
#[derive(Clone, Copy)]
pub(super) struct Adapted<'a> {
    pub name: &'a str,
    pub kind: &'static str,
    /// For DoRA: whether it has one magnitude for each input.
    pub per_input: bool,
    /// For `LoKr`: whether its first factor (`lokr_w1`) has an odd number of rows. For OFT of outputs: whether it has an
    /// odd number of blocks.
    pub odd_rows: bool,
    /// For OFT of outputs: the size of its blocks, if it is known.
    pub block: Option<usize>,
}

impl<'a> Adapted<'a> {
    /// The properties of a layer in an adapter set.
    pub(super) fn of(layer: &AdaptedLayer<'a>) -> Self {
        let height = |name: &str| {
            layer.parameters.iter().find(|(known, _)| *known == name).and_then(|(_, value)| value.dims().first())
        };
        let slow = height("lokr_w1").or_else(|| height("lokr_w1_a")).or_else(|| height(oft::BLOCKS));
        let blocks = layer.parameters.iter().find(|(name, _)| *name == oft::BLOCKS).map(|(_, value)| value);
        Self {
            name: layer.name,
            kind: layer.kind.name,
            per_input: height("dora_scale").is_some(),
            odd_rows: slow.is_some_and(|rows| rows % 2 == 1),
            block: blocks.and_then(|blocks| blocks.dims().last().copied()),
        }
    }
}

/// Check that a format can represent adapters of a kind on some layers of a part. DoRA is assumed to have one magnitude
/// for each output.
///
/// # Errors
/// [`Error::Argument`] if the format cannot represent them; the message names a format that can.
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

/// The modules of a part in a format. kohya's format has two styles of names. If a file mixes them, diffusers ignores the
/// names of one style, so all layers of a part get names of the same style.
///
/// # Errors
/// As [`check_format`].
pub(super) fn modules(format: AdapterFormat, names: &PartNames, layers: &[Adapted<'_>]) -> Result<Modules> {
    if format == AdapterFormat::Diffusers
        && let Some(layer) = layers.iter().find(|layer| !matches!(layer.kind, "lora" | "dora"))
    {
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
    let falls_back =
        format == AdapterFormat::ComfyUi && readers::knows_usual(names.readers, Tool::ComfyUi, Style::Diffusers);
    let mut modules = Modules::new();
    for (key, members) in joined {
        let held: Vec<(Form, Adapted<'_>)> = members.iter().map(|&(form, index)| (form, layers[index])).collect();
        match obstacle(&held) {
            None => {
                modules.insert(key, members);
            }
            Some(_) if falls_back => {
                let own = |index: usize| names.key(layers[index].name, Style::Diffusers).unwrap_or_default();
                modules.extend(members.iter().map(|&(_, index)| (own(index), vec![(Form::Plain, index)])));
            }
            Some(why) => {
                let Adapted { name, kind, .. } = layers[members[0].1];
                let (format, cure) = (format.name(), if names.folds() { "comfyui" } else { "peft" });
                return Err(Error::argument(
                    OP,
                    format!(
                        "format \"{format}\" has {name} in the matrix {key}, which cannot hold this \"{kind}\" adapter: \
                         {why}; save with format \"{cure}\""
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
        format!("format \"{}\" has no name for the layer {layer}; save with format \"peft\"", format.name()),
    )
}

/// The reason why adapters cannot be in one module; `None` if they can.
fn obstacle(members: &[(Form, Adapted<'_>)]) -> Option<&'static str> {
    let [(form, first), ..] = members else { return None };
    let Form::Rows { of, .. } = *form else {
        return (*form == Form::Swapped && first.odd_rows)
            .then_some("it has an odd number of rows or blocks, so its two halves cannot be exchanged");
    };
    let shares: usize = members.iter().map(|(form, _)| count(*form)).sum();
    match first.kind {
        kind if members.iter().any(|(_, layer)| layer.kind != kind) => Some("its layers have different adapters"),
        "lora" | "loha" => None,
        "dora" if first.per_input => {
            Some("it has one magnitude for each input, which applies to all rows of the matrix")
        }
        "oft" if members.iter().any(|(_, layer)| layer.block != first.block) => {
            Some("its layers have blocks of different sizes")
        }
        "oft" => None,
        "dora" if shares < of => Some("DoRA would change the layers in it that have no adapter"),
        "dora" => None,
        _ => Some("its parameters apply to all rows of the matrix"),
    }
}

fn count(form: Form) -> usize {
    if let Form::Rows { count, .. } = form { count } else { 1 }
}
