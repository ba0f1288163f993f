//! The arguments of peft's `LoraConfig` that have no counterpart here.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use trainable_candle_core as tc;

use crate::error::Result;

const INITIAL: &str = "adapters start without an effect; trainable_candle.lora.loftq sets other initial values";
const LAYERS: &str = r"give target_modules a regular expression for whole names, such as '.*\.(0|1)\.to_q'";

/// The name of each argument; the values that are accepted, as Python's `repr` shows them (an empty list accepts every
/// value); and what to do instead of giving another value.
const ARGUMENTS: [(&str, &[&str], &str); 28] = [
    ("task_type", &[], ""),
    ("auto_mapping", &[], ""),
    ("base_model_name_or_path", &[], ""),
    ("revision", &[], ""),
    ("runtime_config", &[], ""),
    ("megatron_core", &[], ""),
    ("qalora_group_size", &[], ""),
    ("peft_type", &["None", "'LORA'"], "choose the kind with `adapter`"),
    ("inference_mode", &["False"], "adapters are made to be trained; `eval()` ends dropout"),
    ("init_lora_weights", &["True"], INITIAL),
    ("bias", &["'none'"], "adapters do not change biases; to train a layer's bias, make it a variable"),
    ("lora_bias", &["False"], "adapters have no bias"),
    (
        "modules_to_save",
        &["None", "[]", "()"],
        "only adapters are trained and saved; `requires_grad_()` makes a module trainable, too",
    ),
    ("fan_in_fan_out", &["False"], "weights are (out, in); transpose those of other layouts"),
    ("layers_to_transform", &["None"], LAYERS),
    ("layers_pattern", &["None"], LAYERS),
    ("layer_replication", &["None"], "repeat the layers in the model"),
    ("loftq_config", &["None", "{}"], "call trainable_candle.lora.loftq"),
    ("eva_config", &["None"], INITIAL),
    ("corda_config", &["None"], INITIAL),
    ("lora_ga_config", &["None"], INITIAL),
    ("use_qalora", &["False"], "give `qat` for quantization-aware training"),
    ("trainable_token_indices", &["None"], "adapters are for linear layers and convolutions"),
    ("target_parameters", &["None"], "name layers in target_modules"),
    ("megatron_config", &["None"], "layers of Megatron are not supported"),
    ("arrow_config", &["None"], "one adapter is used at a time"),
    ("alora_invocation_tokens", &["None"], "adapters act on every token"),
    ("ensure_weight_tying", &["False"], "tied layers are adapted once"),
];

/// Check the arguments that the constructor of `LoraConfig` does not name.
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
        if accepted.first().is_some_and(|_| !accepted.contains(&value.as_str())) {
            return Err(tc::Error::Config(format!(
                "LoraConfig: {name}={value} of peft has no counterpart: {advice}; {} is accepted",
                accepted[0]
            ))
            .into());
        }
    }
    Ok(())
}
