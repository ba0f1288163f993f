"""Flags of kohya's scripts without an exact counterpart here, and what to do instead."""

from typing import Final

_NOT_NEEDED: Final = "is not needed here: leave it out"
_CACHED: Final = "is what --cache disk, the default, does: leave it out"
_ATTENTION: Final = "is not needed here, because attention never stores all scores: leave it out"
_LISTED: Final = "has no counterpart: list the folders in a YAML file, which --dataset takes"

INSTEAD: Final = {
    "--xformers": _ATTENTION,
    "--sdpa": _ATTENTION,
    "--mem-eff-attn": _ATTENTION,
    "--cache-latents": _CACHED,
    "--cache-latents-to-disk": _CACHED,
    "--cache-text-encoder-outputs": _CACHED,
    "--cache-text-encoder-outputs-to-disk": _CACHED,
    "--enable-bucket": "is the default here: leave it out",
    "--bucket-no-upscale": "is the default here; only --upscale changes it",
    "--network-train-unet-only": "is the default; only --train-text-encoder changes it",
    "--no-half-vae": "has no effect here, where the VAE is always f32: leave it out",
    "--save-model-as": "is always safetensors here: leave it out",
    "--caption-extension": "is not needed: .txt and .caption are both read; leave it out",
    "--max-token-length": "is not needed: each model has its own limit; leave it out",
    "--lowram": _NOT_NEEDED,
    "--highvram": _NOT_NEEDED,
    "--max-data-loader-n-workers": _NOT_NEEDED,
    "--persistent-data-loader-workers": _NOT_NEEDED,
    "--network-module": "has no counterpart: choose the kind with --adapter",
    "--network-args": "has no counterpart: give --adapter and --target-modules",
    "--unet-lr": "has no counterpart: give --learning-rate, which is the rate of the UNet",
    "--v-parameterization": "has no counterpart: give --prediction-type v_prediction",
    "--random-crop": "has no counterpart: give --crop random",
    "--color-aug": "has no counterpart: give --color-hue 0.04, and --color-brightness if wanted",
    "--cpu-offload-checkpointing": "has no counterpart: give --gradient-checkpointing offload",
    "--masked-loss": "has no counterpart: give `--mask file`, which reads separate files",
    "--alpha-mask": "has no counterpart: give --mask alpha",
    "--full-fp16": "has no counterpart: give --precision f16",
    "--full-bf16": "has no counterpart: give --precision bf16",
    "--log-with": "has no counterpart: give --tensorboard or --wandb PROJECT",
    "--logging-dir": "has no counterpart: give --tensorboard; logs are in --output",
    "--reg-data-dir": _LISTED,
    "--dataset-config": _LISTED,
    "--huber-c": "has no exact counterpart: give --huber-delta",
}
"""Maps a flag, written with hyphens, to the end of the message about it."""
