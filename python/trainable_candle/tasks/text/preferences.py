"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290) on packed pairs.

The loss of a pair is -log sigmoid(beta (m - m0)), where m is by how much the model finds the chosen
answer more probable than the rejected one (log-probabilities, summed over tokens), and m0 the same
of the base, which is the model with its adapter off. As in trl's `DPOTrainer` with `loss_type
"sigmoid"`.
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

    alike: ClassVar[bool] = False

    def weight(self, batch: Packed) -> float:
        """The pairs: the loss of a step is the mean over those of all batches."""
        return len(_answers(batch))

    def inputs(self, batch: Packed) -> dict[str, Tensor]:
        """The tokens, which of them are which answer, and what the base makes of the pairs."""
        inputs = self.tokens(batch)
        inputs["answers"] = tc.tensor(_answers(batch), device=self._family.device)
        with tc.no_grad(), self._without_adapter():
            inputs["reference"] = self._margins(inputs)
        return inputs

    def loss(self, inputs: Inputs) -> Tensor:
        """The mean loss of the pairs."""
        # The cross-entropy of two scores, of which one is 0, is -log sigmoid of the other.
        rewards = self._rewards(inputs)
        scores = tc.stack([rewards, rewards * 0.0], 1)
        return cross_entropy(scores, tc.zeros(len(rewards), dtype="i64", device=scores.device))

    def validation_loss(self) -> float:
        """The mean over all pairs, each once."""
        rewards = self._all_rewards()
        return float(np.logaddexp(0, -rewards).mean())

    def validation_facts(self, loss: float) -> dict[str, float]:
        """The loss, how often the chosen answer gained more than the rejected, and by how much."""
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
        """How far each chosen answer gained over the rejected one, times beta: (pairs)."""
        return (self._margins(inputs) - inputs["reference"]) * self._family.config.dpo_beta

    def _margins(self, inputs: Inputs) -> Tensor:
        log_probs = self._family.model.log_probs(
            inputs["input_ids"], inputs["targets"], inputs["positions"], inputs["cu_seqlens"]
        )
        return (inputs["answers"] @ log_probs.reshape(-1, 1)).reshape(-1)


def _answers(batch: Packed) -> npt.NDArray[np.float32]:
    assert batch.answers is not None
    return batch.answers
