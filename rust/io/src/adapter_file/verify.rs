//! Reports how other tools would apply an adapter file. The tools do not run: the report follows from the file's
//! contents.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use trainable_candle_core::ops::cayley;
use trainable_candle_core::{DType, Result};
use trainable_candle_nn::adapter::LayerValues;

use super::modules::{Contents, Stored, non_finite};
use super::places::{Place, places};
use super::readers::{AlphaAt, ModuleTraits, Outcome, Tool};
use super::{PartNames, Style, alpha, oft, read};
use crate::form::Form;

/// A part of a model without its weights: the names that tools use for the part, and the part's layers with the shapes
/// that their weights have in files.
pub struct Outline {
    /// The names that tools use for the part.
    pub names: PartNames,
    /// The shape of each layer's weight: (out, in), or (out, in, height, width).
    pub layers: BTreeMap<String, Vec<usize>>,
}

/// The report on one module of a file. A module consists of the tensors whose keys start with the same name, such as
/// the two factors of a LoRA. If a module adapts several layers, which are one matrix in some tools, each of these
/// layers has a report of its own.
pub struct ModuleReport {
    /// The module's name in the file: the keys of its tensors without the parameters' names.
    pub module: String,
    /// The name of the layer, preceded by diffusers' name of the part; `None` if the model has no such layer.
    pub layer: Option<String>,
    /// The kind of adapter; `None` if the parameters form no complete adapter.
    pub kind: Option<&'static str>,
    /// The adapter's rank; 0 if it has no low-rank factors.
    pub rank: usize,
    /// The value of the module's tensor `….alpha`, the numerator of the scale. `None` if the module has no such tensor.
    pub alpha: Option<f64>,
    /// The scale by which the adapter is multiplied: the module's [`alpha`](Self::alpha) / rank, or without this tensor
    /// the scale in peft's configuration. It is 1 if there is neither, and for an adapter without a rank.
    pub scale: f64,
    /// Whether all elements of one of the factors are 0, so that the adapter has no effect.
    pub zero: bool,
    /// A message about wrong shapes, missing parameters or non-finite elements; `None` if the adapter has no such
    /// fault.
    pub fault: Option<String>,
    /// Tools that ignore the module, with the reason.
    pub ignored_by: Vec<(Tool, &'static str)>,
    /// Tools that apply the module, but not as it was trained, with the reason.
    pub changed_by: Vec<(Tool, &'static str)>,
}

/// How other tools would apply a file.
pub struct Report {
    /// The tools that the report covers, in the order of the parts' tables of readers.
    pub tools: Vec<Tool>,
    /// The reports of all modules, in the order of the modules' names.
    pub modules: Vec<ModuleReport>,
    /// Keys that are not parameters of an adapter.
    pub others: Vec<String>,
    /// Remarks about the file as a whole.
    pub remarks: Vec<String>,
}

impl Report {
    /// Whether the file has modules and no other keys, every module fits a layer and has an effect, and the first of
    /// [`tools`](Self::tools), if there is one, applies every module as it was trained. The first is `ComfyUI` if it
    /// supports the model, otherwise peft; the other tools do not count.
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
/// [`Error::Io`](trainable_candle_core::Error::Io) if the file cannot be read;
/// [`Error::WeightsFormat`](trainable_candle_core::Error::WeightsFormat) if it is not a safetensors file, has no
/// tensors, has an alpha that is not one finite number, or has a parameter of an unsupported variant of adapter;
/// [`Error::Config`](trainable_candle_core::Error::Config) if peft's configuration beside the file is not JSON.
pub fn verify_adapter(path: &Path, parts: &[Outline]) -> Result<Report> {
    let contents = Contents::read(path)?;
    let places = places(parts.iter().map(|p| (&p.names, p.layers.keys().map(String::as_str).collect())));
    let found = contents.modules.keys().filter_map(|module| Some((module.as_str(), places.get(module)?)));
    // kohya's two styles are `KohyaOriginal`, with the layers' names in original checkpoints, and `Kohya`, with those
    // of diffusers. A name that is the same in both is no sign of mixed styles, so it is skipped. Such a name has the
    // style `KohyaOriginal`, because this style precedes `Kohya` in `Style::ALL`.
    let is_same_in_both = |(module, place): &(&str, &Place<'_>)| {
        let name = |layer| parts[place.part].names.key(layer, Style::Kohya);
        place.style != Style::Kohya && place.layers.iter().any(|(layer, _)| name(layer).as_deref() == Some(*module))
    };
    let signs = found.filter(|module_and_place| !is_same_in_both(module_and_place));
    let mixes_styles = mixes_kohya_names(signs.map(|(_, place)| place.style));
    let mut modules = Vec::new();
    // For each report in `modules`, the index of the module's part; `None` if no part has the module.
    let mut owners = Vec::new();
    for (module, stored) in &contents.modules {
        let Some(place) = places.get(module) else {
            modules.push(described(module, stored)?);
            owners.push(None);
            continue;
        };
        let part = &parts[place.part];
        for &(layer, form) in &place.layers {
            let outputs = part.layers[layer][0];
            // `own` returns the adapter of this layer alone, from the rows of the module that belong to the layer
            // (`form`), or `None` if the module does not change the layer.
            let mut report = match read::own(stored, form, outputs) {
                Ok(None) => continue,
                Ok(Some(own)) => {
                    let mut report = described(module, &own)?;
                    report.fault = report.fault.or_else(|| misfit(&own.layer_values(), &part.layers[layer]));
                    report
                }
                // An incomplete module cannot be split, so the report of each of its layers describes the whole module.
                Err(error) => {
                    let mut report = described(module, stored)?;
                    report.fault.get_or_insert(error.to_string());
                    report
                }
            };
            // The scale in peft's configuration, which counts for a module without an alpha.
            let configured = contents.configured_scale(part.names.diffusers, layer);
            // Where the alpha is, if it gives a scale other than 1: in the module's tensor `….alpha` (`Beside`), or in
            // peft's configuration.
            let alpha_at = match (stored.alpha, configured) {
                _ if report.rank == 0 => AlphaAt::Nowhere,
                (Some(_), _) if report.scale != 1.0 => AlphaAt::Beside,
                (None, Some(scale)) if scale != 1.0 => AlphaAt::Configuration,
                _ => AlphaAt::Nowhere,
            };
            if let (None, Some(scale), 1..) = (stored.alpha, configured, report.rank) {
                report.scale = scale;
            }
            report.layer = Some(part.names.key(layer, Style::Diffusers).unwrap_or_else(|| layer.to_owned()));
            // The names of DoRA's magnitude in files of LyCORIS and of peft.
            let magnitude = ["dora_scale", "lora_magnitude_vector.weight"];
            let traits = ModuleTraits {
                layer,
                style: place.style,
                kind: report.kind.unwrap_or_default(),
                magnitude: magnitude.into_iter().find(|name| stored.parameters.contains_key(name)),
                // DoRA with a magnitude of shape (1, in, …), or OFT that rotates inputs.
                per_input: stored.parameters.get("dora_scale").is_some_and(|scale| scale.dims().first() == Some(&1))
                    || stored.parameters.contains_key(oft::TRIANGLES),
                limited: oft::is_limited(stored)?,
                has_alpha: stored.alpha.is_some(),
                alpha_at,
            };
            read_by(&part.names, &traits, mixes_styles, &mut report);
            modules.push(report);
            owners.push(Some(place.part));
        }
    }
    let mut remarks = remarks(&contents, parts);
    remarks.extend(unread_scales(&contents, &modules));
    remarks.extend((0..parts.len()).filter_map(|part| misread_alphas(&contents, &places, parts, part)));
    let tools = tools_of(parts, &owners);
    for (module, owner) in modules.iter_mut().zip(&owners) {
        let readers = owner.map_or_else(Default::default, |part| parts[part].names.readers);
        // Tools without a reader for the module's part. A module of no part has a `layer` of `None` instead.
        let unread = tools.iter().filter(|&&tool| owner.is_some() && readers.iter().all(|reader| reader.tool != tool));
        module.ignored_by.extend(unread.map(|&tool| (tool, "it does not support this model")));
    }
    Ok(Report { tools, modules, others: contents.others, remarks })
}

/// The tools that load adapters of the parts with the indices `owners`; if no part has a module, of all parts.
fn tools_of(parts: &[Outline], owners: &[Option<usize>]) -> Vec<Tool> {
    let is_owner = |part: usize| owners.contains(&Some(part)) || owners.iter().all(Option::is_none);
    let mut tools = Vec::new();
    for (_, part) in parts.iter().enumerate().filter(|&(index, _)| is_owner(index)) {
        for reader in part.names.readers {
            if !tools.contains(&reader.tool) {
                tools.push(reader.tool);
            }
        }
    }
    tools
}

/// A module's report with only those fields that follow from the module's tensors.
fn described(module: &str, stored: &Stored) -> Result<ModuleReport> {
    let values = stored.layer_values();
    let (kind, rank) = (values.kind().ok(), values.rank().unwrap_or(0));
    let mut fault = kind.is_none().then(|| "its parameters do not form a complete adapter".to_owned());
    let mut zero = false;
    for (name, value) in &stored.parameters {
        let is_factor = !name.contains("magnitude") && *name != "dora_scale";
        let elements = value.to_dtype(DType::F32)?.contiguous()?.to_vec::<f32>()?;
        zero |= is_factor && elements.iter().all(|x| *x == 0.0);
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

/// Whether both of kohya's styles, with original names and with those of diffusers, occur in `styles`.
fn mixes_kohya_names(styles: impl Iterator<Item = Style>) -> bool {
    let (mut has_original, mut has_diffusers) = (false, false);
    for style in styles {
        has_original |= style == Style::KohyaOriginal;
        has_diffusers |= style == Style::Kohya;
    }
    has_original && has_diffusers
}

/// The reason why the factors of a LoRA, or OFT's blocks, do not fit a weight of `shape`; `None` if they fit.
fn misfit(values: &LayerValues, shape: &[usize]) -> Option<String> {
    // OFT rotates the inputs, with the strict upper triangle of each block, or the outputs, with square blocks.
    for (name, features) in [(oft::TRIANGLES, shape.get(1)), (oft::BLOCKS, shape.first())] {
        let Some(value) = values.parameters.get(name) else { continue };
        // The number of rows of a block.
        let size = match *value.dims() {
            [_, elements] => cayley::size_of(elements),
            [_, size, columns] if size == columns => Some(size),
            _ => None,
        };
        // If OFT rotates inputs, all blocks may share one triangle.
        let count = value.dims().first().copied().unwrap_or(0);
        let is_shared = name == oft::TRIANGLES && count == 1;
        let fits = size.zip(features).is_some_and(|(size, features)| {
            if is_shared { features.is_multiple_of(size) } else { count * size == *features }
        });
        if !fits {
            return Some(format!("{name} of shape {:?} does not fit a weight of shape {shape:?}", value.dims()));
        }
    }
    let (down, up) = (values.parameters.get("lora_A.weight"), values.parameters.get("lora_B.weight"));
    let (Some(down), Some(up)) = (down, up) else {
        return values.parameters.keys().any(|n| n.starts_with("lora_")).then(|| "a factor is missing".to_owned());
    };
    let columns: usize = shape.iter().skip(1).product();
    let down_columns = down.elem_count() / down.dims().first().copied().unwrap_or(1).max(1);
    let fits = up.dims().first() == shape.first() && down_columns == columns && up.dims().get(1) == down.dims().first();
    (!fits).then(|| {
        let (down, up) = (down.dims(), up.dims());
        format!(
            "the shapes of the down factor {down:?} and the up factor {up:?} do not fit a weight of shape {shape:?}"
        )
    })
}

/// Add to `report` those tools of the part's table of readers that ignore the module with these `traits` or change its
/// effect. `mixes_styles` tells whether the file mixes kohya's two styles of names.
fn read_by(names: &PartNames, traits: &ModuleTraits<'_>, mixes_styles: bool, report: &mut ModuleReport) {
    for reader in names.readers {
        let mut outcome = reader.outcome(traits);
        if mixes_styles && reader.tool == Tool::Diffusers && traits.style == Style::KohyaOriginal {
            let why = "it ignores names of this style, because the file mixes kohya's two styles of names";
            outcome = if outcome == Outcome::Whole { Outcome::Ignored(why) } else { outcome };
        }
        match outcome {
            Outcome::Whole => {}
            Outcome::Changed(why) => report.changed_by.push((reader.tool, why)),
            Outcome::Ignored(why) => report.ignored_by.push((reader.tool, why)),
        }
    }
}

/// A remark if diffusers reads wrong alphas of the part with the index `part`. For attention projections with kohya's
/// names, diffusers uses the most common alpha of the part instead of the projection's alpha.
fn misread_alphas(
    contents: &Contents,
    places: &HashMap<String, Place<'_>>,
    parts: &[Outline],
    part: usize,
) -> Option<String> {
    let is_split = |layer: &String| (parts[part].names.original)(layer).is_some_and(|key| key.form != Form::Plain);
    if parts[part].layers.keys().any(is_split) {
        // If several layers of the model are one matrix in original checkpoints, diffusers converts the names with
        // another function, which reads each alpha correctly.
        return None;
    }
    let alphas = contents.modules.iter().filter_map(|(module, stored)| {
        let place = places.get(module).filter(|place| place.part == part)?;
        // No layers are joined here, so the module has one layer.
        let (layer, _) = place.layers[0];
        let is_lora_of_kohya = matches!(place.style, Style::KohyaOriginal | Style::Kohya)
            && stored.parameters.contains_key("lora_A.weight");
        stored.alpha.filter(|_| is_lora_of_kohya).map(|alpha| (layer, alpha))
    });
    let alphas: Vec<(&str, f64)> = alphas.collect();
    let common = alpha::most_common(alphas.iter().map(|(_, alpha)| *alpha))?;
    let others = alphas.iter().filter(|(layer, alpha)| layer.contains("attn") && !alpha::same(*alpha, common)).count();
    let remark = || {
        format!(
            "diffusers uses the alpha {common} for {others} attention projections whose alpha in the file differs; \
             load the file and save it again"
        )
    };
    (others > 0).then(remark)
}

/// A remark about modules without a tensor `….alpha`; `None` if every module, apart from those of OFT, has this tensor.
fn unread_scales(contents: &Contents, modules: &[ModuleReport]) -> Option<String> {
    // OFT has no scale.
    let modules = modules.iter().filter(|m| m.kind != Some("oft"));
    let without = |m: &&ModuleReport| contents.modules.get(&m.module).is_some_and(|stored| stored.alpha.is_none());
    // Without an alpha in the file, a scale other than 1 comes from peft's configuration.
    let (configured, unscaled): (Vec<_>, Vec<_>) = modules.filter(without).partition(|m| m.scale != 1.0);
    match (configured.len(), unscaled.len()) {
        (0, 0) => None,
        (0, unscaled) => Some(format!("{unscaled} modules have no alpha, so tools use the scale 1")),
        (configured, _) => Some(format!(
            "the alphas of {configured} modules are in peft's configuration, which only diffusers and peft read; other \
             tools use the scale 1"
        )),
    }
}

/// The name of the metadata entry with the name of the training adapter that was active during training. (A training
/// adapter changes a distilled model so that it can be trained, and is removed afterwards.)
const TRAINED_OVER: &str = "ss_training_adapter";

/// Remarks about the metadata of the file.
fn remarks(contents: &Contents, parts: &[Outline]) -> Vec<String> {
    let mut remarks = Vec::new();
    if let Some(name) = contents.metadata.get(TRAINED_OVER) {
        remarks.push(format!(
            "the adapter was trained together with the training adapter {name}, which the file does not \
             include: use the adapter without {name}"
        ));
    }
    // A1111 takes the base model from the start of `ss_base_model_version`, such as `sdxl`. A header without any
    // metadata does not mislead it.
    let a1111_reads = |part: &&Outline| part.names.readers.iter().any(|reader| reader.tool == Tool::A1111);
    if let Some(base) = parts.iter().filter(a1111_reads).find_map(|part| part.names.base)
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
