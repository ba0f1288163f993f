"""Several processes compute the same as one process that takes all their batches.

The tests cover a user's own training loop, and the trainer with weighted batches.
"""

import json
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.distributed.launch import rank_environment

# The beginning of both scripts. Only the losses of batches with odd numbers depend on b, so that a
# process may lack a gradient of b.
PROBLEM = """
import json
import sys

import numpy as np

import trainable_candle as tc
from trainable_candle.distributed.group import make_group
from trainable_candle.distributed.world import from_environment
from trainable_candle.train import Callback, Trainer

data = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
parameters = {"a": tc.Var(tc.full((8, 8), 0.1)), "b": tc.Var(tc.full((8,), 0.2))}


def loss(x, number):
    y = x @ parameters["a"]
    if number % 2:
        y = y + parameters["b"]
    return (y.tanh() - x).square().mean()


def values():
    return {name: var.detach().numpy().tolist() for name, var in parameters.items()}
"""

LOOP = """
device = tc.distributed.init("cpu")
rank, size = tc.distributed.rank(), tc.distributed.world_size()
if rank:
    parameters["a"].set(tc.zeros((8, 8)))  # The values of rank 0 replace these.
tc.distributed.broadcast_(parameters)
optimizer = tc.optim.AdamW(list(parameters.values()), lr=1e-2)
for step in range(6):
    for number in range(2 * step, 2 * step + 2):
        if number % size == rank:
            # A step has two batches, and the gradients are averaged over `size` processes. With
            # this scale, the result is the mean over the two batches.
            scale = size / 2
            (loss(tc.tensor(data[number : number + 4]), number) * scale).backward()
    tc.distributed.average_gradients_(parameters)
    optimizer.step()
    optimizer.zero_grad()
total = tc.distributed.all_reduce(tc.tensor([1.0 + rank]))
tc.distributed.barrier()
print(json.dumps({"total": float(total), "parameters": values()}))
tc.distributed.close()
"""

# The batches have different weights, by which the trainer multiplies their losses. The trainer also
# passes the weight, times a common factor, to the loss as `share`. The loss reads `share`, which
# fails if the trainer does not pass it, but the value of the loss does not depend on it.
TRAINER = """
group = make_group(from_environment(), "cpu", facts={})
seen = []


class Recorder(Callback):
    def on_step_end(self, trainer, report):
        seen.append((report.loss, report.grad_norm))


class BatchNumbers:
    def batch(self, index):
        return index


trainer = Trainer(
    lambda given: (loss(given["x"], int(given["number"])) * given["share"]) / given["share"],
    parameters,
    tc.optim.AdamW(list(parameters.values()), lr=1e-2),
    BatchNumbers(),
    inputs=lambda n: {"x": tc.tensor(data[n : n + 4]), "number": tc.tensor(float(n))},
    weigh=lambda n: 1.0 + n % 5,
    steps=6,
    gradient_accumulation=4 // group.size,
    max_grad_norm=0.05,
    callbacks=[Recorder()],
    group=group,
    seed=0,
)
trainer.train()
print(json.dumps({"seen": seen, "parameters": values()}))
group.close()
"""


def run(script: str, size: int) -> list[dict[str, Any]]:
    """Run a script in `size` processes; return what each rank prints."""
    # The processes meet at a socket in the folder; the usual folder's path may be too long for it.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROBLEM + script],
                env=rank_environment(Path(folder), rank, size),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size
    return [json.loads(output) for output in outputs]


def flat(parameters: dict[str, Any]) -> list[float]:
    """Return the elements of the matrix a and the vector b in one list."""
    return [*chain.from_iterable(parameters["a"]), *parameters["b"]]


def test_a_users_own_loop_computes_the_same_on_two_processes() -> None:
    (alone,) = run(LOOP, 1)
    first, second = run(LOOP, 2)
    assert first["parameters"] == second["parameters"]
    assert (first["total"], second["total"], alone["total"]) == (3.0, 3.0, 1.0)
    assert flat(first["parameters"]) == pytest.approx(flat(alone["parameters"]), rel=1e-5)


def test_weighted_batches_give_the_same_on_one_two_and_four_processes() -> None:
    (alone,) = run(TRAINER, 1)
    for several in (run(TRAINER, 2), run(TRAINER, 4)):
        assert all(output == several[0] for output in several)
        for found, expected in zip(several[0]["seen"], alone["seen"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
        assert flat(several[0]["parameters"]) == pytest.approx(flat(alone["parameters"]), rel=1e-5)


def test_averaging_the_gradients_of_no_parameters_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tc.distributed, "_group", SimpleNamespace(size=2))
    tc.distributed.average_gradients_([])
    tc.distributed.average_gradients_({})
