"""The source of the trainer's batches."""

from __future__ import annotations

from typing import Protocol, TypeVar

BatchOut = TypeVar("BatchOut", covariant=True)


class BatchSource(Protocol[BatchOut]):
    """Batches by number. A number always gives the same batch, so a run can resume at any step.

    ```python
    class Rows:
        def batch(self, index):
            return x[index % len(x)]

    source: tc.train.BatchSource[tc.Tensor] = Rows()
    assert source.batch(3).tolist() == source.batch(0).tolist()
    ```
    """

    def batch(self, index: int) -> BatchOut:
        """Return the batch with the number `index`, counted from 0."""
