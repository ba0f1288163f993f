"""`TextTask`: trains language models, and generates answers with them."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

import trainable_candle as tc
from trainable_candle.data.chats import TextOptions, best_fit, has_pairs, load_texts, unknown_token
from trainable_candle.data.chats.reading import dataset_path
from trainable_candle.data.folder import counted
from trainable_candle.distributed.group import ALONE
from trainable_candle.errors import ConfigError, DatasetError, WeightsFormatError
from trainable_candle.export.adapter import short_names
from trainable_candle.export.merged import CONFIG, remove_quantization
from trainable_candle.files import parse_json, write_atomically
from trainable_candle.peft import integer_if_whole
from trainable_candle.settings.checks import existing
from trainable_candle.tasks.checks import check_format, check_targets
from trainable_candle.tasks.estimate import adapted_layers
from trainable_candle.tasks.task import Split, held_out_items, naming_validation
from trainable_candle.tasks.text.preferences import PreparedPreferences
from trainable_candle.tasks.text.prepared import PreparedTexts
from trainable_candle.tasks.text.tokenizer_check import check_tokenizer, row_length
from trainable_candle.tasks.text.writing import WritingOptions, streamed
from trainable_candle.text.tokenizer_files import copy_files
from trainable_candle.train.adapters import Adapters, adapter_config, start_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from trainable_candle import AdapterFile
    from trainable_candle.data.chats import TextDataset
    from trainable_candle.distributed.group import Group
    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.estimate import Estimate
    from trainable_candle.tasks.text.family import TextFamily

_FILES: Final = {
    ".safetensors": "language models are written as folders: give the name of a new folder",
    ".gguf": "merge writes a folder: give the name of a new folder, and see export --gguf",
}
"""For each suffix that makes an output the name of a file: the end of the error about it."""
PEFT: Final = "peft"
"""The folder in a run's output that `PeftModel.from_pretrained` loads."""


class TextTask:
    """The `Task` of language models, which also generates answers and continuations of texts.

    Args:
        family: the model, with the settings in its `config`.
    """

    noun: ClassVar[str] = "example"
    counts: ClassVar[str] = "token"  # the unit of `count` of the data that `prepare` returns
    # A batch's weight is its number of tokens in the loss, or of pairs of answers.
    weighs_batches: ClassVar[bool] = True

    def __init__(self, family: TextFamily) -> None:
        self.family = family
        self._adapters: Adapters | None = None

    @property
    def repeats(self) -> bool:
        """Whether batches of equal shapes launch the same operations; see `Task.repeats`.

        Where one text of a packed row ends and the next begins differs between batches of equal
        shapes. This does not change the operations, because only the device reads these bounds.
        With pairs of answers the result is False: an input has one row for each pair, so its shape
        can differ between batches with equally many tokens.
        """
        return self.family.repeats and self._kind.token_count_fixes_shapes

    @property
    def sequence_length(self) -> int:
        """The largest number of tokens in a packed row.

        Raises:
            ConfigError: the setting exceeds the model's context length.
        """
        return row_length(self.family.config.sequence_length, self.family.context)

    def check(self, report: Callable[[str], None]) -> None:
        """See `Task.check`; also reports the chat template and the tokens that end an answer."""
        family, config = self.family, self.family.config
        check_format(config, family.formats, parts=1)
        layers = family.layers()
        check_targets(config, layers, family.targets)
        if config.initial_adapter and not config.resume:
            path = existing("initial_adapter", config.initial_adapter_path)
            targets = config.target_modules or family.targets
            adapted = adapted_layers(layers, targets, config.exclude_modules)
            family.check_initial_adapter(path, adapted)
        # Reading the property checks the setting.
        _ = self.sequence_length
        check_tokenizer(family.tokenizer, family.weights, family.vocabulary)
        # Tokenizing a prompt checks it.
        for prompt in config.sample_prompts:
            self.prompt_tokens([{"role": "user", "content": prompt}])
        report(family.tokenizer.summary())

    def read(self, report: Callable[[str], None]) -> Split[TextDataset]:
        """Read, check and tokenize the texts; see `Task.read`."""
        config = self.family.config
        train, validation = self._load(config.dataset)
        if config.validation_dataset:
            # Of the validation data set, use the texts on which a run on that set would train.
            with naming_validation():
                validation, _ = self._load(config.validation_dataset)
        elif config.validation_split:
            count, share = len(train), config.validation_split
            held_out = held_out_items(count, share, config.seed, self.noun)
            trained = sorted(set(range(count)) - set(held_out))
            train, validation = train.part(trained), train.part(held_out)
        report(train.summary())
        if validation is not None:
            report(f"validation: {counted(len(validation), self.noun)}")
        return Split(train, validation)

    @property
    def _trains_on_pairs(self) -> bool:
        """Whether each example of the data is a pair of answers, one chosen and one rejected."""
        return self.family.config.objective == "dpo"

    @property
    def _kind(self) -> type[PreparedTexts | PreparedPreferences]:
        """The class of the data that `prepare` returns."""
        return PreparedPreferences if self._trains_on_pairs else PreparedTexts

    def _load(self, dataset: str) -> tuple[TextDataset, TextDataset | None]:
        """Return the texts of a data set: those to train on, and those in files for validation.

        The second are None unless the data set is a folder with files for both purposes.
        """
        config = self.family.config
        options = TextOptions(
            self.sequence_length,
            config.train_on,
            self._trains_on_pairs,
            config.skip_bad,
            self.family.vocabulary,
        )
        return load_texts(dataset_path(dataset), self.family.tokenizer, options)

    def samples(self, data: Split[TextDataset]) -> int:
        """Return the number of packed rows; see `Task.samples`."""
        return len(best_fit([len(text) for text in data.train.examples], self.sequence_length))

    def estimate(
        self,
        config: TrainConfig,
        data: Split[TextDataset],  # noqa: ARG002
        limit: float = math.inf,  # noqa: ARG002
    ) -> Estimate:
        """See `Task.estimate`."""
        return self.family.estimate(config, self.sequence_length)

    def prepare(
        self, data: Split[TextDataset], report: Callable[[str], None], group: Group = ALONE
    ) -> Split[PreparedTexts | PreparedPreferences]:
        """Load the model; see `Task.prepare`."""
        # Reading the property loads the model.
        _ = self.family.model
        prepared = [
            self._kind(self.family, dataset, self.without_adapter, report, group)
            for dataset in (data.train, data.validation)
            if dataset is not None
        ]
        return Split(prepared[0], prepared[1] if len(prepared) > 1 else None)

    def attach(self, fresh: bool = True) -> Adapters:
        """Attach the adapter, and initialise it if `fresh`; see `Task.attach`."""
        family, config = self.family, self.family.config
        adapter = family.model.add_adapter(adapter_config(config, family.targets, family.formats))
        starts = start_adapter(adapter, family, fresh)
        if config.checkpointing != "none":
            family.model.enable_gradient_checkpointing(
                config.checkpointing, blocks=config.checkpoint_blocks
            )
        self._adapters = Adapters({family.component: adapter}, starts)
        return self._adapters

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Return a context in which the adapter is disabled, so that the model is the base."""
        if self._adapters is None:
            yield
            return
        self._adapters.set_enabled(False)
        try:
            yield
        finally:
            self._adapters.set_enabled(True)

    def prompt_tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation, including those that begin the answer's turn.

        Raises:
            ConfigError: the chat template rejects the conversation, the model lacks a token, or no
                position is left for an answer.
        """
        return self._fitting(self._conversation(messages))

    def room(self, messages: Sequence[Mapping[str, str]]) -> int:
        """Return how many tokens of the context a conversation leaves; below 1 if it is too long.

        Raises:
            ConfigError: the chat template rejects the conversation.
        """
        return self.family.context - len(self._conversation(messages))

    def _conversation(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation of any length.

        Raises:
            ConfigError: the chat template rejects the conversation.
        """
        try:
            return self.family.tokenizer.prompt(messages)
        except ValueError as error:
            raise ConfigError(f"prompt: {error}") from error

    def text_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text to continue, without the chat template.

        As in training, the text begins with the tokens that the tokenizer puts before a text.

        Raises:
            ConfigError: the text has no tokens, the model lacks a token, or no position is left for
                a continuation.
        """
        return self._fitting(self.family.tokenizer.beginning(text))

    def _fitting(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a prompt if the model can continue them.

        Raises:
            ConfigError: there are none, or too many for another to follow, or the model lacks one.
        """
        if not tokens:
            raise ConfigError("prompt: has no tokens; give a text")
        problem = unknown_token(tokens, self.family.tokenizer, self.family.vocabulary)
        if problem:
            raise ConfigError(f"prompt: {problem}")
        if len(tokens) >= self.family.context:
            raise ConfigError(
                f"prompt: has {len(tokens)} tokens, and the model was made for "
                f"{self.family.context} positions"
            )
        return tokens

    def answer(
        self, messages: Sequence[Mapping[str, str]], options: WritingOptions
    ) -> Iterator[str]:
        """Return an iterator over the model's answer to a conversation, piece by piece.

        The iterator yields a piece as soon as the model has generated it.

        Raises:
            ConfigError: see `prompt_tokens`.
            ArgumentError: an option is out of range.
            NonFiniteError: the model's output has a NaN; the iterator raises it.
        """
        return self._streamed(self.prompt_tokens(messages), options)

    def continuation(self, text: str, options: WritingOptions) -> Iterator[str]:
        """Return an iterator over what the model writes after a text, without the chat template.

        Raises:
            ConfigError: see `text_tokens`.
            ArgumentError, NonFiniteError: see `answer`.
        """
        return self._streamed(self.text_tokens(text), options)

    def _streamed(self, prompt: Sequence[int], options: WritingOptions) -> Iterator[str]:
        """Return an iterator over the text that follows the tokens of a prompt."""
        family = self.family
        arguments = self._limited(options, [prompt]).arguments(family.tokenizer.stops)
        # A step is a list with one element, for the one prompt: the new token, or None at the end.
        steps = family.model.stream([prompt], **arguments)
        tokens = (token for step in steps for token in step if token is not None)
        return streamed(tokens, family.tokenizer, options.stop)

    def answers(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], options: WritingOptions
    ) -> list[str]:
        """Return the model's answers to several conversations, generated in one batch.

        All answers are limited to the tokens that the longest conversation leaves.

        Raises:
            ConfigError: see `prompt_tokens`.
            ArgumentError: an option is out of range.
            NonFiniteError: the model's output has a NaN.
        """
        prompts = [self.prompt_tokens(messages) for messages in conversations]
        family = self.family
        arguments = self._limited(options, prompts).arguments(family.tokenizer.stops)
        generated = family.model.generate(prompts, **arguments)
        return ["".join(streamed(ids, family.tokenizer, options.stop)) for ids in generated]

    def _limited(self, options: WritingOptions, prompts: Sequence[Sequence[int]]) -> WritingOptions:
        """Return the options, with `tokens` limited to what the longest prompt leaves."""
        room = self.family.context - max(map(len, prompts))
        return replace(options, tokens=min(options.tokens, room))

    def preview(self, path: Path) -> Path:
        """Write answers to the prompts, with and without the adapter; see `Task.preview`."""
        config = self.family.config
        options = WritingOptions(
            config.sample_tokens, config.sample_temperature, seed=config.sample_seed
        )
        conversations = [[{"role": "user", "content": prompt}] for prompt in config.sample_prompts]
        tuned_answers = self.answers(conversations, options)
        with self.without_adapter():
            base_answers = self.answers(conversations, options)
        entries = [
            f"prompt: {prompt}\nbase: {base}\ntuned: {tuned}\n"
            for prompt, base, tuned in zip(
                config.sample_prompts, base_answers, tuned_answers, strict=True
            )
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        text_path = path.with_suffix(".txt")
        write_atomically(text_path, "\n".join(entries))
        return text_path

    def adapter_file(self, adapters: Adapters, path: Path, metadata: dict[str, str]) -> AdapterFile:
        """See `Task.adapter_file`."""
        config = self.family.config
        with_format = config.with_(format=config.format or self.family.formats[0])
        return adapters.file(path, with_format, metadata)

    def publish(self, adapters: Adapters, output: Path, metadata: dict[str, str]) -> Path:
        """Write the folder that peft loads; see `Task.publish`.

        Its configuration names the base model, the kind of task and the adapted layers.
        """
        folder = output / PEFT
        adapters.file(folder, self.family.config.with_(format="peft"), metadata).write()
        path = folder / "adapter_config.json"
        fields = parse_json(path.read_text(encoding="utf-8"))
        layers = self.family.layers()
        fields["base_model_name_or_path"] = self.family.config.weights
        fields["task_type"] = "CAUSAL_LM"
        # Readers of these files expect integers, such as 8 instead of 8.0.
        for name in {"lora_alpha", "alpha"} & fields.keys():
            fields[name] = integer_if_whole(fields[name])
        # Such as `q_proj` for all layers of this name, if all of them are adapted.
        fields["target_modules"] = short_names(fields["target_modules"], layers)
        write_atomically(path, json.dumps(fields, indent=2) + "\n")
        return folder

    def require_output(self, output: Path) -> None:
        """Check that `save_merged` can write to `output`.

        Raises:
            ConfigError: `output` exists and is not an empty folder, or ends in `.safetensors` or
                `.gguf`.
        """
        if output.suffix in _FILES:
            raise ConfigError(f"--output is {output}; {_FILES[output.suffix]}")
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError(
                f"--output is {output}, which exists; expected a new or an empty folder"
            )

    def save_merged(self, output: Path) -> None:
        """Write the model with its adapter merged, if it has one, and copy the tokenizer's files.

        Raises:
            ConfigError: as `require_output`.
            OSError: the model cannot be written.
        """
        self.require_output(output)
        if self._adapters is not None:
            self.family.model.merge_adapter()
        self.family.model.save_pretrained(output)
        # `save_pretrained` has written a configuration with the present dtype. Keep it if the user
        # chose the dtype, else replace it by the original configuration.
        copy_files(self.family.weights, output, *([] if self.family.dtype else [CONFIG]))
        # The original configuration may describe quantized weights; the merged ones are not.
        remove_quantization(output)

    def loss_on(self, dataset: str) -> float:
        """Return the mean loss on a data set of texts, with the adapter if there is one.

        Raises:
            DatasetError: the data set cannot be used, or has pairs of answers. The loss of DPO
                compares a model with its base, and a merged model has no base.
        """
        path = dataset_path(dataset)
        if has_pairs(path):
            raise DatasetError(
                f"--dataset: {path} has pairs of answers (`chosen`, `rejected`), and losses are "
                "compared on texts: rename `chosen` to `completion`, or give another data set"
            )
        texts, _ = self._load(dataset)
        return PreparedTexts(self.family, texts, self.without_adapter, print).validation_loss()

    def load_adapter(self, path: Path, scale: float) -> Adapters:
        """Attach the adapters in a file to the model; `scale` multiplies their effect.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the file is missing, damaged, or of
                another model.
        """
        self._require_own_layers(path)
        adapter = self.family.model.load_adapter(path, scale=scale)
        self._adapters = Adapters({self.family.component: adapter})
        return self._adapters

    def _require_own_layers(self, path: Path) -> None:
        """Check that at least one of a file's modules is for a layer of this model.

        A file without modules is accepted here; loading it then raises the error.

        Raises:
            WeightsFormatError: the file has modules, and none is for a layer of this model.
        """
        modules = tc.verify_adapter(path, self.family.name, self.family.weights).modules
        if modules and all(module.layer is None for module in modules):
            raise WeightsFormatError(
                f"{path}: is for another model: its modules, such as {modules[0].module}, are no "
                f"layers of {self.family.weights}"
            )
