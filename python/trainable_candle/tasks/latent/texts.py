"""Text features of captions, which are cached, computed for each batch, or part of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trainable_candle as tc
from trainable_candle.data import TextCache
from trainable_candle.data.folder import counted
from trainable_candle.distributed.group import first_before_others
from trainable_candle.tasks.latent.data import cache_options, folder_for_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainable_candle import Tensor
    from trainable_candle.data import Dataset
    from trainable_candle.distributed.group import Group
    from trainable_candle.tasks.latent.model import LatentModel
    from trainable_candle.tasks.task import Split


@dataclass(frozen=True)
class Texts:
    """Maps captions to text features."""

    inputs: Callable[[Sequence[str]], Mapping[str, Tensor]]
    """Maps captions to the text inputs of a step: to tokens if `features` is a function, to text
    features if `features` is None."""
    features: Callable[[Mapping[str, Tensor], int], Mapping[str, Tensor]] | None = None
    """Maps tokens and the batch size to text features; called within the step, so that gradients
    reach the text encoders. None if `inputs` returns text features."""


def prepare_texts(
    family: LatentModel,
    data: Split[Dataset],
    prompts: Sequence[str],
    report: Callable[[str], None],
    group: Group,
) -> tuple[Texts, dict[str, dict[str, Tensor]]]:
    """Prepare the mapping from captions to text features, and free the text encoders if possible.

    The encoders are freed if the features of all captions are cached.

    Args:
        family: the model.
        data: the data with the captions.
        prompts: texts whose features are needed after the encoders have been freed.
        report: gets lines for the user if features are cached.
        group: the processes that compute features together; all must call this function.

    Returns:
        The mapping; and, if the encoders have been freed, the features of each prompt, else an
        empty dict.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: the encoders cannot be read, a text does
            not suit them, or the cache has no folder that can be written to.
        OSError: a file cannot be read, or the cache cannot be written.
        DistributedError: another process has failed.
    """
    config = family.config
    # Pass the family's methods, not an encoder's: a reference to an encoder's method would keep the
    # encoder in memory.
    if config.train_text_encoder:
        return Texts(family.tokens, family.encode_tokens), {}
    # If `caption_variants` is 0, tags get a new order each time, so features cannot be cached.
    if config.cache == "off" or not config.caption_variants:
        return Texts(tc.no_grad()(family.features)), {}
    with first_before_others(group):
        identity = family.text_identity()
    # The family gives no identity if its features need no encoder: a cache would save no time.
    if identity is None:
        return Texts(family.features), {}
    # The family gives each caption a size (`size_of`), such as a number of rows of tokens. Captions
    # of equal size are encoded together, as long as their sizes sum up to at most `most_size`.
    cache = TextCache(
        family.features,
        cache_options(config),
        identity,
        folder=folder_for_cache(config, data.train, report),
        most_size=family.text_rows_at_once(),
        size_of=family.text_length,
    )
    captions = data.train.possible_captions()
    if data.validation is not None:
        batches = data.validation.fixed_batches(batch_size=1)
        captions += [caption for batch in batches for caption in batch.captions]
    filled = cache.fill(captions, progress=True, report=report, group=group)
    report(f"captions: {filled}")
    # If all captions were cached before (`filled.made` is 0), an earlier run has logged this note;
    # then do not load the tokenizers only for it.
    truncated = [caption for caption in captions if filled.made and family.truncates(caption)]
    if truncated:
        report(
            f"note: the text encoders do not read the end of {counted(len(truncated), 'caption')}, "
            f"such as `{truncated[0][:40]}...`"
        )
    with tc.no_grad():
        of_prompts = {prompt: family.features([prompt]) for prompt in prompts}
    family.drop_text_models()
    return Texts(cache.batch), of_prompts
