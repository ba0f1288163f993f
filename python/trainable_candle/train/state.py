"""Checkpoints: all that the next step depends on, in a folder that is complete or absent."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.errors import ConfigError, Error, WeightsFormatError
from trainable_candle.files import sync_folder, write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainable_candle import Tensor, Var
    from trainable_candle.optim import Optimizer

FORMAT: Final = 1
_NAME: Final = re.compile(r"checkpoint-(\d+)")
_PARAMETERS: Final = "parameters.safetensors"
_OPTIMIZER: Final = "optimizer.safetensors"
_STATE: Final = "state.json"
_UNFINISHED: Final = (".partial", ".replaced")


@dataclass(frozen=True)
class RunState:
    """What a checkpoint holds besides tensors."""

    step: int
    """Optimizer steps taken."""
    batches: int
    """Batches seen."""
    rng: tuple[int, int]
    """`tc.get_rng_state()`."""
    scaler: dict[str, Any] | None
    """State of the loss scaler, if there is one."""
    settings: dict[str, Any]
    """What the run was started with."""


def checkpoint_path(output: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return output / f"checkpoint-{step:06d}"


def step_of(folder: Path) -> int:
    """The step of a folder that `checkpoint_path` named."""
    return int(folder.name.rpartition("-")[2])


def checkpoints(output: Path) -> list[Path]:
    """The complete checkpoints in `output`, oldest first."""
    if not output.is_dir():
        return []
    found = [p for p in output.iterdir() if _NAME.fullmatch(p.name) and (p / _STATE).is_file()]
    return sorted(found, key=step_of)


def find(output: Path, resume: str) -> Path:
    """The checkpoint folder that `resume` names: a path, or `latest` in `output`.

    Raises:
        ConfigError: there is none.
    """
    if resume == "latest":
        existing = checkpoints(output)
        if not existing:
            raise ConfigError(
                f"resume: there is no checkpoint in {output}; leave --resume out to start"
            )
        return existing[-1]
    path = Path(resume).expanduser()
    if not (path / _STATE).is_file():
        raise ConfigError(f"resume: {path} is no checkpoint folder (it has no {_STATE})")
    return path


def refuse_later(output: Path, step: int) -> None:
    """Check that a run which stands at `step` would not mix its checkpoints with later ones.

    Raises:
        ConfigError: `output` holds checkpoints of later steps, so of another run.
    """
    later = [folder for folder in checkpoints(output) if step_of(folder) > step]
    if later:
        raise ConfigError(
            f"output: {output} holds {later[-1].name} of an earlier run; continue it with "
            "--resume latest, remove its checkpoints, or choose another --output"
        )


def save(
    folder: Path,
    parameters: Mapping[str, Var],
    optimizer: Optimizer,
    state: RunState,
    write_more: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write a checkpoint: first under another name, then renamed.

    Args:
        folder: where it will be; an older one of the same name is replaced.
        parameters: the trainable variables by name.
        optimizer: its state goes in whole.
        state: the rest.
        write_more: writes what else belongs to it into the folder that it is given.

    Raises:
        OSError: it cannot be written; the older checkpoints are as they were.
    """
    partial, replaced = (folder.with_name(folder.name + end) for end in _UNFINISHED)
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        values = {name: var.detach() for name, var in parameters.items()}
        tc.save_file(values, partial / _PARAMETERS)
        tc.save_file(optimizer.state_dict(), partial / _OPTIMIZER)
        write_more(partial)
        content = json.dumps({"format": FORMAT, **asdict(state)}, indent=1)
        write_atomically(partial / _STATE, content)
    except BaseException:
        # A full disk must not stay full for it.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def load(folder: Path, parameters: Mapping[str, Var], optimizer: Optimizer) -> RunState:
    """Read a checkpoint into the variables and the optimizer.

    Raises:
        WeightsFormatError: a file is missing, damaged, of another format, or of another adapter.
    """
    state = read_state(folder)
    try:
        stored = tc.load_file(folder / _PARAMETERS)
        states = tc.load_file(folder / _OPTIMIZER)
    except Error as error:
        raise WeightsFormatError(f"resume: {folder} is damaged: {error}") from error
    _check_fit(folder, stored, parameters)
    for name, var in parameters.items():
        var.set(stored[name].to(var.device))
    try:
        # After the variables: the optimizer keeps track of who changed them last.
        optimizer.load_state_dict(states)
    except Error as error:
        raise WeightsFormatError(
            f"resume: the optimizer of {folder} is another: {error}; {_ADVICE}"
        ) from error
    return state


_ADVICE: Final = "resume with the settings that the run was started with"


def read_state(folder: Path) -> RunState:
    """What a checkpoint holds besides tensors.

    Raises:
        WeightsFormatError: it is missing, damaged or of another format.
    """
    path = folder / _STATE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found = values.pop("format")
        if found == FORMAT:
            values["rng"] = tuple(values["rng"])
            return RunState(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsFormatError(f"resume: {path} cannot be read: {error}") from error
    raise WeightsFormatError(
        f"resume: {folder} has format {found!r}, expected {FORMAT}: "
        "it was written by another version of trainable-candle"
    )


def _check_fit(folder: Path, stored: Mapping[str, Tensor], parameters: Mapping[str, Var]) -> None:
    odd = sorted(stored.keys() ^ parameters.keys())
    if odd:
        raise WeightsFormatError(
            f"resume: {folder} holds other parameters than this run trains "
            f"({len(odd)} differ, the first is {odd[0]}); {_ADVICE}"
        )
    for name, var in parameters.items():
        found, expected = stored[name], var
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise WeightsFormatError(
                f"resume: {name} in {folder} has shape {found.shape} and dtype {found.dtype}, "
                f"expected {expected.shape} and {expected.dtype}; {_ADVICE}"
            )


def remove_leftovers(output: Path) -> None:
    """Remove what a killed run has left half-written; no other run may be writing there."""
    for path in output.iterdir():
        if path.name.endswith(_UNFINISHED):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def prune(output: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for folder in checkpoints(output)[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)
