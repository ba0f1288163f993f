"""LoRAs that start as the principal part of the weights, and their form in files.

A layer computes W x + s (B A - B0 A0) x, where A0 and B0 are the initial values of the trained
factors A and B, and s is the scale. That is PiSSA (Meng et al. 2024, arXiv:2404.02948), which
freezes the residual W - s B0 A0. Here W itself stays, and a frozen LoRA with the factors A0 and B0
(the start) subtracts s B0 A0 x. So the residual is not rounded to the dtype of the weights, and a
model whose adapter is disabled is the original model, as previews and DPO require.

Files hold s (B A - B0 A0) as a plain LoRA of twice the rank, for the original weights.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import ConfigError, ShapeError, WeightsFormatError
from trainable_candle.lora.pissa import pissa
from trainable_candle.lora.stack import scale_of
from trainable_candle.settings.initial import DEFAULT, PISSA
from trainable_candle.train.callbacks import Callback
from trainable_candle.train.state import read_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainable_candle import AdapterSet, Tensor, TrainingAdapter, Var
    from trainable_candle.lora.factors import Matrix
    from trainable_candle.models import Model
    from trainable_candle.settings import TrainConfig
    from trainable_candle.train.trainer import Trainer

_DOWN: Final = ".lora_A.weight"
"""What follows the layer's name in the name of a factor A."""
_UP: Final = ".lora_B.weight"
"""What follows the layer's name in the name of a factor B."""
_PEFT: Final = "base_model.model."
"""What precedes the layer's name in the keys of peft's files."""
_FILE: Final = "start.safetensors"
"""The file of a checkpoint folder with the start."""


def doubled(config: tc.LoraConfig) -> tc.LoraConfig:
    """Return the configuration of LoRAs of twice the rank, with the same layers and scale."""
    return tc.LoraConfig(
        r=2 * config.r,
        # The scale is alpha / sqrt(rank) with `use_rslora`, else alpha / rank.
        lora_alpha=config.lora_alpha * (2**0.5 if config.use_rslora else 2),
        target_modules=config.target_modules,
        exclude_modules=config.exclude_modules,
        use_rslora=config.use_rslora,
    )


class PissaStart:
    """The start of a model's trained LoRA, and the LoRA of twice the rank that files get.

    Until `begin`, the trained LoRA has its usual initial values. Until `begin`, `take` or `load`,
    nothing is subtracted from it.

    Args:
        model: the model; its linear layers have the LoRA.
        trained: the LoRA, newly attached.
    """

    def __init__(self, model: Model, trained: AdapterSet) -> None:
        self._model = model
        self._trained = trained
        self._subtracted: TrainingAdapter | None = None
        """The frozen LoRA with the factors A0 and B0."""
        # From now on, the model's adapter is the one for files, so that this adapter can be merged
        # after training. During training, the layers apply the trained LoRA instead.
        model.remove_adapter()
        self._written = model.add_adapter(doubled(trained.config))
        """The LoRA for files: its first ranks are A and B, the other ranks are A0 and -B0."""
        self._written.set_enabled(False)
        trained.set_enabled(True)

    def begin(self, seed: int) -> None:
        """Set the trained LoRA to the principal part of each weight.

        If the rank exceeds the smaller side of a weight, the factors' remaining rows and columns
        keep their usual initial values.

        Raises:
            NonFiniteError: a weight has a non-finite value.
        """
        parameters = self._trained.named_parameters()
        for name, factor in parameters.items():
            layer = name.removesuffix(_DOWN)
            if layer == name:
                # This is a factor B, which is set together with its factor A.
                continue
            down, up = factor, parameters[layer + _UP]
            rank = down.shape[0]
            principal = pissa(self._model.get_tensor(f"{layer}.weight"), rank, seed)
            # The layer multiplies B A by the scale. So the product of the factors is the principal
            # part divided by the scale: each factor is divided by the scale's square root.
            multiplier = scale_of(self._trained.config, layer, rank) ** -0.5
            a, b = (var.detach().to("cpu").to("f32").numpy().copy() for var in (down, up))
            a[: principal.rank] = multiplier * principal.down
            b[:, : principal.rank] = multiplier * principal.up
            down.set(_like(down, a))
            up.set(_like(up, b))
        self.take()

    def take(self) -> None:
        """Make the present values of the trained LoRA its start."""
        self._set({name: var.detach() for name, var in self._trained.named_parameters().items()})

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the start on the CPU, by names of the trained LoRA's parameters."""
        start = {name: self._start_of(name, var) for name, var in self._named_written().items()}
        return tc.snapshot(start)

    def load(self, start: Mapping[str, Tensor]) -> None:
        """Set the start to a stored one; the trained LoRA keeps its values.

        Raises:
            KeyError: a value is missing.
            ShapeError: a value has another shape.
        """
        self._set({name: start[name] for name in self._trained.named_parameters()})

    def set_enabled(self, enabled: bool) -> None:
        """Enable or disable the subtraction of the start."""
        if self._subtracted is not None:
            self._subtracted.set_enabled(enabled)

    def for_files(self) -> AdapterSet:
        """Return the trained LoRA minus its start, as a LoRA on the original weights."""
        trained = self._trained.named_parameters()
        for name, var in self._named_written().items():
            # [B, -B0] [A; A0] = B A - B0 A0
            factor = trained[name].detach().to(var.dtype)
            var.set(tc.cat([factor, _signed(name, self._start_of(name, var))], _axis(name)))
        return self._written

    def finish(self) -> AdapterSet:
        """Replace the trained LoRA and its start by the LoRA that files get, and return that."""
        written = self.for_files()
        self._trained.set_enabled(False)
        if self._subtracted is not None:
            self._subtracted.remove()
        written.set_enabled(True)
        return written

    def _named_written(self) -> dict[str, Var]:
        return self._written.named_parameters()

    @staticmethod
    def _start_of(name: str, written: Var) -> Tensor:
        """Return A0 or B0, from the second half of `written`, a factor of the LoRA for files."""
        axis = _axis(name)
        rank = written.shape[axis] // 2
        # The second half of B is -B0: a second change of sign gives B0.
        return _signed(name, written.detach().narrow(axis, rank, rank))

    def _set(self, start: Mapping[str, Tensor]) -> None:
        """Write `start` to a new frozen LoRA and to both halves of the factors for files."""
        frozen = {}
        config = self._trained.config
        for name, var in self._named_written().items():
            value = start[name].to(var.device).to(var.dtype)
            # The halves cancel until `for_files` sets the first half to the trained factor.
            var.set(tc.cat([value, _signed(name, value)], _axis(name)))
            # The scale goes into B0, because a file without alphas has the scale 1.
            if name.endswith(_UP):
                rank = value.shape[_axis(name)]
                value = value * scale_of(config, name.removesuffix(_UP), rank)
            frozen[_PEFT + name] = value
        if self._subtracted is not None:
            self._subtracted.remove()
        with TemporaryDirectory() as folder:
            path = Path(folder) / _FILE
            tc.save_file(tc.snapshot(frozen), path)
            self._subtracted = self._model.add_training_adapter(path, scale=-1.0)


class KeepStart(Callback):
    """Writes the start of the trained LoRA to checkpoints, and reads it from them.

    Args:
        start: the start.
    """

    def __init__(self, start: PissaStart) -> None:
        self._start = start

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Make the first process's initial values, which the trainer has copied here, the start."""
        if trainer.step == 0 and trainer.group.size > 1:
            self._start.take()

    def on_save(self, trainer: Trainer[Any], folder: Path) -> None:
        """Write the start to a checkpoint."""
        trainer.write_later(partial(tc.save_file, self._start.state(), folder / _FILE))

    def on_resume(self, trainer: Trainer[Any], folder: Path) -> None:  # noqa: ARG002
        """Load the start of a checkpoint.

        Raises:
            WeightsFormatError: the start is missing, damaged or that of another adapter.
        """
        stored = read_tensors(folder, _FILE)
        try:
            self._start.load(stored)
        except (KeyError, ShapeError) as error:
            raise WeightsFormatError(
                f"resume: {folder} has the start of another adapter ({error}); resume with the "
                "settings that the run was started with"
            ) from error


def require_same_start(config: TrainConfig, earlier: Mapping[str, object]) -> None:
    """Check that a resumed run has `--init pissa` if, and only if, the earlier run had it.

    Args:
        config: the settings of the resumed run.
        earlier: the settings of the earlier run, by name; if `init` is missing, the run had its
            default.

    Raises:
        ConfigError: only one of the two runs has `init` pissa.
    """
    earlier_init = earlier.get("init", DEFAULT)
    if earlier_init != config.init and PISSA in {earlier_init, config.init}:
        raise ConfigError(
            f"resume: the checkpoint is of a run with --init {earlier_init}, and --init is "
            f"{config.init}; give --init {earlier_init}"
        )


def _axis(name: str) -> int:
    """Return the axis whose length is the rank: 0 (rows) in A, 1 (columns) in B."""
    return 0 if name.endswith(_DOWN) else 1


def _signed(name: str, value: Tensor) -> Tensor:
    """Return `value` if it is a factor A, else its negative: the sign of B subtracts the start."""
    return value if name.endswith(_DOWN) else -value


def _like(var: Var, values: Matrix) -> Tensor:
    """Return values as a tensor with the dtype and the device of a variable."""
    return tc.tensor(np.ascontiguousarray(values)).to(var.dtype).to(var.device)
