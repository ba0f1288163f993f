//! Weights of eight bits as `ComfyUI` and others store them, `F8_E4M3`, alone or with a scale per tensor.
//!
//! A scale is beside its weight: `layer.scale_weight` in older files, marked by an empty tensor `scaled_fp8`; `layer.weight_scale` in
//! newer ones, whose format `layer.comfy_quant` names. Follows
//! <https://github.com/comfyanonymous/ComfyUI/blob/a125cd84b054a57729b5eecab930ca9408719832/comfy/ops.py>.

use half::bf16;
use serde_json::Value;

/// What follows the layer's name in the keys that say how a weight was scaled, the weight's own scale first.
const SCALES: [&str; 2] = ["scale_weight", "weight_scale"];
/// Keys that concern the inputs of the layer, or mark the form: they change no weight.
const OTHERS: [&str; 3] = ["scale_input", "input_scale", "comfy_quant"];
/// The tensor that marks an older file.
pub(crate) const MARK: &str = "scaled_fp8";
/// The one format of newer files that is read.
const FORMAT: &str = "float8_e4m3fn";

/// The keys at which the scale of a weight may be.
pub(crate) fn scales_of(name: &str) -> Option<[String; 2]> {
    let layer = name.strip_suffix("weight")?;
    Some(SCALES.map(|scale| format!("{layer}{scale}")))
}

/// All keys that concern a weight beside itself.
pub(crate) fn keys_beside(name: &str) -> Vec<String> {
    let Some(layer) = name.strip_suffix("weight") else { return Vec::new() };
    SCALES.iter().chain(&OTHERS).map(|other| format!("{layer}{other}")).collect()
}

/// The format that the JSON of a `comfy_quant` names, if it is another than the one that is read.
pub(crate) fn other_format(json: &[u8]) -> Option<String> {
    let found: Value = serde_json::from_slice(json).unwrap_or_default();
    let format = found.get("format").and_then(Value::as_str).unwrap_or("unknown");
    (format != FORMAT).then(|| format.to_owned())
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
