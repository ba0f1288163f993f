"""`Work` of models without blocks that can be checkpointed, streamed or quantized."""

from trainable_candle.tasks.speed import Work


def work_without_blocks(*, layers: float, attention: float, kept: float) -> Work:
    """Return a `Work` with these three fields; its other fields are zero or False.

    Args:
        layers: floating-point operations of the frozen layers in a forward pass.
        attention: floating-point operations of attention in a forward pass.
        kept: bytes that the tape keeps.
    """
    return Work(
        layers=layers,
        attention=attention,
        kept=kept,
        recomputed=0,
        decoded=0,
        streamed=0,
        modulation=0,
        offloaded=0,
        states=0,
        blocks=0,
        has_modulation=False,
        can_be_quantized=False,
    )
