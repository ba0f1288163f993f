"""Adapters on models written in Python, with peft's names and file format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from trainable_candle._core import LoraConfig, Model, Tensor, Var, load_file, save_file
from trainable_candle.errors import (
    ArgumentError,
    ConfigError,
    MissingFileError,
    ShapeError,
    WeightsFormatError,
)
from trainable_candle.files import parse_json, write_atomically
from trainable_candle.nn.conv_adapter import LoRAConv2d
from trainable_candle.nn.layers import Conv2d
from trainable_candle.nn.linear import DoRALinear, Linear, LoRALinear
from trainable_candle.nn.module import Module

__all__ = ["ModuleAdapter", "PeftModel", "get_peft_model"]

_WEIGHTS: Final = "adapter_model.safetensors"
_CONFIG: Final = "adapter_config.json"
_PREFIX: Final = "base_model.model."
_NAMES: Final = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
"""The names of a layer's parameters in peft's files, in the order of `get_vars`."""
_MAGNITUDE_OF_STATES: Final = "lora_magnitude_vector.weight"
"""The name of the magnitude in the state dict of peft's model, which differs from that in files."""

_Adapted = LoRALinear | DoRALinear | LoRAConv2d


class _Place(NamedTuple):
    """A layer, its owner (a module, list or dict), and the layer's key in the owner."""

    owner: Any
    key: Any
    layer: Linear | Conv2d


class ModuleAdapter:
    """The adapters of a module written in Python; `Module.add_adapter` returns this object.

    Of the selected layers, linear ones are replaced by `nn.LoRALinear` or `nn.DoRALinear`, and
    convolutions by `nn.LoRAConv2d`, with the same weights. All weights of the module are frozen.

    ```python
    adapter = model.add_adapter(tc.LoraConfig(r=2, target_modules="all-linear"))
    model(x).sum().backward()
    adapter.save("adapters")
    ```

    Args:
        module: A module with `nn.Linear` and `nn.Conv2d` layers at any depth.
        config: The layers to adapt, and the kind (LoRA or DoRA) and rank of the adapters.
        folder: A folder with the adapters' parameters in peft's format; by default they are new.

    Raises:
        MissingFileError, WeightsFormatError, ShapeError: As for `load`; the module is unchanged.
        ConfigError: If the configuration or one of its `target_modules` matches no layer, or a
            selected layer cannot have the adapter that the configuration describes.
        ArgumentError: If a layer is in a tuple, or a selected convolution has several groups.
        TypeError: If an argument has another type.
    """

    def __init__(
        self, module: Module, config: LoraConfig, folder: str | Path | None = None
    ) -> None:
        _expect("add_adapter", "module", module, Module)
        _expect("add_adapter", "config", config, LoraConfig)
        if config.adapter not in {"lora", "dora"}:
            raise ConfigError(
                f"add_adapter: the adapter is {config.adapter}, expected lora or dora: models "
                "written in Python have no other adapters"
            )
        self.config = config
        self._module = module
        places = _places(module)
        shapes: dict[str, Any] = {name: place.layer.weight.shape for name, place in places.items()}
        ranks = config.select(shapes)
        for target in config.target_modules:
            _require_layer(module, shapes, target)
        if not ranks:
            raise ConfigError("add_adapter: no layer has a name that the configuration targets")
        self.layers: dict[str, _Adapted] = {
            name: _adapted(name, places[name].layer, rank, config) for name, rank in ranks.items()
        }
        """The adapted layers by name."""
        if folder is not None:
            self.load(folder)
        module.requires_grad_(requires_grad=False)
        # The plain layers that the adapted layers replace, by name.
        self._replaced: dict[str, _Place] = {}
        for name, layer in self.layers.items():
            place = places[name]
            layer.train(place.layer.training)
            self._replaced[name] = place
            _put(place.owner, place.key, layer)

    def named_parameters(self) -> dict[str, Var]:
        """Return the trainable parameters under peft's names ("fc.lora_A.weight")."""
        return {
            f"{name}.{parameter}": var
            for name, layer in self.layers.items()
            # Not strict: LoRA has no magnitude.
            for parameter, var in zip(_NAMES, layer.get_vars(), strict=False)
        }

    def parameters(self) -> list[Var]:
        """Return the trainable parameters, in the order of `named_parameters`."""
        return list(self.named_parameters().values())

    def set_enabled(self, enabled: bool) -> None:
        """Let the module compute with the adapters (True) or as if there were none (False)."""
        for layer in self.layers.values():
            layer.enabled = enabled

    def merge(self) -> Module:
        """Put the plain layers back, with the adapters merged into them; return the module."""
        for name, layer in self.layers.items():
            self._restore(name, layer.merge())
        return self._module

    def remove(self) -> Module:
        """Put the plain layers back with their frozen weights; return the module."""
        for name, layer in self.layers.items():
            self._restore(name, layer.weight)
        return self._module

    def _restore(self, name: str, weight: Tensor) -> None:
        """Put a plain layer back with this weight, in place of its adapted layer."""
        place, layer = self._replaced[name], self.layers[name]
        place.layer.weight, place.layer.bias = weight, layer.bias
        place.layer.train(layer.training)
        _put(place.owner, place.key, place.layer)

    def save(self, folder: str | Path) -> None:
        """Write a folder that peft's own `PeftModel.from_pretrained` reads for the same model.

        Raises:
            FileError, OSError: If a file cannot be written.
        """
        folder = Path(folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            _PREFIX + name: var.detach().to("cpu") for name, var in self.named_parameters().items()
        }
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
        write_atomically(folder / _CONFIG, json.dumps(self._settings(), indent=2))

    def _settings(self) -> dict[str, Any]:
        """Return the content of peft's `adapter_config.json`."""
        config = self.config
        return {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": None,
            "inference_mode": True,
            "r": config.r,
            "lora_alpha": integer_if_whole(config.lora_alpha),
            "lora_dropout": config.lora_dropout,
            "target_modules": sorted(self.layers),
            "exclude_modules": None,
            "rank_pattern": config.rank_pattern,
            "alpha_pattern": config.alpha_pattern,
            "use_rslora": config.use_rslora,
            "use_dora": config.adapter == "dora",
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "modules_to_save": None,
        }

    def load(self, folder: str | Path) -> None:
        """Read the adapters' parameters from a folder in peft's format, or from its weights file.

        The stored adapters must have the layers and ranks of these adapters.

        Raises:
            MissingFileError: If there is no such file.
            WeightsFormatError: If the file is damaged, or the stored adapters have other layers;
                nothing is changed then.
            ShapeError: If a parameter has another shape; nothing is changed then.
        """
        path = Path(folder).expanduser()
        stored = {
            _parameter_name(key): value
            for key, value in load_file(path / _WEIGHTS if path.is_dir() else path).items()
        }
        parameters = self.named_parameters()
        unmatched = sorted(stored.keys() ^ parameters.keys())
        if unmatched:
            raise WeightsFormatError(
                f"{path}: its adapters differ from the model's ({len(unmatched)} parameters are "
                f"only in the file or only in the model, the first is {unmatched[0]})"
            )
        for name, var in parameters.items():
            if stored[name].shape != var.shape:
                raise ShapeError(
                    f"{path}: {name} has shape {stored[name].shape}, the model's has {var.shape}"
                )
        for name, var in parameters.items():
            var.set(stored[name].to(var.dtype).to(var.device))


class PeftModel(Module):
    """A module with adapters, like peft's class of this name; `get_peft_model` returns one.

    A call of this object calls the module. `parameters` returns the parameters of the adapters.

        model = tc.get_peft_model(model, tc.LoraConfig(r=2, target_modules=["0"]))
        model.save_pretrained("adapters")
    """

    def __init__(self, module: Module, adapter: ModuleAdapter) -> None:
        _expect("PeftModel", "module", module, Module)
        _expect("PeftModel", "adapter", adapter, ModuleAdapter)
        self.model = module
        self._adapter = adapter
        self.forward = module.forward

    @property
    def adapter(self) -> ModuleAdapter:
        """The adapters."""
        return self._adapter

    @classmethod
    def from_pretrained(cls, module: Module, folder: str | Path) -> PeftModel:
        """Attach adapters to a module from a folder that this class or peft has written.

        Raises:
            MissingFileError: If a file is missing.
            WeightsFormatError: If a file is damaged, or its adapters have other layers.
            ConfigError: If the adapters are neither LoRA nor DoRA, or as for `get_peft_model`.
            ArgumentError, TypeError: As for `get_peft_model`.
            ShapeError: If a stored parameter does not have the shape that its layer needs.

        After an error the module is unchanged.
        """
        path = Path(folder).expanduser()
        _reject_model(module)
        return cls(module, ModuleAdapter(module, _read_config(path / _CONFIG), path))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the adapters in peft's format; for errors see `ModuleAdapter.save`."""
        self._adapter.save(folder)

    def merge_and_unload(self) -> Module:
        """Merge the adapters into the weights of the module, and return the module."""
        return self._adapter.merge()

    def unload(self) -> Module:
        """Remove the adapters from the module, and return the module."""
        return self._adapter.remove()

    def print_trainable_parameters(self) -> None:
        """Print the numbers of trained and of all parameters, and the trained percentage."""
        trained = sum(var.numel() for var in self.parameters())
        total = sum(value.numel() for value in self.named_tensors().values())
        print(
            f"trainable params: {trained:,} || all params: {total:,} || "
            f"trainable%: {100 * trained / total:.4f}"
        )


def get_peft_model(module: Module, config: LoraConfig) -> PeftModel:
    """Freeze a module written in Python and attach adapters, like peft's function of this name.

        model = tc.nn.Sequential(tc.nn.Linear(4, 8), tc.nn.ReLU(), tc.nn.Linear(8, 2))
        model = tc.get_peft_model(model, tc.LoraConfig(r=8, target_modules=["0", "2"]))
        optimizer = tc.optim.AdamW(model.parameters(), lr=1e-3)

    Models of `trainable_candle.models` have a method instead: `model.add_adapter(config)`.

    Raises:
        ConfigError, ArgumentError: As for `ModuleAdapter`.
        TypeError: If `module` is not a module written in Python, or `config` not a `LoraConfig`.
    """
    _reject_model(module)
    return PeftModel(module, ModuleAdapter(module, config))


def integer_if_whole(number: float) -> int | float:
    """Return the number as `lora_alpha` of peft's configuration has it: 8 instead of 8.0.

    peft and vLLM declare `lora_alpha` an integer, and Ollama rejects 8.0.
    """
    return int(number) if float(number).is_integer() else number


def _reject_model(value: object) -> None:
    """Raise a TypeError for a model of `trainable_candle.models`."""
    if isinstance(value, Model):
        raise TypeError(
            f"get_peft_model: module is {type(value).__name__}, expected a module written in "
            "Python; use adapter = model.add_adapter(config), and train adapter.parameters()"
        )


def _expect(function: str, name: str, value: object, kind: type) -> None:
    """Raise a TypeError unless the argument `name` is of the class `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{function}: {name} is {type(value).__name__}, expected a {kind.__name__}")


def _places(module: Module) -> dict[str, _Place]:
    """Return the layers that can have adapters, by name; a shared layer has its first name.

    Raises:
        ArgumentError: One of these layers is in a tuple.
    """
    found: dict[str, _Place] = {}
    seen: set[int] = set()
    for name, owner, key, layer in module.named_children():
        # Subclasses, which may compute something else, get no adapters. Type checkers understand
        # only `isinstance`.
        if not isinstance(layer, (Linear, Conv2d)) or type(layer) not in {Linear, Conv2d}:
            continue
        if id(layer) not in seen:
            seen.add(id(layer))
            if isinstance(owner, tuple):
                raise ArgumentError(
                    f"add_adapter: {name} is in a tuple, which cannot change; use a list"
                )
            found[name] = _Place(owner, key, layer)
    return found


def _require_layer(module: Module, shapes: dict[str, Any], target: str) -> None:
    """Check that `target`, an entry of `target_modules`, selects a layer.

    `shapes` has the shape of each layer's weight, by the layer's name.

    Raises:
        ConfigError: The entry selects no layer. If it is the name of a module that can have no
            adapter, the message has the module's class.
    """
    if LoraConfig(target_modules=[target]).select(shapes):
        return
    for name, _, _, layer in module.named_children():
        if name == target or name.endswith(f".{target}"):
            raise ConfigError(
                f"add_adapter: {name} is of the kind {type(layer).__name__}, which has no adapter; "
                "expected Linear or Conv2d layers"
            )
    raise ConfigError(f"add_adapter: no layer has a name that `{target}` targets")


def _put(owner: Any, key: Any, layer: Module) -> None:
    """Set the attribute or item `key` of `owner` to the layer."""
    if isinstance(owner, Module) and isinstance(key, str):
        setattr(owner, key, layer)
    else:
        owner[key] = layer


def _adapted(name: str, layer: Linear | Conv2d, rank: int, config: LoraConfig) -> _Adapted:
    """Return the adapted layer that replaces a plain layer.

    Raises:
        ConfigError: The plain layer cannot have the adapter that the configuration describes.
        ArgumentError: The layer is a convolution with several groups.
    """
    # A key of `alpha_pattern` is a regular expression for a layer's whole name, or for the end of
    # the name after a dot.
    alpha = next(
        (
            value
            for pattern, value in config.alpha_pattern.items()
            if re.fullmatch(rf"(.*\.)?({pattern})", name)
        ),
        config.lora_alpha,
    )
    options = (config.lora_dropout, config.use_rslora)
    if config.dtype != "f32":
        raise ConfigError(
            f"add_adapter: dtype {config.dtype} is for models of trainable_candle.models, and this "
            "is a module written in Python; leave dtype out"
        )
    if isinstance(layer, Conv2d):
        if config.qat is not None:
            raise ConfigError(
                f"add_adapter: {name} is a convolution, and qat rounds weights of linear layers "
                "only; exclude the convolution with exclude_modules"
            )
        if config.adapter == "dora":
            raise ConfigError(f"add_adapter: {name} is a convolution, which can have LoRA only")
        return LoRAConv2d(layer, rank, alpha, *options)
    if config.qat_learned_scales:
        raise ConfigError(
            "add_adapter: qat_learned_scales is for models of trainable_candle.models, and this is "
            "a module written in Python; leave qat_learned_scales out"
        )
    kind = DoRALinear if config.adapter == "dora" else LoRALinear
    assert isinstance(layer, Linear)
    return kind(layer.weight, rank, alpha, layer.bias, *options, config.qat, config.qat_activations)


def _parameter_name(key: str) -> str:
    """Convert a key of peft's file or `state_dict` to a name in `named_parameters`."""
    # Keys of a `state_dict` contain the name of the adapter, by default `default`.
    name = key.removeprefix(_PREFIX).replace(".default.", ".")
    return name.removesuffix(".weight") if name.endswith(_MAGNITUDE_OF_STATES) else name


def _read_config(path: Path) -> LoraConfig:
    """Read peft's `adapter_config.json`.

    Raises:
        MissingFileError: There is no such file.
        WeightsFormatError: The file is damaged.
        ConfigError: The file does not describe LoRA or DoRA.
    """
    try:
        values: Any = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise WeightsFormatError(f"{path}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise WeightsFormatError(f"{path}: expected a JSON object")
    # The values as messages of errors quote them.
    found = {name: repr(value) for name, value in values.items()}
    if values.get("peft_type") != "LORA":
        raise ConfigError(
            f"{path}: peft_type is {found.get('peft_type', 'missing')}, expected 'LORA'"
        )
    for name in ("r", "lora_alpha"):
        if not isinstance(values.get(name), (int, float)):
            raise WeightsFormatError(
                f"{path}: {name} is {found.get(name, 'missing')}, expected a number"
            )
    targets = values.get("target_modules") or []
    return LoraConfig(
        r=values["r"],
        lora_alpha=float(values["lora_alpha"]),
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=values.get("exclude_modules"),
        lora_dropout=float(values.get("lora_dropout", 0.0)),
        use_rslora=bool(values.get("use_rslora")),
        adapter="dora" if values.get("use_dora") else "lora",
        rank_pattern=values.get("rank_pattern") or None,
        alpha_pattern=values.get("alpha_pattern") or {},
    )
