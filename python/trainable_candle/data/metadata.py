"""Metadata in adapter files about the images, under the names of kohya's scripts and ModelSpec."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle.data.item import Item

_LEAST_COUNT: Final = 2
"""A tag is in `modelspec.tags` only if it occurs at least this many times in the captions."""
_MOST_TAGS: Final = 10
"""The greatest number of tags in `modelspec.tags`."""


def described(items: Sequence[Item], separator: str) -> dict[str, str]:
    """Return metadata for the header of an adapter file: folders, tag counts, buckets, common tags.

    Folders with the same name count as one folder, with the repeats of its first image. Entries
    with empty text are left out.

    Args:
        items: the images that are trained on.
        separator: the text that separates a caption's tags.
    """
    folders: dict[str, dict[str, Any]] = {}
    tags: dict[str, Counter[str]] = {}
    buckets: Counter[tuple[int, int]] = Counter()
    for item in items:
        name = item.image.path.parent.name
        facts = folders.setdefault(name, {"n_repeats": item.repeats, "img_count": 0})
        facts["img_count"] += 1
        tags.setdefault(name, Counter()).update(_split(item.image.caption, separator))
        buckets[(item.fit.bucket.width, item.fit.bucket.height)] += 1
    for facts in folders.values():
        # Kohya's scripts write whole numbers, so 2.0 becomes 2.
        if float(facts["n_repeats"]).is_integer():
            facts["n_repeats"] = int(facts["n_repeats"])
    bucket_info = {
        str(number): {"resolution": list(size), "count": count}
        for number, (size, count) in enumerate(sorted(buckets.items()))
    }
    frequent = sum(tags.values(), Counter()).most_common(_MOST_TAGS)
    entries = {
        "ss_dataset_dirs": _text(folders),
        "ss_tag_frequency": _text({name: dict(counts) for name, counts in tags.items()}),
        "ss_bucket_info": _text({"buckets": bucket_info}),
        "modelspec.tags": ", ".join(tag for tag, count in frequent if count >= _LEAST_COUNT),
    }
    return {name: text for name, text in entries.items() if text}


def _split(caption: str, separator: str) -> list[str]:
    parts = " ".join(caption.split()).split(separator.strip())
    return [tag for part in parts if (tag := part.strip())]


def _text(value: object) -> str:
    # `json.dumps` escapes what is not ASCII. So a folder's name may have bytes that are not UTF-8:
    # Python represents them by surrogates, which could not be encoded without escapes.
    return json.dumps(value)
