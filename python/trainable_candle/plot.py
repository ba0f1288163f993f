"""Images of results: loss curves, grids of samples, and PNG files."""

from __future__ import annotations

import io
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from trainable_candle.errors import ArgumentError
from trainable_candle.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt


def prepare() -> None:
    """Import matplotlib, if it is installed, in the background for `loss_curve`.

    The import takes half a second, during which training already runs.
    """

    def load() -> None:
        # `loss_curve` reports a missing matplotlib.
        with suppress(ImportError):
            import matplotlib.backends.backend_agg  # noqa: PLC0415 - optional, and slow to import
            import matplotlib.figure  # noqa: F401, PLC0415

    threading.Thread(target=load, name="plot").start()


def loss_curve(
    path: Path,
    steps: Sequence[int],
    losses: Sequence[float],
    *,
    validation: Sequence[tuple[int, float]] = (),
    title: str = "Training loss",
) -> None:
    """Draw the losses of all steps, their running mean (`running_mean`), and the validation losses.

    Args:
        path: the PNG file to write.
        steps: the steps that the losses belong to, ascending.
        losses: the loss of each step.
        validation: pairs of a step and its validation loss, in ascending order of the steps.
        title: the title above the curve.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to install it.
        ArgumentError: there is no loss, or the numbers of steps and losses differ.
        OSError: the file cannot be written.
    """
    if not losses or len(steps) != len(losses):
        raise ArgumentError(
            f"loss_curve: found {len(steps)} steps and {len(losses)} losses, "
            "expected equal numbers of at least 1"
        )
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "loss_curve: matplotlib, which draws the curve, is not installed; "
            'run: pip install "trainable-candle[plot]"',
            name=error.name,
        ) from error

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="each step")
    axes.plot(steps, running_mean(losses), color="tab:blue", linewidth=1.6, label="running mean")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="tab:orange", label="validation")
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def running_mean(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return, for each value, the mean of the last `width` values up to and including this one.

    `width` is a twentieth of the number of values, at least 1. The mean is over all values so far
    while these are fewer than `width`.
    """
    width = max(1, len(values) // 20)
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    mean: npt.NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
    return mean


def image_grid(
    images: npt.NDArray[np.uint8], *, columns: int | None = None, scale: int = 1, gap: int = 1
) -> Image.Image:
    """Return one image with the given images in rows, on white.

    Args:
        images: the images, (n, height, width) for grey or (n, height, width, 3) for RGB, with n
            at least 1.
        columns: the number of images in a row; by default the grid is about square.
        scale: every pixel is drawn as a square of scale x scale pixels.
        gap: the number of pixels between images, before scaling.

    Raises:
        ArgumentError: the shape is wrong, or a number is out of its range.
    """
    count = len(images)
    if images.ndim not in {3, 4} or count == 0 or images.shape[3:] not in {(), (3,)}:
        raise ArgumentError(
            f"image_grid: the images have shape {images.shape}, "
            "expected (n, height, width) or (n, height, width, 3) with n at least 1"
        )
    columns = min(count, columns if columns is not None else int(np.ceil(np.sqrt(count))))
    if columns < 1 or scale < 1 or gap < 0:
        raise ArgumentError(
            f"image_grid: {columns} columns, scale {scale}, gap {gap}; "
            "expected at least one column, a scale of at least 1, a gap of at least 0"
        )
    height, width = images.shape[1:3]
    rows = -(-count // columns)  # rounded up
    size = (rows * (height + gap) - gap, columns * (width + gap) - gap)
    grid = np.full((*size, *images.shape[3:]), 255, dtype=np.uint8)
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        top, left = row * (height + gap), column * (width + gap)
        grid[top : top + height, left : left + width] = image
    return Image.fromarray(grid.repeat(scale, axis=0).repeat(scale, axis=1))


def visible_scale(images: npt.NDArray[np.uint8]) -> int:
    """Return the `scale` of `image_grid` that makes small images visible: max(1, 64 // height)."""
    return max(1, 64 // int(images.shape[1]))


def padded(images: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    """Stack RGB images; pad each with white, below and at the right, to the largest size."""
    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    stack = np.full((len(images), height, width, 3), 255, np.uint8)
    for canvas, image in zip(stack, images, strict=True):
        canvas[: image.shape[0], : image.shape[1]] = image
    return stack


def save_png(image: Image.Image, path: Path, parameters: str | None = None) -> None:
    """Write an image as PNG.

    Args:
        image: the image.
        path: the file.
        parameters: the text of the PNG entry `parameters`, from which A1111 and other tools read
            the prompt; None writes no such entry.

    Raises:
        OSError: the file cannot be written.
    """
    buffer = io.BytesIO()
    entries = PngInfo()
    if parameters is not None:
        entries.add_text("parameters", parameters)
    image.save(buffer, format="PNG", pnginfo=entries)
    write_atomically(path, buffer.getvalue())
