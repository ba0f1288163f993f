//! Train a LoRA of SDXL's UNet from cached latents and text features, without Python.
//!
//! ```text
//! cargo run --release --example train_sdxl_lora -- UNET CACHE OUTPUT [STEPS [DEVICE]]
//! ```
//!
//! `UNET` is the folder or file of a checkpoint, `OUTPUT` is the adapter file to write, and `CACHE` is a safetensors
//! file of N examples. The images of all examples have the same `height` and `width` in pixels:
//!
//! | tensor | shape |
//! |---|---|
//! | `latents` | (N, 4, height / 8, width / 8), already multiplied by the autoencoder's scaling factor |
//! | `encoder_hidden_states` | (N, 77, 2048), the penultimate states of both text encoders |
//! | `text_embeds` | (N, 1280), the pooled result of the second text encoder |
//! | `time_ids` | (N, 6), in pixels: original height and width, top and left of the crop, height and width after the crop |
//!
//! `STEPS` is 1000 by default. `DEVICE` is `cpu` by default, on which the UNet computes in f32. A build with
//! `--features cuda` also has `cuda`, on which the UNet computes in bf16.
//!
//! Without arguments, a tiny UNet with random weights learns a tiny random cache, as a test of a few seconds.
#![allow(clippy::print_stdout)] // prints the progress of training

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use trainable_candle::core::{device, rng};
use trainable_candle::io::{SaveOptions, load_tensors, save_adapters, save_tensors};
use trainable_candle::models::sdxl::{SDXLUNet, UNetConditions, UNetConfig};
use trainable_candle::models::{Architecture, Choice, Pretrained, save_pretrained};
use trainable_candle::nn::adapter::AdapterSet;
use trainable_candle::nn::optim::{EMA, EMAConfig};
use trainable_candle::nn::{Module, Source};
use trainable_candle::train::objective::{DiffusionConfig, DiffusionObjective, NoiseSchedule, NoisedLatents};
use trainable_candle::{AdamW, DType, Device, Error, LoraConfig, Optimizer, Result, Tensor, no_grad};

const BATCH: usize = 2;

/// The files and the settings of a run.
struct Run {
    unet: PathBuf,
    cache: PathBuf,
    output: PathBuf,
    steps: usize,
    learning_rate: f64,
}

/// The examples of the cache. The first dimension of each tensor is the number of examples.
struct Examples {
    latents: Tensor,
    encoder_hidden_states: Tensor,
    text_embeds: Tensor,
    time_ids: Tensor,
}

impl Examples {
    fn load(path: &Path, device: &Device) -> Result<Self> {
        let mut tensors = load_tensors(path, device)?;
        let mut take = |name: &str| {
            tensors.remove(name).ok_or_else(|| Error::weights(path, format!("there is no tensor \"{name}\"")))
        };
        let examples = Self {
            latents: take("latents")?,
            encoder_hidden_states: take("encoder_hidden_states")?,
            text_embeds: take("text_embeds")?,
            time_ids: take("time_ids")?,
        };
        let count = examples.len();
        if count == 0 || examples.all().iter().any(|tensor| tensor.dims().first() != Some(&count)) {
            let shapes: Vec<&[usize]> = examples.all().iter().map(|tensor| tensor.dims()).collect();
            return Err(Error::weights(
                path,
                format!("the tensors have shapes {shapes:?}, expected the same number of examples in each"),
            ));
        }
        Ok(examples)
    }

    fn all(&self) -> [&Tensor; 4] {
        [&self.latents, &self.encoder_hidden_states, &self.text_embeds, &self.time_ids]
    }

    fn len(&self) -> usize {
        self.latents.dims().first().copied().unwrap_or(0)
    }

    fn select(&self, ids: &Tensor) -> Result<Self> {
        Ok(Self {
            latents: self.latents.index_select(ids, 0)?,
            encoder_hidden_states: self.encoder_hidden_states.index_select(ids, 0)?,
            text_embeds: self.text_embeds.index_select(ids, 0)?,
            time_ids: self.time_ids.index_select(ids, 0)?,
        })
    }

    fn loss(&self, unet: &SDXLUNet, objective: &DiffusionObjective, noised: &NoisedLatents) -> Result<Tensor> {
        let conditions = UNetConditions {
            encoder_hidden_states: &self.encoder_hidden_states,
            text_embeds: &self.text_embeds,
            time_ids: &self.time_ids,
        };
        let prediction = unet.forward(&noised.sample, &noised.timesteps, conditions)?;
        let (mask, weights) = (None, None);
        objective.loss(&prediction, noised, mask, weights)
    }
}

/// The mean loss over all examples. An example has the same noise and timestep in every call.
fn validate(unet: &SDXLUNet, objective: &DiffusionObjective, examples: &Examples) -> Result<f64> {
    let _no_grad = no_grad();
    let seed = 0;
    let mut sum = 0.0;
    for example in 0..examples.len() as u32 {
        let ids = Tensor::from_vec(vec![example], 1, &Device::Cpu)?.to_device(examples.latents.device())?;
        let batch = examples.select(&ids)?;
        let noised = objective.validation_noise(&batch.latents, &[example], seed)?;
        sum += batch.loss(unet, objective, &noised)?.item()?;
    }
    Ok(sum / examples.len() as f64)
}

/// Train and save an adapter; return the validation losses before and after training.
fn train(run: &Run, device: &Device) -> Result<(f64, f64)> {
    rng::manual_seed(0);
    let files = Pretrained::find(&run.unet, SDXLUNet::KIND, &Choice::default())?;
    let dtype = if device.is_cuda() { DType::BF16 } else { DType::F32 };
    let unet = SDXLUNet::load(&files, Some(dtype), device)?;
    let examples = Examples::load(&run.cache, device)?;
    let config =
        LoraConfig { r: 16, lora_alpha: 16.0, target_modules: vec!["all-attention".into()], ..LoraConfig::default() };
    let adapter = AdapterSet::attach(config, &unet.named_layers())?;
    let config = DiffusionConfig { min_snr_gamma: Some(5.0), ..DiffusionConfig::default() };
    let objective = DiffusionObjective::new(&NoiseSchedule::sdxl()?, config, device)?;
    let weight_decay = 0.01;
    let mut optimizer = AdamW::new(adapter.vars().to_vec(), run.learning_rate, weight_decay)?;
    // The running average of the adapter's parameters.
    let mut ema = EMA::new(adapter.buffer(), EMAConfig::default())?;

    let before = validate(&unet, &objective, &examples)?;
    println!("{} examples, validation loss {before:.4}", examples.len());
    for step in 1..=run.steps {
        let ids = Tensor::from_vec(rng::integers_vec(BATCH, examples.len() as u32)?, BATCH, &Device::Cpu)?;
        let batch = examples.select(&ids.to_device(device)?)?;
        let noised = objective.noise(&batch.latents)?;
        let loss = batch.loss(&unet, &objective, &noised)?;
        optimizer.step(&loss.backward()?)?;
        ema.update()?;
        if step % 10 == 0 {
            println!("step {step}: loss {:.4}", loss.item()?);
        }
    }
    // Put the average into the adapter.
    ema.swap_in()?;
    let after = validate(&unet, &objective, &examples)?;
    save_adapters(&run.output, &[(&files.adapter_names(&unet), &adapter)], &SaveOptions::default())?;
    println!("validation loss {after:.4}; the averaged adapter is in {}", run.output.display());
    Ok((before, after))
}

/// Save a tiny UNet with random weights and a cache of four random examples in `folder`; return a run on them.
fn tiny(folder: &Path, device: &Device) -> Result<Run> {
    rng::manual_seed(1);
    let config = UNetConfig {
        block_out_channels: vec![32, 32, 64],
        transformer_layers_per_block: vec![1, 1, 2],
        num_attention_heads: vec![1, 2, 4],
        cross_attention_dim: vec![64; 3],
        addition_time_embed_dim: 8,
        projection_class_embeddings_input_dim: 88, // 6 time ids of 8 numbers each, and 40 numbers of `text_embeds`
        ..UNetConfig::default()
    };
    let run = Run {
        unet: folder.join("unet"),
        cache: folder.join("cache.safetensors"),
        output: folder.join("lora.safetensors"),
        steps: 40,
        learning_rate: 2e-2,
    };
    let quantized_format = None;
    save_pretrained(&SDXLUNet::new(config, &mut Source::fresh(device).root())?, &run.unet, quantized_format)?;
    let random = |dims: &[usize]| Tensor::randn(0.0, 1.0, dims, DType::F32, device);
    let sizes = Tensor::new(&[128f32, 128.0, 0.0, 0.0, 128.0, 128.0], device)?.broadcast_as((4, 6))?;
    let cache = [
        ("latents", random(&[4, 4, 16, 16])?),
        ("encoder_hidden_states", random(&[4, 77, 64])?),
        ("text_embeds", random(&[4, 40])?),
        ("time_ids", sizes),
    ];
    save_tensors(&run.cache, cache.iter().map(|(name, tensor)| (*name, tensor)), &BTreeMap::new())?;
    Ok(run)
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let usage =
        || Error::Config("usage: train_sdxl_lora UNET CACHE OUTPUT [STEPS [DEVICE]], or nothing for a tiny run".into());
    match &arguments[..] {
        [] => {
            let folder = std::env::temp_dir().join(format!("train_sdxl_lora-{}", std::process::id()));
            std::fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, e))?;
            let result = tiny(&folder, &Device::Cpu).and_then(|run| train(&run, &Device::Cpu));
            std::fs::remove_dir_all(&folder).map_err(|e| Error::io(&folder, e))?;
            let (before, after) = result?;
            assert!(after < before, "the loss went from {before} to {after}");
            Ok(())
        }
        [unet, cache, output, rest @ ..] if rest.len() < 3 => {
            let steps = rest.first().map_or(Ok(1000), |text| text.parse()).map_err(|_| usage())?;
            let run = Run { unet: unet.into(), cache: cache.into(), output: output.into(), steps, learning_rate: 1e-4 };
            // `Vec::new`: no folders besides the system's in which to look for the CUDA libraries.
            let device = device::parse(rest.get(1).map_or("cpu", String::as_str), Vec::new)?;
            train(&run, &device).map(drop)
        }
        _ => Err(usage()),
    }
}
