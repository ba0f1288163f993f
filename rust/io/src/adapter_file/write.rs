//! Writes adapter files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use trainable_candle_core::raw::{host_copy, is_float};
use trainable_candle_core::{DType, Device, Error, Result, Tensor};
use trainable_candle_nn::adapter::{AdaptedLayer, AdapterSet};

use super::{AdapterFormat, PartNames, Style, alpha, magnitude, metadata, peft};
use crate::atomic::write_atomically;
use crate::tensor_writer::save_tensors;

const OP: &str = "save_adapter";

/// How an adapter file is written.
#[derive(Clone, Debug, Default)]
pub struct SaveOptions {
    /// The format; by default the one that most tools load.
    pub format: Option<AdapterFormat>,
    /// The dtype of the parameters; f32 by default.
    pub dtype: Option<DType>,
    /// Text entries of the header, which add to those that tools look for, or replace them.
    pub metadata: BTreeMap<String, String>,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The number of adapted layers.
    pub layers: usize,
    /// Layers whose adapter has no effect, because a factor is zero everywhere: untrained ones.
    pub zero: Vec<String>,
}

/// Write the adapters of one part or several to `path`, atomically, with the metadata that tools look for. Alpha / rank is the scale
/// that was trained with, for rsLoRA too; alphas are beside each layer, in the formats of diffusers and peft in the header. In
/// kohya's format all LoRA layers of a part have one alpha, their factors multiplied accordingly. In peft's, a path that is a folder
/// or has no ending becomes a folder that `PeftModel.from_pretrained` loads: `adapter_model.safetensors` and `adapter_config.json`.
///
/// # Errors
/// As [`prepare_adapters`] and [`AdapterFile::write`].
pub fn save_adapters(path: &Path, parts: &[(&PartNames, &AdapterSet)], options: &SaveOptions) -> Result<Saved> {
    let file = prepare_adapters(path, parts, options)?;
    file.write()?;
    Ok(file.saved)
}

/// Copy what [`save_adapters`] writes to the CPU, so that it can be written while training continues.
///
/// # Errors
/// [`Error::Argument`] if the format cannot hold these adapters.
pub fn prepare_adapters(
    path: &Path,
    parts: &[(&PartNames, &AdapterSet)],
    options: &SaveOptions,
) -> Result<AdapterFile> {
    let Some((first, _)) = parts.first() else {
        return Err(Error::argument(OP, "there are no adapters to save"));
    };
    let format = options.format.unwrap_or_else(|| first.default_format());
    let dtype = options.dtype.unwrap_or(DType::F32);
    if !is_float(dtype) {
        return Err(Error::argument(OP, format!("dtype is {}, expected f32, f16 or bf16", dtype.as_str())));
    }
    if format == AdapterFormat::Peft && parts.len() > 1 {
        return Err(Error::argument(OP, "peft's files hold one part; save each by itself, or use another format"));
    }
    let mut parts = parts.iter().map(|&(names, set)| Ok((names, set, set.layers()?))).collect::<Result<Vec<_>>>()?;
    let trained = if format == AdapterFormat::Kohya { unify_alphas(&mut parts)? } else { BTreeMap::new() };
    let title = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let mut entries = metadata::entries(format, &parts, &title);
    if !trained.is_empty() {
        entries.insert(alpha::TRAINED.into(), serde_json::json!(trained).to_string());
    }
    let path = &if format == AdapterFormat::Peft { peft::file_to_write(path) } else { path.to_path_buf() };
    let mut tensors = BTreeMap::new();
    let mut saved = Saved { layers: 0, zero: Vec::new() };
    for (names, set, layers) in &parts {
        let style = style(format, names, layers)?;
        let common = peft::Common::of(set, layers);
        for layer in layers {
            let key = names.key(layer.name, style).ok_or_else(|| unnamed(format, layer.name))?;
            let values = on_host(layer)?;
            for (name, value) in file_parameters(format, names, (layer, &values), common, dtype, &mut entries)? {
                if tensors.insert(format!("{key}.{name}"), value).is_some() {
                    return Err(Error::argument(OP, format!("two parts have a layer {key}; save each by itself")));
                }
            }
            saved.layers += 1;
            if is_zero(&values)? {
                saved.zero.push(layer.name.to_owned());
            }
        }
    }
    entries.extend(options.metadata.clone());
    let config = (format == AdapterFormat::Peft).then(|| peft::config_beside(path)).flatten();
    let config = config.zip(parts.first()).map(|(config, (_, set, layers))| {
        let text = peft::config_text(peft::configuration(set, layers));
        (config, text)
    });
    Ok(AdapterFile { path: path.clone(), tensors, metadata: entries, config, saved })
}

/// An adapter file that is complete but not written yet: on the CPU, where training does not change it.
pub struct AdapterFile {
    path: PathBuf,
    tensors: BTreeMap<String, Tensor>,
    metadata: BTreeMap<String, String>,
    /// peft's configuration, a file of its own.
    config: Option<(PathBuf, String)>,
    saved: Saved,
}

impl AdapterFile {
    /// A summary of its contents.
    pub const fn saved(&self) -> &Saved {
        &self.saved
    }

    /// Write it, atomically.
    ///
    /// # Errors
    /// [`Error::Io`] naming the path if it cannot be written.
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

/// A layer's parameters on the CPU, in storage of their own. Beside the norms that a file of
/// DoRA needs, this is all that leaves a device.
fn on_host<'a>(layer: &AdaptedLayer<'a>) -> Result<Vec<(&'static str, Tensor)>> {
    layer.parameters.iter().map(|(name, value)| Ok((*name, Tensor::from_raw(&host_copy(value.raw())?)))).collect()
}

/// Give each part one alpha; returns the alphas of the layers that had another, by their names in the file.
fn unify_alphas(parts: &mut [(&PartNames, &AdapterSet, Vec<AdaptedLayer<'_>>)]) -> Result<BTreeMap<String, f64>> {
    let mut trained = BTreeMap::new();
    for (names, _, layers) in parts {
        let Some(common) = alpha::common(layers) else { continue };
        let style = style(AdapterFormat::Kohya, names, layers)?;
        for layer in layers.iter_mut().filter(|layer| !alpha::same(alpha::of(layer), common)) {
            trained.extend(names.key(layer.name, style).map(|key| (key, alpha::of(layer))));
            alpha::to_common(layer, common)?;
        }
    }
    Ok(trained)
}

/// The style of a format. diffusers drops one half of a file that mixes kohya's two, so a part has one.
fn style(format: AdapterFormat, names: &PartNames, layers: &[AdaptedLayer<'_>]) -> Result<Style> {
    if format == AdapterFormat::Diffusers
        && let Some(layer) = layers.iter().find(|layer| !matches!(layer.kind.name, "lora" | "dora"))
    {
        return Err(Error::argument(
            OP,
            format!("diffusers does not load \"{}\" adapters; save with format \"kohya\"", layer.kind.name),
        ));
    }
    Ok(match format {
        AdapterFormat::Kohya if layers.iter().all(|layer| (names.original)(layer.name).is_some()) => {
            Style::KohyaOriginal
        }
        AdapterFormat::Kohya => Style::Kohya,
        AdapterFormat::Diffusers => Style::Diffusers,
        AdapterFormat::Peft => Style::Peft,
        AdapterFormat::ComfyUi => Style::ComfyUi,
    })
}

fn unnamed(format: AdapterFormat, layer: &str) -> Error {
    Error::argument(
        OP,
        format!("format \"{}\" has no name for the layer {layer}; save with format \"peft\"", format.name()),
    )
}

/// The entries of one layer with the endings of the format.
fn file_parameters(
    format: AdapterFormat,
    names: &PartNames,
    (layer, values): (&AdaptedLayer<'_>, &[(&'static str, Tensor)]),
    common: peft::Common,
    dtype: DType,
    entries: &mut BTreeMap<String, String>,
) -> Result<Vec<(&'static str, Tensor)>> {
    let undecomposed = !peft::has_rank(layer);
    let fold = match format {
        _ if !undecomposed => 1.0,
        AdapterFormat::Peft => common.fold(layer),
        // Other readers take the scale 1 where nothing has a rank.
        _ => layer.settings.scale,
    };
    let mut found = Vec::new();
    for (name, value) in values {
        let own = value;
        let value = value.to_dtype(dtype)?;
        found.push(match (*name, format) {
            ("lora_A.weight", AdapterFormat::Kohya) => ("lora_down.weight", value),
            ("lora_B.weight", AdapterFormat::Kohya) => ("lora_up.weight", value),
            ("lora_magnitude_vector.weight", AdapterFormat::Kohya | AdapterFormat::ComfyUi) => {
                // Of the factors as the file has them, on the device of the base.
                let rounded = |wanted: &str| {
                    let factor = layer.parameters.iter().find(|(name, _)| *name == wanted);
                    let missing = || Error::argument(OP, format!("the layer {} has no {wanted}", layer.name));
                    factor.ok_or_else(missing)?.1.detach().to_dtype(dtype)
                };
                let (down, up) = (rounded("lora_A.weight")?, rounded("lora_B.weight")?);
                let growth =
                    magnitude::growth(&layer.base, &down, &up, layer.settings.scale)?.to_device(&Device::Cpu)?;
                entries.insert(magnitude::MARK.0.into(), magnitude::MARK.1.into());
                let divided = own.reshape(growth.shape().clone())?.div(&growth)?;
                let mut dims = vec![1; layer.base.weight.rank()];
                dims[0] = layer.base.rows();
                ("dora_scale", divided.reshape(dims)?.to_dtype(dtype)?)
            }
            // transformers 5 hands text encoders' keys to the model as they are; peft completes its own name for the others.
            ("lora_magnitude_vector.weight", AdapterFormat::Diffusers) if !names.is_denoiser => (*name, value),
            ("lora_magnitude_vector.weight", _) => ("lora_magnitude_vector", value),
            ("dora_scale", AdapterFormat::Peft | AdapterFormat::Diffusers) => {
                return Err(Error::argument(
                    OP,
                    format!(
                        "format \"{}\" has no DoRA with a magnitude for each input; save with format \"kohya\"",
                        format.name()
                    ),
                ));
            }
            (peft::FOLDED, _) => (peft::FOLDED, value.mul_scalar(fold)?),
            (name, _) => (name, value),
        });
    }
    // diffusers refuses a file with a key that does not contain "lora", to peft an alpha is an unexpected key; both have a
    // configuration for it.
    if !matches!(format, AdapterFormat::Diffusers | AdapterFormat::Peft) {
        let alpha = if undecomposed { 1.0 } else { alpha::of(layer) };
        found.push(("alpha", Tensor::new(alpha as f32, &Device::Cpu)?));
    }
    Ok(found)
}

/// Whether a factor is zero everywhere.
fn is_zero(values: &[(&'static str, Tensor)]) -> Result<bool> {
    for (name, value) in values {
        let is_factor = !matches!(*name, "lora_magnitude_vector.weight" | "dora_scale");
        if is_factor && value.to_dtype(DType::F32)?.to_vec::<f32>()?.iter().all(|x| *x == 0.0) {
            return Ok(true);
        }
    }
    Ok(false)
}
