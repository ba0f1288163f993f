"""The source of the trainer's batches."""

from __future__ import annotations

from typing import Protocol, TypeVar

BatchOut = TypeVar("BatchOut", covariant=True)


class BatchSource(Protocol[BatchOut]):
    """Batches by number. A number always gives the same batch, so a run can resume at any step.

    ```python
    batches = [tc.randn(2, 8), tc.randn(2, 8), tc.randn(2, 8)]

    class InTurn:
        def batch(self, index):
            return batches[index % len(batches)]

    source: tc.train.BatchSource[tc.Tensor] = InTurn()
    assert source.batch(3).tolist() == source.batch(0).tolist()
    ```
    """

    def batch(self, index: int) -> BatchOut:
        """Return the batch with the number `index`, counted from 0."""
