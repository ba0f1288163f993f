"""The titles of the sections of `--help`, in the order in which `--help` prints them."""

from typing import Final

MODEL: Final = "model and data"
IMAGES: Final = "images"
CAPTIONS: Final = "captions"
TEXTS: Final = "texts"
ADAPTER: Final = "adapter"
TRAINING: Final = "training"
OBJECTIVE: Final = "objective"
VALIDATION: Final = "validation and previews"
MACHINE: Final = "machine"
FILES: Final = "files"

SECTIONS: Final = (
    MODEL, IMAGES, CAPTIONS, TEXTS, ADAPTER, TRAINING, OBJECTIVE, VALIDATION, MACHINE, FILES,
)  # fmt: skip
