"""Settings of validation and previews during training.

The short help omits a `rare` setting. A run that resumes may change a `free` one. A tokenizer reads
the value of a `tokenized` one. The items of a list with `texts` may contain commas. A `Condition`
names settings, the condition without which they have no effect, and the flags that fulfil it (or a
whole message, `complaint`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final

from trainable_candle.settings import sections
from trainable_candle.settings.setting import Condition, Group, Setting

SAMPLERS: Final = ("euler", "dpmpp_2m")


def _needs_prompts(*names: str) -> Condition:
    """Return the condition for settings that have no effect without prompts."""
    return Condition(names, lambda c: bool(c.sample_prompts), "--sample-prompts")


def _two_validations(config: Any) -> str | None:
    """Return why the data for validation are given twice; None if they are not."""
    if config.validation_dataset and config.validation_split:
        return (
            "validation_dataset and validation_split are both given; "
            "give only one: a folder or file, or a share of the dataset"
        )
    return None


@dataclass(frozen=True)
class Validation(Group):
    """The data for validation, and how often the validation loss is computed."""

    section: ClassVar[str] = sections.VALIDATION
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("validate_every", "early_stop"),
            lambda c: bool(c.validation_dataset or c.validation_split),
            "--validation-split or --validation-dataset",
        ),
    )
    contradictions: ClassVar = (_two_validations,)

    validation_dataset: Annotated[
        str | None, Setting("folder or file to validate on", rare=True, path=True)
    ] = None
    validation_split: Annotated[
        float, Setting("share of the dataset to validate on", low=0, below=1, rare=True)
    ] = 0.0
    validate_every: Annotated[
        int, Setting("steps between validations", low=1, rare=True, free=True)
    ] = 100
    early_stop: Annotated[
        int | None,
        Setting(
            "end the run after this many validations in a row without a lower loss",
            low=1,
            rare=True,
            free=True,
            synonyms=("early-stopping-patience", "early-stopping"),
        ),
    ] = None


@dataclass(frozen=True)
class Previews(Group):
    """The prompts of previews, and how often previews are drawn."""

    section: ClassVar[str] = sections.VALIDATION
    conditions: ClassVar[tuple[Condition, ...]] = (
        _needs_prompts("sample_every", "sample_every_epochs", "sample_seed"),
        Condition(
            ("sample_every",),
            lambda c: c.sample_every_epochs is None,
            complaint=(
                "--sample-every and --sample-every-epochs both say when to draw; give one of the "
                "two"
            ),
        ),
    )

    sample_prompts: Annotated[
        list[str],
        Setting(
            "prompts of previews, or a .txt file of prompts",
            texts=True,
            tokenized=True,
            free=True,
            synonyms=("sample.prompts",),
        ),
    ] = field(default_factory=list)
    sample_every: Annotated[
        int,
        Setting(
            "steps between previews",
            low=1,
            rare=True,
            free=True,
            synonyms=("sample-every-n-steps", "sample.sample-every"),
        ),
    ] = 250
    sample_every_epochs: Annotated[
        int | None,
        Setting(
            "epochs between previews, instead of --sample-every",
            low=1,
            rare=True,
            free=True,
            synonyms=("sample-every-n-epochs",),
        ),
    ] = None
    sample_seed: Annotated[
        int,
        Setting(
            "seed of the previews",
            low=0,
            below=2**64,
            rare=True,
            free=True,
            synonyms=("sample.seed",),
        ),
    ] = 0


@dataclass(frozen=True)
class Denoising(Group):
    """The number of sampling steps of a preview.

    It is not in `Drawing`, because the demo's family has this setting, but not those.
    """

    section: ClassVar[str] = sections.VALIDATION
    conditions: ClassVar[tuple[Condition, ...]] = (_needs_prompts("sample_steps"),)

    sample_steps: Annotated[
        int | None,
        Setting(
            "sampling steps per preview (default: model's)",
            low=1,
            rare=True,
            free=True,
            synonyms=("sample.sample-steps",),
        ),
    ] = None


@dataclass(frozen=True)
class Drawing(Group):
    """How previews of image models are drawn from prompts."""

    section: ClassVar[str] = sections.VALIDATION
    conditions: ClassVar[tuple[Condition, ...]] = (
        _needs_prompts("sample_size", "sampler", "guidance", "negative_prompt"),
        Condition(("negative_prompt",), lambda c: c.guidance != 1, "--guidance other than 1"),
    )

    negative_prompt: Annotated[
        str,
        Setting(
            "prompt that guidance leads away from",
            rare=True,
            tokenized=True,
            free=True,
            synonyms=("sample.neg",),
        ),
    ] = ""
    guidance: Annotated[
        float | None,
        Setting(
            "guidance scale of previews (default: model's)",
            low=0,
            rare=True,
            free=True,
            synonyms=("sample.guidance-scale",),
        ),
    ] = None
    sampler: Annotated[
        str | None,
        Setting("sampler of previews (default: model's)", choices=SAMPLERS, rare=True, free=True),
    ] = None
    sample_size: Annotated[
        str | None,
        Setting("size of previews, WIDTHxHEIGHT (default: resolution)", rare=True, free=True),
    ] = None
