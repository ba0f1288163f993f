"""Streamed blocks: weights stay in host memory, and are copied to the simulated device when needed.

These tests check the copies to the device, the order of these copies, graphs, and two ranks that
share the same weights in host memory. The kernels do not compute:
`tests/models/test_streaming.py` compares values.
"""

import json
from pathlib import Path
from typing import Any

import pytest

FLUX = Path(__file__).parents[1] / "golden" / "flux"
# The number of blocks in the model. `load(COUNT)`, below, streams all of them.
COUNT = sum(
    json.loads((FLUX / "transformer" / "config.json").read_text())[name]
    for name in ("num_layers", "num_single_layers")
)
STEP = f"""
    from trainable_candle.models import FluxTransformer
    from trainable_candle.nn.functional import mse_loss

    folder = {str(FLUX)!r}

    def load(stream_blocks, quantize=None, **other):
        return FluxTransformer.from_pretrained(
            folder + "/transformer", dtype="bf16", device="cuda", quantize=quantize,
            stream_blocks=stream_blocks, **other,
        )

    names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep",
             "img_ids", "txt_ids", "guidance")
    case = tc.load_file(folder + "/transformer_forward.safetensors")
    inputs = [case[name].to("cuda") for name in names]

    def stepper(model):
        model.enable_gradient_checkpointing("full")
        adapter = model.add_adapter(tc.LoraConfig(r=4, target_modules=["to_q", "ff.net.2"]))

        def step(*inputs):
            y = model(**dict(zip(names, inputs)))
            loss = mse_loss(y, y.detach() * 0.5)
            loss.backward()
            return loss

        return step
"""


def block_copies(run: Any) -> list[Any]:
    """The copies from the host on the stream that copies blocks.

    Of the streams that copy from the host, the stream that copies blocks has the highest number.
    `call["kind"]` is the function that was called, unlike `call.kind`; see `Call`.
    """
    found = [call for call in run.of("copy") if call["kind"] == "cuMemcpyHtoDAsync"]
    block_stream = max((call["stream"] for call in found), key=int)
    return [call for call in found if call["stream"] == block_stream]


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_a_step_copies_blocks_ahead_of_their_use(cuda: Any, quantize: str | None) -> None:
    run = cuda.run(
        STEP
        + f"""
    step = stepper(load({COUNT}, {quantize!r}))
    step(*inputs)
    mark("second")
    step(*inputs)
    mark("end")
    """
    )
    assert run.of("refused") == []  # the simulated libraries have rejected no call
    second = run.after("second")
    found = block_copies(second)
    # Two slots of device memory hold the weights of two blocks. The previous backward pass left the
    # first two blocks in them, and the forward pass leaves the last two: each pass copies all
    # blocks but two. Each block's modulation is copied once in a step. A unit is what is copied
    # together: the weights of a block, or its modulation. A quantized unit has tensors of two
    # dtypes, which take one copy each.
    copies_of_unit = 1 if quantize is None else 2
    # The units of the forward and the backward pass, and those of the modulation.
    units = 2 * (COUNT - 2) + COUNT
    assert len(found) == copies_of_unit * units
    assert {call["pageable"] for call in found} == {"0"}
    # The copies of each unit wait for the work that used its slot, and later work waits for them.
    # For both, one stream records an event, and the other waits for the event.
    block_stream = found[0]["stream"]
    waits, records = second.of("wait"), second.of("record")
    assert sum(call["stream"] == block_stream for call in waits) == units
    assert sum(call["stream"] == block_stream for call in records) == units
    assert sum(call["stream"] != block_stream for call in records) == units
    assert sum(call["stream"] != block_stream for call in waits) >= units
    # The host itself does not wait for the device, and no memory is allocated.
    assert second.waits == []
    assert second.of("grow", "alloc-pinned") == []


def test_a_copy_is_queued_while_the_block_before_computes(cuda: Any) -> None:
    run = cuda.run(
        STEP
        + f"""
    model = load({COUNT})
    with tc.no_grad():
        mark("forward")
        model(**dict(zip(names, inputs)))
    mark("end")
    """
    )
    forward = run.after("forward")
    calls, found = forward.calls, block_copies(forward)
    copies = [i for i, call in enumerate(calls) if call in found]
    # The last copy is that of the last block. The block before it computes until the stream of the
    # kernels waits for this copy.
    is_work = [call.kind in {"launch", "product"} for call in calls]
    waits = [i for i, call in enumerate(calls) if call.kind == "wait"]
    awaited = next(i for i in reversed(waits) if calls[i]["stream"] != found[0]["stream"])
    assert copies[-1] < awaited
    assert any(is_work[copies[-1] : awaited])  # work of the block before the last
    assert any(is_work[awaited:])  # work of the last block


def test_a_graph_has_the_copies_of_its_step(cuda: Any) -> None:
    run = cuda.run(
        STEP
        + f"""
    step = tc.cuda.capture(stepper(load({COUNT})), inputs)
    plain = tc.cuda.capture(lambda x: x * 2, inputs[:1])
    for call in range(5):
        mark(f"call-{{call}}")
        step(*inputs)
        plain(inputs[0])
    assert step.is_recorded
    mark("end")
    """
    )
    assert run.of("refused") == []
    ends = run.of("capture-end")
    assert ends
    assert all(end["valid"] == "1" for end in ends)
    # Both functions were recorded before call 3.
    for call in (3, 4):
        replay = run.after(f"call-{call}")
        assert len(replay.of("replay")) == 2  # of `step` and of `plain`
        # The graph copies all blocks in the forward pass, all but two in the backward pass, and the
        # modulation of all. The forward pass copies the first two blocks again, because a graph
        # cannot rely on what the slots contain at its start.
        assert int(replay.of("replay")[0]["copies"]) >= 3 * COUNT - 2
        assert replay.waits == []


def test_host_memory_is_freed_with_the_model_and_its_graphs(cuda: Any) -> None:
    run = cuda.run(
        STEP
        + f"""
    step = tc.cuda.capture(stepper(load({COUNT})), inputs)
    for _ in range(4):
        step(*inputs)
    assert step.is_recorded
    mark("dropped")
    del step
    tc.cuda.synchronize()
    mark("end")
    """
    )
    freed = run.after("dropped").of("free-pinned")
    # Each block has its modulation in one allocation, and its other weights in another.
    assert len(freed) == 2 * COUNT
    assert run.of("refused") == []


def test_streamed_blocks_save_the_device_memory_that_is_estimated(cuda: Any) -> None:
    run = cuda.run(
        STEP
        + f"""
    found = []
    for count in (0, {COUNT}):
        before = tc.cuda.memory_stats()["allocated"]
        model = load(count)
        found.append(tc.cuda.memory_stats()["allocated"] - before)
        del model
    facts = next(iter(tc.inspect(folder + "/transformer").parts.values()))
    estimates = [facts.weight_bytes("bf16", stream_blocks=count) for count in (0, {COUNT})]
    print(*found, *estimates)
    """
    )
    resident, streamed, estimated_resident, estimated_streamed = map(int, run.output.split())
    assert streamed < 0.8 * resident
    saved, estimate = resident - streamed, estimated_resident - estimated_streamed
    assert abs(saved - estimate) < 0.1 * resident


BUFFER = 8 << 20
"""The bytes of a pinned buffer. Weights in pageable memory are copied through a ring of buffers."""


@pytest.mark.parametrize("limited", ["driver", "setting"])
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_without_pinned_memory_blocks_are_copied_through_a_ring(
    cuda: Any, quantize: str | None, limited: str
) -> None:
    # With "driver", the driver pins at most one buffer and 64 KiB more. Copies of values other than
    # blocks take that buffer, so the ring of the blocks has none. With "setting", the limit of
    # pinned memory for blocks is 0 bytes; the buffers of the ring do not count.
    settings = {"PINNED": str(BUFFER + (64 << 10))} if limited == "driver" else {}
    set_limit = (
        ""
        if limited == "driver"
        else "import os\n    os.environ['TRAINABLE_CANDLE_PINNED_BYTES'] = '0'"
    )
    run = cuda.run(
        f"""
    {set_limit}
    from trainable_candle import _core
    {STEP}
    # The function returns whether streamed weights are in host memory that is not pinned.
    assert not _core.cuda_stages_weights("cuda")
    step = stepper(load({COUNT}, {quantize!r}))
    assert _core.cuda_stages_weights("cuda")
    step(*inputs)
    mark("second")
    step(*inputs)
    tc.cuda.synchronize()
    mark("end")
    """,
        settings=settings,
    )
    assert {call["why"] for call in run.of("refused")} <= {"pinned-memory"}
    second = run.after("second")
    found = block_copies(second)
    # Blocks are copied as often as from pinned memory; the first test of this file explains the
    # counts. Weights that do not fit in the rest of a buffer need several copies.
    copies_of_unit = 1 if quantize is None else 2
    units = 2 * (COUNT - 2) + COUNT
    assert len(found) >= copies_of_unit * units
    pageable = {call["pageable"] for call in found}
    if limited == "driver":
        # The ring has no buffer: the driver copies from pageable memory itself.
        assert "1" in pageable
    else:
        assert pageable == {"0"}
    block_stream = found[0]["stream"]
    assert sum(call["stream"] == block_stream for call in second.of("wait")) == units
    assert second.of("alloc-pinned") == []


def test_graphs_cannot_copy_from_memory_that_is_not_pinned(cuda: Any) -> None:
    run = cuda.run(
        f"""
    import os
    os.environ["TRAINABLE_CANDLE_PINNED_BYTES"] = "0"
    {STEP}
    from trainable_candle.train.graphs import PassGraphs

    step = stepper(load({COUNT}))
    captured = tc.cuda.capture(step, inputs)
    try:
        for _ in range(4):
            captured(*inputs)
    except tc.errors.DeviceError as error:
        print(error)
    # With weights in pageable memory, these calls run the step without a graph, and succeed.
    # `keep` is the most graphs that are kept; `first` says that a call begins an optimizer step.
    graphs = PassGraphs(lambda inputs, first: step(*inputs.values()), keep=2)
    for _ in range(4):
        graphs(dict(zip(names, inputs)), first=True)
    mark("loaded")
    # Another function can be recorded while the thread that copies pageable memory works.
    plain = tc.cuda.capture(lambda x: x * 2, inputs[:1])
    for _ in range(4):
        step(*inputs)
        plain(inputs[0])
    assert plain.is_recorded
    mark("end")
    """
    )
    # The message of the DeviceError that `captured` raises; "other" means "not pinned".
    assert "a CUDA graph cannot copy from other memory" in run.output
    assert run.after("loaded").of("refused") == []
    assert len(run.after("loaded").of("replay")) >= 2


TOGETHER = """
    import threading
    from trainable_candle import _core

    barrier, messages = threading.Barrier(2), [b"", b""]

    # Each rank calls its function at the same time as the other rank, and gets both messages. Some
    # tests exchange empty messages, only to wait for the other rank.
    def exchange_of(rank):
        def exchange(message):
            messages[rank] = message
            barrier.wait(60)
            found = list(messages)
            barrier.wait(60)
            return found
        return exchange

    # Call work(rank, device) in two threads. Return each rank's error or None.
    def together(work):
        errors = [None, None]

        def run(rank):
            try:
                _core.share_streamed(rank, exchange_of(rank))
                work(rank, f"cuda:{rank}")
            except Exception as error:
                errors[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    def load_shared(device, quantize=None):
        return FluxTransformer.from_pretrained(
            folder + "/transformer", dtype="bf16", device=device, quantize=quantize,
            stream_blocks=STREAMED,
        )
""".replace("STREAMED", str(COUNT))


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_two_ranks_pin_one_copy_of_the_weights(cuda: Any, quantize: str | None) -> None:
    run = cuda.run(
        STEP
        + TOGETHER
        + f"""
    def work(rank, device):
        model = load_shared(device, {quantize!r})
        with tc.no_grad():
            model(**{{name: case[name].to(device) for name in names}})
        tc.cuda.synchronize(device)
        # The size of each shared file, by its inode (field 4); field 0 is the range of addresses.
        # The threads may map a file at several addresses.
        sizes = {{
            line.split()[4]: int(line.split()[0].split("-")[1], 16)
            - int(line.split()[0].split("-")[0], 16)
            for line in open("/proc/self/maps") if "memfd:trainable-candle" in line
        }}
        exchange_of(rank)(b"")
        if rank == 0:
            print(sum(sizes.values()))
        exchange_of(rank)(b"")

    assert together(work) == [None, None]
    """,
        settings={"DEVICES": "2"},
    )
    assert run.of("refused") == []
    pinned = [int(call["bytes"]) for call in run.of("register")]
    # Each of the two ranks pins the same two ranges of memory: the blocks, and their modulation.
    assert len(pinned) == 4
    assert sum(pinned) == 2 * int(run.output)
    assert len(run.of("unregister")) == 4
    # All other pinned memory is buffers through which values are copied.
    assert {call["bytes"] for call in run.of("alloc-pinned")} == {str(BUFFER)}
    found = block_copies(run)
    assert found
    assert {call["pageable"] for call in found} == {"0"}


# `status` is what cuMemHostRegister returns.
@pytest.mark.parametrize(
    "status", ["2", "800", "801"], ids=["out of memory", "not permitted", "not supported"]
)
def test_shared_memory_that_cannot_be_pinned_is_copied_through_a_ring(
    cuda: Any, status: str
) -> None:
    run = cuda.run(
        STEP
        + TOGETHER
        + """
    def work(rank, device):
        model = load_shared(device)
        assert _core.cuda_stages_weights(device)
        inputs = {name: case[name].to(device) for name in names}
        for number in range(2):
            exchange_of(rank)(b"")
            if rank == 0:
                mark(f"pass-{number}")
            exchange_of(rank)(b"")
            with tc.no_grad():
                model(**inputs)
            tc.cuda.synchronize(device)
        del model
        assert not _core.cuda_stages_weights(device)

    for error in together(work):
        print(error)
    """,
        settings={"DEVICES": "2", "REGISTER": status},
    )
    assert run.output.split() == ["None", "None"]
    assert {call["call"] for call in run.of("refused")} == {"cuMemHostRegister"}
    assert run.of("register", "unregister") == []
    # Each of the two ranks copies at least all blocks but the two in the slots, and the modulation
    # of all blocks.
    found = [c for c in run.after("pass-1").of("copy") if c["kind"] == "cuMemcpyHtoDAsync"]
    assert len(found) >= 2 * (COUNT - 2 + COUNT)
    assert {call["pageable"] for call in found} == {"0"}


def test_another_error_of_the_driver_is_raised_by_all_ranks(cuda: Any) -> None:
    run = cuda.run(
        STEP
        + TOGETHER
        + """
    for error in together(lambda rank, device: load_shared(device)):
        print(error)
    """,
        settings={"DEVICES": "2", "REGISTER": "719"},  # CUDA_ERROR_LAUNCH_FAILED
    )
    assert len(run.output.splitlines()) == 2
    assert "stream_blocks" in run.output
