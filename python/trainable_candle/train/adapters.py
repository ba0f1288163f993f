"""The adapters of a run, on one or several components of a model, behind one interface."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.lora import start_from_rounding
from trainable_candle.settings.adapter import OFT_SIDES
from trainable_candle.settings.initial import DEFAULT, LOFTQ, PISSA
from trainable_candle.settings.machine import SAME
from trainable_candle.train.pissa import KeepStart, PissaStart

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from trainable_candle import AdapterFile, AdapterSet, Var
    from trainable_candle.settings import TrainConfig
    from trainable_candle.settings.adapter import Adapter
    from trainable_candle.train.callbacks import Callback


_UP: Final = ".lora_B.weight"
"""The end of the name of a factor B, in LoRA and in DoRA."""


class Adapters:
    """The adapters of each component; a component is `unet` or `text_encoder`, for example.

    Args:
        sets: the adapters by component, at least one.
        starts: with `--init pissa`, the start of each component's LoRA: the product of the initial
            factors, which the model subtracts.
    """

    def __init__(
        self, sets: Mapping[str, AdapterSet], starts: Mapping[str, PissaStart] | None = None
    ) -> None:
        self.sets = dict(sets)
        self._starts = dict(starts or {})

    def named_parameters(self) -> dict[str, Var]:
        """Return the trainable parameters by name.

        If there are several components, each name begins with the component's name and a dot.
        """
        if len(self.sets) == 1:
            return next(iter(self.sets.values())).named_parameters()
        return {
            f"{component}.{name}": var
            for component, adapter in self.sets.items()
            for name, var in adapter.named_parameters().items()
        }

    def groups(self, config: TrainConfig) -> list[tuple[list[Var], float]]:
        """Return groups of parameters, each with its learning rate.

        Text encoders have a learning rate of their own. `lora_plus_ratio` multiplies the rate of
        the factors B in every component (LoRA+, Hayou et al. 2024, arXiv:2402.12354).
        """
        # By default, text encoders train at a tenth of the rate. Prodigy finds one step size for
        # all groups, so with Prodigy they train at the same rate.
        divisor = 1 if config.finds_rate else 10
        text_rate = config.text_encoder_learning_rate or config.rate / divisor
        groups: dict[float, list[Var]] = {}
        for component, adapter in self.sets.items():
            rate = text_rate if component.startswith("text_encoder") else config.rate
            for name, var in adapter.named_parameters().items():
                ratio = config.lora_plus_ratio if name.endswith(_UP) else 1.0
                groups.setdefault(rate * ratio, []).append(var)
        return [(parameters, rate) for rate, parameters in groups.items()]

    def set_training(self, training: bool) -> None:
        """Switch to training (dropout on) or evaluation."""
        for adapter in self.sets.values():
            adapter.set_training(training)

    def set_enabled(self, enabled: bool) -> None:
        """Enable the adapters, or disable them: the model then computes exactly as without them."""
        for adapter in self.sets.values():
            adapter.set_enabled(enabled)
        for start in self._starts.values():
            start.set_enabled(enabled)

    def callbacks(self) -> list[Callback]:
        """Return the callbacks that write PiSSA's starts to checkpoints and read them."""
        return [KeepStart(start) for start in self._starts.values()]

    def finish(self) -> None:
        """After training, replace each LoRA that started with PiSSA by a LoRA for files.

        The new LoRA is the trained LoRA minus its start, so it fits the original weights.
        """
        self.sets |= {component: start.finish() for component, start in self._starts.items()}
        self._starts = {}

    def file(self, path: Path, config: Adapter, metadata: dict[str, str]) -> AdapterFile:
        """Return a copy of the adapters that can be written to one file.

        Args:
            path: the path of the file.
            config: the settings, with the format and precision of the file.
            metadata: the metadata for the file's header.

        Raises:
            ArgumentError: the format cannot represent these adapters.
        """
        # A PiSSA LoRA goes into the file as a LoRA on the original weights.
        plain_loras = {component: start.for_files() for component, start in self._starts.items()}
        return tc.prepare_adapters(
            path,
            list((self.sets | plain_loras).values()),
            format=config.format,
            metadata=metadata,
            dtype=config.adapter_precision,
        )

    def load(self, path: Path) -> None:
        """Load the parameters of a file with the same layers and ranks.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError, ShapeError: there is no such file, or
                its adapters differ.
        """
        for adapter in self.sets.values():
            adapter.load(path)

    @contextmanager
    def loaded(self, path: Path) -> Iterator[None]:
        """Return a context in which the adapters have the parameters of a file.

        After the context they have their own parameters again. For errors, see `load`.
        """
        parameters = self.named_parameters()
        own_values = tc.snapshot({name: var.detach() for name, var in parameters.items()})
        try:
            self.load(path)
            yield
        finally:
            for name, var in parameters.items():
                var.set(own_values[name].to(var.device))


def start_adapter(adapter: AdapterSet, family: Any, fresh: bool) -> dict[str, PissaStart]:
    """Initialise the adapters of a family's model by LoftQ or PiSSA, if the settings ask for it.

    Otherwise, the adapters keep the initial values from `add_adapter`. LoftQ loads the model a
    second time, without quantization, into host memory.

    Args:
        adapter: the newly attached adapters.
        family: a family of language models or image models.
        fresh: whether the run is new; a resumed run reads its values from a checkpoint.

    Returns:
        For PiSSA, the start by the name of the family's component; otherwise an empty dict.
    """
    config: TrainConfig = family.config
    if config.init == PISSA:
        start = PissaStart(family.model, adapter)
        if fresh:
            start.begin(config.seed)
        return {family.component: start}
    if config.init != LOFTQ or not fresh:
        return {}
    unquantized = replace(
        config, init=DEFAULT, base_precision=SAME, stream_blocks=0, stream_modulation=False
    )
    unquantized_model = type(family)(family.weights, family.dtype, "cpu", unquantized).model
    start_from_rounding(adapter, family.model, unquantized_model)
    return {}


def oft_side(config: TrainConfig, formats: Sequence[str]) -> str:
    """Return what OFT rotates: the "input" of layers, or their "output".

    By default, this is the side that readers of the adapter file's format expect.

    Args:
        config: the settings.
        formats: the file formats that have names for the model's layers, the default first.
    """
    input_side, output_side = OFT_SIDES
    expected = input_side if (config.format or formats[0]) == "peft" else output_side
    return config.oft_side or expected


def adapter_config(
    config: TrainConfig, targets: Sequence[str], formats: Sequence[str]
) -> tc.LoraConfig:
    """Return the adapters' configuration.

    Args:
        config: the settings.
        targets: the layers that get adapters if the settings name none.
        formats: as for `oft_side`.
    """
    return tc.LoraConfig(
        r=config.rank,
        lora_alpha=float(config.rank) if config.alpha is None else config.alpha,
        target_modules=config.target_modules or list(targets),
        exclude_modules=config.exclude_modules,
        lora_dropout=config.lora_dropout,
        adapter=config.adapter,
        use_rslora=config.rslora,
        # DoRA's weight decomposition: a magnitude for each output, or for each input.
        wd_on_output=config.dora_axis == "output",
        oft_block_size=config.oft_block_size,
        oft_side=oft_side(config, formats),
        qat=config.qat,
        qat_activations=config.qat_activations,
        qat_learned_scales=config.qat_learned_scales,
        dtype="bf16" if config.stochastic_rounding else "f32",
    )
