"""Says, for each program that loads adapters of language models, whether it loads given files.

vLLM (`vllm/lora/peft_helper.py` at 02143692ba86a7ba6198a67e12982c5317c8bd2f) reads peft's folder.
It declares lora_alpha an integer, and rejects modules_to_save and DoRA. That version ignores
rank_pattern and alpha_pattern, which vLLM 0.33 reads. llama.cpp's `convert_lora_to_gguf.py` (at
0b03adaa632b76c7651dd1f6fa3b7a0b5eda479c) takes lora_alpha from peft's configuration and the ranks
from the shapes of the factors, and stops at a tensor that is not a LoRA factor. mlx-lm
(`mlx_lm/tuner/utils.py` at d78bf58e) has a format of its own. Ollama takes a Modelfile, whose line
ADAPTER names a file in llama.cpp's format or, for the models in `_CONVERTED`, peft's folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.errors import Error
from trainable_candle.export.adapter import adapter_settings, read_adapter
from trainable_candle.export.forms import form_of
from trainable_candle.export.gguf import architecture
from trainable_candle.export.readers import READERS, refusals, vllm_rank

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainable_candle import AdapterReport
    from trainable_candle.export.adapter import TextAdapter
    from trainable_candle.tasks.text.family import TextFamily

AS_IT_IS: Final = "loads it as it is"
_VLLM_DEFAULT_RANK: Final = 16
"""vLLM's default for `--max-lora-rank`."""
_CONVERTED: Final = ("llama", "mistral", "gemma")
"""The starts of the `model_type` of models whose adapters Ollama converts from safetensors."""
_LOADERS: Final = {
    "mlx": {"mlx": AS_IT_IS},
    "gguf": {
        "gguf": AS_IT_IS,
        "ollama": "loads it once a Modelfile names the base (FROM) and the file (ADAPTER)",
    },
    "ollama": {"gguf": f"{AS_IT_IS}: adapter.gguf", "ollama": AS_IT_IS},
}
"""For each form except peft's, the verdicts on the programs that load it."""
_OUTER: Final = ("lm_head", "embed_tokens")
"""The layers outside of the decoder's blocks, which peft can adapt or store."""
_UNREAD: Final = {
    "vllm": ("rank_pattern", "alpha_pattern"),
    "gguf": ("alpha_pattern", "use_rslora"),
}
"""The fields of `adapter_config.json` that vLLM before 0.33 and llama.cpp's converter ignore."""


def outside(report: AdapterReport, settings: Mapping[str, Any] | None) -> set[str]:
    """Return the modules and tensors that peft loads and that are not for linear layers of blocks.

    They are LoRA on the embedding or the head, and complete weights: those of `modules_to_save`,
    and the weight of an adapted embedding or head, which peft may store too.

    Args:
        report: the result of `verify_adapter` with the model's files.
        settings: the `adapter_config.json` of the adapter; None if it has none.
    """
    # `layer` is None if no linear layer of the model's blocks has the module's name.
    modules = [module.module for module in report.modules if module.layer is None]
    return {key for key in [*modules, *report.others] if _outer_names(key, settings)}


def _outer_names(key: str, settings: Mapping[str, Any] | None) -> set[str]:
    """Return the names in `key` that are in `_OUTER` or in `modules_to_save`."""
    saved = (settings or {}).get("modules_to_save") or ()
    return {*_OUTER, *saved}.intersection(key.split("."))


def settings_of(path: Path) -> dict[str, Any] | None:
    """Return the `adapter_config.json` of an adapter in peft's form; None for other adapters.

    Args:
        path: the adapter's file or folder.
    """
    if form_of(path) != "peft":
        return None
    return adapter_settings(path if path.is_dir() else path.parent)


def verdicts(path: Path, family: TextFamily) -> dict[str, str]:
    """Return, for each program, whether it loads the files, and what to do if it does not.

    Args:
        path: the adapter's file or folder.
        family: the adapter's model.

    Returns:
        A verdict for each key of `READERS`.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: the adapter or the model is missing or
            damaged.
    """
    form = form_of(path)
    if form in _LOADERS:
        otherwise = (
            f"cannot load it, and export cannot convert {READERS[form]}'s format: "
            "export the adapter that train-lora wrote"
        )
        return {reader: _LOADERS[form].get(reader, otherwise) for reader in READERS}
    given = _examine(path, family)
    if given.wrong:
        return dict.fromkeys(READERS, given.wrong)
    return {reader: given.verdict(reader) for reader in READERS}


@dataclass
class _Given:
    """An adapter in peft's form, or in a safetensors file without `adapter_config.json`."""

    settings: Mapping[str, Any] | None
    """The `adapter_config.json`; None without one."""
    config: Mapping[str, Any]
    """The model's `config.json`."""
    others: list[str]
    """The keys of the tensors that are not parameters of an adapter."""
    unknown_to_peft: bool
    """Whether peft does not know the names of some tensors."""
    wrong: str | None
    """The verdict on an adapter that is damaged or not for the model; None on other adapters."""
    adapter: TextAdapter | None
    """The adapter; None if it is `wrong` or `unexportable`."""
    unexportable: str | None
    """Why `export` cannot read the adapter; None if it can, or did not try because of `wrong`."""

    def verdict(self, reader: str) -> str:
        """Return whether a program loads the files, and what to do if it does not."""
        problems = self._problems(reader)
        if not problems:
            if reader == "vllm" and self.adapter and self.adapter.rank > _VLLM_DEFAULT_RANK:
                return f"{AS_IT_IS}, with --max-lora-rank {vllm_rank(self.adapter.rank)}"
            return AS_IT_IS
        remaining = self._problems_once_exported(reader)
        if remaining:
            return f"cannot load it, even exported: {'; '.join(remaining)}"
        return f"loads it after `trainable-candle export --for {reader}`: {'; '.join(problems)}"

    def _problems(self, reader: str) -> list[str]:
        """Return why a program does not load the files, or does not apply them as trained."""
        if reader == "mlx":
            return ["it needs adapters.safetensors, and an adapter_config.json of its own form"]
        if reader == "gguf":
            return ["it needs a .gguf file", *self._unread(reader, "its converter")]
        if reader == "ollama":
            converts = str(self.config.get("model_type")).startswith(_CONVERTED)
            also = "" if converts else ", and converts no safetensors adapters of this architecture"
            return [f"it needs a Modelfile{also}"]
        if self.settings is None:
            return ["it needs a folder with adapter_model.safetensors and adapter_config.json"]
        reasons = ["it knows only peft's names of tensors"] if self.unknown_to_peft else []
        return reasons if reader == "peft" else [*reasons, *self._for_vllm(self.settings)]

    def _for_vllm(self, settings: Mapping[str, Any]) -> list[str]:
        """Return why vLLM does not load peft's folder, or does not apply it as trained."""
        reasons = self._unread("vllm", "before 0.33, it")
        if self.adapter:
            reasons += refusals(self.adapter, "vllm")
        elif settings.get("peft_type") != "LORA":
            reasons.append("it loads only LoRA")
        alpha = settings.get("lora_alpha")
        if alpha is None:
            reasons.append("it needs lora_alpha, which adapter_config.json does not give")
        elif not isinstance(alpha, int):
            reasons.append(f"it declares lora_alpha an integer, and may reject {alpha}")
        if settings.get("modules_to_save"):
            reasons.append("it rejects modules_to_save")
        elif self.others:
            reasons.append(f"it rejects the tensor {self.others[0]}")
        if settings.get("bias", "none") != "none":
            reasons.append(f"it may reject bias: {settings['bias']}")
        return reasons

    def _unread(self, reader: str, subject: str) -> list[str]:
        """Return a reason if the settings have fields that `subject` ignores."""
        names = [name for name in _UNREAD[reader] if (self.settings or {}).get(name)]
        return [f"{subject} does not read {' and '.join(names)}"] if names else []

    def _problems_once_exported(self, reader: str) -> list[str]:
        """Return why a program cannot load the adapter once it is exported."""
        # A file that is `wrong` gets no verdicts. Any other file without an adapter has a reason in
        # `unexportable`.
        if self.unexportable or not self.adapter:
            return [str(self.unexportable)]
        if reader in {"gguf", "ollama"}:
            try:
                architecture(self.config)
            except Error as error:
                # `refusals` may advise `export --for merged`, which does not help these programs
                # with an architecture that they lack.
                return [str(error)]
        return refusals(self.adapter, reader)


def _examine(path: Path, family: TextFamily) -> _Given:
    """Compare an adapter in peft's form or in a safetensors file with its model."""
    report = tc.verify_adapter(path, family.name, family.weights)
    settings = settings_of(path)
    outer = outside(report, settings)
    unknown = [key for key in report.others if key not in outer]
    unmatched = [m.module for m in report.modules if m.layer is None and m.module not in outer]
    faults = [f"{m.module}: {m.fault}" for m in report.modules if m.layer and m.fault]
    foreign = [
        *(f"there is no layer {name}" for name in unmatched),
        *(f"{key} is no parameter of an adapter" for key in unknown),
    ]
    wrong = [
        *(f"cannot load it: it is not for this model: {reason}" for reason in foreign),
        *(f"cannot use it: {fault}" for fault in faults),
    ]
    adapter, unexportable = None, None
    if outer:
        names = sorted({name for key in outer for name in _outer_names(key, settings)})
        unexportable = (
            f"it changes {', '.join(names)}, and export writes adapters of the blocks' linear "
            "layers only; merge it with peft's merge_and_unload"
        )
    elif not wrong:
        try:
            adapter = read_adapter(path, family.name, family.weights)
        except Error as error:
            unexportable = str(error)
    return _Given(
        settings=settings,
        config=family.settings,
        others=list(report.others),
        unknown_to_peft=any("peft" in module.ignored_by for module in report.modules),
        wrong=wrong[0] if wrong else None,
        adapter=adapter,
        unexportable=unexportable,
    )
