"""Lists the values from which a plan chooses settings, so that a run fits into memory.

The open settings are those that the user leaves to the plan.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.settings.initial import PISSA
from trainable_candle.settings.machine import DEVICE, HOST, SAME, STORED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.speed import Work

# Names of settings that a plan may choose.
PRECISION: Final = "base_precision"
CHECKPOINTING: Final = "gradient_checkpointing"
TEXTS: Final = "text_encoder_precision"
BLOCKS: Final = "stream_blocks"
MODULATION: Final = "stream_modulation"
STATES: Final = "optimizer_states"

_FORMATS: Final = (SAME, "int8", "nf4")
"""The values that a plan tries for `base_precision` and for `text_encoder_precision`.

SAME leaves the weights unquantized.
"""
_POLICIES: Final = ("none", "selective", "full", "offload")
"""The values that a plan tries for `gradient_checkpointing`."""
_SHARES: Final = 8
"""The number of streamed blocks is planned in eighths of all blocks."""


def text_formats(work: Work | None) -> list[str]:
    """Return the precisions of text encoders, in the order in which a plan tries them.

    STORED keeps the formats of the encoders' files, which rounds no layer again. So it comes before
    the formats that quantize the encoders anew.
    """
    stored = [STORED] if work is not None and work.texts_have_format else []
    return [SAME, *stored, *(form for form in _FORMATS if form != SAME)]


def ladders(
    config: TrainConfig, names: Sequence[str], work: Work | None
) -> list[list[dict[str, Any]]]:
    """Return choices for the open settings, as lists ("ladders").

    There is a list for each combination of the states' memory, the checkpointing policy and the
    base's format. From item to item of a list, more weights are streamed; the first streams none.
    Each choice has values for five settings, open or not; the caller uses only those of the open
    settings.

    Args:
        config: the settings.
        names: the names of the open settings.
        work: the arithmetic and transfers of a micro-batch. If it is None, nothing is quantized or
            streamed.
    """
    formats = [SAME]
    # Pairs of values for `stream_modulation` and `stream_blocks`; None streams nothing.
    streams: list[tuple[bool | None, int | None]] = [(None, None)]
    # PiSSA decomposes unrounded weights in the device's memory: no rounding and no streaming.
    pissa = config.init == PISSA
    if work is not None and work.can_be_quantized and PRECISION in names and not pissa:
        # Quantization-aware training needs an unrounded base or a base in the format of `qat`.
        known = dict.fromkeys([*_FORMATS, work.stored_format or SAME])
        formats = [form for form in known if config.qat in {None, form} or form == SAME]
    if work is not None and config.on_gpu and not pissa:
        modulation = True if work.has_modulation and MODULATION in names else None
        shares = range(1, _SHARES + 1) if BLOCKS in names and work.blocks else ()
        counts = sorted({max(1, work.blocks * share // _SHARES) for share in shares})
        streams += [(modulation, None)] if modulation else []
        streams += [(modulation, count) for count in counts]
    policies = _POLICIES if CHECKPOINTING in names else (_POLICIES[0],)
    # Where the optimizer's states are.
    places = (DEVICE, HOST) if STATES in names else (DEVICE,)
    return [
        [
            {
                STATES: place,
                CHECKPOINTING: policy,
                PRECISION: base,
                MODULATION: modulation,
                BLOCKS: blocks,
            }
            for modulation, blocks in streams
        ]
        for place, policy, base in product(places, policies, formats)
    ]
