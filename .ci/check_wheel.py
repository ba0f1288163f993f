#!/usr/bin/env python3
"""Check a built wheel: its tag, size and contents, and how long it takes to import.

The wheel is installed with its dependencies into a new virtual environment, away from the sources.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

MAX_IMPORT_MS = 60.0
TIMED_IMPORTS = 9

REQUIRED = (
    "trainable_candle/__init__.py",
    "trainable_candle/_core.abi3.so",
    "trainable_candle/_core.pyi",
    "trainable_candle/py.typed",
)

PRINT_VERSION = "import trainable_candle; print(trainable_candle.__version__)"
PRINT_IMPORT_MS = """
import time
import numpy
start = time.perf_counter()
import trainable_candle
print((time.perf_counter() - start) * 1e3)
"""


def check_contents(wheel: Path, max_megabytes: float) -> None:
    """Check the tag, the size, and that the module, its type stubs and the licences are inside."""
    if "-abi3-manylinux" not in wheel.name:
        sys.exit(f"{wheel.name}: expected an abi3 wheel with a manylinux tag")
    megabytes = wheel.stat().st_size / 1e6
    if megabytes > max_megabytes:
        sys.exit(f"{wheel.name}: {megabytes:.1f} MB, expected at most {max_megabytes:.0f} MB")
    names = zipfile.ZipFile(wheel).namelist()
    for required in REQUIRED:
        if required not in names:
            sys.exit(f"{wheel.name}: {required} is missing")
    for licence in ("LICENSE-APACHE", "LICENSE-MIT"):
        if not any(name.endswith(f".dist-info/licenses/{licence}") for name in names):
            sys.exit(f"{wheel.name}: {licence} is missing")
    print(f"{wheel.name}: {megabytes:.2f} MB (allowed {max_megabytes:.0f}), {len(names)} files")


def import_times(python: Path, folder: Path) -> list[float]:
    """Return the milliseconds of `import trainable_candle` after numpy, in several processes."""
    command = [str(python), "-I", "-c", PRINT_IMPORT_MS]
    runs = [
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        for _ in range(TIMED_IMPORTS + 1)
    ]
    return [float(run.stdout) for run in runs[1:]]  # the first run compiled the byte code


def check_import(wheel: Path) -> None:
    """Install the wheel into a new environment; check commands, version and import time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        scripts = folder / "venv" / "bin"
        python = scripts / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
        for command in ("train-lora", "trainable-candle"):
            subprocess.run(
                [scripts / command, "--help"], cwd=folder, check=True, stdout=subprocess.DEVNULL
            )
        found = subprocess.run(
            [python, "-I", "-c", PRINT_VERSION],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        # The wheel's name is NAME-VERSION-TAGS. The module must report the whole version, with the
        # suffix `+cu13` of a CUDA build. The suffix is needed because pip replaces an installed
        # build only by one of another version.
        if found != wheel.name.split("-")[1]:
            sys.exit(f"{wheel.name}: the installed package has the version {found}")
        times = import_times(python, folder)
    # Other work on the machine can only slow a run down, so the fastest run is the measurement.
    print(
        f"import after numpy: {min(times):.1f} ms, median {statistics.median(times):.1f} ms "
        f"(allowed {MAX_IMPORT_MS:.0f})"
    )
    if min(times) > MAX_IMPORT_MS:
        sys.exit("trainable_candle imports too slowly; see `python -X importtime`")


def main() -> None:
    """Check the wheel that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--max-megabytes", type=float, default=20.0)
    given = parser.parse_args()
    wheel = given.wheel.resolve()
    check_contents(wheel, given.max_megabytes)
    check_import(wheel)


if __name__ == "__main__":
    main()
