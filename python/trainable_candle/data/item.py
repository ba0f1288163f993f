"""An image of the data set with its bucket and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainable_candle.data.buckets import Fit
    from trainable_candle.data.folder import ImageFile


@dataclass(frozen=True)
class Item:
    """An image, how it is fitted to a bucket, and the settings of its folder."""

    image: ImageFile
    """The image's file, size, caption and mask."""
    fit: Fit
    """How the image is scaled and cropped to its bucket."""
    trigger: str
    """The tag that is put before the caption; empty for none."""
    loss_weight: float
    """The factor by which the image's loss is multiplied; for a regularisation image, it includes
    `prior_loss_weight`."""
    repeats: float
    """How often the image occurs in an epoch, on average."""
    mask: str
    """The source of masks for the folder's images: `file`, `alpha` (the alpha channel) or `off`."""

    @property
    def has_mask(self) -> bool:
        """Whether the image has a mask of the kind that `mask` selects."""
        if self.mask == "alpha":
            return self.image.transparent
        return self.mask == "file" and self.image.mask is not None

    @property
    def seed(self) -> int:
        """A seed for random choices about the image; it depends only on the content of its file."""
        return int(self.image.digest[:8], 16)
