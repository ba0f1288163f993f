"""Time and host memory of loading a full-size Flux.1 transformer onto a GPU, quantized or not.

python benches/gpu_load.py [--folder DIR] [--formats bf16 nf4 int8 fp8]

The script writes the transformer with random weights in bf16 (23.8 GB) below DIR. Each load is a
process of its own. Its line has the seconds of `from_pretrained`, the peak of GPU memory, and the
peak of host memory that the process allocated; pages of the file in the system's cache do not count
as allocated. Before each load, and before a plain read of the file, the script empties the system's
cache of files, if it may.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import full_flow
from gpu_timing import GIB

import trainable_candle as tc

DEVICE = "cuda"
CHUNK = 1 << 26
"""The bytes of one plain read."""


def empty_cache() -> bool:
    """Empty the system's cache of files; return whether this is allowed."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        return False
    return True


def plain_read(folder: Path) -> float:
    """Return the seconds in which the weight files are read into a small buffer."""
    buffer = bytearray(CHUNK)
    started = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def allocated() -> float:
    """Return the GiB of host memory that this process has allocated, without pages of files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem") if name in fields)
    return kib / 2**20


def load(folder: Path, form: str) -> None:
    """Load the transformer, and print the line of this load."""
    tc.zeros((1,), device=DEVICE).to("cpu")  # makes the CUDA context, which is not timed
    before, done = allocated(), threading.Event()
    peak = before

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, allocated())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    quantize = None if form == "bf16" else form
    try:
        model = tc.models.FluxTransformer.from_pretrained(
            folder, dtype="bf16", device=DEVICE, quantize=quantize
        )
        tc.cuda.synchronize(DEVICE)
        seconds = time.perf_counter() - started
    finally:
        done.set()
        watcher.join()
    stats = tc.cuda.memory_stats(DEVICE)
    print(
        f"{form}: {seconds:.1f} s; GPU {stats['allocated'] / GIB:.2f} GiB, at most "
        f"{stats['peak_allocated'] / GIB:.2f} GiB; host at most {peak - before:.2f} GiB more than "
        f"before",
        flush=True,
    )
    del model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="default: the folder of temporary files")
    parser.add_argument("--formats", nargs="+", default=["bf16", "nf4", "int8", "fp8"])
    # For the process of one load: the folder of the transformer and the format.
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        load(Path(given.load[0]), given.load[1])
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        folder = Path(temporary) / "transformer"
        _class_name, _scheduler, parts = full_flow.PIPELINES["flux"]
        kind, config = parts["transformer"]
        full_flow.write_part(folder, kind, config, DEVICE)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        cached = "" if empty_cache() else " (from the system's cache)"
        seconds = plain_read(folder)
        print(f"plain read of {size / 1e9:.1f} GB{cached}: {seconds:.1f} s", flush=True)
        for form in given.formats:
            empty_cache()
            command = [sys.executable, __file__, "--load", str(folder), form]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
