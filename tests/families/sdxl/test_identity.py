"""The identities of the cache of latents and of the cache of text features.

An identity changes with every file that the cache's entries depend on, and with no other file.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from trainable_candle.families.sdxl import SDXL

OF_TEXT = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


def latents_identity(weights: Path) -> Mapping[str, str]:
    return SDXL(weights, None, "cpu").coder.identity()


def text_identity(weights: Path) -> Mapping[str, str]:
    return SDXL(weights, None, "cpu").text_identity()


def test_an_identity_depends_on_every_byte_that_encoders_are_read_from(
    sdxl_base: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(sdxl_base, base)
    paths = sorted(path for path in base.rglob("*") if path.is_file())
    assert len(paths) > 10
    for path in paths:
        content = path.read_bytes()
        before = latents_identity(base), text_identity(base)
        for place in {0, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            changed = latents_identity(base) != before[0], text_identity(base) != before[1]
            part = path.relative_to(base).parts[0]
            assert changed == (part == "vae", part in OF_TEXT), path
        path.write_bytes(content)
        assert (latents_identity(base), text_identity(base)) == before


def test_without_a_tokenizer_the_identity_has_the_shipped_one(
    sdxl_base: Path, tmp_path: Path
) -> None:
    shutil.copytree(sdxl_base, tmp_path / "base")
    before = text_identity(tmp_path / "base")
    shutil.rmtree(tmp_path / "base" / "tokenizer_2")
    after = text_identity(tmp_path / "base")
    assert [name for name in before if before[name] != after[name]] == ["tokenizer_2"]


@pytest.mark.parametrize("identity", [latents_identity, text_identity])
def test_an_identity_depends_on_configurations_beside_a_single_file(
    sdxl_file: Path, tmp_path: Path, identity: Callable[[Path], Mapping[str, str]]
) -> None:
    shutil.copytree(sdxl_file.parent, tmp_path / "base")
    path = tmp_path / "base" / sdxl_file.name
    names = {repr(identity(path))}
    part = "vae" if identity is latents_identity else "text_encoder_2"
    config = path.parent / part / "config.json"
    config.write_text(config.read_text() + "\n")
    names.add(repr(identity(path)))
    config.unlink()
    names.add(repr(identity(path)))
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    names.add(repr(identity(path)))
    assert len(names) == 4
