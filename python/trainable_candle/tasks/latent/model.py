"""`LatentModel`: the interface between the task and a latent model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from trainable_candle._core import verify_adapter
from trainable_candle.errors import ConfigError
from trainable_candle.hub import shown_name
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.initial_adapter import check_initial_adapter
from trainable_candle.tasks.latent.data import load_images
from trainable_candle.tasks.latent.drawing import Usual
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
    """A model that generates latents. Its files are read only when they are needed.

    Args:
        weights: a folder or a file.
        dtype: the dtype of the model and the text encoders; as stored if None.
        device: the device of all parts.
        config: the settings of the run; None: defaults, enough for drawing and merging.
    """

    name: ClassVar[str]
    """The name for `--model`."""
    groups: ClassVar[tuple[type[Group], ...]]
    """The groups of settings that the model takes; other settings are an error."""
    parts: ClassVar[tuple[str, ...]] = ()
    """The folders of the models in a pipeline; empty if the weights are not a pipeline."""
    component: ClassVar[str]
    """The part that is trained; adapter files use this name."""
    formats: ClassVar[tuple[str, ...]]
    """The formats of adapter files that have names for the model's layers, the default first."""
    targets: ClassVar[tuple[str, ...]]
    """The layers that get adapters by default."""
    text_targets: ClassVar[tuple[str, ...]] = ()
    """The layers of the text encoders that get adapters, if the encoders are trained too."""
    drawing: ClassVar[Usual] = Usual()
    """How images are drawn by default; see `usual`."""
    no_prompt: ClassVar[str] = ""
    """The negative prompt if none is given."""
    reads_texts_apart: ClassVar[bool] = False
    """Whether drawing calls the model separately for the prompt and the negative prompt, because
    texts of different length in one call need a mask, and attention with a mask is slow on a GPU.
    """
    at_once: ClassVar[int] = 1
    """The batch size of drawing, and the least batch size of validation."""
    validation_examples: ClassVar[int] = 16
    """The least number of examples, each with its own noise and noise level, in a validation. Small
    data sets are repeated."""

    def __init__(
        self, weights: Path, dtype: str | None, device: str, config: TrainConfig | None = None
    ) -> None:
        self.weights = weights
        self.dtype = dtype
        self.device = device
        self.config = config or TrainConfig()

    @property
    def shown_name(self) -> str:
        """The name of the weights; see `hub.shown_name`."""
        return shown_name(self.weights)

    # Facts that are read from the files before any weights are loaded.

    @abstractmethod
    def require_own(self) -> None:
        """Check that the weights are of this family.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the weights are missing, damaged, or
                of another model.
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
        """The width and the height of images must be multiples of this number of pixels."""
        return self.coder.factor

    def check(self) -> None:  # noqa: B027 - most families need no check
        """Check the settings in ways that are specific to the family.

        Raises:
            ConfigError: a value does not suit the model.
            MissingFileError, WeightsFormatError: the weights are missing, damaged, or of another
                model.
        """

    def check_format(self, form: str, layers: Collection[str]) -> None:  # noqa: B027
        """Check that a format of files can represent the adapters of some layers.

        Args:
            form: the format.
            layers: the layers of the trained model that get adapters.

        Raises:
            ConfigError: the format cannot represent the adapters; the message names one that can.
        """

    def notes(self) -> list[str]:
        """Return notes for the user about training these weights, a line each."""
        return []

    def check_initial_adapter(self, path: Path, layers: Collection[str]) -> None:
        """Check that the adapters in a file are those that the settings describe.

        Args:
            path: the file.
            layers: the layers of the trained model that get adapters.

        Raises:
            ConfigError: the adapters differ from the settings.
            MissingFileError, WeightsFormatError: the file is missing or damaged.
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
            ConfigError: the file is no such LoRA.
            MissingFileError, WeightsFormatError: the file is missing or damaged.
        """
        start = f"--training-adapter: {path}"
        modules = verify_adapter(path, self.name, self.weights).modules
        if not modules:
            raise ConfigError(f"{start} is not an adapter: the file is empty")
        for module in modules:
            what = module.fault
            if module.layer is None or not module.layer.startswith(f"{self.component}."):
                what = f"the {self.component} has no such layer"
            elif what is None and module.kind != "lora":
                what = f"it is a {module.kind}, expected a LoRA"
            if what:
                raise ConfigError(f"{start} is not a training adapter: {module.module}: {what}")

    def check_prompt(self, prompt: str) -> None:  # noqa: B027 - most draw any text
        """Check that a preview of a prompt can be drawn.

        Raises:
            ConfigError: the preview cannot be drawn.
        """

    @abstractmethod
    def layers(self) -> Mapping[str, Shape]:
        """Return the trained model's linear layers and convolutions: shapes of weights by name."""

    def text_layers(self) -> Mapping[str, Mapping[str, Shape]]:
        """Return the layers of each text encoder that can be trained, by part; see `layers`."""
        return {}

    @abstractmethod
    def estimate(self, config: TrainConfig, data: Split[Dataset], limit: float) -> Estimate:
        """Estimate the memory of a run; see `Task.estimate`."""

    @abstractmethod
    def drawing_bytes(self, size: tuple[int, int], count: int) -> int:
        """Return the approximate bytes that drawing `count` images of a size takes.

        Not included are a model that is in memory already, kernels and workspaces.
        """

    def encode_area(self) -> int:
        """Return how many pixels to encode at once, in all images; 0: one image at a time."""
        return 0

    def text_parts(self) -> int:
        """Return the largest sum of `text_length` over captions that are encoded at once."""
        return 1

    def dataset(self, folder: str) -> Dataset:
        """Return the checked images of a folder, or of a list of folders.

        Raises:
            DatasetError, ConfigError: images or captions cannot be used.
        """
        return load_images(self.config, folder, self.config.resolution or self.resolution)

    # The parts of the model, loaded when they are needed.

    @property
    @abstractmethod
    def model(self) -> Model:
        """The denoising model, which gets the adapters."""

    @property
    @abstractmethod
    def coder(self) -> Coder:
        """The coder, which turns images into latents and back."""

    @property
    def text_models(self) -> Mapping[str, Model]:
        """The text encoders that can be trained, by part."""
        return {}

    def drop_text_models(self) -> None:  # noqa: B027 - there may be none
        """Free the text encoders. Called when all features that the task needs are cached."""

    # Noise, prediction and conditions.

    @abstractmethod
    def objective(self, device: str) -> Objective:
        """Return the training objective.

        Args:
            device: the device of the latents.

        Raises:
            ConfigError, ArgumentError: a setting is outside its range.
        """

    @abstractmethod
    def stepper(self, steps: int, sampler: str | None, size: tuple[int, int]) -> Stepper:
        """Return the sampler for a number of sampling steps.

        Args:
            steps: the number of sampling steps; each uses one guided prediction.
            sampler: the name of the sampler; None means the family's default.
            size: width and height of the images, px, on which noise levels may depend.

        Raises:
            ConfigError, ArgumentError: the model cannot be drawn with this sampler, or the number
                of steps does not suit it.
        """

    @abstractmethod
    def predict(self, sample: Tensor, times: Tensor, conditions: Inputs) -> Tensor:
        """Return the model's prediction for noisy latents, in their shape.

        Args:
            sample: (B, C, h, w), in the dtype of the model.
            times: the times of the samples, from 0 to 1000: (B,), or (1,) if all are equal.
            conditions: the results of `features` and `conditions`.
        """

    @property
    def usual(self) -> Usual:
        """How images are drawn by default, with these weights."""
        return self.drawing

    @property
    def distilled_guidance(self) -> bool:
        """Whether a sampling step is one call of the model, without a negative prompt.

        Such a model takes the guidance scale as input, or works without guidance.
        """
        return False

    def rescaled(self, guided: Tensor, positive: Tensor) -> Tensor:  # noqa: ARG002
        """Return the guided prediction; a family may rescale it to the norms of `positive`.

        Args:
            guided: the prediction with classifier-free guidance.
            positive: the prediction for the prompt alone.
        """
        return guided

    def conditions(
        self,
        frames: Sequence[Frame],  # noqa: ARG002
        guidance: float | None = None,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Return conditions besides the text, such as crop and size, (B, ...) by name.

        Args:
            frames: the frame of each image.
            guidance: the scale, for models that take it as input; None: the scale for training.
        """
        return {}

    # Text.

    @abstractmethod
    def features(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return text features of captions, (B, ...) by name.

        Raises:
            ConfigError: a caption does not suit the model.
        """

    def text_identity(self) -> dict[str, str] | None:
        """Return the text encoders' identity for cache keys; None if a cache saves no time.

        Raises:
            OSError: a file cannot be read.
        """
        return None

    def text_length(self, caption: str) -> int:  # noqa: ARG002
        """Return a caption's size for `text_parts`; captions of one size are encoded together."""
        return 1

    def truncates(self, caption: str) -> bool:  # noqa: ARG002
        """Return whether the text encoders do not read the end of a caption."""
        return False

    # A family that takes the settings `TextEncoders` must implement the next two methods.

    def tokens(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the tokens of captions for `encode_tokens`, (B, ...) by name."""
        raise NotImplementedError(f"{self.name}: its text encoders cannot be trained")

    def encode_tokens(self, tokens: Inputs, batch: int) -> dict[str, Tensor]:
        """Encode the tokens of `batch` captions, with gradients: features (B, ...) by name."""
        raise NotImplementedError(f"{self.name}: its text encoders cannot be trained")

    def unread_layers(self, part: str) -> list[str]:  # noqa: ARG002
        """Return layers of the text encoder `part` whose outputs are unused, as patterns."""
        return []

    def text_adapter(self, part: str, config: TrainConfig) -> LoraConfig:
        """Return the adapters of the text encoder `part` with the settings `config`.

        These adapters ignore `--target-modules`, which is for the denoising model. Layers whose
        outputs are unused get no adapter.
        """
        exclude = [*config.exclude_modules, *self.unread_layers(part)]
        there = config.with_(target_modules=[], exclude_modules=exclude)
        return adapter_config(there, self.text_targets, self.formats)

    # Files.

    @abstractmethod
    def adapted_parts(self, path: Path) -> Sequence[str]:
        """Return the parts that an adapter file is for.

        Raises:
            MissingFileError, WeightsFormatError: the file is missing or damaged.
        """

    @abstractmethod
    def save_merged(self, models: Mapping[str, Model], output: Path) -> None:
        """Write the whole model.

        Args:
            models: the parts whose weights differ from the stored weights.
            output: a new or an empty folder, or, if the family allows it, a new file.

        Raises:
            ConfigError: `output` is none of these.
            OSError: the model cannot be written.
        """

    @abstractmethod
    def require_quantized(self, output: Path, to: str) -> None:
        """Check, before anything is loaded, that `save_quantized` can write the model.

        Args:
            output: the path to write.
            to: "nf4", "fp8" or "int8".

        Raises:
            ConfigError: the family cannot be quantized, `to` does not suit the form of its weights,
                or `output` exists or does not suit `to`.
        """

    @abstractmethod
    def save_quantized(self, models: Mapping[str, Model], output: Path, to: str) -> None:
        """Write the whole model with the denoiser's linear layers quantized.

        Args:
            models: the parts whose weights differ from the stored weights, and the denoiser.
            output: for "nf4" a new or an empty folder, otherwise a new `.safetensors` file.
            to: "nf4", "fp8" or "int8".

        Raises:
            ConfigError: as `require_quantized`.
            OSError: the model cannot be written.
        """
