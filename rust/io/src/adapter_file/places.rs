//! The layers that the modules of a file belong to.

use std::collections::HashMap;

use super::{PartNames, Style};
use crate::form::{Form, Key};

/// The meaning of a module's name.
pub(super) struct Place<'a> {
    /// The index of the part.
    pub part: usize,
    /// The style of the name.
    pub style: Style,
    /// The layers of the module, with the rows of the module that belong to each.
    pub layers: Vec<(&'a str, Form)>,
}

/// The [`Place`] of every name under which a file may hold the adapter of a layer.
pub(super) fn places<'a>(parts: impl Iterator<Item = (&'a PartNames, Vec<&'a str>)>) -> HashMap<String, Place<'a>> {
    let mut places: HashMap<String, Place<'a>> = HashMap::new();
    for (part, (names, layers)) in parts.enumerate() {
        for layer in layers {
            for style in Style::ALL {
                let Some(Key { key, form }) = names.place(layer, style) else { continue };
                let place = places.entry(key).or_insert_with(|| Place { part, style, layers: Vec::new() });
                // A name that two styles share belongs to the first style.
                if (place.part, place.style) == (part, style) {
                    place.layers.push((layer, form));
                }
            }
        }
    }
    places
}
