"""Settings of the device, the precision and the memory of a run.

In a `Setting`, `rare` leaves the setting out of the short help, `free` lets a resumed run change
it, `above` excludes `low` itself, `bare` is the value of a flag without a value, and `synonyms` and
`spellings` are other tools' names of the setting and of its values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, TypedDict

from trainable_candle.placement import AUTO
from trainable_candle.settings import sections
from trainable_candle.settings.setting import Condition, Group, Setting

PRECISIONS: Final = ("f32", "bf16", "f16")
PRECISION_SPELLINGS: Final = {
    "fp32": "f32",
    "float32": "f32",
    "float": "f32",
    "no": "f32",
    "fp16": "f16",
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
    "float_32": "f32",
    "float_16": "f16",
    "bfloat_16": "bf16",
}
"""Maps other tools' names of precisions, in lower case, to the names here; "no" is accelerate's."""
SAME: Final = "same"
"""The value of a precision setting that leaves weights in the dtype of computation, unquantized."""
STORED: Final = "stored"
"""The value of a precision setting that leaves weights in the format of their file."""
FORMATS: Final = ("int8", "fp8", "nf4")
"""The formats to which the weights of linear layers may be quantized."""
EIGHT_BITS: Final = ("int8", "fp8")
"""The formats with 8-bit codes, which a matrix product can multiply without dequantizing them."""
HOST: Final = "host"
"""The value of `stream_from` and of `optimizer_states` that means host memory."""
PEERS: Final = "peers"
"""The value of `stream_from` that means slices on all GPUs of the machine."""
DEVICE: Final = "device"
"""The value of `optimizer_states` that means the memory of the device."""
CHECKPOINTING: Final = ("none", "full", "selective", "offload")
"""The kinds of checkpointing: keep all activations; keep only the inputs of blocks; keep also what
is expensive to recompute; keep the inputs of blocks in host memory."""


class Streaming(TypedDict):
    """The arguments of `from_pretrained` for streamed weights."""

    stream_blocks: int
    stream_modulation: bool


@dataclass(frozen=True)
class Machine(Group):
    """Device, precision, memory."""

    section: ClassVar[str] = sections.MACHINE
    # Each condition has the names of settings, a function that says whether they have an effect in
    # a configuration `c`, and the flags that the error names if they have no effect.
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("cuda_graphs", "stream_blocks", "stream_modulation", "stream_from"),
            lambda c: c.on_gpu,
            "--device cuda",
        ),
        Condition(
            ("checkpoint_blocks",),
            lambda c: c.recomputes_all,
            "--gradient-checkpointing full or offload",
        ),
        Condition(
            ("stream_from",),
            # None is undecided: the run's plan, which it chooses to fit into memory, may stream.
            lambda c: c.stream_blocks != 0 or c.stream_modulation is not False,
            "--stream-blocks or --stream-modulation",
        ),
        Condition(
            ("optimizer_states",),
            lambda c: c.on_gpu or not c.wants_host_states,
            "--device cuda (on the CPU, the states are in host memory anyway)",
        ),
        Condition(
            ("w8a8",),
            lambda c: c.base_precision in EIGHT_BITS,
            "--base-precision int8 or fp8",
        ),
    )

    device: Annotated[str, Setting("auto, cpu, cuda or cuda:N")] = AUTO
    precision: Annotated[
        str,
        Setting(
            "dtype of computation; auto: bf16 on a GPU",
            choices=(AUTO, *PRECISIONS),
            synonyms=("mixed-precision", "train-dtype", "dtype", "train.dtype"),
            spellings=PRECISION_SPELLINGS,
        ),
    ] = AUTO
    vram: Annotated[
        float | None,
        Setting(
            "memory limit, GiB (default: all free memory)",
            low=0,
            above=True,
            free=True,
            synonyms=("memory-limit",),
        ),
    ] = None
    base_precision: Annotated[
        str,
        Setting(
            "format of the frozen model's linear layers",
            choices=(AUTO, SAME, *FORMATS),
            rare=True,
        ),
    ] = AUTO
    w8a8: Annotated[
        bool,
        Setting(
            "with an 8-bit base: round activations and gradients to 8 bits, and multiply the codes",
            rare=True,
        ),
    ] = False
    gradient_checkpointing: Annotated[
        str,
        Setting(
            "which activations to recompute; offload: full, with inputs of blocks in host memory",
            choices=(AUTO, *CHECKPOINTING),
            free=True,
            bare="full",
            spellings={
                "on": "full",
                "true": "full",
                "off": "none",
                "false": "none",
                "cpu_offloaded": "offload",
            },
            synonyms=("train.gradient-checkpointing",),
        ),
    ] = AUTO
    checkpoint_blocks: Annotated[
        int | None,
        Setting(
            "how many of the model's first blocks full or offload checkpointing recomputes; the "
            "others get selective (default: all blocks, or as memory requires)",
            low=1,
            rare=True,
            free=True,
        ),
    ] = None
    stream_blocks: Annotated[
        int | None,
        Setting(
            "how many of the model's blocks stay in host memory and are copied before their "
            "use (default: as memory requires)",
            low=0,
            rare=True,
            free=True,
            synonyms=("blocks-to-swap",),
        ),
    ] = None
    stream_modulation: Annotated[
        bool | None,
        Setting(
            "keep all modulation weights in host memory (default: if memory requires it)",
            rare=True,
            free=True,
        ),
    ] = None
    stream_from: Annotated[
        str,
        Setting(
            "where streamed weights are: in host memory, or in slices on all GPUs of the machine",
            choices=(HOST, PEERS),
            rare=True,
            free=True,
        ),
    ] = HOST
    optimizer_states: Annotated[
        str,
        Setting(
            "where the optimizer's states are: in GPU memory, or in pinned host memory, which "
            "steps read and write over the bus",
            choices=(AUTO, DEVICE, HOST),
            rare=True,
            free=True,
        ),
    ] = AUTO
    cuda_graphs: Annotated[
        int,
        Setting(
            "how many batch shapes to record as CUDA graphs; 0: none", low=0, rare=True, free=True
        ),
    ] = 16
    threads: Annotated[
        int | None, Setting("CPU threads (default: all)", low=1, rare=True, free=True)
    ] = None

    @property
    def base_format(self) -> str | None:
        """The format to which the base is quantized; None if it is not quantized."""
        return self.base_precision if self.base_precision in FORMATS else None

    @property
    def checkpointing(self) -> str:
        """The kind of checkpointing; `none` while `auto` is not resolved."""
        return "none" if self.gradient_checkpointing == AUTO else self.gradient_checkpointing

    @property
    def recomputes_all(self) -> bool:
        """Whether checkpointing keeps only the inputs of the blocks that it recomputes."""
        return self.checkpointing in {"full", "offload"}

    @property
    def streaming(self) -> Streaming:
        """Which weights to stream; none while the settings are not resolved."""
        return {
            "stream_blocks": self.stream_blocks or 0,
            "stream_modulation": bool(self.stream_modulation),
        }

    @property
    def streams(self) -> bool:
        """Whether any weights are streamed; False while the settings are not resolved."""
        return any(self.streaming.values())

    @property
    def wants_host_states(self) -> bool:
        """Whether the settings ask for the optimizer's states in host memory."""
        return self.optimizer_states == HOST

    @property
    def states_on_host(self) -> bool:
        """Whether the optimizer's states are in host memory while the adapter is on a GPU."""
        return self.on_gpu and self.wants_host_states

    @property
    def from_peers(self) -> bool:
        """Whether streamed weights are kept in slices on all GPUs of the machine."""
        return self.stream_from == PEERS

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU; False while `auto` is not resolved."""
        return self.device.partition(":")[0] not in {AUTO, "cpu"}
