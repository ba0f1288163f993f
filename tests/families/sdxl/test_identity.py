"""The identities of the cache of latents and of the cache of text features.

An identity changes with every file that the entries of its cache depend on, and with no other file.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from trainable_candle.families.sdxl import SDXL

TEXT_FOLDERS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


def latents_identity(weights: Path) -> Mapping[str, str]:
    return SDXL(weights, dtype=None, device="cpu").coder.identity()


def text_identity(weights: Path) -> Mapping[str, str]:
    return SDXL(weights, dtype=None, device="cpu").text_identity()


def test_an_identity_changes_with_bytes_of_the_files_of_its_encoders_alone(
    sdxl_base: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(sdxl_base, base)
    paths = sorted(path for path in base.rglob("*") if path.is_file())
    assert len(paths) > 10
    # Flip a bit in the first, a middle and the last byte of each file.
    for path in paths:
        content = path.read_bytes()
        before = latents_identity(base), text_identity(base)
        for offset in {0, len(content) // 2, len(content) - 1}:
            path.write_bytes(
                content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :]
            )
            changed = latents_identity(base) != before[0], text_identity(base) != before[1]
            folder = path.relative_to(base).parts[0]
            assert changed == (folder == "vae", folder in TEXT_FOLDERS), path
        path.write_bytes(content)
        assert (latents_identity(base), text_identity(base)) == before


def test_a_missing_tokenizer_changes_its_own_entry_of_the_identity(
    sdxl_base: Path, tmp_path: Path
) -> None:
    shutil.copytree(sdxl_base, tmp_path / "base")
    before = text_identity(tmp_path / "base")
    shutil.rmtree(tmp_path / "base" / "tokenizer_2")
    after = text_identity(tmp_path / "base")
    assert [name for name in before if before[name] != after[name]] == ["tokenizer_2"]


@pytest.mark.parametrize("identity", [latents_identity, text_identity])
def test_an_identity_depends_on_a_single_file_and_the_configurations_beside_it(
    sdxl_file: Path, tmp_path: Path, identity: Callable[[Path], Mapping[str, str]]
) -> None:
    shutil.copytree(sdxl_file.parent, tmp_path / "base")
    path = tmp_path / "base" / sdxl_file.name
    # Four identities: at first, and after each of three changes, which add up: another
    # configuration, none, another last byte of the file.
    identities = {repr(identity(path))}
    part = "vae" if identity is latents_identity else "text_encoder_2"
    config = path.parent / part / "config.json"
    config.write_text(config.read_text() + "\n")
    identities.add(repr(identity(path)))
    config.unlink()
    identities.add(repr(identity(path)))
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    identities.add(repr(identity(path)))
    assert len(identities) == 4
