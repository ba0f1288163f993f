"""Overviews of a run's previews, for each step and prompt: a web page and an image."""

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
_SIDE: Final = 192
"""The greatest width and height of a thumbnail, px."""
_COLUMNS: Final = 12
"""The most steps on the image; the page shows all steps."""
_LINE: Final = 14
"""Height of a line of text, px."""


def preview_path(folder: Path, step: int, number: int | None = None) -> Path:
    """Return the file of the preview after `step` steps.

    Without `number`, the file has the images of all prompts. With `number`, it has the image of
    this prompt; prompts are counted from 1.
    """
    name = f"step-{step:06d}"
    return folder / (f"{name}.png" if number is None else f"images/{name}-{number}.png")


def write_sheet(folder: Path, prompts: Sequence[str]) -> None:
    """Write `index.html` into a folder of previews, and `previews.png` beside the folder.

    Args:
        folder: the folder with the files of `preview_path`. If there are several prompts, a step
            has a file for each prompt and one file for all. If there is one prompt, a step has only
            the file for all.
        prompts: the prompts, in the order of the images.

    Raises:
        OSError: a file cannot be read or written.
    """
    found = _previews(folder, len(prompts))
    write_atomically(folder / PAGE, _page(folder, prompts, found))
    if found:
        plot.save_png(_picture(prompts, found), folder.parent / SHEET)


def _previews(folder: Path, count: int) -> dict[int, list[Path]]:
    """Return the images of each step that has all of them, in the order of the prompts."""

    def images_of(step: int) -> list[Path]:
        return [preview_path(folder, step, number) for number in range(1, count + 1)]

    if count == 1:
        matches = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
        found = {int(m[1]): [path] for m, path in matches if m and m[2] is None}
    else:
        names = {path.name for path in (folder / "images").glob("step-*.png")}
        steps = {int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
        found = {
            step: images_of(step)
            for step in steps
            if names.issuperset(path.name for path in images_of(step))
        }
    return dict(sorted(found.items()))


def _page(folder: Path, prompts: Sequence[str], found: Mapping[int, Sequence[Path]]) -> str:
    head = "".join(f"<th>{html.escape(prompt)}</th>" for prompt in prompts)
    rows = []
    for step in sorted(found, reverse=True):
        paths = found[step]
        places = [html.escape(os.path.relpath(path, folder), quote=True) for path in paths]
        cells = "".join(
            f'<td><a href="{place}"><img src="{place}" loading="lazy" alt="step {step}"></a></td>'
            for place in places
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


def _picture(prompts: Sequence[str], found: Mapping[int, Sequence[Path]]) -> Image.Image:
    steps = list(found)
    if len(steps) > _COLUMNS:
        last = len(steps) - 1
        steps = [steps[round(n * last / (_COLUMNS - 1))] for n in range(_COLUMNS)]
    rows = [[_thumbnail(found[step][n]) for step in steps] for n in range(len(prompts))]
    width = max(image.width for row in rows for image in row)
    heights = [max(image.height for image in row) + _LINE for row in rows]
    sheet = Image.new("RGB", (len(steps) * (width + 4) + 4, _LINE + 4 + sum(heights)), "white")
    draw = ImageDraw.Draw(sheet)
    for column, step in enumerate(steps):
        draw.text((4 + column * (width + 4), 2), f"step {step}", fill="black")
    top = _LINE + 4
    for prompt, row, height in zip(prompts, rows, heights, strict=True):
        # Pillow's built-in font has Latin letters only.
        text = prompt.encode("latin-1", "replace").decode("latin-1")
        draw.text((4, top), text, fill="black")
        for column, image in enumerate(row):
            sheet.paste(image, (4 + column * (width + 4), top + _LINE))
        top += height
    return sheet


def _thumbnail(path: Path) -> Image.Image:
    with Image.open(path) as image:
        small: Image.Image = image.convert("RGB")
    small.thumbnail((_SIDE, _SIDE))
    return small
