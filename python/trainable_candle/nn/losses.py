"""Losses as modules, under torch's names; each calls one function of `nn.functional`.

All losses take `reduction`: "mean", "sum", or "none" for the losses of the elements (for
cross-entropy: of the rows). The constructors raise `ArgumentError` for any other value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainable_candle.errors import ArgumentError
from trainable_candle.nn import functional
from trainable_candle.nn.module import Module

if TYPE_CHECKING:
    from trainable_candle._core import Tensor

__all__ = [
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "HuberLoss",
    "L1Loss",
    "MSELoss",
    "SmoothL1Loss",
]


class _Loss(Module):
    """The base class of losses: checks and keeps the reduction."""

    def __init__(self, reduction: str = "mean") -> None:
        if reduction not in {"mean", "sum", "none"}:
            raise ArgumentError(
                f"{type(self).__name__}: reduction is {reduction!r}, expected "
                '"mean", "sum" or "none"'
            )
        self.reduction = reduction

    def _facts(self) -> str:
        """Return the text between the parentheses of `repr`."""
        return f"reduction={self.reduction!r}"


class MSELoss(_Loss):
    """The squared error, computed by `functional.mse_loss`.

    ```python
    assert tc.nn.MSELoss()(tc.ones(2), tc.zeros(2)).item() == 1.0
    ```
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of two tensors of the same shape."""
        return functional.mse_loss(input, target, self.reduction)


class L1Loss(_Loss):
    """The absolute error, computed by `functional.l1_loss`.

    ```python
    assert tc.nn.L1Loss()(tc.ones(2), tc.zeros(2)).item() == 1.0
    ```
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of two tensors of the same shape."""
        return functional.l1_loss(input, target, self.reduction)


class SmoothL1Loss(_Loss):
    """The Huber loss with the threshold `beta`, divided by `beta`.

    `functional.smooth_l1_loss` computes it; `beta` = 0 gives the absolute error.

    ```python
    assert tc.nn.SmoothL1Loss()(tc.ones(2), tc.zeros(2)).item() == 0.5
    ```
    """

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(reduction)
        self.beta = beta

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of two tensors of the same shape."""
        return functional.smooth_l1_loss(input, target, self.reduction, self.beta)


class HuberLoss(_Loss):
    """The Huber loss with the threshold `delta`, computed by `functional.huber_loss`.

    ```python
    assert tc.nn.HuberLoss()(tc.ones(2), tc.zeros(2)).item() == 0.5
    ```
    """

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction)
        self.delta = delta

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of two tensors of the same shape."""
        return functional.huber_loss(input, target, self.reduction, self.delta)


class CrossEntropyLoss(_Loss):
    """The cross-entropy of logits and class ids, computed by `functional.cross_entropy`.

    Rows whose class id is `ignore_index` have no loss. `label_smoothing`, from 0 to 1, is the
    fraction of each target's probability that is spread evenly over all classes.

    ```python
    loss = tc.nn.CrossEntropyLoss(label_smoothing=0.1)
    assert loss(tc.zeros(2, 5), tc.tensor([0, 3])).item() > 1.6  # log 5 = 1.609
    ```
    """

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
    ) -> None:
        super().__init__(reduction)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits, (..., classes), and the ids of the right classes, (...)."""
        return functional.cross_entropy(
            input,
            target,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class BCEWithLogitsLoss(_Loss):
    """Binary cross-entropy, computed by `functional.binary_cross_entropy_with_logits`.

    ```python
    assert tc.nn.BCEWithLogitsLoss()(tc.zeros(2), tc.ones(2)).item() > 0.69  # log 2 = 0.693
    ```
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits and of targets from 0 to 1; both have the same shape."""
        return functional.binary_cross_entropy_with_logits(input, target, self.reduction)
