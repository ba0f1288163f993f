"""Identities of files: every byte counts, and hashes are remembered."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from trainable_candle.data import file_identity, identity


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which hashes are remembered.

    The library remembers the hash of a file only if the file's last change is more than `SETTLED`
    nanoseconds ago. This fixture makes `SETTLED` negative, so the library remembers all hashes,
    those of files that have just been written too. The fixture also makes chunks, which one task
    hashes, and pieces, which a thread reads at once, so small that the tests' files have several.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "SETTLED", -(10**12))
    monkeypatch.setattr(identity, "_CHUNK", 4096)
    monkeypatch.setattr(identity, "_PIECE", 1000)
    return tmp_path / "cache" / "trainable-candle" / "contents.json"


@pytest.fixture
def hashed_chunks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The file name of each chunk that was hashed: a file with two chunks occurs twice."""
    chunk, names = identity._chunk, []

    def recorded(name: str, start: int) -> bytes:
        names.append(Path(name).name)
        return chunk(name, start)

    monkeypatch.setattr(identity, "_chunk", recorded)
    return names


def test_an_identity_depends_on_every_byte_but_not_on_the_file_name(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(20_000)
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    original = file_identity(path)
    assert file_identity(path.rename(tmp_path / "b.safetensors")) == original
    path = tmp_path / "b.safetensors"
    found = {original}
    # Many bytes, with the bytes on both sides of the border between two chunks, and the last byte.
    places = {*range(0, len(content), 97), 4095, 4096, len(content) - 1}
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        found.add(file_identity(path))
    assert len(found) == 1 + len(places)
    for other in (content[:-1], content + b"\0", b""):
        path.write_bytes(other)
        assert file_identity(path) not in found


def test_the_hash_of_a_file_is_made_from_its_size_and_the_hashes_of_its_chunks(
    tmp_path: Path,
) -> None:
    content = np.random.default_rng(0).bytes(10_000)
    (tmp_path / "a").write_bytes(content)
    expected = hashlib.blake2b(b"10000", digest_size=16)
    for start in range(0, 10_000, 4096):
        chunk = content[start : start + 4096]
        expected.update(hashlib.sha256(chunk).digest())
    assert identity.content_digests([tmp_path / "a"]) == [expected.hexdigest()]


def test_the_identity_of_a_folder_depends_only_on_files_of_models(tmp_path: Path) -> None:
    folder = tmp_path / "a model"
    (folder / "below").mkdir(parents=True)
    found = {file_identity(folder)}
    for name in ("a.safetensors", "config.json", "merges.txt", "below/config.json", "b.json"):
        (folder / name).write_text("x")
        found.add(file_identity(folder))
        (folder / name).write_text("y")
        found.add(file_identity(folder))
    # The empty folder, and two states for each of five files.
    assert len(found) == 11
    # The same bytes under another name have another identity.
    (folder / "b.json").rename(folder / "c.json")
    found.add(file_identity(folder))
    assert len(found) == 12
    # These files do not count.
    (folder / "README.md").write_text("x")
    (folder / "model.bin").write_text("x")
    assert file_identity(folder) in found


def test_a_hashed_file_is_not_read_again(tmp_path: Path, hashed_chunks: list[str]) -> None:
    for name in ("a.safetensors", "b.json"):
        (tmp_path / name).write_bytes(bytes(5000))
    first = [file_identity(tmp_path / name) for name in ("a.safetensors", "b.json")]
    assert sorted(hashed_chunks) == ["a.safetensors"] * 2 + ["b.json"] * 2
    hashed_chunks.clear()
    (tmp_path / "link").symlink_to(tmp_path / "a.safetensors")
    assert [file_identity(tmp_path / name) for name in ("link", "b.json")] == first
    assert hashed_chunks == []


def test_a_changed_or_replaced_file_is_read_again(tmp_path: Path, hashed_chunks: list[str]) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(5000))
    first = file_identity(path)
    hashed_chunks.clear()
    times = path.stat()
    # Another size; then other content of the same size and modification time.
    for content in (bytes(5001), bytes(5000)[:-1] + b"\1"):
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert file_identity(path) != first
    # Another file takes the place of the hashed one.
    (tmp_path / "new").write_bytes(b"\2" * 5000)
    os.utime(tmp_path / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "new").replace(path)
    assert file_identity(path) != first
    assert set(hashed_chunks) == {"a.safetensors"}


def test_a_damaged_file_of_remembered_hashes_is_ignored(tmp_path: Path, memory: Path) -> None:
    (tmp_path / "b.json").write_bytes(bytes(5000))
    first = file_identity(tmp_path / "b.json")
    for damage in (b"", b"[" * 100_000, b'{"format": 1, "files": {"x": 3}}', b"\xff"):
        memory.write_bytes(damage)
        assert file_identity(tmp_path / "b.json") == first


def test_the_hash_of_a_file_that_just_changed_is_not_remembered(
    tmp_path: Path, memory: Path, hashed_chunks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 10**18 ns are 31 years, so every file counts as just changed.
    monkeypatch.setattr(identity, "SETTLED", 10**18)
    (tmp_path / "a").write_bytes(bytes(5000))
    for _ in range(2):
        file_identity(tmp_path / "a")
    assert hashed_chunks == ["a"] * 4
    assert not memory.exists()


def test_hashing_works_if_hashes_cannot_be_remembered(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    (tmp_path / "a").write_bytes(b"x")
    assert file_identity(tmp_path / "a") == file_identity(tmp_path / "a")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_identity(tmp_path / "none")
