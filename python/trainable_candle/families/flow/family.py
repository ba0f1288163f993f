"""The base class of the families of flow models: noise levels, token counts and checks."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from trainable_candle.errors import ConfigError
from trainable_candle.families.pipeline import PipelineFamily
from trainable_candle.families.pipeline.family import Encoders
from trainable_candle.settings import IMAGE_GROUPS
from trainable_candle.settings.adapter import ClipSkip, TextEncoders
from trainable_candle.settings.objective import DistilledGuidance, NoisePrediction
from trainable_candle.tasks.latent.drawing import DrawingDefaults
from trainable_candle.tasks.latent.objectives import FlowObjective, FlowSampler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainable_candle.data import Dataset
    from trainable_candle.families.flow.schedule import FlowSchedule
    from trainable_candle.settings import Group

E = TypeVar("E", bound=Encoders)


class Features(NamedTuple):
    """The numbers of features of a text, or of each of its tokens."""

    produced: int
    """The number of features that the text encoder produces."""
    read: int
    """The number of features that the transformer reads."""


class FlowFamily(PipelineFamily[E]):
    """A family whose transformer predicts the velocity, noise minus latents.

    Each image token of the transformer is a square of `patch` by `patch` latent pixels.
    """

    # A family whose transformer takes a guidance scale as an input adds `DistilledGuidance`.
    groups: ClassVar[tuple[type[Group], ...]] = tuple(
        group
        for group in IMAGE_GROUPS
        if group not in {NoisePrediction, TextEncoders, ClipSkip, DistilledGuidance}
    )
    component: ClassVar[str] = "transformer"
    # The first format is the default. It has diffusers' names, and the scale is multiplied into the
    # factors: both ComfyUI and diffusers read such files.
    formats: ClassVar[tuple[str, ...]] = ("diffusers", "comfyui", "kohya", "peft")
    timesteps: ClassVar[str] = "logit_normal"
    """The default distribution of noise levels in training."""
    schedule: ClassVar[FlowSchedule]
    """The noise levels of sampling for weights without a scheduler's configuration."""
    patch: ClassVar[int] = 2
    """The side of an image token, in latent pixels."""
    packs: ClassVar[bool] = True
    """Whether the transformer's `in_channels` counts the channels of an image token; otherwise it
    counts those of a latent pixel."""
    scaling: ClassVar[float | None] = None
    """The `scaling_factor` that the autoencoder must have; None: any, or none."""
    overflows: ClassVar[bool] = False
    """Whether the published model computes values that are too large for f16."""
    goes_with: ClassVar[str]
    """The clause for messages that names the text encoders: "Z-Image goes with Qwen3 4B"."""
    distilled: ClassVar[DrawingDefaults] = DrawingDefaults(steps=4, guidance=1.0)
    """How images are drawn by default with a model that was distilled to a few steps."""
    held_tensors: ClassVar[int] = 12
    """The most tensors, of `width` values for each token, that a block holds without a tape."""

    @cached_property
    def found_schedule(self) -> FlowSchedule:
        """The noise levels of sampling: those of the pipeline's scheduler, or else `schedule`.

        Raises:
            ConfigError: the scheduler's configuration is damaged, or a value in it is wrong.
        """
        return type(self.schedule).of(self.weights, self.schedule)

    @property
    def training_shift(self) -> float:
        """The default shift of noise levels in training.

        It is 1, no shift, if the shift in sampling depends on the size of the image: training uses
        such a shift only with `--resolution-shift`.
        """
        return 1.0 if self.found_schedule.grows else self.found_schedule.shift

    @property
    def multiple(self) -> int:
        """The side of an image token, in pixels of the image."""
        return self.facts.factor * self.patch

    def dataset(self, folder: str) -> Dataset:
        """Return the checked images; `--bucket-step` must be a multiple of an image token's side.

        Raises:
            DatasetError, ConfigError: images or captions cannot be used, or `--bucket-step` is not
                such a multiple.
        """
        images = super().dataset(folder)
        step = images.options.bucket_step
        if step % self.multiple:
            raise ConfigError(
                f"--bucket-step is {step} px, expected a multiple of {self.multiple}, "
                f"the side of a token of {self.name}"
            )
        return images

    @property
    @abstractmethod
    def text_features(self) -> Mapping[str, Features]:
        """The features of each text encoder's texts, by the encoder's name in messages."""

    def require_own(self) -> None:
        """Check that the weights are of this family, and that the parts fit together.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the weights are missing, damaged, or
                of another model; or the autoencoder or a text encoder is of another model.
        """
        super().require_own()
        facts = self.facts
        channels, channels_read = facts.latent_channels, facts.config["in_channels"]
        if self.packs:  # `in_channels` is that of an image token of patch * patch latent pixels
            channels_read //= self.patch**2
        if channels != channels_read:
            raise ConfigError(
                f"vae: the latents of {facts.parts['vae'].path} have {channels} channels, but the "
                f"transformer reads {channels_read}; give the autoencoder of the same model"
            )
        scale = facts.parts["vae"].config.get("scaling_factor")
        if self.scaling is not None and scale != self.scaling:
            scales = "does not scale latents" if scale is None else f"scales latents by {scale}"
            raise ConfigError(
                f"vae: {facts.parts['vae'].path} {scales}, expected {self.scaling}; give the "
                "autoencoder of the same model"
            )
        for part, features in self.text_features.items():
            if features.produced != features.read:
                raise ConfigError(
                    f"{part}: it makes {features.produced} features, but the transformer reads "
                    f"{features.read}; {self.goes_with}"
                )

    def check(self) -> None:
        """Check the parts, as `require_own` does.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: as `require_own`.
        """
        self.require_own()

    @property
    def is_distilled(self) -> bool:
        """Whether the model was distilled to a few steps."""
        return self.distillation is not None

    @property
    def drawing_defaults(self) -> DrawingDefaults:
        """How images are drawn by default: distilled models take few steps and no guidance."""
        return self.distilled if self.is_distilled else self.drawing

    @property
    def distillation(self) -> str | None:
        """A note that training undoes the model's distillation, and what to train instead.

        None for models that are not distilled. Families with distilled models override this.
        """
        return None

    def notes(self) -> list[str]:
        """Return notes about what may spoil a run.

        They are: training undoes a distillation, `--training-adapter` is given for a model that is
        not distilled, and values leave the range of f16.
        """
        notes, distillation = [], self.distillation
        if distillation and self.config.training_adapter is None:
            notes.append(f"{distillation}, or give a --training-adapter")
        if not distillation and self.config.training_adapter:
            name = self.shown_name
            notes.append(f"--training-adapter is for distilled models; is {name} distilled?")
        if self.overflows and self.dtype == "f16":
            notes.append(f"values of {self.name} leave the range of f16; give --precision bf16")
        return notes

    def objective(self, device: str) -> FlowObjective:  # noqa: ARG002
        """Return flow matching: the transformer learns the velocity, noise minus latents.

        Raises:
            ConfigError, ArgumentError: a setting is outside its range, or the scheduler's
                configuration is wrong.
        """
        shift_of = self._shift_of_latents if self.config.resolution_shift else None
        return FlowObjective(
            self.config, timesteps=self.timesteps, shift=shift_of or self.training_shift
        )

    def _shift_of_latents(self, size: tuple[int, int]) -> float:
        """Return the shift in training for an image whose latents have this (height, width)."""
        # `coder.factor` is the number of image pixels per latent pixel, along each side. Unlike
        # `facts.factor`, it counts latents as the coder returns them, which may be packed.
        height, width = (side * self.coder.factor for side in size)
        return self.found_schedule.in_training(self.tokens_of((width, height)))

    def stepper(self, steps: int, sampler: str | None, size: tuple[int, int]) -> FlowSampler:
        """Return Euler's method with `steps` steps for images of `size`, (width, height) in pixels.

        Raises:
            ConfigError: the sampler is not Euler, or the scheduler's configuration is wrong.
            ArgumentError: `steps` is below 1.
        """
        if sampler not in {None, "euler"}:
            raise ConfigError(
                f"--sampler is {sampler}, expected euler: {self.name} is a flow model"
            )
        return FlowSampler(self.found_schedule.levels(steps, self.tokens_of(size)))

    def tokens_of(self, size: tuple[int, int]) -> int:
        """Return the number of tokens of an image of (width, height), in pixels."""
        return (size[0] // self.multiple) * (size[1] // self.multiple)

    @property
    def width(self) -> int:
        """The number of features of a token in the transformer."""
        config = self.facts.config
        return int(config["num_attention_heads"] * config["attention_head_dim"])

    def predicting_values(self, latents: int) -> int:
        """Return the most values that predicting `latents` latent pixels holds without a tape."""
        return self.held_tensors * self.width * (latents // self.patch**2 + self.text_tokens)
