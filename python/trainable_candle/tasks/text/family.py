"""The interface between a family of language models and the task that trains it."""

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
    """A causal language model: it predicts each token of a text from the tokens before it.

    `packed_loss` and `log_probs` take the arrays of a `Packed` batch, in which texts of N tokens in
    all follow one another: the ids of the tokens (N,), the id that each token must predict (N,),
    the index of each token in its text (N,), and the starts of the texts with the end of the last.
    """

    def packed_loss(
        self, input_ids: Tensor, targets: Tensor, positions: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        """Return the summed cross-entropy of the targets, f32; targets of -100 do not count."""

    def log_probs(
        self, input_ids: Tensor, targets: Tensor, positions: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        """Return the log-probability of each target, (N,) in f32; 0 for a target of -100."""

    @property
    def generate(self) -> Callable[..., list[list[int]]]:
        """The method that returns the ids of the generated tokens for each prompt."""

    @property
    def stream(self) -> Callable[..., Iterator[list[int | None]]]:
        """The method whose iterator yields, at each position, one token id per prompt.

        The id is None for a prompt whose text has already ended.
        """

    def add_adapter(self, config: LoraConfig) -> AdapterSet:
        """Attach trainable adapters to layers."""

    def load_adapter(self, path: Path, *, scale: float = 1.0) -> AdapterSet:
        """Attach the adapters in a file to layers; `scale` multiplies their effect."""

    def merge_adapter(self) -> None:
        """Merge the adapters into the weights."""

    def save_pretrained(self, path: Path) -> None:
        """Write configuration and weights to a folder."""

    def enable_gradient_checkpointing(self, policy: str, *, blocks: int | None = None) -> None:
        """Recompute activations in the backward pass, as the policy says, instead of keeping them.

        The policies "full" and "offload" apply to the first `blocks` blocks; None: to all.
        """


class TextFamily(Protocol):
    """A language model of a family. Its files are read only when they are needed."""

    name: ClassVar[str]
    """The name for `--model`."""
    component: ClassVar[str]
    """The name of the part that is trained, in adapter files; empty for a model of one part."""
    formats: ClassVar[tuple[str, ...]]
    """The formats of adapter files that have names for the model's layers, the default first."""
    targets: ClassVar[tuple[str, ...]]
    """The layers that get adapters by default, as names or patterns."""
    config: TrainConfig
    """The settings of the run."""
    weights: Path
    """The folder of the model, or a file with its weights."""
    dtype: str | None
    """The dtype of the model; None: as stored."""
    device: str
    """The device of the model."""

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer in the folder of the weights, or in their GGUF file."""

    @property
    def context(self) -> int:
        """The greatest length of the texts that the model was made for, in tokens."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The entries of the model's `config.json`; `config` has the settings of the run."""

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model's embedding has rows for."""

    @property
    def repeats(self) -> bool:
        """Whether packed rows of equal size run the same operations, whatever texts they contain.

        CUDA graphs require it: no state of the host may depend on the lengths of the texts. It has
        nothing to do with the `repeats` of a data set.
        """

    @property
    def model(self) -> CausalModel:
        """The model, which is loaded on first use."""

    def layers(self) -> Mapping[str, Shape]:
        """Return the shapes of the linear layers' weights, by name."""

    def check_initial_adapter(self, path: Path, layers: Collection[str]) -> None:
        """Check that the adapters in a file are those that the settings describe.

        Args:
            path: the file.
            layers: the layers that get adapters.

        Raises:
            ConfigError: the adapters differ from the settings.
            MissingFileError, WeightsFormatError: the file is missing or damaged.
        """

    def estimate(self, config: TrainConfig, tokens: int) -> Estimate:
        """Estimate the memory of a run with packed rows of `tokens` tokens."""
