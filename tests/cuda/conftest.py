"""Fixtures that run Python snippets on a simulated CUDA device.

simulate.py builds the simulated libraries. A kernel that is launched on the simulated device
computes nothing.
"""

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import trainable_candle as tc
from trainable_candle import _core

# The code before each snippet. `mark` writes a line to the log of calls; see `Run.after`.
PRELUDE = """
import os
import trainable_candle as tc

def mark(name):
    with open(os.environ["SIMULATED_CUDA_LOG"], "a") as file:
        file.write(f"mark name={name}\\n")
"""


def load(path: Path) -> ModuleType:
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_simulate() -> ModuleType:
    return load(Path(__file__).parent / "simulate.py")


# Take over the fixtures `..._base` that make tiny pipelines of every family.
_families = load(Path(__file__).parents[1] / "families" / "conftest.py")
globals().update({k: v for k, v in vars(_families).items() if k.endswith("_base")})


@dataclass(frozen=True)
class Call:
    """A line of the simulation's log: a call of a library, or a mark of the snippet.

    `kind` is the first word of the line, and `fields` has the rest, which is `name=value` each. The
    lines of copies and fills also have a field named "kind": the name of the function that was
    called, such as cuMemcpyHtoDAsync.
    """

    kind: str
    fields: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.fields[name]


@dataclass(frozen=True)
class Run:
    """The standard output of a snippet, and the lines of the simulation's log."""

    output: str
    calls: list[Call]

    def after(self, mark: str) -> "Run":
        """Return the calls between the first mark with this name and the next mark."""
        marks = [i for i, call in enumerate(self.calls) if call.kind == "mark"]
        start = next(i for i in marks if self.calls[i]["name"] == mark)
        end = next((i for i in marks if i > start), len(self.calls))
        return Run(self.output, self.calls[start + 1 : end])

    def of(self, *kinds: str) -> list[Call]:
        """Return the calls of these kinds."""
        return [call for call in self.calls if call.kind in kinds]

    @property
    def launches(self) -> list[str]:
        """The names of the launched kernels, in the order of the launches."""
        return [call["name"] for call in self.of("launch")]

    @property
    def waits(self) -> list[Call]:
        """Calls that make the host wait for the device, including copies of pageable memory."""
        copies = self.of("copy")
        blocking = [c for c in copies if c["pageable"] == "1" or not c["kind"].endswith("Async")]
        return self.of("synchronize") + blocking


def parse(line: str) -> Call:
    kind, *fields = line.split()
    return Call(kind, dict(field.split("=", 1) for field in fields))


class Simulation:
    """Runs snippets with simulated libraries, and builds each set of libraries only once."""

    def __init__(self, folder: Path) -> None:
        self.simulate = load_simulate()
        self.folder = folder
        self.build = cache(self.build_variant)
        # The simulated driver reads here which kernels the extension has.
        self.kernels = folder / "kernels"
        self.kernels.write_text(self.simulate.table(Path(_core.__file__)))

    def build_variant(self, libraries: tuple[str, ...], missing: tuple[str, ...]) -> Path:
        """Build `libraries` without the functions `missing`, and return their folder."""
        # `build` caches this function, so each call of it is a cache miss, and the number of misses
        # so far is a different one for each variant.
        folder = self.folder / f"variant-{self.build.cache_info().misses}"
        self.simulate.build(folder, libraries, missing)
        return folder

    def run(
        self,
        code: str,
        *,
        libraries: Sequence[str] | None = None,
        missing: Sequence[str] = (),
        settings: dict[str, str] | None = None,
    ) -> Run:
        """Run a snippet in a process of its own, and assert that it succeeds.

        `libraries` are the names of the libraries that exist (default: all). `missing` are the
        names of functions that these libraries lack. `settings` are environment variables of the
        simulation, without their prefix: {"DEVICES": "2"} sets SIMULATED_CUDA_DEVICES.
        """
        available = tuple(self.simulate.LIBRARIES) if libraries is None else tuple(libraries)
        folder = self.build(available, tuple(missing))
        log = folder / "log"
        log.unlink(missing_ok=True)
        package = Path(tc.__file__).parents[1]
        environment = {**os.environ, **self.simulate.environment(folder)}
        # PYTHONPATH begins with `folder`. The package finds all libraries except the driver below
        # it, where pip would put them. So only the driver needs to be on LD_LIBRARY_PATH.
        environment["PYTHONPATH"] += os.pathsep + str(package)
        environment["LD_LIBRARY_PATH"] = str(folder / self.simulate.DRIVER_FOLDER)
        environment["SIMULATED_CUDA_KERNELS"] = str(self.kernels)
        for name, value in (settings or {}).items():
            environment[f"SIMULATED_CUDA_{name}"] = value
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        calls = [parse(line) for line in log.read_text().splitlines()] if log.exists() else []
        # Calls to which the simulated libraries returned an error; they may explain a failure.
        refused = [call for call in calls if call.kind == "refused"]
        assert result.returncode == 0, f"{result.stderr}\n{refused}"
        return Run(result.stdout, calls)


@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """The simulation. Without CUDA in the build, a C compiler or headers, the test is skipped."""
    if _core.cuda_unavailable_reason() == "this build has no CUDA support":
        pytest.skip("the extension was built without CUDA")
    simulate = load_simulate()
    if not simulate.compiler() or not simulate.headers():
        pytest.skip("there is no C compiler, or no CUDA headers: set CUDA_HOME")
    return Simulation(tmp_path_factory.mktemp("cuda"))
