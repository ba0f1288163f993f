//! Adapter files: an adapter's parameters under the names that other tools read.
//!
//! One file may have adapters of several parts of a pipeline (a UNet and its text encoders). [`PartNames`] has the
//! names that tools use for a part and its layers. Reading accepts every known style of names. The tensors whose keys
//! start with the same name are a *module*. A module is the adapter of one layer, or the joined adapters of several
//! layers whose weights are one matrix in the original checkpoint, the file in which the model's authors published it.

mod alpha;
mod fused;
mod grouping;
mod magnitude;
mod metadata;
mod modules;
mod names;
mod oft;
mod peft;
mod places;
mod read;
pub mod readers;
mod style;
mod verify;
mod write;

use std::str::FromStr;

pub use grouping::check_format;
pub use modules::adapter_keys;
pub use names::{BaseModel, OriginalNames, PartNames};
pub use read::{PartLayers, attach_adapter, attach_training_adapter, load_adapter, read_adapters};
pub use readers::{Alpha, Known, Reader, Tool};
pub use style::Style;
use trainable_candle_core::{Error, Result};
use trainable_candle_nn::adapter::OftSide;
pub use verify::{ModuleReport, Outline, Report, verify_adapter};
pub use write::{AdapterFile, SaveOptions, Saved, prepare_adapters, save_adapters};

/// The function that error messages name, here and in the modules that write files.
const OP: &str = "save_adapter";

/// The tool whose names an adapter file uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterFormat {
    /// `lora_unet_input_blocks_4_1_….lora_down.weight` (kohya's trainers): ComfyUI, A1111 and diffusers load it.
    Kohya,
    /// `unet.down_blocks.1.….lora_A.weight` (diffusers). If `ComfyUI` also reads diffusers' names of the part, the
    /// factors are already multiplied by the scale: diffusers reads a scale from the metadata, `ComfyUI` from tensors,
    /// and both compute the same only if the scale that is left is 1.
    Diffusers,
    /// `base_model.model.LAYER.lora_A.weight` (peft). A file holds one part. A path that does not end in
    /// `.safetensors` is a folder, which gets the files `adapter_model.safetensors` and `adapter_config.json`.
    /// `PeftModel.from_pretrained` loads such a folder.
    Peft,
    /// `diffusion_model.input_blocks.4.1.….lora_A.weight` (ComfyUI's names, which follow the original checkpoint). The
    /// weights of several layers (such as q, k and v) can be one matrix in the original checkpoint. If the adapters of
    /// such layers cannot be joined to one module, the file uses diffusers' names for these layers, provided that
    /// `ComfyUI` reads diffusers' names of the part.
    ComfyUi,
}

impl AdapterFormat {
    const NAMES: [(&'static str, Self); 4] =
        [("kohya", Self::Kohya), ("diffusers", Self::Diffusers), ("peft", Self::Peft), ("comfyui", Self::ComfyUi)];

    /// The names of all formats.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::NAMES.iter().map(|(name, _)| *name)
    }

    /// The side of a layer (inputs or outputs) that OFT rotates in the programs that read the format.
    pub const fn oft_side(self) -> OftSide {
        match self {
            Self::Peft => OftSide::Input,
            Self::Kohya | Self::Diffusers | Self::ComfyUi => OftSide::Output,
        }
    }

    /// The format's name in options and errors.
    pub fn name(self) -> &'static str {
        // `NAMES` has every format, so the default is not used.
        Self::NAMES.iter().find(|(_, format)| *format == self).map_or("", |(name, _)| name)
    }
}

impl FromStr for AdapterFormat {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::NAMES.iter().find(|(name, _)| *name == text).map(|(_, format)| *format).ok_or_else(|| {
            let known: Vec<&str> = Self::NAMES.iter().map(|(name, _)| *name).collect();
            Error::argument(OP, format!("unknown format \"{text}\"; expected \"{}\"", known.join("\", \"")))
        })
    }
}
