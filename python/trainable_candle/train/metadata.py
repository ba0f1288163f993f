"""Adapter files' metadata about training, under the names of kohya's scripts and of ModelSpec."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.settings.initial import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainable_candle import AdapterFile
    from trainable_candle.settings import TrainConfig

_KOHYA_PRECISIONS: Final = {"f32": "no", "f16": "fp16", "bf16": "bf16"}
_MODELSPEC_PREDICTIONS: Final = {"epsilon": "epsilon", "v_prediction": "v"}
_UNKNOWN: Final = "0" * 64
"""The placeholder that `stamp` replaces by a SHA-256."""
_HASHES: Final = ("sshs_model_hash", "modelspec.hash_sha256")
"""The entries for the hash in kohya's scripts and in ModelSpec."""
_BLOCK: Final = 2**20
"""The number of bytes that are read and hashed at once."""
BASE: Final = "trainable_candle.base_precision"
"""The entry with the format to which `--base-precision` quantized the base."""
QAT: Final = "trainable_candle.qat"
"""The entry with the format to which training rounded the adapted weights."""
QAT_SCALES: Final = "trainable_candle.qat_scales"
"""The entry that says that the scales of the rounding in `QAT` were learned."""
INIT: Final = "trainable_candle.init"
"""The entry with the initialisation of the adapter, if it is not the default."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run, for the header of an adapter file."""

    step: int
    epoch: int
    """The number of complete epochs."""
    images: int
    """The number of examples of the data set, each counted once."""
    started: float
    """When the run was started or last resumed, in seconds since 1970."""


def now() -> float:
    """Return seconds since 1970.

    If the environment has `SOURCE_DATE_EPOCH`, return its value, which makes files reproducible.
    """
    fixed = os.environ.get("SOURCE_DATE_EPOCH", "")
    return float(fixed) if fixed.isdecimal() else datetime.now(timezone.utc).timestamp()


def training_metadata(
    config: TrainConfig, progress: Progress, of_data: Mapping[str, str]
) -> dict[str, str]:
    """Return the metadata for an adapter file's header; settings without a value are left out.

    Args:
        config: the settings.
        progress: the progress of the run.
        of_data: the entries about the data set.
    """
    side = config.resolution
    title = config.name or Path(config.output).resolve().name
    date = datetime.fromtimestamp(now(), timezone.utc)
    values = {
        "ss_output_name": title,
        "ss_sd_model_name": Path(config.weights).name or config.model,
        "ss_steps": progress.step,
        "ss_max_train_steps": config.steps,
        "ss_epoch": progress.epoch,
        "ss_num_train_images": progress.images,
        "ss_batch_size_per_device": config.batch_size,
        "ss_gradient_accumulation_steps": config.gradient_accumulation,
        "ss_total_batch_size": config.batch_size * config.gradient_accumulation,
        "ss_resolution": f"({side}, {side})" if side else None,
        "ss_clip_skip": config.clip_skip,
        "ss_learning_rate": config.learning_rate,
        "ss_text_encoder_lr": config.text_encoder_learning_rate,
        "ss_optimizer": config.optimizer,
        "ss_lr_scheduler": config.lr_scheduler,
        "ss_lr_warmup_steps": config.warmup_steps,
        "ss_max_grad_norm": config.most_grad_norm,
        "ss_gradient_checkpointing": config.checkpointing != "none",
        "ss_mixed_precision": _KOHYA_PRECISIONS[config.precision],
        "ss_min_snr_gamma": config.min_snr_gamma,
        "ss_noise_offset": config.noise_offset,
        "ss_multires_noise_iterations": config.multires_noise_iterations,
        "ss_multires_noise_discount": config.multires_noise_discount,
        "ss_loss_type": config.loss,
        "ss_caption_dropout_rate": config.caption_dropout,
        "ss_shuffle_caption": config.caption_shuffle,
        "ss_keep_tokens": config.caption_keep_tokens,
        "ss_flip_aug": config.flip,
        "ss_seed": config.seed,
        "ss_training_comment": config.trigger,
        "ss_training_adapter": Path(config.training_adapter or "").name,
        "ss_training_started_at": progress.started,
        "ss_training_finished_at": date.timestamp(),
        "modelspec.title": title,
        "modelspec.date": date.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "modelspec.resolution": f"{side}x{side}" if side else None,
        "modelspec.trigger_phrase": config.trigger,
        "modelspec.prediction_type": _MODELSPEC_PREDICTIONS.get(config.prediction_type or ""),
        **roundings(config),
        **of_data,
        _HASHES[0]: _UNKNOWN,
        _HASHES[1]: f"0x{_UNKNOWN}",
    }
    # Names of files may contain bytes that are not UTF-8; question marks replace them.
    texts = {name: str(value).encode(errors="replace").decode() for name, value in values.items()}
    return {name: text for name, text in texts.items() if values[name] not in {None, ""}}


def roundings(config: TrainConfig) -> dict[str, str | None]:
    """Return the entries about rounded weights and the adapter's initial values; None: no entry."""
    return {
        BASE: config.base_format,
        QAT: config.qat,
        QAT_SCALES: "learned" if config.qat_learned_scales else None,
        INIT: None if config.init == DEFAULT else config.init,
    }


class Stamped:
    """An adapter file; `write` puts the hash of its tensors into its header.

    Args:
        file: the file, with the metadata of `training_metadata`.
        path: the path of the file.
    """

    def __init__(self, file: AdapterFile, path: Path) -> None:
        self._file = file
        self._path = path

    @property
    def idle(self) -> list[str]:
        """The names of layers whose adapter has no effect."""
        return self._file.idle

    def write(self) -> None:
        """Write the file, completely or not at all; then write the hash into the file's header.

        Raises:
            FileError, OSError: the file cannot be written.
        """
        self._file.write()
        stamp(self._path)


def stamp(path: Path) -> None:
    """Replace the placeholders in a file's header by the SHA-256 of the bytes after the header.

    kohya's scripts and ModelSpec hash these bytes, which are the tensors.

    Args:
        path: a safetensors file. It does not change if it has no placeholder; if there is no such
            file, nothing happens.

    Raises:
        OSError: the file cannot be read or written.
    """
    if not path.is_file():
        return
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = file.read(length)
        entries: dict[str, Any] = json.loads(header).get("__metadata__", {})
        if _UNKNOWN not in entries.get(_HASHES[0], ""):
            return
        digest = hashlib.sha256()
        while block := file.read(_BLOCK):
            digest.update(block)
        # The placeholder is as long as a digest, so the header keeps its length.
        file.seek(8)
        file.write(header.replace(_UNKNOWN.encode(), digest.hexdigest().encode()))
