"""An image of the data set with its settings, before it is encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainable_candle.data.buckets import Fit
    from trainable_candle.data.folder import Picture


@dataclass(frozen=True)
class Item:
    """An image with the settings of its folder."""

    picture: Picture
    fit: Fit
    trigger: str
    loss_weight: float
    """The weight in the loss; for regularisation images, times `prior_loss_weight`."""
    repeats: float
    mask: str
    """`off`, `file` or `alpha`."""

    @property
    def has_mask(self) -> bool:
        """Whether the loss may weigh some pixels less."""
        if self.mask == "alpha":
            return self.picture.transparent
        return self.mask == "file" and self.picture.mask is not None

    @property
    def seed(self) -> int:
        """Seed of the image's random choices, independent of the other images."""
        return int(self.picture.digest[:8], 16)
