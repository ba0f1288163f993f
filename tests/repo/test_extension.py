"""The extension is not linked to CUDA's libraries: it also serves machines that lack them."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

SYSTEM_LIBRARIES = {
    "ld-linux-aarch64.so.1",
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libutil.so.1",
}
CUDA_SYMBOL = re.compile(
    r"^(cu[A-Z]|cuda[A-Z]|cublas|cudnn|cufft|curand|cusolver|cusparse|nccl|nvrtc|nvJitLink)"
)


@pytest.fixture(scope="module")
def extension() -> Iterator[ELFFile]:
    spec = find_spec("trainable_candle._core")
    assert spec is not None
    assert spec.origin is not None
    with Path(spec.origin).open("rb") as file:
        yield ELFFile(file)


def test_the_extension_needs_only_libraries_of_every_linux(extension: ELFFile) -> None:
    section = extension.get_section_by_name(".dynamic")
    assert isinstance(section, DynamicSection)
    needed = {tag.needed for tag in section.iter_tags("DT_NEEDED")}
    assert "libc.so.6" in needed
    assert needed - SYSTEM_LIBRARIES == set()


def test_no_undefined_symbol_of_the_extension_is_of_a_cuda_library(extension: ELFFile) -> None:
    section = extension.get_section_by_name(".dynsym")
    assert isinstance(section, SymbolTableSection)
    undefined = {s.name for s in section.iter_symbols() if s["st_shndx"] == "SHN_UNDEF" and s.name}
    # Every extension module calls one of these two functions of Python.
    assert "PyModule_Create2" in undefined or "PyModuleDef_Init" in undefined
    assert {name for name in undefined if CUDA_SYMBOL.match(name)} == set()
