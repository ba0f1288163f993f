//! The layers that the modules of an adapter file belong to. A module is the tensors whose keys start with the same
//! name: the adapter of one layer, or of several layers whose weights are one matrix in the original checkpoint.

use std::collections::HashMap;

use super::{PartNames, Style};
use crate::form::{Form, Key};

/// What a module's name in a file stands for.
pub(super) struct Place<'a> {
    /// The index of the part (a model of the pipeline) whose layers the module adapts.
    pub part: usize,
    /// The style in which the name is written, such as kohya's or diffusers'.
    pub style: Style,
    /// The module's layers, each with the rows of the module that belong to the layer.
    pub layers: Vec<(&'a str, Form)>,
}

/// A map from every name that a module may have in a file, in any style, to the name's [`Place`]. `parts` yields the
/// names of each part and the part's layers.
pub(super) fn places<'a>(parts: impl Iterator<Item = (&'a PartNames, Vec<&'a str>)>) -> HashMap<String, Place<'a>> {
    let mut places: HashMap<String, Place<'a>> = HashMap::new();
    for (part, (names, layers)) in parts.enumerate() {
        for layer in layers {
            for style in Style::ALL {
                // `key` is the module's name in this style. `form` says which rows of the module belong to the layer.
                let Some(Key { key, form }) = names.place(layer, style) else { continue };
                let place = places.entry(key).or_insert_with(|| Place { part, style, layers: Vec::new() });
                // If several parts or styles give the same name, the name belongs to the first part and style that do.
                if (place.part, place.style) == (part, style) {
                    place.layers.push((layer, form));
                }
            }
        }
    }
    places
}
