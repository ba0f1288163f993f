//! Reading adapter files of any format.
//!
//! A module is the set of an adapter's parameters under one name in a file. A module belongs to one layer of the model,
//! or to several if the program that wrote the file joins their weights (such as those of query, key and value) to one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use trainable_candle_core::{DType, Error, Result, Tensor};
use trainable_candle_nn::adapter::{AdapterSet, LayerValues, TrainingAdapter};
use trainable_candle_nn::{Base, Layer};

use super::modules::{Contents, Stored, non_finite, qat_scales};
use super::places::places;
use super::{PartNames, Style, alpha, fused, magnitude, oft, peft};
use crate::form::Form;

/// A part that a file may have adapters for.
#[derive(Clone, Copy)]
pub struct PartLayers<'a> {
    /// The names that tools use for the part.
    pub names: &'a PartNames,
    /// The layers of the part, by name.
    pub layers: &'a [(String, Layer<'a>)],
}

/// Read the adapters in the file at `path`, or in peft's file if `path` is a folder. The result has one map for each of
/// `parts`, from a layer's name to its adapter. Modules of parts other than `parts` are skipped.
///
/// # Errors
/// [`Error::Io`] if the file cannot be read; [`Error::WeightsFormat`] if it is not an adapter file, has no adapter for
/// any of the parts, names layers that a part does not have, has one layer under two names, has non-finite elements or
/// an alpha that is not one finite number, has a parameter of an unsupported variant of adapter, or has a module that
/// cannot be divided among its layers; [`Error::Config`] if peft's configuration beside the file is not JSON.
pub fn read_adapters(path: &Path, parts: &[PartLayers<'_>]) -> Result<Vec<BTreeMap<String, LayerValues>>> {
    let contents = Contents::read(path)?;
    // A map whose keys are all names that a module may have in a file. A value has the index of the module's part
    // (`part`) and its layers (`layers`), each with a form that tells which rows of the module are the layer's.
    let places = places(parts.iter().map(|p| (p.names, p.layers.iter().map(|(n, _)| n.as_str()).collect())));
    let (mark_name, mark_value) = magnitude::MARK;
    let magnitudes_are_divided = contents.metadata.get(mark_name).is_some_and(|value| value == mark_value);
    let trained_alphas = alpha::trained(&contents.metadata);
    let mut found: Vec<BTreeMap<String, LayerValues>> = parts.iter().map(|_| BTreeMap::new()).collect();
    let mut unplaced: Vec<&String> = Vec::new();
    for (module, stored) in &contents.modules {
        let Some(place) = places.get(module) else {
            unplaced.push(module);
            continue;
        };
        let part = &parts[place.part];
        for &(layer, form) in &place.layers {
            // Always found: `places` has only layers of `parts`.
            let base = part.layers.iter().find(|(name, _)| name == layer).map(|(_, l)| l.base());
            let Some(base) = base else { continue };
            let wrong = |e: Error| Error::weights(path, format!("\"{module}\": {e}"));
            let Some(share) = own(stored, form, base.rows()).map_err(wrong)? else { continue };
            let configured_scale = || contents.configured_scale(part.names.diffusers, layer);
            let trained_alpha =
                part.names.key(layer, Style::Diffusers).and_then(|key| trained_alphas.get(&key).copied());
            let mut values =
                values(&share, &base, magnitudes_are_divided, trained_alpha, configured_scale).map_err(wrong)?;
            // OFT's rotation of the inputs is stored as the strict upper triangles of skew-symmetric blocks. A file may
            // have one triangle for all blocks, but a layer has one per block.
            if let Some(triangles) = values.parameters.get_mut(oft::TRIANGLES) {
                *triangles = peft::unshared(triangles, base.inputs()).map_err(wrong)?;
                values.cayley_neumann_terms = contents.cayley_neumann_terms();
            }
            if let Some(name) = non_finite(&values)? {
                let cure = "the training that made the file has diverged, or the file is damaged";
                return Err(Error::weights(path, format!("{module}.{name} has non-finite elements; {cure}")));
            }
            if found[place.part].insert(layer.to_owned(), values).is_some() {
                return Err(Error::weights(path, format!("the layer \"{layer}\" is in the file under two names")));
            }
        }
    }
    // The names of every part know the prefixes of all parts, so those of the first part suffice.
    let part_prefix = |key: &str| parts.first().and_then(|part| part.names.prefix_of(key));
    let prefixes: Vec<&str> =
        contents.modules.keys().filter(|m| places.contains_key(*m)).filter_map(|m| part_prefix(m)).collect();
    // A key is an error if it has no known prefix, or a prefix that modules of the requested parts have too. Keys with
    // another known prefix belong to parts that were not requested and are skipped, unless no module fits any part.
    let is_unknown = |key: &String| part_prefix(key).is_none_or(|prefix| prefixes.contains(&prefix));
    let none_fits = found.iter().all(BTreeMap::is_empty);
    // `contents.others` has the names of tensors that are no parameters of a known kind of adapter.
    let unknown: Vec<&String> =
        unplaced.into_iter().chain(&contents.others).filter(|key| none_fits || is_unknown(key)).collect();
    if none_fits || !unknown.is_empty() {
        let requested: Vec<&PartNames> = parts.iter().map(|part| part.names).collect();
        return Err(Error::weights(path, mismatch(&contents, &requested, &unknown)));
    }
    Ok(found)
}

/// The largest number of unknown keys that the error message names, and asks the user to remove. If a file has more
/// unknown keys, the message says that the file is for another model.
const MOST_UNKNOWN: usize = 3;

/// The error message for a file in which the keys `unknown` belong to none of the parts `requested`.
fn mismatch(contents: &Contents, requested: &[&PartNames], unknown: &[&String]) -> String {
    let list = |keys: &[&String]| keys.iter().take(MOST_UNKNOWN).map(|key| key.as_str()).collect::<Vec<_>>().join(", ");
    let modules = contents.modules.len();
    if modules == 0 {
        return format!("not an adapter file: none of its tensors is a parameter of an adapter ({})", list(unknown));
    }
    let unplaced = unknown.iter().filter(|key| contents.modules.contains_key(**key)).count();
    let prefix_of = |key: &String| requested.first().and_then(|names| names.prefix_of(key));
    let prefixes: BTreeSet<Option<&str>> = contents.modules.keys().map(prefix_of).collect();
    let is_requested = |prefix: &str| requested.iter().any(|names| names.owns_prefix(prefix));
    if unplaced == modules && prefixes.iter().all(|prefix| prefix.is_some_and(|prefix| !is_requested(prefix))) {
        let found: Vec<&str> = prefixes.into_iter().flatten().collect();
        let parts: Vec<&str> = requested.iter().map(|names| names.diffusers).collect();
        return format!(
            "the file has no adapter for the {}: all of its {modules} modules belong to another part ({})",
            parts.join(" and "),
            found.join(", ")
        );
    }
    if unknown.len() <= MOST_UNKNOWN && unplaced < modules {
        return format!(
            "{} of the file's keys ({}) fit no layer of the model, while the other {} modules fit; remove these keys \
             from the file",
            unknown.len(),
            list(unknown),
            modules - unplaced
        );
    }
    format!(
        "the model has no layer for {unplaced} of the file's {modules} modules ({}); the adapter is for another model",
        list(unknown)
    )
}

/// The adapter of one layer, taken from the module `stored`, which may belong to several layers. The layer has `rows`
/// outputs, and `form` tells which rows of the module they are. `None` if the module does not change the layer. The
/// layer gets only the ranks that it uses, and the alpha is multiplied by (rank of the layer's adapter / rank of the
/// module), so that the scale alpha / rank stays the same.
pub(super) fn own(stored: &Stored, form: Form, rows: usize) -> Result<Option<Stored>> {
    // For `Form::Rows`, the module has the rows of other layers too.
    let module_rows = form.stored_shape(&[rows]).first().copied().unwrap_or(rows);
    let Some(parameters) = fused::split(&stored.parameters, form, module_rows)? else { return Ok(None) };
    let mut share = Stored { parameters, alpha: stored.alpha };
    let (rank, module_rank) = (share.layer_values().rank()?, stored.layer_values().rank()?);
    if let Some(alpha) = share.alpha.as_mut().filter(|_| rank > 0) {
        *alpha *= rank as f64 / module_rank as f64;
    }
    Ok(Some(share))
}

/// The adapter of one layer, with parameters under peft's names, from `stored`, the layer's share of a module
/// ([`own`]).
///
/// `magnitudes_are_divided` tells whether the file stores m ‖W‖ / ‖W + ΔW‖ in place of the magnitudes m (see
/// [`magnitude`]). `trained_alpha` is the layer's alpha in training if the alpha in the file differs from it, otherwise
/// `None`. `configured_scale` returns the layer's scale in peft's configuration.
fn values(
    stored: &Stored,
    base: &Base<'_>,
    magnitudes_are_divided: bool,
    trained_alpha: Option<f64>,
    configured_scale: impl Fn() -> Option<f64>,
) -> Result<LayerValues> {
    let mut values = LayerValues { parameters: BTreeMap::new(), scale: 1.0, cayley_neumann_terms: None };
    for (name, tensor) in &stored.parameters {
        // LyCORIS's `dora_scale` has a magnitude for each output or for each input; peft has a name only for the first.
        let is_output_scale = *name == "dora_scale" && tensor.dims().first() == Some(&base.rows());
        let name = if is_output_scale { "lora_magnitude_vector.weight" } else { name };
        values.parameters.insert(name.to_owned(), tensor.clone());
    }
    if let rank @ 1.. = values.rank()? {
        values.scale = stored.alpha.map(|alpha| alpha / rank as f64).or_else(configured_scale).unwrap_or(1.0);
        if let Some(alpha) = trained_alpha {
            alpha::to_trained(&mut values, rank, alpha)?;
        }
    } else if let (None, Some(scale)) = (stored.alpha, configured_scale()) {
        // An adapter without a rank keeps the scale 1, so `unfold` multiplies one of its factors by peft's scale.
        peft::unfold(&mut values, scale)?;
    }
    if stored.parameters.contains_key("dora_scale")
        && let Some(dora_scale) = values.parameters.get("lora_magnitude_vector.weight")
    {
        let magnitude = output_magnitude(dora_scale, &values, base, magnitudes_are_divided)?;
        values.parameters.insert("lora_magnitude_vector.weight".into(), magnitude);
    }
    Ok(values)
}

/// The magnitudes m, shape (out), from the file's `dora_scale`, shape (out, 1, …). If the magnitudes are divided, they
/// are multiplied by ‖W + ΔW‖ / ‖W‖.
fn output_magnitude(
    dora_scale: &Tensor,
    values: &LayerValues,
    base: &Base<'_>,
    magnitudes_are_divided: bool,
) -> Result<Tensor> {
    if dora_scale.elem_count() != base.rows() {
        let (found, rows) = (dora_scale.dims(), base.rows());
        return Err(Error::shape("dora_scale", format!("found {found:?}, expected ({rows}, 1)")));
    }
    let magnitude = dora_scale.to_dtype(DType::F32)?.reshape(base.rows())?;
    match (values.parameters.get("lora_A.weight"), values.parameters.get("lora_B.weight")) {
        (Some(down), Some(up)) if magnitudes_are_divided => {
            magnitude.mul(&magnitude::growth(base, down, up, values.scale)?)
        }
        _ => Ok(magnitude),
    }
}

/// Read the parameters of an adapter file into `set`, which is attached to `part`. The scales of quantization-aware
/// training are read for those layers that have such scales both in the file and in `set`.
///
/// # Errors
/// As [`read_adapters`], [`AdapterSet::load`] and [`AdapterSet::set_scales`].
pub fn load_adapter(path: &Path, set: &AdapterSet, part: PartLayers<'_>) -> Result<()> {
    let mut found = read_adapters(path, &[part])?;
    set.load(&found.pop().unwrap_or_default())?;
    set.set_scales(&qat_scales(path)?)
}

/// Attach the adapters of a file to the layers of `part` that the file names. Ranks, kinds and alphas are those of the
/// file; the adapters' scales are multiplied by `scale`.
///
/// # Errors
/// [`Error::Argument`] if `scale` is 0 or not finite; as [`read_adapters`] and [`AdapterSet::attach_values`].
pub fn attach_adapter(path: &Path, scale: f64, part: PartLayers<'_>) -> Result<AdapterSet> {
    if !scale.is_finite() || scale == 0.0 {
        let cure = "give a finite number other than 0, or leave the adapter off the model";
        return Err(Error::argument("load_adapter", format!("scale is {scale}; {cure}")));
    }
    let mut values = read_adapters(path, &[part])?.pop().unwrap_or_default();
    for layer in values.values_mut() {
        layer.scale *= scale;
    }
    AdapterSet::attach_values(&values, part.layers)
}

/// Attach the LoRA of a file to the layers of `part` that the file names, beside the adapters that these layers already
/// have. The LoRA's scales are multiplied by `scale`.
///
/// # Errors
/// [`Error::Argument`] if `scale` is not finite; as [`read_adapters`] and [`TrainingAdapter::attach`].
pub fn attach_training_adapter(path: &Path, scale: f64, part: PartLayers<'_>) -> Result<TrainingAdapter> {
    if !scale.is_finite() {
        return Err(Error::argument("add_training_adapter", format!("scale is {scale}, expected a finite number")));
    }
    let values = read_adapters(path, &[part])?.pop().unwrap_or_default();
    TrainingAdapter::attach(&values, scale, part.layers)
}
