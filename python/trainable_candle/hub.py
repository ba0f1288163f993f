"""Downloads models and data sets of the Hugging Face hub with the hub's own client and cache."""

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from trainable_candle.errors import MissingFileError

_STEMS: Final = ("diffusion_pytorch_model", "model")
"""The starts of the names of weight files in diffusers and in transformers."""
_PLAIN: Final = (".safetensors", "-*-of-*.safetensors", ".safetensors.index.json")
"""Patterns of what follows a stem in the names of files without "fp16"."""
_HALF: Final = (
    ".fp16.safetensors",
    ".fp16-*-of-*.safetensors",
    "-*-of-*.fp16.safetensors",
    ".safetensors.index.fp16.json",
)
"""Patterns of what follows a stem in the names of half-precision files."""
_FILES: Final = (".safetensors", ".gguf")
"""The endings of the names of files that hold a model."""
_WORD: Final = re.compile(r"(?!\.)[A-Za-z0-9._-]+")
"""The name of an organisation, or of a repository without its organisation."""


def download(name: str, subfolders: list[str], half: bool = False) -> str:
    """Return the local folder of a model on the hub, downloaded if it is not in the client's cache.

    Downloads only the configuration and the safetensors weights of one variant: the half-precision
    files, with "fp16" in their names, or the files without. Without a connection, uses the cache.

    Args:
        name: "organisation/name".
        subfolders: the model's possible folders in the repository, the likeliest first; "" is the
            repository's root.
        half: which variant to prefer if the repository has both: the half-precision files (True),
            or the files without "fp16" (False).

    Returns:
        The folder with the model's `config.json`.

    Raises:
        MissingFileError: the hub has no such repository; the repository has no such model, or no
            safetensors weights of it; the hub cannot be reached and the model is not in the cache;
            or the client, `huggingface_hub`, is not installed.
    """
    variants = (_HALF, _PLAIN) if half else (_PLAIN, _HALF)
    prefixes = [f"{subfolder}/" if subfolder else "" for subfolder in subfolders]
    snapshot = _fetch(name, [f"{prefix}config.json" for prefix in prefixes], ignored=[])
    for prefix in prefixes:
        if not (snapshot / prefix / "config.json").is_file():
            continue
        for variant in variants:
            wanted = [f"{prefix}{stem}{ending}" for stem in _STEMS for ending in variant]
            # A `*` in `_PLAIN` also matches "fp16", so exclude the half-precision files.
            ignored = [] if variant is _HALF else ["*.fp16.*", "*.fp16-*"]
            folder = _fetch(name, wanted, ignored) / prefix
            if _has_weights(folder, variant):
                return str(folder)
        raise MissingFileError(f"{name}: {prefix or 'the repository'} has no safetensors weights")
    searched = ", ".join(f"{prefix}config.json" for prefix in prefixes)
    raise MissingFileError(f"{name}: no such model: the repository has none of {searched}")


def is_name(text: str) -> bool:
    """Return whether a text has the form "organisation/name" and was not meant as a path.

    Does not ask the hub. A text counts as a path if it ends with `.safetensors` or `.gguf`, or if
    it or its parent folder exists here.
    """
    organisation, slash, name = text.partition("/")
    path = Path(text)
    has_form = bool(slash) and all(map(_WORD.fullmatch, (organisation, name)))
    return has_form and path.suffix not in _FILES and not (path.exists() or path.parent.is_dir())


def resolve(name: str, subfolders: list[str], half: bool) -> str | None:
    """Return the local folder of a model on the hub; None if `is_name` is False for `name`.

    Args:
        name: "organisation/name", or a path.
        subfolders: see `download`.
        half: see `download`.

    Raises:
        MissingFileError: see `download`.
    """
    return download(name, subfolders, half) if is_name(name) else None


def download_pipeline(name: str, parts: Sequence[str], half: bool = False) -> Path:
    """Return the local folder of a pipeline on the hub, downloaded if not in the cache.

    Args:
        name: "organisation/name".
        parts: the folders of the models to download, at least one. The tokenizers and the scheduler
            are always downloaded.
        half: see `download`.

    Raises:
        MissingFileError: see `download`.
    """
    folders = [Path(download(name, [part], half)) for part in parts]
    _fetch(name, ["model_index.json", "tokenizer*/*", "scheduler*/*"], ignored=[])
    return folders[0].parent


def shown_name(path: Path) -> str:
    """Return the name of a model's repository on the hub, or else of its file or folder.

    A file's name is returned without `.safetensors` or `.gguf`.
    """
    # A file in the client's cache is a link to a file whose name is a hash.
    path = path.parent.resolve() / path.name if path.is_file() else path.resolve()
    # The client keeps `organisation/name` in models--organisation--name/snapshots/REVISION.
    cached = path.parents[1].name if path.parent.name == "snapshots" else ""
    if cached.startswith("models--"):
        return cached.rpartition("--")[2]
    return path.stem if path.suffix in _FILES else path.name


def download_language_model(name: str) -> Path:
    """Return the local folder of a language model on the hub, downloaded if not in the cache.

    Args:
        name: "organisation/name".

    Raises:
        MissingFileError: see `download`.
    """
    # Imported here, because the tokenizers import settings, which import this module.
    from trainable_candle.text.tokenizer_files import FILES  # noqa: PLC0415

    weights = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
    return _fetch(name, ["config.json", *FILES, *weights], ignored=[])


def download_texts(name: str, suffixes: Sequence[str]) -> Path:
    """Return the local folder of a data set of texts on the hub, downloaded if not in the cache.

    Args:
        name: "organisation/name".
        suffixes: the endings of the names of files with texts. Only such files in the repository's
            root and in its folder `data` are downloaded.

    Raises:
        MissingFileError: see `download`.
    """
    files = [f"{prefix}*{suffix}" for prefix in ("", "data/") for suffix in suffixes]
    # `dataset_infos.json` describes the data set and has no texts, but the pattern for `.json`
    # matches it.
    return _fetch(name, files, ignored=["dataset_infos.json"], kind="dataset")


def _has_weights(folder: Path, variant: tuple[str, ...]) -> bool:
    """Return whether a folder has a weight file of a variant, `_PLAIN` or `_HALF`."""
    names = [path.name for path in folder.glob("*.safetensors")]
    if variant is _PLAIN:
        names = [name for name in names if ".fp16" not in name]
    endings = [ending for ending in variant if ending.endswith(".safetensors")]
    return any(
        fnmatch(name, stem + ending) for name in names for stem in _STEMS for ending in endings
    )


def _fetch(name: str, wanted: list[str], ignored: list[str], kind: str = "model") -> Path:
    """Download a repository's files that match a pattern of `wanted` and none of `ignored`.

    Args:
        name: "organisation/name".
        wanted: patterns of paths in the repository.
        ignored: patterns of paths in the repository.
        kind: the repository's type, "model" or "dataset".

    Returns:
        The repository's local folder.

    Raises:
        MissingFileError: see `download`.
    """
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 # optional
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415
    except ImportError as error:
        raise MissingFileError(
            f"{name}: there is no such file or folder; to fetch the {kind} of that name from the "
            "Hugging Face hub, pip install huggingface_hub"
        ) from error
    try:
        return Path(
            snapshot_download(
                name, repo_type=kind, allow_patterns=wanted, ignore_patterns=ignored or None
            )
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise MissingFileError(
            f"{name}: there is no such file or folder, and the Hugging Face hub gave no {kind} of "
            f"that name: {reason}"
        ) from error
