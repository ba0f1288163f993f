//! The programs that load adapters of each family, and under which names: one table for each kind of part.
//!
//! Tried with diffusers 0.42 (`tests/io/flow/test_oracles.py`); read for `ComfyUI` in
//! <https://github.com/comfyanonymous/ComfyUI/blob/ec93dcac55e4ebb4f0ee2d2b0ac2b62fb9a58bb9/comfy/lora.py>, for sd-scripts in
//! <https://github.com/kohya-ss/sd-scripts/tree/48d368fa/networks>.

use trainable_candle_io::adapter_file::readers::{EVERY_KIND, PEFT};
use trainable_candle_io::adapter_file::{Alpha, Known, Reader, Style, Tool};

const LORA: &[&str] = &["lora"];
const DIFFUSERS_MAGNITUDE: Option<&str> = Some("lora_magnitude_vector.weight");
const COMFYUI_MAGNITUDE: Option<&str> = Some("dora_scale");

const fn comfyui(styles: &'static [Known]) -> Reader {
    Reader { tool: Tool::ComfyUi, styles, kinds: EVERY_KIND, magnitude: COMFYUI_MAGNITUDE }
}

const fn diffusers(styles: &'static [Known]) -> Reader {
    Reader { tool: Tool::Diffusers, styles, kinds: LORA, magnitude: DIFFUSERS_MAGNITUDE }
}

/// sd-scripts' own networks; with `LyCORIS`' module it loads other kinds.
const KOHYA: Reader =
    Reader { tool: Tool::Kohya, styles: &[Known::all(Style::KohyaOriginal)], kinds: LORA, magnitude: None };

const A1111: Reader = Reader {
    tool: Tool::A1111,
    styles: &[Known::all(Style::KohyaOriginal), Known::all(Style::Kohya)],
    kinds: EVERY_KIND,
    magnitude: COMFYUI_MAGNITUDE,
};

/// Stable Diffusion's UNets. `ComfyUI` has diffusers' names of attention's projections in their first form only.
pub(super) static UNET: &[Reader] = &[
    comfyui(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::Kohya),
        Known::all(Style::Lycoris),
        Known::all(Style::ComfyUi),
        Known::all(Style::Processor),
        Known::all(Style::Diffusers).only(no_projection),
        Known::all(Style::Bare).only(no_projection),
    ]),
    diffusers(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::Kohya),
        Known::all(Style::Diffusers).configured().alpha(Alpha::Refused),
        Known::all(Style::Processor),
    ]),
    KOHYA,
    PEFT,
    A1111,
];

fn no_projection(layer: &str) -> bool {
    !layer.contains(".to_")
}

/// CLIP's text encoders.
pub(super) static TEXT_ENCODER: &[Reader] = &[
    comfyui(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::Kohya),
        Known::all(Style::ComfyUi),
        Known::all(Style::Diffusers),
    ]),
    diffusers(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::Kohya),
        Known::all(Style::Diffusers).configured().alpha(Alpha::Refused),
        Known::all(Style::Processor),
    ]),
    KOHYA,
    PEFT,
    A1111,
];

/// Stable Diffusion 3. diffusers converts no other names.
pub(super) static SD3: &[Reader] = &[
    comfyui(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::ComfyUi),
        Known::all(Style::Diffusers),
        Known::all(Style::OneTrainer),
        Known::all(Style::Lycoris),
        Known::all(Style::Peft),
    ]),
    diffusers(&[Known::all(Style::Diffusers).configured().alpha(Alpha::Refused)]),
    KOHYA,
    PEFT,
];

/// Flux.1. diffusers' conversion of kohya's names gives layers outside of the blocks names that it leaves out afterwards; that of
/// `OneTrainer`'s names knows attention only, and fails on others.
pub(super) static FLUX: &[Reader] = &[
    comfyui(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::ComfyUi),
        Known::all(Style::Diffusers),
        Known::all(Style::OneTrainer),
        Known::all(Style::Lycoris),
        Known::all(Style::Bare),
    ]),
    diffusers(&[
        Known::all(Style::Diffusers).configured(),
        Known::all(Style::KohyaOriginal).only(in_a_block),
        Known::all(Style::OneTrainer).only(is_attention),
    ]),
    KOHYA,
    PEFT,
];

fn in_a_block(layer: &str) -> bool {
    layer.contains("transformer_blocks.")
}

fn is_attention(layer: &str) -> bool {
    in_a_block(layer) && layer.contains(".attn.")
}
