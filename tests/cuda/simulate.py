#!/usr/bin/env python3
"""Build the simulated CUDA libraries of `simulated/`, and list the kernels of binary files.

    eval $(tests/cuda/simulate.py FOLDER python/trainable_candle/_core.abi3.so)

The script prints `export` lines for the shell. Commands that the shell then runs find the simulated
libraries, which log each call in FOLDER/log.
The script needs CUDA's headers (from CUDA_HOME or PyPI's nvidia-cuda-runtime) and a C compiler,
such as zig.
"""

import io
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from elftools.elf.elffile import ELFFile

SOURCES = Path(__file__).parent / "simulated"
DRIVER = "libcuda.so.1"
NCCL = "libnccl.so.2"
LIBRARIES = {
    DRIVER: ("device.c", "memory.c", "ipc.c", "transfer.c", "stream.c", "launch.c"),
    "libcublas.so.13": ("blas.c",),
    "libcublasLt.so.13": ("lt.c",),
    "libcurand.so.10": ("random.c",),
    NCCL: ("nccl.c",),
}
# The folders into which pip puts CUDA's libraries, below a folder of `sys.path`. The driver belongs
# to the system, so it has a folder of its own.
PIP_FOLDER = Path("nvidia") / "cu13"
NCCL_FOLDER = Path("nvidia") / "nccl"
DRIVER_FOLDER = "driver"


def compiler() -> list[str] | None:
    """Return the command of a C compiler, or None if there is none."""
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    found = shutil.which("cc")
    return [found] if found else None


def headers() -> Path | None:
    """Return the folder of `cuda.h`, or None if there is none."""
    home = os.environ.get("CUDA_HOME")
    folders = [Path(home)] if home else []
    folders += [Path(entry) / PIP_FOLDER for entry in sys.path]
    return next((f / "include" for f in folders if (f / "include" / "cuda.h").is_file()), None)


def build(
    folder: Path, libraries: Sequence[str] = tuple(LIBRARIES), missing: Sequence[str] = ()
) -> None:
    """Compile `libraries` into `folder`, without the functions in `missing`.

    A missing function is compiled under another name, so that programs do not find it.

    Raises:
        FileNotFoundError: there is no C compiler, or CUDA's headers are missing.
    """
    command, include = compiler(), headers()
    if not command or not include:
        raise FileNotFoundError("a build needs a C compiler and CUDA's headers; see simulate.py")
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC"]
    flags += [
        "-fno-sanitize=all",  # zig adds sanitizers by default
        "-shared",
        f"-I{include}",
        *(f"-D{name}=missing_{name}" for name in missing),
    ]
    # The other libraries are linked to the driver, which is the first of `LIBRARIES`, so that it
    # exists by then.
    for name in libraries:
        sources = [str(SOURCES / source) for source in LIBRARIES[name]]
        target = library_folder(folder, name)
        target.mkdir(parents=True, exist_ok=True)
        linked = ["-pthread"] if name == DRIVER else [str(library_folder(folder, DRIVER) / DRIVER)]
        output = [f"-Wl,-soname,{name}", "-o", str(target / name)]
        subprocess.run([*command, *flags, *sources, *linked, *output], check=True)


def library_folder(folder: Path, name: str) -> Path:
    """Return the folder into which `build` puts a library."""
    if name == DRIVER:
        return folder / DRIVER_FOLDER
    return folder / (NCCL_FOLDER if name == NCCL else PIP_FOLDER) / "lib"


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables with which a process uses the libraries in `folder`."""
    libraries = [str(folder / DRIVER_FOLDER), str(folder / PIP_FOLDER / "lib")]
    # The package finds NCCL below a folder of `sys.path`.
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": os.pathsep.join(paths),
        "SIMULATED_CUDA_LOG": str(folder / "log"),
    }


def unpack(payload: bytes, size: int) -> bytes:
    """Return the bytes of a fatbin's image, decompressed to `size` bytes if they are zstd data."""
    if not payload.startswith(b"\x28\xb5\x2f\xfd"):  # the magic number of zstd
        return payload
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.decompress(payload)
    import zstandard

    return zstandard.ZstdDecompressor().decompress(payload, max_output_size=size)


def fatbins(program: bytes) -> Iterator[tuple[int, list[tuple[int, int, bytes]]]]:
    """Yield, for each fatbin in a file, its CRC-32 and its images.

    An image is a tuple of its kind (PTX or ELF), the number of its architecture, and its bytes.
    """
    # A fatbin begins with a magic number, a version, the size of this header (16 bytes), and the
    # number of bytes after the header.
    magic = struct.pack("<IHH", 0xBA55ED50, 1, 16)
    start = program.find(magic)
    while start >= 0:
        (size,) = struct.unpack_from("<Q", program, start + 8)
        position, end, images = start + 16, start + 16 + size, []
        # If `end` is beyond the file, this is no fatbin, and it has no images.
        while position < end <= len(program):
            # The header of an image: kind, version, the header's size, the payload's size with
            # padding, and the payload's compressed size, or 0 if it is not compressed. The number
            # of the architecture and the payload's uncompressed size follow.
            kind, _, header, padded, packed = struct.unpack_from("<HHIQI", program, position)
            (number,) = struct.unpack_from("<I", program, position + 28)
            (unpacked,) = struct.unpack_from("<Q", program, position + 56)
            payload = program[position + header : position + header + (packed or padded)]
            images.append((kind, number, unpack(payload, unpacked)))
            position += header + padded
        yield zlib.crc32(program[start:end]), images
        start = program.find(magic, start + 16)


def attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the payload of each attribute in a section `.nv.info`."""
    position = 0
    while position < len(section):
        form, number, size = struct.unpack_from("<BBH", section, position)
        # Only form 4 has a payload. In the other forms, the field `size` is the value.
        length = size if form == 4 else 0
        yield number, section[position + 4 : position + 4 + length]
        position += 4 + length


def machine_code(image: bytes) -> Iterator[str]:
    """Yield, for each kernel in machine code, its line of `table` without the checksum."""
    max_threads, parameter = 0x05, 0x17  # numbers of attributes
    # The image contains the options of its compiler.
    found = re.search(rb"-arch (sm_(\d+)a?)", image)
    if not found:
        raise ValueError("the machine code does not name its architecture")
    architecture, number = found[1].decode(), int(found[2])
    file = ELFFile(io.BytesIO(image))
    for text in file.iter_sections():
        name = text.name.removeprefix(".text.")
        info = file.get_section_by_name(f".nv.info.{name}")
        if name == text.name or info is None:  # not the code of a kernel
            continue
        sizes, threads = {}, 0
        for attribute, payload in attributes(info.data()):
            if attribute == parameter:
                _, ordinal, _, flags = struct.unpack("<IHHI", payload)
                sizes[ordinal] = flags >> 18  # bytes
            elif attribute == max_threads:
                x, y, z = struct.unpack("<III", payload)
                threads = x * y * z
        shared = file.get_section_by_name(f".nv.shared.{name}")
        fixed = shared["sh_size"] if shared else 0
        # From compute capability 9.0 on, the size of the shared memory includes 1 KiB that CUDA
        # reserves.
        fixed -= 1024 if number >= 90 and fixed >= 1024 else 0
        # The highest 8 bits of `sh_info` are the registers per thread, or 0.
        registers = text["sh_info"] >> 24 or listed_registers(file, name)
        yield describe(architecture, name, registers, threads, fixed, sizes)


def listed_registers(file: ELFFile, name: str) -> int:
    """Return a kernel's registers per thread, from the section that lists kernels by symbol.

    The result is 0 if the section does not list the kernel.
    """
    register_count = 0x2F  # the number of an attribute
    symbols = file.get_section_by_name(".symtab")
    for number, payload in attributes(file.get_section_by_name(".nv.info").data()):
        if number == register_count:
            symbol, registers = struct.unpack("<II", payload)
            if symbols.get_symbol(symbol).name == name:
                return registers
    return 0


def describe(
    architecture: str, name: str, registers: int, threads: int, shared: int, sizes: dict[int, int]
) -> str:
    """Return a line of `table` without the checksum; `sizes` maps parameters to their bytes."""
    parameters = ",".join(str(sizes[i]) for i in sorted(sizes)) or "-"
    return f"{architecture} {name} {registers} {threads} {shared} {parameters}"


def portable_code(number: int, image: bytes) -> Iterator[str]:
    """Yield, for each kernel in PTX, its line of `table` without the checksum.

    This function reads only the kernel's name from PTX: the numbers are 0, the parameters `-`.
    """
    for name in re.findall(rb"\.entry\s+(\w+)", image):
        yield describe(f"compute_{number}", name.decode(), 0, 0, 0, {})


def table(program: Path) -> str:
    """Return the table of kernels that `simulated/launch.c` reads; its comment has the format."""
    ptx, elf = 1, 2  # kinds of images: kernels as PTX, or as machine code
    lines = set()
    for checksum, images in fatbins(program.read_bytes()):
        for kind, number, image in images:
            kernels = machine_code(image) if kind == elf else ()
            if kind == ptx:
                kernels = portable_code(number, image)
            lines |= {f"{checksum:08x} {kernel}\n" for kernel in kernels}
    return "".join(sorted(lines))


def main(folder: str, *programs: str) -> None:
    """Build the libraries, and print the variables that a shell must export."""
    target = Path(folder).resolve()
    build(target)
    settings = environment(target)
    if programs:
        kernels = target / "kernels"
        kernels.write_text("".join(table(Path(program)) for program in programs))
        settings["SIMULATED_CUDA_KERNELS"] = str(kernels)
    for name, value in settings.items():
        print(f"export {name}={value}")


if __name__ == "__main__":
    main(*sys.argv[1:])
