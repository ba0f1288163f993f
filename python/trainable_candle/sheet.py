"""Overviews of a run's previews by step and prompt: a web page, and a sheet of thumbnails."""

from __future__ import annotations

import html
import os
import re
from typing import TYPE_CHECKING, Final

from PIL import Image, ImageDraw

from trainable_candle import plot
from trainable_candle.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PAGE: Final = "index.html"
SHEET: Final = "previews.png"
_NAME: Final = re.compile(r"step-(\d+)(?:-(\d+))?\.png")
"""The names of the files of `preview_path`: the step and, if any, the number of the prompt."""
_SIDE: Final = 192
"""The greatest width and height of a thumbnail, px."""
_COLUMNS: Final = 12
"""The most steps on the sheet; the page shows all steps."""
_LINE: Final = 14
"""Height of a line of text, px."""
_GAP: Final = 4
"""Space between thumbnails and at the edges of the sheet, px."""


def preview_path(folder: Path, step: int, number: int | None = None) -> Path:
    """Return the path of the preview after `step` steps.

    Without `number`, the file has the images of all prompts. With `number`, it has the image of
    the prompt with this number; prompts are counted from 1.
    """
    name = f"step-{step:06d}"
    return folder / (f"{name}.png" if number is None else f"images/{name}-{number}.png")


def write_sheet(folder: Path, prompts: Sequence[str]) -> None:
    """Write `index.html` into a folder of previews, and `previews.png` into the parent folder.

    If the folder has no preview yet, only `index.html` is written.

    Args:
        folder: the folder with the files of `preview_path`. If there are several prompts, a step
            has a file for each prompt and one file for all. If there is one prompt, a step has only
            the file for all.
        prompts: the prompts, in the order of the images.

    Raises:
        OSError: a file cannot be read or written.
    """
    previews = _previews(folder, len(prompts))
    write_atomically(folder / PAGE, _page(folder, prompts, previews))
    if previews:
        plot.save_png(_sheet(prompts, previews), folder.parent / SHEET)


def _previews(folder: Path, count: int) -> dict[int, list[Path]]:
    """Return the paths of each step's images, in the order of the prompts, by step.

    A step that lacks the image of a prompt is left out.

    Args:
        folder: as for `write_sheet`.
        count: the number of prompts.
    """

    def images_of(step: int) -> list[Path]:
        return [preview_path(folder, step, number) for number in range(1, count + 1)]

    if count == 1:
        matches = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
        found = {int(match[1]): [path] for match, path in matches if match and match[2] is None}
    else:
        names = {path.name for path in (folder / "images").glob("step-*.png")}
        steps = {int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
        found = {
            step: images_of(step)
            for step in steps
            if names.issuperset(path.name for path in images_of(step))
        }
    return dict(sorted(found.items()))


def _page(folder: Path, prompts: Sequence[str], previews: Mapping[int, Sequence[Path]]) -> str:
    """Return the page: a row of images for each step, the latest first."""
    head = "".join(f"<th>{html.escape(prompt)}</th>" for prompt in prompts)
    rows = []
    for step in sorted(previews, reverse=True):
        paths = [os.path.relpath(path, folder) for path in previews[step]]
        cells = "".join(
            f'<td><a href="{link}"><img src="{link}" loading="lazy" alt="step {step}"></a></td>'
            for link in [html.escape(path, quote=True) for path in paths]
        )
        rows.append(f"<tr><th>{step}</th>{cells}</tr>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Previews</title>\n'
        "<style>body{font:14px sans-serif;margin:1em}table{border-collapse:collapse}"
        "th,td{padding:.3em;vertical-align:top;text-align:left;max-width:24em}"
        "tr:first-child th{position:sticky;top:0;background:#fff}"
        "img{max-width:24em;max-height:24em}</style></head>\n"
        f"<body><table>\n<tr><th>step</th>{head}</tr>\n" + "\n".join(rows) + "\n</table></body>"
        "</html>\n"
    )


def _sheet(prompts: Sequence[str], previews: Mapping[int, Sequence[Path]]) -> Image.Image:
    """Return the sheet: for each prompt a row of thumbnails, with a column for each step."""
    steps = list(previews)
    if len(steps) > _COLUMNS:
        # Choose steps at equal distances, the first and the last among them.
        last = len(steps) - 1
        steps = [steps[round(n * last / (_COLUMNS - 1))] for n in range(_COLUMNS)]
    rows = [[_thumbnail(previews[step][n]) for step in steps] for n in range(len(prompts))]
    width = max(image.width for row in rows for image in row)
    heights = [max(image.height for image in row) + _LINE for row in rows]
    lefts = [_GAP + column * (width + _GAP) for column in range(len(steps))]
    size = (len(steps) * (width + _GAP) + _GAP, _LINE + _GAP + sum(heights))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for left, step in zip(lefts, steps, strict=True):
        draw.text((left, 2), f"step {step}", fill="black")
    top = _LINE + _GAP
    for prompt, row, height in zip(prompts, rows, heights, strict=True):
        # Pillow's built-in font has Latin letters only.
        text = prompt.encode("latin-1", "replace").decode("latin-1")
        draw.text((_GAP, top), text, fill="black")
        for left, image in zip(lefts, row, strict=True):
            sheet.paste(image, (left, top + _LINE))
        top += height
    return sheet


def _thumbnail(path: Path) -> Image.Image:
    """Return an image in RGB, reduced to at most `_SIDE` px in width and in height."""
    with Image.open(path) as image:
        small: Image.Image = image.convert("RGB")
    small.thumbnail((_SIDE, _SIDE))
    return small
