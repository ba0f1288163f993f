"""Settings of language models: their training on texts, and the texts of previews.

The short help omits a `rare` setting. A run that resumes may change a `free` one. With `above`, the
bound `low` is excluded. A `Condition` names settings, the condition without which they have no
effect, and the flags that fulfil it (or a whole message, `complaint`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from trainable_candle.settings import sections
from trainable_candle.settings.setting import Condition, Group, Setting

TRAIN_ON: Final = ("answers", "last-answer", "all")
"""The tokens in the loss: those of all answers, those of each example's last answer, or all."""
OBJECTIVES: Final = ("sft", "dpo")
"""The goals of training on texts: to reproduce the texts, or to prefer the better answer of two."""


def _dpo_contradiction(config: Any) -> str | None:
    """Return why `initial_adapter` contradicts the objective dpo; None if it does not."""
    if config.objective == "dpo" and config.initial_adapter:
        return (
            "objective dpo compares the trained model with the model without adapters, so "
            "initial_adapter would count as learnt; merge initial_adapter into the weights first"
        )
    return None


@dataclass(frozen=True)
class Texts(Group):
    """How texts are packed into rows of tokens, and what is learnt from them."""

    section: ClassVar[str] = sections.TEXTS
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(("dpo_beta",), lambda c: c.objective == "dpo", "--objective dpo"),
        Condition(("train_on",), lambda c: c.objective == "sft", "--objective sft"),
        # A setting of another group, whose meaning depends on the objective.
        Condition(
            ("lora_dropout",),
            lambda c: c.objective == "sft",
            complaint=(
                "--lora-dropout: --objective dpo compares the model with the base, and dropout "
                "would change only one of them; leave --lora-dropout out"
            ),
        ),
    )
    contradictions: ClassVar = (_dpo_contradiction,)

    objective: Annotated[
        str,
        Setting(
            "sft: learn the answers; dpo: prefer the better of two answers",
            choices=OBJECTIVES,
            rare=True,
        ),
    ] = "sft"
    dpo_beta: Annotated[
        float,
        Setting(
            "beta of DPO's loss; larger values keep the model nearer to the base",
            low=0,
            above=True,
            rare=True,
            synonyms=("beta",),
        ),
    ] = 0.1

    sequence_length: Annotated[
        int | None,
        Setting(
            "tokens per row (default: 2048, or less if the model requires it)",
            low=2,
            rare=True,
            synonyms=("max-length", "max-seq-length", "cutoff-len", "sequence-len"),
        ),
    ] = None
    train_on: Annotated[
        str, Setting("which tokens count in the loss", choices=TRAIN_ON, rare=True)
    ] = "answers"


@dataclass(frozen=True)
class Writing(Group):
    """How texts are written in previews."""

    section: ClassVar[str] = sections.VALIDATION
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("sample_tokens", "sample_temperature"),
            lambda c: bool(c.sample_prompts),
            "--sample-prompts",
        ),
    )

    sample_tokens: Annotated[
        int, Setting("largest number of tokens of a preview", low=1, rare=True, free=True)
    ] = 128
    sample_temperature: Annotated[
        float,
        Setting(
            "temperature of previews; 0: always the likeliest token", low=0, rare=True, free=True
        ),
    ] = 0.0
