"""On a GPU, blocks streamed from host memory compute the same bits as blocks in GPU memory.

That holds for eager calls and for replays of CUDA graphs.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.compressed import model_folder

import trainable_candle as tc
from trainable_candle.models import FluxTransformer, SD3Transformer
from trainable_candle.nn import functional as F

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parents[1] / "golden"
COMMON = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")
# For each family: the class, the names of its inputs and the number of its blocks.
KINDS = {
    "flux": (FluxTransformer, (*COMMON, "img_ids", "txt_ids", "guidance"), 4),
    "sd3": (SD3Transformer, COMMON, 3),
}


def losses(
    gpu: str,
    name: str,
    *,
    stream_blocks: int,
    quantize: str | None = None,
    policy: str = "full",
    checkpointed: int | None = None,
    graph: bool = False,
) -> list[np.ndarray]:
    """The losses of six training steps; between the fourth and the fifth, a model output.

    `checkpointed` is the number of blocks to which `policy` applies; None means all.
    """
    kind, names, _ = KINDS[name]
    case = tc.load_file(GOLDEN / name / "transformer_forward.safetensors")
    inputs = [case[key].to(gpu) for key in names]
    tc.manual_seed(0)
    model = kind.from_pretrained(
        model_folder(GOLDEN / name / "transformer"),
        dtype="bf16",
        device=gpu,
        quantize=quantize,
        stream_blocks=stream_blocks,
        stream_modulation=stream_blocks > 0,
    )
    if policy != "none":
        model.enable_gradient_checkpointing(policy, blocks=checkpointed)
    adapter = model.add_adapter(tc.LoraConfig(r=4, target_modules=["to_q", "to_v", "ff.net.2"]))
    optimizer = tc.optim.AdamW(adapter.parameters(), lr=1e-2)

    def step(*inputs: tc.Tensor) -> tc.Tensor:
        y = model(**dict(zip(names, inputs, strict=True))).to("f32")
        loss = F.mse_loss(y, tc.ones(y.shape, device=gpu))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = tc.cuda.capture(step, inputs) if graph else step
    found = []
    for index in range(6):
        found.append(run(*inputs).to("cpu").numpy())
        if index == 3:
            # Streamed blocks are copied into slots of GPU memory. This eager call changes the
            # contents of the slots between two replays.
            with tc.no_grad():
                found.append(model(**dict(zip(names, inputs, strict=True))).to("f32").numpy())
    return found


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
@pytest.mark.parametrize("name", KINDS)
def test_losses_of_streamed_blocks_are_those_of_resident_blocks(
    gpu: str, name: str, quantize: str | None, *, graph: bool
) -> None:
    expected = losses(gpu, name, stream_blocks=0, quantize=quantize)
    for count in (1, KINDS[name][2]):  # One streamed block, or all blocks.
        found = losses(gpu, name, stream_blocks=count, quantize=quantize, graph=graph)
        for streamed, resident in zip(found, expected, strict=True):
            np.testing.assert_array_equal(streamed, resident)


@pytest.mark.parametrize("policy", ["selective", "none"])
def test_losses_are_equal_under_other_checkpoint_policies(gpu: str, policy: str) -> None:
    expected = losses(gpu, "flux", stream_blocks=0, policy=policy)
    found = losses(gpu, "flux", stream_blocks=4, policy=policy)
    for streamed, resident in zip(found, expected, strict=True):
        np.testing.assert_array_equal(streamed, resident)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("policy", ["full", "offload"])
def test_losses_are_equal_when_only_some_blocks_are_checkpointed(
    gpu: str, policy: str, quantize: str | None, *, graph: bool
) -> None:
    expected = losses(gpu, "flux", stream_blocks=0, quantize=quantize)
    # `expected` is with all four blocks checkpointed and none streamed.
    for checkpointed, stream_blocks in ((1, 0), (3, 0), (2, 4)):
        found = losses(
            gpu,
            "flux",
            stream_blocks=stream_blocks,
            quantize=quantize,
            policy=policy,
            checkpointed=checkpointed,
            graph=graph,
        )
        for some, all_blocks in zip(found, expected, strict=True):
            np.testing.assert_array_equal(some, all_blocks)


def test_blocks_with_too_little_pinned_memory_compute_the_same(gpu: str) -> None:
    # A process reads its limit of pinned memory once, so each limit needs a new process.
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from test_streaming_gpu import KINDS, losses

for name, (_, _, count) in KINDS.items():
    for quantize in (None, "nf4"):
        expected = losses({gpu!r}, name, stream_blocks=0, quantize=quantize)
        found = losses({gpu!r}, name, stream_blocks=count, quantize=quantize)
        for streamed, resident in zip(found, expected, strict=True):
            np.testing.assert_array_equal(streamed, resident)
"""
    # Limits in bytes: no pinned memory at all, and a little of it.
    for limit in ("0", "300000"):
        environment = {**os.environ, "TRAINABLE_CANDLE_PINNED_BYTES": limit}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
