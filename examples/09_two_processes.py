"""Train one model in two processes, each on half of every batch.

Each step has the result of a step of one process on the whole batch. `train-lora --gpus 2` does all
of this itself on one machine. A training loop of your own needs the calls of `tc.distributed` in
this script, and a launcher that gives each process its rank:

    torchrun --nproc-per-node 2 examples/09_two_processes.py

Without a launcher the script starts both processes itself, on the CPU:

    python examples/09_two_processes.py
"""

import os
import socket
import subprocess
import sys
import zlib

import trainable_candle as tc
from trainable_candle import nn
from trainable_candle.demo import digits

STEPS = 30
BATCH_SIZE = 64


def train(device: str) -> tuple[float, int]:
    """Train as one of the processes.

    Returns:
        The last step's loss, averaged over the processes, and a checksum of the trained weights.
    """
    device = tc.distributed.init(device)
    rank, size = tc.distributed.rank(), tc.distributed.world_size()

    images, _ = digits.split(digits.load())  # the held-out part is not used
    # Another seed in each process, to show that the broadcast is enough: it gives all processes the
    # initial weights of process 0.
    tc.manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    parameters = model.parameters()
    tc.distributed.broadcast_(parameters)
    optimizer = tc.optim.AdamW(parameters, lr=5e-3)

    for step in range(STEPS):
        # The batch of a step does not depend on the number of processes, which divide it.
        start = step * BATCH_SIZE % (len(images) - BATCH_SIZE)
        mine = slice(start + rank * BATCH_SIZE // size, start + (rank + 1) * BATCH_SIZE // size)
        pixels = images.pixels[mine].reshape(-1, 64) / digits.MAX_PIXEL
        x = tc.tensor(pixels, dtype="f32", device=device)
        labels = tc.tensor(images.labels[mine], dtype="i64", device=device)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        tc.distributed.average_gradients_(parameters)
        optimizer.step()

    mean = float(tc.distributed.all_reduce(loss.detach()).item()) / size
    weights = b"".join(p.detach().to("cpu").numpy().tobytes() for p in parameters)
    tc.distributed.close()
    return mean, zlib.crc32(weights)


def launch(size: int) -> int:
    """Start `size` processes, as torchrun does; returns 0 if all of them succeed, else 1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # port 0: the system chooses a free port
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "cpu"],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]
    # A status is negative if a signal has ended the process, so any status but 0 is a failure.
    statuses = [process.wait() for process in processes]
    return int(any(statuses))


def main() -> int:
    """Train as one of a launcher's processes; without a launcher, start two such processes."""
    if "RANK" not in os.environ:
        return launch(2)
    loss, checksum = train(sys.argv[1] if len(sys.argv) > 1 else "auto")
    line = f"process {os.environ['RANK']}: loss {loss:.4f}, checksum of the weights {checksum:08x}"
    print(f"{line}\n", end="")  # one write, so that the lines of the processes do not mix
    return 0


if __name__ == "__main__":
    sys.exit(main())
