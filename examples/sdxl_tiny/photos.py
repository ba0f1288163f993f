"""Reads the training images, photographs of flowers, and makes their captions and crops."""

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from models import RESOLUTION

FLOWERS = ("daisy", "dandelion", "rose", "sunflower", "tulip")
HUES = (
    ("red", 345, 375),
    ("orange", 15, 40),
    ("yellow", 40, 66),
    ("purple", 255, 305),
    ("pink", 305, 345),
)
"""Colours with the hues where each begins and ends, in degrees; red ends at 375, which is 15.

Hues that belong to no colour, such as green, count as none.
"""
LEAST_SHARE = 0.08
"""A flower's colour is known if it covers more than this share of the image's middle."""


@dataclass
class Photos:
    """N photographs of flowers."""

    pixels: np.ndarray
    """The images, (N, 128, 128, 3) bytes."""
    flowers: np.ndarray
    """The index in `FLOWERS` of each image's flower, (N,)."""
    colours: list[str]
    """The colour of each image's flower; '' if it is not known."""

    def keep(self, chosen: np.ndarray) -> "Photos":
        """Return the images where `chosen`, (N,) booleans, is true."""
        colours = [colour for colour, kept in zip(self.colours, chosen, strict=True) if kept]
        return Photos(self.pixels[chosen], self.flowers[chosen], colours)

    def __len__(self) -> int:
        return len(self.pixels)


def load(folder: Path) -> Photos:
    """Read the photographs FOLDER/daisy/*.jpg, FOLDER/roses/*.jpg and so on, as small squares.

    Files with the same content as an earlier file, and files that FOLDER/LICENSE.txt does not name,
    are left out.

    Raises:
        SystemExit: no photograph is left.
    """
    # Lines that name a file begin like `daisy/123.jpg `.
    licensed = {
        line.split()[0].split("/")[1]
        for line in (folder / "LICENSE.txt").read_text("utf-8").splitlines()
        if ".jpg " in line
    }
    pixels, flowers, colours, seen = [], [], [], set()
    for index, flower in enumerate(FLOWERS):
        for path in sorted(folder.glob(f"{flower}*/*.jpg")):
            content = path.read_bytes()
            digest = hashlib.sha256(content).digest()
            if path.name not in licensed or digest in seen:
                continue
            seen.add(digest)
            with Image.open(path) as image:
                rgb = image.convert("RGB").resize(
                    (RESOLUTION, RESOLUTION), Image.Resampling.LANCZOS
                )
            pixels.append(np.asarray(rgb))
            flowers.append(index)
            colours.append(main_colour(rgb))
    if not pixels:
        raise SystemExit(f"{folder} has none of the images that its LICENSE.txt names")
    return Photos(np.stack(pixels), np.asarray(flowers), colours)


def main_colour(image: Image.Image) -> str:
    """Return the colour with the largest share of the image's middle.

    '' if this share is not above `LEAST_SHARE`. The share of white is multiplied by 0.7.
    """
    border = RESOLUTION // 8
    middle = image.crop((border, border, RESOLUTION - border, RESOLUTION - border))
    hue, saturation, value = np.moveaxis(np.asarray(middle.convert("HSV"), np.float32), -1, 0)
    hue *= 360 / 256
    # Hue is in degrees from here on; saturation and value are in bytes.
    strong = (saturation > 100) & (value > 80)
    # For each colour, the share of pixels that have it.
    shares = {
        name: float(np.mean(strong & (((hue - low) % 360) < high - low)))
        for name, low, high in HUES
    }
    pale = (saturation <= 140) & (saturation > 50) & (value > 150)
    # Pale pixels of hues from 320 to 375 count as pink, too; those that are also strong, with a hue
    # below 345, count twice.
    shares["pink"] += float(np.mean(pale & (((hue - 320) % 360) < 55)))
    shares["white"] = 0.7 * float(np.mean((saturation <= 45) & (value > 170)))
    colour = max(shares, key=lambda name: shares[name])
    return colour if shares[colour] > LEAST_SHARE else ""


def captions(flower: str, colour: str) -> list[str]:
    """Return the captions for images of this flower and colour; '' is no colour.

    Each training step draws one of them for each image. The usual wording is in the list twice
    (without a colour, three times), so it is drawn most often.
    """
    named = f"{colour} {flower}".strip()
    plural = f"{named[:-1]}ies" if flower == "daisy" else f"{named}s"
    article = "an" if named[0] in "aeiou" else "a"
    return [
        f"a photo of {article} {named}",
        f"a photo of {article} {named}",
        f"{article} {named}",
        f"a close-up photo of {article} {named}, nature photography",
        f"a photo of a {flower}",
        f"a {flower}",
        f"a photo of {plural}",
    ]


def crops(photos: Photos, variants: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make `variants` crops of each of N photographs.

    Of eight crops, four are the unchanged photograph, three are a part of it after it was enlarged,
    and one is the whole photograph, blurred. Each crop is mirrored with probability 1/2.

    Returns:
        The pixels, (variants * N, 128, 128, 3); the index of each crop's photograph,
        (variants * N,); and SDXL's time ids, (variants * N, 6): original height and width, top and
        left of the crop, target height and width. As the original size, a blurred photograph has
        the small size that it was enlarged from.
    """
    generator = random.Random(seed)
    pixels, sources, ids = [], [], []
    for variant in range(variants):
        for index in range(len(photos)):
            image = Image.fromarray(photos.pixels[index])
            original, top, left = RESOLUTION, 0, 0
            if variant % 8 == 7:
                original = RESOLUTION // 2
                image = image.resize((original, original), Image.Resampling.LANCZOS)
                image = image.resize((RESOLUTION, RESOLUTION), Image.Resampling.BICUBIC)
            elif variant % 2:
                size = generator.randint(RESOLUTION + 1, RESOLUTION * 5 // 4)
                top, left = (generator.randint(0, size - RESOLUTION) for _ in range(2))
                image = image.resize((size, size), Image.Resampling.BICUBIC)
                image = image.crop((left, top, left + RESOLUTION, top + RESOLUTION))
            if generator.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            pixels.append(np.asarray(image))
            sources.append(index)
            ids.append((original, original, top, left, RESOLUTION, RESOLUTION))
    return np.stack(pixels), np.asarray(sources), np.asarray(ids)
