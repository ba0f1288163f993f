"""The processes of a machine stream blocks from one copy of the weights.

The copy is in host memory, or each process keeps a slice of it on its GPU. On the CPU, each slice
is a range of shared memory that all processes map.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from trainable_candle.distributed.launch import rank_environment
from trainable_candle.distributed.streamed import least_sharing

FLUX = Path(__file__).parents[1] / "golden" / "flux"
# The number of all blocks of the transformer.
BLOCKS = sum(
    json.loads((FLUX / "transformer" / "config.json").read_text())[name]
    for name in ("num_layers", "num_single_layers")
)

# A script that prints the losses of some steps, a hash of the trained adapter, and the mapped KiB
# of each shared memory file of this package, by inode.
STEPS = """
import hashlib
import json
import sys

import trainable_candle as tc
from trainable_candle import distributed
from trainable_candle.distributed.streamed import shared_streams
from trainable_candle.models import FluxTransformer
from trainable_candle.nn.functional import mse_loss

folder, blocks, quantize, device, graph, peers = json.loads(sys.argv[1])
device = distributed.init(device)
with shared_streams(distributed._group, peers=peers):
    model = FluxTransformer.from_pretrained(
        folder + "/transformer", dtype="f32" if device == "cpu" else "bf16", device=device,
        quantize=quantize, stream_blocks=blocks, stream_modulation=blocks > 0,
    )
case = tc.load_file(folder + "/transformer_forward.safetensors")
names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids",
         "txt_ids", "guidance")
inputs = [case[name].to(device) for name in names]
tc.manual_seed(0)
model.enable_gradient_checkpointing("full")
adapter = model.add_adapter(tc.LoraConfig(r=4, target_modules=["all-linear"]))
optimizer = tc.optim.AdamW(adapter.parameters(), lr=1e-2)

def step(*inputs):
    y = model(**dict(zip(names, inputs))).to("f32")
    loss = mse_loss(y, tc.ones(y.shape, device=device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

run = tc.cuda.capture(step, inputs) if graph else step
# The second call records the graph, and the later calls replay it.
losses = [run(*inputs).item() for _ in range(5 if graph else 2)]
digest = hashlib.sha256(b"".join(var.detach().numpy().tobytes() for var in adapter.parameters()))
mapped, is_ours = {}, False
for line in open("/proc/self/smaps"):
    words = line.split()
    if not words[0].endswith(":"):  # The first line of a mapping; its fifth word is the inode.
        is_ours = "memfd:trainable-candle" in line
        if is_ours:
            mapped[words[4]] = 0
            inode = words[4]
    elif is_ours and words[0] == "Size:":
        mapped[inode] += int(words[1])
distributed.barrier()
print(json.dumps({"losses": losses, "digest": digest.hexdigest(), "mapped": mapped}))
distributed.close()
"""


def run(
    size: int,
    blocks: int,
    quantize: str | None,
    *,
    device: str = "cpu",
    graph: bool = False,
    peers: bool = False,
) -> list[dict[str, Any]]:
    """Run the script in `size` processes; return what each rank prints.

    Args:
        size: the number of processes.
        blocks: how many blocks are streamed; with 0, all weights stay on the device.
        quantize: the format of the quantized weights; None: they are not quantized.
        device: "cpu" or "cuda".
        graph: whether a CUDA graph is recorded and replayed.
        peers: whether each process has a slice of the copy; otherwise the copy is in host memory.
    """
    arguments = json.dumps([str(FLUX), blocks, quantize, device, graph, peers])
    with tempfile.TemporaryDirectory(dir="/tmp") as meeting:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", STEPS, arguments],
                env=rank_environment(Path(meeting), rank, size),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size
    return [json.loads(output) for output in outputs]


def assert_one_copy(found: list[dict[str, Any]], resident: dict[str, Any]) -> None:
    """Assert that all processes map the same memory, and compute the same as without streaming.

    `found` are the outputs of the processes, `resident` that of a process without streaming.
    """
    # One file has the blocks, the other their modulation.
    assert len(found[0]["mapped"]) == 2
    assert all(output["mapped"] == found[0]["mapped"] for output in found)
    assert_same_steps(found, resident)


def assert_same_steps(found: list[dict[str, Any]], resident: dict[str, Any]) -> None:
    """Assert that all processes have the losses and the adapter of a run without streaming."""
    for output in found:
        assert (output["losses"], output["digest"]) == (resident["losses"], resident["digest"])


@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
def test_processes_share_one_copy(quantize: str | None) -> None:
    (resident,) = run(1, 0, quantize)
    assert resident["mapped"] == {}
    assert_one_copy(run(2, BLOCKS, quantize), resident)


@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
def test_processes_read_slices_from_each_other(quantize: str | None) -> None:
    (resident,) = run(1, 0, quantize)
    one_copy = sum(run(2, BLOCKS, quantize)[0]["mapped"].values())
    found = run(3, BLOCKS, quantize, peers=True)
    assert_same_steps(found, resident)
    for output in found:
        # Each process maps three slices of the blocks, and three of their modulation.
        assert len(output["mapped"]) == 2 * 3
        assert output["mapped"] == found[0]["mapped"]
        # Together, the slices are as large as one copy, but the size of each file is rounded up to
        # a multiple of 64 KiB: 2 files of one copy, and 2 * 3 files of slices. Sizes are in KiB.
        assert one_copy - 2 * 64 <= sum(output["mapped"].values()) <= one_copy + 2 * 3 * 64


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_gpus_read_slices_from_each_other(gpu: str, quantize: str | None, *, graph: bool) -> None:
    import trainable_candle as tc

    if tc.cuda.device_count() < 2:
        pytest.skip(f"{gpu} is the only GPU")
    (resident,) = run(1, 0, quantize, device="cuda", graph=graph)
    found = run(2, BLOCKS, quantize, device="cuda", graph=graph, peers=True)
    assert_same_steps(found, resident)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_gpus_share_one_copy(gpu: str, quantize: str | None, *, graph: bool) -> None:
    import trainable_candle as tc

    if tc.cuda.device_count() < 2:
        pytest.skip(f"{gpu} is the only GPU")
    (resident,) = run(1, 0, quantize, device="cuda", graph=graph)
    assert_one_copy(run(2, BLOCKS, quantize, device="cuda", graph=graph), resident)


def test_a_single_process_maps_no_shared_memory() -> None:
    (found,) = run(1, BLOCKS, None)
    assert found["mapped"] == {}


def test_the_smallest_group_that_shares_memory_is_counted() -> None:
    # The arguments are the names of the machines of all processes.
    assert least_sharing(["a", "a"]) == 2
    assert least_sharing(["a", "a", "b"]) == 1
    # Processes on machines without a name share nothing.
    assert least_sharing(["", ""]) == 1
