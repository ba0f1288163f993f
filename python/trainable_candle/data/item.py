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
    """The factor of the image's loss; `prior_loss_weight` is included for regularisation images."""
    repeats: float
    """How often the image occurs in an epoch, on average."""
    mask: str
    """Where the image's mask comes from: `file`, `alpha`, or `off` for no mask."""

    @property
    def has_mask(self) -> bool:
        """Whether the loss may weigh some pixels less."""
        if self.mask == "alpha":
            return self.picture.transparent
        return self.mask == "file" and self.picture.mask is not None

    @property
    def seed(self) -> int:
        """The seed of the image's random choices; it depends only on the content of its file."""
        return int(self.picture.digest[:8], 16)
