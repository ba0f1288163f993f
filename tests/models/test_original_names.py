"""Original files of transformers hold the parameters that diffusers converts them to.

The golden list has the names in original files and where diffusers' `from_single_file` takes each
parameter from; `make_names.py` beside it describes its lines.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tests.compressed import decompressed

import trainable_candle as tc

from .test_transformers import FAMILIES, GOLDEN, Family

LIST = decompressed(GOLDEN / "transformers" / "original_names.txt")
PREFIX = "model.diffusion_model."


class Line(NamedTuple):
    """A layer or a parameter of an original file."""

    original: str
    names: list[str]
    """diffusers' names of the layers whose rows follow one another in it."""
    shares: list[int]
    """The relative numbers of rows of these layers."""
    is_swapped: bool


def lines_of(family: str) -> Iterator[Line]:
    """Yield the lines of a family's list, once for each block."""
    blocks: list[tuple[str, str]] = []
    found = ""
    for text in LIST.read_text().splitlines():
        first, *words = text.strip("[]").split()
        if text.startswith("["):
            found = first
            pairs = [word.partition("=") for word in words]
            blocks = [(f"{block}.", f"{own or block}.") for block, _, own in pairs] or [("", "")]
            continue
        is_swapped = words[-1] == "swapped"
        parts = [word.rpartition("*") for word in (words[:-1] if is_swapped else words)]
        shares = [int(times or 1) for times, _, _ in parts]
        for block, own in blocks if found == family else []:
            names = [own + (first if name == "=" else name) for _, _, name in parts]
            yield Line(block + first, names, shares, is_swapped)


def originals(family: Family) -> dict[str, tc.Tensor]:
    """Return the golden model's parameters as an original file has them."""
    stored, tensors, used = family.stored, {}, []
    for line in lines_of(family.name):
        # A layer has a weight and perhaps a bias. The names of some lines are whole parameters.
        for end in ("", ".weight", ".bias"):
            names = [name + end for name in line.names if name + end in stored]
            if not names:
                continue
            used += names
            whole = tc.cat([stored[name] for name in names], 0)
            rows = [share * whole.shape[0] // sum(line.shares) for share in line.shares]
            assert [stored[name].shape[0] for name in names] == rows
            if line.is_swapped:
                whole = tc.cat([*reversed(whole.chunk(2, 0))], 0)
            tensors[line.original + end] = whole
    # The list has every parameter once.
    assert sorted(used) == sorted(stored)
    return tensors


def assert_same(found: dict[str, tc.Tensor], expected: dict[str, tc.Tensor]) -> None:
    """Assert that two models have the same parameters, bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].to("f32"), tensor.to("f32"), err_msg=name)


@pytest.fixture(params=["sd3", "flux", "flux2", "zimage"])
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_original_files_are_read_as_diffusers_converts_them(
    family: Family, prefix: str, tmp_path: Path
) -> None:
    tensors = originals(family)
    path = tmp_path / "original.safetensors"
    tc.save_file({prefix + name: tensor for name, tensor in tensors.items()}, path)
    config = family.transformer / "config.json"
    model = family.kind.from_pretrained(path, config=config)
    assert_same(model.named_tensors(), family.stored)


def test_original_files_are_written_as_diffusers_reads_them(family: Family, tmp_path: Path) -> None:
    path = tmp_path / "original.safetensors"
    tc.models.save_checkpoint(path, {"transformer": family.load("bf16")})
    tensors = originals(family)
    assert_same(tc.load_file(path), {PREFIX + name: tensor for name, tensor in tensors.items()})
