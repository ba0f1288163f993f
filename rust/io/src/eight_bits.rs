//! Weights of eight bits, alone or with scales, as `ComfyUI`, compressed-tensors and bitsandbytes store them.
//!
//! Scales are beside their weight: in older files of `ComfyUI` `layer.scale_weight`, marked by an empty tensor `scaled_fp8`; in newer
//! ones `layer.weight_scale`, whose format `layer.comfy_quant` names; one for the tensor or, in compressed-tensors, for each row
//! (<https://github.com/comfyanonymous/ComfyUI/blob/a125cd84b054a57729b5eecab930ca9408719832/comfy/ops.py>). bitsandbytes has the
//! largest magnitude of each row in `layer.SCB`, and 0 in `layer.weight_format` for weights row by row
//! (<https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/bitsandbytes/nn/modules.py>).

use half::bf16;
use serde_json::Value;

use crate::tensor_writer::EightBits;

/// What follows the layer's name in the keys of factors of a weight.
const SCALES: [&str; 2] = ["scale_weight", "weight_scale"];
/// What follows it in the key of the largest magnitude of each row, whose code is [`LARGEST_INT8`].
const LARGEST: &str = "SCB";
pub(crate) const LARGEST_INT8: f32 = 127.0;
/// Keys that concern the inputs of the layer, or name the form: they change no weight.
const INPUTS: [&str; 2] = ["scale_input", "input_scale"];
/// What the keys end with that hold the form, and must have one that is read.
pub(crate) const COMFY: &str = "comfy_quant";
pub(crate) const ORDER: &str = "weight_format";
/// The tensor that marks an older file.
pub(crate) const MARK: &str = "scaled_fp8";

/// What a key beside a weight holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    /// What its codes are multiplied by.
    Scales,
    /// The same, times 127.
    Largest,
    /// The JSON of `ComfyUI`.
    Comfy,
    /// The order of the elements of bitsandbytes.
    Order,
    /// Nothing that matters to its values.
    Nothing,
}

/// The keys that concern the weight `name` beside itself.
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

/// The name of `ComfyUI` for a weight of such numbers with a scale that is not rotated.
pub const fn comfy_format(bits: EightBits) -> &'static str {
    match bits {
        EightBits::Int8 => "int8_tensorwise",
        EightBits::Fp8 => "float8_e4m3fn",
    }
}

/// The format that the JSON of `ComfyUI` names, if it is another than that of such numbers.
pub(crate) fn other_format(json: &[u8], bits: EightBits) -> Option<String> {
    let found: Value = serde_json::from_slice(json).unwrap_or_default();
    let format = found.get("format").and_then(Value::as_str).unwrap_or("unknown");
    if found.get("convrot").and_then(Value::as_bool) == Some(true) {
        return Some(format!("{format} (convrot)"));
    }
    (format != comfy_format(bits)).then(|| format.to_owned())
}

/// The value of a number of eight bits: a sign, four of exponent with a bias of 7, three of fraction; no infinities, and the largest
/// exponent with the largest fraction is NaN (Micikevicius et al. 2022, arXiv:2209.05433, table 1). bf16 holds each exactly.
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
    fn values_are_those_of_the_format() {
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
