//! Eight-bit weights, with or without scales, as `ComfyUI`, compressed-tensors and bitsandbytes store them.
//!
//! The scales of `layer.weight` are in another tensor. Older files of `ComfyUI` store them in `layer.scale_weight`, and an
//! empty tensor `scaled_fp8` marks such a file. Newer files of `ComfyUI` store the scales in `layer.weight_scale`, and
//! `layer.comfy_quant` has the name of the format.
//! A weight has one scale or, in compressed-tensors, one scale for each row
//! (<https://github.com/comfyanonymous/ComfyUI/blob/a125cd84b054a57729b5eecab930ca9408719832/comfy/ops.py>).
//! bitsandbytes stores the largest magnitude of each row in `layer.SCB`. `layer.weight_format` is 0 if the codes are in
//! row-major order
//! (<https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/bitsandbytes/nn/modules.py>).

use half::bf16;
use serde_json::Value;

use crate::tensor_writer::EightBits;

/// The possible endings of the key of a weight's scales, after the layer's name.
const SCALES: [&str; 2] = ["scale_weight", "weight_scale"];
/// The ending of the key of the rows' largest magnitudes in files of bitsandbytes.
const LARGEST: &str = "SCB";
/// The magnitude of the int8 code of an element that has the largest magnitude of its row.
pub(crate) const LARGEST_INT8: f32 = 127.0;
/// The possible endings of the key of the scales of the layer's inputs. These scales do not change the weight.
const INPUTS: [&str; 2] = ["scale_input", "input_scale"];
/// The ending of the key of `ComfyUI`'s JSON with the name of the format.
pub(crate) const COMFY: &str = "comfy_quant";
/// The ending of the key of bitsandbytes' number for the order of the codes.
pub(crate) const ORDER: &str = "weight_format";
/// The name of the empty tensor that marks an older file of `ComfyUI` with scales.
pub(crate) const MARK: &str = "scaled_fp8";

/// What another tensor of a weight contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    /// The numbers by which the weight's codes are multiplied.
    Scales,
    /// The largest magnitude of each row, which is the row's scale times 127.
    Largest,
    /// `ComfyUI`'s JSON with the name of the format.
    Comfy,
    /// bitsandbytes' number for the order of the codes.
    Order,
    /// Data that does not affect the weight's values.
    Nothing,
}

/// All keys that other tensors of the weight `name` may have, with the tensors' contents. Empty if `name` does not end in
/// `weight`.
pub(crate) fn keys_beside(name: &str) -> Vec<(String, Beside)> {
    let Some(layer) = name.strip_suffix("weight") else { return Vec::new() };
    let keys = |ends: &'static [&str], what| ends.iter().map(move |end| (format!("{layer}{end}"), what));
    keys(&SCALES, Beside::Scales)
        .chain(keys(&[LARGEST], Beside::Largest))
        .chain(keys(&[COMFY], Beside::Comfy))
        .chain(keys(&[ORDER], Beside::Order))
        .chain(keys(&INPUTS, Beside::Nothing))
        .collect()
}

/// `ComfyUI`'s name of the format of eight-bit weights with one scale and without the rotation `convrot`.
pub const fn comfy_format(bits: EightBits) -> &'static str {
    match bits {
        EightBits::Int8 => "int8_tensorwise",
        EightBits::Fp8 => "float8_e4m3fn",
    }
}

/// The name of the format in `ComfyUI`'s JSON, or `None` if this format is supported. The only supported format for weights
/// of type `bits` is [`comfy_format`], without the rotation `convrot`.
pub(crate) fn other_format(json: &[u8], bits: EightBits) -> Option<String> {
    let found: Value = serde_json::from_slice(json).unwrap_or_default();
    let format = found.get("format").and_then(Value::as_str).unwrap_or("unknown");
    if found.get("convrot").and_then(Value::as_bool) == Some(true) {
        return Some(format!("{format} (convrot)"));
    }
    (format != comfy_format(bits)).then(|| format.to_owned())
}

/// The value of the e4m3 number with the given bits: a sign bit, four bits of exponent with a bias of 7, three bits of
/// fraction. e4m3 has no infinities. The largest exponent with the largest fraction is NaN (Micikevicius et al. 2022,
/// arXiv:2209.05433, table 1). bf16 represents every e4m3 value exactly.
pub(crate) fn value(bits: u8) -> bf16 {
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 3 & 0xf), f32::from(bits & 7));
    bf16::from_f32(match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * fraction * 2f32.powi(-9),
        _ => sign * (8.0 + fraction) * 2f32.powi(exponent - 10),
    })
}

#[cfg(test)]
mod tests {
    use super::value;

    #[test]
    fn e4m3_bits_have_the_values_of_the_format() {
        let found = |bits| value(bits).to_f32();
        let expected =
            [(0x00, 0.0), (0x01, 0.001_953_125), (0x38, 1.0), (0xb8, -1.0), (0x3c, 1.5), (0x7e, 448.0), (0xfe, -448.0)];
        for (bits, value) in expected {
            assert!((found(bits) - value).abs() < f32::EPSILON, "{bits:#x}");
        }
        assert!(found(0x7f).is_nan() && found(0xff).is_nan());
        assert_eq!(value(0x80).to_bits(), 0x8000);
    }
}
