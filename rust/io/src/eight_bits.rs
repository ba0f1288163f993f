//! Eight-bit weights, with or without scales, as `ComfyUI`, compressed-tensors and bitsandbytes store them.
//!
//! The scales of `layer.weight` are in another tensor. Older files of `ComfyUI` store them in `layer.scale_weight`, and
//! an empty tensor `scaled_fp8` marks such a file. compressed-tensors and newer files of `ComfyUI` store the scales in
//! `layer.weight_scale`. `ComfyUI` also names the format of each layer in JSON, in the tensor `layer.comfy_quant` or,
//! for all layers together, in an entry of the header. A weight has one scale or one for each row
//! (<https://github.com/comfyanonymous/ComfyUI/blob/a125cd84b054a57729b5eecab930ca9408719832/comfy/ops.py>).
//! bitsandbytes stores the largest magnitude of each row in `layer.SCB`. `layer.weight_format` is 0 if the codes are in
//! row-major order
//! (<https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/bitsandbytes/nn/modules.py>).

use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::{Map, Value};

use crate::tensor_writer::EightBits;

/// The possible endings of the key of a weight's scales, after the layer's name.
const SCALES: [&str; 2] = ["scale_weight", "weight_scale"];
/// The ending of the key of the rows' largest magnitudes in files of bitsandbytes.
const LARGEST: &str = "SCB";
/// The int8 code, without its sign, for the largest magnitude of a row. Smaller magnitudes have smaller codes.
pub(crate) const LARGEST_INT8: f32 = 127.0;
/// The possible endings of the key of the scales of the layer's inputs. These scales do not change the weight.
const INPUTS: [&str; 2] = ["scale_input", "input_scale"];
/// The ending of the key of `ComfyUI`'s JSON with the name of the format.
pub(crate) const COMFY: &str = "comfy_quant";
/// The entry of the header in which `ComfyUI` names the formats of layers.
pub(crate) const HEADER: &str = "_quantization_metadata";
/// The prefixes that the names of weights may have and the names of layers in [`HEADER`] lack.
pub(crate) const PREFIXES: [&str; 2] = ["", "model.diffusion_model."];
/// The ending of the key of bitsandbytes' number for the order of the codes.
pub(crate) const ORDER: &str = "weight_format";
/// The name of the empty tensor that marks an older file of `ComfyUI` with scales.
pub(crate) const MARK: &str = "scaled_fp8";

/// The content of a further tensor that belongs to a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    /// The numbers by which the weight's codes are multiplied.
    Scales,
    /// The largest magnitude of each row, which is the row's scale times 127.
    Largest,
    /// bitsandbytes' number for the order of the codes.
    Order,
    /// Data that does not affect the weight's values.
    Nothing,
}

/// All keys that other tensors of the weight `name` may have, except [`COMFY`]'s, with the tensors' contents. Empty if
/// `name` does not end in `weight`.
pub(crate) fn keys_beside(name: &str) -> Vec<(String, Beside)> {
    // The layer's name with the dot that follows it.
    let Some(layer) = name.strip_suffix("weight") else { return Vec::new() };
    let keys = |ends: &'static [&str], what| ends.iter().map(move |end| (format!("{layer}{end}"), what));
    keys(&SCALES, Beside::Scales)
        .chain(keys(&[LARGEST], Beside::Largest))
        .chain(keys(&[ORDER], Beside::Order))
        .chain(keys(&INPUTS, Beside::Nothing))
        .collect()
}

/// `ComfyUI`'s name of the format of eight-bit weights with one scale and without `convrot`. With `convrot`, a file has
/// rotated weights, and the layer rotates its inputs in the same way.
pub const fn comfy_format(bits: EightBits) -> &'static str {
    match bits {
        EightBits::Int8 => "int8_tensorwise",
        EightBits::Fp8 => "float8_e4m3fn",
    }
}

/// The type of the codes of a weight, given `ComfyUI`'s JSON about it (`stated`) and the dtype of its tensor
/// (`stored`). Codes stored as u8 are e4m3 numbers. The error is the name of a format that is not supported. The
/// supported formats are those of [`comfy_format`], without `convrot`.
pub(crate) fn bits_of(stated: &Value, stored: Option<Dtype>) -> Result<EightBits, String> {
    let format = stated.get("format").and_then(Value::as_str).unwrap_or("unknown");
    if stated.get("convrot").and_then(Value::as_bool) == Some(true) {
        return Err(format!("{format} (convrot)"));
    }
    let bits = match stored {
        Some(Dtype::F8_E4M3 | Dtype::U8) => Some(EightBits::Fp8),
        Some(Dtype::I8) => Some(EightBits::Int8),
        _ => None,
    };
    bits.filter(|&bits| comfy_format(bits) == format).ok_or_else(|| format.to_owned())
}

/// `ComfyUI`'s JSON about each layer, from the text of the header's entry [`HEADER`].
pub(crate) fn layers_of(text: &str) -> Map<String, Value> {
    let Ok(Value::Object(mut found)) = serde_json::from_str(text) else { return Map::new() };
    match found.remove("layers") {
        Some(Value::Object(layers)) => layers,
        _ => Map::new(),
    }
}

/// The value of the e4m3 number with the given bits: a sign bit, four bits of exponent with a bias of 7, three bits of
/// fraction. e4m3 has no infinities. The largest exponent with the largest fraction is NaN (Micikevicius et al. 2022,
/// arXiv:2209.05433, table 1). bf16 represents every e4m3 value exactly.
pub(crate) fn value_of_e4m3(bits: u8) -> bf16 {
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 3 & 0xf), f32::from(bits & 7));
    bf16::from_f32(match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        // fraction / 8 · 2^-6 for subnormal numbers, and (1 + fraction / 8) · 2^(exponent - 7) for the others.
        (0, _) => sign * fraction * 2f32.powi(-9),
        _ => sign * (8.0 + fraction) * 2f32.powi(exponent - 10),
    })
}

/// The value of the e5m2 number with the given bits, which are the upper eight bits of an f16 number. bf16 represents
/// every e5m2 value exactly.
pub(crate) fn value_of_e5m2(bits: u8) -> bf16 {
    bf16::from_f32(f16::from_bits(u16::from(bits) << 8).to_f32())
}

#[cfg(test)]
mod tests {
    use super::{value_of_e4m3, value_of_e5m2};

    #[test]
    fn e4m3_bits_have_the_values_of_the_format() {
        let found = |bits| value_of_e4m3(bits).to_f32();
        let expected =
            [(0x00, 0.0), (0x01, 0.001_953_125), (0x38, 1.0), (0xb8, -1.0), (0x3c, 1.5), (0x7e, 448.0), (0xfe, -448.0)];
        for (bits, value) in expected {
            assert!((found(bits) - value).abs() < f32::EPSILON, "{bits:#x}");
        }
        assert!(found(0x7f).is_nan() && found(0xff).is_nan());
        // -0.
        assert_eq!(value_of_e4m3(0x80).to_bits(), 0x8000);
    }

    #[test]
    fn e5m2_bits_have_the_values_of_the_format() {
        let expected = [(0x00, 0.0), (0x01, 2f32.powi(-16)), (0x3c, 1.0), (0xbd, -1.25), (0x7b, 57344.0)];
        for (bits, value) in expected {
            assert!((value_of_e5m2(bits).to_f32() - value).abs() < f32::EPSILON, "{bits:#x}");
        }
        assert!(value_of_e5m2(0x7f).is_nan());
    }
}
