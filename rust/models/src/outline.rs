//! The layers of a model without its weights, to check adapter files against.

use std::path::Path;

use trainable_candle_core::{Error, Result};
use trainable_candle_io::adapter_file::{Outline, PartNames};
use trainable_candle_nn::Module;

use crate::{clip, sdxl};

/// The parts of `model` that adapters may be for: with the sizes of the files at `weights`, or of the published model. What is not
/// at `weights` has the published sizes.
///
/// # Errors
/// [`Error::Config`] if the model is not known; as [`sdxl::lora_keys::outline`].
pub fn outlines(model: &str, weights: Option<&Path>) -> Result<Vec<Outline>> {
    if model != "sdxl" {
        return Err(Error::Config(format!("verify: there are no layer names of \"{model}\"; expected \"sdxl\"")));
    }
    let encoders = clip::lora_keys::outlines(weights).or_else(|_| clip::lora_keys::outlines(None))?;
    Ok(std::iter::once(sdxl::lora_keys::outline(weights)?).chain(encoders).collect())
}

/// The layers of `model` with the shapes of their weights in files.
pub(crate) fn outline_of(names: PartNames, model: &dyn Module) -> Outline {
    let layers = model.named_layers().into_iter().map(|(name, layer)| {
        let shape = match *layer.base().weight.dims() {
            [out, height, width, input] => vec![out, input, height, width],
            ref dims => dims.to_vec(),
        };
        (name, shape)
    });
    Outline { names, layers: layers.collect() }
}
