//! The arguments of peft's `LoraConfig` that are not parameters of this library's `LoraConfig`. A value is accepted if
//! this library does what the value asks for, or if the value has no effect on training.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use trainable_candle_core as tc;

use crate::error::Result;

const INITIAL_VALUES: &str = "adapters start without an effect; trainable_candle.lora.loftq and \
                              trainable_candle.lora.pissa compute other initial values";
const LAYER_NAMES: &str = r"give target_modules a regular expression for whole names, such as '.*\.(0|1)\.to_q'";

/// For each argument: its name; the values that are accepted, as Python's `repr` shows them (an empty list accepts
/// every value); and advice for a user who gives another value.
const ARGUMENTS: [(&str, &[&str], &str); 28] = [
    ("task_type", &[], ""),
    ("auto_mapping", &[], ""),
    ("base_model_name_or_path", &[], ""),
    ("revision", &[], ""),
    ("runtime_config", &[], ""),
    ("megatron_core", &[], ""),
    ("qalora_group_size", &[], ""),
    ("peft_type", &["None", "'LORA'"], "choose the kind with `adapter`"),
    ("inference_mode", &["False"], "adapters are made to be trained; `eval()` switches dropout off"),
    ("init_lora_weights", &["True"], INITIAL_VALUES),
    ("bias", &["'none'"], "adapters do not change biases; to train a layer's bias, make it a variable"),
    ("lora_bias", &["False"], "adapters have no bias"),
    (
        "modules_to_save",
        &["None", "[]", "()"],
        "only adapters are trained and saved; `requires_grad_()` makes a module trainable, too",
    ),
    ("fan_in_fan_out", &["False"], "weights are (out, in); transpose weights of another layout"),
    ("layers_to_transform", &["None"], LAYER_NAMES),
    ("layers_pattern", &["None"], LAYER_NAMES),
    ("layer_replication", &["None"], "repeat the layers in the model"),
    ("loftq_config", &["None", "{}"], "call trainable_candle.lora.loftq"),
    ("eva_config", &["None"], INITIAL_VALUES),
    ("corda_config", &["None"], INITIAL_VALUES),
    ("lora_ga_config", &["None"], INITIAL_VALUES),
    ("use_qalora", &["False"], "give `qat` for quantization-aware training"),
    ("trainable_token_indices", &["None"], "adapters are for linear layers and convolutions"),
    ("target_parameters", &["None"], "name layers in target_modules"),
    ("megatron_config", &["None"], "layers of Megatron are not supported"),
    ("arrow_config", &["None"], "one adapter is used at a time"),
    ("alora_invocation_tokens", &["None"], "adapters act on every token"),
    ("ensure_weight_tying", &["False"], "tied layers are adapted once"),
];

/// Check `given`, the arguments that are not parameters of `LoraConfig`.
///
/// # Errors
/// `ConfigError` if the value of an argument is not accepted, `TypeError` if peft has no such argument.
pub fn check(given: &Bound<'_, PyDict>) -> Result<()> {
    for (name, value) in given {
        let Some((name, accepted, advice)) = ARGUMENTS.iter().find(|(known, ..)| name.eq(known).unwrap_or(false))
        else {
            let message = format!("LoraConfig.__new__() got an unexpected keyword argument '{name}'");
            return Err(PyTypeError::new_err(message).into());
        };
        let value = value.repr()?.to_string();
        if !accepted.is_empty() && !accepted.contains(&value.as_str()) {
            return Err(tc::Error::Config(format!(
                "LoraConfig: {name}={value} of peft has no counterpart: {advice}; {} is accepted",
                accepted[0]
            ))
            .into());
        }
    }
    Ok(())
}
