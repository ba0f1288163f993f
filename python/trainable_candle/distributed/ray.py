"""Runs on a Ray cluster: one actor for each GPU, all of them in a placement group.

Python code on a machine of the cluster, or in a job of the cluster, starts a run::

    from trainable_candle.distributed.ray import train
    from trainable_candle.train import TrainConfig

    train(TrainConfig(model="sdxl", ...), workers=4, max_failures=3)

Ray places the processes on machines, starts them, forwards what they print, and detects when one
ends. The processes train together like those of any other launcher. Only Ray Core is used.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.distributed.ray_worker import Outcome, Place, Worker
from trainable_candle.distributed.world import World
from trainable_candle.errors import ConfigError, DistributedError
from trainable_candle.settings.paths import LATEST
from trainable_candle.train.interrupt import InterruptGuard

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    from typing_extensions import Self

    from trainable_candle.settings import TrainConfig

STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""PACK prefers few machines, SPREAD many. STRICT_PACK puts all processes on one machine,
STRICT_SPREAD each on a machine of its own."""
GRACE: Final = 15.0
"""Seconds that the other processes get to end after one has failed."""
_POLL: Final = 0.25
"""Seconds between two checks whether a signal has arrived."""
_START_SECONDS: Final = 120.0
"""Seconds that processes may take to start once Ray has reserved what they need."""


@dataclass(frozen=True)
class RayRun:
    """The result of `train`."""

    output: str
    """The folder of the run, on the machine of rank 0 or in a folder that all machines share."""
    step: int
    """The number of optimizer steps, including the steps before a failure."""
    completed: bool
    """Whether the last step was reached."""
    failures: int
    """How often the processes were started again after a failure."""
    stopped_by: signal.Signals | None
    """The signal that ended the run, if one did."""


def train(
    config: TrainConfig,
    *,
    workers: int | None = None,
    cpus_per_worker: float = 1,
    strategy: str = "PACK",
    max_failures: int = 0,
    wait_seconds: float = 300.0,
    address: str | None = None,
    report: Callable[[str], None] = print,
) -> RayRun:
    """Train an adapter on a Ray cluster.

    The processes read and write the paths of `config` on their machines; several machines must
    share the folders of data, weights and `output`. After Ctrl-C or SIGTERM all processes save and
    end after the same step.

    Args:
        config: see `train_adapter`; `device` is `auto`, `cuda` or `cpu`.
        workers: the number of processes, each with a GPU unless `device` is `cpu`; None: as many
            as the cluster has GPUs.
        cpus_per_worker: the number of CPUs that Ray reserves for each process.
        strategy: one of `STRATEGIES`.
        max_failures: how often the run is started again, from its last checkpoint, after a process
            has failed or a machine was lost; -1: without limit. Errors that another attempt would
            meet, too, such as those of settings and data, end the run at once.
        wait_seconds: the seconds to wait until enough GPUs and CPUs of the cluster are free.
        address: the cluster's address, unless `ray.init` has been called. By default Ray looks for
            a cluster at `RAY_ADDRESS` and on this machine, and otherwise starts one here.
        report: gets a line about each attempt; Ray prints the output of the processes.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConfigError: the settings are wrong, the cluster is too small or too busy for this many
            processes, or `max_failures` is not 0 and the machines do not share the output folder.
        DistributedError: the processes cannot be started; or one failed, and no attempt is left or
            another would fail, too.
        Ray's errors, for example if it loses a machine before the processes train.
    """
    ray = _ray()
    if strategy not in STRATEGIES:
        raise ConfigError(f"ray: strategy {strategy!r}, expected one of {', '.join(STRATEGIES)}")
    if config.gpus is not None:
        raise ConfigError("gpus: on a Ray cluster Ray chooses the GPUs; give --workers instead")
    if config.device not in {"auto", "cuda", "cpu"}:
        raise ConfigError(f"device: {config.device} is one GPU; on a Ray cluster give cuda")
    config.require("model", "dataset", "output")
    if not ray.is_initialized():
        ray.init(address=address)
    on_gpu = config.device != "cpu"
    number = (workers or int(ray.cluster_resources().get("GPU", 0))) if on_gpu else workers
    if not number:
        raise ConfigError(
            "ray: the cluster has no GPU; add a machine that has one, or give --device cpu"
            if on_gpu
            else "ray: say how many processes: --workers N"
        )
    needs = {"CPU": cpus_per_worker, **({"GPU": 1} if on_gpu else {})}
    # The processes have other current folders, so `located` makes the paths absolute.
    config = config.located().with_(device="cuda" if on_gpu else "cpu")
    for failures in count():
        attempt = _Workers(ray, number, needs, strategy, wait_seconds)
        with attempt, InterruptGuard() as guard:
            outcomes = attempt.run(config, failures, max_failures, guard, report)
        rank, outcome = max(enumerate(outcomes), key=lambda ranked: _relevance(ranked[1]))
        if not outcome.error:
            return RayRun(config.output, outcome.step, outcome.completed, failures, guard.signal)
        text = f"rank {rank} on {attempt.places[rank].address}: {outcome.error}"
        # A negative `max_failures` is no limit.
        is_last_attempt = max_failures >= 0 and failures >= max_failures
        if outcome.is_final or is_last_attempt or guard.signal:
            tried = f" (failure {failures + 1})" if failures else ""
            raise DistributedError(f"ray: {text}{tried}")
        report(f"ray: {text}; starting again")
    raise AssertionError  # Not reached: `count` has no end.


def _relevance(outcome: Outcome) -> int:
    """Return how well an outcome explains why the run ended; 0 for a success.

    An error that only followed another process's explains least, and one that another attempt
    would meet, too, explains most.
    """
    if not outcome.error:
        return 0
    if outcome.follows:
        return 1
    return 3 if outcome.is_final else 2


class _Workers:
    """The processes of one attempt, as a context that ends them on exit.

    Args:
        ray: the module `ray`.
        number: the number of processes.
        needs: how much Ray reserves for each process, by the name of the resource.
        strategy: how Ray places them.
        seconds: the seconds to wait until the resources are free.

    Raises:
        ConfigError: the resources are not free in time.
        DistributedError: the processes cannot be started.
    """

    def __init__(
        self, ray: Any, number: int, needs: dict[str, float], strategy: str, seconds: float
    ) -> None:
        self.places: list[Place] = []
        """Where each process runs, by rank."""
        self._ray = ray
        self._actors: list[Any] = []
        """The actors, by rank; while they start, in any order."""
        self._running: list[Any] = []
        """Ray's references to the outcomes of the actors that train, by rank."""
        self._group = ray.util.placement_group([needs] * number, strategy=strategy)
        try:
            self._start(number, needs, seconds)
        except BaseException:
            self.__exit__()
            raise

    def _start(self, number: int, needs: dict[str, float], seconds: float) -> None:
        ray = self._ray
        if not self._group.wait(seconds):
            there = ray.cluster_resources()
            wanted = ", ".join(f"{number * amount:g} {name}" for name, amount in needs.items())
            has = ", ".join(f"{there.get(name, 0):g} {name}" for name in needs)
            raise ConfigError(
                f"ray: {number} processes need {wanted}, and the cluster has {has}, of which not "
                f"enough was free within {seconds:g} s; give fewer --workers, or add machines"
            )
        strategies = ray.util.scheduling_strategies
        actors = [
            ray.remote(Worker)
            .options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                # While `run` trains, a call of `stop` must be able to run.
                max_concurrency=2,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=bundle
                ),
            )
            .remote()
            for bundle in range(number)
        ]
        self._actors = actors
        try:
            found = ray.get([actor.place.remote() for actor in actors], timeout=_START_SECONDS)
        except ray.exceptions.RayError as error:
            raise DistributedError(
                f"ray: the processes cannot be started: {error}; every machine of the cluster "
                "needs this version of trainable-candle"
            ) from error
        # The processes of a machine get neighbouring ranks.
        nodes = list(dict.fromkeys(place.node for place in found))
        order = sorted(range(number), key=lambda n: nodes.index(found[n].node))
        self.places = [found[n] for n in order]
        self._actors = [actors[n] for n in order]

    def run(
        self,
        config: TrainConfig,
        failures: int,
        max_failures: int,
        guard: InterruptGuard,
        report: Callable[[str], None],
    ) -> list[Outcome]:
        """Train in all processes; return how training ended in each, by rank.

        If `failures`, the number of attempts that failed before, is not 0, continue from the last
        checkpoint.

        Raises:
            ConfigError: `max_failures` is not 0, and the machines do not share the output folder.
        """
        ray, rank_0 = self._ray, self._actors[0]
        for rank, place in enumerate(self.places):
            report(f"ray: rank {rank} is process {place.pid} on {place.address}")
        if max_failures:
            self._require_shared(config.output)
        if failures and ray.get(rank_0.has_checkpoint.remote(config.output)):
            config = config.with_(resume=LATEST)
        port = ray.get(rank_0.free_port.remote(self.places[0].address))
        job = secrets.token_hex(16)  # a name that no other run has
        worlds = [self._world(rank, port, job) for rank in range(len(self.places))]
        self._running = [
            actor.run.remote(config, world)
            for actor, world in zip(self._actors, worlds, strict=True)
        ]
        return self._wait_for_outcomes(guard)

    def _world(self, rank: int, port: int, job: str) -> World | None:
        """Return what process `rank` knows of the others; None for a single process."""
        size = len(self.places)
        if size == 1:
            return None
        node = self.places[rank].node
        mates = [other for other, place in enumerate(self.places) if place.node == node]
        address = (self.places[0].address, port)
        return World(rank, size, mates.index(rank), len(mates), address, job)

    def _require_shared(self, output: str) -> None:
        """Check that each machine could continue from the checkpoints of rank 0.

        Raises:
            ConfigError: a machine sees another folder at `output`; the message names the machine.
        """
        ray, rank_0 = self._ray, self._actors[0]
        # Reversed, so that each machine keeps its lowest rank, the last that is set.
        rank_of = {place.node: rank for rank, place in reversed(list(enumerate(self.places)))}
        if len(rank_of) == 1:
            return
        # Rank 0 writes an empty file, which the other machines must see in their folder.
        name = f".shared-{secrets.token_hex(8)}"
        ray.get(rank_0.write_mark.remote(output, name))
        try:
            ranks = sorted(rank_of.values())
            seen = ray.get([self._actors[rank].sees.remote(output, name) for rank in ranks])
        finally:
            ray.get(rank_0.remove.remote(output, name))
        for rank, is_seen in zip(ranks, seen, strict=True):
            if not is_seen:
                raise ConfigError(
                    f"output: {output} on {self.places[0].address} is another folder than on "
                    f"{self.places[rank].address}, so a run could not continue there; give a "
                    "folder that all machines share, or --max-failures 0"
                )

    def _wait_for_outcomes(self, guard: InterruptGuard) -> list[Outcome]:
        """Wait for all processes, and return their outcomes, by rank.

        After one has failed, wait for the others for at most `GRACE` seconds. Pass a signal on.
        """
        ray = self._ray
        ranks = {ref: rank for rank, ref in enumerate(self._running)}
        outcomes: dict[int, Outcome] = {}
        deadline, is_forwarded = float("inf"), False
        while len(outcomes) < len(ranks) and time.monotonic() < deadline:
            waiting = [ref for ref, rank in ranks.items() if rank not in outcomes]
            done, _ = ray.wait(waiting, num_returns=1, timeout=_POLL)
            for ref in done:
                outcome = outcomes[ranks[ref]] = self._outcome(ref)
                if outcome.error:
                    deadline = min(deadline, time.monotonic() + GRACE)
            if guard.signal and not is_forwarded:
                self._actors[0].stop.remote()  # Ends all processes after the same step.
                is_forwarded = True
        late = Outcome(error="did not end after another process had failed", follows=True)
        return [outcomes.get(rank, late) for rank in range(len(self.places))]

    def _outcome(self, ref: Any) -> Outcome:
        """Return the outcome of an actor that has ended, even if it was lost."""
        ray = self._ray
        try:
            outcome: Outcome = ray.get(ref)
        except ray.exceptions.RayError as error:
            # Keep the first line of Ray's text; the other lines are about Ray's internals.
            return Outcome(error=str(error).strip().partition("\n")[0])
        return outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        ray = self._ray
        for actor in self._actors:
            ray.kill(actor)
        # Wait, because processes hold their GPUs and the lock of the output until they end.
        if self._running:
            ray.wait(self._running, num_returns=len(self._running), timeout=GRACE)
        ray.util.remove_placement_group(self._group)


def _ray() -> Any:
    """Return the module `ray`.

    Raises:
        ModuleNotFoundError: Ray is not installed.
    """
    try:
        import ray  # noqa: PLC0415 - an extra
        import ray.util.scheduling_strategies  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'ray: the package ray is not installed; run: pip install "trainable-candle[ray]"',
            name="ray",
        ) from error
    return ray
