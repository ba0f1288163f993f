//! Compares the estimated number of values that the tape keeps ([`Saved`]) with the number that the tape actually
//! keeps.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use serde_json::json;
use trainable_candle_core::checkpoint::Policy;
use trainable_candle_core::memory::saved_bytes;
use trainable_candle_core::{DType, Device, Result, Tensor};
use trainable_candle_models::causal_lm::{CausalLM, CausalLMConfig};
use trainable_candle_models::chroma::{ChromaConditions, ChromaConfig, ChromaTransformer};
use trainable_candle_models::clip::{CLIPTextConfig, CLIPTextModel};
use trainable_candle_models::digits::{DigitsConfig, DigitsTransformer};
use trainable_candle_models::flux::{FluxConditions, FluxConfig, FluxTransformer};
use trainable_candle_models::flux2::{Flux2Conditions, Flux2Config, Flux2Transformer};
use trainable_candle_models::qwen_image::{QwenImageConditions, QwenImageConfig, QwenImageTransformer};
use trainable_candle_models::saved::{SampleSize, Saved};
use trainable_candle_models::sd3::{SD3Conditions, SD3Config, SD3Transformer};
use trainable_candle_models::sdxl::{SDXLUNet, UNetConditions};
use trainable_candle_models::z_image::{ZImageConditions, ZImageConfig, ZImageTransformer};
use trainable_candle_models::{Architecture, Configuration, Model};
use trainable_candle_nn::adapter::{AdapterSet, LoraConfig, OftSide};
use trainable_candle_nn::{Checkpointing, Source};

const CPU: Device = Device::Cpu;
/// The bytes of an f32, the dtype of all models in these tests.
const BYTES_PER_VALUE: usize = 4;
/// The sample for the diffusion transformers.
const SIZE: SampleSize = SampleSize { height: 24, width: 16, tokens: 40 };
/// The number of tokens that the latents of this sample become: 12 × 8 patches of 2 × 2. Models that read tokens
/// read 64 values of each (Flux.2: 128), the default of their `in_channels`.
const IMAGE_TOKENS: usize = 96;
/// Kept bytes are counted for the whole process, so one test measures at a time.
static MEASURING: Mutex<()> = Mutex::new(());

fn zeros(dims: &[usize]) -> Tensor {
    Tensor::zeros(dims, DType::F32, &CPU).unwrap()
}

/// Compare the estimate with the tape for LoRA on each of `targets`, under several policies. `run` is a forward pass of
/// `batch` samples.
fn check(model: &dyn Model, targets: &[&str], size: SampleSize, batch: usize, run: impl Fn() -> Result<Tensor>) {
    check_adapter(&LoraConfig { r: 4, ..LoraConfig::default() }, model, targets, size, batch, run);
}

/// As [`check`], for the adapter that `adapter` configures.
fn check_adapter(
    adapter: &LoraConfig,
    model: &dyn Model,
    targets: &[&str],
    size: SampleSize,
    batch: usize,
    run: impl Fn() -> Result<Tensor>,
) {
    let _guard = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
    for target in targets {
        let config = LoraConfig { target_modules: vec![(*target).to_owned()], ..adapter.clone() };
        let set = AdapterSet::attach(config.clone(), &model.named_layers()).unwrap();
        for policy in [Policy::None, Policy::Selective, Policy::Full] {
            model.set_checkpointing(policy);
            let start = saved_bytes();
            let result = run().unwrap();
            let kept = (saved_bytes() - start) as f64;
            // The second number would be that of values offloaded to host memory.
            let [on_device, _] = Saved::values(model, &config, policy.into(), size).unwrap();
            let estimated = (BYTES_PER_VALUE * batch * on_device) as f64;
            drop(result);
            let ratio = estimated / kept;
            // The two may differ by a seventh. Under full checkpointing the estimate also counts the values of the
            // blocks that the backward pass recomputes together. The tape does not hold these values after the forward
            // pass. They make the estimate less than six times as large as what the tape keeps.
            let fits =
                if policy == Policy::Full { (1.0..6.0).contains(&ratio) } else { (ratio - 1.0).abs() < 1.0 / 7.0 };
            assert!(fits, "{} {target} {policy:?}: estimated {estimated} bytes, kept {kept}", model.class_name());
        }
        check_first_blocks(&config, model, size, batch, &run);
        // The next target gets an adapter of its own.
        set.set_enabled(false);
    }
}

/// Compare the estimate with the tape if full checkpointing recomputes only the first blocks of the model. The other
/// blocks are under selective checkpointing.
fn check_first_blocks(
    config: &LoraConfig,
    model: &dyn Model,
    size: SampleSize,
    batch: usize,
    run: impl Fn() -> Result<Tensor>,
) {
    let all = model.blocks_to_checkpoint();
    let estimate = |checkpointing| {
        let [on_device, _] = Saved::values(model, config, checkpointing, size).unwrap();
        (BYTES_PER_VALUE * batch * on_device) as f64
    };
    let mut previous = estimate(Policy::Selective.into());
    for count in [0, all / 4, all / 2, all - 1, all] {
        let estimated = estimate(Checkpointing::of_first(count, Policy::Full, all).unwrap());
        model.checkpoint_first(count, Policy::Full).unwrap();
        let start = saved_bytes();
        let result = run().unwrap();
        let kept = (saved_bytes() - start) as f64;
        drop(result);
        let name = model.class_name();
        // The estimate must not rise if more blocks are recomputed, except if all are. It may rise then, because only
        // then does it add what the layers after the blocks keep to what recomputed blocks keep. (The tape does not
        // hold both at once: the backward pass frees the former before it recomputes blocks.)
        let does_not_rise = estimated <= previous || count == all;
        assert!(
            does_not_rise,
            "{name}: {count} of {all} blocks: estimated {estimated} bytes, with fewer blocks {previous}"
        );
        previous = estimated;
        // The two may differ by about a seventh. In addition, the estimate counts the values of recomputed blocks,
        // which the tape does not hold here. They are at most the whole estimate under full checkpointing.
        let under_full = estimate(Policy::Full.into());
        let fits = estimated > 0.86 * kept && estimated < 1.14 * kept + under_full;
        assert!(fits, "{name}: {count} of {all} blocks: estimated {estimated} bytes, kept {kept}");
    }
}

#[test]
fn the_estimate_for_the_unet_is_near_what_the_tape_keeps() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/trainable_candle/assets/sdxl_tiny/unet");
    let unet = SDXLUNet::from_pretrained(&path, Some(DType::F32), &CPU).unwrap();
    let config = unet.config();
    let (context, pooled) = (zeros(&[2, 77, config.cross_attention_dim[0]]), zeros(&[2, config.pooled_dim()]));
    let size = SampleSize { height: 12, width: 16, tokens: 77 };
    let run = || {
        let conditions =
            UNetConditions { encoder_hidden_states: &context, text_embeds: &pooled, time_ids: &zeros(&[2, 6]) };
        unet.forward(&zeros(&[2, config.in_channels, 12, 16]), &zeros(&[2]), conditions)
    };
    check(&unet, &["all-attention", "all-linear", "all-conv", r".*\.transformer_blocks\..*"], size, 2, run);
}

#[test]
fn the_estimate_for_a_text_encoder_is_near_what_the_tape_keeps() {
    let config = CLIPTextConfig {
        vocab_size: 100,
        hidden_size: 32,
        intermediate_size: 128,
        num_hidden_layers: 10,
        num_attention_heads: 2,
        ..CLIPTextConfig::default()
    };
    let model = CLIPTextModel::new(config, &mut Source::random(DType::F32, &CPU).root()).unwrap();
    let ids = Tensor::zeros(&[2usize, 77][..], DType::I64, &CPU).unwrap();
    let size = SampleSize { height: 0, width: 0, tokens: 77 };
    check(&model, &["all-attention", "all-linear"], size, 2, || {
        model.forward(&ids).map(|features| features.last_hidden_state)
    });
}

#[test]
fn the_estimate_for_a_language_model_is_near_what_the_tape_keeps() {
    for (model_type, architecture) in [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")] {
        let json = json!({
            "architectures": [architecture], "model_type": model_type, "vocab_size": 100, "hidden_size": 32,
            "intermediate_size": 96, "num_hidden_layers": 10, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
        });
        let config = CausalLMConfig::from_json(json.as_object().unwrap()).unwrap();
        let model = CausalLM::new(config, &mut Source::random(DType::F32, &CPU).root()).unwrap();
        // The same numbers serve as ids and as positions of the tokens.
        let tokens: Vec<i64> = (0..40).collect();
        let tokens = Tensor::from_vec(tokens, 40, &CPU).unwrap();
        // Two texts, of 17 and of 23 tokens.
        let bounds = Tensor::from_vec(vec![0i64, 17, 40], 3, &CPU).unwrap();
        let size = SampleSize { height: 0, width: 0, tokens: 40 };
        check(&model, &["all-attention", "all-linear"], size, 1, || model.hidden(&tokens, &tokens, &bounds));
        for side in [OftSide::Input, OftSide::Output] {
            // The estimate does not count the rotation matrices, so the test keeps these matrices small.
            let oft =
                LoraConfig { adapter: "oft".into(), oft_block_size: 2, oft_side: Some(side), ..LoraConfig::default() };
            check_adapter(&oft, &model, &["all-attention"], size, 1, || model.hidden(&tokens, &tokens, &bounds));
        }
    }
}

#[test]
fn the_estimate_for_the_digits_transformer_is_near_what_the_tape_keeps() {
    let model = DigitsTransformer::new(DigitsConfig::default(), &mut Source::random(DType::F32, &CPU).root()).unwrap();
    let labels = Tensor::zeros(&[2usize][..], DType::I64, &CPU).unwrap();
    let size = SampleSize { height: 8, width: 8, tokens: 0 };
    check(&model, &["all-attention", "all-linear"], size, 2, || {
        model.forward(&zeros(&[2, 1, 8, 8]), &zeros(&[2]), &labels)
    });
}

#[test]
fn the_estimate_for_z_image_is_near_what_the_tape_keeps() {
    let config = ZImageConfig {
        dim: 96,
        n_layers: 8,
        n_refiner_layers: 1,
        n_heads: 4,
        cap_feat_dim: 40,
        axes_dims: vec![8, 8, 8],
        ..ZImageConfig::default()
    };
    let model = ZImageTransformer::new(config, &mut Source::random(DType::F32, &CPU).root()).unwrap();
    check(&model, &["all-attention", "all-linear", r"layers\..*"], SIZE, 1, || {
        let conditions = ZImageConditions {
            encoder_hidden_states: &zeros(&[1, SIZE.tokens, 40]),
            timestep: &zeros(&[1]),
            lengths: None,
            rows_are_full: false,
        };
        model.forward(&zeros(&[1, 16, SIZE.height, SIZE.width]), conditions)
    });
}

#[test]
fn the_estimate_for_flux2_is_near_what_the_tape_keeps() {
    let config = Flux2Config {
        num_layers: 2,
        num_single_layers: 8,
        num_attention_heads: 4,
        attention_head_dim: 24,
        joint_attention_dim: 40,
        axes_dims_rope: vec![8, 4, 8, 4],
        ..Flux2Config::default()
    };
    let model = Flux2Transformer::new(config, &mut Source::random(DType::F32, &CPU).root()).unwrap();
    check(&model, &["all-attention", "all-linear"], SIZE, 1, || {
        let conditions = Flux2Conditions {
            encoder_hidden_states: &zeros(&[1, SIZE.tokens, 40]),
            timestep: &zeros(&[1]),
            img_ids: &zeros(&[IMAGE_TOKENS, 4]),
            txt_ids: &zeros(&[SIZE.tokens, 4]),
            guidance: None,
        };
        model.forward(&zeros(&[1, IMAGE_TOKENS, 128]), conditions)
    });
}

#[test]
fn the_estimate_for_chroma_is_near_what_the_tape_keeps() {
    let config = ChromaConfig {
        num_layers: 4,
        num_single_layers: 8,
        num_attention_heads: 4,
        attention_head_dim: 24,
        joint_attention_dim: 40,
        axes_dims_rope: vec![8, 8, 8],
        approximator_num_channels: 16,
        approximator_hidden_dim: 64,
        ..ChromaConfig::default()
    };
    let model = ChromaTransformer::new(config, &mut Source::random(DType::F32, &CPU).root()).unwrap();
    check(&model, &["all-attention", r".*transformer_blocks\..*", "all-linear"], SIZE, 1, || {
        let conditions = ChromaConditions {
            encoder_hidden_states: &zeros(&[1, SIZE.tokens, 40]),
            timestep: &zeros(&[1]),
            img_ids: &zeros(&[IMAGE_TOKENS, 3]),
            txt_ids: &zeros(&[SIZE.tokens, 3]),
            lengths: None,
        };
        model.forward(&zeros(&[1, IMAGE_TOKENS, 64]), conditions)
    });
}

#[test]
fn the_estimate_for_flux_is_near_what_the_tape_keeps() {
    let config = FluxConfig {
        num_layers: 4,
        num_single_layers: 8,
        num_attention_heads: 4,
        attention_head_dim: 24,
        joint_attention_dim: 40,
        pooled_projection_dim: 16,
        guidance_embeds: false,
        axes_dims_rope: vec![8, 8, 8],
        ..FluxConfig::default()
    };
    let model = FluxTransformer::new(config, &mut Source::random(DType::F32, &CPU).root()).unwrap();
    let run = || {
        let conditions = FluxConditions {
            encoder_hidden_states: &zeros(&[1, SIZE.tokens, 40]),
            pooled_projections: &zeros(&[1, 16]),
            timestep: &zeros(&[1]),
            img_ids: &zeros(&[IMAGE_TOKENS, 3]),
            txt_ids: &zeros(&[SIZE.tokens, 3]),
            guidance: None,
        };
        model.forward(&zeros(&[1, IMAGE_TOKENS, 64]), conditions)
    };
    check(&model, &["all-attention", "all-linear"], SIZE, 1, run);
}

#[test]
fn the_estimate_for_qwen_image_is_near_what_the_tape_keeps() {
    let config = QwenImageConfig {
        num_layers: 8,
        num_attention_heads: 4,
        attention_head_dim: 24,
        joint_attention_dim: 40,
        axes_dims_rope: vec![8, 8, 8],
        ..QwenImageConfig::default()
    };
    let model = QwenImageTransformer::new(config, &mut Source::random(DType::F32, &CPU).root()).unwrap();
    check(&model, &["all-attention", r".*transformer_blocks\..*", "all-linear"], SIZE, 1, || {
        let conditions = QwenImageConditions {
            encoder_hidden_states: &zeros(&[1, SIZE.tokens, 40]),
            timestep: &zeros(&[1]),
            img_ids: &zeros(&[IMAGE_TOKENS, 3]),
            txt_ids: &zeros(&[SIZE.tokens, 3]),
            lengths: None,
        };
        model.forward(&zeros(&[1, IMAGE_TOKENS, 64]), conditions)
    });
}

#[test]
fn the_estimate_for_sd3_is_near_what_the_tape_keeps() {
    // SD3.5-large has no second attention. SD3.5-medium has one in about half of its blocks.
    for dual_attention_layers in [Vec::new(), (0..5).collect()] {
        let config = SD3Config {
            num_layers: 8,
            num_attention_heads: 4,
            attention_head_dim: 24,
            joint_attention_dim: 40,
            pooled_projection_dim: 16,
            pos_embed_max_size: 16,
            dual_attention_layers,
            ..SD3Config::default()
        };
        let model = SD3Transformer::new(config, &mut Source::random(DType::F32, &CPU).root()).unwrap();
        check(&model, &["all-attention", r".*transformer_blocks\..*", "all-linear", "all-conv"], SIZE, 1, || {
            let conditions = SD3Conditions {
                encoder_hidden_states: &zeros(&[1, SIZE.tokens, 40]),
                pooled_projections: &zeros(&[1, 16]),
                timestep: &zeros(&[1]),
            };
            model.forward(&zeros(&[1, 16, SIZE.height, SIZE.width]), conditions)
        });
    }
}
