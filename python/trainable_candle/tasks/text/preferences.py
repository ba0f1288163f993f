"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290) on packed pairs.

The loss of a pair is -log sigmoid(beta (m - m0)). The margin m is the log-probability of the chosen
answer minus that of the rejected one (each summed over its tokens) under the model; m0 is the
margin under the base, which is the model with its adapter disabled. trl's `DPOTrainer` with
`loss_type="sigmoid"` has the same loss. The pair's reward in this module is r = beta (m - m0).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

import trainable_candle as tc
from trainable_candle.data.chats import in_order
from trainable_candle.distributed.dealing import measured
from trainable_candle.nn.functional import cross_entropy
from trainable_candle.tasks.text.prepared import Packing

if TYPE_CHECKING:
    import numpy.typing as npt

    from trainable_candle import Tensor
    from trainable_candle.data.chats import Packed
    from trainable_candle.train.trainer import Inputs


class PreparedPreferences(Packing):
    """A data set of pairs of answers, and the loss of a model on it."""

    # The shape of `answers` differs between batches with equally many tokens: it has a row for each
    # pair of answers, and such batches can have different numbers of pairs.
    alike: ClassVar[bool] = False

    def weight(self, batch: Packed) -> float:
        """Return the number of pairs.

        The trainer weights the batch's loss by this number, so the loss of a step is the mean over
        the pairs of all its batches.
        """
        return len(_answers(batch))

    def inputs(self, batch: Packed) -> dict[str, Tensor]:
        """Return the result of `tokens`, with `answers` and the base's margins, `reference`."""
        inputs = self.tokens(batch)
        inputs["answers"] = tc.tensor(_answers(batch), device=self._family.device)
        with tc.no_grad(), self._without_adapter():
            inputs["reference"] = self._margins(inputs)
        return inputs

    def loss(self, inputs: Inputs) -> Tensor:
        """Return the mean loss of the pairs."""
        # -log sigmoid(r) is the cross-entropy of the scores (r, 0) and class 0.
        rewards = self._rewards(inputs)
        scores = tc.stack([rewards, rewards * 0.0], 1)
        return cross_entropy(scores, tc.zeros(len(rewards), dtype="i64", device=scores.device))

    def validation_loss(self) -> float:
        """Return the mean loss over all pairs, each once."""
        rewards = self._all_rewards()
        return float(np.logaddexp(0, -rewards).mean())

    def validation_facts(self, loss: float) -> dict[str, float]:
        """Return the loss, the share of rewards above 0 (accuracy) and the mean reward (margin)."""
        rewards = self._all_rewards()
        accuracy, margin = float((rewards > 0).mean()), float(rewards.mean())
        self._report(
            f"validation: loss {loss:.4f}, chosen preferred {accuracy:.0%}, margin {margin:.3f}"
        )
        return {
            "validation_loss": loss,
            "validation_accuracy": accuracy,
            "validation_margin": margin,
        }

    def _all_rewards(self) -> npt.NDArray[np.float64]:
        batches = in_order(
            self._dataset.examples,
            self._dataset.options.sequence_length,
            self._family.config.batch_size,
        )
        with tc.no_grad():
            found = measured(
                self._group, batches, lambda batch: self._rewards(self.inputs(batch)).tolist()
            )
        return np.array([reward for rewards in found for reward in rewards], np.float64)

    def _rewards(self, inputs: Inputs) -> Tensor:
        """Return the reward r = beta (m - m0) of each pair, shape (pairs,)."""
        return (self._margins(inputs) - inputs["reference"]) * self._family.config.dpo_beta

    def _margins(self, inputs: Inputs) -> Tensor:
        """Return the margin m of each pair under the model in its present state, shape (pairs,)."""
        log_probs = self._family.model.log_probs(
            inputs["input_ids"], inputs["targets"], inputs["positions"], inputs["cu_seqlens"]
        )
        return (inputs["answers"] @ log_probs.reshape(-1, 1)).reshape(-1)


def _answers(batch: Packed) -> npt.NDArray[np.float32]:
    assert batch.answers is not None
    return batch.answers
