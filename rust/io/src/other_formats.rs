//! Recognizes unsupported formats of quantized weights by the names of the tensors in a file.

/// Pairs (end of a tensor's name, format that has such tensors). If a file has tensors with several of these ends, the
/// first pair gives the file's format.
const ENDINGS: [(&str, &str); 11] = [
    // https://github.com/nunchaku-tech/nunchaku
    (".wscales", "SVDQuant (Nunchaku)"),
    (".g_idx", "GPTQ"),
    (".qzeros", "GPTQ or AWQ"),
    (".qweight", "a packed format such as GPTQ or AWQ"),
    // https://github.com/huggingface/optimum-quanto
    (".weight._data", "quanto"),
    // https://github.com/pytorch/ao
    ("._weight_qdata", "torchao"),
    // https://github.com/vllm-project/compressed-tensors
    (".weight_packed", "compressed-tensors in fewer than eight bits"),
    // https://huggingface.co/deepseek-ai/DeepSeek-V3
    (".weight_scale_inv", "fp8 with a scale for each block of a matrix"),
    (".weight_scale_2", "NVFP4"),
    (".pre_quant_scale", "a format that scales the inputs of layers (pre_quant_scale)"),
    // ComfyUI's comfy/quant_nf4.py
    (".weight_code", "ComfyUI's NF4 (bitsandbytes' NF4 is supported)"),
];

/// A key of a format that is not supported, and the name of the format. `None` if no key shows such a format.
pub(crate) fn find<'a>(keys: impl Iterator<Item = &'a String> + Clone) -> Option<(&'a String, &'static str)> {
    ENDINGS.iter().find_map(|&(ending, format)| Some((keys.clone().find(|key| key.ends_with(ending))?, format)))
}

#[cfg(test)]
mod tests {
    use super::find;

    #[test]
    fn keys_show_the_unsupported_formats_only() {
        let format = |keys: &[&str]| {
            let keys: Vec<String> = keys.iter().map(|&key| key.to_owned()).collect();
            find(keys.iter()).map(|(key, format)| (key.clone(), format))
        };
        let found = format(&["blocks.0.qkv.bias", "blocks.0.qkv.qweight", "blocks.0.qkv.wscales"]);
        assert_eq!(found, Some(("blocks.0.qkv.wscales".to_owned(), "SVDQuant (Nunchaku)")));
        assert_eq!(format(&["layers.0.weight_scale_2"]).map(|(_, format)| format), Some("NVFP4"));
        // Scales of 8-bit weights and of bitsandbytes' NF4, which are supported.
        assert_eq!(
            format(&["layers.0.weight", "layers.0.weight_scale", "layers.0.scale_weight", "weight.absmax"]),
            None
        );
    }
}
