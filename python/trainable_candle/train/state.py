"""Checkpoints: everything that resuming a run needs, in a folder that is complete or absent."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.errors import ConfigError, Error, WeightsFormatError
from trainable_candle.files import parse_json, sync_folder, write_atomically
from trainable_candle.settings.paths import AUTO, LATEST

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainable_candle import Tensor, Var
    from trainable_candle.optim import Optimizer

FORMAT: Final = 2
"""The version of the format of checkpoint folders."""
_NAME: Final = re.compile(r"checkpoint-(\d+)")
_PARAMETERS: Final = "parameters.safetensors"
_OPTIMIZER: Final = "optimizer.safetensors"
_STATE: Final = "state.json"
_PARTIAL: Final = ".partial"
"""The suffix of a folder that is being written."""
_REPLACED: Final = ".replaced"
"""The suffix of an old checkpoint while a new one takes its name; then the old one is removed."""
_REMOVED: Final = ".removed"
"""The suffix of a folder that is being removed."""
_ADVICE: Final = "resume with the settings that the run was started with"


@dataclass(frozen=True)
class RunState:
    """The state of a run in a checkpoint, except tensors."""

    step: int
    """The number of optimizer steps taken."""
    batches: int
    """The number of batches that all processes together have used."""
    scaler: dict[str, Any] | None
    """The state of the loss scaler, if there is one."""
    settings: dict[str, Any]
    """The settings of the run."""


def checkpoint_path(output: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return output / f"checkpoint-{step:06d}"


def step_of(folder: Path) -> int:
    """Return the step in the name of a folder; `checkpoint_path` has made the name."""
    return int(folder.name.rpartition("-")[2])


def checkpoints(output: Path) -> list[Path]:
    """Return the complete checkpoints in `output`, in the order of their steps."""
    if not output.is_dir():
        return []
    complete = [p for p in output.iterdir() if _NAME.fullmatch(p.name) and (p / _STATE).is_file()]
    return sorted(complete, key=step_of)


def find(output: Path, resume: str) -> Path | None:
    """Return the checkpoint folder that `resume` names.

    `resume` is a path, or `latest` or `auto` for the last checkpoint in `output`.

    Returns:
        The folder; None for `auto` if `output` has no checkpoint.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    if resume in {LATEST, AUTO}:
        existing = checkpoints(output)
        if not existing and resume == LATEST:
            raise ConfigError(
                f"resume: there is no checkpoint in {output}; leave --resume out to start, or "
                "give --resume auto"
            )
        return existing[-1] if existing else None
    path = Path(resume).expanduser()
    if not (path / _STATE).is_file():
        raise ConfigError(
            f"resume: {path} is not a checkpoint folder (it has no {_STATE}); give such a folder, "
            "or `latest` for the last one in --output"
        )
    return path


def refuse_later(output: Path, step: int) -> None:
    """Check that `output` has no checkpoints of steps after `step`.

    Another run wrote such checkpoints, and a run that continues from `step` would mix its own with
    them.

    Raises:
        ConfigError: `output` has such checkpoints.
    """
    later = [folder for folder in checkpoints(output) if step_of(folder) > step]
    if later:
        raise ConfigError(
            f"output: {output} holds {later[-1].name} of an earlier run; continue it with "
            "--resume latest, remove its checkpoints, or choose another --output"
        )


def remove_run(output: Path, adapter: str) -> None:
    """Remove the checkpoints and the finished adapter of the run in a folder.

    Args:
        output: the folder.
        adapter: the name of the finished adapter's file.

    Raises:
        OSError: a file cannot be removed.
    """
    for checkpoint in checkpoints(output):
        shutil.rmtree(checkpoint)
    (output / adapter).unlink(missing_ok=True)


@dataclass(frozen=True)
class Snapshot:
    """A copy on the CPU of all that the trainer saves; further training does not change it."""

    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: RunState

    @classmethod
    def of(cls, parameters: Mapping[str, Var], optimizer: Optimizer, state: RunState) -> Snapshot:
        """Return a copy of the current values."""
        return cls(
            tc.snapshot({name: var.detach() for name, var in parameters.items()}),
            optimizer.state_dict(),
            state,
        )


class Draft:
    """A checkpoint that is being written: first to a temporary folder, which is then renamed.

    Args:
        folder: the final folder; an older checkpoint of the same name is replaced.

    Raises:
        OSError: the temporary folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = _with_suffix(folder, _PARTIAL)
        """The temporary folder."""
        _restore_name(folder)
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)

    def write(self, snapshot: Snapshot) -> None:
        """Write the files of a snapshot; the last, `state.json`, makes the folder a checkpoint.

        Raises:
            OSError: a file cannot be written.
        """
        tc.save_file(snapshot.parameters, self.path / _PARAMETERS)
        tc.save_file(snapshot.optimizer, self.path / _OPTIMIZER)
        content = json.dumps({"format": FORMAT, **asdict(snapshot.state)}, indent=1)
        write_atomically(self.path / _STATE, content)

    def finish(self) -> None:
        """Rename the temporary folder to its final name.

        An older checkpoint of that name is removed. If the process is killed during the renaming,
        the old or the new checkpoint remains. If only the old one remains, its name may still end
        in `.replaced`; `restore` gives it its old name back.

        Raises:
            OSError: a folder cannot be renamed.
        """
        replaced = _with_suffix(self._folder, _REPLACED)
        if self._folder.exists():
            self._folder.rename(replaced)
        self.path.rename(self._folder)
        sync_folder(self._folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def discard(self) -> None:
        """Remove the temporary folder; undo the renaming of an older checkpoint by `finish`."""
        _restore_name(self._folder)
        shutil.rmtree(self.path, ignore_errors=True)


def save(
    folder: Path, parameters: Mapping[str, Var], optimizer: Optimizer, state: RunState
) -> None:
    """Write a checkpoint and wait for it.

    Args:
        folder: the final folder; an older checkpoint of the same name is replaced.
        parameters: the trainable variables by name.
        optimizer: the optimizer, whose state is saved completely.
        state: the state of the run, except tensors.

    Raises:
        OSError: the checkpoint cannot be written; older checkpoints are unchanged.
    """
    draft = Draft(folder)
    try:
        draft.write(Snapshot.of(parameters, optimizer, state))
        draft.finish()
    except BaseException:
        draft.discard()
        raise


def _with_suffix(folder: Path, suffix: str) -> Path:
    """Return the path of a folder with a suffix after its name."""
    return folder.with_name(folder.name + suffix)


def _restore_name(folder: Path) -> None:
    """Give the old checkpoint its name `folder` back if its replacement was not completed."""
    replaced = _with_suffix(folder, _REPLACED)
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)


def load(folder: Path, parameters: Mapping[str, Var], optimizer: Optimizer) -> RunState:
    """Read a checkpoint into the variables and the optimizer; return the state of the run.

    Raises:
        WeightsFormatError: a file is missing, damaged, of another format, or of a run with another
            adapter or optimizer.
    """
    state = read_state(folder)
    stored, optimizer_state = (read_tensors(folder, name) for name in (_PARAMETERS, _OPTIMIZER))
    _check_fit(folder, stored, parameters)
    for name, var in parameters.items():
        var.set(stored[name].to(var.device))
    try:
        # Load the optimizer's state after setting the variables. The state may have f32 copies of
        # f16 and bf16 variables. If a variable were set later, the next step would replace its copy
        # by the rounded values of the variable.
        optimizer.load_state_dict(optimizer_state)
    except Error as error:
        raise WeightsFormatError(
            f"resume: {folder} has the state of another optimizer: {error}; {_ADVICE}"
        ) from error
    return state


def read_state(folder: Path) -> RunState:
    """Return the state of the run in a checkpoint, except tensors.

    Raises:
        WeightsFormatError: the file is missing, damaged or of another format.
    """
    values = read_json(folder, _STATE)
    try:
        found = values.pop("format")
        if found == FORMAT:
            return RunState(**values)
    except (TypeError, KeyError, AttributeError) as error:
        raise damaged(folder, _STATE, error) from error
    raise WeightsFormatError(
        f"resume: {folder} has format {found!r}, expected {FORMAT}: "
        "it was written by another version of trainable-candle; resume with that version"
    )


def read_json(folder: Path, name: str) -> Any:
    """Return the value in a JSON file of a checkpoint.

    Raises:
        WeightsFormatError: the file is missing or damaged.
    """
    try:
        return parse_json((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(folder, name, error) from error


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors of a file of a checkpoint, on the CPU.

    Raises:
        WeightsFormatError: the file is missing or damaged.
    """
    try:
        return tc.load_file(folder / name)
    except Error as error:
        raise damaged(folder, name, error) from error


def damaged(folder: Path, name: str, reason: object) -> WeightsFormatError:
    """Return the error for a checkpoint's damaged file: why, and from where to resume instead."""
    # Users may rename a folder. Without a step in its name, no checkpoint is known to be earlier.
    has_step = _NAME.fullmatch(folder.name) is not None
    candidates = checkpoints(folder.parent) if has_step else []
    earlier = [other for other in candidates if step_of(other) < step_of(folder)]
    cure = (
        f"remove that folder, and --resume latest continues from {earlier[-1].name}"
        if earlier
        else "there is no earlier checkpoint: remove that folder and start without --resume"
    )
    return WeightsFormatError(f"resume: {folder} is damaged: {name}: {reason}; {cure}")


def _check_fit(folder: Path, stored: Mapping[str, Tensor], parameters: Mapping[str, Var]) -> None:
    """Check that the stored parameters have the names, shapes and dtypes of a run's parameters.

    Raises:
        WeightsFormatError: they differ.
    """
    differing = sorted(stored.keys() ^ parameters.keys())  # names in only one of the two
    if differing:
        raise WeightsFormatError(
            f"resume: {folder} holds other parameters than this run trains "
            f"({len(differing)} differ, the first is {differing[0]}); {_ADVICE}"
        )
    for name, expected in parameters.items():
        found = stored[name]
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise WeightsFormatError(
                f"resume: {name} in {folder} has shape {found.shape} and dtype {found.dtype}, "
                f"expected {expected.shape} and {expected.dtype}; {_ADVICE}"
            )


def restore(output: Path) -> None:
    """Restore the names of the old checkpoints that a run was replacing when it was killed.

    No other run may be writing to `output`.
    """
    for path in list(output.iterdir()):
        if path.name.endswith(_REPLACED):
            _restore_name(path.with_name(path.name.removesuffix(_REPLACED)))


def needs_restoring(output: Path) -> bool:
    """Return whether `restore` would rename a checkpoint."""
    paths = output.iterdir() if output.is_dir() else ()
    return any(
        path.name.endswith(_REPLACED)
        and not path.with_name(path.name.removesuffix(_REPLACED)).exists()
        for path in paths
    )


def remove_leftovers(output: Path) -> None:
    """Call `restore`, then remove the temporary folders and files that a killed run left.

    No other run may be writing to `output`.
    """
    restore(output)
    for path in list(output.iterdir()):
        if path.name.endswith((_PARTIAL, _REPLACED, _REMOVED)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def prune(output: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints; `keep` is at least 1."""
    for folder in checkpoints(output)[:-keep]:
        # Rename the folder first, because a partly removed folder must not look like a checkpoint.
        removed = _with_suffix(folder, _REMOVED)
        shutil.rmtree(removed, ignore_errors=True)
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
