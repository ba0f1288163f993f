//! DoRA's magnitude in files.
//!
//! Let W be the base weight, ΔW the trained change and m the magnitude. The trained weight is m (W + ΔW) / ‖W + ΔW‖.
//! Each norm is the L2 norm of the weights of one output or, if there is one magnitude for each input, of one input.
//! `ComfyUI` computes this formula if there is one magnitude for each input. If there is one for each output, `ComfyUI`
//! divides by ‖W‖ instead of ‖W + ΔW‖ (`comfy/weight_adapter/base.py`, `weight_decompose`). A file for `ComfyUI` with
//! one magnitude for each output therefore stores m ‖W‖ / ‖W + ΔW‖ in place of m, so that `ComfyUI` computes the
//! trained weight.
//!
//! Follows <https://github.com/comfyanonymous/ComfyUI/blob/9c0cf36cd7964978850fd40f8cf76ac2cf9f9e15/comfy/weight_adapter/base.py>.

use trainable_candle_core::{DType, Error, Result, Tensor, Var};
use trainable_candle_nn::Base;
use trainable_candle_nn::adapter::{AdapterSettings, KINDS};

/// The metadata entry (name, value) of files that store m ‖W‖ / ‖W + ΔW‖ in place of the magnitudes m. The value says
/// that readers such as `ComfyUI` divide the stored magnitude by ‖W‖, the norm of the base.
pub(super) const MARK: (&str, &str) = ("trainable_candle.dora_scale", "divided_by_base_norm");

/// ‖W + s B A‖ / ‖W‖ for each output, shape (out), f32: m divided by this is what files for `ComfyUI` store. W is the
/// weight of `base` and s is `scale`. A is `down` and B is `up`, both in the layout of adapter files.
///
/// # Errors
/// [`Error::Shape`] if the factors do not fit the base.
pub(super) fn growth(base: &Base<'_>, down: &Tensor, up: &Tensor, scale: f64) -> Result<Tensor> {
    // The merged weight of plain LoRA is W + s B A.
    let Some(kind) = KINDS.iter().find(|kind| kind.name == "lora") else {
        return Err(Error::Config("there is no kind of adapter \"lora\"".into()));
    };
    let weight = base.weight.values(DType::F32)?;
    let base = Base { weight: (&weight).into(), ..*base };
    // LoRA's parameters are A, then B.
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

/// The L2 norm of the weights of each output, shape (out), for a `weight` of shape (out, ...).
fn norms(weight: &Tensor) -> Result<Tensor> {
    let dims: Vec<usize> = (1..weight.rank()).collect();
    weight.sqr()?.sum(&dims, false)?.sqrt()
}
