//! Python bindings of trainable-candle: the extension module `trainable_candle._core`, which has no arithmetic of its
//! own.
//!
//! Each area of the library has a file or a folder. All exports are in one flat module; the Python package sorts them
//! into submodules.

mod adapter;
mod adapter_set;
mod argument;
mod arguments;
mod autograd;
mod call;
mod capture;
mod device;
mod distributed;
mod dlpack;
mod dtype;
mod error;
mod exceptions;
mod facts;
mod functional;
mod io;
mod lora_config;
mod lora_gradients;
mod loss;
mod models;
mod named;
mod norm;
mod optim;
mod peft_arguments;
mod quantized;
mod rng;
mod runtime;
mod tensor;
mod train;
mod training_adapter;
mod types;
mod var;
mod verify;

// Keeps freed blocks for later allocations, which is faster than returning them to the system.
#[global_allocator]
static ALLOCATOR: trainable_candle_core::RecyclingAllocator = trainable_candle_core::RecyclingAllocator::new();

/// The compiled part of trainable-candle; import `trainable_candle` instead.
#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use crate::adapter::{Adapter, init_linear};
    #[pymodule_export]
    use crate::adapter_set::{AdapterFile, AdapterSet, prepare_adapters, save_adapters};
    #[pymodule_export]
    use crate::autograd::{checkpoint, grad, gradcheck, is_grad_enabled, set_grad_enabled};
    #[pymodule_export]
    use crate::capture::CapturedFunction;
    #[pymodule_export]
    use crate::device::{
        cuda_bus_id, cuda_device_count, cuda_device_name, cuda_empty_cache, cuda_finish_profile, cuda_link,
        cuda_memory_stats, cuda_pinnable_bytes, cuda_reset_peak_memory_stats, cuda_set_memory_limit,
        cuda_stages_weights, cuda_start_profile, cuda_synchronize, cuda_unavailable_reason,
    };
    #[pymodule_export]
    use crate::distributed::{
        NcclCommunicator, gradient_vectors, memory_machine, nccl_unique_id, nccl_version, set_gradient_vectors,
        share_streamed,
    };
    #[pymodule_export]
    use crate::dlpack::from_dlpack;
    #[pymodule_export]
    use crate::dtype::DType;
    #[pymodule_export]
    use crate::facts::{CheckpointFacts, PartFacts, adapted_parts, choices, gguf_facts, inspect, pipeline_parts};
    #[pymodule_export]
    use crate::functional::{
        conv2d, dropout, embedding, fake_quantize, geglu, linear, quick_gelu, rope, scaled_dot_product_attention,
        swiglu, upsample_nearest2d, varlen_attention,
    };
    #[pymodule_export]
    use crate::io::{load_file, save_file, snapshot};
    #[pymodule_export]
    use crate::lora_config::LoraConfig;
    #[pymodule_export]
    use crate::lora_gradients::{lora_backward, lora_backward_};
    #[pymodule_export]
    use crate::loss::{
        cross_entropy, huber_loss, l1_loss, linear_cross_entropy, linear_log_probs, mse_loss, smooth_l1_loss,
    };
    #[pymodule_export]
    use crate::models::{
        AutoencoderKL, AutoencoderKLQwenImage, CLIPTextModel, CausalLM, ChromaTransformer, DigitsTransformer,
        Flux2Transformer, FluxTransformer, Generation, KVCache, Model, QwenImageTransformer, SD3Transformer, SDXLUNet,
        T5Encoder, TextFeatures, ZImageTransformer, save_checkpoint, set_resolver,
    };
    #[pymodule_export]
    use crate::norm::{
        add_layer_norm, group_norm, group_norm_silu, layer_norm, modulated_layer_norm, rms_norm, rms_norm_rope,
    };
    #[pymodule_export]
    use crate::optim::{EMA, GradScaler, Optimizer, Schedule, clip_grad_norm_, optimizer_kinds};
    #[pymodule_export]
    use crate::quantized::{QuantizedTensor, quantize};
    #[pymodule_export]
    use crate::rng::{draw_from, get_rng_state, manual_seed, normal_samples, set_rng_state, stream_seed};
    #[pymodule_export]
    use crate::runtime::{
        available_bytes, get_float32_matmul_precision, get_num_threads, get_w8a8, saved_bytes,
        set_float32_matmul_precision, set_num_threads, set_w8a8,
    };
    #[pymodule_export]
    use crate::tensor::{
        Tensor, arange, cat, empty_like, eye, full, ones, ones_like, rand, randint, randn, stack, tensor, where_,
        zeros, zeros_like,
    };
    #[pymodule_export]
    use crate::train::{
        DiffusionObjective, FlowMatching, NoiseSchedule, NoisedLatents, Sampler, classifier_free_guidance,
    };
    #[pymodule_export]
    use crate::training_adapter::TrainingAdapter;
    #[pymodule_export]
    use crate::var::Var;
    #[pymodule_export]
    use crate::verify::{AdapterModule, AdapterReport, verify_adapter};

    /// Version of the package. A build with CUDA has the suffix `+cu13`.
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str =
        if cfg!(feature = "cuda") { concat!(env!("CARGO_PKG_VERSION"), "+cu13") } else { env!("CARGO_PKG_VERSION") };

    /// Cargo profile of this build, `"release"` or `"debug"`.
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const build_profile: &str = if cfg!(debug_assertions) { "debug" } else { "release" };

    #[pymodule_init]
    fn init() {
        // Long computations call this check from time to time, so that Ctrl-C interrupts them.
        trainable_candle_core::interrupt::set_check(crate::error::check_signals);
    }
}
