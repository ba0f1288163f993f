//! DoRA's magnitude in files.
//!
//! With W for the base weight, ΔW for the trained change and m for the magnitude: `ComfyUI` divides by ‖W + ΔW‖ if
//! there is one magnitude for each input, but by ‖W‖ if there is one for each output (`comfy/weight_adapter/base.py`,
//! `weight_decompose`). In the second case a file for `ComfyUI` therefore stores m ‖W‖ / ‖W + ΔW‖, with which `ComfyUI`
//! computes exactly the trained adapter.
//!
//! Follows <https://github.com/comfyanonymous/ComfyUI/blob/9c0cf36cd7964978850fd40f8cf76ac2cf9f9e15/comfy/weight_adapter/base.py>.

use trainable_candle_core::{DType, Error, Result, Tensor, Var};
use trainable_candle_nn::Base;
use trainable_candle_nn::adapter::{AdapterSettings, KINDS};

/// The metadata entry that marks files whose magnitudes are for `ComfyUI`'s formula.
pub(super) const MARK: (&str, &str) = ("trainable_candle.dora_scale", "divided_by_base_norm");

/// ‖W + s B A‖ / ‖W‖ for each output, (out), f32. W is the weight of `base`, A is `down` and B is `up` in the layout of
/// files, and s is `scale`.
///
/// # Errors
/// [`Error::Shape`] if the factors do not fit the base.
pub(super) fn growth(base: &Base<'_>, down: &Tensor, up: &Tensor, scale: f64) -> Result<Tensor> {
    let Some(kind) = KINDS.iter().find(|kind| kind.name == "lora") else {
        return Err(Error::Config("there is no kind of adapter \"lora\"".into()));
    };
    let weight = base.weight.values(DType::F32)?;
    let base = Base { weight: (&weight).into(), ..*base };
    let parameters = kind
        .parameters
        .iter()
        .zip([down, up])
        .map(|((name, layout), value)| {
            let value = layout.from_file(&base, &value.to_dtype(DType::F32)?)?;
            Ok((*name, Var::from_tensor(&value)?))
        })
        .collect::<Result<Vec<_>>>()?;
    let adapter = (kind.build)(&parameters, &base, &AdapterSettings { scale, ..AdapterSettings::default() })?;
    norms(&adapter.merged_weight(&base)?)?.div(&norms(&weight)?)
}

/// The norm of each output's row of a weight, (out).
fn norms(weight: &Tensor) -> Result<Tensor> {
    let dims: Vec<usize> = (1..weight.rank()).collect();
    weight.sqr()?.sum(&dims, false)?.sqrt()
}
