//! Reports how other tools would apply an adapter file. The tools do not run: the report follows from the file's contents.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use trainable_candle_core::ops::cayley::size_of;
use trainable_candle_core::{DType, Result};
use trainable_candle_nn::adapter::LayerValues;

use super::modules::{Contents, Stored, non_finite};
use super::places::{Place, places};
use super::readers::{AlphaAt, Found, Outcome, Tool};
use super::{PartNames, Style, alpha, oft, read};
use crate::form::Form;

/// A part of a model without its weights: the names that tools use, and its layers with the shapes of their weights in
/// files.
pub struct Outline {
    /// The names that tools use for the part.
    pub names: PartNames,
    /// The shape of each layer's weight: (out, in), or (out, in, height, width).
    pub layers: BTreeMap<String, Vec<usize>>,
}

/// One layer's adapter in a file. A module with the adapters of several layers is reported once for each layer.
pub struct ModuleReport {
    /// The name in the file, without the parameter's name.
    pub module: String,
    /// The name of the layer, preceded by diffusers' name of the part; `None` if the model has no such layer.
    pub layer: Option<String>,
    /// The kind of adapter.
    pub kind: Option<&'static str>,
    /// Its rank; 0 if it has no low-rank factors.
    pub rank: usize,
    /// The numerator of the scale, if the file has it beside the parameters.
    pub alpha: Option<f64>,
    /// The factor that tools apply: alpha / rank according to the file or its configuration, 1 without an alpha in
    /// either.
    pub scale: f64,
    /// Whether a factor is zero everywhere.
    pub zero: bool,
    /// A message about wrong shapes or parameters, if there are any.
    pub fault: Option<String>,
    /// Tools that ignore the module, with the reason.
    pub ignored_by: Vec<(Tool, &'static str)>,
    /// Tools that apply the module, but not as it was trained, with the reason.
    pub changed_by: Vec<(Tool, &'static str)>,
}

/// How other tools would apply a file.
pub struct Report {
    /// The tools that the report covers, in the order of the parts' tables.
    pub tools: Vec<Tool>,
    /// Every module in the order of names.
    pub modules: Vec<ModuleReport>,
    /// Keys that are not parameters of an adapter.
    pub others: Vec<String>,
    /// Remarks about the file as a whole.
    pub remarks: Vec<String>,
}

impl Report {
    /// Whether the file has modules and no other keys, every module fits a layer and has an effect, and the first of
    /// the tools, if there is one, applies every module as it was trained.
    pub fn is_good(&self) -> bool {
        let first = self.tools.first();
        self.others.is_empty()
            && !self.modules.is_empty()
            && self.modules.iter().all(|m| {
                m.layer.is_some()
                    && m.fault.is_none()
                    && !m.zero
                    && !m.ignored_by.iter().chain(&m.changed_by).any(|(tool, _)| Some(tool) == first)
            })
    }
}

/// Report how the tools in the parts' tables of readers would apply the file at `path` to the parts of a model.
///
/// # Errors
/// [`Error::WeightsFormat`](trainable_candle_core::Error::WeightsFormat) if the file is not a safetensors file, has no
/// tensors, has an alpha that is not a number, or has a module of an unsupported form;
/// [`Error::Config`](trainable_candle_core::Error::Config) if peft's configuration beside the file is not JSON.
pub fn verify_adapter(path: &Path, parts: &[Outline]) -> Result<Report> {
    let contents = Contents::read(path)?;
    let places = places(parts.iter().map(|p| (&p.names, p.layers.keys().map(String::as_str).collect())));
    let found = contents.modules.keys().filter_map(|module| Some((module.as_str(), places.get(module)?)));
    // A name that is the same in both of kohya's styles does not mix styles, so it is left out here.
    let is_one = |(module, place): &(&str, &Place<'_>)| {
        let name = |layer| parts[place.part].names.key(layer, Style::Kohya);
        place.layers.iter().all(|(layer, _)| name(layer).as_deref() != Some(*module)) || place.style == Style::Kohya
    };
    let mixes = mixes_kohya_names(found.filter(is_one).map(|(_, place)| place.style));
    let mut modules = Vec::new();
    for (module, stored) in &contents.modules {
        let Some(place) = places.get(module) else {
            modules.push(described(module, stored)?);
            continue;
        };
        let part = &parts[place.part];
        for &(layer, form) in &place.layers {
            let mut report = match read::own(stored, form, part.layers[layer][0]) {
                Ok(None) => continue,
                Ok(Some(own)) => {
                    let mut report = described(module, &own)?;
                    report.fault = report.fault.or_else(|| misfit(&own.layer_values(), &part.layers[layer]));
                    report
                }
                // An incomplete adapter cannot be split, so the whole module is reported for each of its layers.
                Err(error) => {
                    let mut report = described(module, stored)?;
                    report.fault.get_or_insert(error.to_string());
                    report
                }
            };
            let configured = contents.configured_scale(part.names.diffusers, layer);
            let scaled = match (stored.alpha, configured) {
                _ if report.rank == 0 => AlphaAt::Nowhere,
                (Some(_), _) if report.scale != 1.0 => AlphaAt::Beside,
                (None, Some(scale)) if scale != 1.0 => AlphaAt::Configuration,
                _ => AlphaAt::Nowhere,
            };
            if let (None, Some(scale), 1..) = (stored.alpha, configured, report.rank) {
                report.scale = scale;
            }
            report.layer = Some(part.names.key(layer, Style::Diffusers).unwrap_or_else(|| layer.to_owned()));
            let magnitude = ["dora_scale", "lora_magnitude_vector.weight"];
            let found = Found {
                layer,
                style: place.style,
                kind: report.kind.unwrap_or_default(),
                magnitude: magnitude.into_iter().find(|name| stored.parameters.contains_key(name)),
                per_input: stored.parameters.get("dora_scale").is_some_and(|scale| scale.dims().first() == Some(&1))
                    || stored.parameters.contains_key(oft::TRIANGLES),
                limited: oft::is_limited(stored)?,
                has_alpha: stored.alpha.is_some(),
                scaled,
            };
            read_by(&part.names, &found, mixes, &mut report);
            modules.push(report);
        }
    }
    let mut remarks = remarks(&contents, parts);
    remarks.extend(unread_scales(&contents, &modules));
    remarks.extend((0..parts.len()).filter_map(|part| misread_alphas(&contents, &places, parts, part)));
    let mut tools: Vec<Tool> = Vec::new();
    for reader in parts.iter().flat_map(|part| part.names.readers) {
        if !tools.contains(&reader.tool) {
            tools.push(reader.tool);
        }
    }
    Ok(Report { tools, modules, others: contents.others, remarks })
}

/// A module's report with the entries that follow from the parameters alone.
fn described(module: &str, stored: &Stored) -> Result<ModuleReport> {
    let values = stored.layer_values();
    let (kind, rank) = (values.kind().ok(), values.rank().unwrap_or(0));
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
    Ok(ModuleReport {
        module: module.to_owned(),
        layer: None,
        kind: kind.map(|kind| kind.name),
        rank,
        alpha: stored.alpha,
        scale: stored.alpha.filter(|_| rank > 0).map_or(1.0, |alpha| alpha / rank as f64),
        zero,
        fault,
        ignored_by: Vec::new(),
        changed_by: Vec::new(),
    })
}

fn mixes_kohya_names(styles: impl Iterator<Item = Style>) -> bool {
    let (mut original, mut own) = (false, false);
    for style in styles {
        original |= style == Style::KohyaOriginal;
        own |= style == Style::Kohya;
    }
    original && own
}

/// The reason why a low-rank pair or OFT's blocks do not fit a weight of `shape`; `None` if they fit.
fn misfit(values: &LayerValues, shape: &[usize]) -> Option<String> {
    for (name, features) in [(oft::TRIANGLES, shape.get(1)), (oft::BLOCKS, shape.first())] {
        let Some(value) = values.parameters.get(name) else { continue };
        let size = match *value.dims() {
            [_, elements] => size_of(elements),
            [_, size, columns] if size == columns => Some(size),
            _ => None,
        };
        // OFT of inputs may share one triangle among all blocks.
        let count = value.dims().first().copied().unwrap_or(0);
        let is_shared = name == oft::TRIANGLES && count == 1;
        let fits = size.zip(features).is_some_and(|(size, features)| {
            if is_shared { features.is_multiple_of(size) } else { count * size == *features }
        });
        if !fits {
            return Some(format!("{name} {:?} does not fit a weight {shape:?}", value.dims()));
        }
    }
    let (down, up) = (values.parameters.get("lora_A.weight"), values.parameters.get("lora_B.weight"));
    let (Some(down), Some(up)) = (down, up) else {
        return values.parameters.keys().any(|n| n.starts_with("lora_")).then(|| "a factor is missing".to_owned());
    };
    let columns: usize = shape.iter().skip(1).product();
    let per_rank = down.elem_count() / down.dims().first().copied().unwrap_or(1).max(1);
    let fits = up.dims().first() == shape.first() && per_rank == columns && up.dims().get(1) == down.dims().first();
    (!fits).then(|| format!("down {:?} and up {:?} do not fit a weight {shape:?}", down.dims(), up.dims()))
}

/// Adds to the report what each tool does with a module.
fn read_by(names: &PartNames, found: &Found<'_>, mixes: bool, report: &mut ModuleReport) {
    for reader in names.readers {
        let mut outcome = reader.outcome(found);
        if mixes && reader.tool == Tool::Diffusers && found.style == Style::KohyaOriginal {
            let why = "the file mixes kohya's two kinds of names, of which it ignores this kind";
            outcome = if outcome == Outcome::Whole { Outcome::Not(why) } else { outcome };
        }
        match outcome {
            Outcome::Whole => {}
            Outcome::Part(why) => report.changed_by.push((reader.tool, why)),
            Outcome::Not(why) => report.ignored_by.push((reader.tool, why)),
        }
    }
}

/// A remark if diffusers reads wrong alphas: for attention's projections under kohya's names, it uses the most common
/// alpha.
fn misread_alphas(
    contents: &Contents,
    places: &HashMap<String, Place<'_>>,
    parts: &[Outline],
    part: usize,
) -> Option<String> {
    let is_split = |layer: &String| (parts[part].names.original)(layer).is_some_and(|key| key.form != Form::Plain);
    if parts[part].layers.keys().any(is_split) {
        // For models whose original checkpoints join layers, diffusers' converter reads each alpha correctly.
        return None;
    }
    let alphas = contents.modules.iter().filter_map(|(module, stored)| {
        let place = places.get(module).filter(|place| place.part == part)?;
        let (layer, kohya) = (place.layers[0].0, matches!(place.style, Style::KohyaOriginal | Style::Kohya));
        stored.alpha.filter(|_| kohya && stored.parameters.contains_key("lora_A.weight")).map(|alpha| (layer, alpha))
    });
    let alphas: Vec<(&str, f64)> = alphas.collect();
    let common = alpha::most_common(alphas.iter().map(|(_, alpha)| *alpha))?;
    let others = alphas.iter().filter(|(layer, alpha)| layer.contains("attn") && !alpha::same(*alpha, common)).count();
    let remark = || {
        format!(
            "diffusers uses the alpha {common} for {others} attention projections that have another alpha; load the \
             file and save it again"
        )
    };
    (others > 0).then(remark)
}

/// A remark about modules without an alpha.
fn unread_scales(contents: &Contents, modules: &[ModuleReport]) -> Option<String> {
    // OFT has no scale.
    let modules = modules.iter().filter(|m| m.kind != Some("oft"));
    let without = |m: &&ModuleReport| contents.modules.get(&m.module).is_some_and(|stored| stored.alpha.is_none());
    let (configured, unknown): (Vec<_>, Vec<_>) = modules.filter(without).partition(|m| m.scale != 1.0);
    match (configured.len(), unknown.len()) {
        (0, 0) => None,
        (0, unknown) => Some(format!("{unknown} modules have no alpha, so tools use the scale 1")),
        (configured, _) => Some(format!(
            "the alphas of {configured} modules are in the configuration, which diffusers and peft read; other tools \
             use the scale 1"
        )),
    }
}

/// The metadata entry with the name of the training adapter that was active on a distilled model during training.
const TRAINED_OVER: &str = "ss_training_adapter";

fn remarks(contents: &Contents, parts: &[Outline]) -> Vec<String> {
    let mut remarks = Vec::new();
    if let Some(name) = contents.metadata.get(TRAINED_OVER) {
        remarks.push(format!(
            "the adapter was trained together with the training adapter {name}, which the file does not \
             include: use the adapter without {name}"
        ));
    }
    let shows = |part: &&Outline| part.names.readers.iter().any(|reader| reader.tool == Tool::A1111);
    if let Some(base) = parts.iter().filter(shows).find_map(|part| part.names.base)
        && !contents.metadata.is_empty()
    {
        match contents.metadata.get("ss_base_model_version") {
            None => remarks.push(format!(
                "the header has no ss_base_model_version, expected \"{}\": A1111 assumes another base model",
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
