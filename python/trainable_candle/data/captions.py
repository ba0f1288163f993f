"""Reads captions beside images, and transforms them for training."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from trainable_candle.draws import generator, pair
from trainable_candle.errors import DatasetError
from trainable_candle.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainable_candle.data.options import CaptionOptions

METADATA: Final = "metadata.jsonl"
"""The name of a file with the captions of the images in and below its folder."""
CAPTION_SUFFIXES: Final = (".txt", ".caption")
"""Suffixes of caption files, in the order of preference if an image has several such files."""
_COLUMNS: Final = ("text", "caption", "prompt")
"""Fields of a line of `METADATA`; the first of them with a string has the caption."""


def read_caption(path: Path) -> str | None:
    """Return the caption in the `.txt` or `.caption` file beside an image; None without a file.

    Args:
        path: the image.

    Raises:
        DatasetError: the file cannot be read as UTF-8.
    """
    for suffix in CAPTION_SUFFIXES:
        file = path.with_suffix(suffix)
        try:
            if file.is_file():
                return file.read_text(encoding="utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise DatasetError(f"{file}: the caption cannot be read: {error}") from error
    return None


def read_metadata(folder: Path) -> dict[Path, str]:
    """Return the captions in a folder's `metadata.jsonl`, by image; none if there is no such file.

    Each line is a JSON object with `file_name`, relative to the folder, and the caption as `text`,
    `caption` or `prompt`: the layout of Hugging Face's `imagefolder`. A name is rejected if the
    image's folder is outside `folder`, whether because of the name (`../a.png`) or because of a
    symbolic link to a folder. The image itself may be a symbolic link to a file elsewhere, as in
    Hugging Face's cache.

    Raises:
        DatasetError: the file cannot be read; a line is not such an object, names a file outside
            the folder, or gives an image another caption than an earlier line (the message names
            the line).
    """
    path = folder / METADATA
    if not path.is_file():
        return {}
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"dataset: {path} cannot be read: {error}") from error
    captions: dict[Path, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            name, caption = _entry(line)
            image = _inside(folder, name)
            if captions.setdefault(image, caption) != caption:
                raise ValueError(f"{name} has another caption in an earlier line")  # noqa: TRY301 - with the line's number
        except (ValueError, OSError) as error:
            raise DatasetError(f"dataset: {path}, line {number}: {error}") from error
    return captions


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file in or below a folder, from its name relative to the folder.

    Raises:
        ValueError: the path is outside the folder.
        OSError: the name is not a valid file name.
    """
    relative = PurePath(name)
    path = folder / relative
    parent = path.parent.resolve()
    if (
        relative.is_absolute()
        or ".." in relative.parts
        or not relative.parts
        or not parent.is_relative_to(folder.resolve())
    ):
        raise ValueError(f"{name!r} is not in {folder}; expected a name relative to this folder")
    return path


def _entry(line: str) -> tuple[str, str]:
    """Return the file name and the caption in a line of `METADATA`.

    Raises:
        ValueError: the line has no such name or caption; the message ends a sentence about the
            line.
    """
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    name = entry.get("file_name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError('has no `file_name`; expected {"file_name": "a.png", "text": "a cat"}')
    captions = [entry[column] for column in _COLUMNS if isinstance(entry.get(column), str)]
    if not captions:
        raise ValueError(f"has no caption for {name}; expected one of {', '.join(_COLUMNS)}")
    return name, captions[0].strip()


class CaptionMaker:
    """Transforms captions as `CaptionOptions` say.

    Line breaks and repeated spaces become single spaces. Brackets and braces are ordinary
    characters: they set neither weights nor alternatives.

    Args:
        options: the transformations.
        seed: at least 0.
    """

    def __init__(self, options: CaptionOptions, seed: int) -> None:
        self.options = options
        self._seed = seed

    def plain(self, caption: str, trigger: str) -> str:
        """Return the trigger and the whole caption, with its tags in order, as in validation.

        The trigger is not added to a caption that already begins with it as a whole word.
        """
        caption = " ".join(caption.split())
        next_character = caption[len(trigger) : len(trigger) + 1]
        if not trigger or (caption.startswith(trigger) and not next_character.isalnum()):
            return caption
        return f"{trigger}{self._joint}{caption}" if caption else trigger

    def use(self, caption: str, trigger: str, image_seed: int, sample: int) -> str:
        """Return the caption of an image in one sample of training; empty if it is dropped.

        Args:
            caption: the image's caption as it was read.
            trigger: the words that come first; empty: none.
            image_seed: the image's seed, a number that depends only on the content of its file.
            sample: the number of the sample in the run.
        """
        if not self.options.dropout and not self._varies:
            return self.plain(caption, trigger)
        rng = generator(self._seed, "caption", sample)
        dropped, choice = rng.random() < self.options.dropout, int(rng.integers(2**31))
        if dropped:
            return ""
        if self._varies:
            variants = self.options.variants  # 0: no limit, each sample draws a new variant
            return self._variant(
                caption, trigger, image_seed, choice % variants if variants else choice
            )
        return self.plain(caption, trigger)

    def possible(self, caption: str, trigger: str, image_seed: int) -> Iterator[str]:
        """Yield each caption that `use` can return for an image; `endless` must be False.

        The arguments are as for `use`.
        """
        if self.options.dropout > 0:
            yield ""
        if self._varies:
            for number in range(self.options.variants):
                yield self._variant(caption, trigger, image_seed, number)
        else:
            yield self.plain(caption, trigger)

    @property
    def endless(self) -> bool:
        """Whether each sample draws a new variant of its caption, so that `possible` has no end."""
        return self._varies and self.options.variants == 0

    @property
    def _varies(self) -> bool:
        """Whether the variants of a caption differ."""
        return self.options.shuffle or self.options.tag_dropout > 0

    @property
    def _joint(self) -> str:
        """What separates the tags of a transformed caption."""
        return f"{self.options.separator.strip()} "

    def _variant(self, caption: str, trigger: str, image_seed: int, number: int) -> str:
        """Return variant `number` of an image's caption: some tags, perhaps in random order."""
        rng = generator(self._seed, "caption_variant", pair(image_seed, number))
        options = self.options
        own_tags, tags = self._tags(caption), self._tags(self.plain(caption, trigger))
        # `keep_tokens` counts tags of the caption; a trigger that `plain` prepends stays as well.
        kept = options.keep_tokens + len(tags) - len(own_tags)
        head, tail = tags[:kept], tags[kept:]
        stays = rng.random(len(tail)) >= options.tag_dropout
        tail = [tag for tag, stay in zip(tail, stays, strict=True) if stay]
        if options.shuffle:
            tail = [tail[place] for place in rng.permutation(len(tail))]
        return self._joint.join([*head, *tail])

    def _tags(self, caption: str) -> list[str]:
        parts = " ".join(caption.split()).split(self.options.separator.strip())
        return [tag for part in parts if (tag := part.strip())]
