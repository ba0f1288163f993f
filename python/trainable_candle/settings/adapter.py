"""Settings of the adapters: their kind, layers and files; also the layer of CLIP to read.

In a `Setting`, `rare` keeps the setting out of the short help, `free` lets a resumed run change it,
`above` excludes the bound `low` itself, and `below` is an upper bound that is excluded. A
`Condition` has names of settings, when they have an effect, and the flags that give them an effect,
for the message if they have none; `complaint` replaces this whole message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from trainable_candle._core import choices
from trainable_candle.errors import MissingFileError
from trainable_candle.outputs import adapter_in
from trainable_candle.settings import sections
from trainable_candle.settings.initial import DEFAULT as DEFAULT_INIT
from trainable_candle.settings.initial import INITS, contradiction
from trainable_candle.settings.machine import EIGHT_BITS, PRECISION_SPELLINGS, PRECISIONS
from trainable_candle.settings.setting import Condition, Group, Setting

ADAPTERS: Final = tuple(choices()["adapter"])
FORMATS: Final = tuple(choices()["format"])
"""The formats of adapter files."""
GRIDS: Final = tuple(choices()["qat"])
"""The formats that quantization-aware training rounds weights to."""
DORA_AXES: Final = ("output", "input")
"""DoRA has a magnitude for each output feature, as in peft, or for each input feature."""
OFT: Final = "oft"
OFT_SIDES: Final = ("input", "output")
"""OFT rotates the inputs of layers, as in peft, or their outputs, as in LyCORIS and ComfyUI."""


@dataclass(frozen=True)
class Adapter(Group):
    """The adapters on the trained model, and the files that hold them."""

    section: ClassVar[str] = sections.ADAPTER
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(("dora_axis",), lambda c: c.adapter == "dora", "--adapter dora"),
        Condition(("oft_block_size", "oft_side"), lambda c: c.adapter == OFT, "--adapter oft"),
        Condition(
            ("rslora", "lora_dropout"),
            lambda c: c.adapter != OFT,
            "a low-rank adapter, such as lora (oft adds no low-rank product)",
        ),
        Condition(
            ("rank", "alpha"),
            lambda c: c.adapter != OFT,
            complaint=(
                "--rank and --alpha have no effect on --adapter oft: give --oft-block-size instead"
            ),
        ),
        Condition(("qat_activations",), lambda c: c.qat in EIGHT_BITS, "--qat int8 or fp8"),
    )
    contradictions: ClassVar = (contradiction,)

    adapter: Annotated[
        str, Setting("kind of adapter", choices=ADAPTERS, synonyms=("network.type",))
    ] = "lora"
    rank: Annotated[
        int,
        Setting(
            "rank of the adapter",
            low=1,
            synonyms=("network-dim", "lora-rank", "dim", "r", "network.linear"),
        ),
    ] = 16
    alpha: Annotated[
        float | None,
        Setting(
            "the adapter is scaled by alpha / rank (default: rank; language models: 2 x rank)",
            rare=True,
            low=0,
            above=True,
            synonyms=("network-alpha", "lora-alpha", "network.linear-alpha"),
        ),
    ] = None
    target_modules: Annotated[
        list[str], Setting("layers to adapt, comma-separated (default: model's)", rare=True)
    ] = field(default_factory=list)
    exclude_modules: Annotated[
        list[str], Setting("layers not to adapt, comma-separated", rare=True)
    ] = field(default_factory=list)
    rslora: Annotated[
        bool, Setting("scale by alpha / sqrt(rank) instead of alpha / rank", rare=True)
    ] = False
    dora_axis: Annotated[
        str,
        Setting(
            "one magnitude per output or per input; A1111 reads only input",
            choices=DORA_AXES,
            rare=True,
        ),
    ] = DORA_AXES[0]
    oft_block_size: Annotated[
        int,
        Setting(
            "size of the blocks that oft rotates; a layer uses the nearest divisor of its size",
            low=2,
            rare=True,
        ),
    ] = 32
    oft_side: Annotated[
        str | None,
        Setting(
            "rotate inputs (peft) or outputs (ComfyUI) of layers (default: --format's)",
            choices=OFT_SIDES,
            rare=True,
        ),
    ] = None
    lora_dropout: Annotated[
        float, Setting("dropout on the adapter's input", low=0, below=1, rare=True)
    ] = 0.0
    qat: Annotated[
        str | None,
        Setting(
            "train for quantization: round adapted weights to this format",
            choices=GRIDS,
            rare=True,
        ),
    ] = None
    qat_activations: Annotated[
        bool,
        Setting(
            "with --qat int8 or fp8: also round the inputs of adapted layers, for servers that do",
            rare=True,
        ),
    ] = False
    init: Annotated[
        str,
        Setting(
            "initial LoRA values; loftq: offset the error of --base-precision; pissa: the weights' "
            "largest singular values",
            choices=INITS,
            rare=True,
        ),
    ] = DEFAULT_INIT
    initial_adapter: Annotated[
        str | None,
        Setting(
            "adapter file to start from, of the same kind and ranks",
            rare=True,
            synonyms=("network-weights", "lora-model-name"),
            path=True,
        ),
    ] = None
    format: Annotated[
        str | None,
        Setting(
            "how adapter files name their tensors (default: model's)",
            choices=FORMATS,
            rare=True,
            free=True,
        ),
    ] = None
    adapter_precision: Annotated[
        str,
        Setting(
            "dtype of the adapter files",
            choices=PRECISIONS,
            rare=True,
            free=True,
            synonyms=("save-precision", "output-dtype", "save.dtype"),
            spellings=PRECISION_SPELLINGS,
        ),
    ] = "f32"

    @property
    def initial_adapter_path(self) -> Path:
        """The adapter that `initial_adapter` names, as `adapter_in` finds it.

        Raises:
            MissingFileError: the path is a folder that has no finished adapter and is not in peft's
                format.
        """
        try:
            return adapter_in(Path(self.initial_adapter or "").expanduser())
        except MissingFileError as error:
            raise MissingFileError(f"--initial-adapter: {error}") from None


def _scales_contradiction(config: Any) -> str | None:
    """Return why `qat_learned_scales` contradicts `qat`; None if it does not."""
    if config.qat_learned_scales and config.qat == "int4":
        return (
            "--qat-learned-scales needs a format that merge --to can write, and merge cannot write "
            "int4"
        )
    return None


@dataclass(frozen=True)
class LearnedScales(Group):
    """What quantization-aware training learns besides the adapters."""

    section: ClassVar[str] = sections.ADAPTER
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(("qat_learned_scales",), lambda c: c.qat is not None, "--qat"),
    )
    contradictions: ClassVar = (_scales_contradiction,)

    qat_learned_scales: Annotated[
        bool, Setting("with --qat: also learn the scales that merge --to uses", rare=True)
    ] = False


@dataclass(frozen=True)
class TrainingAdapters(Group):
    """The fixed adapter that is applied to a distilled model in training, and not afterwards."""

    section: ClassVar[str] = sections.ADAPTER

    training_adapter: Annotated[
        str | None,
        Setting(
            "file of an adapter for a distilled model, applied only in training",
            rare=True,
            synonyms=("assistant-lora-path", "assistant-adapter", "model.assistant-lora-path"),
            path=True,
        ),
    ] = None

    @property
    def training_adapter_path(self) -> Path:
        """The file that `training_adapter` names; only for runs that have this setting."""
        return Path(self.training_adapter or "").expanduser()


@dataclass(frozen=True)
class TextEncoders(Group):
    """Adapters on text encoders."""

    section: ClassVar[str] = sections.ADAPTER
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("text_encoder_learning_rate",),
            lambda c: c.train_text_encoder,
            "--train-text-encoder",
        ),
    )

    train_text_encoder: Annotated[
        bool,
        Setting(
            "train adapters on the text encoders, too",
            rare=True,
            synonyms=(
                "text-encoder.train",
                "train.train-text-encoder",
            ),
        ),
    ] = False
    text_encoder_learning_rate: Annotated[
        float | None,
        Setting(
            "learning rate of text encoders (default: --learning-rate / 10; prodigy: the same)",
            low=0,
            above=True,
            rare=True,
            section=sections.TRAINING,
            synonyms=("text-encoder-lr", "text-encoder.learning-rate"),
        ),
    ] = None


@dataclass(frozen=True)
class ClipSkip(Group):
    """The layer of CLIP text encoders whose output conditions the model."""

    section: ClassVar[str] = sections.OBJECTIVE

    clip_skip: Annotated[
        int | None,
        Setting(
            "text encoder layers to leave out besides the last (default: model's)",
            low=0,
            rare=True,
        ),
    ] = None
