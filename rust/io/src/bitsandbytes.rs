//! NF4 weights of bitsandbytes in folders of diffusers and transformers.
//!
//! A weight X with n elements is stored as a tensor named X, of shape (⌈n / 2⌉, 1), with two codes in each byte. The
//! tensor `X.quant_state.bitsandbytes__nf4` (the weight's *state*) is JSON with the weight's shape. `X.absmax` has the
//! scales of the weight's blocks and `X.quant_map` the values of the 16 codes. If the scales are quantized too,
//! `X.nested_absmax` has the scales of the blocks of scales, and `X.nested_quant_map` the values of the scales' codes.
//! Follows `QuantState` in
//! <https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/bitsandbytes/functional.py>.

use std::rc::Rc;

use serde_json::{Value, json};
use trainable_candle_core::quantized::nf4_values;
use trainable_candle_core::{DType, Device, Error, Quantized, Result, Tensor};

use crate::tensor_writer::TensorEntry;

/// The ending of the key of an NF4 weight's state, after the weight's name.
pub(crate) const STATE: &str = ".quant_state.bitsandbytes__nf4";
/// The ending of the key of an FP4 weight's state, after the weight's name. FP4 is not supported.
pub(crate) const FP4_STATE: &str = ".quant_state.bitsandbytes__fp4";
/// The ending of the key of the scales of a weight's blocks, after the weight's name.
pub(crate) const SCALES: &str = ".absmax";
/// The ending of the key of the values of a weight's 16 codes.
pub(crate) const CODE_VALUES: &str = ".quant_map";
/// The ending of the key of the scales of the blocks of scales, if the scales are quantized.
pub(crate) const NESTED_SCALES: &str = ".nested_absmax";
/// The ending of the key of the values of the scales' codes, if the scales are quantized.
pub(crate) const NESTED_CODE_VALUES: &str = ".nested_quant_map";

/// The number of elements that share a scale.
const BLOCK: usize = 64;
/// If the scales are quantized: the number of scales in a block of scales. bitsandbytes always uses 256.
const NESTED_BLOCK: usize = 256;

/// The tensors in which bitsandbytes stores a matrix in NF4 with scales in f32.
///
/// `name` is the weight's key, `dims` is its shape (out, in), and `values` computes its values, which have `dtype`.
/// They are computed once for the codes and once for the scales, so that only one matrix is in memory at a time.
///
/// # Errors
/// [`Error::DType`] if `dtype` is not f32, f16 or bf16, the dtypes that bitsandbytes quantizes.
pub fn nf4_entries(
    name: &str,
    dims: [usize; 2],
    dtype: DType,
    values: Rc<dyn Fn() -> Result<Tensor>>,
) -> Result<[TensorEntry<'static>; 4]> {
    let dtype_name = match dtype {
        DType::F32 => "float32",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        other => {
            let text = format!("\"{name}\" has dtype {}, expected f32, f16 or bf16 for bitsandbytes", other.as_str());
            return Err(Error::dtype("save_pretrained", text));
        }
    };
    let state = json!({ "quant_type": "nf4", "blocksize": BLOCK, "dtype": dtype_name, "shape": dims });
    let state = state.to_string().into_bytes();
    let count = dims[0] * dims[1];
    // A function that quantizes the matrix and returns one tensor of the result: "codes" or "scales".
    let quantize = |values: Rc<dyn Fn() -> Result<Tensor>>, wanted: &'static str, shape: Vec<usize>| {
        let compute = move || {
            let tensors = Quantized::nf4_with_plain_scales(&values()?)?.tensors()?;
            let found = tensors.into_iter().flatten().find(|(kind, _)| *kind == wanted);
            let missing = || Error::argument("save_pretrained", format!("a matrix in NF4 has no {wanted}"));
            let (_, tensor) = found.ok_or_else(missing)?;
            tensor.reshape(shape)
        };
        Box::new(compute) as Box<dyn FnOnce() -> Result<Tensor>>
    };
    let entry = |end: &str, shape: Vec<usize>, dtype: DType, values: Box<dyn FnOnce() -> Result<Tensor>>| TensorEntry {
        name: format!("{name}{end}"),
        shape,
        dtype,
        // The elements in the file have the dtype `dtype`.
        codes: None,
        values,
    };
    let (codes_shape, scales_shape) = (vec![count.div_ceil(2), 1], vec![count.div_ceil(BLOCK)]);
    // The tensor of the codes has the weight's own name.
    Ok([
        entry("", codes_shape.clone(), DType::U8, quantize(Rc::clone(&values), "codes", codes_shape)),
        entry(SCALES, scales_shape.clone(), DType::F32, quantize(values, "scales", scales_shape)),
        entry(CODE_VALUES, vec![16], DType::F32, Box::new(|| Tensor::new(nf4_values().as_slice(), &Device::Cpu))),
        entry(STATE, vec![state.len()], DType::U8, Box::new(move || Tensor::new(state.as_slice(), &Device::Cpu))),
    ])
}

/// The metadata of a weight, parsed from its state.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct State {
    /// The shape (out, in) of the weight.
    pub dims: [usize; 2],
    /// The dtype of the weight before it was quantized.
    pub dtype: DType,
    /// The number that is added to the dequantized scales. `None` if the scales are not quantized.
    pub offset: Option<f32>,
}

impl State {
    /// Parse the JSON of a weight's state. The error is a message about the weight, without the weight's name.
    pub(crate) fn parse(json: &[u8]) -> std::result::Result<Self, String> {
        let found: Value = serde_json::from_slice(json).map_err(|error| format!("its state is damaged: {error}"))?;
        let text = |name: &str| found.get(name).and_then(Value::as_str).unwrap_or("missing");
        let size = |value: &Value| value.as_u64().and_then(|size| usize::try_from(size).ok());
        let number = |name: &str| found.get(name).and_then(size);
        let unsupported = |what: String| Err(format!("it has {what}, which is not supported"));
        if text("quant_type") != "nf4" {
            return unsupported(format!("the type {}", text("quant_type")));
        }
        let (block, nested) = (number("blocksize"), number("nested_blocksize"));
        if block != Some(BLOCK) || nested.is_some_and(|size| size != NESTED_BLOCK) {
            let blocks =
                |size: Option<usize>| size.map_or_else(|| "an unknown number of".to_owned(), |size| size.to_string());
            let scales = nested.map_or_else(String::new, |size| format!(", with blocks of {size} scales"));
            return unsupported(format!("blocks of {} weights{scales}", blocks(block)));
        }
        let shape = found.get("shape").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let [Some(rows), Some(columns)] = [0, 1].map(|axis| shape.get(axis).and_then(size)) else {
            return unsupported(format!("the shape {shape:?}"));
        };
        if shape.len() != 2 || rows.checked_mul(columns).is_none() {
            return unsupported(format!("the shape {shape:?}"));
        }
        let dtype = match text("dtype") {
            "float32" => DType::F32,
            "float16" => DType::F16,
            "bfloat16" => DType::BF16,
            other => return unsupported(format!("the dtype {other}")),
        };
        let offset = found.get("nested_offset").and_then(Value::as_f64).map(|offset| offset as f32);
        if nested.is_some() && !offset.is_some_and(f32::is_finite) {
            return Err("its state has no offset for the quantized scales (nested_offset)".to_owned());
        }
        if nested.is_none() && offset.is_some() {
            return Err(
                "its state has an offset for quantized scales (nested_offset), but no block size (nested_blocksize)"
                    .to_owned(),
            );
        }
        Ok(Self { dims: [rows, columns], dtype, offset })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A supported state, without the brace at its end: the tests append further fields.
    const SUPPORTED: &str = r#"{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4, 6]"#;

    #[test]
    fn supported_states_are_parsed_and_other_states_are_errors() {
        let parse = |end: &str| State::parse(format!("{SUPPORTED}{end}}}").as_bytes());
        let plain = State { dims: [4, 6], dtype: DType::BF16, offset: None };
        assert_eq!(parse("").unwrap(), plain);
        let nested = r#", "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5"#;
        assert_eq!(parse(nested).unwrap(), State { offset: Some(0.5), ..plain });
        assert!(parse(r#", "nested_blocksize": 256"#).unwrap_err().contains("no offset"));
        assert!(
            parse(r#", "nested_blocksize": 128, "nested_offset": 0.5"#)
                .unwrap_err()
                .contains("blocks of 64 weights, with blocks of 128 scales")
        );
        let other = SUPPORTED.replace("nf4", "int4") + "}";
        assert!(State::parse(other.as_bytes()).unwrap_err().contains("the type int4"));
        assert!(State::parse(b"{").unwrap_err().contains("damaged"));
    }
}
