"""Test loss curves and grids of images."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainable_candle.errors import ArgumentError
from trainable_candle.plot import image_grid, loss_curve, running_mean, save_png


def test_grid_puts_images_row_by_row() -> None:
    # Three images of two rows of three pixels; all pixels of image N have the value N.
    images = np.arange(3, dtype=np.uint8)[:, None, None].repeat(2, 1).repeat(3, 2)
    grid = np.asarray(image_grid(images, columns=2, gap=1))
    white = 255
    # Rows of pixels of the grid: two with the images 0 and 1, the gap, and two with the image 2.
    upper = [0, 0, 0, white, 1, 1, 1]
    lower = [2, 2, 2, white, white, white, white]
    np.testing.assert_array_equal(grid, [upper, upper, [white] * 7, lower, lower])


def test_grid_enlarges_and_keeps_colours() -> None:
    images = np.zeros((1, 2, 2, 3), dtype=np.uint8)
    images[0, 0, 1] = (9, 8, 7)
    grid = np.asarray(image_grid(images, scale=3))
    assert grid.shape == (6, 6, 3)
    np.testing.assert_array_equal(grid[0:3, 3:6], np.broadcast_to((9, 8, 7), (3, 3, 3)))


def test_grid_is_about_square_by_default() -> None:
    # Ten images make four columns and three rows.
    assert image_grid(np.zeros((10, 8, 8), dtype=np.uint8), gap=0).size == (32, 24)


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 8), (1, 8, 8, 4), (1, 2, 3, 4, 5)])
def test_grid_rejects_arrays_that_are_no_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="image_grid: the images have shape"):
        image_grid(np.zeros(shape, dtype=np.uint8))


@pytest.mark.parametrize("options", [{"columns": 0}, {"scale": 0}, {"gap": -1}])
def test_grid_rejects_impossible_numbers(options: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="expected at least one column"):
        image_grid(np.zeros((1, 2, 2), dtype=np.uint8), **options)


def test_saved_images_are_read_unchanged(tmp_path: Path) -> None:
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    save_png(image, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as read:
        np.testing.assert_array_equal(np.asarray(read), np.asarray(image))
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("count", [1, 19, 20, 400])
def test_running_mean_is_over_a_twentieth_of_the_values(count: int) -> None:
    values = np.random.default_rng(0).normal(size=count)
    width = max(1, count // 20)
    expected = [values[max(0, i + 1 - width) : i + 1].mean() for i in range(count)]
    np.testing.assert_allclose(running_mean(values.tolist()), expected, rtol=0, atol=1e-12)


def test_loss_curve_is_drawn(tmp_path: Path) -> None:
    loss_curve(tmp_path / "loss.png", list(range(1, 101)), [1 / n for n in range(1, 101)])
    with Image.open(tmp_path / "loss.png") as image:
        assert image.format == "PNG"
        # A blank image would have one colour.
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 10


@pytest.mark.parametrize(("steps", "losses"), [([], []), ([1, 2], [0.5])])
def test_loss_curve_needs_at_least_one_step_and_a_loss_for_each(
    tmp_path: Path, steps: list[int], losses: list[float]
) -> None:
    with pytest.raises(ArgumentError, match="loss_curve: found"):
        loss_curve(tmp_path / "loss.png", steps, losses)
    assert list(tmp_path.iterdir()) == []


def test_the_error_without_matplotlib_says_how_to_install_it(tmp_path: Path) -> None:
    code = f"""
import sys; sys.modules["matplotlib"] = None
from pathlib import Path; import trainable_candle.plot as plot
plot.loss_curve(Path({str(tmp_path)!r}) / "loss.png", [1], [1.0])"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert 'pip install "trainable-candle[plot]"' in result.stderr
