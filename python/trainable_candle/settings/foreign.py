"""Settings of other tools that this library lacks in the same form, and what to do instead.

Each text here is the rest of a message that begins with the name of the other tool's setting.
"""

from __future__ import annotations

from typing import Final

_LEAVE: Final = "leave it out"
_NOT_NEEDED: Final = f"is not needed here: {_LEAVE}"
_NONE: Final = f"has no counterpart: {_LEAVE}"
_DEFAULT: Final = f"is the default here: {_LEAVE}"
_CACHED: Final = f"is what --cache disk, the default, does: {_LEAVE}"
_ATTENTION: Final = f"is not needed here, because attention never stores all scores: {_LEAVE}"
_LISTED: Final = "has no counterpart: list the folders in a YAML file and give that as --dataset"
_ENCODER: Final = "has no counterpart: give --text-encoder FILE, once for each text encoder"
_TIMESTEPS: Final = (
    "has no exact counterpart: see --timesteps, --timestep-shift and --resolution-shift"
)
_AI_TOOLKIT_FILE: Final = (
    "belongs to the outer lines of an ai-toolkit file: copy the blocks below `process`, such as "
    "`network` and `train`, to the top of the file"
)
_ONETRAINER_FILE: Final = (
    "is part of a whole OneTrainer configuration: copy the settings that docs/migrating.md names "
    "to a file of their own"
)


def _give(replacement: str) -> str:
    """Return advice to give `replacement`: flags, or a description of something else."""
    return f"has no counterpart of the same form: give {replacement}"


_KOHYA: Final = {
    "xformers": _ATTENTION,
    "sdpa": _ATTENTION,
    "mem_eff_attn": _ATTENTION,
    "split_attn": _ATTENTION,
    "cache_latents": _CACHED,
    "cache_latents_to_disk": _CACHED,
    "cache_text_encoder_outputs": _CACHED,
    "cache_text_encoder_outputs_to_disk": _CACHED,
    "skip_cache_check": _NOT_NEEDED,
    "vae_batch_size": _NOT_NEEDED,
    "text_encoder_batch_size": _NOT_NEEDED,
    "enable_bucket": _DEFAULT,
    "bucket_no_upscale": "is the default here; only --upscale changes it",
    "network_train_unet_only": "is the default here; only --train-text-encoder changes it",
    "network_train_text_encoder_only": _NONE,
    "no_half_vae": f"has no effect here, where the VAE is always f32: {_LEAVE}",
    "save_model_as": f"is always safetensors here: {_LEAVE}",
    "caption_extension": f"is not needed: .txt and .caption are both read; {_LEAVE}",
    "max_token_length": f"is not needed: each model has its own limit; {_LEAVE}",
    "lowram": _NOT_NEEDED,
    "lowvram": "has no counterpart: give --vram GIB, or nothing to use all free memory",
    "highvram": _NOT_NEEDED,
    "max_data_loader_n_workers": _NOT_NEEDED,
    "persistent_data_loader_workers": _NOT_NEEDED,
    "disable_mmap_load_safetensors": _NOT_NEEDED,
    "mem_eff_save": _NOT_NEEDED,
    "torch_compile": f"is not needed: steps run as CUDA graphs; {_LEAVE}",
    "dynamo_backend": f"is not needed: steps run as CUDA graphs; {_LEAVE}",
    "fused_backward_pass": _NOT_NEEDED,
    "num_cpu_threads_per_process": _give("--threads"),
    "network_module": "has no counterpart: choose the kind with --adapter",
    "network_args": "has no counterpart: give --adapter and --target-modules, and "
    "--lora-plus-ratio for loraplus_lr_ratio",
    "loraplus_unet_lr_ratio": _give("--lora-plus-ratio, which is for all parts of a model"),
    "loraplus_text_encoder_lr_ratio": _give("--lora-plus-ratio, which is for all parts of a model"),
    "loraplus_lr_embedding": f"is not needed, because embeddings get no adapter: {_LEAVE}",
    "network_dropout": "has no exact counterpart: --lora-dropout drops the adapter's inputs",
    "scale_weight_norms": _NONE,
    "dim_from_weights": _give("--rank with the rank of the adapter in --initial-adapter"),
    "base_weights": _give("a model into which `trainable-candle merge` has merged the file"),
    "unet_lr": "has no counterpart: give --learning-rate, which is the rate of the UNet",
    "lr_scheduler_num_cycles": _give("--lr-scheduler-args num_cycles=N (of cosine)"),
    "lr_scheduler_power": _give("--lr-scheduler-args power=X (of polynomial)"),
    "lr_scheduler_min_lr_ratio": _give(
        "--lr-scheduler polynomial --lr-scheduler-args lr_end=X (the last learning rate itself)"
    ),
    "lr_scheduler_type": _give("--lr-scheduler"),
    "v_parameterization": "has no counterpart: give --prediction-type v_prediction",
    "random_crop": "has no counterpart: give --crop random",
    "face_crop_aug_range": _NONE,
    "color_aug": "has no counterpart: give --color-hue 0.04, and --color-brightness if wanted",
    "cpu_offload_checkpointing": "has no counterpart: give --gradient-checkpointing offload",
    "masked_loss": "has no counterpart: give `--mask file`, which reads separate files",
    "alpha_mask": "has no counterpart: give --mask alpha",
    "caption_prefix": _give("--trigger"),
    "caption_suffix": _NONE,
    "full_fp16": "has no counterpart: give --precision f16",
    "full_bf16": "has no counterpart: give --precision bf16",
    "fp8_base": _give("--base-precision fp8"),
    "fp8_base_unet": _give("--base-precision fp8"),
    "fp8_scaled": f"is what --base-precision fp8 does, with a scale for each row: {_LEAVE}",
    "fp8_t5": _give("--text-encoder-precision fp8"),
    "fp8_llm": _give("--text-encoder-precision fp8"),
    "load_in_4bit": _give("--base-precision nf4"),
    "load_in_8bit": _give("--base-precision int8"),
    "quantize": _give("--base-precision int8, fp8 or nf4"),
    "base_model_precision": _give("--base-precision int8, fp8 or nf4"),
    "gradient_checkpointing_cpu_offload": _give("--gradient-checkpointing offload"),
    "t5xxl": _ENCODER,
    "clip_l": _ENCODER,
    "clip_g": _ENCODER,
    "t5xxl_max_token_length": f"is fixed for each model: {_LEAVE}",
    "apply_t5_attn_mask": f"is fixed for each model: {_LEAVE}",
    "guidance_scale": "has no single counterpart: give --train-guidance for the scale in training, "
    "--guidance for previews",
    "model_prediction_type": f"is always `raw` here: {_LEAVE}",
    "discrete_flow_shift": _give("--timestep-shift"),
    "timestep_sampling": "has no counterpart of the same form: sigmoid is --timesteps "
    "logit_normal, shift is --timestep-shift X, flux_shift is --resolution-shift",
    "sigmoid_scale": _TIMESTEPS,
    "weighting_scheme": "has no single counterpart: logit_normal and mode are --timesteps, "
    "sigma_sqrt and cosmap are --loss-weighting",
    "logit_mean": _TIMESTEPS,
    "logit_std": _TIMESTEPS,
    "mode_scale": _TIMESTEPS,
    "zero_terminal_snr": _NONE,
    "ip_noise_gamma": _NONE,
    "adaptive_noise_scale": _NONE,
    "debiased_estimation_loss": "has no counterpart: give --min-snr-gamma",
    "scale_v_pred_loss_like_noise_pred": _NONE,
    "huber_c": "has no exact counterpart: give --huber-delta",
    "log_with": "has no counterpart: give --tensorboard or --wandb PROJECT",
    "log_tracker_name": _give("--wandb PROJECT"),
    "wandb_run_name": _give("--name"),
    "logging_dir": "has no counterpart: give --tensorboard; logs are in --output",
    "log_prefix": _NOT_NEEDED,
    "reg_data_dir": _LISTED,
    "dataset_config": _LISTED,
    "in_json": _give("metadata.jsonl in the folder of images"),
    "dataset_repeats": _give("`repeats` in a YAML file of folders"),
    "config_file": _give("--config FILE, in YAML"),
    "save_state": _DEFAULT,
    "save_state_on_train_end": _DEFAULT,
    "save_last_n_steps": _give("--keep-adapters, a number of files"),
    "save_last_n_epochs": _give("--keep-adapters, a number of files"),
    "sample_at_first": _DEFAULT,
    "sample_sampler": _give("--sampler"),
    "training_comment": _NONE,
    "metadata_title": _give("--name"),
    "no_metadata": _NONE,
}
"""Flags of kohya's scripts, and some settings of further tools -> advice; see `INSTEAD`."""
_ONETRAINER_KEYS: Final = {
    "__version": _ONETRAINER_FILE,
    "training_method": _ONETRAINER_FILE,
    "model_type": _give("--model"),
    "concepts": _LISTED,
    "workspace_dir": _give("--output, the folder of this run"),
    "output_model_destination": _give("--output, the folder of this run, and --name"),
    "lora_decompose": _give("--adapter dora"),
    "layer_filter": _give("--target-modules"),
    "ema": _give("--ema-decay alone"),
    "enable_crop_jitter": _give("--crop random"),
    "random_hue_max_strength": _give("--color-hue with half of the value"),
    "tag_dropout_probability": _give("--caption-tag-dropout"),
    "masked_training": _give("--mask file or --mask alpha"),
    "latent_caching": _CACHED,
    "loss_weight_fn": _give("--min-snr-gamma"),
    "loss_weight_strength": _give("--min-snr-gamma"),
    "mse_strength": _give("--loss mse"),
    "huber_strength": _give("--loss huber"),
    "force_v_prediction": _give("--prediction-type v_prediction"),
    "samples": _give("--sample-prompts"),
    "sample_after": _give("--sample-every or --sample-every-epochs"),
    "continue_last_backup": _give("--resume auto"),
}
"""Keys of OneTrainer's configuration files -> advice."""
_AI_TOOLKIT: Final = {
    "job": _AI_TOOLKIT_FILE,
    "config": _AI_TOOLKIT_FILE,
    "process": _AI_TOOLKIT_FILE,
    "training_folder": _give("--output, the folder of this run"),
    "datasets": _LISTED,
    "network.network_kwargs": _give("--target-modules"),
    "train.ema_config": _give("--ema-decay alone"),
    "train.noise_scheduler": f"is fixed for each model: {_LEAVE}",
    "train.train_unet": _DEFAULT,
    "train.gradient_accumulation_steps": "counts every batch as a step: give "
    "--gradient-accumulation N, and divide --steps by N",
    "train.timestep_type": _TIMESTEPS,
    "train.optimizer_params": _give("--optimizer-args name=value, or --weight-decay"),
    "train.skip_first_sample": "has no counterpart, because previews begin before the first step: "
    f"{_LEAVE}",
    "train.disable_sampling": f"is the default without --sample-prompts: {_LEAVE}",
    "model.arch": _give("--model"),
    "model.is_flux": _give("--model flux"),
    "model.is_xl": _give("--model sdxl"),
    "model.quantize": _give("--base-precision int8, fp8 or nf4"),
    "model.quantize_te": _give("--text-encoder-precision int8, fp8 or nf4"),
    "model.low_vram": _give("--vram GIB, or nothing to use all free memory"),
    "save.push_to_hub": _NONE,
    "sample.sampler": _give("--sampler"),
    "sample.width": _give("--sample-size, such as 1024x1024"),
    "sample.height": _give("--sample-size, such as 1024x1024"),
    "sample.walk_seed": _NONE,
    "sample.samples": _give("--sample-prompts"),
}
"""Lines of ai-toolkit's files -> advice; dots join the names of nested lines."""
INSTEAD: Final = {**_KOHYA, **_ONETRAINER_KEYS, **_AI_TOOLKIT}
"""Maps another tool's setting to the rest of a message that begins with the setting's name.

The names have underscores instead of hyphens, and dots between the names of nested lines.
"""


def instead(name: str) -> str | None:
    """Return what `INSTEAD` says about another tool's setting; None if it says nothing.

    If `INSTEAD` lacks a nested line, the result is what it says about the nearest line around it.

    Args:
        name: the name of a flag without its leading hyphens, or of a line in a file; for a nested
            line, the names from the outermost line to this one, joined by dots.
    """
    key = name.replace("-", "_")
    while key not in INSTEAD and "." in key:
        key = key.rpartition(".")[0]
    return INSTEAD.get(key)
