"""Write folders with the configurations of published models, and a data set of one image."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

# `facts_only` is in `benches/`.
sys.path.insert(0, str(Path(__file__).parents[2] / "benches"))

from facts_only import MODELS, write_model

__all__ = ["MODELS", "write_image", "write_model"]


def write_image(folder: Path, side: int = 1024) -> Path:
    """Write a data set of one black image of `side` x `side` px with a caption; return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((side, side, 3), np.uint8)).save(folder / "a.png")
    (folder / "a.txt").write_text("a square")
    return folder
