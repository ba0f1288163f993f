//! For each kind of part, a table of the tools that load its adapters. Each entry has the styles of names that the tool
//! reads: for all layers (`Known::all`), or for the layers that a function selects (`only`). [`Style`] says how the
//! names of each style are made; original names are those of the model's authors. `ComfyUi` puts `ComfyUI`'s
//! prefix before original names, `ComfyUiOwn` puts it before diffusers' names. In a style that is `configured`, the
//! tool applies alphas from peft's configuration. With `Alpha::Rejected`, it reports an error for a tensor `….alpha`.
//!
//! `tests/io/flow/test_oracles.py` tests the entries for diffusers against diffusers 0.42, and
//! `tests/io/flow/test_comfyui_loader.py` tests the entries for `ComfyUI` against the loader of `ComfyUI`. The entries
//! follow the tools' code:
//! - `ComfyUI`: <https://github.com/comfyanonymous/ComfyUI/blob/ec93dcac55e4ebb4f0ee2d2b0ac2b62fb9a58bb9/comfy/lora.py>
//! - `ComfyUI` for Z-Image and FLUX.2: <https://github.com/comfyanonymous/ComfyUI/blob/17358c8f/comfy/lora.py>
//! - sd-scripts: <https://github.com/kohya-ss/sd-scripts/tree/48d368fa/networks>
//! - musubi-tuner: <https://github.com/kohya-ss/musubi-tuner/tree/30c658c4/src/musubi_tuner/networks>

use trainable_candle_io::adapter_file::readers::{EVERY_KIND, PEFT};
use trainable_candle_io::adapter_file::{Alpha, Known, Reader, Style, Tool};

/// The kinds of adapters that diffusers, sd-scripts and musubi-tuner load.
const LORA: &[&str] = &["lora"];
/// diffusers' name of the parameter that holds DoRA's magnitude.
const DIFFUSERS_MAGNITUDE: Option<&str> = Some("lora_magnitude_vector.weight");
/// The name of this parameter in `ComfyUI` and in AUTOMATIC1111's web UI.
const COMFYUI_MAGNITUDE: Option<&str> = Some("dora_scale");

const fn comfyui(styles: &'static [Known]) -> Reader {
    Reader { tool: Tool::ComfyUi, styles, kinds: EVERY_KIND, magnitude: COMFYUI_MAGNITUDE }
}

const fn diffusers(styles: &'static [Known]) -> Reader {
    Reader { tool: Tool::Diffusers, styles, kinds: LORA, magnitude: DIFFUSERS_MAGNITUDE }
}

/// kohya's trainers, sd-scripts and musubi-tuner, with their own network modules. (With the network module of
/// `LyCORIS`, sd-scripts also loads other kinds of adapters.)
const KOHYA: Reader =
    Reader { tool: Tool::Kohya, styles: &[Known::all(Style::KohyaOriginal)], kinds: LORA, magnitude: None };

/// AUTOMATIC1111's web UI and its descendants.
const A1111: Reader = Reader {
    tool: Tool::A1111,
    styles: &[Known::all(Style::KohyaOriginal), Known::all(Style::Kohya)],
    kinds: EVERY_KIND,
    magnitude: COMFYUI_MAGNITUDE,
};

/// Stable Diffusion's UNets. `ComfyUI` reads diffusers' names with dots (`Style::Diffusers`, `Style::Bare`), except
/// those of the projections of attention. For these it reads the names of early releases instead, `Style::Processor`.
pub(super) static UNET: &[Reader] = &[
    comfyui(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::Kohya),
        Known::all(Style::Lycoris),
        Known::all(Style::ComfyUi),
        Known::all(Style::Processor),
        Known::all(Style::Diffusers).only(is_outside_attention),
        Known::all(Style::Bare).only(is_outside_attention),
    ]),
    diffusers(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::Kohya),
        Known::all(Style::Diffusers).configured().alpha(Alpha::Rejected),
        Known::all(Style::Processor),
    ]),
    KOHYA,
    PEFT,
    A1111,
];

/// Whether a layer is not a projection of attention (`.to_q`, `.to_k`, `.to_v`, `.to_out.0`).
fn is_outside_attention(layer: &str) -> bool {
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
        Known::all(Style::Diffusers).configured().alpha(Alpha::Rejected),
        Known::all(Style::Processor),
    ]),
    KOHYA,
    PEFT,
    A1111,
];

/// Stable Diffusion 3. For this model, diffusers does not convert names of other tools.
pub(super) static SD3: &[Reader] = &[
    comfyui(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::ComfyUi),
        Known::all(Style::Diffusers),
        Known::all(Style::OneTrainer),
        Known::all(Style::Lycoris),
        Known::all(Style::Peft),
    ]),
    diffusers(&[Known::all(Style::Diffusers).configured().alpha(Alpha::Rejected)]),
    KOHYA,
    PEFT,
];

/// Flux.1. When diffusers converts kohya's names, it drops layers outside of the blocks. When it converts
/// `OneTrainer`'s names, it supports only the layers of attention and fails on other layers.
pub(super) static FLUX: &[Reader] = &[
    comfyui(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::ComfyUi),
        Known::all(Style::Diffusers),
        Known::all(Style::OneTrainer),
        Known::all(Style::Lycoris),
        Known::all(Style::Bare),
    ]),
    FLUX_IN_DIFFUSERS,
    KOHYA,
    PEFT,
];

const FLUX_IN_DIFFUSERS: Reader = diffusers(&[
    Known::all(Style::Diffusers).configured(),
    Known::all(Style::KohyaOriginal).only(is_in_block),
    Known::all(Style::OneTrainer).only(is_attention),
]);

/// Chroma. The tools read the names that they read for Flux.1, but `ComfyUI` does not read diffusers' names for the
/// layers of the approximator (`distilled_guidance_layer`).
pub(super) static CHROMA: &[Reader] = &[
    comfyui(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::ComfyUi),
        Known::all(Style::Diffusers).only(is_outside_approximator),
        Known::all(Style::OneTrainer).only(is_outside_approximator),
        Known::all(Style::Lycoris).only(is_outside_approximator),
        Known::all(Style::Bare).only(is_outside_approximator),
    ]),
    FLUX_IN_DIFFUSERS,
    KOHYA,
    PEFT,
];

/// Whether a layer of Chroma is not in the approximator.
fn is_outside_approximator(layer: &str) -> bool {
    !layer.starts_with("distilled_guidance_layer.")
}

/// Whether a layer is in a transformer block.
fn is_in_block(layer: &str) -> bool {
    layer.contains("transformer_blocks.")
}

/// Whether a layer belongs to the attention of a transformer block.
fn is_attention(layer: &str) -> bool {
    is_in_block(layer) && layer.contains(".attn.")
}

/// FLUX.2. `ComfyUI` does not read diffusers' names for the shared modulation layers and for the network that embeds
/// time and guidance. diffusers converts peft's names as if they were those of the trainer ai-toolkit, which have
/// `ComfyUI`'s prefix, so `Style::Peft` has the same entry as `Style::ComfyUiOwn`.
pub(super) static FLUX2: &[Reader] = &[
    comfyui(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::ComfyUi),
        Known::all(Style::Diffusers).only(is_outside_conditions),
        Known::all(Style::OneTrainer).only(is_outside_conditions),
        Known::all(Style::Lycoris).only(is_outside_conditions),
        Known::all(Style::Bare).only(is_outside_conditions),
    ]),
    diffusers(&[
        Known::all(Style::Diffusers).configured().alpha(Alpha::Rejected),
        Known::all(Style::KohyaOriginal).only(is_converted_from_kohya),
        Known::all(Style::ComfyUi).only(has_same_row_order).configured().alpha(Alpha::Rejected),
        Known::all(Style::ComfyUiOwn).only(is_in_block).configured().alpha(Alpha::Rejected),
        Known::all(Style::Peft).only(is_in_block).configured().alpha(Alpha::Rejected),
    ]),
    KOHYA,
    PEFT,
];

/// Whether a layer of FLUX.2 neither computes the shared modulation nor embeds time and guidance.
fn is_outside_conditions(layer: &str) -> bool {
    !layer.contains("_modulation") && !layer.starts_with("time_guidance_embed.")
}

/// Whether diffusers converts kohya's name of a layer of FLUX.2 correctly: the layer does not compute the shared
/// modulation, and its rows have the same order in original files and in diffusers.
fn is_converted_from_kohya(layer: &str) -> bool {
    !layer.contains("_modulation") && has_same_row_order(layer)
}

/// Whether original files and diffusers store a layer's rows in the same order. In original files, the rows of
/// `norm_out.linear` that compute the shift come before those that compute the scale. diffusers' own order is the
/// reverse, but diffusers does not exchange the two halves of an adapter's rows.
fn has_same_row_order(layer: &str) -> bool {
    layer != "norm_out.linear"
}

/// Z-Image. Its original names are those of `ComfyUI`'s files, here called `ComfyUI`'s names. `ComfyUI` reads these and
/// also diffusers' names, but not diffusers' names in kohya's style. diffusers reads its own names also in kohya's
/// style and after `ComfyUI`'s prefix. It reads `ComfyUI`'s names in kohya's style, except those of the first and the
/// last layer. After `ComfyUI`'s prefix, it reads only those of `ComfyUI`'s names that are also diffusers' names.
/// musubi-tuner, kohya's trainer for this model, uses diffusers' names in kohya's style.
pub(super) static Z_IMAGE: &[Reader] = &[
    comfyui(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::ComfyUi),
        Known::all(Style::Diffusers),
        Known::all(Style::ComfyUiOwn),
        Known::all(Style::Lycoris),
        Known::all(Style::Bare),
    ]),
    diffusers(&[
        Known::all(Style::Diffusers).configured().alpha(Alpha::Rejected),
        Known::all(Style::ComfyUiOwn).configured(),
        Known::all(Style::ComfyUi).only(has_one_name).configured(),
        Known::all(Style::Kohya),
        Known::all(Style::KohyaOriginal).only(is_inner),
    ]),
    Reader {
        tool: Tool::Kohya,
        styles: &[Known::all(Style::Kohya), Known::all(Style::KohyaOriginal).only(has_one_name)],
        kinds: LORA,
        magnitude: None,
    },
    PEFT,
];

/// Qwen-Image. A layer has the same name in all tools. musubi-tuner, kohya's trainer for this model, reads the names
/// only in kohya's style.
pub(super) static QWEN_IMAGE: &[Reader] = &[
    comfyui(&[
        Known::all(Style::KohyaOriginal),
        Known::all(Style::ComfyUi),
        Known::all(Style::Diffusers),
        Known::all(Style::Lycoris),
        Known::all(Style::Bare),
    ]),
    diffusers(&[
        Known::all(Style::Diffusers).configured().alpha(Alpha::Rejected),
        Known::all(Style::ComfyUi).configured(),
        Known::all(Style::KohyaOriginal),
    ]),
    KOHYA,
    PEFT,
];

/// Whether a layer of Z-Image is neither the first (`all_x_embedder`) nor the last (`all_final_layer`).
fn is_inner(layer: &str) -> bool {
    !layer.starts_with("all_")
}

/// Whether diffusers and `ComfyUI` have the same name for a layer of Z-Image.
fn has_one_name(layer: &str) -> bool {
    is_inner(layer) && !layer.contains(".attention.")
}
