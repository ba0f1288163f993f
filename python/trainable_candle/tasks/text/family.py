"""What a family of language models is to the task that trains it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from trainable_candle import AdapterSet, LoraConfig, Tensor
    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.estimate import Estimate, Shape
    from trainable_candle.text.chat_tokenizer import ChatTokenizer


class CausalModel(Protocol):
    """A decoder of tokens."""

    def packed_loss(
        self, input_ids: Tensor, targets: Tensor, positions: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        """The sum of the cross-entropies of a packed row's targets but for -100, f32."""

    def log_probs(
        self, input_ids: Tensor, targets: Tensor, positions: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        """The logarithm of the probability of each target but -100, (N) in f32."""

    @property
    def generate(self) -> Callable[..., list[list[int]]]:
        """The tokens that follow each prompt."""

    @property
    def stream(self) -> Callable[..., Iterator[list[int | None]]]:
        """The next token of each prompt, step by step."""

    def add_adapter(self, config: LoraConfig) -> AdapterSet:
        """Put trainable adapters on layers."""

    def load_adapter(self, path: Path, *, scale: float = 1.0) -> AdapterSet:
        """Put the adapters of a file on layers."""

    def merge_adapter(self) -> None:
        """Add the adapters to the weights."""

    def save_pretrained(self, path: Path) -> None:
        """Write configuration and weights to a folder."""

    def enable_gradient_checkpointing(self, policy: str) -> None:
        """Recompute in the backward pass instead of keeping."""


class TextFamily(Protocol):
    """A model of a family, of which nothing is read before it is needed."""

    name: ClassVar[str]
    component: ClassVar[str]
    """The part that is trained, as adapters are filed under."""
    formats: ClassVar[tuple[str, ...]]
    """The formats of adapter files that have names for its layers, the default one first."""
    targets: ClassVar[tuple[str, ...]]
    """The layers that get adapters unless the settings name others."""
    config: TrainConfig
    weights: Path
    """The folder of the model."""
    dtype: str | None
    """Of the model; None: as stored."""
    device: str

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer beside the weights."""

    @property
    def context(self) -> int:
        """The positions that the model was made for."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The model's `config.json`."""

    @property
    def vocabulary(self) -> int:
        """The tokens that the model knows."""

    @property
    def repeats(self) -> bool:
        """Whether the model does the same for all texts: no host state depends on their lengths."""

    @property
    def model(self) -> CausalModel:
        """The model, which is loaded when it is first asked for."""

    def layers(self) -> Mapping[str, Shape]:
        """Shapes of the weights of its linear layers, by name."""

    def check_initial_adapter(self, path: Path, layers: Collection[str]) -> None:
        """Check that a file holds the adapters that the settings make."""

    def estimate(self, config: TrainConfig, tokens: int) -> Estimate:
        """What a run will hold in memory with `tokens` in a batch."""
