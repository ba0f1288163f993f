"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290) on packed pairs.

A packed row has several texts one after another; the two answers of a pair are in one batch.
The loss of a pair is -log sigmoid(r) with the reward r = beta (m - m0). The margin m is the
log-probability of the chosen answer minus that of the rejected one (each summed over the tokens of
the answer) under the model; m0 is the margin under the base, which is the model with its adapter
disabled. trl's `DPOTrainer` with `loss_type="sigmoid"` has the same loss.
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

    # The shape of the input `answers` can differ between batches with equally many tokens: it has a
    # row for each pair of answers, and such batches can have different numbers of pairs.
    token_count_fixes_shapes: ClassVar[bool] = False

    def weight(self, batch: Packed) -> float:
        """Return the number of pairs.

        The trainer weights the batch's loss by this number, so the loss of a step is the mean over
        the pairs of all its batches.
        """
        return len(_answers(batch))

    def inputs(self, batch: Packed) -> dict[str, Tensor]:
        """Return the entries that `tokens` returns, and two more.

        These are `answers` (see `_answers`), and `reference`: m0 of each pair.
        """
        inputs = self.tokens(batch)
        inputs["answers"] = tc.tensor(_answers(batch), device=self._family.device)
        with tc.no_grad(), self._without_adapter():
            inputs["reference"] = self._margins(inputs)
        return inputs

    def loss(self, inputs: Inputs) -> Tensor:
        """Return the mean loss of the pairs."""
        # -log sigmoid(r) is the cross-entropy of two classes with the scores (r, 0), for class 0.
        rewards = self._rewards(inputs)
        scores = tc.stack([rewards, rewards * 0.0], 1)
        return cross_entropy(scores, tc.zeros(len(rewards), dtype="i64", device=scores.device))

    def validation_loss(self) -> float:
        """Return the mean loss over all pairs, each once."""
        rewards = self._all_rewards()
        # log(1 + exp(-r)) is -log sigmoid(r).
        return float(np.logaddexp(0, -rewards).mean())

    def validation_facts(self, loss: float) -> dict[str, float]:
        """Return and report the loss, the accuracy and the mean reward.

        The accuracy is the share of the pairs whose reward is above 0. As in trl, the mean reward
        is logged as a margin, `validation_margin`: beta times the mean of m - m0.
        """
        rewards = self._all_rewards()
        accuracy, mean_reward = float((rewards > 0).mean()), float(rewards.mean())
        self._report(
            f"validation: loss {loss:.4f}, chosen preferred {accuracy:.0%}, "
            f"margin {mean_reward:.3f}"
        )
        return {
            "validation_loss": loss,
            "validation_accuracy": accuracy,
            "validation_margin": mean_reward,
        }

    def _all_rewards(self) -> npt.NDArray[np.float64]:
        """Return the rewards of all pairs, the same in all processes."""
        batches = in_order(
            self._dataset.examples,
            self._dataset.options.sequence_length,
            self._family.config.batch_size,
        )
        with tc.no_grad():
            # Each process computes the rewards of some batches; all get the rewards of all.
            by_batch = measured(
                self._group, batches, lambda batch: self._rewards(self.inputs(batch)).tolist()
            )
        return np.array([reward for rewards in by_batch for reward in rewards], np.float64)

    def _rewards(self, inputs: Inputs) -> Tensor:
        """Return the reward r = beta (m - m0) of each pair, shape (pairs,)."""
        return (self._margins(inputs) - inputs["reference"]) * self._family.config.dpo_beta

    def _margins(self, inputs: Inputs) -> Tensor:
        """Return the margin of each pair under the model as it is now, shape (pairs,).

        It is m0 if the adapter is disabled, else m.
        """
        log_probs = self._family.model.log_probs(
            inputs["input_ids"], inputs["targets"], inputs["positions"], inputs["cu_seqlens"]
        )
        # A product with `answers` sums the log-probabilities of each answer and subtracts the sums.
        return (inputs["answers"] @ log_probs.reshape(-1, 1)).reshape(-1)


def _answers(batch: Packed) -> npt.NDArray[np.float32]:
    """Return the `answers` of a batch, which batches of pairs always have: (pairs, tokens).

    A row is 1 at the targets of the chosen answer, -1 at those of the rejected one, 0 elsewhere.
    """
    assert batch.answers is not None
    return batch.answers
