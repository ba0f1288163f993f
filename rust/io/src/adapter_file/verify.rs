//! What other tools would make of an adapter file, told from its keys alone.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use trainable_candle_core::{DType, Result};
use trainable_candle_nn::adapter::LayerValues;

use super::modules::{Contents, non_finite};
use super::read::{Place, places};
use super::{PartNames, Style, alpha};

/// A part of a model without its weights: what tools call it, and its layers with the shapes of their weights in files.
pub struct Outline {
    /// What tools call it.
    pub names: PartNames,
    /// (out, in), or (out, in, height, width).
    pub layers: BTreeMap<String, Vec<usize>>,
}

/// A program that loads adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// ComfyUI, by its key maps (`comfy/lora.py`).
    ComfyUi,
    /// diffusers' pipelines, by their conversion of kohya's names.
    Diffusers,
    /// AUTOMATIC1111's web UI and its descendants.
    A1111,
}

/// One module of a file.
pub struct ModuleReport {
    /// The name in the file, before the parameters'.
    pub module: String,
    /// The layer that it is for, with diffusers' name of the part; None if the model has none.
    pub layer: Option<String>,
    /// The kind of adapter.
    pub kind: Option<&'static str>,
    /// Its rank, 0 if nothing is decomposed.
    pub rank: usize,
    /// The numerator of the scale, if the file has it beside the parameters.
    pub alpha: Option<f64>,
    /// The factor that tools apply: alpha / rank by the file or its configuration, 1 without both.
    pub scale: f64,
    /// Whether a factor is zero everywhere.
    pub zero: bool,
    /// What is wrong with its shapes or parameters.
    pub fault: Option<String>,
    /// Tools that leave it out, and why.
    pub ignored_by: Vec<(Tool, &'static str)>,
}

/// What other tools would make of a file.
pub struct Report {
    /// Every module in the order of names.
    pub modules: Vec<ModuleReport>,
    /// Keys that are not parameters of an adapter.
    pub others: Vec<String>,
    /// Remarks about the file as a whole.
    pub remarks: Vec<String>,
}

impl Report {
    /// Whether `ComfyUI` applies every module, and each has an effect.
    pub fn is_good(&self) -> bool {
        self.others.is_empty()
            && !self.modules.is_empty()
            && self.modules.iter().all(|m| {
                m.layer.is_some()
                    && m.fault.is_none()
                    && !m.zero
                    && !m.ignored_by.iter().any(|(tool, _)| *tool == Tool::ComfyUi)
            })
    }
}

/// Match the file at `path` against the parts of a model as `ComfyUI`, diffusers and A1111 do.
///
/// # Errors
/// [`Error::WeightsFormat`](trainable_candle_core::Error::WeightsFormat) if it is not a safetensors file.
pub fn verify_adapter(path: &Path, parts: &[Outline]) -> Result<Report> {
    let contents = Contents::read(path)?;
    let places = places(parts.iter().map(|p| (&p.names, p.layers.keys().map(String::as_str).collect())));
    let mixes = mixes_kohya_names(contents.modules.keys().filter_map(|m| places.get(m)).map(|(_, _, style)| *style));
    let mut modules = Vec::new();
    for (module, stored) in &contents.modules {
        let values = LayerValues {
            parameters: stored.parameters.iter().map(|(n, t)| ((*n).to_owned(), t.clone())).collect(),
            scale: 1.0,
        };
        let (kind, rank) = (values.kind().ok(), values.rank().unwrap_or(0));
        let place = places.get(module);
        let configured =
            place.and_then(|&(part, layer, _)| contents.configured_scale(parts[part].names.diffusers, layer));
        let scale = match stored.alpha {
            _ if rank == 0 => 1.0,
            Some(alpha) => alpha / rank as f64,
            None => configured.unwrap_or(1.0),
        };
        let mut fault = kind.is_none().then(|| "its parameters do not form a complete adapter".to_owned());
        let mut zero = false;
        for (name, value) in &stored.parameters {
            let factor = !name.contains("magnitude") && *name != "dora_scale";
            let elements = value.to_dtype(DType::F32)?.contiguous()?.to_vec::<f32>()?;
            zero |= factor && elements.iter().all(|x| *x == 0.0);
        }
        if let Some(name) = non_finite(&values)? {
            fault.get_or_insert(format!("{name} has non-finite elements"));
        }
        if let Some(&(part, layer, _)) = place {
            let shape = &parts[part].layers[layer];
            if let (None, Some(wrong)) = (&fault, misfit(&values, shape)) {
                fault = Some(wrong);
            }
        }
        modules.push(ModuleReport {
            module: module.clone(),
            layer: place.map(|&(part, layer, _)| {
                parts[part].names.key(layer, Style::Diffusers).unwrap_or_else(|| layer.to_owned())
            }),
            kind: kind.map(|kind| kind.name),
            rank,
            alpha: stored.alpha,
            scale,
            zero,
            fault,
            ignored_by: place.map_or_else(Vec::new, |&(part, layer, style)| {
                ignored_by(&parts[part].names, layer, style, kind.map_or("", |kind| kind.name), &values, mixes)
            }),
        });
    }
    let mut remarks = remarks(&contents, parts);
    remarks.extend(unread_scales(&contents, &modules));
    remarks.extend((0..parts.len()).filter_map(|part| misread_alphas(&contents, &places, part)));
    Ok(Report { modules, others: contents.others, remarks })
}

fn mixes_kohya_names(styles: impl Iterator<Item = Style>) -> bool {
    let (mut original, mut own) = (false, false);
    for style in styles {
        original |= style == Style::KohyaOriginal;
        own |= style == Style::Kohya;
    }
    original && own
}

/// What is wrong with the sizes of a low-rank pair for a weight of `shape`.
fn misfit(values: &LayerValues, shape: &[usize]) -> Option<String> {
    let (down, up) = (values.parameters.get("lora_A.weight"), values.parameters.get("lora_B.weight"));
    let (Some(down), Some(up)) = (down, up) else {
        return values.parameters.keys().any(|n| n.starts_with("lora_")).then(|| "a factor is missing".to_owned());
    };
    let columns: usize = shape.iter().skip(1).product();
    let per_rank = down.elem_count() / down.dims().first().copied().unwrap_or(1).max(1);
    let fits = up.dims().first() == shape.first() && per_rank == columns && up.dims().get(1) == down.dims().first();
    (!fits).then(|| format!("down {:?} and up {:?} do not fit a weight {shape:?}", down.dims(), up.dims()))
}

/// The tools that leave a module out, and why.
fn ignored_by(
    names: &PartNames,
    layer: &str,
    style: Style,
    kind: &str,
    values: &LayerValues,
    mixes: bool,
) -> Vec<(Tool, &'static str)> {
    let mut ignored = Vec::new();
    let kohya = matches!(style, Style::KohyaOriginal | Style::Kohya);
    let comfyui = match style {
        Style::KohyaOriginal | Style::Kohya | Style::Lycoris | Style::ComfyUi => true,
        // Its map has diffusers' names with `.processor` before the projections of a UNet's attention.
        Style::Processor => names.is_denoiser,
        Style::Diffusers => !names.is_denoiser || !layer.contains(".to_"),
        Style::Bare => names.is_denoiser && !layer.contains(".to_"),
        Style::Peft => false,
    };
    if !comfyui {
        ignored.push((Tool::ComfyUi, "it knows no such key"));
    } else if values.parameters.contains_key("lora_magnitude_vector.weight") {
        ignored.push((Tool::ComfyUi, "it knows DoRA's magnitude as dora_scale only"));
    }
    let diffusers = kohya || matches!(style, Style::Diffusers | Style::Processor);
    if !diffusers {
        ignored.push((Tool::Diffusers, "it knows no such key"));
    } else if !matches!(kind, "lora" | "dora") {
        ignored.push((Tool::Diffusers, "it loads LoRA only"));
    } else if values.parameters.contains_key("dora_scale") {
        ignored.push((Tool::Diffusers, "it leaves DoRA's magnitude out"));
    } else if mixes && style == Style::KohyaOriginal {
        ignored.push((Tool::Diffusers, "it leaves one of kohya's two kinds of names out where a file has both"));
    }
    if !kohya {
        ignored.push((Tool::A1111, "it knows kohya's names only"));
    }
    ignored
}

/// diffusers takes the most common alpha for attention's projections under kohya's names, whatever theirs is.
fn misread_alphas(contents: &Contents, places: &HashMap<String, Place<'_>>, part: usize) -> Option<String> {
    let alphas = contents.modules.iter().filter_map(|(module, stored)| {
        let &(_, layer, style) = places.get(module).filter(|(of, _, _)| *of == part)?;
        let kohya = matches!(style, Style::KohyaOriginal | Style::Kohya);
        stored.alpha.filter(|_| kohya && stored.parameters.contains_key("lora_A.weight")).map(|alpha| (layer, alpha))
    });
    let alphas: Vec<(&str, f64)> = alphas.collect();
    let common = alpha::most_common(alphas.iter().map(|(_, alpha)| *alpha))?;
    let others = alphas.iter().filter(|(layer, alpha)| layer.contains("attn") && !alpha::same(*alpha, common)).count();
    let remark = || {
        format!(
            "diffusers takes the alpha {common} for {others} projections of attention that have another one; \
             load the file and save it again"
        )
    };
    (others > 0).then(remark)
}

/// What tools make of modules without an alpha.
fn unread_scales(contents: &Contents, modules: &[ModuleReport]) -> Option<String> {
    let without = |m: &&ModuleReport| contents.modules.get(&m.module).is_some_and(|stored| stored.alpha.is_none());
    let (configured, unknown): (Vec<_>, Vec<_>) = modules.iter().filter(without).partition(|m| m.scale != 1.0);
    match (configured.len(), unknown.len()) {
        (0, 0) => None,
        (0, unknown) => Some(format!("{unknown} modules have no alpha: tools take the scale 1")),
        (configured, _) => Some(format!(
            "the alphas of {configured} modules are in the configuration, which diffusers and peft read; other tools take the scale 1"
        )),
    }
}

/// Remarks about the header.
fn remarks(contents: &Contents, parts: &[Outline]) -> Vec<String> {
    let mut remarks = Vec::new();
    if let Some(base) = parts.iter().find_map(|part| part.names.base)
        && !contents.metadata.is_empty()
    {
        match contents.metadata.get("ss_base_model_version") {
            None => remarks.push(format!(
                "the header has no ss_base_model_version (\"{}\"): A1111 takes the file for another model's",
                base.version
            )),
            Some(found) if found.split('_').next() != base.version.split('_').next() => remarks.push(format!(
                "ss_base_model_version is \"{found}\", expected \"{}\": A1111 hides the file",
                base.version
            )),
            Some(_) => {}
        }
    }
    remarks
}
