//! Writes adapter files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use trainable_candle_core::raw::{host_copy, is_float};
use trainable_candle_core::{DType, Device, Error, Result, Tensor};
use trainable_candle_nn::adapter::{AdaptedLayer, AdapterSet, OftSide};

use super::fused::{self, Parameters};
use super::grouping::{Adapted, Modules, modules};
use super::modules::QAT_PREFIX;
use super::{AdapterFormat, OP, PartNames, Style, alpha, magnitude, metadata, oft, peft};
use crate::atomic::write_atomically;
use crate::form::Form;
use crate::tensor_writer::save_tensors;

/// Options for writing an adapter file.
#[derive(Clone, Debug, Default)]
pub struct SaveOptions {
    /// The format of the file. By default, the format that the most tools load for the first part.
    pub format: Option<AdapterFormat>,
    /// The dtype of the parameters in the file; f32 by default.
    pub dtype: Option<DType>,
    /// Text entries for the file's header. The file also gets the entries that other tools need. If an entry given here
    /// has the same name as one of those, the file gets the entry given here.
    pub metadata: BTreeMap<String, String>,
}

/// A summary of a written file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The number of adapted layers.
    pub layers: usize,
    /// The layers whose adapter has no effect because all elements of a factor are 0, as before training.
    pub zero: Vec<String>,
}

/// Write the adapters of one or several parts to `path`, atomically, with the metadata that tools look for.
///
/// - Except as described below, alpha / rank in the file is the scale of training, for rsLoRA too. Each module has a
///   tensor `….alpha`. In the formats of diffusers and peft, the alphas are in the header instead.
/// - In kohya's format all layers of a part have the same alpha if all their adapters are LoRAs and the original
///   checkpoint stores each layer's matrix as it is. Each layer's up factor is then multiplied so that the adapter's
///   effect stays the same.
/// - In diffusers' format the factors are multiplied by the scale if `ComfyUI` also reads diffusers' names of the part,
///   because `ComfyUI` does not read the alphas in the header. Such a file has no alphas.
/// - If the format uses the names of original checkpoints, layers that are one matrix in the original checkpoint are
///   stored as one module.
/// - In peft's format, a path that does not end in `.safetensors` becomes a folder with `adapter_model.safetensors` and
///   `adapter_config.json`, which `PeftModel.from_pretrained` loads.
/// - The scales that quantization-aware training learns are f32 tensors `qat_scales.LAYER`. A folder in peft's format
///   does not get them.
///
/// # Errors
/// As [`prepare_adapters`] and [`AdapterFile::write`].
pub fn save_adapters(path: &Path, parts: &[(&PartNames, &AdapterSet)], options: &SaveOptions) -> Result<Saved> {
    let file = prepare_adapters(path, parts, options)?;
    file.write()?;
    Ok(file.saved)
}

/// Copy to the CPU everything that [`save_adapters`] writes, so that the file can be written while training continues.
///
/// # Errors
/// [`Error::Argument`] if `parts` is empty, the dtype is not floating-point, the format cannot represent these
/// adapters, the format is peft's and there are several parts, two parts have the same name for a layer, or `path` is a
/// folder and the format is not peft's.
pub fn prepare_adapters(
    path: &Path,
    parts: &[(&PartNames, &AdapterSet)],
    options: &SaveOptions,
) -> Result<AdapterFile> {
    let Some((first_names, _)) = parts.first() else {
        return Err(Error::argument(OP, "there are no adapters to save"));
    };
    let format = options.format.unwrap_or_else(|| first_names.default_format());
    if format != AdapterFormat::Peft && path.is_dir() {
        return Err(Error::argument(
            OP,
            format!(
                "{} is a folder; give the name of a file, or use the format \"peft\", which writes a folder",
                path.display()
            ),
        ));
    }
    let dtype = options.dtype.unwrap_or(DType::F32);
    if !is_float(dtype) {
        let found = dtype.as_str();
        return Err(Error::argument(OP, format!("dtype is {found}, expected a floating-point dtype such as bf16")));
    }
    if format == AdapterFormat::Peft && parts.len() > 1 {
        return Err(Error::argument(
            OP,
            "peft's files hold one part; save each part separately, or use another format",
        ));
    }
    let mut parts = parts.iter().map(|&(names, set)| Ok((names, set, set.layers()?))).collect::<Result<Vec<_>>>()?;
    parts.iter().try_for_each(|(_, _, layers)| check_oft(format, layers))?;
    let modules: Vec<Modules> = parts
        .iter()
        .map(|(names, _, layers)| modules(format, names, &layers.iter().map(Adapted::of).collect::<Vec<_>>()))
        .collect::<Result<_>>()?;
    // Whether the factors are multiplied by the scales, so that the file needs no alphas.
    let folds = format == AdapterFormat::Diffusers && parts.iter().any(|(names, _, _)| names.folds());
    let mut trained_alphas = BTreeMap::new();
    for ((names, _, layers), modules) in parts.iter_mut().zip(&modules) {
        trained_alphas.extend(rescale(format, folds, (names, layers), modules)?);
    }
    let title = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let mut entries = metadata::entries(format, folds, &parts, &title);
    if !trained_alphas.is_empty() {
        entries.insert(alpha::TRAINED.into(), serde_json::json!(trained_alphas).to_string());
    }
    let path = &if format == AdapterFormat::Peft { peft::file_to_write(path) } else { path.to_path_buf() };
    let mut tensors = BTreeMap::new();
    let mut saved = Saved { layers: 0, zero: Vec::new() };
    for ((names, set, layers), modules) in parts.iter().zip(&modules) {
        // The rank and the alpha that peft's configuration has for all layers that it does not list separately.
        let common = peft::Common::of(set, layers);
        for (key, members) in modules {
            // For each layer of the module: which rows of the module are the layer's (`form`), and its parameters.
            let mut to_join = Vec::new();
            for &(form, index) in members {
                let layer = &layers[index];
                let values = on_host(layer)?;
                to_join.push((form, file_parameters(format, (layer, &values), common, dtype, &mut entries)?));
                saved.layers += 1;
                if is_zero(&values)? {
                    saved.zero.push(layer.name.to_owned());
                }
            }
            let mut values = fused::join(to_join)?;
            // For most parts diffusers rejects the key of an alpha, and peft ignores it. In their formats the alphas
            // are in peft's configuration, which the header contains, or every scale is 1 (`folds`).
            if !matches!(format, AdapterFormat::Diffusers | AdapterFormat::Peft) {
                // The rank of a joined module may be the sum of its layers' ranks. The layers have one scale, so the
                // module's alpha is this scale · the module's rank. Without a parameter of `RANKED`, the module has one
                // layer, whose alpha it gets.
                let module_rank = RANKED.iter().find_map(|name| values.get(name)).map(|down| down.dims()[0]);
                let first = &layers[members[0].1];
                let scaled_rank =
                    module_rank.map_or_else(|| alpha::of(first), |rank| first.settings.scale * rank as f64);
                let alpha = match oft::side(first) {
                    // OFT's alpha is no scale, but a limit of the rotation.
                    Some(_) => oft::NO_LIMIT,
                    None if peft::has_rank(first) => scaled_rank,
                    // The scale is in the factors (see `file_parameters`).
                    None => 1.0,
                };
                values.insert("alpha", Tensor::new(alpha as f32, &Device::Cpu)?);
            }
            for (name, value) in values {
                let ending = ending(format, names, name);
                if tensors.insert(format!("{key}.{ending}"), value).is_some() {
                    return Err(Error::argument(
                        OP,
                        format!("two parts have the key \"{key}.{ending}\"; save each part separately"),
                    ));
                }
            }
        }
    }
    entries.extend(options.metadata.clone());
    // Tools that read peft's folders may reject keys that belong to no adapter, so folders get no scales of
    // quantization-aware training. (`config_beside` is the path of peft's configuration if the file's name is that of
    // the adapter file in such a folder.)
    if peft::config_beside(path).is_none() {
        // `scales()` returns the scales of quantization-aware training by layer.
        for (layer, scales) in parts.iter().map(|(_, set, _)| set.scales()).collect::<Result<Vec<_>>>()?.concat() {
            tensors.insert(format!("{QAT_PREFIX}{layer}"), Tensor::from_raw(&host_copy(scales.raw())?));
        }
    }
    let config = (format == AdapterFormat::Peft).then(|| peft::config_beside(path)).flatten();
    let config = config.zip(parts.first()).map(|(config, (_, set, layers))| {
        let text = peft::config_text(peft::configuration(set, layers));
        (config, text)
    });
    Ok(AdapterFile { path: path.clone(), tensors, metadata: entries, config, saved })
}

/// The complete content of an adapter file, to be written by [`write`](Self::write). The tensors are copies on the CPU,
/// so further training does not change them.
pub struct AdapterFile {
    path: PathBuf,
    tensors: BTreeMap<String, Tensor>,
    metadata: BTreeMap<String, String>,
    /// The path and the content of peft's `adapter_config.json`. `None` if this file is not written.
    config: Option<(PathBuf, String)>,
    saved: Saved,
}

impl AdapterFile {
    /// A summary of the file's contents.
    pub const fn saved(&self) -> &Saved {
        &self.saved
    }

    /// Write the file, atomically.
    ///
    /// # Errors
    /// [`Error::Io`] with the path of the file or folder that cannot be written.
    pub fn write(&self) -> Result<()> {
        if let (Some(_), Some(folder)) = (&self.config, self.path.parent()) {
            std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
        }
        save_tensors(&self.path, self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)), &self.metadata)?;
        if let Some((config, text)) = &self.config {
            write_atomically(config, |file| file.write_all(text.as_bytes()))?;
        }
        Ok(())
    }
}

/// Copy a layer's parameters to the CPU. Apart from the parameters, saving copies only the scales of quantization-aware
/// training and DoRA's norms from the device.
fn on_host<'a>(layer: &AdaptedLayer<'a>) -> Result<Vec<(&'static str, Tensor)>> {
    layer.parameters.iter().map(|(name, value)| Ok((*name, Tensor::from_raw(&host_copy(value.raw())?)))).collect()
}

/// Check that a format can represent the OFT adapters among `layers`.
fn check_oft(format: AdapterFormat, layers: &[AdaptedLayer<'_>]) -> Result<()> {
    let rejected = |text: String| Err(Error::argument(OP, text));
    let Some((first, side)) = layers.iter().find_map(|layer| Some((layer, oft::side(layer)?))) else { return Ok(()) };
    // The side that programs rotate when they read the format.
    let read = format.oft_side();
    if side != read {
        let instead = if side == OftSide::Input { "peft" } else { "kohya\" or \"comfyui" };
        let (format, side, read) = (format.name(), side.name(), read.name());
        return rejected(format!(
            "programs that read format \"{format}\" rotate {read}s, and this OFT rotates {side}s; save with format \"{instead}\", or \
             train with oft_side=\"{read}\" (--oft-side {read})"
        ));
    }
    if first.settings.scale != 1.0 {
        return rejected(format!(
            "files of OFT have no scale, but this adapter has the scale {}; load it with scale=1, or merge it",
            first.settings.scale
        ));
    }
    if side == OftSide::Input && peft::block_size(layers).is_none() {
        return rejected(
            "no oft_block_size in peft's configuration gives the block sizes of all layers; merge the adapter".into(),
        );
    }
    Ok(())
}

/// For the kinds of low-rank adapters whose modules may hold several layers: the parameters whose first dimension is
/// the module's rank.
const RANKED: [&str; 2] = ["lora_A.weight", "hada_w1_b"];

/// Change the layers' scales (alpha / rank) to those that the format needs, without changing the adapters' effects. If
/// `folds`, every scale becomes 1. Returns the alphas that the changed layers had before, by diffusers' names.
fn rescale(
    format: AdapterFormat,
    folds: bool,
    (names, layers): (&PartNames, &mut [AdaptedLayer<'_>]),
    modules: &Modules,
) -> Result<BTreeMap<String, f64>> {
    // The new scale of each layer; `None` if the layer keeps its scale.
    let mut new_scales: Vec<Option<f64>> = vec![None; layers.len()];
    let are_plain = modules.values().flatten().all(|(form, _)| *form == Form::Plain);
    if folds {
        new_scales.fill(Some(1.0));
    } else if let (AdapterFormat::Kohya, true, Some(common_alpha)) = (format, are_plain, alpha::common(layers)) {
        for (new_scale, layer) in new_scales.iter_mut().zip(layers.iter()) {
            let has_common_alpha = alpha::same(alpha::of(layer), common_alpha);
            *new_scale = (!has_common_alpha).then(|| common_alpha / layer.settings.rank as f64);
        }
    }
    // The layers of a fused module (one module of several layers) get the scale of its first layer. This replaces none
    // of the new scales above: diffusers' format has no fused modules, and in kohya's format layers get a new scale
    // above only if all forms are plain; then there are no fused modules.
    for members in modules.values().filter(|members| members.len() > 1) {
        for &(_, index) in members {
            new_scales[index] = Some(layers[members[0].1].settings.scale);
        }
    }
    let mut old_alphas = BTreeMap::new();
    for (layer, scale) in layers.iter_mut().zip(new_scales) {
        // A layer cannot get the scale 0 without a change of its effect.
        let Some(scale) = scale.filter(|scale| *scale != layer.settings.scale && *scale != 0.0) else { continue };
        old_alphas.extend(names.key(layer.name, Style::Diffusers).map(|key| (key, alpha::of(layer))));
        alpha::rescale(layer, scale)?;
    }
    Ok(old_alphas)
}

/// The parameters of one layer with the values that a file in `format` stores, under peft's names. In kohya's and
/// `ComfyUI`'s formats, magnitudes of outputs (DoRA) have the name `dora_scale` instead, and the entry
/// [`magnitude::MARK`] is added to `entries`.
fn file_parameters(
    format: AdapterFormat,
    (layer, values): (&AdaptedLayer<'_>, &[(&'static str, Tensor)]),
    common: peft::Common,
    dtype: DType,
    entries: &mut BTreeMap<String, String>,
) -> Result<Parameters> {
    // The number by which the factor `peft::FOLDED` of a LoKr without a rank is multiplied; 1 for other adapters.
    let fold = match format {
        _ if peft::has_rank(layer) => 1.0,
        // peft multiplies such a LoKr by the alpha / r of its configuration. So this is the layer's scale · r / alpha.
        AdapterFormat::Peft => common.fold(layer),
        // If no parameter has a rank, tools other than peft use the scale 1. Therefore the factor is multiplied by the
        // scale.
        _ => layer.settings.scale,
    };
    let mut stored = Parameters::new();
    for (name, value) in values {
        let (name, value) = match (*name, format) {
            ("lora_magnitude_vector.weight", AdapterFormat::Kohya | AdapterFormat::ComfyUi) => {
                entries.insert(magnitude::MARK.0.into(), magnitude::MARK.1.into());
                ("dora_scale", magnitude_for_comfyui(layer, value, dtype)?)
            }
            // A parameter that has this name before saving is a magnitude for each input.
            ("dora_scale", AdapterFormat::Peft | AdapterFormat::Diffusers) => {
                return Err(Error::argument(
                    OP,
                    format!(
                        "format \"{}\" does not support DoRA with a magnitude for each input; save with format \
                         \"kohya\"",
                        format.name()
                    ),
                ));
            }
            (peft::FOLDED, _) => (peft::FOLDED, value.to_dtype(dtype)?.mul_scalar(fold)?),
            (name, _) => (name, value.to_dtype(dtype)?),
        };
        stored.insert(name, value);
    }
    Ok(stored)
}

/// m ‖W‖ / ‖W + ΔW‖ for the magnitudes m of the outputs, of shape (out, 1) or (out, 1, 1, 1). `ComfyUI` divides the
/// magnitude in the file by ‖W‖, but training divided m by ‖W + ΔW‖ (see [`magnitude`]).
fn magnitude_for_comfyui(layer: &AdaptedLayer<'_>, magnitude: &Tensor, dtype: DType) -> Result<Tensor> {
    // The norms are computed on the device of the base weight. They use the factors as the file stores them, rounded to
    // the file's dtype.
    let rounded = |wanted: &str| {
        let factor = layer.parameters.iter().find(|(name, _)| *name == wanted);
        let missing = || Error::argument(OP, format!("the layer \"{}\" has no {wanted}", layer.name));
        factor.ok_or_else(missing)?.1.detach().to_dtype(dtype)
    };
    let (down, up) = (rounded("lora_A.weight")?, rounded("lora_B.weight")?);
    // ‖W + ΔW‖ / ‖W‖ of each output.
    let growth = magnitude::growth(&layer.base, &down, &up, layer.settings.scale)?.to_device(&Device::Cpu)?;
    let mut dims = vec![1; layer.base.weight.rank()];
    dims[0] = layer.base.rows();
    magnitude.reshape(growth.shape().clone())?.div(&growth)?.reshape(dims)?.to_dtype(dtype)
}

/// The part of a parameter's key after the module's name, in a file of the given format.
fn ending(format: AdapterFormat, names: &PartNames, name: &'static str) -> &'static str {
    match (name, format) {
        ("lora_A.weight", AdapterFormat::Kohya) => "lora_down.weight",
        ("lora_B.weight", AdapterFormat::Kohya) => "lora_up.weight",
        // transformers 5 loads text encoders and expects the key with `.weight`. peft loads other parts and adds
        // `.weight`.
        ("lora_magnitude_vector.weight", AdapterFormat::Diffusers) if !names.is_denoiser => name,
        ("lora_magnitude_vector.weight", _) => "lora_magnitude_vector",
        _ => name,
    }
}

/// Whether all elements of one of the factors are 0.
fn is_zero(values: &[(&'static str, Tensor)]) -> Result<bool> {
    for (name, value) in values {
        let is_factor = !matches!(*name, "lora_magnitude_vector.weight" | "dora_scale");
        if is_factor && value.to_dtype(DType::F32)?.to_vec::<f32>()?.iter().all(|x| *x == 0.0) {
            return Ok(true);
        }
    }
    Ok(false)
}
