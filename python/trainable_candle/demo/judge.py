"""An independent judge of drawn digits: is each the digit asked for, and do the drawings differ?

The judge is a support vector machine of scikit-learn. It is fitted on real images that were used to
train neither the base nor the LoRA, and has no access to the model that draws. Importing this
module without scikit-learn raises ModuleNotFoundError, which names the command that installs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

try:
    from sklearn.svm import SVC
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "demo: scikit-learn, which judges the samples, is not installed; "
        'run: pip install "trainable-candle[demo]"',
        name=error.name,
    ) from error

from trainable_candle.demo.digits import MAX_PIXEL, Digits, Labels, Pixels

if TYPE_CHECKING:
    import numpy.typing as npt

MOST_BEFORE: Final = 0.2
"""`Verdict.share_before` must be less than this."""
LEAST_AFTER: Final = 0.8
"""`Verdict.share_after` must be greater than this."""
LEAST_SPREAD: Final = 0.6
"""`Verdict.spread_ratio` must be at least this."""


class Judge:
    """A digit classifier (SVM, radial basis functions, C = 10) fitted on real images."""

    def __init__(self, real: Digits) -> None:
        self._classifier = SVC(C=10.0, kernel="rbf", gamma="scale")
        self._classifier.fit(_features(real.pixels), real.labels)

    def labels(self, pixels: Pixels) -> Labels:
        """Return the judge's digit for each image; shape (n,)."""
        return np.asarray(self._classifier.predict(_features(pixels)), dtype=np.uint8)

    def accuracy(self, real: Digits) -> float:
        """Return the share (0 to 1) of real images whose digit the judge gets right."""
        return float(np.mean(self.labels(real.pixels) == real.labels))

    def share(self, pixels: Pixels, digit: int) -> float:
        """Return the share (0 to 1) of the images that the judge takes for ``digit``."""
        return float(np.mean(self.labels(pixels) == digit))


@dataclass(frozen=True)
class Verdict:
    """The judgement of samples drawn without and with the LoRA."""

    digit: int
    """The digit that the base has never seen."""
    share_before: float
    """Share (0 to 1) of samples without the LoRA that are the digit."""
    share_after: float
    """Share (0 to 1) of samples with the LoRA that are the digit."""
    spread_ratio: float
    """`spread` of the samples with the LoRA, divided by `spread` of real images of the digit."""
    judge_accuracy: float
    """Share (0 to 1) of right answers of the judge about real images that it was not fitted on."""

    @property
    def passed(self) -> bool:
        """Whether the base draws the digit only with the LoRA, and these drawings differ enough."""
        return (
            self.share_before < MOST_BEFORE
            and self.share_after > LEAST_AFTER
            and self.spread_ratio >= LEAST_SPREAD
        )

    def __str__(self) -> str:
        rows = [
            ("right digit, without the LoRA", self.share_before, f"under {MOST_BEFORE:.0%}"),
            ("right digit, with the LoRA", self.share_after, f"over {LEAST_AFTER:.0%}"),
            ("spread, relative to real images", self.spread_ratio, f"at least {LEAST_SPREAD:.0%}"),
        ]
        lines = [f"  {what:38}{found:7.1%}  (expected: {wanted})" for what, found, wanted in rows]
        head = (
            f"A judge, which is right on {self.judge_accuracy:.1%} of real digits, "
            f"looks for {self.digit}:"
        )
        return "\n".join([head, *lines])


def verdict(judge: Judge, digit: int, before: Pixels, after: Pixels, train: Digits) -> Verdict:
    """Judge the samples drawn without (``before``) and with (``after``) the LoRA.

    ``train`` is the real images on which the base and the LoRA were trained. The judge was not
    fitted on them, so its accuracy is measured on them. Those of the digit also give the spread of
    real images.

    Raises:
        ValueError: ``after``, or the images of the digit in ``train``, are fewer than two.
    """
    return Verdict(
        digit=digit,
        share_before=judge.share(before, digit),
        share_after=judge.share(after, digit),
        spread_ratio=spread(after) / spread(train.only(digit).pixels),
        judge_accuracy=judge.accuracy(train),
    )


def spread(pixels: Pixels) -> float:
    """Return the mean Euclidean distance over all pairs of images, in pixel values.

    The mean is zero if all images are equal: the spread detects a model that always draws the same
    image.

    Raises:
        ValueError: there are fewer than two images.
    """
    count = len(pixels)
    if count < 2:
        raise ValueError(f"spread: found {count} images, expected at least 2")
    flat = pixels.reshape(count, -1).astype(np.float64)
    squared_norms = np.sum(flat * flat, axis=1)
    squared = squared_norms[:, None] + squared_norms[None, :] - 2.0 * (flat @ flat.T)
    # Rounding may make the squared distance of equal images negative.
    distances = np.sqrt(np.maximum(squared, 0.0))
    # The matrix has each pair of images twice, and zeros on its diagonal.
    return float(distances.sum() / (count * (count - 1)))


def _features(pixels: Pixels) -> npt.NDArray[np.float64]:
    """Return the pixels of each image as a row of values from 0 to 1; shape (n, 64)."""
    features: npt.NDArray[np.float64] = pixels.reshape(len(pixels), -1) / np.float64(MAX_PIXEL)
    return features
