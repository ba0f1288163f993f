"""Folders of images made for a test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

MakePictures = Callable[..., list[Path]]


@pytest.fixture
def pictures(tmp_path: Path) -> MakePictures:
    """A function that writes noise images with captions into a folder below `tmp_path`.

    The sizes are (width, height) in px.
    """

    def make(folder: str, *sizes: tuple[int, int], suffix: str = ".png", **save: Any) -> list[Path]:
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        paths = []
        for number, (width, height) in enumerate(sizes):
            rng = np.random.default_rng([number, width, height])
            path = place / f"{number:02d}{suffix}"
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path, **save)
            path.with_suffix(".txt").write_text(f"image {number}, tag a, tag b, tag c")
            paths.append(path)
        return paths

    return make
