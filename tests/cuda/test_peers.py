"""Two processes, each with one simulated device, stream the weights of blocks from both devices.

To stream a transformer block is to copy its weights to a device shortly before the block runs.
Here, each device holds one slice of the weights of every block, and each process copies both
slices. The kernels do not compute, but copies are real, so weights that are read back show what the
slices hold.
"""

from pathlib import Path
from typing import Any

import pytest

# FLUX is the folder of a small Flux, and COUNT the number of its blocks, all of which are streamed.
from .test_streaming import COUNT, FLUX

# The start of the program that both processes run. Each process uses its own device; the processes
# exchange messages on the CPU. `mark` writes a line to the log of calls; `run.after(name)` has the
# calls from this line to the next mark.
CHILD = f"""
import gc
import os

import trainable_candle as tc
from trainable_candle.distributed.group import make_group
from trainable_candle.distributed.streamed import shared_streams, slowest_link
from trainable_candle.distributed.world import from_environment
from trainable_candle.models import FluxTransformer
from trainable_candle.nn.functional import mse_loss

folder = {str(FLUX)!r}
world = from_environment()
group = make_group(world, "cpu", {{}})
device = f"cuda:{{world.local_rank}}"
tc.zeros((1,), device=device)

def mark(name):
    group.barrier()
    if group.rank == 0:
        with open(os.environ["SIMULATED_CUDA_LOG"], "a") as file:
            file.write(f"mark name={{name}}\\n")
    group.barrier()

def load(*, peers, quantize=None):
    with shared_streams(group, peers=peers):
        return FluxTransformer.from_pretrained(
            folder + "/transformer", dtype="bf16", device=device, quantize=quantize,
            stream_blocks={COUNT}, stream_modulation=True,
        )

names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids",
         "txt_ids", "guidance")
case = tc.load_file(folder + "/transformer_forward.safetensors")
inputs = [case[name].to(device) for name in names]

def forward(model):
    with tc.no_grad():
        model(**dict(zip(names, inputs)))

def stepper(model):
    model.enable_gradient_checkpointing("full")
    model.add_adapter(tc.LoraConfig(r=4, target_modules=["to_q", "ff.net.2"]))

    def step(*inputs):
        y = model(**dict(zip(names, inputs)))
        loss = mse_loss(y, y.detach() * 0.5)
        loss.backward()
        return loss

    return step

"""

# Starts the program in the file PATH twice, and prints the output of both processes.
START = """
    import subprocess
    import sys
    import tempfile
    from pathlib import Path
    from trainable_candle.distributed.launch import rank_environment

    with tempfile.TemporaryDirectory(dir="/tmp") as rendezvous:
        children = [
            subprocess.Popen(
                [sys.executable, PATH], env=rank_environment(Path(rendezvous), rank, 2),
                text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in range(2)
        ]
        outputs = [child.communicate(timeout=100) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    print("".join(text for text, _ in outputs))
"""


def run_two_processes(cuda: Any, folder: Path, code: str, **settings: str) -> Any:
    """Run CHILD and `code` in two processes on two devices. One log has the calls of both.

    `settings` configure the simulated driver. PEERS is the link between the devices: "nvlink" (the
    default), "bus" or "none". The driver logs a call with wrong arguments as "refused".
    """
    path = folder / "child.py"
    path.write_text(CHILD + code)
    start = START.replace("PATH", repr(str(path)))
    return cuda.run(start, settings={"DEVICES": "2", **settings})


def block_copies(run: Any, kind: str, rank: int) -> list[Any]:
    """The copies of one kind to a rank's device, on the stream that copies blocks.

    Of the streams that copy to the device, that stream has the highest number.
    """
    found = [call for call in run.of("copy") if call["to"] == str(rank)]
    block_stream = max((call["stream"] for call in found), key=int)
    return [call for call in found if call["stream"] == block_stream and call["kind"] == kind]


def slice_sizes(size: int) -> tuple[int, int]:
    """How many of `size` bytes the slices of rank 0 and rank 1 hold.

    The slice of rank 0 has half of `size`, rounded up to a multiple of 256, but at most `size`.
    """
    first = min(size, -(-size // 512) * 256)
    return first, size - first


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_each_process_copies_slices_from_both_devices(
    cuda: Any, tmp_path: Path, quantize: str | None
) -> None:
    run = run_two_processes(
        cuda,
        tmp_path,
        f"""
model = load(peers=False, quantize={quantize!r})
mark("host")
forward(model)
mark("loading")
model = load(peers=True, quantize={quantize!r})
mark("peers")
forward(model)
mark("end")
""",
    )
    assert run.of("refused") == []
    for rank in (0, 1):
        host = block_copies(run.after("host"), "cuMemcpyHtoDAsync", rank)
        peers = block_copies(run.after("peers"), "cuMemcpyDtoDAsync", rank)
        # Where a model in host memory needs one copy, a model in slices needs one from each slice
        # that is not empty: first from the other process's slice, then from this process's.
        expected = []
        for call in host:
            sizes = slice_sizes(int(call["bytes"]))
            owners = (1 - rank, rank)
            expected += [(str(owner), sizes[owner]) for owner in owners if sizes[owner]]
        assert [(call["from"], int(call["bytes"])) for call in peers] == expected
        assert host
        assert len(peers) > len(host)
        assert not block_copies(run.after("peers"), "cuMemcpyHtoDAsync", rank)
    # Slices need no pinned memory.
    assert run.after("loading").of("register", "alloc-pinned") == []


def test_a_graph_has_the_copies_of_its_step(cuda: Any, tmp_path: Path) -> None:
    run = run_two_processes(
        cuda,
        tmp_path,
        """
step = tc.cuda.capture(stepper(load(peers=True)), inputs)
for call in range(5):
    mark(f"call-{call}")
    step(*inputs)
assert step.is_recorded
mark("end")
""",
    )
    assert run.of("refused") == []
    assert {end["valid"] for end in run.of("capture-end")} == {"1"}
    for call in (3, 4):  # by then, the step is recorded
        replays = run.after(f"call-{call}").of("replay")
        assert len(replays) == 2  # one for each process
        # A step copies the modulation of each block once and the weights of each block twice, but
        # the backward pass finds two blocks in place. Each copy has two slices.
        assert all(int(replay["copies"]) >= 2 * (3 * COUNT - 2) for replay in replays)


def test_saving_reads_both_slices_and_dropping_the_model_frees_all_memory(
    cuda: Any, tmp_path: Path
) -> None:
    run = run_two_processes(
        cuda,
        tmp_path,
        """
before = tc.cuda.memory_stats(device)["allocated"]
model = load(peers=True)
model_bytes = tc.cuda.memory_stats(device)["allocated"] - before
saved = os.path.join(os.path.dirname(__file__), str(group.rank))
model.save_pretrained(saved)
file = "diffusion_pytorch_model.safetensors"
found = tc.load_file(f"{saved}/{file}")
expected = tc.load_file(f"{folder}/transformer/{file}")
assert found.keys() == expected.keys()
# All other tensors come from kernels, which do not compute here, so they are not compared.
streamed = [name for name in found if "_blocks." in name and len(found[name].shape) == 2]
assert len(streamed) > 5 * COUNT  # every block has more than five matrices
for name in streamed:
    values = expected[name]
    rounded = values.to("bf16").to("f32").numpy()
    assert (found[name].to("f32").numpy() == rounded).all(), name
facts = next(iter(tc.inspect(folder + "/transformer").parts.values()))
print(model_bytes, sum(facts.streamed_bytes("bf16", stream_blocks=COUNT, stream_modulation=True)))
mark("dropped")
del model
gc.collect()
group.barrier()
tc.cuda.empty_cache(device)
assert tc.cuda.memory_stats(device)["allocated"] <= before
mark("end")
""".replace("COUNT", str(COUNT)),
    )
    assert run.of("refused") == []
    # Each process exports two slices (of the blocks and of their modulation) and opens the two
    # slices of the other process.
    assert [len(run.of(kind)) for kind in ("ipc-export", "ipc-open", "ipc-close")] == [4, 4, 4]
    assert sorted(call["device"] for call in run.of("ipc-open")) == ["0", "0", "1", "1"]
    assert len(run.after("dropped").of("ipc-close")) == 4
    assert len(run.after("dropped").of("free")) == 4
    # The bytes of the slices of both processes.
    exported = sum(int(call["bytes"]) for call in run.of("ipc-export"))
    for line in filter(None, run.output.splitlines()):
        model_bytes, streamed = map(int, line.split())
        # Each device has half of the streamed weights, and all weights that are not streamed. A
        # slice may be longer than the weights in it, but not shorter.
        assert model_bytes >= exported / 2
        assert exported >= streamed


def test_the_errors_of_devices_that_cannot_read_each_other_name_a_cure(
    cuda: Any, tmp_path: Path
) -> None:
    run = run_two_processes(
        cuda,
        tmp_path,
        """
for work in (lambda: slowest_link(group, device), lambda: load(peers=True)):
    try:
        work()
    except tc.errors.Error as error:
        print(f"{group.rank}: {error}")
""",
        PEERS="none",
    )
    lines = run.output.splitlines()
    link_errors = [line for line in lines if "leave out --stream-from peers" in line]
    assert len(link_errors) == 2  # of `slowest_link`, in both processes
    assert all(
        "the GPU at 0000:10:00.0 cannot read the memory of the one at" in e for e in link_errors
    )
    # The errors of `load`: that of rank 0 also names the devices.
    assert any(
        "0: stream_blocks: GPU 0 of this machine cannot read the memory of GPU 1" in line
        for line in lines
    ), lines
    assert any("1: " in line and "stream from the host" in line for line in lines), lines


@pytest.mark.parametrize("link", ["nvlink", "bus"])
def test_the_slowest_link_is_the_one_that_the_driver_reports(
    cuda: Any, tmp_path: Path, link: str
) -> None:
    run = run_two_processes(cuda, tmp_path, "print(slowest_link(group, device))\n", PEERS=link)
    assert run.output.split() == [link, link]
