"""Checkpoints of a run: everything that the next step depends on, in one folder that is complete or absent."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.errors import ConfigError, WeightsFormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainable_candle import Tensor, Var

FORMAT: Final = 1
_NAME: Final = re.compile(r"checkpoint-(\d+)")
_PARAMETERS: Final = "parameters.safetensors"
_OPTIMIZER: Final = "optimizer.safetensors"
_STATE: Final = "state.json"


@dataclass(frozen=True)
class RunState:
    """What a checkpoint holds besides tensors."""

    step: int
    batches: int
    rng: Any
    scaler: dict[str, Any] | None
    optimizer: dict[str, Any]
    run: dict[str, Any]


def checkpoint_path(output: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return output / f"checkpoint-{step:06d}"


def checkpoints(output: Path) -> list[Path]:
    """The complete checkpoints below `output`, oldest first."""
    if not output.is_dir():
        return []
    found = [p for p in output.iterdir() if _NAME.fullmatch(p.name) and (p / _STATE).is_file()]
    return sorted(found, key=lambda p: int(p.name.rsplit("-", 1)[1]))


def find(output: Path, resume: str) -> Path:
    """The checkpoint folder that `resume` names: a path, or `latest` below `output`.

    Raises:
        ConfigError: there is none.
    """
    if resume == "latest":
        existing = checkpoints(output)
        if not existing:
            raise ConfigError(f"resume: there is no checkpoint in {output}; leave --resume out to start")
        return existing[-1]
    path = Path(resume)
    if not (path / _STATE).is_file():
        raise ConfigError(f"resume: {path} is no checkpoint folder (it has no {_STATE})")
    return path


def save(
    folder: Path,
    parameters: Mapping[str, Var],
    optimizer: tc.optim.Optimizer,
    state: dict[str, Any],
) -> None:
    """Write a checkpoint: first under another name, then renamed.

    Args:
        folder: where it will be; an older one of the same name is replaced.
        parameters: the trainable variables by name.
        optimizer: its state goes in whole.
        state: the fields of `RunState` except `optimizer`.

    Raises:
        OSError: the disk is full or read-only; the older checkpoints are as they were.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors, numbers = _split(optimizer.state_dict())
    tc.save_file({name: var.detach() for name, var in parameters.items()}, partial / _PARAMETERS)
    tc.save_file(tensors, partial / _OPTIMIZER)
    text = json.dumps({"format": FORMAT, **state, "optimizer": numbers}, indent=1)
    with (partial / _STATE).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def load(folder: Path, parameters: Mapping[str, Var], optimizer: tc.optim.Optimizer) -> RunState:
    """Read a checkpoint into the variables and the optimizer.

    Raises:
        WeightsFormatError: a file is missing, damaged, of another format, or of another adapter.
    """
    try:
        values = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsFormatError(f"{folder / _STATE}: cannot be read: {error}") from error
    if values.pop("format", None) != FORMAT:
        raise WeightsFormatError(f"{folder}: was written by another version of trainable-candle")
    stored = tc.load_file(folder / _PARAMETERS)
    if stored.keys() != parameters.keys():
        odd = sorted(stored.keys() ^ parameters.keys())
        raise WeightsFormatError(
            f"{folder}: holds other parameters than this run trains ({len(odd)} differ, first: {odd[0]}); "
            "resume with the settings that the run was started with"
        )
    numbers = values["optimizer"]
    optimizer.load_state_dict(_join(tc.load_file(folder / _OPTIMIZER), numbers))
    for name, var in parameters.items():
        var.set(stored[name])
    return RunState(**values)


def prune(output: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for folder in checkpoints(output)[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)


def _split(values: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {name: value for name, value in values.items() if isinstance(value, tc.Tensor)}
    return tensors, {name: value for name, value in values.items() if name not in tensors}


def _join(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {**tensors, **numbers}
