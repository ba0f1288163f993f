"""Decoder language models with Llama's architecture: Llama, Qwen, Mistral, SmolLM."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import trainable_candle as tc
from trainable_candle.settings import TrainConfig
from trainable_candle.settings.adapter import OFT, Adapter, LearnedScales
from trainable_candle.settings.data import Data, Unusable
from trainable_candle.settings.files import Files
from trainable_candle.settings.machine import Machine
from trainable_candle.settings.previews import Previews, Validation
from trainable_candle.settings.several import Several
from trainable_candle.settings.texts import Texts, Writing
from trainable_candle.settings.training import Training
from trainable_candle.tasks.estimate import Estimate, trained_model
from trainable_candle.tasks.initial_adapter import check_initial_adapter
from trainable_candle.tasks.text import TextTask
from trainable_candle.tasks.text.tokenizer_check import context_of
from trainable_candle.text.chat_tokenizer import ChatTokenizer
from trainable_candle.train.adapters import adapter_config

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from trainable_candle import PartFacts
    from trainable_candle.settings import Group
    from trainable_candle.tasks.estimate import Shape

BUILT_IN: Final = Path(__file__).parents[1] / "assets" / "llama_tiny"
"""The folder of the language model in the package."""


class CausalLM:
    """A language model and its tokenizer, from one folder or one GGUF file.

    Args:
        weights: the folder with the weights, `config.json` and the tokenizer's files; or a GGUF
            file.
        dtype: the dtype of the model; None: the dtype of the weight files.
        device: the device of the model.
        config: the settings of the run; None: the defaults, which suffice to write texts and to
            merge adapters.
    """

    name: ClassVar[str] = "causal-lm"
    summary: ClassVar[str] = "language models: Llama, Qwen, Mistral, SmolLM (a tiny one built in)"
    download: ClassVar[str] = ""  # nothing to download: the default weights are in the package
    groups: ClassVar[tuple[type[Group], ...]] = (
        Data, Unusable, Texts, Adapter, LearnedScales, Training, Validation, Previews, Writing,
        Machine, Several, Files,
    )  # fmt: skip
    # The model is no pipeline of parts; the name of its only part in adapter files is empty.
    parts: ClassVar[tuple[str, ...]] = ()
    component: ClassVar[str] = ""
    formats: ClassVar[tuple[str, ...]] = ("peft",)
    targets: ClassVar[tuple[str, ...]] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip

    def __init__(
        self, weights: Path, dtype: str | None, device: str, config: TrainConfig | None = None
    ) -> None:
        self.weights = weights
        self.dtype = dtype
        self.device = device
        self.config = config or TrainConfig()

    @classmethod
    def default_weights(cls) -> Path | None:
        """Return the folder of a tiny Llama model, which was trained on small tasks about words."""
        return BUILT_IN

    @classmethod
    def defaults(cls, config: TrainConfig) -> dict[str, Any]:
        """Return the learning rate and alpha, which is 2 * rank; OFT has no alpha."""
        rate = 1e-5 if config.objective == "dpo" else 2e-4
        alpha = {} if config.adapter == OFT else {"alpha": 2.0 * config.rank}
        return {"learning_rate": rate, **alpha}

    def task(self) -> TextTask:
        """Return the task that trains this model and writes with it."""
        return TextTask(self)

    def require_own(self) -> None:
        """Check that the weights are of this family.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the weights are missing, damaged, or
                of another model.
        """
        _ = self._facts  # `inspect`, which reads the facts, checks the weights

    @cached_property
    def _facts(self) -> PartFacts:
        return tc.inspect(self.weights, self.name).parts[self.component]

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer in the folder of the weights, or in the GGUF file."""
        return ChatTokenizer.from_pretrained(self.weights)

    @property
    def context(self) -> int:
        """The context length: the largest number of tokens for which the model was made."""
        return context_of(self._facts.config)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The entries of the model's `config.json`; `config` has the settings of the run."""
        return self._facts.config

    @property
    def vocabulary(self) -> int:
        """The number of tokens in the vocabulary."""
        return int(self._facts.config["vocab_size"])

    @property
    def repeats(self) -> bool:
        """Whether packed rows of equal size run the same operations, whatever texts they contain.

        They do not if the rotary scaling depends on the length of the longest text; the run then
        uses no CUDA graphs. This has nothing to do with the `repeats` of a data set.
        """
        settings = self.settings
        scaling = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in {"longrope", "su"}:
            # The longest text determines which of the two lists of factors applies. If the lists
            # are equal, its length has no effect.
            return bool(scaling["short_factor"] == scaling["long_factor"])
        return kind != "dynamic"

    def layers(self) -> Mapping[str, Shape]:
        """Return the shapes of the weights of the linear layers that can have adapters, by name."""
        return self._facts.layers

    def check_initial_adapter(self, path: Path, layers: Collection[str]) -> None:
        """Check that the adapters in a file are those that the settings describe.

        Args:
            path: the file.
            layers: the layers that get adapters according to the settings.

        Raises:
            ConfigError: the adapters differ from the settings.
            MissingFileError, WeightsFormatError: the file is missing or damaged.
        """
        check_initial_adapter(
            self.config,
            path,
            tc.verify_adapter(path, self.name, self.weights).modules,
            # The file can only have, and must have, adapters on the model's only part.
            found=(self.component,),
            expected=(self.component,),
            layers=layers,
        )

    def estimate(self, config: TrainConfig, tokens: int) -> Estimate:
        """Estimate the memory of a run with packed rows of `tokens` tokens."""
        adapter = adapter_config(config, self.targets, self.formats)
        trained = trained_model("model", self._facts, adapter, config, tokens=tokens)
        phases = {**trained.early_phases, "training": trained.items}
        return Estimate(phases, config.on_gpu, trained.work, trained.host)

    @cached_property
    def model(self) -> tc.models.CausalLM:
        """The model, which is loaded on first use."""
        return tc.models.CausalLM.from_pretrained(
            self.weights,
            dtype=self.dtype,
            device=self.device,
            quantize=self.config.base_format,
            **self.config.streaming,
        )
