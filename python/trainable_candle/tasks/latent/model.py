"""What the task needs to know of a latent model: its parts, its text, its presets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from trainable_candle._core import verify_adapter
from trainable_candle.errors import ConfigError
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.initial_adapter import check_initial_adapter
from trainable_candle.tasks.latent.data import load_images
from trainable_candle.train.adapters import adapter_config

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from trainable_candle import LoraConfig, Tensor
    from trainable_candle.data import Dataset
    from trainable_candle.data.buckets import Frame
    from trainable_candle.models import Model
    from trainable_candle.settings import Group
    from trainable_candle.tasks.estimate import Estimate, Shape
    from trainable_candle.tasks.latent.coders import Coder
    from trainable_candle.tasks.latent.objectives import Objective, Stepper
    from trainable_candle.tasks.task import Split
    from trainable_candle.train.trainer import Inputs


class LatentModel(ABC):
    """A model that generates latents, of which nothing is read before it is needed.

    Args:
        weights: a folder or a file.
        dtype: of the model and the text encoders; as stored if None.
        device: of everything.
        config: the settings of the run; None: defaults, enough for drawing and merging.
    """

    name: ClassVar[str]
    """What `--model` calls it."""
    groups: ClassVar[tuple[type[Group], ...]]
    """The groups of settings that it takes; to give others is an error."""
    parts: ClassVar[tuple[str, ...]] = ()
    """The folders of its models in a pipeline; none if it is not a pipeline."""
    component: ClassVar[str]
    """The part that is trained, as adapters are filed under."""
    formats: ClassVar[tuple[str, ...]]
    """The formats of adapter files that have names for its layers, the default one first."""
    targets: ClassVar[tuple[str, ...]]
    """The layers that get adapters unless the settings name others."""
    text_targets: ClassVar[tuple[str, ...]] = ()
    """Those of the text encoders, if these are trained too."""
    guidance: ClassVar[float] = 1.0
    """The scale of classifier-free guidance unless the settings have one; 1 is none."""
    reads_texts_apart: ClassVar[bool] = False
    """Whether drawing calls the model for the prompt and for the negative prompt: texts of
    different length in one call would need a mask, for which attention on a GPU is slow."""
    at_once: ClassVar[int] = 1
    """Batch size of drawing, and the minimum of validation."""
    validation_examples: ClassVar[int] = 16
    """Minimum of samples of noise and level in a validation; smaller data sets are repeated."""

    def __init__(
        self, weights: Path, dtype: str | None, device: str, config: TrainConfig | None = None
    ) -> None:
        self.weights = weights
        self.dtype = dtype
        self.device = device
        self.config = config or TrainConfig()

    # The facts of the files, before anything is loaded.

    @abstractmethod
    def require_own(self) -> None:
        """Check that the weights are of this family.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: they are missing, damaged, or of
                another model.
        """

    @property
    @abstractmethod
    def resolution(self) -> int:
        """The side of the images that the model was made for, px.

        Raises:
            MissingFileError, WeightsFormatError: the weights are missing, damaged, or of another
                model.
        """

    @property
    def multiple(self) -> int:
        """Pixels of which the sides of images must be multiples."""
        return self.coder.factor

    def check(self) -> None:  # noqa: B027 - most have nothing of their own
        """Check what is particular to the family in the settings.

        Raises:
            ConfigError: a value does not suit the model.
            MissingFileError, WeightsFormatError: the weights are missing, damaged, or of another
                model.
        """

    def check_format(self, form: str, layers: Collection[str]) -> None:  # noqa: B027
        """Check that a format of files can hold the adapters of some layers.

        Args:
            form: the format.
            layers: those of the trained model that get adapters.

        Raises:
            ConfigError: it cannot; names one that can.
        """

    def notes(self) -> list[str]:
        """What a user should know of training these weights, in a line each."""
        return []

    def check_initial_adapter(self, path: Path, layers: Collection[str]) -> None:
        """Check that a file holds the adapters that the settings make.

        Args:
            path: the file.
            layers: those of the trained model that get adapters.

        Raises:
            ConfigError: it does not.
            MissingFileError, WeightsFormatError: it is damaged.
        """
        texts = self.text_layers() if self.config.train_text_encoder else ()
        check_initial_adapter(
            self.config,
            path,
            verify_adapter(path, self.name, self.weights).modules,
            found=self.adapted_parts(path),
            expected=(self.component, *texts),
            layers=layers,
        )

    def check_training_adapter(self, path: Path) -> None:
        """Check that a file is a LoRA of the trained model.

        Raises:
            ConfigError: it is not.
            MissingFileError, WeightsFormatError: it is damaged.
        """
        start = f"--training-adapter: {path}"
        modules = verify_adapter(path, self.name, self.weights).modules
        if not modules:
            raise ConfigError(f"{start} is not an adapter: it is empty")
        for module in modules:
            what = module.fault
            if module.layer is None or not module.layer.startswith(f"{self.component}."):
                what = f"the {self.component} has no such layer"
            elif what is None and module.kind != "lora":
                what = f"it is a {module.kind}, expected a LoRA"
            if what:
                raise ConfigError(f"{start} is not a training adapter: {module.module}: {what}")

    def check_prompt(self, prompt: str) -> None:  # noqa: B027 - most draw any text
        """Check that a preview can be drawn of a text.

        Raises:
            ConfigError: it cannot.
        """

    @abstractmethod
    def layers(self) -> Mapping[str, Shape]:
        """Shapes of the weights of the trained model's linear layers and convolutions, by name."""

    def text_layers(self) -> Mapping[str, Mapping[str, Shape]]:
        """The same of the text encoders that can be trained, by part."""
        return {}

    @abstractmethod
    def estimate(self, config: TrainConfig, data: Split[Dataset], limit: float) -> Estimate:
        """What a run will hold in memory; see `Task.estimate`."""

    @abstractmethod
    def drawing_bytes(self, size: tuple[int, int], count: int) -> int:
        """About what drawing `count` images of a width and height takes besides the runtime."""

    def encode_area(self) -> int:
        """Pixels of the images that are encoded at once, at most; 0: one image."""
        return 0

    def text_parts(self) -> int:
        """Parts of captions that are encoded at once, at most."""
        return 1

    def dataset(self, folder: str) -> Dataset:
        """The checked images of a folder, or of a list of folders.

        Raises:
            DatasetError, ConfigError: images or captions cannot be used.
        """
        return load_images(self.config, folder, self.config.resolution or self.resolution)

    # Its parts, loaded when they are needed.

    @property
    @abstractmethod
    def model(self) -> Model:
        """The denoising model, which gets the adapters."""

    @property
    @abstractmethod
    def coder(self) -> Coder:
        """From images to latents and back."""

    @property
    def text_models(self) -> Mapping[str, Model]:
        """The text encoders that can be trained, by part."""
        return {}

    def drop_text_models(self) -> None:  # noqa: B027 - there may be none
        """Free the text encoders; all needed features are cached."""

    # Noise, prediction and conditions.

    @abstractmethod
    def objective(self, device: str) -> Objective:
        """What the model is asked to predict.

        Args:
            device: of the latents.

        Raises:
            ConfigError, ArgumentError: a setting is outside its range.
        """

    @abstractmethod
    def stepper(self, steps: int, sampler: str | None, size: tuple[int, int]) -> Stepper:
        """The sampler for `steps` predictions.

        Args:
            steps: calls of the model.
            sampler: the one to use; None means the family's.
            size: width and height of the images, px, on which noise levels may depend.

        Raises:
            ArgumentError: there is no such sampler, or the number of steps does not suit it.
        """

    @abstractmethod
    def predict(self, sample: Tensor, times: Tensor, conditions: Inputs) -> Tensor:
        """The model's prediction for noisy latents, in their shape.

        Args:
            sample: (B, C, h, w), in the dtype of the model.
            times: from 0 to 1000, (B,), or (1,) for all.
            conditions: what `features` and `conditions` have made.
        """

    @property
    def distilled_guidance(self) -> bool:
        """Whether the model follows a scale of guidance by itself, without a second prediction."""
        return False

    def conditions(
        self,
        frames: Sequence[Frame],  # noqa: ARG002
        guidance: float | None = None,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Conditions from the images (crop and size, for example), (B, ...) by name.

        Args:
            frames: of each image.
            guidance: the scale, an input of models with `distilled_guidance`; None: that of
                training.
        """
        return {}

    # Text.

    @abstractmethod
    def features(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Text features of captions, (B, ...) by name.

        Raises:
            ConfigError: a caption does not suit the model.
        """

    def text_identity(self) -> dict[str, str] | None:
        """Identity of the text encoders for cache keys; None if features are not worth caching.

        Raises:
            OSError: a file cannot be read.
        """
        return None

    def text_length(self, caption: str) -> int:  # noqa: ARG002
        """Number of chunks of the encoders' length in a caption."""
        return 1

    # A family that takes the settings `TextEncoders` has these two.

    def tokens(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """The tokens of captions for `encode_tokens`, (B, ...) by name."""
        raise NotImplementedError(f"{self.name}: its text encoders cannot be trained")

    def encode_tokens(self, tokens: Inputs, batch: int) -> dict[str, Tensor]:
        """Text features of `batch` captions from their tokens, (B, ...) by name, with gradients."""
        raise NotImplementedError(f"{self.name}: its text encoders cannot be trained")

    def unread_layers(self, part: str) -> list[str]:  # noqa: ARG002
        """Layers of the text encoder `part` whose outputs are unused, as patterns."""
        return []

    def text_adapter(self, part: str, config: TrainConfig) -> LoraConfig:
        """The adapters of the text encoder `part` with the settings `config`.

        `--target-modules` is for the denoising model; layers whose outputs are unused get none.
        """
        exclude = [*config.exclude_modules, *self.unread_layers(part)]
        there = config.with_(target_modules=[], exclude_modules=exclude)
        return adapter_config(there, self.text_targets)

    # Files.

    @abstractmethod
    def adapted_parts(self, path: Path) -> Sequence[str]:
        """The parts that an adapter file is for.

        Raises:
            MissingFileError, WeightsFormatError: it is missing or damaged.
        """

    @abstractmethod
    def save_merged(self, models: Mapping[str, Model], output: Path) -> None:
        """Write the whole model.

        Args:
            models: the parts that are not as in the weights.
            output: a new or an empty folder, or where the family allows it a new file.

        Raises:
            ConfigError: there is something else.
            OSError: it cannot be written.
        """

    @abstractmethod
    def save_quantized(self, models: Mapping[str, Model], output: Path, to: str) -> None:
        """Write the whole model with the denoiser's linear layers in eight bits.

        Args:
            models: the parts that are not as in the weights, and the denoiser.
            output: a new `.safetensors` file.
            to: "fp8" or "int8".

        Raises:
            ConfigError: there is something else, or the family has no such files.
            OSError: it cannot be written.
        """
