#!/usr/bin/env python3
"""Check the kernels of a wheel that was built with CUDA: `.ci/check_kernels.py WHEEL`.

The script reads the machine code for every architecture in the wheel. A kernel fails the check if
it spills registers to local memory, or if it needs more shared memory than a block may have. The
machine code states only a kernel's fixed shared memory; a launch may request more. So the script
also launches the kernels that request the most, on simulated GPUs whose blocks may have the least.
"""

import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from re import fullmatch

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "cuda"))
import simulate  # type: ignore[import-not-found] # noqa: E402

# Bytes that a kernel may spill on these architectures; on others, no kernel may spill. The speed of
# the kernels for 9.0 was measured with these spills; kernels for 8.0 spill no more than those.
ALLOWED_SPILLS = {"sm_80": 72, "sm_90a": 72}
# Bytes of local memory that are not spills, by a pattern of kernel names: for a large angle, sine
# and cosine index an array of digits of 1 / pi.
ALLOWED_LOCAL = {r"(sin|cos)(_backward)?_(f16|bf16|f32|f64)": 40}
# A block has 48 KiB of shared memory, unless the program asks the driver for more.
MAX_FIXED_SHARED = 48 << 10
# Compute capabilities whose blocks have at most 99 KiB, which the simulated driver enforces.
LEAST_SHARED = ("86", "89", "120")
# Runs the kernels of `EXPECTED_LAUNCHES`. The attention has two widths of a head. The sizes of
# the convolutions together select every tile.
LAUNCH_PROGRAM = """
import trainable_candle as tc

F = tc.nn.functional


def train(function, *shapes):
    inputs = [tc.Var(tc.randn(s, dtype="bf16", device="cuda")) for s in shapes]
    function(*inputs).sum().backward()


segments = tc.tensor([0, 100, 256], dtype="i64").to("cuda")
for width in (64, 128):
    train(F.scaled_dot_product_attention, *[(1, 2, 256, width)] * 3)
    train(lambda q, k, v: F.varlen_attention(q, k, v, segments), *[(256, 2, width)] * 3)
for channels, out, size in ((8, 8, 64), (4, 64, 64), (64, 64, 64), (512, 512, 128)):
    train(lambda x, w: F.conv2d(x, w, padding=1), (1, channels, size, size), (out, channels, 3, 3))
"""
# p is the pass, w the width of a head, t the tile that a block computes: m128n16 has 128 pixels and
# 16 channels, m16 of a gradient of the weight has 16 output channels. With v4, four values are
# copied at a time, otherwise eight.
EXPECTED_LAUNCHES = {
    *(f"attention_{p}_w{w}_bf16" for p in ("forward", "backward") for w in (64, 128)),
    *(f"attention_varlen_{p}_w{w}_bf16" for p in ("forward", "backward") for w in (64, 128)),
    *(f"conv2d_forward_{t}_bf16" for t in ("m128n16", "m64n64", "m128n128", "m64n64v4")),
    *(f"conv2d_grad_input_{t}_bf16" for t in ("m128n16", "m64n64", "m128n128", "m64n64v4")),
    *(f"conv2d_grad_weight_{t}_bf16" for t in ("m16", "m64", "m128")),
}


@dataclass(frozen=True)
class Kernel:
    """What a kernel needs on one architecture; `local` and `shared` are in bytes."""

    architecture: str
    name: str
    registers: int
    local: int
    shared: int

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the kernel."""
        allowed = max(
            [ALLOWED_SPILLS.get(self.architecture, 0)]
            + [size for name, size in ALLOWED_LOCAL.items() if fullmatch(name, self.name)]
        )
        for what, found, most in (
            ("local", self.local, allowed),
            ("shared", self.shared, MAX_FIXED_SHARED),
        ):
            if found > most:
                yield (
                    f"{self.architecture} {self.name}: {found} bytes of {what} memory, allowed "
                    f"{most} ({self.registers} registers)"
                )


def kernels(library: bytes) -> Iterator[Kernel]:
    """Yield the kernels in the machine code of a library, without those of candle."""
    # The number of the kind ELF in a fatbin, and that of the attribute EIATTR_MIN_STACK_SIZE. A
    # kernel's stack, to which it spills registers, is in local memory.
    elf, stack_size = 2, 0x12
    # An image is a tuple: its kind, its compute capability (80 for 8.0) and its bytes.
    for _, images in simulate.fatbins(library):
        # The only machine code of candle's kernels is for compute capability 8.0. The fatbins of
        # `cuda/kernels` with code for 8.0 have code for other GPUs too.
        if {number for _, number, _ in images} == {80}:
            continue
        for image in (image for kind, _, image in images if kind == elf):
            file = ELFFile(BytesIO(image))
            symbols, stacks = file.get_section_by_name(".symtab"), {}
            info = file.get_section_by_name(".nv.info")
            if not isinstance(symbols, SymbolTableSection) or info is None:
                sys.exit("machine code in the wheel has no symbols or no attributes of its kernels")
            for attribute, payload in simulate.attributes(info.data()):
                if attribute == stack_size:
                    symbol, size = struct.unpack("<II", payload)
                    stacks[symbols.get_symbol(symbol).name] = size
            for line in simulate.machine_code(image):
                architecture, name, registers, _, shared, _ = line.split()
                yield Kernel(architecture, name, int(registers), stacks[name], int(shared))


def launch(folder: Path, capability: str) -> int:
    """Run `LAUNCH_PROGRAM` on a simulated GPU; return a launch's most shared memory, in bytes."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    environment = {**os.environ, **simulate.environment(folder)}
    environment["SIMULATED_CUDA_CAPABILITY"] = capability
    environment["SIMULATED_CUDA_KERNELS"] = str(folder / "kernels")
    subprocess.run([sys.executable, "-c", LAUNCH_PROGRAM], cwd=folder, env=environment, check=True)
    calls = [line.split() for line in log.read_text().splitlines() if line.startswith("launch ")]
    launches = [dict(field.split("=", 1) for field in fields) for _, *fields in calls]
    missing = EXPECTED_LAUNCHES - {call["name"] for call in launches}
    if missing:
        sys.exit(f"{capability}: these kernels were not launched: {', '.join(sorted(missing))}")
    return max(int(call["shared"]) for call in launches)


def main(wheel: str) -> None:
    """Check all kernels, and report every fault."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", name, wheel]
        subprocess.run(install, check=True)
        library = folder / "trainable_candle" / "_core.abi3.so"
        found = list(kernels(library.read_bytes()))
        if not found:
            sys.exit(f"{wheel}: no kernels")
        faults = [fault for kernel in found for fault in kernel.faults()]
        if faults:
            sys.exit("\n".join(sorted(faults)))
        simulate.build(folder)
        (folder / "kernels").write_text(simulate.table(library))
        for architecture in sorted({kernel.architecture for kernel in found}):
            number = architecture.removeprefix("sm_").rstrip("a")
            local = [kernel.local for kernel in found if kernel.architecture == architecture]
            text = f"{architecture}: {len(local)} kernels, local memory up to {max(local)} bytes"
            if number in LEAST_SHARED:
                most = launch(folder, f"{number[:-1]}.{number[-1]}")
                text += f", shared memory up to {most} bytes"
            print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
