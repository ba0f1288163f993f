//! The digits transformer: its parameters and its forward pass.

use serde_json::{Map, Value};
use trainable_candle_core::ops::index::embedding;
use trainable_candle_core::ops::norm::modulated_layer_norm;
use trainable_candle_core::{DType, Device, Error, Result, Tensor};
use trainable_candle_io::WeightFiles;
use trainable_candle_nn::{Blocks, Init, Linear, Module, Quantizable, Source, Visitor, Weights};

use super::DigitsConfig;
use super::blocks::{Block, EPS, xavier};
use crate::layers::{Sinusoids, TimestepEmbedding};
use crate::pretrained::{Architecture, CheckpointNaming, Configuration, Layout, OwnNames};
use crate::registry::{Model, ModelKind};
use crate::saved::{SampleSize, Saved};

/// A class-conditional diffusion transformer for small images. It predicts the velocity of flow matching,
/// `noise - image`.
pub struct DigitsTransformer {
    config: DigitsConfig,
    patch_embed: Linear<Tensor>,
    pos_embed: Tensor,
    sinusoids: Sinusoids,
    time_embedding: TimestepEmbedding,
    class_embedding: Tensor,
    blocks: Blocks<Block>,
    /// Computes the scale and the shift of the last norm, which has no weights of its own.
    norm_out: Linear<Tensor>,
    proj_out: Linear<Tensor>,
}

impl DigitsTransformer {
    /// The `_class_name` in its `config.json`.
    pub const CLASS_NAME: &'static str = "DigitsTransformer";

    /// A model with the parameters of `weights`.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration is wrong; as [`Weights::get`].
    pub fn new(config: DigitsConfig, weights: &mut Weights<'_>) -> Result<Self> {
        config.validate()?;
        let (dim, patch_dim) = (config.inner_dim(), config.patch_dim());
        let embedding_init = Init::Normal(0.02);
        let has_bias = true;
        let blocks = (0..config.num_layers)
            .map(|i| Block::new(&config, &mut weights.pp(&format!("transformer_blocks.{i}"))))
            .collect::<Result<_>>()?;
        let patch_embed = weights.linear_init("pos_embed.proj", patch_dim, dim, has_bias, xavier(patch_dim, dim))?;
        Ok(Self {
            sinusoids: Sinusoids::new(config.frequency_embedding_size, patch_embed.weight.device())?,
            patch_embed,
            pos_embed: weights.get("pos_embed.pos_embed", (1, config.grid() * config.grid(), dim), embedding_init)?,
            time_embedding: TimestepEmbedding::new(
                config.frequency_embedding_size,
                dim,
                &mut weights.pp("time_embedding"),
            )?,
            class_embedding: weights.get("class_embedding.weight", (config.num_classes, dim), embedding_init)?,
            blocks,
            norm_out: weights.linear_init("norm_out.linear", dim, 2 * dim, has_bias, Init::Constant(0.0))?,
            proj_out: weights.linear_init("proj_out", dim, patch_dim, has_bias, Init::Constant(0.0))?,
            config,
        })
    }

    /// A model to train from scratch. Every parameter is a trainable f32 variable. Random initial values come from the
    /// library's generator.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration is wrong, [`Error::OutOfMemory`] if the parameters do not fit on the
    /// device.
    pub fn fresh(config: DigitsConfig, device: &Device) -> Result<Self> {
        Self::new(config, &mut Source::fresh(device).root())
    }

    /// The configuration.
    pub const fn config(&self) -> &DigitsConfig {
        &self.config
    }

    /// The predicted velocity, in the shape of `sample` and the dtype of the weights.
    ///
    /// - `sample (B, C, H, W)`: the noisy images. Pixels of clean images are in -1..1.
    /// - `timestep (B)`: from 0 (clean image) to 1000 (noise).
    /// - `class_labels (B)`: from 0 to `num_classes` - 1, i64 or u32.
    ///
    /// # Errors
    /// [`Error::Shape`] if the inputs do not fit the configuration or one another, [`Error::Index`] if a label is out
    /// of range, [`Error::DType`] if the labels are neither i64 nor u32, [`Error::Device`] if the labels are on another
    /// device than the model.
    pub fn forward(&self, sample: &Tensor, timestep: &Tensor, class_labels: &Tensor) -> Result<Tensor> {
        self.check(sample, timestep, class_labels)?;
        let x = self.patch_embed.forward(&self.patchify(&sample.to_dtype(self.dtype())?)?)?.add(&self.pos_embed)?;
        let condition = self
            .time_embedding
            .forward(&self.sinusoids.forward(timestep)?)?
            .add(&embedding(&self.class_embedding, class_labels)?)?
            .silu()?;
        let x = self.blocks.run(&x, &[&condition], |block, x, conditions| block.forward(x, &conditions[0]))?;
        // As in diffusers, the scale comes first here. In the blocks, the shift comes first.
        let modulation = self.norm_out.forward(&condition)?.chunk(2, 1)?;
        let [scale, shift] = &modulation[..] else { unreachable!("two chunks") };
        self.unpatchify(&self.proj_out.forward(&modulated_layer_norm(&x, scale, shift, EPS)?)?)
    }

    /// Check the shapes of the inputs.
    fn check(&self, sample: &Tensor, timestep: &Tensor, class_labels: &Tensor) -> Result<()> {
        let (channels, size) = (self.config.in_channels, self.config.sample_size);
        let &[batch, c, h, w] = sample.dims() else {
            return Err(self.misfit("sample", sample, &format!("(B, {channels}, {size}, {size})")));
        };
        if [c, h, w] != [channels, size, size] {
            return Err(self.misfit("sample", sample, &format!("(B, {channels}, {size}, {size})")));
        }
        for (name, tensor) in [("timestep", timestep), ("class_labels", class_labels)] {
            if tensor.dims() != [batch] {
                return Err(self.misfit(name, tensor, &format!("({batch},), the batch size of the sample")));
            }
        }
        Ok(())
    }

    /// The error for an input of a wrong shape.
    fn misfit(&self, name: &str, input: &Tensor, expected: &str) -> Error {
        Error::shape(Self::CLASS_NAME, format!("{name} has shape {:?}, expected {expected}", input.dims()))
    }

    /// Divides images into patches: (B, C, H, W) → (B, g², C · p²), for g patches along each side of an image and p
    /// pixels along each side of a patch. Patches, and the pixels of a patch, are in row-major order; the channel is
    /// the first axis of a patch.
    fn patchify(&self, x: &Tensor) -> Result<Tensor> {
        let (g, p, c) = (self.config.grid(), self.config.patch_size, self.config.in_channels);
        let batch = x.dims()[0];
        x.reshape(vec![batch, c, g, p, g, p])?.permute(&[0, 2, 4, 1, 3, 5])?.reshape((
            batch,
            g * g,
            self.config.patch_dim(),
        ))
    }

    /// Joins patches to images: (B, g², p² · C) → (B, C, H, W). As in DiT, the channel is the last axis of these
    /// patches, although it is the first axis of the patches that `patchify` makes.
    fn unpatchify(&self, x: &Tensor) -> Result<Tensor> {
        let (g, p, c) = (self.config.grid(), self.config.patch_size, self.config.in_channels);
        let batch = x.dims()[0];
        x.reshape(vec![batch, g, g, p, p, c])?.permute(&[0, 5, 1, 3, 2, 4])?.reshape((batch, c, g * p, g * p))
    }
}

impl Module for DigitsTransformer {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.linear("pos_embed.proj", &self.patch_embed)?;
        visitor.tensor("pos_embed.pos_embed", &self.pos_embed)?;
        visitor.module("time_embedding", &self.time_embedding)?;
        visitor.tensor("class_embedding.weight", &self.class_embedding)?;
        visitor.blocks("transformer_blocks", &self.blocks)?;
        visitor.linear("norm_out.linear", &self.norm_out)?;
        visitor.linear("proj_out", &self.proj_out)
    }
}

impl Architecture for DigitsTransformer {
    type Config = DigitsConfig;

    const KIND: &'static ModelKind = &super::KIND;

    // All layers of the blocks can be quantized, and no others.
    const QUANTIZABLE: Quantizable = Quantizable { blocks: &["transformer_blocks."], ..Quantizable::NOTHING };

    fn build(config: DigitsConfig, weights: &mut Weights<'_>) -> Result<Self> {
        Self::new(config, weights)
    }

    fn deduce(_files: &WeightFiles, _original: CheckpointNaming, _known: Vec<DigitsConfig>) -> Result<DigitsConfig> {
        Err(Error::Config("DigitsTransformer: the file has no configuration; give config=".into()))
    }

    fn parameter_layout(
        _config: &DigitsConfig,
        _original: Option<CheckpointNaming>,
        _files: Option<&WeightFiles>,
    ) -> Box<dyn Layout> {
        Box::new(OwnNames)
    }
}

impl Model for DigitsTransformer {
    fn kind(&self) -> &'static ModelKind {
        Self::KIND
    }

    fn configuration(&self) -> Map<String, Value> {
        self.config.to_json()
    }

    fn dtype(&self) -> DType {
        self.proj_out.weight.dtype()
    }

    fn saved(&self, size: SampleSize, saved: &mut Saved) {
        let tokens = size.height.div_ceil(self.config.patch_size) * size.width.div_ceil(self.config.patch_size);
        let values = tokens * self.config.inner_dim();
        // `outside` counts layers outside of the blocks. `linear` takes a layer, the number of its input values, and
        // the number of positions to which the layer is applied: the tokens, or 1 for a vector such as the condition.
        saved.outside(|saved| {
            saved.linear(&self.patch_embed, (tokens * self.config.patch_dim(), tokens));
            self.time_embedding.saved(saved);
        });
        saved.each(&self.blocks, |block, saved| block.saved(tokens, saved));
        saved.outside(|saved| {
            saved.linear(&self.norm_out, (self.config.inner_dim(), 1));
            // The last norm keeps its input.
            saved.keep(values);
            saved.linear(&self.proj_out, (values, tokens));
        });
    }

    fn layout(&self, original: Option<CheckpointNaming>, files: Option<&WeightFiles>) -> Box<dyn Layout> {
        Self::parameter_layout(&self.config, original, files)
    }
}
