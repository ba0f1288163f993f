"""`LatentTask`: trains models that generate images, and draws images with them."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from trainable_candle import plot
from trainable_candle.data import LatentCache
from trainable_candle.data.folder import counted
from trainable_candle.data.options import CacheOptions
from trainable_candle.distributed.group import ALONE, first_before_others
from trainable_candle.errors import ConfigError
from trainable_candle.lora.stack import stacked
from trainable_candle.settings.checks import existing
from trainable_candle.settings.previews import Drawing
from trainable_candle.sheet import write_sheet
from trainable_candle.tasks.checks import check_format, check_targets
from trainable_candle.tasks.estimate import adapted_layers, available_bytes, require_memory
from trainable_candle.tasks.latent.data import cache_options, folder_for_cache, read_datasets
from trainable_candle.tasks.latent.drawing import (
    SampleOptions,
    draw,
    parse_size,
    require_multiple,
)
from trainable_candle.tasks.latent.prepared import PreparedLatents
from trainable_candle.tasks.latent.prompts import Place, Prompt, infotext, parse_prompt
from trainable_candle.tasks.latent.texts import prepare_texts
from trainable_candle.tasks.task import Split
from trainable_candle.train.adapters import Adapters, adapter_config, start_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from trainable_candle import AdapterFile, Tensor, TrainingAdapter
    from trainable_candle.data import Dataset
    from trainable_candle.distributed.group import Group
    from trainable_candle.models import Model
    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.estimate import Estimate
    from trainable_candle.tasks.latent.model import LatentModel


class LatentTask:
    """The `Task` of image models, which work on latents.

    It can also draw images, load adapters and merge them. It loads each part of the model (text
    encoders, denoiser, autoencoder) when the part is needed. For training, it frees text encoders
    and autoencoder after their last use.

    Args:
        family: the model, with the settings in its `config`.
    """

    # `Task` says what these mean. `repeats` is about CUDA graphs, not about repeats of images.
    noun: ClassVar[str] = "image"
    repeats: ClassVar[bool] = True
    weighs_batches: ClassVar[bool] = False
    counts: ClassVar[str] = "image"

    def __init__(self, family: LatentModel) -> None:
        self.family = family
        self._side: int | None = None
        """The resolution of the training data: the default side of drawn images."""
        self.adapted: tuple[str, ...] = ()
        """The parts that have adapters."""
        self._prompt_features: dict[str, dict[str, Tensor]] = {}
        """The text features of prompts, from before the text encoders were freed."""
        self._training_adapter: TrainingAdapter | None = None

    def check(self, report: Callable[[str], None]) -> None:
        """See `Task.check`; also reports which tools would not apply the adapter completely."""
        family, config = self.family, self.family.config
        text_encoders = family.text_layers() if config.train_text_encoder else {}
        check_format(config, family.formats, parts=1 + len(text_encoders))
        family.check()
        for note in family.notes():
            report(f"note: {note}")
        # Making the objective checks its settings.
        family.objective("cpu")
        for prompt in self.prompts:
            self._check_prompt(prompt)
        layers = family.layers()
        adapted_in_texts = {
            layer: shape
            for text_layers in text_encoders.values()
            for layer, shape in adapted_layers(text_layers, family.text_targets).items()
        }
        check_targets(config, layers, family.targets, adapted_in_texts)
        targets = config.target_modules or family.targets
        adapted = adapted_layers(layers, targets, config.exclude_modules)
        form = config.format or family.formats[0]
        family.check_format(form, adapted)
        if config.initial_adapter and not config.resume:
            path = existing("initial_adapter", config.initial_adapter_path)
            family.check_initial_adapter(path, adapted)
        if config.training_adapter:
            family.check_training_adapter(
                existing("training_adapter", config.training_adapter_path)
            )
        # Only if diffusers' names are the default: otherwise the user has chosen them on purpose.
        if config.adapter == "dora" and form == family.formats[0] == "diffusers":
            report(
                "note: ComfyUI ignores DoRA's magnitude in files with diffusers' names; "
                "for ComfyUI, give --format comfyui"
            )
        if config.adapter != "lora" and form == "kohya":
            flaw = "ignores DoRA's magnitude" if config.adapter == "dora" else "loads LoRA only"
            # In files with diffusers' names, diffusers loads DoRA only with a magnitude per output.
            diffusers_can = config.adapter == "dora" and config.dora_axis == "output"
            instead = "; for diffusers, give --format diffusers" if diffusers_can else ""
            report(
                f"note: in files with kohya's names, diffusers {flaw}{instead}; "
                "ComfyUI applies the whole adapter"
            )

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts in the settings, each with its options.

        Raises:
            ConfigError: a flag of a prompt, or `sample_size`, is wrong.
        """
        config = self.family.config
        options = SampleOptions(
            steps=config.sample_steps,
            seed=config.sample_seed,
            guidance=config.guidance,
            negative_prompt=config.negative_prompt,
            size=parse_size(config.sample_size) if config.sample_size else None,
            sampler=config.sampler,
        )
        return [parse_prompt(prompt, options) for prompt in config.sample_prompts]

    def _check_prompt(self, prompt: Prompt) -> None:
        """Check that a prompt can be drawn, and that its options have an effect.

        Raises:
            ConfigError, ArgumentError: the text or an option does not suit the model.
        """
        family, options = self.family, prompt.options
        family.check_prompt(prompt.text)
        self._refuse_unused(options)
        side = family.config.resolution or family.resolution
        steps = options.chosen(family.drawing_defaults).steps
        # Making the sampler checks its name and the number of steps.
        family.stepper(steps, options.sampler, options.size or (side, side))
        if options.size:
            require_multiple(options.size, family.multiple)

    def read(self, report: Callable[[str], None]) -> Split[Dataset]:
        """Find and check the images and captions; see `Task.read`."""
        data = read_datasets(self.family.config, self.family.dataset)
        report(data.train.summary())
        if data.validation is not None:
            report(f"validation: {counted(len(data.validation), 'image')}")
        return data

    def samples(self, data: Split[Dataset]) -> int:
        """Return the number of images; see `Task.samples`."""
        return len(data.train)

    def estimate(
        self, config: TrainConfig, data: Split[Dataset], limit: float = math.inf
    ) -> Estimate:
        """See `Task.estimate`."""
        return self.family.estimate(config, data, limit)

    def prepare(
        self, data: Split[Dataset], report: Callable[[str], None], group: Group = ALONE
    ) -> Split[PreparedLatents]:
        """Encode images and captions; free the encoders that are not needed in training.

        See `Task.prepare`.
        """
        family, config = self.family, self.family.config
        self._side = data.train.options.resolution
        # How many pixels to encode at once depends on the free memory. Determine the number before
        # the text encoders are loaded: the estimate of memory assumes that nothing is loaded yet.
        area = family.encode_area()
        # Only rank 0 draws previews. The other ranks load no encoder if all latents and text
        # features are cached.
        previews = self.prompts if group.rank == 0 else []
        negative = {prompt.options.negative_prompt or family.no_prompt for prompt in previews}
        prompts = sorted({prompt.text for prompt in previews} | negative)
        texts, self._prompt_features = prepare_texts(family, data, prompts, report, group)
        datasets = [data.train] if data.validation is None else [data.train, data.validation]
        family.release_cached_memory()
        latents = [self._latents(dataset, area, report, group) for dataset in datasets]
        if config.cache == "off":
            # Load the autoencoder now rather than in the first step.
            family.coder.load()
        elif not previews:
            family.coder.drop()
        family.release_cached_memory()
        prepared = [
            PreparedLatents(family, dataset, encoded, texts, group)
            for dataset, encoded in zip(datasets, latents, strict=True)
        ]
        return Split(prepared[0], prepared[1] if len(prepared) > 1 else None)

    def _latents(
        self, dataset: Dataset, area: int, report: Callable[[str], None], group: Group
    ) -> LatentCache:
        """Return the latents of a data set, encoded unless the settings switch the cache off.

        Args:
            dataset: the images.
            area: the most pixels to encode at once; see `LatentModel.encode_area`.
            report: gets lines about latents that a cache keeps.
            group: the processes that encode together.
        """
        family = self.family
        # The identity has hashes of files. Rank 0 stores them, and the other ranks read them.
        with first_before_others(group):
            identity = family.coder.identity()
        # The identity is None if the family encodes so quickly that a cache on disk saves no time.
        # Then keep the latents in memory, whatever the setting `cache` says.
        options = cache_options(family.config) if identity is not None else CacheOptions("memory")
        # The empty function drops the note about a folder that cannot be written to. For cached
        # captions, which are in the same folder, `prepare_texts` has logged it.
        folder = folder_for_cache(family.config, dataset, lambda _: None) if identity else None
        cache = LatentCache(
            dataset,
            family.coder.encode,
            options,
            identity or {},
            folder=folder,
            encode_area=area,
        )
        if identity is None:
            cache.fill()
        else:
            images = counted(len(dataset), "image")
            report(f"latents of {images}: {cache.fill(progress=True, report=report, group=group)}")
        return cache

    def attach(self, fresh: bool = True) -> Adapters:
        """Attach adapters to the model, and to the text encoders if they are trained too.

        See `Task.attach`.
        """
        family, config = self.family, self.family.config
        adapter = adapter_config(config, family.targets, family.formats)
        sets = {family.component: family.model.add_adapter(adapter)}
        starts = start_adapter(sets[family.component], family, fresh)
        if config.train_text_encoder:
            for name, model in family.text_models.items():
                sets[name] = model.add_adapter(family.text_adapter(name, config))
        if config.checkpointing != "none":
            for name in sets:
                blocks = config.checkpoint_blocks if name == family.component else None
                model = self._part(name)
                model.enable_gradient_checkpointing(config.checkpointing, blocks=blocks)
        if config.training_adapter:
            self._training_adapter = family.model.add_training_adapter(config.training_adapter_path)
        self.adapted = tuple(sets)
        return Adapters(sets, starts)

    @contextmanager
    def _without_training_adapter(self) -> Iterator[None]:
        """Return a context in which the training adapter, if there is one, is disabled."""
        if self._training_adapter is None:
            yield
            return
        self._training_adapter.set_enabled(False)
        try:
            yield
        finally:
            self._training_adapter.set_enabled(True)

    def _part(self, name: str) -> Model:
        return self.family.model if name == self.family.component else self.family.text_models[name]

    def preview(self, path: Path) -> Path:
        """Draw the prompts in the settings, and write a grid of the images; see `Task.preview`.

        If there are several prompts, also write each image to its own file, in the subfolder
        `images`. Then update `index.html` in the folder of `path`, which shows the previews of all
        steps so far, and `previews.png` in its parent folder, which shows some of them.
        """
        drawn = self.draw_prompts(self.prompts)
        grid_path = path.with_suffix(".png")
        several = len(drawn) > 1
        folder = path.parent / "images" if several else path.parent
        folder.mkdir(parents=True, exist_ok=True)
        images = plot.padded([image for image, _ in drawn])
        grid = plot.image_grid(images, scale=plot.visible_scale(images))
        plot.save_png(grid, grid_path, "\n\n".join(text for _, text in drawn))
        if several:
            for number, (image, text) in enumerate(drawn, 1):
                enlarged = plot.image_grid(image[None], scale=plot.visible_scale(image[None]))
                plot.save_png(enlarged, folder / f"{path.name}-{number}.png", text)
        write_sheet(path.parent, self.family.config.sample_prompts)
        return grid_path

    def draw_prompts(self, prompts: Sequence[Prompt]) -> list[tuple[npt.NDArray[np.uint8], str]]:
        """Draw each prompt; return pairs of an image (height, width, 3) and a text.

        The text has the image's prompt and options in the format of AUTOMATIC1111's web UI.
        Consecutive prompts with equal options are drawn by one call of `draw`.

        Raises:
            ConfigError, ArgumentError, MissingFileError, WeightsFormatError, NonFiniteError: see
                `draw`.
        """
        family, drawn = self.family, []
        for options, group in groupby(prompts, key=lambda prompt: prompt.options):
            alike = list(group)
            images = self.draw([prompt.text for prompt in alike], options)
            used = options.chosen(family.drawing_defaults)
            for index, (image, prompt) in enumerate(zip(images, alike, strict=True)):
                # `draw` draws batches of up to `at_once` images. The seed of a batch is that of the
                # options plus `start`, the index of the batch's first image.
                start = index - index % family.at_once
                seeded = replace(options, seed=(options.seed + start) % 2**64)
                # The image's index in its batch, and the number of images in this batch.
                place = Place(index - start, min(family.at_once, len(alike) - start))
                size = (image.shape[1], image.shape[0])
                text = infotext(Prompt(prompt.text, seeded), self._model_name, used, size, place)
                drawn.append((image, text))
        return drawn

    @property
    def _model_name(self) -> str:
        return self.family.shown_name or self.family.name

    def require_room(self, count: int, options: SampleOptions) -> None:
        """Check that there is memory to draw `count` images with these options.

        Raises:
            CudaUnavailableError, DeviceError: there is no such device.
            OutOfMemoryError: the device has too little free memory.
            MissingFileError, WeightsFormatError: the weights are missing, damaged, or of another
                model.
        """
        side = self.family.resolution  # as in `draw`, before `prepare` sets `_side`
        width, height = options.size or (side, side)
        needed = self.family.drawing_bytes((width, height), count)
        limit = available_bytes(self.family.device)
        require_memory(f"{counted(count, 'image')} of {width}x{height} px", needed, limit)

    def draw(
        self, prompts: Sequence[str], options: SampleOptions | None = None
    ) -> npt.NDArray[np.uint8]:
        """Draw one image per prompt; shape (n, height, width, 3).

        The training adapter is disabled meanwhile, if there is one. The library's random generator
        does not change.

        Raises:
            ConfigError, ArgumentError: a prompt or an option does not suit the model.
            MissingFileError, WeightsFormatError: a part of the model that is not loaded yet is
                missing, damaged, or of another model.
            NonFiniteError: an image has a NaN or an infinity.
        """
        options = options or SampleOptions()
        self._refuse_unused(options)
        side = self._side or self.family.resolution
        with self._without_training_adapter():
            return draw(self.family, prompts, options, self._features, (side, side))

    def _refuse_unused(self, options: SampleOptions) -> None:
        """Raise an error if an option has no effect on this model."""
        family = self.family
        # A family with this group of settings uses all options, except for a negative prompt that
        # the model cannot use.
        if Drawing in family.groups:
            self._refuse_negative(options)
            return
        for name in ("guidance", "negative_prompt", "size", "sampler"):
            if getattr(options, name) != getattr(SampleOptions(), name):
                raise ConfigError(
                    f"sample: {name} has no effect on the model `{family.name}`; leave it out"
                )

    def _refuse_negative(self, options: SampleOptions) -> None:
        """Raise an error if a negative prompt has no effect because of the model.

        A guidance of 1 in the options is accepted, so that single prompts can turn guidance off.
        """
        family = self.family
        if not options.negative_prompt:
            return
        if family.distilled_guidance:
            raise ConfigError(
                f"sample: the negative prompt has no effect on {family.shown_name}, which makes no "
                "second prediction for it; leave it out"
            )
        if options.guidance is None and family.drawing_defaults.guidance == 1:
            raise ConfigError(
                f"sample: the negative prompt has no effect, because {family.shown_name} is drawn "
                "without guidance by default; give a guidance scale above 1, too, or leave the "
                "negative prompt out"
            )

    def _features(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        # `prepare` has stored the features of single prompts only.
        if len(prompts) == 1 and prompts[0] in self._prompt_features:
            return self._prompt_features[prompts[0]]
        return self.family.features(prompts)

    def adapter_file(self, adapters: Adapters, path: Path, metadata: dict[str, str]) -> AdapterFile:
        """See `Task.adapter_file`."""
        config = self.family.config
        with_format = config.with_(format=config.format or self.family.formats[0])
        return adapters.file(path, with_format, metadata)

    def publish(
        self,
        adapters: Adapters,  # noqa: ARG002
        output: Path,  # noqa: ARG002
        metadata: dict[str, str],  # noqa: ARG002
    ) -> None:
        """Do nothing: tools for image models read the file that `adapter_file` prepares."""
        return

    def load_adapter(self, path: Path, scale: float) -> Adapters:
        """Attach the adapters in a file to the parts that the file has adapters for.

        `scale` multiplies the adapters' effect on the layers' outputs.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the file is missing, damaged, or of
                another model.
        """
        sets = {
            name: self._part(name).load_adapter(path, scale=scale)
            for name in self.family.adapted_parts(path)
        }
        self.adapted = tuple(sets)
        return Adapters(sets)

    def load_adapters(self, files: Sequence[tuple[Path, float]]) -> Adapters:
        """Attach the sum of the LoRAs in several files; `files` pairs each file with its scale.

        Raises:
            MissingFileError, WeightsFormatError: a file is missing, damaged, or of another model.
            ConfigError: a file is for a part that this model lacks, or has adapters other than
                LoRA.
        """
        by_part: dict[str, list[tuple[Path, float]]] = {}
        for path, scale in files:
            for name in self.family.adapted_parts(path):
                by_part.setdefault(name, []).append((path, scale))
        sets = {name: stacked(self._part(name), found) for name, found in by_part.items()}
        self.adapted = tuple(sets)
        return Adapters(sets)

    def save_merged(self, output: Path, to: str | None = None) -> None:
        """Write all parts of the model, with the adapters merged into the weights.

        Args:
            output: a new or an empty folder, or a new `.safetensors` file.
            to: "nf4", "fp8" or "int8" quantizes the linear layers in the denoiser's blocks. "nf4"
                writes a folder in bitsandbytes' format; "fp8" and "int8" write a file in ComfyUI's
                format. None keeps the precision.

        Raises:
            ConfigError: `output` exists and is not an empty folder, or is a file where a folder is
                needed, or the reverse; or the model cannot be quantized as `to` says.
            OSError: the model cannot be written.
        """
        models = {name: self._part(name) for name in self.adapted}
        for model in models.values():
            model.merge_adapter()
        if to is None:
            self.family.save_merged(models, output)
            return
        component = self.family.component
        models.setdefault(component, self._part(component))
        self.family.save_quantized(models, output, to)

    def loss_on(self, dataset: str) -> float:
        """Return the mean loss on images, with the same noise at every call.

        This changes the family's settings to `dataset`, and may free the text encoders and the
        autoencoder, as `prepare` does.

        Args:
            dataset: a folder, or a YAML file that lists folders.

        Raises:
            DatasetError, ConfigError: images or captions cannot be used.
            MissingFileError, WeightsFormatError: a part of the model is missing, damaged, or of
                another model.
        """
        family = self.family
        family.config = family.config.with_(dataset=dataset, cache="memory", device=family.device)
        data = Split(family.dataset(dataset), None)
        return self.prepare(data, lambda _: None).train.validation_loss()
