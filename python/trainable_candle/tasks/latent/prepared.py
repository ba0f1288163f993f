"""A data set prepared for training: latents of images, and features of their captions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trainable_candle as tc
from trainable_candle.distributed.dealing import measured
from trainable_candle.distributed.group import ALONE
from trainable_candle.draws import normal_samples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle import Tensor
    from trainable_candle.data import Batch, Dataset, DatasetBatches, LatentCache
    from trainable_candle.distributed.group import Group
    from trainable_candle.tasks.latent.model import LatentModel
    from trainable_candle.tasks.latent.texts import Texts
    from trainable_candle.train.trainer import Inputs


class PreparedLatents:
    """A data set of images as encoded latents, and the loss of a model on them.

    Args:
        family: the model, with its autoencoder and text encoders.
        dataset: the images.
        latents: returns the encoded latents of the images, in host memory.
        texts: maps captions to features.
        group: the processes that validate together.
    """

    def __init__(
        self,
        family: LatentModel,
        dataset: Dataset,
        latents: LatentCache,
        texts: Texts,
        group: Group = ALONE,
    ) -> None:
        self._family = family
        # Noise is added to latents in host memory; the loss is computed on the device.
        self._noising = family.objective("cpu")
        self._objective = family.objective(family.device)
        self._dataset = dataset
        self._has_loss_weights = any(item.loss_weight != 1 for item in dataset.items)
        self._latents = latents
        self._texts = texts
        self._group = group

    def __len__(self) -> int:
        return len(self._dataset)

    def batches(self, batch_size: int) -> DatasetBatches:
        """Return shuffled batches; the images of a batch have one size."""
        return self._dataset.batches(batch_size)

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the inputs of `loss` for a batch, by name, on the model's device.

        Their random numbers depend only on the seed and the numbers of the batch's samples.
        """
        encoded = self._latents.batch(batch)
        seed = self._dataset.seed

        # An autoencoder may encode an image as a distribution; then the numbers that `normal`
        # returns draw latents from it.
        def normal() -> Tensor:
            return normal_samples(encoded["mean"].shape[1:], batch.samples, seed, "latents")

        latents = self._family.coder.latents(encoded, normal)
        inputs = self._inputs(batch, self._noising.noise(latents, batch.samples, seed))
        if self._has_loss_weights:
            inputs["weights"] = tc.tensor(batch.loss_weights, device=self._family.device)
        return inputs

    def loss(self, inputs: Inputs) -> Tensor:
        """Return the loss for the result of `inputs`."""
        sample = inputs["sample"]
        conditions: Mapping[str, Tensor] = inputs
        # If the text encoders are trained, they encode the captions here. Otherwise `inputs` has
        # the text features.
        if self._texts.features is not None:
            conditions = {**inputs, **self._texts.features(inputs, sample.shape[0])}
        prediction = self._family.predict(sample, inputs["times"], conditions)
        return self._objective.loss(prediction, inputs)

    def weight(self, batch: Batch) -> float:
        """Return the weight of a batch's loss in the mean of a step: its number of images."""
        return len(batch)

    def count(self, batch: Batch) -> float:
        """Return the number of images in a batch, for reports of speed."""
        return len(batch)

    def metadata(self) -> dict[str, str]:
        """Return metadata about the images for adapter files."""
        return self._dataset.metadata()

    def validation_facts(self, loss: float) -> dict[str, float]:
        """Return the value to log after a validation, the loss."""
        return {"validation_loss": loss}

    def validation_loss(self) -> float:
        """Return the mean loss over all images, each used equally often.

        If there are fewer images than the family's `validation_examples`, each is used several
        times, for at least this number of uses (examples) in all. Each example has its own noise
        and noise level, the same at every call.
        """
        family = self._family
        # `at_once` is the least batch size of validation.
        batches = self._dataset.fixed_batches(max(family.config.batch_size, family.at_once))
        rounds = math.ceil(family.validation_examples / len(self))
        numbered: list[tuple[Batch, range]] = []  # batches with the numbers of their examples
        total = 0
        for _ in range(max(1, rounds)):
            for batch in batches:
                numbered.append((batch, range(total, total + len(batch))))
                total += len(batch)
        # Sums of losses; each process computes those of some batches, and all get the same list.
        losses = measured(
            self._group, numbered, lambda item: self._validation_loss(*item) * len(item[0])
        )
        return math.fsum(losses) / total

    @tc.no_grad()
    def _validation_loss(self, batch: Batch, examples: Sequence[int]) -> float:
        """Return the mean loss on a batch; `examples` are the numbers of its examples.

        The numbers determine noise and noise levels. Latents are the means of their distributions.
        """
        latents = self._family.coder.latents(self._latents.batch(batch), None)
        noised = self._noising.validation_noise(latents, examples)
        return float(self.loss(self._inputs(batch, noised)).item())

    def _inputs(self, batch: Batch, noised: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `noised`, conditions, captions and loss masks, on the model's device.

        Conditions are inputs such as sizes and crops; `batch.frames` has the crop of each image.
        `noised` has the noised latents as `sample`, and what else the objective needs.
        """
        family = self._family
        inputs: dict[str, Tensor] = {
            **noised,
            "sample": noised["sample"].to(family.model.dtype),
            **family.conditions(batch.frames),
            **self._texts.inputs(batch.captions),
        }
        masks = self._dataset.masks(batch, family.coder.factor)
        if masks is not None:
            inputs["mask"] = tc.tensor(masks[:, None])  # (images, 1, height, width) of the latents
        return {name: tensor.to(family.device) for name, tensor in inputs.items()}
