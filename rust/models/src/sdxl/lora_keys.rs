//! What other tools call the UNet and its layers in adapter files.

use std::path::Path;
use std::sync::Arc;

use trainable_candle_core::{DType, Result};
use trainable_candle_io::adapter_file::{BaseModel, Outline, PartNames};
use trainable_candle_nn::Source;

use super::{SDXLUNet, UNetConfig, keys};
use crate::outline::outline_of;
use crate::{Choice, Pretrained};

/// SDXL as metadata of adapter files names it.
pub(crate) const BASE: BaseModel =
    BaseModel { version: "sdxl_base_v1-0", architecture: "stable-diffusion-xl-v1-base", resolution: 1024 };

/// Pixels along one side of a picture for each of the latents.
const DOWNSCALE: usize = 8;

/// The names of the UNet's layers. kohya's trainers write the original checkpoint's.
pub fn names(config: &UNetConfig) -> PartNames {
    let config = config.clone();
    PartNames {
        diffusers: "unet",
        kohya: "lora_unet",
        comfyui: Some("diffusion_model"),
        base: Some(BaseModel { resolution: DOWNSCALE * config.sample_size, ..BASE }),
        original: Arc::new(move |layer| {
            let parameter = keys::original_name(&format!("{layer}.weight"), &config)?;
            parameter.strip_suffix(".weight").map(str::to_owned)
        }),
    }
}

/// The layers of the UNet at `weights`, or of SDXL's base model without it.
///
/// # Errors
/// As [`Pretrained::find`] and [`Pretrained::config`].
pub fn outline(weights: Option<&Path>) -> Result<Outline> {
    let config = match weights {
        Some(path) => Pretrained::find(path, &SDXLUNet::COMPONENT, &Choice::default())?.config(
            &SDXLUNet::COMPONENT,
            UNetConfig::from_json,
            keys::deduce,
        )?,
        None => UNetConfig::default(),
    };
    let names = names(&config);
    Ok(outline_of(names, &SDXLUNet::new(config, &mut Source::shapes(DType::F16).root())?))
}
