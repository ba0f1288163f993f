"""`LatentModel`: the interface between `LatentTask` and a model that generates latents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import trainable_candle as tc
from trainable_candle._core import verify_adapter
from trainable_candle.errors import ConfigError
from trainable_candle.hub import shown_name
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.initial_adapter import check_initial_adapter
from trainable_candle.tasks.latent.data import load_images
from trainable_candle.tasks.latent.drawing import DrawingDefaults
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
        weights: the folder or the file with the weights.
        dtype: the dtype of the denoiser and the text encoders; None: as stored.
        device: the device of all parts.
        config: the settings of the run; None: the defaults, which suffice to draw and to merge.
    """

    name: ClassVar[str]
    """The name for `--model`."""
    groups: ClassVar[tuple[type[Group], ...]]
    """The groups of settings that the model takes; other settings are an error."""
    parts: ClassVar[tuple[str, ...]] = ()
    """The subfolders of a pipeline, one for each part; empty if the weights are not a pipeline."""
    component: ClassVar[str]
    """The name of the denoiser, the part that is always trained; adapter files use this name."""
    formats: ClassVar[tuple[str, ...]]
    """The formats of adapter files that have names for the model's layers, the default first."""
    targets: ClassVar[tuple[str, ...]]
    """The layers that get adapters by default, as names or patterns."""
    text_targets: ClassVar[tuple[str, ...]] = ()
    """The layers of the text encoders that get adapters if the encoders are trained, too. Empty if
    the family cannot train them."""
    drawing: ClassVar[DrawingDefaults] = DrawingDefaults()
    """How the family's models draw images by default; see also `drawing_defaults`."""
    no_prompt: ClassVar[str] = ""
    """The negative prompt of a drawing for which the user gives none."""
    reads_texts_apart: ClassVar[bool] = False
    """Whether drawing calls the model separately for the prompt and the negative prompt, because
    texts of different lengths in one call need a mask, and attention with a mask is slow on a GPU.
    """
    at_once: ClassVar[int] = 1
    """The batch size of drawing, and the least batch size of validation."""
    validation_examples: ClassVar[int] = 16
    """The least number of examples in a validation. Each example has its own noise and noise level;
    a smaller data set is used several times."""

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
        """The side of the square images that the model was made for, px; 0 if it is not known.

        Raises:
            MissingFileError, WeightsFormatError: the weights are missing, damaged, or of another
                model.
        """

    @property
    def multiple(self) -> int:
        """The number of pixels of which the width and the height of images must be multiples."""
        return self.coder.factor

    def check(self) -> None:  # noqa: B027 - most families need no check
        """Check what only this family requires of the settings.

        Raises:
            ConfigError: a value does not suit the model.
            MissingFileError, WeightsFormatError: the weights are missing, damaged, or of another
                model.
        """

    def check_format(self, form: str, layers: Collection[str]) -> None:  # noqa: B027
        """Check that a format of adapter files can represent the adapters of some layers.

        Args:
            form: the format.
            layers: the layers of the denoiser that get adapters.

        Raises:
            ConfigError: the format cannot represent the adapters; the message names one that can.
        """

    def notes(self) -> list[str]:
        """Return notes for the user about training these weights, one line each."""
        return []

    def check_initial_adapter(self, path: Path, layers: Collection[str]) -> None:
        """Check that the adapters in a file are those that the settings describe.

        Args:
            path: the file.
            layers: the layers of the denoiser that get adapters.

        Raises:
            ConfigError: the adapters differ from the settings.
            MissingFileError, WeightsFormatError: the file is missing or damaged.
        """
        text_encoders = self.text_layers() if self.config.train_text_encoder else ()
        check_initial_adapter(
            self.config,
            path,
            verify_adapter(path, self.name, self.weights).modules,
            found=self.adapted_parts(path),
            expected=(self.component, *text_encoders),
            layers=layers,
        )

    def check_training_adapter(self, path: Path) -> None:
        """Check that a file has LoRAs of the denoiser, and nothing else.

        A training adapter is a fixed adapter that is applied to a distilled model only in training.

        Raises:
            ConfigError: the file has other modules, damaged ones, or none.
            MissingFileError, WeightsFormatError: the file is missing or damaged.
        """
        subject = f"--training-adapter: {path}"
        modules = verify_adapter(path, self.name, self.weights).modules
        if not modules:
            raise ConfigError(f"{subject} is not an adapter: the file has no modules")
        for module in modules:
            problem = module.fault
            if module.layer is None or not module.layer.startswith(f"{self.component}."):
                problem = f"the {self.component} has no such layer"
            elif problem is None and module.kind != "lora":
                problem = f"it is a {module.kind}, expected a LoRA"
            if problem:
                raise ConfigError(
                    f"{subject} is not a training adapter: module {module.module}: {problem}"
                )

    def check_prompt(self, prompt: str) -> None:  # noqa: B027 - most families draw any text
        """Check that the model can draw an image from a prompt.

        Raises:
            ConfigError: the prompt does not suit the model.
        """

    @abstractmethod
    def layers(self) -> Mapping[str, Shape]:
        """Return the shapes of the weights of the denoiser's layers, by name.

        The layers are linear layers and convolutions.
        """

    def text_layers(self) -> Mapping[str, Mapping[str, Shape]]:
        """Return what `layers` returns, for each text encoder that can be trained, by its part."""
        return {}

    @abstractmethod
    def estimate(self, config: TrainConfig, data: Split[Dataset], limit: float) -> Estimate:
        """Estimate the memory of a run, if `limit` bytes are available; see `Task.estimate`."""

    @abstractmethod
    def drawing_bytes(self, size: tuple[int, int], count: int) -> int:
        """Return roughly the bytes that drawing images takes.

        They include neither kernels and workspaces, nor the denoiser if it is in memory already.

        Args:
            size: width and height of an image, px.
            count: the number of images.
        """

    def encode_area(self) -> int:
        """Return the most pixels of the images that are encoded at once; 0: encode them singly."""
        return 0

    def text_rows_at_once(self) -> int:
        """Return how large the sum of `text_length` over captions encoded at once may be."""
        return 1

    def dataset(self, folder: str) -> Dataset:
        """Return the checked images of a folder, or of the folders that a YAML file lists.

        Raises:
            DatasetError, ConfigError: see `load_images`.
            MissingFileError, WeightsFormatError: see `resolution`.
        """
        return load_images(self.config, folder, self.config.resolution or self.resolution)

    # The parts of the model, which are loaded when they are needed.

    @property
    @abstractmethod
    def model(self) -> Model:
        """The denoiser, which gets adapters."""

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

    def release_cached_memory(self) -> None:
        """Return to the GPU the memory that no tensor uses, between two phases of a run.

        The tensors of the next phase have other sizes. They would fit badly into the cached blocks,
        and take more memory beside them.
        """
        if self.device.startswith("cuda"):
            tc.cuda.empty_cache(self.device)

    # Noise, prediction and conditions.

    @abstractmethod
    def objective(self, device: str) -> Objective:
        """Return the training objective.

        Args:
            device: the device of the tensors that the objective's methods take.

        Raises:
            ConfigError, ArgumentError: a setting is outside its range.
        """

    @abstractmethod
    def stepper(self, steps: int, sampler: str | None, size: tuple[int, int]) -> Stepper:
        """Return the sampler for a number of sampling steps.

        Args:
            steps: the number of sampling steps; each step uses one guided prediction.
            sampler: the name of the sampler; None: the family's default.
            size: width and height of the images, px; noise levels may depend on it.

        Raises:
            ConfigError, ArgumentError: the model cannot draw with this sampler, or the number of
                steps does not suit it.
        """

    @abstractmethod
    def predict(self, sample: Tensor, times: Tensor, conditions: Inputs) -> Tensor:
        """Return the model's prediction for noisy latents, in their shape.

        Args:
            sample: noisy latents (B, C, h, w): in training in the dtype of the model, in drawing
                f32.
            times: the times of the samples, from 0 to 1000: (B,), or (1,) if all are equal.
            conditions: the results of `features` and `conditions` together, by name. Other names
                are ignored.
        """

    @property
    def drawing_defaults(self) -> DrawingDefaults:
        """How these weights draw images by default."""
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
            frames: for each image, its original size and the position and size of its crop.
            guidance: the guidance scale, for models that take it as input; None: the scale for
                training.
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
        """Return what text features depend on besides captions; None if a cache saves no time.

        Raises:
            OSError: a file cannot be read.
        """
        return None

    def text_length(self, caption: str) -> int:  # noqa: ARG002
        """Return a caption's size; only captions of equal size are encoded in one batch.

        For SDXL the size is the number of rows of 77 tokens. Other families have other units.
        """
        return 1

    def truncates(self, caption: str) -> bool:  # noqa: ARG002
        """Return whether a caption is too long for the text encoders to read its end."""
        return False

    # A family whose `groups` include `TextEncoders` must override the next two methods.

    def tokens(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the tokens of captions for `encode_tokens`, (B, ...) by name."""
        raise NotImplementedError(f"{self.name}: its text encoders cannot be trained")

    def encode_tokens(self, tokens: Inputs, batch: int) -> dict[str, Tensor]:
        """Return text features of `batch` captions, (B, ...) by name, with gradients.

        `tokens` is the result of the method `tokens`; it may have other entries, too.
        """
        raise NotImplementedError(f"{self.name}: its text encoders cannot be trained")

    def unread_layers(self, part: str) -> list[str]:  # noqa: ARG002
        """Return patterns for the layers of the text encoder `part` whose outputs are unused."""
        return []

    def text_adapter(self, part: str, config: TrainConfig) -> LoraConfig:
        """Return the configuration of the adapters of the text encoder `part`.

        It follows from the settings `config`, except for `--target-modules`, which names layers of
        the denoiser. Layers whose outputs are unused get no adapter.
        """
        exclude = [*config.exclude_modules, *self.unread_layers(part)]
        for_texts = config.with_(target_modules=[], exclude_modules=exclude)
        return adapter_config(for_texts, self.text_targets, self.formats)

    # Files.

    @abstractmethod
    def adapted_parts(self, path: Path) -> Sequence[str]:
        """Return the parts that an adapter file has adapters for.

        Raises:
            MissingFileError, WeightsFormatError: the file is missing or damaged.
        """

    @abstractmethod
    def save_merged(self, models: Mapping[str, Model], output: Path) -> None:
        """Write all parts of the model.

        Args:
            models: the parts whose weights differ from the stored weights, by name.
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
            ConfigError: the family cannot be quantized; or `to` needs weights in a folder, and they
                are in one file; or `output` is not what `save_quantized` requires for `to`.
        """

    @abstractmethod
    def save_quantized(self, models: Mapping[str, Model], output: Path, to: str) -> None:
        """Write all parts of the model, with the denoiser's linear layers quantized.

        Args:
            models: the denoiser, and the other parts whose weights differ from the stored weights,
                by name.
            output: for "nf4" a new or an empty folder, otherwise a new `.safetensors` file.
            to: "nf4", "fp8" or "int8".

        Raises:
            ConfigError: as `require_quantized`.
            OSError: the model cannot be written.
        """
