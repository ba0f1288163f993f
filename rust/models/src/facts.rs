//! Determines what a checkpoint contains and how much memory its fine-tuning takes, from headers and configurations
//! alone.

mod incomplete;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::checkpoint::Policy;
use trainable_candle_core::compute::uses_w8a8;
use trainable_candle_core::ops::conv::Conv2dOptions;
use trainable_candle_core::quantized::Format;
use trainable_candle_core::quantized::w8a8::transposed_bytes;
use trainable_candle_core::{DType, Device, Error, Result, Tensor, Weight};
use trainable_candle_io::adapter_file::{AdapterFormat, adapter_keys, check_format};
use trainable_candle_io::{WeightFile, WeightFiles};
use trainable_candle_nn::adapter::{AdapterSettings, KINDS, LoraConfig};
use trainable_candle_nn::optim::OptimizerKind;
use trainable_candle_nn::{Base, Checkpointing, Operation, Quantization, StreamOptions, StreamedBytes, Streaming};

use self::incomplete::{content_hint, incomplete_file, incomplete_folder, pipeline_hint};
use crate::pipelines::{self, PIPELINES, Pipeline, Place, Role};
use crate::pretrained::{CONFIG, Choice, Pretrained, read_json};
use crate::registry::{self, Model, ModelKind};
use crate::saved::{Flops, SampleSize, Saved};

/// The contents of a checkpoint.
pub struct Facts {
    /// The pipeline that all parts belong to. None for a single model that fits no part of a pipeline.
    pub pipeline: Option<&'static Pipeline>,
    /// The models, by the names of their folders in a pipeline's folder. The name is empty for a model that has no
    /// such folder.
    pub parts: BTreeMap<String, PartFacts>,
    /// What the denoiser predicts. In a folder, this is the `prediction_type` of the scheduler's configuration, such as
    /// `epsilon` or `v_prediction`; None if there is no such field. For a checkpoint in one file, it is `v_prediction`
    /// if the file has a tensor `v_pred`, as in `ComfyUI`, and otherwise `epsilon`.
    pub prediction_type: Option<String>,
    /// Whether the last timestep is pure noise. In a folder, this is the `rescale_betas_zero_snr` of the scheduler's
    /// configuration, or false without this field. In a checkpoint in one file, a tensor `ztsnr` marks it.
    pub zero_snr: bool,
}

/// One model of a checkpoint.
pub struct PartFacts {
    /// The model's kind.
    pub kind: &'static ModelKind,
    /// The model's place in a pipeline; None if the model fits no part of a pipeline.
    pub place: Option<Place>,
    /// The path of the model, one of the paths that were given to [`inspect`]: a path in `others`, or else `path`.
    pub path: PathBuf,
    /// The floating-point dtype of most of the model's elements in its file; `None` if its elements have no such dtype.
    pub dtype: Option<DType>,
    /// The model without its weights.
    model: Arc<dyn Model>,
    /// The format of each parameter that the file stores in a block format of GGUF.
    block_formats: BTreeMap<String, Format>,
    /// The format in which the file stores every layer that may be quantized: int8, fp8 or NF4. None if there is no
    /// such format, as for block formats of GGUF.
    code_format: Option<Format>,
    /// Whether the file has weights in NF4 whose scales are not quantized.
    has_plain_scales: bool,
}

impl Facts {
    /// Side in pixels of the square images that the denoiser was trained on: the `sample_size` of the denoiser's
    /// configuration, converted to pixels. If the configuration has no `sample_size`, this is the `resolution` of the
    /// pipeline's base model. None if there is no denoiser, or if neither is known.
    pub fn resolution(&self) -> Option<usize> {
        let is_denoiser = |part: &&PartFacts| part.place.is_some_and(|place| place.part.role == Role::Denoiser);
        let denoiser = self.parts.values().find(is_denoiser)?;
        let pipeline = denoiser.place?.pipeline;
        match denoiser.config().get("sample_size").and_then(Value::as_u64) {
            // `sample_size` counts elements of the denoiser's input. Without an autoencoder, the pipeline says how many
            // pixels an element has along one side.
            Some(side) => Some(side as usize * self.factor().unwrap_or(pipeline.pixels)),
            None => pipeline.base.as_ref().map(|base| base.resolution),
        }
    }

    /// Pixels per latent along one side of an image; None if there is no autoencoder.
    pub fn factor(&self) -> Option<usize> {
        let count_levels = |part: &PartFacts| {
            let config = part.config();
            config.get("block_out_channels").or_else(|| config.get("dim_mult"))?.as_array().map(Vec::len)
        };
        let is_autoencoder = |part: &&PartFacts| part.place.is_some_and(|place| place.part.role == Role::Autoencoder);
        let autoencoder = self.parts.values().find(is_autoencoder);
        // Each level of the encoder, except the last, halves the sides of the image.
        autoencoder.and_then(count_levels).map(|levels| 1 << levels.saturating_sub(1))
    }
}

impl PartFacts {
    /// The facts of the model in `files`. Reads no weights.
    fn of(kind: &'static ModelKind, files: &Pretrained) -> Result<Self> {
        let path = files.path().to_path_buf();
        // The model with the shapes of its parameters, but without values.
        let model = (kind.shapes)(&(kind.config)(files)?)?;
        let weights = WeightFiles::open(files.weights())?;
        let prefix = files.original().map_or("", |original| original.prefix);
        let layout = model.layout(files.original(), Some(&weights));
        // The possible keys of a parameter in the file. Values stay quantized only in forms that keep whole rows.
        let keys_of = |name: &str| {
            let candidates = layout.keys(name).into_iter().filter(|candidate| candidate.form.keeps_rows());
            candidates.map(|candidate| format!("{prefix}{}", candidate.key)).collect::<Vec<_>>()
        };
        let block_format = |(name, _): (String, Weight)| {
            let format = keys_of(&name).iter().find_map(|key| weights.block_format(key))?;
            Some((name, Format::Ggml(format)))
        };
        let block_formats = model.named_weights().into_iter().filter_map(block_format).collect();
        let matrices = pipelines::layer_shapes(model.as_ref()).into_iter().filter(|(_, dims)| dims.len() == 2);
        let layers = matrices.map(|(layer, _)| layer).filter(|layer| kind.quantizable.has(layer));
        let layer_keys: Vec<Vec<String>> = layers.map(|layer| keys_of(&format!("{layer}.weight"))).collect();
        let mut formats = layer_keys.iter().map(|keys| keys.iter().find_map(|key| weights.format(key)));
        // The format of the first layer, if all other layers have the same format.
        let code_format = formats.next().flatten().filter(|&first| formats.all(|format| format == Some(first)));
        let has_plain_scales = layer_keys.iter().flatten().any(|key| weights.has_plain_scales(key));
        let dtype = weights.common_dtype(prefix);
        Ok(Self { kind, place: files.place(), path, dtype, model, block_formats, code_format, has_plain_scales })
    }

    /// The model's `config.json`.
    pub fn config(&self) -> Map<String, Value> {
        self.model.configuration()
    }

    /// Check that a file format can hold adapters of `kind` on `layers`. None stands for the part's default format. For
    /// a model that belongs to no pipeline, nothing is checked.
    ///
    /// # Errors
    /// As [`check_format`]; [`Error::Config`] if there is no such kind of adapter.
    pub fn check_format(&self, format: Option<AdapterFormat>, kind: &str, layers: &[&str]) -> Result<()> {
        let Some(place) = self.place else { return Ok(()) };
        let found = KINDS.iter().find(|known| known.name == kind);
        let found = found.ok_or_else(|| Error::Config(format!("there is no kind of adapter \"{kind}\"")))?;
        check_format(format, &place.names(self.model.as_ref()), found.name, layers)
    }

    /// The model's parameters with their shapes in files.
    pub fn tensors(&self) -> BTreeMap<String, Vec<usize>> {
        self.model.named_weights().into_iter().map(|(name, tensor)| (name, tensor.dims().to_vec())).collect()
    }

    /// The layers that can have adapters, with the shapes of their weights in files: (out, in), or (out, in, height,
    /// width).
    pub fn layers(&self) -> BTreeMap<String, Vec<usize>> {
        pipelines::layer_shapes(self.model.as_ref())
    }

    /// Bytes of the weights on a device, including the slots for streamed weights, and bytes of the streamed weights.
    /// The matrices that may be quantized have the format that [`Quantization::of`] derives from `format`; if `format`
    /// is None, they keep the block format in which their file stores them. Matrices without such a format, and all
    /// other parameters, have `dtype`. As when a model is loaded, [`uses_w8a8`] (whether linear layers multiply codes)
    /// also affects which layers are quantized.
    ///
    /// # Errors
    /// [`Error::Argument`] if a format is given but no layer may be quantized; as [`Streaming::new`].
    pub fn weight_bytes(
        &self,
        dtype: DType,
        format: Option<Format>,
        stream: StreamOptions,
    ) -> Result<(usize, StreamedBytes)> {
        if format.is_some() {
            self.kind.check_quantizable("weight_bytes")?;
        }
        let (layers, quantizable) = (self.layers(), self.kind.quantizable);
        let quantization = Quantization::new(format, quantizable, uses_w8a8());
        let format_of = |name: &str| {
            let layer = name.strip_suffix(".weight")?;
            // `rows` names the embedding and the head of a language model, which `layers` need not have.
            let is_known = layers.contains_key(layer) || quantizable.rows.contains(&layer);
            // None for a layer that is not quantized; `Some(None)` for one that keeps its block format, if it has one.
            let wanted = quantization.of(layer).filter(|_| is_known)?;
            wanted.or_else(|| self.block_formats.get(name).copied())
        };
        let bytes = |name: &str, dims: &[usize]| {
            let unquantized = dims.iter().product::<usize>() * dtype.size_in_bytes();
            match (dims, format_of(name)) {
                (&[rows, columns], Some(Format::Nf4)) if self.has_plain_scales => {
                    Format::bytes_with_plain_scales(rows, columns)
                }
                (&[rows, columns], Some(format)) => {
                    // In some models, layers that multiply codes also keep them transposed, but never if weights are
                    // streamed. `transposed_bytes` is 0 if the sizes do not allow products of codes.
                    let transposed = quantization.transposes() && stream.is_none();
                    format.bytes(rows, columns) + if transposed { transposed_bytes(rows, columns) } else { 0 }
                }
                _ => unquantized,
            }
        };
        let tensors = self.tensors();
        let total: usize = tensors.iter().map(|(name, dims)| bytes(name, dims)).sum();
        if stream.is_none() {
            return Ok((total, StreamedBytes::default()));
        }
        let streaming = Streaming::new(self.model.as_ref(), quantizable, stream, &Device::Cpu)?;
        let layer_bytes = tensors.iter().filter_map(|(name, dims)| {
            let layer = name.strip_suffix(".weight").filter(|layer| layers.contains_key(*layer))?;
            (dims.len() == 2).then(|| (layer, bytes(name, dims)))
        });
        let streamed = streaming.bytes(layer_bytes);
        // The host keeps the streamed weights. The device has slots for them.
        Ok((total - streamed.blocks - streamed.modulation + streamed.slots, streamed))
    }

    /// The approximate number of values that the tape holds at its peak, for one sample of `size`: on the device, and
    /// in the memory of the host, which [`Policy::Offloaded`] uses.
    ///
    /// # Errors
    /// As [`Saved::values`].
    pub fn saved_values(
        &self,
        config: &LoraConfig,
        checkpointing: Checkpointing,
        size: SampleSize,
    ) -> Result<[usize; 2]> {
        Saved::values(self.model.as_ref(), config, checkpointing, size)
    }

    /// The share of the blocks' operations in a forward pass that the backward pass repeats, as [`Saved::recomputed`].
    pub fn recomputed(&self, checkpointing: Checkpointing, size: SampleSize) -> f64 {
        Saved::recomputed(self.model.as_ref(), checkpointing, size)
    }

    /// `policy` for the first `blocks` of the model's blocks, and [`Policy::Selective`] for the rest. If `blocks` is
    /// None, all blocks have `policy`.
    ///
    /// # Errors
    /// As [`Checkpointing::of_first`].
    pub fn checkpointing(&self, policy: Policy, blocks: Option<usize>) -> Result<Checkpointing> {
        let of_first = |count| Checkpointing::of_first(count, policy, self.blocks_to_checkpoint());
        blocks.map_or_else(|| Ok(policy.into()), of_first)
    }

    /// The number of blocks, as [`Module::blocks_to_checkpoint`](trainable_candle_nn::Module::blocks_to_checkpoint).
    pub fn blocks_to_checkpoint(&self) -> usize {
        self.model.blocks_to_checkpoint()
    }

    /// The number of values in the largest gradient of an activation, as [`Saved::widest_gradient`].
    ///
    /// # Errors
    /// As [`Saved::widest_gradient`].
    pub fn widest_gradient(&self, config: &LoraConfig, size: SampleSize) -> Result<usize> {
        Saved::widest_gradient(self.model.as_ref(), config, size)
    }

    /// The floating-point operations of a forward pass over one sample of `size`, as [`Saved::forward_flops`].
    pub fn forward_flops(&self, size: SampleSize) -> Flops {
        Saved::forward_flops(self.model.as_ref(), size)
    }

    /// The format in which the model's file stores every layer that may be quantized: int8, fp8 or NF4. None if there
    /// is no such format. Loading the model in this format keeps the codes of the file.
    pub const fn stored_format(&self) -> Option<Format> {
        self.code_format
    }

    /// Whether the kind of model has layers that may be quantized, and the model's file stores no weight in a block
    /// format of GGUF. Weights in these formats stay quantized when they are loaded; another format would round them a
    /// second time.
    pub fn can_be_quantized(&self) -> bool {
        self.kind.check_quantizable("quantize").is_ok() && self.block_formats.is_empty()
    }

    /// The number of blocks that can be streamed, and whether the layers that compute the blocks' modulation can be
    /// streamed for all blocks ([`StreamOptions::modulation`]).
    pub fn streamable(&self) -> (usize, bool) {
        let quantizable = &self.kind.quantizable;
        (Streaming::blocks(self.model.as_ref(), quantizable), !quantizable.modulation.is_empty())
    }
}

/// The facts of the checkpoint at `path`: a pipeline's folder, an original checkpoint in one file, or a single model.
/// Reads headers and configurations, no weights.
///
/// The paths in `others` are folders and files of single models. Each must hold a text encoder or an autoencoder of the
/// pipeline, which is used instead of the one at `path`. If `pipeline` is given, or if the `model_index.json` in the
/// folder names a pipeline, each part of this pipeline must be at `path` or in `others`. Otherwise, this function looks
/// for a pipeline all of whose parts are there. If there is none, it takes `path` as a single model and ignores
/// `others`.
///
/// # Errors
/// [`Error::Io`] if nothing is at `path` or at one of `others`; [`Error::WeightsFormat`] if a file is damaged, if a
/// part is missing, if a path in `others` holds no part that is still missing, or if `model_index.json` names another
/// pipeline than `pipeline`; [`Error::Config`] if a configuration or `model_index.json` is wrong.
pub fn inspect(path: &Path, pipeline: Option<&'static Pipeline>, others: &[PathBuf]) -> Result<Facts> {
    let is_folder = std::fs::metadata(path).map_err(|e| Error::io(path, e))?.is_dir();
    let indexed = if is_folder { Pipeline::of_folder(path)? } else { None };
    if let (Some(wanted), Some(found)) = (pipeline, indexed)
        && wanted.name != found.name
    {
        return Err(Error::weights(path, format!("it is not a model of {}{}", wanted.title, pipeline_hint(found))));
    }
    let pipeline = pipeline.or(indexed);
    let parts = match pipeline {
        Some(pipeline) => parts_of((path, is_folder), others, pipeline)?,
        None => match PIPELINES.iter().find_map(|pipeline| parts_of((path, is_folder), others, pipeline).ok()) {
            Some(parts) => parts,
            None => {
                let (kind, files) = registry::find(path, &Choice::default())?;
                let facts = PartFacts::of(kind, &files)?;
                let name = facts.place.map_or("", |place| place.part.subfolder);
                BTreeMap::from([(name.to_owned(), facts)])
            }
        },
    };
    let mut pipelines_of_parts = parts.values().filter_map(|part| part.place).map(|place| place.pipeline);
    let pipeline = pipeline.or_else(|| pipelines_of_parts.next());
    let (prediction_type, zero_snr) = if is_folder { by_scheduler(path)? } else { by_markers(path)? };
    Ok(Facts { pipeline, parts, prediction_type, zero_snr })
}

/// The parts of a pipeline, each at `path` or in `others`; `others` take precedence.
///
/// # Errors
/// As [`inspect`].
fn parts_of(
    (path, is_folder): (&Path, bool),
    others: &[PathBuf],
    pipeline: &'static Pipeline,
) -> Result<BTreeMap<String, PartFacts>> {
    let mut found = assign(others, pipeline)?;
    let mut missing = Vec::new();
    for place in pipeline.places() {
        let name = place.part.subfolder;
        if found.contains_key(name) {
            continue;
        }
        // A folder has a subfolder for each part; a file may hold all parts.
        let is_there = !is_folder || path.join(name).join(CONFIG).is_file();
        let choice = Choice { pipeline: Some(pipeline), ..Choice::of(name) };
        match Pretrained::find(path, place.part.model, &choice) {
            // A file whose names are not those of an original checkpoint (`original` is None) holds this part alone. It
            // is accepted only if the part is never in one file with others; otherwise the pipeline is incomplete.
            Ok(files) if is_there && (is_folder || files.original().is_some() || !may_share_file(place)) => {
                let facts = PartFacts::of(place.part.model, &files).map_err(|error| match error {
                    Error::Config(text) if !is_folder => {
                        Error::weights(path, format!("{text}; or give the folder of its pipeline"))
                    }
                    other => other,
                })?;
                found.insert(name.to_owned(), PartFacts { place: Some(place), ..facts });
            }
            // A part without a folder of its own can only be at the path itself.
            Err(error) if name.is_empty() => return Err(error),
            // The part is there but cannot be read. Report why, instead of reporting the part as missing.
            Err(error) if is_folder && is_there => return Err(error),
            Ok(_) | Err(_) => missing.push(name),
        }
    }
    if missing.is_empty() {
        return Ok(found);
    }
    Err(if is_folder {
        incomplete_folder(path, pipeline, &missing)
    } else {
        incomplete_file(path, pipeline, &missing)?
    })
}

/// Assigns each of `paths` to a text encoder or an autoencoder of a pipeline. If the model at a path fits several parts
/// that have no path yet, the path is assigned to the part whose published model has the same width, or else to the
/// first part.
///
/// # Errors
/// [`Error::Io`] if nothing is at a path; [`Error::WeightsFormat`] if the model at a path fits none of the parts that
/// have no path yet; the error of reading the model.
fn assign(paths: &[PathBuf], pipeline: &'static Pipeline) -> Result<BTreeMap<String, PartFacts>> {
    let mut found: BTreeMap<String, PartFacts> = BTreeMap::new();
    for path in paths {
        std::fs::metadata(path).map_err(|e| Error::io(path, e))?;
        let mut candidates = Vec::new();
        let mut failure = None;
        for place in pipeline.places().filter(|place| !place.part.role.is_tuned()) {
            let of_pipeline = |choice: Choice| Choice { pipeline: Some(pipeline), ..choice };
            // The path may be a pipeline's folder, or the folder or file of the model alone.
            let choices = [Choice::of(place.part.subfolder), Choice::default()].map(of_pipeline);
            let files = choices.iter().find_map(|choice| Pretrained::find(path, place.part.model, choice).ok());
            match files.map(|files| PartFacts::of(place.part.model, &files)) {
                Some(Ok(facts)) => candidates.push(PartFacts { place: Some(place), ..facts }),
                Some(Err(error)) => failure = Some(error),
                None => {}
            }
        }
        let width = |config: &Map<String, Value>| config.get("hidden_size").cloned();
        let has_published_width = |facts: &PartFacts| {
            facts.place.is_some_and(|place| width(&(place.part.published)()) == width(&facts.config()))
        };
        candidates.retain(|facts| facts.place.is_some_and(|place| !found.contains_key(place.part.subfolder)));
        let chosen = candidates.iter().position(has_published_width).unwrap_or(0);
        if candidates.is_empty() {
            let title = pipeline.title;
            let hint = WeightFile::open(path).map_or_else(|_| String::new(), |file| content_hint(&file.names()));
            let message =
                format!("it holds none of the text encoders and autoencoders of {title} that are still missing{hint}");
            return Err(failure.unwrap_or_else(|| Error::weights(path, message)));
        }
        let facts = candidates.swap_remove(chosen);
        found.extend(facts.place.map(|place| (place.part.subfolder.to_owned(), facts)));
    }
    Ok(found)
}

/// Whether the part can be in one file together with other parts, as in an original checkpoint.
fn may_share_file(place: Place) -> bool {
    // A section that this library does not write is that of a GGUF file, which holds a single part.
    place.part.sections.iter().any(|section| section.is_written())
}

/// The prediction type, and whether the last timestep is pure noise, from the scheduler's configuration in a pipeline's
/// folder. Without such a configuration, they are None and false.
fn by_scheduler(path: &Path) -> Result<(Option<String>, bool)> {
    let config = path.join("scheduler").join("scheduler_config.json");
    if !config.is_file() {
        return Ok((None, false));
    }
    let map: Map<String, Value> = read_json(&config)?;
    let prediction = map.get("prediction_type").and_then(Value::as_str).map(str::to_owned);
    Ok((prediction, map.get("rescale_betas_zero_snr").and_then(Value::as_bool).unwrap_or(false)))
}

/// The prediction type, and whether the last timestep is pure noise, from the presence of marker tensors in a file.
fn by_markers(path: &Path) -> Result<(Option<String>, bool)> {
    let names = WeightFile::open(path)?.names();
    let has = |marker: &str| names.iter().any(|name| name == marker);
    Ok((Some(if has("v_pred") { "v_prediction" } else { "epsilon" }.to_owned()), has("ztsnr")))
}

/// The subfolders of the parts of a pipeline for which the file at `path` has adapters. The keys of the file may be in
/// any of the adapter formats. A key that does not name a text encoder or an autoencoder belongs to the model that is
/// fine-tuned: the denoiser or the language model.
///
/// # Errors
/// As [`adapter_keys`].
pub fn adapted_parts(path: &Path, pipeline: &'static Pipeline) -> Result<Vec<&'static str>> {
    let keys = adapter_keys(path)?;
    let (tuned, others): (Vec<Place>, Vec<Place>) = pipeline.places().partition(|place| place.part.role.is_tuned());
    let names_other = |key: &String| others.iter().any(|place| place.has_prefix_of(key));
    let tuned = tuned.into_iter().filter(|_| !keys.iter().all(names_other));
    let others = others.iter().copied().filter(|place| keys.iter().any(|key| place.has_prefix_of(key)));
    Ok(tuned.chain(others).map(|place| place.part.subfolder).collect())
}

/// The memory that adapters on some layers take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterMemory {
    /// Number of elements of the adapters' parameters. For each element, the parameter and its gradient take 4 bytes
    /// each in f32, or 2 bytes each in bf16. Only f32 parameters can have a moving average, which takes 4 bytes.
    pub parameters: usize,
    /// Bytes of the optimizer's states.
    pub state_bytes: usize,
}

/// The memory that the adapters of `config` on `layers` take, with the optimizer's states. `layers` maps the name of a
/// layer to the shape of its weight in files. The optimizer is assumed to round bf16 parameters stochastically.
///
/// # Errors
/// [`Error::Config`] if a value of `config` is out of range or a pattern in it is no regular expression, or if there is
/// no such optimizer or kind of adapter; [`Error::Shape`] if a shape is not that of a layer's weight.
pub fn plan(config: &LoraConfig, layers: &BTreeMap<String, Vec<usize>>, optimizer: &str) -> Result<AdapterMemory> {
    let Some(optimizer) = OptimizerKind::find(optimizer) else {
        return Err(Error::Config(format!("there is no optimizer \"{optimizer}\"")));
    };
    let kind = config.kind()?;
    let mut memory = AdapterMemory::default();
    let is_conv = |dims: &[usize]| dims.len() == 4;
    let selected = config.select(layers.iter().map(|(name, dims)| (name.as_str(), is_conv(dims))))?;
    for name in selected.keys() {
        let settings: AdapterSettings = config.settings(name, is_conv(&layers[name]))?;
        // The names of the adapter's parameters, with their shapes and initial values.
        let initial = with_base(&layers[name], |base| (kind.start)(base, &settings))?;
        // The scales that quantization-aware training learns for linear layers.
        let scales = config.qat.filter(|_| config.qat_learned_scales).and_then(|grid| match *layers[name] {
            [rows, columns] => Some(vec![grid.scales(rows, columns)]),
            _ => None,
        });
        let is_rounded = config.dtype == DType::BF16;
        for dims in initial.into_iter().map(|(_, start)| start.dims).chain(scales) {
            memory.parameters += dims.iter().product::<usize>();
            memory.state_bytes += optimizer.state_bytes(&dims, is_rounded);
        }
    }
    Ok(memory)
}

/// Call `run` with a base whose weight takes no memory. `dims` is the shape that this weight has in files.
fn with_base<T>(dims: &[usize], run: impl FnOnce(&Base<'_>) -> T) -> Result<T> {
    let (dims, operation) = match *dims {
        [out, input] => (vec![out, input], Operation::Linear),
        [out, input, height, width] => (vec![out, height, width, input], Operation::Conv2d(Conv2dOptions::default())),
        _ => return Err(Error::shape("LoraConfig", format!("{dims:?} is not the shape of a layer's weight"))),
    };
    let weight = Tensor::zeros((), DType::F32, &Device::Cpu)?.broadcast_as(dims)?;
    Ok(run(&Base { weight: (&weight).into(), bias: None, operation }))
}
