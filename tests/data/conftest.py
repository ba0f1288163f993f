"""A fixture that makes folders of images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

MakeImages = Callable[..., list[Path]]


@pytest.fixture
def images(tmp_path: Path) -> MakeImages:
    """A function that writes noise images with captions into a folder below `tmp_path`.

    Each size is (width, height) in px. Further arguments go to `Image.save`. The function returns
    the paths of the images.
    """

    def make(folder: str, *sizes: tuple[int, int], suffix: str = ".png", **save: Any) -> list[Path]:
        target = tmp_path / folder
        target.mkdir(parents=True, exist_ok=True)
        paths = []
        for number, (width, height) in enumerate(sizes):
            rng = np.random.default_rng([number, width, height])
            path = target / f"{number:02d}{suffix}"
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path, **save)
            path.with_suffix(".txt").write_text(f"image {number}, tag a, tag b, tag c")
            paths.append(path)
        return paths

    return make
